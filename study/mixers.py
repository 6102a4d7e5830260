"""Arms compared mixer by mixer: a forest of every pair of arms that a claim is about."""

from pathlib import Path

import matplotlib.pyplot as plt

from study import claims, curves, stats
from study.drawing import dress, interval, legend_of, mean, mixer_colours, panel_grid, ratio_axis, write
from study.names import mixer_of, variant_of

BETTER = {"log_steps": "sooner", "lost": "lost less often"}


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


def forest(judged: list[dict], rows: list[dict], path: Path) -> Path:
    """A column per pair of arms, a line per mixer and one for the mean of all, a dot per seed; returns the path.

    A hollow dot is a pair of which a run never got there. The threshold of a claim about the mean of all these mixers
    is a dotted line, and its band is grey.
    """
    pairs, mixers = pairs_of(judged, rows), list(dict.fromkeys(map(mixer_of, rows)))
    colours, n = mixer_colours(mixers), len(mixers)
    arm_of = {(mixer_of(row), variant_of(row)): row["arm"] for row in rows}
    columns = -(-len(pairs) // -(-len(pairs) // 4))  # as even as up to four a row allow
    figure, grid = panel_grid(len(pairs), columns, (2.9, 0.42 * n + 1.9), sharey=True)
    for axes, ((first, second, of), claim) in zip(grid.flat, pairs.items(), strict=False):
        convert, _ = claims.UNITS[claims.unit_of(claim)]
        by_mixer = {}
        for i, mixer in enumerate(mixers):
            if {(mixer, first), (mixer, second)} <= arm_of.keys():
                weights = {arm_of[mixer, first]: 1.0, arm_of[mixer, second]: -1.0}
                by_mixer[mixer] = stats.contrast(rows, weights, of)
                pair = [row for row in rows if row["arm"] in weights]
                lost = {row["seed"] for row in pair if of[0] == "log_steps" and curves.lost(row, of[1])}
                line(axes, -i, by_mixer[mixer], convert, colours[mixer], lost)
        if len(by_mixer) > 1:
            seeds = set.intersection(*(set(values) for values in by_mixer.values()))
            pooled = {seed: mean(values[seed] for values in by_mixer.values()) for seed in sorted(seeds)}
            line(axes, -n, pooled, convert, "black", set())
        rule = claim["rule"] if claim["mixers"] == set(by_mixer) else {}
        if "within" in rule:
            ends = convert(-rule["within"]), convert(rule["within"])
            axes.axvspan(*ends, color="0.92", zorder=0, label="counts as no difference")
        if threshold := stats.threshold_of(rule):
            axes.axvline(convert(threshold), color="0.3", linestyle=":", linewidth=1, label="threshold of a claim")
        axes.axvline(convert(0.0), color="0.3", linewidth=1)
        title = f"{first} / {second}" if convert(0.0) == 1 else f"{first} minus {second}"
        axes.set_title(title + " (exploratory)" * claim["exploratory"], fontsize=9)
        axes.set(ylim=(-n - 0.6, 0.6))
        axes.set_xlabel(label_of(claim, first, second), fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        if of[0] == "log_steps":
            ratio_axis(axes)
        axes.axhline(-n + 0.5, color="0.85", linewidth=0.8)
        dress(axes)
    grid[0, 0].set_yticks([-i for i in range(n + 1)], [*mixers, "mean of these"])
    handles = [
        plt.Line2D([], [], marker="o", color="0.3", linewidth=3, label="mean, 95% interval"),
        plt.Line2D([], [], marker=".", color="0.3", linestyle="", label="a seed"),
    ]
    legend_of(figure, handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=5)
    return write(figure, path)


def line(axes: plt.Axes, y: float, by_seed: dict, convert, colour: str, lost: set) -> None:
    """One line of the forest: the interval, the mean, and a dot per seed, hollow for those in lost."""
    values = list(by_seed.values())
    if not values:
        return
    low, high = interval(values)
    if low is not None:
        axes.plot([convert(low), convert(high)], [y, y], color=colour, linewidth=3)
    axes.plot([convert(mean(values))], [y], "o", color=colour, markersize=7)
    for seed, value in by_seed.items():
        look: dict = dict(marker=".", ms=5)
        if seed in lost:
            look = dict(marker="o", fillstyle="none", ms=4, label="a seed of which a run never got there")
        axes.plot([convert(value)], [y - 0.22], color=colour, linestyle="", alpha=0.8, **look)


def label_of(claim: dict, first: str, second: str) -> str:
    """What the axis shows, and which side is better for which arm."""
    of, measured = claim["of"], claims.measured(claim)
    what = f"{' '.join(map(str, of))} ({claims.unit_of(claim)})"
    if of[0] in ("log_steps", "log"):
        what = f"ratio of steps to {of[1]:.0%}" if of[0] == "log_steps" else f"ratio of {of[-1]}"
    if measured is None:
        return what
    is_higher = measured in claims.HIGHER
    better = BETTER.get(measured, "higher" if is_higher else "lower")
    left, right = (second, first) if is_higher else (first, second)
    return f"{what}\n← {left} {better}    {right} {better} →"
