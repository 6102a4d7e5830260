"""What the arms of an experiment are: their mixer, and what they add to it."""

import math


def number(value: float | None) -> float:
    """A number of a row; NaN where the run was not finite."""
    return math.nan if value is None else value


def mixer_of(row: dict) -> str:
    return row["config"].get("attention", "softmax")


def variant_of(row: dict) -> str:
    """What an arm adds to its mixer: the arm's name without the mixer's, "none" if nothing is left."""
    return row["arm"].removeprefix(mixer_of(row)).strip(" ,") or "none"
