"""The recurrence in the Triton kernels of flash-linear-attention: training and prefill on a GPU
that has it."""

import functools
import importlib.util
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from base.configurator import UserError
from ops.recurrence import LOG_DECAY_MIN

WANTED = "flash-linear-attention 0.5 or later"
FLA_DELTA_KEYS = 256  # rows that its state has room for


@functools.cache  # every layer asks for it
def has_fla() -> bool:
    """Whether there is a GPU, and fla beside it."""
    return torch.cuda.is_available() and importlib.util.find_spec("fla") is not None


def check_kernels(kernels: str, is_used: bool) -> None:
    """Raises UserError for kernels="fla" without them; warns of a GPU without them, if there is a
    recurrence to run."""
    if has_fla():
        return
    if kernels == "fla":
        raise UserError(f"kernels='fla': needs a GPU and {WANTED}; kernels=auto works without it")
    if kernels == "auto" and is_used and torch.cuda.is_available():
        warnings.warn(
            f"kernels=auto: on the GPU the recurrence runs in plain PyTorch; install {WANTED}",
            stacklevel=5,
        )


def fla_computes(q: Tensor, v: Tensor, beta: Tensor | None, erase: Tensor | None) -> bool:
    """Whether fla's kernels take these tensors: not float64, wide keys with the delta rule, or a
    key that erases."""
    return (
        v.dtype != torch.float64
        and erase is None
        and (beta is None or q.shape[-1] <= FLA_DELTA_KEYS)
    )


def fla(q, k, v, *, log_decay=None, beta=None, initial_state=None, bounds=None):
    """Computes what recurrence.chunked does for T > 0: products in v's dtype, states in float32.

    bounds: None, or where each packed document begins in all rows end to end, then their length;
    the states are then those of the documents.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    heads = max(q.shape[2], v.shape[2])
    key_width = q.shape[3]
    value_width = v.shape[3]
    # fla refuses odd widths in half precision, which cosFormer's denominator makes: zeros up to a
    # multiple of 8
    pad_keys = (0, -key_width % 8)
    pad_values = (0, -value_width % 8)
    q, k = (F.pad(x.to(v.dtype).expand(-1, -1, heads, -1), pad_keys).contiguous() for x in (q, k))
    v = F.pad(v, pad_values)
    options: dict = dict(scale=1.0, output_final_state=True, cu_seqlens=bounds)
    if initial_state is not None:
        options["initial_state"] = F.pad(initial_state.float(), pad_values + pad_keys)
    if beta is not None:
        options["beta"] = beta.to(v.dtype)
    if log_decay is None:
        log_decay = torch.zeros(*v.shape[:2], heads, device=v.device)
    log_decay = log_decay.float().clamp(min=LOG_DECAY_MIN)
    if log_decay.dim() == 3:
        kernel = chunk_simple_gla if beta is None else chunk_gated_delta_rule
    else:  # a decay per key channel
        kernel = chunk_gla if beta is None else chunk_kda
        log_decay = F.pad(log_decay, pad_keys)
    B = len(v)
    if bounds is not None:  # one row of all documents
        q, k, v, log_decay = (x.flatten(0, 1)[None] for x in (q, k, v, log_decay))
        if beta is not None:
            options["beta"] = options["beta"].flatten(0, 1)[None]
    o, S = kernel(q, k, v, g=log_decay, **options)
    o = o.view(B, -1, *o.shape[2:])
    return o[..., :value_width], S[..., :key_width, :value_width]
