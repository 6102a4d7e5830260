"""The gate: y' = act(y, g), where g is a linear function of the layer's normed input.

    gate = "none" | "native" | GRANULARITY[@POSITION][+ ...][, next layer's ...]

A new activation is one line in GATE_ACTIVATIONS. A new position is one line in POSITIONS, and the
call `self.gated(position, y, x)` where mixer.py or model.py computes the y that it gates.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import UserError, check_choice
from keys import LayerGate
from ops import kernels

# {position: the (heads, width) of what it gates in a mixer}; readout to output: G1 to G5 of Qiu et
# al.
POSITIONS = {
    "readout": lambda mixer: (mixer.n_head, mixer.value_width),
    "value": lambda mixer: mixer.shapes["value"],
    "key": lambda mixer: mixer.shapes["key"],
    "query": lambda mixer: mixer.shapes["query"],
    "output": lambda mixer: (1, mixer.config.n_embd),
    "denominator": lambda mixer: (mixer.n_head, 1),
}

# (y, g, slope) -> y'; what else is known of each, is_factor and is_positive find out
GATE_ACTIVATIONS = {
    "sigmoid": lambda y, g, slope: y * g.sigmoid(),
    "sigmoid2": lambda y, g, slope: y * (2 * g.sigmoid()),  # identity at g = 0
    "non_sparse": lambda y, g, slope: y * (0.5 + 0.5 * g.sigmoid()),
    "silu": lambda y, g, slope: y * F.silu(g),
    "gelu": lambda y, g, slope: y * F.gelu(g),
    "tanh": lambda y, g, slope: y * g.tanh(),
    "identity": lambda y, g, slope: y * g,
    "learned": lambda y, g, slope: y * (g * (slope * g).sigmoid()),
    "add_silu": lambda y, g, slope: y + F.silu(g),
    "add_identity": lambda y, g, slope: y + g,
}


def tried_on(activation: str, y: float) -> torch.Tensor:
    """What the activation makes of y at many g, in float64: it tells what kind of activation it
    is."""
    # whatever torch's default device is
    g = torch.linspace(-4, 4, 33, device="cpu", dtype=torch.float64)
    return GATE_ACTIVATIONS[activation](torch.full_like(g, y), g, torch.ones_like(g))


def is_factor(activation: str) -> bool:
    """Whether it multiplies y, so that zero stays zero. If not, it adds something to y, which no
    norm cancels."""
    return bool((tried_on(activation, 0.0) == 0).all())


def is_positive(activation: str) -> bool:
    """Whether it keeps a positive y above zero, whatever g is."""
    return bool((tried_on(activation, 0.1) > 0).all())


def check_gate(name: str, mixer, config, gate: LayerGate) -> None:
    """Raises UserError for a readout norm or a gate that makes no sense for a mixer. mixer: the
    class called name."""
    norm, activation = mixer.norm_of(config), config.gate_activation
    if norm == "denominator" and not mixer.has_positive_weights:
        raise UserError(
            f"readout_norm='denominator' makes no sense for {name}: its weights have both signs"
        )
    for position, granularity in gate.positions.items():
        check_choice(f"gate='{granularity}@{position}': position", position, POSITIONS)
        if has_no_effect(granularity, position, mixer, config):
            reason = (
                "has no effect, because a norm behind it cancels a factor that its inputs share"
            )
        elif position == "output" and granularity not in ("elementwise", "scalar"):
            reason = "the output projection has mixed the heads; use elementwise or scalar"
        elif position == "denominator" and norm != "denominator":
            reason = f"this mixer has no denominator (its norm is {norm!r})"
        elif (
            norm == "denominator"
            and position in ("query", "key", "denominator")
            and not is_positive(activation)
        ):
            reason = f"gate_activation={activation!r} can make its denominator negative"
        else:
            continue
        raise UserError(f"gate='{granularity}@{position}' of {name}: {reason}")


def has_no_effect(granularity: str, position: str, mixer, config) -> bool:
    """Whether the gate is a factor that all inputs of the readout's norm share, so that the norm
    cancels it.

    On the readout it is, if it comes before the norm; on q, k or v, if the readout is linear in it:
    on q always, on k and v if the gate is static, that is, the same for all tokens.
    """
    norm = mixer.norm_of(config)
    if granularity not in ("headwise", "scalar") or not is_factor(config.gate_activation):
        return False
    is_shared = position in mixer.linear_in and (
        position == "query" or config.gate_input == "static"
    )
    if norm == "none":
        return False
    if granularity == "headwise" and norm != "denominator" and mixer.norms_heads_together:
        return False
    if position == "readout":
        return norm != "denominator" and not config.norm_first
    # v is in the numerator, not in the denominator
    if position == "value" and norm == "denominator":
        return False
    return is_shared


class ZeroLinear(nn.Linear):
    """A linear layer whose weights start at zero, and whose bias starts at bias_start (None: there
    is no bias)."""

    def __init__(self, n_in, n_out, bias_start=None):
        super().__init__(n_in, n_out, bias=bias_start is not None)
        self.bias_start = bias_start

    def init_parameter(self, name: str, start: torch.Tensor, generator: torch.Generator) -> None:
        start.fill_(self.bias_start if name == "bias" else 0.0)


class Gate(nn.Module):
    """y (B, T, heads, width), x (B, T, C) -> y' = act(y, g) of y's shape, with g = W x (+ bias).

    g has one number per entry of y (elementwise), per head (headwise), per channel (shared) or per
    token (scalar). W starts at zero, so that sigmoid halves y at first and sigmoid2 keeps it; a
    native gate's W starts as any linear layer does, as published. The config's gate_rank is that of
    W (0: full rank), and gate_bias the start of a trained bias (None: there is none) or, if
    gate_input is static, of a constant g (None: 0).
    """

    def __init__(self, config, granularity, heads, width, native=None, native_rank=0):
        """native: the activation of a published gate, which the config's gate_* keys leave as it
        is."""
        super().__init__()
        shapes = dict(
            elementwise=(heads, width), headwise=(heads, 1), shared=(1, width), scalar=(1, 1)
        )
        self.shape, self.activation = shapes[granularity], native or config.gate_activation
        size, rank = math.prod(self.shape), native_rank if native else config.gate_rank
        self.down = self.proj = self.static = self.slope = None
        self.static_start = config.gate_bias or 0.0
        is_static = config.gate_input == "static" and not native
        self.has_kernel = (
            granularity == "elementwise" and not is_static and self.activation in kernels.FLA_GATES
        )
        if is_static:
            # flat: a 1-D parameter gets no weight decay
            self.static = nn.Parameter(torch.empty(size))
        else:
            self.down = nn.Linear(config.n_embd, rank, bias=False) if rank else None
            n_in = rank or config.n_embd
            self.proj = (
                nn.Linear(n_in, size, bias=False)
                if native
                else ZeroLinear(n_in, size, config.gate_bias)
            )
        if self.activation == "learned":
            self.slope = nn.Parameter(torch.empty(1))

    def init_parameter(self, name: str, start: torch.Tensor, generator: torch.Generator) -> None:
        start.fill_(1.0 if name == "slope" else self.static_start)

    def forward(
        self, y: torch.Tensor, x: torch.Tensor, norm: nn.RMSNorm | None = None
    ) -> torch.Tensor:
        return self.act(y, self.logits(x), norm)

    def act(self, y: torch.Tensor, g: torch.Tensor, norm: nn.RMSNorm | None = None) -> torch.Tensor:
        """y (B, T, heads, width) and g as logits gives it -> y'. The meters watch this method."""
        if norm is not None:  # of y, which fla's kernel computes with the gate
            return kernels.norm_and_gate(y, g, norm, self.activation)
        return GATE_ACTIVATIONS[self.activation](y, g, self.slope)

    @property
    def is_factor(self) -> bool:
        return is_factor(self.activation)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> g (B, T, heads or 1, width or 1), without B and T if the gate is
        static."""
        if self.static is not None:
            return self.static.unflatten(-1, self.shape)
        return self.proj(x if self.down is None else self.down(x)).unflatten(-1, self.shape)

    def value(self, g: torch.Tensor) -> torch.Tensor:
        """The factor on y or, if the activation is none, what it adds to y. It has the shape of
        g."""
        y = g.new_full((), 1.0 if self.is_factor else 0.0)
        return GATE_ACTIVATIONS[self.activation](y, g, self.slope)
