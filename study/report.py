"""Draws an experiment's figures and writes its report.html, from its rows and from nothing else.

experiment.py does both at its end. `python plot.py results/NAME` draws the figures again that need no config; `python
experiment.py CONFIG --run=false` draws all, and writes report.html again, with the tables and verdicts.
"""

from configurator import UserError

import itertools
import math
from collections.abc import Iterable
from pathlib import Path

from runs.outdir import write_text
from study import claims, gains, mixers, overview, rates, sinks
from study.drawing import COLOURS, arm_looks, curve_panels, is_finite
from study.names import by_learning_rate, joined, mixer_of, variant_of
from study.page import Table, page

LINES = ["-", "--", ":"]
DRAWN = {  # the names of all figures of an experiment
    f"{name}.png"
    for name in (
        "accuracy", "val_loss", "sink", "learning_rates", "branch", "lengths_gain", "gain",
        "claims", "mixers", "windows",
    )
}  # fmt: skip


def figures(rows: list[dict], folder: Path) -> list[Path]:
    """Draws each figure that these rows have data for, and returns the paths. Runs that chose a rate are left out."""
    rows = [row for row in rows if "purpose" not in row]
    if not rows:
        raise UserError(f"{folder}: has no row of a compared run yet, nothing to draw")
    rows = sorted(rows, key=lambda row: (row["arm"], row["seed"]))  # the order in which runs ended is not shown
    if any(row.get("sinks") for row in rows):
        drawn = sinks.figures(rows, folder)
    elif by_learning_rate(rows):  # a sweep has too many runs for curves
        drawn = [rates.windows("val_loss", rates.sweep_of(rows), folder / "learning_rates.png")]
    else:
        drawn = [metric_curves(rows, folder / f"{rows[0].get('metric', 'accuracy')}.png")]
    if any(row.get("meter_curve") for row in rows):
        drawn.append(branch_curves(rows, folder / "branch.png"))
    if any(row.get("loss_curve") for row in rows) and gains.gains(rows):
        drawn.append(gains.by_step(rows, folder / "gain.png"))
    if gains.panels_of(rows):
        drawn.append(gains.by_position(rows, folder / "lengths_gain.png"))
    return drawn


def figures_of_claims(config, rows: list[dict], judged: list[dict], choices: list[dict], folder: Path) -> list[Path]:
    """Draws what needs the config besides the rows: its claims, and the runs that chose the learning rates."""
    drawn, records = [], list(map(claims.record, judged))
    if any(map(overview.has_run, records)):
        drawn.append(overview.forest(records, folder / "claims.png"))
    if len(set(map(mixer_of, rows))) > 1 and mixers.pairs_of(judged, rows):
        drawn.append(mixers.forest(judged, rows, folder / "mixers.png"))
    if first_runs := rates.windows_of(config, choices):
        drawn.append(rates.windows(config.metric, first_runs, folder / "windows.png"))
    return drawn


def panels_by_place(rows: list[dict], curve_of, label: str = "{}") -> dict[str, dict[str, list]]:
    """{setting and mixer, in the label: {what an arm adds to its mixer: [what curve_of gives of each of its runs]}}."""
    panels: dict = {}
    for row in rows:
        place = label.format(joined(row.get("setting"), mixer_of(row)))
        panels.setdefault(place, {}).setdefault(variant_of(row), []).append(curve_of(row))
    return panels


def metric_curves(rows: list[dict], path: Path) -> Path:
    """Draws the metric against the step: a panel per setting and mixer, a colour per kind of arm, every seed. Returns
    the path."""
    is_accuracy = rows[0].get("metric", "accuracy") == "accuracy"
    panels, looks = panels_by_place(rows, curve_of), arm_looks(map(variant_of, rows))
    values = [value for row in rows for _, value in curve_of(row)[1:] if is_finite(value)]
    pairs = rows[0]["data"].get("pairs")  # there is no single number with several slices, or without pairs

    def finish(axes, title):
        if pairs and is_accuracy:
            look = dict(color=COLOURS[6], linestyle=":", linewidth=1, label="chance among the values in context")
            axes.axhline(100 / pairs, **look)
        if is_accuracy:
            axes.set(ylim=(0, 100))
        elif margin := 0.04 * (max(values, default=0) - min(values, default=0)):  # the first evaluation is far above
            axes.set(ylim=(min(values) - margin, max(values) + margin))

    label = "accuracy at the queries (%)" if is_accuracy else "validation loss (nats a token)"
    size = (7, 4.2) if len(panels) == 1 else (3.2, 2.7)
    return curve_panels(panels, looks, path, ylabel=label, size=size, finish=finish)


def curve_of(row: dict) -> list[tuple]:
    """[(step, the metric)], accuracy in per cent; NaN where it was not finite, and behind the end of such a run."""
    scale = 100 if row.get("metric", "accuracy") == "accuracy" else 1
    end = [] if row.get("finite", True) else [(row["curve"][-1][0] + 1, math.nan)]
    return [(step, math.nan if value is None else scale * value) for step, value in row["curve"]] + end


def branch_curves(rows: list[dict], path: Path) -> Path:
    """Draws branch over residual norm, below it the mean of each gate, and the highest induction score of a head,
    against the step: a column per setting and mixer, a colour per kind of arm, every seed. Returns the path."""
    rows = [row for row in rows if row.get("meter_curve")]
    looks = arm_looks(map(variant_of, rows))
    panels = panels_by_place(rows, lambda row: points(row, row["meter_curve"]["branch"]), "{}\n|branch| / |residual|")
    columns = len(panels)
    if any(row["meter_curve"]["gate_mean"] for row in rows):
        for row in rows:
            title = f"{joined(row.get('setting'), mixer_of(row))}\nmean of the gate"
            gates, panel, variant = row["meter_curve"]["gate_mean"], panels.setdefault(title, {}), variant_of(row)
            for (position, values), line in zip(gates.items(), itertools.cycle(LINES), strict=False):
                label = f"{variant}, {position}" if len(gates) > 1 else variant
                looks[label] = looks[variant] | dict(linestyle=line)
                panel.setdefault(label, []).append(points(row, values))
    if any(row["meter_curve"].get("induction") for row in rows):
        highest = lambda row: points(row, map(highest_score, row["meter_curve"]["induction"]))  # noqa: E731
        panels |= panels_by_place(rows, highest, "{}\nhighest induction score")
    look: dict = dict(columns=columns, sharey="row", finish=lambda axes, title: axes.set_ylim(0, None))
    return curve_panels(panels, looks, path, **look)


def points(row: dict, values: Iterable[float | None]) -> list[tuple]:
    """[(step, value)] of the meters that have one."""
    return [(x, y) for x, y in zip(row["meter_curve"]["step"], values, strict=True) if y is not None]


def highest_score(layers: list[list]) -> float | None:
    return max((score for heads in layers for score in heads if score is not None), default=None)


def write_page(path: Path, parts: Iterable[str | Table | Path], about: str = "", command: str = "") -> Path:
    """Writes figures, tables and texts as one HTML file that needs no other. Returns its path.

    about: the config's docstring, with the hypothesis. command: what writes all of this.
    """
    made = f"How this was made: {command}\nEvery run, its keys and its numbers: rows.jsonl beside this file."
    write_text(path, page(path.parent.resolve().name, [part for part in (about, *parts, made) if part]))
    return path
