"""Finds the first tensor that is not finite, which a run that diverges names before it ends."""

import functools
from collections.abc import Iterable

import torch

from runs.parallel import full_tensor


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every entry is; of a sharded tensor every process has to ask, and all get the same answer."""
    return bool(full_tensor(tensor.isfinite().all()))


def bad_weight(model: torch.nn.Module) -> str | None:
    return next((name for name, p in model.named_parameters() if not is_finite(p)), None)


def first_bad_tensor(model: torch.nn.Module, losses: Iterable[torch.Tensor]) -> str | None:
    """Names the first bad weight, output of a module or gradient, or returns None if all are finite.

    losses: an iterator whose every item is a loss, computed when it is asked for: of a sharded model all of them, since
    the other processes wait for this one in each. The gradients stay in the model.
    """
    if name := bad_weight(model):
        return name
    bad = []

    def look_at(name, module, inputs, output):
        output = output[0] if isinstance(output, tuple) else output
        if not output.isfinite().all():
            bad.append(f"output of {name or 'the model'}")

    hooks = [m.register_forward_hook(functools.partial(look_at, name)) for name, m in model.named_modules()]
    for loss in losses:
        loss.backward()
        # the backward pass comes to the last layer first
        gradients = ((name, p.grad) for name, p in reversed(list(model.named_parameters())) if p.grad is not None)
        bad += [f"gradient of {name}" for name, gradient in gradients if not is_finite(gradient)]
    for hook in hooks:
        hook.remove()
    return next(iter(bad), None)
