"""Bad numbers, bad disks, names that are no files and too little memory: one clear line, and nothing lost."""

import math
import os
import re
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from test_resume import FORKS, end

import bench
import evaluate
import meters
import plot
import sample
import train
from base import configurator, files
from data.backcopy import prepare as backcopy_prepare
from data.shards import open_dataset
from data.text import prepare as text_prepare
from hub import export
from model import GPT, GPTConfig
from runs import checkpoint as checkpoints
from runs import health, memory
from runs.hardware import Processes

# -- Numbers that are not finite ---------------------------------------------------------------------------------------


def at_step(at, monkeypatch, change):
    """The loss of that step is change(loss)."""
    micro_loss = train.micro_loss

    def changed(model, config, dtype, step, batch):
        loss = micro_loss(model, config, dtype, step, batch)
        return change(loss) if step == at else loss

    monkeypatch.setattr(train, "micro_loss", changed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_bad_step_is_named_by_a_later_log_and_weights_stay_good(
    run, tmp_path, helpers, capfd, monkeypatch, float16_on_a_cpu, dtype
):
    at_step(5, monkeypatch, lambda loss: loss * float("nan"))
    with pytest.raises(SystemExit, match="1"):
        run("out", dtype=dtype, eval_interval=3, log_interval=100, max_iters=30)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    # the forward pass was right
    assert "is not finite at step 5, learning rate 0.00292; first bad tensor: gradient of " in line
    assert "out/ckpt.pt holds step 3" in line
    ours = checkpoints.load(tmp_path / "out")
    assert ours["iter_num"] == 3 and all(p.isfinite().all() for p in ours["model"].values())
    assert helpers.metrics(tmp_path / "out")[-1] == {"event": "stopped", "step": 5}


def test_an_output_that_overflows_is_the_first_bad_tensor(run, tmp_path, capfd):
    with pytest.raises(SystemExit, match="1"):
        run("out", learning_rate=1e12, grad_clip=None, warmup_iters=0)
    assert re.search(r"is not finite at step 1, .*; first bad tensor: output of blocks\.0\.", capfd.readouterr().err)
    assert checkpoints.load(tmp_path / "out")["iter_num"] == 0


def test_a_process_whose_own_output_is_bad_asks_for_as_much_as_the_others(monkeypatch):
    """Of a sharded model each answer is one of all processes, and one that does not ask would leave them waiting."""
    asked = []
    monkeypatch.setattr(health, "all_finite", lambda tensor: asked.append(tensor) or bool(tensor.isfinite().all()))
    model, numbers = torch.nn.Linear(2, 2), {}
    for x, found in ((1.0, None), (math.nan, "output of the model")):
        asked.clear()
        model.zero_grad()
        assert health.first_bad_tensor(model, (model(torch.full((1, 2), x)).sum() for _ in range(1))) == found
        numbers[found] = len(asked)
    assert set(numbers.values()) == {4}  # two weights, two gradients


def test_a_validation_loss_that_alone_is_not_finite_ends_a_run_whose_best_stays(run, tmp_path, monkeypatch, capfd):
    """The save before the evaluation, which finds a finite output on one row, is there by then."""
    read = train.evaluate

    def overflowing(*words, **keys):
        numbers = read(*words, **keys)
        return numbers | {"loss": math.nan} if (tmp_path / "out" / "best.pt").is_file() else numbers

    monkeypatch.setattr(train, "evaluate", overflowing)
    with pytest.raises(SystemExit, match="1"):
        run("out")
    said = capfd.readouterr().err
    assert "error: validation loss is nan at step 4" in said
    assert "ckpt.pt holds step 4" in said
    assert [checkpoints.load(tmp_path / "out" / name)["iter_num"] for name in ("ckpt.pt", "best.pt")] == [4, 0]


def test_an_infinite_gradient_never_reaches_the_weights(run, monkeypatch):
    at_step(2, monkeypatch, lambda loss: loss * float("inf"))
    runs, step = [], torch.optim.AdamW.step

    def watch(optimizer):
        step(optimizer)
        runs.append([p.detach().clone() for group in optimizer.param_groups for p in group["params"]])

    monkeypatch.setattr(torch.optim.AdamW, "step", watch)
    with pytest.raises(SystemExit):
        run("out", log_interval=100, eval_interval=100)
    assert len(runs) == 8
    assert all(not torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    for later in runs[2:]:  # not in that step, and in none after it
        assert all(torch.equal(a, b) for a, b in zip(runs[1], later, strict=True))


def test_float16_that_overflows_at_any_scale_ends(run, capfd, monkeypatch, float16_on_a_cpu):
    update = torch.amp.GradScaler.update
    monkeypatch.setattr(torch.amp.GradScaler, "update", lambda scaler: update(scaler, 0.5))
    with pytest.raises(SystemExit):
        run("out", dtype="float16")
    assert "float16's loss scale fell below 1 and the gradient still overflows at step 0" in capfd.readouterr().err


# -- Disks -------------------------------------------------------------------------------------------------------------


def refuse(*words):
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_checkpoint_before_and_the_run_goes_on(run, tmp_path, monkeypatch, helpers):
    whole = run("whole")
    with monkeypatch.context() as patched:
        at_step(5, patched, lambda loss: patched.setattr(os, "fsync", refuse) or loss)  # in metrics.jsonl
        with pytest.raises((configurator.UserError, OSError), match="No space left on device"):
            run("out")
    assert checkpoints.load(tmp_path / "out")["iter_num"] == 4
    run("out", init_from="resume")
    assert helpers.equal(*(checkpoints.load(out)["model"] for out in (tmp_path / "out", whole)))


def test_what_takes_a_name_is_on_the_disk_and_before_a_checkpoint_so_are_the_rows(run, tmp_path, monkeypatch):
    fsync, replace, on_disk = os.fsync, os.replace, {}

    def note(number):
        fsync(number)
        on_disk[os.fstat(number).st_ino] = os.fstat(number).st_size

    def check(old, new):
        rows = [tmp_path / "out" / "metrics.jsonl"] if Path(new).name == "ckpt.pt" else []
        for file in (Path(old), *rows):
            assert on_disk.get(file.stat().st_ino) == file.stat().st_size, file
        replace(old, new)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", check)
    run("out")


def test_a_shard_that_is_replaced_during_a_run_is_read_as_it_was(run, mqar, tmp_path, monkeypatch, helpers):
    whole, load, folder = run("whole"), train.load_batches, Path(shutil.copytree(mqar, tmp_path / "mqar"))

    def replace_before_step_6(dataset, config, processes, same_length, step):
        if step == 6:
            (folder / "new.npy").write_bytes(b"another file")
            os.replace(folder / "new.npy", folder / "train_0000.npy")
        return load(dataset, config, processes, same_length, step)

    monkeypatch.setattr(train, "load_batches", replace_before_step_6)
    run("out", dataset=folder)
    assert helpers.equal(*(checkpoints.load(out)["model"] for out in (tmp_path / "out", whole)))


@pytest.mark.parametrize("has_links", [True, False])
def test_best_is_a_link_or_a_copy_and_right_after_a_kill_between_both(has_links, run, tmp_path, monkeypatch, helpers):
    whole, replace, best = run("whole"), os.replace, tmp_path / "out" / "best.pt"

    def kill(old, new):
        if Path(new).name == "ckpt.pt" and best.is_file() and checkpoints.load(best)["iter_num"] == 8:
            raise KeyboardInterrupt
        replace(old, new)

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", kill)
        run("out")
    out = tmp_path / "out"
    assert [checkpoints.load(out / name)["iter_num"] for name in ("ckpt.pt", "best.pt")] == [8, 8]
    assert not best.samefile(out / "ckpt.pt")  # which was saved before the evaluation, and does not know of it
    run("out", init_from="resume")
    for name in ("ckpt.pt", "best.pt"):
        ours, theirs = (checkpoints.load(folder / name) for folder in (out, whole))
        assert helpers.equal(ours["model"], theirs["model"]) and ours["iter_num"] == theirs["iter_num"]
    assert (out / "best.pt").samefile(out / "ckpt.pt") == has_links
    run("out", init_from="resume", max_iters=9, learning_rate=1e3)  # a worse one leaves the best as it is
    assert [checkpoints.load(out / name)["iter_num"] for name in ("ckpt.pt", "best.pt")] == [9, 8]


@pytest.mark.parametrize("script", [evaluate, meters])
def test_an_out_that_cannot_be_written_is_refused_before_anything_is_measured(script, tmp_path, helpers, monkeypatch):
    (tmp_path / "folder.json").mkdir()
    monkeypatch.setattr(script, "load_model", lambda *words, **keys: (None, {}))
    monkeypatch.setattr(script, "data_of", lambda *words: pytest.fail("the work has begun"))
    reasons = {"gone/a.json": "No such file", "/proc/a.json": ""}
    for name, reason in (reasons | dict.fromkeys(("folder.json", "/dev/null"), "is a link, a folder")).items():
        message = helpers.error_of(script.main, [f"--out={tmp_path / name}", "--checkpoint=x", "--device=cpu"])
        assert f"cannot be written ({reason}" in message
    assert os.listdir(tmp_path) == ["folder.json"] and not os.path.isfile("/dev/null")


def write_half(file):
    files.write_whole(file, lambda part: (part.write(b"half"), part.flush(), os._exit(9)))


def test_a_killed_write_leaves_the_old_file_and_what_can_be_told_from_files_of_others(tmp_path):
    file, theirs = tmp_path / ("ä" * 127), tmp_path / ".out.json.123.tmp"  # 254 bytes: the greatest length
    theirs.write_text("no name that we give")
    files.write_text(file, "old")
    killed = FORKS.Process(target=write_half, args=(file,))
    killed.start()
    assert end(killed) == 9
    assert file.read_text() == "old" and len(list(tmp_path.glob(".*.tmp"))) == 2
    files.remove_leftovers(tmp_path)
    files.write_text(file, "new")
    assert file.read_text() == "new" and set(tmp_path.iterdir()) == {file, theirs}


# -- Names, folders, terminals -----------------------------------------------------------------------------------------

MAINS = {  # script: (its main, what it is given beside the path)
    "evaluate": (evaluate.main, "--device=cpu --checkpoint"), "meters": (meters.main, "--device=cpu --checkpoint"),
    "sample": (sample.main, "--device=cpu --checkpoint"), "export": (export.main, "--safetensors=new --checkpoint"),
    "train": (train.main, "--out_dir=new --dataset"), "init_from": (train.main, "--out_dir=new --init_from"),
}  # fmt: skip


@pytest.mark.parametrize("path", ["x" * 5000, "x/" * 2500, "a\0b", "/dev/zero", "pipe", "pipe.py", "zero.py"])
def test_a_path_that_is_no_file_is_one_line_in_every_script_and_nothing_is_waited_for(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkfifo("pipe.py")
    os.symlink("/dev/zero", "zero.py")
    calls = [(main, [*words.split()[:-1], f"{words.split()[-1]}={path}"]) for main, words in MAINS.values()]
    calls += [(plot.main, [path]), (text_prepare.main, [path, "--out_dir=new"]), (train.main, [path])]
    calls += [(open_dataset, path), (configurator.read_config_file, path)]
    calls += [(backcopy_prepare.main, [f"--text={path}", "--out_dir=new"])]
    for call, argument in calls:
        with pytest.raises(configurator.UserError) as caught:
            call(argument)
        assert str(caught.value).isprintable() and len(str(caught.value)) <= 920
    assert sorted(os.listdir()) == ["pipe", "pipe.py", "zero.py"]


def test_processes_that_share_a_folder_may_claim_it_at_once(tmp_path):
    claim = "import sys; from base.files import claim; claim(sys.argv[1], 'experiment'); open(sys.argv[1] + '/a', 'w')"
    command = [sys.executable, "-c", claim, tmp_path / "shared"]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(8)]
    assert [process.wait(timeout=300) for process in processes] == [0] * 8
    assert sorted(os.listdir(tmp_path / "shared")) == [".nanogate", "a"]


def test_a_benchmark_writes_into_no_folder_of_somebody_else(tmp_path, helpers):
    (tmp_path / "ops.json").write_text("theirs")
    message = helpers.error_of(bench.main, ["ops", "--device=cpu", "--threads=1", f"--out_dir={tmp_path}"])
    assert message.startswith(f"{tmp_path}: holds what is not of this project (ops.json)")
    assert os.listdir(tmp_path) == ["ops.json"] and (tmp_path / "ops.json").read_text() == "theirs"


def test_a_character_that_the_terminal_lacks_is_printed_escaped(monkeypatch, helpers):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    script = "import sys\nfrom base import configurator\n"
    script += "def main(argv):\n    print('\\ud800 é')\n    print('é', file=sys.stderr)\n"
    done = helpers.script("-c", script + "configurator.run(main)")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\\ud800 \\xe9\n", b"\\xe9\n")


@pytest.mark.parametrize("size", ["2", "two"])
def test_what_is_left_of_torchrun_in_the_environment_is_named(size, monkeypatch, helpers):
    monkeypatch.setenv("WORLD_SIZE", size)
    assert f"WORLD_SIZE={size} is set, and RANK, LOCAL_RANK" in helpers.error_of(Processes, "cpu", 1)


# -- Memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        dict(n_embd=1 << 20), dict(vocab_size=1 << 40), dict(batch_size=1 << 40), dict(block_size=1 << 40),
        dict(gradient_accumulation_steps=1 << 40), dict(attention="mamba2", position="none", state_size=1 << 40),
        dict(mlp_ratio=1e38),  # more than can be counted
    ],
)  # fmt: skip
def test_too_large_a_run_is_refused_before_anything_is_written(helpers, mqar, tmp_path, keys):
    error = helpers.error_of(helpers.train, mqar, tmp_path / "out", **keys)
    assert "of memory are needed, and there are" in error or "tensors that are too large" in error
    assert not (tmp_path / "out").exists()


def test_memory_counts_gradients_of_what_is_trained_alone(helpers, mqar, tmp_path, monkeypatch):
    keys = dict(n_layer=1, n_head=2, n_embd=512, block_size=32, batch_size=2, gate="headwise", max_iters=1)
    monkeypatch.setattr(memory, "ram_limit", lambda: 16e6)  # weights are 12.7 MB, those of gates 4 kB
    assert "of memory are needed" in helpers.error_of(helpers.train, mqar, tmp_path / "out", **keys)
    helpers.train(mqar, tmp_path / "out", **keys, gates_only=True)


def test_a_container_a_job_around_it_and_a_ulimit_allow_less_than_the_machine_has(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUP_OF_PROCESS", tmp_path / "gone")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    whole = memory.ram_limit()
    assert whole > 1 << 28
    monkeypatch.setattr(memory, "CGROUP_OF_PROCESS", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("0::/job/step\n")
    assert memory.ram_limit() == whole
    for folder, limit, least in [("job/step", "max", whole), ("job", "4000", 4000), ("", "2500", 2500)]:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        assert memory.ram_limit() == least
    monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (99, 999))
    assert memory.ram_limit() == 99


def growth(folder):
    """By how many MB the peak of this process grows while it reads thousands of batches."""
    dataset, peaks = open_dataset(folder), []
    for steps in (range(1500), range(1500, 6000)):  # more than five epochs: whatever is kept of an epoch is there
        for step in steps:
            dataset.batch("train", step, seed=0, batch_size=16, block_size=64)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return (peaks[1] - peaks[0]) / (2**20 if sys.platform == "darwin" else 2**10)


def growth_of_sampling(mixer):
    """By how many MB the peak of this process grows while a model makes tokens, each with 16 KB of k and v."""
    config = GPTConfig(attention=mixer, n_layer=1, n_embd=64, n_head=1, block_size=64, vocab_size=64)
    stream, peaks = GPT(config).eval().stream(torch.zeros(1, 1, dtype=torch.long), 2000), []
    for n_tokens in (200, 600):
        for _ in range(n_tokens):
            next(stream)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return (peaks[1] - peaks[0]) / (2**20 if sys.platform == "darwin" else 2**10)


@pytest.mark.parametrize("mixer", ["softmax", "gla"])
def test_a_long_sample_takes_no_more_memory_than_a_short_one(mixer):
    with ProcessPoolExecutor(1, FORKS) as fresh:
        assert fresh.submit(growth_of_sampling, mixer).result() < 3


def test_thousands_of_batches_take_no_more_memory(tmp_path, helpers):
    helpers.write_text(tmp_path, ["a text of some length. " * 10_000], ["text"])
    with ProcessPoolExecutor(1, FORKS) as fresh:
        assert fresh.submit(growth, tmp_path).result() < 3
