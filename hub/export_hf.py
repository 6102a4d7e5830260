"""A checkpoint of ours as a folder that transformers or fla loads: the tables of hub/families.py,
read backwards.

The config.json is read back before anything is written, and a key that does not come back is
refused by its name.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch

import configurator
from base.files import find_checkpoint
from configurator import UserError, check_choice
from data.tokenizer import TOKENIZER_FILE
from hub.families import (
    CLASSES,
    FAMILIES,
    GATED,
    KEYS_OF_DELTA,
    compared,
    config_of,
    keys_of,
    read_fla,
)
from hub.huggingface import export_to
from hub.tensors import parts_of
from hub.text import AS_IT_IS, CONFIG_FILE, files_for_transformers
from keys import word_of
from model import GPTConfig
from runs.checkpoint import load_model
from runs.notes import unused_keys

LINEAR = {
    FAMILIES[name].mixer: name for name in CLASSES if FAMILIES[name].mixer and name not in GATED
}
# keys of how a model is made or trained; the shapes of the weights say the width of its MLP
NOT_COMPARED = (
    "init out_init_scale dropout kernels match_params mlp_ratio mlp_width pad_vocab_to".split()
)


def write_folder(path: Path | str, folder: Path | str, family: str | None, overwrite: bool) -> str:
    """Writes a checkpoint as a folder of transformers or fla. Returns a line to print. family: the
    model_type (None: by the keys). Raises UserError for a model with keys that the family does not
    have."""
    model, checkpoint = load_model(path)
    config, weights = model.config, checkpoint["model"]  # which have the dtypes of the file
    tables = [name for name in ("wte.weight", "head.weight") if name in weights]
    # without padding
    weights = weights | {name: weights[name][: config.vocab_size] for name in tables}
    try:
        family = family or family_for(config)
        check_choice("family", family, CLASSES)
        config = dataclasses.replace(
            config, **dict(zip(KEYS_OF_DELTA, config.delta_sizes, strict=True))
        )
        if family not in LINEAR.values():
            config, weights = with_their_gates(config, weights, family)
        elif family == "kda" and not config.native_bias:  # theirs has one, which is zero then
            gates = {
                name: w for name, w in weights.items() if name.endswith("gates.native.proj.weight")
            }
            weights |= {
                name.replace("weight", "bias"): w.new_zeros(len(w)) for name, w in gates.items()
            }
            config = dataclasses.replace(config, native_bias=True)
        about = config_of(config, family, weights)
        listed = keys_of(about, config.block_size)
        known = {*listed, *NOT_COMPARED}
        if name := next(
            (field.name for field in dataclasses.fields(config) if field.name not in known), None
        ):
            raise UserError(
                f"{name}={getattr(config, name)!r}: PLAIN of hub/families.py lists no value of {name}"
            )
        back = configurator.build(GPTConfig, listed)
        ours, theirs, ignored = (
            compared(config),
            compared(back),
            {*unused_keys(config), *NOT_COMPARED} - {"gate"},
        )
        if name := next(
            (name for name in ours if ours[name] != theirs[name] and name not in ignored), None
        ):
            raise UserError(
                f"{name}={getattr(config, name)!r}: there it can only be {getattr(back, name)!r}"
            )
        tensors: dict[str, torch.Tensor] = {}
        for part in parts_of(back, family, weights):
            if lacking := [name for name in part.ours if name not in weights]:
                raise UserError(
                    f"it lacks {lacking[0]}, which stands beside {next(iter(part.ours))} there"
                )
            tensors |= zip(
                part.theirs, part.to_theirs([weights[name] for name in part.ours]), strict=True
            )
    except UserError as error:
        raise UserError(f"{path}: cannot be written as {family}: {error}") from None
    # fla's name where one kernel has the norm and the gate
    if family == "gla" and about["use_output_gate"]:
        tensors = {
            name.replace(".g_norm.", ".g_norm_swish_gate."): tensor
            for name, tensor in tensors.items()
        }
    if family in GATED and any(name.endswith(".bias") for name in weights):
        about["attention_bias"] = True  # keys_of refuses it: ours has a bias at the gate alone
    file, data = find_checkpoint(path), checkpoint.get("data", {})
    texts = files_for_transformers(file, data)
    written = export_to(Path(folder), file, tensors, about, texts, overwrite)
    library = "fla" if FAMILIES[family].read is read_fla else "transformers"
    if family == "qwen3" and (
        not config.qk_norm or any(gate.positions for _, gate in config.layers())
    ):
        library = "the code of Qiu et al."
    text = f"written to {folder}/ as {family}, which {library} loads: {written}"
    if TOKENIZER_FILE not in texts and data.get("tokenizer"):
        reason = f"since {data['tokenizer']} cannot be had here; AutoTokenizer takes another"
        text += f"\nnote: without a tokenizer, {reason}"
    if family == "qwen2" and texts.get(CONFIG_FILE) == AS_IT_IS:
        text += "\nnote: transformers 5 gives a qwen2 another tokenizer; use PreTrainedTokenizerFast, not AutoTokenizer"
    return text


def family_for(config: GPTConfig) -> str:
    """The family of which the config has what is special; whether all other keys fit, too, is seen
    later."""
    mixers = {mixer for mixer, _ in config.layers()}
    is_qwen = mixers == {"softmax", "gated_deltanet"} and config.qk_norm
    if not is_qwen and (named := [family for mixer, family in LINEAR.items() if mixer in mixers]):
        return named[0]
    has_gate = any(mixer != "softmax" or gate.positions for mixer, gate in config.layers())
    special = dict(
        gpt2=config.norm == "layer",
        qwen3_5_text=has_gate,
        olmo2=config.post_norm,
        qwen2=config.qkv_bias,
        qwen3=config.qk_norm,
        smollm3=config.position != "rope",
        phi3=config.rope_fraction < 1,
        mistral=config.window != "none",
    )
    return next((family for family, is_it in special.items() if is_it), "llama")


def with_their_gates(config: GPTConfig, weights: dict, family: str) -> tuple[GPTConfig, dict]:
    """The same model with the family's gates, as far as they are equal to ours.

    The 2 of y * 2s(g) goes to the weight behind the gate. Where all softmax layers have an
    elementwise gate, one of a number a head, a channel or a token repeats its rows, and a layer
    without one has rows of zeros, which halve, and twice the weight behind them. Raises UserError
    for an input or a granularity that an edit has added; any other gate stays as it is, and its key
    is refused later.
    """
    softmax = {
        i: gate.positions for i, (mixer, gate) in enumerate(config.layers()) if mixer == "softmax"
    }
    asked, is_gated = (
        {position for positions in softmax.values() for position in positions},
        family in GATED,
    )
    if (
        asked - {"readout"}
        or (asked and config.gate_activation not in ("sigmoid", "sigmoid2"))
        or config.gate_rank
    ):
        return config, weights
    weights, C, H, D = dict(weights), config.n_embd, config.n_head, config.head_dim
    shapes = {
        "elementwise": (H, D),
        "headwise": (H, 1),
        "shared": (1, D),
        "scalar": (1, 1),
        "none": (1, 1),
    }
    granularities = {
        granularity for positions in softmax.values() for granularity in positions.values()
    }
    if asked:  # what an edit of gate.py may have added is not known to be equal to anything there
        check_choice("gate_input", config.gate_input, ("token", "static"))
        for granularity in granularities:
            check_choice("granularity", granularity, shapes)
    has_bias = asked and (config.gate_bias is not None or config.gate_input == "static")
    for layer, positions in softmax.items():
        granularity, place = positions.get("readout", "none"), f"blocks.{layer}.mixer"
        if is_gated if granularity == "none" else config.gate_activation == "sigmoid2":
            weights[f"{place}.out_proj.weight"] = 2 * weights[f"{place}.out_proj.weight"]
        if is_gated:
            gate, shape = f"{place}.gates.readout", shapes[granularity]
            zeros = weights[f"{place}.qkv.weight"].new_zeros(shape[0] * shape[1], C)
            rows = weights.pop(f"{gate}.proj.weight", zeros).unflatten(0, shape)
            weights[f"{gate}.proj.weight"] = rows.expand(H, D, C).flatten(0, 1)
            if has_bias:
                bias = weights.pop(
                    f"{gate}.proj.bias", weights.pop(f"{gate}.static", zeros[:, 0])
                ).unflatten(0, shape)
                weights[f"{gate}.proj.bias"] = bias.expand(H, D).flatten()
                # theirs has biases in all projections of these layers
                for name in ("qkv", "out_proj"):
                    weights[f"{place}.{name}.bias"] = zeros.new_zeros(
                        len(weights[f"{place}.{name}.weight"])
                    )
    keys: dict[str, Any] = {"gate_activation": "sigmoid"}
    if is_gated:
        gates = [
            "elementwise" if i in softmax else word_of(config.gate, i)
            for i in range(config.n_layer)
        ]
        keys |= {"gate": ",".join(gates), "gate_input": "token", "gate_bias": None}
    return dataclasses.replace(config, **keys), weights
