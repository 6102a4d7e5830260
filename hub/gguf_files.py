"""A GGUF file of llama.cpp, read as a folder of transformers is: what its config.json would say, its
tensors under transformers' names, and its tokenizer.

    about, tensors, tokenizer = read_gguf(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))

The families are Llama, Qwen2 and Qwen3. The gguf package turns tensors of its types into float32.
Text is read by the file's vocabulary and merges of a byte-level BPE; a vocabulary without merges,
as that of Llama 2, is refused.
"""

import re
from pathlib import Path
from typing import Any

import torch

from base.configurator import UserError, check_choice, show
from base.files import one_line

# {general.architecture: whether it stores q and k with the two channels of a pair of RoPE side by
# side, where transformers has them D/2 apart}
FAMILIES = {"llama": True, "qwen2": False, "qwen3": False}
# fields behind "ARCHITECTURE.", and what they are in a config.json
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attention.key_length": "head_dim",
}
OPTIONAL = ("attention.head_count_kv", "rope.freq_base", "attention.key_length")
# names of tensors; those of a layer begin with blk.N., and model.layers.N.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# how a text is cut before the merges: {tokenizer.ggml.pre: a pattern for whole pieces, or digits}
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
PATTERNS = {
    "llama-bpe": LLAMA_3,
    "llama3": LLAMA_3,
    "qwen2": QWEN_2,
    "smollm": "digits",
    "gpt-2": "",
}
CONTROL = 3  # a token type: never made of text


def read_gguf(file: Path) -> tuple[dict, dict[str, torch.Tensor], bytes]:
    """(what config.json would say, {transformers' name: float32 tensor}, tokenizer.json). Raises
    UserError, which names the field or the tensor, and what the gguf package raises where the
    header is damaged."""
    with one_line("a GGUF file needs two libraries: pip install gguf tokenizers", ImportError):
        import gguf
        import tokenizers  # noqa: F401
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    about = config_of(fields)
    tensors = {}
    for tensor in reader.tensors:
        name = usual_name(tensor.name)
        with one_line(f"tensor {show(tensor.name)}: damaged, or not read", Exception):
            numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            tensors[name] = torch.from_numpy(numbers.copy()).float()
            if FAMILIES[about["model_type"]] and re.search(r"\.[qk]_proj", name):
                tensors[name] = with_halves(tensors[name], about, ".q_proj" in name)
    about["tie_word_embeddings"] = "lm_head.weight" not in tensors
    about["vocab_size"] = len(tensors["model.embed_tokens.weight"])
    return about, tensors, tokenizer_of(fields)


def config_of(fields: dict[str, Any]) -> dict:
    """What config.json would say, but for what tensors show. Raises UserError."""
    family = fields.get("general.architecture")
    check_choice("general.architecture", family, FAMILIES)
    about = {"model_type": family, "hidden_act": "silu"}
    for field, name in FIELDS.items():
        value = fields.get(f"{family}.{field}")
        if value is not None:
            about[name] = value
        elif field not in OPTIONAL:
            raise UserError(f"has no field {family}.{field}")
    # what the model here does not have
    head_dim = about.get("head_dim") or about["hidden_size"] // about["num_attention_heads"]
    for field, value in (("rope.scaling.type", "none"), ("rope.dimension_count", head_dim)):
        check_choice(f"{family}.{field}", fields.get(f"{family}.{field}", value), (value,))
    return about


def usual_name(name: str) -> str:
    """transformers' name of a tensor. UserError for one that the families do not have."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES:
        raise UserError(f"tensor {show(name)}: the model here has no place for it")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{NAMES[match[2]]}.{match[3]}"


def with_halves(rows: torch.Tensor, about: dict, is_query: bool) -> torch.Tensor:
    """The rows of q or k (heads D, C), whose pairs of channels lie side by side in the file, with
    the two of a pair D/2 apart."""
    heads = about["num_attention_heads"]
    if not is_query:
        heads = about.get("num_key_value_heads", heads)
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def tokenizer_of(fields: dict[str, Any]) -> bytes:
    """The tokenizer.json of the vocabulary, the merges and the special tokens. Raises UserError."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )

    check_choice("tokenizer.ggml.model", fields.get("tokenizer.ggml.model"), ("gpt2",))
    pre = fields.get("tokenizer.ggml.pre", "gpt-2")
    check_choice("tokenizer.ggml.pre", pre, PATTERNS)
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    types = fields.get("tokenizer.ggml.token_type", [])
    for token, kind in zip(tokens, types, strict=False):
        if kind == CONTROL:
            made.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    pattern = PATTERNS[pre]
    is_own = pattern in ("", "digits")  # byte-level BPE's own cut, maybe after one at the digits
    cut: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_own)]
    if pattern == "digits":
        cut.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif pattern:
        cut.insert(0, pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    made.pre_tokenizer = pre_tokenizers.Sequence(cut)
    made.decoder = decoders.ByteLevel()
    bos = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token") and bos is not None:
        first = tokens[bos]
        made.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, bos)]
        )
    return made.to_str().encode()
