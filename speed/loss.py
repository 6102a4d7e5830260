"""The part loss: validation loss against processor time, of nanoGPT's own recipe for a CPU.

Each side trains its own model with its own optimizer, in a process of its own, on the same batches of the same bytes,
in the same dtype and with the same schedule. Only steps are on the clock: neither data nor evaluations. The ratio of a
seed is nanoGPT's processor seconds until its final loss, over ours until that same loss.
"""

import contextlib
import statistics
import sys
import tempfile
import time

import torch

from data.pystdlib import prepare as pystdlib
from data.shards import Dataset, open_dataset
from model import GPT, GPTConfig
from runs.hardware import autocast, keep_freed_memory
from speed.report import BenchConfig, Report
from speed.sides import each_alone, nanogpt_model, nanogpt_optimizer, update
from study.stats import t_interval
from train import TrainConfig, learning_rate, make_optimizers

SIZE: dict = dict(n_layer=4, n_head=4, n_embd=128, block_size=64)
SCHEDULE: dict = dict(
    batch_size=12, max_iters=2000, warmup_iters=100, learning_rate=1e-3, min_lr=1e-4, weight_decay=0.1, beta2=0.99
)
EVALUATIONS = 40  # of a run, evenly over its steps
EVAL_WINDOWS = 256  # evenly over the validation split
SIDES: dict = {
    "nanoGPT": {},
    "softmax": dict(attention="softmax"),
    "gated_deltanet": dict(attention="gated_deltanet", gate="native"),
}


def bench_loss(config: BenchConfig, report: Report) -> None:
    """4 x 128, T = 64, B = 12, 2,000 steps on a megabyte of Python's standard library, every seed in turn."""
    sides = {name: keys for name, keys in SIDES.items() if config.against or name != "nanoGPT"}
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        tasks = [
            (config, folder, name, keys, seed, SIZE, SCHEDULE) for seed in config.seeds for name, keys in sides.items()
        ]
        found = each_alone(curve_of, tasks, config.threads)
    curves = {(task[2], task[4]): curve for task, curve in zip(tasks, found, strict=True)}
    for (name, seed), curve in curves.items():
        _, seconds, loss = curve[-1]
        report.row(side=name, seed=seed, cpu_seconds=seconds, val_loss=loss, dtype=config.dtype)
        report.rows[-1]["curve"] = curve
    for name in [name for name in sides if name != "nanoGPT" and config.against]:
        pairs = []
        for seed in config.seeds:
            theirs, ours = curves["nanoGPT", seed], curves[name, seed]
            goal = theirs[-1][2]
            reached = seconds_to(goal, ours)
            report.row(loss_of_nanogpt=goal, seed=seed, reached_by=name, cpu_seconds=reached or "never")
            # a run that never gets there counts as infinitely slow
            pairs.append((seconds_to(goal, theirs), reached) if reached else (0.0, ours[-1][1]))
        if len(pairs) > 1:
            claim = f"{name}: processor time to nanoGPT's final loss, nanoGPT / ours"
            report.claim(claim, pairs, 1.8, interval=interval_over_seeds)


def interval_over_seeds(ratios: list[float]) -> tuple[float, float, float]:
    """(mean, low, high): Student's 95% interval; a median of five has none by order statistics."""
    mean, low, high = t_interval(ratios)
    return mean, mean if low is None else low, mean if high is None else high


def seconds_to(goal: float, curve: list[tuple[int, float, float]]) -> float | None:
    """Processor seconds at which a curve first falls to this loss, on the line between two evaluations."""
    for (_, before, high), (_, after, low) in zip(curve, curve[1:], strict=False):
        if low <= goal:
            return before + (after - before) * (high - goal) / (high - low)
    return None


def prepare(folder: str) -> None:
    """Writes the megabyte that config/experiments/nanogpt_cpu.py trains on."""
    words = ["--most_bytes=1_000_000", "--val_fraction=0.1", "--seed=0", f"--out_dir={folder}"]
    with contextlib.redirect_stdout(sys.stderr):
        pystdlib.main(words)


def curve_of(
    config: BenchConfig, folder: str, name: str, keys: dict, seed: int, size: dict, schedule: dict
) -> list[tuple[int, float, float]]:
    """Trains one side with one seed. Returns [(step, processor seconds, validation loss)]."""
    torch.set_num_threads(1)
    keep_freed_memory()
    dataset, train = open_dataset(folder), TrainConfig(**size, **schedule)
    torch.manual_seed(seed)
    if name == "nanoGPT":
        model = nanogpt_model(config, vocab_size=dataset.vocab_size, **size)
        optimizers = [nanogpt_optimizer(model, config, train.learning_rate, train.beta2)]
        scales = [[1.0] * len(optimizer.param_groups) for optimizer in optimizers]
        loss_of = lambda batch: model(*batch)[1]  # noqa: E731
    else:
        model = GPT(GPTConfig(vocab_size=dataset.vocab_size, **size, **keys)).to(config.device)
        optimizers = make_optimizers(model, train, config.device)
        scales = [[group["lr_scale"] for group in optimizer.param_groups] for optimizer in optimizers]
        loss_of = lambda batch: model(*batch)  # noqa: E731

    def val_loss():
        with torch.no_grad(), autocast(config.device, config.dtype):
            return statistics.fmean(float(loss_of(batch)) for batch in sample)

    sample = validation_sample(dataset, train, config.device)
    curve, seconds = [(0, 0.0, val_loss())], 0.0
    for step in range(train.max_iters):
        batch = dataset.batch("train", step, seed=seed, batch_size=train.batch_size, block_size=train.block_size)
        batch = tuple(x.to(config.device) for x in batch)
        start = time.process_time()
        for optimizer, of_groups in zip(optimizers, scales, strict=True):
            for group, scale in zip(optimizer.param_groups, of_groups, strict=True):
                group["lr"] = scale * learning_rate(train, step)
        with autocast(config.device, config.dtype):
            loss = loss_of(batch)
        update(model, optimizers, loss)
        seconds += time.process_time() - start
        if (step + 1) % max(1, train.max_iters // EVALUATIONS) == 0:
            curve.append((step + 1, seconds, val_loss()))
    return curve


def validation_sample(dataset: Dataset, train: TrainConfig, device: str) -> list[tuple[torch.Tensor, ...]]:
    """Batches of windows, evenly over the validation split: the same for all sides and seeds."""
    windows = list(dataset.eval_batches("val", 1, train.block_size))
    chosen = windows[:: max(1, len(windows) // EVAL_WINDOWS)][:EVAL_WINDOWS]
    whole = [(x, y) for x, y, _ in chosen if bool((y >= 0).all())]  # the last window may be padded
    return [
        tuple(torch.cat(part).to(device) for part in zip(*whole[i : i + 64], strict=True))
        for i in range(0, len(whole), 64)
    ]
