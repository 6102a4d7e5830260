"""What a model loses and gains when its gates are pruned, or its arithmetic has 8 bits.

with pruned(model, 0.1) as counts:              # gate values under 0.1 are zero
    model(idx, targets)
with quantised(model):                          # weights and inputs have 8 bits
    model(idx, targets)
"""

import contextlib
import functools
from collections.abc import Iterator

import torch.nn as nn
import torch.nn.functional as F

from gate import Gate
from model import GPT


@contextlib.contextmanager
def pruned(model: GPT, threshold: float) -> Iterator[list[int]]:
    """Inside, gate values are zero if their absolute value is below the threshold. It yields the counts [zeroed, all],
    which grow as the model runs. If only some tokens have labels, the last layer computes and counts those."""
    counts = [0, 0]

    def prune(gate, args, output):
        closed = gate.value(gate.logits(args[1])).abs() < threshold
        counts[0] += int(closed.sum())
        counts[1] += closed.numel()
        return output.masked_fill(closed, 0.0)

    with contextlib.ExitStack() as hooks:
        for gate in gates_to_prune(model):
            hooks.enter_context(gate.register_forward_hook(prune))
        yield counts


def gates_to_prune(model: GPT) -> list[Gate]:
    """All gates but additive ones and those on the denominator: a zero there closes nothing."""
    gates = [item for block in model.blocks for item in block.mixer.gates.items()]
    return [gate for name, gate in gates if name != "denominator" and gate.is_factor]


@contextlib.contextmanager
def quantised(model: GPT) -> Iterator[None]:
    """Inside, every nn.Linear of the blocks rounds its weight and its input, as 8-bit arithmetic would: to 255 levels,
    symmetric around zero, weights with one scale per row, inputs with one per tensor, from the largest |x| of the
    batch. The embedding, which is also the output layer, stays as it is. A weight is rounded when it is used: that
    takes the memory of one more weight and not of one more model.
    """

    def round_to_8_bits(x, largest):
        scale = largest.clamp(min=1e-30) / 127
        return (x / scale).round() * scale

    def forward(linear, x):
        weight = round_to_8_bits(linear.weight, linear.weight.abs().amax(1, keepdim=True))
        return F.linear(round_to_8_bits(x, x.abs().max()), weight, linear.bias)

    linears: list = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        linear.forward = functools.partial(forward, linear)
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward
