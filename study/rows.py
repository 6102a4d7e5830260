"""Rows of an experiment: which run a row is of, and which scores of it count.

    rows = read_rows(folder)
    row = find_row(rows, run)       # None: not run yet

A row of rows.jsonl is a run (its arm, setting, seed, data and keys of train.py), what came of it, and what made it. Its
scores are no part of the run: other scores in the config are computed for the same row, and written as a newer one.
"""

import collections
import json

from runs.files import read_jsonl

KEYS = ("config", "data")
RUN = ("arm", "setting", "seed", "purpose", *KEYS)  # what makes a run: its row has the same


def read_rows(folder):
    """The rows of this machine and of the others that share the folder, one a run: the one that ended last."""
    found = {}
    for file in sorted(folder.glob("rows*.jsonl")):
        for row in read_jsonl(file):
            name = json.dumps(run_of(row), sort_keys=True)
            if name not in found or row.get("ended", 0) > found[name].get("ended", 0):
                found[name] = row
    return list(found.values())


def as_read(value):
    """The value as it comes back from JSON: a tuple as a list."""
    return json.loads(json.dumps(value))


def run_of(row):
    """The run that a row is of."""
    return {name: row[name] for name in RUN if name in row}


def find_row(rows, run):
    """The row of this very run: same arm, seed, data and keys."""
    return next((row for row in rows if run_of(row) == run), None)


def rows_of_other_keys(rows, lacking):
    """A line for each difference between runs that lack a row and the rows of their arm, setting and seed."""
    told = collections.Counter()
    for run in lacking:
        same = [row for row in rows if all(row.get(name) == run.get(name) for name in RUN if name not in KEYS)]
        if same:
            told[min((difference(row, run) for row in same), key=len)] += 1
    about = "of their rows have other keys, and are left out"
    return [f"  {count} {about}: {'; '.join(words)}" for words, count in told.items()]


def difference(row, run):
    """How the keys of a row differ from those of a run: a tuple of words."""
    words = []
    for part in KEYS:
        was, now = row[part], run[part]
        for name in [name for name in was | now if was.get(name) != now.get(name)]:
            there, here = (f"{of[name]!r}" if name in of else "not given" for of in (was, now))
            words.append(f"{name} {there} in the row, {here} in the config")
    return tuple(words)


def scores_of(config, row):
    """{name: score} of a row: those that the config asks for, made with the same keys on the same data."""
    if row.get("score_data", {}) != as_read(config.score_data):
        return {}
    scored, found = row.get("scored", {}), row.get("scores", {})
    wanted = as_read(config.scores).items()
    return {name: found[name] for name, keys in wanted if name in found and scored.get(name) == keys}


def with_scores(config, row):
    """The row with the scores of the config and no others: an edit of the config drops none from the file."""
    return row | {"scored": as_read(config.scores), "scores": scores_of(config, row)}


def missing_scores(config, row):
    """The names of the scores that a finished run lacks. A run that was not finite, or chose a rate, has none."""
    if "purpose" in row or not row["finite"]:
        return []
    return [name for name in config.scores if name not in scores_of(config, row)]
