"""The families of transformers that are read: their config.json and tensors, and our keys and tensors.

| family         | what is special                                                                                   |
|----------------|---------------------------------------------------------------------------------------------------|
| llama          | no QK-norm                                                                                        |
| qwen3          | QK-norm. Qiu et al.'s gated models: q_proj has, for each key/value head, rows of queries, then of |
|                | their gates (headwise_attn_output_gate, elementwise_attn_output_gate)                             |
| qwen3_next     | q_proj has rows of the query, then of the gate, head by head; norms of 1 + weight; Gated DeltaNet |
|                | whose projections are interleaved by key head                                                     |
| qwen3_5_text   | the same with projections that are not interleaved                                                |
| gpt2           | LayerNorm, biases, learned positions; the weights of linear layers are (inputs, outputs)          |
| mistral        | a window in all layers, where sliding_window is a number                                          |
| qwen2          | biases on q, k and v; windows in the layers that layer_types or max_window_layers names           |
| smollm3        | no RoPE in every fourth layer, or in those of no_rope_layers                                      |
| olmo2          | norms behind the branches; QK-norm over all heads together                                        |
| phi3           | q, k and v are one weight, and so are the two of the MLP; partial RoPE; windows as in mistral     |
| nanogpt        | what nanoGPT's train.py saves: as gpt2 with weights of (outputs, inputs), maybe without biases    |
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from configurator import UserError, show
from hub import families_linear
from keys import WITH_ROPE_LENGTH
from model import GPTConfig
from ops.fast import at_least_float32
from runs.rules import Rule, wrong_field

GATED = ("qwen3_next", "qwen3_5_text")  # every layer has its gate, and norms hold 1 + weight

# Fields of config.json that are one key of ours: {our key: their field}.
KEYS = dict(
    n_layer="num_hidden_layers", n_head="num_attention_heads", head_dim="head_dim", n_kv_head="num_key_value_heads",
    n_embd="hidden_size", block_size="max_position_embeddings", vocab_size="vocab_size", mlp_width="intermediate_size",
    tie_embeddings="tie_word_embeddings", norm_eps="rms_norm_eps",
)  # fmt: skip
KEYS_OF_DELTA = dict(  # in the order of GPTConfig.delta_sizes
    delta_key_heads="linear_num_key_heads", delta_heads="linear_num_value_heads",
    delta_key_dim="linear_key_head_dim", delta_value_dim="linear_value_head_dim",
)  # fmt: skip
KEYS_OF_GPT2 = dict(
    n_layer="n_layer", n_head="n_head", n_embd="n_embd", block_size="n_positions", vocab_size="vocab_size",
    mlp_width="n_inner", tie_embeddings="tie_word_embeddings", norm_eps="layer_norm_epsilon",
)  # fmt: skip

# Names of tensors: each of ours is replaced by theirs, in turn, where "mixer" has become the name of the mixer.
NAMES = {
    "^wte": "model.embed_tokens", "^head": "lm_head", "^norm": "model.norm", "^blocks": "model.layers",
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
    "mlp.glu": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
    "softmax.out_proj": "self_attn.o_proj", "softmax": "self_attn",
    "gated_deltanet.conv": "linear_attn.conv1d", "gated_deltanet": "linear_attn",
}  # fmt: skip
NAMES_OF_GPT2 = {  # the rows of c_attn are those of q, of k and of v, as ours
    "^head": "lm_head", "^norm": "transformer.ln_f", "^wte": "transformer.wte", "^wpe": "transformer.wpe",
    "^blocks": "transformer.h", "norm_": "ln_", "softmax.qkv": "attn.c_attn", "softmax.out_proj": "attn.c_proj",
    "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip
KEYS_OF_NANOGPT = {key: key for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")}
NAMES_OF_OLMO2 = NAMES | {"norm_1": "post_attention_layernorm", "norm_2": "post_feedforward_layernorm"}


class Family(NamedTuple):
    keys: dict[str, str] = KEYS
    names: dict[str, str] = NAMES
    optional: tuple[str, ...] = ("head_dim",)  # keys that its config.json may leave out, beside those of all families
    always: dict[str, Any] = {}  # keys that it has beside those of a Llama, and other defaults
    window: int | None = None  # where config.json has no sliding_window


FAMILIES = {  # by model_type
    "llama": Family(),
    "qwen3": Family(optional=(), window=4096),
    "qwen3_next": Family(KEYS | KEYS_OF_DELTA, optional=()),
    "qwen3_5_text": Family(KEYS | KEYS_OF_DELTA, optional=()),
    "gpt2": Family(KEYS_OF_GPT2, NAMES_OF_GPT2, ("mlp_width",)),
    "mistral": Family(window=4096),
    "qwen2": Family(always={"qkv_bias": True}, window=4096),
    "smollm3": Family(always={"tie_embeddings": True, "rope_base": 2e6}),
    "olmo2": Family(names=NAMES_OF_OLMO2, always=dict(norm_eps=1e-5, post_norm=True, qk_norm=True, qk_norm_over="all")),
    "phi3": Family(names={"softmax.qkv": "self_attn.qkv_proj"} | NAMES, always={"norm_eps": 1e-5}),
    "nanogpt": Family(KEYS_OF_NANOGPT, NAMES_OF_GPT2),
}
PARTIAL = (*GATED, "phi3")  # RoPE may turn some of a head's channels
ALL_LAYERS = ("mistral", "phi3")  # all layers have the window
BY_LAYER = ("qwen2", "qwen3", "smollm3")  # those that layer_types names, if use_sliding_window is true
LENGTH = "original_max_position_embeddings"
ROPES = {  # by rope_type: the fields of its numbers; a dynamic one is plain up to max_position_embeddings
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor", LENGTH),
    "llama3": ("factor", LENGTH, "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
FIELDS_OF_ROPE = {
    "factor": (float, 1, 1 << 30), LENGTH: (int, 1, 1 << 30), "low_freq_factor": (float, 1, 1),
    "high_freq_factor": (float, 4, 4),
}  # fmt: skip

# Other fields that are read or forbidden, by the rules of runs/rules.py; those of one key obey the rule of that key
NO_FLAGS = ("attention_bias?", "qkv_bias?", "mlp_bias?", "scale_attn_by_inverse_layer_idx?")
FIELDS: dict[str, Any] = {
    "full_attention_interval?": (int, 1, 10_000),
    "layer_types?": [(str, 1, 99), 1, 10_000],
    "rope_scaling?": (dict, 0, 99),
    "rope_parameters?": (dict, 0, 99),
    f"{LENGTH}?": (int, 1, 1 << 30),
    "use_sliding_window?": Rule(bool),
    "sliding_window?": (int, 1, 1 << 30, None),  # null is no window, and where it is missing the family has its own
    "max_window_layers?": (int, 0, 10_000),
    "no_rope_layers?": [(int, 0, 1), 1, 10_000],
    "no_rope_layer_interval?": (int, 1, 10_000),
    **dict.fromkeys(NO_FLAGS, families_linear.NO),
    "scale_attn_weights?": Rule(bool, choices=(True,)),
    "hidden_act?": {"silu"},  # the MLP of these is a swiglu here
    "activation_function?": {"gelu", "gelu_new", "gelu_pytorch_tanh"},  # and that of GPT-2 a gelu, exact or by tanh
    "linear_conv_kernel_dim?": (int, 4, 4),
    "quantization_config?": Rule(dict, choices=({},)),  # take the folder of the weights that are not quantised
}


def family_of(config: dict) -> str:
    """A key of FAMILIES, or of those in families_linear.py. Raises UserError for a model that is not read."""
    if isinstance(config, dict) and "ssm_cfg" in config:
        return "mamba_ssm"
    if wrong := wrong_field(config, {"model_type": FAMILIES.keys() | families_linear.FAMILIES.keys() - {"mamba_ssm"}}):
        raise UserError(wrong)
    return config["model_type"]


def keys_of(config: dict, block_size: int) -> dict[str, Any]:
    """The keys of GPTConfig for a config.json of theirs. Raises UserError for what the model here does not have. No
    field is null but sliding_window, where that is no window, and not the family's."""
    family = family_of(config)
    if family in families_linear.FAMILIES:
        return families_linear.keys_of(config, family, block_size)
    optional = ("tie_embeddings", "norm_eps", "n_kv_head", *FAMILIES[family].optional)
    keys = families_linear.checked(config, FAMILIES[family].keys, FIELDS, optional)
    if family in ("gpt2", "nanogpt"):
        mlp = "gelu" if config.get("activation_function") == "gelu" else "gelu_tanh"
        more = dict(mlp_width=4 * config["n_embd"], norm_eps=1e-5, n_kv_head=config["n_head"], tie_embeddings=True)
        more |= dict(mlp=mlp, norm="layer", bias=True, position="learned")
    else:
        more = rope_keys(config, family) | layer_keys(config, family)
    return more | keys | {"block_size": min(block_size, keys["block_size"])}


def rope_keys(config: dict, family: str) -> dict[str, Any]:
    """The keys that say more than a field of the config.json of a model with RoPE does, and defaults of others."""
    is_gated = family in GATED
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # there, the old spelling hides the new
    rope = config.get(name, {})
    kind, always = rope.get("rope_type", rope.get("type", "default")), FAMILIES[family].always
    allowed = ["default"] if family in PARTIAL else list(ROPES)
    if kind not in allowed or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"{name}={show(rope)}: {family} has {' or '.join(allowed)} RoPE here, the same in all layers")
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25 if is_gated else 1.0))
    if fraction != 1 and family not in PARTIAL:
        words = f"{family} of transformers turns all channels of a head"
        raise UserError(f"partial_rotary_factor={show(fraction)}: {words}")
    keys = {
        "norm_eps": 1e-6,
        "n_kv_head": config["num_attention_heads"],
        "tie_embeddings": False,
        "mlp": "swiglu",
        "qk_norm": config.get("use_qk_norm", True) if family == "qwen3" else is_gated,
        **always,
        "rope_base": rope.get("rope_theta", config.get("rope_theta", always.get("rope_base", 10000.0))),
        "rope_fraction": fraction,
    }
    if kind == "default":
        return keys
    length = config.get(LENGTH, rope.get(LENGTH, config["max_position_embeddings"]))  # beside the dict it counts more
    fields = {name: FIELDS_OF_ROPE[name] for name in ROPES[kind]}
    if wrong := wrong_field({LENGTH: length} | rope, fields, "rope"):
        raise UserError(wrong)
    if other := sorted(rope.keys() - fields.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}):
        raise UserError(f"rope_type={kind!r}: its {other[0]}={show(rope[other[0]])} is not read")
    keys |= {} if kind == "dynamic" else {"rope_scaling": kind, "rope_factor": rope["factor"]}
    return keys | ({"rope_length": length} if kind in WITH_ROPE_LENGTH else {})


def layer_keys(config: dict, family: str) -> dict[str, Any]:
    """The keys that differ by layer: its mixer, its gate, its window, and whether it has RoPE. Raises UserError."""
    n_layer, is_gated = config["num_hidden_layers"], family in GATED
    every = config.get("full_attention_interval", 4) if is_gated else 1
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(n_layer)]
    ropes = [1] * n_layer
    if family == "smollm3":
        every = config.get("no_rope_layer_interval", 4)
        ropes = config.get("no_rope_layers", [(i + 1) % every for i in range(n_layer)])[:n_layer]
    if len(ropes) < n_layer:
        raise UserError(f"no_rope_layers={show(ropes)}: must have a number for each of {n_layer} layers")
    has_windows = family in ALL_LAYERS or (family in BY_LAYER and config.get("use_sliding_window"))
    window = config.get("sliding_window", FAMILIES[family].window) if has_windows else None
    if window:
        first = 0 if family in ALL_LAYERS else config.get("max_window_layers", 28)
        has_window = [not ropes[i] if family == "smollm3" else i >= first for i in range(n_layer)]
        default = ["sliding_attention" if x else "full_attention" for x in has_window]
    types = config.get("layer_types", default)
    asked = [name for name in ("elementwise", "headwise") if config.get(f"{name}_attn_output_gate")]
    gate = "elementwise" if is_gated else asked[0] if asked and family == "qwen3" else "none"
    layers = {} if window and family in ALL_LAYERS else {"full_attention": ("softmax", gate, "none")}
    layers |= {"sliding_attention": ("softmax", gate, str(window))} if window else {}
    layers |= {"linear_attention": ("gated_deltanet", "native", "none")} if is_gated else {}
    if len(types) != n_layer or not layers.keys() >= set(types):
        allowed = " or ".join(layers)
        raise UserError(f"layer_types={show(types)}: must be {allowed} for each of {n_layer} layers")
    words = [(*layers[kind], "rope" if has_rope else "none") for kind, has_rope in zip(types, ropes, strict=True)]
    return families_linear.by_layer(("attention", "gate", "window", "position"), words)


class Part(NamedTuple):
    """Tensors of theirs and of ours that hold the same blocks of rows, each block named by a letter. A tensor has the
    rows of each of its blocks in group 0, then those in group 1 ..."""

    theirs: dict[str, tuple[int, str]]  # {name: (groups, blocks)}
    ours: dict[str, tuple[int, str]]
    sizes: dict[str, int]  # rows of a block; none where a tensor keeps its rows
    translation: tuple[Callable, Callable]  # of the numbers: theirs to ours, ours to theirs

    def to_ours(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(map(self.translation[0], rearranged(weights, self.theirs, self.ours, self.sizes)))

    def to_theirs(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        return rearranged(map(self.translation[1], weights), self.ours, self.theirs, self.sizes)


def parts_of(config: GPTConfig, family: str, names: Iterable[str]) -> Iterator[Part]:
    """Yields every Part of the model, each tensor in one of them. names: those of our tensors."""
    layers, is_linear, shared = config.layers(), family in families_linear.FAMILIES, {}
    table = families_linear.FAMILIES[family] if is_linear else FAMILIES[family].names
    for i, (mixer, gate) in enumerate(layers):
        for theirs, ours, sizes in shared_rows(config, family, mixer, gate):
            for kind in ("weight", "bias"):
                there = {f"{table['^blocks']}.{i}.{name}.{kind}": blocks for name, blocks in theirs.items()}
                here = {f"blocks.{i}.{name}.{kind}": blocks for name, blocks in ours.items()}
                shared |= dict.fromkeys(here, (there, here, sizes))
    for name in names:
        theirs = name
        if name.startswith("blocks") and not is_linear:
            theirs = name.replace("mixer", layers[int(name.split(".")[1])][0])
        for pattern, replacement in table.items():
            theirs = re.sub(pattern, replacement, theirs)
        there, here, sizes = shared.get(name, ({theirs: (1, "")}, {name: (1, "")}, {}))
        if name == next(iter(here)):  # the others come with the first
            yield Part(there, here, sizes, translation(name, family, config.block_size))


def shared_rows(config: GPTConfig, family: str, mixer: str, gate: Any) -> Iterator[tuple[dict, dict, dict]]:
    """The weights of a layer whose rows are shared out otherwise there: the first three fields of Part, each name
    without its layer and kind. The model need not have all of them.

    Softmax: q_proj may have the rows of the gate (g). Gated DeltaNet: ours has q, k, v, beta and dt in in_proj, and its
    gate z apart; Mamba-2's has all but the gate.
    """
    is_of_fla, (Hk, H, Dk, Dv) = family in families_linear.MIXERS, config.delta_sizes
    sizes = {"q": Hk * Dk, "k": Hk * Dk, "v": H * Dv, "z": H * Dv, "b": H, "a": H}
    if family == "phi3":
        sizes = dict.fromkeys("gu", config.mlp_width)
        yield {"mlp.gate_up_proj": (1, "gu")}, {"mlp.glu": (1, "g"), "mlp.up": (1, "u")}, sizes
    elif mixer == "mamba2":
        H = config.expand * config.n_head
        sizes = {"z": H * config.head_dim, "x": H * config.head_dim + 2 * config.n_groups * config.state_size + H}
        yield {"mixer.in_proj": (1, "zx")}, {"mixer.in_proj": (1, "x"), "mixer.gates.native.proj": (1, "z")}, sizes
    elif mixer == "softmax" and family not in ("gpt2", "nanogpt"):
        H, Hk, D = config.n_head, config.n_kv_head or config.n_head, config.head_dim
        granularity, place = gate.positions.get("readout", "none"), "attn" if is_of_fla else "self_attn"
        sizes = {"q": H * D, "k": Hk * D, "v": Hk * D, "g": H if granularity == "headwise" else H * D}
        in_q_proj = (1, "q") if granularity == "none" else (H if family in GATED else Hk, "qg")
        theirs = {f"{place}.q_proj": in_q_proj, f"{place}.k_proj": (1, "k"), f"{place}.v_proj": (1, "v")}
        with_gate = {} if granularity == "none" else {"mixer.gates.readout.proj": (1, "g")}
        yield theirs, {"mixer.qkv": (1, "qkv")} | with_gate, sizes
    elif is_of_fla:
        in_proj = "qkvba" if mixer == "gated_deltanet" else "qkvb"
        for ours, theirs, blocks in (("qkv", "proj", "qkv"), ("in_proj", "proj", in_proj), ("conv", "conv1d", "qkv")):
            yield {f"attn.{block}_{theirs}": (1, block) for block in blocks}, {f"mixer.{ours}": (1, blocks)}, sizes
    elif mixer == "gated_deltanet":
        layout = {"qkvz": Hk, "ba": Hk} if family == "qwen3_next" else {"qkv": 1, "b": 1, "a": 1, "z": 1}
        theirs = {f"linear_attn.in_proj_{blocks}": (groups, blocks) for blocks, groups in layout.items()}
        yield theirs, {"mixer.in_proj": (1, "qkvba"), "mixer.gates.native.proj": (1, "z")}, sizes


def translation(name: str, family: str, block_size: int) -> tuple[Callable, Callable]:
    """(theirs to ours, ours to theirs) of a tensor of ours."""
    if name == "wpe.weight":  # as many positions as are kept
        return lambda w: w[:block_size], lambda w: w
    if family == "gpt2" and name.startswith("blocks"):
        return torch.t, torch.t  # linear layers are (inputs, outputs) there; vectors stay as they are
    if name.endswith("mixer.conv.weight"):  # (channels, 1, width), ours (width, channels)
        return lambda w: w.squeeze(1).T, lambda w: w.T[:, None]
    if family in GATED and "norm" in name and "mixer.norm" not in name:  # in bfloat16 the sum would lose digits
        return lambda w: at_least_float32(w) + 1, lambda w: at_least_float32(w) - 1
    return lambda w: w, lambda w: w


def rearranged(weights: Iterable[torch.Tensor], before: dict, after: dict, sizes: dict) -> list[torch.Tensor]:
    """The rows of weights in the layout `before` in the layout `after`, both {name: (groups, blocks)}."""
    if not sizes:
        return list(weights)  # without a copy: they may be mapped
    rows = {}  # of each block: (groups, rows of a group, inputs), then without groups
    for weight, (groups, blocks) in zip(weights, before.values(), strict=True):
        parts = weight.unflatten(0, (groups, -1)).split([sizes[block] // groups for block in blocks], dim=1)
        rows |= {block: part.flatten(0, 1) for block, part in zip(blocks, parts, strict=True)}
    return [
        torch.cat([rows[block].unflatten(0, (groups, -1)) for block in blocks], dim=1).flatten(0, 1)
        for groups, blocks in after.values()
    ]
