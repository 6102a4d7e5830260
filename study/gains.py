"""What a gate gains: the loss without it against the loss with it, of paired seeds.

Each arm is compared with the one that plain_arms gives it. Losses by length are scores of evaluate.py with `lengths`.
"""

import itertools
import statistics
from pathlib import Path

from study import stats
from study.drawing import arm_looks, curve_panels, is_finite
from study.page import Table, mean_text

PARTS = {  # of the loss of a text (evaluate.parts_of_loss)
    "all": "all of the text",
    "near": "first eighth of the window",
    "far": "second half of the window",
    "repeated": "behind repeated strings",
    "elsewhere": "elsewhere",
}

GATE_KEYS = {"gate", "gate_activation", "gate_bias", "gate_rank", "gate_input", "match_params", "branch_scale", "sink"}


def gains(rows: list[dict]) -> dict[str, dict[str, list]]:
    """{part: {arm: [[(step, gain in nats), ...] of each seed]}}, of the arms that are compared with another."""
    plain, panels, of_run = plain_arms(rows), {}, {}  # of_run: {step: {part: loss}} behind the first evaluation
    for row in rows:
        parts = {one["step"]: one for one in row.get("loss_curve", [])}
        whole = row["curve"] if row["metric"] == "val_loss" else [(step, None) for step in parts]
        late = {step: {"all": loss} | parts.get(step, {}) for step, loss in whole if step > 0}
        of_run[row["arm"], row["seed"]] = late
    for part, ((arm, seed), after) in itertools.product(PARTS, of_run.items()):
        before = of_run.get((plain.get(arm), seed), {})
        pairs = ((step, before.get(step, {}).get(part), loss.get(part)) for step, loss in after.items())
        if curve := [(step, was - now) for step, was, now in pairs if is_finite(was) and is_finite(now)]:
            panels.setdefault(PARTS[part], {}).setdefault(arm, []).append(curve)
    return panels


def by_step(rows: list[dict], panels: dict[str, dict[str, list]], path: Path) -> Path:
    """Draws the gains against the step: a panel per part, a colour per arm, every seed. Returns the path."""
    looks = arm_looks(row["arm"] for row in rows)

    def finish(axes, title):
        axes.axhline(0, color="0.3", linewidth=1)

    label = "gain: loss without minus loss with (nats a token)"
    return curve_panels(panels, looks, path, ylabel=label, columns=3, size=(4.2, 3.0), finish=finish)


def lengths_table(rows: list[dict]) -> Table | None:
    """Mean losses, and their differences from those without a gate, with 95% intervals over the seeds; None without
    scores at several lengths."""
    read: dict = {}  # {(arm, score): {seed: {length: result}}}
    for row in rows:
        for name, score in row["scores"].items():
            if "lengths" in score:
                by_seed = read.setdefault((row["arm"], name), {})
                by_seed[row["seed"]] = {one["block_size"]: one for one in score["lengths"]}
    lengths = sorted({n for by_seed in read.values() for results in by_seed.values() for n in results})
    plain, cells = plain_arms(rows), []
    for (arm, name), by_seed in read.items():
        line = []
        for n in lengths:
            values = [results.get(n, {}).get("loss") for results in by_seed.values()]
            is_refused = set(values) == {None} and any("limit" in results.get(n, {}) for results in by_seed.values())
            line.append("refused" if is_refused else cell(values, ".4f"))
        cells.append([f"{arm}, {name}", *line, str(len(by_seed))])
        if (without := read.get((plain.get(arm), name))) is not None:
            both = [(by_seed[seed], without[seed]) for seed in by_seed if seed in without]
            line = []
            for n in lengths:
                losses_of = [[results.get(n, {}).get("loss") for results in pair] for pair in both]
                line.append(cell([None if None in pair else pair[0] - pair[1] for pair in losses_of], "+.4f"))
            cells.append(["... minus no gate", *line, str(len(both))])
    title = "Loss by context length (nats a token): mean over the seeds and 95% interval"
    return Table(title, ["arm, reading", *(f"{n:,} tokens" for n in lengths), "seeds"], cells) if cells else None


def cell(by_seed: list[float | None], form: str) -> str:
    """The mean and its interval, and of how many seeds where not all of them have a finite loss."""
    values = [value for value in by_seed if value is not None]
    if not values:
        return "-"
    text = mean_text(form, statistics.fmean(values), *stats.interval(values))
    return text + f" [{len(values)} of {len(by_seed)} seeds]" * (len(values) < len(by_seed))


def plain_arms(rows: list[dict]) -> dict[str, str]:
    """{arm: the one without a gate that has else the same keys, but for the rate; of several, that of the same rate}"""
    keys, compared = {}, {}  # keys: {arm: (those of its runs but of its gate, rate and seed; those of its gate; rate)}
    for row in rows:
        config = dict(row["config"], goes_on="init_from" in row, seed=None)
        rate = config.pop("learning_rate", None)
        of_gate = {name: value for name, value in config.items() if name in GATE_KEYS and value not in ("none", 1.0)}
        keys[row["arm"]] = {name: config[name] for name in config.keys() - GATE_KEYS}, of_gate, rate
    for arm, (shared, of_gate, rate) in keys.items():
        same = [(keys[other][2] != rate, other) for other in keys if keys[other][:2] == (shared, {})]
        if of_gate and same:
            compared[arm] = min(same, key=lambda other: other[0])[1]
    return compared
