"""What a run's learning curve says beyond its end: numbers with more power, which claims may be
about.

    "of": ["log_steps", 0.9]    the logarithm of the steps to the first evaluation over 0.9; of a
                                run that never gets there, that of its horizon
    "of": ["at", 1500]          the accuracy, or the loss, that was evaluated at that step
    "of": ["lost", 0.9]         1 if the run never gets there, else 0: the mean is the fraction of
                                runs lost
    "of": ["log_steps", "repeated", 0.8], ["lost", "repeated", 0.8]
                                of the loss of a part of the text (docs/data.md)

A curve is [[step, value], ...], of accuracy or of loss; of a loss, "over" reads "under". The
horizon of a run is the last step that it was to make. One that stopped before it, because it had
solved the task, keeps its last value until there; one that was not finite has no area under its
curve, and never gets there. If every run has the same horizon, the mean of log_steps is the
restricted mean of the logarithm. Where both runs of a pair never get there, the difference is zero,
a tie.
"""

import math
from typing import Any

import numpy as np


def horizon_of(row: dict) -> float:
    """The last step that the run was to make; older rows have it among their keys alone."""
    planned = row.get("horizon") or row.get("config", {}).get("max_iters")
    return float(planned or row["curve"][-1][0])


def steps_to(row: dict, *where: Any) -> float | None:
    """The first evaluated step with an accuracy over a threshold, or a loss under it; None if there
    is none, or if the run was not finite. where: the threshold, or a part of the text, as in the
    row's "loss", and the threshold of its loss."""
    if not row["finite"]:
        return None
    *part, threshold = where
    sign = -1 if part or row.get("metric") == "val_loss" else 1
    for step, value in points_of(row, *part).items():
        if value is not None and sign * value > sign * threshold:
            return step
    return None


def points_of(row: dict, part: str | None = None) -> dict[float, float | None]:
    """{step: the metric, None where it was not finite}; with a part of the text its loss, where it
    has one."""
    if part is None:
        return dict(row["curve"])
    points = row.get("loss_curve", [])
    return {point["step"]: point[part] for point in points if point.get(part) is not None}


def area(row: dict) -> float | None:
    """The mean height of the curve from its first step to the horizon, by trapezoids; None if it
    was not finite."""
    steps, values = zip(*row["curve"], strict=True)
    if not row["finite"]:
        return None
    end = max(horizon_of(row), steps[-1])
    if end == steps[0]:
        return float(values[0])
    whole = np.trapezoid([*values, values[-1]], [*steps, end])
    return float(whole / (end - steps[0]))


def log_steps(row: dict, *where: Any) -> float:
    step = steps_to(row, *where)
    return math.log(max(1.0, horizon_of(row) if step is None else step))


def lost(row: dict, *where: Any) -> float:
    return float(steps_to(row, *where) is None)


def value_at(row: dict, step: float) -> float | None:
    """The metric that was evaluated at a step, or None. Behind the end of a run that had solved its
    task it is the last one."""
    last, value = row["curve"][-1]
    if row["finite"] and last < step <= horizon_of(row):
        return value
    return points_of(row).get(step)


# of a row and what stands behind the name
METRICS: dict = {"log_steps": log_steps, "lost": lost, "at": value_at}
