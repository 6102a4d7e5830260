"""The families of transformers that are read and written: their config.json and tensors, and our keys and tensors.

    keys_of(config, block_size)                 a config.json of theirs -> keys of GPTConfig
    config_of(config, mlp_width, dtype)         the other way
    parts_of(config, family, names)             which tensors of theirs hold the numbers of which tensors of ours

| family         | what is special                                                                                   |
|----------------|---------------------------------------------------------------------------------------------------|
| llama          | no QK-norm                                                                                        |
| qwen3          | QK-norm. Qiu et al.'s gated models: q_proj has, for each key/value head, rows of queries, then of |
|                | their gates (headwise_attn_output_gate, elementwise_attn_output_gate)                             |
| qwen3_next     | q_proj has rows of the query, then of the gate, head by head; norms of 1 + weight; Gated DeltaNet |
|                | whose projections are interleaved by key head                                                     |
| qwen3_5_text   | the same with projections that are not interleaved                                                |
| gpt2           | LayerNorm, biases, learned positions; the weights of linear layers are (inputs, outputs)          |
"""

from configurator import UserError, show

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from model import GPTConfig
from rules import wrong_field

FAMILIES = {  # a model_type that is read, and the class of such a model
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
GATED = ("qwen3_next", "qwen3_5_text")  # every layer has its gate, and norms hold 1 + weight
EXPERTS = "a mixture of experts, and every block here has one MLP"
NOT_READ = {  # why a model_type that people ask for is refused
    "qwen2": "only its q, k and v have biases, and here all linear layers have one, or none",
    "mistral": "its attention may have a sliding window, and the model here has none",
    "mixtral": EXPERTS,
}

# Fields of config.json that are one key of ours: {our key: their field}.
KEYS = dict(
    n_layer="num_hidden_layers", n_head="num_attention_heads", head_dim="head_dim", n_kv_head="num_key_value_heads",
    n_embd="hidden_size", block_size="max_position_embeddings", vocab_size="vocab_size", mlp_width="intermediate_size",
    tie_embeddings="tie_word_embeddings", norm_eps="rms_norm_eps",
)  # fmt: skip
KEYS_OF_DELTA = dict(
    delta_heads="linear_num_value_heads", delta_key_heads="linear_num_key_heads",
    delta_key_dim="linear_key_head_dim", delta_value_dim="linear_value_head_dim",
)  # fmt: skip
KEYS_OF_GPT2 = dict(
    n_layer="n_layer", n_head="n_head", n_embd="n_embd", block_size="n_positions", vocab_size="vocab_size",
    mlp_width="n_inner", tie_embeddings="tie_word_embeddings", norm_eps="layer_norm_epsilon",
)  # fmt: skip

# Their values, by the rules of rules.wrong_field. A field whose name ends in "?" may be missing.
LAYERS, COUNT, FLAG, WORD, NUMBER = (int, 1, 10_000), (int, 1, 1 << 40), (bool, 0, 1), (str, 1, 99), (float, 0, 1e12)
COUNTS = ("num_attention_heads", "hidden_size", "max_position_embeddings", "vocab_size", "intermediate_size")
MORE_COUNTS = ("head_dim", "num_key_value_heads", "full_attention_interval", "decoder_sparse_step")
FIELDS: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    **dict.fromkeys(COUNTS, COUNT),
    **dict.fromkeys([f"{name}?" for name in (*MORE_COUNTS, *KEYS_OF_DELTA.values())], COUNT),
    "num_experts?": (int, 0, 1 << 40),
    "mlp_only_layers?": [(int, 0, 10_000), 0, 10_000],
    "layer_types?": [WORD, 1, 10_000],
    "tie_word_embeddings?": FLAG,
    "rms_norm_eps?": NUMBER,
    "rope_theta?": NUMBER,
    "partial_rotary_factor?": (float, 0, 1),
    **dict.fromkeys(("rope_scaling?", "rope_parameters?"), (dict, 0, 99)),
}
FIELDS_OF_GPT2: dict[str, Any] = {
    "n_layer": LAYERS,
    **dict.fromkeys(("n_head", "n_embd", "n_positions", "vocab_size", "n_inner?"), COUNT),
    **dict.fromkeys(("tie_word_embeddings?", "scale_attn_weights?", "scale_attn_by_inverse_layer_idx?"), FLAG),
    "layer_norm_epsilon?": NUMBER,
    "activation_function?": WORD,
}
# Fields that may have one value alone, or nothing, and why.
NO_BIAS = (False, "its linear layers have biases, which are read of GPT-2 alone")
ONLY: dict[str, tuple] = {
    "quantization_config": ({}, "its weights are quantised; take the folder of those that are not"),
    "hidden_act": ("silu", "the MLP here is a swiglu, whose activation is silu"),
    **dict.fromkeys(("attention_bias", "qkv_bias", "mlp_bias"), NO_BIAS),
    "use_sliding_window": (False, "its attention has a sliding window, and the model here has none"),
    "linear_conv_kernel_dim": (4, "gated_deltanet's width is 4"),
    "scale_attn_weights": (True, "scores are scaled by the width alone here"),
    "scale_attn_by_inverse_layer_idx": (False, "scores are scaled by the width alone here"),
}

# Names of tensors: each of ours is replaced by theirs, in turn, where "mixer" has become the name of the mixer.
NAMES = {
    "^wte": "model.embed_tokens",
    "^head": "lm_head",
    "^norm": "model.norm",
    "^blocks": "model.layers",
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "mlp.glu": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "softmax.out_proj": "self_attn.o_proj",
    "softmax": "self_attn",
    "gated_deltanet.conv": "linear_attn.conv1d",
    "gated_deltanet": "linear_attn",
}
NAMES_OF_GPT2 = {
    "^head": "lm_head",
    "^norm": "transformer.ln_f",
    "^wte": "transformer.wte",
    "^wpe": "transformer.wpe",
    "^blocks": "transformer.h",
    "norm_": "ln_",
    "softmax.qkv": "attn.c_attn",  # the rows of q, of k and of v, as ours
    "softmax.out_proj": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


# ----------------------------------------------------------------------------------------------------------------------
# Their config.json and our keys


def family_of(config: dict) -> str:
    """A key of FAMILIES. Raises UserError, with the reason, for a model that is not read."""
    name = config.get("model_type")
    if not isinstance(name, str):
        raise UserError(f"model_type={show(name)}: must be a text")
    if name not in FAMILIES:
        reason = EXPERTS if "moe" in name else NOT_READ.get(name, "not read here")
        raise UserError(f"model_type={show(name)}: {reason} ({', '.join(FAMILIES)} are read)")
    return name


def fields_of(family: str) -> dict[str, str]:
    """{our key: the field of config.json that gives it}"""
    return KEYS_OF_GPT2 if family == "gpt2" else KEYS | (KEYS_OF_DELTA if family in GATED else {})


def keys_of(config: dict, block_size: int) -> dict[str, Any]:
    """The keys of GPTConfig for a config.json of theirs. Raises UserError for what the model here does not have."""
    family = family_of(config)
    if wrong := wrong_field(config, FIELDS_OF_GPT2 if family == "gpt2" else FIELDS):
        raise UserError(wrong)
    for field, (value, reason) in ONLY.items():
        if (given := config.get(field, value)) != value and (given or value):
            raise UserError(f"{field}={show(given)}: {reason}")
    special = gpt2_keys(config) if family == "gpt2" else rope_keys(config, family) | layer_keys(config, family)
    keys = {key: config[field] for key, field in fields_of(family).items() if field in config}
    return special | keys | {"block_size": min(block_size, keys["block_size"])}


def rope_keys(config: dict, family: str) -> dict[str, Any]:
    """The keys that say more than a field of the config.json of a model with RoPE does."""
    is_gated = family in GATED
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # there, the old spelling hides the new
    rope = config.get(name, {})
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling != "default":
        raise UserError(f"{name}: RoPE scaled by {show(scaling)}, and only plain RoPE is read")
    if layer_type := next((key for key, value in rope.items() if isinstance(value, dict)), None):
        raise UserError(f"{name}: {show(layer_type)} has a RoPE of its own, and here all layers have one")
    base = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25 if is_gated else 1.0))
    if wrong := wrong_field([base, fraction], [NUMBER, 2, 2], "rope"):
        raise UserError(wrong)
    if fraction != 1 and not is_gated:
        raise UserError(f"partial_rotary_factor={fraction}: {family} of transformers turns all channels of a head")
    n_layer, n_head, width = config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"]
    if family == "llama" and width % n_head:
        raise UserError(f"hidden_size={width}: in llama a multiple of num_attention_heads={n_head}")
    if family != "llama" and "head_dim" not in config:
        raise UserError("it has no head_dim")
    experts = config.get("num_experts", n_layer if family == "qwen3_next" else 0)
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    if experts and any((i + 1) % step == 0 and i not in dense for i in range(n_layer)):
        raise UserError(f"num_experts: {EXPERTS}")
    return {
        "norm_eps": 1e-6,  # unless config.json has another
        "n_kv_head": n_head,
        "head_dim": width // n_head,
        "mlp": "swiglu",
        "rope_base": base,
        "rope_fraction": fraction,
        "qk_norm": config.get("use_qk_norm", True) if family == "qwen3" else is_gated,
    }


def layer_keys(config: dict, family: str) -> dict[str, Any]:
    """The keys that say which mixer and which gate each layer has. Raises UserError."""
    n_layer, is_gated = config["num_hidden_layers"], family in GATED
    every = config.get("full_attention_interval", 4) if is_gated else 1
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(n_layer)]
    types = config.get("layer_types", default)
    asked = [name for name in ("elementwise", "headwise") if config.get(f"{name}_attn_output_gate")]
    gate = "elementwise" if is_gated else asked[0] if asked and family == "qwen3" else "none"
    layers = {"full_attention": ("softmax", gate)}
    layers |= {"linear_attention": ("gated_deltanet", "native")} if is_gated else {}
    if len(types) != n_layer:
        raise UserError(f"layer_types: {len(types)} for {n_layer} layers")
    if unknown := next((layer_type for layer_type in types if layer_type not in layers), None):
        raise UserError(f"layer_types: {show(unknown)} is not read ({' and '.join(layers)} are)")
    missing = [field for field in KEYS_OF_DELTA.values() if field not in config]
    if missing and "linear_attention" in types:
        raise UserError(f"it has no {missing[0]}")
    period = next(n for n in range(1, n_layer + 1) if all(types[i] == types[i % n] for i in range(n_layer)))
    mixers, gates = zip(*(layers[layer_type] for layer_type in types[:period]), strict=True)
    return {"attention": ",".join(mixers), "gate": ",".join(gates)}


def gpt2_keys(config: dict) -> dict[str, Any]:
    """The keys that say more than a field of GPT-2's config.json does. Raises UserError."""
    for alias, name in ((KEYS[key], KEYS_OF_GPT2[key]) for key in ("n_embd", "n_layer", "n_head", "block_size")):
        if config.get(alias, config[name]) != config[name]:
            raise UserError(f"{alias}={show(config[alias])}: a second name of {name}, which is {config[name]}")
    gelu = config.get("activation_function", "gelu_new")
    mlp = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}.get(gelu)
    if mlp is None:
        raise UserError(f"activation_function={show(gelu)}: the MLP here has a gelu, exact or by tanh (gelu_new)")
    return {
        "mlp_width": 4 * config["n_embd"],  # unless config.json has another
        "norm_eps": 1e-5,
        "n_kv_head": config["n_head"],
        "mlp": mlp,
        "norm": "layer",
        "bias": True,
        "position": "learned",
    }


def config_of(config: GPTConfig, mlp_width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Their config.json for a model of ours. Whether it says all of the model is seen by reading it back."""
    layers, delta = config.layers(), ("delta_key_heads", "delta_heads", "delta_key_dim", "delta_value_dim")
    keys: dict[str, Any] = dataclasses.asdict(config) | dict(zip(delta, config.delta_sizes, strict=True))
    keys |= {"n_kv_head": config.n_kv_head or config.n_head, "mlp_width": mlp_width}
    has_gate = any(gate.native or gate.positions for _, gate in layers)
    family = "qwen3_next" if has_gate else "qwen3" if config.qk_norm else "llama"
    family = "gpt2" if config.norm == "layer" else family
    about = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "dtype": str(dtype).removeprefix("torch."),
        **{field: keys[key] for key, field in fields_of(family).items()},
        **dict.fromkeys(("bos_token_id", "eos_token_id")),  # some classes would take a number of their own for the end
    }
    if family == "gpt2":
        dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop"), config.dropout) | {"attn_pdrop": 0.0}
        return about | dropout | {"activation_function": "gelu" if config.mlp == "gelu" else "gelu_new"}
    about |= {
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "rope_theta": config.rope_base,  # for versions of transformers before 5
    }
    if family != "qwen3_next":
        return about
    types = {"softmax": "full_attention", "gated_deltanet": "linear_attention"}
    return about | {
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": config.rope_fraction,
        "layer_types": [types.get(mixer, mixer) for mixer, _ in layers],
        "mlp_only_layers": list(range(config.n_layer)),  # no layer has experts
    }


# ----------------------------------------------------------------------------------------------------------------------
# Their tensors and ours


class Part(NamedTuple):
    """Tensors of theirs that hold the same numbers as tensors of ours. Both functions take and return lists."""

    theirs: list[str]
    ours: list[str]
    to_ours: Callable = list
    to_theirs: Callable = list


def parts_of(config: GPTConfig, family: str, names: Iterable[str]) -> Iterator[Part]:
    """Yields every Part of the model, each tensor in one of them. names: those of our tensors."""
    for ours in names:
        place = ours.split(".")
        mixer, gate = config.layers()[int(place[1]) if place[0] == "blocks" else 0]
        if ".gates." in ours:  # comes with the rest of the rows
            continue
        if ".qkv." in ours and family != "gpt2" or ".in_proj." in ours:
            rows = delta_rows(config, family) if mixer == "gated_deltanet" else softmax_rows(config, family, gate)
            yield rows_part(f"model.layers.{place[1]}.", f"blocks.{place[1]}.mixer.", *rows)
            continue
        theirs = ours.replace(".mixer.", f".{mixer}.")
        functions = [functools.partial(_of_each, function) for function in translation(theirs, config, family)]
        for name, replacement in (NAMES_OF_GPT2 if family == "gpt2" else NAMES).items():
            theirs = re.sub(name, replacement, theirs)
        yield Part([theirs], [ours], *functions)


def _of_each(function, weights):
    return [function(weight) for weight in weights]


def translation(name: str, config: GPTConfig, family: str) -> tuple[Callable, ...]:
    """(theirs to ours, ours to theirs) of a tensor; empty if they are the same. name: ours, with that of the mixer."""
    if family == "gpt2" and name.startswith("wpe"):  # as many positions as are kept
        return (lambda w: w[: config.block_size], lambda w: w)
    if family == "gpt2":  # linear layers are (inputs, outputs) there; vectors stay as they are
        return (torch.t, torch.t) if name.startswith("blocks") else ()
    if "gated_deltanet" in name:  # a convolution is (channels, 1, width), ours (width, channels)
        return (lambda w: w.squeeze(1).T, lambda w: w.T[:, None]) if ".conv." in name else ()
    if family in GATED and "norm" in name:  # in bfloat16 the sum would lose digits
        return (lambda w: w.float() + 1, lambda w: w.float() - 1)
    return ()


def rows_part(
    their_layer: str, our_mixer: str, theirs: dict[str, tuple[int, str]], ours: dict[str, str], sizes: dict[str, int]
) -> Part:
    """Linear layers that share out the same blocks of rows otherwise.

    theirs: {name: (groups, its blocks, interleaved in so many groups)}; ours: {name: its blocks, one after the other};
    sizes: the rows of each block. A block is named by a letter.
    """
    before, after = list(theirs.values()), [(1, blocks) for blocks in ours.values()]
    return Part(
        [f"{their_layer}{name}.weight" for name in theirs],
        [f"{our_mixer}{name}.weight" for name in ours],
        functools.partial(rearranged, before=before, after=after, sizes=sizes),
        functools.partial(rearranged, before=after, after=before, sizes=sizes),
    )


def rearranged(weights: list[torch.Tensor], before: list, after: list, sizes: dict[str, int]) -> list[torch.Tensor]:
    """The same blocks of rows in other weights. before, after: (groups, blocks) of each weight.

    A weight has the rows of each of its blocks in group 0, then those in group 1 ...
    """
    rows = {}  # of each block: (groups, rows of a group, inputs), then without groups
    for weight, (groups, blocks) in zip(weights, before, strict=True):
        parts = weight.unflatten(0, (groups, -1)).split([sizes[block] // groups for block in blocks], dim=1)
        rows |= {block: part.flatten(0, 1) for block, part in zip(blocks, parts, strict=True)}
    return [
        torch.cat([rows[block].unflatten(0, (groups, -1)) for block in blocks], dim=1).flatten(0, 1)
        for groups, blocks in after
    ]


def softmax_rows(config: GPTConfig, family: str, gate: Any) -> tuple:
    """What rows_part needs of q_proj, which may have the rows of the gate (g), k_proj and v_proj."""
    H, Hk, D = config.n_head, config.n_kv_head or config.n_head, config.head_dim
    granularity = gate.positions.get("readout", "none")
    sizes = {"q": H * D, "k": Hk * D, "v": Hk * D, "g": H if granularity == "headwise" else H * D}
    groups, in_q_proj = H if family in GATED else Hk, "q" if granularity == "none" else "qg"
    theirs = {"self_attn.q_proj": (groups, in_q_proj), "self_attn.k_proj": (1, "k"), "self_attn.v_proj": (1, "v")}
    ours = {"qkv": "qkv"} | ({} if granularity == "none" else {"gates.readout.proj": "g"})
    return theirs, ours, sizes


def delta_rows(config: GPTConfig, family: str) -> tuple:
    """What rows_part needs of a Gated DeltaNet: ours has [q, k, v, beta, dt] in in_proj, and its gate z apart."""
    Hk, H, Dk, Dv = config.delta_sizes
    sizes = {"q": Hk * Dk, "k": Hk * Dk, "v": H * Dv, "z": H * Dv, "b": H, "a": H}
    layout = {"qkvz": Hk, "ba": Hk} if family == "qwen3_next" else {"qkv": 1, "b": 1, "a": 1, "z": 1}
    theirs = {f"linear_attn.in_proj_{blocks}": (groups, blocks) for blocks, groups in layout.items()}
    return theirs, {"in_proj": "qkvba", "gates.native.proj": "z"}, sizes
