"""How every figure looks, and how it is written. `curve_panels` draws all figures of curves."""

import itertools
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from base.files import check_output, write_whole

plt.rcParams["text.parse_math"] = False  # a name may hold a $
plt.rcParams["figure.constrained_layout.use"] = True

# Okabe & Ito 2008: colours that the colour-blind can tell apart; the last five are from Tol 2021,
# "muted"
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
COLOURS += ["#999933", "#332288", "#44AA99", "#117733", "#CC6677"]


def arm_looks(variants: Iterable[str]) -> dict[str, dict]:
    """{what an arm adds to its mixer: matplotlib's keys of its lines}, the same in every panel of a
    figure: black for the arm without a gate, and a colour for each other one, dashed when the
    colours are used up."""
    looks = {"none": {"color": "#000000", "linestyle": "-"}}
    others = sorted(set(variants) - {"none"})
    for i, name in enumerate(others):
        line = "-" if i < len(COLOURS) else "--"
        looks[name] = {"color": COLOURS[i % len(COLOURS)], "linestyle": line}
    return looks


def panel_grid(n: int, height: float, **keys) -> tuple:
    """(figure, n axes of that height, the spare ones behind them): two in a line, since a phone is
    narrow."""
    columns = min(2, n)
    lines = math.ceil(n / columns)
    size = (7, height * lines + 1)  # with room for a title and a legend
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, **keys)
    for axes in grid.flat[n:]:
        axes.set_axis_off()
    return figure, list(grid.flat[:n]), list(grid.flat[n:])


def curve_panels(
    panels: dict[str, dict[str, list]],
    path: Path,
    *,
    title: str,
    ylabel: str,
    ylim: tuple = (None, None),
    sharey: bool = True,
    zero: bool = False,
) -> Path:
    """Draws a panel per title: a thin line per seed and a thick one at their mean. Returns the
    path.

    A curve that ends before the others, as that of a run that has solved the task, keeps its last
    value. Where a curve has no finite value the mean has a gap, since a mean of the other seeds alone
    would look better than the arm is. The arm "none" comes first. A panel of more than eight arms is
    drawn as several, each with the first arm.

    panels: {title: {label: [curve of a seed, [(step, y), ...], ...]}}.
    """
    looks = arm_looks(itertools.chain(*panels.values()))
    panels = parts_of(panels)
    height = 4.2 if len(panels) == 1 else 2.7
    figure, grid, spare = panel_grid(len(panels), height, sharex=True, sharey=sharey)
    named = {}  # each label of the panels once
    for axes, (name, curves_of) in zip(grid, panels.items(), strict=True):
        for label, curves in curves_of.items():
            draw_curves(axes, curves, label, looks[label])
        axes.set_title(name, fontsize=10)
        if zero:
            axes.axhline(0, color="0.3", linewidth=1)
        # the panels below and to the left may be none
        axes.tick_params(labelbottom=True, labelleft=True)
        dress(axes)
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    for axes in grid:  # last: set_ylim ends autoscaling, also that of the axes that share y
        axes.set_ylim(*ylim)
    figure.suptitle(textwrap.fill(title, 64), fontsize=12)
    for axes in figure.axes[-2:]:  # figure.supxlabel would be hidden by the legend
        axes.set_xlabel("step (thin: a seed, thick: the mean)", fontsize=9)
    figure.supylabel(ylabel, fontsize=10)
    legend = {"frameon": False, "fontsize": 10, "handles": named.values(), "labels": named.keys()}
    if spare:
        spare[0].legend(loc="center", **legend)
    else:
        columns = 2 if len(panels) == 1 else 4
        figure.legend(loc="outside lower center", ncols=min(len(named), columns), **legend)
    return write(figure, path)


def parts_of(panels: dict[str, dict[str, list]]) -> dict[str, dict[str, list]]:
    """The panels, those of more than eight arms in parts of at most eight, each with the first. The
    arm without a gate is the first."""
    parts = {}
    for title, curves_of in panels.items():
        first, *others = sorted(curves_of, key=lambda arm: arm != "none")
        n = max(1, math.ceil(len(others) / 7))
        size = math.ceil(len(others) / n)
        for i in range(n):
            labels = [first, *others[i * size : (i + 1) * size]]
            part = f"{title} ({i + 1} of {n})" if n > 1 else title
            parts[part] = {label: curves_of[label] for label in labels}
    return parts


def draw_curves(axes: plt.Axes, curves: list[list[tuple]], label: str, look: dict) -> None:
    """The curves of the seeds of an arm, and their mean."""
    steps = sorted({step for step, _ in itertools.chain(*curves)})
    by_seed = []
    for curve in curves:
        axes.plot(*zip(*curve, strict=True), linewidth=0.5, alpha=0.35, **look)
        by_seed.append([last_before(curve, step) for step in steps])
    means = np.array(by_seed, dtype=float).mean(axis=0)  # over (seeds, steps)
    axes.plot(steps, means, linewidth=2.2, label=label, **look)


def last_before(curve: list[tuple], step: float) -> float | None:
    """The value at a step, or the last one before it."""
    return next((y for x, y in reversed(curve) if x <= step), None)


def dress(axes: plt.Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def write(figure: plt.Figure, path: Path) -> Path:
    """The path, once the figure is there as a .png. Raises UserError, also where it would replace
    another file."""
    check_output(path, "figure")
    # a legend may stand outside
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120, bbox_inches="tight"))
    plt.close(figure)
    return path
