"""The recurrence that all mixers but softmax share, in forms that agree:

    S_t = a_t * S_{t-1} + k_t v_t^T        S: (Dk, Dv), one per head;   o_t = q_t^T S_t
    delta rule: v_t := beta_t (v_t - (a_t S_{t-1})^T k_t)

    recurrent       token by token: the definition, and the step of cached decoding
    plain_chunked   chunk by chunk, as the papers list it: for reading, and for the tests
    chunked         the same sums in fewer and larger products: training and prefill. Its backwards are in fast.py
    fla             the same in the Triton kernels of flash-linear-attention: training and prefill on a GPU that has it
    quadratic       the explicit weights w_ij with o_i = sum_j w_ij v_j: for the meters

All forms take the same arguments:

    q, k        (B, T, H, Dk); one head (H = 1) is shared by all heads of v
    v           (B, T, H, Dv)
    log_decay   log a_t <= 0: None (no decay), (B, T, H) one per head, or (B, T, H, Dk) one per key channel
    beta        None, or (B, T, H): the delta rule

recurrent, chunked and quadratic compute in at least float32, whatever autocast says, forward and backward, because
bfloat16 has too few digits for decays, sums and states. On a GPU train.py lets all float32 products be computed by
TF32, which reads 10 bits behind the point and sums in float32. The forms take a log-decay of -inf. chunked and
quadratic treat a decay per head below LOG_DECAY_MIN as LOG_DECAY_MIN, and its gradient is zero. T = 0 gives an empty
output and leaves the state as it was. No form scales anything: a mixer scales its q.
"""

from configurator import UserError

import functools
import importlib.metadata
import re
import warnings

import torch
import torch.nn.functional as F

from ops import fast
from ops.fast import at_least_float32

# exp(-104) is 0 in float32. A lower logarithm would only cost digits in the sums, and -inf - -inf would be NaN
LOG_DECAY_MIN = -104.0


def recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    log_decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition. Returns o (B, T, H, Dv) and the final state (B, H, Dk, Dv), as plain_chunked and chunked do."""
    q, k, v, log_decay, beta, S = _prepare(q, k, v, log_decay, beta, initial_state)
    inputs = ([None] * q.shape[1] if x is None else x[:, :, :, None].unbind(1) for x in (q, k, v, log_decay, beta))
    outputs = []
    with torch.autocast(q.device.type, enabled=False):
        for q_t, k_t, v_t, log_a, beta_t in zip(*inputs, strict=True):  # (B, H, 1, D)
            a = None if log_a is None else log_a.exp()
            if beta_t is not None:
                v_t = beta_t * (v_t - fast.product(k_t if a is None else k_t * a, S))
            new = k_t.mT * v_t
            S = new.add_(S) if a is None else new.addcmul_(a.mT, S)
            outputs.append(fast.product(q_t, S))
        o = torch.cat(outputs, dim=2) if outputs else S[:, :, :0]  # no token
        return o.transpose(1, 2), S


def plain_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    log_decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence chunk by chunk, in the fewest lines. T need not be a multiple of chunk_size.

    c_i is the sum of the log-decays from the start of the chunk to i, and S is the state before the chunk:

        1. w_ij = sum_d q_id k_jd exp(c_id - c_jd) for j <= i
        2. delta rule: u_ij as w_ij, with k_i for q_i; (I + [beta_i u_ij]_{j<i}) v := beta (v - (k exp(c)) S)
        3. o  = (q exp(c)) S + w v
        4. S := exp(c_C) S + (k exp(c_C - c))^T v

    Source: Dao & Gu 2024, Listing 1; for the delta rule Yang et al. 2024, "Gated Delta Networks", section 3.3.
    """
    q, k, v, log_decay, beta, S = _prepare(q, k, v, log_decay, beta, initial_state)
    log_decay = torch.zeros_like(v[..., :1]) if log_decay is None else log_decay
    outputs = [S[:, :, :0]]  # for T = 0
    for start in range(0, q.shape[1], chunk_size):
        chunk = slice(start, start + chunk_size)
        inputs = (x if x is None else x[:, chunk].transpose(1, 2) for x in (q, k, v, log_decay, beta))
        q_c, k_c, v_c, c, beta_c = inputs  # (B, H, C, D)
        # 1. the weights inside the chunk
        c = c.cumsum(-2)
        later = torch.ones(c.shape[-2], c.shape[-2], dtype=torch.bool, device=c.device).triu(1)[..., None]
        # mask before exp: exp overflows where j > i, and inf * 0 is NaN in the backward
        decay = (c[..., :, None, :] - c[..., None, :, :]).masked_fill(later, -torch.inf).exp()  # (B, H, C, C, 1 or Dk)
        w = (q_c[..., :, None, :] * k_c[..., None, :, :] * decay).sum(-1)  # (B, H, C, C)
        # 2. the delta rule corrects the values
        if beta is not None:
            u = (k_c[..., :, None, :] * k_c[..., None, :, :] * decay).sum(-1)
            right = beta_c * (v_c - (k_c * c.exp()) @ S)
            v_c = torch.linalg.solve_triangular((beta_c * u).tril(-1), right, upper=False, unitriangular=True)
        # 3. the readout: what the state holds, and what the chunk adds
        outputs.append((q_c * c.exp()) @ S + w @ v_c)
        # 4. the state behind the chunk
        S = c[..., -1:, :].exp().mT * S + (k_c * (c[..., -1:, :] - c).exp()).mT @ v_c
    return torch.cat(outputs, dim=2).transpose(1, 2), S


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    log_decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """plain_chunked in fewer and larger products. chunk_size must be a power of two.

    1. All chunks are computed at once, and a decay per channel needs no (C, C, Dk) tensor (fast.ChannelWeights).
    2. The delta rule does not solve a system for each chunk: v becomes inverse (beta v) - inverse (beta k exp(c)) S,
       the WY form of Yang et al. 2024, with an inverse from doubled blocks (fast.Inverse).
    3. and 4. A loop computes the states alone, and its backward is written by hand (fast.Chunks).

    A log-decay may be -inf, where c_i - c_j would be NaN.

    Together they bought, forward and backward at T = 1,024 over an earlier chunked form (results/bench/README.md):
    22 to 19 ms without decay, 32 to 24 with one per head, 52 to 37 per channel, and 112 to 55 with the delta rule.
    """
    is_empty = initial_state is None
    q, k, v, log_decay, beta, S = _prepare(q, k, v, log_decay, beta, initial_state)
    T = q.shape[1]
    if chunk_size is None:
        # on a CPU the width of the keys was fastest, for every kind of decay; the delta rule wants a small inverse
        chunk_size = 16 if q.shape[-1] <= 16 else 32 if q.shape[-1] <= 32 or beta is not None else 64
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size={chunk_size}: must be a power of two")
    C = min(chunk_size, 1 << max(0, T - 1).bit_length())

    with torch.autocast(q.device.type, enabled=False):
        # padding with k = v = beta = log_decay = 0 leaves the state as it is
        q, k, v, log_decay, beta = (_to_chunks(x, C) for x in (q, k, v, log_decay, beta))  # (B, H, N, C, D)
        # 1. the weights inside the chunks
        inside, q_from_start, k_to_end, decay = _weights(q, k, log_decay)
        # 2. the delta rule: the values become v - w S
        w = None
        if beta is not None:
            erase, k_from_start, _, _ = _weights(k, k, log_decay)
            inverse = fast.apply(fast.Inverse, (erase * beta).tril(-1)) * beta.mT
            v, w = fast.product(inverse, v), fast.product(inverse, k_from_start)
        # 3. and 4. the readout and the states, which are not needed inside a single chunk that begins with zeros
        if is_empty and v.shape[2] == 1:
            o, S = fast.product(inside, v), fast.product(k_to_end.mT, v)[:, :, 0].expand_as(S)
        else:
            chunks = (_flat(x, S.shape[1]) for x in (inside, q_from_start, k_to_end, v, w, decay))
            o, S = fast.apply(fast.Chunks, *chunks, S)
    return o.reshape(*S.shape[:2], -1, o.shape[-1])[:, :, :T].transpose(1, 2), S


# before 0.4 fla's delta rule refuses float32, and it was tested here from 0.5 on; its state has room for 256 rows
FLA_VERSION = (0, 5)
FLA_DELTA_KEYS = 256


@functools.cache  # every layer asks for it
def missing_for_fla() -> str:
    """What this machine lacks to run fla's kernels, as one clause; an empty text if it lacks nothing."""
    wanted = f"flash-linear-attention {FLA_VERSION[0]}.{FLA_VERSION[1]} or later"
    if not torch.cuda.is_available():
        return f"{wanted} needs a GPU, and there is none"
    try:
        version = importlib.metadata.version("flash-linear-attention")
    except importlib.metadata.PackageNotFoundError:
        return f"{wanted} is not installed (pip install flash-linear-attention)"
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < FLA_VERSION:
        return f"{wanted} is needed, {version} is installed (pip install -U flash-linear-attention)"
    return ""


def has_fla() -> bool:
    return not missing_for_fla()


def check_kernels(kernels: str, is_used: bool) -> None:
    """Raises UserError for kernels="fla" without them; warns of a GPU without them, if there is a recurrence to run."""
    missing = missing_for_fla()
    if missing and kernels == "fla":
        raise UserError(f"kernels='fla': {missing}; kernels=auto works without it")
    if missing and kernels == "auto" and torch.cuda.is_available() and is_used:
        warnings.warn(f"kernels=auto: {missing}; on the GPU the recurrence runs in plain PyTorch", stacklevel=5)


def check_delta_keys(name: str, kernels: str, key: str, width: int) -> None:
    """The same for keys that fla's delta rule is too narrow for. key: the setting that makes them `width` wide."""
    if kernels == "torch" or width <= FLA_DELTA_KEYS or not has_fla():
        return
    limit = f"{name}: fla's delta rule takes keys of width at most {FLA_DELTA_KEYS}, not {key}={width}"
    if kernels == "fla":
        raise UserError(f"kernels='fla': {limit}; lower {key}, or set kernels=auto")
    warnings.warn(f"kernels=auto: {limit}; it runs in plain PyTorch", stacklevel=4)


def fla_computes(q: torch.Tensor, v: torch.Tensor, beta: torch.Tensor | None) -> bool:
    """Whether fla's kernels take these tensors: they refuse float64, and wide keys with the delta rule."""
    return v.dtype != torch.float64 and (beta is None or q.shape[-1] <= FLA_DELTA_KEYS)


def fla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    log_decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes what chunked does, in flash-linear-attention's kernels: products in v's dtype, states in float32."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    heads, key_width, value_width = max(q.shape[2], v.shape[2]), q.shape[3], v.shape[3]
    if initial_state is not None:
        initial_state = initial_state.float()
    if v.shape[1] == 0:  # no kernel takes zero tokens
        empty = torch.zeros(v.shape[0], heads, key_width, value_width, device=v.device)
        return v, empty if initial_state is None else initial_state
    # Triton miscompiles odd widths in half precision, so fla refuses them, and cosFormer's denominator makes the width
    # of the values odd. Zeros up to a multiple of 8 change nothing and are cut off again.
    pad_keys, pad_values = (0, -key_width % 8), (0, -value_width % 8)
    q, k = (F.pad(x.to(v.dtype).expand(-1, -1, heads, -1), pad_keys).contiguous() for x in (q, k))
    v = F.pad(v, pad_values)
    if initial_state is not None:
        initial_state = F.pad(initial_state, pad_values + pad_keys)
    if log_decay is None:
        log_decay = torch.zeros(*v.shape[:2], heads, device=v.device)
    log_decay = log_decay.float().clamp(min=LOG_DECAY_MIN)
    keys = dict(scale=1.0, initial_state=initial_state, output_final_state=True)
    if beta is not None:
        keys["beta"] = beta.to(v.dtype)
    if log_decay.dim() == 3:
        kernel = chunk_simple_gla if beta is None else chunk_gated_delta_rule
    else:  # a decay per key channel
        kernel, log_decay = chunk_gla if beta is None else chunk_kda, F.pad(log_decay, pad_keys)
    o, S = kernel(q, k, v, g=log_decay, **keys)
    return o[..., :value_width], S[..., :key_width, :value_width]


def quadratic(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None = None,
    *,
    log_decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weights (B, H, T, T) that the recurrence from an empty state gives each earlier v: o = weights @ v.

    With the delta rule, v is the value before the rule corrects it. Weights may be negative and need not sum to one.
    v is an argument only so that all forms can be called alike.
    """
    q, k, _, log_decay, beta, _ = _prepare(q, k, k if v is None else v, log_decay, beta, None)
    T = q.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        C = 1 << max(0, T - 1).bit_length()
        q, k, log_decay, beta = (_to_chunks(x, C) for x in (q, k, log_decay, beta))
        weights = _weights(q, k, log_decay)[0]
        if beta is not None:
            inverse = fast.apply(fast.Inverse, (_weights(k, k, log_decay)[0] * beta).tril(-1))
            weights = fast.product(weights, inverse) * beta.mT
    return weights[:, :, 0, :T, :T]


def _prepare(q, k, v, log_decay, beta, initial_state):
    """Casts to float32 or float64, gives log_decay and beta a last axis, and makes the state."""
    q, k, v = at_least_float32(q), at_least_float32(k), at_least_float32(v)
    if log_decay is not None:
        log_decay = at_least_float32(log_decay)
        log_decay = log_decay if log_decay.dim() == 4 else log_decay[..., None]  # (B, T, H, 1 or Dk)
    if beta is not None:
        beta = at_least_float32(beta)[..., None]  # (B, T, H, 1)
    if initial_state is None:
        heads = max(q.shape[2], v.shape[2])
        initial_state = v.new_zeros(v.shape[0], heads, q.shape[3], v.shape[3])
    return q, k, v, log_decay, beta, at_least_float32(initial_state)


def _to_chunks(x, C):
    """(B, T, H, D) -> (B, H, N, C, D), with zeros behind the last token; contiguous, or every product would copy it."""
    if x is None:
        return None
    padding = max(C - x.shape[1], -x.shape[1] % C)  # at least one chunk, for T = 0
    if padding:
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
    return x.transpose(1, 2).contiguous().unflatten(2, (-1, C))


def _flat(x, heads):
    """(B, H or 1, N, ...) -> (B*H*N, ...)"""
    return None if x is None else x.expand(-1, heads, -1, -1, -1).flatten(0, 2)


def _weights(q, k, log_decay):
    """What the chunks (B, H, N, C, D) need of their decays; c_i is the sum of log-decays from the chunk's start to i.

    Returns the weights inside the chunks, sum_d q_id k_jd exp(c_id - c_jd) for j <= i and zero above (B, H, N, C, C); q
    decayed from the chunk's start, q exp(c); k decayed to its end, k exp(c_C - c); and the decay of the whole chunk,
    exp(c_C), as (B, H, N, 1 or Dk, 1). Without a decay the last three are q, k and None.
    """
    q = q.view_as(q)  # with the delta rule it is k, and torch.compile does not take one tensor for two inputs
    if log_decay is None:
        return *fast.apply(fast.PlainWeights, q, k), None
    if log_decay.shape[-1] == 1:
        return fast.apply(fast.HeadWeights, q, k, log_decay.clamp(min=LOG_DECAY_MIN).cumsum(-2))
    heads = max(x.shape[1] for x in (q, k, log_decay))
    outputs = fast.apply(fast.ChannelWeights, *(_flat(x, heads) for x in (q, k, log_decay)))
    inside, q, k, decay = (x.unflatten(0, (-1, heads, log_decay.shape[2])) for x in outputs)
    return inside, q, k, decay.mT
