"""The linear and state space models that are read or written: their config.json and tensors, and our keys and tensors.

| family                        | what is special                                                                    |
|-------------------------------|------------------------------------------------------------------------------------|
| gla, gated_deltanet,          | of fla: q, k and v have a weight and a convolution each, which are one here; some  |
| delta_net, kda                | layers may be softmax (`attn`)                                                     |
| mamba2                        | of transformers and of fla, which spell some fields differently; no MLP; in_proj   |
|                               | begins with the rows of the gate                                                   |
| mamba_ssm                     | its authors': those tensors in a pickle, and a config.json without a model_type    |
"""

import math
from typing import Any

from configurator import UserError, rules_of, show
from gate import LayerGate
from model import MIXERS as OURS
from model import GPTConfig
from runs.rules import Rule, wrong_field

# Names of tensors: each of ours is replaced by theirs, in turn.
NAMES = {
    "^wte": "model.embeddings", "^head": "lm_head", "^norm": "model.norm", "^blocks": "model.layers",
    "norm_1": "attn_norm", "norm_2": "mlp_norm", "mlp.glu": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj", "mixer.out_proj": "attn.o_proj", "mixer.norm": "attn.o_norm",
    "mixer.gates.(native|readout).proj": "attn.g_proj", "mixer.(A_log|dt_bias)": r"attn.\1",
}  # fmt: skip
NAMES_OF_GLA = {"mixer.norm": "attn.g_norm", "mixer.decay_in": "attn.gk_proj.0", "mixer.decay_out": "attn.gk_proj.1"}
NAMES_OF_KDA = {
    "mixer.decay_in": "attn.f_proj.0", "mixer.decay_out": "attn.f_proj.1",
    "mixer.gates.native.down": "attn.g_proj.0", "mixer.gates.(native|readout).proj": "attn.g_proj.1",
}  # fmt: skip
NAMES_OF_MAMBA2 = {
    "^wte": "backbone.embeddings", "^head": "lm_head", "^norm": "backbone.norm_f", "^blocks": "backbone.layers",
    "norm_1": "norm", "mixer.conv": "mixer.conv1d",
}  # fmt: skip

FAMILIES = {  # {family: names of its tensors}; all but mamba_ssm are a model_type
    "gla": NAMES | NAMES_OF_GLA,
    "gated_deltanet": NAMES,
    "delta_net": NAMES,
    "kda": NAMES | NAMES_OF_KDA,
    "mamba2": NAMES_OF_MAMBA2,
    "mamba_ssm": NAMES_OF_MAMBA2,
}
MIXERS = {"gla": "gla", "gated_deltanet": "gated_deltanet", "delta_net": "deltanet", "kda": "kda"}  # of fla's families
BY_HEAD = ("gated_deltanet", "kda")  # widths are multiples of head_dim; those of others, of hidden_size

# Fields of config.json, by the rules of runs/rules.py: those of one key obey the rule of that key
NO, YES, NONE = Rule(bool, choices=(False,)), Rule(bool, choices=(True,)), Rule(str, choices=(None,))
NUMBER, SIZE = Rule(float, above=0, at_most=1 << 30), (int, 1, 1 << 30)
KEYS = dict(  # {our key: their field}
    n_layer="num_hidden_layers", n_embd="hidden_size", vocab_size="vocab_size", norm_eps="norm_eps",
    tie_embeddings="tie_word_embeddings",
)  # fmt: skip
DEFAULTS = dict(  # of fla, for what a config.json leaves out
    hidden_ratio=4, norm_eps=1e-6, tie_word_embeddings=False, conv_size=4, use_short_conv=True, allow_neg_eigval=False,
    max_position_embeddings=2048, output_gate_activation="swish",
)  # fmt: skip
DEFAULTS_OF = {
    "gla": dict(expand_k=0.5, expand_v=1.0, use_short_conv=False, use_output_gate=True),
    "gated_deltanet": dict(expand_v=2.0, use_gate=True),
    "delta_net": dict(expand_k=1.0, expand_v=1.0, use_gate=False),
    "kda": dict(expand_v=1.0),
}
FIELDS_OF_FLA: dict[str, Any] = {
    "hidden_ratio": NUMBER, "intermediate_size?": SIZE, "conv_size": (int, 1, 1024), "use_short_conv": Rule(bool),
    "allow_neg_eigval": Rule(bool), "max_position_embeddings": SIZE,
    "output_gate_activation": {"swish", "silu", "sigmoid"}, "num_heads": SIZE, "num_v_heads?": SIZE,
    "expand_k?": NUMBER, "expand_v": NUMBER,
    "use_gate?": Rule(bool), "use_output_gate?": Rule(bool), "hidden_act?": {"swish"}, "attnres_block_size?": NONE,
    "feature_map?": NONE, "clamp_min?": NONE, "elementwise_affine?": YES, "qk_norm?": {"l2"},
    "qk_activation?": {"silu"}, "use_beta?": YES, "safe_gate?": NO, "lower_bound?": NONE,
    "attn?": {  # softmax layers
        "layers": [(int, 0, 10_000), 0, 10_000], "num_heads": SIZE, "num_kv_heads?": SIZE, "qkv_bias?": NO,
        "window_size?": SIZE, "rope_theta?": Rule(float, above=1),
    },
}  # fmt: skip
NO_LIMIT = Rule(list, choices=([0.0, math.inf], [0.0, {"__float__": "Infinity"}]))  # Infinity is no JSON
FIELDS_OF_MAMBA2: dict[str, Any] = {
    "num_heads": SIZE, "use_bias?": NO, "use_conv_bias?": YES, "hidden_act?": {"silu", "swish"}, "rmsnorm?": Rule(bool),
    "norm_before_gate?": NO, "D_has_hdim?": NO, "time_step_limit?": NO_LIMIT, "dt_limit?": NO_LIMIT,
}  # fmt: skip
KEYS_OF_MAMBA2 = KEYS | dict(
    head_dim="head_dim", state_size="state_size", expand="expand", n_groups="n_groups", short_conv="conv_kernel"
)

# what the config.json of Mamba-2's authors calls the fields of transformers, with the defaults of their code
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


def keys_of(config: dict, family: str, block_size: int) -> dict[str, Any]:
    """The keys of GPTConfig for a config.json of theirs. Raises UserError for what the model here does not have."""
    if family in MIXERS:
        if isinstance(config.get("attn"), dict):
            config = config | {"attn": {name: x for name, x in config["attn"].items() if x is not None}}
        return fla_keys(DEFAULTS | DEFAULTS_OF[family] | config, family, block_size)
    return mamba2_keys(of_authors(config) if family == "mamba_ssm" else config, block_size)


def checked(config: dict, keys: dict[str, str], fields: dict, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keys that are one field each. Raises UserError where those, or other fields, disobey their rules."""
    rules = rules_of(GPTConfig)
    of_keys = {field + "?" * (key in optional): rules[key] for key, field in keys.items()}
    if wrong := wrong_field(config, of_keys | fields):
        raise UserError(wrong)
    return {key: config[field] for key, field in keys.items() if field in config}


def fla_keys(config: dict, family: str, block_size: int) -> dict[str, Any]:
    keys = checked(config, KEYS, FIELDS_OF_FLA | ({"head_dim": SIZE} if family in BY_HEAD else {}))
    H, C, attn = config["num_heads"], keys["n_embd"], config.get("attn", {})
    # DeltaNet was published without a gate, and Gated DeltaNet with SiLU: others are written as gates of the readout
    is_native = family != "delta_net" and (family != "gated_deltanet" or config["output_gate_activation"] != "sigmoid")
    has_gate = config.get("use_output_gate" if family == "gla" else "use_gate", True) or family == "kda"
    linear = (MIXERS[family], "none" if not has_gate else "native" if is_native else "elementwise")
    layers = [("softmax", "none") if layer in attn.get("layers", ()) else linear for layer in range(keys["n_layer"])]
    width = config["head_dim"] if family in BY_HEAD else C / H
    key_dim, value_dim = (width * config.get(name, 1) for name in ("expand_k", "expand_v"))
    if any(abs(y - round(y)) > 1e-5 * y for y in (key_dim, value_dim)):
        raise UserError(f"expand_k, expand_v: a head would have {key_dim:g} key and {value_dim:g} value channels")
    if family == "gla" and any(heads != H for heads in (config.get("num_kv_heads", H), attn.get("num_heads", H))):
        raise UserError(f"num_kv_heads, attn.num_heads: the gla here needs num_heads={H} everywhere")
    short_conv = config["conv_size"] if config["use_short_conv"] else 0
    if short_conv and (family == "gla" or ("softmax", "none") in layers and short_conv != 4):
        raise UserError(f"conv_size={short_conv}: it would be in softmax layers, too, and without a SiLU in gla")
    heads, wide = attn.get("num_heads", H), -(-int(C * config["hidden_ratio"] * 2 / 3) // 256) * 256
    return keys | dict(
        n_head=heads, head_dim=max(1, C // heads), n_kv_head=attn.get("num_kv_heads"),  # of softmax layers
        rope_base=attn.get("rope_theta", 10000.0), window=str(attn.get("window_size", "none")),
        block_size=min(block_size, config["max_position_embeddings"]), **by_layer(("attention", "gate"), layers),
        gate_activation="silu" if family == "delta_net" else "sigmoid", native_bias=family == "kda",
        delta_heads=config.get("num_v_heads", H) if family in BY_HEAD else H, delta_key_heads=H,
        delta_key_dim=round(key_dim), delta_value_dim=round(value_dim), mlp="swiglu",
        short_conv=None if short_conv == 4 else short_conv,  # softmax layers have none unless it is named
        beta_max=2.0 if config["allow_neg_eigval"] else 1.0, mlp_width=config.get("intermediate_size", wide),
    )  # fmt: skip


def by_layer(names: tuple[str, ...], layers: list) -> dict[str, str]:
    """{name: its words}, as few as repeat up to the last layer. layers: of each layer, a word for every name."""
    n = next(n for n in range(1, len(layers) + 1) if all(x == layers[i % n] for i, x in enumerate(layers)))
    columns = zip(*layers[:n], strict=True)
    return {name: ",".join(x if len({*x}) > 1 else x[:1]) for name, x in zip(names, columns, strict=True)}


def mamba2_keys(config: dict, block_size: int) -> dict[str, Any]:
    names = KEYS_OF_MAMBA2 | ({} if "norm_eps" in config else {"norm_eps": "layer_norm_epsilon"})
    keys = checked({"tie_word_embeddings": False} | config, names, FIELDS_OF_MAMBA2)
    H, expand, inner = config["num_heads"], keys["expand"], keys["expand"] * keys["n_embd"]
    if H % expand or H * keys["head_dim"] != inner:
        raise UserError(f"num_heads={H}: must be a multiple of expand={expand}, and head_dim times it must be {inner}")
    return keys | dict(
        n_head=H // expand, pad_vocab_to=config.get("pad_vocab_size_multiple", 1), block_size=block_size,
        attention="mamba2", gate="native", mlp="none",
        readout_norm="published" if config.get("rmsnorm", True) else "none",
    )  # fmt: skip


def of_authors(config: dict) -> dict:
    """The config.json of Mamba-2's authors in the words of transformers. Raises UserError."""
    config = DEFAULTS_OF_AUTHORS | config
    if wrong := wrong_field(config, FIELDS_OF_AUTHORS):
        raise UserError(wrong)
    ssm = DEFAULTS_OF_SSM | config["ssm_cfg"]
    if unknown := sorted(ssm.keys() - AUTHORS.keys() - SAME):
        raise UserError(f"ssm_cfg.{unknown[0]}={show(ssm[unknown[0]])}: is not read")
    heads = {"num_heads": ssm["expand"] * config["d_model"] // ssm["headdim"]}
    return {AUTHORS.get(name, name): value for name, value in (config | ssm | heads).items()}


def layers_of(config: GPTConfig) -> list[tuple[str, LayerGate]]:
    """config.layers(), without `native` where a mixer was published without a gate: there it means none."""
    return [
        (mixer, gate._replace(native=gate.native and OURS[mixer].native_gate is not None))
        for mixer, gate in config.layers()
    ]


def config_of(config: GPTConfig, family: str, mlp_width: int | None) -> dict[str, Any]:
    """The fields of their config.json for a model of ours; what they cannot hold is left out."""
    if family == "mamba2":  # in the words of transformers, and norm_eps in fla's, too
        fields = {field: getattr(config, key) for key, field in KEYS_OF_MAMBA2.items()}
        fields |= {"layer_norm_epsilon": config.norm_eps, "num_heads": config.expand * config.n_head}
        return fields | dict(conv_kernel=config.short_conv or 4, use_bias=False, use_conv_bias=True, hidden_act="silu")
    Hk, H, Dk, Dv = config.delta_sizes
    Hk = config.n_head if family == "gla" else Hk
    is_softmax = [mixer == "softmax" for mixer, _ in config.layers()]
    gates = [gate for mixer, gate in layers_of(config) if mixer != "softmax"]
    has_gate, is_native = any(gate.native or gate.positions for gate in gates), any(gate.native for gate in gates)
    width = (0 if family == "gla" else 4) if config.short_conv is None else config.short_conv
    fields = {field: getattr(config, key) for key, field in KEYS.items()} | dict(
        max_position_embeddings=config.block_size, intermediate_size=mlp_width, hidden_act="swish", num_heads=Hk,
        use_short_conv=width > 0, conv_size=width or 4, allow_neg_eigval=config.beta_max == 2,
    )  # fmt: skip
    fields["use_output_gate" if family == "gla" else "use_gate"] = has_gate
    if family in BY_HEAD:
        fields |= dict(head_dim=Dk, num_v_heads=H, expand_v=factor(Dv, Dk))
    else:
        fields |= dict(expand_k=factor(Hk * Dk, config.n_embd), expand_v=factor(Hk * Dv, config.n_embd))
    if family == "gated_deltanet":
        fields["output_gate_activation"] = "swish" if is_native else "sigmoid"
    if any(is_softmax):
        fields["attn"] = dict(
            layers=[i for i, is_it in enumerate(is_softmax) if is_it], num_heads=config.n_head, qkv_bias=False,
            num_kv_heads=config.n_kv_head or config.n_head, rope_theta=config.rope_base,
            window_size=config.window_of(is_softmax.index(True)),
        )  # fmt: skip
    return fields


def factor(product: int, number: int) -> float:
    """What number is multiplied by for product, also where fla cuts the result off to an int."""
    quotient = product / number
    return quotient if int(quotient * number) == product else math.nextafter(quotient, math.inf)
