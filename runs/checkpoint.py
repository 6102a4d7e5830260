"""Checkpoints: written whole or not at all, loaded without running any code from the file, refused if a bit is wrong.

    save("out/ckpt.pt", {"model": model.state_dict(), ...})
    model, checkpoint = load_model("out/ckpt.pt", device="cpu")
    model, checkpoint = open_model("out/ckpt.pt")               # with the memory of one layer

What train.py puts in one: model, model_args, new (the parameters that the weights it started from lacked), optimizer,
scaler, iter_num, best_val_loss, seconds, eval_seconds, rng, run_id, config, data (name, path, sha256, tokenizer,
vocab_size, first_ids, maybe alphabet), dtype, code_sha256, code_files ({file: its own}), versions. A folder that
export.py wrote has model, model_args, iter_num and data, and is loaded in the same way.
"""

import configurator
from configurator import UserError, is_of_memory, show

import contextlib
import hashlib
import itertools
import json
import math
import os
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from data.shards import MAX_VOCAB, Dataset
from model import GPT, GPTConfig
from runs.files import read_json, write_whole, wrong_field
from runs.hardware import DTYPES, Processes

# ----------------------------------------------------------------------------------------------------------------------
# Saving


def save(path: Path | str, checkpoint: dict) -> None:
    """torch.save, whole or not at all (files.write_whole). Raises UserError."""
    try:
        write_whole(path, lambda file: torch.save(checkpoint, file))
    except (OSError, RuntimeError) as error:  # on a full disk torch.save raises a RuntimeError over the OSError
        cause = error if isinstance(error, OSError) else error.__context__ or error
        reason = getattr(cause, "strerror", None) or cause
        raise UserError(
            f"{path}: cannot write the checkpoint ({reason}); the one before it is untouched: make room, or let the "
            "folder be written to, and go on from it with --init_from=resume"
        ) from None


def import_safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError:
        raise UserError("safetensors is not installed: pip install safetensors") from None
    return safetensors.torch


# the dtypes that a weight may have
SAFETENSORS_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def save_safetensors(path: Path | str, layout: dict[str, torch.Tensor], tensors: Iterable[torch.Tensor]) -> str:
    """Writes a safetensors file and returns its sha256. Only one of the tensors has to be in memory. Raises UserError.

    layout: {name: a tensor of that shape and dtype, maybe on the meta device}, wide numbers first; tensors: their
    content in the same order. The library wants all tensors at once, and makes one text of bytes of them.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end, digest = 0, hashlib.sha256()
    for name, tensor in layout.items():
        start, end = end, end + tensor.numel() * tensor.itemsize
        about = {"dtype": SAFETENSORS_DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        header[name] = about
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of 8 bytes

    def write(file):
        content = (tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy() for tensor in tensors)
        for block in itertools.chain([len(text).to_bytes(8, "little"), text], content):
            digest.update(block)
            file.write(block)

    try:
        write_whole(path, write)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Loading


def file_of(path: Path | str) -> Path:
    """The checkpoint's file; of a folder, its ckpt.pt or model.safetensors."""
    path = Path(path)
    if os.path.isdir(path):
        names = ("ckpt.pt", "model.safetensors")
        path = next((path / name for name in names if os.path.isfile(path / name)), path / "ckpt.pt")
    return path


def load(path: Path | str, is_mapped: bool = False) -> dict:
    """The checkpoint's dict, on the CPU. Raises UserError for a file that is missing, damaged or none of ours.

    is_mapped: its tensors stay in the file, and take memory where they are read. Whoever reads one looks for NaN then.
    """
    path = file_of(path)
    if not os.path.isfile(path):
        raise UserError(
            f"{path}: no such checkpoint; train.py writes ckpt.pt and best.pt to its out_dir, and export.py "
            "--from_hf makes one of a published model's folder"
        )
    if path.suffix == ".safetensors":
        checkpoint = _load_safetensors(path)
    else:
        checkpoint = _load_torch(path, is_mapped)
    found = checkpoint if isinstance(checkpoint, dict) else {}
    missing = [name for name in ("model", "model_args") if not isinstance(found.get(name), dict)]
    if missing:
        raise UserError(f"{path}: no checkpoint of this project (it has no {' and no '.join(map(repr, missing))})")
    try:
        configurator.check_size(checkpoint, MOST_VALUES)
        wrong = wrong_field(checkpoint, FIELDS)
        json.dumps([checkpoint.get(name) for name in ("model_args", "data", "config")], allow_nan=False)
    except (ValueError, TypeError) as error:
        wrong = str(error)
    if wrong:
        raise UserError(f"{path}: no checkpoint of this project ({wrong})")
    for name, tensor in found["model"].items():
        wrong = wrong_tensor(tensor, may_be_nan=is_mapped) if isinstance(name, str) else "is no name"
        if wrong:
            raise UserError(f"{path}: its {show(name)} {wrong}")
    ours = torch.get_rng_state()
    rng = checkpoint.get("rng", ours)  # an export has none
    if not (_is_plain(rng) and rng.dtype == ours.dtype and rng.shape == ours.shape):
        raise UserError(f"{path}: no checkpoint of this project (its rng is no state of torch's random numbers)")
    return checkpoint


MOST_VALUES = 1 << 22  # values of a checkpoint and characters of its texts
# what a checkpoint holds beside its tensors; files.wrong_field says how the table is read
TEXT = (str, 0, 999)
FIELDS = {
    "model_args": (dict, 0, 999),
    "new?": [TEXT, 0, 1 << 20],
    "optimizer?": (dict, 0, 99),
    "scaler?": (dict, 0, 99),
    "iter_num?": (int, 0, 1 << 60),
    "best_val_loss?": (float, -math.inf, math.inf),
    "seconds?": (float, 0, 1e12),
    "eval_seconds?": (float, 0, 1e12),
    "run_id?": TEXT,
    "config?": {str: object},
    "data?": {
        "name?": TEXT,
        "path?": (str, 0, 1 << 12),
        "sha256?": TEXT,
        "tokenizer?": TEXT,
        "vocab_size?": (int, 1, 1 << 40),
        "first_ids?": [(int, 0, 1 << 40), 0, 99],
        "alphabet?": (str, 1, MAX_VOCAB),
    },
    "dtype?": set(DTYPES),
    "versions?": {str: TEXT},
}


def wrong_tensor(tensor: Any, may_be_nan: bool = False) -> str | None:
    """Says in words why a value of somebody's file is no weight, or returns None if it is one.

    may_be_nan: its numbers, which may lie in a mapped file, are not read.
    """
    if not _is_plain(tensor):
        return "is no plain tensor"
    if tensor.dtype not in SAFETENSORS_DTYPES:
        return f"is {tensor.dtype}, which is not read: write it as float64, float32, float16 or bfloat16"
    if not may_be_nan and tensor.numel():
        least, most = tensor.aminmax()  # NaN if there is one; takes no memory
        if not max(-least, most) <= torch.finfo(torch.float32).max:
            return "is not finite in float32: the file is broken, or its run has diverged"
    return None


def _is_plain(tensor):
    """Whether it is dense, with memory for each of its numbers: expand() can repeat one row a billion times."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return False
    if tensor.is_meta or tensor.is_neg() or tensor.is_conj():  # the last two have their sign outside of their memory
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


def _load_torch(path, is_mapped):
    try:
        with zipfile.ZipFile(path) as archive:  # reads its table of contents, which stands at the end
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise zipfile.BadZipFile
            damaged = archive.testzip()  # torch checks no checksum; this takes 0.2 s for 500 MB
        if damaged is not None:
            raise UserError(f"{path}: damaged, the checksum of {damaged[:60]!r} in it is wrong; use another checkpoint")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except UserError:
        raise
    except zipfile.BadZipFile:
        raise UserError(f"{path}: cut short, damaged, or no checkpoint") from None
    except pickle.UnpicklingError:
        raise UserError(f"{path}: refused, it is damaged or holds more than tensors and plain values") from None
    except Exception as error:  # a damaged pickle may raise anything: IndexError, struct.error, KeyError
        if is_of_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: damaged, or no checkpoint ({reason[:200]})") from None


def _load_safetensors(path):
    library, config = import_safetensors(), path.with_name("config.json")
    try:
        about = read_json(config)
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if isinstance(about, dict) and "model_type" in about:
        raise UserError(
            f"{path.parent}: is a folder of transformers: python export.py --from_hf={path.parent} reads it"
        )
    if not isinstance(about, dict) or about.get("sha256") != sha256:
        raise UserError(f"{path}: damaged, or not the file that its config.json describes (its sha256 differs)")
    try:
        return about | {"model": library.load_file(path)}  # mapped: in the file until they are read
    except Exception as error:
        if is_of_memory(error):
            raise
        raise UserError(f"{path}: damaged, or no safetensors ({str(error)[:200]})") from None


def open_model(path: Path | str, device: str = "cpu") -> tuple[GPT, dict]:
    """(model in evaluation mode, checkpoint without its weights), for a model that need not fit into the memory.

    A block reads its weights from the file when it runs, in float32, into the memory of the block before, so that
    `model.features` takes the memory of one layer's weights. `model.logits` reads the embedding as the file has it.
    """
    file = file_of(path)
    opened = _version_of(file)
    checkpoint = load(path, is_mapped=True)
    config = configurator.build(GPTConfig, checkpoint["model_args"] | {"kernels": "auto"}, source=str(path))
    with _wrong_weights_named(path):
        model = _on_meta(config, checkpoint.pop("model"), path)[0].eval()

    def checked(name, tensor):
        if wrong := wrong_tensor(tensor):
            raise UserError(f"{path}: its {name!r} {wrong}")
        return tensor.float()

    for name, module in filter(lambda part: part[1] is not None, (("norm", model.norm), ("wpe", model.wpe))):
        checked(f"{name}.weight", module.weight.data)
        module.to(device, torch.float32)
    model.wte.to(device)  # nothing on a CPU, where a lookup reads its rows from the file
    model.wte.register_forward_hook(lambda wte, args, x: checked("wte.weight", x))

    filled, held = [], {}  # held: its weights, which the next block's overwrite where they have the same shape

    def fill(block, args):
        if filled:
            filled.pop().to("meta")
        shapes = {name: tensor.shape for name, tensor in block.state_dict().items()}
        for name in [name for name, tensor in held.items() if shapes.get(name) != tensor.shape]:
            del held[name]
        weights = _tensors_of(file)  # mapped anew, so that the pages that a layer has touched are given back
        if _version_of(file) != opened:
            raise UserError(f"{file}: was replaced while it was read; copy it, and read the copy")
        for name, shape in shapes.items():
            if name not in held:
                held[name] = torch.empty(shape, dtype=torch.float32, device=device)
            whole_name = f"blocks.{block.mixer.layer}.{name}"
            held[name].copy_(weights[whole_name])
            checked(whole_name, held[name])
        block.load_state_dict(held, assign=True)
        filled.append(block)

    for block in model.blocks:
        block.to("meta").register_forward_pre_hook(fill)
    return model, checkpoint


def _version_of(file):
    """What changes when a file is replaced or written to; None if it is missing."""
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _tensors_of(file):
    """The weights of a file that load has checked, mapped."""
    if file.suffix == ".safetensors":
        return import_safetensors().load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)["model"]


def load_model(path: Path | str, device: str = "cpu", **changed: object) -> tuple[GPT, dict]:
    """(model in evaluation mode, checkpoint without its optimizer).

    changed: keys of GPTConfig that need no weights of their own.
    """
    checkpoint = load(path)
    checkpoint.pop("optimizer", None)  # twice the memory of the weights
    model_args = checkpoint["model_args"] | {"kernels": "auto"} | changed  # this machine may lack those it had
    config = configurator.build(GPTConfig, model_args, source=str(path))
    return build_model(config, checkpoint["model"], path, device).eval(), checkpoint


def check_same_weights(processes: Processes, weights: dict[str, torch.Tensor], path: Path | str) -> None:
    """UserError unless all processes have read the same: machines see other files, and a run replaces its own."""
    if processes.world_size == 1:
        return
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        content = weights[name].detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(content.numpy().data)
    advice = "give all machines the same file, one that no run writes to meanwhile"
    processes.check_same(digest.hexdigest(), str(path), advice)


def check_vocabulary(vocab_size: float, checkpoint: dict, dataset: Dataset) -> None:
    """UserError for data whose ids mean something else to the checkpoint's model."""
    if dataset.vocab_size > vocab_size:
        raise UserError(f"{dataset.folder}: has {dataset.vocab_size} token ids, the model knows {vocab_size}")
    tokenizer = checkpoint.get("data", {}).get("tokenizer", dataset.tokenizer)
    if dataset.tokenizer != tokenizer:
        raise UserError(
            f"{dataset.folder}: its tokenizer is {dataset.tokenizer!r}, the model was trained with {tokenizer!r}; "
            "--dataset=FOLDER names other data"
        )
    if dataset.alphabet != checkpoint.get("data", {}).get("alphabet", dataset.alphabet):
        raise UserError(f"{dataset.folder}: its characters are others than those that the model was trained with")


def build_model(config: GPTConfig, weights: dict[str, torch.Tensor], path: Path | str, device: str = "cpu") -> GPT:
    """The GPT of the config with these weights, which must be all of its own. Raises UserError.

    The weights are not copied where they have the model's dtype and are on its device: the model then owns them.
    """
    with _wrong_weights_named(path):
        model, dtypes = _on_meta(config, weights, path)
        own = {name: weights[name].to(device, dtype).contiguous() for name, dtype in dtypes.items()}
        model.load_state_dict(own, assign=True)
    return model


def _on_meta(config, weights, path):
    """(the GPT whose parameters are these very tensors, {name: the dtype that it would have given to each}).

    No memory is taken: the config of a stranger's file may ask for terabytes.
    """
    if config.n_layer > len(weights):
        raise UserError(f"{path}: n_layer={config.n_layer}, and it has {len(weights)} tensors")
    with torch.device("meta"):
        model = GPT(config)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    return model, dtypes


@contextlib.contextmanager
def _wrong_weights_named(path):
    try:
        yield
    except (RuntimeError, TypeError, OverflowError) as error:
        if is_of_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[:2][-1].strip()
        raise UserError(f"{path}: its weights are not those of its config: {reason[:200]}") from None
