"""Files of tensors: loaded without running any code from the file, refused if a bit is wrong.

load_torch("out/ckpt.pt")                       # what torch.save wrote
save_folder(folder, weights, about)             # model.safetensors and config.json
load_folder(folder / "model.safetensors")
"""

import json
import pickle
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from base.files import one_line, read_json, sha256_of_file, write_text, write_whole
from base.rules import UserError, show

FORMAT = 1  # of what is written here; nothing else is read
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_torch(path: Path | str, mapped: bool = False) -> Any:
    """What torch.save wrote: tensors and plain values, on the CPU, and no code is run. Raises
    UserError.

    mapped: the tensors stay in the file until they are read, for callers that copy at once what
    they keep; a process dies if the file is overwritten in place then.
    """
    # a damaged pickle may raise IndexError, struct.error ...
    with one_line(f"{path}: damaged, or no checkpoint of tensors and plain values"):
        # reads its table of contents, which stands at the end
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch checks no checksum; this takes 0.2 s for 500 MB
        if damaged is not None:
            raise UserError(
                f"{path}: damaged, the checksum of {damaged[:60]!r} in it is wrong; use another "
                "checkpoint"
            )
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError:  # whose text advises to run what is in the file
            raise UserError(
                f"{path}: refused, it is damaged or holds more than tensors and plain values"
            ) from None


def import_safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError:
        raise UserError("safetensors is not installed: pip install safetensors") from None
    return safetensors


def save_folder(folder: Path, weights: dict[str, torch.Tensor], about: dict) -> None:
    """Writes model.safetensors and then config.json: `about`, FORMAT and the weights' sha256.
    Raises UserError."""
    library = import_safetensors()
    file = folder / "model.safetensors"
    plain = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    with one_line(f"{file}: cannot be written"):
        write_whole(file, lambda part: library.torch.save_file(plain, part.name, {"format": "pt"}))
    about = about | {"format": FORMAT, "sha256": sha256_of_file(file)}
    # load_folder refuses what is no JSON
    write_text(folder / "config.json", json.dumps(about, indent=2, allow_nan=False))


def about_folder(file: Path) -> dict:
    """What the config.json beside a file of weights holds; {} where it is no object."""
    about = read_json(file.with_name("config.json"), infinity=True)
    return about if isinstance(about, dict) else {}


def load_folder(file: Path) -> dict:
    """What save_folder wrote; the weights, under "model", stay in the file until they are read.
    Raises UserError."""
    library = import_safetensors()
    about = about_folder(file)
    with one_line(f"{file}: damaged, or no safetensors"):
        if about.get("sha256") != sha256_of_file(file):
            raise UserError(
                f"{file}: damaged, or not the file that its config.json describes (its sha256 "
                "differs)"
            )
        return about | {"model": library.torch.load_file(file)}


def check_tensors(tensors: dict, path: Path) -> None:
    """Raises UserError, with the path, where one is no weight or has no name."""
    for name, tensor in tensors.items():
        wrong = wrong_tensor(tensor) if isinstance(name, str) else "is no name"
        if wrong:
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
        return f"is {tensor.dtype}: write it as float64, float32, float16 or bfloat16"
    if tensor.numel():
        least, most = tensor.aminmax()  # NaN if there is one; takes no memory
        if not max(-least, most) <= torch.finfo(torch.float32).max:
            return "is not finite in float32: the file is broken, or its run has diverged"
    return None
