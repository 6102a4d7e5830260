"""The figures of what bench.py wrote: every ratio over its target, costs by length, loss against processor time."""

from pathlib import Path

import matplotlib.pyplot as plt

from runs.files import read_json
from study.drawing import COLOURS, dress, interval_lines, log_axis, mixer_colours, write


def draw(folder: Path) -> list[Path]:
    """Draws all that bench.py wrote to the folder, in ratios.png, cost.png and loss.png. Returns their paths."""
    parts = [read_json(file) for file in sorted(folder.glob("*.json"))]
    claims = [claim for part in parts for claim in part["claims"]]
    rows = [row for part in parts for row in part["rows"] if "mixer" in row and ("T" in row or "context" in row)]
    runs = [row for part in parts for row in part["rows"] if "curve" in row]
    figures = [ratios(claims, folder / "ratios.png")] if claims else []
    figures += [cost_curves(rows, folder / "cost.png")] if rows else []
    return figures + ([loss_curves(runs, folder / "loss.png")] if runs else [])


def cost_curves(rows: list[dict], path: Path) -> Path:
    """Training speed and memory against T, at equal tokens per step; time of a decoded token against the context."""
    panels = [
        ("T", "tokens_s", "training (tokens/s)"), ("T", "peak_mb", "training, peak memory (MB)"),
        ("context", "ms", "decoding (ms a token)"),
    ]  # fmt: skip
    panels = [(x, y, title) for x, y, title in panels if any(x in row and y in row for row in rows)]
    figure, axes_of = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 4), squeeze=False)
    colours = mixer_colours(row["mixer"] for row in rows)
    for axes, (x, y, title) in zip(axes_of[0], panels, strict=True):
        for mixer in dict.fromkeys(row["mixer"] for row in rows):
            points = [(row[x], row[y]) for row in rows if row["mixer"] == mixer and x in row and y in row]
            if points:  # a mixer that one part of bench.py has measured, and another not yet
                axes.plot(*zip(*points, strict=True), color=colours[mixer], marker="o", ms=3, label=mixer)
        axes.set(ylim=(0, None), title=title, xlabel="context" if x == "context" else "sequence length")
        log_axis(axes, (row[x] for row in rows if x in row and y in row))
        dress(axes)
    axes.legend(*axes_of[0, 0].get_legend_handles_labels(), frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return write(figure, path)


def loss_curves(runs: list[dict], path: Path) -> Path:
    """Validation loss against processor seconds: a thin line for each seed of each side."""
    figure, axes = plt.subplots(figsize=(7, 4.4))
    sides = dict.fromkeys(run["side"] for run in runs)
    colours = mixer_colours(side for side in sides if side != "nanoGPT") | {"nanoGPT": "0.3"}
    for side in sides:
        for i, run in enumerate(run for run in runs if run["side"] == side):
            _, seconds, losses = zip(*run["curve"], strict=True)
            axes.plot(seconds, losses, color=colours[side], linewidth=0.8, label=None if i else side)
    highest = max(run["curve"][len(run["curve"]) // 8][2] for run in runs)  # the first steps would squeeze the rest
    axes.set(xlabel="processor seconds of training", ylabel="validation loss (nats a byte)", ylim=(None, highest))
    axes.legend(frameon=False)
    dress(axes)
    return write(figure, path)


def ratios(claims: list[dict], path: Path) -> Path:
    """Each ratio of bench.py over its target, with its interval; right of the line at 1 is better."""
    figure, axes = plt.subplots(figsize=(9, 1 + 0.3 * len(claims)))
    colours = {"met": COLOURS[2], "missed": COLOURS[1], "unresolved": "0.5"}
    lines = []
    for claim in claims:
        name = f"{claim['name']}: {claim['ratio']:.2f} ({'<=' if claim['at_most'] else '>='} {claim['target']:g})"
        sign = -1 if claim["at_most"] else 1
        low, middle, high = sorted((claim[end] / claim["target"]) ** sign for end in ("low", "ratio", "high"))
        lines.append((name, low, middle, high, colours[claim["met"]]))
    interval_lines(axes, lines)
    axes.axvline(1, color="0.3", linewidth=1)
    axes.set(xscale="log", xlabel="ratio over its target (inverted where less is better), 95% interval")
    left, right = axes.get_xlim()
    ticks = [tick for tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20) if left <= tick <= right]
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    for name, colour in colours.items():
        axes.plot([], [], color=colour, linewidth=3, label=name)
    axes.legend(frameon=False)
    dress(axes)
    return write(figure, path)
