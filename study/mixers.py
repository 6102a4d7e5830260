"""Arms compared mixer by mixer: a forest of every pair of arms that a claim is about, losses against FLOPs, and a table
that sets predicted gains beside those found.

    forest(judged, rows, path)      mixers down, pairs of arms across, every seed
    flops(rows, path)               loss at the end against the FLOPs of training
    predicted(config, rows)         the table; it judges nothing
"""

import itertools
import math
from pathlib import Path

import matplotlib.pyplot as plt

from study import claims, curves, stats
from study.drawing import (
    dress,
    interval,
    legend_of,
    mean,
    mean_mark,
    mixer_colours,
    panel_grid,
    ratio_axis,
    write,
)  # fmt: skip
from study.names import by_learning_rate, joined, mixer_of, variant_of
from study.page import Table, mean_text

MARKERS = "o^vsDPX*<>"
BETTER = {"log_steps": "sooner", "lost": "lost less often"}


def pairs_of(judged: list[dict], rows: list[dict]) -> dict[tuple, dict]:
    """{(setting, name of the first arm, of the second, what): the claim}: the pairs that claims compare in all mixers
    alike, and of each pair the first claim about the most mixers. An arm's name is without its mixer's, or "none"."""
    names = {row["arm"]: (mixer_of(row), variant_of(row)) for row in rows}
    found: dict = {}
    for claim in judged:
        by_mixer: dict = {}
        for (_, arm), weight in claim["weights"].items():
            if arm in names:
                mixer, variant = names[arm]
                by_mixer.setdefault(mixer, {})[variant] = weight
        kinds = [tuple(sorted(own.items(), key=lambda item: -item[1])) for own in by_mixer.values()]
        is_pair = kinds and len(kinds[0]) == 2 and abs(sum(weight for _, weight in kinds[0])) < 1e-9
        if is_pair and all(kind == kinds[0] for kind in kinds) and len({s for s, _ in claim["weights"]}) == 1:
            (first, _), (second, _) = kinds[0]
            key = next(iter(claim["weights"]))[0], first, second, tuple(claim["of"])
            if key not in found or len(by_mixer) > len(found[key]["mixers"]):
                found[key] = claim | {"mixers": set(by_mixer)}
    return found


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
    for axes, ((setting, first, second, of), claim) in zip(grid.flat, pairs.items(), strict=False):
        convert, _ = claims.UNITS[claims.unit_of(claim)]
        by_mixer = {}
        for i, mixer in enumerate(mixers):
            if {(mixer, first), (mixer, second)} <= arm_of.keys():
                weights = {(setting, arm_of[mixer, first]): 1.0, (setting, arm_of[mixer, second]): -1.0}
                by_mixer[mixer] = stats.contrast(rows, weights, of)
                line(axes, -i, by_mixer[mixer], convert, colours[mixer], lost_seeds(rows, weights, of))
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
        pair = f"{first} / {second}" if convert(0.0) == 1 else f"{first} minus {second}"
        axes.set_title(joined(setting, pair + " (exploratory)" * claim["exploratory"]), fontsize=9)
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


def lost_seeds(rows: list[dict], weights: dict, of: tuple) -> set[int]:
    if of[0] != "log_steps":
        return set()
    pair = [row for row in rows if (row.get("setting"), row["arm"]) in weights]
    return {row["seed"] for row in pair if curves.lost(row, of[1])}


def label_of(claim: dict, first: str, second: str) -> str:
    """What the axis shows, and which side is better for which arm."""
    of, measured = claim["of"], claims.measured(claim)
    if of[0] == "log_steps":
        what = f"ratio of steps to {of[1]:.0%}"
    elif of[0] == "log":
        what = f"ratio of {of[-1]}"
    else:
        what = f"{' '.join(map(str, of))} ({claims.unit_of(claim)})"
    if measured is None:
        return what
    is_higher = measured in claims.HIGHER
    better = BETTER.get(measured, "higher" if is_higher else "lower")
    left, right = (second, first) if is_higher else (first, second)
    return f"{what}\n← {left} {better}    {right} {better} →"


def flops(rows: list[dict], path: Path) -> Path:
    """Loss at the end against the FLOPs of training, of seeds that the arms share: a colour per mixer, a marker per
    kind of arm, a line from the arm without a gate to each other one. Returns the path.

    Every seed's mean over the arms is taken out of its losses, since all arms of a seed share its text.
    """
    arms, seeds = shared_seeds(rows)
    level = {seed: mean(by_seed[seed]["val_loss"] for by_seed in arms.values()) for seed in seeds}
    colours = mixer_colours(mixer for mixer, _ in arms)
    markers = dict(zip(dict.fromkeys(variant for _, variant in arms), itertools.cycle(MARKERS), strict=False))
    figure, axes = plt.subplots(figsize=(7, 4.6))
    places: dict = {}
    for (mixer, variant), by_seed in arms.items():
        values = [by_seed[seed]["val_loss"] - level[seed] + mean(level.values()) for seed in seeds]
        places[mixer, variant] = training_flops(by_seed[seeds[0]]), mean(values)
        look: dict = dict(marker=markers[variant], markersize=7, alpha=0.9)
        mean_mark(axes, places[mixer, variant][0], values, colours[mixer], **look)
    for (mixer, variant), end in places.items():
        if variant != "none" and (mixer, "none") in places:
            ends = zip(places[mixer, "none"], end, strict=True)
            axes.plot(*ends, color=colours[mixer], linewidth=0.8, alpha=0.6)
    axes.set_title(f"seeds {', '.join(map(str, seeds))}", fontsize=9)
    axes.set(xlabel="FLOPs of training", ylabel="loss at the end, each seed's level taken out\n(nats a token)")
    handles = [plt.Line2D([], [], color=colours[m], linewidth=3, label=m) for m in dict.fromkeys(m for m, _ in arms)]
    look = dict(color="0.3", linestyle="", markersize=6)
    handles += [plt.Line2D([], [], marker=marker, label=name, **look) for name, marker in markers.items()]
    legend_of(figure, handles)
    dress(axes)
    return write(figure, path)


def has_flops(rows: list[dict]) -> bool:
    """Whether `flops` has something to show: several mixers, losses of finite runs, a seed that arms share.

    A run that goes on from another one's weights has cost more than its row tells, and a sink is not about its loss.
    """
    if any("init_from" in row or row.get("sinks") for row in rows):
        return False
    is_accuracy = rows[0].get("metric", "accuracy") == "accuracy"
    if is_accuracy or len({row.get("setting") for row in rows}) > 1:
        return False
    arms, seeds = shared_seeds(rows)
    return bool(seeds) and len({mixer for mixer, _ in arms}) > 1 and not by_learning_rate(rows)


def shared_seeds(rows: list[dict]) -> tuple[dict, list[int]]:
    """({(mixer, variant): {seed: row}}, the seeds that these arms share), of runs with all that `flops` needs.

    Arms with few seeds are left out where that leaves more runs in all.
    """
    needed, known = ("flops_per_token", "val_loss", "tokens_per_second", "step_ms"), {}
    for row in rows:
        if all(row.get(name) for name in needed):
            known.setdefault((mixer_of(row), variant_of(row)), {})[row["seed"]] = row
    best: tuple[dict, set] = {}, set()
    for least in sorted({len(by_seed) for by_seed in known.values()}):
        arms = {arm: by_seed for arm, by_seed in known.items() if len(by_seed) >= least}
        seeds = set.intersection(*map(set, arms.values()))
        if len(arms) * len(seeds) >= len(best[0]) * len(best[1]):
            best = arms, seeds
    return best[0], sorted(best[1])


def training_flops(row: dict) -> float:
    tokens = row["tokens_per_second"] * row["step_ms"] / 1000  # of a step
    return 3 * row["flops_per_token"] * tokens * curves.horizon_of(row)


def predicted(config, rows: list[dict]) -> Table | None:
    """Predicted gains of perplexity beside the paired differences of the loss, as the share of the perplexity without a
    gate that is gone, per byte and per token."""
    cells, b = [], config.bytes_per_token
    for (name, about), setting in itertools.product(config.predicted.items(), config.settings or [None]):
        without, with_gate = ((setting, arm) for arm in about["arms"])
        gains = list(stats.contrast(rows, {without: 1.0, with_gate: -1.0}, ["val_loss"]).values())
        line = [joined(name, setting), " to ".join(f"{value:g}" for value in about["per_cent"])]
        if not gains:
            cells.append([*line, "not run", "", "", "0"])
            continue
        ends = (mean(gains), *stats.interval(gains))
        of_perplexity = [[end and -100 * math.expm1(-n * end) for end in ends] for n in (1.0, b)]
        shares = [mean_text("+.1f", *share) for share in of_perplexity]
        cells.append([*line, mean_text("+.4f", *ends), *shares, str(len(gains))])
    header = ["mixer", "predicted (%)", "nats a byte", "per byte (%)", f"per token of {b:g} bytes (%)", "seeds"]
    title = "Predicted gains of perplexity beside those found here: other sizes, other text; nothing is judged"
    return Table(title, header, cells) if cells else None
