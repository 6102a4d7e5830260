"""What a gate gains: the loss without it against the loss with it, of paired seeds.

    by_step(rows, path)         gain.png: the gain against the step, in each part of the text
    by_position(rows, path)     lengths_gain.png: the difference against the position, at the longest context
    lengths_table(rows)         the loss at each context length, and its difference from that without a gate

Each arm is compared with the one that names.plain_arms gives it. Losses by length and position are scores of
evaluate.py with `lengths`.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt

from study import stats
from study.drawing import COLOURS, arm_looks, curve_panels, is_finite, mean
from study.names import joined, mixer_of, plain_arms, variant_of
from study.page import Table, mean_text

PARTS = {  # of the loss of a text (evaluate.parts_of_loss)
    "all": "all of the text",
    "near": "first eighth of the window",
    "far": "second half of the window",
    "repeated": "behind repeated strings",
    "elsewhere": "elsewhere",
}

# ----------------------------------------------------------------------------------------------------------------------
# Against the step


def gains(rows: list[dict]) -> dict[str, dict[str, list]]:
    """{part: {arm: [[(step, gain in nats), ...] of each seed]}}, of the arms that are compared with another."""
    plain, panels = plain_arms(rows), {}
    of_run = {(row.get("setting"), row["arm"], row["seed"]): losses(row) for row in rows}
    for part in PARTS:
        for (setting, arm, seed), after in of_run.items():
            before = of_run.get((setting, plain.get((setting, arm)), seed), {})
            curve = [
                (step, before[step][part] - loss[part])
                for step, loss in after.items()
                if is_finite(loss.get(part)) and is_finite(before.get(step, {}).get(part))
            ]
            if curve:
                panels.setdefault(part, {}).setdefault(arm, []).append(curve)
    return panels


def losses(row: dict) -> dict[int, dict[str, float]]:
    """{step: {part: loss}} of the evaluations of a run behind its first."""
    parts = {one["step"]: one for one in row.get("loss_curve", [])}
    return {step: {"all": loss} | parts.get(step, {}) for step, loss in row["curve"] if step > 0 and is_finite(loss)}


def by_step(rows: list[dict], path: Path) -> Path:
    """Draws the gains: a panel per part, a colour per arm, every seed. Returns the path."""
    looks = arm_looks(map(variant_of, rows))
    of_arms = {row["arm"]: looks[variant_of(row)] for row in rows}
    panels = {PARTS[part]: curves for part, curves in gains(rows).items()}
    label = "loss without the gate minus loss with it (nats)"
    return curve_panels(panels, of_arms, path, ylabel=label, columns=len(panels), finish=zero_line)


def zero_line(axes: plt.Axes, title: str) -> None:
    axes.axhline(0, color="0.3", linewidth=1)


# ----------------------------------------------------------------------------------------------------------------------
# By context length and position


def readings(rows: list[dict]) -> dict[tuple, dict[int, list[dict]]]:
    """{(setting, mixer, arm, score): {seed: [result of each length]}}, in the order of the rows."""
    results: dict = {}
    for row in rows:
        for name, score in row.get("scores", {}).items():
            if "lengths" in score:
                key = row.get("setting"), mixer_of(row), row["arm"], name
                results.setdefault(key, {})[row["seed"]] = score["lengths"]
    return results


def pairs(rows: list[dict]) -> dict[tuple, dict[int, list[dict]]]:
    """{key of `readings`: the results by seed of the arm that it is compared with}."""
    read, plain = readings(rows), plain_arms(rows)
    others = {key: (key[0], key[1], plain.get((key[0], key[2])), key[3]) for key in read}
    return {key: read[other] for key, other in others.items() if other in read}


def lengths_table(rows: list[dict]) -> Table | None:
    """Mean losses with their 95% intervals over the seeds; None without scores at several lengths."""
    read, compared, cells = readings(rows), pairs(rows), []
    lengths = sorted({one["block_size"] for by_seed in read.values() for one in itertools.chain(*by_seed.values())})
    for (setting, mixer, arm, name), by_seed in read.items():
        losses = {seed: losses_of(results) for seed, results in by_seed.items()}
        no_seed = refused(by_seed.values())
        line = ["refused" if n in no_seed else cell([own.get(n) for own in losses.values()], ".4f") for n in lengths]
        cells.append([joined(arm, name, setting), *line, str(len(losses))])
        if plain := compared.get((setting, mixer, arm, name)):
            both = [(own, losses_of(plain[seed])) for seed, own in losses.items() if seed in plain]
            gains = ([own[n] - other[n] if n in own and n in other else None for own, other in both] for n in lengths)
            cells.append(["... minus no gate", *(cell(values, "+.4f") for values in gains), str(len(both))])
    title = "Loss by context length (nats a token): mean over the seeds and 95% interval"
    return Table(title, ["arm, reading", *(f"{n:,} tokens" for n in lengths), "seeds"], cells) if cells else None


def losses_of(results: list[dict]) -> dict[int, float]:
    return {one["block_size"]: one["loss"] for one in results if one.get("loss") is not None}


def refused(by_seed: Iterable[list[dict]]) -> list[int]:
    """The lengths that are refused in every seed, of the results of each seed."""
    by_seed = list(by_seed)
    tried = dict.fromkeys(one["block_size"] for results in by_seed for one in results if "limit" in one)
    return [n for n in tried if not any(n in losses_of(results) for results in by_seed)]


def cell(by_seed: list[float | None], form: str) -> str:
    """The mean and its interval, and of how many seeds where not all of them have a finite loss."""
    values = [value for value in by_seed if value is not None]
    if not values:
        return "-"
    text = mean_text(form, mean(values), *stats.interval(values))
    return text + f" [{len(values)} of {len(by_seed)} seeds]" * (len(values) < len(by_seed))


def panels_of(rows: list[dict]) -> dict[str, dict[str, list]]:
    """{mixer and arm: {reading: [[(position, difference), ...] of each seed]}}, of those that have one."""
    panels: dict = {}
    read = readings(rows)
    for (setting, mixer, arm, name), plain in pairs(rows).items():
        by_seed = read[setting, mixer, arm, name]
        title = joined(setting, arm if arm.startswith(mixer) else f"{mixer}, {arm}")
        if curves := differences([(by_seed[seed], plain[seed]) for seed in by_seed if seed in plain]):
            panels.setdefault(title, {})[name] = curves
    return panels


def by_position(rows: list[dict], path: Path) -> Path:
    """Draws the loss with a gate minus that without against the position: a panel per mixer and arm, a colour per
    reading, every seed. Returns the path."""
    panels = panels_of(rows)
    names = dict.fromkeys(name for curves in panels.values() for name in curves)
    looks = {name: dict(color=COLOURS[i % len(COLOURS)]) for i, name in enumerate(names)}
    trained = {score["trained_length"] for row in rows for score in row["scores"].values() if "lengths" in score}

    def finish(axes, title):
        zero_line(axes, title)
        for length in trained:
            axes.axvline(length, color="0.5", linestyle=":", linewidth=1, label=f"trained length, {length:,}")

    xlabel, ylabel = "position in the context (tokens)", "loss with the gate minus without (nats a token)"
    return curve_panels(panels, looks, path, xlabel=xlabel, ylabel=ylabel, columns=5, finish=finish)


def differences(by_seed: list[tuple[list[dict], list[dict]]]) -> list[list[tuple]]:
    """[[(position, difference of the losses), ...]] of the seeds, at the longest context that all of them reach with a
    gate and without; empty if there is none. by_seed: the results of a seed with the gate, and without."""
    curves = [by_length(results) for pair in by_seed for results in pair]
    shared = set.intersection(*map(set, curves)) if curves else set()
    if not shared:
        return []
    longest = [curve[max(shared)] for curve in curves]
    return [
        [(at, loss - other) for (at, loss), (_, other) in zip(gated, plain, strict=True)]
        for gated, plain in zip(longest[::2], longest[1::2], strict=True)
    ]


def by_length(results: list[dict]) -> dict[int, list]:
    """{length: [[position, loss]]} of the lengths that the model reads, with a finite loss at every position."""
    curves = {one["block_size"]: one["by_position"] for one in results if "by_position" in one}
    return {n: curve for n, curve in curves.items() if None not in [loss for _, loss in curve]}
