"""What the first token gets, by kind of query: the table and the figure of an experiment with
sinks.

Both are made from the field "sinks" of the rows, which holds the meters of each kind of query at
each evaluation (docs/meters.md), if the data set names kinds, as data/backcopy does. "other" are
the queries of no named kind: those where the head has nothing to do.
"""

import collections
import itertools
import statistics
from collections.abc import Iterable
from pathlib import Path

from study.drawing import arm_looks, curve_panels
from study.page import Table
from study.rows import is_finite, number

# their colours come first
ARMS = ("none", "elementwise", "sigmoid2", "headwise", "elementwise@value")


def kinds_in(rows: list[dict]) -> list[str]:
    """The names of the kinds, "other" first."""
    names = [name for name in rows[0]["sinks"][-1] if name not in ("step", "value_norm")]
    return sorted(names, key=lambda name: name != "other")


def gate_of(kind: dict) -> float | None:
    """The mean of the gate on the readout, or else of the first gate there is."""
    means = kind["gate_mean"]
    return means.get("readout", next(iter(means.values()), None))


def table(rows: list[dict]) -> Table | None:
    """What token 0 gets by kind of query at the end, and the standard deviation of the weight: a
    line per arm."""
    if not (rows := [row for row in rows if row.get("sinks")]):
        return None
    kinds, cells = kinds_in(rows), []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        ends = [row["sinks"][-1] for row in rows if row["arm"] == arm]
        weights = [share for end in ends if (share := end[kinds[0]]["share"]) is not None]
        line = {"arm": arm, "seeds": str(len(ends))}
        line |= {f"weight, {k}": mean_of((end[k]["share"] for end in ends), ".1%") for k in kinds}
        line["sd"] = f"{statistics.stdev(weights):.1%}" if len(weights) > 1 else "-"
        line |= {
            f"effective, {k}": mean_of((end[k]["effective"] for end in ends), ".3f") for k in kinds
        }
        line["|v_0|"] = mean_of((end["value_norm"] for end in ends), ".2f")
        line |= {f"gate, {k}": mean_of((gate_of(end[k]) for end in ends), ".2f") for k in kinds}
        line |= {f"loss, {k}": mean_of((end[k]["loss"] for end in ends), ".4f") for k in kinds}
        cells.append(list(line.values()))
    title = "token 0 by kind of query, means over the seeds; effective: written of it over the residual stream"
    return Table(title, list(line), cells)


def mean_of(values: Iterable[float | None], form: str) -> str:
    values = [value for value in values if value is not None]
    return format(statistics.fmean(values), form) if values else "-"


def figure(rows: list[dict], path: Path) -> Path:
    """Draws weight, effective sink, value norm and gate against the step, or of more than seven
    arms their ends, in a column each. The gate at the queries of the second kind is dashed. Arms
    with fewer seeds than others are left to the table. Returns the path."""
    rows = [row for row in rows if row.get("sinks")]
    counts = collections.Counter(row["arm"] for row in rows)
    arms = sorted(
        (arm for arm, n in counts.items() if n == max(counts.values())),
        key=lambda arm: arm != "none",
    )
    (idle, *busy), is_crowded = kinds_in(rows), len(arms) > 7
    weight, where = "Weight on the first token (%)", "at all queries"
    # (panel, what a label says behind the arm, value of a point of a row's sinks, style)
    shown: list = [
        (weight, "", lambda point: 100 * number(point[idle]["share"]), {}),
        (
            "Effective sink: written of the first token / |x|",
            "",
            lambda point: point[idle]["effective"],
            {},
        ),
        ("Value norm of the first token / median", "", lambda point: point["value_norm"], {}),
        ("Gate", "", lambda point: gate_of(point[idle]), {}),
    ]
    if busy:
        where = f"at queries that are no {' and no '.join(f'{kind}s' for kind in busy)}; dashed: at {busy[0]}s"
        shown.append(
            ("Gate", f", at {busy[0]}s", lambda point: gate_of(point[busy[0]]), {"linestyle": "--"})
        )
    colours = arm_looks([*ARMS, *arms])  # an arm of several figures has one colour
    panels, looks = {}, {}
    for (title, at, value, style), (i, arm) in itertools.product(shown, enumerate(arms)):
        # the axis has the names; what begins with _ is not in the legend
        label = "_" * is_crowded + arm + at
        runs = [row["sinks"] for row in rows if row["arm"] == arm]
        curves = [
            [(point["step"], y) for point in points if is_finite(y := value(point))]
            for points in runs
        ]
        curves = list(filter(None, curves))
        if is_crowded:  # a stroke per seed
            curves = [[(i - 0.35, y), (i + 0.35, y)] for *_, (_, y) in curves]
        panels.setdefault(title, {})[label], looks[label] = curves, colours[arm] | style

    def finish(axes, title):
        axes.set(ylim=(0, None))
        if is_crowded:
            axes.set_xticks(range(len(arms)), arms, rotation=30, ha="right", fontsize=8)
        if title == weight:
            uniform = statistics.fmean(row["meters"]["kinds"][idle]["uniform"] for row in rows)
            axes.axhline(
                100 * uniform, color="0.4", linestyle=":", linewidth=1, label="uniform weights"
            )

    look: dict = dict(columns=2, size=(4.7, 3.0), sharey=False, finish=finish)
    look["xlabel"] = f"at the end, {where}" if is_crowded else f"step ({where})"
    return curve_panels(panels, looks, path, **look)
