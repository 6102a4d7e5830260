"""An experiment's tables and figures: of its rows, of the runs that chose its rates, and of its
claims.

experiment.py makes them at its end, and again with --run=false; `python plot.py results/NAME` draws
the figures that need no config, and `python plot.py results` those of claims.
"""

import math
import statistics
from pathlib import Path

import matplotlib.pyplot as plt

from base.configurator import UserError
from base.files import one_line, read_json
from keys import CLASS_OF, GPTConfig, keys_of_today
from study import claims, sinks, stats
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
    """A line per arm: every seed, the mean with its interval, and the learning rate, where the rows
    name it."""
    title, form = "End accuracy, by seed", ".1%"
    if config.metric == "val_loss":
        title, form = "Validation loss at the end (nats a token), by seed", ".4f"
    cells = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of_arm = {row["seed"]: row for row in rows if row["arm"] == arm}
        ends = {seed: number(row[config.metric]) for seed, row in of_arm.items()}
        line = [arm]
        for seed in config.seeds:
            line.append(f"{ends[seed]:{form}}" if seed in ends else "not run")
        low, high = stats.interval(list(ends.values()))
        line.append(f"{statistics.fmean(ends.values()):{form}}")
        line.append("-" if low is None else f"{low:{form}} to {high:{form}}")
        rates = {str(row["config"].get("learning_rate", "-")): None for row in of_arm.values()}
        cells.append([*line, ", ".join(rates)])
    header = ["arm", *map(str, config.seeds), "mean", "95% interval", "rate"]
    return Table(title, header, cells)


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
    for row in rows:
        arms = panels.setdefault(mixer_of(row), {})
        arms.setdefault(variant_of(row), []).append(curve_of(row))

    def finish(axes, title):
        if is_accuracy:
            axes.set(ylim=(0, 100))

    label = "accuracy at the queries (%)" if is_accuracy else "validation loss (nats a token)"
    size = (7, 4.2) if len(panels) == 1 else (3.2, 2.7)
    looks = arm_looks(sorted(map(variant_of, rows)))
    return curve_panels(panels, looks, path, ylabel=label, size=size, finish=finish)


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


def gains(rows: list[dict]) -> dict[str, dict[str, list]]:
    """{part: {arm: [[(step, loss of its plain arm minus its own), ...] of each seed]}}, of the arms
    that have one."""
    by_run = {(row["arm"], row["seed"]): row for row in rows}
    plain, panels = plain_arms(rows), {}
    for part, title in PARTS.items():
        for (arm, seed), row in by_run.items():
            other = by_run.get((plain.get(arm), seed))
            if other is None:
                continue
            before, curve = losses_of(other, part), []
            for step, loss in losses_of(row, part).items():
                if is_finite(loss) and is_finite(before.get(step)):
                    curve.append((step, before[step] - loss))
            if curve:
                panels.setdefault(title, {}).setdefault(arm, []).append(curve)
    return panels


def losses_of(row: dict, part: str) -> dict[int, float]:
    """{step: loss of a part of the text}, without the first evaluation, which is far above."""
    if part != "all":
        return {at["step"]: at.get(part) for at in row.get("loss_curve", [])[1:]}
    return dict(row["curve"][1:]) if row["metric"] == "val_loss" else {}


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
    """Draws a panel per unit, with the mean of each claim's contrast, its exact interval, unless few
    seeds leave it open, bars at its threshold or the ends of its band, and a dot for each seed;
    what is exploratory has a hollow mark. Returns the path, or none where no claim has run."""
    panels = {}
    for unit in claims.UNITS:
        of_unit = [one for one in records if has_run(one) and one["unit"] == unit]
        if of_unit:
            panels[unit] = of_unit
    if not panels:
        return []
    heights = [0.7 + 0.22 * len(of_unit) for of_unit in panels.values()]
    figure, grid = plt.subplots(
        len(panels), 1, figsize=(9, sum(heights)), squeeze=False, height_ratios=heights
    )
    for axes, (unit, of_unit) in zip(grid.flat, panels.items(), strict=True):
        is_ratio = unit in (claims.RATIO, "ratio")
        axes.axvline(1.0 if is_ratio else 0.0, color="0.3", linewidth=1)  # no difference
        for i, one in enumerate(of_unit):
            claim_line(axes, -i, one, is_ratio)
        names = [one["name"] for one in of_unit]
        axes.set_yticks(range(0, -len(names), -1), names, fontsize=8)
        axes.set(xlabel=unit, ylim=(-len(of_unit) + 0.2, 0.8))
        if unit == claims.RATIO:
            axes.set_xscale("log")
            plain_ticks(axes.xaxis, (1, 1.5, 2, 3, 5))
        dress(axes)
    legend_of(figure, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return [write(figure, path)]


def claim_line(axes: plt.Axes, y: int, one: dict, is_ratio: bool) -> None:
    colour = VERDICT_COLOURS[one["verdict"]]
    if None not in (one["low"], one["high"]):
        axes.plot([one["low"], one["high"]], [y, y], color=colour, linewidth=3)
    face, kind = (colour, one["verdict"])
    if one["exploratory"]:
        face, kind = "white", f"{one['verdict']} (exploratory)"
    axes.plot(one["estimate"], y, "o", color=colour, markerfacecolor=face, label=kind)
    bar: dict = {"marker": "|", "linestyle": "", "markersize": 11}
    if one["threshold"] is not None:
        axes.plot(one["threshold"], y, color="black", label="threshold", **bar)
    if one["within"] is not None:
        other_end = 1 / one["within"] if is_ratio else -one["within"]
        axes.plot([one["within"], other_end], [y, y], color="0.4", label="band", **bar)
    seeds = list(one["seeds"].values())
    axes.plot(seeds, [y] * len(seeds), ".", color="0.4", markersize=4, zorder=3, label="a seed")
