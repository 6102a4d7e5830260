"""Parts that several mixers use: norms, the short convolution, softmax attention written out,
positions.

The docstrings are the definitions; where autograd is slow on a CPU, fast.py has the same with a
backward of its own.
"""

import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from base.configurator import UserError
from ops import fast
from ops.documents import Documents
from ops.fast import at_least_float32

LINEAR_ROWS = 4096  # of a weight, at once


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019), in the dtype
    of x.

    Under autocast a CPU's result is in autocast's dtype, so that it is rounded once for all
    products that read it.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # where nn.RMSNorm is one kernel
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
        dtype = x.dtype
        if x.is_cpu and torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        fine = at_least_float32(x)
        return fast.Norm.call(fine, self.weight.to(fine.dtype), self.eps).to(dtype)


def make_norm(config) -> nn.Module:
    """The norm of the residual stream."""
    if config.norm == "rms":
        return RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


class ResidualLinear(nn.Linear):
    """The last linear layer of a residual branch. Its start is smaller in deeper models
    (GPT.init_weights)."""

    start_scale = 1.0  # a factor on its start


def float_linear(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear(x, weight) in at least float32: x (..., C), weight (V, C) -> (..., V).

    In half precision without a gradient it is made in blocks of V: the products of 512 tokens and
    50,000 rows are 50 MB, and made and copied whole they took a sixth longer.
    """
    is_half = x.dtype in (torch.float16, torch.bfloat16)
    if not is_half or torch.is_grad_enabled() or not x.is_cpu:
        return at_least_float32(F.linear(x, weight))
    y = x.new_empty(*x.shape[:-1], len(weight), dtype=torch.float32)
    for rows, part in zip(weight.split(LINEAR_ROWS), y.split(LINEAR_ROWS, dim=-1), strict=True):
        part.copy_(F.linear(x, rows))
    return y


class FusedLinear(nn.Linear):
    """Several linear layers of one input, as one product. parts: the rows of each, which Muon steps
    one by one.

    heads: how many heads each of the first parts has, one behind the other; with muon_split="head"
    Muon steps each head alone. The other parts stay whole.
    """

    def __init__(self, n_in, parts, bias=False, heads=()):
        super().__init__(n_in, sum(parts), bias=bias)
        self.parts = list(parts)
        self.heads = list(heads) + [1] * (len(self.parts) - len(heads))
        for n, n_heads in zip(self.parts, self.heads, strict=True):
            if n % n_heads:
                raise UserError(f"FusedLinear: heads={n_heads} does not divide a part of {n} rows")


class ShortConv(nn.Module):
    """Causal convolution over time with one filter per channel: y_t = sum_i w_i x_{t-W+1+i}. (B, T,
    C) -> (B, T, C).

    Without a width, y is x. Under autocast the sum is float32 and y is rounded to x's dtype. Of
    another document it reads nothing.
    """

    # of its past in a mixer's state; Mixer.init_state sets it, since a mixer may have several
    state_name = "conv"

    def __init__(self, channels, width, bias):
        super().__init__()
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(width, channels)) if width else None
        self.bias = nn.Parameter(torch.empty(channels)) if width and bias else None

    def init_parameter(self, name, start, generator):
        start.uniform_(-(self.width**-0.5), self.width**-0.5, generator=generator)

    def forward(self, x: Tensor, state: dict | None, document: Documents | None = None) -> Tensor:
        if not self.width:
            return x
        T = x.shape[1]
        crossings = None
        if document is not None:
            crossings = [document.crossing(n) for n in reversed(range(self.width))]
        if state is None:
            past = x.new_zeros(x.shape[0], self.width - 1, x.shape[2])
        else:
            past = state[self.state_name].to(x.dtype)
        x = torch.cat([past, x], dim=1)
        if state is not None:
            state[self.state_name] = x[:, T:].clone()  # a view would keep the whole prefill alive
        return fast.Convolution.call(x, self.weight, self.bias, crossings)


def make_conv(config, channels: int, published_width: int = 0, bias: bool = False) -> ShortConv:
    """The mixer's convolution: as published, unless the key short_conv has another width."""
    width = published_width if config.short_conv is None else config.short_conv
    return ShortConv(channels, width, bias)


def scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """The scores of softmax attention written out: q (B, H, T, D), k (B, Hk, S, D) -> (B, H, T, S).

    k may have fewer heads. mask: as `masked` takes it.
    """
    k = for_all_heads(k, q.shape[1])
    with torch.autocast(q.device.type, enabled=False):  # it would round them
        product = at_least_float32(q) @ at_least_float32(k).mT
        product *= q.shape[-1] ** -0.5  # in place: at (T, T) a copy takes as long as the product
    return masked(product, mask)


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """mask: None, bool (true where a query sees a key; else the score becomes -inf, in place), or a
    float that is added."""
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill_(~mask, -torch.inf)
    return scores + mask


def for_all_heads(x: Tensor, n_head: int, dim: int = 1) -> Tensor:
    """Repeats each of the Hk heads of the axis dim for the n_head / Hk heads that share it: (B, Hk,
    T, D) -> (B, n_head, T, D)."""
    return x if x.shape[dim] == n_head else x.repeat_interleave(n_head // x.shape[dim], dim=dim)


def takes_flash(q: Tensor) -> bool:
    """Whether FlashAttention takes q, (..., D): half precision on a GPU, not one before Ampere, and
    heads up to 256 wide."""
    is_flash = q.is_cuda and q.itemsize == 2 and q.shape[-1] <= 256
    return is_flash and torch.cuda.get_device_properties(q.device).major >= 8


def takes_groups(q: Tensor, mask: Tensor | None) -> bool:
    """Whether torch's kernel takes fewer heads of k and v than of q. If not, asking for it makes
    the (T, T) weights."""
    if not q.is_cuda:
        return q.is_cpu
    # FlashAttention does, and none of the other kernels, which take masks
    return mask is None and takes_flash(q)


def trains_in_blocks(q: Tensor) -> bool:
    """Whether fast.CausalAttention is faster than torch's kernel: bfloat16 on a CPU, with a
    gradient."""
    is_slow = q.is_cpu and q.dtype == torch.bfloat16 and torch.is_grad_enabled()
    return is_slow and not torch.compiler.is_compiling()


def takes_documents(q: Tensor, window: int | None) -> bool:
    """Whether attention_of_documents can read all documents of packed rows at once, for q (B, T, H,
    D): on a CPU what trains in blocks, on a GPU what torch's FlashAttention takes. Else `read` is
    called for the documents of each length."""
    if q.is_cpu:
        return trains_in_blocks(q) and window is None
    return takes_flash(q) and q.shape[-1] % 8 == 0


def attention_of_documents(
    q: Tensor, k: Tensor, v: Tensor, document: Documents, window: int | None
) -> Tensor:
    """Causal attention in which no document of a packed row sees another one: q (B, T, H, D), k and
    v (B, T, Hk, D) -> (B, T, H, D). window: how many keys a query sees, its own included."""
    k, v = (for_all_heads(x, q.shape[2], dim=2) for x in (k, v))
    if not q.is_cpu:
        return flash_attention_of_documents(q, k, v, document, window)
    rows = [x.transpose(1, 2) for x in (q, k, v)]  # (B, H, T, D)
    return fast.CausalAttention.call(*rows, None, document).transpose(1, 2)


def flash_attention_of_documents(
    q: Tensor, k: Tensor, v: Tensor, document: Documents, window: int | None
) -> Tensor:
    """The same on a GPU, with as many heads of k and v as of q."""
    from torch.nn.attention import varlen  # brings the compiler, which takes a second

    bounds = document.bounds(1)
    longest = max(document.lengths)
    before = -1 if window is None else window - 1
    o = varlen.varlen_attn(
        q.flatten(0, 1),  # (B T, H, D), all documents end to end
        k.flatten(0, 1),
        v.flatten(0, 1),
        bounds,
        bounds,
        longest,
        longest,
        window_size=(before, 0),  # so many keys before a query, -1 for all, and none behind it
    )
    return o.view(q.shape)  # type: ignore


def attention(q, k, v, mask, scale: float | None = None) -> Tensor:
    """scores(q, k, mask).softmax(-1) @ v in torch's kernels: none makes the (T, T) weights.

    Without a mask a text is read causally, and a single query sees all keys. scale: of the scores;
    None: D^-1/2.
    """
    is_causal = mask is None and q.shape[2] > 1
    D = v.shape[-1]
    if q.shape[-1] % 8 and not q.is_cpu:
        # only FlashAttention takes other widths on a GPU, and it takes neither masks nor float32:
        # without a word, torch would make the (T, T) weights
        if scale is None:
            scale = q.shape[-1] ** -0.5
        q, k, v = (F.pad(x, (0, -x.shape[-1] % 8)) for x in (q, k, v))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    is_slow = is_causal and trains_in_blocks(q)
    if is_slow or not takes_groups(q, mask):
        k, v = (for_all_heads(x, q.shape[1]) for x in (k, v))
    if is_slow:
        return fast.CausalAttention.call(q, k, v, scale)
    options: dict = dict(is_causal=is_causal, scale=scale, enable_gqa=k.shape[1] < q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)[..., :D]


def remember(ring: Tensor, x: Tensor, start: int, in_order: bool) -> Tensor:
    """Writes x (B, H, T, D), of the positions from start on, to a ring of M places, and returns the
    keys or values that its queries may see: the last M - 1 before start, then x, (B, H, S, D). For a
    single query, unless in_order, they are the ring itself, in the order of its places."""
    M, T = ring.shape[2], x.shape[2]
    if T == 1 and not in_order:
        ring[:, :, start % M] = x[:, :, 0]
        return ring[:, :, : start + 1].to(x.dtype)
    past = torch.arange(max(0, start - M + 1), start, device=x.device)
    new = torch.arange(start, start + T, device=x.device)[-M:]
    visible = torch.cat([ring[:, :, past % M].to(x.dtype), x], dim=2)
    ring[:, :, new % M] = x[:, :, -M:].to(ring.dtype)
    return visible


def rotate(x: Tensor, start: int, angles: "Angles", document: Documents | None = None) -> Tensor:
    """RoPE (Su et al. 2021): position t turns the pair of channels (i, i + D/2) by the angle t
    base^(-2i/D).

    x (B, T, H, D) of the positions from start on, or of those in packed documents -> the same shape
    in at least float32. angles: of rope_frequencies; where these are of fewer channels, the others
    stay as they are.
    """
    x = at_least_float32(x)
    cos, sin = angles(x, start, document)  # (T, 1, n), or (B, T, 1, n)
    width = 2 * cos.shape[-1]
    turned = fast.Rotation.call(x[..., :width], cos, sin)
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], dim=-1)


def rope_frequencies(
    D: int, base: float, scaling="none", factor=1.0, trained_length=1
) -> tuple[Tensor, float]:
    """The angle by which one position turns each of the D/2 pairs, float64 (D/2,), and a factor on
    the rotated vector.

    factor: how many times trained_length the context is to be. `ntk` raises the base, so that the
    slowest pair turns as far as in training. `yarn` (Peng et al. 2023, sections 3.2 and 3.4)
    divides the frequency of a pair that turned less than once in training by the factor, keeps that
    of a pair that turned more than 32 times, interpolates in between, and sharpens the softmax.
    `llama3` (Llama 3.1) does the same between 1 and 4 turns, linearly in them, and `linear` divides
    all frequencies.
    """
    exponent = torch.arange(0, D, 2, dtype=torch.float64, device="cpu") / D
    if scaling == "ntk":
        base = base * factor ** (D / max(1, D - 2))
    frequency = base**-exponent
    # kept: the share of a frequency that is not divided
    amplitude, kept = 1.0, 0.0 if scaling == "linear" else 1.0
    if scaling == "llama3":
        kept = ((trained_length * frequency / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
    elif scaling == "yarn":
        # the interpolation is linear in the pair index, as published; these pairs made 32 turns and
        # 1 turn in training
        low, high = (
            D * math.log(trained_length / (2 * math.pi * t)) / (2 * math.log(base)) for t in (32, 1)
        )
        low, high = max(0, math.floor(low)), min(D - 1, math.ceil(high))
        pair = torch.arange(D // 2, dtype=torch.float64, device="cpu")
        kept = 1 - ((pair - low) / max(1e-3, high - low)).clamp(0, 1)
        amplitude = 0.1 * math.log(factor) + 1
    return frequency * kept + frequency / factor * (1 - kept), amplitude


def quarter_turn(M: int) -> tuple[Tensor, float]:
    """cosFormer's angle for one position, which reaches pi/2 after M of them, float64 (1,), and a
    factor of 1."""
    return torch.tensor([math.pi / 2 / M], dtype=torch.float64, device="cpu"), 1.0


class Angles(nn.Module):
    """cos and sin of the angles of positions: angles(x, start) -> (T, 1, n) each, for x (B, T,
    ...), in x's dtype; angles(x, 0, document) of packed documents -> (B, T, 1, n).

    Those of the first positions are kept in a table. It is made anew, for twice as many, where
    positions go past it, and where dtype or device are others. A compiled graph cannot make it: it
    reads the table, or computes the angles of its own positions.
    """

    def __init__(self, frequency_of: Callable, *settings):
        """frequency_of(*settings) -> the angles of one position, float64 (n,) on the CPU, and a
        factor on cos, sin."""
        super().__init__()
        self.settings = (frequency_of, *settings)
        self.table: Tensor | None = None  # (2, length, 1, n)

    def forward(
        self, x: Tensor, start: int, document: Documents | None = None
    ) -> tuple[Tensor, ...]:
        end = start + x.shape[1]
        table = self.table
        is_other = table is None or (table.dtype, table.device) != (x.dtype, x.device)
        if not is_other and end <= table.shape[1]:
            cos_sin = table[:, start:end]
        elif torch.compiler.is_compiling() or type(x) is not Tensor:
            cos_sin = self.computed(start, end, x.dtype, x.device)
        else:
            cos_sin = self.make(2 * end, x.dtype, x.device)[:, start:end]
        if document is not None:
            cos_sin = cos_sin[:, document.position]
        return cos_sin.unbind()

    def make(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.inference_mode(False):  # it must serve training, too
            self.table = self.computed(0, length, dtype, device)
        return self.table

    def computed(self, start: int, end: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        frequency, amplitude = self.settings[0](*self.settings[1:])
        position = torch.arange(start, end, device="cpu", dtype=torch.float64)  # MPS lacks float64
        angle = position[:, None, None] * frequency
        cos_sin = amplitude * torch.stack([angle.cos(), angle.sin()])
        is_async = device.type == "cuda"  # the host need not wait for a GPU
        return cos_sin.to(dtype).to(device, non_blocking=is_async)


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, computed in at least float32, in the dtype of
    x."""
    return fast.L2Norm.call(at_least_float32(x)).to(x.dtype)
