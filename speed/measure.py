"""What the parts of bench.py share: the sides of a comparison, their turns, ratios with intervals,
and a Report.

    theirs = Side(config, NANOGPT, batch, **keys)
    ours = Side(config, "softmax", batch, **keys)
    report.compare(config, "step, theirs / ours", theirs, ours, 30, target=1.0)
"""

import contextlib
import multiprocessing
import re
import resource
import runpy
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from scipy.stats import quantile_test

from base import configurator
from base.files import one_line
from model import GPT, GPTConfig
from runs.hardware import autocast, seconds_of
from runs.parallel import share_out
from speed.config import BenchConfig
from train import TrainConfig, make_optimizers

NANOGPT = "nanoGPT"  # in place of the name of an attention
PLAIN = TrainConfig(learning_rate=1e-4, seed=0)


class Side:
    """A model with that attention, or nanoGPT's without dropout and biases, each with its own
    optimizer.

    A call trains it once on its batch (inputs, targets). keys are those of GPTConfig, for nanoGPT
    those of its own. compiled: whether torch.compile makes the step.
    """

    def __init__(
        self,
        config: BenchConfig,
        name: str,
        batch: tuple = (),
        train: TrainConfig = PLAIN,
        compiled: bool = False,
        **keys: Any,
    ):
        torch.manual_seed(train.seed)
        self.batch = batch
        self.device = config.device
        self.dtype = config.dtype
        self.grad_clip = train.grad_clip or float("inf")
        if name == NANOGPT:
            betas = (train.beta1, train.beta2)
            rates = (train.weight_decay, train.learning_rate, betas, config.device)
            with contextlib.redirect_stdout(sys.stderr):  # nanoGPT prints its size and its groups
                theirs = runpy.run_path(str(config.against), run_name="nanogpt_model")
                sizes = theirs["GPTConfig"](dropout=0.0, bias=False, **keys)
                self.model = theirs["GPT"](sizes).to(config.device)
                self.optimizers = [self.model.configure_optimizers(*rates)]
            self.step_model = torch.compile(self.model) if compiled else self.model
        else:
            self.model = GPT(GPTConfig(**keys, attention=name))
            self.step_model = step_of(self.model, config, compiled, train)
            self.optimizers = make_optimizers(self.model, train, config.device)

    def loss(self) -> torch.Tensor:
        idx, targets = self.batch
        with autocast(self.device, self.dtype):
            loss = self.step_model(idx.to(self.device), targets.to(self.device))
        return loss[1] if isinstance(loss, tuple) else loss  # nanoGPT returns it behind its logits

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def __call__(self) -> None:
        self.loss().backward()
        self.clip()
        self.update()


def step_of(
    model: GPT, config: BenchConfig, compiled: bool, train: TrainConfig = PLAIN
) -> torch.nn.Module:
    """Moves the model to the device, and returns what train.py calls in a step of one process."""
    alone: Any = SimpleNamespace(device=config.device, device_type=config.device, world_size=1)
    return share_out(model, train, alone, compiled, config.dtype)


def random_batch(config: BenchConfig, vocab_size: int, B: int, T: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(vocab_size, (2, B, T), generator=generator).to(config.device))


def in_new_processes(function: Callable, tasks: list[tuple], at_once: int = 1) -> list:
    """[function(*task), ...], each in a process of its own, so many at once. UserError if one is
    killed."""
    new = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(at_once, new, max_tasks_per_child=1) as pool,
        one_line("a process that measures was killed, perhaps for its memory", BrokenProcessPool),
    ):
        return list(pool.map(function, *zip(*tasks, strict=True)))


def peak_mb(config: BenchConfig, name: str, batch: tuple, keys: dict) -> float:
    """Peak memory in MB, on a GPU of the tensors alone, of a new process that trains such a Side
    three times."""
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
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", status)[1])


def interleave(sides: dict, pairs: int, config: BenchConfig) -> dict:
    """{name: [seconds, ...]}: calls each side once untimed, then all in turn, every other round in
    reverse order."""
    seconds = {name: [] for name in sides}
    order = list(sides)
    for name in order:
        seconds_of(sides[name], config.device)
    for _ in range(pairs):
        for name in order:
            seconds[name].append(seconds_of(sides[name], config.device))
        order.reverse()
    return seconds


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """(median, low, high): the median of at least 6 values, and its 95% interval by order
    statistics.

    A single value is a size in bytes, which does not vary: it is its own interval.
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    interval = quantile_test(values, p=0.5).confidence_interval(0.95)
    return statistics.median(values), float(interval.low), float(interval.high)


def judge(low: float, high: float, target: float, at_most: bool = False) -> str:
    """Compares the interval with the target: met, missed or unresolved."""
    if at_most:
        low, high, target = -high, -low, -target
    if low >= target:
        return "met"
    return "missed" if high < target else "unresolved"


@dataclass
class Report:
    """What a part measured: rows of a table, ratios with their raw pairs, and claims: ratios with a
    target. Each is printed at once."""

    part: str
    rows: list = field(default_factory=list)
    ratios: list = field(default_factory=list)
    claims: list = field(default_factory=list)

    def row(self, **values: object) -> None:
        self.rows.append(values)
        numbers = {name: value for name, value in values.items() if name != "runs"}
        print(f"  {self.part}: {numbers}", flush=True)

    def compare(
        self,
        config: BenchConfig,
        name: str,
        above: Callable,
        below: Callable,
        pairs: int,
        **target: Any,
    ) -> None:
        """Calls both in turn, and reports the ratio of their seconds; target as in `ratio`."""
        seconds = interleave({"above": above, "below": below}, pairs, config)
        self.ratio(name, seconds["above"], seconds["below"], **target)

    def ratio(
        self,
        name: str,
        above: list,
        below: list,
        target: float | None = None,
        at_most: bool = False,
    ) -> None:
        """above is divided by below, pair by pair, as measured side by side.

        A target makes it a claim. It is what a user could take instead (1.0), or a limit, and never
        a guess.
        """
        pairs = list(zip(above, below, strict=True))
        middle, low, high = median_interval([a / b for a, b in pairs])
        ratio = {"name": name, "ratio": middle, "low": low, "high": high, "pairs": pairs}
        line = f"  {name:<58}{middle:>8.3f}  [{low:.3f}, {high:.3f}]"
        if target is None:
            self.ratios.append(ratio)
        else:
            verdict = judge(low, high, target, at_most)
            self.claims.append(ratio | dict(target=target, at_most=at_most, met=verdict))
            line += f"  {'at most' if at_most else 'at least'} {target:g}: {verdict}"
        print(line, flush=True)
