"""What the first token gets, by kind of query: the figure of an experiment with sinks.

It is made from the field "sinks" of the rows, which holds the meters of each kind of query at
each evaluation (docs/meters.md), if the data set names kinds, as data/backcopy does. "other" are
the queries of no named kind: those where the head has nothing to do.
"""

import collections
from pathlib import Path

from study.drawing import arm_looks, curve_panels
from study.rows import is_finite


def numbers_of(point: dict) -> dict[str, float | None]:
    """{name: number} of the sinks of a run at one step, by kind of query."""
    numbers = {"value norm of token 0": point["value_norm"]}
    for kind, meters in point.items():
        if kind in ("step", "value_norm"):
            continue
        numbers[f"weight, {kind}"] = meters["share"]
        numbers[f"effective sink, {kind}"] = meters["effective"]
        numbers[f"loss, {kind}"] = meters["loss"]
        for position, mean in meters["gate_mean"].items():
            numbers[f"gate on {position}, {kind}"] = mean
    return numbers


def figure(rows: list[dict], path: Path) -> Path:
    """Draws each number against the step, a panel for each. Arms with fewer seeds than others are
    left out. Returns the path."""
    rows = [row for row in rows if row.get("sinks")]
    counts = collections.Counter(row["arm"] for row in rows)
    panels: dict = {}
    for row in rows:
        if counts[row["arm"]] < max(counts.values()):
            continue
        curves = collections.defaultdict(list)
        for point in row["sinks"]:
            for name, value in numbers_of(point).items():
                if is_finite(value):
                    curves[name].append((point["step"], value))
        for name, curve in curves.items():
            panels.setdefault(name, {}).setdefault(row["arm"], []).append(curve)

    def finish(axes, title):
        axes.set_ylim(0, None)

    return curve_panels(panels, arm_looks(counts), path, columns=3, sharey=False, finish=finish)
