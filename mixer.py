"""What all mixers share: gates, the recurrence, the readout's norm, the output projection, the
state of decoding.

A mixer is a subclass of `Mixer` (model.py, variants.py), which declares what was published and makes
q, k and v of x.
"""

import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import UserError
from gate import POSITIONS, Gate
from keys import GPTConfig
from ops import kernels, levels, recurrence
from ops.fast import at_least_float32
from ops.layers import Angles, ResidualLinear, RMSNorm, ShortConv

DENOMINATOR_MIN = 1e-6
# modules made as norm(width, eps=...); one that cancels a factor of its inputs
READOUT_NORMS = {"rms": RMSNorm}


class Projection(NamedTuple):
    """What `project` returns. In softmax layers k and v have equally many heads, which divide q's:
    Hk = Hv.

    In all others v has one for each head of the readout, and q and k equally many, which divide
    them: Hq = Hk.
    """

    q: torch.Tensor  # (B, T, Hq, Dk)
    k: torch.Tensor  # (B, T, Hk, Dk)
    v: torch.Tensor  # (B, T, Hv, Dv)
    log_decay: torch.Tensor | None = None  # (B, T, H), or (B, T, H, Dk) per key channel
    beta: torch.Tensor | None = None  # (B, T, H), of the delta rule
    # (B, T, Hk, Dk), the key of what the delta rule erases, if that is not k
    erase: torch.Tensor | None = None
    skip: torch.Tensor | None = None  # (B, T, Hv, Dv), added to the readout
    sink: torch.Tensor | None = None  # (B, H, T), the logits of a softmax layer's sinks
    levels: torch.Tensor | None = None  # (B, T, H, L), of log-linear states; Mixer makes them


class Levels(nn.Module):
    """x (B, T, C) -> how much of each level a token reads, lambda (B, T, H, L) > 0 (ops/levels.py).

    log_linear: softplus(scale W x), about 0.69 at the start (Guo et al. 2025). merged: softmax(W x)
    over the levels, and a token is in the block that it completes when it reads it: the past of
    token 7 is one block, and not four.
    """

    def __init__(self, config, n_head):
        super().__init__()
        self.n_levels = max(2, 1 + (config.block_size - 1).bit_length())
        self.is_merged = config.levels == "merged"
        self.proj = nn.Linear(config.n_embd, n_head * self.n_levels, bias=False)
        self.scale = None if self.is_merged else nn.Parameter(torch.empty(n_head * self.n_levels))

    def init_parameter(self, name: str, start: torch.Tensor, generator: torch.Generator) -> None:
        start.fill_(1.0)

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        y = at_least_float32(self.proj(x))
        if not self.is_merged:
            return F.softplus(self.scale * y).unflatten(-1, (-1, self.n_levels))
        y = y.unflatten(-1, (-1, self.n_levels)).softmax(-1)
        # the levels up to the one that the token completes are read as that one
        # (T, 1, 1)
        end = torch.arange(start + 1, start + 1 + x.shape[1], device=x.device)[:, None, None]
        level = torch.arange(self.n_levels, device=x.device)
        # (T, 1, L)
        level = level.maximum(levels.level_of(end, end - 1)).clamp(max=self.n_levels - 1)
        return y.gather(-1, level.expand_as(y))


class Mixer(nn.Module):
    """q, k, v -> gates on them -> recurrence or softmax -> norm and gates of the readout -> output
    projection.

    A subclass declares what was published (the class attributes) and computes q, k and v from x
    (`project`). `y = mixer(x, state=None, start=0, only=None)`: x and y are (B, T, C), and start is
    the position of x[:, 0]. state: None for a text read in one call; otherwise what `init_state`
    made, which every call updates in place. only: (B, T), true for M tokens; y is then (1, M, C),
    their outputs alone.
    """

    layer = 0  # the index of the mixer's layer, which GPT sets
    longest: int | None = None  # the largest block_size that its `check` lets pass (None: any)
    sub_tokens = 1  # how many steps of the recurrence a token is
    # what decoding does there; softmax "rolls" its window, cosformer "ends"
    past_block_size = "goes on"
    # by how much later tokens may change earlier logits through rounding, as a share of the largest
    # logit in float32; an FFT does, which adds all tokens up before it rounds
    tolerance = 0.0
    published_norm = "none"  # of the readout: none, rms or denominator (the sum of the weights)
    # whether the readout's RMSNorm takes all heads together, with a weight for every channel; else
    # each head is normed on its own, and all have one weight
    norms_heads_together = False
    # (activation, "before norm" or "after norm") of the gate the mixer was published with
    native_gate: tuple[str, str] | None = None
    # a factor on one of these is a factor on the readout
    linear_in: tuple[str, ...] = ("query", "key", "value")
    has_positive_weights = False  # if so, their sum can be the readout's denominator
    A_range = (1.0, 16.0)  # of A at the start, where a parameter A_log has its logarithm
    # of S, for a token: 2 to write it, 2 to read it and 1 for its decay, also where that is one
    flops_per_entry = 5
    flops_per_level = 3  # of the state of a level: it is not written
    has_levels = True  # whether `levels` splits the state into those of log2(T) blocks

    def __init_subclass__(cls):
        """A class with a `read` or `forward` of its own inherits nothing that was known of another
        readout."""
        super().__init_subclass__()
        if not vars(cls).keys().isdisjoint(("read", "forward")):
            cls.linear_in = vars(cls).get("linear_in", ())
            # None: nothing can show its weights
            cls.explicit_weights = vars(cls).get("explicit_weights")
            cls.has_levels = vars(cls).get("has_levels", False)

    @classmethod
    def norm_of(cls, config: GPTConfig) -> str:
        """The norm of the readout in this config: "none", "rms" or "denominator"."""
        return cls.published_norm if config.readout_norm == "published" else config.readout_norm

    @classmethod
    def check(cls, name: str, config: GPTConfig) -> None:
        """Raises UserError for keys that don't fit this mixer; gate.check_gate checks its norm and
        gates."""
        if config.bias:
            raise UserError(
                f"bias=True: {name} has no biases; leave bias out, or let every layer be softmax"
            )

    def __init__(self, config, gate, *, query, key, value, native_rank=0):
        """query, key, value: (heads, width) of each. native_rank: rank of the native gate's weight
        (0: full rank)."""
        super().__init__()
        self.config, self.norm_kind = config, self.norm_of(config)
        # not in read, which torch.compile traces
        self.has_fla = config.kernels != "torch" and kernels.has_fla()
        # of the recurrence that the last call took, in the words that train.py prints
        self.form = ""
        self.n_head, self.key_width, self.value_width = max(query[0], value[0]), query[1], value[1]
        self.shapes = dict(query=query, key=key, value=value)
        self.levels = (
            Levels(config, self.n_head) if self.has_levels and config.levels != "none" else None
        )
        self.angles: Angles | None = None  # of the positions, where a mixer asks for them
        self.gates = nn.ModuleDict()
        if gate.native and self.native_gate:
            published = (*POSITIONS["readout"](self), self.native_gate[0], native_rank)
            self.gates["native"] = Gate(config, "elementwise", *published)
        for position, granularity in gate.positions.items():
            self.gates[position] = Gate(config, granularity, *POSITIONS[position](self))
        is_first = {
            "native": "before norm" in (self.native_gate or ()),
            "readout": not config.norm_first,
        }
        on_readout = [name for name in is_first if name in self.gates]
        self.before_norm = [self.gates[name] for name in on_readout if is_first[name]]
        self.after_norm = [self.gates[name] for name in on_readout if not is_first[name]]

        self.norm = None
        if self.norm_kind in READOUT_NORMS:
            width = self.value_width
            if self.norms_heads_together:
                width = self.n_head * width
            self.norm = READOUT_NORMS[self.norm_kind](width, eps=config.norm_eps)
        is_alone = type(self.norm) is RMSNorm and not self.norms_heads_together
        is_alone = is_alone and type(self).normed is Mixer.normed
        self.is_fused = (
            self.has_fla and is_alone and any(gate.has_kernel for gate in self.after_norm[:1])
        )
        self.out_proj = ResidualLinear(
            self.n_head * self.value_width, config.n_embd, bias=config.bias
        )
        self.out_proj.start_scale = config.out_init_scale

    def init_parameter(self, name: str, start: torch.Tensor, generator: torch.Generator) -> None:
        """The start of a decay exp(-A softplus(. + dt_bias)) as in Dao & Gu 2024, and of D."""
        if name == "A_log":
            start.uniform_(*self.A_range, generator=generator).log_()
        elif name == "dt_bias":
            # softplus(dt_bias) = dt, log-uniform in [0.001, 0.1]
            dt = start.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp()
            start.copy_(dt + torch.log(-torch.expm1(-dt)))
        elif name == "D":
            start.fill_(1.0)
        else:
            kind = type(self).__name__
            raise UserError(f"{name}: no rule for its start; give {kind} an init_parameter")

    def project(self, x: torch.Tensor, state: dict | None, start: int) -> Projection:
        """x (B, T, C) -> Projection. If `state` is a dict, a convolution reads its past there and
        writes it back."""
        raise NotImplementedError

    def forward(self, x, state=None, start=0, only=None):
        p = self.gated_projection(x, state, start)
        # (B, T, H, Dv), with a denominator (B, T, H, Dv + 1)
        o, skip = self.read(p, state, start), p.skip
        if only is not None:  # no step below mixes tokens
            o, x, skip = (y if y is None else y[only][None] for y in (o, x, skip))  # (1, M, ...)
        if self.norm_kind == "denominator":
            o, denominator = o.split([self.value_width, 1], dim=-1)
            o = o / self.gated("denominator", denominator, x).clamp(min=DENOMINATOR_MIN)
        if skip is not None:
            o = o + skip
        for gate in self.before_norm:
            o = gate(o, x)
        gates = self.after_norm
        # the norm and the gate behind it in one kernel, which a compiler makes of the plain form by
        # itself
        if (
            self.is_fused
            and o.is_cuda
            and o.dtype != torch.float64
            and not torch.compiler.is_compiling()
        ):
            o, gates = gates[0](o, x, self.norm), gates[1:]
        else:
            o = self.normed(o)
        for gate in gates:
            o = gate(o, x)
        if self.config.branch_scale != 1:
            o = self.config.branch_scale * o
        # a model in half precision; under autocast the weights stay float32
        if self.out_proj.weight.itemsize < 4:
            o = o.to(self.out_proj.weight.dtype)
        y = self.out_proj(o.flatten(2))  # (B, T, C)
        return self.gated("output", y[:, :, None], x).squeeze(2)

    def gated(self, position: str, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.gates[position](y, x) if position in self.gates else y

    def gated_projection(
        self, x: torch.Tensor, state: dict | None = None, start: int = 0
    ) -> Projection:
        """project(x), with the gates on q, k and v applied: what `read` gets."""
        p = self.project(x, state, start)
        # a static gate is float32 even under autocast: without .to() its product would be float32,
        # too
        q, k, v = (
            self.gated(at, y, x).to(y.dtype)
            for at, y in (("query", p.q), ("key", p.k), ("value", p.v))
        )
        # a second path of v to the readout
        skip = None if p.skip is None else self.gated("value", p.skip, x)
        # and one of k to the state
        erase = None if p.erase is None else self.gated("key", p.erase, x)
        of_levels = None if self.levels is None else self.levels(x, start)
        return p._replace(q=q, k=k, v=v, erase=erase, skip=skip, levels=of_levels)

    def read(self, p: Projection, state: dict | None, start: int) -> torch.Tensor:
        """The readout (B, T, H, Dv); with a denominator (B, T, H, Dv + 1), and the last channel is
        the denominator."""
        q, k, v, erase = p.q, p.k, p.v, p.erase
        if 1 < q.shape[2] < self.n_head:
            n = self.n_head // q.shape[2]
            q, k, erase = (x if x is None else x.repeat_interleave(n, dim=2) for x in (q, k, erase))
        if self.norm_kind == "denominator":
            v = F.pad(v, (0, 1), value=1.0)  # a channel of ones sums the weights
        options: dict = dict(
            log_decay=p.log_decay, beta=p.beta, initial_state=None if state is None else state["S"]
        )
        uses_fla = self.has_fla and q.is_cuda and kernels.fla_computes(q, v, p.beta, erase)
        if erase is not None:
            options["erase"] = erase
        if p.levels is not None:
            form, self.form = levels.chunked, "plain PyTorch, by levels"
            options |= dict(levels=p.levels, start=start)
        elif q.shape[1] <= self.sub_tokens:
            form, self.form = recurrence.recurrent, "plain PyTorch, token by token"
        elif uses_fla:
            form, self.form = kernels.fla, "fla's kernels"
        else:
            form, self.form = recurrence.chunked, "plain PyTorch, chunk by chunk"
        o, final = form(q, k, v, **options)
        if state is not None:
            state["S"] = final
        return o

    def normed(self, o: torch.Tensor) -> torch.Tensor:
        """The readout's RMSNorm, computed in at least float32: (B, T, H, Dv) -> the same shape."""
        if self.norm is None:
            return o
        o = at_least_float32(o)
        if self.norms_heads_together:
            return self.norm(o.flatten(2)).view_as(o)
        return self.norm(o)

    def state_shapes(self, B: int, length: int) -> dict[str, tuple[int, ...]]:
        """{name: shape} of the tensors of the state of B sequences of at most `length` tokens,
        without a convolution's. Only caches depend on the length."""
        # level 0 is the token itself
        n_states = () if self.levels is None else (self.levels.n_levels - 1,)
        return {
            "S": (
                B,
                self.n_head,
                *n_states,
                self.key_width,
                self.value_width + (self.norm_kind == "denominator"),
            )
        }

    def init_state(
        self, batch_size: int, device=None, dtype=None, length: int | None = None
    ) -> dict:
        """The state at the start of a text: zeros. length: the most tokens that will be read (None:
        any number)."""
        shapes = self.state_shapes(batch_size, length or self.config.block_size)
        for path, conv in self.named_modules():
            if isinstance(conv, ShortConv) and conv.width:
                conv.state_name = path
                shapes[path] = (batch_size, conv.width - 1, conv.channels)
        return {
            name: torch.zeros(shape, device=device, dtype=dtype) for name, shape in shapes.items()
        }

    def explicit_weights(self, p: Projection) -> torch.Tensor:
        """(B, H, T, T): each value's weight in the readout of a whole text, before a
        denominator."""
        inputs, n = (p.q, p.k, p.erase), self.n_head // p.q.shape[2]
        q, k, erase = (x if x is None else x.repeat_interleave(n, dim=2) for x in inputs)
        weights = recurrence.quadratic(q, k, log_decay=p.log_decay, beta=p.beta, erase=erase)
        return weights if p.levels is None else weights * levels.factors(p.levels.transpose(1, 2))

    def flops_per_token(self, T: int) -> float:
        """FLOPs of the recurrence for one token, forward."""
        per_entry = self.flops_per_entry
        if self.levels is not None:  # the past falls into log2(T) / 2 blocks, on average
            per_entry = 2 + self.flops_per_level * math.log2(T) / 2
        return per_entry * self.n_head * self.key_width * self.value_width
