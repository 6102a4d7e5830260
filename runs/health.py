"""What in a run is no longer sound: the first tensor that is not finite."""

import functools
from collections.abc import Iterable

import torch

from runs.parallel import all_finite


def bad_weight(model: torch.nn.Module) -> str | None:
    """The name of the first weight that is not finite."""
    return next((name for name, p in model.named_parameters() if not all_finite(p)), None)


def first_bad_tensor(model: torch.nn.Module, losses: Iterable[torch.Tensor]) -> str | None:
    """Names the first bad weight, output of a module or, from the last layer back, gradient, or
    returns None if all are finite.

    losses: an iterator whose every item is a loss, computed when it is asked for: of a sharded
    model all of them, since the other processes wait for this one in each. The gradients stay in
    the model.
    """
    weight = bad_weight(model)
    if weight is not None:
        return weight
    bad = []

    def look_at(name, module, inputs, output):
        output = output[0] if isinstance(output, tuple) else output
        if not output.isfinite().all():
            bad.append(f"output of {name or 'the model'}")

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_hook(functools.partial(look_at, name)))
    for loss in losses:
        loss.backward()
    for hook in hooks:
        hook.remove()
    if bad:
        return bad[0]
    for name, p in reversed(list(model.named_parameters())):
        if p.grad is not None and not all_finite(p.grad):
            return f"gradient of {name}"
    return None
