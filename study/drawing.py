"""How every figure looks, and how it is written."""

import itertools
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from model import MIXERS
from runs.files import check_output, write_output

plt.rcParams["text.parse_math"] = False  # a name may hold a $

# Okabe & Ito 2008: colours that the colour-blind can tell apart. The spare ones are from Tol 2021, "muted"
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
SPARE_COLOURS = ["#999933", "#332288", "#44AA99", "#117733", "#CC6677"]


def mixer_colours(names: Iterable[str]) -> dict[str, str]:
    """{name: colour}: the colour that a mixer's class declares; all others take those that no class declares, in turn.

    names: mixers, or patterns of mixers; the patterns come last, so that each mixer has one colour in every figure.
    """
    declared = {name: vars(mixer).get("colour") for name, mixer in MIXERS.items()}  # without what it inherits
    unused = itertools.cycle([c for c in SPARE_COLOURS if c not in declared.values()] or COLOURS)
    return {name: declared.get(name) or next(unused) for name in dict.fromkeys([*MIXERS, *names])}


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def interval_lines(axes: plt.Axes, lines: list[tuple]) -> None:
    """lines: [(name, low, middle, high, colour)], from the top down."""
    for i, (_, low, middle, high, colour) in enumerate(lines):
        axes.plot([low, high], [-i, -i], color=colour, linewidth=3)
        axes.plot([middle], [-i], color=colour, marker="o")
    axes.set_yticks([-i for i in range(len(lines))], [name for name, *_ in lines], fontsize=8)


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
