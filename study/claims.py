"""The figures of an experiment's claims: every interval, every pair of seeds, and how soon each arm solves the task.

They are drawn from what tables.judge_claims returns, and from the rows; `record` is what claims.json keeps of it, from
which overview.py draws the claims of all experiments.
"""

import math
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from study import curves, report, stats
from study.drawing import COLOURS, dress, interval_lines, label_edges, legend_of, mean, ratio_axis, write
from study.page import Table

CLAIM_COLOURS = {
    "supported": COLOURS[2], "passed": COLOURS[2], "equivalent": COLOURS[0], "not supported": COLOURS[4],
    "refuted": COLOURS[1], "failed": COLOURS[1], "inconclusive": "0.5",
}  # fmt: skip


PANELS = 24  # of a figure with a panel per claim
SIDES = {"over the threshold": COLOURS[2], "not over it": COLOURS[1], "no difference": "0.5"}


def figures(judged: list[dict], rows: list[dict], solved_above: float | None, folder: Path) -> list[Path]:
    """Draws claims.png, pairs.png and survival.png, each if there is something to show. Returns the paths."""
    records = list(map(record, judged))
    drawn = [forest(records, folder / "claims.png")] if any(is_shown(claim) for claim in judged) else []
    if any(is_pair(claim) for claim in judged):
        drawn.append(pairs([claim for claim in judged if is_pair(claim)], rows, folder / "pairs.png"))
    if solved_above is not None:
        drawn.append(survival(rows, solved_above, folder / "survival.png"))
    return drawn


def is_shown(claim: dict) -> bool:
    return claim["verdict"] != "not run" and bool(claim["by_seed"])


def is_pair(claim: dict) -> bool:
    """Whether the claim compares two arms, and some seeds have both."""
    weights = list(claim["weights"].values())
    return is_shown(claim) and len(weights) == 2 and min(weights) < 0 < max(weights)


def unit_of(claim: dict) -> str:
    """The unit that a claim's numbers are shown in, one of UNITS."""
    of, what = claim["of"], measured(claim)
    if of[0] == "log_steps":
        return RATIO if abs(sum(claim["weights"].values())) < 1e-9 else "steps"
    if of[0] == "log":
        return "ratio"
    if what in ("val_loss", "loss"):
        return "nats a token"
    if what in ("perplexity", "word_perplexity", "bits_per_byte"):
        return "as in the rows"
    if of[0] == "meters":
        return "of the residual stream" if of[-1] == "effective" else "%" if SHARES & set(of) else "as in the rows"
    return "points" if what in ("accuracy", "slices", "lost") else "as in the rows"


def measured(claim: dict) -> str | None:
    """The name of what a claim is about, if it is one that is better high or low."""
    return next((word for word in claim["of"] if word in HIGHER + LOWER), None)


RATIO = "ratio of steps"
BY_LOG = ("log", "log_steps")  # numbers that are compared by their logarithms
BEYOND = {False: "over", True: "other than"}  # {a change in either direction is asked about: how a threshold is named}
HIGHER = ("accuracy", "slices")
SHARES = {"share", "uniform", "sink", "sink_max", "sink_baseline", "heads_above", "gate_below_0.1"}  # meters
LOWER = ("val_loss", "loss", "perplexity", "word_perplexity", "bits_per_byte", "log_steps", "lost")
UNITS = {  # {unit: (how a number of the rows is shown in it, its format)}
    "of the residual stream": (lambda x: x, "+.3f"), "nats a token": (lambda x: x, "+.4f"), RATIO: (math.exp, ".2f"),
    "ratio": (math.exp, ".3f"), "steps": (math.exp, ",.0f"), "%": (lambda x: 100 * x, "+.1f"),
    "points": (lambda x: 100 * x, "+.1f"), "as in the rows": (lambda x: x, "+.4g"),
}  # fmt: skip


def number_shown(claim: dict) -> Callable[..., str]:
    """The function that shows a number of the claim as text: number(value), or number(value, format) for what was
    declared. A logarithm is shown as what it is of."""
    if claim["of"][0] not in BY_LOG:
        return lambda value, form="+.4f": f"{value:{form}}"
    convert, own_form = UNITS[unit_of(claim)]
    return lambda value, form="": f"{convert(value):{own_form}}"


def distance_shown(claim: dict, value: float, sign: str = "") -> str:
    """A distance from a threshold or from zero, as text; between logarithms it is a factor."""
    return f"a factor of {math.exp(value):.3g}" if claim["of"][0] in BY_LOG else f"{sign}{value:.3g}"


def record(claim: dict) -> dict:
    """What claims.json keeps of a judged claim, with all numbers in its unit.

    null: an end that too few seeds leave open, and what a claim does not have. detectable: so far beyond the threshold,
    or, of a ratio, by this factor.
    """
    unit = unit_of(claim)
    convert, _ = UNITS[unit]

    def shown(value: float | None) -> float | None:
        return None if value is None or not math.isfinite(value) else float(f"{convert(value):.6g}")

    values = claim["by_seed"]
    numbers = {name: shown(claim.get(name)) for name in ("low", "high", "student_low", "student_high", "threshold")}
    numbers |= {name: shown(claim.get(name)) for name in ("within", "detectable", "detectable_within")}
    tests = {name: claim.get(name) for name in ("p", "p_holm", "p_within_holm", "over", "needed", "sides")}
    about = {"name": claim["claim"], "setting": claim["setting"], "of": " ".join(map(str, claim["of"])), "unit": unit}
    about |= {"verdict": claim["verdict"], "exploratory": claim["exploratory"]}
    about["either_way"] = "other_than" in claim["rule"]
    about |= {"estimate": shown(mean(values.values())) if values else None} | numbers | tests
    return about | {"seeds": {str(seed): shown(value) for seed, value in values.items()}, "flags": notes(claim)}


def notes(claim: dict) -> list[str]:
    """What a reader must know beside the verdict: seeds without a value, and the flags."""
    words = []
    for name, text in {"lost": "no value in seeds", "missing": "a look before all seeds have run, without"}.items():
        words += [f"{text} {', '.join(map(str, claim[name]))}"] if claim[name] else []
    return words + claim["flags"]


def table(records: list[dict], title: str = "") -> Table:
    """A row per claim: its verdict, and the numbers behind it in the unit of the claim."""
    header = ["claim", "verdict", "estimate", "unit", "exact interval", "Student's", "threshold", "p after Holm"]
    return Table(title, [*header, "can see", "seeds", "remarks"], [line_of(one) for one in records])


def line_of(one: dict) -> list[str]:
    _, form = UNITS[one["unit"]]

    def text(value: float | None) -> str:
        return "-" if value is None else format(value, form)

    def interval(low: float | None, high: float | None) -> str:
        is_open = low is None and high is None
        return "" if is_open else f"{'-inf' if low is None else text(low)} to {'inf' if high is None else text(high)}"

    word = f"exploratory: {one['verdict']}" if one["exploratory"] else one["verdict"]
    rule = [] if one["threshold"] is None else [f"{BEYOND[one['either_way']]} {text(one['threshold'])}"]
    rule += [] if one["within"] is None else [f"within {text(one['within']).removeprefix('+')}"]
    rule += [f"in {one['needed']} seeds"] if one["needed"] is not None else []
    p = one["p_holm"] if one["p_holm"] is not None else one["p_within_holm"]
    seen = one["detectable"] if one["detectable"] is not None else one["detectable_within"]
    can_see = "" if seen is None else text(seen).removeprefix("+")
    if seen is None and p is not None and one["student_low"] is not None:  # there is a spread
        can_see = "nothing"  # so few seeds have no p under the level
    remarks = [f"{one['over']} of {len(one['seeds'])} seeds are over it"] if one["over"] is not None else []
    return [
        name_of(one), word, text(one["estimate"]) if one["seeds"] else "", one["unit"],
        interval(one["low"], one["high"]), interval(one["student_low"], one["student_high"]), ", ".join(rule),
        "" if p is None else f"{p:.2g}", can_see, str(len(one["seeds"])),
        "; ".join(remarks + one["flags"]),
    ]  # fmt: skip


def name_of(one: dict) -> str:
    return ", ".join(filter(None, (one["name"], one["setting"])))


def forest(records: list[dict], path: Path, panel: str = "of") -> Path:
    """The mean of each claim's contrast with its exact interval, a bar at its threshold, and a dot for each seed.

    records: what `record` returns; claims without runs are left out. panel: the field by which claims share a panel.
    Records that have an "experiment" stand under its name. Where few seeds leave the exact interval open, a
    thin line goes up to the edge, and a darker one is Student's interval; what is exploratory has a hollow mark.
    """
    panels = {}
    for one in records:
        if one["verdict"] != "not run" and one["seeds"]:
            lines = panels.setdefault((one[panel], one["unit"]), [])
            experiment = one.get("experiment")
            if experiment and experiment not in [line.get("experiment") for line in lines]:
                lines.append({"heading": experiment})
            lines.append(one)
    step = 0.3 if panel == "of" else 0.22
    heights = [0.7 + step * len(own) for own in panels.values()]
    look: dict = dict(squeeze=False, height_ratios=heights)
    figure, grid = plt.subplots(len(panels), 1, figsize=(9, sum(heights)), **look)
    for axes, ((of, unit), own) in zip(grid.flat, panels.items(), strict=True):
        forest_panel(axes, own, 1.0 if unit in (RATIO, "ratio") else 0.0)
        name = unit if of == unit else f"{of} ({unit})"
        axes.set(xlabel=name, ylim=(-len(own) + 0.2, 0.8))
        if unit == RATIO:
            ratio_axis(axes)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(7))
        dress(axes)
    shown = [one for own in panels.values() for one in own if "verdict" in one]
    are_open = [one for one in shown if is_open(one)]
    marks: dict[str, tuple[bool, dict]] = {  # those that are in a panel
        "threshold": (any(one["threshold"] is not None for one in shown), dict(marker="|", ls="", c="black", ms=11)),
        "a seed": (True, dict(marker=".", ls="", c="0.4", ms=4)),
        "mean, exploratory": (any(one["exploratory"] for one in shown), dict(marker="o", ls="", c="0.4", mfc="none")),
        "exact interval open: too few seeds": (bool(are_open), dict(c="0.8", lw=0.8)),
        "Student's, there": (any(one["student_low"] is not None for one in are_open), dict(c="0.4", lw=1.2)),
    }
    handles = [plt.Line2D([], [], label=name, **look) for name, (is_there, look) in marks.items() if is_there]
    verdicts = {one["verdict"]: None for one in shown}
    handles += [plt.Line2D([], [], color=CLAIM_COLOURS[word], lw=3, label=word) for word in verdicts]
    look = dict(loc="center left", bbox_to_anchor=(1, 0.5)) if panel == "of" else dict(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4
    )  # fmt: skip
    figure.legend(handles=handles, frameon=False, fontsize=8, **look)
    return write(figure, path)


def is_open(one: dict) -> bool:
    """Whether a record's claim has too few seeds for an exact interval with two ends. A count has no interval."""
    return one["over"] is None and (one["low"] is None or one["high"] is None)


def forest_panel(axes: plt.Axes, own: list[dict], zero: float) -> None:
    """own: records, and headings among them. zero: where a contrast shows no difference."""
    seeds = [value for one in own for value in one.get("seeds", {}).values()]
    edges, lines = (min(zero, *seeds), max(zero, *seeds)), []
    for i, one in enumerate(own):
        if "heading" in one:
            lines.append((one["heading"], zero, zero, zero, "none"))
            continue
        middle, low, high = one["estimate"], one["low"], one["high"]
        if is_open(one):
            axes.plot(edges, [-i, -i], color="0.8", linewidth=0.8)
            if one["student_low"] is not None:
                axes.plot([one["student_low"], one["student_high"]], [-i, -i], color="0.4", linewidth=1.2)
        ends = (middle if low is None else low), middle, (middle if high is None else high)
        lines.append((name_of(one), *ends, CLAIM_COLOURS[one["verdict"]]))
        if one["threshold"] is not None:
            axes.plot([one["threshold"]], [-i], "|", color="black", markersize=11)
    interval_lines(axes, lines)
    for i, (one, label) in enumerate(zip(own, axes.get_yticklabels(), strict=True)):
        if "heading" in one:
            label.set_fontweight("bold")
            continue
        axes.plot(list(one["seeds"].values()), [-i] * len(one["seeds"]), ".", color="0.4", markersize=4, zorder=3)
        if one["exploratory"]:
            axes.plot([one["estimate"]], [-i], "o", color="white", markersize=3.5, zorder=4)
    axes.axvline(zero, color="0.3", linewidth=1)


def pairs(judged: list[dict], rows: list[dict], path: Path) -> Path:
    """Both arms of each claim, a line per seed; up to PANELS claims. Returns the path."""
    n_left, judged = len(judged[PANELS:]), judged[:PANELS]
    columns = min(4, len(judged))
    lines = -(-len(judged) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(3.1 * columns, 2.9 * lines), squeeze=False)
    for axes in grid.flat[len(judged) :]:
        axes.set_axis_off()
    for axes, claim in zip(grid.flat, judged, strict=False):
        unit = unit_of(claim)
        unit = "steps" if unit == RATIO else unit  # of one arm
        convert, _ = UNITS[unit]
        cells = sorted(claim["weights"], key=claim["weights"].get)  # from the arm that is subtracted to the other
        sides = [stats.contrast(rows, {cell: 1}, claim["of"]) for cell in cells]
        for seed in claim["by_seed"]:
            ends = [convert(side[seed]) for side in sides]
            colour = SIDES[side_of(claim, claim["by_seed"][seed], ends)]
            axes.plot([0, 1], ends, "o-", color=colour, lw=1, ms=3, alpha=0.8)
        axes.set_xticks([0, 1], [wrapped(arm, 16) for _, arm in cells], fontsize=8)
        axes.set(xlim=(-0.2, 1.2))
        axes.set_ylabel({"points": "%", "ratio": claim["of"][-1]}.get(unit, unit), fontsize=8)
        axes.set_title(wrapped(", ".join(filter(None, (claim["claim"], claim["setting"]))), 34), fontsize=8)
        dress(axes)
    handles = [plt.Line2D([], [], marker="o", color=colour, label=f"a seed: {name}") for name, colour in SIDES.items()]
    look: dict = dict(ncols=len(SIDES), fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0.0))
    figure.legend(handles=handles, title=f"and {n_left} pairs more in report.html" if n_left else None, **look)
    return write(figure, path)


def side_of(claim: dict, value: float, ends: list[float]) -> str:
    """On which side of the claim's threshold, or of zero, a seed's value lies: one of SIDES."""
    if ends[0] == ends[1]:
        return "no difference"
    return "over the threshold" if value > (stats.threshold_of(claim["rule"]) or 0) else "not over it"


def wrapped(text: str, width: int) -> str:
    lines = [""]
    for word in text.split():
        lines += [""] if lines[-1] and len(lines[-1]) + len(word) >= width else []
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def survival(rows: list[dict], solved_above: float, path: Path) -> Path:
    """The share of runs that have not solved the task, against the step, and how many are still at risk.

    A panel per setting and mixer, a colour per kind of arm (Kaplan & Meier 1958). Returns the path.
    """
    panels: dict = {}
    rows = sorted(rows, key=lambda row: (row["arm"], row["seed"]))  # as in report.figures
    colours = report.colours_of(rows)
    for row in rows:
        place = ", ".join(filter(None, (row.get("setting"), report.mixer_of(row))))
        panels.setdefault(place, {}).setdefault(report.variant_of(row), []).append(row)
    columns = min(5, len(panels))
    lines, most = -(-len(panels) // columns), max(map(len, panels.values()))
    size = (3.2 * columns + 0.5, lines * (2.3 + 0.16 * most))
    figure, grid = plt.subplots(lines, columns, figsize=size, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (place, arms) in zip(grid.flat, panels.items(), strict=False):
        end = max(curves.horizon_of(row) for own in arms.values() for row in own)
        ticks = [0, end / 2, end]
        for i, (arm, own) in enumerate((arm, arms[arm]) for arm in colours if arm in arms):
            steps, is_censored = curves.times(own, solved_above)
            found = curves.survival(steps, is_censored)
            x, y = [0, *(step for step, _, _ in found), end], [1, *(share for _, share, _ in found), found[-1][1]]
            colour = colours[arm]
            axes.plot(x, [100 * share for share in y], drawstyle="steps-post", color=colour, label=arm)
            at_risk = [sum(step >= tick for step in steps) for tick in ticks]
            for tick, n in zip(ticks, at_risk, strict=True):
                axes.annotate(
                    str(n), (tick, 0), (0, -30 - 11 * i), xycoords=("data", "axes fraction"), ha="center", fontsize=7,
                    textcoords="offset points", color=colour, annotation_clip=False,
                )  # fmt: skip
        axes.set(ylim=(0, 103), xlim=(0, end), title=place)
        axes.set_xticks(ticks)
        axes.title.set_fontsize(9)
        dress(axes)
    grid[0, 0].set_ylabel("runs not yet solved (%)")
    figure.supxlabel(f"step; under it, runs still at risk of an accuracy over {solved_above:.0%}", fontsize=9)
    label_edges(grid)
    legend_of(figure)
    return write(figure, path)
