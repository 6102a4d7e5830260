"""How the learning rates of an experiment were chosen: a table, and a figure of the rates that an arm learns at."""

import math
import statistics
from pathlib import Path

from study.drawing import arm_looks, curve_panels
from study.page import Table
from study.plan import rates_of
from study.rows import is_finite, mixer_of, number, variant_of


def table(config, choices: list[dict]) -> Table | None:
    """A line per arm that chooses its learning rate, or takes that of another arm: which one, and why."""
    scale, form = (100, ".1f") if config.metric == "accuracy" else (1, ".4f")
    chosen, cells = {choice["arm"]: choice for choice in choices}, []
    for arm, rate in rates_of(config, choices).items():
        if (choice := chosen.get(arm)) is None:
            cells.append([arm, f"{rate:g}", "-", "-", "-", f"that of {config.rate_of[arm]}"])
            continue
        values, lost = choice["values"][rate], choice["values"][rate].count(-math.inf)
        margin, error = (scale * choice.get(name, math.nan) for name in ("margin", "error"))
        remarks = [f"{lost} of {len(values)} runs were lost"] * (lost > 0)
        if "joint" in choice and choice["joint"][1] != rate:
            remarks.append(f"{choice['joint'][1]:g} is best for all arms of {choice['joint'][0]}")
        remarks += ["margin under a standard error"] * (abs(margin) < error) + ["edge"] * choice["is_edge"]
        mean = "-" if lost else f"{abs(scale * statistics.fmean(values)):{form}}"  # of a loss more is better, too
        over = "-" if math.isnan(margin) else f"{margin:+{form}} over {choice['other']:g}"
        error = "-" if math.isnan(error) else f"{error:{form}}"
        cells.append([arm, f"{rate:g}", mean, over, error, "; ".join(remarks)])
    by = {"auc": "area under the curve", "last": "at the end"}[config.select_by]
    title = f"Learning rates, by the mean {by} over the selection seeds, and its margin over the next best one"
    header = ["arm", "rate", "mean", "margin", "standard error", "remarks"]
    return Table(title, header, cells) if cells else None


def windows(config, choices: list[dict], path: Path) -> list[Path]:
    """Draws the metric at the end against the learning rate, where an arm has tried three rates: a panel per mixer, a
    colour per arm, every seed; a cross, and a gap in the line, where a run was lost. Returns the paths."""
    is_accuracy, panels = config.metric == "accuracy", {}
    scale, tried = 100 if is_accuracy else 1, set()
    for choice in choices:
        known = {rate: rows for rate, rows in sorted(choice["trials"].items()) if None not in rows}
        for of_seed in zip(*known.values(), strict=True):
            curve = [(rate, scale * number(row[config.metric])) for rate, row in zip(known, of_seed, strict=True)]
            arms = panels.setdefault(mixer_of(of_seed[0]), {})
            arms.setdefault(variant_of(of_seed[0]), []).append(curve)
        tried |= known.keys()
    if not any(len(curves[0]) > 2 for arms in panels.values() for curves in arms.values()):
        return []
    looks = arm_looks(arm for arms in panels.values() for arm in arms)

    def finish(axes, title):
        for i, (arm, curves) in enumerate(panels[title].items()):
            lost = [rate for curve in curves for rate, end in curve if not is_finite(end)]
            look = dict(color=looks[arm]["color"], transform=axes.get_xaxis_transform())
            axes.plot(lost, [0.97 - 0.03 * i] * len(lost), "x", **look)
        axes.set_xscale("log")
        axes.set_xticks(sorted(tried), [f"{rate:,.2g}" for rate in sorted(tried)], fontsize=7)  # not formulas
        axes.minorticks_off()

    what = "accuracy at the end (%)" if is_accuracy else "loss at the end (nats a token)"
    look: dict = dict(xlabel="peak learning rate", ylabel=what, size=(2.5, 2.6), columns=len(panels), finish=finish)
    return [curve_panels(panels, looks, path, **look, has_bands=False)]  # of few seeds they would fill the panel
