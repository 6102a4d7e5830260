"""Models in the folders of transformers, of nanoGPT, or in a GGUF file, read as a checkpoint of
ours. Nothing in them is run.

    read_folder("Qwen3-0.6B", "out/qwen3", 2048)    config.json, *.safetensors, tokenizer.json -> a checkpoint's folder
    checkpoint_of(Path("Qwen3-0.6B"))               the same as a dict, which checkpoint.load takes

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
from base.files import claim, new_folder, one_line, read_json, write_whole
from base.tensors import check_tensors, import_safetensors, load_torch, save_folder
from data.tokenizer import TOKENIZER_FILE, FileTokenizer
from hub.families import FAMILIES, Family, check_family, keys_of
from hub.gguf_files import read_gguf
from hub.tensors import parts_of
from hub.text import TOKENIZER_FILES, copied_files
from model import GPTConfig
from runs.memory import without_data

# of names of tensors: with a part for images; fla's norm with a gate in one kernel; of a compiled
# model; of DistributedDataParallel
SPELLINGS = {
    "model.language_model.": "model.",
    ".g_norm_swish_gate.": ".g_norm.",
    "_orig_mod.": "",
    "module.": "",
}
# tensors with nothing of the text model: parts for images, layers that predict further tokens,
# angles, causal masks
LEFT_OUT = r"(model\.)?(visual|mtp)\.|.*(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)$"


def read_folder(folder: Path | str, out_dir: Path | str, block_size: int, overwrite: bool) -> str:
    """Writes the model in a folder of transformers to out_dir, as a checkpoint. Returns what to
    print.

    folder: may also be nanoGPT's ckpt.pt, or the folder that it is in, or a GGUF file. block_size:
    the most tokens of context that are kept of what the model was trained with. Raises UserError.
    """
    about, longest, file = checkpoint_of(Path(folder), block_size)
    weights = about.pop("model")
    texts = copied_files(file, about.get("data", {}))
    written = export_to(Path(out_dir), weights, about, texts, overwrite)
    text = f"written to {out_dir}/: {written}"
    kept = about["model_args"]["block_size"]
    if kept < longest:
        text += (
            f"\nblock_size={kept}, of {longest} that it was made for; --block_size=... keeps more"
        )
    return text


def checkpoint_of(folder: Path, block_size: int = 2048) -> tuple[dict, int, Path]:
    """(the checkpoint of what read_folder takes, the context it was made for, one of its files).
    Raises UserError."""
    file = folder / "config.json"
    if folder.suffix in (".pt", ".gguf"):
        file = folder
    elif not os.path.isfile(file) and os.path.isfile(folder / "ckpt.pt"):
        file = folder / "ckpt.pt"
    try:
        with one_line("cannot be read"):
            content = None  # of a tokenizer that lies in no file of its own
            if file.suffix == ".pt":
                about, tensors = read_nanogpt(file)
            elif file.suffix == ".gguf":
                about, tensors, content = read_gguf(file)
            else:
                about, tensors = read_hub(folder)
            config = configurator.build(GPTConfig, keys_of(about, block_size))
            family = FAMILIES[about["model_type"]]
            tensors = with_usual_names(tensors, family)
            check_tensors(tensors, file)
            weights = translated(config, about["model_type"], tensors)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    checkpoint: dict[str, Any] = {
        "model": weights,
        "model_args": dataclasses.asdict(config),
        "iter_num": 0,
    }
    if content is not None or os.path.exists(folder / TOKENIZER_FILE):
        tokenizer = FileTokenizer(folder / TOKENIZER_FILE, content)
        checkpoint["data"] = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
        checkpoint["data"]["first_ids"] = tokenizer.first_ids()
        if content is not None:
            checkpoint["data"]["tokenizer_json"] = content.decode()
    # a state space model has any length
    longest = about.get(family.keys.get("block_size"), 0)
    return checkpoint, longest, file


def read_hub(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """A folder's config.json, without what is null, and its tensors. Raises UserError."""
    about = read_json(folder / "config.json", infinity=True)
    if "text_config" in about:  # of images and text: the text model has a config of its own
        about |= {"model_type": f"{about['model_type']}_text"} | about["text_config"]
    is_set = {k: v for k, v in about.items() if v is not None or k == "sliding_window"}
    check_family(is_set)  # before the tensors, which may be a pickle
    tensors = {}
    for file in files_of(folder):
        with one_line(f"{file.name}: missing, damaged, or no safetensors"):
            tensors |= import_safetensors().torch.load_file(file)
    return is_set, tensors


def read_nanogpt(file: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """What a config.json would say of nanoGPT's checkpoint, and its tensors. Raises UserError. The
    gelu is the exact one, as in nanoGPT's code of today; a checkpoint does not say which its code
    had."""
    content = load_torch(file)
    args = content["model_args"]
    if args.keys() - {"dropout"} != FAMILIES["nanogpt"].keys.keys():
        raise UserError("no checkpoint of nanoGPT, whose model_args are n_layer, n_head, bias ...")
    return args | {"model_type": "nanogpt", "activation_function": "gelu"}, content["model"]


def with_usual_names(content: dict, family: Family) -> dict[str, torch.Tensor]:
    """The tensors but for LEFT_OUT, under their usual names."""
    tensors = {}
    prefix = family.blocks.partition(".")[0] + "."  # which a folder may leave out
    for name, tensor in content.items():
        if re.match(LEFT_OUT, name):
            continue
        for other, usual in SPELLINGS.items():
            name = name.replace(other, usual, 1)
        tensors[name if name.startswith((prefix, "lm_head.")) else prefix + name] = tensor
    return tensors


def files_of(folder: Path) -> list[Path]:
    """The files with the weights. Raises UserError."""
    if os.path.isfile(folder / "model.safetensors"):  # before the index, as transformers reads it
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not os.path.isfile(index):
        raise UserError("has no model.safetensors; a pickle is not read, since it can run code")
    # their last part alone: nothing outside the folder is read
    names = {os.path.basename(name) for name in read_json(index)["weight_map"].values()}
    return [folder / name for name in sorted(names)]


def translated(
    config: GPTConfig, family: str, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Our tensors. UserError names those of theirs that are missing or unknown, or ours that would
    have another shape."""
    model = without_data(config)
    weights: dict = {}
    unknown = tensors.keys() - {"lm_head.weight"}  # a tied output layer may be saved a second time
    for part in parts_of(model, family):
        missing = part.theirs.keys() - tensors.keys()
        if missing:
            raise UserError(f"lacks {min(missing)}, which its config.json asks for")
        unknown -= part.theirs.keys()
        weights |= part.to_ours(tensors)
    if unknown:
        raise UserError(f"holds {min(unknown)}, which the model here has no place for")
    model.load_state_dict(weights, assign=True)  # which compares the shapes
    return weights


def export_to(
    folder: Path, weights: dict, about: dict, texts: dict[str, bytes], overwrite: bool
) -> str:
    """Writes model.safetensors, config.json with `about`, and the files of the tokenizer, texts
    {name: content} (hub/text.py). Returns their names. Raises UserError."""
    # an older export's tokenizer must not stay
    old = TOKENIZER_FILES if claim(folder, "export", overwrite) else ()
    with new_folder(folder, "config.json", old) as new:
        for name, content in texts.items():
            write_whole(new / name, lambda file, content=content: file.write(content))
        save_folder(new, weights, about)
    return ", ".join(["model.safetensors", "config.json", *texts])
