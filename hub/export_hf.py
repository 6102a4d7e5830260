"""A checkpoint of ours as a folder that transformers or fla loads: the tables of hub/families.py,
read backwards.

The config.json is read back before anything is written, and a key that does not come back is
refused by its name.
"""

import dataclasses
from pathlib import Path

from base import configurator
from base.configurator import UserError, check_choice
from base.files import find_checkpoint, one_line
from data.tokenizer import TOKENIZER_FILE
from hub.families import (
    CLASSES,
    GATED,
    config_of,
    keys_of,
    shortest,
    written_out,
)
from hub.huggingface import export_to
from hub.tensors import parts_of
from hub.text import AS_IT_IS, CONFIG_FILE, files_for_transformers
from keys import word_of
from model import GPT, GPTConfig
from runs.checkpoint import load_model
from runs.memory import without_data
from runs.notes import unused_keys

# keys of how a model is made or trained; the shapes of the weights say the width of its MLP
NOT_COMPARED = {"init", "out_init_scale", "dropout", "kernels", "match_params", "mlp_ratio"}


def write_folder(path: Path | str, folder: Path | str, family: str | None, overwrite: bool) -> str:
    """Writes a checkpoint as a folder of transformers or fla. Returns a line to print. family: a
    model_type. Raises UserError for a model with keys that the family does not have."""
    check_choice("family", family, CLASSES)
    model, checkpoint = load_model(path)
    config, weights = model.config, checkpoint["model"]  # which have the dtypes of the file
    try:
        if family in GATED:
            config, weights = with_their_gates(model, weights)
        about = config_of(config, family, weights)
        back = configurator.build(type(config), keys_of(about, config.block_size))
        check_same(config, back)
        model = without_data(back)
        with one_line(f"its weights are not those of a {family} with its keys"):
            model.load_state_dict(weights, assign=True)
    except UserError as error:
        raise UserError(f"{path}: cannot be written as {family}: {error}") from None
    tensors = {}
    for part in parts_of(model, family):
        tensors |= part.to_theirs(weights)
    # fla's name where one kernel has the norm and the gate
    if family == "gla" and about["use_output_gate"]:
        tensors = {
            name.replace(".g_norm.", ".g_norm_swish_gate."): w for name, w in tensors.items()
        }
    data = checkpoint.get("data", {})
    texts = files_for_transformers(find_checkpoint(path), data)
    text = f"written to {folder}/ as {family}: "
    text += export_to(Path(folder), tensors, about, texts, overwrite)
    has_gates = any(gate.positions for _, gate in config.layers())
    if family == "qwen3" and (has_gates or not config.qk_norm):
        text += "\nnote: the code of Qiu et al. loads it, and transformers a qwen3 of another kind"
    if TOKENIZER_FILE not in texts and data.get("tokenizer"):
        text += f"\nnote: without the tokenizer, {data['tokenizer']}; AutoTokenizer takes another"
    if family == "qwen2" and texts.get(CONFIG_FILE) == AS_IT_IS:
        text += "\nnote: transformers 5 gives a qwen2 another tokenizer; use PreTrainedTokenizerFast, not AutoTokenizer"
    return text


def check_same(config: GPTConfig, back: GPTConfig) -> None:
    """Raises UserError for a key that has not come back, and has an effect in this model."""
    theirs = written_out(back)
    unused = unused_keys(dataclasses.replace(config, delta_sizes=config.head_sizes))
    ignored = {*unused, *NOT_COMPARED} - {"gate"}
    for name, value in written_out(config).items():
        if value != theirs[name] and name not in ignored:
            only = getattr(back, name)
            raise UserError(f"{name}={getattr(config, name)!r}: there it can only be {only!r}")


def with_their_gates(model: GPT, weights: dict) -> tuple[GPTConfig, dict]:
    """The same model with an elementwise sigmoid gate in every softmax layer, as far as its gates
    are equal to one: a gate of one number a head, a channel or a token repeats its rows, and the 2
    of y * 2s(g) goes to the weight behind the gate. Any other stays, and its key is refused later.
    """
    config = model.config
    is_plain = config.gate_input == "token" and config.gate_bias is None and not config.gate_rank
    if not is_plain or config.gate_activation not in ("sigmoid", "sigmoid2"):
        return config, weights
    weights, gates = dict(weights), []
    for layer, block in enumerate(model.blocks):
        gates.append(word_of(config.gate, layer))
        if list(block.mixer.gates) != ["readout"]:
            continue
        gates[-1] = "elementwise"
        out_proj = f"blocks.{layer}.mixer.out_proj.weight"
        proj = f"blocks.{layer}.mixer.gates.readout.proj.weight"
        if config.gate_activation == "sigmoid2":
            weights[out_proj] = 2 * weights[out_proj]
        rows = weights[proj].unflatten(0, block.mixer.gates["readout"].shape)  # (H or 1, D or 1, C)
        weights[proj] = rows.expand(config.n_head, config.head_dim, -1).flatten(0, 1)
    return dataclasses.replace(config, gate=shortest(gates), gate_activation="sigmoid"), weights
