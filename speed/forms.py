"""The part ops: the chunked forms against softmax attention and against the loop token by token."""

import math
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ops.layers import attention, cos_sin_features
from ops.recurrence import chunked, recurrent
from runs.hardware import DTYPES
from speed.report import BenchConfig, Report, interleave, paired


def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention(q, k, v, None, is_causal=True).transpose(1, 2)


def decayed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Callable = chunked, **keys) -> torch.Tensor:
    return form(q, k, v, **keys)[0]


def cosformer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Callable = chunked) -> torch.Tensor:
    angle = torch.arange(q.shape[1], device=q.device) * (math.pi / 2 / q.shape[1])
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    q, k = (cos_sin_features(x.relu(), cos, sin) for x in (q, k))
    o, _ = form(q, k, F.pad(v, (0, 1), value=1.0))
    return o[..., :-1] / o[..., -1:].clamp(min=1e-6)


def op_inputs(T: int, device: str, B: int = 1, H: int = 12, D: int = 64) -> dict[str, dict[str, torch.Tensor]]:
    """{form: {name of an argument: a tensor that requires a gradient}}"""
    torch.manual_seed(0)
    q, k, v, channel = torch.randn(4, B, T, H, D, device=device).unbind()
    scalar, beta = torch.randn(2, B, T, H, device=device).sigmoid().unbind()
    plain = dict(q=q, k=k, v=v)
    inputs = {
        "no decay": plain,
        "scalar decay": plain | dict(log_decay=-scalar),
        "channel decay to -5": plain | dict(log_decay=-5 * channel.sigmoid()),
        "channel decay to -50": plain | dict(log_decay=-50 * channel.sigmoid()),
        "gated delta rule": plain | dict(k=F.normalize(k, dim=-1), log_decay=-scalar, beta=beta),
        "cosFormer": plain,
    }
    return {form: {name: x.detach().requires_grad_() for name, x in keys.items()} for form, keys in inputs.items()}


def both_ways(function: Callable, inputs: dict[str, torch.Tensor], **keys: object) -> Callable:
    """Returns call(), which computes function(**inputs) and the gradients of all inputs."""
    weight = torch.randn_like(inputs["v"])
    return lambda: torch.autograd.grad((function(**inputs, **keys) * weight).sum(), list(inputs.values()))


def bench_ops(config: BenchConfig, report: Report) -> None:
    """B = 1, H = 12, D = 64, forward and backward: the chunked forms, in float32, against softmax and the loop.

    Softmax is what a model takes, in float32 or in the dtype of training: the faster of the two. The claims are those
    of the shorter sequence, where softmax costs least.
    """
    for T, pairs, target in ((1024, config.pairs, 1.0), (4096, config.long_pairs, None)):
        inputs = op_inputs(T, config.device)
        functions = {name: cosformer if name == "cosFormer" else decayed for name in inputs}
        sides = {name: both_ways(function, inputs[name]) for name, function in functions.items()}
        others = {}
        for dtype in dict.fromkeys(("float32", config.dtype)):
            cast = {name: x.detach().to(DTYPES[dtype]).requires_grad_() for name, x in inputs["no decay"].items()}
            others[f"softmax {dtype}"] = both_ways(softmax, cast)
        seconds = interleave(sides | others, pairs, config)
        for name, values in seconds.items():
            report.row(form=name, T=T, ms=1e3 * statistics.median(values))
        fastest = min(others, key=lambda name: statistics.median(seconds[name]))
        report.row(fastest_softmax=fastest, T=T)
        for name in sides:
            report.ratio(f"{name}, T = {T:,}: softmax / chunked", paired(seconds, fastest, name), target)
        for name, function in functions.items() if T == 1024 else ():
            both = {"loop": both_ways(function, inputs[name], form=recurrent), "chunked": sides[name]}
            pairs_of_loop = paired(interleave(both, config.long_pairs, config), *both)
            report.ratio(f"{name}, T = {T:,}: token by token / chunked", pairs_of_loop)
