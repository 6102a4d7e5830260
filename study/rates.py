"""How the learning rates of an experiment were chosen: a line per arm, and a figure of the rates that it learns at."""

import itertools
import math
import statistics
from pathlib import Path

from study.drawing import arm_looks, curve_panels, is_finite
from study.plan import rates_of
from study.rows import mixer_of, number, variant_of


def lines(config, choices: list[dict]) -> list[str]:
    """One line per arm that chooses its learning rate, or takes that of another arm: which one, and why."""
    chosen, words = {choice["arm"]: choice for choice in choices}, []
    for arm, rate in rates_of(config, choices).items():
        why = why_chosen(config, chosen[arm]) if arm in chosen else f"that of {config.rate_of[arm]}"
        words.append(f"learning rate of {arm}: {rate:g} ({why})")
    return words


def why_chosen(config, choice: dict) -> str:
    """The mean that a rate was chosen by, its margin over the next best rate, and what makes the choice doubtful."""
    is_accuracy = config.metric == "accuracy"
    scale, unit, form = (100, " points", ".1f") if is_accuracy else (1, "", ".4f")
    values = choice["values"][choice["rate"]]
    if lost := values.count(-math.inf):
        return f"{lost} of {len(values)} runs were lost"
    mean = statistics.fmean(values)
    by = "area under the curve" if config.select_by == "auc" else "at the end"
    words = [f"mean {by} " + (f"{mean:.1%}" if is_accuracy else f"{-mean:.4f}")]  # of a loss more is better, too
    words += [f"{choice['joint'][1]:g} is best for all arms of {choice['joint'][0]}"] if "joint" in choice else []
    if "other" in choice:
        margin, error, over = scale * choice["margin"], scale * choice["error"], f"over {choice['other']:g}"
        if math.isnan(error):
            words.append(
                f"{margin:+{form}}{unit} {over}, one seed" if len(values) == 1 else f"{over}, where a run was lost"
            )
        else:
            words.append(f"{margin:+{form}} {over}, standard error {error:{form}}{unit}")
        words += ["margin under a standard error"] if abs(margin) < error else []
    return "; ".join(words + (["at the edge of the rates"] if choice["is_edge"] else []))


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
