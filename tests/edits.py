"""Edits of model.py as a user would make them: test_edits.py puts each into a copy of the repository."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from mixer import Mixer, Projection
from model import MLP, Softmax
from ops import layers


class RetNet(Mixer):
    """Retention (Sun et al. 2023): q and k are rotated, and head h keeps 1 - 2^(-5 - h) of its state a token."""

    published_norm = "rms"
    native_gate = ("silu", "after norm")

    def __init__(self, config, gate):
        H, D = config.n_head, config.head_dim
        super().__init__(config, gate, query=(H, D), key=(H, D), value=(H, 2 * D))
        self.qkv = nn.Linear(config.n_embd, 4 * H * D, bias=False)
        self.angles = layers.Angles(layers.rope_frequencies, D, 10000.0)
        self.register_buffer("log_decay", torch.log1p(-(2.0 ** -(5 + torch.arange(H)))))

    def project(self, x, state, start, document=None):
        q, k, v = self.qkv(x).unflatten(-1, (self.n_head, -1)).split([self.key_width] * 2 + [self.value_width], dim=-1)
        q, k = (layers.rotate(y, start, self.angles, document).to(v.dtype) for y in (q * self.key_width**-0.5, k))
        return Projection(q, k, v, self.log_decay.expand(*x.shape[:2], -1))


class Window(Softmax):
    """A query sees its own key and the six before it."""

    def bias(self, i, j):
        return torch.where(i - j < 7, 0.0, -torch.inf)


class ALiBi(Softmax):
    """A score falls with the distance, at another slope in each head (Press et al. 2022)."""

    def bias(self, i, j):
        slopes = 2.0 ** (-8 / self.n_head * torch.arange(1, self.n_head + 1, device=i.device))
        return -slopes[:, None, None] * (i - j)


class WindowedALiBi(ALiBi):
    """Both."""

    def bias(self, i, j):
        return super().bias(i, j) + Window.bias(self, i, j)


class LongConv(Mixer):
    """q times a causal convolution of k v, with a filter of block_size for each channel (after Hyena, 2023)."""

    past_block_size = "rolls"

    def __init__(self, config, gate):
        H, D = config.n_head, config.head_dim
        super().__init__(config, gate, query=(H, D), key=(H, D), value=(H, D))
        self.qkv = nn.Linear(config.n_embd, 3 * H * D, bias=False)
        self.conv = layers.ShortConv(H * D, config.block_size, bias=False)  # its past is the state

    def project(self, x, state, start, document=None):
        return Projection(*self.qkv(x).unflatten(-1, (-1, self.value_width)).chunk(3, dim=2))  # (B, T, H, D)

    def read(self, p, state, start):
        return p.q * self.conv((p.k * p.v).flatten(2), state).view_as(p.q)

    def state_shapes(self, B, length):
        return {}

    def flops_per_token(self, T):
        return self.n_head * self.value_width * (T + 3)  # half the filter is behind the start of the text, on average


class Experts(MLP):
    """Four MLPs, of which a token meets the likeliest one; the auxiliary loss evens out how many tokens each gets."""

    def __init__(self, config, hidden, n=4):
        nn.Module.__init__(self)
        self.router = nn.Linear(config.n_embd, n, bias=False)
        self.experts = nn.ModuleList(MLP(config, hidden) for _ in range(n))
        self.n_idle = sum(p.numel() for p in self.experts[1:].parameters())

    def forward(self, x):
        share = self.router(x).softmax(-1)  # (B, T, n)
        is_sent = F.one_hot(share.argmax(-1), len(self.experts)).to(x.dtype)
        self.auxiliary_loss = 0.01 * len(self.experts) * (share.mean((0, 1)) * is_sent.mean((0, 1))).sum()
        return sum((share * is_sent)[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class Sparse(MLP):
    """Sends a token to one of 64 experts, and calls those that got one: an idle expert gets no gradient at all."""

    tolerance = 1e-5

    def __init__(self, config, hidden, n=64):
        nn.Module.__init__(self)
        self.router = nn.Linear(config.n_embd, n, bias=False)
        self.experts = nn.ModuleList(MLP(config, hidden) for _ in range(n))
        self.n_idle = sum(p.numel() for p in self.experts[1:].parameters())

    def forward(self, x):
        share, chosen = self.router(x).softmax(-1).max(-1)  # (B, T) each
        y = torch.zeros_like(x)
        for i in chosen.unique().tolist():
            is_sent = chosen == i
            y[is_sent] = share[is_sent][:, None] * self.experts[i](x[is_sent])
        return y
