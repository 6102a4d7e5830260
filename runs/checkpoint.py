"""Checkpoints: written whole or not at all, loaded without running any code from the file, refused
if a bit is wrong.

    save("out/ckpt.pt", {"model": model.state_dict(), ...})
    model, checkpoint = load_model("out/ckpt.pt", device="cpu")

What train.py puts in one: model, model_args, new (the parameters that the weights it started from
lacked), optimizer, scaler, iter_num, best_val_loss, seconds, eval_seconds, rng, run_id, config,
data (name, path, sha256, tokenizer, vocab_size, first_ids, maybe alphabet, mask_documents,
mixture), dtype, code_sha256, code_files ({file: its sha256}), versions. A folder that export.py
wrote has model, model_args, iter_num, data and dtype, and is loaded in the same way. Both have a
format number. A folder of transformers is read as export.py --from_hf reads it
(hub/huggingface.py).
"""

import json
import pickle
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import configurator
from configurator import UserError, show
from data.shards import MAX_VOCAB, Dataset, open_dataset
from model import GPT, GPTConfig
from runs.files import (
    CHECKPOINTS,
    find_checkpoint,
    one_line,
    read_json,
    sha256_of_file,
    write_text,
    write_whole,
)
from runs.hardware import DTYPES, Processes, places_of_torchrun
from runs.rules import wrong_field

FORMAT = 1  # of what is written here; nothing else is read
WITHOUT_FORMAT = (
    "of version 0.2, which the code of commit fa2548f reads, or nanoGPT's, for export.py --from_hf"
)
# of a file with a config.json beside it
OF_FOLDERS = {Path(name).suffix for name in CHECKPOINTS[1:]}
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# what a checkpoint holds beside its tensors; rules.wrong_field says how the table is read
TEXT = (str, 0, 999)
FIELDS = {
    "format?": (int, 0, 1 << 30),
    "model_args": (dict, 0, 999),
    "iter_num?": (int, 0, 1 << 60),
    "dtype?": set(DTYPES),
    "data?": {
        "name?": TEXT,
        "path?": (str, 0, 1 << 12),
        "sha256?": TEXT,
        "tokenizer?": TEXT,
        "mixture?": (str, 1, 1 << 16),
        "vocab_size?": (int, 1, 1 << 40),
        "first_ids?": [(int, 0, 1 << 40), 0, 99],
        "alphabet?": (str, 1, MAX_VOCAB),
        "mask_documents?": (bool, 0, 1),
    },
}
# the last code that has the keys shards, gather_dtype and checkpoint, and reads what they wrote
LAST_WITH_SHARDS = "27a232e"
# keys of older checkpoints that said how processes shared a run: any others may go on with it
GONE = {"shards", "gather_dtype", "checkpoint"}


def save(path: Path | str, checkpoint: dict) -> None:
    """torch.save with the format number, whole or not at all (files.write_whole). Raises
    UserError."""
    try:
        write_whole(path, lambda file: torch.save(checkpoint | {"format": FORMAT}, file))
    except RuntimeError as error:  # torch's own, over the OSError of a full disk
        raise UserError(f"{path}: cannot be written ({error.__context__ or error})") from None


def import_safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError:
        raise UserError("safetensors is not installed: pip install safetensors") from None
    return safetensors


def save_folder(folder: Path, weights: dict[str, torch.Tensor], about: dict) -> None:
    """Writes model.safetensors and then config.json: `about`, FORMAT and the weights' sha256.
    Raises UserError."""
    library, file = import_safetensors(), folder / "model.safetensors"
    plain = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    with one_line(f"{file}: cannot be written"):
        write_whole(file, lambda part: library.torch.save_file(plain, part.name, {"format": "pt"}))
    about = about | {"format": FORMAT, "sha256": sha256_of_file(file)}
    # load has refused what is no JSON
    write_text(folder / "config.json", json.dumps(about, indent=2, allow_nan=False))


def load(path: Path | str, mapped: bool = False) -> dict:
    """The checkpoint's dict, on the CPU. Raises UserError for a file that is missing, damaged or no
    checkpoint.

    mapped: the tensors stay in the file (load_torch), for callers that copy at once what they keep."""
    path = find_checkpoint(path)
    checkpoint = load_torch(path, mapped) if path.suffix not in OF_FOLDERS else _load_folder(path)
    with one_line(f"{path}: no checkpoint of this project", ValueError, TypeError):
        wrong = wrong_field(checkpoint, FIELDS)
        if wrong or not isinstance(checkpoint.get("model"), dict):
            raise ValueError(wrong or "it has no model")
        json.dumps([checkpoint.get(name) for name in ("model_args", "data")], allow_nan=False)
    if (number := checkpoint.get("format")) != FORMAT:
        reason = WITHOUT_FORMAT if number is None else "take the version of the code that wrote it"
        raise UserError(
            f"{path}: its format is {show(number)}, and this version reads {FORMAT} alone: {reason}"
        )
    if "shards" in checkpoint:
        raise UserError(
            f"{path}: its tensors are in shards beside it; export.py --whole of commit {LAST_WITH_SHARDS} makes "
            "one file of them, and this version reads that"
        )
    for name in ("model_args", "config"):
        if isinstance(checkpoint.get(name), dict):
            checkpoint[name] = keys_of_today(checkpoint[name])
    check_tensors(checkpoint["model"], path)
    return checkpoint


def keys_of_today(keys: dict) -> dict:
    """The keys of an older checkpoint, without those that are gone and said nothing of the model."""
    return {name: value for name, value in keys.items() if name not in GONE}


def check_tensors(tensors: dict, path: Path) -> None:
    """Raises UserError, with the path, where one is no weight or has no name."""
    for name, tensor in tensors.items():
        if wrong := wrong_tensor(tensor) if isinstance(name, str) else "is no name":
            raise UserError(f"{path}: its {show(name)} {wrong}")


def wrong_tensor(tensor: Any) -> str | None:
    """Says in words why a value of somebody's file is no weight, or returns None if it is one."""
    # dense, with memory for each of its numbers: expand() can repeat one row a billion times
    is_plain = (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
    )
    if not is_plain:
        return "is no plain tensor"
    if tensor.dtype not in WEIGHT_DTYPES:
        return f"is {tensor.dtype}, which is not read: write it as float64, float32, float16 or bfloat16"
    if tensor.numel():
        least, most = tensor.aminmax()  # NaN if there is one; takes no memory
        if not max(-least, most) <= torch.finfo(torch.float32).max:
            return "is not finite in float32: the file is broken, or its run has diverged"
    return None


def load_torch(path: Path, mapped: bool = False) -> Any:
    """What torch.save wrote: tensors and plain values, and no code is run. Raises UserError.

    mapped: the tensors stay in the file until they are read; a process dies if the file is
    overwritten in place then.
    """
    _, _, local_rank, local_size = places_of_torchrun()
    # a damaged pickle may raise IndexError, struct.error ...
    with one_line(f"{path}: damaged, or no checkpoint"):
        try:
            # reads its table of contents, which stands at the end
            with zipfile.ZipFile(path) as archive:
                # compressed numbers cannot be mapped, and torch would take their bytes for numbers
                mapped = mapped and all(
                    record.compress_type == zipfile.ZIP_STORED for record in archive.filelist
                )
                # the processes of a machine share the work
                archive.filelist = archive.filelist[local_rank::local_size]
                damaged = archive.testzip()  # torch checks no checksum; this takes 0.2 s for 500 MB
            if damaged is None:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
            wrong = (
                f"damaged, the checksum of {damaged[:60]!r} in it is wrong; use another checkpoint"
            )
        except zipfile.BadZipFile:
            wrong = "cut short, damaged, or no checkpoint"
        except pickle.UnpicklingError:
            wrong = "refused, it is damaged or holds more than tensors and plain values"
    raise UserError(f"{path}: {wrong}")


def _load_folder(path):
    library, about = import_safetensors(), read_json(path.with_name("config.json"), infinity=True)
    about = about if isinstance(about, dict) else {}
    if not about.keys().isdisjoint(("model_type", "ssm_cfg")):  # the second: Mamba-2 of its authors
        from hub import huggingface  # which imports this file

        return huggingface.checkpoint_of(path.parent)[0] | {"format": FORMAT}
    with one_line(f"{path}: damaged, or no safetensors"):
        if about.get("sha256") != sha256_of_file(path):
            raise UserError(
                f"{path}: damaged, or not the file that its config.json describes (its sha256 differs)"
            )
        # mapped: in the file until they are read
        return about | {"model": library.torch.load_file(path)}


def load_model(path: Path | str, device: str = "cpu", **changed: object) -> tuple[GPT, dict]:
    """(model in evaluation mode, checkpoint without its optimizer).

    changed: keys of GPTConfig that no weight depends on.
    """
    checkpoint = load(path, mapped=True)
    checkpoint.pop("optimizer", None)  # twice the memory of the weights
    weights = checkpoint["model"]
    for name in weights:
        weights[name] = weights[name].clone()
    # this machine may lack those it had
    model_args = checkpoint["model_args"] | {"kernels": "auto"} | changed
    config = configurator.build(GPTConfig, model_args, source=str(path))
    return build_model(config, weights, path, device).eval(), checkpoint


def data_of(
    checkpoint: dict, name: str | None = None, mask_documents: bool | None = None
) -> Dataset:
    """The data set of that name, or the one of training, of a mixture its first part.
    mask_documents=None: as there."""
    trained_on = checkpoint.get("data", {})
    is_masked = (
        trained_on.get("mask_documents", False) if mask_documents is None else mask_documents
    )
    return open_dataset(name or trained_on.get("path", ""), is_masked)


def check_same_weights(processes: Processes, path: Path | str) -> None:
    """UserError unless all processes see the same file: machines may have others at the path."""
    if processes.world_size > 1:
        advice = "give all machines the same file, one that no run writes to meanwhile"
        processes.check_same(sha256_of_file(find_checkpoint(path)), str(path), advice)


def check_vocabulary(vocab_size: float, checkpoint: dict, dataset: Dataset) -> None:
    """UserError for data whose ids mean something else to the checkpoint's model."""
    if dataset.vocab_size > vocab_size:
        raise UserError(
            f"{dataset.folder}: has {dataset.vocab_size} token ids, the model knows {vocab_size}"
        )
    for name in ("tokenizer", "alphabet"):
        ours, theirs = (
            getattr(dataset, name),
            checkpoint.get("data", {}).get(name, getattr(dataset, name)),
        )
        if ours != theirs:
            raise UserError(
                f"{dataset.folder}: its {name} is {show(ours)}, the model was trained with {show(theirs)}"
            )


def build_model(
    config: GPTConfig, weights: dict[str, torch.Tensor], path: Path | str, device: str = "cpu"
) -> GPT:
    """The GPT of the config with these weights, which must be exactly those it has. Raises
    UserError.

    The weights are not copied where they have the model's dtype and are on its device: the model
    then owns them.
    """
    with one_line(
        f"{path}: its weights are not those of its config", RuntimeError, TypeError, OverflowError
    ):
        with torch.device("meta"):  # the config of a stranger's file may ask for terabytes
            model = GPT(config)
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        model.load_state_dict(weights, assign=True)  # before anything is copied
        others = [
            x for module in model.modules() for x in (vars(module) | module._buffers).values()
        ]
        if any(isinstance(x, torch.Tensor) and x.is_meta for x in others):
            # what no checkpoint holds, such as buffers that are not persistent
            with torch.random.fork_rng(devices=[]):
                model = GPT(config).to(device)
        made = {
            name: weights[name].to(device, dtype).contiguous() for name, dtype in dtypes.items()
        }
        model.load_state_dict(made, assign=True)
    return model
