"""The claims of an experiment in one figure, and those of all experiments in one table, from claims.json alone.

    python plot.py results      # results/NAME/claims.png, and the table

experiment.py writes claims.json beside the rows. Claims of one unit share a panel: points of accuracy, per cent of a
weight, nats, ratios of steps.
"""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from configurator import UserError
from runs.files import read_json
from study.claims import RATIO, UNITS
from study.drawing import COLOURS, drawable, dress, legend_of, ratio_axis, write
from study.page import Table, mean_text

VERDICT_COLOURS = {
    "supported": COLOURS[2], "passed": COLOURS[2], "equivalent": COLOURS[0], "not supported": COLOURS[4],
    "refuted": COLOURS[1], "failed": COLOURS[1], "inconclusive": "0.5",
}  # fmt: skip


def draw(folder: Path) -> list:
    """Draws the claims of each experiment in this folder. Returns the paths and a table of all. Raises UserError."""
    drawn, cells = [], []
    for file in sorted(folder.glob("*/claims.json")):
        with drawable(file):
            records = [one for one in read_json(file)["claims"] if has_run(one)]
            cells += [[f"{file.parent.name}: {one['name']}", *numbers(one)] for one in records]
            drawn += [forest(records, file.with_name("claims.png"))] if records else []
    if not drawn:
        raise UserError(f"{folder}: no claim of an experiment has been judged yet, nothing to draw")
    title = "All claims: an interval is exact where the seeds allow it, else Student's"
    return [*drawn, Table(title, ["claim", "mean (interval)", "threshold", "unit", "seeds", "verdict"], cells)]


def has_run(one: dict) -> bool:
    return one["verdict"] != "not run" and bool(one["seeds"])


def numbers(one: dict) -> list[str]:
    """The cells of a claim's line behind its name."""
    exact, student = (one["low"], one["high"]), (one["student_low"], one["student_high"])
    low, high = student if None in exact else exact
    _, form = UNITS[one["unit"]]
    limits = [f"{name} {one[name]:{form}}" for name in ("threshold", "within") if one[name] is not None]
    verdict = "exploratory: " * one["exploratory"] + one["verdict"]
    mean = mean_text(form, one["estimate"], low, high)
    return [mean, ", ".join(limits).removeprefix("threshold "), one["unit"], str(len(one["seeds"])), verdict]


def forest(records: list[dict], path: Path) -> Path:
    """The mean of each claim's contrast with its exact interval, a bar at its threshold, and a dot for each seed.

    records: as claims.record gives them. Where few seeds leave the exact interval open, a thin line goes up to the
    edge, and a darker one is Student's interval; what is exploratory has a hollow mark. Returns the path.
    """
    shown = list(filter(has_run, records))
    panels = {unit: of for unit in UNITS if (of := [one for one in shown if one["unit"] == unit])}
    heights = [0.7 + 0.22 * len(of) for of in panels.values()]
    figure, grid = plt.subplots(len(panels), 1, figsize=(9, sum(heights)), squeeze=False, height_ratios=heights)
    for axes, (unit, of) in zip(grid.flat, panels.items(), strict=True):
        forest_panel(axes, of, 1.0 if unit in (RATIO, "ratio") else 0.0)
        axes.set(xlabel=unit, ylim=(-len(of) + 0.2, 0.8))
        if unit == RATIO:
            ratio_axis(axes)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(7))
        dress(axes)
    legend_of(figure, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return write(figure, path)


def forest_panel(axes: plt.Axes, records: list[dict], zero: float) -> None:
    """records: from the top down. zero: a contrast without a difference."""
    seeds = [value for one in records for value in one["seeds"].values()]
    axes.axvline(zero, color="0.3", linewidth=1)
    axes.set_yticks([-i for i in range(len(records))], [one["name"] for one in records], fontsize=8)
    for y, one in ((-i, one) for i, one in enumerate(records)):
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
