"""checkpoint=sharded: each process writes its part of the weights and moments, while the training goes on.

    saving = save(folder, tensors, group, then)     # the tensors are in RAM when it returns
    wait(saving)                                    # until all is written; raises what went wrong on any process
    read(folder, tensors)                           # fills tensors, whole ones or shards of any number of processes

A folder has a safetensors file for each process: torch.distributed.checkpoint writes and reads them, without its
.metadata, which is a pickle. All else is in ckpt.pt, with the folder's name and the SHA-256 of its files.
"""

import dataclasses
import re
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from configurator import UserError, is_of_memory, show
from runs.files import sha256_of_file, sync_folder
from runs.hardware import places_of_torchrun

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process, or where each reads by itself
FOLDERS = "ckpt"  # of an out_dir: the folders with shards
NAME = re.compile(r"[0-9]+-[0-9a-f]{8}")  # of each of them: the step, and digits of its own


def save(folder: Path, tensors: dict[str, torch.Tensor], group: Any, then: Callable[[dict], None]) -> Any:
    """Starts to write the tensors. When all processes have, rank 0 calls then({name of a file: its SHA-256})."""
    # imported here: no other run needs them
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, async_save

    class Writer(HuggingFaceStorageWriter):
        def write_data(self, plan, planner):
            written = super().write_data(plan, planner).wait()
            names = {result.storage_data.relative_path for result in written}
            sums = {name: sha256_of_file(folder / name) for name in names}
            done = torch.futures.Future()
            done.set_result([dataclasses.replace(result, storage_data=sums) for result in written])
            return done

        def finish(self, metadata, results):  # on rank 0 alone
            sync_folder(folder)
            sync_folder(folder.parent)
            then({name: sha256 for rank in results for result in rank for name, sha256 in result.storage_data.items()})

    writer = Writer(str(folder), save_distributed=True)
    return async_save(tensors, storage_writer=writer, process_group=group)


def wait(saving: Any) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        saving.result()
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise UserError(str(first) if isinstance(first, UserError) else f"no checkpoint is written: {first}") from None


def folder_of(file: Path, shards: dict) -> Path:
    """The folder beside a ckpt.pt or best.pt. Raises UserError for a name that could lead elsewhere."""
    if not NAME.fullmatch(shards["folder"]):
        raise UserError(f"{file}: {show(shards['folder'])} is no folder of shards")
    return file.parent / FOLDERS / shards["folder"]


def shapes(folder: Path, files: dict[str, str]) -> dict[str, torch.Size]:
    """{name: shape} of the tensors in a folder. Raises UserError unless its files are those of the checkpoint."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    there = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    if wrong := sorted(there ^ files.keys()):
        raise UserError(f"{folder}: {show(wrong[0])} is {'not of the checkpoint' if wrong[0] in there else 'missing'}")
    _, _, local_rank, local_size = places_of_torchrun()
    for name in sorted(files)[local_rank::local_size]:  # the processes of a machine share the work
        if sha256_of_file(folder / name) != files[name]:
            raise UserError(f"{folder / name}: damaged (its sha256 differs); use another checkpoint")
    found = _named(folder, HuggingFaceStorageReader(str(folder)).read_metadata)
    return {name: tensor.size for name, tensor in found.state_dict_metadata.items()}


def read_whole(file: Path, shards: dict, parts: Collection[str]) -> dict[str, torch.Tensor]:
    """The tensors of these parts, whole, of the checkpoint in a ckpt.pt. Raises UserError."""
    folder = folder_of(file, shards)
    found = shapes(folder, shards["files"]) if parts else {}
    tensors = {name: torch.empty(shape) for name, shape in found.items() if name.split("/")[0] in parts}
    read(folder, tensors)
    return tensors


def read(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fills the tensors of these names: each process reads the rows that it has. Raises UserError."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    _named(folder, lambda: load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True))


def _named(folder, call):
    """The call's result. What it raises becomes a UserError that names the folder."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        return call()
    except (Exception, CheckpointException) as error:  # the second is no Exception
        if is_of_memory(error):
            raise
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
        raise UserError(f"{folder}: cannot be read ({next(iter(causes), error)})") from None


def flat(checkpoint: dict) -> dict[str, torch.Tensor]:
    """{"model/NAME": weight, "optimizer/NAME/PART": moment} of a checkpoint."""
    moments = checkpoint["optimizer"]["state"].items()
    weights = {f"model/{name}": tensor.detach() for name, tensor in checkpoint["model"].items()}
    return weights | {f"optimizer/{name}/{part}": x for name, parts in moments for part, x in parts.items()}


def nested(tensors: dict[str, torch.Tensor]) -> tuple[dict, dict]:
    """The other way: (weights, {name of a parameter: its moments})."""
    weights, moments = {}, {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "model":
            weights[rest] = tensor
        else:
            parameter, _, part = rest.rpartition("/")
            moments.setdefault(parameter, {})[part] = tensor
    return weights, moments
