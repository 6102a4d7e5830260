"""The rows of an experiment: which run a row belongs to, and which of its scores count.

    rows = {text_of(row): row for row in read_rows(folder)}
    row = rows.get(text_of(run))                # None: this run has no row yet

A row of rows.jsonl holds a run (its arm, seed, data and keys of train.py), its results, and the
code and machine that made them. Scores are not part of what identifies a run: if the config asks
for another score, it is computed for the finished run, and a newer row is written.
"""

import importlib
import json
import math
import types
from pathlib import Path
from typing import Any

from base.configurator import UserError
from base.files import read_jsonl
from base.rules import wrong_field
from keys import CLASS_OF, keys_of_today

RUN = ("arm", "seed", "purpose", "branch", "config", "data")  # what identifies a run

# what the fields of a row may be, as rules of rules.wrong_field, and those of each kind of query
TEXT, DICT, MANY = (str, 0, 999), (dict, 0, 9999), 1 << 20
COUNT, NUMBER, STEP = (int, 0, 1 << 62), (float, -1e30, 1e30, None), (float, 0, 1 << 62)
OF_KIND = {"share": NUMBER, "effective": NUMBER, "gate_mean": {str: NUMBER}, "loss": NUMBER}
ROW = {
    "arm": TEXT, "seed": COUNT, "purpose?": {"selection"}, "branch?": {"of": TEXT, "at": COUNT},
    "config": DICT, "data": DICT, "metric": {"accuracy", "val_loss"}, "prepare?": TEXT,
    "finite": (bool, 0, 1), "accuracy": NUMBER, "val_loss": NUMBER, "curve": [[NUMBER, 2, 2], 1, MANY],
    "horizon?": COUNT, "seconds": STEP, "ended?": STEP, "scores": {str: DICT}, "scored?": {str: DICT},
    "data_version?": COUNT, "planned_seeds?": [COUNT, 0, 9999], "processes?": (int, 1, MANY), "meters?": DICT,
    "loss_curve?": [{"step": COUNT, str: NUMBER}, 0, MANY],
    "sinks?": [{"step": COUNT, "value_norm": NUMBER, str: OF_KIND}, 0, MANY],
}  # fmt: skip


def wrong_row(row: dict) -> str | None:
    """Says in words what is wrong with a row, or returns None."""
    wrong = wrong_field(row, ROW)
    if wrong:
        return wrong
    steps = [step for step, _ in row["curve"]]
    return wrong_field(steps, [STEP, 1, MANY], "curve: step")


def read_rows(folder: Path) -> list[dict]:
    """The rows of the folder, of each run the one that ended last. Raises UserError for a row with
    a wrong field."""
    rows: dict[str, dict] = {}
    for number, row in enumerate(read_jsonl(folder / "rows.jsonl"), 1):
        wrong = wrong_row(row)
        if wrong:
            raise UserError(f"{folder / 'rows.jsonl'} line {number}: {wrong}")
        name = text_of(row)
        if name not in rows or row.get("ended", 0) > rows[name].get("ended", 0):
            rows[name] = row
    return list(rows.values())


def as_read(value: Any) -> Any:
    """The value as JSON gives it back: a tuple becomes a list."""
    return json.loads(json.dumps(value))


def run_of(row: dict) -> dict:
    return {name: row[name] for name in RUN if name in row}


def text_of(row: dict) -> str:
    """The run that a row belongs to, as a text that two rows share if they are of the same run."""

    def parse_float(text):  # 1.0 as 1: a key means the same however its number is written
        return int(float(text)) if float(text).is_integer() else float(text)

    run = run_of(row)
    if isinstance(run.get("config"), dict):
        run["config"] = keys_of_today(run["config"])
    return json.dumps(json.loads(json.dumps(run), parse_float=parse_float), sort_keys=True)


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def number(value: float | None) -> float:
    """A number of a row; NaN where the run was not finite."""
    return math.nan if value is None else value


def script_of(name: str) -> types.ModuleType:
    """data/NAME/prepare.py, with its keys (Config) and VERSION."""
    return importlib.import_module(f"data.{name}.prepare")


def mixer_of(row: dict) -> str:
    """The mixer of a run; a variant of softmax counts as softmax."""
    mixer = keys_of_today(row["config"]).get("attention", "softmax")
    return "softmax" if mixer in CLASS_OF.values() else mixer


def variant_of(row: dict) -> str:
    """What an arm adds to its mixer: the arm's name without the mixer's, "none" if nothing is
    left."""
    return row["arm"].removeprefix(mixer_of(row)).strip(" ,") or "none"


def wanted_scores(config, arm: str) -> dict[str, dict]:
    """{name: keys of evaluate.py} of the scores that the config asks for of an arm."""
    return {
        name: as_read(keys)
        for name, keys in config.scores.items()
        if arm in config.scores_of.get(name, config.arms)
    }


def scores_of(config, row: dict) -> dict[str, dict]:
    """{name: score} of the scores that the config asks for, and that were made with its keys."""
    made = row.get("scored", {})
    return {
        name: row["scores"][name]
        for name, keys in wanted_scores(config, row["arm"]).items()
        if name in row["scores"] and made.get(name) == keys
    }


def is_scored(config, row: dict) -> bool:
    """Whether a row has all scores that the config asks for. A run that was not finite has none."""
    wanted = wanted_scores(config, row["arm"])
    return not row["finite"] or scores_of(config, row).keys() == wanted.keys()
