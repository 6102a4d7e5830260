"""Nothing is lost: training processes are killed at any moment and go on to the same bits. Signals save and leave."""

import functools
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import wait_until

import model
import train
from base import configurator, files
from base.configurator import UserError
from runs import checkpoint as checkpoints
from runs import hardware, outdir
from runs.checkpoint import load_model
from runs.resume import where_to_start

KILLS = int(os.environ.get("NANOGATE_KILLS", 100))
# a forked process has torch at once: a kill costs a fraction of a second, and is as real as any
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train", "torch._dynamo"])  # which optimizers import

MIXERS = ("softmax", "cosformer", "gla", "mamba2", "gated_deltanet")
VALUES = dict(  # of the cases in turn
    gate=("elementwise", "none"), eval_interval=(3, 5, 1, 7), dropout=(0.1, 0.1, 0.0)
)
CASES = {
    f"{mixer}-{dtype}": dict(attention=mixer, dtype=dtype) | {key: of[i % len(of)] for key, of in VALUES.items()}
    for i, (mixer, dtype) in enumerate(itertools.product(MIXERS, ("float32", "bfloat16", "float16")))
}
KEYS = dict(gradient_accumulation_steps=2, max_iters=14, n_layer=1, n_embd=32)


def train_in_any_dtype(words):
    hardware.TOO_SLOW.clear()  # float16 is refused on a CPU; its loss scale is for GPUs, and is tested here without
    train.main(words)


def start(keys, helpers):
    """train.py in a process of its own."""
    process = FORKS.Process(target=train_in_any_dtype, args=(helpers.words(**keys),))
    process.start()
    return process


def end(process):
    process.join(120)
    assert process.exitcode is not None, "hangs"
    return process.exitcode


def check_same_run(ours, theirs, helpers):
    """Parameters, optimizer, scale, random state, samples and all rows are those of the other run."""
    for name in ("ckpt.pt", "best.pt"):
        a, b = (checkpoints.load(out / name) for out in (ours, theirs))
        for part in ("model", "optimizer", "scaler", "rng", "iter_num", "best_val_loss"):
            assert helpers.equal(a[part], b[part]), (name, part)
    one, other = (helpers.without_times(helpers.metrics(out)) for out in (ours, theirs))
    assert one == other
    samples = [load_model(out)[0].generate(torch.tensor([[3, 20]]), 20, temperature=0) for out in (ours, theirs)]
    assert torch.equal(*samples)
    assert sorted(f.name for f in ours.iterdir()) == sorted(f.name for f in theirs.iterdir())


def kill_at_random(process, out, rng, seconds):
    """SIGKILL at a random moment; every other time, at a random moment of a checkpoint's writing. How it was hit."""
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0.0, 0.7 * seconds))
    else:
        writes, deadline = rng.randrange(8), time.monotonic() + 2 * seconds
        while process.is_alive() and time.monotonic() < deadline:
            if list(out.glob(".*.pt.*.tmp")):
                if writes == 0:
                    break
                writes -= 1
                time.sleep(0.002)  # until the next file
    process.kill()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        return "ended"
    left = [file.name for file in out.glob(".*.tmp")]
    return f"while it wrote {left[0][1:-21]}" if left else "between"


@pytest.fixture
def kill_and_compare(keys, helpers):
    """Where each kill hit of up to `kills` kills of a run, which then goes on to its end, with the bits of another."""

    nothing = FORKS.Process(target=int)  # the first process also starts the server, for seconds
    nothing.start()
    end(nothing)

    def call(name, case, kills, rng):
        began = time.monotonic()
        assert end(start(keys(f"whole-{name}", **case), helpers)) == 0
        seconds, hits, killed = time.monotonic() - began, [], keys(name, init_from="auto", **case)
        killed["out_dir"].mkdir()
        for _ in range(kills):
            process = start(killed, helpers)
            hits.append(kill_at_random(process, killed["out_dir"], rng, seconds))
            if hits[-1] == "ended":
                assert process.exitcode == 0
                hits.pop()
                break
        assert end(start(killed, helpers)) == 0
        check_same_run(keys(f"whole-{name}")["out_dir"], killed["out_dir"], helpers)
        return hits

    return call


def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(kill_and_compare):
    rng = random.Random(0)
    hits = [kill_and_compare(name, CASES[name], 2, rng) for name in ("softmax-bfloat16", "gla-float16")]
    assert any(hits)  # a fast machine ends before some of the kills


def test_a_run_that_ends_in_its_first_step_goes_on_without_moments(run, helpers, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(train, "micro_loss", lambda *args: sys.exit(1))
        run("stopped")
    assert helpers.losses(run("stopped", init_from="resume")) == helpers.losses(run("whole"))


@pytest.mark.slow
def test_killed_runs_of_every_mixer_and_dtype_end_with_the_same_bits(kill_and_compare):
    hits, seed = [], int(os.environ.get("NANOGATE_SEED", 1))
    for name, case in itertools.cycle(CASES.items()):
        if len(hits) >= KILLS:
            break
        hits += kill_and_compare(f"{name}-{len(hits)}", case, 8, random.Random(f"{seed} {len(hits)}"))
    counted = {how: hits.count(how) for how in sorted(set(hits))}
    print(f"\n{len(hits)} kills: {json.dumps(counted)}")


# -- Signals -----------------------------------------------------------------------------------------------------------


def wait_for_step(out, step, is_alive):
    file = out / "metrics.jsonl"
    wait_until(lambda: file.is_file() and f'"step": {step},' in file.read_text(), is_alive)


def test_a_signal_saves_the_step_reached_and_the_run_goes_on_to_the_same_bits(keys, helpers):
    case = dict(dropout=0.1, eval_interval=10, max_iters=100)
    whole = helpers.train(**keys("whole", **case))
    stopped, step = keys("stopped", init_from="auto", **case), 0
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = start(stopped, helpers)
        wait_for_step(stopped["out_dir"], step + 6, process.is_alive)
        time.sleep(random.uniform(0, 0.1))  # in the middle of anything
        os.kill(process.pid, number)
        assert end(process) == status
        before, step = step, checkpoints.load(stopped["out_dir"])["iter_num"]
        assert before + 7 <= step < 100 and list(helpers.losses(stopped["out_dir"])) == list(range(step))
    helpers.train(**stopped)
    check_same_run(whole, stopped["out_dir"], helpers)


def stop_in(number, act, patch):
    """act() comes in the second batch of the evaluation of that number, counted from 1. Returns the list of all batches
    that evaluations have begun, each by the number of its evaluation."""
    evaluate, evaluations, batches = train.evaluate, itertools.count(1), []

    def acting(*words, before_batch, **given):
        this = next(evaluations)

        def before():
            batches.append(this)
            if this == number and batches.count(this) == 2:
                act()
            before_batch()

        return evaluate(*words, before_batch=before, **given)

    patch.setattr(train, "evaluate", acting)
    return batches


def kill(out, step):
    """Ends train.py by an exception that nothing in it catches, once the save of the step is on the disk."""
    assert checkpoints.load(out / "ckpt.pt")["iter_num"] == step
    pytest.exit("killed")


# evaluations before, between and behind the steps, and that of the whole split: its number, its step
CASES_OF_EVALUATIONS = [(1, 0), (2, 4), (3, 8), (4, 8)]


@pytest.mark.parametrize(("number", "step"), CASES_OF_EVALUATIONS)
def test_a_stopped_evaluation_loses_no_step_and_is_made_again(number, step, run, helpers, monkeypatch, capfd):
    case = dict(max_iters=8, eval_interval=4, eval_tokens=2000, eval_whole=True)
    whole = run("whole", **case)
    for name, status in (("SIGTERM", 143), ("SIGKILL", None)):
        out = whole.parent / name
        act = functools.partial(signal.raise_signal, signal.SIGTERM) if status else functools.partial(kill, out, step)
        with monkeypatch.context() as patch, pytest.raises((SystemExit, pytest.exit.Exception)) as ended:
            batches = stop_in(number, act, patch)
            run(name, **case)
        assert getattr(ended.value, "code", None) == status
        assert batches.count(number) == 2 and max(batches) == number  # no batch comes behind the signal, and no step
        assert checkpoints.load(out)["iter_num"] == step
        said = capfd.readouterr()
        assert (f"\nSIGTERM: the run saves and ends; it is at step {step}, last saved {step}" in said.err) == (
            name == "SIGTERM"
        )
        assert (f"SIGTERM: saved at step {step} of 8; " in said.out) == (name == "SIGTERM")
        run(name, init_from="resume", **case)
        check_same_run(whole, out, helpers)


@pytest.mark.parametrize("save_interval", [2, 8])
def test_with_a_save_interval_a_stop_in_an_evaluation_costs_the_steps_since_the_save_or_none(
    save_interval, run, helpers, monkeypatch
):
    case = dict(max_iters=12, eval_interval=4, save_interval=save_interval, eval_tokens=2000, eval_whole=False)
    whole = run("whole", **case)
    assert [row["step"] for row in helpers.metrics(whole, "eval")] == [0, 4, 8, 12]
    saved = []
    save = train.save

    def noted(run, is_best):
        saved.append(run.step)
        save(run, is_best)

    for name, last in (("SIGTERM", 4), ("SIGKILL", 4 // save_interval * save_interval)):
        out = whole.parent / name
        act = functools.partial(signal.raise_signal, signal.SIGTERM)
        if name == "SIGKILL":
            act = functools.partial(kill, out, last)
        with monkeypatch.context() as patch, pytest.raises((SystemExit, pytest.exit.Exception)):
            stop_in(2, act, patch)
            run(name, **case)
        assert checkpoints.load(out)["iter_num"] == last
        with monkeypatch.context() as patch:
            patch.setattr(train, "save", noted)
            run(name, init_from="resume", **case)
        check_same_run(whole, out, helpers)
    assert set(saved) <= set(range(0, 13, save_interval)) | {12}  # best.pt, too


def test_what_a_signal_does_is_printed_when_it_comes_and_what_a_second_one_does(run, monkeypatch, capfd):
    loss = train.micro_loss

    def signalled(model, config, dtype, step, batch):
        if step == 5:
            signal.raise_signal(signal.SIGINT)
            said = "SIGINT: the run saves and ends; it is at step 5, last saved 4. A second"
            assert said in capfd.readouterr().err
        return loss(model, config, dtype, step, batch)

    monkeypatch.setattr(train, "micro_loss", signalled)
    with pytest.raises(SystemExit, match="130"):
        run("out", gradient_accumulation_steps=1, eval_interval=4)
    assert "SIGINT: saved at step 6 of 14; --init_from=resume" in capfd.readouterr().out


def test_under_nohup_a_closed_terminal_is_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with hardware.signals_to(pytest.fail):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


# -- What resume refuses, and says -------------------------------------------------------------------------------------


def test_resume_refuses_another_model_and_says_what_else_is_new(keys, helpers, capsys):
    out = helpers.train(**keys("out", max_iters=4))
    for name, value, was in [
        ("n_layer", 3, 1), ("attention", "gla", "softmax"), ("dtype", "bfloat16", "float32"),
        ("eval_tokens", None, 100000), ("block_size", 64, 32), ("optimizer", "muon", "adamw"),
    ]:  # fmt: skip
        message = helpers.error_of(helpers.train, **keys("out", init_from="resume", **{name: value}))
        assert message.startswith(f"{name}={value}: {out}/ckpt.pt has {was}, which a resumed run keeps; leave")
    message = helpers.error_of(helpers.train, **keys("out", init_from="resume", attention="gated"))
    assert message.startswith(f"gate=elementwise: {out}/ckpt.pt has none, which a resumed run keeps; leave")
    capsys.readouterr()
    nothing = dict(keep_moments=True)
    helpers.train(**keys("out", init_from="resume", max_iters=5, learning_rate=1e-3, vocab_size=None, **nothing))
    said = capsys.readouterr().out
    assert all(f"note: {name}={value} changes nothing: " in said for name, value in nothing.items())
    changed = re.findall("(?m)^(.*), where the checkpoint has (.*)$", said)
    assert changed == [("max_iters: 5", "4"), ("learning_rate: 0.001", "0.003")]


def test_a_resumed_run_has_its_checkpoints_keys_then_a_files_then_the_command_lines(keys, helpers, tmp_path, capsys):
    case = dict(seed=7, dropout=0.1, schedule="constant", weight_decay=0.3, beta2=0.9)
    whole = helpers.train(**keys("whole", **case))
    out = helpers.train(**keys("out", **case) | dict(max_iters=4))
    train.main([f"--out_dir={out}", "--init_from=resume", "--max_iters=14"])
    check_same_run(whole, out, helpers)
    assert re.findall("(?m)^(.*), where the checkpoint", capsys.readouterr().out) == ["max_iters: 14"]
    (tmp_path / "more.py").write_text("max_iters = 15\nlearning_rate = 1e-3\nweight_decay = 0.2\n")
    train.main([str(tmp_path / "more.py"), f"--out_dir={out}", "--init_from=resume", "--weight_decay=0.1"])
    now = checkpoints.load(out)
    config, group = now["config"], now["optimizer"]["param_groups"][0]
    assert (config["max_iters"], config["learning_rate"], config["seed"]) == (15, 1e-3, 7)
    assert config["weight_decay"] == group["weight_decay"] == 0.1 and group["betas"] == (0.9, 0.9)


WSD, LINEAR = dict(schedule="wsd", decay_iters=2), dict(attention="gated_deltanet")


@pytest.mark.parametrize(
    ("had", "start", "given", "has"),
    [
        (WSD, "resume", dict(decay_iters=3), dict(schedule="wsd", decay_iters=3)),
        (WSD, "resume", dict(schedule="wsd"), dict(schedule="wsd", decay_iters=2)),
        (WSD, "resume", dict(schedule="constant"), dict(schedule="constant", decay_iters=None)),
        (WSD, "auto", dict(schedule="constant"), dict(schedule="constant", decay_iters=None)),
        (dict(schedule="constant"), "resume", dict(schedule="cosine"), dict(schedule="cosine")),
        (dict(min_lr=1e-5), "resume", dict(schedule="wsd"), dict(min_lr=None)),
        (LINEAR, "resume", dict(beta_max=1.0, head_dim=None), dict(attention="gated_deltanet", beta_max=1.0)),
        (dict(attention="gated"), "resume", dict(attention="gated"), dict(attention="softmax", gate="elementwise")),
        (LINEAR, "out/ckpt.pt", dict(levels="log_linear"), dict(attention="gated_deltanet", levels="log_linear")),
    ],
    ids=str,
)
def test_keys_that_are_given_are_read_with_those_of_the_checkpoint(had, start, given, has, run, helpers, monkeypatch):
    monkeypatch.chdir(run("out", max_iters=1, **had).parent)
    out_dir = "out" if start in ("resume", "auto") else "another"
    words = helpers.words(out_dir=out_dir, init_from=start, max_iters=9, **given)
    config, user_keys, *_ = where_to_start(configurator.read_words(train.TrainConfig, words))
    assert {name: getattr(config, name) for name in has} == has and config.max_iters == 9
    assert user_keys.keys() >= {"out_dir", "init_from", "max_iters", *given}


def test_a_run_goes_on_from_a_checkpoint_that_has_keys_which_are_gone_and_a_command_line_may_not(keys, helpers):
    out = helpers.train(**keys("out", max_iters=4))
    old = checkpoints.load(out)
    gone = {"shards": 2, "gather_dtype": "auto", "checkpoint": "whole"}
    checkpoints.save(out / "ckpt.pt", old | {"config": old["config"] | gone})
    helpers.train(**keys("out", init_from="resume", max_iters=5))
    assert checkpoints.load(out)["config"].keys() == old["config"].keys()
    for name, value in gone.items():
        message = helpers.error_of(helpers.train, **keys("out", init_from="resume", **{name: value}))
        assert message.startswith(f"unknown key '{name}': here it is ")


def test_what_no_run_can_go_on_from_is_one_line_and_no_moment_of_another_shape_reaches_the_optimizer(keys, helpers):
    out, again = helpers.train(**keys("out", max_iters=4)), keys("out", init_from="resume", dtype="auto")
    whole = checkpoints.load(out)
    state = whole["optimizer"]["state"]

    def refused(expected, **changed):
        checkpoints.save(out / "ckpt.pt", {name: x for name, x in (whole | changed).items() if x is not None})
        message = helpers.error_of(helpers.train, **again)
        assert message.startswith(f"{out}/ckpt.pt: {expected}"), message

    for lacks in ("optimizer", "rng", "data"):
        words = f"has no {lacks}, which a resume needs; --init_from={out}/ckpt.pt starts a new run from its weights"
        refused(words, **{lacks: None})
    for wrong in (
        torch.zeros(3),
        torch.zeros_like(whole["rng"]),
        whole["rng"].float(),
        whole["rng"].to("meta"),
        5,
        None,
    ):
        refused("no run can go on from it (", rng=[] if wrong is None else wrong)
    for part, wrong, words in [
        ("exp_avg", torch.zeros(3), "has the shape (3,)"), ("exp_avg_sq", torch.zeros(()), "has the shape ()"),
        ("step", torch.zeros(2), "has the shape (2,)"), ("exp_avg", torch.full((32, 32), torch.nan), "is not finite"),
        # one number that all entries share: the right shape, and a kernel that takes it for dense writes past its end
        ("exp_avg", torch.zeros(1, 1).expand(32, 32), "is no plain tensor"), ("exp_avg", 5, "is no plain tensor"),
    ]:  # fmt: skip
        wrong_state = {"state": state | {"wte.weight": state["wte.weight"] | {part: wrong}}}
        refused(f"no run can go on from it (its optimizer's {part} of wte.weight {words}", optimizer=wrong_state)
    others = {name.replace("wte.weight", "other"): parts for name, parts in state.items()}
    words = f"no run can go on from it (its optimizer has {len(state)} parameters, of other names than the model's"
    refused(words, optimizer={"state": others})


NO_NUMBER = [True, "1.0", None, math.nan, math.inf, -math.inf, -1.0, [], {}, torch.ones(())]
LIES = {  # of a field of a checkpoint: values that no run has written there
    "run_id": [True, 5, None, [], b"x" * 32, "", "e", "x" * 1000],
    "config": [True, None, 5, [], "config", {5: 1}, {"n_layer": True}, {"n_layers": 2}, {"batch_size": math.inf}],
    "code_files": [True, None, 5, [], ["model.py"], {"model.py": None}, {5: "a"}, {"model.py": {}}],
    "best_val_loss": [True, "1.0", None, math.nan, -math.inf, -1.0, [], {}, torch.ones(())],
    "seconds": NO_NUMBER,
    "eval_seconds": NO_NUMBER,
    "iter_num": [True, "4", None, 4.0, math.nan, math.inf, -1, 10**30, [], torch.ones(())],
    "dtype": [True, None, 5, "float8", "auto", [], torch.float32],
    "data": [True, None, 5, [], {}, {"sha256": None}, {"sha256": 5}, {"sha256": "another"}],
    "optimizer": [True, None, 5, [], {}, {"state": None}, {"state": []}, {"state": {5: {}}}, {"state": {"a": 5}}],
    "scaler": [True, None, 5, []],
    "model_args": [True, None, 5, [], {5: 1}, {"n_layer": True}],
}


@pytest.mark.parametrize("field", LIES)
def test_a_field_of_a_checkpoint_that_lies_is_named_in_one_line_and_nothing_is_written(
    field, keys, helpers, trained, tmp_path
):
    out = Path(shutil.copytree(trained, tmp_path / "out"))
    whole, again = checkpoints.load(out), keys("out", **helpers.tiny, init_from="resume")
    again = {name: again[name] for name in ("dataset", "out_dir", "init_from")}
    for lie in LIES[field]:
        checkpoints.save(out / "ckpt.pt", whole | {field: lie})
        before = contents(out)
        message = helpers.error_of(train.main, helpers.words(**again))
        is_of_data = field == "data" and lie == {"sha256": "another"}
        assert "not the data that" in message if is_of_data else f"{out}/ckpt.pt" in message, (lie, message)
        assert field in message or field in ("data", "config", "model_args"), (lie, message)
        assert contents(out) | {Path("lock"): b""} == before | {Path("lock"): b""}


def test_before_the_first_evaluation_there_is_no_best_loss(run, keys, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(hardware.Processes, "stop_signal", lambda self, step, log_interval: 15)
        run("out")
    assert checkpoints.load(keys("out")["out_dir"])["best_val_loss"] == math.inf
    assert checkpoints.load(run("out", init_from="resume"))["best_val_loss"] < 5


def test_a_run_that_goes_on_counts_the_seconds_from_before(run, helpers):
    out = run("out", max_iters=4)
    checkpoints.save(out / "ckpt.pt", checkpoints.load(out) | {"seconds": 2e6, "eval_seconds": 1e6})
    (row,) = helpers.metrics(run("out", init_from="resume"), "end")
    assert row["seconds"] > 2e6 and row["eval_seconds"] > 1e6


def test_a_run_does_not_go_on_over_a_damaged_row_which_is_named_with_its_line(keys, helpers):
    out = helpers.train(**keys("out", max_iters=4))
    rows = (out / "metrics.jsonl").read_text()
    for wrong in ('{"event": "eval"}', '{"event": 5, "step": 1}', '{"event": "train", "step": -1}', '{"event": "tr'):
        (out / "metrics.jsonl").write_text(f"{wrong}\n{rows}")
        message = helpers.error_of(helpers.train, **keys("out", init_from="resume"))
        assert message == f"{out}/metrics.jsonl line 1: damaged; remove the line"
        assert (out / "metrics.jsonl").read_text() == f"{wrong}\n{rows}"


def test_a_run_keeps_its_rows_a_step_since_its_place_in_the_data_is_the_step_times_these(keys, helpers):
    whole, out = (
        helpers.train(**keys("whole", schedule="constant")),
        helpers.train(**keys("out", max_iters=4, schedule="constant")),
    )
    for given in (dict(batch_size=8), dict(gradient_accumulation_steps=1), dict(batch_size=1)):
        message = helpers.error_of(helpers.train, **keys("out", init_from="resume", **given))
        rows = keys("out", **given)["batch_size"] * keys("out", **given)["gradient_accumulation_steps"]
        assert f"{out}/ckpt.pt has 8 rows a step, which a resumed run keeps, and not {rows}: its place" in message
        assert f"--init_from={out}/ckpt.pt --keep_moments=true goes on with other rows" in message
    # the same rows in twice as many parts, as for twice as many processes
    helpers.train(**keys("out", init_from="resume", batch_size=2, gradient_accumulation_steps=4))
    assert helpers.losses(out) == pytest.approx(helpers.losses(whole), rel=1e-5)


@pytest.mark.parametrize("field", ["optimizer", "config", "iter_num"])
def test_moments_are_not_taken_from_a_checkpoint_that_lies(field, keys, helpers, trained, tmp_path):
    whole = checkpoints.load(trained)
    given = dict(init_from=tmp_path / "ckpt.pt", keep_moments=True, n_layer=2, n_embd=16)
    for lie in LIES[field]:
        checkpoints.save(tmp_path / "ckpt.pt", whole | {field: lie})
        message = helpers.error_of(helpers.train, **keys("out", **given))
        assert f"{tmp_path}/ckpt.pt" in message, (lie, message)


def test_moments_go_to_the_parameters_of_their_names(run, helpers, monkeypatch):
    whole, out = run("whole", schedule="constant"), run("out", max_iters=5, schedule="constant")
    groups = model.GPT.parameter_groups  # in an edited model.py the parameters have another order
    other = lambda *args: [group | {"params": group["params"][::-1]} for group in groups(*args)]  # noqa: E731
    monkeypatch.setattr(model.GPT, "parameter_groups", other)
    run("out", init_from="resume")
    ours, theirs = (checkpoints.load(folder)["model"] for folder in (out, whole))
    assert helpers.equal(ours, theirs)


# -- What stays as it is: the folders of others, and runs that are there -----------------------------------------------


def contents(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_folder_of_somebody_elses_files_stays_as_it_is(keys, helpers):
    out = keys("out")["out_dir"]
    (out / "notes").mkdir(parents=True)
    for name in ("best.pt", "notes/a.txt"):
        (out / name).write_text("theirs")
        before = contents(out)
        for how in ("scratch", "auto"):
            message = helpers.error_of(helpers.train, **keys("out", init_from=how))
            assert f"{out}: holds what is not of this project (best.pt" in message
            assert contents(out) == before
    helpers.train(**keys("out", overwrite=True, max_iters=1))
    assert checkpoints.load(out)["iter_num"] == 1 and (out / ".nanogate").read_text() == "run\n"
    assert (out / "notes" / "a.txt").read_text() == "theirs"
    (out / ".nanogate").write_text("data set\n")
    for overwrite in (False, True):
        message = helpers.error_of(helpers.train, **keys("out", init_from="resume", overwrite=overwrite))
        assert message == f"{out}: is the folder of another kind of output, 'data set'; name another folder"


def test_a_run_that_is_there_is_not_started_over_without_a_word(keys, helpers):
    out = helpers.train(**keys("out", max_iters=4))
    for name in ("meters.json", "page.png", "page.html", "maps.png", "curves.png"):  # of meters.py and plot.py
        (out / name).write_text("{}")
    before = contents(out)
    message = helpers.error_of(helpers.train, **keys("out"))
    assert f"{out}: holds a run already (ckpt.pt); --init_from=resume goes on from its ckpt.pt, --overwrite" in message
    assert contents(out) == before | {Path("lock"): (out / "lock").read_bytes()}
    (out / "ckpt.pt").unlink()
    assert "holds a run already (best.pt); --init_from" in helpers.error_of(helpers.train, **keys("out"))
    helpers.train(**keys("out", overwrite=True, max_iters=2, eval_interval=1))
    assert checkpoints.load(out)["iter_num"] == 2 and list(helpers.losses(out)) == [0, 1]
    names = {"ckpt.pt", "best.pt", "config.json", "metrics.jsonl", ".nanogate"}
    assert {file.name for file in out.glob("*.??*")} == names


def test_a_run_does_not_replace_the_weights_that_it_starts_from(keys, helpers):
    out = helpers.train(**keys("out", max_iters=1))
    before = contents(out)
    for source in (out, out / "best.pt", out.parent / "." / "out" / ".." / "out"):
        message = helpers.error_of(helpers.train, **keys("out", init_from=source, overwrite=True))
        assert f"init_from={source}: lies in out_dir, where a new run replaces it" in message
    assert contents(out) == before


def test_a_run_that_replaces_another_leaves_no_checkpoint_of_it_even_if_it_ends_before_its_first(
    keys, helpers, monkeypatch
):
    out = helpers.train(**keys("out", max_iters=2))
    old = checkpoints.load(out / "best.pt")["run_id"]

    def interrupted(*words, **keys):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        helpers.train(**keys("out", overwrite=True))
    left = [out / name for name in ("ckpt.pt", "best.pt") if (out / name).exists()]
    assert all(checkpoints.load(file)["run_id"] != old for file in left)


def test_checkpoints_of_keep_interval_stay_and_a_run_that_replaces_theirs_removes_them(mqar, helpers, tmp_path):
    def kept(**changed):
        every_four = dict(max_iters=8, eval_interval=2, keep_interval=4, init_from="auto")
        helpers.train(mqar, out, **every_four | changed)
        return {file.name: checkpoints.load(file)["iter_num"] for file in sorted(out.glob("ckpt*.pt"))}

    out = tmp_path / "out"
    assert kept() == {"ckpt-4.pt": 4, "ckpt-8.pt": 8, "ckpt.pt": 8}
    before = (out / "ckpt-4.pt").read_bytes()
    assert kept(max_iters=10) == {"ckpt-4.pt": 4, "ckpt-8.pt": 8, "ckpt.pt": 10}
    assert (out / "ckpt-4.pt").read_bytes() == before
    (out / "ckpt-mine.pt").write_bytes(before)
    assert kept(max_iters=2, init_from="scratch", overwrite=True) == {"ckpt-mine.pt": 4, "ckpt.pt": 2}
    words = helpers.error_of(kept, eval_interval=3)
    assert "keep_interval=4: a checkpoint is saved every eval_interval=3 steps; give a multiple of that" in words
    assert "every save_interval=6 steps" in helpers.error_of(kept, save_interval=6)
    words = "save_interval=3: must be a multiple of eval_interval=2, or divide it"
    assert helpers.error_of(kept, save_interval=3) == words
    assert "keep_last=1: is of the checkpoints of keep_interval" in helpers.error_of(
        kept, keep_interval=None, keep_last=1
    )


def test_of_checkpoints_that_stay_the_last_ones_stay_and_a_full_disk_loses_none(mqar, helpers, tmp_path, monkeypatch):
    out = tmp_path / "out"
    keys = dict(max_iters=8, eval_interval=8, save_interval=1, keep_interval=2, keep_last=2)
    link = outdir.files.link_whole

    def full(file, path):
        if (file.name, path.name) == ("ckpt-6.pt", "ckpt.pt"):
            raise UserError("disk is full")
        link(file, path)

    with monkeypatch.context() as patch:
        patch.setattr(outdir.files, "link_whole", full)
        assert helpers.error_of(helpers.train, mqar, out, **keys) == "disk is full"
    assert checkpoints.load(out)["iter_num"] == 5
    assert {file.name for file in out.glob("ckpt-*")} == {"ckpt-2.pt", "ckpt-4.pt", "ckpt-6.pt"}
    (out / "ckpt-1mine.pt").write_bytes(b"")
    helpers.train(mqar, out, init_from="resume", **keys)
    found = {file.name: checkpoints.load(file)["iter_num"] for file in out.glob("ckpt-[0-9].pt")}
    assert found == {"ckpt-6.pt": 6, "ckpt-8.pt": 8} and (out / "ckpt-1mine.pt").exists()


@pytest.mark.parametrize("case", [dict(dropout=0.1), dict(optimizer="muon", gate="elementwise")], ids=str)
def test_auto_starts_where_there_is_no_checkpoint_and_else_goes_on_to_the_same_bits(case, run, helpers):
    case |= {"schedule": "constant"}
    whole = run("whole", **case)
    for max_iters in (4, 8, 14, 14):
        out = run("out", init_from="auto", max_iters=max_iters, **case)
        if max_iters == 4:  # a kill has left rows of later steps, the last one cut
            with open(out / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write('{"event": "train", "step": 4, "loss": 1.0, "tokens_per_second": 9}\n{"event": "tra')
    check_same_run(whole, out, helpers)
    (out / "ckpt.pt").unlink()  # a kill between best.pt and ckpt.pt, in the first save of all
    run("out", init_from="auto", max_iters=3)
    assert checkpoints.load(out)["iter_num"] == 3


# -- One run at a time; what is kept -----------------------------------------------------------------------------------


def test_a_second_run_in_one_out_dir_is_refused_while_the_first_one_lives(keys, helpers):
    out = keys("out")["out_dir"]
    first = start(keys("out", max_iters=100_000), helpers)
    wait_for_step(out, 5, first.is_alive)
    for how in ("scratch", "resume"):
        message = helpers.error_of(helpers.train, **keys("out", init_from=how, max_iters=100_000))
        assert f"{out}: process {first.pid} on " in message
    (out / "lock").write_bytes(b"\xff\n\0")
    assert f"{out}: " in helpers.error_of(helpers.train, **keys("out", overwrite=True))
    first.kill()
    first.join()
    (out / "lock").write_bytes(b"process 9 on a machine")
    files.lock(out).close()  # the dead process has none
    (out / f".best.pt.{'0' * 16}.tmp").write_bytes(b"left by a kill")
    helpers.train(**keys("out", overwrite=True))
    assert not list(out.glob(".*.tmp"))
