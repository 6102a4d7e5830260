"""
Experiments: what is run, what is kept, what stops it. What is made of rows: test_rows.py and the others with made_rows.

Runs are carried out in this process, but for the tests of `processes`.

    python -m pytest tests/test_experiment.py
"""

import configurator
from configurator import UserError

import dataclasses
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from made_rows import made_row

import evaluate
import experiment
import plot
import train
from data.mqar import prepare as mqar_prepare
from data.shards import open_dataset
from runs.checkpoint import load
from runs.files import read_jsonl
from runs.hardware import usable_cores
from study import claims, report, runner, tables
from study.rows import read_rows

ROOT = Path(__file__).resolve().parent.parent
DATA = dict(seq_len=32, vocab_size=16, pairs=4, train_size=200, val_size=50)
FLOAT32 = {"dtype": "float32"}
OTHER = dict(slices="32/4,64/4,64/7", vocab_size=16, train_size=1, val_size=50)
ARMS = {"none": {"gate": "none"}, "elementwise": {"gate": "elementwise"}}
PLAIN = experiment.ExperimentConfig(arms={"none": {}}, base=FLOAT32)
COMMANDS = []  # of the runs that were started since the test began
START_PROCESS = runner.start_process


@pytest.fixture(scope="module", autouse=True)
def in_process():
    def start(command, folder, threads, gpu, processes, held):
        script, keys = command
        COMMANDS.append(f"{script} {folder.name}")
        {"train.py": train, "evaluate.py": evaluate}[script].main([f"--config_override={json.dumps(keys)}"])
        return types.SimpleNamespace(returncode=0, poll=lambda: 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "start_process", start)
        yield


@pytest.fixture(autouse=True)
def commands():
    COMMANDS.clear()
    return COMMANDS


@pytest.fixture
def processes(monkeypatch):
    """Runs are processes of their own, as outside of the tests."""
    monkeypatch.setattr(runner, "start_process", START_PROCESS)


@pytest.fixture(scope="module")
def base(helpers):
    keys = dict(max_iters=6, eval_interval=3, learning_rate=1e-2, lr_decay_iters=6)
    return {name: value for name, value in (helpers.tiny | keys).items() if name != "threads"}


@pytest.fixture(scope="module")
def run(tmp_path_factory, base, helpers):
    """run(out_dir, key=value, ...) runs the tiny experiment, two runs at a time."""

    def call(out_dir, data=DATA, base=base, **keys):
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


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of it, somewhere else."""
    shutil.copytree(finished, tmp_path / "copied")
    return tmp_path / "copied"


def rows_of(out_dir):
    return {(row["arm"], row["seed"]): row for row in read_jsonl(out_dir / "rows.jsonl")}


# ----------------------------------------------------------------------------------------------------------------------
# Running


def test_every_arm_is_run_with_every_seed_and_has_its_row(finished, base, helpers):
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
        meters = [evaluation["meters"] for evaluation in evaluations]
        curve = row["meter_curve"]
        assert curve["step"] == [0, 3, 6] and len(meters[0]["branch"]) == base.get("n_layer", 2)
        assert curve["branch"] == pytest.approx([statistics.fmean(one["branch"]) for one in meters], rel=1e-3)
        gates = {} if arm == "none" else {"readout": [one["gate_mean"]["readout"] for one in meters]}
        assert curve["induction"] == [one["induction"] for one in meters]
        assert curve["gate_mean"] == gates and gates.get("readout", [0.5])[0] == 0.5
        assert row["planned_seeds"] == [0, 1]
        assert {"git_commit", "versions", "step_ms", "state_bytes", "flops_per_token"} <= row.keys()
    assert rows["elementwise", 0]["n_params"] == rows["none", 0]["n_params"] + 2 * 16 * 16


def test_the_arms_of_a_seed_share_their_data_and_other_seeds_have_other_data(finished):
    for seed in (0, 1):
        gated, plain = (load(finished / f"{arm}-seed{seed}") for arm in ("elementwise", "none"))
        assert gated["data"]["sha256"] == plain["data"]["sha256"]
        assert gated["data"]["sha256"] == open_dataset(finished / "data" / f"seed{seed}").sha256
        assert open_dataset(finished / "data" / f"seed{seed}").meta["seed"] == seed
    assert load(finished / "none-seed0")["data"]["sha256"] != load(finished / "none-seed1")["data"]["sha256"]
    meta = open_dataset(finished / "data" / "seed0").meta
    assert {row["data_version"] for row in runner.read_rows(finished)} == {meta["generator_version"]}


def test_figures_are_drawn_again_from_the_rows_alone_and_a_damaged_row_is_named(finished, tmp_path, capsys):
    png = (finished / "accuracy.png").read_bytes()
    first, *others = (finished / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.here-1.jsonl").write_text(first)  # as older workers wrote them, a file each
    (tmp_path / "rows.here-2.jsonl").write_text("".join(others) + '{"cut": ')
    plot.main([str(tmp_path), str(finished / "none-seed0")])
    assert png.startswith(b"\x89PNG\r\n") and (tmp_path / "accuracy.png").read_bytes() == png
    drawn = [tmp_path / "accuracy.png", tmp_path / "branch.png", finished / "none-seed0" / "page.png"]
    assert capsys.readouterr().out.split() == list(map(str, drawn))
    (tmp_path / "rows.here-2.jsonl").write_text("".join([others[0][:9], *others[1:]]))
    with pytest.raises(UserError, match=r"rows.here-2.jsonl line 1: damaged; remove the line"):
        plot.main([str(tmp_path)])


def test_started_again_it_runs_nothing_and_says_the_same(run, copied, commands, capsys):
    before, said = (copied / "rows.jsonl").read_bytes(), []
    for _ in range(2):
        run(copied)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "4 runs, 24 steps; 4 runs are done already" in said[0]
    assert not commands and (copied / "rows.jsonl").read_bytes() == before  # though it lies in another folder now
    (line,) = [line for line in said[0].splitlines() if line.startswith("none ")]
    assert line.split()[1:3] == [f"{rows_of(copied)['none', seed]['accuracy']:.1%}" for seed in (0, 1)]


def test_it_runs_what_has_no_row_and_goes_on_where_a_run_was_stopped(run, copied, base, commands, helpers, capsys):
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
    assert sorted(commands) == ["train.py elementwise-seed1", "train.py none-seed0"]
    assert f"resuming {stopped} at step 3" in said and f"resuming {copied / 'none-seed0'} at step 6" in said
    assert (copied / "rows.jsonl").read_text().startswith("".join(kept))
    after = rows_of(copied)
    assert len(after) == 4
    for name, row in after.items():
        assert row["curve"] == before[name]["curve"] and [step for step, _ in row["curve"]] == [0, 3, 6]
        assert row["val_loss"] == pytest.approx(before[name]["val_loss"], rel=1e-6)


@pytest.mark.parametrize(
    "number, status",
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 138, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_every_run_which_saves_first(base, tmp_path, helpers, number, status):
    arms = {"none": {}, "elementwise": {"gate": "elementwise"}}
    keys = dict(arms=arms, base=base | dict(max_iters=100_000, eval_interval=50_000), data=DATA, jobs=2)
    command = [sys.executable, "experiment.py", *helpers.words(out_dir=tmp_path, **keys)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    files = [tmp_path / f"{arm}-seed0" / "metrics.jsonl" for arm in arms]
    deadline = time.monotonic() + 120
    while not all(file.is_file() and '"train"' in file.read_text() for file in files):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == status and "Traceback" not in said
    for file in files:
        assert load(file.parent)["iter_num"] > 0
        assert "SIGTERM: saved at step" in (file.parent / "log.txt").read_text()
    assert not (tmp_path / "rows.jsonl").exists()
    for arm in arms:  # another worker need not wait
        runner.lock(tmp_path, f"{arm}-seed0").close()


@pytest.mark.parametrize("jobs, each, at_a_time", [(0, 1, 2), (4, 1, 4), (0, 2, 2)])
def test_every_gpu_has_its_run_and_with_more_jobs_as_many_as_the_others(monkeypatch, tmp_path, jobs, each, at_a_time):
    monkeypatch.setattr(runner, "pick_device", lambda name: "cuda")
    first, second = {1: ("4", "7"), 2: ("4,7", "1,2")}[each]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{first},{second}")
    started, seen = [], []  # the GPU of each process; those of all that were started before one was first asked

    def start_process(command, folder, threads, gpu, processes, held):
        started.append(gpu)
        assert processes == each
        return types.SimpleNamespace(returncode=0, poll=lambda: seen.append(list(started)) or 0)

    monkeypatch.setattr(runner, "start_process", start_process)
    monkeypatch.setattr(runner, "prepare", lambda config, keys, seed, place: place)
    monkeypatch.setattr(runner, "finish", lambda config, job: made_row(job["item"], 0.5))
    keys = dict(jobs=jobs, processes_per_run=each, base=FLOAT32 | {"gradient_accumulation_steps": 2})
    config = experiment.ExperimentConfig(arms=ARMS, seeds=[0, 1, 2, 3], data=DATA, **keys)
    runner.work(config, tmp_path)
    assert len(read_rows(tmp_path)) == len(started) == 8
    assert sorted(seen[0]) == sorted([first, second] * (at_a_time // 2))
    assert started.count(first) == started.count(second) == 4


def test_runs_of_several_processes_need_gpus_and_share_the_cores(monkeypatch, helpers):
    config = experiment.ExperimentConfig(arms={"none": {}}, processes_per_run=4, base=FLOAT32)
    monkeypatch.setattr(runner, "pick_device", lambda name: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert helpers.error_of(runner.gpus_of, config) == "processes_per_run=4: each needs a GPU, and there are 3"
    monkeypatch.setattr(runner, "pick_device", lambda name: "cpu")
    monkeypatch.setattr(runner, "usable_cores", lambda: 32)
    assert runner.jobs_of(config, runner.gpus_of(config)) == 1 and runner.threads_of(config, 1) == 8


def test_a_dry_run_plans_for_the_gpus_that_are_given(helpers):
    base = FLOAT32 | {"gradient_accumulation_steps": 4, "max_iters": 3600}
    keys = dict(arms={"none": {}, "gated": {"gate": "elementwise"}}, seeds=list(range(8)), base=base, data=DATA)
    config = experiment.ExperimentConfig(**keys, processes_per_run=4, gpus=16, dry_run=True)
    (run, other) = (experiment.runs_of(config, [0], [])[i] for i in (0, 1))
    about = {"finite": True, "accuracy": 0.5, "val_loss": 1.0, "scores": {}, "seconds": 7200.0, "last_step": 3600}
    rows = [run | about, other | about | {"processes": 4}]  # two hours of one process, or of four
    lines = experiment.estimate(config, rows).splitlines()
    # 7 runs of half an hour and 7 of two hours, of 4 GPUs each
    assert "14 of 16 runs to do: about 4.4 hours, 4 at a time, 4 GPUs each (70.0 GPU-hours, 16 GPUs)" in lines
    message = helpers.error_of(experiment.ExperimentConfig, **keys, gpus=16)
    assert message.startswith("gpus=16: is for --dry_run=true")


def test_a_run_of_two_processes_has_the_row_of_one(processes, tmp_path, base, helpers):
    keys = dict(arms={"none": {}}, base=base | {"gradient_accumulation_steps": 2}, data=DATA, jobs=1, exploratory=True)
    experiment.main(helpers.words(out_dir=tmp_path / "two", processes_per_run=2, **keys))
    (row,) = read_rows(tmp_path / "two")
    data = tmp_path / "two" / "data" / "seed0"
    alone = helpers.train(data, tmp_path / "alone", seed=0, **keys["base"])
    assert row["processes"] == 2 and row["finite"] and row["last_step"] == 6
    evaluations = helpers.metrics(alone, "eval")
    assert row["curve"] == [[e["step"], pytest.approx(e["accuracy"], rel=1e-4)] for e in evaluations]
    assert row["val_loss"] == pytest.approx(helpers.metrics(alone, "end")[0]["val_loss"], rel=1e-4)
    assert "2 process(es)" in (tmp_path / "two" / "none-seed0" / "log.txt").read_text()


def test_a_folder_of_a_run_of_other_keys_is_left_alone(run, copied, base, commands, helpers):
    before = (copied / "rows.jsonl").read_bytes()
    message = helpers.error_of(run, copied, base=base | {"n_layer": 1}, seeds="1")
    assert "none-seed1: holds a run of other keys; move it away, or take another --out_dir" in message
    assert not commands and (copied / "rows.jsonl").read_bytes() == before
    assert load(copied / "none-seed1")["model_args"]["n_layer"] == 2


# ----------------------------------------------------------------------------------------------------------------------
# The data of the runs


def test_workers_that_start_together_prepare_their_data_once(tmp_path, monkeypatch):
    made, prepare = [], mqar_prepare.main
    monkeypatch.setattr(mqar_prepare, "main", lambda words: made.append(words) or prepare(words))
    with ThreadPoolExecutor(4) as pool:  # a lock is that of an open file: threads exclude each other as processes do
        folders = list(pool.map(lambda _: runner.prepare(PLAIN, DATA, 3, tmp_path), range(4)))
    assert folders == [tmp_path / "seed3"] * 4 and len(made) == 1
    assert open_dataset(folders[0]).meta["seed"] == 3


def test_the_data_are_shared_by_all_runs_that_ask_for_the_same(tmp_path, monkeypatch):
    made = []

    def prepare(words):
        asked = json.loads(words[0].partition("=")[2])
        folder = Path(asked.pop("out_dir"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "meta.json").write_text('{"generator_version": 1}')
        made.append((str(folder.relative_to(tmp_path)), asked))

    for name in ("mqar", "wikitext103"):
        monkeypatch.setattr(f"data.{name}.prepare.main", prepare)
    monkeypatch.setattr(runner, "start_process", lambda *words: None)
    settings = {"a": {"n_layer": 1}, "b": {"n_layer": 2}, "c": {"data": {"pairs": 2}}}
    config = experiment.ExperimentConfig(
        arms={"x": {}, "y": {}}, settings=settings, seeds=[0, 1], base=FLOAT32, data=DATA
    )
    for item in experiment.runs_of(config, config.seeds, []):
        runner.start(config, item, tmp_path, 1, None, None)
    fewer = DATA | {"pairs": 2}
    assert made == [
        ("data/seed0", DATA | {"seed": 0}), ("data/c/seed0", fewer | {"seed": 0}),
        ("data/seed1", DATA | {"seed": 1}), ("data/c/seed1", fewer | {"seed": 1}),
    ]  # fmt: skip
    made.clear()
    runner.prepare(PLAIN, DATA | {"seed": 7}, 0, tmp_path / "fixed")  # a seed among the keys of the data stays
    text = experiment.ExperimentConfig(arms={"x": {}}, base=FLOAT32, prepare="wikitext103")
    for seed in (0, 1):
        runner.prepare(text, {"mini": True}, seed, tmp_path / "text")
    assert made == [("fixed/all", DATA | {"seed": 7}), ("text/all", {"mini": True})]


def test_the_experiment_on_wikitext_runs_on_other_text_and_claims_ratios_of_word_perplexity(base, tmp_path):
    copies = tmp_path / "copies"
    copies.mkdir()
    for split, times in {"train": 40, "valid": 30, "test": 10}.items():
        (copies / f"wiki.{split}.tokens").write_text(" \n = A Title = \n \n One two three .\n" * times)
    arms = {"softmax": {}, "softmax sigmoid": {"gate": "elementwise"}}
    of = ["log", "scores", "test", "word_perplexity"]
    gain = {"contrast": {"softmax": 1, "softmax sigmoid": -1}, "above": 0.0305, "of": of, "exploratory": True}
    keys = dict(arms=arms, claims={"by more than 3%": gain}, seeds=[0], learning_rates=[], selection_seeds=[])
    keys |= {"selection_iters": [], "base": base | {"vocab_size": 256, "gradient_accumulation_steps": 1}}
    keys |= {"data": {"from_dir": str(copies), "tokenizer": "byte"}}
    words = [f"--{name}={json.dumps(value)}" for name, value in keys.items()]
    config = configurator.load(experiment.ExperimentConfig, [str(ROOT / "config/experiments/wikitext103.py"), *words])
    rows = experiment.run_all(config, tmp_path / "out")
    ends = {row["arm"]: row["scores"]["test"]["word_perplexity"] for row in rows}
    claim = claims.record(*claims.judge_claims(config, rows))
    ratios = {"0": ends["softmax"] / ends["softmax sigmoid"]}
    assert claim["seeds"] == pytest.approx(ratios, rel=1e-5) and claim["unit"] == "ratio"
    assert claim["threshold"] == pytest.approx(1 / 0.97, abs=1e-4)
    assert open_dataset(tmp_path / "out" / "data" / "all").counts("test")["words"] == 120


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dry_run_times_steps_in_the_dtype_of_the_runs(dtype, base, monkeypatch):
    dtypes, forward = [], experiment.GPT.forward

    def noted(model, *args):
        dtypes.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)
        return forward(model, *args)

    monkeypatch.setattr(experiment.GPT, "forward", noted)
    config = experiment.ExperimentConfig(arms={"none": {}}, seeds=[0], data=DATA, base=base | {"dtype": dtype})
    assert "1 of 1 runs to do" in experiment.estimate(config, [])
    assert set(dtypes) == {getattr(torch, dtype)}


def test_without_a_gpu_a_dry_run_gives_gpu_hours_at_an_assumed_speed():
    if torch.cuda.is_available():
        pytest.skip("it times steps where there is a GPU")
    config = configurator.load(experiment.ExperimentConfig, [str(ROOT / "config/experiments/wikitext103.py")])
    text = experiment.estimate(config, [])
    assumed = r"\(([\d.]+) GPU-hours, (\d+) GPUs\), assuming 2e\+14 FLOPs a second, which is not measured"
    found = re.search(r"of (\d+) runs to do: about ([\d.]+) hours, 1 at a time " + assumed, text)
    tokens = 13 * (5 * 1150 + 3 * 115 + 2 * 345) * 2**19
    least, most = (3 * forward * tokens / 2e14 / 3600 for forward in (2.5e8, 3.6e8))  # 2 FLOPs a parameter, and mixing
    assert int(found[1]) == 13 * (5 + 3 + 2) and found[2] == found[3] and least < float(found[3]) < most
    of_a_node = experiment.estimate(dataclasses.replace(config, processes_per_run=8, gpus=16, dry_run=True), [])
    hours = f"about {float(found[3]) / 16:.1f} hours, 2 at a time, 8 GPUs each ({found[3]} GPU-hours, 16 GPUs)"
    assert hours in of_a_node
    assert "in linear mixers and SSMs the gate lowers word perplexity by more than 3%: 5 seeds give no p under" in text


def test_an_assumed_speed_counts_the_ids_and_the_tokens_of_the_data_to_come(base):
    keys = base | {"block_size": 64, "batch_size": 2, "gradient_accumulation_steps": 3}
    item = {"config": keys, "data": DATA}  # rows of 32 tokens, 16 ids
    with torch.device("meta"):
        of_token = experiment.GPT(configurator.build(train.TrainConfig, keys | {"vocab_size": 16})).flops_per_token()
    assert experiment.seconds_of_step(item, 1, 1e6) == pytest.approx(3 * of_token * 2 * 3 * 32 / 1e6)


def test_a_run_that_was_taken_over_costs_what_all_its_starts_did(base, tmp_path):
    config = experiment.ExperimentConfig(arms={"none": {}}, seeds=[0], data=DATA, base=base)
    (row,) = experiment.run_all(config, tmp_path)
    folder, (run,) = tmp_path / "none-seed0", experiment.runs_of(config, [0], [])
    end = read_jsonl(folder / "metrics.jsonl")[-1]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(end | {"seconds": 1000.0}) + "\n")
    job = {"item": run, "folder": folder, "process": types.SimpleNamespace(returncode=0), "started": time.time() - 5}
    assert row["seconds"] < 1000 == runner.finish(config, job)["seconds"]


# ----------------------------------------------------------------------------------------------------------------------
# Scores of finished runs


def test_a_finished_run_gets_the_scores_it_lacks_and_is_not_run_again(base, tmp_path, commands, capsys, helpers):
    mqar_prepare.main(helpers.words(out_dir=tmp_path / "other", **OTHER))
    out = tmp_path / "out"

    def rows_with(**keys):
        about = dict(arms={"none": {}}, seeds=[0], data=DATA, base=base | {"block_size": 64})
        config = experiment.ExperimentConfig(**about | keys)
        capsys.readouterr()
        commands.clear()
        (row,) = experiment.run_all(config, out)
        return row

    plain = rows_with()
    assert commands == ["train.py none-seed0"]
    saved = load(out / "none-seed0")
    other = {"dataset": str(tmp_path / "other")}
    scores = {"a": other | {"batch_size": 8}, "b": other | {"batch_size": 4}}
    one = rows_with(scores={"a": scores["a"]})
    assert commands == ["evaluate.py none-seed0"] and one["scores"]["a"]["labels"] == 50 * (4 + 4 + 7)
    assert list(one["scores"]["a"]["slices"]) == ["32/4", "64/4", "64/7"] and one["scores"]["a"]["step"] == 6
    two = rows_with(scores=scores)
    assert len(commands) == 1 and two["scores"]["a"] == one["scores"]["a"] and two["scores"].keys() == {"a", "b"}
    assert list(rows_with(scores={"b": scores["b"]})["scores"]) == ["b"] and not commands
    rows_with(scores=scores)
    assert not commands  # what the config did without for a while is still there
    own = rows_with(scores=scores | {"a": {"batch_size": 8}})  # on the run's own data
    assert len(commands) == 1 and own["scores"]["b"] == two["scores"]["b"] and own["scores"]["a"]["labels"] == 50 * 4
    assert all(plain[name] == own[name] for name in ("seconds", "curve", "val_loss", "versions"))
    assert saved["run_id"] == load(out / "none-seed0")["run_id"]
    assert len(read_rows(out)) == 1  # of the lines of a run the last one counts
    assert [figure.name for figure in report.figures([own], out)] == ["accuracy.png", "branch.png"]

    assert list(rows_with(scores=scores, run=False)["scores"]) == ["b"] and not commands
    assert "1 finished runs lack a score, which --run=true computes" in capsys.readouterr().out
    (out / "none-seed0" / "ckpt.pt").unlink()
    assert list(rows_with(scores=scores)["scores"]) == ["b"] and not commands
    assert f"1 finished runs have no checkpoint in {out} (none-seed0), which a score" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes, and runs that fail

GAIN = {"contrast": {"none": 1}, "above": 0}
CHOOSING = dict(selection_seeds=[5], learning_rates=[1.0])
WRONG = [
    (dict(arms={"none": {"gaet": "none"}}), "arm 'none': unknown key 'gaet' (did you mean 'gate'?)"),
    (dict(arms={"none": {}, "elementwise": {"n_head": 3}}), "n_embd=16: must be a multiple of n_head=3"),
    (dict(arms={"none": {}, "elementwise": "gla"}), "arms: elementwise: it='gla': must be a dict"),
    (dict(arms={}), "arms={}: there is nothing to run"),
    (dict(seeds=[]), "seeds=[]: there is nothing to run; add one at least"),
    (dict(arms={"none": {"dtype": "auto"}}), "arm 'none': dtype=auto is timed anew"),
    (dict(metric="val_loss", solved_above=0.9), "solved_above: is about accuracy, and metric='val_loss'"),
    (dict(scores={"longer": {"lenghts": 5}}), "score 'longer': unknown key 'lenghts' (did you mean 'lengths'?)"),
    (dict(metric="loss"), "metric='loss': must be one of accuracy, val_loss"),
    (dict(learning_rates=[0.1]), "metric='accuracy': with learning_rates it must be val_loss"),
    (dict(learning_rates=[0.1], selection_seeds=[1]), "selection_seeds=[1]: the comparison uses some of them"),
    (dict(selection_seeds=[5]), "selection_seeds: there are no learning_rates"),
    (dict(rate_of={"elementwise": "none"}), "rate_of: without selection_seeds"),
    (dict(rate_of={"none": "none"}), "rate_of: none='none': must be one of elementwise"),
    (dict(rate_of={"none": []}, **CHOOSING), "rate_of: none: it=[]: must be a text"),
    (
        dict(selection_iters=[2, 7], **CHOOSING),
        "selection_iters=[2, 7]: must be one or two, growing, none over max_iters=6",
    ),
    (dict(select_by="best"), "select_by='best': must be one of auc, last"),
    (dict(settings={"a": {"n_layr": 1}}), "unknown key 'n_layr'"),
    (dict(settings={"a": {"data": 1}}), "settings: a: data=1: must be a dict"),
    (dict(claims={"helps": {"contrast": {"gatd": 1}, "above": 0}}), "claims: helps='gatd'"),
    (dict(claims={"helps": {"contrast": {}}}), "claims: helps: contrast={}: must be a dict"),
    (dict(claims={"helps": {"contrast": {"d8": {"none": 1}}, "above": 0}}), "claims: helps: setting='d8'"),
    (dict(claims={"helps": {"contrast": {"none": "1"}, "above": 0}}), "claims: helps: none='1': must be"),
    (dict(claims={"helps": GAIN | {"above": []}}), "claims: helps: above=[]: must be a number"),
    (
        dict(claims={"helps": GAIN | {"sidse": 1}}),
        "claims: helps='sidse': must be one of contrast, above, other_than, ",
    ),
    (dict(claims={"helps": GAIN | {"sides": 3}}), "claims: helps: sides=3: must be"),
    (dict(claims={"helps": GAIN | {"other_than": 0}}), "claims: helps: other_than has two sides"),
    (dict(claims={"helps": GAIN | {"in": 1, "within": 1}}), "claims: helps: a count (in) has above"),
    (dict(claims={"helps": GAIN | {"in": 3}}), "claims: helps: in=3: is more than the seeds of its arms"),
    (dict(claims={"helps": {"contrast": {"none": 1}}}), "claims: helps: must have above, other_than or within"),
    (dict(claims={"helps": GAIN | {"of": ["lost"]}}), "claims: helps: of=['lost']: must be names"),
    (dict(claims={"helps": GAIN | {"of": ["log"]}}), "claims: helps: of=['log']: must be names"),
    (dict(claims={"helps": GAIN | {"of": [["log"]]}}), "claims: helps: of=[['log']]: must be names"),
    (dict(base={"max_iter": 5}), "unknown key 'max_iter' (did you mean 'max_iters'?)"),
    (dict(data=DATA | {"pair": 4}), "data: unknown key 'pair' (did you mean 'pairs'?)"),
    (dict(base=FLOAT32 | {"out_dir": "/tmp"}), "base: out_dir: the experiment sets it, so that its files stay in"),
    (dict(arms={"none": {"dataset": "/tmp"}}), "arms: none: dataset: the experiment sets it"),
    (dict(settings={"a": {"init_from": "/tmp"}}), "settings: a: init_from: the experiment sets it"),
    (dict(scores={"longer": {"out": "/elsewhere/a.json"}}), "scores: longer: out: the experiment sets it"),
    (dict(scores={"longer": {"checkpoint": "/tmp"}}), "scores: longer: checkpoint: the experiment sets it"),
    (dict(gpus=16), "gpus=16: is for --dry_run=true"),
]


@pytest.mark.parametrize("keys, expected", WRONG, ids=str)
def test_a_wrong_key_is_found_before_the_first_run(keys, expected, base, helpers):
    keys = dict(arms=ARMS, seeds=[0, 1], data=DATA, base=base) | keys
    assert expected in helpers.error_of(experiment.ExperimentConfig, **keys)


@pytest.mark.parametrize(
    "name", ["../../evil", "/abs", "..\\evil", "", " ", "..", ".a", "x" * 300, "a\0b", "a\nb", "\ud800"]
)
def test_a_name_that_is_no_file_name_is_refused(name):
    for kind, keys in {"arms": {}, "settings": {}, "scores": {"batch_size": 8}}.items():
        with pytest.raises(UserError, match=f"{kind}: .*: names are file names"):
            experiment.ExperimentConfig(**{"arms": ARMS, "base": FLOAT32} | {kind: {name: keys}})
    with pytest.raises(UserError, match="name: .*: names are file names"):
        experiment.ExperimentConfig(name=name, arms=ARMS, base=FLOAT32)


@pytest.mark.parametrize("name", ["/any/folder", "../x", "mqar/../..", ".", "", "mqar/", "x" * 5000, "m\0", "shards"])
def test_prepare_is_one_of_the_names_under_data_and_no_code_of_another_folder_runs(tmp_path, helpers, name):
    (tmp_path / "any").mkdir()
    (tmp_path / "any" / "prepare.py").write_text("raise SystemExit('this ran')")
    for each in (name, str(tmp_path / "any"), f"../{tmp_path.name}/any"):
        message = helpers.error_of(experiment.ExperimentConfig, arms=ARMS, base=FLOAT32, prepare=each)
        assert message.startswith("prepare=") and "must be one of backcopy, mqar, pystdlib" in message


def test_the_folder_of_somebody_else_is_refused_before_anything_is_written(run, tmp_path, commands, helpers):
    for name, content in [("model.py", "theirs"), ("rows.jsonl", '{"theirs": 1}\n'), (".nanogate", "run\n")]:
        folder = tmp_path / name.strip(".")
        folder.mkdir()
        (folder / name).write_text(content)
        for keys in (dict(seeds="0"), dict(seeds="0", run=False)):
            message = helpers.error_of(run, folder, **keys)
            said = "holds what is not of an experiment", "line 1: it has no arm", "another kind of output, 'run'"
            assert any(words in message for words in said)
        assert [file.read_text() for file in folder.iterdir()] == [content]
    assert not commands
    run(tmp_path / "model.py", run=False, overwrite=True)
    assert (tmp_path / "model.py" / "model.py").read_text() == "theirs"
    assert (tmp_path / "model.py" / ".nanogate").read_text() == "experiment\n"


def test_the_steps_of_a_run_are_those_of_train_py_with_all_its_keys():
    settings = {"as train.py has it": {"n_head": 4}, "short": {"n_head": 2, "max_iters": "1e3"}}
    base = {"n_embd": 40, "dtype": "float32"}  # alone it is wrong: 12 heads do not divide it
    config = experiment.ExperimentConfig(arms={"none": {}}, settings=settings, base=base)
    runs = experiment.runs_of(config, [0], [])
    assert [experiment.steps_of([run]) for run in runs] == [5000, 1000]


def test_a_run_that_dies_is_one_line_that_names_its_log(processes, run, tmp_path, base, helpers):
    out_dir = tmp_path / "out"
    message = helpers.error_of(run, out_dir, arms='{"none": {"block_size": 16}}', seeds="0")
    assert "none-seed0 ended with status 2: error: " in message
    assert "block_size=16 is too small" in message and str(out_dir / "none-seed0" / "log.txt") in message
    assert not (out_dir / "rows.jsonl").exists()


@pytest.fixture
def ended(mqar, tmp_path, helpers):
    """ended(status, key=value, ...) -> a job whose training was run in this process and ended with that status."""

    def call(status, **keys):
        try:
            helpers.train(mqar, tmp_path, eval_interval=1, **keys)
        except SystemExit as stopped:
            assert stopped.code == status
        (tmp_path / "log.txt").write_text("Traceback\nIndexError: list index out of range\n")
        item = {"arm": "none", "seed": 0, "data": {}, "config": {}}
        process = types.SimpleNamespace(returncode=status)
        return {"item": item, "folder": tmp_path, "process": process, "started": 0.0}

    return call


def test_a_run_that_was_not_finite_has_a_row(ended):
    row = runner.finish(PLAIN, ended(1, learning_rate=1e12, grad_clip=None, warmup_iters=0))
    assert not row["finite"] and row["accuracy"] is None
    json.dumps(row, allow_nan=False)
    assert tables.show(PLAIN, row) == "accuracy nan%"
    assert [step for step, _ in row["curve"]] == [0]


def test_a_run_that_crashed_after_an_evaluation_is_not_one_that_was_not_finite(ended, helpers):
    message = helpers.error_of(runner.finish, PLAIN, ended(1, max_iters=1))  # an exception has status 1, too
    assert "ended with status 1: IndexError: list index out of range" in message
