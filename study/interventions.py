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
from runs.recorder import replaced


@contextlib.contextmanager
def pruned(model: GPT, threshold: float) -> Iterator[list[int]]:
    """Inside, gate values are zero if their absolute value is below the threshold. It yields the
    counts [zeroed, all], which grow as the model runs. If only some tokens have labels, the last
    layer may compute and count those alone."""
    counts = [0, 0]

    def prune(gate, act, y, g):
        closed = gate.value(g).abs() < threshold
        counts[0] += int(closed.sum())
        counts[1] += closed.numel()
        return act(y, g).masked_fill(closed, 0.0)

    with contextlib.ExitStack() as stack:
        for gate in gates_to_prune(model):
            stack.enter_context(replaced(gate, "act", functools.partial(prune, gate)))
        yield counts


def gates_to_prune(model: GPT) -> list[Gate]:
    """All gates, wherever they are, but additive ones and those on the denominator: a zero there
    closes nothing."""
    named = [(path, module) for path, module in model.named_modules() if isinstance(module, Gate)]
    return [gate for path, gate in named if not path.endswith(".denominator") and gate.is_factor]


@contextlib.contextmanager
def quantised(model: GPT) -> Iterator[None]:
    """Inside, every nn.Linear of the blocks rounds its weight and its input, as 8-bit arithmetic
    would: to 255 levels, symmetric around zero, weights with one scale per row, inputs with one per
    tensor, from the largest |x| of the batch. The embedding, which is also the output layer, stays
    as it is. A weight is rounded when it is used: that takes the memory of one more weight and not
    of one more model.
    """

    def round_to_8_bits(x, largest):
        scale = largest.clamp(min=1e-30) / 127
        return (x / scale).round() * scale

    def forward(linear, its_own, x):
        weight = round_to_8_bits(linear.weight, linear.weight.abs().amax(1, keepdim=True))
        return F.linear(round_to_8_bits(x, x.abs().max()), weight, linear.bias)

    with contextlib.ExitStack() as stack:
        for linear in model.blocks.modules():
            if isinstance(linear, nn.Linear):
                stack.enter_context(replaced(linear, "forward", functools.partial(forward, linear)))
        yield
