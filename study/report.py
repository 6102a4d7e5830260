"""An experiment's tables and figures: of its rows, of the runs that chose its rates, and of its
claims.

experiment.py makes them at its end, and again with --run=false; `python plot.py results/NAME` draws
the figures that need no config, and `python plot.py results` those of claims.
"""

import math
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from base.files import one_line, read_json
from configurator import UserError
from keys import CLASS_OF, GPTConfig, keys_of_today
from study import claims, curves, sinks, stats
from study.drawing import (
    COLOURS,
    arm_looks,
    curve_panels,
    dress,
    legend_of,
    mixer_colours,
    plain_ticks,
    write,
)
from study.page import Table
from study.plan import rates_of
from study.rows import is_finite, mixer_of, number, variant_of

VERDICT_COLOURS = {
    "supported": COLOURS[2],
    "passed": COLOURS[2],
    "equivalent": COLOURS[0],
    "not supported": COLOURS[4],
    "refuted": COLOURS[1],
    "failed": COLOURS[1],
    "inconclusive": "0.5",
    stats.UNDECIDABLE: "0.75",
}

PARTS = {  # of the loss of a text (evaluate.parts_of_loss)
    "all": "all of the text",
    "near": "first eighth of the window",
    "far": "second half of the window",
    "repeated": "behind repeated strings",
    "elsewhere": "elsewhere",
}

# all that an experiment draws in its folder
FIGURES = ("accuracy.png", "val_loss.png", "sink.png", "gain.png", "state.png", "claims.png")

GATE_KEYS = {
    "gate",
    "gate_activation",
    "gate_bias",
    "gate_rank",
    "gate_input",
    "match_params",
    "branch_scale",
}


def show(config, row: dict) -> str:
    end = number(row[config.metric])
    return f"accuracy {end:.1%}" if config.metric == "accuracy" else f"loss {end:.4f}"


def arms_table(config, rows: list[dict]) -> Table:
    """A line per arm: every seed, the mean with its interval, with solved_above how many seeds
    solved the task, and how soon, and the learning rate, where the rows name it."""
    if config.metric == "accuracy":
        title, form = "End accuracy, by seed", ".1%"
    else:
        title, form = "Validation loss at the end (nats a token), by seed", ".4f"
    solved_above = config.solved_above
    header = ["arm", *map(str, config.seeds), "mean", "95% interval"]
    header += ["solved", "steps to it"] if solved_above is not None else []
    cells = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of_arm = [row for row in rows if row["arm"] == arm]
        ends = {row["seed"]: number(row[config.metric]) for row in of_arm}
        values = list(ends.values())
        low, high = stats.interval(values)
        line = [f"{ends[seed]:{form}}" if seed in ends else "not run" for seed in config.seeds]
        line.append(f"{statistics.fmean(values):{form}}")
        line.append("-" if low is None else f"{low:{form}} to {high:{form}}")
        if solved_above is not None:
            steps = [curves.steps_to(row, solved_above) for row in of_arm]
            reached = [step for step in steps if step is not None]
            line.append(f"{sum(value > solved_above for value in values)}/{len(values)}")
            line.append(f"{statistics.median(reached):,.0f}" if reached else "-")
        rates = dict.fromkeys(row["config"].get("learning_rate", "-") for row in of_arm)
        cells.append([arm, *line, ", ".join(map(str, rates))])
    return Table(title, [*header, "rate"], cells)


def rates_table(config, choices: list[dict]) -> Table:
    """A line per arm that chooses its learning rate, or takes that of another arm: the means that
    it was chosen by, and by how much it is better than the next best rate."""
    chosen, cells = {choice["arm"]: choice for choice in choices}, []
    for arm, rate in rates_of(config, choices).items():
        choice = chosen.get(arm)
        if choice is None:
            cells.append([arm, f"{rate:g}", "-", "-", f"that of {config.rate_of[arm]}"])
            continue
        means = []
        for tried, values in sorted(choice["values"].items()):
            # of a loss more is better, too
            means.append(f"{abs(statistics.fmean(values)):.4f} at {tried:g}")
        margin, error = choice.get("margin", math.nan), choice.get("error", math.nan)
        cells.append([arm, f"{rate:g}", f"{margin:+.4f}", f"{error:.4f}", ", ".join(means)])
    by = {"auc": "area under the curve", "last": "at the end"}[config.select_by]
    title = f"Learning rates, by the mean {config.metric} {by} over the selection seeds,\n"
    title += "the margin over the next best one, and the standard error of the margin"
    return Table(title, ["arm", "rate", "margin", "error", "means"], cells)


def figures(rows: list[dict], folder: Path) -> list[Path]:
    """Draws each figure that these rows have data for, and returns the paths. Runs that chose a
    rate are left out."""
    rows = [row for row in rows if "purpose" not in row]
    if not rows:
        raise UserError(f"{folder}: has no row of a compared run yet, nothing to draw")
    # the order in which runs ended is not shown
    rows = sorted(rows, key=lambda row: (row["arm"], row["seed"]))
    if any(row.get("sinks") for row in rows):
        return [sinks.figure(rows, folder / "sink.png")]
    drawn = [metric_curves(rows, folder / f"{rows[0]['metric']}.png")]
    panels = gains(rows)
    if panels and any(row.get("loss_curve") for row in rows):
        drawn.append(gain_curves(rows, panels, folder / "gain.png"))
    if rows[0]["metric"] == "accuracy":
        drawn += accuracy_by_state(rows, folder / "state.png")
    return drawn


def metric_curves(rows: list[dict], path: Path) -> Path:
    """Draws the metric against the step: a panel per mixer, a colour per kind of arm, every seed.
    Returns the path."""
    is_accuracy = rows[0]["metric"] == "accuracy"
    panels: dict = {}
    values = []
    for row in rows:
        curve = curve_of(row)
        panels.setdefault(mixer_of(row), {}).setdefault(variant_of(row), []).append(curve)
        values += [value for _, value in curve[1:] if is_finite(value)]
    low, high = min(values, default=0), max(values, default=0)

    def finish(axes, title):
        if is_accuracy:
            axes.set(ylim=(0, 100))
        elif high > low:  # the first evaluation is far above
            margin = 0.04 * (high - low)
            axes.set(ylim=(low - margin, high + margin))

    label = "accuracy at the queries (%)" if is_accuracy else "validation loss (nats a token)"
    size = (7, 4.2) if len(panels) == 1 else (3.2, 2.7)
    looks = arm_looks(sorted(map(variant_of, rows)))
    return curve_panels(panels, looks, path, ylabel=label, size=size, finish=finish)


def curve_of(row: dict) -> list[tuple]:
    """[(step, the metric)], accuracy in per cent; NaN where it was not finite, and behind the end
    of such a run."""
    scale = 100 if row["metric"] == "accuracy" else 1
    curve = [(step, scale * number(value)) for step, value in row["curve"]]
    if not row["finite"]:
        curve.append((curve[-1][0] + 1, math.nan))
    return curve


def gains(rows: list[dict]) -> dict[str, dict[str, list]]:
    """{part: {arm: [[(step, loss of its plain arm minus its own), ...] of each seed]}}, of the arms
    that have one."""
    of_run: dict[
        tuple, dict
    ] = {}  # {(arm, seed): {part: {step: loss}}} behind the first evaluation
    for row in rows:
        parts: dict[str, dict] = {part: {} for part in PARTS}
        if row["metric"] == "val_loss":
            parts["all"] = {step: loss for step, loss in row["curve"] if step > 0}
        for point in row.get("loss_curve", []):
            for part in PARTS.keys() & point.keys():
                if point["step"] > 0:
                    parts[part][point["step"]] = point[part]
        of_run[row["arm"], row["seed"]] = parts
    plain, panels = plain_arms(rows), {}
    for part, title in PARTS.items():
        for (arm, seed), parts in of_run.items():
            before = of_run.get((plain.get(arm), seed), {}).get(part, {})
            curve = []
            for step, loss in parts[part].items():
                if is_finite(loss) and is_finite(before.get(step)):
                    curve.append((step, before[step] - loss))
            if curve:
                panels.setdefault(title, {}).setdefault(arm, []).append(curve)
    return panels


def plain_arms(rows: list[dict]) -> dict[str, str]:
    """{arm: the one without a gate that has else the same keys, but for the rate; of several, that
    of the same rate}"""
    about = {}
    for row in rows:
        config = keys_of_today(row["config"])
        is_gated = config.get("attention") in CLASS_OF.values()  # a rival of the gate
        for name in GATE_KEYS & config.keys():
            is_gated = is_gated or config[name] != getattr(GPTConfig, name)
        others = config.keys() - GATE_KEYS - {"seed", "learning_rate"}
        shared = {name: config[name] for name in others} | {"attention": mixer_of(row)}
        about[row["arm"]] = shared, is_gated, config.get("learning_rate")
    compared = {}
    for arm, (shared, is_gated, rate) in about.items():
        same = [other for other in about if about[other][:2] == (shared, False)]
        if is_gated and same:
            compared[arm] = min(same, key=lambda other: about[other][2] != rate)
    return compared


def gain_curves(rows: list[dict], panels: dict[str, dict[str, list]], path: Path) -> Path:
    """Draws the gains against the step: a panel per part, a colour per arm, every seed. Returns the
    path."""
    looks = arm_looks(row["arm"] for row in rows)

    def finish(axes, title):
        axes.axhline(0, color="0.3", linewidth=1)

    label = "gain: loss without minus loss with (nats a token)"
    return curve_panels(
        panels, looks, path, ylabel=label, columns=3, size=(4.2, 3.0), finish=finish
    )


def accuracy_by_state(rows: list[dict], path: Path) -> list[Path]:
    """Draws the accuracy against the bytes of the state, as in "Zoology" (Arora et al. 2023), where
    a seed has three sizes or more: a panel per kind, a colour per mixer, every seed. Returns the
    paths. An arm's kind is its name without mixer and size: "levels" for "gla levels 16"."""
    points: dict = {}
    for row in rows:
        if "state_bytes" in row:
            kind = variant_of(row).rstrip(" 0123456789") or "none"
            point = row["state_bytes"] / 1024, 100 * number(row["accuracy"])
            points.setdefault((kind, mixer_of(row), row["seed"]), []).append(point)
    panels: dict = {}
    for (kind, mixer, _), curve in points.items():
        if len(dict(curve)) > 2:
            panels.setdefault(kind, {}).setdefault(mixer, []).append(sorted(curve))
    if not panels:
        return []
    colours = mixer_colours(map(mixer_of, rows))
    looks = {name: dict(color=colour, marker=".") for name, colour in colours.items()}

    def finish(axes, title):
        axes.set_xscale("log", base=4)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(ylim=(0, 100))

    x, y = "KiB of state of a sequence, in float32", "accuracy at the queries (%)"
    return [curve_panels(panels, looks, path, ylabel=y, xlabel=x, columns=3, finish=finish)]


def draw_claims(folder: Path) -> list:
    """Draws the claims of each experiment in this folder. Returns the paths and a table of all.
    Raises UserError."""
    drawn, found = [], []
    for file in sorted(folder.glob("*/claims.json")):
        with one_line(f"{file}: cannot be drawn"):
            records = read_json(file)["claims"]
            for one in filter(has_run, records):
                found.append(one | {"name": f"{file.parent.name}: {one['name']}"})
            drawn += claims_figure(records, file.with_name("claims.png"))
    if not drawn:
        raise UserError(f"{folder}: no claim of an experiment has been judged yet, nothing to draw")
    return [*drawn, claims.table(found)]


def has_run(one: dict) -> bool:
    return one["verdict"] != "not run" and bool(one["seeds"])


def claims_figure(records: list[dict], path: Path) -> list[Path]:
    """Draws a panel per unit, with the mean of each claim's contrast, its exact interval, bars at
    its threshold or the ends of its band, and a dot for each seed. Where few seeds leave the exact
    interval open, a thin line is Student's; what is exploratory has a hollow mark. Returns the
    path, or none where no claim has run."""
    records = list(filter(has_run, records))
    panels = {unit: [one for one in records if one["unit"] == unit] for unit in claims.UNITS}
    panels = {unit: of_unit for unit, of_unit in panels.items() if of_unit}
    if not panels:
        return []
    heights = [0.7 + 0.22 * len(of_unit) for of_unit in panels.values()]
    figure, grid = plt.subplots(
        len(panels), 1, figsize=(9, sum(heights)), squeeze=False, height_ratios=heights
    )
    for axes, (unit, of_unit) in zip(grid.flat, panels.items(), strict=True):
        is_ratio = unit in (claims.RATIO, "ratio")
        axes.axvline(1.0 if is_ratio else 0.0, color="0.3", linewidth=1)  # no difference
        claim_lines(axes, of_unit, is_ratio)
        axes.set(xlabel=unit, ylim=(-len(of_unit) + 0.2, 0.8))
        if unit == claims.RATIO:
            axes.set_xscale("log")
            low, high = axes.get_xlim()
            is_narrow = high / low < 10
            plain_ticks(axes.xaxis, (1, 1.2, 1.5, 2, 3, 5, 7, 8, 9) if is_narrow else (1, 2, 5))
        else:
            axes.xaxis.set_major_locator(MaxNLocator(7))
        dress(axes)
    legend_of(figure, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return [write(figure, path)]


def claim_lines(axes: plt.Axes, records: list[dict], is_ratio: bool) -> None:
    """Draws the claims of a panel, one below the other. NaN, for what a claim has not, draws
    nothing."""
    names = ("estimate", "low", "high", "student_low", "student_high", "threshold", "within")
    number_of = {name: np.array([one[name] for one in records], dtype=float) for name in names}
    y = -np.arange(len(records))
    axes.set_yticks(y, [one["name"] for one in records], fontsize=8)
    is_open = np.isnan(number_of["low"]) | np.isnan(number_of["high"])
    student = number_of["student_low"][is_open], number_of["student_high"][is_open]
    label = "Student's interval, where few seeds leave the exact one open"
    if np.isfinite(student[0]).any():
        axes.hlines(y[is_open], *student, color="0.4", linewidth=1.2, label=label)
    colours = [VERDICT_COLOURS[one["verdict"]] for one in records]
    axes.hlines(y, number_of["low"], number_of["high"], colors=colours, linewidth=3)
    for one, colour in zip(records, colours, strict=True):
        axes.plot([], [], "o-", color=colour, label=one["verdict"])
    band = number_of["within"]
    ends = {
        "threshold": number_of["threshold"],
        "band": band,
        "_band": 1 / band if is_ratio else -band,
    }
    for label, x in ends.items():
        if np.isfinite(x).any():
            colour = "black" if label == "threshold" else "0.4"
            axes.plot(x, y, "|", color=colour, markersize=11, label=label)
    for at, one in zip(y, records, strict=True):
        seeds = list(one["seeds"].values())
        axes.plot(seeds, [at] * len(seeds), ".", color="0.4", markersize=4, label="a seed")
    hollow = [one["exploratory"] for one in records]
    faces = np.where(hollow, "white", colours)
    axes.scatter(number_of["estimate"], y, c=faces, edgecolors=colours, s=30, zorder=3)
    if any(hollow):
        axes.plot([], [], "o", color="0.4", markerfacecolor="white", label="mean, exploratory")
