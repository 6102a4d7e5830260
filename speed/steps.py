"""The parts step, decode, profile and mixers (also mixers_compiled, mixers_torch): speeds of whole models.

Sizes are those of nanoGPT's 124M model, and a step has 12,288 tokens. A rehearsal has one narrow
layer.
"""

import contextlib
import itertools
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from base import files
from runs.hardware import autocast, peak_flops, seconds_of
from speed.config import BenchConfig
from speed.measure import NANOGPT, PLAIN, TOKENS, Side, prefilled
from speed.rows import Rows

WARM_UP = 5  # steps
TIMED_CALLS = 5  # of decoding, of which the fastest counts
HOW = ("float32", "autocast", "bfloat16 weights")  # sample.py decodes as the first of them


def make_side(config: BenchConfig, attention: str = "softmax", T: int = 1024, **keys: Any) -> Side:
    """A Side of measure.py; keys of it and of the model."""
    size: dict = dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50_304, block_size=T)
    return Side(config, attention, B=max(1, 12 * 1024 // T), **size, **keys)


def timed(config: BenchConfig, rows: Rows, row: str, compiled: bool, **keys: Any) -> Side:
    """Writes the row of a Side: ms of a step and what follows from it, memory, graphs."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    before = torch.cuda.memory_allocated()  # 0 without a GPU
    if config.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    side = make_side(config, compiled=compiled, **keys)
    for _ in range(WARM_UP):
        side()
    seconds = statistics.median(seconds_of(side, config.device) for _ in range(config.pairs))
    tokens_s = side.batch[0].numel() / seconds
    peak = torch.cuda.max_memory_allocated() - before  # of weights, moments and activations
    numbers = dict(ms=1e3 * seconds, tokens_s=tokens_s, peak_gb=peak / 1e9)
    if hasattr(side.model, "flops_per_token"):  # not nanoGPT's
        flops = 3 * side.model.flops_per_token(side.batch[0].shape[1])
        numbers["mfu"] = flops * tokens_s / peak_flops(config.device, config.dtype)[0]
        numbers["form"] = side.model.blocks[0].mixer.form
    if compiled:
        numbers["graphs"] = counters["stats"]["unique_graphs"]
        numbers["breaks"] = sum(counters["graph_break"].values())
    rows.write(row, **numbers)
    return side


def step(config: BenchConfig, rows: Rows) -> None:
    """Our step beside nanoGPT's, then with a gate and with Muon, each plain and compiled."""
    for how, compiled in (("plain", False), ("compiled", True)):
        with rows.attempt(f"ours, {how}"):
            ours = timed(config, rows, f"ours, {how}", compiled)
            if config.against:
                row = f"{NANOGPT}, {how}"
                theirs = timed(config, rows, row, compiled, attention=NANOGPT)
                rows.compare(f"{row} / ours, {how}", theirs, ours)
        row = f"ours, elementwise gate, {how}"
        with rows.attempt(row):
            timed(config, rows, row, compiled, gate="elementwise")
        row = f"ours, Muon, {how}"
        with rows.attempt(row):
            timed(config, rows, row, compiled, train=replace(PLAIN, optimizer="muon"))


def mixers(
    names: tuple, lengths: tuple, kernels: str, compiled: bool, config: BenchConfig, rows: Rows
) -> None:
    """A step of these mixers at each length, of 12,288 tokens, or of one row that is longer."""
    for T, mixer in itertools.product(lengths, names):
        row = f"{mixer}, {T:,} tokens, kernels={kernels}, {'compiled' if compiled else 'plain'}"
        with rows.attempt(row):
            timed(config, rows, row, compiled, attention=mixer, T=T, kernels=kernels)


def decode(config: BenchConfig, rows: Rows) -> None:
    """ms of a token behind a prompt of 256, in 1 and 64 rows."""
    for mixer, how, B in itertools.product(("softmax", "gated_deltanet"), HOW, (1, 64)):
        row = f"{mixer}, {how}, {B} rows"
        with rows.attempt(row):
            model: Any = make_side(config, mixer).model.eval()
            in_dtype: Any = contextlib.nullcontext()
            if how == "bfloat16 weights":
                model = model.bfloat16()
            elif how == "autocast":
                in_dtype = autocast(config.device, "bfloat16")
            with in_dtype:
                call = prefilled(model, 256, B)
                call()  # warms up
                seconds = min(seconds_of(call, config.device) for _ in range(TIMED_CALLS)) / TOKENS
            rows.write(row, ms_a_token=1e3 * seconds, tokens_s=B / seconds)


def profile(config: BenchConfig, rows: Rows) -> None:
    """The parts of a plain step, each with the device synchronised. Writes torch's tables of the
    kernels of a step to out_dir/kernels_plain.txt and kernels_compiled.txt."""
    side = make_side(config)
    losses: list[torch.Tensor] = []

    def forward():
        losses.append(side.loss())

    def backward():
        losses.pop().backward()

    for _ in range(WARM_UP):  # the last step counts
        seconds = {
            "forward": seconds_of(forward, config.device),
            "backward": seconds_of(backward, config.device),
            "clipping": seconds_of(side.clip, config.device),
            "optimizer": seconds_of(side.update, config.device),
        }
    for row, of_part in seconds.items():
        rows.write(row, ms=1e3 * of_part)
    for how, compiled in (("plain", False), ("compiled", True)):
        with rows.attempt(f"kernels of a {how} step"):
            side = make_side(config, compiled=compiled)
            side()
            with torch.profiler.profile() as profiler:
                seconds_of(side, config.device)
            table = profiler.key_averages().table("self_device_time_total", 30, 80)
            files.write_text(Path(config.out_dir) / f"kernels_{how}.txt", f"{table}\n")
