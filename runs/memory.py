"""The refusal, before anything is written, of a run that cannot fit into memory.

What is compared is a lower bound: the tensors that are certainly held at once, activations as one
vector a token. A run is refused where this is more than all the memory there is, not than what is
left just now, so that nothing is refused that could run. Where torch runs out of memory later,
configurator.report ends with one line.
"""

import contextlib
import os
import resource
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from base.configurator import UserError
from data.shards import Dataset
from keys import GPTConfig, TrainConfig, model_args
from model import GPT
from runs.hardware import Processes
from runs.parallel import is_fsdp

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_OF_PROCESS = Path("/proc/self/cgroup")


def ram_limit() -> float:
    """Bytes of RAM that this process can have: what the machine has, or the least that `ulimit -v`
    and its control groups (version 2, of a container and of a job) allow."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    if CGROUP_OF_PROCESS.exists():
        path = CGROUP_OF_PROCESS.read_text(encoding="utf-8").strip().rpartition(":")[2]
        group = CGROUPS / path.lstrip("/")
        # a container sees its own group as the root
        for folder in (group, *group.parents, CGROUPS):
            with contextlib.suppress(OSError, ValueError):  # no file, or the word "max"
                limits.append(int((folder / "memory.max").read_text(encoding="utf-8")))
    return min(limits)


class NotEnoughMemory(UserError):
    """More memory is needed than there is."""


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


def check_training(config: TrainConfig, dataset: Dataset, processes: Processes) -> None:
    """NotEnoughMemory where the weights, gradients and batch of a run need more bytes than the
    device, or the RAM of the processes on this machine, has in all."""
    model = without_data(GPTConfig(**model_args(config)))
    if config.gates_only:
        model.train_gates_only()
    states = sum(p.nbytes * (1 + p.requires_grad) for p in model.parameters())
    if is_fsdp(config, processes.world_size):
        states /= processes.world_size
    micro_steps = config.gradient_accumulation_steps // processes.world_size
    tokens = config.batch_size * dataset.longest("train", config.block_size)
    batch = 16 * tokens * micro_steps  # ids and labels
    stream = 4 * config.n_embd * tokens  # the residual stream, once
    sums = 48 * config.block_size  # of an evaluation (evaluate.add_scores)
    needed = states + batch + stream + sums
    limit = ram_limit() / processes.local_size
    if processes.device_type == "cuda":
        _, limit = torch.cuda.mem_get_info()
    if needed > limit:
        raise NotEnoughMemory(
            f"at least {tqdm.format_sizeof(needed, 'B')} of memory are needed, and there are "
            f"{tqdm.format_sizeof(limit, 'B')}; lower the model, batch_size or block_size"
        )
