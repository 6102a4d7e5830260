"""A GGUF file of llama.cpp, read as a folder of transformers is: what its config.json would say, its
tensors under transformers' names, and its tokenizer.

    about, tensors, tokenizer = read_gguf(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))

The families are Llama, Qwen2 and Qwen3. Tensors of TYPES are de-quantised to float32 by the gguf
package. Text is read by the file's vocabulary and merges of a byte-level BPE; a vocabulary without
merges, as that of Llama 2, is refused.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from base.configurator import UserError, show
from base.files import one_line
from runs.memory import ram_limit

INSTALL = "a GGUF file needs a library: pip install gguf"
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
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
# how a text is cut before the merges: {tokenizer.ggml.pre: a pattern; None is GPT-2's}
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
PATTERNS = {
    "llama-bpe": LLAMA_3,
    "llama3": LLAMA_3,
    "qwen2": QWEN_2,
    "smollm": None,  # and digit by digit
    "gpt-2": None,
}
CONTROL = 3  # a token type: never made of text


def read_gguf(file: Path) -> tuple[dict, dict[str, torch.Tensor], bytes]:
    """(what config.json would say, {transformers' name: float32 tensor}, tokenizer.json). Raises
    UserError, which names the field or the tensor."""
    reader, fields = opened(file)
    import gguf

    about = config_of(fields, reader.tensors)
    check_sizes(reader.tensors, file.stat().st_size)
    tensors = {}
    for tensor in reader.tensors:
        name = usual_name(tensor.name)
        with one_line(f"tensor {show(tensor.name)}: damaged", Exception):
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()
        tensors[name] = with_halves(name, torch.from_numpy(values), about).float()
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    print(f"{file}: " + ", ".join(f"{n} tensors of {kind}" for kind, n in kinds.most_common()))
    return about, tensors, tokenizer_of(fields)


def opened(file: Path) -> tuple[Any, dict[str, Any]]:
    """gguf's reader of a file, and {name of a field: its value}. Raises UserError."""
    with one_line(INSTALL, ImportError):
        import gguf
    # whatever a damaged header makes of it
    with one_line("no GGUF file, or damaged", Exception):
        reader = gguf.GGUFReader(file)
        return reader, {name: field.contents() for name, field in reader.fields.items()}


def read_tokenizer(file: Path) -> bytes:
    """The tokenizer.json of a file, without its tensors. Raises UserError, which names the file."""
    try:
        return tokenizer_of(opened(file)[1])
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def config_of(fields: dict[str, Any], tensors: list) -> dict:
    """What config.json would say. Raises UserError."""
    family = fields.get("general.architecture")
    if family not in FAMILIES:
        raise UserError(
            f"general.architecture is {show(family)}; these can be read: {', '.join(sorted(FAMILIES))}"
        )
    about = {"model_type": family, "hidden_act": "silu"}
    for field, name in FIELDS.items():
        value = fields.get(f"{family}.{field}")
        if value is not None:
            about[name] = value
        elif field not in OPTIONAL:
            raise UserError(f"has no field {family}.{field}")
    scaling = fields.get(f"{family}.rope.scaling.type", "none")
    if scaling != "none":
        raise UserError(f"{family}.rope.scaling.type is {show(scaling)}; only none can be read")
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    about["tie_word_embeddings"] = "output.weight" not in shapes
    if "token_embd.weight" in shapes:
        about["vocab_size"] = int(shapes["token_embd.weight"][1])
    head_dim = about.get("head_dim") or about["hidden_size"] // about["num_attention_heads"]
    turned = fields.get(f"{family}.rope.dimension_count", head_dim)
    if turned != head_dim:
        raise UserError(
            f"{family}.rope.dimension_count is {show(turned)}; only {head_dim} can be read"
        )
    return about


def check_sizes(tensors: list, size: int) -> None:
    """UserError for a type that is not read, tensors that overlap or lie past the end of the file,
    and more of them than the memory holds."""
    needed = 0
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.data_offset):
        if tensor.tensor_type.name not in TYPES:
            raise UserError(
                f"tensor {show(tensor.name)} is {tensor.tensor_type.name}; these can be read: {', '.join(TYPES)}"
            )
        if tensor.data_offset < end:
            raise UserError(f"tensor {show(tensor.name)} overlaps the one before it")
        end = tensor.data_offset + tensor.n_bytes
        if end > size:
            raise UserError(f"tensor {show(tensor.name)} ends behind the file, which is cut short")
        needed += 4 * int(tensor.n_elements)
    if needed > ram_limit():
        raise UserError(f"its tensors need {needed / 1e9:.1f} GB of memory, and there is less")


def usual_name(name: str) -> str:
    """transformers' name of a tensor. Raises UserError for one that the families do not have."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES:
        raise UserError(f"tensor {show(name)}: the model here has no place for it")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{NAMES[match[2]]}.{match[3]}"


def with_halves(name: str, values: torch.Tensor, about: dict) -> torch.Tensor:
    """The rows of q and k (heads D, C), whose pairs of channels lie side by side in the file of
    some families, with the two of a pair D/2 apart; others stay as they are."""
    if not FAMILIES[about["model_type"]] or not re.search(r"\.[qk]_proj\.", name):
        return values
    heads = about["num_attention_heads"]
    if ".k_proj." in name:
        heads = about.get("num_key_value_heads", heads)
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def tokenizer_of(fields: dict[str, Any]) -> bytes:
    """The tokenizer.json of the vocabulary, the merges and the special tokens. Raises UserError."""
    with one_line("a tokenizer needs a library: pip install tokenizers", ImportError):
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, processors
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UserError(
            f"tokenizer.ggml.model is {show(kind)}; only gpt2, with merges, can be read"
        )
    pre = fields.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in PATTERNS:
        raise UserError(
            f"tokenizer.ggml.pre is {show(pre)}; these can be read: {', '.join(sorted(PATTERNS))}"
        )
    with one_line("its tokenizer.ggml.tokens or merges are damaged", Exception):
        tokens = fields["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
        vocabulary = {token: i for i, token in enumerate(tokens)}
        made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        types = fields.get("tokenizer.ggml.token_type", [])
        of_control = [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, types, strict=False)
            if token_type == CONTROL
        ]
        made.add_special_tokens(of_control)
    pattern = PATTERNS[pre]
    cut: list = []
    if pre == "smollm":
        cut.append(pre_tokenizers.Digits(individual_digits=True))
    if pattern:
        cut.append(pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"))
    cut.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    made.pre_tokenizer = pre_tokenizers.Sequence(cut)
    made.decoder = decoders.ByteLevel()
    bos = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token") and bos is not None:
        if not 0 <= bos < len(tokens):
            raise UserError(f"tokenizer.ggml.bos_token_id is {bos}, of {len(tokens)} tokens")
        first = tokens[bos]
        made.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A $B", special_tokens=[(first, bos)]
        )
    return json.dumps(json.loads(made.to_str()), ensure_ascii=False).encode()
