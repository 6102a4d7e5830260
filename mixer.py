"""What all mixers share: gates, the recurrence, the readout's norm, the output projection, the
state of decoding.

A mixer is a subclass of `Mixer` (model.py, variants.py), which declares the norm and the gate that
its paper has, and makes q, k and v of x.
"""

import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from base.configurator import UserError
from gate import POSITIONS, Gate
from keys import GPTConfig
from ops import kernels, levels, recurrence
from ops.documents import Documents
from ops.fast import at_least_float32
from ops.layers import Angles, ResidualLinear, RMSNorm, ShortConv

DENOMINATOR_MIN = 1e-6
# {readout_norm: class}. gate.reason_against relies on this: each cancels a factor that all of its
# inputs share
READOUT_NORMS = {"rms": RMSNorm}


class Projection(NamedTuple):
    """What `project` returns. H is the number of heads of the readout, and Hk divides it: with
    softmax k and v have Hk heads, with every other mixer q and k."""

    q: Tensor  # (B, T, H or Hk, Dk)
    k: Tensor  # (B, T, Hk, Dk)
    v: Tensor  # (B, T, Hk or H, Dv)
    log_decay: Tensor | None = None  # (B, T, H), or (B, T, H, Dk) per key channel
    beta: Tensor | None = None  # (B, T, H), of the delta rule
    # (B, T, Hk, Dk), what the delta rule erases, if that is not k
    erase: Tensor | None = None
    skip: Tensor | None = None  # (B, T, H, Dv), added to the readout
    sink: Tensor | None = None  # (B, T, H), the logits of a softmax layer's sinks
    # (B, T, H, L), how much of each level is read (ops/levels.py); Mixer makes them
    levels: Tensor | None = None
    document: Documents | None = None  # of packed rows; Mixer adds it

    def replace(self, **values) -> "Projection":
        """_replace(**values), which torch 2.11 cannot compile in front of fla's kernels."""
        return Projection(**{**self._asdict(), **values})


class Mixer(nn.Module):
    """q, k, v -> gates on them -> recurrence or softmax -> norm and gates of the readout -> output
    projection.

    A subclass declares what its paper has (the class attributes) and computes q, k and v from x
    (`project`). `y = mixer(x, state=None, start=0, document=None)`: x and y are (B, T, C), and
    start is the position of x[:, 0]. state: None for a text read in one call; otherwise what
    `init_state` made, which every call updates in place.

    document: None where a row is one text. For packed rows it is a Documents (ops/documents.py),
    which GPT.features makes of the tensor (B, T) that it takes under the same name. Each document
    is then read as if it were alone, without a state.
    """

    layer = 0  # the index of the mixer's layer, which GPT sets

    # what its paper has
    published_norm = "none"  # of the readout: none, rms or denominator (the sum of the weights)
    # whether the readout's RMSNorm takes all heads together, with a weight for every channel; else
    # each head is normed on its own, and all have one weight
    norms_heads_together = False
    # (activation, "before norm" or "after norm") of the gate the mixer was published with
    native_gate: tuple[str, str] | None = None
    A_range = (1.0, 16.0)  # of A at the start, where a parameter A_log has its logarithm

    longest: int | None = None  # the largest block_size that it takes (None: any)

    # what is true of the mixer; `make check MIXER=NAME` tests it (docs/mixers.md). A class with a
    # `read` or `forward` of its own has other defaults (__init_subclass__)
    past_block_size = "goes on"  # what decoding does there: "goes on", "rolls" a window, or "ends"
    is_linear_in_query = True  # a factor on q is a factor on the readout, before its norm
    has_positive_weights = False  # true: their sum can be the readout's denominator
    # whether the key `levels` (log-linear attention, ops/levels.py) may split the state into one for
    # each of log2(T) blocks of the past
    has_levels = True
    # of packed documents. false: `read` is called once for each length of document, with the
    # documents of that length as its rows. true: `read` gets the packed rows, and keeps their
    # documents apart by p.document, as the recurrence does: it forgets its state where one begins
    reads_packed = True
    tolerance = 0.0  # how much later tokens may change earlier logits by rounding (an FFT does)
    # steps of the recurrence for a token: all that `project` returns is sub_tokens * T long
    sub_tokens = 1
    flops_per_entry = 5  # of S, for a token: 2 to write it, 2 to read it, 1 for its decay
    flops_per_level = 3  # of an entry of one level's state: 2 to read it, 1 for its decay

    def __init_subclass__(cls):
        """A class that defines `read` or `forward` has another readout than its parents, and what
        they declare of theirs may not hold. Unless it sets them itself, is_linear_in_query,
        has_levels and reads_packed are False, and explicit_weights is None."""
        super().__init_subclass__()
        own = vars(cls)
        if "read" in own or "forward" in own:
            cls.is_linear_in_query = own.get("is_linear_in_query", False)
            cls.has_levels = own.get("has_levels", False)
            cls.reads_packed = own.get("reads_packed", False)
            cls.explicit_weights = own.get("explicit_weights")  # None: nothing can show its weights

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
        """gate: the layer's entry of the key `gate`, a keys.LayerGate. query, key, value: the
        (heads, width) of each. native_rank: the rank of the native gate's weight (0: full)."""
        super().__init__()
        self.config = config
        self.shapes = {"query": query, "key": key, "value": value}
        self.n_head = max(query[0], value[0])
        self.key_width = query[1]
        self.value_width = value[1]
        # asked here: in `read` torch.compile could not trace the search for an installed package
        self.has_fla = config.kernels != "torch" and kernels.has_fla()
        self.form = ""  # of the recurrence, in the last call; train.py prints it
        self.angles: Angles | None = None  # of the positions, where a mixer asks for them
        self.levels = None
        if self.has_levels and config.levels != "none":
            self.levels = levels.Levels(config, self.n_head)

        self.gates = nn.ModuleDict()
        self.before_norm = []
        self.after_norm = []
        sides = {"before norm": self.before_norm, "after norm": self.after_norm}
        if gate.native and self.native_gate:
            activation, place = self.native_gate
            shape = POSITIONS["readout"](self)
            native = Gate(config, "elementwise", *shape, native=activation, native_rank=native_rank)
            self.gates["native"] = native
            sides[place].append(native)
        for position, granularity in gate.positions.items():
            self.gates[position] = Gate(config, granularity, *POSITIONS[position](self))
        if "readout" in self.gates:
            place = "after norm" if config.norm_first else "before norm"
            sides[place].append(self.gates["readout"])

        self.norm_kind = self.norm_of(config)
        self.norm = None
        if self.norm_kind in READOUT_NORMS:
            n_normed = self.n_head if self.norms_heads_together else 1
            width = n_normed * self.value_width
            self.norm = READOUT_NORMS[self.norm_kind](width, eps=config.norm_eps)
        self.out_proj = ResidualLinear(
            self.n_head * self.value_width, config.n_embd, bias=config.bias
        )
        self.out_proj.start_scale = config.out_init_scale

    def init_parameter(self, name, start, generator):
        """How the parameters A_log, dt_bias and D of a subclass start: those of a decay
        exp(-A softplus(. + dt_bias)), and D, as in Dao & Gu 2024."""
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
            raise UserError(
                f"nothing says how {name} starts: give {kind} a method "
                "init_parameter(name, start, generator)"
            )

    def project(
        self, x: Tensor, state: dict | None, start: int, document: Documents | None = None
    ) -> Projection:
        """x (B, T, C) -> Projection. If `state` is a dict, a convolution reads its past there and
        writes it back. What mixes tokens here, such as a convolution, or counts their positions,
        has to look at `document`."""
        raise NotImplementedError

    def forward(self, x, state=None, start=0, document=None):
        p = self.gated_projection(x, state, start, document)
        # (B, T, H, Dv), with a denominator (B, T, H, Dv + 1)
        o = self.read(p, state, start) if document is None else self.read_documents(p)
        if self.norm_kind == "denominator":
            o, denominator = o.split([self.value_width, 1], dim=-1)
            o = o / self.gated("denominator", denominator, x).clamp(min=DENOMINATOR_MIN)
        if p.skip is not None:
            o = o + p.skip
        for gate in self.before_norm:
            o = gate(o, x)
        o = self.normed(o)
        for gate in self.after_norm:
            o = gate(o, x)
        if self.config.branch_scale != 1:
            o = self.config.branch_scale * o
        # norms and gates give float32. If the model's own weights are in half precision, o is cast to
        # their dtype. (Under autocast weights are float32, and the product casts both)
        if self.out_proj.weight.itemsize < 4:
            o = o.to(self.out_proj.weight.dtype)
        y = self.out_proj(o.flatten(2))  # (B, T, C)
        return self.gated("output", y[:, :, None], x).squeeze(2)  # as one head of width C

    def gated(self, position: str, y: Tensor, x: Tensor) -> Tensor:
        """y (B, T, heads, width) with the gate at this position (of gate.POSITIONS), or as it is
        where the layer has none there. x (B, T, C): the layer's normed input."""
        return self.gates[position](y, x) if position in self.gates else y

    def gated_projection(
        self,
        x: Tensor,
        state: dict | None = None,
        start: int = 0,
        document: Documents | None = None,
    ) -> Projection:
        """project(x), with the gates on q, k and v applied: what `read` gets."""
        # a `project` that cannot keep documents apart need not take `document`
        options = {} if document is None else {"document": document}
        p = self.project(x, state, start, **options)
        # a static gate is float32 even under autocast: without .to() its product would be, too
        q = self.gated("query", p.q, x).to(p.q.dtype)
        k = self.gated("key", p.k, x).to(p.k.dtype)
        v = self.gated("value", p.v, x).to(p.v.dtype)
        # p.skip is v's second path to the readout, and gets the gate of v. p.erase is a second key,
        # and gets that of k
        skip = p.skip
        if skip is not None:
            skip = self.gated("value", skip, x)
        erase = p.erase
        if erase is not None:
            erase = self.gated("key", erase, x)
        of_levels = None if self.levels is None else self.levels(x, start, document)
        return p.replace(q=q, k=k, v=v, erase=erase, skip=skip, levels=of_levels, document=document)

    def read_documents(self, p: Projection) -> Tensor:
        """The readout of packed rows, in which no document reads another one."""
        if self.reads_packed and p.levels is None:
            return self.read(p, None, 0)
        # one projection for each length, whose rows are the documents of that length
        stacks: dict = {}
        for name, y in p._asdict().items():
            if name != "document" and y is not None:
                stacks[name] = p.document.split(y)
        outputs = []
        for i in range(len(stacks["q"])):
            alone = Projection(**{name: of_lengths[i] for name, of_lengths in stacks.items()})
            outputs.append(self.read(alone, None, 0))
        return p.document.join(outputs)

    def read(self, p: Projection, state: dict | None, start: int) -> Tensor:
        """The readout (B, T, H, Dv); with a denominator (B, T, H, Dv + 1), and the last channel is
        the denominator."""
        q = self.for_all_heads(p.q)
        k = self.for_all_heads(p.k)
        erase = self.for_all_heads(p.erase)
        v = p.v
        if self.norm_kind == "denominator":
            v = F.pad(v, (0, 1), value=1.0)  # a channel of ones sums the weights
        initial_state = None if state is None else state["S"]
        options: dict = dict(log_decay=p.log_decay, beta=p.beta, initial_state=initial_state)
        first = None if p.document is None else p.document.first_steps(self.sub_tokens)
        if p.levels is not None:
            self.form = "plain PyTorch, by levels"
            o, S = levels.chunked(q, k, v, **options, erase=erase, levels=p.levels, start=start)
        elif q.shape[1] <= self.sub_tokens:  # one token
            self.form = "plain PyTorch, token by token"
            o, S = recurrence.recurrent(q, k, v, **options, erase=erase, first=first)
        elif self.has_fla and q.is_cuda and kernels.fla_computes(q, v, p.beta, erase):
            self.form = "fla's kernels"
            bounds = None if p.document is None else p.document.bounds(self.sub_tokens)
            o, S = kernels.fla(q, k, v, **options, bounds=bounds)
        else:
            self.form = "plain PyTorch, chunk by chunk"
            o, S = recurrence.chunked(q, k, v, **options, erase=erase, first=first)
        if state is not None:
            state["S"] = S
        return o

    def for_all_heads(self, y: Tensor | None) -> Tensor | None:
        """q, k or erase (B, T, Hk, D) -> (B, T, H, D): each head is repeated for the H / Hk heads of
        the readout that share it. A single one stays alone, since it broadcasts."""
        if y is None or y.shape[2] in (1, self.n_head):
            return y
        return y.repeat_interleave(self.n_head // y.shape[2], dim=2)

    def normed(self, o: Tensor) -> Tensor:
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
        width = self.value_width + (self.norm_kind == "denominator")
        if self.levels is None:
            return {"S": (B, self.n_head, self.key_width, width)}
        n_states = self.levels.n_levels - 1  # level 0 is the token itself
        return {"S": (B, self.n_head, n_states, self.key_width, width)}

    def init_state(
        self, batch_size: int, device=None, dtype=None, length: int | None = None
    ) -> dict:
        """The state at the start of a text: zeros. length: the most tokens that will be read (None:
        any number)."""
        shapes = self.state_shapes(batch_size, length or self.config.block_size)
        for path, conv in self.named_modules():
            if isinstance(conv, ShortConv) and conv.width:
                conv.state_name = path  # where its forward finds its past
                shapes[path] = (batch_size, conv.width - 1, conv.channels)
        return {
            name: torch.zeros(shape, device=device, dtype=dtype) for name, shape in shapes.items()
        }

    def explicit_weights(self, p: Projection) -> Tensor:
        """(B, H, T, T): each value's weight in the readout of a whole text, before a
        denominator."""
        q = self.for_all_heads(p.q)
        k = self.for_all_heads(p.k)
        erase = self.for_all_heads(p.erase)
        first = None if p.document is None else p.document.first_steps(self.sub_tokens)
        weights = recurrence.quadratic(
            q, k, log_decay=p.log_decay, beta=p.beta, erase=erase, first=first
        )
        return weights if p.levels is None else weights * levels.factors(p.levels.transpose(1, 2))

    def flops_per_token(self, T: int) -> float:
        """FLOPs of the recurrence for one token, forward."""
        per_entry = self.flops_per_entry
        if self.levels is not None:
            # 2 to write the token; the past falls into log2(T) / 2 blocks, on average
            per_entry = 2 + self.flops_per_level * math.log2(T) / 2
        return per_entry * self.n_head * self.key_width * self.value_width
