"""A GPT in which each layer has the sequence mixer that the config names, with optional gates.

    model = GPT(GPTConfig(attention="gla", gate="elementwise", vocab_size=256))
    logits = model(idx)                         # (B, T) ids -> (B, T, vocab_size)
    loss = model(idx, targets)                  # nats, mean over the labels that are not -100

First come the mixers, then the GPT. What all mixers share is in mixer.py, the gate in gate.py, more
mixers in variants.py, and the keys of a config in keys.py. To add a mixer, write a class whose
`project` computes q, k and v from x, and give it a line in MIXERS. To train on another loss, edit
GPT.loss.
"""

import inspect
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from base.configurator import UserError, check_choice
from gate import GATE_ACTIVATIONS, Gate, check_gate
from keys import GPTConfig, word_of
from mixer import READOUT_NORMS, Mixer, Projection
from ops import IGNORE, kernels, layers, sampling
from ops.documents import Documents
from ops.fast import CosSinFeatures, at_least_float32
from ops.layers import FusedLinear, ResidualLinear, RMSNorm, make_conv, make_norm
from ops.loss import cross_entropy_sum

# --------------------------------------------------------------------------------------------------
# The mixers


class Softmax(Mixer):
    """Softmax attention with RoPE and grouped key/value heads; QK-norm and a window are optional.

    In decoding the state is a KV cache of the last `cache_size` tokens. To add something to the
    scores, as ALiBi does, subclass it and define bias(self, i, j). It gets the positions i of
    queries (T, 1) and j of keys (S,), and returns (T, S) or (H, T, S); -inf hides a key. variants.py
    has more subclasses.
    """

    # explained in Mixer (mixer.py)
    past_block_size = "rolls"
    is_linear_in_query = False  # a factor on q changes the temperature of the softmax
    has_positive_weights = True

    # of softmax alone
    qkv_bias = False
    rope_fraction = 1.0  # share of a head's channels that RoPE turns: the first ones
    bias: Callable | None = None  # a subclass's bias(self, i, j), see above
    is_written_out = False  # true: `attend` makes the (T, T) weights

    def __init__(self, config, gate):
        H, Hk, D = config.n_head, config.n_kv_head or config.n_head, config.head_dim
        super().__init__(config, gate, query=(H, D), key=(Hk, D), value=(Hk, D))
        self.split = [H * D, Hk * D, Hk * D]
        has_bias = config.bias or self.qkv_bias
        self.qkv = FusedLinear(config.n_embd, self.split, heads=[H, Hk, Hk], bias=has_bias)
        self.conv = make_conv(config, sum(self.split))  # the identity, unless short_conv is given
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(D, eps=config.norm_eps)
            self.k_norm = RMSNorm(D, eps=config.norm_eps)
        # position may be a pattern over the layers, such as rope,none. `project` looks up the entry
        # of this layer (word_of): self.layer is not known here, since GPT sets it after all layers
        # are made
        if "rope" in config.position:
            # cos and sin, made at the first call; GPT lets layers of equal settings share them
            self.angles = layers.Angles(
                layers.rope_frequencies,
                int(D * self.rope_fraction),
                config.rope_base,
                config.rope_scaling,
                config.rope_factor,
                config.rope_length or config.block_size,
            )

    def project(self, x, state, start, document=None):
        qkv = self.conv(self.qkv(x), state, document).split(self.split, dim=-1)
        q, k, v = (y.unflatten(-1, (-1, self.value_width)) for y in qkv)  # (B, T, H or Hk, D)
        if self.q_norm is not None:
            q = self.q_norm(at_least_float32(q))
            k = self.k_norm(at_least_float32(k))
        if word_of(self.config.position, self.layer) == "rope":
            # RoPE counts from the start of each document, or of the row
            of_rope = document if self.config.rope_restarts else None
            q = layers.rotate(q, start, self.angles, of_rope)
            k = layers.rotate(k, start, self.angles, of_rope)
        return Projection(q.to(v.dtype), k.to(v.dtype), v)

    def read(self, p, state, start):
        q, k, v = (y.transpose(1, 2) for y in (p.q, p.k, p.v))  # (B, H or Hk, T, D)
        T = q.shape[2]
        window = self.window or T
        needs_mask = self.bias is not None or self.is_written_out
        if state is not None:
            window = self.cache_size
            # keys by position, as j below; else in the order of the cache, which is a ring
            in_order = T > 1 or needs_mask
            k = layers.remember(state["k"], k, start, in_order)  # (B, Hk, S, D)
            v = layers.remember(state["v"], v, start, in_order)
        S = k.shape[2]
        # without a mask torch's kernels read a whole text causally, and let one query see all keys
        is_causal_or_one_query = (S == T and T <= window) or T == 1
        mask = None
        if needs_mask or not is_causal_or_one_query:
            i = torch.arange(start, start + T, device=q.device)  # positions of the queries
            j = torch.arange(start + T - S, start + T, device=q.device)  # and of the keys
            mask = self.mask(i, j, window, p)
        o = self.attend(q, k, v, mask, p)  # (B, H, T, D)
        return o.transpose(1, 2)

    def read_documents(self, p):
        # one call for the documents of all lengths, if no subclass changes `read`, `attend` or the
        # scores, and a kernel takes it
        own = type(self)
        is_plain = own.attend is Softmax.attend and own.read is Softmax.read and self.bias is None
        if is_plain and layers.takes_documents(p.q, self.window):
            return layers.attention_of_documents(p.q, p.k, p.v, p.document, self.window)
        return super().read_documents(p)

    def mask(self, i: Tensor, j: Tensor, window: int, p: Projection) -> Tensor:
        """Which keys at positions j (S,) are seen by queries at i (T,): bool (T, S). With a bias,
        the float (1, H, T, S) that is added to the scores."""
        distance = i[:, None] - j
        sees = (distance >= 0) & (distance < window)
        if self.bias is None:
            return sees
        added = self.bias(i[:, None], j).masked_fill(~sees, -torch.inf)
        return added.expand(1, self.n_head, -1, -1)

    def attend(self, q, k, v, mask: Tensor | None, p: Projection) -> Tensor:
        """q (B, H, T, D), k and v (B, Hk, S, D) -> the readout (B, H, T, D). Without a mask a text
        is read causally, and a single query sees all keys. p: what `read` got, for subclasses (sinks,
        XSA)."""
        return layers.attention(q, k, v, mask)

    def explicit_weights(self, p):
        q, k = p.q.transpose(1, 2), p.k.transpose(1, 2)
        i = torch.arange(q.shape[2], device=q.device)
        return self.weights(q, k, self.mask(i, i, self.window or len(i), p), p)

    def weights(self, q, k, mask: Tensor, p: Projection) -> Tensor:
        """q (B, H, T, D), k (B, Hk, S, D) -> the weights of the values (B, H, T, S), written out."""
        return layers.scores(q, k, mask).softmax(-1)

    @property
    def window(self) -> int | None:
        """How many keys a query sees, its own included; None: all."""
        return self.config.window_of(self.layer)

    @property
    def cache_size(self) -> int:
        """How many tokens are remembered in decoding."""
        return min(self.window or self.config.block_size, self.config.block_size)

    def state_shapes(self, B, length):
        # (B, Hk, S, D) is read twice as fast for one query as (B, S, Hk, D)
        shape = (B, self.shapes["key"][0], min(self.cache_size, length), self.value_width)
        return {"k": shape, "v": shape}

    def flops_per_token(self, T: int) -> float:
        """FLOPs for one token: scores, and the weighted sum. The query at t = 1, ..., T sees
        min(t, most) keys; mean_keys is the mean over t."""
        most = min(T, self.window or T)
        mean_keys = most - most * (most - 1) / (2 * T)
        return 2 * 2 * self.n_head * self.value_width * mean_keys

    @classmethod
    def check(cls, name, config):
        rotated = int(config.head_dim * cls.rope_fraction)
        if "rope" in config.position and (rotated < 2 or rotated % 2):
            raise UserError(
                f"position='rope': {name} turns {rotated} channels of a head; it must be an even number of at least 2"
            )
        if cls.norm_of(config) == "denominator":
            raise UserError(
                f"readout_norm='denominator' makes no sense for {name}: its weights sum to one already"
            )


class CosFormer(Mixer):
    """cosFormer (Qin et al. 2022): weight_ij = relu(q_i) . relu(k_j) * cos(pi/2 (i - j) / M),
    divided by the sum of the weights over j.

    M is block_size and not the length of the input, so that the output of a token does not depend
    on later tokens. Past M the cosine would turn negative: such a position raises UserError. With the
    features [q cos, q sin], of width 2D, it is the plain recurrence: cos(a - b) = cos a cos b +
    sin a sin b.
    """

    past_block_size = "ends"
    published_norm = "denominator"
    has_positive_weights = True

    def __init__(self, config, gate):
        H, D = config.n_head, config.head_dim
        super().__init__(config, gate, query=(H, D), key=(H, D), value=(H, D))
        self.key_width = 2 * D  # of the features
        self.qkv = FusedLinear(config.n_embd, [H * D] * 3, heads=[H] * 3)
        self.conv = make_conv(config, 3 * H * D)
        self.angles = layers.Angles(layers.quarter_turn, config.block_size)

    def project(self, x, state, start, document=None):
        qkv = self.conv(self.qkv(x), state, document)
        q, k, v = qkv.unflatten(-1, (-1, self.value_width)).chunk(3, dim=2)  # (B, T, H, D)
        return Projection(F.relu(q), F.relu(k), v)

    def gated_projection(self, x, state=None, start=0, document=None):
        """Gates q and k, which have width D, and turns them into features of width 2D. Raises
        UserError past M."""
        p = super().gated_projection(x, state, start, document)
        M = self.config.block_size
        end = start + x.shape[1]
        if end > M:
            raise UserError(
                f"cosformer: position {end} is past block_size={M}, where its cosine turns negative"
            )
        # (T, 1, 1), or (B, T, 1, 1)
        cos, sin = self.angles(at_least_float32(p.q), start, document)
        q = CosSinFeatures.call(at_least_float32(p.q), cos, sin)  # (B, T, H, 2D)
        k = CosSinFeatures.call(at_least_float32(p.k), cos, sin)
        return p.replace(q=q, k=k)


class GLA(Mixer):
    """Gated linear attention (Yang et al. 2023): S_t = diag(a_t) S_{t-1} + k_t v_t^T, o_t = q_t S_t.

    The decay a_t = exp(logsigmoid(W2 W1 x + b) / 16) is one for each channel of the keys. q is
    scaled by Dk^-0.5.
    """

    published_norm = "rms"
    native_gate = ("silu", "after norm")
    decay_rank = decay_temperature = 16  # as published

    def __init__(self, config, gate):
        _, H, Dk, Dv = config.head_sizes  # each head has keys of its own
        super().__init__(config, gate, query=(H, Dk), key=(H, Dk), value=(H, Dv))
        self.split = [H * Dk, H * Dk, H * Dv]
        self.qkv = FusedLinear(config.n_embd, self.split, heads=[H] * 3)
        self.conv = make_conv(config, sum(self.split))
        self.decay_in = nn.Linear(config.n_embd, self.decay_rank, bias=False)
        self.decay_out = nn.Linear(self.decay_rank, H * Dk)

    def project(self, x, state, start, document=None):
        qkv = self.conv(self.qkv(x), state, document).split(self.split, dim=-1)
        q, k, v = (y.unflatten(-1, (self.n_head, -1)) for y in qkv)  # (B, T, H, Dk or Dv)
        logits = self.decay_out(self.decay_in(x)).unflatten(-1, (-1, self.key_width))
        log_decay = F.logsigmoid(at_least_float32(logits)) / self.decay_temperature
        return Projection(q * self.key_width**-0.5, k, v, log_decay)  # log_decay (B, T, H, Dk)


class Mamba2(Mixer):
    """Mamba-2 (Dao & Gu 2024): S_t = exp(-dt_t A) S_{t-1} + k_t (dt_t v_t)^T, o_t = q_t S_t + D v_t.

    A, dt and D are one number a head; q and k are shared by all heads. The paper calls q, k and v
    C, B and x.
    """

    published_norm = "rms"
    norms_heads_together = True
    native_gate = ("silu", "before norm")
    is_linear_in_query = False  # the term D v_t of the readout has no q

    def __init__(self, config, gate):
        H, Dv, N = config.expand * config.n_head, config.head_dim, config.state_size
        super().__init__(config, gate, query=(1, N), key=(1, N), value=(H, Dv))
        self.split = [H * Dv, N, N]
        self.in_proj = FusedLinear(config.n_embd, [*self.split, H], heads=[H])  # v has H heads
        self.conv = make_conv(config, sum(self.split), published_width=4, bias=True)
        # Mixer.init_parameter has their starts
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.A_log = nn.Parameter(torch.empty(H))
        self.D = nn.Parameter(torch.empty(H))

    def project(self, x, state, start, document=None):
        vkq, dt = self.in_proj(x).split([sum(self.split), self.n_head], dim=-1)
        v, k, q = F.silu(self.conv(vkq, state, document)).split(self.split, dim=-1)
        k = k.unflatten(-1, (1, -1))  # (B, T, 1, N)
        q = q.unflatten(-1, (1, -1))
        v = v.unflatten(-1, (-1, self.value_width))  # (B, T, H, Dv)
        dt = F.softplus(at_least_float32(dt) + self.dt_bias)  # (B, T, H)
        dt_v = (dt[..., None] * v).to(v.dtype)
        return Projection(q, k, dt_v, -self.A_log.exp() * dt, skip=self.D[:, None] * v)


class DeltaNet(Mixer):
    """DeltaNet (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule"):
    S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = q_t S_t. q and k are L2-normed,
    and q is then scaled by Dk^-0.5.

    beta = beta_max sigmoid(W x). With beta_max = 2 the eigenvalue 1 - beta can be negative (Grazzi
    et al. 2024, "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues"). Subclasses
    multiply S_{t-1} by a decay exp(-A softplus(dt)).
    """

    published_norm = "rms"
    # S is read once more, for what it holds under k, and each level is written
    flops_per_entry = 7
    flops_per_level = 7
    decay: str | None = None  # one per "head" or per "channel" of the keys
    n_steps = 1  # of the delta rule per token. A subclass with more makes sub-tokens of them

    def __init__(self, config, gate):
        Hk, H, Dk, Dv = config.head_sizes
        native_rank = Dv if self.decay == "channel" else 0  # as published for KDA
        shapes: dict = dict(query=(Hk, Dk), key=(Hk, Dk), value=(H, Dv))
        super().__init__(config, gate, native_rank=native_rank, **shapes)
        n = self.n_steps
        self.split = [Hk * Dk, n * Hk * Dk, n * H * Dv]  # q, k, v
        of_beta = self.beta_widths(config)
        of_dt = [H] if self.decay == "head" else []
        self.parts = [sum(self.split), sum(of_beta), *of_dt]  # how project cuts in_proj's output
        # in_proj's rows, matrix by matrix (q, n of k, n of v): Muon steps each by itself
        of_qkv = [Hk * Dk] * (1 + n) + [H * Dv] * n
        heads = [Hk] * (1 + n) + [H] * n
        self.in_proj = FusedLinear(config.n_embd, of_qkv + of_beta + of_dt, heads=heads)
        self.conv = make_conv(config, sum(self.split), published_width=4)
        if self.decay == "channel":
            self.decay_in = nn.Linear(config.n_embd, Dv, bias=False)
            self.decay_out = nn.Linear(Dv, H * Dk, bias=False)
        if self.decay:  # Mixer.init_parameter has their starts
            self.dt_bias = nn.Parameter(torch.empty(H * Dk if self.decay == "channel" else H))
            self.A_log = nn.Parameter(torch.empty(H))

    def beta_widths(self, config) -> list[int]:
        """The rows of each matrix that makes beta: n_steps matrices of H rows, one per head."""
        _, H, _, _ = config.head_sizes
        return [H] * self.n_steps

    def project(self, x, state, start, document=None):
        qkv, beta, *dt = self.in_proj(x).split(self.parts, dim=-1)
        q, k, v = F.silu(self.conv(qkv, state, document)).split(self.split, dim=-1)
        q = q.unflatten(-1, (-1, self.key_width))  # (B, T, Hk, Dk)
        k = k.unflatten(-1, (-1, self.key_width))  # (B, T, n Hk, Dk), with n = n_steps
        v = v.unflatten(-1, (-1, self.value_width))  # (B, T, n H, Dv)
        q = layers.l2_norm(q) * self.key_width**-0.5
        k = layers.l2_norm(k)
        beta = self.config.beta_max * at_least_float32(beta).sigmoid()  # (B, T, n H)
        log_decay = None
        if self.decay == "head":
            rate = F.softplus(at_least_float32(dt[0]) + self.dt_bias)
            log_decay = -self.A_log.exp() * rate  # (B, T, H)
        elif self.decay == "channel":
            rate = F.softplus(at_least_float32(self.decay_out(self.decay_in(x))) + self.dt_bias)
            rate = rate.unflatten(-1, (-1, self.key_width))
            log_decay = -self.A_log.exp()[:, None] * rate  # (B, T, H, Dk)
        return Projection(q, k, v, log_decay, beta)


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet (Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule"):
    DeltaNet with a decay per head."""

    native_gate = ("silu", "after norm")
    decay = "head"
    A_range = (0.01, 16.0)


class KDA(DeltaNet):
    """Kimi Delta Attention (Kimi Linear, 2025): DeltaNet with a decay per key channel."""

    native_gate = ("sigmoid", "after norm")
    decay = "channel"


# variants.py adds its own
MIXERS = {
    "softmax": Softmax,
    "cosformer": CosFormer,
    "gla": GLA,
    "mamba2": Mamba2,
    "gated_deltanet": GatedDeltaNet,
    "deltanet": DeltaNet,
    "kda": KDA,
}

# --------------------------------------------------------------------------------------------------
# The GPT


def check_layers(config: GPTConfig) -> None:
    """Raises UserError for layers, MLPs, gates and norms that do not exist, or do not fit
    together."""
    check_choice("mlp", config.mlp, MLPS)
    check_choice("gate_activation", config.gate_activation, GATE_ACTIVATIONS)
    norms = ("published", "none", "denominator", *READOUT_NORMS)
    check_choice("readout_norm", config.readout_norm, norms)
    for name, gate in config.layers():
        check_choice("attention", name, MIXERS)
        MIXERS[name].check(name, config)
        check_gate(name, MIXERS[name], config, gate)
    used = {MIXERS[name] for name, _ in config.layers()}
    if config.levels != "none":
        if not any(mixer.has_levels for mixer in used):
            raise UserError(
                f"levels={config.levels!r}: no layer of {config.attention} has a recurrent state to be split"
            )
        if config.kernels == "fla":
            raise UserError(
                f"levels={config.levels!r}: fla has no kernel for it; leave kernels out"
            )
    has_recurrence = any(not issubclass(mixer, Softmax) for mixer in used)
    kernels.check_kernels(config.kernels, has_recurrence)
    if config.mlp == "none" and config.match_params:
        raise UserError("match_params=True: mlp='none' has no MLP to narrow")
    # norm_first=False puts the gate of a readout before its norm: at least one of the layers with
    # such a gate must have a norm. Where no layer has such a gate, at least one of all must
    gated = {MIXERS[name] for name, gate in config.layers() if "readout" in gate.positions}
    has_norm = any(mixer.norm_of(config) in READOUT_NORMS for mixer in gated or used)
    if not config.norm_first and not has_norm:
        raise UserError("norm_first=False: no layer has a norm for the gate to come before")


def check_documents(config: GPTConfig) -> None:
    """Raises UserError for a layer whose mixer cannot keep packed documents apart."""
    for name, _ in config.layers():
        for method in ("forward", "gated_projection", "project"):
            if "document" not in inspect.signature(getattr(MIXERS[name], method)).parameters:
                raise UserError(
                    f"mask_documents: {name} cannot keep packed documents apart: its `{method}` takes no "
                    "`document` (docs/mixers.md, Documents)"
                )


# keys.py knows no mixers: a new GPTConfig calls this
GPTConfig.checks.append(check_layers)


class MLP(nn.Module):
    """down(gelu(up(x))). If forward sets `auxiliary_loss`, in nats a token, GPT.forward adds it to
    the loss in training."""

    n_matrices = 2  # of n_embd x hidden
    n_idle = 0  # parameters that one token does not use, such as those of the other experts
    tolerance = 0.0  # as a mixer's: how much later tokens may change earlier logits by rounding

    def __init__(self, config, hidden):
        super().__init__()
        self.approximate = "tanh" if config.mlp == "gelu_tanh" else "none"
        self.up = nn.Linear(config.n_embd, hidden, bias=config.bias)
        self.down = ResidualLinear(hidden, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class SwiGLU(MLP):
    """down(silu(glu(x)) * up(x))."""

    n_matrices = 3

    def __init__(self, config, hidden):
        super().__init__(config, hidden)
        self.glu = nn.Linear(config.n_embd, hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.glu(x)) * self.up(x))


MLPS = {"gelu": MLP, "gelu_tanh": MLP, "swiglu": SwiGLU, "none": None}


def mlp_width(config: GPTConfig, mixer: Mixer) -> int:
    """The hidden width of the MLP beside this mixer. An MLP of any kind has as many parameters as a
    GELU MLP of width mlp_ratio * n_embd, and with match_params as many fewer as the mixer's gates
    have. Raises UserError if no width is left."""
    n = MLPS[config.mlp].n_matrices
    hidden = round(config.mlp_ratio * config.n_embd * 2 / n)
    if config.match_params:
        of_gates = sum(p.numel() for p in mixer.gates.parameters())
        # parameters of one hidden unit: all matrices but `down` have a bias for it
        of_unit = n * config.n_embd + (n - 1) * config.bias
        hidden -= round(of_gates / of_unit)
        if hidden < 1:
            raise UserError("match_params=True: the gate has more parameters than the MLP")
    return hidden


class Block(nn.Module):
    """x + mixer(norm(x)), then x + MLP(norm(x)), if there is one."""

    def __init__(self, config, name, gate):
        super().__init__()
        has_mlp = config.mlp != "none"
        self.norm_1 = make_norm(config)
        self.norm_2 = make_norm(config) if has_mlp else None
        self.mixer = MIXERS[name](config, gate)
        self.mlp = None
        if has_mlp:
            self.mlp = MLPS[config.mlp](config, mlp_width(config, self.mixer))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, state=None, start=0, **options):
        """x (B, T, C); state, start and, among the options, document as in Mixer."""
        x = x + self.dropout(self.mixer(self.norm_1(x), state, start, **options))
        if self.mlp is not None:
            x = x + self.dropout(self.mlp(self.norm_2(x)))
        return x


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits)[target] of each token: logits (..., V), targets (...) -> (...), 0 where
    a target is -100. Evaluation reports it, whatever loss GPT.loss trains on."""
    losses = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return losses.view_as(targets)


class NGrams(nn.Module):
    """Embeddings of the last two, three and four tokens, which GPT adds to the token's own, after
    the Byte Latent Transformer (Pagnoni et al. 2024).

    An n-gram is hashed to a row of its table, which it shares with others. A table costs one lookup
    a token. In a small model of bytes or characters the first layers need not learn these n-grams.
    """

    longest = 4  # tokens of an n-gram

    def __init__(self, config):
        super().__init__()
        self.rows = config.ngram_rows
        n_tables = self.longest - 1
        self.tables = nn.ModuleList(nn.Embedding(self.rows, config.n_embd) for _ in range(n_tables))

    def init_state(self, B: int, device=None) -> Tensor:
        """The ids of the tokens before a text (B, 3): -1, there are none."""
        return torch.full((B, self.longest - 1), -1, device=device)

    def forward(self, idx, state: dict | None = None, documents: Documents | None = None):
        """idx (B, T) -> (B, T, C). state: the dict of the first layer, which keeps the last ids."""
        B, T = idx.shape
        past = self.init_state(B, idx.device) if state is None else state["ids"]
        ids = torch.cat([past, idx], dim=1)  # (B, 3 + T)
        if state is not None:
            state["ids"] = ids[:, T:].clone()  # a view would keep the whole prefill alive
        x: Any = 0.0
        hashed = ids[:, -T:]  # int64, whatever idx is
        for back, table in enumerate(self.tables, start=1):
            begin = self.longest - 1 - back
            earlier = ids[:, begin : begin + T]  # the token `back` places before
            if documents is not None:
                earlier = earlier.masked_fill(documents.position < back, -1)
            # under 2^31, so that the product stays under 2^63
            hashed = (hashed * 1_000_003 + earlier + 1) % (2**31 - 1)
            # mixes in the high bits: else ids at equal distances would share few rows
            spread = hashed ^ (hashed >> 15)
            x = x + table(spread % self.rows)
        return x


class GPT(nn.Module):
    """Token and position embeddings, n_layer blocks, a norm, and the output layer. Raises UserError
    if vocab_size is None."""

    def __init__(self, config):
        super().__init__()
        if config.vocab_size is None:
            raise UserError("vocab_size is not set: give the number of token ids")
        self.config = config
        # for init_weights; drawn before the modules below are made, since their constructors draw,
        # too, and how much depends on the config
        seed = int(torch.randint(2**31, (), device="cpu"))
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wpe = None
        if config.position == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.ngrams = NGrams(config) if config.ngram_rows else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, name, gate) for name, gate in config.layers())
        self.norm = make_norm(config)
        tables: dict = {}  # of angles: layers of the same settings share one
        for layer, block in enumerate(self.blocks):
            mixer = block.mixer
            mixer.layer = layer
            if mixer.angles is not None:
                mixer.angles = tables.setdefault(mixer.angles.settings, mixer.angles)
        if not self.wte.weight.is_meta:  # a meta tensor has a shape and no data
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """How every parameter starts. s = 0.02. The first two rows win; init="pytorch" replaces the
        next two; the last row comes on top.

        | module, parameter          | start                                           |
        |----------------------------|-------------------------------------------------|
        | has an init_parameter      | what init_parameter(name, start, generator) does|
        | RMSNorm, LayerNorm         | 1, biases 0                                     |
        | Linear, Embedding          | N(0, s), biases 0                               |
        | ResidualLinear             | N(0, s / sqrt(2 n_layer))                       |
        | init="pytorch": Linear     | U(-1/sqrt(fan_in), 1/sqrt(fan_in)), biases 0    |
        | init="pytorch": Embedding  | N(0, 1)                                         |
        | a mixer's out_proj         | out_init_scale times what these rules give      |

        init_parameter writes the first values into the tensor `start`, which holds the constructor's
        (elsewhere start is a position). Raises UserError for a parameter without a rule.

        Each draw depends on (seed, name of the parameter) alone: two models of one seed start with
        the same weights wherever both have the parameter, so that a gated model starts where the
        ungated one does.
        """
        is_pytorch = self.config.init == "pytorch"
        of_residual = 0.02 * (2 * self.config.n_layer) ** -0.5
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
            elif isinstance(module, ResidualLinear):
                start.normal_(0.0, of_residual, generator=generator)
            elif isinstance(module, nn.Linear):
                start.normal_(0.0, 0.02, generator=generator)
            elif isinstance(module, nn.Embedding):
                start.normal_(0.0, 1.0 if is_pytorch else 0.02, generator=generator)
            else:
                kind = type(module).__name__
                raise UserError(
                    f"nothing says how {full_name} starts: give {kind} a method "
                    "init_parameter(name, start, generator)"
                )
            if isinstance(module, ResidualLinear):  # start_scale: 1, but for a mixer's out_proj
                start = start * module.start_scale
            p.copy_(start)

    def features(
        self,
        idx: Tensor,
        state: list[dict] | None = None,
        start: int = 0,
        document: Tensor | None = None,
    ) -> tuple[Tensor, list[dict] | None]:
        """idx (B, T) -> the hidden states after the last norm (B, T, C), and the state, which is
        updated in place. start: the position of idx[:, 0].

        document (B, T), of packed rows: for each token the index in its row at which its document
        begins (0 0 0 3 3: one document of three tokens, one of two). Each is read as if it were
        alone. Raises UserError where cosformer or learned positions would go past block_size, and
        for a mixer that cannot keep documents apart.
        """
        end = start + idx.shape[1]
        position: Any = slice(start, end)
        documents = None
        options = {}  # a block or mixer that reads no packed rows need not take `document`
        if document is not None:
            check_documents(self.config)
            documents = Documents(document)
            position = documents.position
            options["document"] = documents  # mixers get the object, not the tensor
        x = self.wte(idx)
        if self.wpe is not None:
            if end > self.config.block_size:
                raise UserError(
                    f"position='learned': there is no embedding past block_size={self.config.block_size}"
                )
            x = x + self.wpe.weight[position]
        if self.ngrams is not None:
            x = x + self.ngrams(idx, None if state is None else state[0], documents)
        x = self.dropout(x)
        for i, block in enumerate(self.blocks):
            x = block(x, None if state is None else state[i], start, **options)
        return self.norm(x), state

    @property
    def output_weight(self) -> Tensor:
        """The weight of the output layer (vocab_size, C): the embedding's own where they are tied."""
        return (self.wte if self.head is None else self.head).weight

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states (..., C) -> float logits (..., vocab_size)."""
        return layers.float_linear(x, self.output_weight)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of training, summed over the labels. Hidden states x (B, T, C), targets (B, T).

        It is token_losses(self.logits(x), targets).sum(), without the logits in memory
        (ops/loss.py). To train on another loss, edit this method alone.
        """
        return cross_entropy_sum(x, self.output_weight, targets)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        reduction: str = "mean",
        document: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, vocab_size) or, with targets (B, T), the loss in nats. Targets of -100 are
        masked.

        reduction: "mean" over the labels, or "sum", for a mean over more than this batch. document:
        None, or that of packed rows, as in `features`.
        """
        x, _ = self.features(idx, document=document)
        if targets is None:
            return self.logits(x)
        total = self.loss(x, targets)
        n_labels = (targets != IGNORE).sum()
        if self.training:
            modules = self.blocks.modules()
            total = total + n_labels * sum(getattr(one, "auxiliary_loss", 0.0) for one in modules)
        return total if reduction == "sum" else total / n_labels.clamp(min=1)

    def init_state(
        self, batch_size: int = 1, device=None, dtype=None, length: int | None = None
    ) -> list[dict]:
        """The state at the start of a text, a dict for each layer. length: the most tokens that
        will be read, so that a KV cache need be no longer (None: any number; a cache then has room
        for block_size tokens, or the window, and rolls). device: None is the weights'; dtype: None
        is torch's default."""
        device = device or self.wte.weight.device
        state = [block.mixer.init_state(batch_size, device, dtype, length) for block in self.blocks]
        if self.ngrams is not None:
            state[0]["ids"] = self.ngrams.init_state(batch_size, device)
        return state

    # methods: generate(idx, max_new_tokens, temperature=1.0, ...), and stream, which yields each id
    stream = sampling.stream
    generate = sampling.generate

    def n_params(self) -> int:
        """All parameters, position embeddings, too; a tied embedding counts once."""
        return sum(p.numel() for p in self.parameters())

    def state_bytes(self, batch_size: int = 1) -> int:
        """Bytes of the state of batch_size sequences: the size of the tensors of init_state, in
        float32."""
        # no data: a cache can be larger than the memory
        state = self.init_state(batch_size, device="meta")
        n_bytes = 0
        for layer in state:
            n_bytes += sum(tensor.nbytes for tensor in layer.values())
        return n_bytes

    def flops_per_token(self, T: int | None = None) -> float:
        """FLOPs of a token, forward, at context T (None: block_size); a multiply-add counts 2.
        Training: 3 times it."""
        n = self.n_params()
        for looked_up in (self.wpe, self.ngrams):  # and not multiplied
            if looked_up is not None:
                n -= sum(p.numel() for p in looked_up.parameters())
        if self.head is not None:  # else the embedding is the output layer, and multiplied there
            n -= self.wte.weight.numel()
        mixing = 0.0
        for block in self.blocks:
            mixing += block.mixer.flops_per_token(T or self.config.block_size)
            if block.mlp is not None:
                n -= block.mlp.n_idle
        return 2 * n + mixing

    def train_gates_only(self) -> None:
        """From here on, only the parameters of gates need a gradient."""
        gates = self.gate_parameters()
        if not gates:
            raise UserError("gates_only=True: no layer has a gate; name one, as in --gate=headwise")
        for p in self.parameters():
            p.requires_grad_(p in gates)

    def gate_parameters(self) -> set[nn.Parameter]:
        of_gates: set = set()
        for module in self.modules():
            if isinstance(module, Gate):
                of_gates.update(module.parameters())
        return of_gates

    def parameter_groups(
        self,
        weight_decay: float,
        gate_weight_decay: float | None = None,
        gate_lr_scale: float = 1.0,
    ) -> list[dict]:
        """Groups of (name, parameter) for an optimizer: matrices, then vectors (norms, biases,
        A_log), which do not decay; then the gates' matrices and vectors. gate_weight_decay=None:
        weight_decay. What needs no gradient is left out."""
        if gate_weight_decay is None:
            gate_weight_decay = weight_decay
        groups: list[dict] = [  # matrices, vectors, matrices of gates, vectors of gates
            {"params": [], "weight_decay": weight_decay, "lr_scale": 1.0},
            {"params": [], "weight_decay": 0.0, "lr_scale": 1.0},
            {"params": [], "weight_decay": gate_weight_decay, "lr_scale": gate_lr_scale},
            {"params": [], "weight_decay": 0.0, "lr_scale": gate_lr_scale},
        ]
        gates = self.gate_parameters()
        for name, p in self.named_parameters():
            if p.requires_grad:
                i = (2 if p in gates else 0) + (1 if p.dim() < 2 else 0)  # in the order above
                groups[i]["params"].append((name, p))
        return [group for group in groups if group["params"]]
