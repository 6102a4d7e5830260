"""The families of transformers that are read and written: their config.json and tensors, and our keys and tensors.

    keys_of(config, block_size)                 a config.json of theirs -> keys of GPTConfig
    config_of(config, mlp_width, dtype)         the other way
    parts_of(config, family)                    which tensors of theirs hold the numbers of which tensors of ours

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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from model import GPTConfig
from runs.files import wrong_field

FAMILIES = ("llama", "qwen3", "qwen3_next", "qwen3_5_text", "gpt2")
WITH_NORMS_OF_ONE_PLUS = ("qwen3_next", "qwen3_5_text")
NOT_READ = {  # why a model_type that people ask for is refused
    "qwen2": "only its q, k and v have biases, and here all linear layers have one, or none",
    "mistral": "its attention may have a sliding window, and the model here has none",
}
# A table for each family: the fields of its config.json that are read, our key, if it is one alone, and the values that
# the field may have (files.wrong_field says how they are read). A field whose name ends in "?" may be missing.
COUNT, NUMBER, MAYBE = (int, 1, 1 << 40), (float, 0, 1e12), (int, 1, 1 << 40, None)
FLAG, WORD, LAYERS, ROPE = (bool, 0, 1), (str, 1, 99), (int, 1, 10_000), (dict, 0, 99, None)
FIELDS: dict[str, tuple] = {
    "num_hidden_layers": (LAYERS, "n_layer"),
    "num_attention_heads": (COUNT, "n_head"),
    "head_dim?": (MAYBE, "head_dim"),
    "num_key_value_heads?": (MAYBE, "n_kv_head"),
    "hidden_size": (COUNT, "n_embd"),
    "max_position_embeddings": (COUNT, "block_size"),
    "vocab_size": (COUNT, "vocab_size"),
    "intermediate_size": (COUNT, "mlp_width"),
    "tie_word_embeddings?": (FLAG, "tie_embeddings"),
    "rms_norm_eps?": (NUMBER, "norm_eps"),
    "hidden_act?": (WORD,),
    "rope_theta?": (NUMBER,),
    "rope_scaling?": (ROPE,),
    "rope_parameters?": (ROPE,),
    "partial_rotary_factor?": ((float, 0, 1),),
    "layer_types?": ([WORD, 1, 10_000],),
    "full_attention_interval?": (COUNT,),
    "num_experts?": ((int, 0, 1 << 40, None),),
    "decoder_sparse_step?": (COUNT,),
    "mlp_only_layers?": ([(int, 0, 10_000), 0, 10_000],),
}
FIELDS_OF_DELTA: dict[str, tuple] = {
    "linear_num_value_heads?": (COUNT, "delta_heads"),
    "linear_num_key_heads?": (COUNT, "delta_key_heads"),
    "linear_key_head_dim?": (COUNT, "delta_key_dim"),
    "linear_value_head_dim?": (COUNT, "delta_value_dim"),
    "linear_conv_kernel_dim?": (COUNT,),
}
FIELDS_OF_GPT2: dict[str, tuple] = {
    "n_layer": (LAYERS, "n_layer"),
    "n_head": (COUNT, "n_head"),
    "n_embd": (COUNT, "n_embd"),
    "n_positions": (COUNT, "block_size"),
    "vocab_size": (COUNT, "vocab_size"),
    "n_inner?": (COUNT, "mlp_width"),
    "tie_word_embeddings?": (FLAG, "tie_embeddings"),
    "layer_norm_epsilon?": (NUMBER, "norm_eps"),
    "activation_function?": (WORD,),
    "scale_attn_weights?": (FLAG,),
    "scale_attn_by_inverse_layer_idx?": (FLAG,),
}


def names_of(fields: dict[str, tuple]) -> dict[str, str]:
    """{our key: their name}"""
    return {ours[0]: name.rstrip("?") for name, (_, *ours) in fields.items() if ours}


NAMES, NAMES_OF_DELTA, NAMES_OF_GPT2 = names_of(FIELDS), names_of(FIELDS_OF_DELTA), names_of(FIELDS_OF_GPT2)
ALIASES_OF_GPT2 = {NAMES[key]: NAMES_OF_GPT2[key] for key in ("n_embd", "n_layer", "n_head", "block_size")}


# ----------------------------------------------------------------------------------------------------------------------
# Their config.json and our keys


def family_of(config: dict) -> str:
    """One of FAMILIES. Raises UserError, with the reason, for a model that is not read."""
    kind = config.get("model_type")
    if kind in FAMILIES:
        return kind
    if isinstance(kind, str) and "moe" in kind or kind == "mixtral":
        raise UserError(f"model_type={show(kind)}: a mixture of experts, and every block here has one MLP")
    reason = NOT_READ.get(kind, "not read here") if isinstance(kind, str) else "must be a text"
    raise UserError(f"model_type={show(kind)}: {reason} ({', '.join(FAMILIES)} are read)")


def keys_of(config: dict, block_size: int) -> dict[str, Any]:
    """The keys of GPTConfig for a config.json of theirs. Raises UserError for what the model here does not have."""
    family = family_of(config)
    fields = FIELDS_OF_GPT2 if family == "gpt2" else FIELDS | FIELDS_OF_DELTA
    if wrong := wrong_field(config, {name: rule for name, (rule, *_) in fields.items()}):
        raise UserError(wrong)
    if config.get("quantization_config"):
        raise UserError("quantization_config: its weights are quantised; take the folder of those that are not")
    if family == "gpt2":
        return gpt2_keys(config, block_size)
    is_gated = family in WITH_NORMS_OF_ONE_PLUS
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act={show(config['hidden_act'])}: the MLP here is a swiglu, whose activation is silu")
    if biased := [name for name in ("attention_bias", "qkv_bias", "mlp_bias") if config.get(name)]:
        raise UserError(f"{biased[0]}: its linear layers have biases, which are read of GPT-2 alone")
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # there, the old spelling hides the new
    rope = config.get(name, {})
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling != "default":
        raise UserError(f"{name}: RoPE scaled by {show(scaling)}, and only plain RoPE is read")
    if kind := next((kind for kind, value in rope.items() if isinstance(value, dict)), None):
        raise UserError(f"{name}: {show(kind)} has a RoPE of its own, and here all layers have one")
    base = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25 if is_gated else 1.0))
    if wrong := wrong_field([base, fraction], [NUMBER, 2, 2], "rope"):
        raise UserError(wrong)
    if fraction != 1 and not is_gated:
        raise UserError(f"partial_rotary_factor={fraction}: {family} of transformers turns all channels of a head")
    n_layer, n_head, width = config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"]
    if family == "llama" and width % n_head:
        raise UserError(f"hidden_size={width}: in llama a multiple of num_attention_heads={n_head}")
    experts = n_layer if config.get("num_experts") is None and family == "qwen3_next" else config.get("num_experts")
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    if experts and any((i + 1) % step == 0 and i not in dense for i in range(n_layer)):
        raise UserError("num_experts: a mixture of experts, and every block here has one MLP")
    if config.get("head_dim") is None and family != "llama":
        raise UserError("it has no head_dim")

    given = {"rms_norm_eps": 1e-6, "num_key_value_heads": n_head, "head_dim": width // n_head} | config
    return {
        **{key: given[name] for key, name in NAMES.items()},
        "block_size": min(block_size, config["max_position_embeddings"]),
        "mlp": "swiglu",
        "rope_base": base,
        "rope_fraction": fraction,
        "qk_norm": config.get("use_qk_norm", True) if family == "qwen3" else is_gated,
        **layers_of(config, family),
    }


def gpt2_keys(config: dict, block_size: int) -> dict[str, Any]:
    """keys_of for GPT-2, whose config.json has names of its own."""
    for alias, name in ALIASES_OF_GPT2.items():
        if config.get(alias, config[name]) != config[name]:
            raise UserError(f"{alias}={show(config[alias])}: a second name of {name}, which is {config[name]}")
    gelu = config.get("activation_function", "gelu_new")
    mlp = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}.get(gelu)
    if mlp is None:
        raise UserError(f"activation_function={show(gelu)}: the MLP here has a gelu, exact or by tanh (gelu_new)")
    if not config.get("scale_attn_weights", True) or config.get("scale_attn_by_inverse_layer_idx"):
        raise UserError(
            "scale_attn_weights, scale_attn_by_inverse_layer_idx: scores are scaled by the width alone here"
        )
    given = {"n_inner": 4 * config["n_embd"], "layer_norm_epsilon": 1e-5} | config
    return {
        **{key: given[name] for key, name in NAMES_OF_GPT2.items()},
        "n_kv_head": config["n_head"],
        "block_size": min(block_size, config["n_positions"]),
        "mlp": mlp,
        "norm": "layer",
        "bias": True,
        "position": "learned",
    }


def layers_of(config: dict, family: str) -> dict[str, Any]:
    """The keys that say which mixer and which gate each layer has. Raises UserError."""
    n_layer, is_gated = config["num_hidden_layers"], family in WITH_NORMS_OF_ONE_PLUS
    every = config.get("full_attention_interval", 4) if is_gated else 1
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(n_layer)]
    types = config.get("layer_types", default)
    mixers = {"full_attention": "softmax"} | ({"linear_attention": "gated_deltanet"} if is_gated else {})
    if len(types) != n_layer:
        raise UserError(f"layer_types: {len(types)} for {n_layer} layers")
    if unknown := next((kind for kind in types if kind not in mixers), None):
        raise UserError(f"layer_types: {show(unknown)} is not read ({' and '.join(mixers)} are)")
    if config.get("use_sliding_window"):
        raise UserError("use_sliding_window: its attention has a sliding window, and the model here has none")
    asked = [name for name in ("elementwise", "headwise") if config.get(f"{name}_attn_output_gate")]
    gate = "elementwise" if is_gated else asked[0] if asked and family == "qwen3" else "none"
    gates = {"full_attention": gate, "linear_attention": "native"}
    period = next(n for n in range(1, n_layer + 1) if all(types[i] == types[i % n] for i in range(n_layer)))
    keys: dict[str, Any] = {
        "attention": ",".join(mixers[kind] for kind in types[:period]),
        "gate": ",".join(gates[kind] for kind in types[:period]),
    }
    if "linear_attention" not in types:
        return keys
    if config.get("linear_conv_kernel_dim", 4) != 4:
        raise UserError(f"linear_conv_kernel_dim={config['linear_conv_kernel_dim']}: gated_deltanet's width is 4")
    if missing := next((name for name in NAMES_OF_DELTA.values() if name not in config), None):
        raise UserError(f"it has no {missing}")
    return keys | {ours: config[name] for ours, name in NAMES_OF_DELTA.items()}


CLASSES = {  # of transformers that are written
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def config_of(config: GPTConfig, mlp_width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Their config.json for a model of ours. Whether it says all of the model is seen by reading it back."""
    layers, delta = config.layers(), ("delta_key_heads", "delta_heads", "delta_key_dim", "delta_value_dim")
    keys: dict[str, Any] = dataclasses.asdict(config) | dict(zip(delta, config.delta_sizes, strict=True))
    keys |= {"n_kv_head": config.n_kv_head or config.n_head, "mlp_width": mlp_width}
    has_gate = any(gate.native or gate.positions for _, gate in layers)
    family = "qwen3_next" if has_gate else "qwen3" if config.qk_norm else "llama"
    if config.norm == "layer":
        family = "gpt2"
    names = NAMES_OF_GPT2 if family == "gpt2" else NAMES
    about = {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "dtype": str(dtype).removeprefix("torch."),
        **{theirs: keys[ours] for ours, theirs in names.items()},
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
    kinds = {"softmax": "full_attention", "gated_deltanet": "linear_attention"}
    return about | {
        **{theirs: keys[ours] for ours, theirs in NAMES_OF_DELTA.items()},
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": config.rope_fraction,
        "layer_types": [kinds.get(mixer, mixer) for mixer, _ in layers],
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


def split_rows(weight: torch.Tensor, groups: int, sizes: list[int]) -> list[torch.Tensor]:
    """Several weights whose rows lie in one, interleaved: the rows of each in group 0, then those in group 1 ..."""
    parts = weight.unflatten(0, (groups, -1)).split([size // groups for size in sizes], dim=1)
    return [part.flatten(0, 1) for part in parts]


def join_rows(weights: list[torch.Tensor], groups: int) -> torch.Tensor:
    """The inverse of split_rows."""
    return torch.cat([weight.unflatten(0, (groups, -1)) for weight in weights], dim=1).flatten(0, 1)


def rows_part(theirs: dict[str, tuple[int, list[str]]], ours: dict[str, list[str]], sizes: dict[str, int]) -> Part:
    """Linear layers that share out the same blocks of rows otherwise; sizes: the rows of each block.

    theirs: {name: (groups, its blocks, interleaved in so many groups)}; ours: {name: its blocks, one after the other}
    """

    def to_ours(weights):
        rows = {}
        for weight, (groups, blocks) in zip(weights, theirs.values(), strict=True):
            parts = split_rows(weight, groups, [sizes[block] for block in blocks])
            rows |= dict(zip(blocks, parts, strict=True))
        return [torch.cat([rows[block] for block in blocks]) for blocks in ours.values()]

    def to_theirs(weights):
        rows = {}
        for weight, blocks in zip(weights, ours.values(), strict=True):
            rows |= dict(zip(blocks, weight.split([sizes[block] for block in blocks]), strict=True))
        return [join_rows([rows[block] for block in blocks], groups) for groups, blocks in theirs.values()]

    return Part(list(theirs), list(ours), to_ours, to_theirs)


def parts_of(config: GPTConfig, family: str) -> Iterator[Part]:
    """Yields every Part of the model, each tensor in one of them."""
    if family == "gpt2":
        yield from gpt2_parts(config)
        return

    def norm(theirs: str, ours: str) -> Part:
        if family not in WITH_NORMS_OF_ONE_PLUS:
            return Part([theirs], [ours])
        # in bfloat16 the sum would lose digits
        return Part([theirs], [ours], lambda w: [w[0].float() + 1], lambda w: [w[0].float() - 1])

    yield Part(["model.embed_tokens.weight"], ["wte.weight"])
    if not config.tie_embeddings:
        yield Part(["lm_head.weight"], ["head.weight"])
    yield norm("model.norm.weight", "norm.weight")
    for i, (mixer, gate) in enumerate(config.layers()):
        theirs, ours = f"model.layers.{i}.", f"blocks.{i}."
        yield norm(f"{theirs}input_layernorm.weight", f"{ours}norm_1.weight")
        yield norm(f"{theirs}post_attention_layernorm.weight", f"{ours}norm_2.weight")
        for their, our in (("gate_proj", "glu"), ("up_proj", "up"), ("down_proj", "down")):
            yield Part([f"{theirs}mlp.{their}.weight"], [f"{ours}mlp.{our}.weight"])
        if mixer == "gated_deltanet":
            yield from delta_parts(config, family, f"{theirs}linear_attn.", f"{ours}mixer.")
        else:
            granularity = gate.positions.get("readout", "none")
            yield softmax_part(config, family, granularity, f"{theirs}self_attn.", f"{ours}mixer.")
            yield Part([f"{theirs}self_attn.o_proj.weight"], [f"{ours}mixer.out_proj.weight"])
            for name in ("q_norm", "k_norm") if config.qk_norm else ():
                yield norm(f"{theirs}self_attn.{name}.weight", f"{ours}mixer.{name}.weight")


def gpt2_parts(config: GPTConfig) -> Iterator[Part]:
    """The parts of a GPT-2. Its positions are as many as are kept."""
    yield Part(["transformer.wte.weight"], ["wte.weight"])
    yield Part(["transformer.wpe.weight"], ["wpe.weight"], lambda w: [w[0][: config.block_size]])
    if not config.tie_embeddings:
        yield Part(["lm_head.weight"], ["head.weight"])
    pairs = [("transformer.ln_f", "norm")]
    names = {
        "ln_1": "norm_1",
        "ln_2": "norm_2",
        "attn.c_attn": "mixer.qkv",  # the rows of q, of k and of v, as ours
        "attn.c_proj": "mixer.out_proj",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    }
    for i in range(config.n_layer):
        pairs += [(f"transformer.h.{i}.{their}", f"blocks.{i}.{our}") for their, our in names.items()]
    for their, our in pairs:
        for name in ("weight", "bias"):  # t() leaves vectors as they are
            yield Part([f"{their}.{name}"], [f"{our}.{name}"], lambda w: [w[0].t()], lambda w: [w[0].t()])


def softmax_part(config: GPTConfig, family: str, granularity: str, theirs: str, ours: str) -> Part:
    """q_proj, which may have the gate's rows, k_proj and v_proj."""
    H, Hk, D = config.n_head, config.n_kv_head or config.n_head, config.head_dim
    sizes = {
        "q": H * D,
        "k": Hk * D,
        "v": Hk * D,
        "gate": {"none": 0, "headwise": H, "elementwise": H * D}[granularity],
    }
    of_ours, in_q_proj = {f"{ours}qkv.weight": ["q", "k", "v"]}, ["q"]
    if granularity != "none":
        of_ours[f"{ours}gates.readout.proj.weight"] = ["gate"]
        in_q_proj.append("gate")
    groups = H if family in WITH_NORMS_OF_ONE_PLUS else Hk
    of_theirs = {"q": (groups, in_q_proj), "k": (1, ["k"]), "v": (1, ["v"])}
    return rows_part({f"{theirs}{name}_proj.weight": rows for name, rows in of_theirs.items()}, of_ours, sizes)


def delta_parts(config: GPTConfig, family: str, theirs: str, ours: str) -> Iterator[Part]:
    """The parts of a Gated DeltaNet. Ours has rows [q, k, v, beta, dt] in in_proj, and its gate z apart."""
    Hk, H, Dk, Dv = config.delta_sizes
    sizes = {"q": Hk * Dk, "k": Hk * Dk, "v": H * Dv, "z": H * Dv, "b": H, "a": H}
    of_ours = {f"{ours}in_proj.weight": [*"qkvba"], f"{ours}gates.native.proj.weight": ["z"]}
    of_theirs = (("qkvz", Hk), ("ba", Hk)) if family == "qwen3_next" else (("qkv", 1), ("b", 1), ("a", 1), ("z", 1))
    yield rows_part({f"{theirs}in_proj_{rows}.weight": (n, [*rows]) for rows, n in of_theirs}, of_ours, sizes)
    conv = [f"{theirs}conv1d.weight"], [f"{ours}conv.weight"]  # theirs (channels, 1, width), ours (width, channels)
    yield Part(*conv, lambda w: [w[0].squeeze(1).T], lambda w: [w[0].T[:, None]])
    for name in ("dt_bias", "A_log", "norm.weight", "out_proj.weight"):
        yield Part([theirs + name], [ours + name])
