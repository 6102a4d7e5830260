"""
Several workers on one folder: who has a run, who takes over the runs of a worker that is gone, and that none is lost.

    python -m pytest tests/test_workers.py
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tqdm import tqdm

import experiment
from runs.files import lock, read_jsonl
from study import leases, runner
from study.leases import Leases
from study.rows import text_of

ROOT = Path(__file__).resolve().parent.parent
BASE = {"dtype": "float32"}
FORK = multiprocessing.get_context("fork")  # torch is imported once


def gone():
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.fixture
def left(tmp_path):
    """left(name, host=..., pid=...) writes the lease of another worker."""

    def call(name, **about):
        (tmp_path / "leases").mkdir(exist_ok=True)
        file = tmp_path / "leases" / f"{name}.0"
        file.write_text(json.dumps(leases.about_this_process() | {"pid": gone(), "started": 0.0} | about))
        return file

    return call


# ----------------------------------------------------------------------------------------------------------------------
# Leases


def test_a_lease_is_one_workers_until_it_is_dropped_or_given_back(tmp_path):
    with Leases(tmp_path) as one:
        assert one.take("a") and one.take("b") and one.is_mine("a")
        about = json.loads((tmp_path / "leases" / "a.0").read_text())
        assert (about["host"], about["pid"]) == (socket.gethostname(), os.getpid())
        with ran_elsewhere(tmp_path, "a", "b") as taken:
            assert taken == [False, False]
        one.drop("a")
        one.give_back("b")
        with ran_elsewhere(tmp_path, "a", "b") as taken:
            assert taken == [True, True]
    assert {f.name for f in (tmp_path / "leases").iterdir()} == {"a.0", "b.0", "b.1"}


class ran_elsewhere:
    """with ran_elsewhere(folder, name, ...) as taken: whether another process gets these leases."""

    def __init__(self, folder, *names):
        self.folder, self.names, self.queue = folder, names, FORK.SimpleQueue()

    def __enter__(self):
        self.process = FORK.Process(target=self.run)
        self.process.start()
        return self.queue.get()

    def run(self):
        with Leases(self.folder) as other:
            self.queue.put([other.take(name) for name in self.names])

    def __exit__(self, *error):
        self.process.join()


def test_of_many_workers_that_take_over_at_once_only_one_gets_the_lease(tmp_path, left):
    names = [f"run{i}" for i in range(30)]
    for name in names[:20]:
        left(name)  # the others are free
    barrier, queue = FORK.Barrier(4), FORK.SimpleQueue()

    def taker():
        with Leases(tmp_path) as own:
            found = []
            for name in names:
                barrier.wait()
                found += [name] if own.take(name) else []
            queue.put(found)
            barrier.wait()

    processes = [FORK.Process(target=taker) for _ in range(4)]
    for process in processes:
        process.start()
    taken = [name for _ in processes for name in queue.get()]
    for process in processes:
        process.join()
    assert sorted(taken) == sorted(names)


def test_a_worker_of_this_machine_that_is_gone_has_no_lease_and_one_that_lives_keeps_it(tmp_path, left):
    left("dead")
    left("reborn", pid=os.getpid())  # a container that was started again: the same number, another process
    left("lives", pid=os.getppid())
    with Leases(tmp_path) as own:
        assert own.take("dead") and own.take("reborn") and not own.take("lives")
        assert own.holder("lives") == f"process {os.getppid()} on {socket.gethostname()}"


def test_on_another_machine_the_heartbeat_decides_and_no_clock_is_compared(tmp_path, left, monkeypatch):
    monkeypatch.setattr(leases, "STALE", 0.3)
    file = left("run", host="elsewhere", machine="elsewhere")
    os.utime(file, (5e8, 5e8))  # a clock that is years behind
    with Leases(tmp_path) as own:
        for beat in range(4):
            assert not own.take("run")
            os.utime(file, (5e8 + beat, 5e8 + beat))
            time.sleep(0.2)
        assert not own.take("run")
        time.sleep(0.4)
        assert own.take("run") and own.is_mine("run")


def test_a_process_is_not_looked_for_on_another_machine_that_has_the_same_name(tmp_path, left):
    left("run", host=socket.gethostname(), machine="another container")  # where the number is that of a live process
    with Leases(tmp_path) as own:
        assert not own.take("run")


def test_what_is_held_has_a_heartbeat_also_while_the_worker_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT", 0.05)
    with Leases(tmp_path) as own:
        own.take("run")
        os.utime(tmp_path / "leases" / "run.0", (5e8, 5e8))
        deadline = time.monotonic() + 30
        while (tmp_path / "leases" / "run.0").stat().st_mtime == 5e8:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_worker_that_was_suspended_has_lost_its_lease_and_leaves_that_of_the_next_alone(tmp_path):
    with Leases(tmp_path) as suspended:
        suspended.take("run")
        next_one = tmp_path / "leases" / "run.1"
        next_one.write_text("{}")
        assert not suspended.is_mine("run")
        suspended.drop("run")
        assert next_one.is_file()
        suspended.take("again")
        (tmp_path / "leases" / "again.0").write_text("{}")  # done, dropped, and taken anew by a third one
        assert not suspended.is_mine("again")


# ----------------------------------------------------------------------------------------------------------------------
# Workers


def made_row(item):
    about = {"finite": True, "accuracy": 0.5, "val_loss": 1.0, "metric": "accuracy", "scores": {}, "seconds": 1.0}
    return item | about | {"curve": [[0, 0.1], [10, 0.5]], "made_by": os.getpid()}


def stubbed_worker(config, out_dir, seconds):
    """A worker whose runs sleep. It is a process of its own, forked off this one."""
    tqdm.set_lock(threading.RLock())
    sys.stdout = sys.stderr = open(out_dir / f"said.{os.getpid()}", "w")
    runner.prepare = lambda config, keys, seed, place: place
    runner.start_process = lambda *words: subprocess.Popen(["sleep", str(seconds)])
    runner.finish = lambda config, job: made_row(job["item"])
    runner.LOOK = 0.1
    runner.run_all(config, out_dir)


def start_workers(count, config, out_dir, seconds):
    processes = [FORK.Process(target=stubbed_worker, args=(config, out_dir, seconds)) for _ in range(count)]
    for process in processes:
        process.start()
    return processes


def all_rows(out_dir):
    return [row for file in out_dir.glob("rows*.jsonl") for row in read_jsonl(file)]


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def held_by(out_dir, process):
    files = [file for file in (out_dir / "leases").glob("*seed*") if file.stat().st_size]
    return [file.name for file in files if f'"pid": {process.pid},' in leases.read_text(file)]


def test_two_of_eight_workers_are_killed_and_every_run_has_exactly_one_row(tmp_path):
    (tmp_path / ".nanogate").write_text("experiment\n")
    arms = {name: {"gate": gate} for name, gate in (("none", "none"), ("gated", "elementwise"))}
    keys = dict(selection_seeds=[100, 101], learning_rates=[0.001, 0.01, 0.1])  # selection and comparison in one call
    config = experiment.ExperimentConfig(arms=arms, seeds=list(range(8)), base=BASE, jobs=1, **keys)
    workers = start_workers(8, config, tmp_path, 0.3)
    for victim in workers[:2]:
        until(lambda victim=victim: held_by(tmp_path, victim))
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
    for worker in workers[2:]:
        worker.join(timeout=120)
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * 2 + [0] * 6
    rows = all_rows(tmp_path)
    expected = [run for choice in experiment.choose_rates(config, rows) for run in choice["runs"]]
    assert len(rows) == len(expected) + 16 == 2 * 2 * (3 + 2) + 2 * 2 + 16  # the smallest of equal rates is at the edge
    assert len({text_of(row) for row in rows}) == len(rows)
    assert len({row["made_by"] for row in rows}) >= 6  # nobody was idle
    held = [file.name for file in (tmp_path / "leases").glob("*")]
    assert not [name for name in held if "seed" in name]
    assert any("waiting for" in file.read_text() for file in tmp_path.glob("said.*"))


def test_a_run_that_got_its_row_before_the_lease_was_taken_is_not_run_again(tmp_path):
    config = experiment.ExperimentConfig(arms={"none": {}}, base=BASE)
    (run,) = experiment.runs_of(config, [0], [])
    with Leases(tmp_path) as own:
        assert runner.take(config, run, tmp_path, own)
        own.drop("none-seed0")
        (tmp_path / "rows.there-5.jsonl").write_text(json.dumps(made_row(run)) + "\n")  # since the rows were read
        assert not runner.take(config, run, tmp_path, own)
        assert not own.held and not list((tmp_path / "leases").iterdir())


def test_a_run_whose_worker_was_killed_is_left_alone_while_its_process_is_at_work(tmp_path, left):
    config = experiment.ExperimentConfig(arms={"none": {}}, base=BASE)
    (run,) = experiment.runs_of(config, [0], [])
    left("none-seed0")
    folder = tmp_path / "none-seed0"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(run))
    with Leases(tmp_path) as own:
        with lock(folder):
            assert not runner.take(config, run, tmp_path, own)
            said = runner.others_in_words([run], own)
            assert said == "waiting for 1 runs of other workers: none-seed0 (its worker is gone, it still runs)"
        assert runner.take(config, run, tmp_path, own)


def test_the_first_worker_writes_rows_jsonl_and_each_other_one_a_file_of_its_own(tmp_path, left):
    with Leases(tmp_path) as own:
        with runner.open_rows(tmp_path, own) as file:
            assert Path(file.name).name == "rows.jsonl"
        own.drop("rows.jsonl")
        left("rows.jsonl", pid=os.getppid())
        other = tmp_path / f"rows.{socket.gethostname()}-{os.getpid()}.jsonl"
        other.write_text('{"a": 1}\n{"cut')
        with runner.open_rows(tmp_path, own) as file:
            assert Path(file.name) == other and other.read_text() == '{"a": 1}\n'
        own.drop(other.name)
        left(other.name, pid=os.getppid())  # a worker in another container: the same name, the same number
        with runner.open_rows(tmp_path, own) as file:
            assert Path(file.name).name == f"rows.{socket.gethostname()}-{os.getpid()}.1.jsonl"


def test_a_worker_that_lost_its_lease_writes_no_row(tmp_path, monkeypatch):
    config = experiment.ExperimentConfig(arms={"none": {}}, base=BASE, jobs=1)
    monkeypatch.setattr(runner, "prepare", lambda config, keys, seed, place: place)
    monkeypatch.setattr(runner, "LOOK", 0.1)

    def start_process(command, folder, threads, gpu, processes):
        (run,) = experiment.runs_of(config, [0], [])
        (tmp_path / "leases" / "none-seed0.1").write_text("{}")  # taken over, and done
        (tmp_path / "rows.there-5.jsonl").write_text(json.dumps(made_row(run)) + "\n")
        return subprocess.Popen(["true"])

    monkeypatch.setattr(runner, "start_process", start_process)
    monkeypatch.setattr(runner, "finish", lambda config, job: pytest.fail("a second row"))
    assert len(runner.run_all(config, tmp_path)) == len(all_rows(tmp_path)) == 1


def test_a_run_that_the_process_of_a_killed_worker_still_holds_is_waited_for(tmp_path, monkeypatch):
    config = experiment.ExperimentConfig(arms={"none": {}}, base=BASE, jobs=1)
    monkeypatch.setattr(runner, "prepare", lambda config, keys, seed, place: place)
    monkeypatch.setattr(runner, "finish", lambda config, job: made_row(job["item"]))
    monkeypatch.setattr(runner, "LOOK", 0.1)
    started = []

    def start_process(command, folder, threads, gpu, processes):
        started.append(folder)
        if len(started) == 1:  # the other one has taken its lock only now
            threading.Timer(0.5, lock(folder).close).start()
            return subprocess.Popen(["false"])
        return subprocess.Popen(["true"])

    monkeypatch.setattr(runner, "start_process", start_process)
    assert len(runner.run_all(config, tmp_path)) == len(all_rows(tmp_path)) == 1 and len(started) == 2


def test_a_worker_that_lost_rows_jsonl_goes_on_in_a_file_of_its_own(tmp_path, monkeypatch):
    config = experiment.ExperimentConfig(arms={"none": {}}, seeds=[0, 1], base=BASE, jobs=1)

    def finish(config, job):
        if job["item"]["seed"] == 0:  # it was suspended, and another worker has taken the file over
            text = json.dumps(leases.about_this_process() | {"pid": os.getppid()})
            (tmp_path / "leases" / "rows.jsonl.1").write_text(text)
        return made_row(job["item"])

    monkeypatch.setattr(runner, "prepare", lambda config, keys, seed, place: place)
    monkeypatch.setattr(runner, "start_process", lambda *words: subprocess.Popen(["true"]))
    monkeypatch.setattr(runner, "finish", finish)
    monkeypatch.setattr(runner, "LOOK", 0.1)
    assert len(runner.run_all(config, tmp_path)) == 2
    assert not (tmp_path / "rows.jsonl").read_text() and len(all_rows(tmp_path)) == 2


@pytest.mark.slow
def test_two_of_eight_workers_that_train_are_killed_and_every_run_has_exactly_one_row(tmp_path, helpers):
    data = dict(seq_len=32, vocab_size=16, pairs=4, train_size=200, val_size=50)
    base = {name: value for name, value in helpers.tiny.items() if name != "threads"} | {"max_iters": 300}
    keys = dict(arms={"none": {}, "gated": {"gate": "elementwise"}}, seeds=list(range(6)), base=base, data=data, jobs=1)
    words = helpers.words(out_dir=tmp_path / "out", **keys | {"seeds": "0,1,2,3,4,5"})
    workers = [subprocess.Popen([sys.executable, "experiment.py", *words], cwd=ROOT) for _ in range(8)]
    for victim in workers[:2]:
        until(lambda victim=victim: held_by(tmp_path / "out", victim))
        victim.kill()
        victim.wait()
    assert [worker.wait(timeout=900) for worker in workers] == [-signal.SIGKILL] * 2 + [0] * 6
    rows = all_rows(tmp_path / "out")
    assert len(rows) == len({text_of(row) for row in rows}) == 12
    assert all(row["finite"] and row["last_step"] == 300 for row in rows)
    assert (tmp_path / "out" / "report.html").is_file()
