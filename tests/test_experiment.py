"""Experiments: what is run, what is kept, what stops it. Files with made_rows test what is made of rows.

Runs are carried out in this process, but for those of the test with two processes.
"""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, wait_until
from made_rows import DATA, made_row

import experiment
import plot
from base.configurator import UserError
from base.files import read_jsonl
from base.rules import show
from data.mqar import prepare as mqar_prepare
from data.shards import open_dataset
from runs.checkpoint import load, save
from runs.hardware import usable_cores
from study import runner
from study.plan import steps_of
from study.rows import read_rows

FLOAT32 = {"dtype": "float32"}
OTHER = dict(slices="32/4,64/4,64/7", vocab_size=16, train_size=1, val_size=50)
ARMS = {"none": {"gate": "none"}, "elementwise": {"gate": "elementwise"}}
PLAIN = experiment.ExperimentConfig(arms={"none": {}}, base=FLOAT32)
START_PROCESS = runner.start_process


@pytest.fixture(scope="module")
def base(helpers):
    keys = dict(max_iters=6, eval_interval=3, learning_rate=1e-2)
    return {name: value for name, value in (helpers.tiny | keys).items() if name != "threads"}


@pytest.fixture(scope="module")
def run(tmp_path_factory, base, helpers, started):
    """run(out_dir, key=value, ...) runs the tiny experiment, two runs at a time. Of older calls, `started` has none."""

    def call(out_dir, data=DATA, base=base, **keys):
        started.clear()
        file = tmp_path_factory.mktemp("config") / "tiny.py"
        file.write_text(f'name = "tiny"\narms = {ARMS}\nseeds = [0, 1]\ndata = {data}\nbase = {base}\n')
        experiment.main([str(file), *helpers.words(out_dir=out_dir, jobs=2, **keys)])

    return call


@pytest.fixture(scope="module")
def finished(run, tmp_path_factory):
    """An experiment of 2 arms and 2 seeds that has run; nobody writes to it."""
    out_dir = tmp_path_factory.mktemp("finished") / "tiny"
    run(out_dir)
    return out_dir


def rows_of(out_dir):
    return {(row["arm"], row["seed"]): row for row in read_jsonl(out_dir / "rows.jsonl")}


# -- Running -----------------------------------------------------------------------------------------------------------


def test_every_arm_is_run_with_every_seed_on_its_data_and_has_its_row(finished, base, helpers):
    rows = rows_of(finished)
    assert sorted(rows) == [("elementwise", 0), ("elementwise", 1), ("none", 0), ("none", 1)]
    assert len((finished / "rows.jsonl").read_text().splitlines()) == 4
    for (arm, seed), row in rows.items():
        evaluations = helpers.metrics(finished / f"{arm}-seed{seed}", "eval")
        assert row["curve"] == [[step, evaluations[i]["accuracy"]] for i, step in enumerate((0, 3, 6))]
        assert (row["accuracy"], row["val_loss"]) == (evaluations[-1]["accuracy"], evaluations[-1]["val_loss"])
        assert (row["dtype"], row["device"], row["threads"]) == ("float32", "cpu", max(1, usable_cores() // 2))
        assert "code_sha256" in row and row["horizon"] == row["last_step"] == 6
        assert row["config"] == base | {"gate": arm, "seed": seed} and row["data"] == DATA and row["finite"]
        assert row["planned_seeds"] == [0, 1]
        assert {"git_commit", "versions", "step_ms", "state_bytes", "flops_per_token"} <= row.keys()
    assert rows["elementwise", 0]["n_params"] == rows["none", 0]["n_params"] + 2 * 16 * 16
    first, second = (open_dataset(finished / "data" / f"seed{seed}") for seed in (0, 1))
    for seed, data in enumerate((first, second)):
        used = {load(finished / f"{arm}-seed{seed}")["data"]["sha256"] for arm in ARMS}
        assert used == {data.sha256} and data.meta["seed"] == seed
    assert first.sha256 != second.sha256
    assert {row["data_version"] for row in read_rows(finished)} == {first.meta["generator_version"]}


def test_figures_are_drawn_again_from_the_rows_alone_and_a_damaged_row_is_named(finished, tmp_path, capsys):
    png = (finished / "accuracy.png").read_bytes()
    rows = (finished / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows + '{"cut": ')
    plot.main([str(tmp_path), str(finished / "none-seed0")])
    assert png.startswith(b"\x89PNG\r\n") and (tmp_path / "accuracy.png").read_bytes() == png
    drawn = [tmp_path / "accuracy.png", finished / "none-seed0" / "page.png"]
    assert capsys.readouterr().out.split() == list(map(str, drawn))
    (tmp_path / "rows.jsonl").write_text(rows[:9] + rows[rows.index("\n") :])
    with pytest.raises(UserError, match=r"rows.jsonl line 1: damaged; remove the line"):
        plot.main([str(tmp_path)])


def test_it_runs_what_has_no_row_and_goes_on_where_a_run_was_stopped(
    run, finished, base, started, tmp_path, helpers, capsys
):
    copied = shutil.copytree(finished, tmp_path / "copied")
    before, lines = rows_of(copied), (copied / "rows.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"arm": "none", "seed": 1' in line or '"arm": "elementwise", "seed": 0' in line]
    # one run had ended when its row was cut short; the other one was stopped after step 3
    (copied / "rows.jsonl").write_text("".join(kept) + '{"arm": "none", "se')
    stopped = copied / "elementwise-seed1"
    for name in ("metrics.jsonl", "ckpt.pt", "best.pt"):
        (stopped / name).unlink()
    helpers.train(copied / "data" / "seed1", stopped, **base | dict(max_iters=3, gate="elementwise", seed=1))
    run(copied)
    said = capsys.readouterr().out
    assert sorted(name for name, _ in started) == ["train.py elementwise-seed1", "train.py none-seed0"]
    assert f"resuming {stopped} at step 3" in said and f"resuming {copied / 'none-seed0'} at step 6" in said
    assert (copied / "rows.jsonl").read_text().startswith("".join(kept))
    after = rows_of(copied)
    assert len(after) == len((copied / "rows.jsonl").read_text().splitlines()) == 4
    for name, row in after.items():
        assert row["curve"] == before[name]["curve"] and [step for step, _ in row["curve"]] == [0, 3, 6]
        assert row["val_loss"] == pytest.approx(before[name]["val_loss"], rel=1e-6)


def test_a_signal_stops_every_run_which_saves_first(base, tmp_path, helpers):
    keys = dict(arms=ARMS, base=base | dict(max_iters=100_000, eval_interval=50_000), data=DATA, jobs=2)
    command = [sys.executable, "experiment.py", *helpers.words(out_dir=tmp_path, **keys)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    files = [tmp_path / f"{arm}-seed0" / "metrics.jsonl" for arm in ARMS]
    is_alive = lambda: process.poll() is None  # noqa: E731
    wait_until(lambda: all(file.is_file() and '"train"' in file.read_text() for file in files), is_alive)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "Traceback" not in said
    assert "SIGTERM: the runs save and end. A second SIGTERM or Ctrl-C ends this worker alone, at once" in said
    for file in files:
        assert load(file.parent)["iter_num"] > 0
        assert "SIGTERM: saved at step" in (file.parent / "log.txt").read_text()
        runner.lock(tmp_path, file.parent.name).close()  # another worker need not wait
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize("jobs, each, at_a_time, threads", [(4, 1, 4, {}), (0, 2, 2, {"threads": 3})])
def test_every_gpu_has_its_run_and_with_more_jobs_as_many_as_the_others(
    monkeypatch, tmp_path, capsys, jobs, each, at_a_time, threads
):
    monkeypatch.setattr(runner, "pick_device", lambda name: "cuda")
    first, second = {1: ("4", "7"), 2: ("4,7", "1,2")}[each]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{first},{second}")
    started, seen = [], []  # the GPU of each process; those of all that were started before one was first asked

    def start_process(script, keys, folder, by_cores, gpu, processes, held):
        started.append(gpu)
        assert processes == each and keys["threads"] == threads.get("threads", by_cores)
        return types.SimpleNamespace(returncode=0, poll=lambda: seen.append(list(started)) or 0)

    monkeypatch.setattr(runner, "start_process", start_process)
    monkeypatch.setattr(runner, "prepare", lambda config, keys, seed, place: place)
    monkeypatch.setattr(runner, "finish", lambda config, run, folder, status: made_row(run, 0.5))
    keys = dict(jobs=jobs, processes_per_run=each, base=FLOAT32 | {"gradient_accumulation_steps": 2} | threads)
    config = experiment.ExperimentConfig(arms=ARMS, seeds=[0, 1, 2, 3], data=DATA, **keys)
    runner.work(config, tmp_path)
    assert len(read_rows(tmp_path)) == len(started) == 8
    done = re.findall(r"\((\d) of 8 runs\)", capsys.readouterr().out)
    assert done == list("12345678")  # also of runs that end at once
    assert sorted(seen[0]) == sorted([first, second] * (at_a_time // 2))
    assert started.count(first) == started.count(second) == 4


def test_a_run_of_two_processes_has_the_row_of_one(monkeypatch, tmp_path, base, helpers):
    monkeypatch.setattr(runner, "start_process", START_PROCESS)  # processes of their own, as outside of the tests
    keys = dict(arms={"none": {}}, base=base | {"gradient_accumulation_steps": 2}, data=DATA, jobs=1)
    experiment.main(helpers.words(out_dir=tmp_path / "two", processes_per_run=2, **keys))
    (row,) = read_rows(tmp_path / "two")
    data = tmp_path / "two" / "data" / "seed0"
    alone = helpers.train(data, tmp_path / "alone", seed=0, **keys["base"])
    assert row["processes"] == 2 and row["finite"] and row["last_step"] == 6
    evaluations = helpers.metrics(alone, "eval")
    assert row["curve"] == [[e["step"], pytest.approx(e["accuracy"], rel=1e-4)] for e in evaluations]
    assert row["val_loss"] == pytest.approx(helpers.metrics(alone, "end")[0]["val_loss"], rel=1e-4)


def test_a_folder_of_a_run_of_other_keys_is_left_alone(run, finished, base, started, tmp_path, helpers):
    copied = shutil.copytree(finished, tmp_path / "copied")
    before = (copied / "rows.jsonl").read_bytes()
    message = helpers.error_of(run, copied, base=base | {"n_layer": 1}, seeds="1")
    assert "none-seed1: holds a run of other keys; move it away, or take another --out_dir" in message
    assert not started and (copied / "rows.jsonl").read_bytes() == before
    assert load(copied / "none-seed1")["model_args"]["n_layer"] == 2


def test_workers_that_start_together_prepare_their_data_once(tmp_path, monkeypatch):
    made, prepare = [], mqar_prepare.main
    monkeypatch.setattr(mqar_prepare, "main", lambda words: made.append(words) or prepare(words))
    with ThreadPoolExecutor(4) as pool:  # a lock is that of an open file: threads exclude each other as processes do
        folders = list(pool.map(lambda _: runner.prepare(PLAIN, DATA, 3, tmp_path), range(4)))
    assert folders == [tmp_path / "seed3"] * 4 and len(made) == 1
    assert open_dataset(folders[0]).meta["seed"] == 3
    fixed = {runner.prepare(PLAIN, DATA | {"seed": 7}, seed, tmp_path) for seed in (0, 1)}  # a seed of the data stays
    assert fixed == {tmp_path / "all"} and len(made) == 2


def test_an_experiment_replaces_data_of_other_keys_with_overwrite_alone_and_nothing_else(tmp_path, helpers):
    first, later = DATA | {"vocab_size": 32}, DATA | {"vocab_size": 64}
    runner.prepare(PLAIN, first, 3, tmp_path)
    message = helpers.error_of(runner.prepare, PLAIN, later, 3, tmp_path)
    assert "vocab_size" in message and "--overwrite=true" in message
    folder = runner.prepare(dataclasses.replace(PLAIN, overwrite=True), later, 3, tmp_path)
    assert open_dataset(folder).vocab_size == 64
    (tmp_path / "seed4").mkdir()
    (tmp_path / "seed4" / "thesis.txt").write_text("mine")
    assert "thesis.txt" in helpers.error_of(runner.prepare, PLAIN, DATA, 4, tmp_path)


def test_a_run_is_scored_and_one_whose_row_is_removed_gets_the_scores_it_lacks_without_training(
    base, tmp_path, started, capsys, helpers
):
    mqar_prepare.main(helpers.words(out_dir=tmp_path / "other", **OTHER))
    out = tmp_path / "out"

    def rows_with(**keys):
        about = dict(arms={"none": {}}, seeds=[0], data=DATA, base=base | {"block_size": 64})
        config = experiment.ExperimentConfig(**about | keys)
        capsys.readouterr()
        started.clear()
        (row,) = experiment.run_all(config, out)
        return row

    scores = {"a": {"dataset": str(tmp_path / "other"), "batch_size": 8}, "b": {"batch_size": 4}}
    one = rows_with(scores={"a": scores["a"]})
    assert [name for name, _ in started] == ["train.py none-seed0", "evaluate.py none-seed0"]
    assert one["scores"]["a"]["labels"] == 50 * (4 + 4 + 7)
    assert list(one["scores"]["a"]["slices"]) == ["32/4", "64/4", "64/7"] and one["scores"]["a"]["step"] == 6
    saved = load(out / "none-seed0")
    assert rows_with(scores=scores)["scores"].keys() == {"a"} and not started
    assert "1 rows lack a score that the config asks for; remove these rows" in capsys.readouterr().out
    (out / "rows.jsonl").unlink()
    two = rows_with(scores=scores)
    assert two["scores"]["a"] == one["scores"]["a"] and two["scores"]["b"]["labels"] == 50 * 4
    assert saved["iter_num"] == load(out / "none-seed0")["iter_num"] and two["curve"] == one["curve"]
    assert rows_with(scores={"b": scores["b"]})["scores"].keys() == {"b"} and not started
    assert rows_with(scores={"a": {"batch_size": 8}})["scores"] == {} and not started  # made with other keys


def test_a_branch_ends_with_the_bits_of_a_run_that_had_its_schedule_from_the_start(
    base, tmp_path, started, capsys, helpers
):
    arms = {
        "decayed": {"schedule": "wsd", "decay_iters": 2, "max_iters": 5},
        "none": {"schedule": "constant", "keep_interval": 3},
        "straight": {"schedule": "wsd", "decay_iters": 2, "max_iters": 5},
    }
    keys = dict(arms=arms, branches={"decayed": {"of": "none", "at": 3}}, seeds=[0], data=DATA, base=base, jobs=2)
    config = experiment.ExperimentConfig(**keys)
    started.clear()
    experiment.run_all(config, tmp_path)
    names = [name for name, _ in started]
    assert sorted(names) == [f"train.py {arm}-seed0" for arm in ("decayed", "none", "straight")]
    assert names.index("train.py none-seed0") < names.index("train.py decayed-seed0")
    rows = rows_of(tmp_path)
    branch, straight = rows["decayed", 0], rows["straight", 0]
    assert branch["val_loss"] == straight["val_loss"] and branch["last_step"] == straight["last_step"] == 5
    assert [step for step, _ in branch["curve"]] == [3, 5]
    assert branch["curve"][0] == [3, dict(rows["none", 0]["curve"])[3]]
    assert branch["branch"] == {"of": "none", "at": 3} and "branch" not in straight
    assert branch["seconds"] > 0
    assert "3 runs, 13 steps" in capsys.readouterr().out
    assert steps_of([branch]) == 2 and steps_of([straight]) == 5
    started.clear()
    experiment.run_all(config, tmp_path)
    assert not started
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    others = "".join(line for line in lines if '"arm": "decayed"' not in line)
    (tmp_path / "rows.jsonl").write_text(others)
    shutil.rmtree(tmp_path / "decayed-seed0")
    kept = tmp_path / "none-seed0" / "ckpt-3.pt"
    save(kept, load(kept) | {"seconds": 1e6})
    experiment.run_all(config, tmp_path)
    assert rows_of(tmp_path)["decayed", 0]["seconds"] < 1e6  # without those before it began
    (tmp_path / "rows.jsonl").write_text(others)
    for file in (tmp_path / "none-seed0").glob("ckpt-*.pt"):
        file.unlink()
    words = helpers.error_of(experiment.run_all, config, tmp_path)
    assert (
        "decayed-seed0: goes on from" in words
        and "ckpt-3.pt, which is not there, and no run that is left makes it" in words
    )


def test_runs_start_from_a_checkpoint_that_they_name_and_go_on_with_their_own(finished, base, tmp_path):
    start = finished / "none-seed0"
    arms = {"none": {}, "late": {"gate": "elementwise", "gate_activation": "sigmoid2"}}
    keys = dict(arms=arms, seeds=[7], data=DATA | {"seed": 0}, base=base | {"init_from": str(start)})
    experiment.run_all(experiment.ExperimentConfig(**keys), tmp_path)
    rows = rows_of(tmp_path)
    last = rows_of(finished)["none", 0]["accuracy"]
    assert [rows[arm, 7]["curve"][0] for arm in arms] == [[0, pytest.approx(last)]] * 2
    assert rows["none", 7]["last_step"] == 6 and rows["none", 7]["val_loss"] != rows["late", 7]["val_loss"]


# -- Mistakes, and runs that fail --------------------------------------------------------------------------------------

GAIN = {"contrast": "none", "above": 0}


def of(path):
    """The keys of an experiment with a claim about this path."""
    return {"claims": {"helps": GAIN | {"of": path}}}


def branch(at, **keys):
    """The keys of an experiment whose second arm goes on from the first one."""
    return {"arms": {"none": keys, "branch": {}}, "branches": {"branch": {"of": "none", "at": at}}}


CHOOSING = dict(selection_seeds=[5], learning_rates=[1.0])
NO_FILE = ["../../evil", "/abs", "a/b", "..\\evil", "", " ", ".", "..", ".a", "x" * 300, "a\0b", "a\nb", "\ud800"]
NO_SCRIPT = ["/any/folder", "../x", "mqar/../..", ".", "mqar/", "x" * 5000, "m\0", "shards"]  # none is data/NAME
WRONG = [
    (dict(arms={"none": {"gaet": "none"}}), "arm 'none': unknown key 'gaet' (did you mean 'gate'?)"),
    (dict(arms={"none": {"dtype": "auto"}}), "arm 'none': dtype=auto is timed anew"),
    (dict(scores={"longer": {"lenghts": 5}}), "score 'longer': unknown key 'lenghts' (did you mean 'lengths'?)"),
    (dict(seeds=[0, 1, 1]), "seeds, selection_seeds: name each seed once"),
    (dict(seeds_of={"nobody": [1]}), "seeds_of='nobody': must be one of none"),
    (dict(seeds_of={"none": [-1]}), "seeds_of.none[0]=-1: must be"),
    (dict(seeds_of={"none": [7]}), "seeds_of: none: has none of seeds=[0, 1]"),
    (dict(first_arms=["nobody"]), "first_arms='nobody': must be one of none"),
    (dict(learning_rates=[0.1]), "learning_rates, selection_seeds: give both, or none"),
    (dict(learning_rates=[0.1], selection_seeds=[1]), "seeds, selection_seeds: name each seed once"),
    (dict(branches={"x": {"of": "none", "at": 3}}), "branches: x: of='x': must be one of none, elementwise"),
    (dict(branches={"elementwise": {"of": "none"}}), "branches.elementwise has no at"),
    (branch(at=3), "branches: branch: 'none' keeps no checkpoint of step 3: give it a keep_interval"),
    (
        branch(at=3, keep_interval=3) | dict(seeds_of={"none": [0]}, seeds=[0, 1]),
        "branches: branch: 'none' is not run with all of its seeds",
    ),
    (branch(at=3, keep_interval=3, n_embd=32), "branches: branch: has another head_dim, n_embd than 'none'"),
    (branch(at=3, keep_interval=3, weight_decay=0.3), "branches: branch: would take weight_decay from 'none'"),
    (
        branch(at=6, keep_interval=3) | dict(arms={"none": dict(keep_interval=3), "branch": dict(max_iters=3)}),
        "branches: branch: at=6: is behind its own max_iters=3",
    ),
    (
        dict(
            arms={"a": dict(keep_interval=3), "b": dict(keep_interval=3)},
            branches={"a": {"of": "b", "at": 3}, "b": {"of": "a", "at": 3}},
        ),
        "branches: a: goes on from itself, by a from b from a",
    ),
    (of(["log"]), "claims: helps: of=['log']: must be names"),
    (of(["log", "lost"]), "claims: helps: of=['log', 'lost']: must be names"),
    (branch(at=9, keep_interval=3), "branches: branch: 'none' keeps no checkpoint of step 9"),
    (branch(at=4, keep_interval=3), "branches: branch: 'none' keeps no checkpoint of step 4"),
    (dict(rate_of={"none": "none"}, **CHOOSING), "rate_of='none': must be one of elementwise"),
    (dict(selection_iters=7, **CHOOSING), "arm 'none': selection_iters: must be at most max_iters=6"),
    (dict(claims={"helps": {"contrast": "gatd", "above": 0}}), "claims: helps: contrast='gatd'"),
    (
        dict(claims={"helps": GAIN | {"other_than": 0}}),
        "claims: helps: must have above, other_than (which",
    ),
    (dict(claims={"helps": GAIN | {"in": 3}}), "claims: helps: in: is more than the seeds of its arms"),
    (dict(claims={"helps": GAIN | {"of": ["lost"]}}), "claims: helps: of=['lost']: must be names"),
    (of(["at", "far", 3]), "claims: helps: of=['at', 'far', 3]: must be names"),
    (of(["lost", "reapeted", 0.8]), "claims: helps: of=['lost', 'reapeted', 0.8]: must be names"),
    (of(["lost", "repeated", "far", 0.8]), "claims: helps: of=['lost', 'repeated', 'far', 0.8]: must be names"),
    (dict(claims={"helps": GAIN | {"contrast": {"none": 1}}}), "claims: helps: contrast={'none': 1}: must be a text"),
    (dict(data=DATA | {"slice": 4}), "data: unknown key 'slice' (did you mean 'slices'?)"),
    *(({kind: {name: {}}}, f"{show(name)}: names are file") for kind in ("arms", "scores") for name in NO_FILE),
    *((dict(name=name), "name") for name in NO_FILE),
    *(
        (dict(prepare=name), f"prepare={show(name)}: must be one of backcopy, hub, induction, mqar")
        for name in NO_SCRIPT
    ),
]


@pytest.mark.parametrize("keys, expected", WRONG, ids=str)
def test_a_wrong_key_is_found_before_the_first_run(keys, expected, base, helpers):
    keys = dict(arms=ARMS, seeds=[0, 1], data=DATA, base=base) | keys
    assert expected in helpers.error_of(experiment.ExperimentConfig, **keys)


def test_the_folder_of_somebody_else_is_refused_before_anything_is_written(run, tmp_path, started, helpers):
    for name, content in [("model.py", "theirs"), ("rows.jsonl", '{"theirs": 1}\n')]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text(content)
        said = helpers.error_of(run, folder, seeds="0")
        assert "holds what is not of this project" in said or "line 1: damaged" in said
        assert [file.read_text() for file in folder.iterdir()] == [content] and not started


def test_a_run_that_was_not_finite_has_a_row_and_one_that_crashed_has_none_but_a_line(mqar, tmp_path, helpers, capfd):
    def finished(name, log):
        (tmp_path / name / "log.txt").write_text(log)
        run = {"arm": "none", "seed": 0, "data": {}, "config": {}}
        return runner.finish(PLAIN, run, tmp_path / name, 1)

    with pytest.raises(SystemExit, match="1"):
        keys = dict(learning_rate=1e12, grad_clip=None, warmup_iters=0)
        helpers.train(mqar, tmp_path / "infinite", eval_interval=1, **keys)
    error = capfd.readouterr().err
    assert "error: the output on a row of validation is not finite at step 1" in error
    assert "ckpt.pt holds step 0" in error and load(tmp_path / "infinite")["iter_num"] == 0
    row = finished("infinite", "")
    assert not row["finite"] and row["accuracy"] is None and [step for step, _ in row["curve"]] == [0]
    json.dumps(row, allow_nan=False)
    helpers.train(mqar, tmp_path / "crashed", eval_interval=1, max_iters=1)
    (tmp_path / "refused").mkdir()
    for name, log in {
        "crashed": "Traceback\nIndexError: list index out of range\n",  # an exception has status 1, too
        "refused": "error: IndexError: list index out of range\na report of torchrun's own\n",
    }.items():
        message = helpers.error_of(finished, name, log)
        assert f"{name} ended with status 1: " in message and "IndexError: list index out of range (all of" in message
        assert str(tmp_path / name / "log.txt") in message
