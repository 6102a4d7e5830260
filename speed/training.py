"""The parts train, tiny, overhead, checkpointing and length: what a training step costs."""

import multiprocessing
import statistics
from collections.abc import Callable

import torch

from model import MIXERS
from ops import IGNORE
from runs.hardware import gemm_rate, seconds_of
from speed.decoding import prefilled
from speed.gpu import Counting
from speed.report import BenchConfig, Report, interleave, median_interval, paired
from speed.sides import (
    SMALL,
    TINY,
    alone,
    keeps_every_token,
    nanogpt_step,
    our_step,
    peak_bytes,
    random_batch,
    tiny_batch,
)

TINY_MIXERS = {"softmax": "", "gated_deltanet": "gated_deltanet, "}  # what the names of their claims say of them
STEP_DTYPES = ("float32", "bfloat16")  # of a step beside nanoGPT's, whichever dtype=auto picks here
AGAIN = ("kept", "again")  # the activations of blocks are kept, or computed again on the way back


def bench_train(config: BenchConfig, report: Report) -> None:
    """6 x 384, T = 256, B = 8, in float32 and in bfloat16: our step and nanoGPT's, with autocast alike."""
    for vocab_size in (256, 50_304):
        batch = random_batch(config, vocab_size, 8, 256)
        keys: dict = SMALL | dict(block_size=256, vocab_size=vocab_size)
        sides: dict = {}
        for dtype in STEP_DTYPES:
            sides[f"ours {dtype}"] = our_step(config, dtype, batch, config.compile and dtype == config.dtype, **keys)
            if config.against:
                sides[f"nanoGPT {dtype}"] = nanogpt_step(config, dtype, batch, **keys)
        seconds = interleave(sides, config.pairs if vocab_size == 256 else config.long_pairs, config)
        flops = 3 * sides["ours float32"].model.flops_per_token(256) * 8 * 256
        for name, values in seconds.items():
            median = statistics.median(values)
            share = flops / median / gemm_rate(config.device, name.split()[1])
            report.row(side=name, vocabulary=vocab_size, ms=1e3 * median, tokens_s=2048 / median, gemm_share=share)
        for dtype in STEP_DTYPES if config.against else []:
            name = f"step in {dtype}, {vocab_size:,} ids, nanoGPT / ours"
            target = 1.0 if dtype == "float32" else 1.05
            report.claim(name, paired(seconds, f"nanoGPT {dtype}", f"ours {dtype}"), target)
    memory = {"ours": alone(peak_bytes, our_step, (config, config.dtype, batch), keys)}
    if config.against:
        memory["nanoGPT"] = alone(peak_bytes, nanogpt_step, (config, "float32", batch), keys)
        pairs = [(memory["ours"], memory["nanoGPT"])]
        report.claim("peak memory, 50,304 ids, ours / nanoGPT", pairs, 0.55, at_most=True)
    for name, size in memory.items():
        report.row(side=name, vocabulary=vocab_size, peak_mb=size / 1e6)


def bench_tiny(config: BenchConfig, report: Report) -> None:
    """2 x 64 on MQAR rows, one core, float32, as the recall experiments run; and two such runs at a time.

    Both of ours are compared with nanoGPT's softmax. A row has the operations of a step, counted as it runs.
    """
    cpu = BenchConfig(against=config.against, device="cpu", dtype="float32", threads=1)
    names = [*TINY_MIXERS, "nanoGPT"] if config.against else [*TINY_MIXERS]
    torch.set_num_threads(1)
    steps = {name: tiny_step(name, cpu) for name in names}
    seconds = interleave(steps, config.pairs, cpu)
    for name, values in seconds.items():
        report.row(side=name, ms=1e3 * statistics.median(values), operations=operations_of(steps[name]))
    torch.set_num_threads(config.threads)
    if not config.against:
        return
    for name, label in TINY_MIXERS.items():
        report.claim(f"tiny step, {label}nanoGPT / ours", paired(seconds, "nanoGPT", name), 1.6)
    with multiprocessing.get_context("spawn").Pool(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        calls = {name: lambda name=name: pool.starmap(tiny_steps, [(name, cpu)] * 2, chunksize=1) for name in names}
        seconds = interleave(calls, config.long_pairs, cpu)
    for name, label in TINY_MIXERS.items():
        pairs = paired(seconds, name, "nanoGPT")
        report.claim(f"two tiny runs at a time, {label}ours / nanoGPT", pairs, 0.65, at_most=True)


def operations_of(step: Callable) -> int:
    """How many operations a step makes that are neither views nor allocations: forward, backward, clipping, AdamW."""
    with Counting() as counting:
        step()
    return counting.found.kernels


def tiny_step(name: str, config: BenchConfig) -> Callable:
    """A step of the TINY model with that mixer, or of nanoGPT's."""
    inputs, targets = tiny_batch()
    keys: dict = TINY | dict(block_size=64, vocab_size=16)
    if name == "nanoGPT":
        targets = targets.masked_fill(targets == IGNORE, -1)  # its IGNORE
        return nanogpt_step(config, "float32", (inputs, targets), **keys)
    gated = {} if name == "softmax" else dict(gate="native", short_conv=4)
    return our_step(config, "float32", (inputs, targets), **keys, **gated, attention=name)


def tiny_steps(name: str, config: BenchConfig, steps: int = 40) -> None:
    step = tiny_step(name, config)
    for _ in range(steps):
        step()


def bench_overhead(config: BenchConfig, report: Report) -> None:
    """4 x 768, T = 512: what a gate costs in a training step, a forward, decoding and memory, beside its FLOPs."""
    arms: dict = {
        "elementwise": dict(gate="elementwise"),
        "headwise": dict(gate="headwise"),
        "rank 16": dict(gate="elementwise", gate_rank=16),
        "elementwise, match_params": dict(gate="elementwise", match_params=True),
    }
    keys: dict = dict(n_layer=4, n_head=12, n_embd=768, block_size=512, vocab_size=256)
    batch = random_batch(config, 256, 2, 512)
    base = our_step(config, config.dtype, batch, config.compile, **keys)
    base_memory = alone(peak_bytes, our_step, (config, config.dtype, batch), keys)
    for name, gate in arms.items():
        step = our_step(config, config.dtype, batch, config.compile, **keys | gate)
        share = step.model.flops_per_token() / base.model.flops_per_token()
        memory = alone(peak_bytes, our_step, (config, config.dtype, batch), keys | gate) / base_memory
        columns = {}
        for column, make in {"step": lambda s: s, "forward": forward_of, "decode": decode_of}.items():
            sides = {"none": make(base), name: make(step)}
            seconds = interleave(sides, config.pairs, config)
            columns[column] = paired(seconds, name, "none")
        medians = {column: median_interval([a / b for a, b in pairs])[0] for column, pairs in columns.items()}
        report.row(gate=name, flops=share, **medians, memory=memory)
        limit = {"elementwise": share + 0.02, "elementwise, match_params": 1.02}.get(name, 1.03)
        report.claim(f"training step, {name} / none", columns["step"], round(limit, 4), at_most=True)


def forward_of(step) -> Callable:
    idx = torch.zeros(2, 512, dtype=torch.long, device=step.model.wte.weight.device)
    return lambda: step.model(idx, idx).item()


def decode_of(step) -> Callable:
    return prefilled(step.model, 256)


def bench_checkpointing(config: BenchConfig, report: Report) -> None:
    """6 x 384, T = 512, B = 8: what activation_checkpointing takes in time, and what it leaves of the memory.

    A forward is a third of a step: to compute every block once more should take a third of a step at most.
    """
    batch = random_batch(config, 256, 8, 512)
    for name in ("softmax", "gla"):
        keys: dict = SMALL | dict(block_size=512, vocab_size=256, attention=name)
        steps = {side: our_step(config, config.dtype, batch, recomputes=side == "again", **keys) for side in AGAIN}
        seconds = interleave(steps, config.long_pairs, config)
        memory = {
            side: alone(peak_bytes, our_step, (config, config.dtype, batch), keys | dict(recomputes=side == "again"))
            for side in AGAIN
        }
        for side, values in seconds.items():
            report.row(mixer=name, blocks=side, ms=1e3 * statistics.median(values), peak_mb=memory[side] / 1e6)
        pairs = paired(seconds, "again", "kept")
        report.claim(f"{name}: step, activation_checkpointing / without", pairs, 1.35, at_most=True)
        pairs = [(memory["again"], memory["kept"])]
        report.claim(f"{name}: peak memory, activation_checkpointing / without", pairs, 0.6, at_most=True)


def bench_length(config: BenchConfig, report: Report) -> None:
    """2 x 256, as many tokens a step at every T: tokens/s of a training step, and its memory. Then the GEMM share."""
    for name in MIXERS:
        calls, T, keeps_all = {}, 256, keeps_every_token(name)
        keys: dict = dict(n_layer=2, n_head=4, n_embd=256, vocab_size=256, attention=name)
        while T <= config.longest:
            batch = random_batch(config, 256, config.longest // T, T)
            calls[T] = our_step(config, config.dtype, batch, **keys | {"block_size": T})
            memory = alone(peak_bytes, our_step, (config, config.dtype, batch), keys | {"block_size": T})
            seconds = seconds_of(calls[T], config.device), seconds_of(calls[T], config.device)
            report.row(mixer=name, T=T, tokens_s=config.longest / min(seconds), peak_mb=memory / 1e6)
            T *= 4 if keeps_all and T >= 4096 else 2  # the cost grows with T^2
        if not keeps_all and 16_384 in calls:
            seconds = interleave({1024: calls[1024], 16_384: calls[16_384]}, config.long_pairs, config)
            report.claim(f"{name}: tokens/s at 16,384 / at 1,024", paired(seconds, 1024, 16_384), 0.85)
    bench_gemm_share(config, report)


def bench_gemm_share(config: BenchConfig, report: Report) -> None:
    """6 x 384, T = 4,096, B = 1: a step's FLOPs at the rate of a matrix product of the same dtype, over its time."""
    T = min(4096, config.longest)
    batch = random_batch(config, 256, 1, T)
    for name in MIXERS:
        step = our_step(config, config.dtype, batch, **SMALL | dict(block_size=T, vocab_size=256, attention=name))
        flops = 3 * step.model.flops_per_token(T) * T
        step()  # untimed
        pairs = [
            (flops / gemm_rate(config.device, config.dtype), seconds_of(step, config.device))
            for _ in range(config.long_pairs)
        ]
        share = statistics.median(a / b for a, b in pairs)
        report.row(share_of=name, length=T, ms=1e3 * statistics.median(b for _, b in pairs), gemm_share=share)
        if not keeps_every_token(name):
            report.claim(f"{name}: step at {T:,}, share of the GEMM rate", pairs, 0.6)
