"""One GPT whose every layer picks its mixer, each with an optional gate after its readout.

    model = GPT(GPTConfig(attention="gla", gate="elementwise", vocab_size=256))
    logits = model(idx)                         # (B, T) ids -> (B, T, vocab_size)
    loss = model(idx, targets)                  # mean over the labels that are not -100

Read it in this order: the keys (GPTConfig), what all mixers share (Mixer), the mixers, the GPT. The gate is gate.py.
A new mixer is one class that says what it makes of x, and one line in MIXERS.
"""

import itertools
import math
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import configurator
import recurrence
from configurator import UserError, check_choice, key
from gate import (
    ADDITIVE_ACTIVATIONS,
    GATE_ACTIVATIONS,
    POSITIVE_ACTIVATIONS,
    READOUT_ACTIVATIONS,
    Gate,
    parse_gate,
)
from layers import RMSNorm, ShortConv, l2_norm, make_conv, manual_attention, rope_frequencies, rotate
from loss import IGNORE, cross_entropy_sum
from recurrence import at_least_float32
from sampling import check_request, draw

NORM_EPS = 1e-5
DENOMINATOR_MIN = 1e-6

# ----------------------------------------------------------------------------------------------------------------------
# The keys


@dataclass
class GPTConfig:
    """Every key of the model. Raises UserError for values that don't fit together."""

    n_layer: int = key(12, "number of blocks", at_least=1, at_most=10_000)
    n_head: int = key(12, "heads", at_least=1)
    head_dim: int | None = key(None, "width of a head (None: n_embd / n_head)", at_least=1)
    n_kv_head: int | None = key(None, "key and value heads of softmax layers (None: n_head)", at_least=1)
    n_embd: int = key(768, "width of the residual stream", at_least=1)
    block_size: int = key(
        1024, "context length; also cosFormer's M, the longest distance its cosine covers", at_least=1
    )
    vocab_size: int | None = key(None, "number of token ids (None: the data's)", at_least=1)
    pad_vocab_to: int = key(
        1, "round the embedding's rows up to a multiple; padding is never scored or sampled", at_least=1
    )
    mlp_ratio: float = key(4.0, "hidden width of the MLP over n_embd", above=0)
    dropout: float = key(0.0, "on the embedding and on both residual branches", at_least=0, below=1)

    init: str = key("normal", "how linear weights and embeddings start (init_weights)", choices=("normal", "pytorch"))
    attention: str = key(
        "softmax", "mixer of each layer: softmax, cosformer, gla, mamba2, gated_deltanet, or a pattern a,b,b"
    )
    position: str = key("rope", "rope (softmax layers only), learned or none", choices=("rope", "learned", "none"))
    rope_base: float = key(10000.0, "base of the rotary angles", above=1)
    rope_scaling: str = key("none", "how RoPE goes past block_size", choices=("none", "ntk", "yarn"))
    rope_factor: float = key(1.0, "how many times past it", at_least=1)
    qk_norm: bool = key(False, "RMSNorm on q and k of softmax layers, before RoPE")
    attention_softcap: float | None = key(
        None, "c: softmax scores become c * tanh(score / c); not fused, slower", above=0
    )
    logit_softcap: float | None = key(None, "c: logits become c * tanh(logit / c)", above=0)
    short_conv: int | None = key(
        None, "width of a causal convolution on q, k, v (None: as published, 0: off)", at_least=0, at_most=1024
    )
    expand: int = key(2, "mamba2: inner width over n_embd", at_least=1)
    state_size: int = key(128, "mamba2: width of B and C, the state's rows", at_least=1)
    n_groups: int = key(1, "mamba2: groups of heads that share B and C", at_least=1)

    gate: str = key("none", "none, native, GRANULARITY[@POSITION] joined by +; one entry or a pattern by layer a,b,b")
    gate_activation: str = key("sigmoid", "what the gate does with g", choices=GATE_ACTIVATIONS)
    gate_rank: int = key(0, "0: W_g has full rank; r: it is a product of rank r", at_least=0)
    gate_input: str = key("token", "token: g = W_g x; static: a learned constant", choices=("token", "static"))
    gate_bias: float | None = key(None, "start of a trained bias of the gate (None: no bias)")
    readout_norm: str = key(
        "published", "of every mixer's readout", choices=("published", "none", "rms", "denominator")
    )
    norm_first: bool = key(True, "true: act(norm(readout)); false: norm(act(readout))")
    readout_activation: str = key("none", "on the normed readout, before the gate", choices=READOUT_ACTIVATIONS)
    kernels: str = key(
        "auto", "of the recurrence; auto: fla on a GPU where it is installed", choices=("auto", "torch", "fla")
    )
    match_params: bool = key(False, "narrow the MLP until a gated model has its ungated twin's parameter count")

    def __post_init__(self):
        configurator.check(self)
        if self.attention == "gated":  # BlaGPT's name for softmax with the gate of Qiu et al.
            self.attention = "softmax"
            self.gate = "elementwise" if self.gate == "none" else self.gate
        if self.head_dim is None and self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd}: must be a multiple of n_head={self.n_head}, or head_dim be given")
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.n_head % (self.n_kv_head or self.n_head):
            raise UserError(f"n_kv_head={self.n_kv_head}: must divide n_head={self.n_head}")
        if self.position == "rope" and self.head_dim % 2:
            raise UserError(f"position='rope': needs an even head width, not {self.head_dim}")
        if self.kernels == "fla" and not recurrence.has_fla():
            raise UserError(
                "kernels='fla': needs a GPU and `pip install flash-linear-attention`; kernels=auto needs none"
            )
        classes = set()
        for name, gate in self.layers():
            MIXERS[name].check(self, gate)
            classes.add(MIXERS[name])
        if not self.norm_first and not any(mixer.norm_of(self) == "rms" for mixer in classes):
            raise UserError(
                "norm_first=False: no layer has a norm for the gate to come before (readout_norm='rms' adds one)"
            )

    def layers(self):
        """[(mixer name, LayerGate)] of each layer: the two patterns, repeated to n_layer."""
        names, gates = [part.strip() for part in self.attention.split(",")], self.gate.split(",")
        for name in names:
            check_choice("attention", name, (*MIXERS, "gated") if len(names) == 1 else MIXERS)
        gates = [parse_gate(gate) for gate in gates]
        return list(itertools.islice(zip(itertools.cycle(names), itertools.cycle(gates), strict=False), self.n_layer))


# ----------------------------------------------------------------------------------------------------------------------
# What all mixers share


class Projection(NamedTuple):
    """What a mixer makes of x. Shapes as in recurrence.py; H, Hk and Hv may differ (they divide one another)."""

    q: torch.Tensor  # (B, T, Hq, Dk)
    k: torch.Tensor  # (B, T, Hk, Dk)
    v: torch.Tensor  # (B, T, Hv, Dv)
    log_decay: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    skip: torch.Tensor | None = None  # (B, T, Hv, Dv), added to the readout


class Mixer(nn.Module):
    """q, k, v -> gates on them -> recurrence or softmax -> norm and gate, in their order -> output projection.

    A subclass says what was published (the class attributes) and what it makes of x (`project`).
    `y, state = mixer(x, state=None, start=0)`: x (B, T, C); start is the position of x[:, 0];
    state=None is the begin of text, with nothing kept; else a dict from `init_state`, given back filled. A state that
    was given is used up: softmax writes its keys and values in place.
    """

    past_block_size = "goes on"  # what decoding does there; softmax rolls its window, cosFormer ends
    published_norm = "none"  # none, rms (per head, or over the whole width: norm_width) or denominator
    native_gate = None  # (activation, before the norm or after it) of the gate the mixer was published with
    has_nonnegative_weights = False  # a denominator is a sum of weights: it needs them to be of one sign
    # a norm divides by the readout's size, and so undoes a gate of one number before it; a static gate on v or k, one
    # number for all tokens, is such a gate as well: {norm: {position: granularities}}
    erased_by = {
        "rms": dict.fromkeys(("query", "readout", "static value", "static key"), ("headwise", "scalar")),
        "denominator": dict.fromkeys(("query", "static key"), ("headwise", "scalar")),
    }

    @classmethod
    def norm_of(cls, config):
        return cls.published_norm if config.readout_norm == "published" else config.readout_norm

    @classmethod
    def check(cls, config, gate):
        """Raises UserError, with the reason, for a norm or a gate that makes no sense for this mixer."""
        name, norm = cls.__name__.lower(), cls.norm_of(config)
        if norm == "denominator" and not cls.has_nonnegative_weights:
            why = "its weights sum to one" if cls is Softmax else "its weights have both signs, their sum can be 0"
            raise UserError(f"readout_norm='denominator' makes no sense for {name}: {why}")
        if norm == "denominator" and not config.norm_first and gate.granularity:
            raise UserError(
                "norm_first=False makes no difference with a denominator: the division commutes with the gate"
            )
        for position, granularity in gate.granularity.items():
            term = f"gate='{granularity}@{position}' of {name}"
            table = cls.erased_by.get(norm, {})
            erased = table.get(position, ()) if position != "readout" or not config.norm_first else ()
            if config.gate_input == "static":
                erased = (*erased, *table.get(f"static {position}", ()))
            if granularity in erased and config.gate_activation not in ADDITIVE_ACTIVATIONS:
                raise UserError(
                    f"{term}: one number for all that the readout's {norm} norm divides by is divided out again"
                )
            is_in_denominator = norm == "denominator" and position in ("query", "key", "denominator")
            if is_in_denominator and config.gate_activation not in POSITIVE_ACTIVATIONS:
                raise UserError(f"{term}: gate_activation={config.gate_activation!r} can turn its denominator negative")
            if position == "output" and granularity not in ("elementwise", "scalar"):
                raise UserError(f"{term}: the output projection has mixed the heads; use elementwise or scalar")
            if position == "denominator" and norm != "denominator":
                raise UserError(f"{term}: it has no denominator (its norm is {norm!r})")
            if position == "denominator" and granularity not in ("headwise", "scalar"):
                raise UserError(f"{term}: a denominator is one number a head; use headwise or scalar")

    def __init__(self, config, gate, *, query, key, value, n_head=None):
        """query, key, value: (heads, width) of each. n_head: heads of the readout (default: the queries')."""
        super().__init__()
        self.config, self.norm_kind = config, self.norm_of(config)
        self.n_head, self.key_width, self.value_width = n_head or query[0], query[1], value[1]
        readout = (self.n_head, self.value_width)
        shapes = dict(query=query, key=key, value=value, readout=readout, output=(1, config.n_embd))
        shapes["denominator"] = (self.n_head, 1)
        self.gates = nn.ModuleDict()
        if gate.native and self.native_gate:
            self.gates["native"] = Gate(config.n_embd, "elementwise", *readout, self.native_gate[0])
        options = dict(rank=config.gate_rank, has_bias=config.gate_bias is not None)
        options["is_static"] = config.gate_input == "static"
        for position, granularity in gate.granularity.items():
            shape = shapes[position]
            self.gates[position] = Gate(config.n_embd, granularity, *shape, config.gate_activation, **options)
        self.norm = RMSNorm(self.norm_width(), eps=NORM_EPS) if self.norm_kind == "rms" else None
        self.out_proj = nn.Linear(self.n_head * self.value_width, config.n_embd, bias=False)

    def norm_width(self):
        """Width the RMSNorm of the readout is taken over: one head."""
        return self.value_width

    def project(self, x, state, start):
        """x (B, T, C) -> Projection. A convolution reads and writes its past in `state` where that is a dict."""
        raise NotImplementedError

    def forward(self, x, state=None, start=0, only=None):
        state = None if state is None else dict(state)
        p = self.gated_projection(x, state, start)
        o = self.read(p, state, start)
        if only is not None:  # the tokens whose output is asked for, (1, M, ...): all below is token by token
            o, x, p = o[only][None], x[only][None], p._replace(skip=None if p.skip is None else p.skip[only][None])
        readout = self.finish(o, p, x)
        if self.out_proj.weight.itemsize < 4:  # a model in half precision; under autocast the weights are float32
            readout = readout.to(self.out_proj.weight.dtype)
        return self.gate("output", self.out_proj(readout.flatten(2))[:, :, None], x).squeeze(2), state

    def gate(self, position, y, x):
        return self.gates[position](y, x) if position in self.gates else y

    def gated_projection(self, x, state, start):
        p = self.project(x, state, start)
        skip = None if p.skip is None else self.gate("value", p.skip, x)  # a second way of v to the readout
        q, k, v = self.gate("query", p.q, x), self.gate("key", p.k, x), self.gate("value", p.v, x)
        return p._replace(q=q, k=k, v=v, skip=skip)

    def read(self, p, state, start):
        """The readout (B, T, H, Dv); with a denominator its value stands behind it, (B, T, H, Dv + 1)."""
        q, k, v = p.q, p.k, p.v
        if 1 < q.shape[2] < self.n_head:
            q, k = (x.repeat_interleave(self.n_head // x.shape[2], dim=2) for x in (q, k))
        if self.norm_kind == "denominator":
            v = F.pad(v, (0, 1), value=1.0)  # a channel of ones sums the weights
        uses_fla = q.is_cuda and self.config.kernels != "torch" and recurrence.has_fla()
        form = recurrence.recurrent if q.shape[1] == 1 else recurrence.fla if uses_fla else recurrence.chunked
        initial = None if state is None else state["S"]
        o, final = form(q, k, v, log_decay=p.log_decay, beta=p.beta, initial_state=initial)
        if state is not None:
            state["S"] = final
        return o

    def finish(self, o, p, x):
        """Divides by the denominator; then norm, activation and gates in the order the config says."""
        if self.norm_kind == "denominator":
            o, denominator = o.split([self.value_width, 1], dim=-1)
            o = o / self.gate("denominator", denominator, x).clamp(min=DENOMINATOR_MIN)
        if p.skip is not None:
            o = o + p.skip
        native_is_first = self.native_gate is not None and self.native_gate[1] == "before norm"
        if native_is_first:
            o = self.gate("native", o, x)
        if not self.config.norm_first:
            o = self.gate("readout", o, x)
        if self.norm is not None:
            o = self.normed(o)
        activation = READOUT_ACTIVATIONS[self.config.readout_activation]
        if activation is not None:
            o = activation(o)
        if not native_is_first:
            o = self.gate("native", o, x)
        if self.config.norm_first:
            o = self.gate("readout", o, x)
        return o

    def normed(self, o):
        o = at_least_float32(o)
        return self.norm(o if self.norm_width() == self.value_width else o.flatten(2)).view_as(o)

    def init_state(self, batch_size, device=None, dtype=None):
        """The state at the begin of text: zeros, float32 unless dtype says otherwise."""
        width = self.value_width + (self.norm_kind == "denominator")
        state = {"S": torch.zeros(batch_size, self.n_head, self.key_width, width, device=device, dtype=dtype)}
        return state | self.init_conv_state(batch_size, device, dtype)

    def init_conv_state(self, batch_size, device, dtype):
        conv = next((m for m in self.modules() if isinstance(m, ShortConv)), None)
        if conv is None:
            return {}
        return {"conv": torch.zeros(batch_size, conv.width - 1, conv.channels, device=device, dtype=dtype)}

    def weights(self, x, start=0):
        """The weights (B, H, T, T) of each value in the readout, before norm and gate, from an empty state."""
        p = self.gated_projection(x, None, start)
        return self.explicit_weights(p, start)

    def explicit_weights(self, p, start):
        repeat = self.n_head // p.q.shape[2]
        q, k = (x.repeat_interleave(repeat, dim=2) for x in (p.q, p.k))
        weights = recurrence.quadratic(q, k, log_decay=p.log_decay, beta=p.beta)
        if self.norm_kind == "denominator":
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=DENOMINATOR_MIN)
        return weights

    def flops_per_token(self, T):
        """Of the recurrence as it is defined, forward: write, read and decay of S. A multiply-add counts 2."""
        return 5 * self.n_head * self.key_width * self.value_width


# ----------------------------------------------------------------------------------------------------------------------
# The mixers


class Softmax(Mixer):
    """Softmax attention with RoPE, grouped key/value heads and, if asked for, QK-norm. Its state is the KV cache:
    the last block_size keys and values, a ring that old entries leave."""

    past_block_size = "rolls"
    # a gate on q or k is a temperature: nothing erases it
    erased_by = {"rms": dict.fromkeys(("readout", "static value"), ("headwise", "scalar"))}

    def __init__(self, config, gate):
        H, Hk, D = config.n_head, config.n_kv_head or config.n_head, config.head_dim
        super().__init__(config, gate, query=(H, D), key=(Hk, D), value=(Hk, D))
        self.qkv = nn.Linear(config.n_embd, (H + 2 * Hk) * D, bias=False)
        self.conv = make_conv(config, (H + 2 * Hk) * D)
        self.q_norm = RMSNorm(D, eps=NORM_EPS) if config.qk_norm else None
        self.k_norm = RMSNorm(D, eps=NORM_EPS) if config.qk_norm else None
        self.split = (H, Hk)
        scaling = config.rope_scaling, config.rope_factor, config.block_size
        self.rope = rope_frequencies(D, config.rope_base, *scaling)

    def project(self, x, state, start):
        qkv = self.qkv(x)
        if self.conv is not None:
            qkv = self.conv(qkv, state)
        H, Hk = self.split
        qk, v = qkv.unflatten(-1, (-1, self.value_width)).split((H + Hk, Hk), dim=2)  # (B, T, H + Hk or Hk, D)
        if self.q_norm is not None:
            q, k = at_least_float32(qk).split((H, Hk), dim=2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=2)
        if self.config.position == "rope":
            qk = rotate(qk, start, *self.rope)
        q, k = qk.to(v.dtype).split((H, Hk), dim=2)
        return Projection(q, k, v)

    def read(self, p, state, start):
        (q, k, v), mask = (x.transpose(1, 2) for x in (p.q, p.k, p.v)), None  # (B, H, T, D)
        if state is not None:
            k, v, mask = self.remember(k, v, state, start)
        if k.shape[1] < self.n_head:  # else it would copy them for nothing
            k, v = (x.repeat_interleave(self.n_head // x.shape[1], dim=1) for x in (k, v))
        if self.config.attention_softcap is not None:
            o, _ = manual_attention(q, k, v, mask, self.config.attention_softcap, is_causal=state is None)
        else:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=state is None)
        return o.transpose(1, 2)

    def remember(self, k, v, state, start):
        """Writes k, v (B, Hk, T, D) to the ring; returns all that the new queries may see, so too, and the mask."""
        M, T = self.config.block_size, k.shape[2]
        if T == 1:  # one query sees the whole ring, in any order
            state["k"][:, :, start % M], state["v"][:, :, start % M] = k[:, :, 0], v[:, :, 0]
            seen = min(start + 1, M)
            return state["k"][:, :, :seen].to(k.dtype), state["v"][:, :, :seen].to(v.dtype), None
        past = torch.arange(max(0, start - M + 1), start, device=k.device)
        new = torch.arange(start, start + T, device=k.device)
        position = torch.cat([past, new])
        distance = new[:, None] - position[None, :]
        all_k, all_v = (
            torch.cat([state[name][:, :, past % M].to(x.dtype), x], dim=2) for name, x in (("k", k), ("v", v))
        )
        for name, x in (("k", k), ("v", v)):
            state[name][:, :, new[-M:] % M] = x[:, :, -M:].to(state[name])
        return all_k, all_v, (distance >= 0) & (distance < M)

    def init_state(self, batch_size, device=None, dtype=None):
        # a head's keys lie side by side: one query reads them at twice the speed
        shape = (batch_size, self.split[1], self.config.block_size, self.value_width)
        state = {name: torch.zeros(shape, device=device, dtype=dtype) for name in ("k", "v")}
        return state | self.init_conv_state(batch_size, device, dtype)

    def explicit_weights(self, p, start):
        q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))
        k, v = (x.repeat_interleave(self.n_head // x.shape[1], dim=1) for x in (k, v))
        return manual_attention(q, k, v, None, self.config.attention_softcap, is_causal=True)[1]

    def flops_per_token(self, T):
        """Scores and weighted sum over the (T + 1) / 2 keys a query sees on average."""
        return 2 * 2 * self.n_head * self.value_width * (T + 1) / 2


class CosFormer(Mixer):
    """cosFormer (Qin et al. 2022): weight_ij = relu(q_i) . relu(k_j) * cos(pi/2 (i - j) / M), over their sum.

    M is block_size, not the length at hand, so that a prefix gives a prefix. Past M the cosine would turn negative.
    """

    past_block_size = "ends"
    published_norm = "denominator"
    has_nonnegative_weights = True

    def __init__(self, config, gate):
        H, D = config.n_head, config.head_dim
        super().__init__(config, gate, query=(H, D), key=(H, D), value=(H, D))
        self.key_width = 2 * D
        self.qkv = nn.Linear(config.n_embd, 3 * H * D, bias=False)
        self.conv = make_conv(config, 3 * H * D)

    def project(self, x, state, start):
        qkv = self.qkv(x)
        if self.conv is not None:
            qkv = self.conv(qkv, state)
        q, k, v = qkv.unflatten(-1, (-1, self.value_width)).chunk(3, dim=2)  # (B, T, H, D)
        return Projection(F.relu(q), F.relu(k), v)

    def reweigh(self, p, start):
        """cos(a - b) = cos a cos b + sin a sin b: a product of features [cos, sin] of width 2D."""
        M, end = self.config.block_size, start + p.q.shape[1]
        if end > M:
            raise UserError(f"cosformer: position {end} is past block_size={M}, where its cosine turns negative")
        angle = torch.arange(start, end, device=p.q.device, dtype=torch.float64) * (math.pi / 2 / M)
        q, k = at_least_float32(p.q), at_least_float32(p.k)
        cos, sin = angle.cos().to(q.dtype)[:, None, None], angle.sin().to(q.dtype)[:, None, None]  # (T, 1, 1)
        return p._replace(q=torch.cat([q * cos, q * sin], -1), k=torch.cat([k * cos, k * sin], -1))

    def read(self, p, state, start):
        return super().read(self.reweigh(p, start), state, start)

    def explicit_weights(self, p, start):
        return super().explicit_weights(self.reweigh(p, start), start)


class GLA(Mixer):
    """Gated linear attention (Yang et al. 2023): a decay per key channel, exp(logsigmoid(W2 W1 x + b) / 16)."""

    published_norm = "rms"
    native_gate = ("silu", "after norm")

    def __init__(self, config, gate):
        C, H, D = config.n_embd, config.n_head, config.head_dim
        super().__init__(config, gate, query=(H, D), key=(H, D), value=(H, D))
        self.qkv = nn.Linear(C, 3 * H * D, bias=False)
        self.conv = make_conv(config, 3 * H * D)
        self.decay_in = nn.Linear(C, 16, bias=False)
        self.decay_out = nn.Linear(16, H * D)

    def project(self, x, state, start):
        qkv = self.qkv(x)
        if self.conv is not None:
            qkv = self.conv(qkv, state)
        q, k, v = qkv.unflatten(-1, (-1, self.value_width)).chunk(3, dim=2)  # (B, T, H, D)
        logits = self.decay_out(self.decay_in(x)).unflatten(-1, (-1, self.key_width))  # (B, T, H, D)
        return Projection(q * self.key_width**-0.5, k, v, F.logsigmoid(at_least_float32(logits)) / 16)


class Mamba2(Mixer):
    """Mamba-2 (Dao & Gu 2024): decay exp(-dt A) per head, v = dt x, q and k shared by a group of heads, D x added."""

    published_norm = "rms"
    native_gate = ("silu", "before norm")
    # the norm is over all heads, and D x shows a gate on q or k
    erased_by = {"rms": dict.fromkeys(("readout", "static value"), ("scalar",))}
    A_range = (1.0, 16.0)

    @classmethod
    def check(cls, config, gate):
        super().check(config, gate)
        if config.expand * config.n_head % config.n_groups:
            raise UserError(f"n_groups={config.n_groups}: must divide mamba2's {config.expand * config.n_head} heads")

    def __init__(self, config, gate):
        H, D = config.expand * config.n_head, config.head_dim
        G, N = config.n_groups, config.state_size
        super().__init__(config, gate, query=(G, N), key=(G, N), value=(H, D), n_head=H)
        self.in_proj = nn.Linear(config.n_embd, H * D + 2 * G * N + H, bias=False)
        self.conv = make_conv(config, H * D + 2 * G * N, published_width=4, bias=True)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(H)) for _ in range(3))
        self.split = (H * D, G * N, G * N)

    def norm_width(self):
        """The whole readout, not one head."""
        return self.n_head * self.value_width

    def normed(self, o):
        """Over the whole readout; with several groups, over each group's part of it."""
        if self.config.n_groups == 1:
            return super().normed(o)
        groups = at_least_float32(o).flatten(2).unflatten(-1, (self.config.n_groups, -1))
        o_normed = F.rms_norm(groups, groups.shape[-1:], eps=NORM_EPS).flatten(2)
        return (o_normed * self.norm.weight).view_as(o)

    def project(self, x, state, start):
        vkq, dt = self.in_proj(x).split([sum(self.split), self.n_head], dim=-1)
        if self.conv is not None:
            vkq = self.conv(vkq, state)
        v, k, q = F.silu(vkq).split(self.split, dim=-1)
        k, q = (y.unflatten(-1, (-1, self.key_width)) for y in (k, q))  # (B, T, G, N)
        v = v.unflatten(-1, (-1, self.value_width))  # (B, T, H, D)
        dt = F.softplus(at_least_float32(dt) + self.dt_bias)  # (B, T, H)
        return Projection(q, k, dt[..., None] * v, -self.A_log.exp() * dt, skip=self.D[:, None] * v)


class GatedDeltaNet(Mixer):
    """Gated DeltaNet (Yang et al. 2024): a decay per head and the delta rule, on L2-normed q and k."""

    published_norm = "rms"
    native_gate = ("silu", "after norm")
    # the delta rule is not linear in k
    erased_by = {"rms": dict.fromkeys(("query", "readout", "static value"), ("headwise", "scalar"))}
    A_range = (0.01, 16.0)

    def __init__(self, config, gate):
        H, D = config.n_head, config.head_dim
        super().__init__(config, gate, query=(H, D), key=(H, D), value=(H, D))
        self.in_proj = nn.Linear(config.n_embd, 3 * H * D + 2 * H, bias=False)
        self.conv = make_conv(config, 3 * H * D, published_width=4)
        self.dt_bias, self.A_log = (nn.Parameter(torch.empty(H)) for _ in range(2))

    def project(self, x, state, start):
        H = self.n_head
        qkv, beta, dt = self.in_proj(x).split([3 * H * self.value_width, H, H], dim=-1)
        if self.conv is not None:
            qkv = self.conv(qkv, state)
        q, k, v = F.silu(qkv).unflatten(-1, (-1, self.value_width)).chunk(3, dim=2)  # (B, T, H, D)
        dt = F.softplus(at_least_float32(dt) + self.dt_bias)  # (B, T, H)
        beta = at_least_float32(beta).sigmoid()
        return Projection(l2_norm(q) * self.key_width**-0.5, l2_norm(k), v, -self.A_log.exp() * dt, beta)

    def flops_per_token(self, T):
        """As for the others, and one more read of S: what it holds under k."""
        return 7 * self.n_head * self.key_width * self.value_width


MIXERS = {
    "softmax": Softmax,
    "cosformer": CosFormer,
    "gla": GLA,
    "mamba2": Mamba2,
    "gated_deltanet": GatedDeltaNet,
}

# ----------------------------------------------------------------------------------------------------------------------
# The GPT


class MLP(nn.Module):
    def __init__(self, config, hidden):
        super().__init__()
        self.up = nn.Linear(config.n_embd, hidden, bias=False)
        self.down = nn.Linear(hidden, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """The same for every mixer: x + mixer(norm(x)), then x + MLP(norm(x)).

    only: None, or (B, T) true for the tokens whose output is wanted; it is then (1, M, C), those and no others.
    """

    def __init__(self, config, name, gate):
        super().__init__()
        C, hidden = config.n_embd, round(config.mlp_ratio * config.n_embd)
        self.norm_1, self.norm_2 = RMSNorm(C, eps=NORM_EPS), RMSNorm(C, eps=NORM_EPS)
        self.mixer = MIXERS[name](config, gate)
        if config.match_params:  # a unit of the MLP is 2C weights
            hidden -= round(sum(p.numel() for p in self.mixer.gates.parameters()) / (2 * C))
            if hidden < 1:
                raise UserError(
                    f"match_params=True: the gate has more parameters than the MLP (mlp_ratio={config.mlp_ratio})"
                )
        self.mlp = MLP(config, hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, state=None, start=0, only=None):
        y, state = self.mixer(self.norm_1(x), state, start, only)
        x = (x if only is None else x[only][None]) + self.dropout(y)
        return x + self.dropout(self.mlp(self.norm_2(x))), state


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.vocab_size is None:
            raise UserError("vocab_size=None: a model needs the number of token ids")
        self.config = config
        seed = int(torch.randint(2**31, (), device="cpu"))  # before the modules below draw weights of their own
        rows = -(-config.vocab_size // config.pad_vocab_to) * config.pad_vocab_to
        self.wte = nn.Embedding(rows, config.n_embd)  # also the output weights: tied
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, name, gate) for name, gate in config.layers())
        self.norm = RMSNorm(config.n_embd, eps=NORM_EPS)
        if not self.wte.weight.is_meta:  # a model of shapes alone
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """How every parameter starts. s = 0.02.

        | parameter                                | start                                               |
        |------------------------------------------|-----------------------------------------------------|
        | linear and embedding weights             | N(0, s)                                             |
        | out_proj, mlp.down (residual branches)   | N(0, s / sqrt(2 n_layer))                           |
        | init="pytorch": all linear weights       | U(-1/sqrt(fan_in), 1/sqrt(fan_in))                  |
        | init="pytorch": embeddings               | N(0, 1)                                             |
        | gates: proj                              | 0 (native gates: as linear weights, as published)   |
        | gates: proj.bias and static              | gate_bias, or 0                                     |
        | gates: slope                             | 1                                                   |
        | norms                                    | 1                                                   |
        | conv                                     | U(-1/sqrt(width), 1/sqrt(width)), its bias too      |
        | decay_out.bias                           | 0                                                   |
        | A_log                                    | log of U(1, 16); gated_deltanet U(0.01, 16)         |
        | dt_bias                                  | softplus^-1 of a log-uniform dt in [0.001, 0.1]     |
        | D                                        | 1                                                   |

        Each is drawn from (seed, its own name): two models of one seed share the weights they have in
        common, whatever else they have, so that an arm with a gate starts where the arm without it does.
        """
        for name, p in self.named_parameters():
            path = name.split(".")
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            start = torch.zeros(p.shape)
            if "gates" in path and path[-3:-1] != ["native", "proj"] and path[-2] != "down":
                start += {"slope": 1.0, "weight": 0.0}.get(path[-1], self.config.gate_bias or 0.0)
            elif "norm" in path[-2]:
                start += 1.0
            elif path[-2] == "conv":
                bound = self.get_submodule(name.rpartition(".")[0]).width ** -0.5
                start.uniform_(-bound, bound, generator=generator)
            elif path[-1] == "A_log":
                start.uniform_(*self.get_submodule(name.rpartition(".")[0]).A_range, generator=generator).log_()
            elif path[-1] == "dt_bias":
                dt = start.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp()
                start = dt + torch.log(-torch.expm1(-dt))  # softplus(start) = dt
            elif path[-1] == "D":
                start += 1.0
            elif path[-1] == "bias":
                pass
            elif self.config.init == "pytorch" and path[-2] in ("wte", "wpe"):
                start.normal_(generator=generator)
            elif self.config.init == "pytorch":
                start.uniform_(-(p.shape[1] ** -0.5), p.shape[1] ** -0.5, generator=generator)
            else:
                is_residual = path[-2] in ("out_proj", "down") and "gates" not in path
                scale = (2 * self.config.n_layer) ** -0.5 if is_residual else 1.0
                start.normal_(0.0, 0.02 * scale, generator=generator)
            p.copy_(start)

    def features(self, idx, state=None, start=0, only=None):
        """idx (B, T) -> the last layer's normed hidden states (B, T, C) and the state (None if None was given).

        only: (B, T), true for the M tokens that are looked at; the last layer then computes (1, M, C), just those.
        """
        x = self.wte(idx)
        if self.wpe is not None:
            end = start + idx.shape[1]
            if end > self.config.block_size:
                raise UserError(f"position='learned': there is no embedding past block_size={self.config.block_size}")
            x = x + self.wpe.weight[start:end]
        x = self.dropout(x)
        new_state = None if state is None else []
        for i, block in enumerate(self.blocks):
            is_last = i == len(self.blocks) - 1
            x, layer_state = block(x, None if state is None else state[i], start, only if is_last else None)
            if state is not None:
                new_state.append(layer_state)
        return self.norm(x), new_state

    def logits(self, x):
        """Hidden states (..., C) -> float logits (..., vocab_size)."""
        logits = at_least_float32(F.linear(x, self.wte.weight)[..., : self.config.vocab_size])
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def forward(self, idx, targets=None, reduction="mean"):
        """Logits (B, T, vocab_size); or, with targets (B, T), the loss in nats: labels of -100 do not count.

        reduction: "mean" over the labels, or "sum", for a mean over more than this batch.
        """
        if targets is None:
            return self.logits(self.features(idx)[0])
        only = targets != IGNORE
        if only.device.type != "cpu" or only.all():  # a GPU would wait for the count, and compile for every other one
            only = None
        x, _ = self.features(idx, only=only)
        targets = targets if only is None else targets[only][None]
        total = cross_entropy_sum(
            x, self.wte.weight, targets, vocab_size=self.config.vocab_size, softcap=self.config.logit_softcap
        )
        return total if reduction == "sum" else total / (targets != IGNORE).sum().clamp(min=1)

    # -- sampling ------------------------------------------------------------------------------------------------------

    def init_state(self, batch_size=1, device=None, dtype=None):
        """One dict of tensors per layer: KV caches, recurrent states, the past of convolutions."""
        device = device or self.wte.weight.device
        return [block.mixer.init_state(batch_size, device, dtype) for block in self.blocks]

    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, n_tokens=None):
        """Yields max_new_tokens times the next ids (B, 1) after idx (B, T).

        temperature 0 is greedy. n_tokens: ids from there on are never drawn. Cost per token is that of one state:
        a recurrent mixer goes on for ever; softmax sees the last block_size tokens; cosFormer and learned
        positions end at block_size. UserError, before anything is drawn, for what cannot be.
        """
        check_request(self, idx, max_new_tokens, temperature, top_k, top_p, n_tokens)
        return self._stream(idx, max_new_tokens, temperature, top_k, top_p, n_tokens)

    @torch.no_grad()
    def _stream(self, idx, max_new_tokens, temperature, top_k, top_p, n_tokens):
        state, start = self.init_state(idx.shape[0], dtype=self.wte.weight.dtype), 0
        for _ in range(max_new_tokens):
            x, state = self.features(idx, state, start)
            start += idx.shape[1]
            idx = draw(self.logits(x[:, -1])[:, :n_tokens], temperature, top_k, top_p)
            yield idx

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, n_tokens=None):
        """idx (B, T) with max_new_tokens ids behind it, as `stream` draws them."""
        new = self.stream(idx, max_new_tokens, temperature, top_k, top_p, n_tokens)
        return torch.cat([idx, *new], dim=1)

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def n_params(self):
        return sum(p.numel() for p in self.parameters())

    def state_bytes(self, batch_size=1):
        """Bytes of the cache for one batch: the real size of the tensors of init_state."""
        state = self.init_state(batch_size, device="cpu")
        return sum(tensor.nbytes for layer in state for tensor in layer.values())

    def flops_per_token(self, T=None):
        """Forward, at context T (default block_size); a multiply-add counts 2. Training costs three times this."""
        looked_up = 0 if self.wpe is None else self.wpe.weight.numel()  # wte is a matrix product, at the end
        mixing = sum(block.mixer.flops_per_token(T or self.config.block_size) for block in self.blocks)
        return 2 * (self.n_params() - looked_up) + mixing

    def parameter_groups(self, weight_decay):
        """Matrices decay; vectors (norms, biases, convolution biases, decay parameters, static gates) do not."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
