"""The part loss: validation loss against processor time, of nanoGPT's own recipe for a CPU.

Each side trains its own model with its own optimizer, in a process of its own, on the same batches of the same bytes,
in the same dtype and with the same schedule. Only steps are on the clock: neither data nor evaluations. The ratio of a
seed is nanoGPT's processor seconds until its final loss, over ours until that same loss.
"""

import contextlib
import itertools
import statistics
import sys
import tempfile
import time

import torch

from data.pystdlib import prepare as pystdlib
from data.shards import open_dataset
from runs.hardware import keep_freed_memory
from speed.baselines import NANOGPT, Side, in_new_processes
from speed.report import BenchConfig, Report
from study.stats import t_interval
from train import TrainConfig, learning_rate

SIZE: dict = dict(n_layer=4, n_head=4, n_embd=128, block_size=64)
SCHEDULE: dict = dict(max_iters=2000, warmup_iters=100, learning_rate=1e-3, min_lr=1e-4, weight_decay=0.1, beta2=0.99)
EVALUATIONS = 40  # of a run, evenly over its steps
EVAL_WINDOWS = 256  # evenly over the validation split
SIDES: dict = {NANOGPT: {}, "softmax": {}, "gated_deltanet": dict(gate="native")}


def bench_loss(config: BenchConfig, report: Report) -> None:
    """4 x 128, T = 64, B = 12, 2,000 steps on a megabyte of Python's standard library, every seed in turn."""
    sides = [name for name in SIDES if config.against or name != NANOGPT]
    runs = list(itertools.product(config.seeds, sides))
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(sys.stderr):
            pystdlib.main(["--most_bytes=1_000_000", "--val_fraction=0.1", "--seed=0", f"--out_dir={folder}"])
        curves = in_new_processes(curve_of, [(config, folder, *run) for run in runs], at_once=config.threads)
    curves = dict(zip(runs, curves, strict=True))
    for (seed, name), curve in curves.items():
        _, seconds, loss = curve[-1]
        report.row(side=name, seed=seed, cpu_seconds=seconds, val_loss=loss, dtype=config.dtype, curve=curve)
    for name in sides[1:] if config.against and len(config.seeds) > 1 else []:
        pairs = [seconds_to_same_loss(curves[seed, NANOGPT], curves[seed, name]) for seed in config.seeds]
        claim = f"{name}: processor time to nanoGPT's final loss, nanoGPT / ours"
        report.ratio(claim, *zip(*pairs, strict=True), target=1.0, interval=interval_over_seeds)


def seconds_to_same_loss(theirs: list[tuple], ours: list[tuple]) -> tuple[float, float]:
    """Processor seconds of both to their final loss. Ours, if it never gets there, counts as infinitely slow."""
    goal = theirs[-1][2]
    reached = seconds_to(goal, ours)
    return (seconds_to(goal, theirs), reached) if reached else (0.0, ours[-1][1])


def seconds_to(goal: float, curve: list[tuple[int, float, float]]) -> float | None:
    """Processor seconds at which a curve first falls to this loss, on the line between two evaluations."""
    for (_, before, high), (_, after, low) in itertools.pairwise(curve):
        if low <= goal:
            return before + (after - before) * (high - goal) / (high - low)
    return None


def interval_over_seeds(ratios: list[float]) -> tuple[float, float, float]:
    """(mean, low, high): Student's 95% interval; a median of five has none by order statistics."""
    mean, low, high = t_interval(ratios)
    return (mean, mean, mean) if low is None else (mean, low, high)


def curve_of(config: BenchConfig, folder: str, seed: int, name: str) -> list[tuple[int, float, float]]:
    """Trains one side with one seed. Returns [(step, processor seconds, validation loss)]."""
    torch.set_num_threads(1)
    keep_freed_memory()
    dataset, train, T = open_dataset(folder), TrainConfig(**SCHEDULE, seed=seed), SIZE["block_size"]
    side = Side(config, name, train=train, **SIZE, **SIDES[name], vocab_size=dataset.vocab_size)
    # the same windows for all sides and seeds, evenly over the split; the last one may be padded
    windows = dataset.eval_batches("val", 64, T, tokens=EVAL_WINDOWS * T)
    sample = [(x[whole], y[whole]) for x, y, _ in windows if (whole := (y >= 0).all(dim=1)).any()]

    def val_loss():
        with torch.no_grad():
            return statistics.fmean(float(side.loss(batch)) for batch in sample)

    curve, seconds = [(0, 0.0, val_loss())], 0.0
    for step in range(train.max_iters):
        batch = dataset.batch("train", step, seed=seed, batch_size=12, block_size=T)
        start = time.process_time()
        for group in (group for optimizer in side.optimizers for group in optimizer.param_groups):
            group["lr"] = group.get("lr_scale", 1.0) * learning_rate(train, step)
        side(batch)
        seconds += time.process_time() - start
        if (step + 1) % max(1, train.max_iters // EVALUATIONS) == 0:
            curve.append((step + 1, seconds, val_loss()))
    return curve
