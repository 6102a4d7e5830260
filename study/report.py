"""An experiment's tables and figures: of its rows, of the runs that chose its rates, and of its
claims.

experiment.py makes them at its end, and again with --run=false; `python plot.py results/NAME` draws
the figure that needs no config.
"""

import collections
import math
import statistics
from pathlib import Path

import matplotlib.pyplot as plt

from base.configurator import UserError
from study import stats
from study.drawing import COLOURS, arm_looks, curve_panels, dress, write
from study.rows import mixer_of, number, variant_of
from study.table import Table

# all that an experiment draws in its folder
FIGURES = ("accuracy.png", "val_loss.png", "sink.png", "claims.png")


# -- Tables ----------------------------------------------------------------------------------------


def arms_table(config, rows: list[dict]) -> Table:
    """A line per arm: every seed, and the mean with its interval."""
    title, form = "End accuracy, by seed", ".1%"
    if config.metric == "val_loss":
        title, form = "Validation loss at the end (nats a token), by seed", ".4f"
    of_arm: dict[str, dict] = {}
    for row in rows:
        of_arm.setdefault(row["arm"], {})[row["seed"]] = number(row[config.metric])
    cells = []
    for arm, ends in of_arm.items():
        line = [arm]
        for seed in config.seeds:
            line.append(f"{ends[seed]:{form}}" if seed in ends else "not run")
        low, high = stats.interval(list(ends.values()))
        line.append(f"{statistics.fmean(ends.values()):{form}}")
        cells.append([*line, "-" if low is None else f"{low:{form}} to {high:{form}}"])
    return Table(title, ["arm", *map(str, config.seeds), "mean", "95% interval"], cells)


def rates_table(config, choices: list[dict]) -> Table:
    """A line per arm whose learning rate is chosen: the means that it was chosen by."""
    cells = []
    for choice in choices:
        if choice["rate"] is not None:
            means = []
            for rate, values in sorted(choice["values"].items()):
                # of a loss more is better, too
                means.append(f"{abs(statistics.fmean(values)):.4f} at {rate:g}")
            cells.append([choice["arm"], f"{choice['rate']:g}", ", ".join(means)])
    by = {"auc": "area under the curve", "last": "at the end"}[config.select_by]
    title = f"Learning rates, by the mean {config.metric} {by} over the selection seeds"
    return Table(title, ["arm", "rate", "means"], cells)


# -- Figures ---------------------------------------------------------------------------------------


def figure(rows: list[dict], folder: Path) -> Path:
    """Draws the sinks, where the rows have them, or else the metric. Returns the path. Runs that
    chose a rate are left out."""
    rows = [row for row in rows if "purpose" not in row]
    if not rows:
        raise UserError(f"{folder}: has no row of a compared run yet, nothing to draw")
    # the order in which runs ended is not shown
    rows = sorted(rows, key=lambda row: (row["arm"], row["seed"]))
    if any(row.get("sinks") for row in rows):
        return sink_curves(rows, folder / "sink.png")
    return metric_curves(rows, folder / f"{rows[0]['metric']}.png")


def metric_curves(rows: list[dict], path: Path) -> Path:
    """Draws the metric against the step: a panel per mixer, a colour per kind of arm, every seed.
    Returns the path."""
    panels: dict = {}
    for row in rows:
        arms = panels.setdefault(mixer_of(row), {})
        arms.setdefault(variant_of(row), []).append(curve_of(row))
    label = "validation loss (nats a token)"
    limits = (None, None)
    if rows[0]["metric"] == "accuracy":
        label = "accuracy at the queries (%)"
        limits = (0, 100)
    looks = arm_looks(sorted(map(variant_of, rows)))
    return curve_panels(panels, looks, path, ylabel=label, ylim=limits)


def curve_of(row: dict) -> list[tuple]:
    """[(step, the metric)]: accuracy in per cent, or the loss behind the first evaluation, which is
    far above; NaN where it was not finite, and behind the end of such a run."""
    if row["metric"] == "accuracy":
        curve = [(step, 100 * number(value)) for step, value in row["curve"]]
    else:
        curve = [(step, number(value)) for step, value in row["curve"][1:]]
    if not row["finite"] or not curve:
        curve.append((row["curve"][-1][0] + 1, math.nan))
    return curve


def sink_curves(rows: list[dict], path: Path) -> Path:
    """Draws what the first token gets against the step, a panel for each number: of each kind of
    query (docs/meters.md), if the data set names kinds, as data/backcopy does. "other" are the
    queries of no named kind: those where the head has nothing to do. Arms with fewer seeds than
    others are left out. Returns the path."""
    rows = [row for row in rows if row.get("sinks")]
    counts = collections.Counter(row["arm"] for row in rows)
    panels: dict = {}
    for row in rows:
        if counts[row["arm"]] < max(counts.values()):
            continue
        curves = collections.defaultdict(list)
        for point in row["sinks"]:
            for name, value in sinks_of(point).items():
                if value is not None:
                    curves[name].append((point["step"], value))
        for name, curve in curves.items():
            panels.setdefault(name, {}).setdefault(row["arm"], []).append(curve)
    return curve_panels(panels, arm_looks(counts), path, sharey=False, ylim=(0, None))


def sinks_of(point: dict) -> dict[str, float | None]:
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


def claims_figure(records: list[dict], path: Path) -> list[Path]:
    """Draws the claims that have run, a panel per unit. Returns the path, or none where no claim
    has."""
    panels: dict[str, list] = {}
    for one in records:
        if one["verdict"] != "not run" and one["seeds"]:
            panels.setdefault(one["unit"], []).append(one)
    if not panels:
        return []
    heights = [0.7 + 0.22 * len(of_unit) for of_unit in panels.values()]
    figure, grid = plt.subplots(
        len(panels), 1, figsize=(9, sum(heights)), squeeze=False, height_ratios=heights
    )
    title = "mean (hollow: exploratory), exact interval, threshold or band, and a dot for each seed"
    grid[0, 0].set_title(title, fontsize=9)
    for axes, (unit, of_unit) in zip(grid.flat, panels.items(), strict=True):
        is_ratio = unit in ("ratio of steps", "ratio")
        axes.axvline(1.0 if is_ratio else 0.0, color="0.3", linewidth=1)  # no difference
        for i, one in enumerate(of_unit):
            claim_line(axes, -i, one, is_ratio)
        names = [f"{one['name']}: {one['verdict']}" for one in of_unit]
        axes.set_yticks(range(0, -len(names), -1), names, fontsize=8)
        axes.set(xlabel=unit, ylim=(-len(of_unit) + 0.2, 0.8))
        dress(axes)
    return [write(figure, path)]


def claim_line(axes: plt.Axes, y: int, one: dict, is_ratio: bool) -> None:
    """The mean of a claim's contrast, its exact interval, unless few seeds leave it open, bars at
    its threshold and at the ends of its band, and a dot for each seed."""
    if None not in (one["low"], one["high"]):
        axes.plot([one["low"], one["high"]], [y, y], color=COLOURS[5], linewidth=3)
    face = "white" if one["exploratory"] else COLOURS[0]
    axes.plot(one["estimate"], y, "o", color=COLOURS[0], markerfacecolor=face)
    bars = []
    if one["threshold"] is not None:
        bars.append(one["threshold"])
    if one["within"] is not None:
        bars += [one["within"], 1 / one["within"] if is_ratio else -one["within"]]
    axes.plot(bars, [y] * len(bars), "|", color="black", markersize=11)
    seeds = list(one["seeds"].values())
    axes.plot(seeds, [y] * len(seeds), ".", color="0.4", markersize=4, zorder=3)
