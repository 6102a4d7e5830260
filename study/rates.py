"""How the learning rates of an experiment were chosen: a table, and a figure of the rates that an arm learns at."""

import itertools
import math
import statistics
from pathlib import Path

from study.drawing import arm_looks, curve_panels, is_finite
from study.page import Table
from study.plan import rates_of
from study.rows import mixer_of, number, variant_of


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


def windows_of(config, choices: list[dict]) -> dict[str, dict[str, dict[float, list[float]]]]:
    """{mixer: {arm without its mixer's name: {rate: metric at the end, by seed}}}. NaN: it was not finite. {}: fewer
    than three rates."""
    ends_of: dict = {}
    for choice in choices:
        for trial in choice["trials"]:
            if None not in trial["rows"]:
                row, ends = trial["rows"][0], [number(row[config.metric]) for row in trial["rows"]]
                arms = ends_of.setdefault(mixer_of(row), {})
                arms.setdefault(variant_of(row), {})[trial["rate"]] = ends
    return ends_of if any(len(rates) > 2 for arms in ends_of.values() for rates in arms.values()) else {}


def windows(metric: str, ends_of: dict[str, dict[str, dict[float, list[float]]]], path: Path) -> Path:
    """Draws the metric at the end (ends_of, as `windows_of` gives it) against the learning rate: a panel per mixer, a
    colour per arm, every seed; a cross, and a gap in the line, where a run was lost. Returns the path."""
    scale = 100 if metric == "accuracy" else 1
    looks = arm_looks(arm for arms in ends_of.values() for arm in arms)
    tried = sorted({rate for arms in ends_of.values() for by_rate in arms.values() for rate in by_rate})

    def curves(by_rate):  # a curve per seed; a run that is still to come leaves a gap, too
        by_seed = itertools.zip_longest(*by_rate.values(), fillvalue=math.nan)
        return [sorted(zip(by_rate, (scale * end for end in ends), strict=True)) for ends in by_seed]

    def finish(axes, title):
        for i, (arm, by_rate) in enumerate(ends_of[title].items()):
            lost = [rate for rate, ends in by_rate.items() if not all(map(is_finite, ends))]
            look = dict(color=looks[arm]["color"], transform=axes.get_xaxis_transform())
            axes.plot(lost, [0.97 - 0.03 * i] * len(lost), "x", **look)
        axes.set_xscale("log")
        axes.set_xticks(tried, [f"{rate:,.2g}" for rate in tried], fontsize=7)  # its own ticks would be formulas
        axes.minorticks_off()

    panels = {title: {arm: curves(by_rate) for arm, by_rate in arms.items()} for title, arms in ends_of.items()}
    what = "accuracy at the end (%)" if metric == "accuracy" else "loss at the end (nats a token)"
    look: dict = dict(xlabel="peak learning rate", ylabel=what, size=(2.5, 2.6), columns=len(panels), finish=finish)
    return curve_panels(panels, looks, path, **look, has_bands=False)  # of few seeds they would fill the panel
