"""
Training: that it learns, that a run is a function of its seed alone, what it writes and what it refuses.

    python -m pytest tests/test_train.py
"""

import configurator

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import traceback
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.run import get_args_parser

import evaluate
import experiment
import model
import sample
import train
from data.mqar import prepare as mqar_prepare
from data.shards import Dataset, open_dataset
from data.writing import write_examples
from model import MIXERS
from runs import checkpoint as checkpoints
from runs import hardware, outdir, parallel

# A convolution of width 2 lets a value see its key: 20 seeds of 20 passed 97% by step 250. Without decay, a seed that
# finds the trick late still has the rate to learn it
LEARNS = dict(
    n_embd=64, short_conv=2, batch_size=32, max_iters=350, warmup_iters=20, decay_lr=False, beta2=0.99,
    eval_interval=1000, log_interval=50,
)  # fmt: skip


@pytest.fixture
def run(mqar, tmp_path, helpers):
    """run(name, key=value, ...) trains the tiny model on MQAR in the folder of that name, and returns the folder."""
    return lambda name, **keys: helpers.train(**dict(dataset=mqar, out_dir=tmp_path / name) | keys)


@pytest.fixture(scope="module")
def trained(mqar, tmp_path_factory, helpers):
    """A run of 8 steps, to look at and to start from; nobody writes to it."""
    return helpers.train(mqar, tmp_path_factory.mktemp("trained") / "out")


# ----------------------------------------------------------------------------------------------------------------------
# Learning


def test_softmax_with_a_short_convolution_learns_mqar(run, helpers):
    out = run("out", seed=0, **LEARNS)
    assert helpers.metrics(out, "eval")[-1]["accuracy"] > 0.95


# ----------------------------------------------------------------------------------------------------------------------
# A run is a function of its seed: whatever the processes, the evaluations, the restarts


@pytest.fixture
def at_step(monkeypatch):
    """at_step(act): act(step) is called at the start of every step of the runs from here on."""

    def call(act, learning_rate=train.learning_rate):
        monkeypatch.setattr(train, "learning_rate", lambda config, step: act(step) or learning_rate(config, step))

    return call


def test_only_the_last_micro_step_of_a_process_is_all_reduced(run, monkeypatch):
    class Parallel:
        def __init__(self, model):
            self.model, self.waits = model, False

        def __call__(self, *args, **keys):
            waited.append(self.waits)
            return self.model(*args, **keys)

        @contextlib.contextmanager
        def no_sync(self):
            self.waits = True
            yield
            self.waits = False

    waited = []
    monkeypatch.setattr(parallel, "DistributedDataParallel", Parallel)
    monkeypatch.setattr(parallel, "share_out", lambda model, *words: Parallel(model))
    run("out", gradient_accumulation_steps=4, max_iters=2)
    assert waited == [True, True, True, False] * 2


def test_four_micro_steps_of_different_numbers_of_labels_are_one_batch_four_times_as_large(run, mixed_mqar, helpers):
    dataset, keys = open_dataset(mixed_mqar), dict(seed=1337, batch_size=4, block_size=32)
    batches = [dataset.batch("train", 0, micro_step=m, gradient_accumulation_steps=4, **keys) for m in range(4)]
    assert len({int((targets != -100).sum()) for _, targets in batches}) > 1
    small = run("small", dataset=mixed_mqar, gradient_accumulation_steps=4, max_iters=6)
    large = run("large", dataset=mixed_mqar, batch_size=16, max_iters=6)
    assert helpers.losses(large) == pytest.approx(helpers.losses(small), rel=1e-5)


def test_dropout_is_drawn_anew_in_every_step(mqar, run, tmp_path, helpers):
    rows = np.load(mqar / "train_0000.npy")[:1]  # one row, and a rate that moves nothing: every step is the same
    about = dict(generator="tests", generator_version=1, parameters={}, seed=0, name="mqar", tokenizer="mqar")
    splits = {split: [(rows, {"slice": "32/4"})] for split in ("train", "val")}
    write_examples(tmp_path / "row", splits, vocab_size=32, **about)
    keys = dict(dataset=tmp_path / "row", learning_rate=1e-30, batch_size=1)
    plain, dropped = (helpers.losses(run(f"{p}", dropout=p, **keys)) for p in (0.0, 0.5))
    assert len(set(plain.values())) == 1
    assert len(set(dropped.values())) == 8


def test_the_seed_settles_the_run_whenever_it_evaluates_and_another_seed_gives_another(run, helpers):
    often, never = (run(f"{n}", eval_interval=n, dropout=0.1) for n in (1, 1000))
    assert helpers.losses(often) == helpers.losses(never) != helpers.losses(run("other", seed=1, dropout=0.1))
    assert [row["step"] for row in helpers.metrics(often, "eval")] == list(range(9))
    assert [row["step"] for row in helpers.metrics(never, "eval")] == [0, 8]


def test_a_batch_loaded_a_step_ahead_is_the_one_the_step_would_load(run, helpers, monkeypatch):
    loaded, trained_on, load_batches, micro_loss = [], [], train.load_batches, train.micro_loss

    def load(*args):
        loaded.append((args[-1], load_batches(*args)))
        return loaded[-1][1]

    def seen_loss(*args):
        trained_on.append(args[-2:])
        return micro_loss(*args)

    monkeypatch.setattr(train, "load_batches", load)
    monkeypatch.setattr(train, "micro_loss", seen_loss)
    run("ahead")
    assert [step for step, _ in loaded] == list(range(9))  # each once
    assert all(batch is batches[0] for (step, batch), (of, batches) in zip(trained_on, loaded, strict=False))
    assert [step for step, _ in trained_on] == list(range(8))


@pytest.mark.parametrize("keys", [dict(), dict(dropout=0.1, gradient_accumulation_steps=3)], ids=["plain", "dropout"])
def test_stop_and_resume_equals_one_run_to_the_bit(run, helpers, keys):
    keys = dict(keys, lr_decay_iters=8)
    whole = run("whole", **keys)
    run("parts", max_iters=4, **keys)
    parts = run("parts", init_from="resume", **keys)
    ours, theirs = (checkpoints.load(out / "ckpt.pt") for out in (whole, parts))
    for name in ("model", "optimizer", "scaler", "rng", "iter_num", "best_val_loss", "model_args"):
        assert helpers.equal(ours[name], theirs[name]), name
    assert helpers.equal(*(checkpoints.load(out / "best.pt")["model"] for out in (whole, parts)))
    assert helpers.without_times(helpers.metrics(whole)) == helpers.without_times(helpers.metrics(parts))


def test_resume_after_a_kill_drops_the_rows_that_are_run_again(run, helpers):
    keys = dict(lr_decay_iters=8)
    whole = run("whole", **keys)
    killed = run("killed", max_iters=4, **keys)
    rows = [json.dumps(row) for row in helpers.metrics(whole)]
    # killed after step 6, when it was writing the next line; ckpt.pt is of step 4
    kept = [row for row in rows if json.loads(row)["step"] <= 6]
    (killed / "metrics.jsonl").write_text("\n".join(kept) + '\n{"event": "tra')
    run("killed", init_from="resume", **keys)
    assert helpers.without_times(helpers.metrics(killed)) == helpers.without_times(helpers.metrics(whole))


def test_a_step_that_a_signal_stopped_at_is_evaluated_where_the_interval_asks_for_it(run, helpers, monkeypatch):
    for out, at, interval in (("a", 6, 2), ("b", 4, 4)):
        monkeypatch.setattr(hardware.Processes, "stop_signal", lambda self, step, _, at=at: 15 * (step == at))
        with pytest.raises(SystemExit):
            run(out)
        monkeypatch.undo()
        out = run(out, init_from="resume", eval_interval=interval)
        assert [row["step"] for row in helpers.metrics(out, "eval")] == sorted({0, 4, 8, at})


def test_resuming_a_finished_run_only_evaluates_it_again(run, helpers):
    out = run("out")
    before, saved = helpers.metrics(out), checkpoints.load(out)
    run("out", init_from="resume")
    assert helpers.without_times(helpers.metrics(out)) == helpers.without_times(before)
    for name in ("model", "optimizer"):
        assert helpers.equal(checkpoints.load(out)[name], saved[name])


# ----------------------------------------------------------------------------------------------------------------------
# A run that is solved ends early


@pytest.fixture
def accuracies(monkeypatch):
    """accuracies(a, b, ...) -> the evaluations of train.py from here on have these accuracies."""

    def call(*values):
        evaluate, left = train.evaluate, itertools.chain(values, itertools.repeat(0.5))
        monkeypatch.setattr(train, "evaluate", lambda *args, **keys: evaluate(*args, **keys) | {"accuracy": next(left)})

    return call


def test_two_evaluations_above_the_threshold_end_a_run_whose_files_are_whole(run, helpers, accuracies, capsys):
    keys = dict(max_iters=20, eval_interval=2)
    accuracies(0.1, 0.95, 0.9, 0.91, 0.92, 0.99)  # 0.9 is not above
    out = run("out", stop_above=0.9, **keys)
    assert [row["step"] for row in helpers.metrics(out, "eval")] == [0, 2, 4, 6, 8]
    assert helpers.metrics(out)[-1]["event"] == "end" and helpers.metrics(out)[-1]["step"] == 8
    assert "accuracy 92.0% after 8 of 20 steps (solved) in" in capsys.readouterr().out
    whole = run("whole", **keys | dict(max_iters=8, lr_decay_iters=20))
    for name in ("model", "optimizer", "rng", "iter_num"):
        assert helpers.equal(checkpoints.load(out)[name], checkpoints.load(whole)[name]), name


def test_a_solved_run_that_is_resumed_ends_at_once_and_without_the_threshold_goes_on(run, helpers, accuracies):
    keys = dict(max_iters=8, eval_interval=2)
    accuracies(0.1, 0.95, 0.95, 0.95, 0.95)
    out = run("out", stop_above=0.9, **keys)
    before = helpers.metrics(out)
    assert before[-1]["step"] == 4
    run("out", init_from="resume", **keys)
    assert helpers.without_times(helpers.metrics(out)) == helpers.without_times(before)
    run("out", init_from="resume", stop_above=None, **keys)
    assert [row["step"] for row in helpers.metrics(out, "eval")] == [0, 2, 4, 6, 8]


def test_a_run_that_is_stopped_between_two_good_evaluations_is_solved_at_the_second(run, helpers, accuracies):
    keys = dict(eval_interval=2, lr_decay_iters=20, stop_above=0.9)
    accuracies(0.1, 0.95, 0.95)
    out = run("out", max_iters=2, **keys)
    run("out", init_from="resume", max_iters=20, **keys)
    assert [row["step"] for row in helpers.metrics(out, "eval")] == [0, 2, 4]
    assert helpers.metrics(out)[-1]["event"] == "end"


# ----------------------------------------------------------------------------------------------------------------------
# Resuming


def test_resume_is_refused_without_a_checkpoint_with_other_data_and_past_the_end(run, trained, mixed_mqar, helpers):
    message = helpers.error_of(run, "nothing", init_from="resume")
    assert "ckpt.pt" in message and "no such checkpoint" in message
    message = helpers.error_of(run, trained, init_from="resume", dataset=mixed_mqar)
    assert f"{mixed_mqar}: not the data that" in message
    assert "is at step 8 already" in helpers.error_of(run, trained, init_from="resume", max_iters=7)
    assert checkpoints.load(trained)["iter_num"] == 8


# ----------------------------------------------------------------------------------------------------------------------
# Starting from the weights of another run


def test_a_gate_can_be_added_to_a_trained_model(run, trained, capsys):
    out = run("gated", init_from=trained / "best.pt", gate="elementwise", gate_activation="sigmoid2", max_iters=1)
    said = capsys.readouterr().out
    assert "14 of 16 tensors taken" in said
    gates = [f"blocks.{i}.mixer.gates.readout.proj.weight" for i in (0, 1)]
    assert f"or have another shape: {', '.join(gates)}\n" in said
    assert "left out" not in said
    # sigmoid2 of a new gate keeps the readout: the gated model begins where the other one ended
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-2])
    assert first["event"] == last["event"] == "eval" and first["step"] == 0
    assert first["val_loss"] == pytest.approx(last["val_loss"], rel=1e-6)


@pytest.mark.parametrize("given", [{}, {"rope_length": 200}])
def test_yarn_at_a_longer_context_keeps_the_trained_length(run, trained, given):
    yarn = dict(rope_scaling="yarn", rope_factor=2.0) | given
    longer = run("longer", init_from=trained, block_size=64, max_iters=1, learning_rate=1e-12, **yarn)
    as_evaluated = checkpoints.load_model(trained, **yarn)[0]  # its block_size is the trained length
    ids = torch.arange(32)[None] % 8
    with torch.no_grad():
        torch.testing.assert_close(checkpoints.load_model(longer)[0](ids), as_evaluated(ids))
    again = run("again", init_from=longer, block_size=128, max_iters=1)
    assert checkpoints.load_model(again)[0].config.rope_length == given.get("rope_length", 32)


def test_weights_of_another_shape_are_left_and_named_and_some_must_fit(run, trained, capsys, helpers):
    run("wider", init_from=trained, mlp_ratio=3, max_iters=1)
    said = capsys.readouterr().out
    assert "10 of 14 tensors taken" in said
    assert "left out: blocks.0.mlp.up.weight, blocks.0.mlp.down.weight, blocks.1.mlp" in said
    message = helpers.error_of(run, "other", init_from=trained, n_embd=20, n_head=2)
    assert "none of its weights fit this model" in message


# ----------------------------------------------------------------------------------------------------------------------
# When the numbers are not finite


@pytest.mark.parametrize(
    "keys", [{}, dict(eval_interval=2), dict(max_iters=2)], ids=["logged", "between", "at the end"]
)
def test_nan_stops_the_run_and_the_checkpoint_is_the_last_good_one(run, tmp_path, helpers, capfd, keys):
    unseen = dict(log_interval=1000) if keys else {}
    with pytest.raises(SystemExit) as stopped:
        run("out", **dict(learning_rate=1e12, grad_clip=None, warmup_iters=0) | unseen | keys)
    assert stopped.value.code == 1
    (error,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert re.search(r"is not finite at step 1, learning rate \S+; first bad tensor: output of blocks.0.", error)
    saved = checkpoints.load(tmp_path / "out")
    assert saved["iter_num"] == 0 and all(tensor.isfinite().all() for tensor in saved["model"].values())
    assert [row["event"] for row in helpers.metrics(tmp_path / "out")] == ["eval", "train", "stopped"]


# ----------------------------------------------------------------------------------------------------------------------
# What a run writes


def test_a_run_writes_its_config_its_code_its_rows_and_two_checkpoints(trained, mqar, helpers):
    written = {file.name for file in trained.iterdir()}
    assert written == {".nanogate", "config.json", "code", "metrics.jsonl", "ckpt.pt", "best.pt", "lock"}
    about = json.loads((trained / "config.json").read_text())
    config = configurator.build(train.TrainConfig, about["config"])
    assert (config.n_embd, config.vocab_size, config.dataset) == (16, 32, str(mqar))
    assert {"git_commit", "git_dirty", "versions", "command", "dtype", "n_params"} <= about.keys()
    assert (about["device"], about["threads"]) == ("cpu", 1)
    checkpoint, dataset = checkpoints.load(trained), open_dataset(mqar)
    assert checkpoint["data"]["sha256"] == dataset.sha256 and checkpoint["dtype"] == "float32"
    assert (checkpoint["data"]["tokenizer"], checkpoint["data"]["vocab_size"]) == ("mqar", 32)
    assert checkpoint["versions"]["torch"] == str(torch.__version__) and checkpoint["config"] == about["config"]
    copied = [file.relative_to(trained / "code") for file in (trained / "code").rglob("*.py")]
    assert {Path("train.py"), Path("model.py"), Path("data/shards.py")} <= set(copied)
    for name in copied:
        assert (trained / "code" / name).read_bytes() == (outdir.ROOT / name).read_bytes()


def test_the_copy_of_the_code_alone_trains_to_the_same_bits(run, trained, mqar, tmp_path, helpers):
    code = shutil.copytree(trained / "code", tmp_path / "elsewhere")
    keys = helpers.tiny | dict(dataset=mqar, out_dir=tmp_path / "again")
    words = [sys.executable, code / "train.py", *helpers.words(**keys)]
    ended = subprocess.run(list(map(str, words)), cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    ours, theirs = (checkpoints.load(out) for out in (tmp_path / "again", trained))
    for name in ("model", "optimizer", "rng", "best_val_loss", "code_sha256"):
        assert helpers.equal(ours[name], theirs[name]), name


def test_dirty_is_code_of_the_run_that_the_commit_lacks_and_a_copy_has_no_commit_of_the_repository_around_it(
    project, monkeypatch
):
    def git(*words):
        keys = ["-c", "user.name=a", "-c", "user.email=a", "-c", "init.defaultBranch=main"]
        done = subprocess.run(["git", "-C", project.parent, *keys, *words], capture_output=True, check=True)
        return done.stdout.decode().strip()

    def state():
        return outdir.git_state(outdir.code_of("train.py"))

    git("init")
    git("add", "project/train.py")
    git("commit", "-m", "a monorepo")
    assert state() == {"git_commit": None, "git_dirty": None}
    (project.parent / ".git").rename(project / ".git")
    git("-C", "project", "config", "core.quotePath", "false")
    git("-C", "project", "add", ".")
    git("-C", "project", "commit", "-m", "the project")
    clean = {"git_commit": git("-C", "project", "rev-parse", "HEAD"), "git_dirty": False}
    assert state() == clean
    (project / "results").mkdir()
    (project / "results" / "rows.jsonl").write_text("{}")
    with open(os.fsencode(project) + b"/\xff.py", "w") as file:  # a file name that is not UTF-8
        file.write("")
    append(project / "sample.py", "# no file of a run")
    assert state() == clean
    append(project / "model.py", "import a_new_mixer")
    assert state() == clean | {"git_dirty": True}
    git("-C", "project", "commit", "-am", "an edit")
    assert state()["git_dirty"] is False
    (project / "a_new_mixer.py").write_text("")  # imported, and unknown to git
    assert state()["git_dirty"] is True
    monkeypatch.setenv("PATH", "")
    assert state() == {"git_commit": None, "git_dirty": None}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of what train.py needs, to edit; a run keeps and hashes the files there."""
    for name in outdir.code_of("train.py"):
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(outdir.ROOT / name, tmp_path / "project" / name)
    monkeypatch.setattr(outdir, "ROOT", tmp_path / "project")
    return tmp_path / "project"


def append(file, line):
    with open(file, "a") as opened:
        opened.write(f"{line}\n")


def test_an_edit_is_named_on_resume_and_the_code_before_it_is_kept(run, project, tmp_path, capsys):
    out = run("out", max_iters=2)
    before = (project / "model.py").read_text()
    append(project / "model.py", "# an edit")
    append(project / "ops/loss.py", "import a_new_mixer")
    (project / "a_new_mixer.py").write_text("")  # a user's own file goes along
    run("out", max_iters=3, init_from="resume")
    assert "the code has changed since this checkpoint: model.py, ops/loss.py\n" in capsys.readouterr().out
    assert (out / "code.1" / "model.py").read_text() == before
    assert (out / "code" / "model.py").read_text() == before + "# an edit\n"
    assert (out / "code" / "a_new_mixer.py").is_file() and not (out / "code.1" / "a_new_mixer.py").exists()
    about, checkpoint = json.loads((out / "config.json").read_text()), checkpoints.load(out)
    assert about["code_sha256"] == checkpoint["code_sha256"] == outdir.code_sha256()[0]
    run("out", max_iters=4, init_from="resume")  # nothing is new
    assert "the code" not in capsys.readouterr().out and not (out / "code.2").exists()
    append(project / "plot.py", "")  # no file that a result depends on
    append(project / "data" / "shards.py", "# another")
    run("out", max_iters=5, init_from="resume")
    assert "since this checkpoint: data/shards.py\n" in capsys.readouterr().out and (out / "code.2").is_dir()


def test_metrics_hold_every_step_and_evaluation_and_end(trained, helpers):
    rows = helpers.metrics(trained)
    assert [row["step"] for row in rows if row["event"] == "train"] == list(range(8))
    assert [row["step"] for row in rows if row["event"] == "eval"] == [0, 4, 8]
    assert rows[-1]["event"] == "end" and rows[-1]["step"] == 8
    assert 0 < rows[-1]["eval_seconds"] < rows[-1]["seconds"]
    for row in rows:
        scores = {"val_loss", "perplexity", "accuracy", "labels", "slices"}
        names = {
            "train": {"loss", "lr", "grad_norm", "spike", "tokens_per_second", "mfu"},
            "eval": {"meters"} | scores,
            "end": {"seconds", "eval_seconds"} | scores,
        }[row["event"]]
        assert row.keys() == names | {"event", "step"}


def test_best_is_the_checkpoint_of_the_lowest_validation_loss(run, helpers):
    # a rate at which the loss rises again
    out = run("out", eval_interval=1, learning_rate=0.3, warmup_iters=0, max_iters=6)
    losses = {row["step"]: row["val_loss"] for row in helpers.metrics(out, "eval")}
    best, last = checkpoints.load(out / "best.pt"), checkpoints.load(out / "ckpt.pt")
    assert best["iter_num"] == min(losses, key=losses.get) != 6 == last["iter_num"]
    assert best["best_val_loss"] == last["best_val_loss"] == min(losses.values())


def test_evaluations_read_the_same_sample_and_the_end_of_a_run_the_whole_split(text, tmp_path, helpers, capsys):
    keys = dict(dtype="bfloat16", eval_tokens=70, batch_size=2, max_iters=3, eval_interval=1)
    out = helpers.train(text, tmp_path / "out", **keys)
    end, evaluations = helpers.metrics(out)[-1], helpers.metrics(out, "eval")
    assert [row["labels"] for row in evaluations] == 4 * [3 * 32] and "bits_per_byte" not in evaluations[-1]
    best = checkpoints.load(out / "best.pt")
    assert best["best_val_loss"] == min(row["val_loss"] for row in evaluations) != end["val_loss"]
    assert end["labels"] == open_dataset(text).counts("val")["tokens"] - 1
    assert f"(validation loss {best['best_val_loss']:.4f} on the sample)" in capsys.readouterr().out
    # the checkpoint alone gives the same, in the dtype of the run
    evaluate.main([f"--checkpoint={out}", "--device=cpu", "--batch_size=4"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["loss"] == end["val_loss"] and found["dtype"] == "bfloat16"
    evaluate.main([f"--checkpoint={out}", "--device=cpu", "--dtype=float32"])
    exact = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    assert exact != end["val_loss"] == pytest.approx(exact, rel=1e-2)
    helpers.train(text, out, **keys | dict(init_from="resume", max_iters=5))
    assert [row["labels"] for row in helpers.metrics(out, "eval")] == 6 * [3 * 32]
    short = helpers.metrics(helpers.train(text, tmp_path / "short", eval_whole=False, **keys))[-1]
    assert (short["labels"], short["val_loss"]) == (3 * 32, evaluations[-1]["val_loss"]) and short["event"] == "end"
    words = helpers.words(**helpers.tiny | keys | dict(dataset=text, out_dir=out, init_from="resume", eval_tokens=99))
    message = helpers.error_of(train.main, words)
    assert message.startswith("eval_tokens=99: ") and "has 70, which a resumed run keeps" in message


# ----------------------------------------------------------------------------------------------------------------------
# Learning rate, dtype, device


def test_learning_rate_warms_up_to_its_peak_and_ends_at_min_lr():
    config = train.TrainConfig(learning_rate=1.0, warmup_iters=9, max_iters=109, min_lr=0.2)
    rates = [train.learning_rate(config, step) for step in range(120)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(rates) == rates[9] == 1.0
    assert all(later < earlier for earlier, later in zip(rates[9:], rates[10:110], strict=False))
    assert rates[59] == pytest.approx(0.6)  # half-way between the two
    assert rates[109:] == pytest.approx([0.2] * 11)
    config = train.TrainConfig(learning_rate=1.0, warmup_iters=0, max_iters=50, lr_decay_iters=20)  # min_lr: a tenth
    assert train.learning_rate(config, 0) == 1.0
    assert train.learning_rate(config, 20) == train.learning_rate(config, 49) == pytest.approx(0.1)
    constant = train.TrainConfig(learning_rate=1.0, warmup_iters=1, decay_lr=False, max_iters=50)
    assert [train.learning_rate(constant, step) for step in (0, 1, 49)] == [0.5, 1.0, 1.0]


def test_the_optimizer_follows_the_schedule(trained, helpers):
    config = train.TrainConfig(**helpers.tiny)
    rates = [train.learning_rate(config, step) for step in range(9)]
    assert [row["lr"] for row in helpers.metrics(trained, "train")] == rates[:8]
    saved = checkpoints.load(trained)["optimizer"]["param_groups"]
    assert [group["lr"] for group in saved] == [rates[8]] * 2  # of the step that would follow


def test_gradients_are_clipped_to_grad_clip(run, helpers, monkeypatch):
    norms = []

    def watch(optimizer, *args, **keys):
        grads = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.stack(grads).norm()))
        return step(optimizer, *args, **keys)

    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", watch)
    before = [row["grad_norm"] for row in helpers.metrics(run("out", grad_clip=0.1), "train")]
    assert min(before) > 0.1
    assert norms == pytest.approx([0.1] * 8, rel=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_the_cpu_stays_near_float32(run, trained, helpers, dtype):
    out = run("half", dtype=dtype)
    half, full = helpers.losses(out), helpers.losses(trained)
    assert half == pytest.approx(full, rel=5e-3) and half != full
    weights = checkpoints.load(out)["model"].values()
    assert {tensor.dtype for tensor in weights} == {torch.float32}


def test_a_step_whose_float16_gradient_overflows_is_skipped_and_its_row_is_json(run, helpers, monkeypatch):
    start_too_high = functools.partial(torch.amp.GradScaler, init_scale=2.0**60)
    monkeypatch.setattr(torch.amp, "GradScaler", start_too_high)
    out = run("half", dtype="float16", max_iters=1)
    (row,) = helpers.metrics(out, "train")  # which refuses Infinity
    assert row["grad_norm"] is None and math.isfinite(row["loss"])
    before, after = helpers.metrics(out, "eval")
    assert before["val_loss"] == after["val_loss"]
    assert checkpoints.load(out)["scaler"]["scale"] == 2.0**59


class HostReads(torch.utils._python_dispatch.TorchDispatchMode):
    """Where the program reads a tensor's value or a count of its elements: there it would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.places = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if torch.Tag.data_dependent_output in function.tags or torch.Tag.dynamic_output_shape in function.tags:
            folders = (outdir.ROOT, outdir.ROOT / "ops", outdir.ROOT / "runs")
            ours = [f for f in traceback.extract_stack() if Path(f.filename).parent in folders]
            self.places.add((Path(ours[-1].filename).name, ours[-1].name, ours[-1].lineno))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mixer", "dtype"),
    [*((mixer, "bfloat16") for mixer in MIXERS), ("softmax", "float32"), ("softmax", "float16"), ("kda", "float16")],
)
def test_no_step_waits_for_a_gpu(run, text, helpers, monkeypatch, mixer, dtype):
    reads, load_batches, micro_loss, inside = HostReads(), train.load_batches, train.micro_loss, []

    def first_loss(*args):  # a step begins with it, and ends with the next one's batches
        if not inside:
            reads.__enter__()
            inside.append(True)
        return micro_loss(*args)

    def load(*args):
        batches = load_batches(*args)
        if inside:
            reads.__exit__(None, None, None)
            inside.clear()
        return batches

    monkeypatch.setattr(train, "micro_loss", first_loss)
    monkeypatch.setattr(train, "load_batches", load)
    keys = dict(dropout=0.1, gradient_accumulation_steps=2, max_iters=2, log_interval=1000)
    run("out", dataset=text, attention=mixer, gate="elementwise", dtype=dtype, **keys)
    found = collections.Counter((file, function) for file, function, _ in reads.places)
    # one read each: labels are counted before they are on the device, and forward looks at them on a CPU only
    places = [("train.py", "load_batches"), ("model.py", "forward")]
    assert found <= collections.Counter(places)
    assert found[places[0]] == 1  # or nothing was watched


def test_to_a_gpu_a_batch_goes_from_pinned_memory_without_a_wait():
    tensor, processes = mock.Mock(), types.SimpleNamespace(device_type="cuda", device="cuda:1")
    on_device = hardware.Processes.to_device(processes, tensor)
    assert on_device is tensor.pin_memory().to.return_value
    tensor.pin_memory().to.assert_called_once_with("cuda:1", non_blocking=True)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_the_peak_of_a_gpu_is_its_data_sheets_or_measured(name, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(hardware, "gemm_rate", lambda device, dtype: 7e12)
    flops, source = hardware.peak_flops("cuda", "bfloat16")
    assert flops == (expected or 7e12)
    assert (f"data sheet's for {name}" in source) is (expected is not None) is ("measured" not in source)


def test_the_peak_of_a_cpu_that_is_slow_at_the_dtype_is_float32s_which_part_of_a_step_is_in(monkeypatch):
    monkeypatch.setattr(hardware, "gemm_rate", lambda device, dtype: {"bfloat16": 1e12, "float32": 2e12}[dtype])
    assert hardware.peak_flops("cpu", "bfloat16") == (2e12, "a matrix product in float32, measured")


def test_a_gpu_that_only_emulates_bfloat16_computes_in_float16(monkeypatch):
    for emulates, dtype in ((True, "float16"), (False, "bfloat16")):  # V100 or T4; A100
        is_supported = lambda including_emulation=True, own=not emulates: own or including_emulation  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
        assert hardware.pick_dtype.__wrapped__("auto", "cuda") == dtype


def test_mfu_is_three_forward_passes_over_the_peak(run, trained, text, helpers, capsys, monkeypatch):
    monkeypatch.setattr(train, "peak_flops", lambda device, dtype: (2e9, f"a matrix product in {dtype}, measured"))
    out = run("out", dataset=text)
    assert "MFU: against 0.002 TFLOP/s a process, a matrix product in float32, measured" in capsys.readouterr().out
    flops = json.loads((out / "config.json").read_text())["flops_per_token"]
    for row in helpers.metrics(out, "train"):
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * 3 * flops / 2e9)


@pytest.mark.parametrize(
    "asked, device, steps, expected",
    [
        ("true", "cpu", 1, (True, "compile on")),
        ("false", "cuda", 9999, (False, "compile off")),
        ("auto", "cpu", 9999, (False, "compile off (auto: cpu gains little)")),
        ("auto", "cuda", 499, (False, "compile off (auto: fewer than 500 steps)")),
        ("auto", "cuda", 500, (True, "compile on (auto: a GPU, 500 steps or more)")),
    ],
)
def test_compile_auto_says_why(asked, device, steps, expected):
    is_on, words = train.is_compiled(train.TrainConfig(compile=asked, max_iters=steps), device)
    assert (is_on, words) == (expected[0], f", {expected[1]}, torch {torch.__version__}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # inductor's own
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_run_says_that_it_compiles_and_learns_the_same(run, text, helpers, capsys):
    keys = dict(dataset=text, n_layer=1, gate="elementwise", max_iters=3)
    plain, compiled = run("plain", **keys), run("compiled", compile="true", **keys)
    assert helpers.losses(compiled) == pytest.approx(helpers.losses(plain), rel=1e-4)
    said = capsys.readouterr().out
    assert "compile on, torch" in said
    assert re.search(r"compiling the model: the first step takes a while\ncompiled in \d+ s\n", said)


@pytest.mark.parametrize(
    "mixer", [pytest.param(name, marks=() if name in ("softmax", "gla") else pytest.mark.slow) for name in MIXERS]
)
def test_rows_of_four_lengths_are_compiled_once_and_learn_the_same(mixer, run, tmp_path, helpers, monkeypatch):
    data, compiled, seen = tmp_path / "data", [], set()
    mqar_prepare.main(
        helpers.words(slices="10/2,16/2,24/4,32/4", vocab_size=16, train_size=40, val_size=8, out_dir=data)
    )

    def counting(graph, inputs):
        compiled.append(graph)
        return graph

    def spied(dataset, *words, batch=Dataset.batch, **keys):
        seen.add(batch(dataset, *words, **keys | {"same_length": False})[0].shape[1])
        return batch(dataset, *words, **keys)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counting))
    monkeypatch.setattr(Dataset, "batch", spied)
    keys = dict(dataset=data, attention=mixer, gate="elementwise", n_layer=1, batch_size=1, max_iters=12)
    torch._dynamo.reset()
    out = run("compiled", compile="true", **keys)
    assert seen == {10, 16, 24, 32} and len(compiled) == 1  # evaluations at every length, too
    assert helpers.losses(out) == pytest.approx(helpers.losses(run("plain", **keys)), rel=1e-4)


def test_train_starts_without_what_only_other_scripts_need():
    heavy = "matplotlib", "transformers", "datasets", "tiktoken", "pandas", "torch._dynamo", "torch._inductor"
    code = f"import sys, train; print([name for name in {heavy} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], cwd=outdir.ROOT, capture_output=True, text=True)
    assert ended.stdout == "[]\n", ended.stderr


def test_a_run_says_what_it_runs_on(run, capsys):
    run("out", compile="false", dtype="bfloat16", max_iters=1)
    said = capsys.readouterr().out
    n_params = 32 * 16 + 2 * (4 * 16 * 16 + 2 * 2 * 16 * 16 + 2 * 16) + 16  # embedding, blocks, last norm
    assert f"2 x 16, softmax, gate none, {n_params:,} parameters" in said
    assert "device: cpu, bfloat16, 1 process(es) of 1 threads, compile off, torch" in said
    assert "32 ids, 128 tokens a step" in said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_a_run_says_that_its_float32_products_are_by_tf32(dtype):
    processes = types.SimpleNamespace(device_type="cuda", world_size=1, threads=1)
    line = train.describe_device(train.TrainConfig(), processes, dtype)
    assert line == f"device: cuda, {dtype}, float32 products by TF32, 1 process(es) of 1 threads"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_may_have_an_index_and_one_that_is_not_there_is_one_clear_line(run, helpers, monkeypatch):
    assert helpers.error_of(run, "out", device="cuda").startswith("device='cuda': this machine has none")
    assert hardware.pick_device("cpu:0") == "cpu:0"
    assert helpers.error_of(hardware.pick_device, "cuda:0").startswith("device='cuda:0': this machine has none")
    assert "device='gpu': must be one of auto, cuda, mps, cpu" in helpers.error_of(hardware.pick_device, "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [hardware.pick_device(name) for name in ("cuda", "cuda:1")] == ["cuda", "cuda:1"]
    for name in ("cuda:2", "cuda:x"):
        message = helpers.error_of(hardware.pick_device, name)
        assert message == f"device={name!r}: this machine's last one is cuda:1"


def test_a_gate_that_stays_where_it_starts_is_no_alarm_before_the_end_of_the_warmup(run, capsys):
    for warmup_iters, alarms in [(0, [2, 4, 6, 8]), (4, [4, 6, 8]), (9, [])]:
        keys = dict(gate="elementwise", learning_rate=1e-30, warmup_iters=warmup_iters, eval_interval=2)
        run(f"{warmup_iters}", **keys)
        said = re.findall(r"step (\d+): a gate has collapsed, layer 0", capsys.readouterr().out)
        assert [int(step) for step in said] == alarms


@pytest.mark.parametrize(
    "keys, notes",
    [
        (dict(gate_activation="silu"), ["gate_activation=silu changes nothing: gate is none or native"]),
        (dict(attention="gla", state_size=64), ["state_size=64 changes nothing: no layer reads it"]),
        (dict(attention="gla", gate="native", n_kv_head=1), ["n_kv_head=1 changes nothing: no layer reads it"]),
        (dict(attention="softmax,cosformer", gate="native", gate_rank=2), [
            "gate_rank=2 changes nothing: gate is none or native",
            "gate=native changes nothing: softmax,cosformer was published without a gate, so native means none",
        ]),
        (dict(rope_factor=2, gate="scalar", gate_rank=2), ["rope_factor=2.0 changes nothing: rope_scaling is none"]),
        (dict(attention="gla,mamba2", state_size=8, expand=1, gate="native", decay_lr=False, warmup_iters=3), []),
    ],
)  # fmt: skip
def test_a_key_that_was_given_and_changes_nothing_has_a_line(run, capsys, keys, notes):
    run("out", max_iters=1, **keys)
    assert re.findall("(?m)^note: (.*)$", capsys.readouterr().out) == notes


def test_without_decay_the_schedule_is_the_same_for_all_keys_that_a_run_calls_unused():
    def rates(**keys):
        config = train.TrainConfig(max_iters=20, warmup_iters=5, **keys)
        return [train.learning_rate(config, step) for step in range(20)]

    for decays in (True, False):
        for keys in (dict(min_lr=1e-4), dict(lr_decay_iters=9)):
            assert (rates(decay_lr=decays, **keys) != rates(decay_lr=decays)) is decays
    assert rates(decay_lr=False)[:5] != rates(decay_lr=False)[5:10]  # the warmup stays


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes


NANOGPT = """# config/train_gpt2.py of nanoGPT
wandb_log = True
wandb_project = 'owt'
wandb_run_name = 'gpt2-124M'
batch_size = 12
gradient_accumulation_steps = 5 * 8
eval_interval = 1000
eval_iters = 200
"""


def test_the_keys_of_nanogpt_that_are_none_here_are_named_at_once_with_what_takes_their_place(tmp_path, helpers):
    (tmp_path / "train_gpt2.py").write_text(NANOGPT)
    words = ["--backend=nccl", "--eval_only=True", '--config_override={"always_save_checkpoint": 1}']
    message = str(pytest.raises(configurator.UserError, train.main, [str(tmp_path / "train_gpt2.py"), *words]).value)
    assert message == (
        "eval_iters: no key here: eval_tokens sets the size of the fixed sample that evaluations read; "
        "eval_only: no key here: run python evaluate.py --checkpoint=out; "
        "always_save_checkpoint: no key here: leave it out, ckpt.pt is the last and best.pt the best; "
        "wandb_log, wandb_project, wandb_run_name: no key here: leave it out, metrics.jsonl and plot.py show the run; "
        "backend: no key here: leave it out, it is nccl between GPUs and gloo between CPUs"
    )
    words = ["--out_dir=out-shakespeare-char", "--init_from=resume", "--dtype=float16", "--compile=False"]
    message = helpers.error_of(sample.main, words)
    assert message.startswith("out_dir: no key here: write --checkpoint=OUT_DIR; init_from: no key here: write")
    for main, config, script in (
        (train.main, "config/experiments/minimum.py", "experiment.py"),
        (experiment.main, "config/pystdlib.py", "train.py"),
    ):
        assert script in helpers.error_of(main, [str(Path(train.__file__).parent / config)])
    assert not set(train.TrainConfig.elsewhere) & {field.name for field in dataclasses.fields(train.TrainConfig)}


def test_torchrun_takes_no_key_for_an_option_of_its_own(helpers):
    names = [field.name for field in dataclasses.fields(train.TrainConfig)] + ["config_override"]
    words = helpers.words(**dict.fromkeys(names, 1))
    parser = get_args_parser()
    assert parser.parse_args(["train.py", *words]).training_script_args == words
    # Python 3.11 looks at the words behind the script, too: torchrun's --log-dir and --logs-specs may both be --log
    options = [option.lstrip("-").replace("_", "-") for option in parser._option_string_actions]
    assert not [name for name in names for option in options if option.startswith(name.replace("_", "-"))]


def without_val(source, folder):
    """The data set without its validation split."""
    shutil.copytree(source, folder)
    meta = json.loads((folder / "meta.json").read_text())
    del meta["splits"]["val"]
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def test_what_is_wrong_with_the_data_is_said_before_anything_is_written(run, mqar, text, tmp_path, helpers):
    no_val = without_val(mqar, tmp_path / "no_val")
    for keys, expected in [
        (dict(dataset=tmp_path / "nowhere"), "nowhere/meta.json: cannot be read (No such file"),
        (dict(n_layers=2), "unknown key 'n_layers' (did you mean 'n_layer'?)"),
        (dict(device="gpu"), "must be one of auto, cpu, cuda, mps"),
        (dict(init_from="scrach"), "scrach: no such checkpoint"),
        (dict(gate="sigmoid2"), "sigmoid2 is an activation; write --gate=elementwise --gate_activation=sigmoid2"),
        (dict(dataset=no_val), "no_val: has no split 'val'; it has train"),
        (dict(block_size=31), "train has rows of 32 tokens; block_size=31 is too small"),
        (dict(vocab_size=31), "has ids up to 31"),
        (dict(dataset=text, block_size=2000), "fewer than block_size + 1 = 2001"),
    ]:
        assert expected in helpers.error_of(run, "out", **keys)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    assert "cannot be written (Not a directory)" in helpers.error_of(run, "file/out")


@pytest.mark.parametrize("steps, processes", [(4, 3), (1, 2), (2, 4)])
def test_micro_steps_that_the_processes_cannot_share_are_refused(mqar, helpers, monkeypatch, steps, processes):
    config = train.TrainConfig(dataset=str(mqar), gradient_accumulation_steps=steps)
    group = types.SimpleNamespace(world_size=processes, is_main=True, check_same=lambda *words: None)
    monkeypatch.setattr(train, "check_same_start", lambda *words: None)
    message = helpers.error_of(train.run, config, group, None, None, [])
    assert f"gradient_accumulation_steps={steps}: must be a multiple of the {processes} processes" in message


def test_a_mistake_on_the_command_line_is_one_line_and_status_2(mqar, tmp_path, helpers):
    (tmp_path / "wrong.py").write_text('"""A config of a wrong key."""\nn_layer = 2\nlearning_rat = 1\n')
    for words, expected in [
        ([tmp_path / "wrong.py"], "unknown key 'learning_rat' (did you mean 'learning_rate'?)"),
        (helpers.words(dataset=mqar, block_size=16, device="cpu"), "block_size=16 is too small"),
    ]:
        ended = helpers.script("train.py", *words)
        assert ended.returncode == 2 and ended.stdout == b""
        (line,) = ended.stderr.decode().splitlines()
        assert line.startswith("error: ") and expected in line


class UnusedBlock(model.Block):
    """A block whose edit forgot to apply what it builds."""

    def __init__(self, *args):
        super().__init__(*args)
        self.forgotten = torch.nn.Linear(2, 2)


def test_what_is_built_and_never_applied_is_an_error(run, helpers, monkeypatch):
    monkeypatch.setattr(model, "Block", UnusedBlock)
    message = helpers.error_of(run, "out", max_iters=2)
    assert "4 parameters are built and never used, first blocks.0.forgotten.weight" in message
