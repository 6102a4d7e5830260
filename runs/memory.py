"""The memory that is left, and the refusal of a run or an evaluation that cannot fit into it, before
anything is written.

What is compared is a lower bound: the tensors that are certainly held at once. Activations are
counted as one vector a token, and a step holds several times as much. Where torch runs out of
memory all the same, configurator.report ends with one line.
"""

import math
import re
import resource
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from base.configurator import UserError
from data.shards import Dataset
from model import GPT, GPTConfig
from runs.hardware import Processes
from runs.parallel import is_fsdp

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def ram_available() -> float:
    """Bytes of RAM that this process may still take: the least that the machine, its control group
    (of a container or a job) and `ulimit -v` leave. Infinite where the system does not say."""
    return min(of_machine(), of_groups(), of_ulimit())


def number_in(file: Path, pattern: str) -> float:
    """The number that the pattern finds in a file of the system; infinite where there is none."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return math.inf
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1]) if found else math.inf


def of_machine() -> float:
    return 1024 * number_in(PROC / "meminfo", r"^MemAvailable: +(\d+) kB")


def of_groups() -> float:
    """Of the control groups (version 2) of this process: the limit of each holds for those in it."""
    try:
        line = (PROC / "self" / "cgroup").read_text(encoding="utf-8").strip()
    except OSError:
        return math.inf
    group = CGROUPS / line.rpartition(":")[2].lstrip("/")
    left = math.inf
    # a container sees its own group as the root
    for folder in [group, *group.parents, CGROUPS]:
        limit = number_in(folder / "memory.max", r"^(\d+)$")
        if limit < math.inf:
            used = number_in(folder / "memory.current", r"^(\d+)$")
            # pages of files count as used, and are given back when they are wanted
            cached = number_in(folder / "memory.stat", r"^inactive_file (\d+)$")
            left = min(left, max(0, limit - used + (cached if cached < math.inf else 0)))
    return left


def of_ulimit() -> float:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return max(0, limit - 1024 * number_in(PROC / "self" / "status", r"^VmSize:\s+(\d+) kB"))


class NotEnoughMemory(UserError):
    """More memory would be needed than is left: now, and on this machine."""


class NoRandomStart(TorchFunctionMode):
    """Leaves new weights as memory has them: on the meta device torch would import its compiler to
    draw them, 1.3 s."""

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
    """NotEnoughMemory where each of processes_here has fewer bytes left."""
    if device == "cuda":
        available = torch.cuda.mem_get_info()[0]
    else:
        available = ram_available() / processes_here
    if needed > available:
        raise NotEnoughMemory(
            f"at least {tqdm.format_sizeof(needed, 'B')} of memory would be needed, and "
            f"{tqdm.format_sizeof(available, 'B')} are left"
        )


def bytes_of_pass(config: GPTConfig, tokens: int, dataset: Dataset, block_size: int) -> int:
    """A lower bound for one forward pass: ids and labels, one vector a token, and what
    evaluate.score adds up at each position of a slice."""
    ids_and_labels = 16 * tokens
    vectors = 4 * config.n_embd * tokens
    sums = 48 * block_size * max(1, len(dataset.slices))
    return ids_and_labels + vectors + sums


def check_training(config, dataset: Dataset, processes: Processes) -> None:
    """NotEnoughMemory for a run that fits neither in RAM, where its model is made, nor on its
    device."""
    weights = sum(p.nbytes for p in without_data(config).parameters())
    check(config, weights, "cpu", processes.local_size)

    moments = 2 if config.optimizer == "adamw" else 1  # Muon's matrices have one
    states = (2 + moments) * weights  # with the weights and their gradients
    if is_fsdp(config, processes.world_size):
        states /= processes.world_size
    tokens = config.batch_size * dataset.longest("train", config.block_size)
    micro_steps = config.gradient_accumulation_steps // processes.world_size
    rows = 16 * tokens * micro_steps  # the ids and labels of a step
    needed = states + rows + bytes_of_pass(config, tokens, dataset, config.block_size)
    check(config, needed, processes.device_type, processes.local_size)


def check_evaluation(
    config, model: GPT, dataset: Dataset, block_size: int, processes_here: int = 1
) -> None:
    """NotEnoughMemory for the rows of evaluate.py or meters.py; UserError for windows longer than
    the text."""
    counts = dataset.counts(config.split)
    length = dataset.longest(config.split, block_size)
    tokens = counts["tokens"]
    if dataset.kind == "stream" and block_size > max(model.config.block_size, tokens - 1):
        raise UserError(
            f"block_size={block_size}: {config.split} has {tokens} tokens, so {tokens - 1} reads all of it"
        )
    rows_there = counts.get("rows") or -(-tokens // length)
    rows_at_once = getattr(config, "batch_size", None) or config.rows
    rows = min(rows_at_once, rows_there)
    needed = bytes_of_pass(model.config, rows * length, dataset, block_size)
    check(config, needed, model.wte.weight.device.type, processes_here)
