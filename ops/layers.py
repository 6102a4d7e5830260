"""Parts that several mixers use: norms, the short convolution, rotary positions, softmax attention written out.

Where a part has a backward of its own, a test compares it with the definition in plain PyTorch.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from ops.recurrence import apply, at_least_float32, first_derivative_only, without_autocast

ATTENTION_KEYS = 256  # keys of a block in softmax attention's backward


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019), in the dtype of x.

    On a GPU nn.RMSNorm is one kernel. On a CPU it makes many passes over x, so it is written out there: forward and
    backward took 1.4 ms a call and not 3.8 (results/bench/README.md). There its result is in autocast's dtype under
    autocast, so that it is rounded once for all products that read it.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
        fine = at_least_float32(x)
        dtype = torch.get_autocast_dtype("cpu") if x.is_cpu and torch.is_autocast_enabled("cpu") else x.dtype
        return apply(_RMSNorm, fine, self.weight.to(fine.dtype), self.eps).to(dtype)


def make_norm(config) -> nn.Module:
    """The norm of the residual stream."""
    if config.norm == "rms":
        return RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * r
        ctx.save_for_backward(normed, weight, r)
        return normed * weight

    @staticmethod
    @first_derivative_only
    @without_autocast
    def backward(ctx, dy):
        normed, weight, r = ctx.saved_tensors
        d_weight = dy * normed  # for each token; the sum over tokens is taken below
        along = (d_weight @ weight)[..., None].div_(-normed.shape[-1])  # the part along x, which the norm cancels
        dx = (dy * weight).addcmul_(normed, along).mul_(r)
        return dx, d_weight.flatten(0, -2).sum(0), None


class ResidualLinear(nn.Linear):
    """The last linear layer of a residual branch. Its start is smaller in deeper models (GPT.init_weights)."""

    start_scale = 1.0  # a factor on its start


class ShortConv(nn.Module):
    """Causal convolution over time with one filter per channel: y_t = sum_i w_i x_{t-W+1+i}. (B, T, C) -> (B, T, C).

    Under autocast, where x is bfloat16 and the weights are float32, the sum is float32 and y is rounded to x's dtype.
    """

    def __init__(self, channels, width, bias):
        super().__init__()
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(width, channels))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def init_parameter(self, name: str, start: torch.Tensor, generator: torch.Generator) -> None:
        start.uniform_(-(self.width**-0.5), self.width**-0.5, generator=generator)

    def forward(self, x: torch.Tensor, state: dict | None) -> torch.Tensor:
        T = x.shape[1]
        past = x.new_zeros(x.shape[0], self.width - 1, x.shape[2]) if state is None else state["conv"].to(x.dtype)
        x = torch.cat([past, x], dim=1)
        if state is not None:
            state["conv"] = x[:, T:].clone()  # a view would keep the whole prefill alive
        return apply(_ShortConv, x, self.weight, self.bias)


class _ShortConv(torch.autograd.Function):
    """x (B, W - 1 + T, C), weight (W, C), bias (C,) or None -> (B, T, C).

    In autograd's backward, each of the W slices of x would get a gradient of x's size, which is mostly zeros.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        T, fine = x.shape[1] - len(weight) + 1, x.to(torch.promote_types(x.dtype, weight.dtype))
        # W shifted products give the same bits whatever T is; conv1d does not
        first, *shifted = zip(_windows(fine, T), weight.unbind(0), strict=True)
        y = first[0] * first[1]
        for x_i, w in shifted:
            y.addcmul_(x_i, w)
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        T, dtype = dy.shape[1], torch.promote_types(x.dtype, weight.dtype)
        dy, fine = dy.to(dtype), x.to(dtype)
        dx, dw = torch.zeros_like(fine), torch.empty_like(weight)
        for i, (x_i, w) in enumerate(zip(_windows(fine, T), weight, strict=True)):
            dx[:, i : i + T].addcmul_(dy, w)  # not a window of unfold: torch.compile refuses to write to one
            dw[i] = (dy * x_i).sum((0, 1))
        return dx.to(x.dtype), dw, dy.sum((0, 1)).to(weight.dtype) if ctx.needs_input_grad[2] else None


def _windows(x, T):
    """x[:, i : i + T] for every i, as views."""
    return x.unfold(1, T, 1).mT.unbind(1)


def make_conv(config, channels: int, published_width: int = 0, bias: bool = False) -> ShortConv | None:
    width = published_width if config.short_conv is None else config.short_conv
    return ShortConv(channels, width, bias) if width else None


def init_decay(name: str, start: torch.Tensor, generator: torch.Generator, A_range: tuple[float, float]) -> None:
    """Fills A_log or dt_bias of a decay exp(-A softplus(. + dt_bias)), as Dao & Gu 2024 start them.

    A is uniform in A_range, and softplus(dt_bias) is log-uniform in [0.001, 0.1].
    """
    if name == "A_log":
        start.uniform_(*A_range, generator=generator).log_()
    else:
        dt = start.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp()
        start.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt


def manual_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, softcap: float | None, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes out scaled_dot_product_attention. q, k, v (B, H, T, D) -> output (B, H, T, D), weights (B, H, T, T)."""
    scores = at_least_float32(q @ k.mT) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1)
    return weights.to(v.dtype) @ v, weights


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> torch.Tensor:
    """scaled_dot_product_attention of q, k, v (B, H, T, D), with a faster backward on a CPU in bfloat16."""
    is_slow = is_causal and q.dtype == torch.bfloat16 and q.device.type == "cpu" and q.shape[2] > 1
    if is_slow and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _CausalAttention.apply(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)


class _CausalAttention(torch.autograd.Function):
    """scaled_dot_product_attention's kernel for CPUs, with a backward made of products over blocks of keys.

    That kernel's own backward took twice as long in bfloat16 at 256 tokens (results/bench/README.md). In float32 it is
    as fast as this one. Each block takes the weights anew from the scores, so that no more is saved than by the kernel.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        # log_sums (B, H, T): logarithm of the sum of a query's exponentials
        o, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, o, log_sums)
        return o

    @staticmethod
    @first_derivative_only
    @without_autocast
    def backward(ctx, do):
        q, k, v, o, log_sums = ctx.saved_tensors
        shape, T, scale = q.shape, q.shape[2], q.shape[-1] ** -0.5
        along = (do * o).sum(-1, keepdim=True, dtype=log_sums.dtype)  # the part that the softmax cancels
        # with two more columns, a product subtracts a number per query before it is rounded
        q, do = _with_columns(q, log_sums[..., None] / scale), _with_columns(do, along)
        k, v = (F.pad(x, (0, 2), value=-1.0).flatten(0, 1) for x in (k, v))  # (B H, T, D + 2)
        dk, dv, no_input = torch.empty_like(k), torch.empty_like(v), k.new_zeros(())
        for start in range(0, T, ATTENTION_KEYS):
            keys, queries = slice(start, start + ATTENTION_KEYS), slice(start, T)  # no earlier query sees these keys
            scores = torch.baddbmm(no_input, q[:, queries], k[:, keys].mT, beta=0, alpha=scale)
            weights = scores.exp_().tril_()
            d_scores = torch.bmm(do[:, queries], v[:, keys].mT).mul_(weights)
            if start == 0:
                dq = at_least_float32(d_scores @ k[:, keys])
            else:
                dq[:, queries] += d_scores @ k[:, keys]
            dk[:, keys] = d_scores.mT @ q[:, queries]
            dv[:, keys] = weights.mT @ do[:, queries]
        return tuple(x[..., :-2].to(q.dtype).view(shape) for x in (dq.mul_(scale), dk.mul_(scale), dv))


def _with_columns(x, number):
    """x (B, H, T, D) and (B, H, T, 1), whose digits take two columns of x's dtype -> (B H, T, D + 2)."""
    high = number.to(x.dtype)
    return torch.cat([x, high, (number - high).to(x.dtype)], -1).flatten(0, 1)


def rope_frequencies(
    D: int, base: float, scaling: str, factor: float, trained_length: int
) -> tuple[torch.Tensor, float]:
    """The angle by which one position turns each of the D/2 pairs, float64 (D/2,), and a factor on the rotated vector.

    factor: how many times trained_length the context is to be. `ntk` raises the base, so that the slowest pair turns as
    far as in training. `yarn` (Peng et al. 2023, sections 3.2 and 3.4) divides the frequency of a pair that turned less
    than once in training by the factor, keeps that of a pair that turned more than 32 times, interpolates in between,
    and sharpens the softmax.
    """
    exponent = torch.arange(0, D, 2, dtype=torch.float64, device="cpu") / D
    if scaling == "ntk":
        base = base * factor ** (D / max(1, D - 2))
    frequency = base**-exponent
    if scaling != "yarn":
        return frequency, 1.0
    # the interpolation is linear in the pair index, as published; these pairs made 32 turns and 1 turn in training
    index = [D * math.log(trained_length / (2 * math.pi * t)) / (2 * math.log(base)) for t in (32, 1)]
    low, high = max(0, math.floor(index[0])), min(D - 1, math.ceil(index[1]))
    keep = 1 - ((torch.arange(len(frequency), device="cpu") - low) / max(1e-3, high - low)).clamp(0, 1)
    return frequency * keep + frequency / factor * (1 - keep), 0.1 * math.log(factor) + 1


def cos_sin(x: torch.Tensor, start: int, frequency_of: Callable, *settings) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the angles of x's positions, (T, 1, n) each in x's dtype. x (B, T, ...).

    frequency_of(*settings) returns the angle per position, float64 (n,) or a number, and a factor on cos and sin.
    The angles are computed on the CPU, because they are float64, which MPS lacks. The last few results are kept, since
    every layer asks for the same ones in every step. While compiling, or with fake tensors, nothing is read or kept.
    """
    is_traced = torch.compiler.is_compiling() or type(x) is not torch.Tensor
    make = _cos_sin if is_traced else _kept_cos_sin
    return make(start, x.shape[1], x.dtype, x.device, frequency_of, *settings)


def _cos_sin(start, length, dtype, device, frequency_of, *settings):
    with torch.inference_mode(False):  # a kept tensor must serve training, too
        frequency, amplitude = frequency_of(*settings)
        position = torch.arange(start, start + length, device="cpu", dtype=torch.float64)
        angle = position[:, None, None] * frequency
        is_async = device.type == "cuda"  # the host need not wait for a GPU
        return tuple((amplitude * y).to(dtype).to(device, non_blocking=is_async) for y in (angle.cos(), angle.sin()))


_kept_cos_sin = functools.lru_cache(maxsize=8)(_cos_sin)


def rotate(
    x: torch.Tensor, start: int, base: float, scaling: str = "none", factor: float = 1.0, trained_length: int = 1
) -> torch.Tensor:
    """RoPE (Su et al. 2021) in the half-split layout: pairs (i, i + D/2). x (B, T, H, D), in at least float32."""
    x = at_least_float32(x)
    settings = x.shape[-1], base, scaling, factor, trained_length
    return apply(_Rotation, x, *cos_sin(x, start, rope_frequencies, *settings))


class _Rotation(torch.autograd.Function):
    """Rotates pairs by angles whose cos and sin are (T, 1, D/2). The backward rotates the gradient by minus the angles.

    Forward and backward took 2.4 ms a call, and autograd's 5.4 (results/bench/README.md).
    """

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        y = x * torch.cat([cos, cos], -1)
        (left, right), (y_left, y_right) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
        y_left.addcmul_(right, sin, value=-1)
        y_right.addcmul_(left, sin)
        return y

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(dy, cos, -sin), None, None


def cos_sin_features(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[x cos, x sin]: two of these have the product x . y cos(a - b). x (B, T, H, D) -> (B, T, H, 2D)."""
    return apply(_CosSinFeatures, x, cos, sin)


class _CosSinFeatures(torch.autograd.Function):
    """Neither way copies its halves together or apart, as autograd does."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return (x[..., None, :] * torch.stack([cos, sin], -2)).flatten(-2)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        d_cos, d_sin = dy.chunk(2, dim=-1)
        return (d_cos * cos).addcmul_(d_sin, sin), None, None


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last axis, computed in at least float32, in the dtype of x."""
    return apply(_L2Norm, at_least_float32(x)).to(x.dtype)


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(1e-6).rsqrt_()
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        y, r = ctx.saved_tensors
        along = (dy * y).sum(-1, keepdim=True)  # the part along x, which the norm cancels
        return dy.addcmul(y, along, value=-1).mul_(r)
