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

from base.files import read_jsonl
from base.rules import did_you_mean, show, wrong_field
from configurator import UserError
from keys import CLASS_OF, keys_of_today

RUN = ("arm", "seed", "purpose", "branch", "config", "data")  # what identifies a run

# what the fields of a row may be, as rules of rules.wrong_field
TEXT, DICT, MANY = (str, 0, 999), (dict, 0, 9999), 1 << 20
COUNT, NUMBER, STEP = (int, 0, 1 << 62), (float, -1e30, 1e30, None), (float, 0, 1 << 62)
TEXT_OR_NONE, SECONDS = (*TEXT, None), (float, 0, 1e12)
LENGTH = {"block_size": COUNT, "loss?": NUMBER}
# of query
OF_KIND = {"share": NUMBER, "effective": NUMBER, "gate_mean": {str: NUMBER}, "loss": NUMBER}
BRANCH = {"of": TEXT, "at": COUNT}
ROW = {
    "arm": TEXT, "seed": COUNT, "purpose?": {"selection"}, "branch?": BRANCH,
    "config": DICT, "data": DICT, "init_from?": DICT, "metric": {"accuracy", "val_loss"}, "prepare?": TEXT,
    "finite": (bool, 0, 1), "accuracy?": (float, -1e-3, 1.001, None), "val_loss?": NUMBER,
    "curve": [[NUMBER, 2, 2], 1, MANY], "horizon?": COUNT, "last_step?": COUNT, "seconds": SECONDS, "ended?": SECONDS,
    "scores": {str: {"slices?": {str: NUMBER}, "lengths?": [LENGTH, 0, 99]}}, "scored?": {str: DICT},
    "tokens_per_second?": NUMBER, "step_ms?": NUMBER, "flops_per_token?": NUMBER, "n_params?": COUNT,
    "state_bytes?": COUNT, "data_version?": COUNT, "planned_seeds?": [COUNT, 0, 9999], "processes?": (int, 1, MANY),
    "threads?": (*COUNT, None), "dtype?": TEXT_OR_NONE, "device?": TEXT_OR_NONE, "code_sha256?": TEXT_OR_NONE,
    "git_commit?": TEXT_OR_NONE, "git_dirty?": (bool, 0, 1, None), "versions?": DICT, "meters?": DICT,
    "loss?": {str: NUMBER}, "loss_curve?": [{"step": COUNT, str: NUMBER}, 0, MANY],
    "sinks?": [{"step": COUNT, "value_norm": NUMBER, str: OF_KIND}, 0, MANY],
}  # fmt: skip


# where a number stands in a row, for the paths of claims: {name: None for a number or a list of
# them, or what is inside}; str: any name, of a score, a kind of query, a slice, a gate's position,
# or a key
OF_LOSS = dict.fromkeys(
    ("near", "far", "repeated", "elsewhere", "far_minus_near", "repeated_minus_elsewhere")
)
OF_QUERIES = ("share", "to_sink", "effective", "loss")
OF_METERS = (
    "sink",
    "to_sink",
    "sink_baseline",
    "effective_sink",
    "value_norm",
    "branch",
    "max_activation",
)
OF_METERS += ("max_over_median", "induction")
OF_SCORE = (
    "loss",
    "perplexity",
    "accuracy",
    "labels",
    "bits_per_byte",
    "bytes",
    "word_perplexity",
    "tokens_per_word",
)
OF_SCORE += ("words", "block_size", "trained_length", "rope_factor", "prune_below", "step")
OF_RUN = (
    "accuracy",
    "val_loss",
    "tokens_per_second",
    "step_ms",
    "flops_per_token",
    "n_params",
    "state_bytes",
)
OF_RUN += ("seconds", "horizon", "last_step", "processes", "threads")
NUMBERS: dict = dict.fromkeys(OF_RUN) | {
    "loss": OF_LOSS,
    "scores": {str: dict.fromkeys(OF_SCORE) | {"slices": {str: None}, "loss_of": OF_LOSS}},
    "meters": dict.fromkeys(OF_METERS) | {
        "gate_mean": {str: None}, "gate_below_0.1": {str: None},
        "kinds": {str: dict.fromkeys(OF_QUERIES) | {"gate_mean": {str: None}}},
    },
    "config": {str: None}, "data": {str: None},
}  # fmt: skip


def wrong_path(path: list[str]) -> str | None:
    """Says what is wrong with the path to a number of a row, or returns None."""
    inside, before = NUMBERS, "a row"
    for name in path:
        if inside is None:
            return f"{show(before)} is a number, and has no {show(name)}"
        if str not in inside and name not in inside:
            return f"{before} has no {show(name)}{did_you_mean(name, inside)}"
        inside, before = inside[str] if str in inside else inside[name], name
    if inside is None:
        return None
    names = "names of its own" if str in inside else ", ".join(inside)
    return f"{before} is no number; it has {names}"


def wrong_row(row: dict) -> str | None:
    """Says in words what is wrong with a row, or returns None."""
    if wrong := wrong_field(row, ROW):
        return wrong
    steps, values = zip(*row["curve"], strict=True)
    a_number = NUMBER[:3] if row["finite"] else NUMBER
    rules: dict = {
        "curve: step": [STEP, 1, MANY],
        "curve": [a_number, 1, MANY],
        row["metric"]: a_number,
    }
    return wrong_field(row | {"curve: step": list(steps), "curve": list(values)}, rules)


def read_rows(folder: Path) -> list[dict]:
    """The rows of the folder, of each run the one that ended last. Raises UserError for a row with
    a wrong field."""
    rows: dict[str, dict] = {}
    for number, row in enumerate(read_jsonl(folder / "rows.jsonl"), 1):
        if wrong := wrong_row(row):
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


def scores_of(config, row: dict) -> dict[str, dict | None]:
    """{name: score} of the scores that the config asks for of the row's arm; None: it lacks it, or
    it was made with other keys."""
    arm, made, scores = row["arm"], row.get("scored", {}), row.get("scores", {})
    wanted = {
        name: keys
        for name, keys in config.scores.items()
        if arm in config.scores_of.get(name, [arm])
    }
    return {
        name: scores.get(name) if made.get(name) == as_read(keys) else None
        for name, keys in wanted.items()
    }


def missing_scores(config, row: dict) -> list[str]:
    """The names of the scores that a row, or a run, lacks. A run that diverged or chose a rate is
    not scored."""
    if "purpose" in row or not row.get("finite", True):
        return []
    return [name for name, score in scores_of(config, row).items() if score is None]
