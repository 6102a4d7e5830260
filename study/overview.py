"""The claims of an experiment, or of all experiments, in one figure, from claims.json and from nothing else.

python plot.py results      # results/claims.png

experiment.py writes claims.json beside the rows. Claims of one unit share a panel: points of accuracy, per cent of a
weight, nats, ratios of steps.
"""

import itertools
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from configurator import UserError
from runs.files import read_json
from study.claims import RATIO, UNITS
from study.drawing import COLOURS, drawable, dress, legend_of, ratio_axis, write

VERDICT_COLOURS = {
    "supported": COLOURS[2], "passed": COLOURS[2], "equivalent": COLOURS[0], "not supported": COLOURS[4],
    "refuted": COLOURS[1], "failed": COLOURS[1], "inconclusive": "0.5",
}  # fmt: skip


def draw(folder: Path) -> Path:
    """Draws the claims of all experiments in this folder, and returns the path. Raises UserError."""
    records = []
    for file in sorted(folder.glob("*/claims.json")):
        with drawable(file):
            records += [one | {"experiment": file.parent.name} for one in read_json(file)["claims"] if has_run(one)]
    if not records:
        raise UserError(f"{folder}: no claim of an experiment has been judged yet, nothing to draw")
    declared = {one["experiment"] for one in records if not one["exploratory"]}
    return forest(sorted(records, key=lambda one: one["experiment"] not in declared), folder / "claims.png")


def has_run(one: dict) -> bool:
    return one["verdict"] != "not run" and bool(one["seeds"])


def forest(records: list[dict], path: Path) -> Path:
    """The mean of each claim's contrast with its exact interval, a bar at its threshold, and a dot for each seed.

    records: as claims.record gives them; those with an "experiment" stand under its name. Where few seeds leave the
    exact interval open, a thin line goes up to the edge, and a darker one is Student's interval; what is exploratory
    has a hollow mark. Returns the path.
    """
    shown, panels = list(filter(has_run, records)), {}
    for unit in (unit for unit in UNITS if any(one["unit"] == unit for one in shown)):
        of_unit = (one for one in shown if one["unit"] == unit)
        for experiment, lines in itertools.groupby(of_unit, key=lambda one: one.get("experiment")):
            panels.setdefault(unit, []).extend([experiment] * (experiment is not None) + list(lines))
    heights = [0.7 + 0.22 * len(lines) for lines in panels.values()]
    look: dict = dict(figsize=(9, sum(heights)), squeeze=False, height_ratios=heights)
    figure, grid = plt.subplots(len(panels), 1, **look)
    for axes, (unit, lines) in zip(grid.flat, panels.items(), strict=True):
        forest_panel(axes, lines, 1.0 if unit in (RATIO, "ratio") else 0.0)
        axes.set(xlabel=unit, ylim=(-len(lines) + 0.2, 0.8))
        if unit == RATIO:
            ratio_axis(axes)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(7))
        dress(axes)
    legend_of(figure, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return write(figure, path)


def forest_panel(axes: plt.Axes, lines: list[dict | str], zero: float) -> None:
    """lines: records, and names of experiments among them, from the top down. zero: a contrast without a difference."""
    records = {-i: one for i, one in enumerate(lines) if isinstance(one, dict)}
    names = [one if isinstance(one, str) else one["name"] for one in lines]
    seeds = [value for one in records.values() for value in one["seeds"].values()]
    axes.axvline(zero, color="0.3", linewidth=1)
    axes.set_yticks([-i for i in range(len(lines))], names, fontsize=8)
    for y, name in enumerate(axes.get_yticklabels()):
        name.set_fontweight("normal" if -y in records else "bold")
    for y, one in records.items():
        middle, colour, dots = one["estimate"], VERDICT_COLOURS[one["verdict"]], list(one["seeds"].values())
        if one["over"] is None and None in (one["low"], one["high"]):  # a count has no interval
            edges = [min(zero, *seeds), max(zero, *seeds)]
            axes.plot(edges, [y, y], color="0.8", linewidth=0.8, label="exact interval open: too few seeds")
            if one["student_low"] is not None:
                ends = [one["student_low"], one["student_high"]]
                axes.plot(ends, [y, y], color="0.4", linewidth=1.2, label="Student's, there")
        ends = [middle if end is None else end for end in (one["low"], one["high"])]
        axes.plot(ends, [y, y], color=colour, linewidth=3, label=one["verdict"])
        axes.plot([middle], [y], "o", color=colour)
        if one["threshold"] is not None:
            axes.plot([one["threshold"]], [y], "|", color="black", markersize=11, label="threshold")
        axes.plot(dots, [y] * len(dots), ".", color="0.4", markersize=4, zorder=3, label="a seed")
        if one["exploratory"]:
            look: dict = dict(markerfacecolor="white", markeredgecolor=colour, markersize=6, zorder=4)
            axes.plot([middle], [y], "o", label="mean, exploratory", **look)
