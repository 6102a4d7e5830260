"""How every figure looks, and how it is written."""

import itertools
import math
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

from model import MIXERS
from runs.files import check_output, write_output
from study import stats

plt.rcParams["text.parse_math"] = False  # a name may hold a $

# Okabe & Ito 2008: colours that the colour-blind can tell apart. The spare ones are from Tol 2021, "muted"
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
SPARE_COLOURS = ["#999933", "#332288", "#44AA99", "#117733", "#CC6677"]
MIXER_COLOURS = {
    "softmax": COLOURS[0],
    "cosformer": COLOURS[1],
    "gla": COLOURS[2],
    "mamba2": COLOURS[3],
    "gated_deltanet": COLOURS[4],
    "deltanet": COLOURS[5],
    "kda": "#882255",
}

ALL_COLOURS = [*COLOURS[:6], *SPARE_COLOURS, COLOURS[6]]  # for up to a dozen arms

FEWEST_FOR_AN_INTERVAL = 3  # seeds

# {the widest range of ratios, highest over lowest: the first digits that have a tick}
RATIO_TICKS = {2.5: (1, 1.2, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), 10: (1, 1.5, 2, 3, 5, 7), 100: (1, 2, 5), math.inf: (1,)}


def mixer_colours(names: Iterable[str]) -> dict[str, str]:
    """{name: colour}: those of MIXER_COLOURS; all other mixers, and patterns, take those that are left, in turn.

    names: mixers, or patterns of mixers; the patterns come last, so that each mixer has one colour in every figure.
    """
    unused = itertools.cycle([c for c in SPARE_COLOURS if c not in MIXER_COLOURS.values()] or COLOURS)
    return {name: MIXER_COLOURS.get(name) or next(unused) for name in dict.fromkeys([*MIXERS, *names])}


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def mean_lines(axes: plt.Axes, curves: Iterable[list], **look) -> None:
    """The mean of the seeds' curves, [[step, value], ...] each, and from three seeds on its 95% interval, as a band.

    A curve that ends before the others keeps its last value, as that of a run that was stopped when it had solved the
    task. Steps at which a curve has no finite value have no mean.
    """
    curves = [list(curve) for curve in curves]
    steps = sorted({step for curve in curves for step, _ in curve})
    columns = [[at(curve, step) for curve in curves] for step in steps]
    found = [(step, values) for step, values in zip(steps, columns, strict=True) if all(map(is_finite, values))]
    if not found:
        return
    steps, middles = [step for step, _ in found], [mean(values) for _, values in found]
    axes.plot(steps, middles, **look)
    if len(curves) < FEWEST_FOR_AN_INTERVAL:
        return
    intervals = [interval(values) for _, values in found]
    lows, highs = (
        [middle if end is None else end for middle, end in zip(middles, ends, strict=True)]
        for ends in zip(*intervals, strict=True)
    )
    axes.fill_between(steps, lows, highs, color=look.get("color"), alpha=0.15, linewidth=0)


def at(curve: list, step: float) -> float | None:
    """The value of a curve at a step, or the last one before it."""
    return next((value for moment, value in reversed(curve) if moment <= step), None)


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def interval(values: list[float]) -> tuple[float | None, float | None]:
    """The ends of the 95% interval of the seeds' mean, as figures draw it: from three seeds on. With two it would reach
    13 standard errors to each side."""
    return stats.interval(values) if len(values) >= FEWEST_FOR_AN_INTERVAL else (None, None)


def mean_mark(axes: plt.Axes, x: float, values: list[float], colour: str, marker: str = "o", **look) -> None:
    """The mean of the seeds' values at x, an upright line along its 95% interval, and a dash at each seed."""
    low, high = interval(values)
    if low is not None:
        axes.plot([x, x], [low, high], color=colour, linewidth=1, alpha=0.6)
    axes.plot([x] * len(values), values, "_", color=colour, markersize=5, alpha=0.5)
    axes.plot([x], [mean(values)], marker, color=colour, **look)


def interval_lines(axes: plt.Axes, lines: list[tuple]) -> None:
    """lines: [(name, low, middle, high, colour)], from the top down."""
    for i, (_, low, middle, high, colour) in enumerate(lines):
        axes.plot([low, high], [-i, -i], color=colour, linewidth=3)
        axes.plot([middle], [-i], color=colour, marker="o")
    axes.set_yticks([-i for i in range(len(lines))], [name for name, *_ in lines], fontsize=8)


def log_axis(axes: plt.Axes, values: Iterable[float]) -> None:
    """Makes x logarithmic, with a tick at each value. Its own ticks would be formulas, which are not parsed."""
    values = sorted(set(values))
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:,.2g}" if value < 1 else f"{value:,}" for value in values], fontsize=7)
    axes.minorticks_off()


def ratio_axis(axes: plt.Axes) -> None:
    """Makes x logarithmic, for ratios: the wider the range, the fewer ticks."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = next(ticks for most, ticks in RATIO_TICKS.items() if high / low <= most)
    axes.xaxis.set_major_locator(LogLocator(subs=ticks))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def label_edges(grid) -> None:
    """Numbers on the lowest panel of each column and the first of each row, where panels that share an axis leave some
    places of the grid (an array of axes) empty."""
    for lines, side in ((grid.T[:, ::-1], "labelbottom"), (grid, "labelleft")):
        for line in lines:
            if shown := [axes for axes in line if axes.axison]:
                shown[0].tick_params(**{side: True})


def legend_of(figure: plt.Figure) -> None:
    """One legend to the right of the figure, with each label of its panels once."""
    handles: dict = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    look: dict = dict(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.legend(handles.values(), handles.keys(), **look)


def dress(axes: plt.Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def write(figure: plt.Figure, path: Path) -> Path:
    """The path, once the figure is there as a .png. Raises UserError."""
    check_output("figure", path)
    figure.tight_layout()
    # a legend may stand outside
    write_output("figure", path, lambda file: figure.savefig(file, format="png", dpi=150, bbox_inches="tight"))
    plt.close(figure)
    return path
