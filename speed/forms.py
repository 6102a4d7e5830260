"""The part ops: the chunked forms against softmax attention and against the loop token by token."""

import math
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

from gate import parse_gate
from model import GPTConfig, Projection, Softmax
from ops.layers import cos_sin_features
from ops.recurrence import chunked, recurrent
from runs.hardware import DTYPES
from speed.report import BenchConfig, Report, interleave, paired


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def of_the_model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention in the form that model.py takes for this dtype."""
    config = GPTConfig(n_layer=1, n_head=q.shape[2], head_dim=q.shape[3], n_embd=1, position="none")
    return Softmax(config, parse_gate("none")).read(Projection(q, k, v), None, 0)


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
    q, k = (cos_sin_features(x.relu(), cos, sin) for x in (q, k))
    o, _ = form(q, k, F.pad(v, (0, 1), value=1.0))
    return o[..., :-1] / o[..., -1:].clamp(min=1e-6)


OPS = {  # form: (its function, its targets: softmax's time over its own at T = 1,024 and at 4,096)
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


def softmax_sides(config: BenchConfig, inputs: list[torch.Tensor]) -> dict[str, Callable]:
    """SDPA in float32 and, where models train in a smaller dtype, softmax attention in it: torch's form and ours."""
    sides = {"SDPA float32": both_ways(sdpa, inputs)}
    if config.dtype != "float32":
        small = [x.detach().to(DTYPES[config.dtype]).requires_grad_() for x in inputs]
        sides[f"SDPA {config.dtype}"] = both_ways(sdpa, small)
        sides[f"softmax of model.py {config.dtype}"] = both_ways(of_the_model, small)
    return sides


def bench_ops(config: BenchConfig, report: Report) -> None:
    """B = 1, H = 12, D = 64, forward and backward: the chunked forms, in float32, against softmax and the loop.

    Softmax is the fastest form that a model could take: SDPA in float32, or the forms in the dtype of training.
    """
    for i, T in enumerate((1024, 4096)):
        inputs = op_inputs(T, config.device)
        sides = {name: both_ways(function, inputs[name]) for name, (function, _) in OPS.items()}
        softmax = softmax_sides(config, inputs["no decay"])
        pairs = config.pairs if T == 1024 else config.long_pairs
        seconds = interleave(sides | softmax, pairs, config)
        for name, values in seconds.items():
            report.row(form=name, T=T, ms=1e3 * statistics.median(values))
        fastest = min(softmax, key=lambda name: statistics.median(seconds[name]))
        report.row(fastest_softmax=fastest, T=T)
        for name, (_, targets) in OPS.items():
            report.claim(f"{name}, T = {T:,}: softmax / chunked", paired(seconds, fastest, name), targets[i])
        if T > 1024:
            continue
        for name, (function, _) in OPS.items():
            both = {"loop": both_ways(function, inputs[name], form=recurrent), "chunked": sides[name]}
            seconds = interleave(both, config.long_pairs, config)
            report.claim(f"{name}, T = {T:,}: token by token / chunked", paired(seconds, "loop", "chunked"), 15)
