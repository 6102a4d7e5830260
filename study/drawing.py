"""How every figure looks, and how it is written. `curve_panels` draws all figures of curves."""

import itertools
import math
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from base.files import check_output, write_whole

plt.rcParams["text.parse_math"] = False  # a name may hold a $

# Okabe & Ito 2008: colours that the colour-blind can tell apart; the last five are from Tol 2021,
# "muted"
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
COLOURS += ["#999933", "#332288", "#44AA99", "#117733", "#CC6677"]


def arm_looks(variants: Iterable[str]) -> dict[str, dict]:
    """{what an arm adds to its mixer: matplotlib's keys of its lines}, the same in every panel of a
    figure: black for the arm without a gate, and a colour for each other one, dashed when the
    colours are used up."""
    looks = {"none": {"color": "#000000", "linestyle": "-"}}
    others = [name for name in dict.fromkeys(variants) if name != "none"]
    for i, name in enumerate(others):
        line = "-" if i < len(COLOURS) else "--"
        looks[name] = {"color": COLOURS[i % len(COLOURS)], "linestyle": line}
    return looks


def curve_panels(
    panels: dict[str, dict[str, list]],
    looks: dict[str, dict],
    path: Path,
    *,
    ylabel: str = "",
    ylim: tuple = (None, None),
    sharey: bool = True,
) -> Path:
    """Draws a panel per title: a thin line per seed and a thick one at their mean. Returns the
    path.

    A curve that ends before the others, as that of a run that has solved the task, keeps its last
    value. Where a curve has no finite value the mean has a gap: one of the others would look better
    than the arm is.

    panels: {title: {label: [curve of a seed, [(step, y), ...], ...]}}; looks: {label: matplotlib's
    keys of its lines}.
    """
    columns = min(4, len(panels))
    lines = math.ceil(len(panels) / columns)
    width, height = (7, 4.2) if len(panels) == 1 else (3.2, 2.7)
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(width * columns + 0.6, height * lines + 0.6),
        squeeze=False,
        sharex=True,
        sharey=sharey,
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, curves_of) in zip(grid.flat, panels.items(), strict=False):
        for label, curves in curves_of.items():
            draw_curves(axes, curves, label, looks[label])
        axes.set_title(title, fontsize=9)
        axes.set_ylim(*ylim)
        # the panels below and to the left may be none
        axes.tick_params(labelbottom=True, labelleft=True)
        dress(axes)
    figure.supxlabel("step", fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    named = {}  # each label of the panels once
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    place: dict = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    figure.legend(named.values(), named.keys(), frameon=False, fontsize=8, **place)
    return write(figure, path)


def draw_curves(axes: plt.Axes, curves: list[list[tuple]], label: str, look: dict) -> None:
    """The curves of the seeds of an arm, and their mean."""
    steps = sorted({step for step, _ in itertools.chain(*curves)})
    by_seed = []
    for curve in curves:
        axes.plot(*zip(*curve, strict=True), linewidth=0.7, alpha=0.5, **look)
        by_seed.append([last_before(curve, step) for step in steps])
    means = np.array(by_seed, dtype=float).mean(axis=0)  # over (seeds, steps)
    axes.plot(steps, means, linewidth=1.8, label=label, **look)


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
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    # a legend may stand outside
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=150, bbox_inches="tight"))
    plt.close(figure)
    return path
