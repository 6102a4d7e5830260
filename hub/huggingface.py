"""Models of transformers and fla, of nanoGPT, or in a GGUF file, read as a checkpoint of ours.
Nothing in them is run.

    checkpoint_of(Path("Qwen3-0.6B/model.safetensors"))

The tables are in hub/families.py. Files are mapped: a tensor that stays as it is takes no memory.
"""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import torch

from base import configurator
from base.configurator import UserError
from base.files import claim, new_folder, one_line, read_json, write_bytes
from base.tensors import check_tensors, import_safetensors, load_torch, save_folder
from data.tokenizer import TOKENIZER_FILE, FileTokenizer
from hub.families import FAMILIES, OF_NANOGPT, keys_of
from hub.gguf_files import read_gguf
from hub.tensors import parts_of, take_gates_apart, to_ours
from hub.text import TOKENIZER_FILES, copied_files
from model import GPTConfig
from runs.memory import without_data

# of names of tensors: with a part for images; fla's norm with a gate in one kernel; of a compiled
# model
SPELLINGS = {
    "model.language_model.": "model.",
    ".g_norm_swish_gate.": ".g_norm.",
    "_orig_mod.": "",
}
# tensors with nothing of the text model: parts for images, layers that predict further tokens,
# angles, causal masks
LEFT_OUT = r"(model\.)?(visual|mtp)\.|.*(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)$"


def checkpoint_of(file: Path, block_size: int = 2048) -> dict[str, Any]:
    """The checkpoint of a GGUF file, of nanoGPT's ckpt.pt, or of the folder that a safetensors file
    is in. block_size: the most tokens of context that are kept of what it was trained with. Raises
    UserError."""
    tokenizer_json = None
    try:
        with one_line("cannot be read"):
            if file.suffix == ".pt":
                about, tensors = read_nanogpt(file)
            elif file.suffix == ".gguf":
                about, tensors, tokenizer_json = read_gguf(file)
            else:
                about, tensors = read_hub(file.parent)
            config = configurator.build(GPTConfig, keys_of(about, block_size))
            check_tensors(tensors, file)
            weights = translated(config, about["model_type"], tensors)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    checkpoint: dict[str, Any] = {
        "model": weights,
        "model_args": dataclasses.asdict(config),
        "iter_num": 0,
    }
    beside = file.with_name(TOKENIZER_FILE)
    if tokenizer_json is not None or os.path.exists(beside):
        tokenizer = FileTokenizer(beside, tokenizer_json)
        checkpoint["data"] = {
            "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "first_ids": tokenizer.first_ids(),
        }
    if tokenizer_json is not None:
        checkpoint["data"]["tokenizer_json"] = tokenizer_json.decode()
    return checkpoint


def read_hub(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """A folder's config.json, without what is null, and its tensors. Raises UserError."""
    about = read_json(folder / "config.json", infinity=True)
    if "text_config" in about:  # of images and text: the text model has a config of its own
        about |= {"model_type": f"{about['model_type']}_text"} | about["text_config"]
    is_set = {k: v for k, v in about.items() if v is not None or k == "sliding_window"}
    # several files only where there is not one of all, as transformers reads them
    files = [*folder.glob("model.safetensors")] or [*folder.glob("model-*-of-*.safetensors")]
    if not files:
        raise UserError("has no model.safetensors; a pickle is not read, since it can run code")
    tensors = {}
    for file in sorted(files):
        with one_line(f"{file.name}: damaged, or no safetensors"):
            tensors |= import_safetensors().torch.load_file(file)
    return is_set, tensors


def read_nanogpt(file: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """What a config.json would say of nanoGPT's checkpoint, and its tensors. Raises UserError. The
    gelu is the exact one, as in nanoGPT's code of today; a checkpoint does not say which its code
    had."""
    content = load_torch(file)
    args = content["model_args"]
    if args.keys() - {"dropout"} != set(OF_NANOGPT):
        raise UserError("no checkpoint of nanoGPT, whose model_args are n_layer, n_head, bias ...")
    return args | {"model_type": "nanogpt", "activation_function": "gelu"}, content["model"]


def translated(
    config: GPTConfig, family: str, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Our tensors. UserError names those of theirs that are missing, unknown or of another size, or
    ours that would have another shape."""
    tensors = with_usual_names(tensors, FAMILIES[family].blocks)
    if config.gate != "none":
        take_gates_apart(tensors, config, family)
    model = without_data(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    weights = {}
    unknown = tensors.keys() - {"lm_head.weight"}  # a tied output layer may be saved a second time
    for theirs, ours in parts_of(model, family):
        for name, n in theirs.items():
            if name not in tensors:
                raise UserError(f"lacks {name}, which its config.json asks for")
            if n not in (0, len(tensors[name])):
                raise UserError(f"{name} has {len(tensors[name])} rows; {n} are asked for")
        unknown -= theirs.keys()
        rows = [tensors[name] for name in theirs]
        if len(ours) > 1:
            rows = torch.cat(rows).split([shapes[name][0] for name in ours])
        elif len(rows) > 1:
            rows = [torch.cat(rows)]
        for name, tensor in zip(ours, rows, strict=True):
            weights[name] = to_ours(name, tensor, model, family)
    if unknown:
        raise UserError(f"holds {min(unknown)}, which the model here has no place for")
    model.load_state_dict(weights, assign=True)  # which compares the shapes
    return weights


def with_usual_names(content: dict, blocks: str) -> dict[str, torch.Tensor]:
    """The tensors but for LEFT_OUT, under their usual names. blocks: the family's."""
    tensors = {}
    prefix = blocks.partition(".")[0] + "."  # which a folder may leave out
    for name, tensor in content.items():
        if re.match(LEFT_OUT, name):
            continue
        for other, usual in SPELLINGS.items():
            name = name.replace(other, usual, 1)
        if not name.startswith((prefix, "lm_head.")):
            name = prefix + name
        tensors[name] = tensor
    return tensors


def export_to(
    folder: str, weights: dict, about: dict, file: Path, data: dict, overwrite: bool
) -> str:
    """Writes model.safetensors, config.json with `about`, and the files of the tokenizer, which
    copied_files finds by `file` and `data`. Returns their names. Raises UserError."""
    texts = copied_files(file, data)
    # an older export's tokenizer must not stay
    old = TOKENIZER_FILES if claim(Path(folder), "export", overwrite) else ()
    with new_folder(Path(folder), "config.json", old) as new:
        for name, content in texts.items():
            write_bytes(new / name, content)
        save_folder(new, weights, about)
    return ", ".join(["model.safetensors", "config.json", *texts])
