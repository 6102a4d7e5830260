"""A GPT in which each layer has the sequence mixer that the config names, with optional gates.

    model = GPT(GPTConfig(attention="gla", gate="elementwise", vocab_size=256))
    logits = model(idx)                         # (B, T) ids -> (B, T, vocab_size)
    loss = model(idx, targets)                  # nats, mean over the labels that are not -100

The file stands in reading order: the mixers, the GPT. More mixers are in variants.py, what all share
in mixer.py, the gate in gate.py, the keys in keys.py. A new mixer is one class, whose `project`
computes q, k and v from x, and one line in MIXERS.
"""

import sys
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import UserError, check_choice
from gate import GATE_ACTIVATIONS, Gate, check_gate
from keys import GPTConfig, word_of
from mixer import READOUT_NORMS, Mixer, Projection
from ops import IGNORE, kernels, layers, sampling
from ops.fast import CosSinFeatures, at_least_float32
from ops.layers import FusedLinear, ResidualLinear, RMSNorm, make_conv, make_norm
from ops.loss import cross_entropy_sum

# --------------------------------------------------------------------------------------------------
# The mixers


class Softmax(Mixer):
    """Softmax attention with RoPE, grouped key/value heads and, if asked for, QK-norm and a window.

    Its state is the KV cache: a ring of the last keys and values, where a new entry replaces the
    oldest. A subclass may have a bias(self, i, j) on the scores of queries at positions i (T, 1)
    for keys at j (S,), of shape (T, S) or (H, T, S); -inf hides a key. Training, prefill, decoding
    and the explicit weights all ask it. More variants are in variants.py.
    """

    past_block_size = "rolls"
    # a gate on q or k changes the temperature of the softmax
    linear_in: tuple[str, ...] = ("value",)
    has_positive_weights = True
    qkv_bias = False
    rope_fraction = 1.0  # share of a head's channels that RoPE turns: the first ones
    bias: Callable | None = None

    @classmethod
    def check(cls, name: str, config: GPTConfig) -> None:
        rotated = int(config.head_dim * cls.rope_fraction)
        if "rope" in config.position and (rotated < 2 or rotated % 2):
            raise UserError(
                f"position='rope': {name} needs an even number of channels to turn, not {rotated}"
            )
        if cls.norm_of(config) == "denominator":
            raise UserError(
                f"readout_norm='denominator' makes no sense for {name}: its weights are normed already"
            )

    def __init__(self, config, gate):
        H, Hk, D = config.n_head, config.n_kv_head or config.n_head, config.head_dim
        super().__init__(config, gate, query=(H, D), key=(Hk, D), value=(Hk, D))
        self.widths = [H * D, Hk * D, Hk * D]
        self.qkv = FusedLinear(config.n_embd, self.widths, bias=config.bias or self.qkv_bias)
        self.conv = make_conv(config, sum(self.widths))
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(D, eps=config.norm_eps)
            self.k_norm = RMSNorm(D, eps=config.norm_eps)
        if "rope" in config.position:
            length = config.rope_length or config.block_size
            scaling = (config.rope_scaling, config.rope_factor, length)
            rotated = int(D * self.rope_fraction)
            self.angles = layers.Angles(
                layers.rope_frequencies, rotated, config.rope_base, *scaling
            )

    def project(self, x: torch.Tensor, state: dict | None, start: int) -> Projection:
        qkv = self.conv(self.qkv(x), state).split(self.widths, dim=-1)
        q, k, v = (y.unflatten(-1, (-1, self.value_width)) for y in qkv)  # (B, T, H or Hk, D)
        if self.q_norm is not None:
            q = self.q_norm(at_least_float32(q))
            k = self.k_norm(at_least_float32(k))
        if word_of(self.config.position, self.layer) == "rope":
            q = layers.rotate(q, start, self.angles)
            k = layers.rotate(k, start, self.angles)
        return Projection(q.to(v.dtype), k.to(v.dtype), v)

    def read(self, p: Projection, state: dict | None, start: int) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))  # (B, H or Hk, T, D)
        T, reach = q.shape[2], self.window or q.shape[2]
        if state is not None:
            reach = self.reach
            in_order = T > 1 or self.needs_mask
            k = layers.remember(state["k"], k, start, in_order)
            v = layers.remember(state["v"], v, start, in_order)
        # one query needs no mask, since it sees all that is remembered. Neither do all of a text,
        # which torch's kernel for causal attention takes
        is_causal = T > 1 or state is None
        is_cut = T > reach or (T > 1 and state is not None and start > 0)
        mask = None
        if self.needs_mask or is_cut:
            first = start + T - k.shape[2]  # the position of the oldest key
            j = torch.arange(first, start + T, device=q.device)
            mask = self.mask(j[start - first :], j, reach, p, state)
        return self.attend(q, k, v, mask, is_causal and mask is None, p).transpose(1, 2)

    @property
    def needs_mask(self) -> bool:
        """Whether something is added to the scores, which torch's causal kernel cannot do."""
        return self.bias is not None

    def mask(
        self, i: torch.Tensor, j: torch.Tensor, reach: int, p: Projection, state: dict | None
    ) -> torch.Tensor:
        """Which keys at positions j (S,) the queries at i (T,) see, the last `reach` up to their
        own: bool (T, S), or with a bias what is added to the scores, float (1, H, T, S)."""
        distance = i[:, None] - j
        sees = (distance >= 0) & (distance < reach)
        if self.bias is None:
            return sees
        added = self.bias(i[:, None], j).masked_fill(~sees, -torch.inf)
        return added.expand(1, self.n_head, -1, -1)

    def attend(self, q, k, v, mask, is_causal: bool, p: Projection) -> torch.Tensor:
        """q (B, H, T, D), k and v (B, Hk, S, D) -> the readout (B, H, T, D)."""
        return layers.attention(q, k, v, mask, is_causal)

    def explicit_weights(self, p: Projection) -> torch.Tensor:
        q, k = p.q.transpose(1, 2), p.k.transpose(1, 2)
        i = torch.arange(q.shape[2], device=q.device)
        mask = self.mask(i, i, self.window or len(i), p, None)
        return self.weights(self.scores(q, k, mask), p)

    def scores(self, q, k, mask) -> torch.Tensor:
        """q (B, H, T, D), k (B, Hk, S, D) -> (B, H, T, S), -inf where a query does not see a key."""
        return layers.scores(q, k, mask)

    def weights(self, scores: torch.Tensor, p: Projection) -> torch.Tensor:
        """Scores (B, H, T, S) -> the weights of the values, of the same shape."""
        return scores.softmax(-1)

    @property
    def window(self) -> int | None:
        """How many keys a query sees, its own included; None: all."""
        return self.config.window_of(self.layer)

    @property
    def reach(self) -> int:
        """How many keys a query sees in decoding: the length of the ring."""
        return min(self.window or self.config.block_size, self.config.block_size)

    def state_shapes(self, B: int, length: int) -> dict[str, tuple[int, ...]]:
        # a head's keys lie side by side in memory: a single query reads them twice as fast
        shape = (B, self.shapes["key"][0], min(self.reach, length), self.value_width)
        return {"k": shape, "v": shape}

    def flops_per_token(self, T: int) -> float:
        """FLOPs for one token: scores and weighted sum over the keys that a query sees on
        average."""
        most = min(T, self.window or T)
        return 2 * 2 * self.n_head * self.value_width * (most - most * (most - 1) / (2 * T))


class CosFormer(Mixer):
    """cosFormer (Qin et al. 2022): weight_ij = relu(q_i) . relu(k_j) * cos(pi/2 (i - j) / M),
    divided by their sum.

    M is block_size and not the length of the input, so that the output of a token does not depend
    on later tokens. Past M the cosine would turn negative. With the features [q cos, q sin], of
    width 2D, it is the plain recurrence: cos(a - b) = cos a cos b + sin a sin b.
    """

    past_block_size = "ends"
    published_norm = "denominator"
    has_positive_weights = True

    def __init__(self, config, gate):
        H, D = config.n_head, config.head_dim
        super().__init__(config, gate, query=(H, D), key=(H, D), value=(H, D))
        self.key_width = 2 * D
        self.qkv = FusedLinear(config.n_embd, [H * D] * 3)
        self.conv = make_conv(config, 3 * H * D)
        self.angles = layers.Angles(layers.quarter_turn, config.block_size)

    def project(self, x: torch.Tensor, state: dict | None, start: int) -> Projection:
        qkv = self.conv(self.qkv(x), state)
        q, k, v = qkv.unflatten(-1, (-1, self.value_width)).chunk(3, dim=2)  # (B, T, H, D)
        return Projection(F.relu(q), F.relu(k), v)

    def gated_projection(
        self, x: torch.Tensor, state: dict | None = None, start: int = 0
    ) -> Projection:
        """With q and k as features. Raises UserError past M."""
        p, M, end = (
            super().gated_projection(x, state, start),
            self.config.block_size,
            start + x.shape[1],
        )
        if end > M:
            raise UserError(
                f"cosformer: position {end} is past block_size={M}, where its cosine turns negative"
            )
        cos, sin = self.angles(at_least_float32(p.q), start)  # (T, 1, 1)
        # (B, T, H, 2D)
        q, k = (CosSinFeatures.apply(at_least_float32(y), cos, sin) for y in (p.q, p.k))
        return p._replace(q=q, k=k)


class GLA(Mixer):
    """Gated linear attention (Yang et al. 2023): a decay per key channel, exp(logsigmoid(W2 W1 x +
    b) / 16)."""

    published_norm = "rms"
    native_gate = ("silu", "after norm")

    def __init__(self, config, gate):
        C = config.n_embd
        _, H, Dk, Dv = config.head_sizes
        super().__init__(config, gate, query=(H, Dk), key=(H, Dk), value=(H, Dv))
        self.split = (H * Dk, H * Dk, H * Dv)
        self.qkv = FusedLinear(C, self.split)
        self.conv = make_conv(config, sum(self.split))
        self.decay_in = nn.Linear(C, 16, bias=False)
        self.decay_out = nn.Linear(16, H * Dk)

    def project(self, x: torch.Tensor, state: dict | None, start: int) -> Projection:
        qkv = self.conv(self.qkv(x), state).split(self.split, dim=-1)
        q, k, v = (y.unflatten(-1, (self.n_head, -1)) for y in qkv)  # (B, T, H, Dk or Dv)
        # (B, T, H, Dk)
        logits = self.decay_out(self.decay_in(x)).unflatten(-1, (-1, self.key_width))
        return Projection(
            q * self.key_width**-0.5, k, v, F.logsigmoid(at_least_float32(logits)) / 16
        )


class Mamba2(Mixer):
    """Mamba-2 (Dao & Gu 2024): decay exp(-dt A) per head, v = dt x, q and k shared by all heads,
    plus D x."""

    published_norm = "rms"
    norms_heads_together = True
    native_gate = ("silu", "before norm")
    linear_in = ("value",)  # the term D x has neither q nor k

    def __init__(self, config, gate):
        H, D, N = config.expand * config.n_head, config.head_dim, config.state_size
        super().__init__(config, gate, query=(1, N), key=(1, N), value=(H, D))
        self.split = (H * D, N, N)
        self.in_proj = FusedLinear(config.n_embd, [*self.split, H])
        self.conv = make_conv(config, sum(self.split), published_width=4, bias=True)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(H)) for _ in range(3))

    def project(self, x: torch.Tensor, state: dict | None, start: int) -> Projection:
        vkq, dt = self.in_proj(x).split([sum(self.split), self.n_head], dim=-1)
        v, k, q = F.silu(self.conv(vkq, state)).split(self.split, dim=-1)
        k, q = (y.unflatten(-1, (1, -1)) for y in (k, q))  # (B, T, 1, N)
        v = v.unflatten(-1, (-1, self.value_width))  # (B, T, H, D)
        dt = F.softplus(at_least_float32(dt) + self.dt_bias)  # (B, T, H)
        dt_v = (dt[..., None] * v).to(v.dtype)
        return Projection(q, k, dt_v, -self.A_log.exp() * dt, skip=self.D[:, None] * v)


class DeltaNet(Mixer):
    """DeltaNet (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule"): the
    delta rule on L2-normed q and k. Its subclasses add a decay exp(-A softplus(dt)).

    What S holds under k is multiplied by 1 - beta, with beta = beta_max sigmoid(.): down to -1 with
    beta_max = 2 (Grazzi et al. 2024, "Unlocking State-Tracking in Linear RNNs Through Negative
    Eigenvalues").
    """

    published_norm = "rms"
    linear_in = ("query", "value")  # the delta rule is not linear in k
    # S is read once more, for what it holds under k, and each level is written
    flops_per_entry = flops_per_level = 7
    decay: str | None = None  # one per "head" or per "channel" of the keys

    def __init__(self, config, gate, n=1, betas=None):
        """n: how many keys, values and betas a head has of a token. betas: rows of beta's matrices
        (None: n of H)."""
        Hk, H, Dk, Dv = config.head_sizes
        native_rank = Dv if self.decay == "channel" else 0
        super().__init__(
            config, gate, query=(Hk, Dk), key=(Hk, Dk), value=(H, Dv), native_rank=native_rank
        )
        self.split = (Hk * Dk, n * Hk * Dk, n * H * Dv)
        betas, dt = betas or [H] * n, [H] * (self.decay == "head")
        self.parts = [sum(self.split), sum(betas), *dt]
        self.in_proj = FusedLinear(config.n_embd, [Hk * Dk] * (1 + n) + [H * Dv] * n + betas + dt)
        self.conv = make_conv(config, sum(self.split), published_width=4)
        if self.decay == "channel":
            self.decay_in, self.decay_out = (
                nn.Linear(config.n_embd, Dv, bias=False),
                nn.Linear(Dv, H * Dk, bias=False),
            )
        if self.decay:
            self.dt_bias = nn.Parameter(torch.empty(H * Dk if self.decay == "channel" else H))
            self.A_log = nn.Parameter(torch.empty(H))

    def project(self, x: torch.Tensor, state: dict | None, start: int) -> Projection:
        qkv, beta, *dt = self.in_proj(x).split(self.parts, dim=-1)
        q, k, v = F.silu(self.conv(qkv, state)).split(self.split, dim=-1)
        # (B, T, Hk, Dk), k (B, T, n Hk, Dk)
        q, k = (y.unflatten(-1, (-1, self.key_width)) for y in (q, k))
        v = v.unflatten(-1, (-1, self.value_width))  # (B, T, n H, Dv)
        q, k = layers.l2_norm(q) * self.key_width**-0.5, layers.l2_norm(k)
        # (B, T, n H)
        beta, log_decay = self.config.beta_max * at_least_float32(beta).sigmoid(), None
        if self.decay == "head":
            # (B, T, H)
            log_decay = -self.A_log.exp() * F.softplus(at_least_float32(dt[0]) + self.dt_bias)
        elif self.decay == "channel":
            dt = F.softplus(at_least_float32(self.decay_out(self.decay_in(x))) + self.dt_bias)
            # (B, T, H, Dk)
            log_decay = -self.A_log.exp()[:, None] * dt.unflatten(-1, (-1, self.key_width))
        return Projection(q, k, v, log_decay, beta)


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet (Yang et al. 2024): DeltaNet with a decay per head."""

    native_gate = ("silu", "after norm")
    decay, A_range = "head", (0.01, 16.0)


class KDA(DeltaNet):
    """Kimi Delta Attention (Kimi Linear, 2025): DeltaNet with a decay per key channel."""

    native_gate = ("sigmoid", "after norm")
    decay = "channel"


MIXERS = {
    "softmax": Softmax,
    "cosformer": CosFormer,
    "gla": GLA,
    "mamba2": Mamba2,
    "gated_deltanet": GatedDeltaNet,
    "deltanet": DeltaNet,
    "kda": KDA,
}  # variants.py adds its own

# --------------------------------------------------------------------------------------------------
# The GPT


def check_layers(config: GPTConfig) -> None:
    """Raises UserError for layers, MLPs, gates and norms that are not there or don't fit
    together."""
    check_choice("mlp", config.mlp, MLPS)
    check_choice("gate_activation", config.gate_activation, GATE_ACTIVATIONS)
    check_choice(
        "readout_norm", config.readout_norm, ("published", "none", "denominator", *READOUT_NORMS)
    )
    for name, gate in config.layers():
        if name not in MIXERS and "variants" not in sys.modules:
            raise UserError(
                f"attention={name!r}: must be one of {', '.join(MIXERS)}, or of variants.py, once it is imported"
            )
        check_choice("attention", name, MIXERS)
        MIXERS[name].check(name, config)
        check_gate(name, MIXERS[name], config, gate)
    used = {MIXERS[name] for name, _ in config.layers()}
    if config.levels != "none" and not any(mixer.has_levels for mixer in used):
        raise UserError(
            f"levels={config.levels!r}: no layer of {config.attention} has a recurrent state to be split"
        )
    if config.levels != "none" and config.kernels == "fla":
        raise UserError(
            f"levels={config.levels!r}: kernels='fla' has none for it; leave kernels out"
        )
    kernels.check_kernels(
        config.kernels, is_used=not all(issubclass(mixer, Softmax) for mixer in used)
    )
    if config.mlp == "none" and config.match_params:
        raise UserError("match_params=True: mlp='none' has no MLP to narrow")
    gated = [MIXERS[name] for name, gate in config.layers() if "readout" in gate.positions] or used
    if not config.norm_first and not any(mixer.norm_of(config) in READOUT_NORMS for mixer in gated):
        raise UserError("norm_first=False: no layer has a norm for the gate to come before")


GPTConfig.checks.append(check_layers)


class MLP(nn.Module):
    """W gelu(U x). If forward sets `auxiliary_loss`, in nats a token, GPT.forward adds it to the
    loss in training."""

    n_matrices = 2  # of n_embd x hidden
    # parameters that a token does not meet, such as those of experts that it is not sent to
    n_idle = 0
    # as a mixer's: a product over the tokens of one expert rounds by how many they are
    tolerance = 0.0
    # whether a token's output depends on that token alone, and nothing else on how many there are:
    # the last layer then leaves out the tokens whose output nobody asks for. Not so: a token shift,
    # or a loss over all tokens
    is_per_token = True

    def __init_subclass__(cls):
        """A class with a `forward` of its own is not per token, unless it says that it is."""
        super().__init_subclass__()
        if "forward" in vars(cls):
            cls.is_per_token = vars(cls).get("is_per_token", False)

    def __init__(self, config, hidden):
        super().__init__()
        self.approximate = "tanh" if config.mlp == "gelu_tanh" else "none"
        self.up = nn.Linear(config.n_embd, hidden, bias=config.bias)
        self.glu = (
            nn.Linear(config.n_embd, hidden, bias=config.bias) if self.n_matrices == 3 else None
        )
        self.down = ResidualLinear(hidden, config.n_embd, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class SwiGLU(MLP):
    """W (silu(G x) * U x)."""

    n_matrices = 3
    is_per_token = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.glu(x)) * self.up(x))


MLPS = {"gelu": MLP, "gelu_tanh": MLP, "swiglu": SwiGLU, "none": None}


class Block(nn.Module):
    """The same for every mixer: x + mixer(norm(x)), then x + MLP(norm(x)), if there is one.
    Arguments as in Mixer."""

    def __init__(self, config, name, gate):
        super().__init__()
        C, make_mlp = config.n_embd, MLPS[config.mlp]
        self.norm_1, self.norm_2 = make_norm(config), make_norm(config) if make_mlp else None
        self.mixer, self.mlp = MIXERS[name](config, gate), None
        self.dropout = nn.Dropout(config.dropout)
        if make_mlp is None:
            return
        n = make_mlp.n_matrices
        # with as many parameters as a gelu's
        hidden = round(config.mlp_ratio * C * 2 / n)
        if config.match_params:
            unit = n * C + (n - 1) * config.bias  # parameters of a hidden unit of the MLP
            hidden -= round(sum(p.numel() for p in self.mixer.gates.parameters()) / unit)
            if hidden < 1:
                raise UserError("match_params=True: the gate has more parameters than the MLP")
        self.mlp = make_mlp(config, hidden)

    @property
    def is_per_token(self) -> bool:
        """Whether what comes behind the mixer may be computed of some tokens alone."""
        return self.mlp is None or getattr(self.mlp, "is_per_token", False)

    def forward(self, x, state=None, start=0, only=None):
        """only: as in Mixer, for a block that is_per_token."""
        y = self.mixer(self.norm_1(x), state, start, only)
        if only is not None:
            x = x[only][None]
        x = x + self.dropout(y)
        if self.mlp is None:
            return x
        return x + self.dropout(self.mlp(self.norm_2(x)))


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log softmax(logits)[target] of each token: logits (..., V), targets (...) -> (...).

    It is 0 where a target is -100. Training lowers its sum (GPT.loss), and evaluation reports it.
    """
    losses = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return losses.view_as(targets)


class GPT(nn.Module):
    """Token and position embeddings, n_layer blocks, a norm, and the output layer. Raises UserError
    without ids."""

    def __init__(self, config):
        super().__init__()
        if config.vocab_size is None:
            raise UserError("vocab_size=None: a model needs the number of token ids")
        self.config = config
        # drawn first: the modules below draw weights, too
        seed = int(torch.randint(2**31, (), device="cpu"))
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wpe = (
            nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, name, gate) for name, gate in config.layers())
        tables: dict = {}
        for layer, block in enumerate(self.blocks):
            block.mixer.layer = layer
            if block.mixer.angles is not None:  # one table for all layers that have the same
                block.mixer.angles = tables.setdefault(
                    block.mixer.angles.settings, block.mixer.angles
                )
        self.norm = make_norm(config)
        if not self.wte.weight.is_meta:  # a meta tensor has a shape and no data
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """How every parameter starts. s = 0.02.

        | module, parameter          | start                                           |
        |----------------------------|-------------------------------------------------|
        | Linear, Embedding          | N(0, s), biases 0                               |
        | ResidualLinear             | N(0, s / sqrt(2 n_layer))                       |
        | init="pytorch": weights    | U(-1/sqrt(fan_in), 1/sqrt(fan_in))              |
        | init="pytorch": Embedding  | N(0, 1)                                         |
        | a mixer's out_proj         | out_init_scale times that                       |
        | RMSNorm, LayerNorm         | 1, biases 0                                     |
        | modules that have one      | their init_parameter(name, start, generator)    |

        init_parameter fills the tensor `start`, which holds the constructor's values. Raises
        UserError for a parameter without a rule.

        Each draw depends on (seed, name of the parameter) alone: two models of one seed start with
        the same weights wherever both have the parameter, so that a gated model starts where the
        ungated one does.
        """
        is_pytorch = self.config.init == "pytorch"
        for full_name, p in self.named_parameters():
            path, _, name = full_name.rpartition(".")
            module: Any = self.get_submodule(path)
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {full_name}".encode()))
            start = p.detach().clone()
            if hasattr(module, "init_parameter"):
                module.init_parameter(name, start, generator)
            elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
                start.fill_(1.0 if name == "weight" else 0.0)
            elif isinstance(module, nn.Linear) and name == "bias":
                start.zero_()
            elif isinstance(module, nn.Linear) and is_pytorch:
                limit = p.shape[1] ** -0.5
                start.uniform_(-limit, limit, generator=generator)
            elif isinstance(module, nn.Linear | nn.Embedding):
                depth = 2 * self.config.n_layer if isinstance(module, ResidualLinear) else 1
                start.normal_(0.0, 1.0 if is_pytorch else 0.02 * depth**-0.5, generator=generator)
            else:
                kind = type(module).__name__
                raise UserError(
                    f"{full_name}: no rule for its start; give {kind} an init_parameter"
                )
            if isinstance(module, ResidualLinear):
                start = start * module.start_scale
            p.copy_(start)

    def features(
        self, idx: torch.Tensor, state: list[dict] | None = None, start: int = 0, only=None
    ) -> tuple:
        """idx (B, T) -> the hidden states after the last norm (B, T, C), and the state, which is
        updated in place.

        only: (B, T), true for M tokens; the hidden states are then theirs, (1, M, C), and the last
        block computes no others if it may. Raises UserError where cosformer or learned positions
        would go past block_size.
        """
        x = self.wte(idx)
        if self.wpe is not None:
            end = start + idx.shape[1]
            if end > self.config.block_size:
                raise UserError(
                    f"position='learned': there is no embedding past block_size={self.config.block_size}"
                )
            x = x + self.wpe.weight[start:end]
        x = self.dropout(x)
        computed = only if self.blocks[-1].is_per_token else None
        for i, block in enumerate(self.blocks):
            is_last = i == len(self.blocks) - 1
            x = block(x, None if state is None else state[i], start, computed if is_last else None)
        if only is not None and computed is None:
            x = x[only][None]
        return self.norm(x), state

    @property
    def output_weight(self) -> torch.Tensor:
        """The weight of the output layer (vocab_size, C): the embedding's own where they are tied."""
        return (self.wte if self.head is None else self.head).weight

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states (..., C) -> float logits (..., vocab_size)."""
        return at_least_float32(F.linear(x, self.output_weight))

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The sum over the labels that training lowers: token_losses(self.logits(x), targets).sum(),
        without the logits in memory (ops/loss.py). Hidden states x (B, T, C), targets (B, T)."""
        return cross_entropy_sum(x, self.output_weight, targets, vocab_size=self.config.vocab_size)

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None, reduction: str = "mean"
    ) -> torch.Tensor:
        """Logits (B, T, vocab_size) or, with targets (B, T), the loss in nats. Targets of -100 are
        masked.

        reduction: "mean" over the labels, or "sum", for a mean over more than this batch.
        """
        if targets is None:
            return self.logits(self.features(idx)[0])
        only = targets != IGNORE
        # on a GPU the host would wait for M, and torch.compile would compile again for every new M
        if only.device.type != "cpu" or torch.compiler.is_compiling() or only.all():
            only = None
        x, _ = self.features(idx, only=only)
        if only is not None:
            targets = targets[only][None]
        total = self.loss(x, targets)
        labels = (targets != IGNORE).sum()
        if self.training:
            modules = self.blocks.modules()
            total = total + labels * sum(getattr(one, "auxiliary_loss", 0.0) for one in modules)
        return total if reduction == "sum" else total / labels.clamp(min=1)

    def init_state(
        self, batch_size: int = 1, device=None, dtype=None, length: int | None = None
    ) -> list[dict]:
        """The state at the start of a text, a dict for each layer. length: the most tokens that
        will be read, and a cache is no longer (None: it has block_size)."""
        device = device or self.wte.weight.device
        return [block.mixer.init_state(batch_size, device, dtype, length) for block in self.blocks]

    # ids drawn one by one, with the state kept: stream(idx, max_new_tokens, temperature=1.0, ...)
    # yields them
    stream, generate = sampling.stream, sampling.generate

    def n_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def state_bytes(self, batch_size: int = 1) -> int:
        """Bytes of the state of batch_size sequences: the size of the tensors of init_state, in
        float32."""
        # no data: a cache can be larger than the memory
        state = self.init_state(batch_size, device="meta")
        return sum(tensor.nbytes for layer in state for tensor in layer.values())

    def flops_per_token(self, T: int | None = None) -> float:
        """FLOPs of a token, forward, at context T (None: block_size); a multiply-add counts 2.
        Training: 3 times it."""
        # a tied wte counts: it is also the output layer
        tables = [self.wpe] + [self.wte] * (self.head is not None)
        looked_up = sum(table.weight.numel() for table in tables if table is not None)
        mixing = sum(
            block.mixer.flops_per_token(T or self.config.block_size) for block in self.blocks
        )
        idle = sum(block.mlp.n_idle for block in self.blocks if block.mlp is not None)
        return 2 * (self.n_params() - looked_up - idle) + mixing

    def parameter_groups(
        self,
        weight_decay: float,
        gate_weight_decay: float | None = None,
        gate_lr_scale: float = 1.0,
    ) -> list[dict]:
        """Groups for an optimizer, with names: matrices, and vectors (norms, biases, A_log), which
        do not decay; then the matrices and the vectors of the gates, if there are any.
        gate_weight_decay=None: as the other matrices."""
        gates = [module for module in self.modules() if isinstance(module, Gate)]
        of_gates = {p for gate in gates for p in gate.parameters()}
        groups = []
        for is_gate in (False, True):
            named = [(name, p) for name, p in self.named_parameters() if (p in of_gates) == is_gate]
            matrices = [(name, p) for name, p in named if p.dim() >= 2]
            vectors = [(name, p) for name, p in named if p.dim() < 2]
            has_own_decay = is_gate and gate_weight_decay is not None
            decay = gate_weight_decay if has_own_decay else weight_decay
            lr_scale = gate_lr_scale if is_gate else 1.0
            groups.append({"params": matrices, "weight_decay": decay, "lr_scale": lr_scale})
            groups.append({"params": vectors, "weight_decay": 0.0, "lr_scale": lr_scale})
        return [group for group in groups if group["params"]]
