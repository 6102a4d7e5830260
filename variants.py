"""Rivals of softmax attention and of the gate, and mixers beyond those of model.py, each a class.

Nobody has to open this file: import it, and `attention` takes the names of MIXERS at its end.

    import variants
    model = GPT(GPTConfig(attention="fox", vocab_size=256))

A name may stand in a pattern, as in attention="fox,fox,gla".
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import model
from base.configurator import UserError
from gate import ZeroLinear
from mixer import Mixer, Projection
from model import KDA, GatedDeltaNet, Softmax
from ops import layers
from ops.fast import at_least_float32, product
from ops.layers import FusedLinear, RMSNorm, make_conv

# --------------------------------------------------------------------------------------------------
# Softmax's rivals


class WrittenOut(Softmax):
    """Attention whose readout is computed by the (T, T) weights, as a subclass defines `weights`:
    torch's kernels have no other than softmax's."""

    is_written_out = True

    def attend(self, q, k, v, mask, p):
        weights = self.weights(q, k, mask, p)
        return weights.to(v.dtype) @ layers.for_all_heads(v, q.shape[1])


class FoX(WrittenOut):
    """The Forgetting Transformer (Lin et al. 2025): a score gets the sum of log f from behind the
    key up to the query, with f = sigmoid(W x + b) for each head and token.

    log f is the projection's log_decay (B, T, H). In decoding it is (B, M + T, H): the state keeps
    that of the last M tokens, in order, as many as the cache holds; `mask` takes the last S.
    """

    def __init__(self, config, gate):
        super().__init__(config, gate)
        self.forget = nn.Linear(config.n_embd, config.n_head)

    def project(self, x, state, start, document=None):
        log_decay = F.logsigmoid(at_least_float32(self.forget(x)))  # (B, T, H)
        if state is not None:
            log_decay = torch.cat([state["log_decay"], log_decay], dim=1)
            # a view would keep all of it alive
            state["log_decay"] = log_decay[:, x.shape[1] :].clone()
        return super().project(x, state, start, document).replace(log_decay=log_decay)

    def mask(self, i, j, window, p):
        """What is added to the scores: float (B, H, T, S)."""
        total = p.log_decay[:, -len(j) :].cumsum(1).transpose(1, 2)  # (B, H, S)
        # from behind the key up to the query
        between = total[..., -len(i) :, None] - total[..., None, :]
        mask = super().mask(i, j, window, p)
        return between.masked_fill(~mask, -torch.inf) if self.bias is None else between + mask

    def state_shapes(self, B, length):
        decays = {"log_decay": (B, min(self.cache_size, length), self.n_head)}
        return decays | super().state_shapes(B, length)


class Softpick(WrittenOut):
    """Weights relu(e^x - 1) / sum |e^x - 1| (Zuhri et al. 2025), which may all be zero."""

    def weights(self, q, k, mask, p):
        return softpick(layers.scores(q, k, mask))


def softpick(scores: Tensor) -> Tensor:
    """relu(e^x - 1) / sum |e^x - 1| over the last axis, where a score x of -inf counts as 0.

    Above and below are multiplied by e^-m, so that nothing overflows; m is the largest score, or 0.
    """
    m = scores.detach().amax(-1, keepdim=True).clamp(min=0)
    y = ((scores - m).exp() - (-m).exp()).masked_fill(scores == -torch.inf, 0.0)
    return y.relu() / (y.abs().sum(-1, keepdim=True) + 1e-8)


class SoftCapped(WrittenOut):
    """Scores become c tanh(score / c), with c = 50, as in Gemma 2; a subclass may have another."""

    cap = 50.0

    def weights(self, q, k, mask, p):
        scores = layers.scores(q, k, None)
        capped = self.cap * torch.tanh(scores / self.cap)
        return layers.masked(capped, mask).softmax(-1)


class XSA(Softmax):
    """Exclusive Self Attention (Zhai 2026, arXiv 2603.09078): each head's readout o of a token loses
    its part along the token's own value v: o - (o . u) u, where u = v / max(|v|, 1e-12).

    The first token of a text reads its own value alone, and so nothing.
    """

    has_positive_weights = False  # a value's weight in its own token's readout may be negative

    def attend(self, q, k, v, mask, p):
        o = at_least_float32(super().attend(q, k, v, mask, p))  # (B, H, T, D)
        own = at_least_float32(p.v.transpose(1, 2))  # (B, Hk, T, D)
        unit = F.normalize(own, dim=-1, eps=1e-12)
        unit = layers.for_all_heads(unit, self.n_head)
        return (o - (o * unit).sum(-1, keepdim=True) * unit).to(v.dtype)

    def explicit_weights(self, p):
        weights = super().explicit_weights(p)  # (B, H, T, T)
        v = at_least_float32(layers.for_all_heads(p.v.transpose(1, 2), self.n_head))  # (B, H, T, D)
        with torch.autocast(v.device.type, enabled=False):  # it would round o
            o = weights @ v
        own = (o * v).sum(-1) / v.norm(dim=-1).clamp(min=1e-12).square()  # (B, H, T)
        return weights - own.diag_embed()


class ZeroSink(Softmax):
    """Softmax "off by one" (Miller 2023): a logit of 0 beside the scores, with a value of zero.

    Subclasses have another logit, `sink_logit`. The weights of the keys then sum to
    sigmoid(log_sum - logit), where log_sum is the logarithm of the sum of the scores'
    exponentials: a headwise gate, which a readout_norm would cancel.
    """

    def sink_logit(self, x):
        """x (B, T, C) -> the sink's logit for each query (B, T, H)."""
        return x.new_zeros(*x.shape[:2], self.n_head)

    def project(self, x, state, start, document=None):
        return super().project(x, state, start, document).replace(sink=self.sink_logit(x))

    def attend(self, q, k, v, mask, p):
        """torch's kernels read a first key, whose value is zero. In one more channel it has a 1, the
        other keys a 0, and a query the logit times sqrt(D). Kernels want v as wide."""
        T, D = q.shape[2:]
        score = p.sink.mT[..., None] / D**-0.5
        q = torch.cat([q, score.to(q.dtype)], dim=-1)  # (B, H, T, D + 1)
        if mask is None and T > 1:
            # a text is read causally: a query of zeros keeps every query level with its own key
            q = F.pad(q, (0, 0, 1, 0))
        k, v = (F.pad(x, (0, 1, 1, 0)) for x in (k, v))  # (B, Hk, 1 + S, D + 1)
        k[:, :, 0, -1] = 1.0
        if mask is not None:
            mask = F.pad(mask, (1, 0), value=mask.dtype == torch.bool)  # true, or 0.0
        o = layers.attention(q, k, v, mask, D**-0.5)
        return o[:, :, -T:, :D]

    def weights(self, q, k, mask, p):
        """The weights of the keys. The sink's, which writes nothing, is left out."""
        scores = layers.scores(q, k, mask)
        scores = torch.cat([scores, p.sink.mT[..., None].to(scores.dtype)], dim=-1)
        return scores.softmax(-1)[..., :-1]


class HeadSink(ZeroSink):
    """The sink's logit is a trained number for each head, as in gpt-oss (2025)."""

    def __init__(self, config, gate):
        super().__init__(config, gate)
        self.sink = SinkLogit(config.n_head)

    def sink_logit(self, x):
        return self.sink.logit.expand(*x.shape[:2], -1)


class SinkLogit(nn.Module):
    def __init__(self, n_head):
        super().__init__()
        self.logit = nn.Parameter(torch.empty(n_head))

    def init_parameter(self, name, start, generator):
        start.normal_(0.0, 0.02, generator=generator)  # as in gpt-oss


class TokenSink(ZeroSink):
    """The sink's logit is W x, with x of the query's token, as in Inkling 2."""

    def __init__(self, config, gate):
        super().__init__(config, gate)
        self.sink = nn.ModuleDict({"proj": nn.Linear(config.n_embd, config.n_head, bias=False)})

    def sink_logit(self, x):
        return self.sink["proj"](x)


# --------------------------------------------------------------------------------------------------
# Softmax as published models have it


class Qwen2(Softmax):
    """Softmax with biases on q, k and v, as in Qwen2."""

    qkv_bias = True


class Qwen3Next(Softmax):
    """Softmax with RoPE on a quarter of a head's channels, as in Qwen3-Next and Qwen3.5."""

    rope_fraction = 0.25


class SiLUReadout(Softmax):
    """Softmax whose readout goes through SiLU: the row without parameters of table 3 in Qiu et al.
    (2025)."""

    def normed(self, o):
        return F.silu(super().normed(o))


# --------------------------------------------------------------------------------------------------
# The delta rule's


class KDAOfFla(KDA):
    """KDA as fla has it: with a bias in its native gate, which starts at 0."""

    def __init__(self, config, gate):
        super().__init__(config, gate)
        if "native" in self.gates:
            proj = self.gates["native"].proj
            self.gates["native"].proj = nn.Linear(proj.in_features, proj.out_features)


class GatedDeltaNet2(KDA):
    """Gated DeltaNet-2 (NVIDIA 2026, "Decoupling Erase and Write in Linear Attention"): KDA with a
    beta for each channel of the key that erases and of the value: S_t = (I - k_t (b_t * k_t)^T) a_t
    S_{t-1} + k_t (w_t * v_t)^T."""

    def beta_widths(self, config):
        Hk, H, Dk, Dv = config.head_sizes
        return [Hk * Dk, H * Dv]

    def project(self, x, state, start, document=None):
        p = super().project(x, state, start, document)
        erase, write = p.beta.split([p.k[0, 0].numel(), p.v[0, 0].numel()], dim=-1)
        # (B, T, Hk, Dk) and (B, T, H, Dv), up to beta_max
        erase, write = erase.view_as(p.k), write.view_as(p.v)
        v = (write / self.config.beta_max * p.v).to(p.v.dtype)
        return p.replace(v=v, beta=torch.ones_like(p.beta[..., : self.n_head]), erase=erase * p.k)


class DeltaProduct(GatedDeltaNet):
    """Gated DeltaProduct (Siems et al. 2025): Gated DeltaNet with n = 2 steps of the delta rule a
    token.

    A token is n sub-tokens, each with a k, v and beta of its own. It decays the state at the first
    and reads it at the last, so that the recurrence is that of a text n times as long. n = 1 is
    Gated DeltaNet. fla's layer has beta_max=2. A subclass may have another n_steps.
    """

    n_steps = 2
    is_linear_in_query = True
    reads_packed = True

    def __init__(self, config, gate):
        super().__init__(config, gate)
        self.sub_tokens = self.n_steps
        self.flops_per_entry *= self.n_steps

    def project(self, x, state, start, document=None):
        p = super().project(x, state, start, document)
        n = self.sub_tokens
        # (B, n T, heads, ...)
        k, v, beta = (y.unflatten(2, (n, -1)).flatten(1, 2) for y in (p.k, p.v, p.beta))
        # zeros before the last sub-token
        q = F.pad(p.q[:, :, None], (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)
        # zeros behind the first
        log_decay = F.pad(p.log_decay[:, :, None], (0, 0, 0, n - 1)).flatten(1, 2)
        return Projection(q, k, v, log_decay, beta)

    def gated(self, position, y, x):
        """A gate on q, k or v is the same for all sub-tokens of a token."""
        if position in self.gates and position in ("query", "key", "value"):
            x = x.repeat_interleave(self.sub_tokens, dim=1)
        return super().gated(position, y, x)

    def read(self, p, state, start):
        # (B, T, H, Dv)
        return super().read(p, state, start)[:, self.sub_tokens - 1 :: self.sub_tokens]


# --------------------------------------------------------------------------------------------------
# State space models


class NormOfHalves(RMSNorm):
    """RMSNorm of each half of the channels, with a mean of its own."""

    def forward(self, x):
        halves = x.unflatten(-1, (2, -1))
        normed = F.rms_norm(halves, halves.shape[-1:], eps=self.eps)
        return normed.flatten(-2) * self.weight


class Mamba3(Mixer):
    """Mamba-3 (Lahoti et al. 2026) in its SISO form: a token is written twice, at once with its own
    r dt, and with the next token, with that one's (1 - r) dt.

        S_t = a_t (S_{t-1} + (1 - r_t) dt_t k_{t-1} v_{t-1}^T) + r_t dt_t k_t v_t^T,    a_t = exp(-A_t dt_t)

    All heads share k and q (B and C there), but for a bias and how far pairs are turned: the sum of
    pi tanh(.) dt. The recurrence runs a token late, when both factors of k v^T are known, and
    `read` adds the token's own share.
    """

    native_gate = ("silu", "after norm")
    is_linear_in_query = False  # the term D x has no q
    reads_packed = True

    def __init__(self, config, gate):
        H, D, N = config.expand * config.n_head, config.head_dim, config.state_size
        super().__init__(config, gate, query=(H, N), key=(H, N), value=(H, D))
        self.parts = (H * D + 2 * N, H, H, H, N // 4)  # v k q, dt, A, r, angle
        parts = (H * D, N, N, *self.parts[1:])
        self.in_proj = FusedLinear(config.n_embd, parts, heads=[H])  # of v alone
        self.conv = make_conv(config, self.parts[0])
        self.kq_norm = NormOfHalves(2 * N, eps=config.norm_eps)
        self.kq_bias = nn.Parameter(torch.empty(2 * H * N))
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.D = nn.Parameter(torch.empty(H))

    def init_parameter(self, name, start, generator):
        if name == "kq_bias":
            start.fill_(1.0)
        else:
            super().init_parameter(name, start, generator)

    def project(self, x, state, start, document=None):
        N = self.key_width
        n = self.parts[-1]  # pairs that turn
        vkq, *rates = self.in_proj(x).split(self.parts, dim=-1)
        v, kq = self.conv(vkq, state, document).split([self.parts[0] - 2 * N, 2 * N], dim=-1)
        dt, A, share, angle = (at_least_float32(y) for y in rates)
        v = v.unflatten(-1, (self.n_head, -1))  # (B, T, H, D)
        dt = F.softplus(dt + self.dt_bias)  # (B, T, H)
        share = share.sigmoid()
        turns = dt[..., None] * math.pi * angle.tanh()[:, :, None]  # (B, T, H, n)
        if document is None:
            angle = turns.cumsum(1)
        else:
            angle = document.join([one.cumsum(1) for one in document.split(turns)])
        if state is not None:
            angle = angle + state["angle"][:, None]
            state["angle"] = angle[:, -1].remainder(2 * math.pi)
        kq = self.kq_norm(at_least_float32(kq)).unflatten(-1, (2, 1, N))
        kq = kq + self.kq_bias.view(2, -1, N)  # (B, T, 2, H, N)
        pairs, kept = kq.split([2 * n, N - 2 * n], dim=-1)
        a, b = pairs.unflatten(-1, (n, 2)).unbind(-1)
        cos = angle.cos()[:, :, None]
        sin = angle.sin()[:, :, None]
        pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        k, q = torch.cat([pairs, kept], dim=-1).to(v.dtype).unbind(2)
        # (B, T, H, 2), in the place of beta
        factors = torch.stack([share * dt, (1 - share) * dt], dim=-1)
        log_decay = -F.softplus(A).clamp(min=1e-4) * dt
        return Projection(q, k, v, log_decay, factors, skip=self.D[:, None] * v)

    def late(self, p: Projection, state: dict | None) -> tuple[Projection, Tensor]:
        """What the recurrence computes, with k and v of the token before; the weight of a token's
        own v (B, T, H)."""
        own, rest = p.beta.unbind(-1)
        before = {}
        for name, y in (("k", p.k), ("v", p.v), ("own", own)):
            last = torch.zeros_like(y[:, 0]) if state is None else state[name].to(y.dtype)
            before[name] = torch.cat([last[:, None], y[:, :-1]], dim=1)
            if state is not None:
                state[name] = y[:, -1].clone()  # a view would keep the whole prefill alive
        k = (p.log_decay.exp() * (before["own"] + rest))[..., None] * before["k"]
        if p.document is not None:  # the token before is of another document
            k = k.masked_fill(p.document.first[:, :, None, None], 0.0)
        weight = own * (at_least_float32(p.q) * p.k).sum(-1)
        return p.replace(k=k, v=before["v"], beta=None), weight

    def read(self, p, state, start):
        late, own = self.late(p, state)
        return super().read(late, state, start) + own[..., None] * p.v

    def state_shapes(self, B, length):
        H = self.n_head
        of_last_token = {
            "k": (B, H, self.key_width),
            "v": (B, H, self.value_width),
            "own": (B, H),
            "angle": (B, H, self.parts[-1]),
        }
        return super().state_shapes(B, length) | of_last_token

    def explicit_weights(self, p):
        late, own = self.late(p, None)
        of_others = F.pad(super().explicit_weights(late)[..., 1:], (0, 1))
        return of_others + own.transpose(1, 2).diag_embed()


class Monarch(Mixer):
    """S_t = P^T L(x_t) P R(x_t) S_{t-1} + k_t v_t^T and o_t = q_t^T S_t: a transition that mixes
    the n = 64 rows of S.

    L and R are block diagonal: sqrt(n) = 8 orthogonal blocks of 8 x 8, the Cayley transforms (I +
    A)^-1 (I - A) of skew-symmetric A, which are parameters; x_t enters only by a sigmoid for
    each block, a factor on it. P transposes the rows as an 8 x 8 table (Dao et al. 2022, "Monarch").
    Products of such matrices are not of that form, so there is no cheap chunked form: it runs token
    by token, and block_size may not be above 64.

    The proposal, which is unpublished, has one h_t = P^T L P R h_{t-1} + B x_t. Ours: heads, with
    blocks of their own; head_dim columns h side by side in S, with B x = k v^T; the readout by q,
    and its norm; and the start at blocks near the identity and gates of sigmoid(4), which leave a
    tenth of S after 64 tokens.
    """

    published_norm = "rms"
    is_linear_in_query = True
    reads_packed = True
    longest = 64
    m = 8  # sqrt(n)
    flops_per_entry = 4 * m + 6  # of S: two products with blocks, their sigmoids, written and read

    @classmethod
    def check(cls, name, config):
        super().check(name, config)
        if config.block_size > cls.longest:
            why = "it runs token by token, since products of its transitions have no cheap chunked form"
            raise UserError(
                f"block_size={config.block_size}: {name} takes at most {cls.longest}; {why}"
            )

    def __init__(self, config, gate):
        H, D, m = config.n_head, config.head_dim, self.m
        super().__init__(config, gate, query=(H, m * m), key=(H, m * m), value=(H, D))
        self.split = (H * m * m, H * m * m, H * D)
        self.qkv = FusedLinear(config.n_embd, self.split, heads=[H] * 3)
        self.conv = make_conv(config, sum(self.split))
        self.block_gates = ZeroLinear(config.n_embd, H * 2 * m, bias_start=4.0)
        # flat: a 1-D parameter gets no weight decay
        self.skew = nn.Parameter(torch.empty(2 * H * m**3))

    def init_parameter(self, name, start, generator):
        start.normal_(0.0, 0.02, generator=generator)

    def project(self, x, state, start, document=None):
        qkv = self.conv(self.qkv(x), state, document).split(self.split, dim=-1)
        q, k, v = (y.unflatten(-1, (self.n_head, -1)) for y in qkv)  # (B, T, H, n or D)
        # (B, T, H, 2m): L's, R's
        logits = at_least_float32(self.block_gates(x)).unflatten(-1, (self.n_head, -1))
        return Projection(q * self.key_width**-0.5, k, v, F.logsigmoid(logits))

    def blocks(self) -> Tensor:
        """The blocks of L and of R: (2, H, m, m, m)."""
        A = at_least_float32(self.skew).view(2, self.n_head, self.m, self.m, self.m)
        A = A - A.mT
        one = torch.eye(self.m, dtype=A.dtype, device=A.device)
        return torch.linalg.solve_ex(one + A, one - A)[0]  # solve would wait for a GPU

    def read(self, p, state, start):
        if state is None:
            state = self.init_state(len(p.v), p.v.device, p.v.dtype)
        q = at_least_float32(p.q)[..., None, :]  # (B, T, H, 1, n)
        k = at_least_float32(p.k)[..., None]  # (B, T, H, n, 1)
        v = at_least_float32(p.v)[..., None, :]  # (B, T, H, 1, D)
        S = at_least_float32(state["S"])
        gates = p.log_decay.exp()
        outputs = []
        if p.document is not None:  # the state before a document is forgotten
            gates = gates.masked_fill(p.document.first[:, :, None, None], 0.0)
        gates = gates.unflatten(-1, (2, self.m, 1, 1))  # (B, T, H, 2, m, 1, 1)
        with torch.autocast(v.device.type, enabled=False):
            L, R = self.blocks()
            by_token = [y.unbind(1) for y in (q, k, v, gates)]
            for q_t, k_t, v_t, gate in zip(*by_token, strict=True):
                S = S.unflatten(2, (self.m, self.m))  # (B, H, m, m, D)
                S = (gate[:, :, 1] * product(R, S)).transpose(2, 3)
                S = (gate[:, :, 0] * product(L, S)).transpose(2, 3)
                S = S.flatten(2, 3) + k_t * v_t
                outputs.append(product(q_t, S))  # (B, H, 1, D)
        state["S"] = S
        return torch.cat(outputs, dim=2).transpose(1, 2)


model.MIXERS |= {
    "fox": FoX,
    "softpick": Softpick,
    "softcap": SoftCapped,
    "xsa": XSA,
    "sink_zero": ZeroSink,
    "sink_head": HeadSink,
    "sink_token": TokenSink,
    "qwen2": Qwen2,
    "qwen3_next": Qwen3Next,
    "silu_readout": SiLUReadout,
    "kda_fla": KDAOfFla,
    "gated_deltanet2": GatedDeltaNet2,
    "deltaproduct": DeltaProduct,
    "mamba3": Mamba3,
    "monarch": Monarch,
}
