"""The figures of an experiment's claims: every interval, every pair of seeds, and how soon each arm solves the task.

They are drawn from what tables.judge_claims returns, and from the rows.
"""

import math
from pathlib import Path

import matplotlib.pyplot as plt

from study import curves, stats
from study.drawing import COLOURS, dress, interval_lines, mean, write

CLAIM_COLOURS = {
    "supported": COLOURS[2], "passed": COLOURS[2], "equivalent": COLOURS[0], "not supported": COLOURS[4],
    "refuted": COLOURS[1], "failed": COLOURS[1], "inconclusive": "0.5",
}  # fmt: skip


PANELS = 12  # of a figure with a panel per claim


def figures(judged: list[dict], rows: list[dict], solved_above: float | None, folder: Path) -> list[Path]:
    """Draws claims.png, pairs.png and survival.png, each if there is something to show. Returns the paths."""
    drawn = [forest(judged, folder / "claims.png")] if any(is_shown(claim) for claim in judged) else []
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


def unit_of(claim: dict) -> tuple[float, str]:
    """(factor, unit) of a claim's number in figures."""
    of = claim["of"]
    if of[0] == "log_steps":
        return 1, "natural logarithm of the steps"
    if of[0] == "val_loss" or (of[0] == "auc" and claim["metric"] == "val_loss"):
        return 1, "nats a token"
    return 100, "%" if of[0] == "meters" else "points"


def forest(judged: list[dict], path: Path) -> Path:
    """The mean of each claim's contrast with its exact interval, a bar at its threshold, and a dot for each seed.

    judged: what tables.judge_claims returns; claims without runs are left out. Each number of the rows that claims are
    about gets a panel. An end that few seeds leave open is drawn thin, up to the edge.
    """
    panels = {}
    for claim in judged:
        if is_shown(claim):
            panels.setdefault(tuple(claim["of"]), []).append(claim)
    heights = [0.7 + 0.3 * len(own) for own in panels.values()]
    look: dict = dict(squeeze=False, height_ratios=heights)
    figure, grid = plt.subplots(len(panels), 1, figsize=(9, sum(heights)), **look)
    for axes, (of, own) in zip(grid.flat, panels.items(), strict=True):
        scale, unit = unit_of(own[0])
        seeds = [scale * value for claim in own for value in claim["by_seed"].values()]
        edges, lines = (min(0.0, *seeds), max(0.0, *seeds)), []
        for i, claim in enumerate(own):
            name = ", ".join(filter(None, (claim["claim"], claim["setting"])))
            middle = scale * mean(claim["by_seed"].values())
            low, high = (scale * claim.get(end, middle / scale) for end in ("low", "high"))
            if math.isinf(low) or math.isinf(high):
                axes.plot(edges, [-i, -i], color="0.7", linewidth=1)
            ends = (low if math.isfinite(low) else middle), middle, (high if math.isfinite(high) else middle)
            lines.append((name, *ends, CLAIM_COLOURS[claim["verdict"]]))
            if claim["threshold"] is not None:
                axes.plot([scale * claim["threshold"]], [-i], "|", color="black", markersize=11)
        interval_lines(axes, lines)
        for i, claim in enumerate(own):
            values = [scale * value for value in claim["by_seed"].values()]
            axes.plot(values, [-i] * len(values), ".", color="0.4", markersize=4, zorder=3)
        axes.axvline(0, color="0.3", linewidth=1)
        axes.set(xlabel=f"{' '.join(map(str, of))} ({unit})", ylim=(-len(own), 1))
        dress(axes)
    axes.plot([], [], "|", color="black", markersize=11, label="threshold")
    axes.plot([], [], ".", color="0.4", markersize=4, label="a seed")
    for word in {claim["verdict"]: None for own in panels.values() for claim in own}:
        axes.plot([], [], color=CLAIM_COLOURS[word], linewidth=3, label=word)
    figure.legend(
        *axes.get_legend_handles_labels(), frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    return write(figure, path)


def pairs(judged: list[dict], rows: list[dict], path: Path) -> Path:
    """Both arms of each claim, a line per seed; up to PANELS claims. Returns the path."""
    judged = judged[:PANELS]
    columns = min(4, len(judged))
    lines = -(-len(judged) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(3.1 * columns, 2.9 * lines), squeeze=False)
    for axes in grid.flat[len(judged) :]:
        axes.set_axis_off()
    for axes, claim in zip(grid.flat, judged, strict=False):
        scale, unit = unit_of(claim)
        cells = sorted(claim["weights"], key=claim["weights"].get)  # from the arm that is subtracted to the other
        sides = [stats.contrast(rows, {cell: 1}, claim["of"]) for cell in cells]
        for seed in claim["by_seed"]:
            ends = [scale * side[seed] for side in sides]
            axes.plot([0, 1], ends, "o-", color=COLOURS[2] if ends[1] > ends[0] else COLOURS[1], lw=1, ms=3, alpha=0.8)
        axes.set_xticks([0, 1], [arm for _, arm in cells], fontsize=8)
        axes.set(xlim=(-0.2, 1.2))
        axes.set_ylabel("%" if unit == "points" else unit, fontsize=8)
        axes.set_title(wrapped(", ".join(filter(None, (claim["claim"], claim["setting"]))), 34), fontsize=8)
        dress(axes)
    return write(figure, path)


def wrapped(text: str, width: int) -> str:
    lines = [""]
    for word in text.split():
        lines += [""] if lines[-1] and len(lines[-1]) + len(word) >= width else []
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def survival(rows: list[dict], solved_above: float, path: Path) -> Path:
    """The share of runs that have not solved the task, against the step, and how many are still at risk.

    A panel per setting and mixer, a colour per arm (Kaplan & Meier 1958). Returns the path.
    """
    panels = {}
    for row in rows:
        place = ", ".join(filter(None, (row.get("setting"), row["config"].get("attention", "softmax"))))
        panels.setdefault(place, {}).setdefault(row["arm"], []).append(row)
    columns = min(5, len(panels))
    lines, most = -(-len(panels) // columns), max(map(len, panels.values()))
    size = (3.2 * columns + 0.5, lines * (2.3 + 0.16 * most))
    figure, grid = plt.subplots(lines, columns, figsize=size, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (place, arms) in zip(grid.flat, panels.items(), strict=False):
        end = max(curves.horizon_of(row) for own in arms.values() for row in own)
        ticks = [0, end / 2, end]
        for i, (arm, own) in enumerate(arms.items()):
            steps, is_censored = curves.times(own, solved_above)
            found = curves.survival(steps, is_censored)
            x, y = [0, *(step for step, _, _ in found), end], [1, *(share for _, share, _ in found), found[-1][1]]
            colour = COLOURS[i % len(COLOURS)]
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
        axes.legend(frameon=False, fontsize=7)
        dress(axes)
    grid[0, 0].set_ylabel("runs not yet solved (%)")
    figure.supxlabel(f"step; under it, runs still at risk of an accuracy over {solved_above:.0%}", fontsize=9)
    return write(figure, path)
