"""What a gate gains: the loss without it against the loss with it, of paired seeds.

Each arm is compared with the one that plain_arms gives it.
"""

import itertools
from pathlib import Path

from keys import GPTConfig
from study.drawing import arm_looks, curve_panels, is_finite

PARTS = {  # of the loss of a text (evaluate.parts_of_loss)
    "all": "all of the text",
    "near": "first eighth of the window",
    "far": "second half of the window",
    "repeated": "behind repeated strings",
    "elsewhere": "elsewhere",
}

GATE_KEYS = {"gate", "gate_activation", "gate_bias", "gate_rank", "gate_input", "match_params", "branch_scale"}
GATE_KEYS |= {"sink", "attention_weights", "forget_gate"}  # its rivals


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


def plain_arms(rows: list[dict]) -> dict[str, str]:
    """{arm: the one without a gate that has else the same keys, but for the rate; of several, that of the same rate}"""
    # keys: {arm: (the keys of its runs but of its gate, rate and seed; the names of its gate's; rate)}
    keys, compared = {}, {}
    for row in rows:
        config = dict(row["config"], seed=None)
        rate = config.pop("learning_rate", None)
        of_gate = {name for name in GATE_KEYS & config.keys() if config[name] != getattr(GPTConfig, name)}
        keys[row["arm"]] = {name: config[name] for name in config.keys() - GATE_KEYS}, of_gate, rate
    for arm, (shared, of_gate, rate) in keys.items():
        same = [(keys[other][2] != rate, other) for other in keys if keys[other][:2] == (shared, set())]
        if of_gate and same:
            compared[arm] = min(same, key=lambda other: other[0])[1]
    return compared
