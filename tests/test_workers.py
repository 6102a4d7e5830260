"""Several workers on one folder: who has a run, who goes on with those of a dead worker, and that none is lost."""

import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from conftest import wait_until
from made_rows import every_run, listed, made_row

from base.files import read_jsonl
from study import runner
from study.plan import choose_rates
from study.rows import text_of

FORK = multiprocessing.get_context("fork")  # torch is imported once


def test_a_run_is_taken_by_one_worker_until_it_and_its_process_are_gone_or_it_has_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    (tmp_path / "train.py").write_text("import time; time.sleep(60)")
    config = listed(arms={"none": {}}, seeds=[0])
    (run,) = every_run(config)
    held = runner.take(run, tmp_path)
    assert held is not None and runner.take(run, tmp_path) is None
    with runner.start_process("train.py", {}, tmp_path, 1, None, 1, held) as process:
        held.close()  # the worker is gone
        assert runner.take(run, tmp_path) is None
        process.kill()
    runner.take(run, tmp_path).close()
    runner.append_row(tmp_path, made_row(run, 0.5))  # before the lock is taken
    assert runner.take(run, tmp_path) is None
    runner.lock(tmp_path, "none-seed0").close()  # it was given back


def test_rows_of_many_workers_are_appended_whole_and_a_line_that_was_cut_goes(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"cut')
    rows = [{"number": i, "text": "x" * 5000} for i in range(24)]
    with ThreadPoolExecutor(len(rows)) as threads:
        list(threads.map(lambda row: runner.append_row(tmp_path, row), rows))
    first, *others = read_jsonl(tmp_path / "rows.jsonl")
    assert first == {"a": 1} and sorted(others, key=lambda row: row["number"]) == rows


def stubbed_worker(config, out_dir):
    """A worker whose runs sleep. It is a process of its own, forked off this one."""
    sys.stdout = sys.stderr = open(out_dir / f"said.{os.getpid()}", "w", encoding="utf-8")
    runner.prepare = lambda config, keys, seed, place: place
    runner.start_process = lambda *about: subprocess.Popen(["sleep", "0.3"], pass_fds=[about[-1].fileno()])
    runner.finish = lambda config, run, folder, status: made_row(run, 0.5) | {"made_by": os.getpid()}
    runner.LOOK = 0.1
    runner.run_all(config, out_dir)


def test_two_of_eight_workers_are_killed_and_every_run_has_exactly_one_row(tmp_path):
    (tmp_path / ".nanogate").write_text("experiment\n")
    keys = dict(selection_seeds=[100, 101], learning_rates=[0.001, 0.01, 0.1])  # selection and comparison in one call
    config = listed(seeds=list(range(8)), jobs=1, **keys)
    workers = [FORK.Process(target=stubbed_worker, args=(config, tmp_path)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for victim in workers[:2]:
        holds = f"process {victim.pid} "
        wait_until(lambda holds=holds: any(holds in file.read_text() for file in tmp_path.glob("locks/*seed*/lock")))
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
    for worker in workers[2:]:
        worker.join(timeout=120)
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * 2 + [0] * 6
    rows = read_jsonl(tmp_path / "rows.jsonl")
    expected = [run for choice in choose_rates(config, rows) for run in choice["runs"]]
    assert len(rows) == len(expected) + 16 == 2 * 2 * (3 + 1) + 16  # the smallest of equal rates is at the edge
    assert len({text_of(row) for row in rows}) == len(rows)
    assert len({row["made_by"] for row in rows}) >= 6  # nobody was idle
    assert any("waiting for" in file.read_text() for file in tmp_path.glob("said.*"))
