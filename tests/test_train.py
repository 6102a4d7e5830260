"""Training: that it learns, that a run is a function of its seed alone, what it writes and what it refuses."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import edits
import pytest
import torch

import model
import train
from base import configurator
from base.configurator import UserError
from data.mqar import prepare as mqar_prepare
from data.shards import open_dataset
from runs import checkpoint as checkpoints
from runs import hardware, loggers, outdir, parallel, probe

KEYS = dict(meters=False)


# -- A run is a function of its seed: whatever the processes, the evaluations, the restarts, the trunk it grows from ---


def test_softmax_with_a_short_convolution_learns_mqar(run, helpers):
    # a convolution of width 2 lets a value see its key: 20 seeds of 20 passed 97% by step 250
    keys = dict(n_embd=64, short_conv=2, batch_size=32, max_iters=250, warmup_iters=20, schedule="constant", beta2=0.99)
    out = run("out", seed=0, eval_interval=1000, log_interval=50, **keys)
    assert helpers.metrics(out, "eval")[-1]["accuracy"] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [name for name in model.MIXERS if name != "monarch"])  # it only finds the four values
def test_every_mixer_learns_to_recall(mixer, run, tmp_path, helpers):
    sizes = dict(slices="64/4", vocab_size=64, train_size=20_000, val_size=1000)
    mqar_prepare.main(helpers.words(out_dir=tmp_path / "data", **sizes))
    keys = dict(n_embd=64, block_size=64, short_conv=4, state_size=32, batch_size=64, warmup_iters=50)
    steps = 2000 if mixer == "mamba2" else 1000  # it stays longer at naming one of the four values in context
    out = run("out", dataset=tmp_path / "data", attention=mixer, max_iters=steps, eval_interval=200, **keys)
    reached = helpers.metrics(out, "eval")[-1]["accuracy"]
    assert reached > (0.95 if mixer in ("softmax", "gated_deltanet", "gla") else 0.60)


def test_only_the_last_micro_step_of_a_process_is_all_reduced(run, monkeypatch):
    @contextlib.contextmanager
    def no_sync(step_model):
        waits.append(True)
        yield
        waits.pop()

    waits, waited, loss = [], [], train.micro_loss
    monkeypatch.setattr(parallel, "DistributedDataParallel", model.GPT)
    monkeypatch.setattr(model.GPT, "no_sync", no_sync, raising=False)
    monkeypatch.setattr(train, "micro_loss", lambda *args: waited.append(any(waits)) or loss(*args))
    run("out", gradient_accumulation_steps=4, max_iters=2)
    assert waited == [True, True, True, False] * 2


def test_four_micro_steps_of_different_numbers_of_labels_are_one_batch_four_times_as_large(run, mixed_mqar, helpers):
    dataset, keys = open_dataset(mixed_mqar), dict(seed=1337, batch_size=4, block_size=32)
    batches = [dataset.batch("train", 0, micro_step=m, gradient_accumulation_steps=4, **keys) for m in range(4)]
    assert len({int((targets != -100).sum()) for _, targets, _ in batches}) > 1
    small = run("small", dataset=mixed_mqar, gradient_accumulation_steps=4, max_iters=6)
    large = run("large", dataset=mixed_mqar, batch_size=16, max_iters=6)
    assert helpers.losses(large) == pytest.approx(helpers.losses(small), rel=1e-5)


@pytest.mark.parametrize(("end", "n_read"), [("max_iters", 8), ("a bad shard", 4), ("SIGTERM", 8)])
def test_two_steps_are_read_ahead_and_a_reader_ends_with_its_run(end, n_read, run, tmp_path, monkeypatch, helpers):
    """What the reader raises is raised at its step."""
    load, loss, is_read = train.load_batches, train.micro_loss, [threading.Event() for _ in range(10)]

    def reader(*args, step, **keys):
        if end == "a bad shard" and step == 4:
            raise UserError(end)
        batches = load(*args, step=step, **keys)
        is_read[step].set()
        return batches

    def wait(model, config, dtype, step, batch):
        # the step waits for the reader, and not the reader for the step
        assert all(event.wait(60) for event in is_read[step : min(step + 3, n_read)])
        assert not any(event.is_set() for event in is_read[step + 3 :])
        if end == "SIGTERM" and step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(model, config, dtype, step, batch)

    monkeypatch.setattr(train, "load_batches", reader)
    monkeypatch.setattr(train, "micro_loss", wait)
    endings = {"max_iters": contextlib.nullcontext(), "SIGTERM": pytest.raises(SystemExit, match="143")}
    with endings.get(end) or pytest.raises(UserError, match=end):
        run("out")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
    assert len(helpers.losses(tmp_path / "out")) == (8 if end == "max_iters" else 4)


def test_dropout_is_drawn_anew_in_every_step(run, helpers, monkeypatch):
    load = train.load_batches  # the same rows again and again, and a rate that moves nothing: every step is the same
    monkeypatch.setattr(train, "load_batches", lambda *args, step, **keys: load(*args, step=0, **keys))
    plain, dropped = (helpers.losses(run(f"{p}", dropout=p, learning_rate=1e-30)) for p in (0.0, 0.5))
    assert len(set(plain.values())) == 1 and len(set(dropped.values())) == 8
    config = train.TrainConfig(**helpers.tiny | dict(dropout=0.5, vocab_size=32))
    net, x = train.make_model(config, None, None)[0], torch.arange(32)[None]
    first, second, again = (train.micro_loss(net, config, "float32", 3, train.Batch(m, x, x, 32)) for m in (0, 1, 0))
    assert first == again != second  # and in every micro-step


def test_the_seed_settles_the_run_whenever_it_evaluates_and_another_seed_gives_another(run, helpers):
    often, never = (run(f"{n}", eval_interval=n, dropout=0.1) for n in (1, 1000))
    assert helpers.losses(often) == helpers.losses(never) != helpers.losses(run("other", seed=1, dropout=0.1))
    assert [row["step"] for row in helpers.metrics(often, "eval")] == list(range(9))
    assert [row["step"] for row in helpers.metrics(never, "eval")] == [0, 8]


def test_best_has_a_step_that_a_signal_stopped_at_and_a_kill_kept_from_being_saved(run, helpers, monkeypatch, tmp_path):
    """The signal saves step 4 without an evaluation, and the kill comes between its row and its save."""

    def stopped(**keys):
        with monkeypatch.context() as patched, pytest.raises(BaseException):  # noqa: B017
            patched.setattr(hardware.Processes, "stop_signal", lambda self, step, _: 15 * (step == keys["at"]))
            patched.setattr(checkpoints, "save", keys.get("save", checkpoints.save))
            run("out", init_from="auto", eval_interval=2)

    def killed(*words, **keys):
        raise KeyboardInterrupt

    stopped(at=4)
    assert [row["step"] for row in helpers.metrics(tmp_path / "out", "eval")] == [0, 2]
    stopped(at=99, save=killed)
    assert [row["step"] for row in helpers.metrics(tmp_path / "out", "eval")] == [0, 2, 4]
    stopped(at=5)
    losses = [row["val_loss"] for row in helpers.metrics(tmp_path / "out", "eval")]
    assert len(losses) == 3 and min(losses) == losses[2]
    assert checkpoints.load(tmp_path / "out" / "best.pt")["iter_num"] == 4


def test_two_evaluations_above_the_threshold_end_a_run_and_best_is_the_lowest_loss(run, helpers, monkeypatch, capsys):
    keys, pairs = (
        dict(max_iters=20, eval_interval=2, schedule="constant"),
        ((0.1, 3.0), (0.95, 1.0), (0.9, 2.0), (0.91, 1.5), (0.92, 1.4)),
    )
    scores, read = iter([dict(accuracy=right, loss=nats) for right, nats in pairs]), train.evaluate  # 0.9 is not above
    monkeypatch.setattr(train, "evaluate", lambda *args, **keys: read(*args, **keys) | next(scores))
    out = run("out", stop_above=0.9, **keys)
    best = checkpoints.load(out / "best.pt")
    assert (best["iter_num"], best["best_val_loss"]) == (2, 1.0)
    assert [row["step"] for row in helpers.metrics(out, "eval")] == [0, 2, 4, 6, 8]
    assert helpers.metrics(out)[-1]["event"] == "end" and helpers.metrics(out)[-1]["step"] == 8
    assert "accuracy 92.0% after 8 of 20 steps (solved) in" in capsys.readouterr().out
    monkeypatch.undo()
    whole = run("whole", **keys | dict(max_iters=8))
    for name in ("model", "optimizer", "rng", "iter_num"):
        assert helpers.equal(checkpoints.load(out)[name], checkpoints.load(whole)[name]), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_with_the_moments_of_a_trunk_goes_on_as_the_trunk_would(run, helpers, monkeypatch, optimizer):
    keys, load = dict(optimizer=optimizer, schedule="constant"), train.load_batches
    trunk, whole = run("trunk", max_iters=4, **keys), run("whole", **keys)
    # the trunk's next ones
    monkeypatch.setattr(train, "load_batches", lambda *args, step, **keys: load(*args, step=step + 4, **keys))
    branch = run("branch", init_from=trunk, keep_moments=True, warmup_iters=0, max_iters=4, **keys)
    ours, theirs = checkpoints.load(branch), checkpoints.load(whole)
    assert helpers.equal(ours["model"], theirs["model"]) and ours["iter_num"] == 4
    assert helpers.equal(ours["optimizer"]["state"], theirs["optimizer"]["state"])


# -- What a run writes -------------------------------------------------------------------------------------------------


def test_a_run_writes_its_config_its_code_two_checkpoints_and_every_step_and_evaluation(trained, mqar, helpers):
    written = {file.name for file in trained.iterdir()}
    assert written == {".nanogate", "config.json", "code", "metrics.jsonl", "ckpt.pt", "best.pt", "lock"}
    about, checkpoint = json.loads((trained / "config.json").read_text()), checkpoints.load(trained)
    config = configurator.build(train.TrainConfig, about["config"])
    assert (config.n_embd, config.vocab_size, config.dataset) == (16, 32, str(mqar))
    assert {"git_commit", "git_dirty", "versions", "command", "dtype", "n_params"} <= about.keys()
    assert checkpoint["data"]["sha256"] == open_dataset(mqar).sha256 and checkpoint["config"] == about["config"]
    rows, scores = helpers.metrics(trained), {"val_loss", "perplexity", "accuracy", "labels", "slices"}
    names = {
        "train": {"loss", "lr", "grad_norm", "spike", "tokens_per_second", "mfu"},
        "eval": {"meters", "gate_closed", "seconds"} | scores,
        "end": {"seconds", "eval_seconds", "whole"} | scores,
    }
    assert all(row.keys() == names[row["event"]] | {"event", "step"} for row in rows)
    assert [row["step"] for row in rows if row["event"] == "train"] == list(range(8))
    assert [row["step"] for row in rows if row["event"] == "eval"] == [0, 4, 8]
    assert rows[-1]["event"] == "end" and rows[-1]["step"] == 8
    assert 0 < rows[-1]["eval_seconds"] < rows[-1]["seconds"]
    rates = [train.learning_rate(train.TrainConfig(**helpers.tiny), step) for step in range(9)]
    assert [row["lr"] for row in rows if row["event"] == "train"] == rates[:8]
    groups = checkpoint["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [rates[8]] * 2  # of the step that would follow


def test_a_logger_of_ones_own_gets_every_row_and_is_closed(run, helpers, monkeypatch):
    class Mine:
        def __init__(self, config, first_step, kept, run_id):
            made.append((config.out_dir, first_step, [row["step"] for row in kept]))

        def log(self, row):
            logged.append(row)

        def close(self):
            made.append("closed")

    made, logged = [], []
    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", Mine)  # in place of a choice of its own in keys.py
    out = run("out", logger="tensorboard", max_iters=4)
    assert made == [(str(out), 0, []), "closed"] and logged == helpers.metrics(out)
    run("out", logger="tensorboard", max_iters=5, init_from="resume")
    assert made[2] == (str(out), 4, [0, 0, 1, 2, 3, 4]) and logged[-1] == helpers.metrics(out)[-1]


def test_the_copy_of_the_code_alone_trains_to_the_same_bits(keys, trained, tmp_path, helpers):
    code = shutil.copytree(trained / "code", tmp_path / "elsewhere")
    ended = helpers.script(code / "train.py", *helpers.words(**keys("again")), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr.decode()
    ours, theirs = (checkpoints.load(out) for out in (tmp_path / "again", trained))
    for name in ("model", "optimizer", "rng", "best_val_loss", "code_sha256"):
        assert helpers.equal(ours[name], theirs[name]), name


def test_the_commit_is_that_of_the_project_itself_and_an_edit_makes_it_dirty(project, monkeypatch):
    def git(*words):
        keys = ["-c", "user.name=a", "-c", "user.email=a"]
        subprocess.run(["git", "-C", project, *keys, *words], capture_output=True, check=True)

    none = {"git_commit": None, "git_dirty": None}
    git("init")
    git("add", ".")
    git("commit", "-m", "the project")
    (project / "results" / "sink" / "none-seed0" / "code").mkdir(parents=True)
    for name in ("rows.jsonl", "results/sink/none-seed0/code/train.py"):  # no code, and what a run keeps
        (project / name).write_text("")
    clean = outdir.git_state()
    assert len(clean["git_commit"]) == 40 and clean["git_dirty"] is False
    (project / "new.py").write_text("")
    assert outdir.git_state() == clean | {"git_dirty": True}
    (project / ".git").rename(project.parent / ".git")  # a copy has no commit of the repository around it
    assert outdir.git_state() == none
    monkeypatch.setenv("PATH", "")
    assert outdir.git_state() == none


@pytest.fixture
def project(trained, tmp_path, monkeypatch):
    """A copy of what train.py needs, to edit; a run keeps and hashes the files there."""
    monkeypatch.setattr(outdir, "ROOT", shutil.copytree(trained / "code", tmp_path / "project"))
    return outdir.ROOT


def test_an_edit_is_named_on_resume_and_goes_to_the_kept_code_which_can_go_on(run, project, capsys, monkeypatch):
    out = run("out", max_iters=2)
    before = (project / "model.py").read_text()
    (project / "model.py").write_text(before + "# an edit\n")
    run("out", max_iters=3, init_from="resume")
    assert "the code has changed since this checkpoint: model.py\n" in capsys.readouterr().out
    assert (out / "code" / "model.py").read_text() == before + "# an edit\n"
    about, checkpoint = json.loads((out / "config.json").read_text()), checkpoints.load(out)
    assert about["code_sha256"] == checkpoint["code_sha256"] == outdir.code_sha256()[0]
    monkeypatch.setattr(outdir, "ROOT", out / "code")
    (out / "code" / ".#train.py").symlink_to("nobody@nowhere")  # Emacs's mark of an unsaved buffer
    assert not [name for name in outdir.code_of_the_project() if "#" in name]
    run("out", max_iters=4, init_from="resume")
    assert checkpoints.load(out)["iter_num"] == 4 and (out / "code" / "train.py").read_bytes()


def test_a_mixer_in_a_file_of_its_own_is_hashed_named_on_resume_and_kept_with_the_code(
    run, keys, project, tmp_path, capsys, helpers
):
    folder = project / "mine" / "linear"  # deeper than the files of the project
    folder.mkdir(parents=True)
    (folder / "scan.py").write_text("from model import Softmax\n\n\nclass Scan(Softmax):\n    pass\n")
    registered = "\nfrom mine.linear.scan import Scan\n\nMIXERS['scan'] = Scan\n"
    (project / "model.py").write_text((project / "model.py").read_text() + registered)
    out = run("out", max_iters=1)
    assert "mine/linear/scan.py" in checkpoints.load(out)["code_files"]
    before = outdir.code_sha256()[0]
    (folder / "scan.py").write_text((folder / "scan.py").read_text() + "# an edit\n")
    assert outdir.code_sha256()[0] != before
    run("out", max_iters=2, init_from="resume")
    assert "the code has changed since this checkpoint: mine/linear/scan.py\n" in capsys.readouterr().out
    words = helpers.words(**keys("again", max_iters=1, attention="scan"))
    ended = helpers.script(out / "code" / "train.py", *words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr.decode()
    assert checkpoints.load(tmp_path / "again")["code_sha256"] == checkpoints.load(out)["code_sha256"]


def test_the_code_of_a_run_has_every_file_that_its_process_has_imported(keys, tmp_path, helpers):
    """A process that trains notes what it has loaded by its end."""
    noted = tmp_path / "files.json"
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        f"sys.path.insert(0, {str(outdir.ROOT)!r})\n"
        "import train\n"
        f"train.main({helpers.words(**keys('out', max_iters=1))!r})\n"
        "files = [getattr(module, '__file__', None) for module in sys.modules.values()]\n"
        f"open({str(noted)!r}, 'w').write(json.dumps([file for file in files if file]))\n"
    )
    ended = helpers.script(program)
    assert ended.returncode == 0, ended.stderr.decode()
    paths = [Path(file) for file in json.loads(noted.read_text())]
    ours = [path.relative_to(outdir.ROOT) for path in paths if path.is_relative_to(outdir.ROOT)]
    loaded = {str(path) for path in ours if path.parts[0] not in (".venv", "tests")}
    hashed = set(outdir.code_sha256()[1])
    assert {"model.py", "variants.py", "data/shards.py", "runs/probe.py"} < loaded <= hashed


def test_the_code_is_every_file_but_those_of_environments_tests_and_what_runs_have_kept(project):
    before = outdir.code_of_the_project()
    left_out = ("tests/test_a.py", "config/a.py", ".hidden/a.py", "mine/env/a.py", "out/a/code/a.py", "data/a.txt")
    taken = ("mine/a.py", "mine/code/b.py", "data/mine/prepare.py")
    for name in (*left_out, *taken, "mine/env/pyvenv.cfg", "out/a/config.json"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    assert set(outdir.code_of_the_project()) - set(before) == set(taken)


def test_evaluations_read_the_same_sample_and_the_end_of_a_run_the_whole_split(run, text, helpers, evaluated, capsys):
    keys = dict(dtype="bfloat16", eval_tokens=70, batch_size=2, max_iters=3, eval_interval=1)
    out = run("out", dataset=text, **keys)
    end, evaluations = helpers.metrics(out)[-1], helpers.metrics(out, "eval")
    assert [row["labels"] for row in evaluations] == 4 * [3 * 32]
    best = checkpoints.load(out / "best.pt")
    assert best["best_val_loss"] == min(row["val_loss"] for row in evaluations) != end["val_loss"]
    assert end["labels"] == open_dataset(text).counts("val")["tokens"] - 1
    # the checkpoint alone gives the same, in the dtype of the run
    capsys.readouterr()
    found = evaluated(out, batch_size=4)
    assert found["loss"] == end["val_loss"] and found["dtype"] == "bfloat16"


def test_a_run_shorter_than_its_interval_evaluates_a_tenth_of_what_it_trains_on(run, text, helpers, capsys):
    """A step has 128 tokens, and a row 32."""
    keys = dict(dataset=text, meters=True, eval_interval=10, eval_tokens=200, eval_whole="false")
    out = run("out", max_iters=5, **keys)
    assert [row["labels"] for row in helpers.metrics(out, "eval")] == [2 * 32, 2 * 32]
    assert "shorter than eval_interval=10: evaluations read 64 tokens, a tenth" in capsys.readouterr().out
    run("out", max_iters=10, init_from="resume", **keys)  # no trial any more
    last = helpers.metrics(out, "eval")[-1]
    assert last["labels"] == 223 and "shorter than" not in capsys.readouterr().out
    # the lowest loss of another sample is no measure of this one
    assert checkpoints.load(out / "best.pt")["best_val_loss"] == last["val_loss"]
    whole = run("whole", max_iters=2, **keys | dict(eval_tokens=None))
    assert helpers.metrics(whole, "eval")[-1]["labels"] == open_dataset(text).counts("val")["tokens"] - 1


def test_meters_read_no_more_than_the_evaluation_but_four_rows(run, text, monkeypatch):
    read, rows = probe.layer_meters, []
    monkeypatch.setattr(probe, "layer_meters", lambda model, x, *args: rows.append(len(x)) or read(model, x, *args))
    run("short", dataset=text, meters=True, max_iters=5, eval_interval=10)
    run("long", dataset=text, meters=True, max_iters=3, eval_interval=3, eval_tokens=200)
    assert rows == [4, 4, 6, 6]


def test_a_run_shorter_than_a_reading_of_the_whole_split_ends_with_the_sample(run, text, helpers, capsys, monkeypatch):
    """By this clock an evaluation takes 10 s, and all between two looks at it a millisecond."""
    now, calls, read = itertools.count(0, 1e-3), [], train.evaluate
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(now) + 10 * len(calls))
    monkeypatch.setattr(train, "evaluate", lambda *args, **keys: calls.append(1) or read(*args, **keys))
    keys = dict(dataset=text, eval_tokens=70, batch_size=2, max_iters=3, eval_interval=3)
    out = run("out", **keys)
    sample, end = helpers.metrics(out, "eval")[-1], helpers.metrics(out)[-1]
    assert (end["labels"], end["val_loss"], end["whole"]) == (3 * 32, sample["val_loss"], False)
    assert f"--out_dir={out} --init_from=resume --eval_whole=true\n" in capsys.readouterr().out
    size, n_calls = open_dataset(text).counts("val")["tokens"] - 1, len(calls)
    for words in ({"eval_whole": True}, {}):  # the second one finds the end, and reads nothing
        run("out", init_from="resume", **keys | words)
        assert helpers.metrics(out)[-1] | {"labels": size, "whole": True} == helpers.metrics(out)[-1]
    assert len(calls) == n_calls + 1 and [row["event"] for row in helpers.metrics(out)].count("end") == 1
    whole = helpers.metrics(run("whole", eval_whole=True, **keys))[-1]
    assert whole["labels"] == size and whole["whole"]
    run("rows", eval_tokens=320, batch_size=2, max_iters=3, eval_interval=3)  # 4 labels in a row of 32 tokens
    assert "  measured on 40 of 1,200 labels; all of them take about 300 s:\n" in capsys.readouterr().out


# -- Learning rate, gradients, gates -----------------------------------------------------------------------------------


def rates(steps, **keys):
    config = train.TrainConfig(**dict(learning_rate=1.0, warmup_iters=1, max_iters=50) | keys)
    return [train.learning_rate(config, step) for step in steps]


def test_learning_rate_warms_up_to_its_peak_and_ends_at_min_lr():
    found = rates(range(120), warmup_iters=9, max_iters=109, min_lr=0.2)
    assert found[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(found) == found[9] == 1.0
    assert all(later < earlier for earlier, later in zip(found[9:], found[10:110], strict=False))
    assert found[59] == pytest.approx(0.6)  # half-way between the two
    assert found[109:] == pytest.approx([0.2] * 11)
    # min_lr: a tenth
    assert rates((0, 20, 49), warmup_iters=0, max_iters=20) == pytest.approx([1.0, 0.1, 0.1])


def test_wsd_is_constant_and_then_falls(helpers):
    assert rates((0, 1, 49), schedule="constant") == [0.5, 1.0, 1.0]
    steps = (0, 1, 34, 38, 43, 49, 50, 51)
    expected = [1 - (n / 16) ** 0.5 for n in (4, 9, 15)]
    assert rates(steps, schedule="wsd", decay_iters=16) == pytest.approx([0.5, 1.0, 1.0, *expected, 0, 0])
    assert rates((40, 50), schedule="wsd", min_lr=0.2) == [1.0, 0.2]  # a fifth of the steps
    assert rates((0, 1, 13), schedule="wsd", decay_iters=50) == pytest.approx([0.5, 1.0, 1 - (12 / 49) ** 0.5])
    assert "is of schedule='wsd', not of 'cosine'" in helpers.error_of(train.TrainConfig, decay_iters=3)


def test_gradients_are_clipped_to_grad_clip(run, helpers, monkeypatch):
    norms, step = [], torch.optim.AdamW.step

    def watch(optimizer):
        grads = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.stack(grads).norm()))
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", watch)
    before = [row["grad_norm"] for row in helpers.metrics(run("out", grad_clip=0.1), "train")]
    assert min(before) > 0.1
    assert norms == pytest.approx([0.1] * 8, rel=1e-4)
    none, zero = (helpers.losses(run(f"out{clip}", grad_clip=clip)) for clip in (None, 0))
    assert none == zero != helpers.losses(run("same", grad_clip=0.1))


# -- Mistakes ----------------------------------------------------------------------------------------------------------


def test_wrong_data_or_starts_are_told_before_a_file_is_written(run, trained, text, mixed_mqar, tmp_path, helpers):
    resumes, moments = dict(out_dir=trained, init_from="resume"), dict(init_from=trained, keep_moments=True)
    before = (trained / "ckpt.pt").read_bytes()
    for keys, expected in [
        (dict(block_size=31), "train has rows of 32 tokens; block_size=31 is too small"),
        (dict(vocab_size=31), "has ids up to 31"),
        (dict(dataset=text, block_size=2000), "fewer than block_size + 1 = 2001"),
        (dict(init_from="resume"), "ckpt.pt: no such checkpoint"),
        (resumes | dict(dataset=mixed_mqar), f"{mixed_mqar}: not the data that"),
        (resumes | dict(max_iters=7), "is at step 8 already"),
        (moments | dict(optimizer="muon"), f"{trained} has the moments of adamw, not of optimizer=muon"),
        (dict(keep_moments=True), "init_from='scratch' has none; name a run"),
    ]:
        assert expected in helpers.error_of(run, "out", **keys)
    assert not (tmp_path / "out").exists() and (trained / "ckpt.pt").read_bytes() == before
    moments |= dict(gate="elementwise", gate_activation="sigmoid2")  # what is found when the model has been built
    message = helpers.error_of(run, "out", **moments)
    assert "its optimizer has 14 parameters, of other names than the model's" in message
    gated = dict(optimizer="muon", gate="elementwise", max_iters=2)
    of_adamw = run("gates_in_adamw", **gated, gate_optimizer="adamw")
    message = helpers.error_of(run, "out", **gated, init_from=of_adamw, keep_moments=True)
    assert "was stepped by another optimizer: its moments have no momentum_buffer" in message


def test_what_is_built_and_never_applied_is_an_error(run, helpers, monkeypatch):
    class UnusedBlock(model.Block):
        def __init__(self, *args):
            super().__init__(*args)
            self.forgotten = torch.nn.Linear(2, 2)

    monkeypatch.setattr(model, "Block", UnusedBlock)
    message = helpers.error_of(run, "out", max_iters=2)
    assert "4 parameters are built and never used, first blocks.0.forgotten.weight" in message


def test_experts_that_get_no_token_of_a_step_are_not_unused(run, helpers, monkeypatch):
    """Each of two layers has 64 experts, and a step 32 tokens."""
    monkeypatch.setitem(model.MLPS, "sparse", edits.Sparse)
    out = run("out", mlp="sparse", batch_size=1, block_size=32, max_iters=2, eval_interval=2)
    assert len(helpers.losses(out)) == 2


def test_the_code_of_a_run_that_is_starting_and_an_environment_are_not_code_of_the_project(tmp_path):
    for mark in (".nanogate", "config.json", "nothing"):
        (tmp_path / mark / "code").mkdir(parents=True)
        (tmp_path / mark / mark).touch()
    has_code = {file.name: outdir.has_code(file / "code") for file in tmp_path.iterdir()}
    assert has_code == {".nanogate": False, "config.json": False, "nothing": True}
    (tmp_path / "env" / "conda-meta").mkdir(parents=True)
    assert not outdir.has_code(tmp_path / "env")
