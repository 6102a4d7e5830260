"""
Nothing is lost: real training processes are killed, at random moments and in the middle of writing a checkpoint, and
go on to the same bits. Signals save and leave. torchrun stops with a dead rank, or starts again.

    python -m pytest tests/test_resume.py
    NANOGATE_KILLS=500 python -m pytest tests/test_resume.py -m slow -s        how often to kill
"""

import itertools
import json
import multiprocessing
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import model
import train
from runs import checkpoint as checkpoints
from runs import hardware
from runs.checkpoint import load_model

ROOT = Path(train.__file__).parent
KILLS = int(os.environ.get("NANOGATE_KILLS", 100))
# a forked process has torch at once: a kill costs a fraction of a second, and is as real as any
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train"])
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")

MIXERS = ("softmax", "cosformer", "gla", "mamba2", "gated_deltanet")
CASES = {
    f"{mixer}-{dtype}": dict(attention=mixer, dtype=dtype, gate=gate, eval_interval=every, dropout=dropout)
    for (mixer, dtype), gate, every, dropout in zip(
        itertools.product(MIXERS, ("float32", "bfloat16", "float16")),
        itertools.cycle(("elementwise", "none")),
        itertools.cycle((3, 5, 1, 7)),
        itertools.cycle((0.1, 0.1, 0.0)),
        strict=False,
    )
}
KEYS = dict(gradient_accumulation_steps=2, max_iters=14, n_layer=1, keep_checkpoints=2, n_embd=32)


@pytest.fixture
def keys(mqar, tmp_path, helpers):
    """keys(name, key=value, ...) -> the keys of a run of the tiny model on MQAR in the folder of that name."""
    return lambda name, **keys: helpers.tiny | KEYS | dict(dataset=mqar, out_dir=tmp_path / name) | keys


def start(keys, helpers):
    """train.py in a process of its own."""
    process = FORKS.Process(target=train.main, args=(helpers.words(**keys),))
    process.start()
    return process


def end(process):
    process.join(120)
    assert process.exitcode is not None, "hangs"
    return process.exitcode


def sampled(out):
    """Tokens drawn from the last checkpoint."""
    model, _ = load_model(out)
    torch.manual_seed(0)
    return model.generate(torch.tensor([[3, 20]]), 20).tolist()


def check_same_run(ours, theirs, helpers):
    """Parameters, optimizer, scale, random state, samples and all rows are those of the other run."""
    for name in ("ckpt.pt", "best.pt"):
        a, b = (checkpoints.load(out / name) for out in (ours, theirs))
        for part in ("model", "optimizer", "scaler", "rng", "iter_num", "best_val_loss"):
            assert helpers.equal(a[part], b[part]), (name, part)
    rows = [helpers.without_times(helpers.metrics(out)) for out in (ours, theirs)]
    assert rows[0] == rows[1]
    assert sampled(ours) == sampled(theirs)
    assert sorted(f.name for f in ours.iterdir()) == sorted(f.name for f in theirs.iterdir())


def kill_at_random(process, out, rng, seconds):
    """SIGKILL at a random moment; every other time, at a random moment of a checkpoint's writing. How it was hit."""
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0.0, seconds))
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


def kill_and_resume(case, name, keys, helpers, rng, kills, whole, seconds):
    """A run that is killed `kills` times, or until it ends, and then goes on to its end. Where each kill hit."""
    out, hits = keys(name)["out_dir"], []
    out.mkdir()
    for _ in range(kills):
        process = start(keys(name, init_from="auto", **case), helpers)
        hits.append(kill_at_random(process, out, rng, seconds))
        if hits[-1] == "ended":
            assert process.exitcode == 0
            hits.pop()
            break
    assert end(start(keys(name, init_from="auto", **case), helpers)) == 0
    check_same_run(whole, out, helpers)
    return hits


@pytest.fixture
def kill_cases(keys, helpers, mqar, tmp_path):
    def call(cases, kills_of_each, rounds, seed):
        rng, hits = random.Random(seed), []
        for name, case in cases:
            whole, began = f"whole-{name}", time.monotonic()
            assert end(start(keys(whole, **case), helpers)) == 0
            seconds = time.monotonic() - began
            for i in range(rounds):
                killed = f"killed-{name}-{i}"
                hits += kill_and_resume(
                    case, killed, keys, helpers, rng, kills_of_each, keys(whole)["out_dir"], seconds
                )
        return hits

    return call


def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(kill_cases):
    cases = [(name, CASES[name]) for name in ("softmax-bfloat16", "gla-float16", "gated_deltanet-float32")]
    assert kill_cases(cases, kills_of_each=2, rounds=1, seed=0)  # a fast machine ends before some of the kills


@pytest.mark.slow
def test_killed_runs_of_every_mixer_and_dtype_end_with_the_same_bits(kill_cases):
    hits, seed = [], int(os.environ.get("NANOGATE_SEED", 1))
    for name, case in itertools.cycle(CASES.items()):
        if len(hits) >= KILLS:
            break
        hits += kill_cases([(f"{name}-{len(hits)}", case)], kills_of_each=8, rounds=1, seed=f"{seed} {len(hits)}")
    counted = {how: hits.count(how) for how in sorted(set(hits))}
    print(f"\n{len(hits)} kills: {json.dumps(counted)}")


# ----------------------------------------------------------------------------------------------------------------------
# Signals


def wait_for_step(out, step, process):
    """Until metrics.jsonl has the row of that step."""
    deadline = time.monotonic() + 60
    while f'"step": {step},' not in (out / "metrics.jsonl").read_text() if (out / "metrics.jsonl").is_file() else True:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize(
    "number, status",
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 138, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_the_step_reached_and_the_run_goes_on_to_the_same_bits(keys, helpers, number, status):
    case = dict(dropout=0.1, eval_interval=5, keep_checkpoints=0, max_iters=40)
    assert end(start(keys("whole", **case), helpers)) == 0
    out = keys("stopped")["out_dir"]
    process = subprocess.Popen(
        [sys.executable, "train.py", *helpers.words(**keys("stopped", **case))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for_step(out, 6, process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == status
    step = checkpoints.load(out)["iter_num"]
    assert 7 <= step < 40
    assert f"{number.name}: saved at step {step} of 40; --init_from=resume goes on from there" in said
    assert list(helpers.losses(out)) == list(range(step))
    helpers.train(**keys("stopped", init_from="resume", **case))
    check_same_run(keys("whole")["out_dir"], out, helpers)


def test_a_run_whose_terminal_is_closed_saves(keys, helpers):
    case, out = dict(eval_interval=1000, log_interval=1, max_iters=100_000), keys("out")["out_dir"]
    words = [sys.executable, "train.py", *helpers.words(**keys("out", **case))]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(ROOT)
        os.execv(words[0], words)
    deadline = time.monotonic() + 120
    while not (out / "metrics.jsonl").is_file() or not helpers.metrics(out, "train"):
        assert time.monotonic() < deadline
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)  # or the run would wait for a reader
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    step = checkpoints.load(out)["iter_num"]
    assert step >= 1 and list(helpers.losses(out)) == list(range(step))


def test_under_nohup_a_closed_terminal_is_nothing_and_a_second_warning_ends_no_save():
    before, processes = signal.signal(signal.SIGHUP, signal.SIG_IGN), types.SimpleNamespace(signal=0, world_size=1)
    try:
        with hardware.Processes.signals_held(processes):
            os.kill(os.getpid(), signal.SIGHUP)
            assert processes.signal == 0
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGUSR1)
                assert processes.signal == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_at_any_moment_leaves_a_run_that_goes_on_to_the_same_bits(keys, helpers):
    case, rng, stops = dict(eval_interval=4, keep_checkpoints=0, max_iters=120), random.Random(0), 0
    assert end(start(keys("whole", **case), helpers)) == 0
    out = keys("stopped")["out_dir"]
    for _ in range(4):
        rows = Path(out) / "metrics.jsonl"
        size = rows.stat().st_size if rows.exists() else 0
        process = start(keys("stopped", init_from="auto", **case), helpers)
        while process.is_alive() and (rows.stat().st_size if rows.exists() else 0) == size:
            time.sleep(0.01)  # it is still starting
        time.sleep(rng.uniform(0, 0.3))
        os.kill(process.pid, rng.choice([signal.SIGTERM, signal.SIGINT]))
        status = end(process)
        assert status in (0, 1, 130, 143, -signal.SIGTERM)  # 1: a Ctrl-C that came before there was a run
        stops += status in (130, 143)
    assert stops
    assert end(start(keys("stopped", init_from="auto", **case), helpers)) == 0
    check_same_run(keys("whole")["out_dir"], out, helpers)


def test_seconds_of_a_resumed_run_are_those_of_its_parts_together(keys, helpers):
    case = dict(lr_decay_iters=14, eval_interval=100)
    out = helpers.train(**keys("out", **case) | dict(max_iters=4))
    checkpoint = checkpoints.load(out)
    checkpoints.save(out / "ckpt.pt", checkpoint | {"seconds": 1000.0, "eval_seconds": 100.0})
    helpers.train(**keys("out", init_from="resume", **case))
    row = helpers.metrics(out, "end")[-1]
    assert 1000 < row["seconds"] < 1100 and 100 < row["eval_seconds"] < 200


# ----------------------------------------------------------------------------------------------------------------------
# What resume refuses, and says


def test_resume_refuses_another_model_and_says_what_else_is_new(keys, helpers, capsys):
    out = helpers.train(**keys("out", max_iters=4))
    for name, value, was in [
        ("n_layer", 3, 1), ("attention", "gla", "softmax"), ("dtype", "bfloat16", "float32"),
        ("eval_tokens", None, 100000), ("block_size", 64, 32),
    ]:  # fmt: skip
        message = helpers.error_of(helpers.train, **keys("out", init_from="resume", **{name: value}))
        assert f"{name}={value}: {out}/ckpt.pt has {was}, which a resumed run keeps; for a new run name" in message
    capsys.readouterr()
    helpers.train(**keys("out", init_from="resume", max_iters=5, learning_rate=1e-3, vocab_size=None))
    said = capsys.readouterr().out
    changed = re.findall("(?m)^  (.*), where the checkpoint has (.*)$", said)
    assert changed == [("max_iters: 5", "4"), ("learning_rate: 0.001", "0.003")]


def test_a_resumed_run_has_the_keys_of_its_checkpoint_then_a_config_files_then_the_command_lines(
    keys, helpers, tmp_path, capsys
):
    case = dict(seed=7, dropout=0.1, lr_decay_iters=14, weight_decay=0.3, beta2=0.9)
    whole = helpers.train(**keys("whole", **case))
    out = helpers.train(**keys("out", **case) | dict(max_iters=4))
    train.main([f"--out_dir={out}", "--init_from=resume", "--max_iters=14"])
    check_same_run(whole, out, helpers)
    assert re.findall("(?m)^  (.*), where the checkpoint", capsys.readouterr().out) == ["max_iters: 14"]
    (tmp_path / "more.py").write_text("max_iters = 15\nlearning_rate = 1e-3\nweight_decay = 0.2\n")
    train.main([str(tmp_path / "more.py"), f"--out_dir={out}", "--init_from=resume", "--weight_decay=0.1"])
    now = checkpoints.load(out)
    config, group = now["config"], now["optimizer"]["param_groups"][0]
    assert (config["max_iters"], config["learning_rate"], config["seed"]) == (15, 1e-3, 7)
    assert config["weight_decay"] == group["weight_decay"] == 0.1 and group["betas"] == (0.9, 0.9)


def test_a_checkpoint_of_another_run_is_refused(keys, helpers):
    ours, theirs = (helpers.train(**keys(name, seed=seed)) for name, seed in (("ours", 0), ("theirs", 1)))
    (ours / "ckpt.pt").write_bytes((theirs / "ckpt.pt").read_bytes())
    message = helpers.error_of(helpers.train, **keys("ours", init_from="resume"))
    assert message == f"{ours}/ckpt.pt: not of the run that {ours}/config.json describes; put its own one back"
    (ours / "config.json").unlink()  # a ckpt.pt that was taken elsewhere on purpose
    helpers.train(**keys("ours", init_from="resume", seed=1))


def test_what_no_run_can_go_on_from_is_one_line(keys, helpers):
    out = helpers.train(**keys("out"))
    whole = checkpoints.load(out)
    for lacks in ("optimizer", "rng", "best_val_loss", "data"):
        checkpoints.save(out / "ckpt.pt", {name: value for name, value in whole.items() if name != lacks})
        message = helpers.error_of(helpers.train, **keys("out", init_from="resume"))
        assert f"has no {lacks}, to resume; --init_from={out}/ckpt.pt starts a new run from its weights" in message
    for wrong in (
        dict(optimizer={}),
        dict(scaler={"scale": 1.0}, dtype="float16"),
        dict(rng=torch.zeros(3)),
        dict(best_val_loss=""),
    ):
        checkpoints.save(out / "ckpt.pt", whole | wrong)
        message = helpers.error_of(helpers.train, **keys("out", init_from="resume", dtype="auto"))
        assert "no run can go on from it" in message or "no checkpoint of this project" in message, wrong


def test_moments_of_other_shapes_never_reach_the_optimizer(keys, helpers):
    out = helpers.train(**keys("out", max_iters=4, lr_decay_iters=14))
    for part, wrong, said in [
        ("exp_avg", torch.zeros(3), "exp_avg of wte.weight is (3,), not (32, 32)"),
        ("exp_avg_sq", torch.zeros(32, 31), "exp_avg_sq of wte.weight is (32, 31), not (32, 32)"),
        ("step", torch.zeros(2), "step of wte.weight is (2,), not ()"),
        ("exp_avg", torch.zeros(32, 32, dtype=torch.int64), "exp_avg of wte.weight is torch.int64"),
        ("exp_avg", 3.0, "exp_avg of wte.weight is no plain tensor"),
    ]:
        checkpoint = checkpoints.load(out)
        checkpoint["optimizer"]["state"]["wte.weight"][part] = wrong
        checkpoints.save(out / "broken.pt", checkpoint)
        assert said in refused(keys, helpers, out, "broken.pt")
    checkpoint = checkpoints.load(out)
    checkpoint["optimizer"]["state"]["another"] = checkpoint["optimizer"]["state"].pop("wte.weight")
    checkpoints.save(out / "broken.pt", checkpoint)
    assert "parameters of other names than the model's" in refused(keys, helpers, out, "broken.pt")
    # one number that all entries share: the right shape, and a kernel that takes it for dense writes past its end
    checkpoint = checkpoints.load(out)
    checkpoint["optimizer"]["state"]["wte.weight"]["exp_avg"] = torch.zeros(1, 1).expand(32, 32)
    checkpoints.save(out / "broken.pt", checkpoint)
    assert "exp_avg of wte.weight is no plain tensor" in refused(keys, helpers, out, "broken.pt")


def refused(keys, helpers, out, name):
    """What is said when the run would go on from that file."""
    shutil.copytree(out, keys(name)["out_dir"], dirs_exist_ok=True)
    shutil.copyfile(out / name, keys(name)["out_dir"] / "ckpt.pt")
    message = helpers.error_of(helpers.train, **keys(name, init_from="resume"))
    assert "no run can go on from it" in message
    return message


def test_moments_go_to_the_parameters_of_their_names(keys, helpers, monkeypatch):
    whole = helpers.train(**keys("whole"))
    out = helpers.train(**keys("out", max_iters=5, lr_decay_iters=14))
    groups = model.GPT.parameter_groups  # in an edited model.py the parameters have another order
    monkeypatch.setattr(
        model.GPT, "parameter_groups", lambda *args: [g | {"params": g["params"][::-1]} for g in groups(*args)]
    )
    helpers.train(**keys("out", init_from="resume"))
    ours, theirs = (checkpoints.load(folder)["model"] for folder in (out, whole))
    assert helpers.equal(ours, theirs)


@pytest.mark.parametrize("what", ["", "metrics.jsonl"])
def test_an_out_dir_that_goes_during_a_run_is_named_and_the_status_is_1(keys, helpers, monkeypatch, capfd, what):
    out, learning_rate = keys("out")["out_dir"], train.learning_rate

    def remove(config, step):
        if step == 5:
            shutil.rmtree(out) if not what else (out / what).unlink()
        return learning_rate(config, step)

    monkeypatch.setattr(train, "learning_rate", remove)
    with pytest.raises(SystemExit) as stopped:
        helpers.train(**keys("out"))
    assert stopped.value.code == 1
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert errors == [f"error: {out / what} is gone since the run began; step 8 is lost"]


def test_a_damaged_row_is_named(keys, helpers):
    out = helpers.train(**keys("out"))
    rows = (out / "metrics.jsonl").read_text().splitlines()
    (out / "metrics.jsonl").write_text("\n".join([*rows[:2], rows[2][:9] + "x", *rows[3:]]) + "\n")
    message = helpers.error_of(helpers.train, **keys("out", init_from="resume"))
    assert message == f"{out}/metrics.jsonl line 3: damaged; remove the line"


# ----------------------------------------------------------------------------------------------------------------------
# What stays as it is: the folders of others, and runs that are there


def contents(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", ["model.py", "config.json", "best.pt", "notes/a.txt"])
def test_a_folder_of_somebody_elses_files_stays_as_it_is(keys, helpers, name):
    out = keys("out")["out_dir"]
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("{}")
    for how in ("scratch", "auto"):
        message = helpers.error_of(helpers.train, **keys("out", init_from=how))
        assert f"{out}: holds what is not of a run ({name.split('/')[0]}); name another folder, or add" in message
        assert contents(out) == {Path(name): b"{}"}
    helpers.train(**keys("out", overwrite=True, max_iters=1))
    assert checkpoints.load(out)["iter_num"] == 1 and (out / ".nanogate").read_text() == "run\n"
    (out / ".nanogate").write_text("data set\n")
    for overwrite in (False, True):
        message = helpers.error_of(helpers.train, **keys("out", init_from="resume", overwrite=overwrite))
        assert message == f"{out}: is the folder of another kind of output, 'data set'; name another folder"


def test_a_strangers_folder_keeps_its_files_and_a_replaced_run_leaves_none(keys, helpers):
    out = keys("out")["out_dir"]
    theirs = {"ckpt_7.pt": "theirs", ".cache.tmp/precious": "theirs", "meters.json": "theirs", "code/thesis.tex": "x"}
    for name, content in theirs.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(content)
    helpers.train(**keys("out", overwrite=True, max_iters=1))
    theirs["code.1/thesis.tex"] = theirs.pop("code/thesis.tex")
    assert {name: (out / name).read_text() for name in theirs} == theirs
    helpers.train(**keys("out", overwrite=True, max_iters=1))
    assert not {"ckpt_7.pt", "meters.json"} & {file.name for file in out.iterdir()}
    assert (out / ".cache.tmp" / "precious").read_text() == "theirs"
    assert (out / "code.1" / "thesis.tex").is_file()


def test_a_run_does_not_go_on_when_training_and_validation_have_changed_places(keys, helpers, tmp_path):
    data = Path(shutil.copytree(keys("out")["dataset"], tmp_path / "data"))
    out = helpers.train(**keys("out", dataset=data, max_iters=4))
    meta = json.loads((data / "meta.json").read_text())
    meta["splits"] = {"val": meta["splits"]["train"], "train": meta["splits"]["val"]}  # the shards keep their order
    (data / "meta.json").write_text(json.dumps(meta))
    message = helpers.error_of(helpers.train, **keys("out", dataset=data, init_from="resume"))
    assert message == f"{data}: not the data that {out / 'ckpt.pt'} was trained on"


def test_a_run_does_not_replace_the_weights_that_it_starts_from(keys, helpers):
    out = helpers.train(**keys("out", max_iters=1))
    before = contents(out)
    for source in (out, out / "best.pt"):
        message = helpers.error_of(helpers.train, **keys("out", init_from=source, overwrite=True))
        assert f"init_from={source}: lies in out_dir, where a new run replaces it" in message
    assert contents(out) == before


def test_an_empty_folder_becomes_a_run(keys, helpers):
    keys("out")["out_dir"].mkdir()
    (keys("out")["out_dir"] / f"..nanogate.{'0' * 16}.tmp").write_text("")  # a kill, while the marker was written
    helpers.train(**keys("out", max_iters=1))


@pytest.mark.parametrize("max_iters", [4, 14], ids=["half-finished", "finished"])
def test_a_run_that_is_there_is_not_started_over_without_a_word(keys, helpers, max_iters):
    out = helpers.train(**keys("out", max_iters=max_iters, lr_decay_iters=14))
    before = contents(out)
    message = helpers.error_of(helpers.train, **keys("out"))
    assert message == (f"{out}: holds a run already; --init_from=resume goes on with it, --overwrite=true starts over")
    assert contents(out) == before | {Path("lock"): (out / "lock").read_bytes()}
    (out / "ckpt.pt").unlink()
    assert "holds best.pt of a run, and no ckpt.pt; --overwrite" in helpers.error_of(helpers.train, **keys("out"))
    helpers.train(**keys("out", overwrite=True, max_iters=2))
    assert checkpoints.load(out)["iter_num"] == 2 and list(helpers.losses(out)) == [0, 1]


def test_torchruns_restart_of_a_refused_command_is_refused_too(keys, helpers, monkeypatch):
    out = helpers.train(**keys("out", max_iters=4, lr_decay_iters=14))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    before = contents(out)
    assert "holds a run already" in helpers.error_of(helpers.train, **keys("out", seed=9))
    assert contents(out).keys() == before.keys() and contents(out)[Path("ckpt.pt")] == before[Path("ckpt.pt")]
    helpers.train(**keys("out", max_iters=4, lr_decay_iters=14))  # the very command that wrote it goes on


def test_auto_starts_where_there_is_no_checkpoint_and_else_goes_on_to_the_same_bits(keys, helpers):
    whole = helpers.train(**keys("whole"))
    out = keys("out")["out_dir"]
    for max_iters in (4, 8, 14, 14):
        helpers.train(**keys("out", init_from="auto", max_iters=max_iters, lr_decay_iters=14))
    check_same_run(whole, out, helpers)
    (out / "ckpt.pt").unlink()  # a kill between best.pt and ckpt.pt, in the first save of all
    helpers.train(**keys("out", init_from="auto", max_iters=3))
    assert checkpoints.load(out)["iter_num"] == 3


def test_the_demo_goes_on_after_ctrl_c():
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "train.py" in line]
    assert line.endswith("train.py config/pystdlib.py --init_from=auto")


# ----------------------------------------------------------------------------------------------------------------------
# One run at a time; what is kept


def test_a_second_run_in_one_out_dir_is_refused_while_the_first_one_lives(keys, helpers):
    pytest.importorskip("fcntl")
    out = keys("out")["out_dir"]
    first = start(keys("out", max_iters=100_000), helpers)
    deadline = time.monotonic() + 60
    while not (out / "ckpt.pt").is_file():
        assert time.monotonic() < deadline and first.is_alive()
    for how in ("scratch", "resume"):
        message = helpers.error_of(helpers.train, **keys("out", init_from=how, max_iters=100_000))
        assert re.fullmatch(rf"{out}: process {first.pid} on \S+ is running in it; wait, stop it, or take .*", message)
    first.kill()
    first.join()
    (out / f".best.pt.{'0' * 16}.tmp").write_bytes(b"left by a kill")
    assert end(start(keys("out", overwrite=True), helpers)) == 0
    assert not list(out.glob(".*.tmp"))


def test_the_last_k_checkpoints_are_kept(keys, helpers):
    def kept(**changed):
        out = helpers.train(**keys("out", eval_interval=2, max_iters=7, overwrite=True, **changed))
        steps = {int(file.stem[5:]) for file in out.glob("ckpt_*.pt")}
        assert all(checkpoints.load(out / f"ckpt_{step}.pt")["iter_num"] == step for step in steps)
        return steps

    assert kept(keep_checkpoints=0) == set()
    assert kept(keep_checkpoints=3) == {4, 6, 7}
    assert kept(keep_checkpoints=1) == {7}
    assert kept(keep_checkpoints=9) == {0, 2, 4, 6, 7}


# ----------------------------------------------------------------------------------------------------------------------
# Several processes


def torchrun(keys, helpers, *options, processes=2):
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *options, "train.py"]
    return subprocess.Popen(
        [sys.executable, *launch, *helpers.words(**keys)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def workers(process):
    """The process ids of the ranks that torchrun started."""
    said = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout
    return [int(pid) for pid in said.split()]


@pytest.fixture(scope="module")
def long_run(mqar, tmp_path_factory, helpers):
    """A run of one process, for those of two to be compared with."""
    keys = helpers.tiny | KEYS | dict(dataset=mqar, max_iters=120, eval_interval=40, keep_checkpoints=0, dropout=0.1)
    return helpers.train(**keys | dict(out_dir=tmp_path_factory.mktemp("long_run") / "out"))


LONG = dict(max_iters=120, eval_interval=40, keep_checkpoints=0, dropout=0.1)


def test_sigterm_to_torchrun_saves_and_one_process_goes_on_with_the_same_curve(keys, helpers, long_run):
    out = keys("out")["out_dir"]
    process = torchrun(keys("out", **LONG), helpers)
    wait_for_step(out, 5, process)
    process.terminate()
    process.communicate(timeout=60)
    step = checkpoints.load(out)["iter_num"]
    assert 6 <= step < 120 and list(helpers.losses(out)) == list(range(step))
    helpers.train(**keys("out", init_from="resume", **LONG))
    # the gradients of two processes are summed in another order
    assert helpers.losses(out) == pytest.approx(helpers.losses(long_run), rel=1e-3)


def test_a_rank_that_dies_stops_the_others_and_torchrun_starts_again_from_the_last_checkpoint(keys, helpers, long_run):
    out = keys("out")["out_dir"]
    process = torchrun(keys("out", **LONG), helpers, "--max-restarts=1")
    wait_for_step(out, 50, process)
    os.kill(workers(process)[1], signal.SIGKILL)
    said, complained = process.communicate(timeout=120)
    assert process.returncode == 0, complained
    assert "has lost the others: one of them has ended, and has printed why" in complained
    assert f"resuming {out} at step 40" in said or f"resuming {out} at step 80" in said
    assert helpers.losses(out) == pytest.approx(helpers.losses(long_run), rel=1e-3)
    assert list(helpers.losses(out)) == list(range(120))


def test_a_users_mistake_under_torchrun_is_said_once(keys, helpers):
    process = torchrun(keys("out", init_from="resume"), helpers)
    _, complained = process.communicate(timeout=60)
    lines = [line for line in complained.splitlines() if line.startswith("error:")]
    assert process.returncode == 1 and len(lines) == 1 and "no such checkpoint; train.py writes" in lines[0]
    assert 'train.py", line' not in complained  # no stack trace of ours; torchrun adds its own
