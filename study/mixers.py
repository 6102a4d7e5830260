"""Arms compared mixer by mixer: a forest of every pair of arms that a claim is about."""

from pathlib import Path

import matplotlib.pyplot as plt

from study import claims, stats
from study.drawing import dress, interval, legend_of, mean, mixer_colours, panel_grid, ratio_axis, write
from study.rows import mixer_of, variant_of


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

    claims.png has the thresholds.
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
                line(axes, -i, by_mixer[mixer], convert, colours[mixer])
        if len(by_mixer) > 1:
            seeds = set.intersection(*(set(values) for values in by_mixer.values()))
            pooled = {seed: mean(values[seed] for values in by_mixer.values()) for seed in sorted(seeds)}
            line(axes, -n, pooled, convert, "black")
        axes.axvline(convert(0.0), color="0.3", linewidth=1)
        title = f"{first} / {second}" if convert(0.0) == 1 else f"{first} minus {second}"
        axes.set_title(title + " (exploratory)" * claim["exploratory"], fontsize=9)
        axes.set(ylim=(-n - 0.6, 0.6))
        axes.set_xlabel(f"{' '.join(map(str, of))} ({claims.unit_of(claim)})", fontsize=8)
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


def line(axes: plt.Axes, y: float, by_seed: dict, convert, colour: str) -> None:
    """One line of the forest: the interval, the mean, and a dot per seed."""
    values = list(by_seed.values())
    if not values:
        return
    low, high = interval(values)
    if low is not None:
        axes.plot([convert(low), convert(high)], [y, y], color=colour, linewidth=3)
    axes.plot([convert(mean(values))], [y], "o", color=colour, markersize=7)
    axes.plot(list(map(convert, values)), [y - 0.22] * len(values), ".", color=colour, alpha=0.8, markersize=5)
