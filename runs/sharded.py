"""checkpoint=sharded: each process writes its part of the weights and moments, while the training
goes on.

    saving = save(folder, flat(checkpoint), group, then)    # the tensors are in RAM when it returns
    wait(saving)                                            # until all is written
    weights, moments = read(file, shards, tensor_for)       # whole, or as shards of any number of processes

A folder has a safetensors file for each process: torch.distributed.checkpoint writes and reads
them, without its .metadata, which is a pickle. All else is in ckpt.pt, with the folder's name and
the SHA-256 of its files.
"""

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from configurator import UserError, show
from runs.files import one_line, sha256_of_file, sync_folder
from runs.hardware import places_of_torchrun

# in one process, or where each reads by itself
warnings.filterwarnings("ignore", "torch.distributed is disabled")
FOLDERS = "ckpt"  # of an out_dir: the folders with shards
NAME = re.compile(r"[0-9]+-[0-9a-f]{8}")  # of each of them: the step, and digits of its own


def flat(checkpoint: dict) -> dict[str, torch.Tensor]:
    """{"model/NAME": weight, "optimizer/NAME/PART": moment} of a checkpoint."""
    moments = checkpoint["optimizer"]["state"].items()
    weights = {f"model/{name}": tensor.detach() for name, tensor in checkpoint["model"].items()}
    return weights | {
        f"optimizer/{name}/{part}": x for name, parts in moments for part, x in parts.items()
    }


def save(
    folder: Path, tensors: dict[str, torch.Tensor], group: Any, then: Callable[[dict], None]
) -> Any:
    """Starts to write the tensors. When all processes have, rank 0 calls then({name of a file: its
    SHA-256})."""
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
            then(
                {
                    name: sha256
                    for rank in results
                    for result in rank
                    for name, sha256 in result.storage_data.items()
                }
            )

    writer = Writer(str(folder), save_distributed=True)
    return async_save(tensors, storage_writer=writer, process_group=group)


def wait(saving: Any) -> None:
    """Until all is written. Raises UserError."""
    with one_line("no checkpoint is written", Exception), first_cause():
        saving.result()


@contextlib.contextmanager
def first_cause() -> Iterator[None]:
    """What the first process has failed with, in place of torch's CheckpointException, which is no
    Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def read(
    file: Path, shards: dict, tensor_for: Callable[[str, torch.Size], torch.Tensor | None]
) -> tuple[dict, dict]:
    """(weights, {name of a parameter: its moments}) of the checkpoint in a ckpt.pt or best.pt.

    tensor_for(name, shape): what to fill, a whole tensor or a shard, or None to leave it out.
    Raises UserError.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    folder, files = file.parent / FOLDERS / shards["folder"], shards["files"]
    if not NAME.fullmatch(shards["folder"]):
        raise UserError(f"{file}: {show(shards['folder'])} is no folder of shards")
    there = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    if wrong := sorted(there ^ files.keys()):
        raise UserError(
            f"{folder}: {show(wrong[0])} is {'not of the checkpoint' if wrong[0] in there else 'missing'}"
        )
    _, _, local_rank, local_size = places_of_torchrun()
    for name in sorted(files)[local_rank::local_size]:  # the processes of a machine share the work
        if sha256_of_file(folder / name) != files[name]:
            raise UserError(
                f"{folder / name}: damaged (its sha256 differs); use another checkpoint"
            )
    reader: Any = HuggingFaceStorageReader(str(folder))
    with one_line(f"{folder}: cannot be read", Exception), first_cause():
        shapes = {
            name: about.size for name, about in reader.read_metadata().state_dict_metadata.items()
        }
        wanted = {name: tensor_for(name, shape) for name, shape in shapes.items()}
        tensors = {name: tensor for name, tensor in wanted.items() if tensor is not None}
        load(tensors, storage_reader=reader, no_dist=True)
    weights = {
        name.removeprefix("model/"): x for name, x in tensors.items() if name.startswith("model/")
    }
    moments: dict = {}
    for name in (name for name in tensors if name.startswith("optimizer/")):
        parameter, _, part = name.removeprefix("optimizer/").rpartition("/")
        moments.setdefault(parameter, {})[part] = tensors[name]
    return weights, moments
