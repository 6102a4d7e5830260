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

from study import claims, curves, report, stats
from study.drawing import dress, interval, mean, mean_mark, mixer_colours, ratio_axis, write
from study.page import Table

BETTER = {"log_steps": "sooner", "lost": "lost less often"}


def pairs_of(judged: list[dict], rows: list[dict]) -> dict[tuple, dict]:
    """{(setting, name of the first arm, of the second, what): the claim}: the pairs that claims compare in all mixers
    alike, and of each pair the first claim about the most mixers. An arm's name is without its mixer's, or "none"."""
    names = {row["arm"]: (report.mixer_of(row), report.variant_of(row)) for row in rows}
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
    pairs, mixers, rules, lost = pairs_of(judged, rows), list(report.arms_of(rows)), [], set()
    colours, n = mixer_colours(mixers), len(mixers)
    lines = -(-len(pairs) // 4)
    columns = -(-len(pairs) // lines)
    look: dict = dict(squeeze=False, sharey=True, figsize=(2.9 * columns + 1.2, lines * (0.42 * n + 1.9)))
    figure, grid = plt.subplots(lines, columns, **look)
    for axes in grid.flat[len(pairs) :]:
        axes.set_axis_off()
    for axes, ((setting, first, second, of), claim) in zip(grid.flat, pairs.items(), strict=False):
        convert, _ = claims.UNITS[claims.unit_of(claim)]
        is_ratio, each = convert(0.0) == 1, {}
        for i, mixer in enumerate(mixers):
            arms = {report.variant_of(row): row["arm"] for row in rows if report.mixer_of(row) == mixer}
            if not {first, second} <= arms.keys():
                continue
            weights = {(setting, arms[first]): 1.0, (setting, arms[second]): -1.0}
            each[mixer] = stats.contrast(rows, weights, of)
            never = lost_seeds(rows, weights, of)
            line(axes, -i, each[mixer], convert, colours[mixer], never)
            lost |= never
        if len(each) > 1:
            seeds = set.intersection(*(set(own) for own in each.values()))
            pooled = {seed: mean(own[seed] for own in each.values()) for seed in sorted(seeds)}
            line(axes, -n, pooled, convert, "black", set())
        rule = claim["rule"] if claim["mixers"] == set(each) else {}
        rules.append(rule)
        if "within" in rule:
            axes.axvspan(convert(-rule["within"]), convert(rule["within"]), color="0.92", zorder=0)
        if stats.threshold_of(rule):
            axes.axvline(convert(stats.threshold_of(rule)), color="0.3", linestyle=":", linewidth=1)
        axes.axvline(convert(0.0), color="0.3", linewidth=1)
        joined = f"{first} / {second}" if is_ratio else f"{first} minus {second}"
        joined += " (exploratory)" * claim["exploratory"]
        axes.set_title(", ".join(filter(None, (setting, joined))), fontsize=9)
        axes.set(ylim=(-n - 0.6, 0.6))
        axes.set_xlabel(label_of(claim, first, second), fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        if of[0] == "log_steps":
            ratio_axis(axes)
        axes.axhline(-n + 0.5, color="0.85", linewidth=0.8)
        dress(axes)
    grid[0, 0].set_yticks([-i for i in range(n + 1)], [*mixers, "mean of these"])
    handles: list = [
        plt.Line2D([], [], marker="o", color="0.3", linewidth=3, label="mean, 95% interval"),
        plt.Line2D([], [], marker=".", color="0.3", linestyle="", label="a seed"),
    ]
    if lost:
        label = "a seed of which a run never got there"
        handles.append(plt.Line2D([], [], marker="o", color="0.3", ls="", fillstyle="none", ms=4, label=label))
    if any(stats.threshold_of(rule) for rule in rules):
        handles.append(plt.Line2D([], [], color="0.3", linestyle=":", label="threshold of a claim"))
    if any("within" in rule for rule in rules):
        handles.append(plt.Rectangle((0, 0), 1, 1, color="0.9", label="counts as no difference"))
    place: dict = dict(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=len(handles), fontsize=8, frameon=False)
    figure.legend(handles=handles, **place)
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
        look: dict = dict(marker="o", fillstyle="none", ms=4) if seed in lost else dict(marker=".", ms=5)
        axes.plot([convert(value)], [y - 0.22], color=colour, linestyle="", alpha=0.8, **look)


def lost_seeds(rows: list[dict], weights: dict, of: tuple) -> set[int]:
    if of[0] != "log_steps":
        return set()
    own = [row for row in rows if (row.get("setting"), row["arm"]) in weights]
    return {row["seed"] for row in own if curves.lost(row, of[1])}


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
    level = {seed: mean(own[seed]["val_loss"] for own in arms.values()) for seed in seeds}
    colours = mixer_colours([mixer for mixer, _ in arms])
    markers = dict(zip(dict.fromkeys(variant for _, variant in arms), report.MARKERS, strict=False))
    figure, axes = plt.subplots(figsize=(7, 4.6))
    places: dict = {}
    for (mixer, variant), own in arms.items():
        values = [own[seed]["val_loss"] - level[seed] + mean(level.values()) for seed in seeds]
        places[mixer, variant] = training_flops(own[seeds[0]]), mean(values)
        marker = markers.get(variant, "o")
        mean_mark(axes, places[mixer, variant][0], values, colours[mixer], marker, markersize=7, alpha=0.9)
    for (mixer, variant), (x, y) in places.items():
        if variant != "none" and (mixer, "none") in places:
            x0, y0 = places[mixer, "none"]
            axes.plot([x0, x], [y0, y], color=colours[mixer], linewidth=0.8, alpha=0.6)
    axes.set_title(f"seeds {', '.join(map(str, seeds))}", fontsize=9)
    axes.set(xlabel="FLOPs of training", ylabel="loss at the end, each seed's level taken out\n(nats a token)")
    handles = [plt.Line2D([], [], color=colours[m], linewidth=3, label=m) for m in dict.fromkeys(m for m, _ in arms)]
    look: dict = dict(color="0.3", linestyle="", markersize=6)
    handles += [plt.Line2D([], [], marker=marker, label=name, **look) for name, marker in markers.items()]
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    dress(axes)
    return write(figure, path)


def has_flops(rows: list[dict]) -> bool:
    """Whether `flops` has something to show: several mixers, losses of finite runs, a seed that arms share.

    A run that goes on from another one's weights has cost more than its row tells, and a sink is not about its loss.
    """
    if any("init_from" in row or row.get("sinks") for row in rows):
        return False
    if len(report.arms_of(rows)) < 2 or report.is_accuracy(rows) or len({row.get("setting") for row in rows}) > 1:
        return False
    arms, seeds = shared_seeds(rows)
    return bool(seeds) and len({mixer for mixer, _ in arms}) > 1 and not report.by_learning_rate(rows)


def shared_seeds(rows: list[dict]) -> tuple[dict, list[int]]:
    """({(mixer, variant): {seed: row}}, the seeds that these arms share), of runs with all that `flops` needs.

    Arms with few seeds are left out where that leaves more runs in all.
    """
    needed, found = ("flops_per_token", "val_loss", "tokens_per_second", "step_ms"), {}
    for row in rows:
        if all(row.get(name) for name in needed):
            found.setdefault((report.mixer_of(row), report.variant_of(row)), {})[row["seed"]] = row
    best: tuple[dict, set] = {}, set()
    for least in sorted({len(own) for own in found.values()}):
        arms = {arm: own for arm, own in found.items() if len(own) >= least}
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
        without, with_gate = about["arms"]
        weights = {(setting, without): 1.0, (setting, with_gate): -1.0}
        gains = list(stats.contrast(rows, weights, ["val_loss"]).values())
        claimed = " to ".join(f"{value:g}" for value in about["per_cent"])
        name = ", ".join(filter(None, (name, setting)))
        if not gains:
            cells.append([name, claimed, "not run", "", "", "0"])
            continue
        ends = (mean(gains), *stats.interval(gains))

        def shown(form, convert, ends=ends):
            middle, low, high = (None if value is None else convert(value) for value in ends)
            return f"{middle:{form}}" + ("" if low is None else f" ({low:{form}} to {high:{form}})")

        per_byte, per_token = (shown("+.1f", lambda value, n=n: -100 * math.expm1(-n * value)) for n in (1.0, b))
        cells.append([name, claimed, shown("+.4f", float), per_byte, per_token, str(len(gains))])
    header = ["mixer", "predicted (%)", "nats a byte", "per byte (%)", f"per token of {b:g} bytes (%)", "seeds"]
    title = "Predicted gains of perplexity beside those found here: other sizes, other text; nothing is judged"
    return Table(title, header, cells) if cells else None
