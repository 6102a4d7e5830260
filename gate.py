"""The gate: y' = act(y, g), g a linear function of the layer's normed input. One module for every mixer and position.

    gate = "none" | "native" | GRANULARITY[@POSITION][+ ...][, next layer's ...]

`parse_gate` reads one layer's entry of that string; `Gate` computes one of its terms. A new activation is one line
in GATE_ACTIVATIONS.
"""

import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import UserError, check_choice

GRANULARITIES = ("elementwise", "headwise", "shared", "scalar")
POSITIONS = ("readout", "value", "key", "query", "output", "denominator")  # readout to output: G1 to G5 of Qiu et al.
READOUT_ACTIVATIONS = {"none": None, "silu": F.silu, "square": torch.square}

GATE_ACTIVATIONS = {  # (y, g, slope) -> y'
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
POSITIVE_ACTIVATIONS = ("sigmoid", "sigmoid2", "non_sparse")  # the others can turn the sign of y
ADDITIVE_ACTIVATIONS = ("add_silu", "add_identity")  # not a factor: no norm divides them out


class LayerGate(NamedTuple):
    """One layer's entry of the gate string: the published gate or not, and the gates by position."""

    native: bool
    granularity: dict  # position -> granularity


def parse_gate(text):
    """`none`, `native`, or GRANULARITY[@POSITION] joined by +, `native` among them or not -> LayerGate."""
    terms = text.replace(" ", "").split("+")
    if terms == ["none"]:
        return LayerGate(False, {})
    granularity = {}
    for term in terms:
        if term == "native" and terms.count("native") == 1:
            continue
        name, at, position = term.partition("@")
        position = position if at else "readout"
        check_choice(f"gate={text!r}: granularity", name, ("none", "native", *GRANULARITIES))
        check_choice(f"gate={text!r}: position", position, POSITIONS)
        if name not in GRANULARITIES:
            raise UserError(f"gate={text!r}: {name!r} stands alone in a layer (only 'native+...' can be joined)")
        if position in granularity:
            raise UserError(f"gate={text!r}: two gates at position {position!r}")
        granularity[position] = name
    return LayerGate("native" in terms, granularity)


class Gate(nn.Module):
    """g = W x (+ bias), of one number per entry of y, per head, per channel (shared) or per token (scalar).

    y (B, T, heads, width), x (B, T, C) -> y' of y's shape. W starts at zero: sigmoid halves y, sigmoid2 keeps it.
    """

    def __init__(self, n_embd, granularity, heads, width, activation, *, rank=0, has_bias=False, is_static=False):
        super().__init__()
        shapes = dict(elementwise=(heads, width), headwise=(heads, 1), shared=(1, width), scalar=(1, 1))
        self.shape, self.activation = shapes[granularity], activation
        size = math.prod(self.shape)
        self.down = self.proj = self.static = None
        if is_static:
            self.static = nn.Parameter(torch.empty(size))  # flat: a 1-D parameter gets no weight decay
        elif rank:
            self.down, self.proj = nn.Linear(n_embd, rank, bias=False), nn.Linear(rank, size, bias=has_bias)
        else:
            self.proj = nn.Linear(n_embd, size, bias=has_bias)
        self.slope = nn.Parameter(torch.empty(1)) if activation == "learned" else None

    def forward(self, y, x):
        return GATE_ACTIVATIONS[self.activation](y, self.logits(x), self.slope)

    def logits(self, x):
        """g: (B, T, heads or 1, width or 1), and without B and T where it is static."""
        if self.static is not None:
            return self.static.unflatten(-1, self.shape)
        return self.proj(x if self.down is None else self.down(x)).unflatten(-1, self.shape)

    def value(self, g):
        """What y is multiplied with; for the additive activations, what is added to it. Shape of g."""
        y = 0.0 if self.activation in ADDITIVE_ACTIVATIONS else 1.0
        return GATE_ACTIVATIONS[self.activation](y, g, self.slope)
