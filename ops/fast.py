"""Functions whose backward is written by hand, since autograd's is slower on a CPU. To understand a
model, nobody has to read this file: each docstring begins with the definition, and says what the
function gains. With autograd in place of all of them a step takes 6% longer with softmax, 5% with
gla, 3% with cosformer, 25 to 35% with mamba2 and 22 to 26% with gated_deltanet."""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class Function(torch.autograd.Function):
    """Makes a subclass's forward and backward static, and lets the backward run without autocast,
    which would round: a compiled step traces its backward under the autocast of its forward.

    Under torch 2.11 a compiled step gives no gradient to an output that an in-place method, or a
    cast that changes nothing, has returned. A compiled forward therefore returns views.

    It treats saved intermediates as constants, so it refuses a second derivative: a Hessian would
    be silently wrong.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        forward, backward = cls.forward, cls.backward

        def with_new_outputs(ctx, *inputs):
            outputs = forward(ctx, *inputs)
            if not torch.compiler.is_compiling():
                return outputs
            if isinstance(outputs, tuple):
                return tuple(x.view_as(x) for x in outputs)
            return outputs.view_as(outputs)

        def without_autocast(ctx, *gradients):
            with torch.autocast(gradients[0].device.type, enabled=False):
                return backward(ctx, *gradients)

        cls.forward = staticmethod(with_new_outputs)  # type: ignore
        cls.backward = staticmethod(once_differentiable(without_autocast))  # type: ignore

    @classmethod
    def call(cls, *inputs):
        """apply(*inputs), and without its 8 microseconds where no gradient is wanted: a decoded
        token makes some hundred calls."""
        if torch.is_grad_enabled():
            return cls.apply(*inputs)
        return cls.forward(NoContext(), *inputs)


class NoContext:
    """The ctx of a forward that no backward follows: it keeps nothing."""

    def save_for_backward(self, *tensors) -> None:
        pass


class Product(Function):
    """a @ b. In a compiled step under autocast, autograd would compute its gradient in
    bfloat16. 1 to 3% of a step."""

    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return (dy @ b.mT).sum_to_size(a.shape), (a.mT @ dy).sum_to_size(b.shape)


product = Product.call


class PlainWeights(Function):
    """(q @ k.mT).tril(), q, k: recurrence.weights without a decay. The gradients of q and k add up
    inside a product: 4% of a step."""

    def forward(ctx, q, k):
        ctx.save_for_backward(q, k)
        return (q @ k.mT).tril_(), q, k

    def backward(ctx, d_inside, dq, dk):
        q, k = ctx.saved_tensors
        d_product = d_inside.tril()
        return _add_product(dq.clone(), d_product, k), _add_product(dk.clone(), d_product.mT, q)


class HeadWeights(Function):
    """recurrence.weights with a decay per head. q, k (B, H or 1, N, C, Dk), c (B, H or 1, N, C, 1).
    begun: None, or how many documents have begun in the chunk, (B, 1, N, C, 1). Most of the gain of
    mamba2."""

    def forward(ctx, q, k, c, begun=None):
        end = c[..., -1:, :]
        from_start, to_end, decay = c.exp(), (end - c).exp(), end.exp()
        # exp overflows above the diagonal, where it is replaced: this is never differentiated
        between = (c - c.mT).exp_().tril_()
        if begun is not None:  # a decay of zero lies between two tokens of two documents
            last = begun[..., -1:, :]
            between.mul_((begun == begun.mT).to(c.dtype))
            from_start.mul_(begun == 0)
            to_end.mul_(begun == last)
            decay.mul_(last == 0)
        inside = (q @ k.mT) * between
        ctx.save_for_backward(q, k, from_start, to_end, decay, between, inside)
        return inside, q * from_start, k * to_end, decay

    def backward(ctx, d_inside, dq, dk, d_decay):
        q, k, from_start, to_end, decay, between, inside = ctx.saved_tensors
        d_product = (d_inside * between).sum_to_size(*q.shape[:-1], q.shape[-2])
        dq, dk = dq * from_start, dk * to_end
        dc = None
        if ctx.needs_input_grad[2]:  # not if packed documents are all that decays
            d_exponent = d_inside * inside  # of c_i - c_j
            d_end = (dk * k).sum(-1, keepdim=True)  # of c_C - c
            dc = (d_exponent.sum(-1) - d_exponent.sum(-2))[..., None]
            dc.add_((dq * q).sum(-1, keepdim=True)).sub_(d_end)
            dc[..., -1:, :] += d_end.sum(-2, keepdim=True) + decay * d_decay
        dq, dk = dq.sum_to_size(q.shape), dk.sum_to_size(k.shape)
        return _add_product(dq, d_product, k), _add_product(dk, d_product.mT, q), dc, None


def _add_product(y, w, x):
    """y + w @ x, written to y."""
    return y.flatten(0, 2).baddbmm_(w.flatten(0, 2), x.flatten(0, 2)).view_as(y)


class ChannelWeights(Function):
    """recurrence.weights with a decay per channel. q, k, log_decay (M, C, Dk).

    Matrix products of factors of at most 1, so that nothing overflows. It begins with blocks of one
    token, whose weight is q k. Two neighbouring blocks of s tokens make one of 2s, whose lower left
    quarter is the product of the right block's q, decayed from that block's start, and the left
    block's k, decayed to that block's end. Then the right block's q is decayed by the whole left
    block, and the left block's k by the whole right one.
    """

    def forward(ctx, q, k, log_decay):
        a = _flush(log_decay.exp())
        decay = _flush(log_decay.sum(1, keepdim=True).exp())
        ctx.save_for_backward(q, k, a, decay)
        q_from_start = q * a
        k_to_end = k.clone()
        inside = torch.diag_embed((q * k).sum(-1))
        for s, right, left in _doubled(q_from_start, k_to_end, a):
            _lower_left(inside, s).copy_((right @ left.mT).view(len(q), -1, s, s))
        return inside, q_from_start, k_to_end, decay

    def backward(ctx, d_inside, dq, dk, d_decay):
        q, k, a, decay = ctx.saved_tensors
        # the doubling of the forward, with the decays alone: the gradient of a block's q is decayed
        # as its q was
        from_start = a.clone()
        to_end = torch.ones_like(k)
        sum_q = torch.zeros_like(q)
        sum_k = torch.zeros_like(k)
        for s, right_decay, left_decay in _doubled(from_start, to_end, a):
            right = _halves(q, s)[1]
            left = _halves(k, s)[0]
            d_right = _halves(sum_q, s)[1]
            d_left = _halves(sum_k, s)[0]
            d = _lower_left(d_inside, s).reshape(-1, s, s)
            d_right.addcmul_(right_decay, _small_product(d, left * left_decay))
            d_left.addcmul_(left_decay, _small_product(d.mT, right * right_decay))
        dk = to_end.mul_(dk)
        d_end = decay * d_decay + (k * dk).sum(1, keepdim=True)
        dq, dk = sum_q.addcmul_(from_start, dq), sum_k.add_(dk)
        # c_i scales q_i by exp(c_i) and k_i by exp(-c_i); a log-decay is in the c of its token and
        # of all later ones
        ones = torch.ones(a.shape[1], a.shape[1], dtype=a.dtype, device=a.device).triu()
        d_log_decay = torch.baddbmm(
            d_end, ones.expand(len(a), -1, -1), (q * dq).addcmul_(k, dk, value=-1)
        )
        # no decay acts on it: it is not in d_log_decay
        diagonal = d_inside.diagonal(dim1=1, dim2=2)[..., None]
        return dq.addcmul_(diagonal, k), dk.addcmul_(diagonal, q), d_log_decay


def _doubled(q, k, decay):
    """Yields, for s = 1, 2, ..., C/2: s, q of the right and k of the left blocks, views that it
    then decays in place, the right block's q to the start of the pair and the left block's k to its
    end."""
    s = 1
    while s < q.shape[1]:
        left_decay, right_decay = _halves(decay, 1)
        right = _halves(q, s)[1]
        left = _halves(k, s)[0]
        yield s, right, left
        right *= left_decay
        left *= right_decay
        decay = _flush(left_decay * right_decay)
        s *= 2


def _halves(x, s):
    """The left and the right blocks of s tokens, as views: (M, C, D) -> two (M C / 2s, s, D)."""
    return x.view(-1, 2, s, x.shape[-1]).unbind(1)


def _blocks(x, s):
    """The blocks of s on the diagonal, as a view: (M, C, C) -> (M, C / s, s, s)."""
    return x.view(len(x), -1, s, x.shape[-1] // s, s).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _lower_left(x, s):
    """The lower left quarters of the blocks of 2s on the diagonal, as a view: (M, C, C) -> (M, C /
    2s, s, s)."""
    return _blocks(x, 2 * s)[:, :, s:, :s]


def _small_product(w, x):
    """w @ x. A small w is taken column by column: a batched product of tiny matrices is slow on a
    CPU."""
    if w.shape[-1] > 2 and x[0].numel() > 64:
        return w @ x
    y = w[:, :, :1] * x[:, :1]
    for j in range(1, w.shape[-1]):
        y.addcmul_(w[:, :, j : j + 1], x[:, j : j + 1])
    return y


def _flush(decay):
    """Replaces decays too small to be seen by zero: products of them would be denormal numbers,
    which are slow."""
    return F.threshold(decay, torch.finfo(decay.dtype).eps ** 2, 0.0)


class Inverse(Function):
    """(I + L)^-1 of a strictly lower triangular L (..., C, C), which
    torch.linalg.solve_triangular(I + L, I) computes slowly. With Chunks the delta rule takes 55 ms instead of 112, at
    1,024 tokens (results/bench/README.md)."""

    def forward(ctx, L):
        # inverted blocks of s give inverted blocks of 2s; a series of powers of L needs fewer
        # products, but cancels
        C = L.shape[-1]
        inverse = torch.eye(C, dtype=L.dtype, device=L.device).expand_as(L).contiguous()
        flat = inverse.view(-1, C, C)
        L = L.reshape(-1, C, C)
        s = 1
        while s < C:
            left, right = _blocks(flat, s).unflatten(1, (-1, 2)).unbind(2)  # (M, C / 2s, s, s)
            _lower_left(flat, s).copy_(-(right @ _lower_left(L, s) @ left))
            s *= 2
        ctx.save_for_backward(inverse)
        return inverse

    def backward(ctx, d_inverse):
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ d_inverse @ inverse.mT)


class Chunks(Function):
    """The loop over N chunks, given the weights inside them. q is decayed from the chunk's start
    and k to its end:

        v := v - w S (only for the delta rule);   o = inside v + q S;   S := a S + k^T v

    inside (B*H*N, C, C), q, k, w (B*H*N, C, Dk), v (B*H*N, C, Dv), decay a (B*H*N, 1 or Dk, 1), S
    (B, H, Dk, Dv). The gradient G of S follows the same recurrence backwards, G := a G + q^T do -
    w^T dv. With ChannelWeights a decay per channel takes 37 ms instead of 52, at 1,024 tokens.
    """

    def forward(ctx, inside, q, k, v, w, decay, S):
        shape = S.shape
        S = S.flatten(0, 1)
        states = []
        values = []
        kv = k.mT @ v if w is None else None
        # a chunk costs a few small operations: waking a second thread would cost more than it saves
        for k_n, v_n, new, w_n, a in _by_chunk(len(S), k.mT, v, kv, w, decay):
            states.append(S)
            if w is not None:
                values.append(torch.baddbmm(v_n, w_n, S, alpha=-1))
                new = k_n @ values[-1]
            S = new.addcmul_(a, S)
        states = _joined(states)
        if w is not None:
            v = _joined(values)
        ctx.save_for_backward(inside, q, k, v, w, decay, states)
        # a view would keep all states alive
        return (inside @ v).baddbmm_(q, states), S.clone().view(shape)

    def backward(ctx, do, G):
        inside, q, k, v, w, decay, states = ctx.saved_tensors
        shape = G.shape
        G = G.flatten(0, 1)
        dv = inside.mT @ do
        d_states = []  # G after each chunk
        d_values = []
        w_T = None if w is None else w.mT
        chunks = _by_chunk(len(G), q.mT @ do, dv, k, w_T, decay)
        for new, dv_n, k_n, w_n, a in reversed(chunks):
            d_states.append(G)
            if w is not None:
                d_values.append(torch.baddbmm(dv_n, k_n, G))
                new = torch.baddbmm(new, w_n, d_values[-1], alpha=-1)
            G = new.addcmul_(a, G)
        d_states = _joined(d_states[::-1])
        if w is None:
            dv = dv.baddbmm_(k, d_states)
            dw = None
        else:
            dv = _joined(d_values[::-1])
            dw = (dv @ states.mT).neg_()
        d_decay = None
        if ctx.needs_input_grad[5]:
            d_decay = (d_states * states).sum(-1, keepdim=True).sum_to_size(decay.shape)
        return do @ v.mT, do @ states.mT, v @ d_states.mT, dv, dw, d_decay, G.view(shape)


def _joined(chunks):
    """Joins N tensors (B*H, ...) to one (B*H*N, ...)."""
    return torch.stack(chunks, 1).flatten(0, 1)


def _by_chunk(heads, *tensors):
    """Splits tensors (B*H*N, ...), the first of which is not None, into N tuples, one per chunk;
    None stays None."""
    n_chunks = len(tensors[0]) // heads
    views = []
    for x in tensors:
        if x is None:
            views.append([None] * n_chunks)
        else:
            views.append(x.view(heads, n_chunks, *x.shape[-2:]).unbind(1))
    return list(zip(*views, strict=True))


class Norm(Function):
    """layers.RMSNorm: x / sqrt(mean(x^2) + eps) * weight, over the last axis: 1.4 ms instead of 3.8
    (results/bench/README.md)."""

    def forward(ctx, x, weight, eps):
        square_sum = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        r = square_sum.div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * r
        ctx.save_for_backward(normed, weight, r)
        return normed * weight

    def backward(ctx, dy):
        normed, weight, r = ctx.saved_tensors
        d_weight = dy * normed  # for each token; the sum over tokens is taken below
        # the part along x, which the norm cancels
        along = (d_weight @ weight)[..., None].div_(-normed.shape[-1])
        dx = (dy * weight).addcmul_(normed, along).mul_(r)
        return dx, d_weight.flatten(0, -2).sum(0), None


class L2Norm(Function):
    """layers.l2_norm: x / sqrt(sum(x^2) + 1e-6), over the last axis. Up to 1.5% of a step."""

    def forward(ctx, x):
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(1e-6).rsqrt_()
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    def backward(ctx, dy):
        y, r = ctx.saved_tensors
        along = (dy * y).sum(-1, keepdim=True)  # the part along x, which the norm cancels
        return dy.addcmul(y, along, value=-1).mul_(r)


class Convolution(Function):
    """layers.ShortConv: sum_i weight_i x_{t+i} + bias of x (B, W - 1 + T, C), weight (W, C), bias
    (C,) or None. A part of the gain of mamba2 and gated_deltanet.

    crossings: None, or the tokens (rows, places) at which each weight_i would read another
    document. They are few: what y held there is saved, and put back after the sum.
    """

    def forward(ctx, x, weight, bias, crossings=None):
        ctx.save_for_backward(x, weight)
        ctx.crossings = crossings
        T = x.shape[1] - len(weight) + 1
        fine = x.to(torch.promote_types(x.dtype, weight.dtype))
        # W shifted products give the same bits whatever T is; conv1d does not
        y = fine[:, :T] * weight[0]
        if crossings is not None:
            y[crossings[0]] = 0.0
        for i in range(1, len(weight)):
            _add_tap(y, fine[:, i : i + T], weight[i], crossings, i)
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        T = dy.shape[1]
        fine = x.to(torch.promote_types(x.dtype, weight.dtype))
        dy = dy.to(fine.dtype)
        dx = torch.zeros_like(fine)
        dw = torch.empty_like(weight)
        for i in range(len(weight)):
            _add_tap(dx[:, i : i + T], dy, weight[i], ctx.crossings, i)
            of_tokens = dy * fine[:, i : i + T]
            if ctx.crossings is not None:
                of_tokens[ctx.crossings[i]] = 0.0
            dw[i] = of_tokens.sum((0, 1))
        d_bias = dy.sum((0, 1)).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return dx.to(x.dtype), dw, d_bias, None


def _add_tap(y, x, weight, crossings, i):
    """y += x weight, but at the tokens crossings[i]."""
    if crossings is None:
        y.addcmul_(x, weight)
        return
    kept = y[crossings[i]]
    y.addcmul_(x, weight)
    y[crossings[i]] = kept


class Rotation(Function):
    """layers.rotate: pairs of channels (i, i + D/2) turn by angles whose cos and sin are (T, 1,
    D/2), or (B, T, 1, D/2). Autograd's backward rounds otherwise, and trained models would have other bits."""

    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        if torch.compiler.is_compiling():
            # halves that are written apart would be one kernel with a condition for each number,
            # which took three times as long
            halves = x.unflatten(-1, (2, -1))  # (B, T, H, 2, D/2)
            sines = torch.stack([-sin, sin], dim=-2)
            y = (halves * cos[..., None, :]).addcmul(halves.flip(-2), sines)
            return y.flatten(-2)
        y = x * torch.cat([cos, cos], -1)
        left, right = x.chunk(2, dim=-1)
        y_left, y_right = y.chunk(2, dim=-1)
        y_left.addcmul_(right, sin, value=-1)
        y_right.addcmul_(left, sin)
        return y

    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return Rotation.call(dy, cos, -sin), None, None


class CosSinFeatures(Function):
    """[x cos, x sin]: two of these have the product x . y cos(a - b). x (B, T, H, D) -> (B, T, H,
    2D). No faster than autograd, whose gradients have other last bits."""

    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return torch.cat([x * cos, x * sin], dim=-1)

    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        d_cos, d_sin = dy.chunk(2, dim=-1)
        return (d_cos * cos).addcmul_(d_sin, sin), None, None


ATTENTION_KEYS = 256  # keys of a block in the backward of softmax attention


class CausalAttention(Function):
    """layers.attention of q, k, v (B, H, T, D): torch's kernel for CPUs, with a backward in blocks
    of keys.

    The kernel's own took twice as long in bfloat16 at 256 tokens (results/bench/README.md); in
    float32 it is as fast. Each block takes the weights anew from the scores, so that no more is
    saved than by the kernel.

    document: None, or where the documents of packed rows begin, each of which is read alone
    (ops/documents.py). Forward they are rows of their own; backward the weights between them are
    set to zero, where calls for each length took 8% of a step.
    """

    def forward(ctx, q, k, v, scale=None, document=None):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        # log_sums (B, H, T): logarithm of the sum of a query's exponentials
        if document is None:
            o, log_sums = kernel(q, k, v, is_causal=True, scale=scale)
        else:
            # for each length (documents, length, H, D)
            alone = [document.split(x.transpose(1, 2)) for x in (q, k, v)]
            outputs = []
            sums = []
            for of_length in zip(*alone, strict=True):
                rows = [x.transpose(1, 2) for x in of_length]
                o, log_sums = kernel(*rows, is_causal=True, scale=scale)
                outputs.append(o.transpose(1, 2))
                sums.append(log_sums.transpose(1, 2))
            o = document.join(outputs).transpose(1, 2)
            log_sums = document.join(sums).transpose(1, 2)
        ctx.document = document
        ctx.scale = scale or q.shape[-1] ** -0.5
        ctx.save_for_backward(q, k, v, o, log_sums)
        return o

    def backward(ctx, do):
        q, k, v, o, log_sums = ctx.saved_tensors
        shape = q.shape
        T = shape[2]
        scale = ctx.scale
        spans = [] if ctx.document is None else ctx.document.spans()
        # the part that the softmax cancels
        along = (do * o).sum(-1, keepdim=True, dtype=log_sums.dtype)
        # with two more columns, a product subtracts a number per query before it is rounded
        q = _with_columns(q, log_sums[..., None] / scale)
        do = _with_columns(do, along)
        k, v = (F.pad(x, (0, 2), value=-1.0).flatten(0, 1) for x in (k, v))  # (B H, T, D + 2)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        no_input = k.new_zeros(())
        for start in range(0, T, ATTENTION_KEYS):
            # no earlier query sees these keys
            keys = slice(start, start + ATTENTION_KEYS)
            queries = slice(start, T)
            scores = torch.baddbmm(no_input, q[:, queries], k[:, keys].mT, beta=0, alpha=scale)
            weights = scores.exp_().tril_()
            for row, begin, end in spans:  # no query behind a document sees its keys
                of_row = weights[row * shape[1] : (row + 1) * shape[1]]
                begin, end = max(0, begin - start), max(0, end - start)
                of_row[:, end:, begin:end] = 0.0
            d_scores = torch.bmm(do[:, queries], v[:, keys].mT).mul_(weights)
            if start == 0:
                dq = at_least_float32(d_scores @ k[:, keys])
            else:
                dq[:, queries] += d_scores @ k[:, keys]
            dk[:, keys] = d_scores.mT @ q[:, queries]
            dv[:, keys] = weights.mT @ do[:, queries]
        gradients = (dq.mul_(scale), dk.mul_(scale), dv)
        dq, dk, dv = (x[..., :-2].to(q.dtype).view(shape) for x in gradients)
        return dq, dk, dv, None, None


def _with_columns(x, number):
    """x (B, H, T, D) and (B, H, T, 1), whose digits take two columns of x's dtype -> (B H, T, D +
    2)."""
    high = number.to(x.dtype)
    return torch.cat([x, high, (number - high).to(x.dtype)], -1).flatten(0, 1)
