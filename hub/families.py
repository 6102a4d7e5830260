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
| qwen2          | biases on q, k and v                                                                           |
| smollm3        | no RoPE in every fourth layer, or in those of no_rope_layers                                   |
| nanogpt        | what nanoGPT's train.py saves: as gpt2 with weights of (outputs, inputs), maybe without biases |
| gla, kda,      | of fla: q, k and v have a weight and a convolution each, which are one here; some layers may   |
| delta_net,     | be softmax (`attn`)                                                                            |
| gated_deltanet |                                                                                                |
| mamba2         | of transformers and of fla, which spell some fields differently; no MLP; in_proj begins with   |
|                | the rows of the gate                                                                           |

keys_of reads a config.json and config_of writes it. Of each kind of family, the two halves stand
side by side.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import variants  # noqa: F401  some families have its mixers
from base.configurator import UserError, check_choice, show
from keys import WITH_ROPE_LENGTH, mlp_ratio_of, word_of
from model import MIXERS, GPTConfig, Softmax

# Names of tensors: {what ours begin with: what theirs begin with}, without blocks.N. before. The
# first that fits counts. "mixer" is called softmax in softmax layers
OF_ALL = {
    "head": "lm_head", "mlp.glu": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
NAMES = OF_ALL | {
    "wte": "model.embed_tokens", "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
    "norm": "model.norm", "softmax.out_proj": "self_attn.o_proj", "softmax": "self_attn",
    "mixer.conv": "linear_attn.conv1d", "mixer": "linear_attn",
}  # fmt: skip
NAMES_OF_GPT2 = {  # the rows of c_attn are those of q, of k and of v, as ours
    "head": "lm_head", "wte": "transformer.wte", "wpe": "transformer.wpe", "norm_": "ln_", "norm": "transformer.ln_f",
    "softmax.qkv": "attn.c_attn", "softmax.out_proj": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip
NAMES_OF_FLA = OF_ALL | {
    "wte": "model.embeddings", "norm_1": "attn_norm", "norm_2": "mlp_norm", "norm": "model.norm",
    "softmax.out_proj": "attn.o_proj", "mixer.out_proj": "attn.o_proj", "mixer.gates.native.proj": "attn.g_proj",
    "mixer.gates.readout.proj": "attn.g_proj", "mixer.norm": "attn.o_norm", "mixer": "attn",
}  # fmt: skip
NAMES_OF_GLA = {
    "mixer.decay_in": "attn.gk_proj.0",
    "mixer.decay_out": "attn.gk_proj.1",
} | NAMES_OF_FLA
NAMES_OF_GLA["mixer.norm"] = "attn.g_norm"
NAMES_OF_KDA = {
    "mixer.decay_in": "attn.f_proj.0", "mixer.decay_out": "attn.f_proj.1",
    "mixer.gates.native.down": "attn.g_proj.0",
} | NAMES_OF_FLA  # fmt: skip
NAMES_OF_KDA["mixer.gates.native.proj"] = "attn.g_proj.1"
NAMES_OF_MAMBA2 = {
    "wte": "backbone.embeddings", "head": "lm_head", "norm_1": "norm", "norm": "backbone.norm_f",
    "mixer.conv": "mixer.conv1d",
}  # fmt: skip

# Fields that are one key: {our key: the field}. mlp_width, which is mlp_ratio here, and the four
# numbers of delta_sizes have names of their own
SIZES = ("key_heads", "heads", "key_dim", "value_dim")
BASE = dict(
    n_layer="num_hidden_layers",
    n_embd="hidden_size",
    vocab_size="vocab_size",
    tie_embeddings="tie_word_embeddings",
)
KEYS = BASE | dict(
    n_head="num_attention_heads", head_dim="head_dim", n_kv_head="num_key_value_heads", norm_eps="rms_norm_eps",
    block_size="max_position_embeddings", mlp_width="intermediate_size",
)  # fmt: skip
KEYS_OF_QWEN3_NEXT = KEYS | dict(
    key_heads="linear_num_key_heads", heads="linear_num_value_heads", key_dim="linear_key_head_dim",
    value_dim="linear_value_head_dim",
)  # fmt: skip
KEYS_OF_GPT2 = dict(
    n_layer="n_layer", n_head="n_head", n_embd="n_embd", block_size="n_positions", vocab_size="vocab_size",
    mlp_width="n_inner", tie_embeddings="tie_word_embeddings", norm_eps="layer_norm_epsilon",
)  # fmt: skip
KEYS_OF_NANOGPT = {
    key: key for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")
}
KEYS_OF_FLA = BASE | dict(
    norm_eps="norm_eps", block_size="max_position_embeddings", mlp_width="intermediate_size", key_heads="num_heads",
)  # fmt: skip
KEYS_BY_HEAD = KEYS_OF_FLA | dict(heads="num_v_heads", key_dim="head_dim")
KEYS_OF_MAMBA2 = BASE | dict(
    norm_eps="norm_eps", head_dim="head_dim", state_size="state_size", expand="expand", short_conv="conv_kernel",
)  # fmt: skip

# What fields may be that no tensor shows, and what those are that a config.json leaves out
ALLOWED: dict[str, Any] = dict(hidden_act=("silu",), use_sliding_window=(False,))
DEFAULTS: dict[str, Any] = dict(
    tie_word_embeddings=False, rms_norm_eps=1e-6, full_attention_interval=4,
    rope_theta=10000.0, partial_rotary_factor=1.0, sliding_window=None, no_rope_layer_interval=4,
)  # fmt: skip
ALLOWED_OF_GPT2 = dict(
    activation_function=("gelu", "gelu_new", "gelu_pytorch_tanh"), scale_attn_weights=(True,),
    scale_attn_by_inverse_layer_idx=(False,),
)  # fmt: skip
DEFAULTS_OF_GPT2 = dict(
    n_inner=None, tie_word_embeddings=True, layer_norm_epsilon=1e-5, activation_function="gelu_new"
)
ALLOWED_OF_FLA = dict(
    output_gate_activation=("swish", "silu", "sigmoid"), hidden_act=("swish",), feature_map=(), clamp_min=(),
    qk_norm=("l2",), qk_activation=("silu",), safe_gate=(False,), lower_bound=(),
)  # fmt: skip
DEFAULTS_OF_FLA: dict[str, Any] = dict(
    intermediate_size=None, hidden_ratio=4, norm_eps=1e-6, tie_word_embeddings=False, conv_size=4, use_short_conv=True,
    allow_neg_eigval=False, max_position_embeddings=2048, output_gate_activation="swish", num_v_heads=None,
    expand_k=1.0, expand_v=1.0, use_gate=True, use_output_gate=True,
)  # fmt: skip
NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # which is no JSON
ALLOWED_OF_MAMBA2 = dict(
    hidden_act=("silu", "swish"), norm_before_gate=(False,), time_step_limit=NO_LIMIT
)

GATED = ("qwen3_next", "qwen3_5_text")  # every layer has its gate, and norms hold 1 + weight
# widths are multiples of head_dim; those of others of fla, of hidden_size
BY_HEAD = ("gated_deltanet", "kda")


def kind_of(mixer: str) -> str:
    """softmax for it and its subclasses; any other mixer is its own kind."""
    return "softmax" if issubclass(MIXERS[mixer], Softmax) else mixer


def shortest(words: list) -> str:
    """The words as a pattern, as few as repeat up to the last layer."""
    n = 1
    while any(word != words[i % n] for i, word in enumerate(words)):
        n += 1
    return ",".join(words[:n])


# --------------------------------------------------------------------------------------------------
# GPT-2


def read_gpt2(config: dict, name: str) -> dict[str, Any]:
    mlp = "gelu" if config["activation_function"] == "gelu" else "gelu_tanh"
    return {"mlp": mlp, "mlp_width": config.get("n_inner") or 4 * config["n_embd"]}


def write_gpt2(keys: dict, name: str) -> dict[str, Any]:
    return {"activation_function": "gelu" if keys["mlp"] == "gelu" else "gelu_new"}


# --------------------------------------------------------------------------------------------------
# Softmax of transformers, maybe with Gated DeltaNet

LENGTH = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"
ROPES = {  # by rope_type: the fields that are read
    "default": {"mrope_section", "mrope_interleaved"},  # of images
    "dynamic": {"factor"},  # plain up to max_position_embeddings
    "linear": {"factor"},
    "yarn": {"factor", LENGTH},
    "llama3": {"factor", LENGTH, "low_freq_factor", "high_freq_factor"},
}


def read_rope(config: dict, name: str) -> dict[str, Any]:
    """The keys of RoPE, and under "rotated" the share of a head's channels that it turns."""
    # transformers ignores rope_parameters if rope_scaling is set
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    check_choice("rope_type", kind, ("default",) if name in GATED else ROPES)
    unread = rope.keys() - ROPES[kind] - {"rope_type", "type", "rope_theta", PARTIAL}
    if unread:
        field = min(unread)
        raise UserError(f"rope_type={kind!r}: its {field}={show(rope[field])} is not read")
    rotated = rope.get(PARTIAL, config[PARTIAL])
    check_choice(PARTIAL, rotated, (1.0, 0.25) if name in GATED else (1.0,))
    keys = {"rope_base": rope.get("rope_theta", config["rope_theta"]), "rotated": rotated}
    if kind in ("default", "dynamic"):
        return keys
    if kind == "llama3":
        check_choice("low_freq_factor", rope["low_freq_factor"], (1,))
        check_choice("high_freq_factor", rope["high_freq_factor"], (4,))
    if kind in WITH_ROPE_LENGTH:
        length = rope.get(LENGTH, config["max_position_embeddings"])
        keys["rope_length"] = config.get(LENGTH, length)
    return keys | {"rope_scaling": kind, "rope_factor": rope["factor"]}


def write_rope(keys: dict) -> dict[str, Any]:
    softmax: Any = next(MIXERS[name] for name in keys["attention"] if kind_of(name) == "softmax")
    plain = {"rope_theta": keys["rope_base"], PARTIAL: softmax.rope_fraction}
    kind = keys["rope_scaling"]
    if kind not in ROPES:
        return {"rope_parameters": {"rope_type": "default"} | plain} | plain
    scaling = {"rope_type": kind, "factor": keys["rope_factor"]}
    if kind in WITH_ROPE_LENGTH:
        scaling[LENGTH] = keys["rope_length"]
    if kind == "llama3":  # a whole number makes some of them warn
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    # transformers reads rope_parameters from its version 5 on. Older ones, and vLLM, read the same
    # numbers beside it, and rope_scaling, which hides rope_parameters where both are read
    return {"rope_parameters": scaling | plain, "rope_scaling": scaling} | plain


def read_transformers(config: dict, name: str) -> dict[str, Any]:
    """The keys of RoPE, and those that differ by layer: its mixer, its gate, its window, and
    whether it has RoPE."""
    keys = read_rope(config, name)
    n_layer = config["num_hidden_layers"]
    softmax = "qwen2" if name == "qwen2" else "softmax"
    if keys.pop("rotated") < 1:
        softmax = "qwen3_next"
    gate = "none"
    if name in GATED:
        gate = "elementwise"
    for asked in ("elementwise", "headwise"):
        if name == "qwen3" and config.get(f"{asked}_attn_output_gate"):
            gate = asked
    ropes = [1] * n_layer
    if name == "smollm3":
        every = config["no_rope_layer_interval"]
        ropes = config.get("no_rope_layers") or [(i + 1) % every for i in range(n_layer)]
    keys["position"] = shortest(["rope" if rope else "none" for rope in ropes])
    keys |= {"attention": softmax, "gate": gate}
    if name == "mistral":
        keys["window"] = str(config["sliding_window"] or "none")
    if name in GATED:
        every = config["full_attention_interval"]
        is_full = [(i + 1) % every == 0 for i in range(n_layer)]
        if "layer_types" in config:
            is_full = [kind == "full_attention" for kind in config["layer_types"]]
        keys["attention"] = shortest([softmax if full else "gated_deltanet" for full in is_full])
        keys["gate"] = shortest([gate if full else "native" for full in is_full])
    return keys


def write_transformers(keys: dict, name: str) -> dict[str, Any]:
    fields = write_rope(keys) | {"sliding_window": keys["window"][0]}
    if name in GATED:  # no layer has experts
        is_full = [kind_of(mixer) == "softmax" for mixer in keys["attention"]]
        kinds = ["full_attention" if full else "linear_attention" for full in is_full]
        fields |= {"layer_types": kinds, "mlp_only_layers": list(range(len(kinds)))}
    if name == "smollm3":
        fields["no_rope_layers"] = [int(position == "rope") for position in keys["position"]]
    asked = keys["gate"][0].positions.get("readout")
    if name == "qwen3" and asked:
        fields[f"{asked}_attn_output_gate"] = True  # of Qiu et al., whose own code alone reads it
    return fields


# --------------------------------------------------------------------------------------------------
# fla: layers of one mixer, maybe with softmax layers between them


def read_fla(config: dict, name: str) -> dict[str, Any]:
    H, C, n_layer = config["num_heads"], config["hidden_size"], config["num_hidden_layers"]
    # DeltaNet was published without a gate, and Gated DeltaNet with SiLU: others are written as
    # gates of the readout
    is_sigmoid = name == "gated_deltanet" and config["output_gate_activation"] == "sigmoid"
    gate = "elementwise" if name == "delta_net" or is_sigmoid else "native"
    if name != "kda" and not config["use_output_gate" if name == "gla" else "use_gate"]:
        gate = "none"
    attn = config.get("attn", {})
    softmax = set(attn.get("layers", ()))
    mixers = ["softmax" if i in softmax else FAMILIES[name].mixer for i in range(n_layer)]
    width = config["head_dim"] if name in BY_HEAD else C / H
    short_conv = config["conv_size"] if config["use_short_conv"] else 0
    heads = attn.get("num_heads", H)  # of softmax layers
    keys = dict(
        n_head=heads,
        head_dim=max(1, C // heads),
        n_kv_head=attn.get("num_kv_heads"),
        rope_base=attn.get("rope_theta") or 10000.0,
        window=str(attn.get("window_size") or "none"),
        attention=shortest(mixers),
        gate=shortest(["none" if mixer == "softmax" else gate for mixer in mixers]),
        gate_activation="silu" if name == "delta_net" else "sigmoid",
        heads=config["num_v_heads"] or H,
        key_dim=round(width * config["expand_k"]),
        value_dim=round(width * config["expand_v"]),
        # softmax layers have none unless it is named
        short_conv=None if short_conv == 4 else short_conv,
        beta_max=2.0 if config["allow_neg_eigval"] else 1.0,
    )
    if config["intermediate_size"] is None:
        keys["mlp_width"] = -(-int(C * config["hidden_ratio"] * 2 / 3) // 256) * 256
    return keys


def write_fla(keys: dict, name: str) -> dict[str, Any]:
    H, _, Dk, Dv = keys["delta_sizes"]
    softmax = [i for i, mixer in enumerate(keys["attention"]) if kind_of(mixer) == "softmax"]
    gates = [gate for i, gate in enumerate(keys["gate"]) if i not in softmax]
    is_native = any(gate.native for gate in gates)
    has_gate = is_native or any(gate.positions for gate in gates)
    width = max(keys["short_conv"])
    fields = dict(use_short_conv=width > 0, conv_size=width or 4)
    fields["allow_neg_eigval"] = keys["beta_max"] == 2
    fields["use_output_gate" if name == "gla" else "use_gate"] = has_gate
    if name in BY_HEAD:
        fields["expand_v"] = Dv / Dk
    else:
        fields["expand_k"] = H * Dk / keys["n_embd"]
        fields["expand_v"] = H * Dv / keys["n_embd"]
    if name == "gated_deltanet":
        fields["output_gate_activation"] = "swish" if is_native else "sigmoid"
    if softmax:
        fields["attn"] = dict(
            layers=softmax,
            num_heads=keys["n_head"],
            num_kv_heads=keys["n_kv_head"],
            rope_theta=keys["rope_base"],
            window_size=keys["window"][softmax[0]],
        )
    return fields


# --------------------------------------------------------------------------------------------------
# Mamba-2, of transformers and fla


def read_mamba2(config: dict, name: str) -> dict[str, Any]:
    norm = "published" if config["rmsnorm"] else "none"
    return dict(n_head=config["num_heads"] // config["expand"], readout_norm=norm)


def write_mamba2(keys: dict, name: str) -> dict[str, Any]:
    """In the words of transformers, and norm_eps in fla's, too."""
    return dict(
        layer_norm_epsilon=keys["norm_eps"],
        num_heads=keys["expand"] * keys["n_head"],
        n_groups=1,
        conv_kernel=keys["short_conv"][0] or 4,
    )


# --------------------------------------------------------------------------------------------------
# All families, and both ways of a config.json


class Family(NamedTuple):
    names: dict[str, str]  # of tensors
    blocks: str  # what theirs call the list of layers
    keys: dict[str, str]  # {our key: the field that it is}
    allowed: dict[str, tuple]  # {field: what it may be}
    defaults: dict[str, Any]  # of fields that a config.json may leave out
    read: Callable[[dict, str], dict]  # (config.json, family): the keys that are not one field
    # (what written_out returns, family): the fields that are not one key
    write: Callable[[dict, str], dict]
    always: dict[str, Any] = {"mlp": "swiglu"}  # keys that every model has
    mixer: str | None = None  # of its linear layers


LLAMA = Family(
    NAMES, "model.layers", KEYS, ALLOWED, DEFAULTS, read_transformers, write_transformers
)
QWEN3_NEXT = LLAMA._replace(
    keys=KEYS_OF_QWEN3_NEXT,
    defaults=DEFAULTS | {"head_dim": 256, PARTIAL: 0.25},
    always={"mlp": "swiglu", "qk_norm": True},
    mixer="gated_deltanet",
)
GPT2 = Family(
    NAMES_OF_GPT2, "transformer.h", KEYS_OF_GPT2, ALLOWED_OF_GPT2, DEFAULTS_OF_GPT2, read_gpt2, write_gpt2,
    always=dict(norm="layer", bias=True, position="learned"),
)  # fmt: skip
FLA = Family(
    NAMES_OF_FLA, "model.layers", KEYS_OF_FLA, ALLOWED_OF_FLA, DEFAULTS_OF_FLA, read_fla, write_fla
)
FAMILIES = {  # by model_type, but for nanogpt
    "llama": LLAMA,
    "qwen3": LLAMA._replace(
        keys=KEYS | {"qk_norm": "use_qk_norm"},
        defaults=DEFAULTS | dict(head_dim=128, use_qk_norm=True),
    ),
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_NEXT,
    "gpt2": GPT2,
    "mistral": LLAMA._replace(defaults=DEFAULTS | {"sliding_window": 4096}),
    "qwen2": LLAMA,
    "smollm3": LLAMA._replace(defaults=DEFAULTS | dict(tie_word_embeddings=True, rope_theta=2e6)),
    "nanogpt": GPT2._replace(keys=KEYS_OF_NANOGPT),
    "gla": FLA._replace(
        names=NAMES_OF_GLA,
        allowed=ALLOWED_OF_FLA | dict(use_short_conv=(False,)),  # here it has no SiLU
        defaults=DEFAULTS_OF_FLA | dict(expand_k=0.5, use_short_conv=False),
        mixer="gla",
    ),
    "gated_deltanet": FLA._replace(
        keys=KEYS_BY_HEAD, defaults=DEFAULTS_OF_FLA | {"expand_v": 2.0}, mixer="gated_deltanet"
    ),
    "delta_net": FLA._replace(defaults=DEFAULTS_OF_FLA | {"use_gate": False}, mixer="deltanet"),
    "kda": FLA._replace(names=NAMES_OF_KDA, keys=KEYS_BY_HEAD, mixer="kda_fla"),
    "mamba2": Family(
        NAMES_OF_MAMBA2, "backbone.layers", KEYS_OF_MAMBA2, ALLOWED_OF_MAMBA2,
        dict(tie_word_embeddings=False, rmsnorm=True), read_mamba2, write_mamba2,
        always=dict(attention="mamba2", gate="native", mlp="none"), mixer="mamba2",
    ),
}  # fmt: skip
CLASSES = {  # of what is written; other families are only read
    "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM", "gpt2": "GPT2LMHeadModel", "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "smollm3": "SmolLM3ForCausalLM", "gla": "GLAForCausalLM",
    "gated_deltanet": "GatedDeltaNetForCausalLM", "delta_net": "DeltaNetForCausalLM", "kda": "KDAForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
}  # fmt: skip


def check_family(config: dict) -> None:
    """Raises UserError for a model that is not read."""
    check_choice("model_type", config.get("model_type"), FAMILIES)


def keys_of(config: dict, block_size: int) -> dict[str, Any]:
    """The keys of GPTConfig for a config.json of theirs. Raises UserError for what the model here
    does not have. No field is null but sliding_window, where that is no window, and not the
    family's."""
    check_family(config)
    name = config["model_type"]
    family = FAMILIES[name]
    config = family.defaults | config
    if "layer_norm_epsilon" in config:  # of transformers' Mamba-2
        config.setdefault("norm_eps", config["layer_norm_epsilon"])
    # the folder of the weights that are not quantised is read
    allowed = family.allowed | {"quantization_config": ({},)}
    for field in config.keys() & allowed.keys():
        check_choice(field, config[field], allowed[field])
    given = {key: config[field] for key, field in family.keys.items() if field in config}
    keys = family.always | given | family.read(config, name)
    if "mlp_width" in keys:
        keys["mlp_ratio"] = mlp_ratio_of(keys.pop("mlp_width"), keys["n_embd"], keys["mlp"])
    if "heads" in keys:
        keys["delta_sizes"] = [keys.pop(size) for size in SIZES]
    return keys | {"block_size": min(block_size, keys.get("block_size", block_size))}


def config_of(config: GPTConfig, name: str, weights: dict) -> dict[str, Any]:
    """Their config.json for a model of ours, without what it has no field for. Raises UserError."""
    family = FAMILIES[name]
    keys = written_out(config)
    if not {kind_of(mixer) for mixer in keys["attention"]} <= {"softmax", family.mixer}:
        raise UserError(f"attention={config.attention!r}: {name} has no such layers")
    widths = [len(w) for name, w in weights.items() if name.endswith("mlp.up.weight")]
    keys["mlp_width"] = max(widths, default=1)
    keys |= zip(SIZES, config.head_sizes, strict=True)
    about = {
        "architectures": [CLASSES[name]],
        "model_type": name,
        "dtype": str(weights["wte.weight"].dtype).removeprefix("torch."),
        # some classes have numbers of their own
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    fields = {field: keys[key] for key, field in family.keys.items()}
    return about | fields | family.write(keys, name)


def written_out(config: GPTConfig) -> dict[str, Any]:
    """All keys: a pattern as what each layer has, and the number that is meant where one is
    None."""
    keys = dict(vars(config), attention=[], gate=[], window=[], position=[], short_conv=[])
    for i, (mixer, gate) in enumerate(config.layers()):
        is_softmax = kind_of(mixer) == "softmax"
        published = 0 if is_softmax or mixer == "gla" else 4
        keys["attention"].append(mixer)
        # a native gate is none where a mixer was published without one
        is_native = gate.native and MIXERS[mixer].native_gate is not None
        keys["gate"].append(gate._replace(native=is_native))
        keys["window"].append(config.window_of(i) if is_softmax else None)
        keys["position"].append(word_of(config.position, i))
        keys["short_conv"].append(published if config.short_conv is None else config.short_conv)
    keys["n_kv_head"] = config.n_kv_head or config.n_head
    keys["rope_length"] = config.rope_length or config.block_size
    keys["delta_sizes"] = config.head_sizes
    return keys
