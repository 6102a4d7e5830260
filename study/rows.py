"""The rows of an experiment: which run a row belongs to, and which of its scores count.

    rows = read_rows(folder)
    row = by_run(rows).get(text_of(run))        # None: this run has no row yet

A row of rows.jsonl holds a run (its arm, setting, seed, data and keys of train.py), its results, and the code and
machine that made them. Scores are not part of what identifies a run: if the config asks for another score, it is
computed for the finished run, and a newer row is written.
"""

from configurator import UserError

import collections
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rules import wrong_field
from runs.files import read_jsonl

KEYS = ("config", "data", "init_from")
RUN = ("arm", "setting", "seed", "purpose", *KEYS)  # what identifies a run

# the fields of a row, as a rule of files.wrong_field
TEXT, DICT, LIST = (str, 0, 999), (dict, 0, 9999), [object, 0, 1 << 20]
COUNT, NUMBER = (int, 0, 1 << 62), (float, -1e30, 1e30, None)
SHARE, STEP = (float, -1e-3, 1.001, None), (float, 0, 1 << 62)
OF_KIND = {"share": NUMBER, "effective": NUMBER, "gate_mean": {str: NUMBER}, "loss": NUMBER}
ROW = {
    "arm": TEXT, "setting?": TEXT, "seed": COUNT, "purpose?": {"selection", "short selection"},
    "config": DICT, "data": DICT, "init_from?": DICT, "metric?": {"accuracy", "val_loss"}, "prepare?": TEXT,
    "finite?": (bool, 0, 1), "accuracy?": SHARE, "val_loss?": NUMBER, "curve": [[NUMBER, 2, 2], 1, 1 << 20],
    "scores": {str: DICT}, "scored?": {str: DICT}, "score_data?": DICT,
    "seconds?": (float, 0, 1e12), "ended?": (float, 0, 1e12), "tokens_per_second?": NUMBER, "step_ms?": NUMBER,
    "horizon?": COUNT, "last_step?": COUNT, "data_version?": COUNT, "planned_seeds?": [COUNT, 0, 9999],
    "n_params?": COUNT, "state_bytes?": COUNT, "flops_per_token?": NUMBER, "processes?": (int, 1, 1 << 20),
    "threads?": (*COUNT, None), "dtype?": (*TEXT, None), "device?": (*TEXT, None), "code_sha256?": (*TEXT, None),
    "git_commit?": (*TEXT, None), "git_dirty?": (bool, 0, 1, None), "versions?": DICT,
    "meters?": {"kinds?": {str: {"share": NUMBER, "effective": NUMBER}}}, "loss?": DICT,
    "loss_curve?": [{"step": COUNT}, 0, 1 << 20], "meter_curve?": DICT,
    "sinks?": [{"step": COUNT, "value_norm": NUMBER, "trigger?": OF_KIND, "other?": OF_KIND}, 0, 1 << 20],
}  # fmt: skip


def wrong_row(row: dict) -> str | None:
    """Says in words what is wrong with a row, or returns None."""
    if wrong := wrong_field(row, ROW):
        return wrong
    if wrong := wrong_field([step for step, _ in row["curve"]], [STEP, 1, 1 << 20], "curve: step"):
        return wrong
    if not (curve := row.get("meter_curve")):  # the meters were off
        return None
    n = len(curve["step"]) if isinstance(curve.get("step"), list) else 0
    rule = {"step": [COUNT, n, n], "branch": [NUMBER, n, n], "gate_mean": {str: [NUMBER, n, n]}, "induction?": LIST}
    return wrong_field(curve, rule, "meter_curve")


def read_rows(folder: Path) -> list[dict]:
    """The rows of the folder, one for each run: the one that ended last. Raises UserError for a row with a wrong field.

    Workers append to rows.jsonl; older ones had a file each, rows.HOST-PROCESS.jsonl.
    """
    found: dict[str, dict] = {}
    for file in sorted(folder.glob("rows*.jsonl")):
        for number, row in enumerate(read_jsonl(file), 1):
            if wrong := wrong_row(row):
                raise UserError(f"{file} line {number}: {wrong}")
            name = text_of(row)
            if name not in found or row.get("ended", 0) > found[name].get("ended", 0):
                found[name] = row
    return list(found.values())


def as_read(value: Any) -> Any:
    """The value as JSON gives it back: a tuple becomes a list."""
    return json.loads(json.dumps(value))


def run_of(row: dict) -> dict:
    """The run that a row belongs to."""
    return {name: row[name] for name in RUN if name in row}


def text_of(row: dict) -> str:
    """The run that a row belongs to, as a text that two rows share if they are of the same run."""
    return json.dumps(whole_numbers(run_of(row)), sort_keys=True)


def whole_numbers(value: Any) -> Any:
    """The value with 1 in place of 1.0, at any depth: a key means the same however its number is written."""
    if isinstance(value, dict):
        return {name: whole_numbers(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def by_run(rows: Iterable[dict]) -> dict[str, dict]:
    """{text_of(run): its row}."""
    return {text_of(row): row for row in rows}


def rows_of_other_keys(rows: list[dict], lacking: Iterable[dict]) -> list[str]:
    """For runs without a row: how the rows of the same arm, setting and seed differ. One line for each difference."""
    told = collections.Counter()
    for run in lacking:
        same = [row for row in rows if all(row.get(name) == run.get(name) for name in RUN if name not in KEYS)]
        if same:
            told[min((difference(row, run) for row in same), key=len)] += 1
    about = "of their rows have other keys, and are left out"
    return [f"  {count} {about}: {'; '.join(words)}" for words, count in told.items()]


def difference(row: dict, run: dict) -> tuple[str, ...]:
    """How the keys of a row differ from the keys of a run, in words: one text for each key."""
    words = []
    for part in KEYS:
        was, now = row.get(part, {}), run.get(part, {})  # init_from: only a run that starts from another's weights
        for name in [name for name in was | now if was.get(name) != now.get(name)]:
            there, here = (f"{of[name]!r}" if name in of else "not given" for of in (was, now))
            words.append(f"{name} {there} in the row, {here} in the config")
    return tuple(words)


def arm_of(config, row: dict) -> str:
    """The name that the arm of a row has in the config: in a sweep, rows of ARM are of "ARM at RATE"."""
    return row["arm"] if row["arm"] in config.arms else row["arm"].rpartition(" at ")[0]


def wanted_scores(config, row: dict) -> list[str]:
    """The names of the scores that the config asks for, of a run of this arm."""
    arm = arm_of(config, row)
    return [name for name in config.scores if arm in config.scores_of.get(name, [arm])]


def scores_of(config, row: dict) -> dict[str, dict]:
    """{name: score}: the scores of a row that the config asks for and that were made with the same keys."""
    scored, found = row.get("scored", {}), row.get("scores", {})
    wanted = {name: as_read(config.scores[name]) for name in wanted_scores(config, row)}
    return {name: found[name] for name, keys in wanted.items() if name in found and scored.get(name) == keys}


def with_scores(config, row: dict) -> dict:
    """The row with only the scores that the config asks for. The file keeps the others."""
    return row | {"scored": as_read(config.scores), "scores": scores_of(config, row)}


def missing_scores(config, row: dict) -> list[str]:
    """The names of the scores that a finished run lacks. A run that diverged or chose a rate is not scored."""
    if "purpose" in row or not row["finite"]:
        return []
    return [name for name in wanted_scores(config, row) if name not in scores_of(config, row)]
