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
    T, heads = q.shape[1], S.shape[:2]
    if chunk_size is None:
        chunk_size = 32 if log_decay is not None and log_decay.shape[-1] > 1 else 64
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size={chunk_size}: must be a power of two")
    C = min(chunk_size, 1 << (T - 1).bit_length())

    with torch.autocast(q.device.type, enabled=False):
        # padding with k = v = beta = log_decay = 0 leaves the state as it is
        q, k, v, log_decay, beta = (_to_chunks(x, C, S.shape[1]) for x in (q, k, v, log_decay, beta))  # (B*H*N, C, D)
        inside, q_from_start, k_to_end, decay = _weights(q, k, log_decay)
        w = None
        if beta is not None:
            inverse = _Inverse.apply((_weights(k, k, log_decay)[0] * beta).tril_(-1)) * beta.mT
            v, w = inverse @ v, inverse @ (k if log_decay is None else k * log_decay.cumsum(1).exp())
        if is_empty and len(v) == heads.numel():
            o, S = inside @ v, (k_to_end.mT @ v).view_as(S)
        else:
            o, S = _Chunks.apply(inside, q_from_start, k_to_end, v, w, decay, S)
    return o.view(*heads, -1, o.shape[-1])[:, :, :T].transpose(1, 2), S


class _Chunks(torch.autograd.Function):
    """The loop over the chunks.

    The gradient is the same recurrence run backwards, G_n = a_n G_{n+1} + dS_n: a loop without a graph node per chunk.
    """

    @staticmethod
    def forward(ctx, inside, q, k, v, w, decay, S):
        shape, S = S.shape, S.flatten(0, 1)
        M = len(S)
        states = S.new_empty(M, len(q) // M, *S.shape[1:])
        values = v if w is None else torch.empty_like(v)
        for n, (k_n, v_n, w_n, a_n) in enumerate(_each(M, k.mT, v, w, decay)):
            states[:, n] = S
            if w is not None:
                v_n = torch.baddbmm(v_n, w_n, S, alpha=-1)
                values.view(M, -1, *v.shape[1:])[:, n] = v_n
            S = torch.baddbmm(S if decay is None else S * a_n, k_n, v_n)
        states = states.flatten(0, 1)
        ctx.save_for_backward(inside, q, k, values, w, decay, states)
        return (inside @ values).baddbmm_(q, states), S.view(shape)

    @staticmethod
    def backward(ctx, do, G):
        inside, q, k, v, w, decay, states = ctx.saved_tensors
        shape, G = G.shape, G.flatten(0, 1)
        do = do.contiguous()
        M = len(G)
        Gs = torch.empty_like(states)
        dv = inside.mT @ do
        parts = list(enumerate(_each(M, k, w if w is None else w.mT, decay, q.mT, do)))
        for n, (k_n, w_n, a_n, q_n, do_n) in reversed(parts):
            Gs.view(M, -1, *G.shape[1:])[:, n] = G
            after, G = G, torch.baddbmm(G if decay is None else G * a_n, q_n, do_n)
            if w is not None:
                dv_n = dv.view(M, -1, *v.shape[1:])[:, n]
                dv_n += k_n @ after
                G = G.baddbmm_(w_n, dv_n, alpha=-1)
        if w is None:
            dv.baddbmm_(k, Gs)
        dw = None if w is None else (dv @ states.mT).neg_()
        d_decay = None if decay is None else (Gs * states).sum(-1, keepdim=True).sum_to_size(decay.shape)
        return do @ v.mT, do @ states.mT, v @ Gs.mT, dv, dw, d_decay, G.view(shape)


def _each(M, *tensors):
    """zip over the chunks"""
    return zip(*([None] * 100000 if x is None else x.unflatten(0, (M, -1)).unbind(1) for x in tensors))


class _Inverse(torch.autograd.Function):
    """(I + L)^-1 of strictly lower triangular L (M, C, C). Its gradient needs no second solve."""

    @staticmethod
    def forward(ctx, L):
        eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
        inverse = torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, d_inverse):
        (inverse,) = ctx.saved_tensors
        return (inverse.mT @ d_inverse @ inverse.mT).neg_()


def _weights(q, k, log_decay):
    if log_decay is None:
        return (q @ k.mT).tril(), q, k, None
    if log_decay.shape[-1] == 1:
        c = log_decay.cumsum(-2)
        exponent = c - c.mT
        above = torch.ones(exponent.shape[-2:], dtype=torch.bool, device=c.device).triu(1)
        # mask before exp: exp overflows above the diagonal, and inf * 0 is NaN in the backward
        inside = (q @ k.mT) * exponent.masked_fill(above, -torch.inf).exp()
        return inside, q * c.exp(), k * (c[:, -1:] - c).exp(), c[:, -1:].exp()
    inside, q_from_start, k_to_end, decay = _Levels.apply(q, k, log_decay)
    return inside, q_from_start, k_to_end, decay.mT


class _Levels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, log_decay):
        a, decay = _exp(log_decay), _exp(log_decay.sum(1, keepdim=True))
        ctx.save_for_backward(q, k, a, decay)
        q_from_start, k_to_end = q * a, k.clone()
        inside = torch.diag_embed((q * k).sum(-1))
        for s, rows, columns, left, right in _halves(q_from_start, k_to_end, a):
            _diagonal_blocks(inside, 2 * s)[:, :, s:, :s] = _outer(rows, columns).view(len(q), -1, s, s)
            rows *= left
            columns *= right
        return inside, q_from_start, k_to_end, decay

    @staticmethod
    def backward(ctx, d_inside, dq, dk, d_decay):
        q, k, a, decay = ctx.saved_tensors
        q_from_start, k_to_end = q * a, k.clone()
        levels = []
        for s, rows, columns, left, right in _halves(q_from_start, k_to_end, a):
            levels.append((s, rows.clone(), columns.clone(), left, right))
            rows *= left
            columns *= right
        to_end = (k_to_end * dk).sum(1, keepdim=True) + decay * d_decay
        dq, dk = (x.clone(memory_format=torch.contiguous_format) for x in (dq, dk))
        for s, rows, columns, left, right in reversed(levels):
            d = _diagonal_blocks(d_inside, 2 * s)[:, :, s:, :s].reshape(-1, s, s)
            _add_product(dq.view(-1, 2, s, q.shape[-1])[:, 1].mul_(left), d, columns)
            _add_product(dk.view(-1, 2, s, q.shape[-1])[:, 0].mul_(right), d.mT, rows)
        dq *= a
        x = q * dq - k * dk
        ones = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device).triu()
        d_log_decay = torch.baddbmm(to_end, ones.expand(len(x), -1, -1), x)
        diagonal = d_inside.diagonal(dim1=1, dim2=2)[..., None]
        return dq.addcmul_(diagonal, k), dk.addcmul_(diagonal, q), d_log_decay


def _halves(q, k, decay):
    D = q.shape[-1]
    for s in _doubling(q.shape[1]):
        left, right = decay.view(-1, 2, 1, D).unbind(1)
        yield s, q.view(-1, 2, s, D)[:, 1], k.view(-1, 2, s, D)[:, 0], left, right
        decay = _flush(left * right)


def _flush(x):
    return F.threshold(x, torch.finfo(x.dtype).eps ** 2, 0.0)


def _exp(x):
    return _flush(x.exp())


def _doubling(C):
    return [1 << i for i in range(C.bit_length() - 1)]


def _diagonal_blocks(x, s):
    M, C, _ = x.shape
    return x.view(M, C // s, s, C // s, s).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _outer(x, y):
    return x @ y.mT if x.shape[1] != 2 else (x[:, :, None] * y[:, None]).sum(-1)


def _add_product(y, w, x):
    if w.shape[-1] > 4:
        y += w @ x
    else:
        for j in range(w.shape[-1]):
            y.addcmul_(w[:, :, j : j + 1], x[:, j : j + 1])


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
    q, k, _, log_decay, beta, S = _prepare(q, k, k if v is None else v, log_decay, beta, None)
    T = q.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        C = 1 << (T - 1).bit_length()
        q, k, log_decay, beta = (_to_chunks(x, C, S.shape[1]) for x in (q, k, log_decay, beta))
        weights, *_ = _weights(q, k, log_decay)
        if beta is not None:
            weights = weights @ _Inverse.apply((_weights(k, k, log_decay)[0] * beta).tril(-1)) * beta.mT
    return weights.view(*S.shape[:2], C, C)[:, :, :T, :T]


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


def _to_chunks(x, C, H):
    """(B, T, H or 1, D) -> (B*H*N, C, D), zeros behind the last token."""
    if x is None:
        return None
    if x.shape[1] % C:
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C))
    return x.transpose(1, 2).expand(-1, H, -1, -1).reshape(-1, C, x.shape[-1]).contiguous()
