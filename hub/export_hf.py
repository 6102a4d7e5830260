"""A checkpoint of ours as a folder that transformers loads: a Llama, a Qwen3 or a Qwen3.5.

The config.json is read back before anything is written, and a key that does not come back is
refused by its name.
"""

import dataclasses
from typing import Any

import torch

from base import configurator
from base.configurator import UserError, check_choice
from base.files import find_checkpoint, one_line
from data.tokenizer import TOKENIZER_FILE
from hub.families import FAMILIES, GATED, PARTIAL, SIZES, keys_of
from hub.huggingface import export_to
from hub.tensors import parts_of, put_gates_between, to_theirs
from keys import word_of
from model import GPTConfig
from runs.checkpoint import load_model
from runs.memory import without_data
from runs.notes import unused_keys

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
# keys of how a model is made or trained; the shapes of the weights say the width of its MLP
NOT_COMPARED = {
    "init",
    "out_init_scale",
    "dropout",
    "kernels",
    "match_params",
    "mlp_ratio",
    "rope_restarts",
}


def write_folder(path: str, folder: str, family: str | None, overwrite: bool) -> str:
    """Writes a checkpoint as a folder of transformers. Returns a line to print. family: a
    model_type. Raises UserError for a model with keys that the family does not have."""
    check_choice("family", family, CLASSES)
    model, checkpoint = load_model(path)
    try:
        # the weights have the dtypes of the file
        about, back, weights = as_family(model.config, checkpoint["model"], family)
        model = without_data(back)
        with one_line(f"its weights are not those of a {family} with its keys"):
            model.load_state_dict(weights, assign=True)
    except UserError as error:
        raise UserError(f"{path}: cannot be written as {family}: {error}") from None
    tensors = {}
    for theirs, ours in parts_of(model, family):
        rows = [to_theirs(name, weights[name], family) for name in ours]
        if len(theirs) > 1:
            rows = torch.cat(rows).split(list(theirs.values()))
        tensors |= zip(theirs, rows, strict=True)
    put_gates_between(tensors, back)
    data = checkpoint.get("data", {})
    written = export_to(folder, tensors, about, find_checkpoint(path), data, overwrite)
    text = f"written to {folder}/ as {family}: {written}"
    if TOKENIZER_FILE not in written and data.get("tokenizer"):
        text += f"\nnote: without the tokenizer, {data['tokenizer']}; AutoTokenizer takes another"
    return text


def as_family(config: GPTConfig, weights: dict, family: str) -> tuple[dict, GPTConfig, dict]:
    """(their config.json, the keys that come back from it, weights for these). Raises UserError for
    a key that has not come back, and has an effect in this model.

    Of gates y * 2s(g) the 2 goes to the weight behind the gate: they have sigmoid gates there.
    """
    if config.gate_activation == "sigmoid2":
        for i, (_, gate) in enumerate(config.layers()):
            if "readout" in gate.positions:
                name = f"blocks.{i}.mixer.out_proj.weight"
                weights = weights | {name: 2 * weights[name]}
        config = dataclasses.replace(config, gate_activation="sigmoid")
    about = config_of(config, family, weights)
    back = configurator.build(type(config), keys_of(about, config.block_size))
    theirs = spelled_out(back)
    ignored = {*unused_keys(config), *NOT_COMPARED} - {"gate"}
    for name, value in spelled_out(config).items():
        if value != theirs[name] and name not in ignored:
            only = getattr(back, name)
            raise UserError(f"{name}={getattr(config, name)!r}: there it can only be {only!r}")
    return about, back, weights


def config_of(config: GPTConfig, family: str, weights: dict) -> dict[str, Any]:
    """Their config.json for a model of ours, without what it has no field for."""
    keys = spelled_out(config)
    widths = [len(w) for name, w in weights.items() if name.endswith("mlp.up.weight")]
    keys["mlp_width"] = max(widths, default=1)
    keys |= zip(SIZES, config.head_sizes, strict=True)
    about = {field: keys[key] for key, field in FAMILIES[family].keys.items()}
    about["architectures"] = [CLASSES[family]]
    about["model_type"] = family
    about["dtype"] = str(weights["wte.weight"].dtype).removeprefix("torch.")
    # some classes have numbers of their own
    about |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    part = 0.25 if "qwen3_next" in keys["attention"] else 1.0
    rope = {"rope_theta": config.rope_base, PARTIAL: part}
    # transformers reads rope_parameters from its version 5 on. Older ones, and vLLM, read the same
    # numbers beside it
    about |= rope | {"rope_parameters": {"rope_type": "default"} | rope}
    if family == GATED:
        about["layer_types"] = [
            "linear_attention" if mixer == "gated_deltanet" else "full_attention"
            for mixer in keys["attention"]
        ]
    return about


def spelled_out(config: GPTConfig) -> dict[str, Any]:
    """All keys: a pattern as what each layer has, and the number that is meant where one is
    None."""
    layers = range(config.n_layer)
    return vars(config) | {
        "attention": [mixer for mixer, _ in config.layers()],
        "gate": [gate for _, gate in config.layers()],
        "window": [config.window_of(i) for i in layers],
        "position": [word_of(config.position, i) for i in layers],
        "n_kv_head": config.n_kv_head or config.n_head,
        "delta_sizes": config.head_sizes,
    }
