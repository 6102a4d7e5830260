"""An experiment's tables and figures: of its rows, of the runs that chose its rates, and of its
claims.

experiment.py makes them at its end, and again with --run=false; `python plot.py results/NAME` draws
the figure that needs no config.
"""

import collections
import math
import textwrap
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt

from base.configurator import UserError
from study import stats
from study.curves import area, horizon_of, points_of
from study.drawing import COLOURS, curve_panels, dress, write
from study.rows import mixer_of, number, variant_of
from study.table import Table

# all that an experiment draws in its folder
FIGURES = ("accuracy.png", "val_loss.png", "sink.png", "gain.png", "claims.png")


# -- Tables ----------------------------------------------------------------------------------------


def arms_table(config, rows: list[dict]) -> Table:
    """A line per arm: every seed, and the mean with its interval."""
    title, form = "End accuracy, by seed", ".1%"
    if config.metric == "val_loss":
        title, form = "Validation loss at the end (nats a token), by seed", ".4f"
    of_arm = {}
    for row in rows:
        of_arm.setdefault(row["arm"], {})[row["seed"]] = number(row[config.metric])
    lines = []
    for arm, ends in of_arm.items():
        shown = [f"{ends[seed]:{form}}" if seed in ends else "not run" for seed in config.seeds]
        mean = f"{fmean(ends.values()):{form}}"
        low, high = stats.interval(list(ends.values()))
        interval = "-" if low is None else f"{low:{form}} to {high:{form}}"
        lines.append([arm, *shown, mean, interval])
    return Table(title, ["arm", *map(str, config.seeds), "mean", "95% interval"], lines)


def rates_table(config, choices: list[dict]) -> Table:
    """A line per arm whose learning rate is chosen: the means that it was chosen by."""
    lines = []
    for choice in choices:
        if choice["rate"] is not None:
            means = []
            for rate, values in sorted(choice["values"].items()):
                # abs: value_of negates a loss
                means.append(f"{abs(fmean(values)):.4f} at {rate:g}")
            lines.append([choice["arm"], f"{choice['rate']:g}", ", ".join(means)])
    by = {"auc": "area under the curve", "last": "at the end"}[config.select_by]
    title = f"Learning rates, by the mean {config.metric} {by} over the selection seeds"
    return Table(title, ["arm", "rate", "means"], lines)


# -- Figures ---------------------------------------------------------------------------------------


def figure(rows: list[dict], folder: Path) -> Path:
    """Draws the sinks, where the rows have them, or else the metric. Returns the path. Runs that
    chose a rate are left out."""
    rows = [row for row in rows if "purpose" not in row]
    if not rows:
        raise UserError(f"{folder}: has no row of a compared run yet, nothing to draw")
    # the order in which runs ended is not shown
    rows = sorted(rows, key=lambda row: (row["arm"], row["seed"]))
    sinks = sink_curves(rows, folder / "sink.png")
    return sinks or metric_curves(rows, folder / f"{rows[0]['metric']}.png")


def metric_curves(rows: list[dict], path: Path) -> Path:
    """Draws the metric against the step: a panel per mixer, a colour per kind of arm, every seed.
    Returns the path."""
    is_accuracy = rows[0]["metric"] == "accuracy"
    by_mixer = nested_lists()  # mixer, variant: curves
    sizes = nested_lists()  # mixer, variant: what decides who leads
    for row in rows:
        mixer, variant, curve = mixer_of(row), variant_of(row), curve_of(row)
        by_mixer[mixer][variant].append(curve)
        # a task that is solved ends a run
        sizes[mixer][variant].append(number(area(row)) if is_accuracy else -curve[-1][1])
    panels = {}
    for mixer, arms in by_mixer.items():
        means = finite_means(sizes[mixer])
        leads = f": {max(means, key=means.__getitem__)} leads" if means and len(arms) > 1 else ""
        panels[mixer + leads] = arms
    what = "largest mean area under its curves" if is_accuracy else "lowest mean loss at the end"
    title = f"The arm with the {what} leads (no test)"
    if len(by_mixer) == len(arms) == 1:  # nothing leads
        (curves,) = arms.values()
        end = fmean(curve[-1][1] for curve in curves)
        title = f"{mixer} ends at {end:.4g}{'%' * is_accuracy}, by the mean of its seeds"
    if is_accuracy:
        label = "accuracy at the queries (%)   better →"
        return curve_panels(panels, path, title=title, ylabel=label, ylim=(0, 100))
    label = "validation loss (nats a token)   ← better"
    return curve_panels(panels, path, title=title, ylabel=label)


def nested_lists() -> dict:
    """A dict of dicts of lists, which are made when they are asked for."""
    return collections.defaultdict(lambda: collections.defaultdict(list))


def finite_means(numbers: dict) -> dict:
    """{arm: the mean of its numbers}, of arms whose numbers are all finite."""
    means = {arm: fmean(of_arm) for arm, of_arm in numbers.items()}
    return {arm: mean for arm, mean in means.items() if math.isfinite(mean)}


PARTS = {
    "all of the text": None,
    "first eighth of the window": "near",
    "second half of the window": "far",
    "behind repeated strings": "repeated",
    "elsewhere": "elsewhere",
}


def gain_curves(rows: list[dict], path: Path) -> list[Path]:
    """Draws by how much each arm's loss is lower than that of its mixer's arm "none", of the same
    seed and as many steps: a panel for each part of the text. Returns the path, or none
    where the rows have no losses by part, or no such arm."""

    def pair_of(row):
        return mixer_of(row), row["seed"], horizon_of(row)

    rows = [row for row in rows if row["finite"] and row.get("loss_curve")]
    rows = [row for row in rows if row["metric"] == "val_loss"]
    without = {pair_of(row): row for row in rows if variant_of(row) == "none"}
    panels = nested_lists()
    for row in rows:
        twin = without.get(pair_of(row))
        if twin is None or variant_of(row) == "none":
            continue
        first, _ = row["curve"][0]  # its loss is far above the others
        for title, part in PARTS.items():
            ours, theirs = points_of(row, part), points_of(twin, part)
            steps = [step for step in ours if step in theirs and step > first]
            curve = [(step, number(theirs[step]) - number(ours[step])) for step in steps]
            if curve:
                panels[title][row["arm"]].append(curve)
    if not panels:
        return []
    arms = panels["all of the text"]
    ahead = 0  # arms in which every seed is, at its end
    behind = 0
    for curves in arms.values():
        gains = [curve[-1][1] for curve in curves]
        ahead += min(gains) > 0
        behind += max(gains) < 0
    title = f"At the end every seed is ahead in {ahead} of {len(arms)} arms, and behind in {behind}"
    label = "loss of none minus that of the arm (nats a token)   arm better →"
    return [curve_panels(panels, path, title=title, ylabel=label, zero=True)]


def curve_of(row: dict) -> list[tuple]:
    """[(step, the metric)]: accuracy in per cent, or the loss behind the first evaluation, which is
    far above; NaN where it was not finite, and behind the end of such a run."""
    first, factor = (0, 100) if row["metric"] == "accuracy" else (1, 1)
    curve = [(step, factor * number(value)) for step, value in row["curve"][first:]]
    if not row["finite"] or not curve:
        curve.append((row["curve"][-1][0] + 1, math.nan))
    return curve


def sink_curves(rows: list[dict], path: Path) -> Path | None:
    """Draws what the first token gets against the step, a panel for each number: of each kind of
    query (docs/meters.md), if the data set names kinds, as data/backcopy does. "other" are the
    queries of no named kind: those where the head has nothing to do. Arms with fewer seeds than
    others are left out. Returns the path, or None where the rows have no such number."""
    rows = [row for row in rows if row.get("sinks")]
    counts = collections.Counter(row["arm"] for row in rows)
    most = max(counts.values(), default=0)
    curves_of = nested_lists()
    for row in rows:
        if counts[row["arm"]] < most:
            continue
        curves = collections.defaultdict(list)
        for point in row["sinks"]:
            for name, value in sinks_of(point).items():
                if value is not None:
                    curves[name].append((point["step"], value))
        for name, curve in curves.items():
            curves_of[name][row["arm"]].append(curve)
    if not curves_of:
        return None
    last = {}
    for arm, curves in curves_of.get("effective sink, other queries", {}).items():
        last[arm] = [curve[-1][1] for curve in curves]
    ends = finite_means(last)
    title = "What the first token gets"
    if len(ends) > 1:
        least = min(ends, key=ends.__getitem__)
        title = f"At the end the head writes least of the first token with {least}: "
        title += f"{ends[least]:.3f} of the residual stream"
        if "none" in ends and least != "none":
            title += f"; without a gate {ends['none']:.3f}"
    label = "share of the weight, share of the stream, norm over the median, gate (1: open)"
    label += "   ← smaller sink"
    return curve_panels(curves_of, path, title=title, ylabel=label, sharey=False, ylim=(0, None))


def sinks_of(point: dict) -> dict[str, float | None]:
    """{name: number, or None} of the sinks of a run at one step: of weights and effective sinks at
    "other" queries alone, since at those of a named kind the head is at work; of gates by kind."""
    other = point["other"]
    numbers = {
        "weight on token 0, other queries": other["share"],
        "effective sink, other queries": other["effective"],
        "value norm of token 0 / median": point["value_norm"],
    }
    for kind in sorted(point.keys() - {"step", "value_norm"}):
        for position, mean in point[kind]["gate_mean"].items():
            numbers[f"gate on {position}, {kind} queries"] = mean
    return numbers


# whether more of a number is better, or less
BETTER = {"accuracy": 1, "val_loss": -1, "log_steps": -1, "lost": -1}
COLOUR_OF_VERDICT = dict.fromkeys(("supported", "equivalent", "passed"), COLOURS[0])
COLOUR_OF_VERDICT |= dict.fromkeys(("refuted", "not supported"), COLOURS[1])


def gate_side(claim: dict, gated: set[str]) -> str:
    """Which side of a judged claim's line is the one where a gate is better: "gate better" with an
    arrow, or nothing where the contrast is not of gated arms and ungated ones, or of no score."""
    of = claim["of"]
    better = BETTER.get(of[-1] if of[0] == "log" else of[0])
    if better is None:
        return ""
    signs = {(arm in gated, better * weight > 0) for arm, weight in claim["contrast"].items()}
    if signs == {(True, True), (False, False)}:
        return "gate better →"
    return "← gate better" if signs == {(True, False), (False, True)} else ""


def claims_figure(records: list[dict], path: Path, sides: dict[str, str]) -> list[Path]:
    """Draws the claims that have run, a panel per unit. Returns the path, or none where no claim
    has. sides: {claim: the words of gate_side}."""
    shown = [one for one in records if one["verdict"] != "not run"]
    if not shown:
        return []
    panels = {}
    for one in shown:
        panels.setdefault(one["unit"], []).append(one)
    heights = [1.0 + 0.36 * len(of_unit) for of_unit in panels.values()]
    size = (7.2, sum(heights) + 0.8)
    figure, grid = plt.subplots(len(panels), figsize=size, squeeze=False, height_ratios=heights)
    counts = collections.Counter(
        "exploratory: " * one["exploratory"] + one["verdict"] for one in shown
    )
    title = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
    figure.suptitle(f"Claims: {title}", fontsize=11)
    figure.supxlabel(
        "large dot: mean (hollow: exploratory); small: a seed; black: asked; bar: exact 95% interval\n"
        "(of a one-sided claim two bounds, of 95% each)",
        fontsize=8,
    )
    for axes, (unit, of_unit) in zip(grid.flat, panels.items(), strict=True):
        is_ratio = unit in ("ratio of steps", "ratio")
        axes.axvline(1.0 if is_ratio else 0.0, color="0.3", linewidth=1)  # no difference
        names = []
        for i, one in enumerate(of_unit):
            claim_line(axes, -i, one, is_ratio)
            names.append(textwrap.fill(f"{one['name']}: {one['verdict']}", 42))
            side = sides.get(one["name"], "")
            axes.text(1.01, -i, side, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        axes.set_yticks(range(0, -len(names), -1), names, fontsize=8)
        axes.set(xlabel=unit, ylim=(-len(names) + 0.4, 0.6))
        axes.locator_params(axis="x", nbins=6)
        dress(axes)
    return [write(figure, path)]


def claim_line(axes: plt.Axes, y: int, one: dict, is_ratio: bool) -> None:
    """The mean of a claim's contrast in the colour of its verdict, its exact interval, unless few
    seeds leave it open, bars at its threshold and at the ends of its band, and a dot for each
    seed."""
    colour = COLOUR_OF_VERDICT.get(one["verdict"], "0.5")
    seeds = list(one["seeds"].values())
    axes.plot(seeds, [y] * len(seeds), ".", color="0.6", markersize=4)
    # None, of an open end, is drawn as nothing
    axes.plot([one["low"], one["high"]], [y, y], color=colour, linewidth=3, alpha=0.5)
    face = "white" if one["exploratory"] else colour
    axes.plot(one["estimate"], y, "o", color=colour, markerfacecolor=face, zorder=3)
    bars = [one["threshold"]]
    if one["within"] is not None:
        bars += [one["within"], 1 / one["within"] if is_ratio else -one["within"]]
    axes.plot(bars, [y] * len(bars), "|", color="black", markersize=11)
