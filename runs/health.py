"""What in a run is no longer sound: the first tensor that is not finite, gates that are stuck."""

import functools
from collections.abc import Iterable

import torch

from runs.parallel import all_finite

# a gate counts as closed where its mean is under this share of what its activation can reach
LEAST_OPEN = 0.02
# ... or where its logits are so many times those of the first evaluation (so many themselves, if
# those were under 1: the weight of a gate starts at zero); it may be stuck open, too
GROWTH = 10.0


def bad_weight(model: torch.nn.Module) -> str | None:
    """The name of the first weight that is not finite."""
    return next((name for name, p in model.named_parameters() if not all_finite(p)), None)


def first_bad_tensor(model: torch.nn.Module, losses: Iterable[torch.Tensor]) -> str | None:
    """Names the first bad weight, output of a module or, from the last layer back, gradient, or
    returns None if all are finite.

    losses: an iterator whose every item is a loss, computed when it is asked for. All are taken: of
    a sharded model the other processes wait for this one in each. The gradients stay in the model.
    """
    weight = bad_weight(model)
    if weight is not None:
        return weight
    bad: list[str] = []

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
    # every process asks for every gradient, also where its own output was bad
    for name, p in reversed(list(model.named_parameters())):
        if p.grad is not None and not all_finite(p.grad):
            bad.append(f"gradient of {name}")
    return bad[0] if bad else None


def closed_gates(row: dict, earlier: list[dict]) -> tuple[list[str], list[str]]:
    """(the names of the gates that count as closed, as "3.readout" in layer 3; a line to print for each
    of them that had not before). row: an evaluation's, with `meters` as runs/probe.py's summary
    gives them; earlier: the rows of the run's evaluations before it."""
    known = set()
    for before in earlier:
        known.update(before.get("gate_closed", []))
    measured = [one for one in (*earlier, row) if "gate_logits" in one.get("meters", {})]
    first = measured[0]
    names = []
    notes = []
    for name, logits in row["meters"]["gate_logits"].items():
        reasons = []
        share = row["meters"]["gate_open"][name]
        if share is not None and share < LEAST_OPEN:
            reasons.append(f"its mean is {share:.2g} of what its activation can reach")
        start = first["meters"]["gate_logits"].get(name)
        if logits is not None and start is not None and logits >= GROWTH * max(start, 1.0):
            since = f"from {start:.3g} at step {first['step']}"
            reasons.append(f"its logits have grown to {logits:.3g} (root mean square), {since}")
        if reasons:
            names.append(name)
            if name not in known:
                notes.append(
                    f"note: step {row['step']}: gate {name} (LAYER.POSITION) may be stuck: "
                    f"{'; '.join(reasons)}; docs/gates.md says what to do"
                )
    return names, notes
