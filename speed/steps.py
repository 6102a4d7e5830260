"""The parts step, mixers, compiled, decode and profile: speeds of whole models.

Sizes are those of nanoGPT's 124M model, and a step has 12,288 tokens. A rehearsal has one narrow
layer.
"""

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ops.kernels import has_fla
from runs.hardware import autocast, peak_flops, seconds_of
from speed.config import BenchConfig
from speed.costs import TOKENS, prefilled
from speed.measure import NANOGPT, PLAIN, Side, interleave, median_interval, random_batch
from speed.rows import Rows

RECURRENT = ("gla", "mamba2", "gated_deltanet", "deltanet", "kda", "cosformer")
T = 1024
LONG = 4096
WARM_UP = 5  # steps
HOW = ("float32", "autocast", "bfloat16 weights")  # sample.py decodes as the first of them
CHANGES: dict[str, dict] = {  # {row of the part step: keys of its Side}
    "elementwise gate": dict(gate="elementwise"),
    "Muon": dict(train=replace(PLAIN, optimizer="muon")),
}


def make_side(config: BenchConfig, attention: str = "softmax", T: int = T, **keys: Any) -> Side:
    """A Side of measure.py; keys of it and of the model."""
    B = 12 * 1024 // T
    model: dict = dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50_304, block_size=T)
    if config.rehearse:
        B = 2
        model = dict(n_layer=1, n_head=2, n_embd=32, vocab_size=256, block_size=T // 32)
    batch = random_batch(config, model["vocab_size"], B, model["block_size"])
    return Side(config, attention, batch, **model, **keys)


def timed(config: BenchConfig, rows: Rows, cases: dict[str, dict]) -> None:
    """Steps of Sides in turn: {row: their keys}. Of two the ratio has a row, too."""
    sides: dict[str, Side] = {}
    found: dict[str, dict] = {}
    for row, keys in cases.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        before = torch.cuda.memory_allocated()  # 0 without a GPU
        if config.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        sides[row] = make_side(config, **keys)
        seconds = [seconds_of(sides[row], config.device) for _ in range(WARM_UP)]
        peak = torch.cuda.max_memory_allocated() - before  # of weights, moments and activations
        found[row] = dict(warm_up_s=sum(seconds), peak_gb=peak / 1e9)
        if keys["compiled"]:
            counters = torch._dynamo.utils.counters
            found[row]["graphs"] = counters["stats"]["unique_graphs"]
            found[row]["breaks"] = sum(counters["graph_break"].values())
    times = interleave(sides, config.pairs, config)
    for row, side in sides.items():
        tokens = side.batch[0].numel()
        seconds_a_step = statistics.median(times[row])
        numbers = dict(ms=1e3 * seconds_a_step, tokens_s=tokens / seconds_a_step)
        if hasattr(side.model, "flops_per_token"):  # not nanoGPT's
            flops = 3 * side.model.flops_per_token(side.batch[0].shape[1])
            peak_rate, _ = peak_flops(config.device, config.dtype)
            numbers["mfu"] = flops * numbers["tokens_s"] / peak_rate
            found[row]["form"] = side.model.blocks[0].mixer.form
        rows.write(row, **numbers, loss=side.loss().item(), **found[row])
    if len(cases) == 2:
        ours, theirs = cases
        ratios = [b / a for a, b in zip(times[ours], times[theirs], strict=True)]
        ratio, low, high = median_interval(ratios)
        rows.write(f"{theirs} / {ours}", ratio=ratio, low=low, high=high)


def step(config: BenchConfig, rows: Rows) -> None:
    """Our step beside nanoGPT's, then with a gate and with Muon, each plain and compiled."""
    for compiled in (False, True):
        how = "compiled" if compiled else "plain"
        keys: dict = dict(compiled=compiled)
        cases = {f"ours, {how}": keys}
        if config.against:
            cases[f"{NANOGPT}, {how}"] = keys | dict(attention=NANOGPT)
        rows.attempt(f"ours, {how}", timed, config, rows, cases)
        for name, change in CHANGES.items():
            row = f"ours, {name}, {how}"
            rows.attempt(row, timed, config, rows, {row: keys | change})


def mixers(config: BenchConfig, rows: Rows) -> None:
    """A step of recurrent mixers, with fla's kernels and in plain PyTorch."""
    for length in (T, LONG):
        of_recurrent(config, rows, length, compiled=False)


def compiled(config: BenchConfig, rows: Rows) -> None:
    """Compiled steps, and how many graphs each is."""
    of_recurrent(config, rows, T, compiled=True)


def of_recurrent(config: BenchConfig, rows: Rows, length: int, compiled: bool) -> None:
    for mixer in RECURRENT:
        for kernels in ("auto", "torch") if has_fla() else ("torch",):
            row = f"{mixer}, {length:,} tokens, kernels={kernels}"
            keys = dict(attention=mixer, T=length, kernels=kernels, compiled=compiled)
            rows.attempt(row, timed, config, rows, {row: keys})


def decode(config: BenchConfig, rows: Rows) -> None:
    """ms of a token behind a prompt of 256, in 1 and 64 rows."""
    for mixer in ("softmax", "gated_deltanet"):
        for how in HOW:
            for B in (1, 64):
                row = f"{mixer}, {how}, {B} rows"
                rows.attempt(row, decode_row, config, rows, row, mixer, how, B)


def decode_row(config: BenchConfig, rows: Rows, row: str, mixer: str, how: str, B: int) -> None:
    model: Any = make_side(config, mixer).model.eval()
    in_dtype: Any = contextlib.nullcontext()
    if how == "bfloat16 weights":
        model = model.bfloat16()
    elif how == "autocast":
        in_dtype = autocast(config.device, "bfloat16")
    context = min(256, model.config.block_size - TOKENS)
    with in_dtype:
        decode = prefilled(model, context, B)  # warms up
        prefill = seconds_of(lambda: prefilled(model, context, B), config.device)
        seconds = min(seconds_of(decode, config.device) for _ in range(WARM_UP)) / TOKENS
    rows.write(row, ms_a_token=1e3 * seconds, tokens_s=B / seconds, prefill_ms=1e3 * prefill)


def profile(config: BenchConfig, rows: Rows) -> None:
    """The parts of a plain step, each with the device synchronised, and the kernels of a plain and
    of a compiled step."""
    side = make_side(config)
    losses: list[torch.Tensor] = []
    pieces: dict[str, Callable] = {
        "forward": lambda: losses.append(side.loss()),
        "backward": lambda: losses.pop().backward(),
        "clipping": side.clip,
        "optimizer": side.update,
    }
    ms: dict[str, list] = {piece: [] for piece in pieces}
    for _ in range(WARM_UP):
        for piece, call in pieces.items():
            ms[piece].append(1e3 * seconds_of(call, config.device))
    for piece, values in ms.items():
        rows.write(piece, ms=min(values))
    rows.attempt("kernels", kernels, config, rows, side, "kernels of a plain step")
    side = make_side(config, compiled=True)
    rows.attempt("kernels", kernels, config, rows, side, "kernels of a compiled step")


def kernels(config: BenchConfig, rows: Rows, side: Side, table: str) -> None:
    """ms and calls of all kernels of a step, and of the 15 that take the most."""
    side()
    with torch.profiler.profile() as profiler:
        seconds_of(side, config.device)
    kind, time_of = torch.autograd.DeviceType.CPU, "self_cpu_time_total"
    if config.device == "cuda":
        kind, time_of = torch.autograd.DeviceType.CUDA, "self_device_time_total"
    ms = {}
    calls = {}
    for event in profiler.key_averages():
        if event.device_type == kind:
            ms[event.key] = getattr(event, time_of) / 1e3
            calls[event.key] = event.count
    rows.write("all", table, ms=sum(ms.values()), calls=sum(calls.values()))
    for key in sorted(ms, key=ms.__getitem__, reverse=True)[:15]:
        rows.write(key[:80], table, ms=ms[key], calls=calls[key])
