"""The families of models that are read and written: their config.json and the names of their
tensors, and ours.

| family         | what is special                                                                                |
|----------------|------------------------------------------------------------------------------------------------|
| llama          | no QK-norm                                                                                     |
| qwen3          | QK-norm. Qiu et al.'s gated models: q_proj has, for each key/value head, rows of queries, then |
|                | of their gates (headwise_attn_output_gate, elementwise_attn_output_gate)                       |
| qwen3_next     | q_proj has rows of the query, then of the gate, head by head; norms of 1 + weight; Gated       |
|                | DeltaNet whose projections are interleaved by key head                                         |
| qwen3_5_text   | the same with projections that are not interleaved                                             |
| gpt2           | LayerNorm, biases, learned positions; the weights of linear layers are (inputs, outputs)       |
| mistral        | a window in all layers, where sliding_window is a number                                       |
| qwen2          | biases on q, k and v; windows in the layers that layer_types or max_window_layers names        |
| smollm3        | no RoPE in every fourth layer, or in those of no_rope_layers                                   |
| olmo2          | norms behind the branches; QK-norm over all heads together                                     |
| phi3           | q, k and v are one weight, and so are the two of the MLP; partial RoPE; windows as in mistral  |
| nanogpt        | what nanoGPT's train.py saves: as gpt2 with weights of (outputs, inputs), maybe without biases |
| gla, kda,      | of fla: q, k and v have a weight and a convolution each, which are one here; some layers may   |
| delta_net,     | be softmax (`attn`)                                                                            |
| gated_deltanet |                                                                                                |
| mamba2         | of transformers and of fla, which spell some fields differently; no MLP; in_proj begins with   |
|                | the rows of the gate                                                                           |
| mamba_ssm      | its authors': those tensors in a pickle, and a config.json without a model_type                |

keys_of reads a config.json and config_of writes it. Of each kind of family, the two halves stand
side by side.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from base.rules import Rule, wrong_field
from configurator import UserError, rules_of, show
from keys import WITH_ROPE_LENGTH, word_of
from model import MIXERS, GPTConfig

# Names of tensors: {ours: theirs}. Ours are patterns of a whole name without blocks.N. before and
# .weight or .bias behind it. In NAMES "mixer" has become the name of the mixer. A name that no
# pattern matches is no tensor of theirs.
OF_ALL = {
    "head": "lm_head", "norm": "model.norm", "mlp.glu": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}  # fmt: skip
NAMES = OF_ALL | {
    "wte": "model.embed_tokens", "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
    "softmax.out_proj": "self_attn.o_proj", "softmax.(q_norm|k_norm)": r"self_attn.\1",
    "gated_deltanet.conv": "linear_attn.conv1d",
    "gated_deltanet.(norm|out_proj|A_log|dt_bias)": r"linear_attn.\1",
}  # fmt: skip
NAMES_OF_OLMO2 = NAMES | {
    "norm_1": "post_attention_layernorm",
    "norm_2": "post_feedforward_layernorm",
}
NAMES_OF_GPT2 = {  # the rows of c_attn are those of q, of k and of v, as ours
    "head": "lm_head", "norm": "transformer.ln_f", "wte": "transformer.wte", "wpe": "transformer.wpe",
    "norm_(1|2)": r"ln_\1", "mixer.qkv": "attn.c_attn", "mixer.out_proj": "attn.c_proj", "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}  # fmt: skip
NAMES_OF_FLA = OF_ALL | {
    "wte": "model.embeddings", "norm_1": "attn_norm", "norm_2": "mlp_norm", "mixer.out_proj": "attn.o_proj",
    "mixer.norm": "attn.o_norm", "mixer.gates.(native|readout).proj": "attn.g_proj",
    "mixer.(A_log|dt_bias)": r"attn.\1",
}  # fmt: skip
NAMES_OF_GLA = NAMES_OF_FLA | {
    "mixer.norm": "attn.g_norm", "mixer.decay_in": "attn.gk_proj.0", "mixer.decay_out": "attn.gk_proj.1",
}  # fmt: skip
NAMES_OF_KDA = NAMES_OF_FLA | {
    "mixer.decay_in": "attn.f_proj.0", "mixer.decay_out": "attn.f_proj.1",
    "mixer.gates.native.down": "attn.g_proj.0", "mixer.gates.(native|readout).proj": "attn.g_proj.1",
}  # fmt: skip
NAMES_OF_MAMBA2 = {
    "wte": "backbone.embeddings", "head": "lm_head", "norm": "backbone.norm_f", "norm_1": "norm",
    "mixer.conv": "mixer.conv1d", "mixer.(norm|out_proj|A_log|D|dt_bias)": r"mixer.\1",
}  # fmt: skip

# What a published model has in place of each key of GPTConfig that its config.json does not give,
# whatever the defaults of an edited GPTConfig are. A key of a model that stands neither here nor in
# its family is not known to be exportable
PLAIN: dict[str, Any] = dict(
    norm="rms", norm_eps=1e-5, post_norm=False, bias=False, qkv_bias=False, tie_embeddings=True, head_dim=None,
    n_kv_head=None, mlp="swiglu", mlp_width=None, attention="softmax", position="rope", rope_base=10000.0,
    rope_fraction=1.0, rope_scaling="none", rope_factor=1.0, rope_length=None, qk_norm=False, qk_norm_over="head",
    window="none", logit_softcap=None, short_conv=None, expand=2, state_size=128, n_groups=1,
    levels="none", beta_max=1.0, delta_heads=None, delta_key_heads=None, delta_key_dim=None, delta_value_dim=None,
    gate="none", gate_activation="sigmoid", gate_rank=0, gate_input="token", native_bias=False, gate_bias=None,
    readout_norm="published", norm_first=True, readout_activation="none", branch_scale=1.0,
)  # fmt: skip

NO, YES, NONE = (
    Rule(bool, choices=(False,)),
    Rule(bool, choices=(True,)),
    Rule(str, choices=(None,)),
)
NUMBER, SIZE, OR_NONE = (
    Rule(float, above=0, at_most=1 << 30),
    (int, 1, 1 << 30),
    (int, 1, 1 << 30, None),
)

# Fields that are one key: {our key: the field}. A field obeys the rule of its key
BASE = dict(
    n_layer="num_hidden_layers",
    n_embd="hidden_size",
    vocab_size="vocab_size",
    tie_embeddings="tie_word_embeddings",
)
KEYS_OF_GPT2 = dict(
    n_layer="n_layer", n_head="n_head", n_embd="n_embd", block_size="n_positions", vocab_size="vocab_size",
    mlp_width="n_inner", tie_embeddings="tie_word_embeddings", norm_eps="layer_norm_epsilon",
)  # fmt: skip
KEYS_OF_NANOGPT = {
    key: key for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")
}
KEYS = BASE | dict(
    n_head="num_attention_heads", head_dim="head_dim", n_kv_head="num_key_value_heads", norm_eps="rms_norm_eps",
    block_size="max_position_embeddings", mlp_width="intermediate_size",
)  # fmt: skip
KEYS_OF_DELTA = dict(  # in the order of GPTConfig.delta_sizes
    delta_key_heads="linear_num_key_heads", delta_heads="linear_num_value_heads",
    delta_key_dim="linear_key_head_dim", delta_value_dim="linear_value_head_dim",
)  # fmt: skip
# Of other fields: the rules of those that are read or forbidden, and what those are that a
# config.json leaves out
FIELDS: dict[str, Any] = {
    "full_attention_interval": (int, 1, 10_000), "layer_types?": [(str, 1, 99), 1, 10_000],
    "rope_scaling": (dict, 0, 99), "rope_parameters": (dict, 0, 99), "original_max_position_embeddings?": SIZE,
    "use_sliding_window": Rule(bool), "sliding_window": OR_NONE, "max_window_layers": (int, 0, 10_000),
    "no_rope_layers?": [(int, 0, 1), 1, 10_000], "no_rope_layer_interval": (int, 1, 10_000),
    "attention_bias?": NO, "qkv_bias?": NO, "mlp_bias?": NO, "hidden_act?": {"silu"},  # of a swiglu
    "linear_conv_kernel_dim?": (int, 4, 4),
}  # fmt: skip
DEFAULTS: dict[str, Any] = dict(
    head_dim=None, num_key_value_heads=None, tie_word_embeddings=False, rms_norm_eps=1e-6, full_attention_interval=4,
    rope_scaling={}, rope_parameters={}, rope_theta=10000.0, partial_rotary_factor=1.0, use_sliding_window=False,
    sliding_window=None, max_window_layers=28, no_rope_layer_interval=4,
)  # fmt: skip
DEFAULTS_OF_QWEN3 = DEFAULTS | dict(sliding_window=4096, head_dim=128, use_qk_norm=True)
OF_OLMO2 = dict(post_norm=True, qk_norm=True, qk_norm_over="all")
FIELDS_OF_GPT2: dict[str, Any] = {
    "activation_function": {"gelu", "gelu_new", "gelu_pytorch_tanh"}, "scale_attn_weights?": YES,
    "scale_attn_by_inverse_layer_idx?": NO,
}  # fmt: skip
DEFAULTS_OF_GPT2 = dict(
    n_inner=None, tie_word_embeddings=True, layer_norm_epsilon=1e-5, activation_function="gelu_new"
)
GATED = ("qwen3_next", "qwen3_5_text")  # every layer has its gate, and norms hold 1 + weight
PARTIAL = (*GATED, "phi3")  # RoPE may turn some of a head's channels
ALL_LAYERS = ("mistral", "phi3")  # all layers have the window
# those that layer_types names, if use_sliding_window is true
BY_LAYER = ("qwen2", "qwen3", "smollm3")

LENGTH = "original_max_position_embeddings"
KEYS_OF_ROPE = dict(rope_base="rope_theta", rope_fraction="partial_rotary_factor")
SCALED = {"rope_factor": "factor"}
ROPES: dict[str, tuple[dict, dict]] = {  # by rope_type: {our key: field}, {other field: rule}
    "default": ({}, {}),
    "linear": (SCALED, {}),
    "dynamic": ({}, {"factor": NUMBER}),  # plain up to max_position_embeddings
    "yarn": (SCALED | {"rope_length": LENGTH}, {}),
    "llama3": (
        SCALED | {"rope_length": LENGTH},
        {"low_freq_factor": (float, 1, 1), "high_freq_factor": (float, 4, 4)},
    ),
}


def read_gpt2(config: dict, name: str) -> dict[str, Any]:
    mlp = "gelu" if config["activation_function"] == "gelu" else "gelu_tanh"
    return {"mlp": mlp, "mlp_width": config.get("n_inner") or 4 * config["n_embd"]}


def write_gpt2(keys: dict, name: str) -> dict[str, Any]:
    return {"activation_function": "gelu" if keys["mlp"] == "gelu" else "gelu_new"}


def read_rope(config: dict, name: str) -> dict[str, Any]:
    # there, the old spelling hides the new
    field = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
    rope, allowed = config[field], ["default"] if name in PARTIAL else list(ROPES)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in allowed or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(
            f"{field}={show(rope)}: {name} has {' or '.join(allowed)} RoPE here, the same in all layers"
        )
    scaled, others = ROPES[kind]
    numbers = {field: config[field] for field in KEYS_OF_ROPE.values()} | {
        LENGTH: config["max_position_embeddings"]
    }
    # beside the dict it counts more
    numbers |= rope | ({LENGTH: config[LENGTH]} if LENGTH in config else {})
    keys = checked(numbers, KEYS_OF_ROPE | scaled, others, "rope")
    if (fraction := keys["rope_fraction"]) != 1 and name not in PARTIAL:
        words = f"{name} of transformers turns all channels of a head"
        raise UserError(f"partial_rotary_factor={show(fraction)}: {words}")
    read = {"rope_type", "type", *KEYS_OF_ROPE.values(), *scaled.values(), *others}
    if kind != "default" and (other := sorted(rope.keys() - read)):
        raise UserError(f"rope_type={kind!r}: its {other[0]}={show(rope[other[0]])} is not read")
    return keys | ({"rope_scaling": kind} if scaled else {})


def read_transformers(config: dict, name: str) -> dict[str, Any]:
    """The keys of RoPE, and those that differ by layer: its mixer, its gate, its window, and
    whether it has RoPE."""
    of_rope, n_layer, mixer = (
        read_rope(config, name),
        config["num_hidden_layers"],
        FAMILIES[name].mixer,
    )
    every = config["full_attention_interval"] if mixer else 1
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(n_layer)]
    ropes = [1] * n_layer
    if name == "smollm3":
        every = config["no_rope_layer_interval"]
        ropes = config.get("no_rope_layers", [(i + 1) % every for i in range(n_layer)])[:n_layer]
    if len(ropes) < n_layer:
        raise UserError(
            f"no_rope_layers={show(ropes)}: must have a number for each of {n_layer} layers"
        )
    has_windows = name in ALL_LAYERS or (name in BY_LAYER and config["use_sliding_window"])
    window = config["sliding_window"] if has_windows else None
    if window:
        first = 0 if name in ALL_LAYERS else config["max_window_layers"]
        has_window = [not ropes[i] if name == "smollm3" else i >= first for i in range(n_layer)]
        default = ["sliding_attention" if x else "full_attention" for x in has_window]
    types = config.get("layer_types", default)
    asked = [word for word in ("elementwise", "headwise") if config.get(f"{word}_attn_output_gate")]
    gate = "elementwise" if mixer else asked[0] if asked and name == "qwen3" else "none"
    layers = {} if window and name in ALL_LAYERS else {"full_attention": ("softmax", gate, "none")}
    layers |= {"sliding_attention": ("softmax", gate, str(window))} if window else {}
    layers |= {"linear_attention": (mixer, "native", "none")} if mixer else {}
    if len(types) != n_layer or not layers.keys() >= set(types):
        allowed = " or ".join(layers)
        raise UserError(
            f"layer_types={show(types)}: must be {allowed} for each of {n_layer} layers"
        )
    words = [
        (*layers[kind], "rope" if has_rope else "none")
        for kind, has_rope in zip(types, ropes, strict=True)
    ]
    of_rope["n_kv_head"] = config["num_key_value_heads"] or config["num_attention_heads"]
    return of_rope | by_layer(("attention", "gate", "window", "position"), words)


def by_layer(names: tuple[str, ...], layers: list) -> dict[str, str]:
    """{name: its words}, as few as repeat up to the last layer. layers: of each layer, a word for
    every name."""
    n = next(
        n
        for n in range(1, len(layers) + 1)
        if all(x == layers[i % n] for i, x in enumerate(layers))
    )
    columns = zip(*layers[:n], strict=True)
    return {
        name: ",".join(x if len({*x}) > 1 else x[:1])
        for name, x in zip(names, columns, strict=True)
    }


def write_transformers(keys: dict, name: str) -> dict[str, Any]:
    kind = keys["rope_scaling"] if keys["rope_scaling"] in ROPES else "default"
    scaled, others = ROPES[kind]
    rope = {field: keys[key] for key, field in KEYS_OF_ROPE.items()}
    scaling = {"rope_type": kind} | {field: keys[key] for key, field in scaled.items()}
    # a whole number makes some of them warn
    scaling |= {field: float(only) for field, (_, only, _) in others.items()}
    window = next(filter(None, keys["window"]), None)
    # transformers reads rope_parameters from its version 5 on; older ones, and vLLM, read the same
    # numbers beside it
    fields: dict[str, Any] = {"rope_parameters": scaling | rope} | rope
    if kind != "default":  # it hides rope_parameters where both are read
        fields["rope_scaling"] = scaling
    fields["sliding_window"] = window
    fields |= {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": window is not None,
    }
    if name in BY_LAYER or FAMILIES[name].mixer:
        kinds = [
            "full_attention" if mixer == "softmax" else "linear_attention"
            for mixer in keys["attention"]
        ]
        layers = zip(keys["window"], kinds, strict=True)
        fields["layer_types"] = ["sliding_attention" if window else kind for window, kind in layers]
    if FAMILIES[name].mixer:  # no layer has experts
        fields |= {"linear_conv_kernel_dim": 4, "mlp_only_layers": list(range(keys["n_layer"]))}
    if name == "smollm3":
        fields["no_rope_layers"] = [int(position == "rope") for position in keys["position"]]
    if name == "qwen3" and (asked := keys["gate"][0].positions.get("readout")):
        fields[f"{asked}_attn_output_gate"] = True  # of Qiu et al., whose own code alone reads it
    return fields


# --------------------------------------------------------------------------------------------------
# fla: layers of one mixer, maybe with softmax layers between them

KEYS_OF_FLA = BASE | dict(
    norm_eps="norm_eps", block_size="max_position_embeddings", mlp_width="intermediate_size",
    delta_key_heads="num_heads",
)  # fmt: skip
KEYS_BY_HEAD = KEYS_OF_FLA | dict(delta_heads="num_v_heads", delta_key_dim="head_dim")
# widths are multiples of head_dim; those of others, of hidden_size
BY_HEAD = ("gated_deltanet", "kda")
FIELDS_OF_FLA: dict[str, Any] = {
    "hidden_ratio": NUMBER, "conv_size": (int, 1, 1024), "use_short_conv": Rule(bool), "allow_neg_eigval": Rule(bool),
    "output_gate_activation": {"swish", "silu", "sigmoid"}, "expand_k": NUMBER, "expand_v": NUMBER,
    "use_gate": Rule(bool), "use_output_gate": Rule(bool), "hidden_act?": {"swish"}, "attnres_block_size?": NONE,
    "feature_map?": NONE, "clamp_min?": NONE, "elementwise_affine?": YES, "qk_norm?": {"l2"},
    "qk_activation?": {"silu"}, "use_beta?": YES, "safe_gate?": NO, "lower_bound?": NONE,
    "attn?": {  # softmax layers
        "layers": [(int, 0, 10_000), 0, 10_000], "num_heads": SIZE, "num_kv_heads?": OR_NONE,
        "qkv_bias?": Rule(bool, choices=(False,), optional=True), "window_size?": OR_NONE,
        "rope_theta?": Rule(float, above=1, optional=True),
    },
}  # fmt: skip
DEFAULTS_OF_FLA: dict[str, Any] = dict(
    intermediate_size=None, hidden_ratio=4, norm_eps=1e-6, tie_word_embeddings=False, conv_size=4, use_short_conv=True,
    allow_neg_eigval=False, max_position_embeddings=2048, output_gate_activation="swish", num_v_heads=None,
    expand_k=1.0, expand_v=1.0, use_gate=True, use_output_gate=True,
)  # fmt: skip
DEFAULTS_OF_GLA = DEFAULTS_OF_FLA | dict(expand_k=0.5, use_short_conv=False)


def read_fla(config: dict, name: str) -> dict[str, Any]:
    H, C, attn, is_gla = (
        config["num_heads"],
        config["hidden_size"],
        config.get("attn", {}),
        name == "gla",
    )
    # DeltaNet was published without a gate, and Gated DeltaNet with SiLU: others are written as
    # gates of the readout
    is_native = name != "delta_net" and (
        name != "gated_deltanet" or config["output_gate_activation"] != "sigmoid"
    )
    has_gate = config["use_output_gate" if is_gla else "use_gate"] or name == "kda"
    linear = (
        FAMILIES[name].mixer,
        "none" if not has_gate else "native" if is_native else "elementwise",
    )
    softmax = attn.get("layers", ())
    layers = [
        ("softmax", "none") if i in softmax else linear for i in range(config["num_hidden_layers"])
    ]
    width, value_heads = (
        (config["head_dim"], config["num_v_heads"] or H) if name in BY_HEAD else (C / H, H)
    )
    key_dim, value_dim = width * config["expand_k"], width * config["expand_v"]
    if any(abs(y - round(y)) > 1e-5 * y for y in (key_dim, value_dim)):
        raise UserError(
            f"expand_k, expand_v: a head would have {key_dim:g} key and {value_dim:g} value channels"
        )
    heads, wide = attn.get("num_heads", H), -(-int(C * config["hidden_ratio"] * 2 / 3) // 256) * 256
    if is_gla and not H == heads == config.get("num_kv_heads", H):
        raise UserError(
            f"num_kv_heads, attn.num_heads: the gla here needs num_heads={H} everywhere"
        )
    short_conv = config["conv_size"] if config["use_short_conv"] else 0
    if short_conv and (is_gla or ("softmax", "none") in layers and short_conv != 4):
        raise UserError(
            f"conv_size={short_conv}: it would be in softmax layers, too, and without a SiLU in gla"
        )
    return dict(
        # of softmax layers
        n_head=heads, head_dim=max(1, C // heads), n_kv_head=attn.get("num_kv_heads"),
        rope_base=attn.get("rope_theta") or 10000.0, window=str(attn.get("window_size") or "none"),
        **by_layer(("attention", "gate"), layers), gate_activation="silu" if name == "delta_net" else "sigmoid",
        delta_heads=value_heads, delta_key_dim=round(key_dim), delta_value_dim=round(value_dim),
        # softmax layers have none unless it is named
        short_conv=None if short_conv == 4 else short_conv,
        beta_max=2.0 if config["allow_neg_eigval"] else 1.0, mlp_width=config["intermediate_size"] or wide,
    )  # fmt: skip


def write_fla(keys: dict, name: str) -> dict[str, Any]:
    H, Dk, Dv = (keys[key] for key in ("delta_key_heads", "delta_key_dim", "delta_value_dim"))
    softmax = [i for i, mixer in enumerate(keys["attention"]) if mixer == "softmax"]
    gates = [gate for i, gate in enumerate(keys["gate"]) if i not in softmax]
    is_native, width = any(gate.native for gate in gates), max(keys["short_conv"])
    fields = dict(hidden_act="swish", use_short_conv=width > 0, conv_size=width or 4)
    fields["allow_neg_eigval"] = keys["beta_max"] == 2
    fields["use_output_gate" if name == "gla" else "use_gate"] = is_native or any(
        gate.positions for gate in gates
    )
    if name in BY_HEAD:
        fields["expand_v"] = factor(Dv, Dk)
    else:
        H = fields["num_heads"] = keys["n_head"] if name == "gla" else H
        fields |= dict(
            expand_k=factor(H * Dk, keys["n_embd"]), expand_v=factor(H * Dv, keys["n_embd"])
        )
    if name == "gated_deltanet":
        fields["output_gate_activation"] = "swish" if is_native else "sigmoid"
    if softmax:
        fields["attn"] = dict(
            layers=softmax, num_heads=keys["n_head"], num_kv_heads=keys["n_kv_head"], qkv_bias=False,
            rope_theta=keys["rope_base"], window_size=keys["window"][softmax[0]],
        )  # fmt: skip
    return fields


def factor(product: int, number: int) -> float:
    """What number is multiplied by for product, also where fla cuts the result off to an int."""
    quotient = product / number
    return quotient if int(quotient * number) == product else math.nextafter(quotient, math.inf)


# --------------------------------------------------------------------------------------------------
# Mamba-2, of transformers and fla, and of its authors

KEYS_OF_MAMBA2 = BASE | dict(
    norm_eps="norm_eps", head_dim="head_dim", state_size="state_size", expand="expand", n_groups="n_groups",
    short_conv="conv_kernel",
)  # fmt: skip
DEFAULTS_OF_MAMBA2 = dict(tie_word_embeddings=False, rmsnorm=True)
# Infinity is no JSON
NO_LIMIT = Rule(list, choices=([0.0, math.inf], [0.0, {"__float__": "Infinity"}]))
FIELDS_OF_MAMBA2: dict[str, Any] = {
    "num_heads": SIZE, "use_bias?": NO, "use_conv_bias?": YES, "hidden_act?": {"silu", "swish"}, "rmsnorm": Rule(bool),
    "norm_before_gate?": NO, "D_has_hdim?": NO, "time_step_limit?": NO_LIMIT, "dt_limit?": NO_LIMIT,
}  # fmt: skip
# what the config.json of the authors calls the fields of transformers, with the defaults of their
# code
AUTHORS = {
    "d_model": "hidden_size", "n_layer": "num_hidden_layers", "tie_embeddings": "tie_word_embeddings",
    "d_state": "state_size", "d_conv": "conv_kernel", "headdim": "head_dim", "ngroups": "n_groups", "bias": "use_bias",
    "conv_bias": "use_conv_bias",
}  # fmt: skip
SAME = {"layer", "expand", "D_has_hdim", "rmsnorm", "norm_before_gate", "dt_limit", "chunk_size"}
DEFAULTS_OF_AUTHORS = dict(tie_embeddings=True, pad_vocab_size_multiple=8, norm_eps=1e-5)
DEFAULTS_OF_SSM = dict(d_state=128, d_conv=4, expand=2, headdim=64, ngroups=1)
FIELDS_OF_AUTHORS: dict[str, Any] = {
    "d_model": SIZE, "pad_vocab_size_multiple": SIZE, "d_intermediate?": Rule(int, choices=(0,)), "rms_norm?": YES,
    "attn_layer_idx?": Rule(list, choices=([],)), "ssm_cfg": {"layer": {"Mamba2"}, "headdim?": SIZE, "expand?": SIZE},
}  # fmt: skip


def of_authors(config: dict) -> dict:
    """The config.json of Mamba-2's authors in the words of transformers. Raises UserError."""
    config = DEFAULTS_OF_AUTHORS | config
    checked(config, {}, FIELDS_OF_AUTHORS)
    ssm = DEFAULTS_OF_SSM | config["ssm_cfg"]
    if unknown := sorted(ssm.keys() - AUTHORS.keys() - SAME):
        raise UserError(f"ssm_cfg.{unknown[0]}={show(ssm[unknown[0]])}: is not read")
    heads = {"num_heads": ssm["expand"] * config["d_model"] // ssm["headdim"]}
    return {AUTHORS.get(name, name): value for name, value in (config | ssm | heads).items()}


def read_mamba2(config: dict, name: str) -> dict[str, Any]:
    H, expand = config["num_heads"], config["expand"]
    inner = expand * config["hidden_size"]
    if H % expand or H * config["head_dim"] != inner:
        raise UserError(
            f"num_heads={H}: must be a multiple of expand={expand}, and head_dim times it must be {inner}"
        )
    norm, padded = (
        "published" if config["rmsnorm"] else "none",
        config.get("pad_vocab_size_multiple", 1),
    )
    return dict(n_head=H // expand, readout_norm=norm, pad_vocab_to=padded)


def write_mamba2(keys: dict, name: str) -> dict[str, Any]:
    """In the words of transformers, and norm_eps in fla's, too."""
    fields = dict(layer_norm_epsilon=keys["norm_eps"], num_heads=keys["expand"] * keys["n_head"])
    fields |= dict(
        conv_kernel=keys["short_conv"][0] or 4,
        use_bias=False,
        use_conv_bias=True,
        hidden_act="silu",
    )
    return fields


# --------------------------------------------------------------------------------------------------
# All families, and both ways of a config.json


class Family(NamedTuple):
    names: dict[str, str]  # of tensors
    blocks: str  # what theirs call the list of layers
    keys: dict[str, str]  # {our key: the field that it is}; a field obeys the rule of its key
    fields: dict[str, Any]  # rules of other fields that are read or forbidden
    defaults: dict[str, Any]  # of fields that a config.json may leave out
    read: Callable[[dict, str], dict]  # (config.json, family): the keys that are not one field
    # (what `compared` returns, family): the fields that are not one key
    write: Callable[[dict, str], dict]
    always: dict[str, Any] = {}  # keys that every model has
    mixer: str | None = None  # of its linear layers
    biases: str = ""  # a pattern, as those in `names`, of what may have a bias


LLAMA = Family(NAMES, "model.layers", KEYS, FIELDS, DEFAULTS, read_transformers, write_transformers)
WINDOW_4096, EPS_1E5 = DEFAULTS | {"sliding_window": 4096}, DEFAULTS | {"rms_norm_eps": 1e-5}
QWEN3_NEXT = LLAMA._replace(
    keys=KEYS | KEYS_OF_DELTA,
    defaults=DEFAULTS | dict(head_dim=256, partial_rotary_factor=0.25),
    always={"qk_norm": True},
    mixer="gated_deltanet",
    biases="softmax.(qkv|out_proj|gates.readout.proj)",  # with attention_bias
)
OF_GPT2 = dict(norm="layer", bias=True, position="learned")
GPT2 = Family(
    NAMES_OF_GPT2, "transformer.h", KEYS_OF_GPT2, FIELDS_OF_GPT2, DEFAULTS_OF_GPT2, read_gpt2, write_gpt2,
    always=OF_GPT2, biases="norm(_1|_2)?|mixer.(qkv|out_proj)|mlp.(up|down)",
)  # fmt: skip
FLA = Family(
    NAMES_OF_FLA, "model.layers", KEYS_OF_FLA, FIELDS_OF_FLA, DEFAULTS_OF_FLA, read_fla, write_fla
)
MAMBA2 = Family(
    NAMES_OF_MAMBA2, "backbone.layers", KEYS_OF_MAMBA2, FIELDS_OF_MAMBA2, DEFAULTS_OF_MAMBA2, read_mamba2, write_mamba2,
    always=dict(attention="mamba2", gate="native", mlp="none"), mixer="mamba2", biases="mixer.conv",
)  # fmt: skip
FAMILIES = {  # by model_type, but for nanogpt and mamba_ssm
    "llama": LLAMA,
    "qwen3": LLAMA._replace(keys=KEYS | {"qk_norm": "use_qk_norm"}, defaults=DEFAULTS_OF_QWEN3),
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_NEXT,
    "gpt2": GPT2,
    "mistral": LLAMA._replace(defaults=WINDOW_4096),
    "qwen2": LLAMA._replace(defaults=WINDOW_4096, always={"qkv_bias": True}, biases="softmax.qkv"),
    "smollm3": LLAMA._replace(defaults=DEFAULTS | dict(tie_word_embeddings=True, rope_theta=2e6)),
    "olmo2": LLAMA._replace(names=NAMES_OF_OLMO2, defaults=EPS_1E5, always=OF_OLMO2),
    "phi3": LLAMA._replace(names={"softmax.qkv": "self_attn.qkv_proj"} | NAMES, defaults=EPS_1E5),
    "nanogpt": GPT2._replace(keys=KEYS_OF_NANOGPT),
    "gla": FLA._replace(
        names=NAMES_OF_GLA, defaults=DEFAULTS_OF_GLA, mixer="gla", biases="mixer.decay_out"
    ),
    "gated_deltanet": FLA._replace(
        keys=KEYS_BY_HEAD, defaults=DEFAULTS_OF_FLA | {"expand_v": 2.0}, mixer="gated_deltanet"
    ),
    "delta_net": FLA._replace(defaults=DEFAULTS_OF_FLA | {"use_gate": False}, mixer="deltanet"),
    "kda": FLA._replace(
        names=NAMES_OF_KDA,
        keys=KEYS_BY_HEAD,
        always={"native_bias": True},
        mixer="kda",
        biases="mixer.gates.native.proj",
    ),
    "mamba2": MAMBA2,
    "mamba_ssm": MAMBA2,
}
CLASSES = {  # of what is written, without "ForCausalLM"; other families are only read
    "llama": "Llama", "qwen3": "Qwen3", "qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5", "gpt2": "GPT2LMHeadModel",
    "mistral": "Mistral", "qwen2": "Qwen2", "smollm3": "SmolLM3", "olmo2": "Olmo2", "phi3": "Phi3",
    "gla": "GLA", "gated_deltanet": "GatedDeltaNet", "delta_net": "DeltaNet", "kda": "KDA", "mamba2": "Mamba2",
}  # fmt: skip


def family_of(config: dict) -> str:
    """A key of FAMILIES. Raises UserError for a model that is not read."""
    if isinstance(config, dict) and "ssm_cfg" in config:
        return "mamba_ssm"
    checked(config, {}, {"model_type": FAMILIES.keys() - {"mamba_ssm"}})
    return config["model_type"]


def keys_of(config: dict, block_size: int) -> dict[str, Any]:
    """The keys of GPTConfig for a config.json of theirs. Raises UserError for what the model here
    does not have. No field is null but sliding_window, where that is no window, and not the
    family's."""
    name = family_of(config)
    family = FAMILIES[name]
    config = family.defaults | (of_authors(config) if name == "mamba_ssm" else config)
    if family.mixer == "mamba2" and "layer_norm_epsilon" in config:  # of transformers
        config = {"norm_eps": config["layer_norm_epsilon"]} | config
    # the folder of the weights that are not quantised is read
    keys = checked(
        config, family.keys, family.fields | {"quantization_config?": Rule(dict, choices=({},))}
    )
    keys = PLAIN | family.always | keys | family.read(config, name)
    return keys | {"block_size": min(block_size, keys.get("block_size", block_size))}


def checked(config: dict, keys: dict[str, str], fields: dict, name: str = "") -> dict[str, Any]:
    """The keys that are one field each. Raises UserError where those, or other fields, disobey
    their rules."""
    rules = rules_of(GPTConfig)
    if wrong := wrong_field(
        config, {field: rules[key] for key, field in keys.items()} | fields, name
    ):
        raise UserError(wrong)
    return {key: config[field] for key, field in keys.items()}


def config_of(config: GPTConfig, name: str, weights: dict) -> dict[str, Any]:
    """Their config.json for a model of ours, without what it has no field for. Raises UserError."""
    family, widths = (
        FAMILIES[name],
        {len(w) for name, w in weights.items() if name.endswith("mlp.up.weight")},
    )
    keys, architecture = compared(config) | {"mlp_width": max(widths, default=None)}, CLASSES[name]
    has_other_mixers = not {"softmax", family.mixer} >= {*keys["attention"]}
    if has_other_mixers or len(widths) != 1 and "mlp_width" in family.keys:
        raise UserError(
            f"attention={config.attention!r} with MLPs of {len(widths)} widths: {name} has no such layers"
        )
    about = {
        "architectures": [
            architecture if architecture.endswith("Model") else f"{architecture}ForCausalLM"
        ],
        "model_type": name,
        "dtype": str(weights["wte.weight"].dtype).removeprefix("torch."),
        # some classes have numbers of their own
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    return (
        about | {field: keys[key] for key, field in family.keys.items()} | family.write(keys, name)
    )


def compared(config: GPTConfig) -> dict[str, Any]:
    """All keys: a pattern as what each layer has, and the number that follows from others where one
    is None."""
    layers = config.layers()
    published = [0 if mixer in ("softmax", "gla") else 4 for mixer, _ in layers]
    return vars(config) | dict(
        zip(KEYS_OF_DELTA, config.delta_sizes, strict=True),
        n_kv_head=config.n_kv_head or config.n_head,
        rope_length=config.rope_length or config.block_size
        if config.rope_scaling in WITH_ROPE_LENGTH
        else None,
        attention=[mixer for mixer, _ in layers],
        # a native gate is none where a mixer was published without one
        gate=[
            gate._replace(native=gate.native and MIXERS[mixer].native_gate is not None)
            for mixer, gate in layers
        ],
        window=[
            config.window_of(i) if mixer == "softmax" else None
            for i, (mixer, _) in enumerate(layers)
        ],
        position=[word_of(config.position, i) for i in range(len(layers))],
        short_conv=published if config.short_conv is None else [config.short_conv] * len(layers),
    )
