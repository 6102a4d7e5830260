"""What the arms of an experiment are: their mixer, what they add to it, and the arm that they are compared with."""

import math
from typing import Any

GATE_KEYS = ("gate", "gate_activation", "gate_bias", "gate_rank", "gate_input", "match_params", "branch_scale")


def joined(*names: str | None) -> str:
    """Names of a claim, an arm, a setting ... in a title, as in "gla sigmoid, 64 pairs"; empty ones are left out."""
    return ", ".join(filter(None, names))


def number(value: float | None) -> float:
    """A number of a row; NaN where the run was not finite."""
    return math.nan if value is None else value


def mixer_of(row: dict) -> str:
    return row["config"].get("attention", "softmax")


def variant_of(row: dict) -> str:
    """What an arm adds to its mixer: the arm's name without the mixer's, "none" if nothing is left."""
    return row["arm"].removeprefix(mixer_of(row)).strip(" ,") or "none"


def made_by(row: dict, name: str) -> Any:
    """The "code", "dtype", "device" or "threads" that made a row; None where an older row does not hold it. The commit
    stands in for a hash of the code that the numbers depend on."""
    if name == "code":
        return row.get("code_sha256") or row.get("git_commit")
    value = row.get(name) or row["config"].get(name)
    return None if value in ("auto", 0) else value


def plain_arms(rows: list[dict]) -> dict[tuple, str]:
    """{(setting, arm): the arm that it is compared with}, of the arms that have one.

    It is the arm without a gate that has else the same keys, but for the learning rate; in a sweep over rates it is
    the one of the same rate.
    """
    keys = {(row.get("setting"), row["arm"]): keys_of(row) for row in rows}
    compared = {}
    for (setting, arm), (shared, of_gate, rate) in keys.items():
        same = [
            (keys[s, other][2] != rate, other)
            for s, other in keys
            if s == setting and keys[s, other][:2] == (shared, {})
        ]
        if of_gate and same:
            compared[setting, arm] = min(same, key=lambda other: other[0])[1]
    return compared


def keys_of(row: dict) -> tuple[dict, dict, float | None]:
    """(the keys of a row's run without those of its gate, its rate and its seed; the keys of its gate; its rate)"""
    config = {name: value for name, value in row["config"].items() if name not in ("learning_rate", "seed")}
    of_gate = {name: value for name, value in config.items() if name in GATE_KEYS and value not in ("none", 1.0)}
    shared = {name: value for name, value in config.items() if name not in GATE_KEYS}
    return shared | {"goes on": "init_from" in row}, of_gate, row["config"].get("learning_rate")


def by_learning_rate(rows: list[dict]) -> dict[str, dict[float, list[dict]]]:
    """{arm: {learning rate: its rows}} of a sweep, whose arms are named "ARM at RATE"."""
    rates: dict = {}
    for row in rows:
        arm, at, text = row["arm"].rpartition(" at ")
        rate = row["config"].get("learning_rate")
        if at and rate is not None and text == f"{float(rate):g}":
            rates.setdefault(arm, {}).setdefault(rate, []).append(row)
    return {arm: dict(sorted(by_rate.items())) for arm, by_rate in rates.items()}


def has_diverged(row: dict) -> bool:
    """Whether a run was not finite, or ended with a higher validation loss than it began with."""
    # both on the same tokens, where val_loss is of the whole split
    return not row["finite"] or row["curve"][-1][1] > row["curve"][0][1]
