"""What a gate gains while training goes on: the loss without it minus the loss with it, against the step.

    gains(rows)             {(arm, part of the text): [(seed, [(step, gain)])]}
    figure(rows, path)      a panel per part, a colour per arm, a line per seed

An arm is compared with the one that has no gate and else the same keys, but for the learning rate: `plain_arms`.
"""

from pathlib import Path

import matplotlib.pyplot as plt

from study import report
from study.drawing import dress, is_finite, legend_of, mean_lines, write

GATE_KEYS = ("gate", "gate_activation", "gate_bias", "gate_rank", "gate_input", "match_params", "branch_scale")
PARTS = {  # of the loss of a text (evaluate.parts_of_loss)
    "all": "all of the text",
    "near": "first eighth of the window",
    "far": "second half of the window",
    "repeated": "behind repeated strings",
    "elsewhere": "elsewhere",
}


def plain_arms(rows: list[dict]) -> dict[tuple, str]:
    """{(setting, arm): the arm that it is compared with}, of the arms that have one."""
    keys = {(row.get("setting"), row["arm"]): keys_of(row) for row in rows}
    plain = {place: own for place, (own, changes) in keys.items() if not changes}
    rates = {(row.get("setting"), row["arm"]): row["config"].get("learning_rate") for row in rows}
    found = {}
    for place, (own, changes) in keys.items():
        same = [other for other in plain if other[0] == place[0] and plain[other] == own]
        if changes and same:  # of a sweep over rates the arm of the same one
            found[place] = min(same, key=lambda other: rates[other] != rates[place])[1]
    return found


def keys_of(row: dict) -> tuple[dict, dict]:
    """The keys of a row's run without those of its gate, its rate and its seed; the keys of its gate."""
    config = {name: value for name, value in row["config"].items() if name not in ("learning_rate", "seed")}
    changes = {name: value for name, value in config.items() if name in GATE_KEYS and value not in ("none", 1.0)}
    own = {name: value for name, value in config.items() if name not in GATE_KEYS}
    return own | {"goes on": "init_from" in row}, changes


def gains(rows: list[dict]) -> dict[tuple[str, str], list]:
    """{(arm, part): [(seed, [(step, gain in nats)])]}, of the arms that are compared with another."""
    plain, found = plain_arms(rows), {}
    of_run = {(row.get("setting"), row["arm"], row["seed"]): losses(row) for row in rows}
    for (setting, arm, seed), after in of_run.items():
        before = of_run.get((setting, plain.get((setting, arm)), seed), {})
        for part in PARTS:
            curve = [
                (step, before[step][part] - own[part])
                for step, own in after.items()
                if is_finite(own.get(part)) and is_finite(before.get(step, {}).get(part))
            ]
            if curve:
                found.setdefault((arm, part), []).append((seed, curve))
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
