"""Measures speed and memory; prints tables and, as its last line, one JSON object, and draws figures.

    python bench.py ops                              the chunked forms against scaled_dot_product_attention and the loop
    python bench.py train --against=PATH/model.py    a training step against nanoGPT's own (its file is not kept here)
    python bench.py all --pairs=30                   train, overhead, length, decode, ops and data
    python bench.py --profile=true                   where a training step goes

Absolute times of a shared machine mean little, so a claim is a ratio: the two sides run in turn in one process, with
the same number of threads, and their order changes from pair to pair. The interval of a claim is that of the median of
the paired ratios, by order statistics (95%, no assumption about the noise). A claim is *met* if the whole interval
clears the target, *missed* if the whole interval falls short of it, else *unresolved*. out_dir gets a JSON file per
part, with the raw pairs.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded; train.py says why

import configurator
from configurator import UserError, check_choice, key

import contextlib
import importlib.util
import json
import math
import multiprocessing
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F

import plot
from data.mqar import prepare as mqar
from data.shards import open_dataset
from data.tokenizer import get_tokenizer
from model import GPT, MIXERS, GPTConfig
from ops import IGNORE
from ops.recurrence import chunked, has_fla, recurrent
from runs import files
from runs.hardware import (
    DTYPES,
    check_threads,
    gemm_rate,
    keep_freed_memory,
    pick_device,
    pick_dtype,
    seconds_of,
    usable_cores,
)
from study.interventions import decoding_speed
from train import TrainConfig, make_optimizers

HERE = Path(__file__).resolve().parent


@dataclass
class BenchConfig:
    what: list[str] = key(["all"], "train, overhead, length, decode, ops, data, or all of them")
    profile: bool = key(False, "instead: where a training step goes")
    against: str | None = key(None, "nanoGPT's model.py, to be measured beside ours")
    pairs: int = key(30, "pairs of a ratio whose sides take less than a second", at_least=6)
    long_pairs: int = key(7, "pairs of a ratio whose sides take seconds", at_least=6)
    longest: int = key(32_768, "the longest sequence of the part length", at_least=1024)
    threads: int = key(0, "CPU threads (0: as many as cores)", at_least=0)
    device: str = key("auto", "where to compute", choices=("auto", "cpu", "cuda", "mps"))
    dtype: str = key("auto", "dtype of matrix products", choices=("auto", *DTYPES))
    compile: bool = key(False, "compile our side in train and overhead")
    out_dir: str = key("results/bench", "where the JSON files and the figures go", is_path=True)
    overwrite: bool = key(False, "true: take an out_dir that holds files which are none of a benchmark")


def main(argv: list[str]) -> None:
    config = configurator.load(BenchConfig, argv, positional="what", program="bench.py", description=__doc__)
    for name in config.what:
        check_choice("what", name, (*PARTS, "all"))
    check_threads(config.threads)
    config.threads = config.threads or usable_cores()
    torch.set_num_threads(config.threads)
    keep_freed_memory()  # for all sides
    config.device = pick_device(config.device)
    config.dtype = pick_dtype(config.dtype, config.device)
    if config.device == "cuda":
        torch.set_float32_matmul_precision("high")  # for all sides, as train.py and nanoGPT's do
    if config.profile:
        print(profile(config))
        return
    out_dir = Path(config.out_dir)
    # a folder without a marker may be results/bench of a clone, which has our JSON files
    has_our_files = any(is_ours(file) for file in out_dir.glob("*.json"))
    files.claim(out_dir, "bench", config.overwrite or has_our_files)
    about = describe(config)
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    claims = []
    for name in PARTS if "all" in config.what else config.what:
        report = Report(name)
        PARTS[name](config, report)
        print(report)
        (out_dir / f"{name}.json").write_text(json.dumps(about | report.as_dict(), indent=1) + "\n")
        claims += report.claims
    compiled_ran_eager(config)
    print("written:", ", ".join([f"{out_dir}/", *map(str, plot.bench(out_dir))]))
    print(json.dumps(about | {"claims": [{k: v for k, v in claim.items() if k != "pairs"} for claim in claims]}))


def is_ours(file: Path) -> bool:
    """Whether a JSON file is what this script writes of a part."""
    try:
        found = files.read_json(file)
    except UserError:
        return False
    return isinstance(found, dict) and {"part", "rows", "claims"} <= found.keys()


def describe(config: BenchConfig) -> dict:
    # these kernels compute the recurrence of a model (Mixer.read); the part ops measures the forms in PyTorch
    kernels = "fla" if config.device == "cuda" and has_fla() else "plain PyTorch"
    machine = torch.cuda.get_device_name() if config.device == "cuda" else platform.processor() or platform.machine()
    return {
        "command": " ".join(["python", *sys.argv]),
        "device": f"{config.device}, {machine}, {config.threads} threads",
        "dtype": config.dtype,
        "versions": f"python {platform.python_version()}, torch {torch.__version__}",
        "kernels": f"{kernels}, compile {'on' if config.compile else 'off'}",
        "gemm_gflops": {name: round(gemm_rate(config.device, name) / 1e9) for name in ("float32", "bfloat16")},
    }


# ----------------------------------------------------------------------------------------------------------------------
# Pairs, ratios, intervals


def interleave(sides: dict, pairs: int, config: BenchConfig) -> dict:
    """{name: [seconds, ...]}: calls each side once untimed, then all in turn, every other round in reverse order."""
    seconds = {name: [] for name in sides}
    for call in sides.values():
        seconds_of(call, config.device)
    for i in range(pairs):
        for name in list(sides)[:: -1 if i % 2 else 1]:
            seconds[name].append(seconds_of(sides[name], config.device))
    return seconds


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """(median, low, high): the median of at least 6 values, and its 95% interval by order statistics.

    A single value is a size in bytes, which does not vary: it is its own interval.
    """
    values, n = sorted(values), len(values)
    if n == 1:
        return values[0], values[0], values[0]
    tail, k = 0.0, 0
    while tail + math.comb(n, k) / 2**n <= 0.025:
        tail += math.comb(n, k) / 2**n
        k += 1
    return statistics.median(values), values[k - 1], values[n - k]


def judge(low: float, high: float, target: float, at_most: bool = False) -> str:
    """Compares the interval with the target: met, missed or unresolved."""
    if at_most:
        low, high, target = -high, -low, -target
    return "met" if low >= target else "missed" if high < target else "unresolved"


@dataclass
class Report:
    """What a part found: lines of a table, claims with their raw pairs, and rows for figures."""

    name: str
    lines: list = field(default_factory=list)
    claims: list = field(default_factory=list)
    rows: list = field(default_factory=list)

    def claim(self, name: str, pairs: list[tuple], target: float, at_most: bool = False) -> None:
        """pairs: [(what is divided, what it is divided by), ...], as measured side by side."""
        ratio, low, high = median_interval([a / b for a, b in pairs])
        claim = {"name": name, "ratio": ratio, "low": low, "high": high, "target": target, "at_most": at_most}
        self.claims.append(claim | {"met": judge(low, high, target, at_most), "pairs": pairs})

    def row(self, **values: object) -> None:
        self.rows.append(values)
        self.lines.append("  ".join(f"{name} {show(value)}" for name, value in values.items()))

    def __str__(self):
        lines = [f"\n{self.name}", *(f"  {line}" for line in self.lines)]
        for claim in self.claims:
            sign = "<=" if claim["at_most"] else ">="
            lines.append(
                f"  {claim['name']:<58}{claim['ratio']:>8.3f}  [{claim['low']:.3f}, {claim['high']:.3f}]"
                f"  {sign} {claim['target']:g}: {claim['met']}"
            )
        return "\n".join(lines)

    def as_dict(self) -> dict:
        return {"part": self.name, "rows": self.rows, "claims": self.claims}


def show(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


# ----------------------------------------------------------------------------------------------------------------------
# Sides: a training step of ours, and one of nanoGPT


def update(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], loss: torch.Tensor) -> None:
    """Backward, clipping and the optimizer's step, the same for all sides."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)


def our_step(config, dtype, batch, compiled=False, **keys):
    """Returns step(), which trains our model once on the batch (inputs, targets), as train.py does."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**keys)).to(config.device)
    optimizers = make_optimizers(model, TrainConfig(learning_rate=1e-4), config.device)
    forward = torch.compile(model) if compiled else model

    def step():
        with torch.autocast(config.device, DTYPES[dtype], enabled=dtype != "float32"):
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


def nanogpt_model(path: Path | str, config: BenchConfig, vocab_size: int, block_size: int = 256):
    module = nanogpt(path)
    torch.manual_seed(0)
    keys = dict(n_layer=6, n_head=6, n_embd=384, block_size=block_size, dropout=0.0, bias=False)
    with contextlib.redirect_stdout(sys.stderr):  # nanoGPT prints its size
        return module.GPT(module.GPTConfig(vocab_size=vocab_size, **keys)).to(config.device)


def nanogpt_step(
    path: Path | str, config: BenchConfig, batch: tuple[torch.Tensor, ...], vocab_size: int, dtype: str = "float32"
) -> Callable:
    """Returns step(), a step as nanoGPT's train.py makes it, which on a CPU is in float32."""
    model = nanogpt_model(path, config, vocab_size)
    with contextlib.redirect_stdout(sys.stderr):
        optimizers = [model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), config.device)]

    def step():
        with torch.autocast(config.device, DTYPES[dtype], enabled=dtype != "float32"):
            _, loss = model(*batch)
        update(model, optimizers, loss)

    return step


def random_batch(config: BenchConfig, vocab_size: int, B: int, T: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(vocab_size, (2, B, T), generator=generator).to(config.device))


def alone(function: Callable, *arguments: object):
    """Calls function(*arguments) in a new process, whose peak memory then has no other cause."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def peak_bytes(make_step: Callable, arguments: tuple, keywords: dict) -> int:
    """Peak resident memory, on a GPU of the tensors alone, of a process that takes three steps."""
    config = arguments[0] if isinstance(arguments[0], BenchConfig) else arguments[1]
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


# ----------------------------------------------------------------------------------------------------------------------
# The parts


def bench_train(config: BenchConfig, report: Report) -> None:
    """6 x 384, T = 256, B = 8: our step in float32 and with defaults, nanoGPT's in float32 and under autocast."""
    targets = {256: 1.75, 50_304: 1.8}
    for vocab_size, target in targets.items():
        batch = random_batch(config, vocab_size, 8, 256)
        keys = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=vocab_size)
        ours = {
            "ours float32": our_step(config, "float32", batch, **keys),
            f"ours {config.dtype}": our_step(config, config.dtype, batch, config.compile, **keys),
        }
        sides = dict(ours)
        if config.against:
            sides["nanoGPT float32"] = nanogpt_step(config.against, config, batch, vocab_size)
            sides["nanoGPT bfloat16"] = nanogpt_step(config.against, config, batch, vocab_size, "bfloat16")
        seconds = interleave(sides, config.pairs if vocab_size == 256 else config.long_pairs, config)
        model = sides["ours float32"].model
        flops = 3 * model.flops_per_token(256) * 8 * 256
        for name, values in seconds.items():
            median = statistics.median(values)
            share = flops / median / gemm_rate(config.device, "float32" if "float32" in name else "bfloat16")
            report.row(side=name, vocabulary=vocab_size, ms=1e3 * median, tokens_s=2048 / median, gemm_share=share)
        if not config.against:
            continue
        base = seconds["nanoGPT float32"]
        fast = list(zip(base, seconds[f"ours {config.dtype}"], strict=True))
        if vocab_size == 256:
            report.claim("float32 step, nanoGPT / ours", list(zip(base, seconds["ours float32"], strict=True)), 1.0)
        report.claim(f"step with defaults, {vocab_size:,} ids, nanoGPT / ours", fast, target)
    memory = {"ours": alone(peak_bytes, our_step, (config, config.dtype, batch), keys)}
    if config.against:
        arguments = (config.against, config, batch, vocab_size)
        memory["nanoGPT"] = alone(peak_bytes, nanogpt_step, arguments, {})
        pairs = [(memory["ours"], memory["nanoGPT"])]
        report.claim("peak memory, 50,304 ids, ours / nanoGPT", pairs, 0.55, at_most=True)
    for name, size in memory.items():
        report.row(side=name, vocabulary=vocab_size, peak_mb=size / 1e6)


TINY = dict(
    n_layer=2, n_head=4, n_embd=64, mlp_ratio=3, block_size=64, vocab_size=16, attention="cosformer", position="none",
    readout_norm="none", gate="elementwise",
)  # fmt: skip


def tiny_batch(B: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    rows = mqar.generate(np.random.default_rng(0), B, 64, 4, vocab_size=16, queries=2, power=1.0).astype(np.int64)
    labels = np.where(rows[:, 1] == 0, IGNORE, rows[:, 1])
    return torch.from_numpy(rows[:, 0].copy()), torch.from_numpy(labels)


def bench_overhead(config: BenchConfig, report: Report) -> None:
    """4 x 768, T = 512: what a gate costs in a training step, a forward, decoding and memory, beside its FLOPs."""
    arms: dict = {
        "elementwise": dict(gate="elementwise"),
        "headwise": dict(gate="headwise"),
        "rank 16": dict(gate="elementwise", gate_rank=16),
        "elementwise, match_params": dict(gate="elementwise", match_params=True),
    }
    keys = dict(n_layer=4, n_head=12, n_embd=768, block_size=512, vocab_size=256)
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
            columns[column] = list(zip(seconds[name], seconds["none"], strict=True))
        medians = {column: median_interval([a / b for a, b in pairs])[0] for column, pairs in columns.items()}
        report.row(gate=name, flops=share, **medians, memory=memory)
        limit = {"elementwise": share + 0.02, "elementwise, match_params": 1.02}.get(name, 1.03)
        report.claim(f"training step, {name} / none", columns["step"], round(limit, 4), at_most=True)


def forward_of(step) -> Callable:
    idx = torch.zeros(2, 512, dtype=torch.long, device=step.model.wte.weight.device)
    return lambda: step.model(idx, idx).item()


@torch.no_grad()
def prefilled(model: GPT, context: int) -> Callable:
    """Returns decode(), which makes one more token behind a context of that many tokens."""
    device = model.wte.weight.device
    idx = torch.zeros(1, context, dtype=torch.long, device=device)
    _, state = model.features(idx, model.init_state(1), 0)

    @torch.no_grad()
    def decode():
        x, _ = model.features(idx[:, :1], state, context)
        return int(model.logits(x[:, -1]).argmax())

    return decode


def decode_of(step) -> Callable:
    return prefilled(step.model, 256)


def keeps_every_token(name: str) -> bool:
    """Whether the mixer's state grows with the context, as a KV cache does and a recurrent state does not."""
    keys: dict = dict(n_layer=1, n_head=1, n_embd=16, vocab_size=1, attention=name)
    short, long = (GPT(GPTConfig(**keys, block_size=T)).state_bytes() for T in (16, 32))
    return short < long


def bench_length(config: BenchConfig, report: Report) -> None:
    """2 x 256, the same number of tokens at every T: tokens/s of a training step, and its memory."""
    for name in MIXERS:
        calls, T, keeps_all = {}, 256, keeps_every_token(name)
        keys = dict(n_layer=2, n_head=4, n_embd=256, vocab_size=256, attention=name)
        while T <= config.longest:
            batch = random_batch(config, 256, config.longest // T, T)
            calls[T] = our_step(config, config.dtype, batch, **keys | {"block_size": T})
            memory = alone(peak_bytes, our_step, (config, config.dtype, batch), keys | {"block_size": T})
            seconds = seconds_of(calls[T], config.device), seconds_of(calls[T], config.device)
            report.row(mixer=name, T=T, tokens_s=config.longest / min(seconds), peak_mb=memory / 1e6)
            T *= 4 if keeps_all and T >= 4096 else 2  # the cost grows with T^2
        if not keeps_all and 16_384 in calls:
            seconds = interleave({1024: calls[1024], 16_384: calls[16_384]}, config.long_pairs, config)
            pairs = list(zip(seconds[1024], seconds[16_384], strict=True))
            report.claim(f"{name}: tokens/s at 16,384 / at 1,024", pairs, 0.85)


def bench_decode(config: BenchConfig, report: Report) -> None:
    """6 x 384, batch 1, float32, one thread: ms per token at several contexts. nanoGPT reads the context each time."""
    torch.set_num_threads(1)  # products of one row leave a second thread nothing to do
    contexts = (64, 256, 1024, 4096)
    keys: dict = dict(n_layer=6, n_head=6, n_embd=384, vocab_size=256, block_size=4097)
    decoders = {}
    for name in MIXERS:
        torch.manual_seed(0)
        model = GPT(GPTConfig(**keys, attention=name)).to(config.device).eval()
        decoders[name] = {context: prefilled(model, context) for context in contexts}
    ungated = decoders["softmax"], decoders["gla"]
    if config.against:
        model = nanogpt_model(config.against, config, 256, block_size=1024).eval()
        for context, for_state, for_cache in ((256, 14, 12), (1024, 60, 50)):
            idx = torch.zeros(1, context, dtype=torch.long, device=config.device)
            sides = {"nanoGPT": lambda idx=idx: model.generate(idx, 1)}
            sides |= {"cache": ungated[0][context], "state": ungated[1][context]}
            seconds = interleave(sides, config.pairs if context == 256 else config.long_pairs, config)
            for side, target in (("state", for_state), ("cache", for_cache)):
                pairs = list(zip(seconds["nanoGPT"], seconds[side], strict=True))
                report.claim(f"token at context {context:,}, nanoGPT / ours with a {side}", pairs, target)
    for name, by_context in decoders.items():
        seconds = interleave(by_context, config.pairs, config)
        for context in contexts:
            report.row(mixer=name, context=context, ms=1e3 * statistics.median(seconds[context]))
        if not keeps_every_token(name):
            pairs = list(zip(seconds[4096], seconds[64], strict=True))
            report.claim(f"{name}: token at context 4,096 / at 64", pairs, 1.1, at_most=True)
    model = GPT(GPTConfig(**keys, attention="gla")).to(config.device).eval()
    report.row(**closed_heads(config, keys))
    for B in (1, 8, 32):
        idx, state = torch.zeros(B, 1, dtype=torch.long, device=config.device), model.init_state(B)
        with torch.no_grad():
            seconds = interleave({B: lambda i=idx, s=state: model.features(i, s, 1)}, config.pairs, config)[B]
        report.row(mixer="gla", batch=B, tokens_s=B / statistics.median(seconds))
    products = interleave({"all": matrix_vector_products(model)}, config.pairs, config)["all"]
    report.row(floor="the matrix-vector products of a token alone (gla)", ms=1e3 * statistics.median(products))
    torch.set_num_threads(config.threads)


def matrix_vector_products(model: GPT) -> Callable:
    """Returns call(), which multiplies one row by every matrix of the model: no step of decoding can do less."""
    weights = [p.detach() for p in model.parameters() if p.dim() == 2]
    rows = {n: torch.zeros(1, n, device=weights[0].device) for n in {w.shape[1] for w in weights}}
    return lambda: [F.linear(rows[w.shape[1]], w) for w in weights]


@torch.no_grad()
def closed_heads(config: BenchConfig, keys: dict) -> dict:
    """Times softmax at a context of 4,000 with a headwise gate that closes five of six heads, which can be skipped."""
    model = GPT(GPTConfig(**keys, gate="headwise", gate_bias=1.0)).to(config.device).eval()
    for block in model.blocks:
        block.mixer.gates["readout"].proj.bias[1:] = -40.0
    prompt = torch.zeros(1, 4000, dtype=torch.long, device=config.device)
    return {"closed heads": "5 of 6"} | decoding_speed(model, prompt, 0.1)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def decayed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    form: Callable = chunked,
) -> torch.Tensor:
    return form(q, k, v, log_decay=log_decay, beta=beta)[0]


def cosformer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, form: Callable = chunked) -> torch.Tensor:
    angle = torch.arange(q.shape[1], device=q.device) * (math.pi / 2 / q.shape[1])
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    q, k = (torch.cat([x.relu() * cos, x.relu() * sin], -1) for x in (q, k))
    o, _ = form(q, k, F.pad(v, (0, 1), value=1.0))
    return o[..., :-1] / o[..., -1:].clamp(min=1e-6)


OPS = {  # form: (its function, its targets: SDPA's time over its own at T = 1,024 and at 4,096)
    "no decay": (decayed, (3, 7)),
    "scalar decay": (decayed, (2.8, 7)),
    "channel decay to -5": (decayed, (2.2, 5.5)),
    "channel decay to -50": (decayed, (1, 2)),
    "gated delta rule": (decayed, (1, 2.5)),
    "cosFormer": (cosformer, (1.6, 4)),
}


def both_ways(function: Callable, inputs: list[torch.Tensor], **keys: object) -> Callable:
    """Returns call(), which computes function(*inputs) and the gradients of all inputs that require one."""
    weight = torch.randn_like(inputs[2])
    wanted = [x for x in inputs if x.requires_grad]
    return lambda: torch.autograd.grad((function(*inputs, **keys) * weight).sum(), wanted)


def op_inputs(T: int, device: str, B: int = 1, H: int = 12, D: int = 64) -> dict[str, list[torch.Tensor]]:
    """{form: its inputs}, each of which requires a gradient."""
    torch.manual_seed(0)
    q, k, v, channel = torch.randn(4, B, T, H, D, device=device).unbind()
    scalar, beta = torch.randn(2, B, T, H, device=device).sigmoid().unbind()
    inputs = {"no decay": (q, k, v), "cosFormer": (q, k, v), "scalar decay": (q, k, v, -scalar)}
    for lowest in (-5, -50):
        inputs[f"channel decay to {lowest}"] = (q, k, v, lowest * channel.sigmoid())
    inputs["gated delta rule"] = (q, F.normalize(k, dim=-1), v, -scalar, beta)
    return {name: [x.detach().requires_grad_() for x in tensors] for name, tensors in inputs.items()}


def bench_ops(config: BenchConfig, report: Report) -> None:
    """B = 1, H = 12, D = 64, float32, forward and backward: the chunked forms against SDPA and the loop."""
    for i, T in enumerate((1024, 4096)):
        inputs = op_inputs(T, config.device)
        sides = {name: both_ways(function, inputs[name]) for name, (function, _) in OPS.items()}
        pairs = config.pairs if T == 1024 else config.long_pairs
        seconds = interleave(sides | {"SDPA": both_ways(sdpa, inputs["no decay"])}, pairs, config)
        for name, values in seconds.items():
            report.row(form=name, T=T, ms=1e3 * statistics.median(values))
        for name, (_, targets) in OPS.items():
            paired = list(zip(seconds["SDPA"], seconds[name], strict=True))
            report.claim(f"{name}, T = {T:,}: SDPA / chunked", paired, targets[i])
        if T > 1024:
            continue
        for name, (function, _) in OPS.items():
            both = {"loop": both_ways(function, inputs[name], form=recurrent), "chunked": sides[name]}
            seconds = interleave(both, config.long_pairs, config)
            paired = list(zip(seconds["loop"], seconds["chunked"], strict=True))
            report.claim(f"{name}, T = {T:,}: token by token / chunked", paired, 15)


def bench_data(config: BenchConfig, report: Report) -> None:
    """How long MQAR rows take, BPE tokens against tiktoken, the loader against a step, and the start of a run."""

    def make_rows():
        mqar.generate(np.random.default_rng(0), 100_000, 64, 4, vocab_size=8192)

    cpu = BenchConfig(device="cpu")
    seconds = statistics.median(interleave({"rows": make_rows}, config.long_pairs, cpu)["rows"])
    report.row(what="MQAR, 100,000 rows of 64", seconds=seconds, rows_s=1e5 / seconds)
    try:
        tokenizer = get_tokenizer("gpt2")
    except UserError as error:
        report.lines.append(f"BPE: not run, {error}")
    else:
        documents = [" ".join(f"word{i * j % 977} of the {i}th line\n" for j in range(200)) for i in range(500)]
        sides = {"ours": lambda: list(map(tokenizer.encode_array, documents))}
        sides["tiktoken"] = lambda: tokenizer._encoding.encode_ordinary_batch(documents, num_threads=1)
        seconds = interleave(sides, config.long_pairs, cpu)
        tokens = sum(len(tokenizer.encode_array(document)) for document in documents)
        for side, values in seconds.items():
            report.row(what=f"BPE, {side}", tokens_s=tokens / statistics.median(values))
        pairs = list(zip(seconds["ours"], seconds["tiktoken"], strict=True))
        report.claim("BPE, ours / tiktoken alone", pairs, 1.2, at_most=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        mqar.main([f"--out_dir={folder}", "--train_size=20000", "--val_size=100", "--vocab_size=16", "--queries=2"])
        dataset, steps = open_dataset(folder), iter(range(1_000_000))
        step = our_step(cpu, "float32", tiny_batch(), **TINY)
        sides = {
            "loader": lambda: dataset.batch("train", next(steps), seed=0, batch_size=64, block_size=64),
            "step": step,
        }
        seconds = interleave(sides, config.pairs, cpu)
        pairs = list(zip(seconds["loader"], seconds["step"], strict=True))
        report.row(what="loader", batches_s=1 / statistics.median(seconds["loader"]))
        report.claim("loader / the tiny model's step", pairs, 0.02, at_most=True)
        words = ["--n_layer=2", "--n_embd=64", "--n_head=4", "--block_size=64", "--device=cpu", "--max_iters=1"]
        words += [f"--dataset={folder}", f"--out_dir={folder}/out", "--overwrite=true"]
        command = [sys.executable, str(HERE / "train.py"), *words]
        starts = [seconds_of(lambda: subprocess.run(command, check=True, capture_output=True), "cpu") for _ in range(3)]
        report.row(what="train.py, start to end of one step", seconds=min(starts))


PARTS = {
    "train": bench_train,
    "overhead": bench_overhead,
    "length": bench_length,
    "decode": bench_decode,
    "ops": bench_ops,
    "data": bench_data,
}


def profile(config: BenchConfig) -> str:
    """A table of the operations of a training step (6 x 384, GLA, gated), by the time that they take themselves."""
    batch = random_batch(config, 256, 8, 256)
    keys = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=256, attention="gla", gate="elementwise")
    step = our_step(config, config.dtype, batch, **keys)
    step()
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            step()
    order = "self_cuda_time_total" if config.device == "cuda" else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=20)


def compiled_ran_eager(config: BenchConfig) -> None:
    """Warns if a compiled function ran eager in part: past dynamo's recompile limit, or around a graph break."""
    counters = torch._dynamo.utils.counters
    # dynamo counts the recompile limit as unimplemented
    reasons = [reason.splitlines()[0] for name in ("unimplemented", "graph_break") for reason in counters[name]]
    if config.compile and reasons:
        print(
            f"warning: a compiled function ran eager in part: {'; '.join(dict.fromkeys(reasons))} "
            "(TORCH_LOGS=recompiles,graph_breaks says where)",
            file=sys.stderr,
        )


if __name__ == "__main__":
    configurator.run(main)
