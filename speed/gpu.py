"""The part gpu: what only a GPU can tell. It is not in `all`; docs/gpu.md shows the command."""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from model import MIXERS
from ops.recurrence import fla, has_fla, missing_for_fla, recurrent
from runs.hardware import peak_flops, seconds_of
from speed.costs import PUBLISHED, gate_overhead
from speed.report import BenchConfig, Report
from speed.sides import NANOGPT, Side, random_batch

SIZE: dict = dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50_304, block_size=1024)  # 125M parameters
STEPS = 200


def bench_gpu(config: BenchConfig, report: Report) -> None:
    """fla's kernels against the definition; what a gate costs at 125M; tokens/s and MFU of every mixer and nanoGPT."""
    compare_kernels(config, report)
    gate_overhead(config, report, PUBLISHED, 8, SIZE)
    speeds(config, report)


def compare_kernels(config: BenchConfig, report: Report, T: int = 1000, kernels: Callable = fla) -> None:
    """Relative errors of the outputs, the final state and the gradients: every decay, with the delta rule or without.

    The definition is computed in float32. The limit of the claim is that of products in bfloat16 or TF32.
    """
    if kernels is fla and not has_fla():
        report.row(fla=f"not compared: {missing_for_fla()}")
        return
    generator, errors = torch.Generator().manual_seed(0), {}
    q, k, v, channel = torch.randn(4, 2, T, 4, 64, generator=generator).to(config.device).unbind()
    scalar, beta = torch.randn(2, 2, T, 4, generator=generator).sigmoid().to(config.device).unbind()
    decays = {"none": {}, "per head": dict(log_decay=-scalar), "per channel": dict(log_decay=-channel.sigmoid())}
    for (decay, keys), is_delta in itertools.product(decays.items(), (False, True)):
        inputs = dict(q=q, k=F.normalize(k, dim=-1), v=v, **keys, **(dict(beta=beta) if is_delta else {}))
        ours, defined = (outputs_and_gradients(form, inputs) for form in (kernels, recurrent))
        row = {name: float((ours[name] - x).norm() / x.norm()) for name, x in defined.items()}
        report.row(decay=decay, delta_rule=is_delta, **row)
        errors[decay, is_delta] = max(row.values())
    report.ratio("fla, largest relative error", [(max(errors.values()), 1.0)], 1e-2, at_most=True)


def outputs_and_gradients(form: Callable, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    q, k, v, *_ = leaves.values()
    o, S = form(q, k, v, **{name: x for name, x in leaves.items() if name not in "qkv"})
    weight = torch.linspace(-1, 1, o.numel(), device=o.device).view_as(o)
    gradients = torch.autograd.grad((o.float() * weight).sum() + S.sum(), list(leaves.values()))
    names = ["o", "state", *(f"d {name}" for name in leaves)]
    return {name: x.detach().float() for name, x in zip(names, (o, S, *gradients), strict=True)}


def speeds(config: BenchConfig, report: Report, B: int = 16) -> None:
    """Steps of 125M in a row: tokens/s and MFU of every mixer, and of nanoGPT with as many products as our softmax."""
    T, flops = SIZE["block_size"], {}
    batch = random_batch(config, SIZE["vocab_size"], B, T)
    peak, source = peak_flops(config.device, config.dtype)
    report.row(peak=f"{peak / 1e12:.3g} TFLOP/s, {source}")
    for name in [*MIXERS, NANOGPT] if config.against else MIXERS:
        side = Side(config, name, batch, **SIZE)
        flops[name] = flops["softmax"] if name == NANOGPT else 3 * side.model.flops_per_token(T) * B * T
        side()  # compiles
        seconds = seconds_of(lambda side=side: [side() for _ in range(STEPS)], config.device) / STEPS
        mfu = flops[name] / seconds / peak
        report.row(run=name, steps=STEPS, ms=1e3 * seconds, tokens_s=B * T / seconds, mfu=mfu)
