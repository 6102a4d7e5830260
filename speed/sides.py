"""The sides of a comparison: a training step of ours, and one of nanoGPT's, whose model.py the key `against` names."""

from configurator import UserError

import contextlib
import importlib.util
import multiprocessing
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from data.mqar import prepare as mqar
from model import GPT, GPTConfig
from ops import IGNORE
from runs.hardware import autocast, keep_freed_memory
from runs.parallel import recompute
from speed.report import BenchConfig
from train import TrainConfig, make_optimizers

SMALL: dict = dict(n_layer=6, n_head=6, n_embd=384)  # the size at which a step and a token are compared with nanoGPT's
TINY: dict = dict(n_layer=2, n_head=4, n_embd=64)  # the size of the recall experiments


def update(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], loss: torch.Tensor) -> None:
    """Backward, clipping and the optimizer's step, the same for all sides."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)


def our_step(config, dtype, batch, compiled=False, recomputes=False, **keys):
    """Returns step(), which trains our model, step.model, once on the batch (inputs, targets), as train.py does.

    recomputes: with activation_checkpointing
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(**keys)).to(config.device)
    for block in model.blocks if recomputes else ():
        recompute(block)
    optimizers = make_optimizers(model, TrainConfig(learning_rate=1e-4), config.device)
    forward = torch.compile(model) if compiled else model

    def step():
        with autocast(config.device, dtype):
            loss = forward(*batch)
        update(model, optimizers, loss)

    step.model = model
    return step


def nanogpt(path: Path | str) -> ModuleType:
    """Imports nanoGPT's model.py. Raises UserError if there is no such file."""
    if not Path(path).is_file():
        raise UserError(f"against={path!r}: no such file; it is model.py of a copy of nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    with contextlib.redirect_stdout(sys.stderr):
        spec.loader.exec_module(module)
    return module


def nanogpt_model(config: BenchConfig, **keys):
    """nanoGPT's model without dropout and biases, as its train.py makes it; keys are those of its GPTConfig."""
    module = nanogpt(config.against)
    with contextlib.redirect_stdout(sys.stderr):  # nanoGPT prints its size
        model = module.GPT(module.GPTConfig(**dict(dropout=0.0, bias=False) | keys))
    return model.to(config.device)


def nanogpt_optimizer(model, config: BenchConfig, learning_rate: float, beta2: float) -> torch.optim.Optimizer:
    with contextlib.redirect_stdout(sys.stderr):  # it prints its groups
        return model.configure_optimizers(0.1, learning_rate, (0.9, beta2), config.device)


def nanogpt_step(
    config: BenchConfig, dtype: str, batch: tuple[torch.Tensor, ...], compiled: bool = False, **keys
) -> Callable:
    """Returns step(), a step as nanoGPT's train.py makes it; that one runs in float32 on a CPU."""
    torch.manual_seed(0)
    model = nanogpt_model(config, **keys)
    optimizers = [nanogpt_optimizer(model, config, 1e-4, 0.95)]
    forward = torch.compile(model) if compiled else model

    def step():
        with autocast(config.device, dtype):
            _, loss = forward(*batch)
        update(model, optimizers, loss)

    return step


def random_batch(config: BenchConfig, vocab_size: int, B: int, T: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(vocab_size, (2, B, T), generator=generator).to(config.device))


def tiny_batch(B: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """MQAR rows of 64 tokens, of which two have labels."""
    rows = mqar.generate(np.random.default_rng(0), B, 64, 4, vocab_size=16, queries=2, power=1.0).astype(np.int64)
    labels = np.where(rows[:, 1] == 0, IGNORE, rows[:, 1])
    return torch.from_numpy(rows[:, 0].copy()), torch.from_numpy(labels)


def keeps_every_token(name: str) -> bool:
    """Whether the mixer's state grows with the context, as a KV cache does and a recurrent state does not."""
    keys: dict = dict(n_layer=1, n_head=1, n_embd=16, vocab_size=1, attention=name)
    short, long = (GPT(GPTConfig(**keys, block_size=T)).state_bytes() for T in (16, 32))
    return short < long


def alone(function: Callable, *arguments: object):
    """Calls function(*arguments) in a new process, whose peak memory then has no other cause."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def each_alone(function: Callable, tasks: list[tuple], at_once: int) -> list:
    """[function(*task)], each in a new process, so many at a time."""
    with multiprocessing.get_context("spawn").Pool(at_once, maxtasksperchild=1) as pool:
        return pool.starmap(function, tasks, chunksize=1)


def peak_bytes(make_step: Callable, arguments: tuple, keywords: dict) -> int:
    """Peak resident memory, on a GPU of the tensors alone, of a process that takes three steps."""
    config = arguments[0]
    torch.set_num_threads(config.threads)
    keep_freed_memory()
    step = make_step(*arguments, **keywords)
    for _ in range(3):
        step()
    if config.device == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # not ru_maxrss, which on Linux a new process inherits from the one that started it
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(peak.split()[1])
