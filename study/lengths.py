"""Loss at several context lengths and by position, with a gate against without: a table and a figure over paired seeds.

    table(rows)             a line per arm and reading, and below it its difference from the mixer's arm without a gate
    figure(rows, path)      that difference against the position, at the longest context that the mixer reads

They read the scores that evaluate.py makes with `lengths`. report.py draws the loss by position itself.
"""

from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt

from study import gains, report, stats
from study.drawing import COLOURS, dress, mean, mean_lines, write
from study.page import Table


def readings(rows: list[dict]) -> dict[tuple, dict[int, list[dict]]]:
    """{(setting, mixer, arm, score): {seed: [result of each length]}}, in the order of the rows."""
    found: dict = {}
    for row in rows:
        for name, score in row.get("scores", {}).items():
            if "lengths" in score:
                key = row.get("setting"), report.mixer_of(row), row["arm"], name
                found.setdefault(key, {})[row["seed"]] = score["lengths"]
    return found


def pairs(rows: list[dict]) -> list[tuple[tuple, dict, dict]]:
    """[(key of `readings`, its results by seed, those of the arm that it is compared with)] (gains.plain_arms)."""
    found, plain = readings(rows), gains.plain_arms(rows)
    others = {key: (key[0], key[1], plain.get((key[0], key[2])), key[3]) for key in found}
    return [(key, own, found[others[key]]) for key, own in found.items() if others[key] in found]


def table(rows: list[dict]) -> Table | None:
    """Mean losses with their 95% intervals over the seeds; None without scores at several lengths."""
    found, compared = readings(rows), {key: (own, plain) for key, own, plain in pairs(rows)}
    lengths = sorted({one["block_size"] for own in found.values() for results in own.values() for one in results})
    cells = []
    for key, own in found.items():
        setting, _, arm, name = key
        losses = {seed: losses_of(results) for seed, results in own.items()}
        label = ", ".join(filter(None, (arm, name, setting)))
        ends = {n: [found[n] for found in losses.values() if n in found] for n in lengths}
        no_seed = refused(own.values())
        line = ["refused" if n in no_seed else cell(ends[n], ".4f", len(own)) for n in lengths]
        cells.append([label, *line, str(len(own))])
        if key in compared:
            plain = {seed: losses_of(results) for seed, results in compared[key][1].items()}
            shared = [seed for seed in losses if seed in plain]
            gains = {
                n: [losses[s][n] - plain[s][n] for s in shared if n in losses[s] and n in plain[s]] for n in lengths
            }
            cells.append(
                ["... minus no gate", *(cell(gains[n], "+.4f", len(shared)) for n in lengths), str(len(shared))]
            )
    title = "Loss by context length (nats a token): mean over the seeds and 95% interval"
    return Table(title, ["arm, reading", *(f"{n:,} tokens" for n in lengths), "seeds"], cells) if cells else None


def losses_of(results: list[dict]) -> dict[int, float]:
    return {one["block_size"]: one["loss"] for one in results if one.get("loss") is not None}


def refused(each: Iterable[list[dict]]) -> list[int]:
    """The lengths that are refused in every seed. each: the results of a seed."""
    each = list(each)
    tried = dict.fromkeys(one["block_size"] for results in each for one in results if "limit" in one)
    return [n for n in tried if not any(n in losses_of(results) for results in each)]


def cell(values: list[float], form: str, seeds: int) -> str:
    """The mean and its interval, and of how many seeds where not all of them have a finite loss."""
    if not values:
        return "-"
    low, high = stats.interval(values)
    text = f"{mean(values):{form}}" + ("" if low is None else f" ({low:{form}} to {high:{form}})")
    return text + f" [{len(values)} of {seeds} seeds]" * (len(values) < seeds)


def panels_of(rows: list[dict]) -> dict[str, dict[str, list]]:
    """{mixer and arm: {reading: [difference of each seed, as `differences` gives them]}}, of those that have one."""
    panels: dict = {}
    for (setting, mixer, arm, name), own, plain in pairs(rows):
        title = ", ".join(filter(None, (setting, arm if arm.startswith(mixer) else f"{mixer}, {arm}")))
        if curves := differences([(own[seed], plain[seed]) for seed in own if seed in plain]):
            panels.setdefault(title, {})[name] = curves
    return panels


def figure(rows: list[dict], path: Path) -> Path:
    """Loss with a gate minus loss without against the position, of the same seed: a panel per mixer and arm, a colour
    per reading, a thin line per seed, the mean with its interval. Returns the path."""
    panels = panels_of(rows)
    columns = min(5, len(panels))
    look: dict = dict(squeeze=False, sharey=True, figsize=(3.4 * columns + 0.4, 3.4 * -(-len(panels) // columns)))
    drawn, grid = plt.subplots(-(-len(panels) // columns), columns, **look)
    trained = {score["trained_length"] for row in rows for score in row["scores"].values() if "lengths" in score}
    names = list(dict.fromkeys(name for own in panels.values() for name in own))
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, own) in zip(grid.flat, panels.items(), strict=False):
        for name, curves in own.items():
            colour = COLOURS[names.index(name) % len(COLOURS)]
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), color=colour, linewidth=0.6, alpha=0.4)
            mean_lines(axes, curves, color=colour, linewidth=1.8, label=name)
        axes.axhline(0, color="0.3", linewidth=1)
        for length in trained:
            axes.axvline(length, color="0.5", linestyle=":", linewidth=1)
        axes.set_title(title, fontsize=9)
        axes.set(xlabel="position in the context (tokens)")
        if len(own) > 1:
            axes.legend(frameon=False, fontsize=7)
        dress(axes)
    for axes in grid[:, 0]:
        axes.set(ylabel="loss with the gate minus without\n(nats a token)")
    return write(drawn, path)


def differences(each: list[tuple[list[dict], list[dict]]]) -> list[list[tuple]]:
    """[[(position, difference of the losses)]] of the seeds, at the longest context that all of them reach with a gate
    and without; empty if there is none. each: the results of a seed with the gate, and without."""
    curves = at_longest([by_length(results) for pair in each for results in pair])
    return [
        [(at, loss - other) for (at, loss), (_, other) in zip(gated, plain, strict=True)]
        for gated, plain in zip(curves[::2], curves[1::2], strict=True)
    ]


def at_longest(each: list[dict[int, list]]) -> list[list]:
    """The losses by position at the longest length that all have; empty if they share none. each: by_length of each."""
    shared = set.intersection(*map(set, each)) if each else set()
    return [one[max(shared)] for one in each] if shared else []


def by_length(results: list[dict]) -> dict[int, list]:
    """{length: [[position, loss]]} of the lengths that the model reads, with a finite loss at every position."""
    found = {one["block_size"]: one["by_position"] for one in results if "by_position" in one}
    return {n: curve for n, curve in found.items() if None not in [loss for _, loss in curve]}
