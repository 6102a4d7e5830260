"""The parts card, step, mixers, compiled_NAME, decode and attention: what the card is, and speeds
of whole models.

Sizes are those of nanoGPT's 124M model, and a step has 12,288 tokens. A rehearsal has one narrow
layer.
"""

import contextlib
import functools
import importlib.util
import platform
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ops.kernels import has_fla
from runs.hardware import autocast, gemm_rate, peak_flops, seconds_of
from speed.config import BenchConfig
from speed.costs import TOKENS, has_cache, of_any_length, prefilled
from speed.measure import NANOGPT, PLAIN, Side, interleave, median_interval, random_batch
from speed.rows import Rows

# those that are measured first
RECURRENT = ("gla", "mamba2", "gated_deltanet", "deltanet", "kda", "cosformer")
LENGTHS = (1024, 4096)
WARM_UP = 5  # steps
HOW = ("float32", "autocast", "bfloat16 weights")  # sample.py decodes as the first of them
KERNELS: dict[str, dict] = {  # {row: what a softmax layer has}
    "causal": {},
    "grouped": dict(n_kv_head=2),
    "window": dict(window="8"),
    "sink": dict(attention="sink_head"),
    "window and sink": dict(window="8", attention="sink_head"),
    "window, grouped": dict(window="8", n_kv_head=2),
    "forget gate": dict(attention="fox"),
    "soft-cap": dict(attention="softcap"),
}


def sizes(config: BenchConfig, T: int) -> tuple[int, dict]:
    """(rows of a step, keys of the model)"""
    if config.rehearse:
        return 2, dict(n_layer=1, n_head=2, n_embd=32, vocab_size=256, block_size=T // 32)
    return max(1, 12 * 1024 // T), dict(
        n_layer=12, n_head=12, n_embd=768, vocab_size=50_304, block_size=T
    )


def make_side(config: BenchConfig, name: str, T: int, rows: int | None = None, **keys: Any) -> Side:
    """A Side of measure.py at these sizes; keys of it and of the model. rows: of a step (None:
    those of `sizes`)."""
    B, model = sizes(config, T)
    batch = random_batch(config, model["vocab_size"], rows or B, model["block_size"])
    return Side(config, name, batch, **model, **keys)


def warmed(make: Callable, config: BenchConfig) -> tuple[Side, dict]:
    """A Side that has taken some steps, and what they tell: seconds until then, with the
    compiler's, and the peak of memory, its weights and moments included."""
    before = 0
    if config.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    found: list = []

    def start():
        found.append(make())
        for _ in range(1 if config.rehearse else WARM_UP):
            found[0]()

    seconds = seconds_of(start, config.device)
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9 if config.device == "cuda" else None
    return found[0], {"warm_up_s": seconds, "peak_gb": peak}


def speed_of(config: BenchConfig, side: Side, seconds: list[float], flops: float) -> dict:
    """The numbers of a row. flops: of a token, forward."""
    median, tokens = statistics.median(seconds), side.batch[0].numel()
    peak, _ = peak_of(config.device, config.dtype)
    rates = {"tokens_s": tokens / median, "mfu": 3 * flops * tokens / median / peak}
    return {"ms": 1e3 * median, "ms_min": 1e3 * min(seconds), "ms_max": 1e3 * max(seconds)} | rates


peak_of = functools.cache(peak_flops)  # that of a device without a data sheet is measured


def n_pairs(config: BenchConfig) -> int:
    return 6 if config.rehearse else config.pairs


# -- The card --------------------------------------------------------------------------------------


def card(config: BenchConfig, rows: Rows) -> None:
    """What the numbers were measured on, and how fast it multiplies matrices."""
    about: dict = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    about |= {"fla": has_fla(), "triton": importlib.util.find_spec("triton") is not None}
    if config.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        about |= {
            "card": card.name,
            "memory_gb": card.total_memory / 1e9,
            "capability": f"{card.major}.{card.minor}",
        }
    rows.write("versions", **about)
    for dtype in ("float32", "bfloat16"):
        rows.write(f"matrix product, {dtype}", tflops=gemm_rate(config.device, dtype) / 1e12)
    peak, source = peak_of(config.device, config.dtype)
    rows.write("peak, for MFU", tflops=peak / 1e12, source=source)


# -- A step of 124M parameters ---------------------------------------------------------------------


def step(config: BenchConfig, rows: Rows) -> None:
    """Our step beside nanoGPT's, plain and compiled, then with a gate and with Muon; the kernels of
    a compiled step."""
    speeds = {}
    for compiled in (False, True):
        speed = rows.attempt(f"ours, {word_for(compiled)}", beside_nanogpt, config, rows, compiled)
        speeds[compiled] = speed
    if None not in speeds.values():
        rows.predicted("compiled / plain", speeds[True] / speeds[False])
    others: dict = {
        "elementwise gate": dict(gate="elementwise"),
        "Muon": dict(train=replace(PLAIN, optimizer="muon")),
    }
    for name, keys in others.items():
        for compiled in (False, True):
            row = f"ours, {name}, {word_for(compiled)}"
            rows.attempt(
                row, alone, config, rows, row, "softmax", LENGTHS[0], dict(compiled=compiled) | keys
            )
    rows.attempt("kernels", kernels_of_a_step, config, rows)


def word_for(compiled: bool) -> str:
    return "compiled" if compiled else "plain"


def beside_nanogpt(config: BenchConfig, rows: Rows, compiled: bool) -> float:
    """Writes a row for each side, and their ratio. Returns our tokens a second."""
    sides, costs, word = {}, {}, word_for(compiled)
    attentions = {"ours": "softmax"} | ({NANOGPT: NANOGPT} if config.against else {})
    for name, attention in attentions.items():
        make = functools.partial(make_side, config, attention, LENGTHS[0], compiled=compiled)
        sides[name], costs[name] = warmed(make, config)
    # of both: their MFU compares
    flops = sides["ours"].model.flops_per_token(sides["ours"].batch[0].shape[1])
    seconds = interleave(sides, n_pairs(config), config)
    numbers = {name: speed_of(config, side, seconds[name], flops) for name, side in sides.items()}
    for name, side in sides.items():
        rows.write(
            f"{name}, {word}", **numbers[name], **costs[name], loss=float(side.loss().detach())
        )
    if NANOGPT in sides:
        pairs = zip(seconds[NANOGPT], seconds["ours"], strict=True)
        middle, low, high = median_interval([theirs / ours for theirs, ours in pairs])
        rows.write(f"nanoGPT / ours, {word}", ratio=middle, low=low, high=high)
    return numbers["ours"]["tokens_s"]


def alone(config: BenchConfig, rows: Rows, row: str, mixer: str, T: int, keys: dict) -> float:
    """Writes the row of one side. Returns its tokens a second."""
    if keys.get("compiled"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    side, costs = warmed(functools.partial(make_side, config, mixer, T, **keys), config)
    seconds = interleave({row: side}, n_pairs(config), config)[row]
    numbers = speed_of(config, side, seconds, side.model.flops_per_token(side.batch[0].shape[1]))
    rows.write(row, **numbers, **costs, form=side.model.blocks[0].mixer.form)
    return numbers["tokens_s"]


def kernels_of_a_step(config: BenchConfig, rows: Rows) -> None:
    """The 15 kernels that take the most of a compiled step."""
    side, _ = warmed(lambda: make_side(config, "softmax", LENGTHS[0], compiled=True), config)
    n_steps = 3
    with torch.profiler.profile() as profiler:
        for _ in range(n_steps):
            seconds_of(side, config.device)
    kind, time_of = torch.autograd.DeviceType.CPU, "self_cpu_time_total"
    if config.device == "cuda":
        kind, time_of = torch.autograd.DeviceType.CUDA, "self_device_time_total"
    events = [event for event in profiler.key_averages() if event.device_type == kind]
    for event in sorted(events, key=lambda event: -getattr(event, time_of))[:15]:
        ms = getattr(event, time_of) / 1e3 / n_steps
        rows.write(event.key[:80], "kernels of a compiled step", ms=ms, calls=event.count / n_steps)


# -- Mixers ----------------------------------------------------------------------------------------


def mixers(config: BenchConfig, rows: Rows) -> None:
    """A step of every recurrent mixer, with fla's kernels and in plain PyTorch."""
    recurrent = [name for name in of_any_length() if not has_cache(name)]
    others = [name for name in recurrent if name not in RECURRENT]
    asked = [(name, T) for T in LENGTHS for name in RECURRENT] + [
        (name, LENGTHS[0]) for name in others
    ]
    for mixer, T in asked:
        speeds = {
            kernels: mixer_alone(config, rows, mixer, T, kernels) for kernels in ("auto", "torch")
        }
        if T == LENGTHS[0]:
            lacks = "" if has_fla() else "needs a GPU and fla"
            is_known = not lacks and None not in speeds.values()
            rows.predicted(
                f"fla / plain: {mixer}",
                speeds["auto"] / speeds["torch"] if is_known else None,
                lacks,
            )


def mixer_alone(config: BenchConfig, rows: Rows, mixer: str, T: int, kernels: str) -> float | None:
    """Tokens a second, and a quarter of the rows where the first try fails, most likely for its
    memory."""
    if kernels == "auto" and not has_fla():
        return None  # the same as torch
    row, keys = f"{mixer}, {T:,} tokens, kernels={kernels}", dict(kernels=kernels)
    speed = rows.attempt(row, alone, config, rows, row, mixer, T, keys)
    if speed is None:
        quarter = max(1, sizes(config, T)[0] // 4)
        row = f"{row}, {quarter} rows"
        speed = rows.attempt(row, alone, config, rows, row, mixer, T, keys | dict(rows=quarter))
    return speed


def compiled_mixer(mixer: str, config: BenchConfig, rows: Rows) -> None:
    """The part compiled_NAME: a compiled step of that mixer, and how many graphs it is."""
    for kernels in ("auto", "torch") if has_fla() else ("torch",):
        row, keys = f"{mixer}, kernels={kernels}", dict(kernels=kernels, compiled=True)
        rows.attempt(row, alone, config, rows, row, mixer, LENGTHS[0], keys)
        counters = torch._dynamo.utils.counters
        breaks = sum(counters["graph_break"].values())
        rows.write(f"{row}: graphs", graphs=counters["stats"]["unique_graphs"], breaks=breaks)


# -- Decoding --------------------------------------------------------------------------------------


def decode(config: BenchConfig, rows: Rows) -> None:
    """ms of a token behind a prompt of 256, in 1 and 64 rows."""
    _, keys = sizes(config, LENGTHS[0])
    for mixer in ("softmax", "gated_deltanet"):
        for how in HOW:
            model: Any = Side(config, mixer, **keys).model.eval()
            model = model.bfloat16() if how == "bfloat16 weights" else model
            for B in (1, 64):
                row = f"{mixer}, {how}, {B} row{'s' * (B > 1)}"
                rows.attempt(row, decode_row, config, rows, row, model, how, B)


def decode_row(config: BenchConfig, rows: Rows, row: str, model: Any, how: str, B: int) -> None:
    context, found = min(256, model.config.block_size - TOKENS), []
    with autocast(config.device, "bfloat16") if how == "autocast" else contextlib.nullcontext():
        prefill = [
            seconds_of(lambda: found.append(prefilled(model, context, B)), config.device)
            for _ in range(2)
        ]
        seconds = [
            seconds_of(found[-1], config.device) / TOKENS
            for _ in range(2 if config.rehearse else 6)
        ]
    ms = 1e3 * min(seconds)
    rows.write(row, ms_a_token=ms, tokens_s=B / min(seconds), prefill_ms=1e3 * min(prefill))


# -- Attention -------------------------------------------------------------------------------------


class Attention(TorchDispatchMode):
    """Collects the names of torch's attention kernels that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0].removeprefix("_scaled_dot_product_")
        if "attention" in name and "backward" not in name:
            self.names.add(name)
        return function(*args, **(kwargs or {}))


def attention_kernels(config: BenchConfig, rows: Rows) -> None:
    """Which kernel torch takes for a softmax layer, and what a step of one layer costs. Without one
    the (T, T) weights are made. Under mask_documents a document is a row of its own, so that it
    needs no mask."""
    for dtype in ("bfloat16", "float32"):
        for name, keys in KERNELS.items():
            in_dtype = replace(config, dtype=dtype)
            rows.attempt(
                f"{name}, {dtype}", attention_kernel, in_dtype, rows, f"{name}, {dtype}", keys
            )


def attention_kernel(config: BenchConfig, rows: Rows, row: str, keys: dict) -> None:
    _, model = sizes(config, 2048)
    batch = random_batch(config, 256, 4, model["block_size"])
    keys = model | dict(n_layer=1, vocab_size=256) | keys
    attention = keys.pop("attention", "softmax")
    side, costs = warmed(lambda: Side(config, attention, batch, **keys), config)
    with Attention() as seen:
        side()
    ms = 1e3 * min(seconds_of(side, config.device) for _ in range(5))
    rows.write(row, kernel=", ".join(sorted(seen.names)) or "none", ms=ms, peak_gb=costs["peak_gb"])
