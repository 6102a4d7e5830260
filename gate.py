"""The gate: y' = act(y, g), where g is a linear function of the layer's normed input.

The key `gate` is "none", or terms joined by +: native (the published gate), GRANULARITY (a gate on
the readout), GRANULARITY@POSITION (a gate elsewhere). Layers may differ, with a comma:
"native,headwise@value+scalar". The granularities are those of Gate, the positions those of
POSITIONS.

A new activation is one line in GATE_ACTIVATIONS. A new position is one line in POSITIONS, and the
call `self.gated(position, y, x)` where mixer.py or model.py computes the y that it gates.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from base.configurator import UserError, check_choice
from keys import LayerGate

# (y, g, slope) -> y'. slope: a trained number that `learned` alone reads; None for all others
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


class ZeroLinear(nn.Linear):
    """A linear layer whose weights start at zero. bias_start: where its bias starts (None: it has
    none)."""

    def __init__(self, n_in, n_out, bias_start=None):
        super().__init__(n_in, n_out, bias=bias_start is not None)
        self.bias_start = bias_start

    def init_parameter(self, name, start, generator):
        start.fill_(self.bias_start if name == "bias" else 0.0)


class Gate(nn.Module):
    """The gate of Qiu et al. 2025 ("Gated Attention for Large Language Models"): y (B, T, heads,
    width), x (B, T, C) -> y' = act(y, g) of y's shape, with g = W x (+ bias).

    For each token g has one number per entry of y (elementwise), per head (headwise), per channel
    that all heads share (shared), or a single one (scalar). W starts at zero, so that sigmoid halves
    y at first and sigmoid2 keeps it. The W of a native gate starts as any linear layer does.

    Of the config: gate_rank is the rank of W (0: full). gate_width is how many channels of x, the
    first ones, W reads (None: all), as in modded-nanogpt. gate_bias is where a trained bias starts
    (None: there is none). With gate_input="static" g is a trained constant that starts at gate_bias
    (None: at 0).
    """

    def __init__(self, config, granularity, heads, width, native=None, native_rank=0):
        """native: the activation of a mixer's published gate, which the gate_* keys do not change;
        None for any other gate."""
        super().__init__()
        shapes = {
            "elementwise": (heads, width),
            "headwise": (heads, 1),
            "shared": (1, width),
            "scalar": (1, 1),
        }
        self.shape = shapes[granularity]
        size = math.prod(self.shape)
        self.activation = native or config.gate_activation
        self.static_start = config.gate_bias or 0.0
        self.x_width = None if native else config.gate_width  # channels of x that W reads
        self.down = None
        self.proj = None
        self.static = None
        self.slope = None
        if config.gate_input == "static" and not native:
            # flat: a 1-D parameter gets no weight decay
            self.static = nn.Parameter(torch.empty(size))
        else:
            n_in = self.x_width or config.n_embd
            rank = native_rank if native else config.gate_rank
            if rank:
                self.down = nn.Linear(n_in, rank, bias=False)
                n_in = rank
            if native:
                self.proj = nn.Linear(n_in, size, bias=False)
            else:
                self.proj = ZeroLinear(n_in, size, config.gate_bias)
        if self.activation == "learned":
            self.slope = nn.Parameter(torch.empty(1))

    def init_parameter(self, name, start, generator):
        start.fill_(1.0 if name == "slope" else self.static_start)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return self.act(y, self.logits(x))

    def logits(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> g (B, T, heads or 1, width or 1), without B and T if the gate is
        static."""
        if self.static is not None:
            return self.static.unflatten(-1, self.shape)
        if self.x_width is not None:
            x = x[..., : self.x_width]
        if self.down is not None:
            x = self.down(x)
        return self.proj(x).unflatten(-1, self.shape)

    def act(self, y: Tensor, g: Tensor) -> Tensor:
        """y (B, T, heads, width) and g as logits gives it -> y'. The meters watch this method."""
        return GATE_ACTIVATIONS[self.activation](y, g, self.slope)

    @property
    def is_factor(self) -> bool:
        return is_factor(self.activation)

    def value(self, g: Tensor) -> Tensor:
        """The factor on y; of an activation that is not a factor, what it adds to y. It has the
        shape of g."""
        y = g.new_full((), 1.0 if self.is_factor else 0.0)
        return GATE_ACTIVATIONS[self.activation](y, g, self.slope)


# {position: the (heads, width) of what stands there}. G1 to G5 are the names of Qiu et al.
POSITIONS = {
    "readout": lambda mixer: (mixer.n_head, mixer.value_width),  # G1
    "value": lambda mixer: mixer.shapes["value"],  # G2
    "key": lambda mixer: mixer.shapes["key"],  # G3
    "query": lambda mixer: mixer.shapes["query"],  # G4
    "output": lambda mixer: (1, mixer.config.n_embd),  # G5
    "denominator": lambda mixer: (mixer.n_head, 1),
}

# -- Which gates make sense ------------------------------------------------------------------------


def tried_on(activation: str, y: float) -> Tensor:
    """act(y, g) at many g, in float64, which shows what kind of activation it is."""
    # whatever torch's default device is
    g = torch.linspace(-4, 4, 33, device="cpu", dtype=torch.float64)
    return GATE_ACTIVATIONS[activation](torch.full_like(g, y), g, torch.ones_like(g))


def is_factor(activation: str) -> bool:
    """Whether it multiplies y, so that zero stays zero; else it adds something to y."""
    return bool((tried_on(activation, 0.0) == 0).all())


def is_positive(activation: str) -> bool:
    """Whether it keeps a positive y above zero, whatever g is."""
    return bool((tried_on(activation, 0.1) > 0).all())


def has_slope(activation: str, start: float) -> bool:
    """Whether act(y, g) changes with g where g starts. If not, the weight of the gate, which starts
    at zero, gets no gradient."""
    with torch.inference_mode(False), torch.enable_grad():
        g = torch.tensor(start, device="cpu", dtype=torch.float64, requires_grad=True)
        y = GATE_ACTIVATIONS[activation](torch.ones_like(g), g, torch.ones_like(g))
        (derivative,) = torch.autograd.grad(y, g)
    return bool(derivative != 0)


def check_gate(name: str, mixer, config, gate: LayerGate) -> None:
    """Raises UserError for a readout norm or a gate that makes no sense for a mixer. mixer: the
    class called name."""
    if mixer.norm_of(config) == "denominator" and not mixer.has_positive_weights:
        raise UserError(
            f"readout_norm='denominator' makes no sense for {name}: its weights have both signs"
        )
    for position, granularity in gate.positions.items():
        check_choice(f"gate='{granularity}@{position}': position", position, POSITIONS)
        reason = reason_against(granularity, position, mixer, config)
        if reason:
            raise UserError(f"gate='{granularity}@{position}' of {name}: {reason}")


def reason_against(granularity: str, position: str, mixer, config) -> str:
    """The reason why this gate is refused, or ""."""
    norm = mixer.norm_of(config)
    activation = config.gate_activation
    start = config.gate_bias or 0.0
    if not has_slope(activation, start):
        return (
            f"gate_activation={activation!r} has no slope at the start of the gate, {start:g}, so that it "
            "would never learn; give another gate_bias, such as 1"
        )
    if position == "output" and granularity not in ("elementwise", "scalar"):
        return "the output projection has mixed the heads; use elementwise or scalar"
    if position == "denominator" and norm != "denominator":
        return f"this mixer has no denominator (its norm is {norm!r})"
    is_in_denominator = norm == "denominator" and position in ("query", "key", "denominator")
    if is_in_denominator and not is_positive(activation):
        return f"gate_activation={activation!r} can make its denominator negative"
    # a norm cancels a factor that all of its inputs share, and so does a denominator. A gate on the
    # readout comes after a denominator, one on the query before it
    is_before_norm = False
    if position == "readout":
        is_before_norm = norm not in ("none", "denominator") and not config.norm_first
    elif position == "query":
        is_before_norm = norm != "none" and mixer.is_linear_in_query
    # the granularities that have one factor for all inputs of a norm
    cancelled = ("scalar",) if mixer.norms_heads_together else ("scalar", "headwise")
    if is_before_norm and granularity in cancelled and is_factor(activation):
        return "has no effect, because a norm behind it cancels a factor that its inputs share"
    return ""
