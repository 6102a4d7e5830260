"""Checkpoints: what train.py saves, and what every script that needs a model reads.

    save("out/ckpt.pt", {"model": weights, ...})
    model, checkpoint = load_model("out/ckpt.pt", device="cpu")

FIELDS and OF_A_RUN list what one of train.py's holds. A folder that hub/export.py wrote has model,
model_args, iter_num, data and dtype, and is loaded in the same way. Both have a format number. A
folder of transformers is read as hub/export.py --from_hf reads it (hub/huggingface.py).
"""

import functools
import json
import math
from pathlib import Path

import torch

import variants  # noqa: F401  a checkpoint may have any mixer
from base import configurator
from base.configurator import UserError, show
from base.files import CHECKPOINTS, find_checkpoint, one_line, write_whole
from base.rules import wrong_field
from base.tensors import FORMAT, about_folder, check_tensors, load_folder, load_torch
from data.meta import MAX_VOCAB
from data.shards import Dataset, open_dataset
from keys import keys_of_today
from model import GPT, GPTConfig
from runs.hardware import DTYPES
from runs.memory import NotEnoughMemory, without_data

# how the names of the files end that read_folder reads
OF_FOLDERS = {".gguf", *(Path(name).suffix for name in CHECKPOINTS[1:])}
TEXT = (str, 0, 999)
SECONDS = (float, 0, 1e12)
# what a checkpoint holds beside "model", its weights; base/rules.py says how the tables are read
FIELDS = {
    "format?": (int, 0, 1 << 30),
    "model_args": (dict, 0, 999),
    "iter_num?": (int, 0, 1 << 60),
    "dtype?": set(DTYPES),
    "data?": {  # what it was trained on
        "name?": TEXT,
        "path?": (str, 0, 1 << 12),
        "sha256?": TEXT,
        "tokenizer?": TEXT,
        "mixture?": (str, 1, 1 << 16),
        "vocab_size?": (int, 1, 1 << 40),
        "first_ids?": [(int, 0, 1 << 40), 0, 99],
        "alphabet?": (str, 1, MAX_VOCAB),
        "tokenizer_json?": (str, 1, 1 << 26),  # of a GGUF file, which has the tokenizer in it
        "mask_documents?": (bool, 0, 1),
    },
}
# and what a run goes on from
OF_A_RUN = {
    "config?": {str: object},
    "optimizer?": {"state": {str: (dict, 0, 99)}},  # resume.check_moments looks at the tensors
    "scaler?": (dict, 0, 99),
    "rng?": object,
    "best_val_loss?": (float, 0, math.inf),  # infinite before the first evaluation
    "seconds?": SECONDS,
    "eval_seconds?": SECONDS,
    "run_id?": (str, 32, 32),
    "code_files?": {str: TEXT},  # {file: its sha256}
}


def save(path: Path | str, checkpoint: dict) -> None:
    """torch.save with the format number, whole or not at all (files.write_whole). Raises
    UserError."""
    try:
        write_whole(path, functools.partial(torch.save, checkpoint | {"format": FORMAT}))
    except RuntimeError as error:  # torch's own, over the OSError of a full disk
        raise UserError(f"{path}: cannot be written ({error.__context__ or error})") from None


def load(path: Path | str, mapped: bool = False) -> dict:
    """The checkpoint's dict, on the CPU, its keys called as today. Raises UserError for a file that
    is missing, damaged or no checkpoint. mapped: as in load_torch."""
    path = find_checkpoint(path)
    checkpoint = load_torch(path, mapped) if path.suffix not in OF_FOLDERS else read_folder(path)
    with one_line(f"{path}: no checkpoint of this project", ValueError, TypeError):
        wrong = wrong_field(checkpoint, FIELDS)
        if wrong or not isinstance(checkpoint.get("model"), dict):
            raise ValueError(wrong or "it has no model")
        json.dumps([checkpoint.get(name) for name in ("model_args", "data")], allow_nan=False)
    number = checkpoint.get("format")
    if number is None and any(
        str(name).endswith("transformer.wte.weight") for name in checkpoint["model"]
    ):
        from hub import huggingface  # nanoGPT's own ckpt.pt

        checkpoint = huggingface.checkpoint_of(path)
    elif number != FORMAT:
        raise UserError(
            f"{path}: its format is {show(number)}, and this version reads {FORMAT} alone: take "
            "the version of the code that wrote it"
        )
    wrong = wrong_field(checkpoint, OF_A_RUN)
    if wrong:
        raise UserError(f"{path}: no run has written this ({wrong})")
    check_tensors(checkpoint["model"], path)
    with one_line(f"{path}: cannot be read"):
        for name in ("model_args", "config"):
            if name in checkpoint:
                checkpoint[name] = keys_of_today(checkpoint[name])
    return checkpoint


def read_folder(file: Path) -> dict:
    """The checkpoint of a folder of ours, of one for transformers, or of a GGUF file."""
    if file.suffix != ".gguf" and "model_type" not in about_folder(file):
        return load_folder(file)
    from hub import huggingface  # most scripts read no such folder

    return huggingface.checkpoint_of(file) | {"format": FORMAT}


def load_model(path: Path | str, device: str = "cpu", **changed: object) -> tuple[GPT, dict]:
    """(model in evaluation mode, checkpoint without its optimizer).

    changed: keys of GPTConfig that no weight depends on.
    """
    checkpoint = load(path, mapped=True)
    checkpoint.pop("optimizer", None)  # twice the memory of the weights
    weights = checkpoint["model"]
    for name in weights:
        weights[name] = weights[name].clone()
    # this machine may lack the kernels it had
    model_args = checkpoint["model_args"] | {"kernels": "auto"} | changed
    config = configurator.build(GPTConfig, model_args, source=str(path))
    return build_model(config, weights, path, device).eval(), checkpoint


def build_model(
    config: GPTConfig, weights: dict[str, torch.Tensor], path: Path | str, device: str = "cpu"
) -> GPT:
    """The GPT of the config with these weights, which must be exactly those it has. Raises
    UserError.

    The weights are not copied where they have the model's dtype and are on its device: the model
    then owns them.
    """
    wrong = f"{path}: its weights are not those of its config"
    with one_line(wrong, RuntimeError, TypeError, OverflowError):
        try:
            model = without_data(config)  # the config of a stranger's file may ask for terabytes
        except NotEnoughMemory as error:
            raise UserError(f"{path}: {error}") from None
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        model.load_state_dict(weights, assign=True)  # before anything is copied
        if has_no_data(model):
            with torch.random.fork_rng(devices=[]):
                model = GPT(config).to(device)
        made = {}
        for name, dtype in dtypes.items():
            made[name] = weights[name].to(device, dtype).contiguous()
        model.load_state_dict(made, assign=True)
    return model


def has_no_data(model: GPT) -> bool:
    """Whether the model has tensors without data, which no checkpoint holds, such as buffers that
    are not persistent."""
    for module in model.modules():
        for value in (*vars(module).values(), *module._buffers.values()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                return True
    return False


def data_of(
    checkpoint: dict, name: str | None = None, mask_documents: bool | None = None
) -> Dataset:
    """The data set of that name, or the one of training, of a mixture its first part.
    mask_documents=None: as there."""
    trained_on = checkpoint.get("data", {})
    if mask_documents is None:
        mask_documents = trained_on.get("mask_documents", False)
    return open_dataset(name or trained_on.get("path", ""), mask_documents)


def check_vocabulary(vocab_size: int, checkpoint: dict, dataset: Dataset) -> None:
    """UserError for data that the checkpoint's model, of so many ids, cannot read."""
    if dataset.vocab_size > vocab_size:
        raise UserError(
            f"{dataset.folder}: has {dataset.vocab_size} token ids, the model knows {vocab_size}"
        )
    check_same_meaning(checkpoint, dataset)


def check_same_meaning(checkpoint: dict, dataset: Dataset) -> None:
    """UserError for data whose ids mean something else to the checkpoint's model."""
    for name in ("tokenizer", "alphabet"):
        ours = getattr(dataset, name)
        theirs = checkpoint.get("data", {}).get(name, ours)
        if ours != theirs:
            raise UserError(
                f"{dataset.folder}: its {name} is {show(ours)}, the model was trained with "
                f"{show(theirs)}"
            )
