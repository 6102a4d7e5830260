"""The recurrence that cosFormer, GLA, Mamba-2 and Gated DeltaNet share, in three forms that agree:

    S_t = a_t * S_{t-1} + k_t v_t^T        S: (Dk, Dv), one per head;   o_t = q_t^T S_t
    delta rule: v_t := beta_t (v_t - (a_t S_{t-1})^T k_t)

    recurrent   token by token: the definition, and the step of cached decoding
    chunked     matrix products inside a chunk, a short loop over chunks: training and prefill
    quadratic   the explicit weights w_ij with o_i = sum_j w_ij v_j: the probe
    fla         chunked, in the Triton kernels of flash-linear-attention, where that is installed and a GPU is there

All take the same arguments:

    q, k        (B, T, H, Dk); one head (H = 1) is shared by all heads of v
    v           (B, T, H, Dv)
    log_decay   log a_t <= 0: None (no decay), (B, T, H) one per head, or (B, T, H, Dk) one per key channel
    beta        None, or (B, T, H): the delta rule

Everything in the first three is at least float32, whatever autocast says: decays, sums and states do not survive
bfloat16. There is no scale: a mixer scales its q.
"""

import functools
import importlib.util

import torch
import torch.nn.functional as F

# exp(80) is finite in float32 (the limit is exp(88)), with room for the factors it is multiplied with
SAFE_EXPONENT = 80.0


def at_least_float32(x):
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def recurrent(q, k, v, *, log_decay=None, beta=None, initial_state=None):
    """The definition. Returns o (B, T, H, Dv) and the final state (B, H, Dk, Dv)."""
    q, k, v, log_decay, beta, S = _prepare(q, k, v, log_decay, beta, initial_state)
    outputs = []
    with torch.autocast(q.device.type, enabled=False):
        for t in range(q.shape[1]):
            q_t, k_t, v_t = q[:, t, :, None], k[:, t, :, None], v[:, t, :, None]  # (B, H, 1, D)
            if log_decay is not None:
                S = S * log_decay[:, t, :, :, None].exp()
            if beta is not None:
                v_t = beta[:, t, :, :, None] * (v_t - k_t @ S)
            S = S + k_t.mT * v_t
            outputs.append(q_t @ S)
        return torch.cat(outputs, dim=2).transpose(1, 2), S


def chunked(q, k, v, *, log_decay=None, beta=None, initial_state=None, chunk_size=None):
    """The same function in matrix products over chunks. T need not be a multiple of chunk_size, a power of two.

    With c_i the sum of the log-decays from the chunk's start to i, and S the state before the chunk:

        o_i = exp(c_i) q_i^T S + sum_{j<=i} w_ij v_j        w_ij = sum_d q_id k_jd exp(c_id - c_jd)
        S  := exp(c_C) S + sum_j exp(c_C - c_j) k_j v_j^T

    The delta rule first replaces the chunk's v by u - w S, where u and w solve one triangular system
    (the WY form: Yang et al. 2024, "Gated Delta Networks", section 3.3).
    """
    is_empty = initial_state is None
    q, k, v, log_decay, beta, S = _prepare(q, k, v, log_decay, beta, initial_state)
    T = q.shape[1]
    if chunk_size is None:
        chunk_size = 32 if log_decay is not None and log_decay.shape[-1] > 1 else 64
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size={chunk_size}: must be a power of two")
    C = min(chunk_size, 1 << (T - 1).bit_length())

    with torch.autocast(q.device.type, enabled=False):
        # padding with k = v = beta = log_decay = 0 leaves the state as it is
        q, k, v, log_decay, beta = (_to_chunks(x, C) for x in (q, k, v, log_decay, beta))  # (B, H, N, C, D)
        c = None if log_decay is None else log_decay.cumsum(-2)  # (B, H, N, C, 1 or Dk)
        inside = _weights(q, k, c)  # (B, H, N, C, C)
        if c is None:
            q_from_start, k_to_end, chunk_decays = q, k, None
        else:
            q_from_start, k_to_end = q * c.exp(), k * (c[..., -1:, :] - c).exp()
            chunk_decays = c[..., -1, :, None].exp()  # (B, H, N, 1 or Dk, 1)

        if beta is None:
            states, S = _States.apply(k_to_end.mT @ v, chunk_decays, S)  # (B, H, N, Dk, Dv), one before each chunk
        else:
            solve = _unit_triangular_solver(_weights(k, k, c).tril(-1) * beta)
            u = solve(beta * v)
            w = solve(beta * (k if c is None else k * c.exp()))
            states, corrected = [], []
            # unbind, not x[:, :, n]: the backward of an index writes a whole zero tensor for every n
            decays = [1.0] * u.shape[2] if chunk_decays is None else chunk_decays.unbind(2)
            for u_n, w_n, k_n, a_n in zip(u.unbind(2), w.unbind(2), k_to_end.mT.unbind(2), decays, strict=True):
                states.append(S)
                corrected.append(u_n - w_n @ S)
                S = k_n @ corrected[-1] + a_n * S
            states, v = torch.stack(states, 2), torch.stack(corrected, 2)
        o = inside @ v  # (B, H, N, C, Dv)
        if not (is_empty and states.shape[2] == 1):
            o = o + q_from_start @ states
    return o.flatten(2, 3)[:, :, :T].transpose(1, 2), S


class _States(torch.autograd.Function):
    """S_{n+1} = a_n S_n + new_n: the states before each chunk (B, H, N, Dk, Dv), and the last one.

    The gradient is the same recurrence run backwards, G_n = a_n G_{n+1} + dS_n: a loop without a graph node per chunk.
    """

    @staticmethod
    def forward(ctx, new, decays, S):
        states = []
        for n in range(new.shape[2]):
            states.append(S)
            S = new[:, :, n] + S if decays is None else torch.addcmul(new[:, :, n], decays[:, :, n], S)
        states = torch.stack(states, 2)
        ctx.save_for_backward(states, decays)
        return states, S

    @staticmethod
    def backward(ctx, d_states, G):
        states, decays = ctx.saved_tensors
        d_new = []
        for n in reversed(range(states.shape[2])):
            d_new.append(G)
            G = d_states[:, :, n] + G if decays is None else torch.addcmul(d_states[:, :, n], decays[:, :, n], G)
        d_new = torch.stack(d_new[::-1], 2)
        d_decays = None if decays is None else (d_new * states).sum_to_size(decays.shape)
        return d_new, d_decays, G


@functools.cache  # every layer asks, in every step
def has_fla():
    return torch.cuda.is_available() and importlib.util.find_spec("fla") is not None


def fla(q, k, v, *, log_decay=None, beta=None, initial_state=None):
    """chunked's function in flash-linear-attention's kernels: products in v's dtype, decays and states in float32."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    heads = max(q.shape[2], v.shape[2])
    q, k = (x.to(v.dtype).expand(-1, -1, heads, -1).contiguous() for x in (q, k))
    if log_decay is None:
        log_decay = torch.zeros(*v.shape[:2], heads, device=v.device)
    keys = dict(g=log_decay, scale=1.0, initial_state=initial_state, output_final_state=True)
    if beta is not None:
        return chunk_gated_delta_rule(q, k, v, beta=beta.to(v.dtype), **keys)
    return (chunk_gla if log_decay.dim() == 4 else chunk_simple_gla)(q, k, v, **keys)


def quadratic(q, k, v=None, *, log_decay=None, beta=None):
    """The weights (B, H, T, T) that the recurrence from an empty state gives each earlier v: o = weights @ v.

    For the delta rule v is the value before its correction. Weights may be negative and need not sum to one.
    v is not read; it is taken so that the three forms can be called alike.
    """
    q, k, _, log_decay, beta, _ = _prepare(q, k, k if v is None else v, log_decay, beta, None)
    T = q.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        q, k, log_decay, beta = (_to_chunks(x, 1 << (T - 1).bit_length()) for x in (q, k, log_decay, beta))
        c = None if log_decay is None else log_decay.cumsum(-2)
        weights = _weights(q, k, c)
        if beta is not None:
            solve = _unit_triangular_solver(_weights(k, k, c).tril(-1) * beta)
            weights = weights @ solve(torch.diag_embed(beta.squeeze(-1)))
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
    """(B, T, H, D) -> (B, H, N, C, D), zeros behind the last token."""
    if x is None:
        return None
    x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % C))
    return x.unflatten(2, (-1, C))


def _weights(q, k, c):
    """sum_d q_id k_jd exp(c_id - c_jd) for j <= i, zero above: (..., C, D) -> (..., C, C)."""
    if c is None:
        return (q @ k.mT).tril()
    if c.shape[-1] == 1:
        exponent = c - c.mT
        above = torch.ones(exponent.shape[-2:], dtype=torch.bool, device=c.device).triu(1)
        # mask before exp: exp overflows above the diagonal, and inf * 0 is NaN in the backward
        return (q @ k.mT) * exponent.masked_fill(above, -torch.inf).exp()
    return _channel_weights(q, k, c)


def _channel_weights(q, k, c):
    """One decay per channel: exp(c_i - c_j) = exp(c_i - p) exp(p - c_j), with a pivot p that keeps both factors finite.

    Where the decays of the whole block are mild, p is its first token. Where they are not, p is the end of the left
    half: both factors of (right rows, left columns) are then at most 1, and each half is a smaller block of the same
    kind, until one token is left. Exact for any decay. (A pivot in the middle would reach further, but the rounding of
    a row would then depend on tokens after it. As it is, it does so only where a decay makes a block split.)
    """
    C, first = c.shape[-2], c[..., :1, :]
    if C == 1 or (first - c[..., -1:, :]).max() < SAFE_EXPONENT:
        return ((q * (c - first).exp()) @ (k * (first - c).exp()).mT).tril()
    q, k, c = (torch.stack(x.chunk(2, dim=-2), dim=-3) for x in (q, k, c))  # (..., 2, C/2, Dk)
    pivot = c[..., 0, -1:, :]
    rows, columns = q[..., 1, :, :] * (c[..., 1, :, :] - pivot).exp(), k[..., 0, :, :] * (pivot - c[..., 0, :, :]).exp()
    below, halves = rows @ columns.mT, _channel_weights(q, k, c)
    top = torch.cat([halves[..., 0, :, :], torch.zeros_like(below)], -1)
    return torch.cat([top, torch.cat([below, halves[..., 1, :, :]], -1)], -2)


def _unit_triangular_solver(strictly_lower):
    """y with (I + strictly_lower) y = x, as a function of x."""
    return lambda x: torch.linalg.solve_triangular(strictly_lower, x, upper=False, unitriangular=True)
