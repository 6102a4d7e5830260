"""The recurrence that all mixers but softmax share, in forms that agree:

    S_t = a_t * S_{t-1} + k_t v_t^T        S: (Dk, Dv), one per head;   o_t = q_t^T S_t
    delta rule: v_t := beta_t (v_t - (a_t S_{t-1})^T k_t)

    recurrent       token by token: the definition, and the step of cached decoding
    plain_chunked   chunk by chunk, as the papers list it: for reading, and for the tests
    chunked         the same sums in fewer and larger products: training and prefill
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

import functools
import importlib.metadata
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F

# exp(-104) is 0 in float32. A lower logarithm would only cost digits in the sums, and -inf - -inf would be NaN
LOG_DECAY_MIN = -104.0


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def without_autocast(backward: Callable) -> Callable:
    """Decorates a backward: when it is called inside an autocast context, its products would be rounded, or fail."""

    @functools.wraps(backward)
    def wrapped(ctx, *gradients):
        with torch.autocast(gradients[0].device.type, enabled=False):
            return backward(ctx, *gradients)

    return wrapped


def first_derivative_only(backward: Callable) -> Callable:
    """Decorates a backward that treats saved intermediates as constants: it raises under create_graph=True.

    torch's once_differentiable raises only if the incoming gradient needs a gradient. The gradient of a loss needs
    none: the result would be a constant, and a Hessian-vector product silently wrong.
    """

    @functools.wraps(backward)
    def wrapped(ctx, *gradients):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # while compiling, torch refuses it itself
            raise RuntimeError("create_graph=True: there are no second derivatives; take differences of gradients")
        return backward(ctx, *gradients)

    return wrapped


class _NoContext:
    """The ctx of a forward whose backward is never called."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        pass


def apply(function: type[torch.autograd.Function], *inputs):
    """function.apply(*inputs). Without gradients its forward alone: autograd takes half the time of a small call."""
    return function.apply(*inputs) if torch.is_grad_enabled() else function.forward(_NoContext(), *inputs)


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
                v_t = beta_t * (v_t - _product(k_t if a is None else k_t * a, S))
            new = k_t.mT * v_t
            S = new.add_(S) if a is None else new.addcmul_(a.mT, S)
            outputs.append(_product(q_t, S))
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

        w_ij = sum_d q_id k_jd exp(c_id - c_jd) for j <= i, and u_ij the same with k_i for q_i
        delta rule: (I + [beta_i u_ij]_{j<i}) v := beta (v - (k exp(c)) S)
        o  = (q exp(c)) S + w v
        S := exp(c_C) S + (k exp(c_C - c))^T v

    Source: Dao & Gu 2024, Listing 1; for the delta rule Yang et al. 2024, "Gated Delta Networks", section 3.3.
    """
    q, k, v, log_decay, beta, S = _prepare(q, k, v, log_decay, beta, initial_state)
    log_decay = torch.zeros_like(v[..., :1]) if log_decay is None else log_decay
    outputs = [S[:, :, :0]]  # for T = 0
    for start in range(0, q.shape[1], chunk_size):
        chunk = slice(start, start + chunk_size)
        inputs = (x if x is None else x[:, chunk].transpose(1, 2) for x in (q, k, v, log_decay, beta))
        q_c, k_c, v_c, c, beta_c = inputs  # (B, H, C, D)
        c = c.cumsum(-2)
        later = torch.ones(c.shape[-2], c.shape[-2], dtype=torch.bool, device=c.device).triu(1)[..., None]
        # mask before exp: exp overflows where j > i, and inf * 0 is NaN in the backward
        decay = (c[..., :, None, :] - c[..., None, :, :]).masked_fill(later, -torch.inf).exp()  # (B, H, C, C, 1 or Dk)
        w = (q_c[..., :, None, :] * k_c[..., None, :, :] * decay).sum(-1)  # (B, H, C, C)
        if beta is not None:
            u = (k_c[..., :, None, :] * k_c[..., None, :, :] * decay).sum(-1)
            right = beta_c * (v_c - (k_c * c.exp()) @ S)
            v_c = torch.linalg.solve_triangular((beta_c * u).tril(-1), right, upper=False, unitriangular=True)
        outputs.append((q_c * c.exp()) @ S + w @ v_c)
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

    Four things differ. All chunks are computed at once, except that a loop computes the states, with a backward written
    by hand (_Chunks). A decay per channel needs no (C, C, Dk) tensor (_ChannelWeights). The delta rule does not solve a
    system in every turn of the loop: v becomes inverse (beta v) - inverse (beta k exp(c)) S, the WY form of Yang et al.
    2024, with an inverse from doubled blocks (_Inverse). A log-decay may be -inf, where c_i - c_j would be NaN.

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
        inside, q_from_start, k_to_end, decay = _weights(q, k, log_decay)
        w = None
        if beta is not None:
            erase, k_from_start, _, _ = _weights(k, k, log_decay)
            inverse = apply(_Inverse, (erase * beta).tril(-1)) * beta.mT
            v, w = _product(inverse, v), _product(inverse, k_from_start)
        if is_empty and v.shape[2] == 1:
            o, S = _product(inside, v), _product(k_to_end.mT, v)[:, :, 0].expand_as(S)
        else:
            o, S = apply(_Chunks, *(_flat(x, S.shape[1]) for x in (inside, q_from_start, k_to_end, v, w, decay)), S)
    return o.reshape(*S.shape[:2], -1, o.shape[-1])[:, :, :T].transpose(1, 2), S


class _Product(torch.autograd.Function):
    """a @ b. Inside an autocast context, the gradient that autograd computes would be in bfloat16."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @without_autocast
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return (dy @ b.mT).sum_to_size(a.shape), (a.mT @ dy).sum_to_size(b.shape)


_product = functools.partial(apply, _Product)


class _Chunks(torch.autograd.Function):
    """The loop over N chunks, given the weights inside them. q is decayed from the chunk's start and k to its end:

        v := v - w S (only for the delta rule);   o = inside v + q S;   S := a S + k^T v

    inside (B*H*N, C, C), q, k, w (B*H*N, C, Dk), v (B*H*N, C, Dv), decay a (B*H*N, 1 or Dk, 1), S (B, H, Dk, Dv).
    The gradient G of S follows the same recurrence backwards, G := a G + q^T do - w^T dv. Autograd would go through
    small operations for every chunk; here most products are one for all chunks.
    """

    @staticmethod
    def forward(ctx, inside, q, k, v, w, decay, S):
        shape, S = S.shape, S.flatten(0, 1)
        states, values = [], []
        # a chunk costs a few small operations: waking a second thread would cost more than it saves
        for new, k_n, v_n, w_n, a in _by_chunk(len(S), k.mT @ v if w is None else None, k.mT, v, w, decay):
            states.append(S)
            if w is not None:
                values.append(torch.baddbmm(v_n, w_n, S, alpha=-1))
                new = k_n @ values[-1]
            S = new.add_(S) if a is None else new.addcmul_(a, S)
        states, v = _joined(states), v if w is None else _joined(values)
        ctx.save_for_backward(inside, q, k, v, w, decay, states)
        return (inside @ v).baddbmm_(q, states), S.clone().view(shape)  # a view would keep all states alive

    @staticmethod
    @first_derivative_only
    @without_autocast
    def backward(ctx, do, G):
        inside, q, k, v, w, decay, states = ctx.saved_tensors
        shape, G = G.shape, G.flatten(0, 1)
        dv, d_states, d_values = inside.mT @ do, [], []  # d_states: G after each chunk
        for new, dv_n, k_n, w_n, a in reversed(_by_chunk(len(G), q.mT @ do, dv, k, None if w is None else w.mT, decay)):
            d_states.append(G)
            if w is not None:
                d_values.append(torch.baddbmm(dv_n, k_n, G))
                new = torch.baddbmm(new, w_n, d_values[-1], alpha=-1)
            G = new.add_(G) if a is None else new.addcmul_(a, G)
        d_states = _joined(d_states[::-1])
        dv = dv.baddbmm_(k, d_states) if w is None else _joined(d_values[::-1])
        dw = None if w is None else (dv @ states.mT).neg_()
        d_decay = None if decay is None else (d_states * states).sum(-1, keepdim=True).sum_to_size(decay.shape)
        return do @ v.mT, do @ states.mT, v @ d_states.mT, dv, dw, d_decay, G.view(shape)


def _joined(chunks):
    """Joins N tensors (B*H, ...) to one (B*H*N, ...)."""
    return torch.stack(chunks, 1).flatten(0, 1)


def _by_chunk(heads, *tensors):
    """Splits tensors (B*H*N, ...) into N tuples, one per chunk; None stays None."""
    views = [x if x is None else x.view(heads, -1, *x.shape[-2:]).unbind(1) for x in tensors]
    n_chunks = len(next(view for view in views if view is not None))
    return list(zip(*(view or (None,) * n_chunks for view in views), strict=True))


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
            inverse = apply(_Inverse, (_weights(k, k, log_decay)[0] * beta).tril(-1))
            weights = _product(weights, inverse) * beta.mT
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
        return *apply(_PlainWeights, q, k), None
    if log_decay.shape[-1] == 1:
        return apply(_HeadWeights, q, k, log_decay.clamp(min=LOG_DECAY_MIN).cumsum(-2))
    heads = max(x.shape[1] for x in (q, k, log_decay))
    outputs = apply(_ChannelWeights, *(_flat(x, heads) for x in (q, k, log_decay)))
    inside, q, k, decay = (x.unflatten(0, (-1, heads, log_decay.shape[2])) for x in outputs)
    return inside, q, k, decay.mT


class _PlainWeights(torch.autograd.Function):
    """_weights without a decay. q, k (B, H or 1, N, C, Dk).

    q and k pass through it, so that their two gradients are added inside a product.
    """

    @staticmethod
    def forward(ctx, q, k):
        ctx.save_for_backward(q, k)
        return (q @ k.mT).tril_(), q, k

    @staticmethod
    @without_autocast
    def backward(ctx, d_inside, dq, dk):
        q, k = ctx.saved_tensors
        d_product = d_inside.tril()
        return _added_product(dq, d_product, k), _added_product(dk, d_product.mT, q)


class _HeadWeights(torch.autograd.Function):
    """_weights with a decay per head. q, k (B, H or 1, N, C, Dk), c (B, H, N, C, 1).

    Autograd would go over the (C, C) weights and the keys about twice as often.
    """

    @staticmethod
    def forward(ctx, q, k, c):
        end = c[..., -1:, :]
        from_start, to_end, decay = c.exp(), (end - c).exp(), end.exp()
        # exp overflows above the diagonal, where it is replaced: this is never differentiated
        between = (c - c.mT).exp_().tril_()
        inside = (q @ k.mT) * between
        ctx.save_for_backward(q, k, from_start, to_end, decay, between, inside)
        return inside, q * from_start, k * to_end, decay

    @staticmethod
    @first_derivative_only
    @without_autocast
    def backward(ctx, d_inside, dq, dk, d_decay):
        q, k, from_start, to_end, decay, between, inside = ctx.saved_tensors
        d_product = (d_inside * between).sum_to_size(*q.shape[:-1], q.shape[-2])
        d_exponent = d_inside * inside  # of c_i - c_j
        dq, dk = dq * from_start, dk * to_end
        d_end = (dk * k).sum(-1, keepdim=True)  # of c_C - c
        dc = (d_exponent.sum(-1) - d_exponent.sum(-2))[..., None].add_((dq * q).sum(-1, keepdim=True)).sub_(d_end)
        dc[..., -1:, :] += d_end.sum(-2, keepdim=True) + decay * d_decay
        dq, dk = dq.sum_to_size(q.shape), dk.sum_to_size(k.shape)
        return _flat_add(dq, d_product, k), _flat_add(dk, d_product.mT, q), dc


def _added_product(y, w, x):
    """y + w @ x."""
    return torch.baddbmm(y.flatten(0, 2), w.flatten(0, 2), x.flatten(0, 2)).view_as(y)


def _flat_add(y, w, x):
    """y + w @ x, in place."""
    return y.flatten(0, 2).baddbmm_(w.flatten(0, 2), x.flatten(0, 2)).view_as(y)


class _ChannelWeights(torch.autograd.Function):
    """_weights with a decay per channel. q, k, log_decay (M, C, Dk).

    The plain form, in plain_chunked, makes a tensor (M, C, C, Dk) of exp(c_i - c_j). This one makes matrix products,
    and no decay overflows, because each factor is at most 1. It begins with blocks of one token, whose weight is q k.
    Two neighbouring blocks of s tokens make one block of 2s: its lower left quarter is the product of the right block's
    q, decayed from that block's start, and the left block's k, decayed to that block's end. Then the right block's q is
    decayed by the whole left block, and the left block's k by the whole right one. A row never meets a later token.
    (A pivot, exp(c_i - p) exp(p - c_j), needs fewer products, but overflows.)
    """

    @staticmethod
    def forward(ctx, q, k, log_decay):
        a, decay = _flush(log_decay.exp()), _flush(log_decay.sum(1, keepdim=True).exp())
        ctx.save_for_backward(q, k, a, decay)
        q_from_start, k_to_end, inside = q * a, k.clone(), torch.diag_embed((q * k).sum(-1))
        for s, right, left in _doubled(q_from_start, k_to_end, a):
            _lower_left(inside, s).copy_((right @ left.mT).view(len(q), -1, s, s))
        return inside, q_from_start, k_to_end, decay

    @staticmethod
    @first_derivative_only
    @without_autocast
    def backward(ctx, d_inside, dq, dk, d_decay):
        q, k, a, decay = ctx.saved_tensors
        # the doubling of the forward, with the decays alone: the gradient of a block's q is decayed as its q was
        from_start, to_end, sum_q, sum_k = a.clone(), torch.ones_like(k), torch.zeros_like(q), torch.zeros_like(k)
        for s, right_decay, left_decay in _doubled(from_start, to_end, a):
            (_, right), (left, _), (_, d_right), (d_left, _) = (_halves(x, s) for x in (q, k, sum_q, sum_k))
            d = _lower_left(d_inside, s).reshape(-1, s, s)
            d_right.addcmul_(right_decay, _small_product(d, left * left_decay))
            d_left.addcmul_(left_decay, _small_product(d.mT, right * right_decay))
        dk = to_end.mul_(dk)
        d_end = decay * d_decay + (k * dk).sum(1, keepdim=True)
        dq, dk = sum_q.addcmul_(from_start, dq), sum_k.add_(dk)
        # c_i scales q_i by exp(c_i) and k_i by exp(-c_i); a log-decay is in the c of its token and of all later ones
        ones = torch.ones(a.shape[1], a.shape[1], dtype=a.dtype, device=a.device).triu()
        d_log_decay = torch.baddbmm(d_end, ones.expand(len(a), -1, -1), (q * dq).addcmul_(k, dk, value=-1))
        diagonal = d_inside.diagonal(dim1=1, dim2=2)[..., None]  # no decay acts on it: it is not in d_log_decay
        return dq.addcmul_(diagonal, k), dk.addcmul_(diagonal, q), d_log_decay


def _doubled(q, k, decay):
    """Yields, for s = 1, 2, ..., C/2: s, q of the right blocks and k of the left blocks, which are views.

    Then it decays the right block's q to the start of the pair and the left block's k to its end, in place.
    """
    s, C = 1, q.shape[1]
    while s < C:
        left_decay, right_decay = _halves(decay, 1)
        (_, right), (left, _) = _halves(q, s), _halves(k, s)
        yield s, right, left
        right *= left_decay
        left *= right_decay
        decay = _flush(left_decay * right_decay)
        s *= 2


def _halves(x, s):
    """The left and the right blocks of s tokens, as views: (M, C, D) -> two (M C / 2s, s, D)."""
    return x.view(-1, 2, s, x.shape[-1]).unbind(1)


def _lower_left(x, s):
    """The lower left quarters of the blocks of 2s on the diagonal, as a view: (M, C, C) -> (M, C / 2s, s, s)."""
    blocks = x.view(len(x), -1, 2 * s, x.shape[-1] // (2 * s), 2 * s).diagonal(dim1=1, dim2=3)
    return blocks.permute(0, 3, 1, 2)[:, :, s:, :s]


def _small_product(w, x):
    """w @ x. A small w is taken column by column: a batched product of tiny matrices is slow on a CPU."""
    if w.shape[-1] > 2 and x[0].numel() > 64:
        return w @ x
    y = w[:, :, :1] * x[:, :1]
    for j in range(1, w.shape[-1]):
        y.addcmul_(w[:, :, j : j + 1], x[:, j : j + 1])
    return y


def _flush(decay):
    """Replaces decays too small to be seen by zero: products of them would be denormal numbers, which are slow."""
    return F.threshold(decay, torch.finfo(decay.dtype).eps ** 2, 0.0)


class _Inverse(torch.autograd.Function):
    """(I + L)^-1 of a strictly lower triangular L (..., C, C).

    The plain form is torch.linalg.solve_triangular, which took 18 ms on two threads (results/bench/README.md), and
    whose gradient solves once more, where this one takes two products.
    """

    @staticmethod
    def forward(ctx, L):
        # inverted blocks of s give inverted blocks of 2s; a series of powers of L needs fewer products, but cancels
        inverse, s = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L).contiguous(), 1
        flat, L = inverse.view(-1, *L.shape[-2:]), L.reshape(-1, *L.shape[-2:])
        while s < L.shape[-1]:
            blocks = flat.view(len(flat), -1, s, L.shape[-1] // s, s).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
            left, right = blocks.unflatten(1, (-1, 2)).unbind(2)  # (M, C / 2s, s, s)
            _lower_left(flat, s).copy_(-(right @ _lower_left(L, s) @ left))
            s *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @without_autocast
    def backward(ctx, d_inverse):
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ d_inverse @ inverse.mT)
