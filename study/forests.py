"""Claims as forests, a line per claim or per mixer, and those of all experiments in one table, from claims.json alone.

    python plot.py results      # results/NAME/claims.png, and the table

experiment.py writes claims.json beside the rows, and draws mixers.png: every pair of arms that a claim is about, mixer
by mixer. Claims of one unit share a panel: points of accuracy, per cent of a weight, nats, ratios of steps.
"""

from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from configurator import UserError
from runs.files import one_line, read_json
from study import stats
from study.claims import RATIO, UNITS, table
from study.drawing import COLOURS, FEWEST, dress, legend_of, mixer_colours, panel_grid, ratio_axis, write
from study.rows import mixer_of, variant_of

VERDICT_COLOURS = {
    "supported": COLOURS[2], "passed": COLOURS[2], "equivalent": COLOURS[0], "not supported": COLOURS[4],
    "refuted": COLOURS[1], "failed": COLOURS[1], "inconclusive": "0.5",
}  # fmt: skip


def draw(folder: Path) -> list:
    """Draws the claims of each experiment in this folder. Returns the paths and a table of all. Raises UserError."""
    drawn, found = [], []
    for file in sorted(folder.glob("*/claims.json")):
        with one_line(f"{file}: cannot be drawn"):
            records = [one for one in read_json(file)["claims"] if has_run(one)]
            found += [one | {"name": f"{file.parent.name}: {one['name']}"} for one in records]
            drawn += [of_claims(records, file.with_name("claims.png"))] if records else []
    if not drawn:
        raise UserError(f"{folder}: no claim of an experiment has been judged yet, nothing to draw")
    return [*drawn, table(found)]


def has_run(one: dict) -> bool:
    return one["verdict"] != "not run" and bool(one["seeds"])


def of_claims(records: list[dict], path: Path) -> Path:
    """The mean of each claim's contrast with its exact interval, a bar at its threshold, and a dot for each seed. Where
    few seeds leave the exact interval open, a thin line goes up to the edge, and a darker one is Student's interval;
    what is exploratory has a hollow mark. records: of claims that have run. Returns the path."""
    panels = {unit: of for unit in UNITS if (of := [one for one in records if one["unit"] == unit])}
    heights = [0.7 + 0.22 * len(of) for of in panels.values()]
    figure, grid = plt.subplots(len(panels), 1, figsize=(9, sum(heights)), squeeze=False, height_ratios=heights)
    for axes, (unit, of) in zip(grid.flat, panels.items(), strict=True):
        zero = 1.0 if unit in (RATIO, "ratio") else 0.0  # a contrast without a difference
        axes.axvline(zero, color="0.3", linewidth=1)
        axes.set_yticks([-i for i in range(len(of))], [one["name"] for one in of], fontsize=8)
        for i, one in enumerate(of):
            claim_line(axes, -i, one, zero, [value for one in of for value in one["seeds"].values()])
        axes.set(xlabel=unit, ylim=(-len(of) + 0.2, 0.8))
        if unit == RATIO:
            ratio_axis(axes)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(7))
        dress(axes)
    legend_of(figure, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return write(figure, path)


def claim_line(axes: plt.Axes, y: float, one: dict, zero: float, seeds: list[float]) -> None:
    """seeds: the values of all claims of the panel."""
    middle, colour, dots = one["estimate"], VERDICT_COLOURS[one["verdict"]], list(one["seeds"].values())
    if one["over"] is None and None in (one["low"], one["high"]):  # a count has no interval
        edges = [min(zero, *seeds), max(zero, *seeds)]
        axes.plot(edges, [y, y], color="0.8", linewidth=0.8, label="exact interval open: too few seeds")
        if one["student_low"] is not None:
            ends = [one["student_low"], one["student_high"]]
            axes.plot(ends, [y, y], color="0.4", linewidth=1.2, label="Student's, there")
    ends = [middle if end is None else end for end in (one["low"], one["high"])]
    axes.plot(ends, [y, y], color=colour, linewidth=3, label=one["verdict"])
    axes.plot([middle], [y], "o", color=colour)
    if one["threshold"] is not None:
        axes.plot([one["threshold"]], [y], "|", color="black", markersize=11, label="threshold")
    axes.plot(dots, [y] * len(dots), ".", color="0.4", markersize=4, zorder=3, label="a seed")
    if one["exploratory"]:
        look: dict = dict(markerfacecolor="white", markeredgecolor=colour, markersize=6, zorder=4)
        axes.plot([middle], [y], "o", label="mean, exploratory", **look)


def pairs_of(judged: list[dict], rows: list[dict]) -> dict[tuple, dict]:
    """{(name of the first arm, of the second, what): the claim}: the pairs that claims compare in all mixers
    alike, and of each pair the first claim about the most mixers. An arm's name is without its mixer's, or "none"."""
    names = {row["arm"]: (mixer_of(row), variant_of(row)) for row in rows}
    pairs: dict = {}
    for claim in judged:
        by_mixer: dict = {}
        for arm, weight in claim["weights"].items():
            if arm in names:
                mixer, variant = names[arm]
                by_mixer.setdefault(mixer, []).append((weight, variant))
        kinds = {tuple(sorted(arms)) for arms in by_mixer.values()}
        (arms,) = kinds if len(kinds) == 1 else [()]
        if len(arms) == 2 and abs(sum(weight for weight, _ in arms)) < 1e-9:
            (_, second), (_, first) = arms
            key = first, second, tuple(claim["of"])
            if key not in pairs or len(by_mixer) > len(pairs[key]["mixers"]):
                pairs[key] = claim | {"mixers": set(by_mixer)}
    return pairs


def of_mixers(pairs: dict[tuple, dict], rows: list[dict], path: Path) -> Path:
    """A column per pair of arms (pairs_of), a line per mixer and one for the mean of all, a dot per seed; returns the
    path. claims.png has the thresholds."""
    arm_of = {(mixer_of(row), variant_of(row)): row["arm"] for row in rows}
    mixers, mean = list(dict.fromkeys(map(mixer_of, rows))), "mean of these"
    names, colours, n = [*mixers, mean], mixer_colours(mixers) | {mean: "black"}, len(mixers)
    columns = -(-len(pairs) // -(-len(pairs) // 4))  # as even as up to four a row allow
    figure, grid = panel_grid(len(pairs), columns, (2.9, 0.42 * n + 1.9), sharey=True)
    for axes, ((first, second, of), claim) in zip(grid.flat, pairs.items(), strict=False):
        convert, _ = UNITS[claim["unit"]]
        by_mixer = {
            mixer: stats.contrast(rows, {arm_of[mixer, first]: 1.0, arm_of[mixer, second]: -1.0}, of)
            for mixer in mixers
            if {(mixer, first), (mixer, second)} <= arm_of.keys()
        }
        if len(by_mixer) > 1:
            seeds = sorted(set.intersection(*map(set, by_mixer.values())))
            by_mixer[mean] = {seed: fmean(values[seed] for values in by_mixer.values()) for seed in seeds}
        for name, values in ((name, list(by_seed.values())) for name, by_seed in by_mixer.items() if by_seed):
            y, colour, (low, high) = -names.index(name), colours[name], stats.interval(values)
            if low is not None and len(values) >= FEWEST:
                axes.plot([convert(low), convert(high)], [y, y], color=colour, linewidth=3)
            axes.plot([convert(fmean(values))], [y], "o", color=colour, markersize=7)
            axes.plot(list(map(convert, values)), [y - 0.22] * len(values), ".", color=colour, alpha=0.8, markersize=5)
        axes.axvline(convert(0.0), color="0.3", linewidth=1)
        title = f"{first} / {second}" if convert(0.0) == 1 else f"{first} minus {second}"
        axes.set_title(title + " (exploratory)" * claim["exploratory"], fontsize=9)
        axes.set(ylim=(-n - 0.6, 0.6))
        what = ["steps to", *of[1:]] if of[0] == "log_steps" else of
        axes.set_xlabel(f"{' '.join(map(str, what))} ({claim['unit']})", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        if of[0] == "log_steps":
            ratio_axis(axes)
        axes.axhline(-n + 0.5, color="0.85", linewidth=0.8)
        dress(axes)
    grid[0, 0].set_yticks([-i for i in range(n + 1)], names)
    handles = [
        plt.Line2D([], [], marker="o", color="0.3", linewidth=3, label="mean, 95% interval"),
        plt.Line2D([], [], marker=".", color="0.3", linestyle="", label="a seed"),
    ]
    legend_of(figure, handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=5)
    return write(figure, path)
