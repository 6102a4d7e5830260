"""The rows of an experiment: which run a row belongs to, and which of its scores count.

    rows = {text_of(row): row for row in read_rows(folder)}
    row = rows.get(text_of(run))                # None: this run has no row yet

A row of rows.jsonl holds a run (its arm, seed, data and keys of train.py), its results, and the
code and machine that made them. Scores are not part of what identifies a run: if the config asks
for another score, the row lacks it until the row is removed and the experiment started again.
"""

import importlib
import json
import math
import types
from pathlib import Path
from typing import Any

from base.files import read_jsonl
from keys import SOFTMAX, keys_of_today, without_alias

RUN = ("arm", "seed", "purpose", "branch", "config", "data")  # what identifies a run

# what every row has, as rules of rules.wrong_field
NUMBER = (float, -1e30, 1e30, None)
ROW = {
    "arm": (str, 0, 999),
    "seed": (int, 0, 1 << 62),
    "config": (dict, 0, 9999),
    "data": (dict, 0, 9999),
    "metric": {"accuracy", "val_loss"},
    "finite": (bool, 0, 1),
    "accuracy": NUMBER,
    "val_loss": NUMBER,
    "curve": [[NUMBER, 2, 2], 1, 1 << 20],
    "seconds": (float, 0, 1 << 62),
    "scores": (dict, 0, 9999),
}


def read_rows(folder: Path) -> list[dict]:
    """The rows of the folder, of each run the one that ended last. Raises UserError for a damaged
    row."""
    rows = {}
    for row in read_jsonl(folder / "rows.jsonl", ROW):
        name = text_of(row)
        if name not in rows or row.get("ended", 0) > rows[name].get("ended", 0):
            rows[name] = row
    return list(rows.values())


def as_read(value: Any) -> Any:
    """The value as JSON gives it back: a tuple becomes a list."""
    return json.loads(json.dumps(value))


def text_of(row: dict) -> str:
    """The run that a row belongs to, as a text that two rows share if they are of the same run."""

    def parse_float(text):  # 1.0 as 1: a key means the same however its number is written
        return int(float(text)) if float(text).is_integer() else float(text)

    run = {name: row[name] for name in RUN if name in row}
    run["config"] = keys_of_today(run["config"])
    return json.dumps(json.loads(json.dumps(run), parse_float=parse_float), sort_keys=True)


def number(value: float | None) -> float:
    """A number of a row; NaN where the run was not finite."""
    return math.nan if value is None else value


def script_of(name: str) -> types.ModuleType:
    """data/NAME/prepare.py, with its keys (Config) and VERSION."""
    return importlib.import_module(f"data.{name}.prepare")


def mixer_of(row: dict) -> str:
    """The mixer of a run; a variant of softmax counts as softmax."""
    mixer = without_alias(keys_of_today(row["config"])).get("attention", "softmax")
    return "softmax" if mixer in SOFTMAX else mixer


def variant_of(row: dict) -> str:
    """What an arm adds to its mixer: the arm's name without the mixer's, "none" if nothing is
    left."""
    return row["arm"].removeprefix(mixer_of(row)).strip(" ,") or "none"


def wanted_scores(config, arm: str) -> dict[str, dict]:
    """{name: keys of evaluate.py} of the scores that the config asks for of an arm."""
    names = [name for name in config.scores if arm in config.scores_of.get(name, config.arms)]
    return as_read({name: config.scores[name] for name in names})
