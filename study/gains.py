"""What a gate gains: the loss without it against the loss with it, of paired seeds.

    by_step(rows, path)         gain.png: the gain against the step, in each part of the text
    by_position(rows, path)     lengths_gain.png: the difference against the position, at the longest context
    lengths_table(rows)         the loss at each context length, and its difference from that without a gate

Each arm is compared with the one that names.plain_arms gives it. Losses by length and position are scores of
evaluate.py with `lengths`.
"""

from pathlib import Path

from study import stats
from study.drawing import COLOURS, arm_looks, curve_panels, is_finite, mean
from study.names import joined, plain_arms, variant_of
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
            pairs = ((step, before.get(step, {}).get(part), loss.get(part)) for step, loss in after.items())
            if curve := [(step, was - now) for step, was, now in pairs if is_finite(was) and is_finite(now)]:
                panels.setdefault(part, {}).setdefault(arm, []).append(curve)
    return panels


def losses(row: dict) -> dict[int, dict[str, float]]:
    """{step: {part: loss}} of the evaluations of a run behind its first."""
    parts = {one["step"]: one for one in row.get("loss_curve", [])}
    return {step: {"all": loss} | parts.get(step, {}) for step, loss in row["curve"] if step > 0}


def by_step(rows: list[dict], path: Path) -> Path:
    """Draws the gains: a panel per part, a colour per arm, every seed. Returns the path."""
    looks = arm_looks(map(variant_of, rows))
    of_arms = {row["arm"]: looks[variant_of(row)] for row in rows}
    panels = {PARTS[part]: curves for part, curves in gains(rows).items()}
    label = "loss without the gate minus loss with it (nats)"
    return curve_panels(panels, of_arms, path, ylabel=label, columns=len(panels), finish=zero_line)


def zero_line(axes, title: str) -> None:
    axes.axhline(0, color="0.3", linewidth=1)


# ----------------------------------------------------------------------------------------------------------------------
# By context length and position


def readings(rows: list[dict]) -> dict[tuple, dict[int, dict[int, dict]]]:
    """{(setting, arm, score): {seed: {length: result}}}, in the order of the rows."""
    results: dict = {}
    for row in rows:
        for name, score in row.get("scores", {}).items():
            if "lengths" in score:
                by_seed = results.setdefault((row.get("setting"), row["arm"], name), {})
                by_seed[row["seed"]] = {one["block_size"]: one for one in score["lengths"]}
    return results


def pairs(rows: list[dict]) -> dict[tuple, dict[int, dict[int, dict]]]:
    """{key of `readings`: the results by seed of the arm that it is compared with}."""
    read, plain = readings(rows), plain_arms(rows)
    others = {(setting, arm, name): (setting, plain.get((setting, arm)), name) for setting, arm, name in read}
    return {key: read[other] for key, other in others.items() if other in read}


def lengths_table(rows: list[dict]) -> Table | None:
    """Mean losses with their 95% intervals over the seeds; None without scores at several lengths."""
    read, compared, cells = readings(rows), pairs(rows), []
    lengths = sorted({n for by_seed in read.values() for results in by_seed.values() for n in results})
    for (setting, arm, name), by_seed in read.items():
        line = []
        for n in lengths:
            values = [results.get(n, {}).get("loss") for results in by_seed.values()]
            is_refused = set(values) == {None} and any("limit" in results.get(n, {}) for results in by_seed.values())
            line.append("refused" if is_refused else cell(values, ".4f"))
        cells.append([joined(arm, name, setting), *line, str(len(by_seed))])
        if plain := compared.get((setting, arm, name)):
            both = [(by_seed[seed], plain[seed]) for seed in by_seed if seed in plain]
            line = [cell([difference(n, *pair) for pair in both], "+.4f") for n in lengths]
            cells.append(["... minus no gate", *line, str(len(both))])
    title = "Loss by context length (nats a token): mean over the seeds and 95% interval"
    return Table(title, ["arm, reading", *(f"{n:,} tokens" for n in lengths), "seeds"], cells) if cells else None


def difference(length: int, gated: dict[int, dict], plain: dict[int, dict]) -> float | None:
    after, before = (results.get(length, {}).get("loss") for results in (gated, plain))
    return None if after is None or before is None else after - before


def cell(by_seed: list[float | None], form: str) -> str:
    """The mean and its interval, and of how many seeds where not all of them have a finite loss."""
    values = [value for value in by_seed if value is not None]
    if not values:
        return "-"
    text = mean_text(form, mean(values), *stats.interval(values))
    return text + f" [{len(values)} of {len(by_seed)} seeds]" * (len(values) < len(by_seed))


def panels_of(rows: list[dict]) -> dict[str, dict[str, list]]:
    """{arm: {reading: [[(position, difference), ...] of each seed]}}, of those that have one: at the longest
    context that all seeds reach with a gate and without, with a finite loss at every position."""
    panels: dict = {}
    read = readings(rows)
    for (setting, arm, name), plain in pairs(rows).items():
        by_seed = read[setting, arm, name]
        both = [(curves_of(by_seed[seed]), curves_of(plain[seed])) for seed in by_seed if seed in plain]
        if shared := set.intersection(*(set(curves) for pair in both for curves in pair)) if both else ():
            n = max(shared)
            panels.setdefault(joined(setting, arm), {})[name] = [
                [(at, loss - other) for (at, loss), (_, other) in zip(gated[n], before[n], strict=True)]
                for gated, before in both
            ]
    return panels


def curves_of(results: dict[int, dict]) -> dict[int, list]:
    """{length: [[position, loss]]} of the lengths that the model reads, with a finite loss at every position."""
    curves = {n: one["by_position"] for n, one in results.items() if "by_position" in one}
    return {n: curve for n, curve in curves.items() if None not in [loss for _, loss in curve]}


def by_position(rows: list[dict], path: Path) -> Path:
    """Draws the loss with a gate minus that without against the position: a panel per arm, a colour per
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
