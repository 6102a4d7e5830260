"""The part ops: the chunked forms against softmax attention, the loop token by token, and
log-linear states."""

import math
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ops import fast, levels
from ops.layers import attention
from ops.recurrence import chunked, recurrent
from runs.hardware import DTYPES
from speed.config import BenchConfig
from speed.measure import Report, interleave


def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention(q, k, v, None).transpose(1, 2)


def readout(form: Callable, **inputs) -> torch.Tensor:
    return form(**inputs)[0]


def cosformer(
    form: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options
) -> torch.Tensor:
    angle = torch.arange(q.shape[1], device=q.device) * (math.pi / 2 / q.shape[1])
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    q, k = (fast.CosSinFeatures.apply(x.relu(), cos, sin) for x in (q, k))
    o, _ = form(q, k, F.pad(v, (0, 1), value=1.0), **options)
    return o[..., :-1] / o[..., -1:].clamp(min=1e-6)


def forms(T: int, device: str, H: int = 12, D: int = 64) -> dict[str, tuple[Callable, dict]]:
    """{name: (its function of a form of the recurrence and its inputs, {input: a tensor that
    requires a gradient})}"""
    torch.manual_seed(0)
    q, k, v, channel = torch.randn(4, 1, T, H, D, device=device).unbind()
    scalar, beta = torch.randn(2, 1, T, H, device=device).sigmoid().unbind()
    plain = dict(q=q, k=k, v=v)
    inputs: dict = {
        "no decay": plain,
        "scalar decay": plain | dict(log_decay=-scalar),
        "channel decay to -5": plain | dict(log_decay=-5 * channel.sigmoid()),
        "channel decay to -50": plain | dict(log_decay=-50 * channel.sigmoid()),
        "gated delta rule": plain | dict(k=F.normalize(k, dim=-1), log_decay=-scalar, beta=beta),
        "cosFormer": plain,
    }
    return {
        name: (cosformer if name == "cosFormer" else readout, leaves(of))
        for name, of in inputs.items()
    }


def leaves(
    inputs: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    return {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}


def both_ways(function: Callable, inputs: dict[str, torch.Tensor], *form: Callable) -> Callable:
    """Returns call(), which computes function(*form, **inputs) and the gradients of all inputs."""
    weight = torch.randn_like(inputs["v"])
    return lambda: torch.autograd.grad(
        (function(*form, **inputs) * weight).sum(), list(inputs.values())
    )


def bench_ops(config: BenchConfig, report: Report) -> None:
    """B = 1, H = 12, D = 64, forward and backward: the chunked forms, in float32, against softmax,
    the loop and log-linear states.

    Softmax is what a model takes, in float32 or in the dtype of training: the faster of the two.
    The claims are those of the shorter sequence, where softmax costs least.
    """
    for T, pairs, target in ((1024, config.pairs, 1.0), (4096, config.long_pairs, None)):
        of_length = forms(T, config.device)
        sides = {
            name: both_ways(function, inputs, chunked)
            for name, (function, inputs) in of_length.items()
        }
        dtypes, (_, plain) = dict.fromkeys(("float32", config.dtype)), of_length["no decay"]
        others = {
            f"softmax {dtype}": both_ways(softmax, leaves(plain, DTYPES[dtype])) for dtype in dtypes
        }
        seconds = interleave(sides | others, pairs, config)
        for name, values in seconds.items():
            report.row(form=name, T=T, ms=1e3 * statistics.median(values))
        fastest = min(others, key=lambda name: statistics.median(seconds[name]))
        report.row(fastest_softmax=fastest, T=T)
        for name in sides:
            report.ratio(
                f"{name}, T = {T:,}: softmax / chunked",
                seconds[fastest],
                seconds[name],
                target=target,
            )
        for name, (function, inputs) in of_length.items():
            of_levels = leaves(
                {"levels": torch.rand(*plain["v"].shape[:3], T.bit_length(), device=config.device)}
            )
            slower = {
                "log-linear": (both_ways(function, inputs | of_levels, levels.chunked), pairs)
            }
            if T == 1024:
                slower["token by token"] = (
                    both_ways(function, inputs, recurrent),
                    config.long_pairs,
                )
            for form, (call, n) in slower.items():
                times = interleave({form: call, "chunked": sides[name]}, n, config).values()
                report.ratio(f"{name}, T = {T:,}: {form} / chunked", *times)
