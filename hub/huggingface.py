"""Models in the folders of transformers, or of nanoGPT, read as a checkpoint of ours. Nothing in
them is run.

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

import configurator
from base.files import claim, is_no_file, new_folder, one_line, read_json, write_whole
from base.rules import wrong_field
from base.tensors import check_tensors, import_safetensors, load_torch, save_folder
from configurator import UserError, show
from data.tokenizer import TOKENIZER_FILE, FileTokenizer
from hub.families import FAMILIES, family_of, keys_of
from hub.tensors import parts_of
from hub.text import TOKENIZER_FILES, copied_files
from model import GPTConfig
from runs.memory import without_data

# of names of tensors: with a part for images; fla's norm with a gate in one kernel; older; compiled
SPELLINGS = {
    "model.language_model.": "model.",
    ".g_norm_swish_gate.": ".g_norm.",
    "backbone.embedding.": "backbone.embeddings.",
    "_orig_mod.": "",
}
# tensors with nothing of the text model: parts for images, layers that predict further tokens,
# angles, causal masks
LEFT_OUT = r"(model\.)?(visual|mtp)\.|.*(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)$"


def read_folder(folder: Path | str, out_dir: Path | str, block_size: int, overwrite: bool) -> str:
    """Writes the model in a folder of transformers to out_dir, as a checkpoint. Returns what to
    print.

    folder: may also be nanoGPT's ckpt.pt, or the folder that it is in. block_size: the most tokens
    of context that are kept of what the model was trained with. Raises UserError.
    """
    folder, out_dir = Path(folder), Path(out_dir)
    about, longest, file = checkpoint_of(folder, block_size)
    weights, texts = about.pop("model"), copied_files(file, {})
    text = f"written to {out_dir}/: {export_to(out_dir, file, weights, about, texts, overwrite)}"
    if (kept := about["model_args"]["block_size"]) < longest:
        text += (
            f"\nblock_size={kept}, of {longest} that it was made for; --block_size=... keeps more"
        )
    return text


def checkpoint_of(folder: Path, block_size: int = 2048) -> tuple[dict, int, Path]:
    """(the checkpoint of what read_folder takes, the context it was made for, one of its files).
    Raises UserError."""
    file = folder if folder.suffix == ".pt" else folder / "ckpt.pt"
    is_of_nanogpt = file == folder or (
        os.path.isfile(file) and not os.path.isfile(folder / "config.json")
    )
    file = file if is_of_nanogpt else folder / "config.json"
    try:
        their_config, tensors = (
            read_nanogpt(file) if is_of_nanogpt else (read_json(file, infinity=True), {})
        )
        if isinstance(their_config, dict):
            text_config = their_config.get("text_config")
            # a model of images and text: the text model has a config of its own
            if isinstance(text_config, dict):
                their_config |= {
                    "model_type": f"{their_config.get('model_type')}_text"
                } | text_config
            their_config = {
                k: v for k, v in their_config.items() if v is not None or k == "sliding_window"
            }
        # before the tensors: the reason for a pickle of Qwen2 is Qwen2
        family = family_of(their_config)
        config = configurator.build(GPTConfig, keys_of(their_config, block_size))
        for part in [] if is_of_nanogpt else files_of(folder, family):
            tensors |= read_tensors(part, family)
        weights = translated(config, family, tensors)
    except UserError as error:
        raise UserError(
            str(error) if str(error).startswith(str(folder)) else f"{folder}: {error}"
        ) from None

    checkpoint: dict[str, Any] = {
        "model": weights,
        "model_args": dataclasses.asdict(config),
        "iter_num": 0,
    }
    if os.path.exists(folder / TOKENIZER_FILE):
        tokenizer = FileTokenizer(folder / TOKENIZER_FILE)
        checkpoint["data"] = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
        checkpoint["data"]["first_ids"] = tokenizer.first_ids()
    # a state space model has any length
    longest = their_config.get(FAMILIES[family].keys.get("block_size"), 0)
    return checkpoint, longest, file


def read_nanogpt(file: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """What a config.json would say of nanoGPT's checkpoint, and its tensors. Raises UserError. The
    gelu is the exact one, as in nanoGPT's code of today; a checkpoint does not say which its code
    had."""
    check_regular(file)
    content = load_torch(file)
    args = content.get("model_args") if isinstance(content, dict) else None
    if not isinstance(args, dict) or args.keys() - {"dropout"} != set(FAMILIES["nanogpt"].keys):
        raise UserError(
            f"{file}: no checkpoint of nanoGPT, whose model_args are n_layer, n_head, n_embd, bias ..."
        )
    about = args | {"model_type": "nanogpt", "activation_function": "gelu"}
    return about, with_usual_names(content.get("model"), file, "nanogpt")


def read_tensors(file: Path, family: str) -> dict[str, torch.Tensor]:
    """The tensors of one of a folder's files. Raises UserError."""
    check_regular(file)
    if file.suffix == ".bin":
        # tensors alone, so that it runs no code
        return with_usual_names(load_torch(file), file, family)
    with one_line(f"{file}: missing, damaged, or no safetensors"):
        return with_usual_names(import_safetensors().torch.load_file(file), file, family)


def with_usual_names(content: Any, file: Path, family: str) -> dict[str, torch.Tensor]:
    """The tensors of {name: tensor}, but for LEFT_OUT, under their usual names. Raises UserError
    for anything else."""
    if not isinstance(content, dict):
        raise UserError(f"{file}: holds no table of tensors")
    content = {
        name: tensor for name, tensor in content.items() if not re.match(LEFT_OUT, str(name))
    }
    check_tensors(content, file)
    # which a folder may leave out
    tensors, prefix = {}, FAMILIES[family].blocks.partition(".")[0] + "."
    for name, tensor in content.items():
        for other, usual in SPELLINGS.items():
            name = name.replace(other, usual, 1)
        name = name.removeprefix("module.")  # of DistributedDataParallel
        tensors[name if name.startswith((prefix, "lm_head.")) else prefix + name] = tensor
    return tensors


def files_of(folder: Path, family: str) -> list[Path]:
    """The files with the weights. Raises UserError."""
    if os.path.isfile(folder / "model.safetensors"):  # before the index, as transformers reads it
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if (
        family == "mamba_ssm"
        and os.path.isfile(folder / "pytorch_model.bin")
        and not os.path.isfile(index)
    ):
        # there is nothing else; load_torch reads tensors alone
        return [folder / "pytorch_model.bin"]
    if not os.path.isfile(index):
        raise UserError(
            f"{folder}: has no model.safetensors; a pickle is not read, since it can run code"
        )
    table = read_json(index)
    if wrong := wrong_field(table, {"weight_map": {str: (str, 1, 255)}}):
        raise UserError(f"{index}: {wrong}")
    names = sorted(set(table["weight_map"].values()))
    for name in names:
        if name != os.path.basename(name) or name in (".", ".."):
            raise UserError(f"{index}: its {show(name)} is no name of a file in this folder")
    return [folder / name for name in names]


def check_regular(file: Path) -> None:
    """Raises UserError for a pipe or a device: to open one may wait for ever. A link to a file
    elsewhere is none: the cache of a hub has nothing else."""
    if is_no_file(file):
        raise UserError(f"{file}: cannot be read (is no file)")


def some(names) -> str:
    names = list(names)
    return ", ".join(names[:3])[:200] + f" and {len(names) - 3} more" * (len(names) > 3)


def translated(
    config: GPTConfig, family: str, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Our tensors. UserError names those of theirs that are missing, unknown, or of another
    shape."""
    ours = without_data(config).state_dict()
    parts = list(parts_of(config, family, ours))
    names = [name for part in parts for name in part.theirs]
    if missing := [name for name in names if name not in tensors]:
        raise UserError(f"lacks {some(missing)}, which its config.json asks for")
    if unknown := sorted(tensors.keys() - {*names, "lm_head.weight"}):
        raise UserError(f"holds {some(unknown)}, which the model here has no place for")
    weights = {}
    for part in parts:
        theirs = [tensors[name] for name in part.theirs]
        try:
            made = dict(zip(part.ours, part.to_ours(theirs), strict=True))
        except (RuntimeError, ValueError, IndexError):
            made = {}
        if any(name not in made or made[name].shape != ours[name].shape for name in part.ours):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in theirs)
            raise UserError(
                f"{some(part.theirs)}: {shapes} is not the shape that its config.json gives"
            )
        weights |= made
    if "lm_head.weight" in tensors.keys() - {*names}:  # a tied output layer, saved a second time
        if not torch.equal(tensors["lm_head.weight"].float(), weights["wte.weight"].float()):
            raise UserError(
                f"its lm_head.weight is not {some(parts[0].theirs)}, though its config.json ties them"
            )
    return weights


def export_to(
    folder: Path, file: Path, weights: dict, about: dict, texts: dict[str, bytes], overwrite: bool
) -> str:
    """Writes model.safetensors, config.json with `about`, and the files of the tokenizer. Returns
    their names.

    file: one of the model's; texts: {name: content} of the tokenizer's (hub/text.py). Raises
    UserError.
    """
    if os.path.realpath(folder) in (
        os.path.realpath(file.parent),
        os.path.dirname(os.path.realpath(file)),
    ):
        raise UserError(f"{folder}: holds the model that is to be written; name another folder")
    # an older export's tokenizer must not stay
    old = TOKENIZER_FILES if claim(folder, "export", overwrite) else ()
    with new_folder(folder, "config.json", old) as new:
        for name, content in texts.items():
            write_whole(new / name, lambda file, content=content: file.write(content))
        save_folder(new, weights, about)
    return ", ".join(["model.safetensors", "config.json", *texts])
