"""The families of models that are read: their config.json and the names of their tensors, and ours.

| family         | what is special                                                               |
|----------------|-------------------------------------------------------------------------------|
| llama          | no QK-norm                                                                    |
| qwen3          | QK-norm. Qiu et al.'s gated models: q_proj has, for each key/value head, rows |
|                | of queries, then of their gates                                               |
| qwen3_5_text   | q_proj has rows of the query, then of the gate, head by head; norms of        |
|                | 1 + weight; maybe layers of Gated DeltaNet                                    |
| gpt2           | LayerNorm, biases, learned positions; the weights of linear layers are        |
|                | (inputs, outputs)                                                             |
| mistral        | a window in all layers, where sliding_window is a number                      |
| qwen2          | biases on q, k and v                                                          |
| nanogpt        | what nanoGPT's train.py saves: as gpt2 with weights of (outputs, inputs),     |
|                | maybe without biases                                                          |
| gla, delta_net | of fla: q, k and v have a weight and a convolution each, which are one here   |
| gated_deltanet |                                                                               |
| mamba2         | of transformers and of fla, which spell some fields differently; no MLP;      |
|                | in_proj begins with the rows of the gate                                      |

hub/export_hf.py writes some of them.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import variants  # noqa: F401  some families have its mixers
from base.configurator import UserError, check_choice, show
from keys import WITH_ROPE_LENGTH, mlp_ratio_of

# Names of tensors: {what ours begin with: what theirs begin with}, without blocks.N. before. The
# first that fits counts. "mixer" is called softmax in softmax layers
OF_ALL = {
    "head": "lm_head",
    "mlp.glu": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
NAMES = OF_ALL | {
    "wte": "model.embed_tokens",
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "norm": "model.norm",
    "softmax.out_proj": "self_attn.o_proj",
    "softmax": "self_attn",
    "mixer.conv": "linear_attn.conv1d",
    "mixer": "linear_attn",
}
NAMES_OF_GPT2 = {  # the rows of c_attn are those of q, of k and of v, as ours
    "head": "lm_head",
    "wte": "transformer.wte",
    "wpe": "transformer.wpe",
    "norm_": "ln_",
    "norm": "transformer.ln_f",
    "softmax.qkv": "attn.c_attn",
    "softmax.out_proj": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
NAMES_OF_FLA = OF_ALL | {
    "wte": "model.embeddings",
    "norm_1": "attn_norm",
    "norm_2": "mlp_norm",
    "norm": "model.norm",
    "mixer.out_proj": "attn.o_proj",
    "mixer.gates.native.proj": "attn.g_proj",
    "mixer.decay_in": "attn.gk_proj.0",
    "mixer.decay_out": "attn.gk_proj.1",
    "mixer.norm": "attn.o_norm",
    "mixer": "attn",
}
NAMES_OF_MAMBA2 = {
    "wte": "backbone.embeddings",
    "head": "lm_head",
    "norm_1": "norm",
    "norm": "backbone.norm_f",
    "mixer.conv": "mixer.conv1d",
}

# Fields that are one key: {our key: the field}. mlp_width, which is mlp_ratio here, and the four
# numbers of delta_sizes have names of their own
SIZES = ("key_heads", "heads", "key_dim", "value_dim")
BASE = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
}
KEYS = BASE | {
    "n_head": "num_attention_heads",
    "head_dim": "head_dim",
    "n_kv_head": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "block_size": "max_position_embeddings",
    "mlp_width": "intermediate_size",
}
KEYS_OF_QWEN3_5 = KEYS | {
    "key_heads": "linear_num_key_heads",
    "heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
}
KEYS_OF_GPT2 = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "block_size": "n_positions",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "layer_norm_epsilon",
}
OF_NANOGPT = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")
KEYS_OF_FLA = BASE | {
    "n_head": "num_heads",
    "norm_eps": "norm_eps",
    "block_size": "max_position_embeddings",
    "mlp_width": "intermediate_size",
    "key_heads": "num_heads",
}
KEYS_OF_MAMBA2 = BASE | {
    "norm_eps": "norm_eps",
    "head_dim": "head_dim",
    "state_size": "state_size",
    "expand": "expand",
    "short_conv": "conv_kernel",
}

# What fields may be that no tensor shows, in every family
ALLOWED: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),
    "use_sliding_window": (False,),
    "quantization_config": ({},),  # the folder of the weights that are not quantised is read
    # of GPT-2
    "activation_function": ("gelu", "gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    # of fla
    "feature_map": (None,),
    "clamp_min": (None,),
    "qk_norm": ("l2",),
    "qk_activation": ("silu",),
    "output_gate_activation": ("swish", "silu"),
    "use_output_gate": (True,),
    "attn": (None,),  # softmax layers between the others
    # of Mamba-2
    "norm_before_gate": (False,),
    "time_step_limit": ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]),  # none; JSON has no inf
}
# What those fields are that a config.json leaves out
DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
}
DEFAULTS_OF_GPT2 = {
    "tie_word_embeddings": True,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
}
DEFAULTS_OF_FLA: dict[str, Any] = {
    "hidden_ratio": 4,
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "conv_size": 4,
    "use_short_conv": True,
    "allow_neg_eigval": False,
    "max_position_embeddings": 2048,
    "expand_k": 1.0,
    "expand_v": 1.0,
}


def read_gpt2(config: dict, name: str) -> dict[str, Any]:
    mlp = "gelu" if config["activation_function"] == "gelu" else "gelu_tanh"
    return {"mlp": mlp, "mlp_width": config.get("n_inner") or 4 * config["n_embd"]}


LENGTH = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"
ROPES = {  # by rope_type: the fields that are read
    "default": {"mrope_section", "mrope_interleaved"},  # of images
    "linear": {"factor"},
    "yarn": {"factor", LENGTH},
    "llama3": {"factor", LENGTH, "low_freq_factor", "high_freq_factor"},
}


def read_rope(config: dict, name: str) -> dict[str, Any]:
    """The keys of RoPE, and the attention that turns as many of a head's channels."""
    # transformers ignores rope_parameters if rope_scaling is set
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    check_choice("rope_type", kind, ("default",) if name == GATED else ROPES)
    unread = rope.keys() - ROPES[kind] - {"rope_type", "type", "rope_theta", PARTIAL}
    if unread:
        field = min(unread)
        raise UserError(f"rope_type={kind!r}: its {field}={show(rope[field])} is not read")
    turned = rope.get(PARTIAL, config[PARTIAL])
    check_choice(PARTIAL, turned, (1.0, 0.25) if name == GATED else (1.0,))
    keys = {
        "rope_base": rope.get("rope_theta", config["rope_theta"]),
        "attention": "softmax" if turned == 1 else "qwen3_next",
    }
    if kind == "default":
        return keys
    if kind == "llama3":
        check_choice("low_freq_factor", rope["low_freq_factor"], (1,))
        check_choice("high_freq_factor", rope["high_freq_factor"], (4,))
    if kind in WITH_ROPE_LENGTH:
        length = rope.get(LENGTH, config["max_position_embeddings"])
        keys["rope_length"] = config.get(LENGTH, length)
    return keys | {"rope_scaling": kind, "rope_factor": rope["factor"]}


def read_llama(config: dict, name: str) -> dict[str, Any]:
    keys = read_rope(config, name)
    if name == "qwen2":
        keys["attention"] = "qwen2"
    if name == "mistral":
        keys["window"] = str(config["sliding_window"] or "none")
    for gate in ("elementwise", "headwise"):
        if name == "qwen3" and config.get(f"{gate}_attn_output_gate"):
            keys["gate"] = gate
    return keys


def read_qwen3_5(config: dict, name: str) -> dict[str, Any]:
    keys = read_rope(config, name)
    mixers = []
    gates = []
    for kind in config["layer_types"]:
        is_full = kind == "full_attention"
        mixers.append(keys["attention"] if is_full else "gated_deltanet")
        gates.append("elementwise" if is_full else "native")
    return keys | {"attention": ",".join(mixers), "gate": ",".join(gates)}


def read_fla(config: dict, name: str) -> dict[str, Any]:
    H, C = config["num_heads"], config["hidden_size"]
    width = config["head_dim"] if name == "gated_deltanet" else C / H
    keys = {
        "head_dim": max(1, C // H),
        "heads": config.get("num_v_heads", H),
        "key_dim": round(width * config["expand_k"]),
        "value_dim": round(width * config["expand_v"]),
        "short_conv": config["conv_size"] if config["use_short_conv"] else 0,
        "beta_max": 2.0 if config["allow_neg_eigval"] else 1.0,
    }
    if "intermediate_size" not in config:
        keys["mlp_width"] = math.ceil(int(C * config["hidden_ratio"] * 2 / 3) / 256) * 256
    return keys


def read_mamba2(config: dict, name: str) -> dict[str, Any]:
    norm = "published" if config["rmsnorm"] else "none"
    return {"n_head": config["num_heads"] // config["expand"], "readout_norm": norm}


class Family(NamedTuple):
    names: dict[str, str]  # of tensors
    blocks: str  # what theirs call the list of layers
    keys: dict[str, str]  # {our key: the field that it is}
    defaults: dict[str, Any]  # of fields that a config.json may leave out
    read: Callable[[dict, str], dict]  # (config.json, family): the keys that are not one field
    # keys that every model has; mlp is swiglu, unless these or `read` say otherwise
    always: dict[str, Any] = {}
    allowed: dict[str, tuple] = {}  # beside ALLOWED: {field: what it may be}


LLAMA = Family(NAMES, "model.layers", KEYS, DEFAULTS, read_llama)
GPT2 = Family(
    NAMES_OF_GPT2,
    "transformer.h",
    KEYS_OF_GPT2,
    DEFAULTS_OF_GPT2,
    read_gpt2,
    always={"norm": "layer", "bias": True, "position": "learned"},
)
FLA = Family(NAMES_OF_FLA, "model.layers", KEYS_OF_FLA, DEFAULTS_OF_FLA, read_fla)
GATED = "qwen3_5_text"  # every layer has its gate, and norms hold 1 + weight
FAMILIES = {  # by model_type, but for nanogpt
    "llama": LLAMA,
    "qwen3": LLAMA._replace(
        keys=KEYS | {"qk_norm": "use_qk_norm"},
        defaults=DEFAULTS | {"head_dim": 128, "use_qk_norm": True},
    ),
    "qwen3_5_text": LLAMA._replace(
        keys=KEYS_OF_QWEN3_5,
        defaults=DEFAULTS | {"head_dim": 256, PARTIAL: 0.25},
        read=read_qwen3_5,
        always={"qk_norm": True},
    ),
    "gpt2": GPT2,
    "mistral": LLAMA._replace(defaults=DEFAULTS | {"sliding_window": 4096}),
    "qwen2": LLAMA,
    "nanogpt": GPT2._replace(keys=dict(zip(OF_NANOGPT, OF_NANOGPT, strict=True))),
    "gla": FLA._replace(
        names=NAMES_OF_FLA | {"mixer.norm": "attn.g_norm"},
        allowed={"use_short_conv": (False,)},  # here it has no SiLU
        defaults=DEFAULTS_OF_FLA | {"expand_k": 0.5, "use_short_conv": False},
        always={"attention": "gla", "gate": "native"},
    ),
    "gated_deltanet": FLA._replace(
        allowed={"use_gate": (True,)},
        defaults=DEFAULTS_OF_FLA | {"expand_v": 2.0},
        always={"attention": "gated_deltanet", "gate": "native"},
    ),
    "delta_net": FLA._replace(
        allowed={"use_gate": (False,)},
        always={"attention": "deltanet"},
    ),
    "mamba2": Family(
        NAMES_OF_MAMBA2,
        "backbone.layers",
        KEYS_OF_MAMBA2,
        {"tie_word_embeddings": False, "rmsnorm": True},
        read_mamba2,
        always={"attention": "mamba2", "gate": "native", "mlp": "none"},
    ),
}


def keys_of(config: dict, block_size: int) -> dict[str, Any]:
    """The keys of GPTConfig for a config.json of theirs, whose fields are not null, but for
    sliding_window: null is no window there. Raises UserError for what the model here lacks."""
    name = config.get("model_type")
    check_choice("model_type", name, FAMILIES)
    family = FAMILIES[name]
    config = family.defaults | config
    if "layer_norm_epsilon" in config:  # of transformers' Mamba-2
        config.setdefault("norm_eps", config["layer_norm_epsilon"])
    allowed = ALLOWED | family.allowed
    for field in config.keys() & allowed.keys():
        check_choice(field, config[field], allowed[field])
    given = {key: config[field] for key, field in family.keys.items() if field in config}
    keys = {"mlp": "swiglu"} | family.always | given | family.read(config, name)
    if "mlp_width" in keys:
        keys["mlp_ratio"] = mlp_ratio_of(keys.pop("mlp_width"), keys["n_embd"], keys["mlp"])
    if "heads" in keys:
        keys["delta_sizes"] = [keys.pop(size) for size in SIZES]
    return keys | {"block_size": min(block_size, keys.get("block_size", block_size))}
