"""Mixers beyond those of model.py, whose table MIXERS names them all. They need only what every mixer has."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import UserError
from gate import ZeroLinear
from keys import GPTConfig
from mixer import Mixer, Projection
from ops import layers
from ops.fast import Product, at_least_float32
from ops.layers import RMSNorm, make_conv


class Mamba3(Mixer):
    """Mamba-3 (Lahoti et al. 2026) in its SISO form, with the share r, the step dt and A of each token and head:

        S_t = a_t (S_{t-1} + (1 - r_t) dt_t k_{t-1} v_{t-1}^T) + r_t dt_t k_t v_t^T,    a_t = exp(-A_t dt_t)

    q and k (C and B there) are normed, have a bias, and are turned by an angle that sums pi tanh(.) dt over the tokens.
    A group of heads shares q and k before the bias. The recurrence runs one token late: at t it takes up k_{t-1}
    v_{t-1}^T, when both its factors are known, and `read` adds the share of the token itself.
    """

    native_gate = ("silu", "after norm")
    linear_in = ("value",)  # the term D x has neither q nor k

    @classmethod
    def check(cls, name: str, config: GPTConfig) -> None:
        super().check(name, config)
        if config.state_size < 4:
            raise UserError(f"state_size={config.state_size}: {name} turns a quarter in pairs, and needs 4 or more")
        if config.expand * config.n_head % config.n_groups:
            raise UserError(f"n_groups={config.n_groups}: must divide {name}'s {config.expand * config.n_head} heads")

    def __init__(self, config, gate):
        H, D = config.expand * config.n_head, config.head_dim
        G, N = config.n_groups, config.state_size
        super().__init__(config, gate, query=(H, N), key=(H, N), value=(H, D))
        self.split, self.rates = (H * D, G * N, G * N), (H, H, H, N // 4)  # v k q, and dt A r angle
        self.in_proj = nn.Linear(config.n_embd, sum(self.split + self.rates), bias=False)
        self.conv = make_conv(config, sum(self.split))
        self.q_norm, self.k_norm = (RMSNorm(N, eps=config.norm_eps) for _ in range(2))
        self.q_bias, self.k_bias = (nn.Parameter(torch.empty(H * N)) for _ in range(2))  # flat: no weight decay
        self.dt_bias, self.D = (nn.Parameter(torch.empty(H)) for _ in range(2))

    def init_parameter(self, name: str, start: torch.Tensor, generator: torch.Generator) -> None:
        if name == "dt_bias":
            layers.init_decay(name, start, generator, A_range=(1.0, 1.0))
        else:
            start.fill_(1.0)

    def project(self, x: torch.Tensor, state: dict | None, start: int) -> Projection:
        vkq, rates = self.in_proj(x).split([sum(self.split), sum(self.rates)], dim=-1)
        v, k, q = self.conv(vkq, state).split(self.split, dim=-1)
        v = v.unflatten(-1, (-1, self.value_width))  # (B, T, H, D)
        dt, A, share, angle = at_least_float32(rates).split(self.rates, dim=-1)
        dt, share = F.softplus(dt + self.dt_bias), share.sigmoid()  # (B, T, H)
        angle = (dt[..., None] * math.pi * angle.tanh()[:, :, None]).cumsum(1)  # (B, T, H, N / 4)
        if state is not None:
            angle = angle + state["angle"][:, None]
            state["angle"] = angle[:, -1].remainder(2 * math.pi)
        q, k = self.turned(q, self.q_norm, self.q_bias, angle), self.turned(k, self.k_norm, self.k_bias, angle)
        factors = torch.stack([share * dt, (1 - share) * dt], dim=-1)  # (B, T, H, 2), in the place of beta
        log_decay = -F.softplus(A).clamp(min=1e-4) * dt
        return Projection(q.to(v.dtype), k.to(v.dtype), v, log_decay, factors, skip=self.D[:, None] * v)

    def turned(self, y: torch.Tensor, norm: RMSNorm, bias: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        """q or k (B, T, G N) -> each head's (B, T, H, N): the angles turn the first N / 4 pairs of neighbours."""
        y = norm(at_least_float32(y).unflatten(-1, (self.config.n_groups, -1)))[:, :, :, None]
        y = (y + bias.view(self.config.n_groups, -1, self.key_width)).flatten(2, 3)
        pairs, cos, sin = y[..., : 2 * angle.shape[-1]].unflatten(-1, (-1, 2)), angle.cos(), angle.sin()
        a, b = pairs.unbind(-1)
        pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1)
        return torch.cat([pairs.flatten(-2), y[..., 2 * angle.shape[-1] :]], dim=-1)

    def late(self, p: Projection, state: dict | None) -> tuple[Projection, torch.Tensor]:
        """What the recurrence computes, with k and v of the token before; the weight of a token's own v (B, T, H)."""
        (own, next_), before = p.beta.unbind(-1), {}
        for name, y in (("k", p.k), ("v", p.v), ("own", own)):
            last = torch.zeros_like(y[:, 0]) if state is None else state[name].to(y.dtype)
            before[name] = torch.cat([last[:, None], y[:, :-1]], dim=1)
            if state is not None:
                state[name] = y[:, -1].clone()  # a view would keep the whole prefill alive
        k = (p.log_decay.exp() * (before["own"] + next_))[..., None] * before["k"]
        return p._replace(k=k, v=before["v"], beta=None), own * (at_least_float32(p.q) * p.k).sum(-1)

    def read(self, p: Projection, state: dict | None, start: int) -> torch.Tensor:
        late, own = self.late(p, state)
        return super().read(late, state, start) + own[..., None] * p.v

    def state_shapes(self, B: int) -> dict[str, tuple[int, ...]]:
        H, N = self.n_head, self.key_width
        return super().state_shapes(B) | dict(k=(B, H, N), v=(B, H, self.value_width), own=(B, H), angle=(B, H, N // 4))

    def explicit_weights(self, p: Projection) -> torch.Tensor:
        late, own = self.late(p, None)
        return F.pad(super().explicit_weights(late)[..., 1:], (0, 1)) + own.transpose(1, 2).diag_embed()


class Monarch(Mixer):
    """S_t = P^T L(x_t) P R(x_t) S_{t-1} + k_t v_t^T and o_t = q_t^T S_t: a transition that mixes the n = 64 rows of S.

    L and R are block diagonal: sqrt(n) = 8 orthogonal blocks of 8 x 8, the Cayley transforms (I + A)^-1 (I - A) of
    skew-symmetric A, which are parameters; of x_t is only one sigmoid for each block, a factor on it. P transposes the
    rows as an 8 x 8 table (Dao et al. 2022, "Monarch"). Products of such matrices are not of that form, so there is no
    cheap chunked form: it runs token by token, and block_size may not be above 64.

    The proposal, which is unpublished, has one h_t = P^T L P R h_{t-1} + B x_t. Ours: heads, with blocks of their own;
    head_dim columns h side by side in S, with B x = k v^T; the readout by q, and its norm; and the start at blocks near
    the identity and gates of sigmoid(4), which leave a tenth of S after 64 tokens.
    """

    published_norm = "rms"
    linear_in = ("query", "key", "value")
    longest = 64
    m = 8  # sqrt(n)
    flops_per_entry = 4 * m + 6  # of S: two products with blocks, their sigmoids, written and read

    @classmethod
    def check(cls, name: str, config: GPTConfig) -> None:
        super().check(name, config)
        if config.block_size > cls.longest:
            why = "it runs token by token, since products of its transitions have no cheap chunked form"
            raise UserError(f"block_size={config.block_size}: {name} takes at most {cls.longest}; {why}")

    def __init__(self, config, gate):
        H, D, m = config.n_head, config.head_dim, self.m
        super().__init__(config, gate, query=(H, m * m), key=(H, m * m), value=(H, D))
        self.split = (H * m * m, H * m * m, H * D)
        self.qkv = nn.Linear(config.n_embd, sum(self.split), bias=False)
        self.conv = make_conv(config, sum(self.split))
        self.block_gates = ZeroLinear(config.n_embd, H * 2 * m, bias_start=4.0)
        self.skew = nn.Parameter(torch.empty(2 * H * m**3))  # flat: a 1-D parameter gets no weight decay

    def init_parameter(self, name: str, start: torch.Tensor, generator: torch.Generator) -> None:
        start.normal_(0.0, 0.02, generator=generator)

    def project(self, x: torch.Tensor, state: dict | None, start: int) -> Projection:
        qkv = self.conv(self.qkv(x), state).split(self.split, dim=-1)
        q, k, v = (y.unflatten(-1, (self.n_head, -1)) for y in qkv)  # (B, T, H, n or D)
        logits = at_least_float32(self.block_gates(x)).unflatten(-1, (self.n_head, -1))  # (B, T, H, 2m): L's, R's
        return Projection(q * self.key_width**-0.5, k, v, F.logsigmoid(logits))

    def blocks(self) -> torch.Tensor:
        """The blocks of L and of R: (2, H, m, m, m)."""
        A = at_least_float32(self.skew).view(2, self.n_head, self.m, self.m, self.m)
        A, one = A - A.mT, torch.eye(self.m, dtype=A.dtype, device=A.device)
        return torch.linalg.solve_ex(one + A, one - A)[0]  # solve would wait for a GPU

    def turned(self, p: Projection, v: torch.Tensor, S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The readout (B, T, H, D) of v (B, T, H, D) from the state S (B, H, n, D) on, and the state behind it."""
        q, k, v, S = (at_least_float32(y) for y in (p.q[..., None, :], p.k[..., None], v[..., None, :], S))
        gates, outputs = p.log_decay.exp().unflatten(-1, (2, self.m, 1, 1)), []  # (B, T, H, 2, m, 1, 1)
        with torch.autocast(v.device.type, enabled=False):
            L, R = self.blocks()
            for q_t, k_t, v_t, gate in zip(*(y.unbind(1) for y in (q, k, v, gates)), strict=True):
                S = S.unflatten(2, (self.m, self.m))  # (B, H, m, m, D)
                S = (gate[:, :, 1] * Product.apply(R, S)).transpose(2, 3)
                S = (gate[:, :, 0] * Product.apply(L, S)).transpose(2, 3)
                S = S.flatten(2, 3) + k_t * v_t
                outputs.append(Product.apply(q_t, S))  # (B, H, 1, D)
        return torch.cat(outputs, dim=2).transpose(1, 2), S

    def read(self, p: Projection, state: dict | None, start: int) -> torch.Tensor:
        state = self.init_state(len(p.v), p.v.device, p.v.dtype) if state is None else state
        o, state["S"] = self.turned(p, p.v, state["S"])
        return o

    def explicit_weights(self, p: Projection) -> torch.Tensor:
        B, T, H = p.v.shape[:3]
        one_hot = torch.eye(T, device=p.v.device, dtype=p.v.dtype)[:, None].expand(B, -1, H, -1)  # v of each token
        return self.turned(p, one_hot, one_hot.new_zeros(B, H, self.key_width, T))[0].transpose(1, 2)
