"""The parts train, overhead, length, packing, decode and ops: what a training step, one more token
and a chunked form cost."""

import functools
import math
import resource
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from base import configurator
from data.shards import best_fit
from ops import fast, layers
from ops.recurrence import chunked
from runs.hardware import DTYPES
from speed.config import BenchConfig
from speed.measure import NANOGPT, RECURRENT, TOKENS, Side, in_new_processes, prefilled
from speed.rows import Rows

# the size at which a step and a token are compared with nanoGPT's
SMALL: dict = dict(n_layer=6, n_head=6, n_embd=384)
GATES: dict[str, dict] = {
    "elementwise": dict(gate="elementwise"),
    "headwise": dict(gate="headwise"),
    "rank 16": dict(gate="elementwise", gate_rank=16),
    "elementwise, match_params": dict(gate="elementwise", match_params=True),
}


def train(config: BenchConfig, rows: Rows) -> None:
    """6 x 384, T = 256, B = 8, in float32 and in bfloat16: our step and nanoGPT's, with autocast
    alike, and their memory."""
    keys: dict = SMALL | dict(B=8, block_size=256, vocab_size=50_304)
    exact = replace(config, dtype="float32")
    # first: a new process has at least the peak of the one that starts it
    tasks = [(exact, name, keys) for name in ("softmax", NANOGPT)]
    ours, theirs = in_new_processes(peak_memory, tasks)
    rows.ratio("peak memory, float32, 50,304 ids, ours / nanoGPT", [ours], [theirs])
    for vocab_size in (256, 50_304):
        keys["vocab_size"] = vocab_size
        for dtype in ("float32", "bfloat16"):
            in_dtype = replace(config, dtype=dtype)
            ours = Side(in_dtype, "softmax", **keys)
            theirs = Side(in_dtype, NANOGPT, **keys)
            rows.compare(f"step in {dtype}, {vocab_size:,} ids, nanoGPT / ours", theirs, ours)


def peak_memory(config: BenchConfig, name: str, keys: dict) -> int:
    """Trains such a Side three times. Returns the peak memory of this process, on a GPU that of the
    tensors."""
    torch.set_num_threads(config.threads)
    configurator.set_up()
    side = Side(config, name, **keys)
    for _ in range(3):
        side()
    if config.device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def overhead(config: BenchConfig, rows: Rows) -> None:
    """4 x 768, T = 512: what a gate costs in a training step, beside its FLOPs."""
    keys: dict = dict(n_layer=4, n_head=12, n_embd=768, block_size=512, vocab_size=256)
    plain = Side(config, "softmax", B=2, **keys)
    for name, gate in GATES.items():
        gated = Side(config, "softmax", B=2, **keys | gate)
        flops = gated.model.flops_per_token() / plain.model.flops_per_token()
        rows.write(f"FLOPs, {name} / none", ratio=flops)
        rows.compare(f"training step, {name} / none", gated, plain)


def length(config: BenchConfig, rows: Rows) -> None:
    """2 x 256, 16,384 tokens a step at both lengths: tokens/s of a training step."""
    keys: dict = dict(n_layer=2, n_head=4, n_embd=256, vocab_size=256)
    for name in ("softmax", *RECURRENT):
        short = Side(config, name, B=16, block_size=1024, **keys)
        long = Side(config, name, B=1, block_size=16_384, **keys)
        rows.compare(f"{name}: tokens/s at 16,384 / at 1,024", short, long)


def packing(config: BenchConfig, rows: Rows) -> None:
    """2 x 256, 8 rows of 1,024 tokens: a training step on packed documents of 1,000 tokens on
    average, and on plain text."""
    keys: dict = dict(n_layer=2, n_head=4, n_embd=256, block_size=1024, vocab_size=256)
    for name in ("softmax", *RECURRENT):
        plain, packed = (Side(config, name, B=8, **keys) for _ in range(2))
        document = packed_documents(*plain.batch[0].shape).to(config.device)
        packed.step_model = functools.partial(packed.step_model, document=document)
        rows.compare(f"{name}: step on packed documents / on plain text", packed, plain)


def packed_documents(B: int, T: int) -> torch.Tensor:
    """`document` of B rows of T tokens, of documents of 1,000 tokens on average for T = 1,024, as
    data/shards.py packs them."""
    rng = np.random.default_rng(0)
    parts = []
    for n in rng.exponential(T * 1000 / 1024, 100 * B).astype(int) + 1:
        parts += [T] * (n // T)
        if n % T:
            parts.append(n % T)
    lengths = np.array(parts)
    rows = best_fit(lengths, T)
    documents = torch.empty(B, T, dtype=torch.long)
    for document, i in zip(documents, rng.permutation(len(rows)), strict=False):
        begin = 0
        for length in lengths[rows[i]]:
            document[begin : begin + length] = begin
            begin += int(length)
        document[begin:] = begin  # the padding
    return documents


def decode(config: BenchConfig, rows: Rows) -> None:
    """6 x 384, float32, one thread: a token behind a long context and behind a short one, and
    beside nanoGPT's generate."""
    torch.set_num_threads(1)  # products of one row leave a second thread nothing to do
    keys: dict = SMALL | dict(vocab_size=256)
    models: dict = {}
    for name in ("softmax", *RECURRENT):
        models[name] = Side(config, name, **keys, block_size=4096 + TOKENS).model.eval()
        long, short = (prefilled(models[name], context) for context in (4096, 64))
        rows.compare(f"{name}: token at context 4,096 / at 64", long, short)
    if config.against:  # nanoGPT's generate reads the whole context for every token
        theirs = Side(config, NANOGPT, **keys, block_size=1024).model.eval()
        for context in (256, 1024):
            idx = torch.zeros(1, context, dtype=torch.long, device=config.device)
            generate = functools.partial(theirs.generate, idx, TOKENS)
            for side, mixer in (("state", "gla"), ("cache", "softmax")):
                row = f"token at context {context:,}, nanoGPT / ours with a {side}"
                rows.compare(row, generate, prefilled(models[mixer], context))
    torch.set_num_threads(config.threads)


def ops(config: BenchConfig, rows: Rows) -> None:
    """B = 1, H = 12, D = 64, forward and backward: the chunked forms, in float32, against softmax
    in the dtype of training."""
    for T in (1024, 4096):
        found = forms(T // 64 if config.rehearse else T, config.device)
        _, plain = found["no decay"]
        of_softmax = both_ways(softmax, plain, DTYPES[config.dtype])
        for name, (function, inputs) in found.items():
            row = f"{name}, T = {T:,}: softmax / chunked"
            rows.compare(row, of_softmax, both_ways(function, inputs))


def forms(T: int, device: str, H: int = 12, D: int = 64) -> dict[str, tuple[Callable, dict]]:
    """{name: (the function, its inputs)}"""
    torch.manual_seed(0)
    q, k, v, channel = torch.randn(4, 1, T, H, D, device=device).unbind()
    scalar, beta = torch.randn(2, 1, T, H, device=device).sigmoid().unbind()
    plain = dict(q=q, k=k, v=v)
    unit_k = F.normalize(k, dim=-1)
    return {
        "no decay": (readout, plain),
        "scalar decay": (readout, plain | dict(log_decay=-scalar)),
        "channel decay to -5": (readout, plain | dict(log_decay=-5 * channel.sigmoid())),
        "channel decay to -50": (readout, plain | dict(log_decay=-50 * channel.sigmoid())),
        "gated delta rule": (readout, plain | dict(k=unit_k, log_decay=-scalar, beta=beta)),
        "cosFormer": (cosformer, plain),
    }


def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return layers.attention(q, k, v, None).transpose(1, 2)


def readout(**inputs: Any) -> torch.Tensor:
    return chunked(**inputs)[0]


def cosformer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    angle = torch.arange(q.shape[1], device=q.device) * (math.pi / 2 / q.shape[1])
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    q, k = (fast.CosSinFeatures.apply(x.relu(), cos, sin) for x in (q, k))
    o = readout(q=q, k=k, v=F.pad(v, (0, 1), value=1.0))
    return o[..., :-1] / o[..., -1:].clamp(min=1e-6)


def both_ways(function: Callable, inputs: dict, dtype: torch.dtype = torch.float32) -> Callable:
    """Returns call(), which computes function(**inputs) and the gradients of all inputs."""
    inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    weight = torch.randn_like(inputs["v"])

    def gradients():
        y = (function(**inputs) * weight).sum()
        return torch.autograd.grad(y, list(inputs.values()))

    return gradients
