"""The part ops: the chunked forms against softmax attention and against log-linear states."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ops import fast, layers, levels
from ops.recurrence import chunked
from runs.hardware import DTYPES
from speed.config import BenchConfig
from speed.measure import Report


def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return layers.attention(q, k, v, None).transpose(1, 2)


def readout(**inputs: Any) -> torch.Tensor:
    """With `levels` among the inputs, of log-linear states."""
    form = levels.chunked if "levels" in inputs else chunked
    return form(**inputs)[0]


def cosformer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: torch.Tensor
) -> torch.Tensor:
    angle = torch.arange(q.shape[1], device=q.device) * (math.pi / 2 / q.shape[1])
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    q, k = (fast.CosSinFeatures.apply(x.relu(), cos, sin) for x in (q, k))
    o = readout(q=q, k=k, v=F.pad(v, (0, 1), value=1.0), **options)
    return o[..., :-1] / o[..., -1:].clamp(min=1e-6)


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


def both_ways(function: Callable, inputs: dict, dtype: torch.dtype = torch.float32) -> Callable:
    """Returns call(), which computes function(**inputs) and the gradients of all inputs."""
    inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    weight = torch.randn_like(inputs["v"])
    return lambda: torch.autograd.grad((function(**inputs) * weight).sum(), list(inputs.values()))


def bench_ops(config: BenchConfig, report: Report) -> None:
    """B = 1, H = 12, D = 64, forward and backward: the chunked forms, in float32, against softmax
    in the dtype of training, and against log-linear states.

    The claims are those of the shorter sequence, where softmax costs least.
    """
    for T, pairs, target in ((1024, config.pairs, 1.0), (4096, config.long_pairs, None)):
        found = forms(T, config.device)
        _, plain = found["no decay"]
        of_softmax = both_ways(softmax, plain, DTYPES[config.dtype])
        of_levels = torch.rand(*plain["v"].shape[:3], T.bit_length(), device=config.device)
        for name, (function, inputs) in found.items():
            ours = both_ways(function, inputs)
            row = f"{name}, T = {T:,}: softmax / chunked"
            report.compare(config, row, of_softmax, ours, pairs, target=target)
            log_linear = both_ways(function, inputs | dict(levels=of_levels))
            row = f"{name}, T = {T:,}: log-linear / chunked"
            report.compare(config, row, log_linear, ours, pairs)
