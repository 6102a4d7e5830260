"""What a gate gains while training goes on: the loss without it minus the loss with it, against the step.

    gains(rows)             {(arm, part of the text): [(seed, [(step, gain)])]}
    figure(rows, path)      a panel per part, a colour per arm, a line per seed

An arm is compared with the run of its seed that has the same keys but for those of the gate and the learning rate.
"""

from pathlib import Path

import matplotlib.pyplot as plt

from study import report
from study.drawing import dress, is_finite, legend_of, mean_lines, write
from study.rows import text_of

GATE_KEYS = ("gate", "gate_activation", "gate_bias", "gate_rank", "gate_input", "match_params", "branch_scale")
PARTS = {  # of the loss of a text (evaluate.parts_of_loss)
    "all": "all of the text",
    "near": "first eighth of the window",
    "far": "second half of the window",
    "repeated": "behind repeated strings",
    "elsewhere": "elsewhere",
}


def plain_run(row: dict) -> str:
    """The run of a row without its gate, as a text that two rows share if they are of the same one but for the rate."""
    keys = {name: value for name, value in row["config"].items() if name not in (*GATE_KEYS, "learning_rate")}
    return text_of({name: row[name] for name in ("setting", "seed", "data") if name in row} | {"config": keys})


def gains(rows: list[dict]) -> dict[tuple[str, str], list]:
    """{(arm, part): [(seed, [(step, gain in nats)])]}, of the arms that have a plain run to be compared with."""
    plain = {plain_run(row): row for row in rows if not set(GATE_KEYS) & row["config"].keys()}
    found: dict = {}
    for row in rows:
        other = plain.get(plain_run(row))
        if other is None or other is row:
            continue
        before, after = losses(other), losses(row)
        for part in PARTS:
            steps = [step for step in after if part in after[step] and part in before.get(step, {})]
            curve = [(step, before[step][part] - after[step][part]) for step in steps]
            curve = [(step, gain) for step, gain in curve if is_finite(gain)]
            if curve:
                found.setdefault((row["arm"], part), []).append((row["seed"], curve))
    return found


def losses(row: dict) -> dict[int, dict[str, float]]:
    """{step: {part: loss}} of the evaluations of a run behind its first."""
    parts = {one["step"]: one for one in row.get("loss_curve", [])}
    return {step: {"all": loss} | parts.get(step, {}) for step, loss in row["curve"] if step > 0 and is_finite(loss)}


def figure(rows: list[dict], path: Path) -> Path:
    """The gains against the step: a panel per part, a colour per arm, thin lines for seeds, a thick one for their mean
    with its interval. Returns the path."""
    found, colours = gains(rows), report.colours_of(rows)
    parts = [part for part in PARTS if any(part == other for _, other in found)]
    variants = {row["arm"]: report.variant_of(row) for row in rows}
    plots, grid = plt.subplots(1, len(parts), figsize=(3.0 * len(parts) + 0.8, 3.4), sharey=True, squeeze=False)
    for axes, part in zip(grid[0], parts, strict=True):
        for (arm, _), curves in ((key, curves) for key, curves in found.items() if key[1] == part):
            colour = colours[variants[arm]]
            for _, curve in curves:
                axes.plot(*zip(*curve, strict=True), color=colour, linewidth=0.7, alpha=0.5)
            mean_lines(axes, [curve for _, curve in curves], color=colour, linewidth=2, label=arm)
        axes.axhline(0, color="0.3", linewidth=1)
        axes.set(xlabel="step")
        axes.set_title(PARTS[part], fontsize=9)
        dress(axes)
    grid[0, 0].set_ylabel("loss without the gate minus loss with it (nats)", fontsize=8)
    legend_of(plots)
    return write(plots, path)
