"""The recurrence that all mixers but softmax and monarch share, in forms that agree:

    S_t = a_t S_{t-1} + k_t v_t^T        S: (Dk, Dv), one per head;   o_t = q_t^T S_t
    with the delta rule, beta_t (v_t - (a_t S_{t-1})^T k_t) takes the place of v_t

    recurrent       token by token: the definition, and the step of cached decoding
    chunked         chunk by chunk: training and prefill
    quadratic       the explicit weights w_ij with o_i = sum_j w_ij v_j: for the meters
    kernels.fla     the same in Triton's kernels, on a GPU

All but quadratic return o (B, T, H, Dv) and the final state (B, H, Dk, Dv), in at least float32
(kernels.fla: o in v's dtype), of the arguments (kernels.fla: no erase, and bounds in place of first)

    q, k            (B, T, H, Dk); one head (H = 1) is shared by all heads of v. No form scales q
    v               (B, T, H, Dv)
    log_decay       log a_t <= 0: None (no decay), (B, T, H) one per head, or (B, T, H, Dk) one per key channel
    beta            None, or (B, T, H): the delta rule
    erase           None, or (B, T, H, Dk): takes the place of k_t in (a_t S_{t-1})^T k_t; with beta alone
    initial_state   None (zeros), or (B, H, Dk, Dv)
    first           None, or (B, T) bool: true at the first token of each document of a packed row

Packed documents are kept apart by one rule, in `prepare`: at a document's first token the decay is
zero, log a_t = -inf, in a mixer without a decay too. So the state before it is forgotten, and no
weight reaches over it. (kernels.fla is told where the documents begin instead.)

Autocast changes nothing, forward or backward: bfloat16 has too few digits for decays, sums and
states. On a GPU, train.py lets TF32 compute float32 products. T = 0 gives an empty output and
leaves the state as it was.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.fast import (
    ChannelWeights,
    Chunks,
    HeadWeights,
    Inverse,
    PlainWeights,
    at_least_float32,
    product,
)

# exp(-104) is 0 in float32. A lower logarithm would only cost digits in the sums, and -inf - -inf
# would be NaN
LOG_DECAY_MIN = -104.0


def recurrent(q, k, v, *, log_decay=None, beta=None, erase=None, initial_state=None, first=None):
    """The definition, token by token."""
    *inputs, S = prepare(q, k, v, log_decay, beta, erase, initial_state, first=first)
    inputs = ([None] * q.shape[1] if x is None else x[:, :, :, None].unbind(1) for x in inputs)
    outputs = []
    with torch.autocast(q.device.type, enabled=False):
        for q_t, k_t, v_t, log_a, beta_t, erase_t in zip(*inputs, strict=True):  # (B, H, 1, D)
            a = None if log_a is None else log_a.exp()
            # 1. the delta rule: of what the decayed state holds under k, or erase, a share beta gives
            # way to the same share of v
            if beta_t is not None:
                erase_t = k_t if erase_t is None else erase_t
                v_t = beta_t * (v_t - product(erase_t if a is None else erase_t * a, S))
            # 2. the state decays and takes up the token
            new = k_t.mT * v_t
            S = new.add_(S) if a is None else new.addcmul_(a.mT, S)  # (B, H, Dk, Dv)
            # 3. the readout
            outputs.append(product(q_t, S))
        o = torch.cat(outputs, dim=2) if outputs else S[:, :, :0]
    return o.transpose(1, 2), S


def chunked(
    q,
    k,
    v,
    *,
    log_decay=None,
    beta=None,
    erase=None,
    initial_state=None,
    first=None,
    chunk_size: int | None = None,
):
    """The recurrence chunk by chunk. T need not be a multiple of chunk_size, which must be a power
    of two.

    c_i is the sum of the log-decays from the start of the chunk to i, and S is the state before the
    chunk:

        1. w_ij = sum_d q_id k_jd exp(c_id - c_jd) for j <= i
        2. only with the delta rule: the new v solves (I + [beta_i u_ij]_{j<i}) v = beta (v_old - (e exp(c)) S),
           where e is k or erase, and u is w with e in the place of q
        3. o = (q exp(c)) S + w v
        4. S := exp(c_C) S + (k exp(c_C - c))^T v

    Source: Dao & Gu 2024, Listing 1; for the delta rule Yang et al. 2024, "Gated Delta Networks",
    section 3.3. Steps 1 and 2 are taken for all chunks at once: S is not known yet, so that step 2
    makes v - w S of v, with v := inverse (beta v) and w := inverse (beta e exp(c)), their WY form.
    Only the states are a loop, whose backward is written by hand (fast.Chunks).

    A log-decay may be -inf. One per head counts as at least LOG_DECAY_MIN, and has no gradient
    below it. At the first token of a document it is -inf, which a sum would not recover from: there
    `weights` masks what lies on both sides.
    """
    T = q.shape[1]
    starts_empty = initial_state is None
    is_packed = first is not None
    q, k, v, log_decay, beta, erase, S = prepare(
        q, k, v, log_decay, beta, erase, initial_state, first=first
    )
    if chunk_size is None:
        # on a CPU the width of the keys was fastest, for every kind of decay; the delta rule wants
        # a small inverse
        most = 64 if beta is None else 32
        chunk_size = min(max(16, _power_of_two(q.shape[-1])), most)
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size={chunk_size}: must be a power of two")

    with torch.autocast(q.device.type, enabled=False):
        C = min(chunk_size, _power_of_two(T))
        # (B, H, N, C, D); padding with k = v = beta = log_decay = 0 leaves the state as it is
        q, k, v, log_decay, beta, erase = (
            to_chunks(x, C) for x in (q, k, v, log_decay, beta, erase)
        )
        # 1. the weights inside the chunks
        inside, q_from_start, k_to_end, decay = weights(q, k, log_decay, is_packed)
        # 2. the delta rule: the values become v - w S
        w = None
        if beta is not None:
            u, from_start, _, _ = weights(k if erase is None else erase, k, log_decay, is_packed)
            inverse = Inverse.call((u * beta).tril(-1)) * beta.mT
            v, w = product(inverse, v), product(inverse, from_start)
        # 3. and 4. the readout and the states, which are not needed inside a single chunk that
        # begins with zeros
        if starts_empty and v.shape[2] == 1:
            o = product(inside, v)
            S = product(k_to_end.mT, v)[:, :, 0].expand_as(S)
        else:
            tensors = (inside, q_from_start, k_to_end, v, w, decay)
            o, S = Chunks.call(*(_flat(x, S.shape[1]) for x in tensors), S)
    return o.reshape(*S.shape[:2], -1, o.shape[-1])[:, :, :T].transpose(1, 2), S


def quadratic(q, k, *, log_decay=None, beta=None, erase=None, first=None) -> Tensor:
    """The weights (B, H, T, T) that the recurrence from an empty state gives each earlier v: o =
    weights @ v.

    With the delta rule, v is the value before the rule corrects it. Weights may be negative and
    need not sum to one.
    """
    is_packed = first is not None
    q, k, _, log_decay, beta, erase, _ = prepare(q, k, k, log_decay, beta, erase, None, first=first)
    T = q.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        C = _power_of_two(T)  # one chunk
        q, k, log_decay, beta, erase = (to_chunks(x, C) for x in (q, k, log_decay, beta, erase))
        w = weights(q, k, log_decay, is_packed)[0]
        if beta is not None:
            u = weights(k if erase is None else erase, k, log_decay, is_packed)[0]
            inverse = Inverse.call((u * beta).tril(-1))
            w = product(w, inverse) * beta.mT
    return w[:, :, 0, :T, :T]


def weights(q: Tensor, k: Tensor, log_decay: Tensor | None, is_packed: bool = False) -> tuple:
    """What the chunks (B, H, N, C, D) need of their decays; c_i is the sum of log-decays from the
    chunk's start to i.

    Returns the weights inside the chunks, sum_d q_id k_jd exp(c_id - c_jd) for j <= i and zero
    above (B, H, N, C, C); q decayed from the chunk's start, q exp(c); k decayed to its end, k
    exp(c_C - c); and the decay of the whole chunk, exp(c_C), as (B, H, N, 1 or Dk, 1). is_packed:
    a log-decay of -inf begins a document.
    """
    # with the delta rule it is k, and torch.compile does not take one tensor for two inputs
    q = q.view_as(q)
    if log_decay is None:
        return *PlainWeights.call(q, k), k.new_ones(*k.shape[:3], 1, 1)
    if log_decay.shape[-1] == 1:
        begun = None
        if is_packed:
            is_first = (log_decay == -torch.inf).all(1, keepdim=True)  # in all heads
            begun = is_first.cumsum(-2)
            log_decay = log_decay.masked_fill(is_first, 0.0)
        return HeadWeights.call(q, k, log_decay.clamp(min=LOG_DECAY_MIN).cumsum(-2), begun)
    heads = max(x.shape[1] for x in (q, k, log_decay))
    outputs = ChannelWeights.call(*(_flat(x, heads) for x in (q, k, log_decay)))
    inside, q, k, decay = (x.unflatten(0, (-1, heads, log_decay.shape[2])) for x in outputs)
    return inside, q, k, decay.mT


def prepare(q, k, v, log_decay, beta, erase, initial_state, *n_states, first=None):
    """Casts to float32 or float64, gives log_decay and beta a last axis, makes the state, or
    n_states a head, and lets no decay reach over the first token of a document."""
    if log_decay is not None and log_decay.dim() == 3:
        log_decay = log_decay[..., None]  # (B, T, H, 1 or Dk)
    if beta is not None:
        beta = beta[..., None]  # (B, T, H, 1)
    if first is not None:
        if log_decay is None:
            log_decay = torch.zeros(*first.shape, 1, 1, dtype=q.dtype, device=q.device)
        log_decay = log_decay.masked_fill(first[:, :, None, None], -torch.inf)
    inputs = (q, k, v, log_decay, beta, erase)
    q, k, v, log_decay, beta, erase = (x if x is None else at_least_float32(x) for x in inputs)
    if initial_state is None:
        initial_state = v.new_zeros(
            v.shape[0], max(q.shape[2], v.shape[2]), *n_states, q.shape[3], v.shape[3]
        )
    return q, k, v, log_decay, beta, erase, at_least_float32(initial_state)


def _power_of_two(T):
    """The smallest that is not less than T."""
    return 1 << max(0, T - 1).bit_length()


def to_chunks(x, C):
    """(B, T, H, D) -> (B, H, N, C, D), with zeros behind the last token; contiguous, or every
    product would copy it."""
    if x is None:
        return None
    padding = max(C - x.shape[1], -x.shape[1] % C)  # at least one chunk, for T = 0
    if padding:
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
    return x.transpose(1, 2).contiguous().unflatten(2, (-1, C))


def _flat(x, heads):
    """(B, H or 1, N, ...) -> (B*H*N, ...), contiguous: flatten copies nothing where one row has one
    chunk."""
    return None if x is None else x.expand(-1, heads, -1, -1, -1).flatten(0, 2).contiguous()
