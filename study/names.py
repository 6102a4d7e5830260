"""What the arms of an experiment are: their mixer, what they add to it, and the arm that they are compared with."""

import math
from typing import Any

GATE_KEYS = ("gate", "gate_activation", "gate_bias", "gate_rank", "gate_input", "match_params", "branch_scale")


def joined(*names: str | None) -> str:
    """Names of an arm, a reading ... in a title, as in "gla sigmoid, NTK"; empty ones are left out."""
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


def plain_arms(rows: list[dict]) -> dict[str, str]:
    """{arm: the arm that it is compared with}, of the arms that have one: the arm without a gate that has else the same
    keys, but for the learning rate; of several, the one of the same rate."""
    keys, compared = {row["arm"]: keys_of(row) for row in rows}, {}
    for arm, (shared, of_gate, rate) in keys.items():
        same = [(keys[other][2] != rate, other) for other in keys if keys[other][:2] == (shared, {})]
        if of_gate and same:
            compared[arm] = min(same, key=lambda other: other[0])[1]
    return compared


def keys_of(row: dict) -> tuple[dict, dict, float | None]:
    """(the keys of a row's run without those of its gate, its rate and its seed; the keys of its gate; its rate)"""
    config = {name: value for name, value in row["config"].items() if name not in ("learning_rate", "seed")}
    of_gate = {name: value for name, value in config.items() if name in GATE_KEYS and value not in ("none", 1.0)}
    shared = {name: value for name, value in config.items() if name not in GATE_KEYS}
    return shared | {"goes on": "init_from" in row}, of_gate, row["config"].get("learning_rate")
