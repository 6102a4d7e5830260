"""The loggers that hand the rows to a library of others: with a stand-in for it, and with the library where it is."""

import json
import struct
import sys
import types

import pytest

from runs import loggers

SERVICES = ["wandb", "trackio"]
KEYS = dict(eval_interval=4, schedule="constant", meters="true")


class Library:
    """A stand-in for wandb and trackio."""

    def __init__(self, starting_step=0, fails=()):
        self.run = types.SimpleNamespace(starting_step=starting_step)
        self.fails = fails
        self.keys, self.logged, self.deleted, self.finished = None, [], [], 0
        self.kept = []  # the names of the runs in trackio's store

    def init(self, project, name, **keys):
        self.keys = keys | {"project": project, "name": name}
        if "init" in self.fails:
            raise RuntimeError("the service\nis down")
        return self.run

    def log(self, numbers, step):
        self.logged.append((step, numbers))
        if "log" in self.fails:
            raise RuntimeError("the service\nis down")

    def finish(self):
        self.finished += 1
        if "finish" in self.fails:
            raise RuntimeError("the service\nis down")

    def Api(self):
        return self

    def runs(self, project):
        if not self.kept:
            raise ValueError("no project")
        return [
            types.SimpleNamespace(name=name, delete=lambda name=name: self.deleted.append(name)) for name in self.kept
        ]


@pytest.fixture
def library(monkeypatch):
    """library(name, ...) -> the stand-in that is imported from here on."""
    monkeypatch.delenv("WANDB_PROJECT", raising=False)

    def make(name, **keys):
        stand_in = Library(**keys)
        monkeypatch.setitem(sys.modules, name, stand_in)
        return stand_in

    return make


def expected(rows):
    return [(row["step"], loggers.curves_of(row)) for row in rows]


def run_id_of(out):
    return json.loads((out / "config.json").read_text())["run_id"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_gets_every_row_and_the_keys_of_the_run(name, run, library, helpers):
    stand_in = library(name)
    out = run("out", logger=name, max_iters=6)
    assert stand_in.logged == expected(helpers.metrics(out)) and stand_in.finished == 1
    assert {"loss", "lr"} <= {curve.removeprefix("train/") for curve in stand_in.logged[1][1]}
    assert stand_in.keys["project"] == "nanogate" and stand_in.keys["config"]["max_iters"] == 6
    assert stand_in.keys["name"].startswith(str(out))


def test_wandb_goes_on_in_the_same_run_after_the_last_step_that_it_has(run, library, helpers, monkeypatch):
    library("wandb")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    out = run("out", logger="wandb", max_iters=6)
    again = library("wandb", starting_step=3)  # it has the rows of steps 0 to 2
    run("out", logger="wandb", max_iters=8, init_from="resume")
    assert again.logged == [(step, row) for step, row in expected(helpers.metrics(out)) if step >= 3]
    assert again.keys["id"] == run_id_of(out) and again.keys["resume"] == "allow" and again.keys["project"] == "mine"
    new = library("wandb")
    run("out", logger="wandb", max_iters=1, overwrite=True)
    assert new.keys["id"] != again.keys["id"]


def test_trackio_replaces_the_same_run_alone(run, library, helpers):
    first = library("trackio")
    out = run("out", logger="trackio", max_iters=6)
    again = library("trackio")
    again.kept = ["out", first.keys["name"], f"{out} 12345678"]
    run("out", logger="trackio", max_iters=8, init_from="resume")
    assert again.deleted == [first.keys["name"]] == [f"{out} {run_id_of(out)[:8]}"]
    assert again.logged == expected(helpers.metrics(out))


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_service_that_fails_is_told_in_one_line_and_ends_no_run(name, fails, run, library, helpers, capfd):
    stand_in = library(name, fails=[fails])
    out = run("out", logger=name, max_iters=3)
    lines = [line for line in capfd.readouterr().err.splitlines() if "logger=" in line]
    assert lines == [f"logger='{name}': failed, and only metrics.jsonl goes on (RuntimeError: the service is down)"]
    assert len(stand_in.logged) == {"init": 0, "log": 1}.get(fails, len(helpers.metrics(out)))
    assert helpers.metrics(out)[-1]["event"] == "end"


@pytest.mark.parametrize("name", SERVICES)
def test_a_library_that_is_missing_is_named_before_anything_is_replaced(name, run, helpers, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    out = run("out", max_iters=1)
    message = helpers.error_of(run, "out", logger=name, overwrite=True)
    assert message.startswith(f"logger='{name}': pip install {name} (") and (out / "ckpt.pt").is_file()


def test_wandb_does_not_write_through_a_link(run, library, helpers, tmp_path):
    library("wandb")
    out = run("out", logger="wandb", max_iters=1)
    (out / "wandb").symlink_to(tmp_path)
    assert "out/wandb: cannot be written (is a link" in helpers.error_of(run, "out", logger="wandb", overwrite=True)


# -- With the libraries themselves -------------------------------------------------------------------------------------


def train_with_a_kill(run, **keys):
    """A run of 6 steps, of which a kill has undone one, and that goes on to 8."""
    out = run("out", max_iters=6, **keys)
    with open(out / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"event": "train", "step": 6, "loss": 99.0}) + "\n")
    return run("out", max_iters=8, init_from="auto", **keys)


def merged(rows):
    """[(step, all numbers of it)] of the rows of a run."""
    numbers = {}
    for step, curves in expected(rows):
        numbers.setdefault(step, {}).update(curves)
    return list(numbers.items())


def records_of(file):
    """The records of a file of wandb: LevelDB's log after 7 bytes, a record or a part of one (its last one is of type
    1 or 4) after checksum, length and type, none of them across the blocks of 32 kB."""
    content, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def test_the_last_folder_that_wandb_wrote_offline_has_every_number_once(run, helpers, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    out = train_with_a_kill(run, logger="wandb")
    folders = sorted((out / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(folder.name.endswith(f"-{run_id_of(out)}") for folder in folders)
    (file,) = folders[-1].glob("*.wandb")
    logged, names = [], set()
    for record in map(Record.FromString, records_of(file)):
        if record.HasField("run"):
            names.add((record.run.project, record.run.display_name, record.run.run_id))
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            logged.append((row["_step"], {name: x for name, x in row.items() if not name.startswith("_")}))
    assert names == {("nanogate", str(out), run_id_of(out))}
    assert logged == merged(helpers.metrics(out))


def test_the_store_of_trackio_has_every_row_once_after_a_kill(run, helpers, monkeypatch, tmp_path):
    pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage")
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "store")
    out = train_with_a_kill(run, logger="trackio")
    (record,) = storage.SQLiteStorage.get_run_records("nanogate")
    logs = storage.SQLiteStorage.get_logs("nanogate", record["name"])
    logged = [(log.pop("step"), {name: x for name, x in log.items() if name != "timestamp"}) for log in logs]
    assert record["name"] == f"{out} {run_id_of(out)[:8]}" and logged == expected(helpers.metrics(out))
