"""A checkpoint of ours as a folder that transformers loads: the tables of runs/families.py, read backwards.

    write_folder("out/gated", "exported")       model.safetensors, config.json and the tokenizer's files

The config.json that is to be written is read back first: a key that it does not bring back stands in the way, and is
named. A gate that equals one of theirs is rewritten as that before.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

import configurator
from configurator import UserError, check_choice
from keys import WITH_ROPE_LENGTH, word_of
from model import GPTConfig
from runs.checkpoint import load, save_folder
from runs.families import BY_LAYER, FAMILIES, GATED, KEYS_OF_DELTA, ROPES, keys_of, parts_of
from runs.files import find_checkpoint
from runs.huggingface import export_to
from runs.memory import without_data
from runs.notes import unused_keys

CLASSES = {  # by model_type; other families are read alone
    "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM", "gpt2": "GPT2LMHeadModel", "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "smollm3": "SmolLM3ForCausalLM", "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}  # fmt: skip
# keys that say how a model is made or trained, and those that are compared layer by layer
NOT_COMPARED = (
    "init", "out_init_scale", "dropout", "kernels", "match_params", "mlp_ratio", "mlp_width", "pad_vocab_to",
    "attention", "gate", "window", "position",
)  # fmt: skip


def write_folder(path: Path | str, folder: Path | str, family: str | None, overwrite: bool = False) -> list[str]:
    """Writes a checkpoint as a folder of transformers. Returns lines to print.

    family: the model_type (None: the one that has the keys). Raises UserError for a model that no family has.
    """
    checkpoint, folder = load(path), Path(folder)
    config = configurator.build(GPTConfig, checkpoint["model_args"] | {"kernels": "auto"}, source=str(path))
    weights, made = checkpoint["model"], without_data(config).state_dict()
    if {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in made.items()}:
        raise UserError(f"{path}: its weights are not those of its config")
    tables = [name for name in ("wte.weight", "head.weight") if name in weights]
    weights = weights | {name: weights[name][: config.vocab_size] for name in tables}  # without padding
    try:
        family = family or family_for(config)
        check_choice("family", family, CLASSES)
        config, weights, biases = with_their_gates(config, weights, family)
        widths = {len(w) for name, w in weights.items() if name.endswith("mlp.up.weight")}
        if len(widths) != 1:
            raise UserError(f"its MLPs have {len(widths)} widths; in transformers all layers have one")
        about = config_of(config, family, widths.pop(), weights["wte.weight"].dtype)
        back = configurator.build(GPTConfig, keys_of(about, config.block_size))
        check_same(config, back)
    except UserError as error:
        raise UserError(f"{path}: cannot be written as {family}: {error}") from None
    theirs = {}
    for part in parts_of(back, family, weights):
        theirs |= zip(part.theirs, part.to_theirs([weights[name] for name in part.ours]), strict=True)
    if any(bias is not None for bias in biases.values()):  # theirs has biases in all of these layers, or in none
        about["attention_bias"], (H, D) = True, (config.n_head, config.head_dim)
        for layer, bias in biases.items():
            place = f"model.layers.{layer}.self_attn."
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                weight = theirs[f"{place}{name}.weight"]
                theirs[f"{place}{name}.bias"] = weight.new_zeros(len(weight))
            if bias is not None:  # head by head, those of the queries and of the gate
                theirs[f"{place}q_proj.bias"].view(H, 2, D)[:, 1] = bias.view(H, D)
    with export_to(folder, find_checkpoint(path), overwrite, checkpoint.get("data", {})) as (new, written):
        save_folder(new, theirs, about)
    return [f"written to {folder}/ as {family}, which transformers loads: {', '.join(written)}"]


def family_for(config: GPTConfig) -> str:
    """The family whose special key the config has. Whether it has all others, too, is seen by check_same."""
    has_gate = any(mixer != "softmax" or gate.positions for mixer, gate in config.layers())
    chosen = {
        "gpt2": config.norm == "layer", "qwen3_5_text": has_gate, "olmo2": config.post_norm, "qwen2": config.qkv_bias,
        "qwen3": config.qk_norm, "smollm3": config.position != "rope", "phi3": config.rope_fraction != 1,
        "mistral": config.window != "none",
    }  # fmt: skip
    return next((family for family, is_it in chosen.items() if is_it), "llama")


def with_their_gates(config: GPTConfig, weights: dict, family: str) -> tuple[GPTConfig, dict, dict]:
    """The same model with the family's gates, and {layer: their bias (H D,) or None}; unchanged where none is equal.

    The 2 of y * 2s(g) goes to the weight behind the gate. Qwen3-Next and Qwen3.5 have an elementwise gate in every
    softmax layer: one of a number a head, a channel or a token has the same rows again, and a layer without one has
    rows of zeros, whose sigmoid is one half, and twice the weight behind them.
    """
    softmax = [(i, gate) for i, (mixer, gate) in enumerate(config.layers()) if mixer == "softmax"]
    asked = {position for _, gate in softmax for position in gate.positions}
    doubles = config.gate_activation == "sigmoid2"
    if asked - {"readout"} or (asked and config.gate_activation not in ("sigmoid", "sigmoid2")):
        return config, weights, {}
    weights, biases, C, H, D = dict(weights), {}, config.n_embd, config.n_head, config.head_dim
    shapes = {"elementwise": (H, D), "headwise": (H, 1), "shared": (1, D), "scalar": (1, 1), "none": (1, 1)}
    for layer, gate in softmax:
        place, granularity = f"blocks.{layer}.mixer.", gate.positions.get("readout", "none")
        if family in GATED if granularity == "none" else doubles:
            weights[f"{place}out_proj.weight"] = 2 * weights[f"{place}out_proj.weight"]
        if family in GATED:
            shape = shapes[granularity]
            given = {name: weights.pop(name) for name in list(weights) if name.startswith(f"{place}gates.")}
            given = {name.removeprefix(f"{place}gates.readout."): w for name, w in given.items()}
            rows = given.get("proj.weight", weights[f"{place}qkv.weight"].new_zeros(math.prod(shape), C))
            rows = rows @ given["down.weight"] if "down.weight" in given else rows  # of lower rank
            bias = given.get("proj.bias", given.get("static"))
            weights[f"{place}gates.readout.proj.weight"] = rows.unflatten(0, shape).expand(H, D, C).flatten(0, 1)
            biases[layer] = None if bias is None else bias.unflatten(0, shape).expand(H, D).flatten()
    keys: dict[str, Any] = {"gate_activation": "sigmoid"}
    if family in GATED:
        words = [word_of(config.gate, i) for i in range(config.n_layer)]
        gates = ["elementwise" if i in biases else word for i, word in enumerate(words)]
        keys |= {"gate": ",".join(gates), "gate_rank": 0, "gate_input": "token", "gate_bias": None}
    return dataclasses.replace(config, **keys), weights, biases


def config_of(config: GPTConfig, family: str, mlp_width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Their config.json for a model of ours; keys that it has no field for are left out."""
    types, layers = {"softmax": "full_attention", "gated_deltanet": "linear_attention"}, config.layers()
    if any(mixer not in types for mixer, _ in layers):
        raise UserError(f"attention={config.attention!r}: there, layers are {' or '.join(types)}")
    keys: dict[str, Any] = dataclasses.asdict(config) | dict(zip(KEYS_OF_DELTA, config.delta_sizes, strict=True))
    keys |= {"n_kv_head": config.n_kv_head or config.n_head, "mlp_width": mlp_width}
    about = {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "dtype": str(dtype).removeprefix("torch."),
        **{field: keys[key] for key, field in FAMILIES[family].keys.items()},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),  # some classes have numbers of their own
    }
    if family == "gpt2":
        return about | {"activation_function": "gelu" if config.mlp == "gelu" else "gelu_new"}
    rope = {"rope_type": next((name for name, ours in ROPES.items() if ours == config.rope_scaling), "default")}
    if rope["rope_type"] != "default":
        rope |= {"factor": config.rope_factor}
    if config.rope_scaling in WITH_ROPE_LENGTH:
        rope |= {"original_max_position_embeddings": config.rope_length or config.block_size}
    if config.rope_scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"rope_theta": config.rope_base, "partial_rotary_factor": config.rope_fraction}
    windows = [config.window_of(i) for i in range(config.n_layer)]
    window = next((window for window in windows if window), None)
    about |= {"hidden_act": "silu", "attention_bias": False, "rope_parameters": rope, "sliding_window": window}
    if family in BY_LAYER or family in GATED:
        kinds = [types[mixer] for mixer, _ in layers]
        about["layer_types"] = ["sliding_attention" if windows[i] else kind for i, kind in enumerate(kinds)]
        about["use_sliding_window"] = window is not None
    if family in GATED:
        about |= {"linear_conv_kernel_dim": 4, "mlp_only_layers": list(range(config.n_layer))}  # no layer has experts
    if family == "smollm3":
        about["no_rope_layers"] = [int(word_of(config.position, i) == "rope") for i in range(config.n_layer)]
    if family == "qwen3":  # the flags of Qiu et al., whose own code alone reads a gated one
        asked = layers[0][1].positions.get("readout")
        about |= {"use_qk_norm": config.qk_norm} | ({f"{asked}_attn_output_gate": True} if asked else {})
    return about


def check_same(config: GPTConfig, back: GPTConfig) -> None:
    """UserError for the first key that their config.json did not bring back."""
    for names in (("attention", "gate"), ("window",), ("position",)):
        ours, theirs = ([layers_of(one, names[0])] for one in (config, back))
        if ours != theirs:
            given = ", ".join(f"{name}={getattr(config, name)!r}" for name in names)
            other = ", ".join(repr(getattr(back, name)) for name in names)
            raise UserError(f"{given}: there it can only be {other}, or what docs/checkpoints.md says is equal to it")
    ours, theirs, unused = followed(config), followed(back), unused_keys(config)
    for name in ours:
        if ours[name] != theirs[name] and name not in unused and name not in NOT_COMPARED:
            raise UserError(f"{name}={ours[name]!r}: there it can only be {theirs[name]!r}")


def layers_of(config: GPTConfig, name: str) -> list:
    """What each layer has of a key that is a pattern."""
    return (
        config.layers() if name == "attention" else [word_of(getattr(config, name), i) for i in range(config.n_layer)]
    )


def followed(config: GPTConfig) -> dict[str, Any]:
    """All keys, with the number that follows from others where one is None."""
    of_delta = dict(zip(KEYS_OF_DELTA, config.delta_sizes, strict=True))
    lengths = {"n_kv_head": config.n_kv_head or config.n_head, "rope_length": config.rope_length or config.block_size}
    return vars(config) | of_delta | lengths
