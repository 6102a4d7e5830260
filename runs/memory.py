"""The refusal of what this machine clearly has no memory for, by arithmetic, before a program takes
or writes anything.

Counted are the weights, their gradients and AdamW's two moments or Muon's one, the rows of a step
and one vector a token: a step takes several times as much. Where torch reports a shortage all the
same, configurator.report ends with one line.
"""

import math
import os
import re
import resource
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from configurator import UserError
from data.shards import Dataset
from model import GPT, GPTConfig
from runs.hardware import Processes
from runs.parallel import is_fsdp

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# files of a control group, of version 2 and of version 1: its limit, and what it uses
VERSION_2 = ("memory.max", "memory.current")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def ram_available() -> int:
    """Bytes of RAM that this process may still take: the least that the machine, its container or
    job and ulimit leave. Where the system does not say, all RAM of the machine."""
    left = [of_groups(), of_ulimit()]
    in_kb = re.search(r"MemAvailable: +(\d+) kB", text_of(PROC / "meminfo"))
    left.append(
        1024 * int(in_kb[1]) if in_kb else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    return int(min(left))


def text_of(file: Path) -> str:
    """The content of a file of the system; nothing where there is none."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def of_groups() -> float:
    """Bytes that the control groups of this process leave it, such as a container's or those of a
    job of SLURM."""
    left = math.inf
    for line in text_of(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUPS / "memory" if controllers else CGROUPS
        group = root / path.lstrip("/")
        # the limit of a group holds for those in it; a container sees its own as the root, and the
        # path is not there
        for folder in [group, *group.parents]:
            if folder == root or root in folder.parents:
                left = min(left, of_group(folder, VERSION_1 if controllers else VERSION_2))
    return left


def of_group(folder: Path, names: tuple[str, str]) -> float:
    """Bytes that a control group leaves; infinity for one without a limit."""
    limit, used = (text_of(folder / name).strip() for name in names)
    if not limit.isdigit() or not used.isdigit():  # "max", or no group
        return math.inf
    # pages of files count as used, and are given back when they are wanted
    cached = re.search(
        r"^(?:total_)?inactive_file (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE
    )
    return max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))


def of_ulimit() -> float:
    """Bytes that `ulimit -v` leaves this process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = re.search(r"VmSize:\s+(\d+) kB", text_of(PROC / "self" / "status"))
    return (
        math.inf
        if limit == resource.RLIM_INFINITY or not used
        else max(0, limit - 1024 * int(used[1]))
    )


class NotEnoughMemory(UserError):
    """More memory would be needed than is left: now, and on this machine."""


class NoRandomStart(TorchFunctionMode):
    """Leaves new weights as memory has them, which spares time: of a large model, and 1.3 s on the
    meta device, where torch would import its compiler."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def without_data(config: GPTConfig) -> GPT:
    """The model on the meta device, where tensors have shapes alone. Raises NotEnoughMemory for
    uncountable sizes."""
    try:
        # a GPT draws its seed
        with torch.random.fork_rng(devices=[]), torch.device("meta"), NoRandomStart():
            return GPT(config)
    except (RuntimeError, TypeError, OverflowError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise NotEnoughMemory("its config asks for tensors that are too large") from None


def check(config, needed: float, device: str, processes_here: int = 1) -> None:
    """NotEnoughMemory, unless config.memory_check is false, where each of processes_here has fewer
    bytes left."""
    available = (
        torch.cuda.mem_get_info()[0] if device == "cuda" else ram_available() // processes_here
    )
    if needed > available and config.memory_check:
        raise NotEnoughMemory(
            f"at least {tqdm.format_sizeof(needed, 'B')} of memory would be needed, and "
            f"{tqdm.format_sizeof(available, 'B')} are left: --memory_check=false tries it all the same"
        )


def of_pass(config: GPTConfig, tokens: int, dataset: Dataset, block_size: int) -> int:
    """Bytes of ids, labels and one vector a token, and of what evaluate.score adds up at each
    position of a slice."""
    return (16 + 4 * config.n_embd) * tokens + 48 * block_size * max(1, len(dataset.slices))


def check_training(config, dataset: Dataset, processes: Processes) -> None:
    """NotEnoughMemory for a run that fits neither in RAM, where its model is made, nor on its
    device."""
    weights = sum(p.nbytes for p in without_data(config).parameters())
    tokens = config.batch_size * dataset.longest("train", config.block_size)
    rows = 16 * tokens * (config.gradient_accumulation_steps // processes.world_size)
    copies = 4 if config.optimizer == "adamw" else 3
    shards = processes.world_size if is_fsdp(config, processes.world_size) else 1
    states = copies * weights / shards
    check(config, weights, "cpu", processes.local_size)
    needed = states + rows + of_pass(config, tokens, dataset, config.block_size)
    check(config, needed, processes.device_type, processes.local_size)


def check_evaluation(
    config, model: GPT, dataset: Dataset, block_size: int, processes_here: int = 1
) -> None:
    """NotEnoughMemory for the rows of evaluate.py or meters.py; UserError for windows longer than
    the text."""
    counts, length = dataset.counts(config.split), dataset.longest(config.split, block_size)
    tokens = counts["tokens"]
    if dataset.kind == "stream" and block_size > max(model.config.block_size, tokens - 1):
        raise UserError(
            f"block_size={block_size}: {config.split} has {tokens} tokens, so {tokens - 1} reads all of it"
        )
    rows = min(
        getattr(config, "batch_size", None) or config.rows,
        counts.get("rows") or -(-tokens // length),
    )
    needed = of_pass(model.config, rows * length, dataset, block_size)
    check(config, needed, model.wte.weight.device.type, processes_here)
