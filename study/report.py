"""An experiment's tables and figures, from its rows and from nothing else.

experiment.py makes them at its end, and again with --run=false; `python plot.py results/NAME` draws the figures that
need no config.
"""

import math
import statistics
from pathlib import Path

from configurator import UserError
from study import claims, curves, forests, gains, rates, sinks, stats
from study.drawing import arm_looks, curve_panels, is_finite, mixer_colours
from study.page import Table
from study.rows import mixer_of, number, variant_of


def show(config, row: dict) -> str:
    end = number(row[config.metric])
    return f"accuracy {end:.1%}" if config.metric == "accuracy" else f"loss {end:.4f}"


def table(config, rows: list[dict]) -> Table:
    """A line per arm: every seed, the mean with its interval, with solved_above how many seeds solved the task, and how
    soon, and the learning rate, where the rows name it."""
    is_accuracy, solved_above = config.metric == "accuracy", config.solved_above
    title = ("End accuracy" if is_accuracy else "Validation loss at the end (nats a token)") + ", by seed"
    form, cells, has_rates = ".1%" if is_accuracy else ".4f", [], any("learning_rate" in row["config"] for row in rows)
    for arm in dict.fromkeys(row["arm"] for row in rows):
        by_seed = {row["seed"]: row for row in rows if row["arm"] == arm}
        ends = {seed: number(row[config.metric]) for seed, row in by_seed.items()}
        low, high = stats.interval(list(ends.values()))
        line = {"arm": arm}
        line |= {str(seed): f"{ends[seed]:{form}}" if seed in ends else "not run" for seed in config.seeds}
        line["mean"] = f"{statistics.fmean(ends.values()):{form}}"
        line["95% interval"] = "-" if low is None else f"{low:{form}} to {high:{form}}"
        if solved_above is not None:
            reached = [step for row in by_seed.values() if (step := curves.steps_to(row, solved_above)) is not None]
            line["solved"] = f"{sum(end > solved_above for end in ends.values())}/{len(ends)}"
            line["steps to it"] = f"{statistics.median(reached):,.0f}" if reached else "-"
        if has_rates:
            tried = dict.fromkeys(row["config"].get("learning_rate") for row in by_seed.values())
            line["rate"] = ", ".join("-" if rate is None else f"{float(rate):g}" for rate in tried)
        cells.append(list(line.values()))
    return Table(title, list(line), cells)


def figures(rows: list[dict], folder: Path) -> list[Path]:
    """Draws each figure that these rows have data for, and returns the paths. Runs that chose a rate are left out."""
    rows = [row for row in rows if "purpose" not in row]
    if not rows:
        raise UserError(f"{folder}: has no row of a compared run yet, nothing to draw")
    rows = sorted(rows, key=lambda row: (row["arm"], row["seed"]))  # the order in which runs ended is not shown
    if any(row.get("sinks") for row in rows):
        return [sinks.figure(rows, folder / "sink.png")]
    drawn = [metric_curves(rows, folder / f"{rows[0]['metric']}.png")]
    if any(row.get("loss_curve") for row in rows) and (panels := gains.gains(rows)):
        drawn.append(gains.by_step(rows, panels, folder / "gain.png"))
    return drawn + (accuracy_by_state(rows, folder / "state.png") if rows[0]["metric"] == "accuracy" else [])


def figures_of_claims(config, rows: list[dict], judged: list[dict], choices: list[dict], folder: Path) -> list[Path]:
    """Draws what needs the config besides the rows: its claims, and the runs that chose the learning rates."""
    drawn = []
    if records := list(filter(forests.has_run, map(claims.record, judged))):
        drawn.append(forests.of_claims(records, folder / "claims.png"))
    if len(set(map(mixer_of, rows))) > 1 and (pairs := forests.pairs_of(judged, rows)):
        drawn.append(forests.of_mixers(pairs, rows, folder / "mixers.png"))
    return drawn + rates.windows(config, choices, folder / "windows.png")


def metric_curves(rows: list[dict], path: Path) -> Path:
    """Draws the metric against the step: a panel per mixer, a colour per kind of arm, every seed. Returns the path."""
    is_accuracy = rows[0]["metric"] == "accuracy"
    panels, looks = {}, arm_looks(map(variant_of, rows))
    for row in rows:
        panels.setdefault(mixer_of(row), {}).setdefault(variant_of(row), []).append(curve_of(row))
    values = [value for row in rows for _, value in curve_of(row)[1:] if is_finite(value)]

    def finish(axes, title):
        if is_accuracy:
            axes.set(ylim=(0, 100))
        elif margin := 0.04 * (max(values, default=0) - min(values, default=0)):  # the first evaluation is far above
            axes.set(ylim=(min(values) - margin, max(values) + margin))

    label = "accuracy at the queries (%)" if is_accuracy else "validation loss (nats a token)"
    size = (7, 4.2) if len(panels) == 1 else (3.2, 2.7)
    return curve_panels(panels, looks, path, ylabel=label, size=size, finish=finish)


def accuracy_by_state(rows: list[dict], path: Path) -> list[Path]:
    """Draws the accuracy against the bytes of the state, as in "Zoology" (Arora et al. 2023), where a seed has three
    sizes or more: a panel per kind, a colour per mixer, every seed. Returns the paths. An arm's kind is its name
    without mixer and size: "levels" for "gla levels 16"."""
    curves: dict = {}
    for row in rows:
        if "state_bytes" in row:  # old rows have none
            kind = variant_of(row).rstrip(" 0123456789") or "none"
            point = row["state_bytes"] / 1024, 100 * number(row["accuracy"])
            curves.setdefault((kind, mixer_of(row), row["seed"]), []).append(point)
    panels: dict = {}
    for (kind, mixer, _), curve in curves.items():
        if len(dict(curve)) > 2:
            panels.setdefault(kind, {}).setdefault(mixer, []).append(sorted(curve))
    if not panels:
        return []
    colours = mixer_colours(map(mixer_of, rows))
    looks = {name: dict(color=colour, marker=".") for name, colour in colours.items()}

    def finish(axes, title):
        axes.set_xscale("log", base=4)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set(ylim=(0, 100))

    labels: dict = dict(ylabel="accuracy at the queries (%)", xlabel="KiB of state of a sequence, in float32")
    return [curve_panels(panels, looks, path, **labels, columns=3, finish=finish)]


def curve_of(row: dict) -> list[tuple]:
    """[(step, the metric)], accuracy in per cent; NaN where it was not finite, and behind the end of such a run."""
    scale, end = 100 if row["metric"] == "accuracy" else 1, row["curve"][-1][0] + 1
    return [(step, scale * number(value)) for step, value in row["curve"]] + [(end, math.nan)] * (not row["finite"])
