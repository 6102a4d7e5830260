"""Checkpoints: written whole or not at all, and loaded without running any code from the file.

    save("out/ckpt.pt", {"model": model.state_dict(), ...})
    model, checkpoint = load_model("out/ckpt.pt", device="cpu")

What train.py puts in one: model, model_args, optimizer, scaler, iter_num, best_val_loss, rng, config, data
(name, sha256, tokenizer, vocab_size), dtype, versions.
"""

import os
import pickle
import zipfile
from pathlib import Path

import torch

import configurator
from configurator import UserError
from model import GPT, GPTConfig


def save(path, checkpoint):
    """torch.save to a temporary file in the same folder, fsync, rename: a kill leaves the old file or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # on a full disk torch.save raises a RuntimeError over the OSError
        cause = error if isinstance(error, OSError) else error.__context__ or error
        reason = getattr(cause, "strerror", None) or cause
        raise UserError(f"{path}: cannot write the checkpoint ({reason}); the one before it is untouched") from None
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)


def load(path, device="cpu"):
    """The checkpoint's dict. Raises UserError for what is missing, damaged, or no checkpoint of this project."""
    path = Path(path)
    if path.is_dir():
        path = path / "ckpt.pt"
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; train.py writes ckpt.pt and best.pt to its out_dir")
    try:
        zipfile.ZipFile(path).close()  # reads its table of contents, which stands at the end
        checkpoint = torch.load(path, map_location=device, weights_only=True)
    except zipfile.BadZipFile:
        raise UserError(f"{path}: cut short, damaged, or no checkpoint") from None
    except pickle.UnpicklingError:
        raise UserError(f"{path}: refused, it is damaged or holds more than tensors and plain values") from None
    except Exception as error:  # a damaged pickle may raise anything: IndexError, struct.error, KeyError
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: damaged, or no checkpoint ({reason})") from None
    found = checkpoint if isinstance(checkpoint, dict) else {}
    missing = [name for name in ("model", "model_args") if not isinstance(found.get(name), dict)]
    if missing:
        raise UserError(f"{path}: no checkpoint of this project (it has no {' and no '.join(map(repr, missing))})")
    return checkpoint


def load_model(path, device="cpu", **changed):
    """(model in evaluation mode, checkpoint). `changed`: keys of GPTConfig that need no weights of their own."""
    checkpoint = load(path, device)
    model_args = checkpoint["model_args"] | {"kernels": "auto"} | changed  # this machine may lack those it had
    model = GPT(configurator.build(GPTConfig, model_args, source=str(path))).to(device)
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        differences = str(error).splitlines()
        raise UserError(f"{path}: its weights are not those of its config: {differences[1].strip()}") from None
    return model.eval(), checkpoint
