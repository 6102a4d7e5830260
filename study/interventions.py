"""What a model loses and gains when its gates are pruned, or its arithmetic has 8 bits.

    with pruned(model, 0.1) as counts:              # gate values under 0.1 are zero
        model(idx, targets)
    with quantised(model):                          # weights and inputs have 8 bits
        model(idx, targets)

meters.py prints these beside what it measures in one forward pass of the model as it is; evaluate.py reads a split so.
"""

import contextlib
from collections.abc import Iterator

import torch.nn as nn
import torch.nn.functional as F

from gate import ADDITIVE_ACTIVATIONS, Gate
from model import GPT


@contextlib.contextmanager
def pruned(model: GPT, threshold: float) -> Iterator[list[int]]:
    """A context in which gate values are zero if their absolute value is below the threshold.

    It yields the counts [zeroed, all], which grow as the model runs. Gates on the denominator and additive gates are
    left alone: a zero there closes nothing. If only some tokens have labels, the last layer computes and counts those.
    """
    counts, handles = [0, 0], []

    def prune(gate, args, output):
        closed = gate.value(gate.logits(args[1])).abs() < threshold
        counts[0] += int(closed.sum())
        counts[1] += closed.numel()
        return output.masked_fill(closed, 0.0)

    try:
        for gate in gates_to_prune(model):
            handles.append(gate.register_forward_hook(prune))
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def gates_to_prune(model: GPT) -> list[Gate]:
    """The gates that multiply, but for those on the denominator."""
    gates = [item for block in model.blocks for item in block.mixer.gates.items() if item[0] != "denominator"]
    return [gate for _, gate in gates if gate.activation not in ADDITIVE_ACTIVATIONS]


def share_of(counts: list[int]) -> float:
    """Of [some, all], rounded to four digits."""
    return float(f"{counts[0] / counts[1]:.4g}")


@contextlib.contextmanager
def quantised(model: GPT) -> Iterator[None]:
    """Inside, every nn.Linear of the blocks rounds its weight and its input, as 8-bit arithmetic would.

    Both are rounded to 255 levels, symmetric around zero: weights with one scale per row, inputs with one per tensor,
    from the largest |x| of the batch. The embedding, which is also the output layer, stays as it is. A weight is
    rounded when it is used, so that this takes the memory of one more weight and not of one more model.
    """

    def round_to_8_bits(x, largest):
        scale = largest.clamp(min=1e-30) / 127
        return (x / scale).round() * scale

    def rounded(linear):
        def forward(x):
            weight = round_to_8_bits(linear.weight, linear.weight.abs().amax(1, keepdim=True))
            return F.linear(round_to_8_bits(x, x.abs().max()), weight, linear.bias)

        return forward

    linears = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
    try:
        for linear in linears:
            vars(linear)["forward"] = rounded(linear)
        yield
    finally:
        for linear in linears:
            vars(linear).pop("forward", None)
