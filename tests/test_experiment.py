"""
Experiments: what is run, what is kept, what is said of it.

    python -m pytest tests/test_experiment.py
"""

import dataclasses
import html
import json
import math
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import experiment
import plot
import report
from checkpoint import load
from configurator import UserError
from data.shards import open_dataset
from files import read_jsonl

ROOT = Path(__file__).resolve().parent.parent
DATA = dict(seq_len=32, vocab_size=16, pairs=4, train_size=200, val_size=50)
OTHER = dict(slices="32/4,64/4,64/7", vocab_size=16, train_size=1, val_size=50)
CONFIG = """
name = "tiny"
arms = {{"none": {{"gate": "none"}}, "elementwise": {{"gate": "elementwise"}}}}
seeds = [0, 1]
baseline = "none"
treatment = "elementwise"
data = {data}
base = {base}
"""


@pytest.fixture(scope="module")
def base(helpers):
    keys = dict(max_iters=6, eval_interval=3, learning_rate=1e-2, lr_decay_iters=6)
    return {name: value for name, value in (helpers.tiny | keys).items() if name != "threads"}


@pytest.fixture(scope="module")
def run(tmp_path_factory, base, helpers):
    """run(out_dir, key=value, ...) runs the tiny experiment, two runs at a time."""

    def call(out_dir, data=DATA, base=base, **keys):
        file = tmp_path_factory.mktemp("config") / "tiny.py"
        file.write_text(CONFIG.format(data=data, base=base))
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


@pytest.fixture
def started(monkeypatch):
    """The folders of the runs that the experiment starts from here on."""
    folders, popen = [], experiment.subprocess.Popen

    def watch(command, **keys):
        if str(command[1]).endswith("train.py"):
            folders.append(json.loads(command[-1].partition("=")[2])["out_dir"].rpartition("/")[2])
        return popen(command, **keys)

    monkeypatch.setattr(experiment.subprocess, "Popen", watch)
    return folders


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
        assert row["config"] == base | {"gate": arm, "seed": seed} and row["data"] == DATA and row["finite"]
        assert {"git_commit", "git_dirty", "versions", "step_ms", "state_bytes", "flops_per_token"} <= row.keys()
    assert rows["elementwise", 0]["n_params"] == rows["none", 0]["n_params"] + 2 * 16 * 16


def test_the_arms_of_a_seed_share_their_data_and_other_seeds_have_other_data(finished):
    for seed in (0, 1):
        gated, plain = (load(finished / f"{arm}-seed{seed}") for arm in ("elementwise", "none"))
        assert gated["data"]["sha256"] == plain["data"]["sha256"]
        assert gated["data"]["sha256"] == open_dataset(finished / "data" / f"seed{seed}").sha256
        assert open_dataset(finished / "data" / f"seed{seed}").meta["seed"] == seed
    assert load(finished / "none-seed0")["data"]["sha256"] != load(finished / "none-seed1")["data"]["sha256"]


def test_a_figure_is_drawn_and_drawn_again_from_the_rows_alone(finished, tmp_path, capsys):
    png = b"\x89PNG\r\n"
    assert (finished / "accuracy.png").read_bytes().startswith(png)
    shutil.copy(finished / "rows.jsonl", tmp_path)
    plot.main([str(tmp_path), str(finished / "none-seed0")])
    assert (tmp_path / "accuracy.png").read_bytes() == (finished / "accuracy.png").read_bytes()
    assert (finished / "none-seed0" / "page.png").read_bytes().startswith(png)
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "accuracy.png"), str(finished / "none-seed0" / "page.png")
    ]  # fmt: skip


def test_started_again_it_runs_nothing_and_says_the_same(run, copied, started, capsys):
    before = (copied / "rows.jsonl").read_bytes()
    run(copied)
    first = capsys.readouterr().out
    run(copied)
    assert capsys.readouterr().out == first
    assert not started
    assert (copied / "rows.jsonl").read_bytes() == before  # though it lies in another folder now
    assert "4 runs, 24 steps; 4 runs are done already" in first
    accuracies = [f"{rows_of(copied)['none', seed]['accuracy']:.1%}" for seed in (0, 1)]
    (line,) = [line for line in first.splitlines() if line.startswith("none ")]
    assert line.split()[1:3] == accuracies
    assert "verdict: " in first and "cost of the gate: +" in first


def test_it_runs_what_has_no_row_and_goes_on_where_a_run_was_stopped(run, copied, base, started, helpers):
    before, lines = rows_of(copied), (copied / "rows.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"arm": "none", "seed": 1' in line or '"arm": "elementwise", "seed": 0' in line]
    # one run had ended when its row was cut short; the other one was stopped after step 3
    (copied / "rows.jsonl").write_text("".join(kept) + '{"arm": "none", "se')
    stopped = copied / "elementwise-seed1"
    for name in ("metrics.jsonl", "ckpt.pt", "best.pt"):
        (stopped / name).unlink()
    data = copied / "data" / "seed1"
    helpers.train(data, stopped, **base | dict(max_iters=3, gate="elementwise", seed=1))
    run(copied)
    assert sorted(started) == ["elementwise-seed1", "none-seed0"]
    assert (copied / "rows.jsonl").read_text().startswith("".join(kept))
    assert f"resuming {stopped} at step 3" in (stopped / "log.txt").read_text()
    assert f"resuming {copied / 'none-seed0'} at step 6" in (copied / "none-seed0" / "log.txt").read_text()
    after = rows_of(copied)
    assert len(after) == 4
    for name, row in after.items():
        assert [step for step, _ in row["curve"]] == [0, 3, 6]
        assert row["curve"] == before[name]["curve"]
        assert row["val_loss"] == pytest.approx(before[name]["val_loss"], rel=1e-6)


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
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
    assert (tmp_path / "rows.jsonl").read_text() == ""


@pytest.mark.parametrize("jobs, at_a_time", [(0, 2), (4, 4)])
def test_every_gpu_has_its_run_and_with_more_jobs_as_many_as_the_others(monkeypatch, tmp_path, jobs, at_a_time):
    monkeypatch.setattr(experiment, "pick_device", lambda name: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    started, seen = [], []  # the GPU of each process; those of all that were started before one was first asked

    class Ended:
        returncode = 0

        def __init__(self, command, env, **keys):
            started.append(env["CUDA_VISIBLE_DEVICES"])

        def poll(self):
            seen.append(list(started))
            return 0

    monkeypatch.setattr(experiment.subprocess, "Popen", Ended)
    monkeypatch.setattr(experiment, "prepare", lambda config, keys, folder: folder)
    monkeypatch.setattr(experiment, "show", lambda config, row: "")
    monkeypatch.setattr(experiment, "finish", lambda config, job: job["run"] | {"seconds": 1.0})
    config = listed(jobs=jobs)
    runs = experiment.runs_of(config, config.seeds, [])
    assert len(list(experiment.run_side_by_side(config, runs, tmp_path))) == len(started) == 8
    assert sorted(seen[0]) == ["4"] * (at_a_time // 2) + ["7"] * (at_a_time // 2)
    assert started.count("4") == started.count("7") == 4


def test_what_was_run_with_other_keys_is_not_taken_for_this_run(run, copied, base, started, helpers):
    run(copied, base=base | {"n_layer": 1}, data=DATA | {"val_size": 60}, seeds="1")
    assert sorted(started) == ["elementwise-seed1", "none-seed1"]
    assert "resuming" not in (copied / "none-seed1" / "log.txt").read_text()
    assert helpers.metrics(copied / "none-seed1", "eval")[-1]["labels"] == 60 * 4
    assert load(copied / "none-seed1")["model_args"]["n_layer"] == 1
    lines = (copied / "rows.jsonl").read_text().splitlines()
    assert len(lines) == 6  # the old rows are still true of what they say
    assert [json.loads(line)["config"]["n_layer"] for line in lines] == [2] * 4 + [1] * 2


# ----------------------------------------------------------------------------------------------------------------------
# Scores of finished runs


def test_finished_runs_are_scored_on_other_data_and_the_figures_are_drawn(base, tmp_path, capsys):
    config = experiment.ExperimentConfig(
        name="scored", arms={"softmax": {}, "gla": {"attention": "gla"}}, seeds=[0], data=DATA,
        base=base | {"block_size": 64}, score_data=OTHER,
        scores={"longer": {"batch_size": 8}}, jobs=2,
    )  # fmt: skip
    rows = experiment.run_all(config, tmp_path)
    assert [row["arm"] for row in rows] == ["softmax", "gla"]
    for row in rows:
        score = row["scores"]["longer"]
        assert list(score["slices"]) == ["32/4", "64/4", "64/7"] and score["attention"] == row["arm"]
        assert score["labels"] == 50 * (4 + 4 + 7) and score["step"] == 6
    assert experiment.run_all(config, tmp_path) == rows
    title, head, *lines = experiment.slices_table([rows[0], rows[1] | {"scores": {}}]).split("\n")  # one not finite
    assert title.startswith("longer: ") and head.split() == ["arm", "32/4", "64/4", "64/7"]
    shown = [f"{value:.1%}" for value in rows[0]["scores"]["longer"]["slices"].values()]
    assert [line.split() for line in lines] == [["softmax", *shown], ["gla", "nan%", "nan%", "nan%"]]
    assert experiment.slices_table([rows[0] | {"scored": {}}]) == ""
    figures = report.figures(rows, tmp_path)
    assert [figure.name for figure in figures] == ["accuracy.png", "slices.png"]
    assert all(figure.read_bytes().startswith(b"\x89PNG") for figure in figures)


def test_an_experiment_on_text_shows_losses_and_has_no_verdict(base, tmp_path):
    made = {"attention": "cosformer", "gate": "none", "trained_length": 4}
    lengths = [{"block_size": 4, "loss": 2.0, "by_position": [[0, 3.0], [2, 1.0]]}, {"block_size": 8, "limit": "past"}]
    rows = [
        {"arm": arm, "seed": seed, "metric": "val_loss", "val_loss": 2.0 + seed, "curve": [[0, 5.0], [6, 2.0 + seed]],
         "data": {}, "config": {"attention": "cosformer", "gate": gate}, "scores": {"ntk": made | {"lengths": lengths}}}
        for arm, gate in (("plain", "none"), ("gated", "elementwise")) for seed in (0, 1)
    ]  # fmt: skip
    config = experiment.ExperimentConfig(arms={"plain": {}, "gated": {}}, seeds=[0, 1], metric="val_loss")
    assert "gated    2.0000  3.0000  2.5000" in experiment.table(config, rows)
    assert [figure.name for figure in report.figures(rows, tmp_path)] == ["val_loss.png", "lengths.png"]


def test_every_arm_is_run_at_every_rate_and_where_it_diverges_is_said(tmp_path):
    keys = dict(arms={"a": {"gate": "none"}, "b": {}}, learning_rates=[0.001, 0.1, 3], metric="val_loss")
    config = experiment.ExperimentConfig(**keys)
    runs = experiment.runs_of(config, [0], config.learning_rates)
    assert [run["arm"] for run in runs] == ["a at 0.001", "a at 0.1", "a at 3", "b at 0.001", "b at 0.1", "b at 3"]
    assert runs[2]["config"] == {"gate": "none", "learning_rate": 3, "seed": 0}
    ends = [1.0, 1.5, 2.1, 1.0, math.nan, 1.9]  # of runs that begin at 2
    about = dict(metric="val_loss", data={})
    rows = [
        run | about | {"val_loss": end, "finite": not math.isnan(end), "curve": [[0, 2.0], [6, end]]}
        for run, end in zip(runs, ends, strict=True)
    ]
    said = [line.split() for line in experiment.divergence(rows).splitlines()[1:]]
    assert said == [["a", "0.1", "3"], ["b", "3", "0.1"]]
    assert experiment.divergence(rows) in experiment.summary(config, rows, [])
    assert [figure.name for figure in report.figures(rows, tmp_path)] == ["learning_rates.png"]


# ----------------------------------------------------------------------------------------------------------------------
# The list, its parts, the rates, the claims


def made_row(run, value):
    """A row as a finished run writes it, with that accuracy."""
    row = run | {"finite": value is not None, "accuracy": value, "val_loss": 1.0, "metric": "accuracy"}
    return row | {"curve": [[0, 0.1], [50, 0.5], [100, value or 0.0]], "seconds": 36.0, "scores": {}}


def listed(**keys):
    arms = {"none": {"gate": "none"}, "gated": {"gate": "elementwise"}}
    settings = {"d16": {"n_embd": 16, "data": {"pairs": 2}}, "d32": {"n_embd": 32}}
    return experiment.ExperimentConfig(
        **dict(name="listed", arms=arms, settings=settings, seeds=[0, 1], data=DATA, base={"n_head": 2}) | keys
    )


def write_rows(out_dir, rows, name="rows.jsonl"):
    out_dir.mkdir(exist_ok=True)
    (out_dir / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_settings_and_mixers_have_figures_of_their_ends(tmp_path):
    arms = {mixer: {"attention": mixer} for mixer in ("softmax", "gla")}
    arms |= {f"{mixer} gated": keys | {"gate": "elementwise"} for mixer, keys in arms.items()}
    config = listed(arms=arms)
    rows = [made_row(run, 0.5 + 0.1 * run["seed"]) for run in experiment.runs_of(config, config.seeds, [])]
    rows[0] = made_row(rows[0], None)  # not finite: it has no end
    rows = [row | {"state_bytes": 512} for row in rows]
    assert [figure.name for figure in report.figures(rows, tmp_path)] == ["accuracy.png", "ends.png", "state.png"]
    rows = [row for row in rows if row["setting"] == "d16" and row["config"]["attention"] == "gla"]
    assert [figure.name for figure in report.figures(rows, tmp_path)] == ["accuracy.png"]


@pytest.fixture
def drawn(monkeypatch):
    """{name of a figure file: its panels}, of what report.py draws from here on."""
    panels, write = {}, report.write
    monkeypatch.setattr(
        report, "write", lambda figure, path: panels.update({path.name: figure.axes}) or write(figure, path)
    )
    return panels


def labels_of(axes):
    return {line.get_label() for line in axes.lines if not line.get_label().startswith("_")}


def test_many_arms_have_a_panel_for_each_mixer_and_scores_one_for_each_setting(tmp_path, drawn):
    kinds = {
        "none": {}, "native": {"gate": "native"}, "sigmoid": {"gate": "elementwise"},
        "matched": {"gate": "elementwise", "match_params": True},
    }  # fmt: skip
    arms = {f"{m} {kind}": {"attention": m} | keys for m in ("gla", "mamba2") for kind, keys in kinds.items()}
    config = listed(arms=arms)
    slices = {"32/4": 0.9, "64/4": 0.8, "64/8": 0.4}
    about = {"state_bytes": 512, "scores": {"longer": {"slices": slices}}}
    rows = [made_row(run, 0.5) | about for run in experiment.runs_of(config, config.seeds, [])]
    report.figures(rows, tmp_path)
    assert list(drawn) == ["accuracy.png", "state.png", "slices.png"]
    titles, chance = [axes.get_title() for axes in drawn["accuracy.png"]], {"chance among the values in context"}
    assert titles == ["gla, d16", "mamba2, d16", "gla, d32", "mamba2, d32"]
    for axes in drawn["accuracy.png"]:
        assert len(axes.lines) == 4 * 2 + 1  # arms, seeds; chance
        assert labels_of(axes) - chance == {
            "gate none", "gate native", "gate elementwise", "elementwise, parameters matched"
        }  # fmt: skip
    assert [axes.get_title().partition(":")[0] for axes in drawn["slices.png"]] == ["d16", "d16", "d32", "d32"]
    shown = {f"{mixer}, gate {gate}" for mixer in ("gla", "mamba2") for gate in ("none", "elementwise")}
    assert all(labels_of(axes) - chance == shown for axes in drawn["slices.png"])


def test_claims_may_be_about_other_numbers_of_the_rows_each_with_its_own_correction(tmp_path, drawn):
    gain = {"contrast": {"gated": 1, "none": -1}, "above": 0.01}
    longer = {"of": ["scores", "longer", "slices", "64/8"]}
    claims = {"it helps": gain, "it helps on more pairs": gain | longer, "it helps there, too": gain | longer}
    claims["it is sparse"] = {"contrast": {"gated": 1}, "above": 0.5, "of": ["meters", "gate_below_0.1", "readout"]}
    config, rows = listed(seeds=[0, 1, 2], settings={}, claims=claims), []
    for run in experiment.runs_of(config, config.seeds, []):
        noise, is_gated = run["seed"] / 1000, run["arm"] == "gated"
        row = made_row(run, 0.5 + is_gated * (0.1 + noise))
        row["scores"] = {"longer": {"slices": {"64/8": 0.3 + is_gated * (0.1 + noise)}}}
        row["meters"] = {"gate_below_0.1": {"readout": 0.2 + noise}} if is_gated else {}
        rows.append(row)
    judged = {claim["claim"]: claim for claim in experiment.judge_claims(config, rows)}
    words = ["supported", "supported", "supported", "not supported"]
    assert [claim["verdict"] for claim in judged.values()] == words
    alone, paired = judged["it helps"], judged["it helps on more pairs"]
    assert paired["p"] == pytest.approx(alone["p"]) and alone["p_holm"] == alone["p"]
    assert paired["p_holm"] == pytest.approx(2 * paired["p"])
    assert judged["it is sparse"]["by_seed"] == pytest.approx({0: 0.2, 1: 0.201, 2: 0.202})
    report.claims(list(judged.values()), tmp_path / "claims.png")
    names = ["accuracy (points)", "scores longer slices 64/8 (points)", "meters gate_below_0.1 readout (points)"]
    assert [axes.get_xlabel() for axes in drawn["claims.png"]] == names
    del rows[0]["scores"]["longer"]  # as in a run that was not finite
    assert experiment.judge_claims(config, rows)[1]["n"] == 2


def test_claims_have_a_figure_of_their_intervals_and_thresholds(tmp_path, drawn):
    claims = {"it helps": {"contrast": {"gated": 1, "none": -1}, "above": 0.05}}
    config = listed(seeds=[0, 1, 2], claims=claims)
    rows = [
        made_row(run, 0.5 + run["seed"] / 100 * (run["arm"] == "gated"))
        for run in experiment.runs_of(config, config.seeds, [])
        if run["setting"] == "d16" or run["seed"] == 0  # one seed: not run
    ]
    judged = experiment.judge_claims(config, rows)
    report.claims(judged, tmp_path / "claims.png")
    axes = drawn["claims.png"][0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["it helps, d16"]
    threshold, interval, mean = axes.lines[:3]
    assert list(interval.get_xdata()) == pytest.approx([100 * judged[0]["low"], 100 * judged[0]["high"]])
    assert list(mean.get_xdata()) == pytest.approx([1]) and list(threshold.get_xdata()) == [5]


def test_every_setting_has_every_arm_and_its_own_data():
    runs = experiment.runs_of(listed(), [0, 1], [])
    assert [experiment.name_of(run) for run in runs] == [
        "d16-none-seed0", "d16-gated-seed0", "d32-none-seed0", "d32-gated-seed0",
        "d16-none-seed1", "d16-gated-seed1", "d32-none-seed1", "d32-gated-seed1",
    ]  # fmt: skip
    assert [run["data"]["pairs"] for run in runs[:4]] == [2, 2, 4, 4]
    assert [run["config"]["n_embd"] for run in runs[:4]] == [16, 16, 32, 32]
    assert all("data" not in run["config"] for run in runs)


def test_the_shards_of_a_list_are_the_list(tmp_path, monkeypatch):
    config, ran = listed(), []

    def run_side_by_side(config, waiting, out_dir):
        for run in waiting:
            ran.append(experiment.name_of(run))
            yield made_row(run, 0.5)

    monkeypatch.setattr(experiment, "run_side_by_side", run_side_by_side)
    everything = [experiment.name_of(run) for run in experiment.runs_of(config, config.seeds, [])]
    for i in (1, 2, 3):
        rows = experiment.run_all(dataclasses.replace(config, shard=f"{i}/3"), tmp_path)
        assert (rows is None) == (i < 3)
    assert sorted(ran) == sorted(everything) and len(set(ran)) == 8
    assert [experiment.name_of(row) for row in rows] == everything
    assert experiment.run_all(config, tmp_path) == rows and len(ran) == 8


def test_rates_are_chosen_on_the_selection_seeds_and_the_seeds_run_at_them(tmp_path, monkeypatch, capsys):
    config = listed(settings={}, seeds=[0], selection_seeds=[7, 8], learning_rates=[0.001, 0.01])
    scores = {("none", 0.001): 0.6, ("none", 0.01): 0.5, ("gated", 0.001): 0.6, ("gated", 0.01): 0.7}

    def run_side_by_side(config, waiting, out_dir):
        for run in waiting:
            rate, seed = run["config"]["learning_rate"], run["seed"]
            diverged = (run["arm"], rate, seed) == ("none", 0.001, 8)  # one seed of the better rate is not finite
            yield made_row(run, None if diverged else scores[run["arm"], rate])

    monkeypatch.setattr(experiment, "run_side_by_side", run_side_by_side)
    rows = experiment.run_all(config, tmp_path)
    assert [(row["arm"], row["seed"], row["config"]["learning_rate"]) for row in rows] == [
        ("none", 0, 0.01), ("gated", 0, 0.01)
    ]  # fmt: skip
    assert "learning rate of none: 0.01" in capsys.readouterr().out
    every = report.read_rows(tmp_path)
    assert len(every) == 2 * 2 * 2 + 2
    compared = report.figures(rows, tmp_path)[0].read_bytes()
    assert report.figures(every, tmp_path)[0].read_bytes() == compared  # runs that chose a rate are in no figure
    with pytest.raises(UserError, match="no row of a compared run yet"):
        report.figures([row for row in every if "purpose" in row], tmp_path)


def test_a_folder_of_shards_is_drawn_and_a_damaged_row_is_named(finished, tmp_path):
    first, *others = (finished / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.1-of-2.jsonl").write_text(first)
    (tmp_path / "rows.2-of-2.jsonl").write_text("".join(others) + '{"cut": ')
    plot.main([str(tmp_path)])
    assert (tmp_path / "accuracy.png").read_bytes() == (finished / "accuracy.png").read_bytes()
    (tmp_path / "rows.2-of-2.jsonl").write_text("".join([others[0][:9], *others[1:]]))
    with pytest.raises(UserError, match=r"rows.2-of-2.jsonl line 1: damaged; remove the line"):
        plot.main([str(tmp_path)])


def test_one_arm_and_one_setting_may_choose_the_rate_for_others(tmp_path, capsys):
    arms = {"none": {}, "gated": {"gate": "elementwise"}, "matched": {"gate": "elementwise", "match_params": True}}
    keys = dict(selection_seeds=[7], learning_rates=[0.001, 0.01], rate_of={"matched": "gated"}, rates_at="d32")
    config = listed(arms=arms, seeds=[0], scores={"longer": {"lengths": [64]}}, run=False, **keys)
    tried = experiment.selection_runs(config)
    assert {(run["setting"], run["arm"]) for run in tried} == {("d32", "none"), ("d32", "gated")} and len(tried) == 4
    assert not any("scored" in run for run in tried)  # they only choose
    best = {"none": 0.001, "gated": 0.01}
    rows = [made_row(run, 0.9 if run["config"]["learning_rate"] == best[run["arm"]] else 0.5) for run in tried]
    chosen = experiment.choose_rates(config, rows)
    assert chosen == {(s, arm): best.get(arm, 0.01) for s in ("d16", "d32") for arm in arms}
    runs = experiment.runs_of(config, [0], config.learning_rates, chosen)
    rows += [made_row(run, 0.5) for run in runs]
    write_rows(tmp_path, rows)
    assert len(experiment.run_all(config, tmp_path)) == 6 and all(run["scored"] for run in runs)
    assert "learning rate of matched: 0.01\n" in capsys.readouterr().out
    assert experiment.choose_rates(config, rows[1:]) is None
    assert experiment.estimate(config, rows[1:]).startswith("d32-none-lr0.001-seed7 ")


def test_a_scenario_holds_where_all_its_claims_have_their_verdicts():
    claims = {name: {"contrast": {"gated": 1, "none": -1}, "above": above} for name, above in (("a", 0.1), ("b", 0.3))}
    scenarios = {
        "one": {"a": "supported", "b": "not supported"},
        "two": {"a": "not supported"},
        "three": {"a": "not run"},
    }
    config = listed(seeds=[0, 1, 2], claims=claims, scenarios=scenarios)
    rows = []
    for run in experiment.runs_of(config, config.seeds, []):
        gain = {"d16": 0.2, "d32": 0.1 * run["seed"]}[run["setting"]]
        rows.append(made_row(run, 0.5 + run["seed"] / 100 + (gain if run["arm"] == "gated" else 0)))
    said = experiment.scenarios_table(config, experiment.judge_claims(config, rows))
    assert said == "scenario, d16: one\nscenario, d32: none of them"
    none = experiment.scenarios_table(config, experiment.judge_claims(config, rows[:4]))  # one seed
    assert none == "scenario, d16: three\nscenario, d32: three"
    assert experiment.scenarios_table(listed(), []) == ""


def test_a_dry_run_lists_what_is_left_and_estimates_its_hours(tmp_path, capsys):
    config = listed(jobs=1)
    runs = experiment.runs_of(config, config.seeds, [])
    text = experiment.estimate(config, [made_row(runs[0], 0.5)]).splitlines()
    assert len(text) == 8 and text[3].startswith("d16-none-seed1") and text[3].endswith(" 36 s")  # as its arm's row
    assert not any(line.startswith("d16-none-seed0") for line in text)
    assert text[-1].startswith("7 of 8 runs to do: about ") and text[-1].endswith(" hours, 1 at a time")


def test_claims_are_judged_by_setting_and_tables_are_made_again_from_the_rows(tmp_path, capsys):
    gain = {"gated": 1, "none": -1}
    claims = {"it helps": {"contrast": gain, "above": 0.05}}  # in each setting
    claims["it helps at 16"] = {"contrast": gain, "above": 0.05, "setting": "d16"}
    claims["it helps more at 16"] = {"contrast": {"d16": gain, "d32": {"gated": -1, "none": 1}}, "above": 0.0}
    config = listed(seeds=[0, 1, 2], claims=claims, solved_above=0.75, run=False)
    value = {("d16", "none"): 0.5, ("d16", "gated"): 0.8, ("d32", "none"): 0.5, ("d32", "gated"): 0.5}
    runs = experiment.runs_of(config, config.seeds, [])
    rows = [made_row(run, value[run["setting"], run["arm"]] + run["seed"] / 1000) for run in runs]
    write_rows(tmp_path, rows)
    judged = experiment.judge_claims(config, experiment.run_all(config, tmp_path))
    assert [claim["setting"] for claim in judged] == ["d16", "d32", "d16", None]
    assert [claim["verdict"] for claim in judged] == ["supported", "not supported", "supported", "supported"]
    for claim, gained in zip(judged, (0.3, 0.0, 0.3, 0.3), strict=True):
        assert claim["by_seed"] == pytest.approx({0: gained, 1: gained, 2: gained}, abs=1e-12)
    assert "it helps, d16: supported (+0.3000, 95% interval" in experiment.claims_table(judged)
    words = [f"--config_override={json.dumps(dataclasses.asdict(config))}", f"--out_dir={tmp_path}"]
    capsys.readouterr()
    experiment.main(words)
    first = capsys.readouterr().out
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    page = html.unescape(files["report.html"].decode())
    assert "claims.png" in files and experiment.summary(config, rows, judged) in first
    assert first.split("\n\n")[1] in page and "<code>python experiment.py --config_override=" in page
    gains = experiment.gains_table(config, [row for row in rows if row["setting"] == "d16"])
    assert gains.splitlines()[1:] == ["gated    +0.3000  +0.3000 to  +0.3000"] and gains in first
    assert "gated     80.0%   80.1%   80.2%   80.1%     3/3          100" in first
    experiment.main(words)
    assert capsys.readouterr().out == first
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files


def test_the_gain_is_over_the_arm_that_lacks_the_keys_of_the_gate_and_no_others():
    gated = {"gate": "elementwise"}
    arms = {"none": {}, "static": gated | {"gate_input": "static"}, "other": gated | {"readout_norm": "none"}}
    config = listed(arms=arms, settings={}, seeds=[0, 1])
    rows = [made_row(run, 0.5 + 0.1 * (run["arm"] == "static")) for run in experiment.runs_of(config, config.seeds, [])]
    assert experiment.gains_table(config, rows).splitlines()[1:] == ["static    +0.1000  +0.1000 to  +0.1000"]


def test_which_arm_is_solved_later_is_counted_over_the_seeds_that_both_solve():
    config, reached = listed(seeds=[0, 1, 2, 3], solved_above=0.75), {"gated": (20, 10, 30, 10), "none": (10, 10, 10)}
    rows = [
        {"arm": arm, "seed": seed, "curve": [[0, 0.1], [step, 0.9]]}
        for arm, steps in reached.items()
        for seed, step in enumerate(steps)
    ]
    rows.append({"arm": "none", "seed": 3, "curve": [[0, 0.1], [10, 0.5]]})  # never solved
    said = "; solved later in 2, sooner in 0 of 3 seeds that both solve"
    assert experiment.said_of_steps(config, rows, "gated", "none") == said
    assert experiment.said_of_steps(config, rows[-1:], "gated", "none") == ""
    assert experiment.said_of_steps(listed(), rows, "gated", "none") == ""


def test_what_is_there_is_shown_before_the_rest_has_run(tmp_path, capsys):
    config = listed(baseline="none", treatment="gated", claims={"it helps": {"contrast": {"gated": 1}, "above": 0.5}})
    runs = experiment.runs_of(config, config.seeds, [])
    write_rows(tmp_path, [made_row(runs[0], 0.4)])  # of one arm, in one setting
    keys = dataclasses.asdict(config) | {"run": False}
    experiment.main([f"--config_override={json.dumps(keys)}", f"--out_dir={tmp_path}"])
    said = capsys.readouterr().out
    assert "7 of 8 runs have no row yet" in said and "d32: no run of it has a row yet" in said
    assert "verdict:" not in said and "it helps, d16: not run" in said and "it helps, d32: not run" in said


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes, and runs that fail


def test_a_wrong_key_is_found_before_the_first_run(run, tmp_path, base, started, helpers):
    for keys, expected in [
        (
            dict(arms='{"none": {"gaet": "none"}, "elementwise": {}}'),
            "arm 'none': unknown key 'gaet' (did you mean 'gate'?)",
        ),
        (dict(arms='{"none": {}, "elementwise": {"n_head": 3}}'), "n_embd=16: must be a multiple of n_head=3"),
        (dict(arms='{"none": {}, "elementwise": "gla"}'), "arms: elementwise='gla': must be a dict"),
        (dict(arms='{"none": {}}'), "arms='elementwise': must be one of none"),
        (dict(treatment="gla"), "arms='gla': must be one of none, elementwise"),
        (dict(scores='{"longer": {"lenghts": 5}}'), "score 'longer': unknown key 'lenghts' (did you mean 'lengths'?)"),
        (dict(metric="loss"), "metric='loss': must be one of accuracy, val_loss"),
        (dict(learning_rates="0.1"), "metric='accuracy': with learning_rates it must be val_loss"),
        (dict(learning_rates="0.1", selection_seeds="1"), "selection_seeds=[1]: the comparison uses some of them"),
        (dict(selection_seeds="5"), "selection_seeds: there are no learning_rates"),
        (dict(rate_of='{"elementwise": "none"}'), "rate_of, rates_at: without selection_seeds"),
        (dict(rate_of='{"none": "none"}'), "rate_of: none='none': must be one of elementwise"),
        (dict(rates_at="large"), "rates_at='large'"),
        (dict(scenarios='{"A": "C"}'), "scenarios: A='C': must be a dict"),
        (dict(scenarios='{"A": {"it helps": "supported"}}'), "scenarios: A='it helps'"),
        (dict(shard="3/2"), "shard='3/2': write i/n"),
        (dict(settings='{"a": {"n_layr": 1}}'), "unknown key 'n_layr'"),
        (dict(claims='{"helps": {"contrast": {"gatd": 1}, "above": 0}}'), "claims: helps"),
        (dict(claims='{"helps": {"contrast": {}}}'), "claims: helps: must have a contrast and above"),
        (dict(claims='{"helps": {"contrast": {"d8": {"gated": 1}}, "above": 0}}'), "claims: helps: setting"),
        (dict(base=base | {"max_iter": 5}), "unknown key 'max_iter' (did you mean 'max_iters'?)"),
        (dict(data=DATA | {"pair": 4}), "prepare.py failed: error: config_override: unknown key"),
        (dict(prepare="mqra"), "prepare.py failed"),
    ]:
        assert expected in helpers.error_of(run, tmp_path / "out", **keys)
    assert not started


def test_the_steps_of_a_run_are_those_of_train_py_with_all_its_keys():
    settings = {"as train.py has it": {"n_head": 4}, "short": {"n_head": 2, "max_iters": "1e3"}}
    base = {"n_embd": 40}  # alone it is wrong: 12 heads do not divide it
    config = experiment.ExperimentConfig(arms={"none": {}}, settings=settings, base=base)
    runs = experiment.runs_of(config, [0], [])
    assert [experiment.steps_of([run]) for run in runs] == [5000, 1000]


def test_a_run_that_dies_is_one_line_that_names_its_log(run, tmp_path, base, helpers):
    out_dir = tmp_path / "out"
    arms = '{"none": {"block_size": 16}, "elementwise": {}}'
    message = helpers.error_of(run, out_dir, arms=arms, seeds="0", base=base | {"max_iters": 100_000})
    assert "none-seed0 ended with status 2: error: " in message
    assert "block_size=16 is too small" in message and str(out_dir / "none-seed0" / "log.txt") in message
    assert (out_dir / "rows.jsonl").read_text() == ""


PLAIN = experiment.ExperimentConfig()


@pytest.fixture
def ended(mqar, tmp_path, helpers):
    """ended(status, key=value, ...) -> a job whose training was run in this process and ended with that status."""

    def call(status, **keys):
        try:
            helpers.train(mqar, tmp_path, eval_interval=1, **keys)
        except SystemExit as stopped:
            assert stopped.code == status
        (tmp_path / "log.txt").write_text("Traceback\nIndexError: list index out of range\n")
        run = {"arm": "none", "seed": 0, "data": {}, "config": {}}
        process = types.SimpleNamespace(returncode=status)
        return {"run": run, "folder": tmp_path, "process": process, "scores": [], "started": 0.0}

    return call


def test_a_run_that_was_not_finite_has_a_row(ended):
    row = experiment.finish(PLAIN, ended(1, learning_rate=1e12, grad_clip=None, warmup_iters=0))
    assert not row["finite"] and row["accuracy"] is None
    json.dumps(row, allow_nan=False)
    assert experiment.show(PLAIN, row) == "accuracy nan%"
    assert [step for step, _ in row["curve"]] == [0]


def test_a_run_that_crashed_after_an_evaluation_is_not_one_that_was_not_finite(ended, helpers):
    message = helpers.error_of(experiment.finish, PLAIN, ended(1, max_iters=1))  # an exception has status 1, too
    assert "ended with status 1: IndexError: list index out of range" in message


# ----------------------------------------------------------------------------------------------------------------------
# Judging


def judging(arms, **keys):
    return experiment.ExperimentConfig(arms=arms, baseline="none", treatment="elementwise", **keys)


def judged(plain, gated, **keys):
    """The verdict on made-up accuracies, seed by seed; None is a run that was not finite."""
    config = judging({"none": {}, "elementwise": {}}, **keys)
    rows = [
        {"arm": arm, "seed": seed, "accuracy": accuracy or math.nan, "finite": accuracy is not None}
        for arm, accuracies in (("none", plain), ("elementwise", gated))
        for seed, accuracy in enumerate(accuracies)
    ]
    return experiment.verdict(config, rows)


@pytest.mark.parametrize(
    "plain, gated, expected",
    [
        ([0.54, 0.30, 0.50], [0.76, 0.99, 0.80], "success"),
        ([0.54, 0.30, 0.56], [0.76, 0.99, 0.80], "in between"),  # one seed of the baseline is too good
        ([0.54, 0.30, 0.50], [0.76, 0.99, 0.75], "in between"),  # one seed of the treatment is not above
        ([0.50, 0.60, 0.70], [0.53, 0.63, 0.72], "failure"),
        ([0.50, 0.60, 0.70], [0.47, 0.58, 0.70], "failure"),
        ([0.50, 0.60, 0.70], [0.54, 0.64, 0.74], "in between"),
        ([0.90, 0.90, 0.90], [0.30, 0.30, 0.30], "in between"),  # the gate harms: neither of the two
        ([0.50, 0.50, 0.50], [0.80, 0.80, None], "failure (a run was not finite)"),
        ([0.50, None, 0.50], [0.80, 0.80, 0.80], "failure (a run was not finite)"),
    ],
)
def test_verdict_follows_the_rules_of_the_config(plain, gated, expected):
    assert judged(plain, gated).startswith(expected)


def test_the_rules_are_keys_of_the_config():
    plain, gated = [0.5, 0.6], [0.7, 0.8]
    assert judged(plain, gated).startswith("in between")
    assert judged(plain, gated, success_above=0.65, success_below=0.61).startswith("success")
    assert judged(plain, gated, failure_within=0.21).startswith("failure")
    assert "(elementwise - none = +20.0 points over 2 seeds;" in judged(plain, gated)


def test_other_arms_than_the_two_do_not_count():
    config = judging({"none": {}, "elementwise": {}, "conv": {}})
    scores = {"none": 0.4, "elementwise": 0.9, "conv": math.nan}
    rows = [{"arm": arm, "seed": 0, "accuracy": x, "finite": not math.isnan(x)} for arm, x in scores.items()]
    assert experiment.verdict(config, rows).startswith("success")
