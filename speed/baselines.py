"""The sides of a comparison: models of ours, and nanoGPT's, whose model.py the key `against` names."""

import contextlib
import importlib.util
import multiprocessing
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import configurator
from model import GPT, GPTConfig
from runs.hardware import autocast
from speed.config import BenchConfig
from train import TrainConfig, make_optimizers

NANOGPT = "nanoGPT"  # in place of the name of an attention
SMALL: dict = dict(n_layer=6, n_head=6, n_embd=384)  # the size at which a step and a token are compared with nanoGPT's
PLAIN = TrainConfig(learning_rate=1e-4, seed=0)


class Side:
    """A model with that attention, or nanoGPT's without dropout and biases, each with its own optimizer.

    A call trains it once on its batch (inputs, targets): forward, backward, clipping and the optimizer's step.
    keys are those of GPTConfig, for nanoGPT those of its own.
    """

    def __init__(self, config: BenchConfig, name: str, batch: tuple = (), train: TrainConfig = PLAIN, **keys):
        torch.manual_seed(train.seed)
        self.batch, self.device, self.dtype = batch, config.device, config.dtype
        self.grad_clip = train.grad_clip or float("inf")
        if name == NANOGPT:
            spec = importlib.util.spec_from_file_location("nanogpt_model", config.against)
            module = importlib.util.module_from_spec(spec)
            with contextlib.redirect_stdout(sys.stderr):  # nanoGPT prints its size and its groups
                spec.loader.exec_module(module)
                self.model = module.GPT(module.GPTConfig(**dict(dropout=0.0, bias=False) | keys)).to(config.device)
                rates = train.learning_rate, (train.beta1, train.beta2)
                self.optimizers = [self.model.configure_optimizers(train.weight_decay, *rates, config.device)]
        else:
            self.model = GPT(GPTConfig(**keys, attention=name)).to(config.device)
            self.optimizers = make_optimizers(self.model, train, config.device)

    def loss(self, batch: tuple = ()) -> torch.Tensor:
        with autocast(self.device, self.dtype):
            loss = self.model(*(x.to(self.device) for x in batch or self.batch))
        return loss[1] if isinstance(loss, tuple) else loss  # nanoGPT returns it behind its logits

    def __call__(self, batch: tuple = ()) -> None:
        self.loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)


def random_batch(config: BenchConfig, vocab_size: int, B: int, T: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(vocab_size, (2, B, T), generator=generator).to(config.device))


def in_new_processes(function: Callable, tasks: list[tuple], at_once: int = 1) -> list:
    """[function(*task), ...], each in a process of its own, so many at once."""
    with multiprocessing.get_context("spawn").Pool(at_once, maxtasksperchild=1) as pool:
        return pool.starmap(function, tasks, chunksize=1)


def peak_mb(config: BenchConfig, name: str, batch: tuple, keys: dict) -> float:
    """Peak memory in MB, on a GPU of the tensors alone, of a new process that trains such a Side three times."""
    return in_new_processes(peak_bytes, [(config, name, batch, keys)])[0] / 1e6


def peak_bytes(config: BenchConfig, name: str, batch: tuple, keys: dict) -> int:
    torch.set_num_threads(config.threads)
    configurator.set_up()
    side = Side(config, name, batch, **keys)
    for _ in range(3):
        side()
    if config.device == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # not ru_maxrss, which on Linux a new process inherits from the one that started it
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(peak.split()[1])
