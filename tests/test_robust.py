"""
Bad numbers, bad disks, strange paths and prompts: one clear line, and nothing lost. Memory.

    python -m pytest tests/test_robust.py
"""

import configurator

import dataclasses
import os
import re
import subprocess
import sys

import pytest
import torch

import bench
import data.text.prepare as text_prepare
import evaluate
import experiment
import export
import meters
import plot
import sample
import train
from data.shards import open_dataset
from data.tokenizer import get_tokenizer
from data.writing import write_stream
from model import GPT, MIXERS, GPTConfig
from runs import checkpoint as checkpoints
from runs import files

ABOUT = dict(generator="tests", generator_version=1, parameters={}, seed=0, name="text")


@pytest.fixture
def run(mqar, tmp_path, helpers):
    return lambda name, **keys: helpers.train(**dict(dataset=mqar, out_dir=tmp_path / name) | keys)


# ----------------------------------------------------------------------------------------------------------------------
# Numbers that are not finite


def poison(monkeypatch, at_step, how):
    """Makes the gradient, or the loss, of one step not finite."""
    micro_loss = train.micro_loss

    def poisoned(model, config, dtype, step, batch):
        return micro_loss(model, config, dtype, step, batch) * (how if step == at_step else 1)

    monkeypatch.setattr(train, "micro_loss", poisoned)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_bad_step_is_named_though_the_log_looks_later_and_the_weights_stay_good(
    run, tmp_path, helpers, capfd, monkeypatch, dtype
):
    poison(monkeypatch, 5, float("nan"))
    with pytest.raises(SystemExit) as stopped:
        run("out", dtype=dtype, eval_interval=3, log_interval=100, max_iters=30)
    assert stopped.value.code == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert "is not finite at step 5, learning rate 0.00292; " in line
    assert "first bad tensor: gradient of " in line  # the forward pass was right
    assert "out/ckpt.pt holds the last good step saved, 3" in line
    ours = checkpoints.load(tmp_path / "out")
    assert ours["iter_num"] == 3 and all(p.isfinite().all() for p in ours["model"].values())
    assert helpers.metrics(tmp_path / "out")[-1] == {"event": "stopped", "step": 5}


def test_an_infinite_gradient_never_reaches_the_weights(run, monkeypatch):
    poison(monkeypatch, 2, float("inf"))
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


def test_float16_that_overflows_at_any_scale_ends(run, capfd, monkeypatch):
    update = torch.amp.GradScaler.update
    monkeypatch.setattr(torch.amp.GradScaler, "update", lambda scaler: update(scaler, 0.5))
    with pytest.raises(SystemExit):
        run("out", dtype="float16")
    assert "float16's loss scale fell below 1 and the gradient still overflows at step 0" in capfd.readouterr().err


def test_a_number_that_float32_has_not_is_refused_by_every_key(helpers, tmp_path):
    for name in [f.name for f in dataclasses.fields(train.TrainConfig) if "float" in str(f.type)]:
        for value in (-1e300, 3.5e38):
            for call in (
                lambda name=name, value=value: train.main(helpers.words(**{name: value}, out_dir=tmp_path / "out")),
                lambda name=name, value=value: configurator.build(train.TrainConfig, {name: value}),
            ):
                assert re.match(rf"{name}=.*: must be a number (of at|above) ", helpers.error_of(call))


def test_the_largest_gate_bias_is_finite_in_the_weights():
    keys = dict(n_layer=1, n_embd=8, n_head=2, vocab_size=8, gate="elementwise", gate_bias=-3.4e38)
    model = GPT(GPTConfig(**keys))
    assert all(p.isfinite().all() for p in model.parameters()) and model(torch.arange(8)[None]).isfinite().all()


# ----------------------------------------------------------------------------------------------------------------------
# Disks


def refuse(*words):
    raise OSError(28, "No space left on device")


def at_step_5(monkeypatch, call):
    learning_rate = train.learning_rate

    def calling(config, step):
        if step == 5:
            call()
        return learning_rate(config, step)

    monkeypatch.setattr(train, "learning_rate", calling)


@pytest.mark.parametrize("what", ["ckpt.pt", "metrics.jsonl"])
def test_a_disk_that_fills_up_leaves_the_checkpoint_before_and_the_run_goes_on(
    what, run, tmp_path, monkeypatch, helpers
):
    whole, save = run("whole"), torch.save
    with monkeypatch.context() as patched:
        if what == "ckpt.pt":  # of step 8, when all of it is written
            patched.setattr(torch, "save", lambda state, file: (save(state, file), state["iter_num"] == 8 and refuse()))
            expected = "best.pt: cannot be written (No space left on device)"
        else:
            at_step_5(patched, lambda: patched.setattr(os, "fsync", refuse))
            expected = "metrics.jsonl: cannot be written (No space left on device)"
        assert expected in helpers.error_of(run, "out")
    assert checkpoints.load(tmp_path / "out")["iter_num"] == 4
    run("out", init_from="resume")
    assert helpers.equal(*(checkpoints.load(out)["model"] for out in (tmp_path / "out", whole)))


# ----------------------------------------------------------------------------------------------------------------------
# Paths and folders


def write_data(folder):
    write_stream(folder, {"train": ["a text " * 99], "val": ["text"]}, tokenizer=get_tokenizer("byte"), **ABOUT)


NO_OUTPUTS = {
    "gone/a.json": "No such file or directory",
    "file/a.json": "Not a directory",
    "folder.json": "is something else already",
    "/proc/a.json": "cannot be written",
}


@pytest.mark.parametrize("script", [evaluate, meters])
def test_an_out_that_cannot_be_written_is_refused_before_anything_is_measured(script, tmp_path, helpers, monkeypatch):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(script, "load_model", lambda *words, **keys: (None, {}))
    monkeypatch.setattr(script, "open_dataset", lambda *words: pytest.fail("the work has begun"))
    for name, reason in NO_OUTPUTS.items():
        message = helpers.error_of(script.main, [f"--out={tmp_path / name}", "--checkpoint=x", "--device=cpu"])
        assert message.startswith("out=") and reason in message
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.json"]


def test_a_benchmark_is_refused_in_folders_that_are_closed_or_of_somebody_else(tmp_path, helpers, monkeypatch):
    monkeypatch.setattr(bench, "PARTS", {"ops": lambda config, report: pytest.fail("the work has begun")})
    for folder in ("/proc/a", __file__, f"{__file__}/a"):
        assert "cannot be written" in helpers.error_of(bench.main, ["ops", f"--out_dir={folder}", "--device=cpu"])
    monkeypatch.setattr(bench, "PARTS", {"ops": lambda config, report: report.row(form="no decay", T=1024, ms=1.0)})
    monkeypatch.setattr(bench, "gemm_rate", lambda device, dtype: 1e9)
    theirs, ours, words = tmp_path / "theirs", tmp_path / "ours", ["ops", "--device=cpu", "--threads=1"]
    theirs.mkdir()
    (theirs / "data.json").write_text('{"theirs": 1}')
    message = helpers.error_of(bench.main, [*words, f"--out_dir={theirs}"])
    assert message.startswith(f"{theirs}: holds what is not of a bench (data.json); name another folder, or add --over")
    assert os.listdir(theirs) == ["data.json"]
    for _ in range(2):
        bench.main([*words, f"--out_dir={ours}"])
    assert (ours / ".nanogate").read_text() == "bench\n" and (ours / "ops.json").is_file()


@pytest.mark.parametrize("path", ["", "x" * 5000, "x/" * 2500, "a\0b", "/dev/zero", "pipe"])
def test_a_path_that_is_no_file_is_one_line_in_every_script(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    calls = [(main, [f"--checkpoint={path}"]) for main in (evaluate.main, sample.main, export.main, meters.main)]
    calls += [(plot.main, [path or " "]), (text_prepare.main, [path or " "]), (open_dataset, path)]
    for call, words in (*calls, *((configurator.read_config_file, name) for name in (path, f"{path}.py"))):
        with pytest.raises(configurator.UserError) as caught:
            call(words)
        assert len(str(caught.value)) < 1000
    assert os.listdir(tmp_path) == ["pipe"]


def test_processes_that_share_a_folder_may_claim_it_at_once(tmp_path):
    claim = "import sys; from runs.files import claim; claim(sys.argv[1], 'experiment'); open(sys.argv[1] + '/a', 'w')"
    command = [sys.executable, "-c", claim, str(tmp_path / "shared")]
    processes = [subprocess.Popen(command, cwd=experiment.HERE) for _ in range(8)]
    assert [process.wait(timeout=300) for process in processes] == [0] * 8
    assert sorted(os.listdir(tmp_path / "shared")) == [".nanogate", "a"]


# ----------------------------------------------------------------------------------------------------------------------
# Files that are written, and links in their places


def test_no_link_is_followed_to_be_written_to(run, text, tmp_path, helpers):
    out, precious = run("out", dataset=text, max_iters=1), tmp_path / "precious"
    precious.write_text("mine")

    def make_links(folder, *names):
        for name in names:
            (folder / name).unlink()
            (folder / name).symlink_to(precious)

    make_links(out, "ckpt.pt", "best.pt", "config.json", "metrics.jsonl")
    run("out", dataset=text, max_iters=1, overwrite=True)
    assert not any(file.is_symlink() for file in out.iterdir())
    for _ in range(2):
        write_data(tmp_path / "data")
        make_links(tmp_path / "data", "meta.json", "train_0000.npy")
    make_links(out, "lock")
    message = helpers.error_of(run, "out", dataset=text, max_iters=1, overwrite=True)
    assert message == f"{out}/lock: cannot be written (Too many levels of symbolic links)"
    assert precious.read_text() == "mine"


KILLED = """
import os, sys
from runs.files import write_whole
write_whole(sys.argv[1], lambda file: (file.write(b"half"), file.flush(), os._exit(9)))
"""


def test_a_write_that_is_killed_leaves_the_old_file_and_what_it_leaves_can_be_told_from_files_of_others(
    tmp_path, helpers
):
    file, theirs = tmp_path / ("ä" * 127), tmp_path / ".out.json.123.tmp"  # 254 bytes: the greatest length
    theirs.write_text("no name that we give")
    files.write_text(file, "old")
    assert helpers.script("-c", KILLED, file).returncode == 9
    assert file.read_text() == "old" and len(list(tmp_path.glob(".*.tmp"))) == 2
    files.remove_leftovers(tmp_path)
    files.write_text(file, "new")
    assert file.read_text() == "new" and set(tmp_path.iterdir()) == {file, theirs}


def test_a_name_that_stands_twice_in_a_json_file_is_refused(tmp_path, helpers):
    (tmp_path / "a.json").write_text('{"a": [{"b": 1, "b": 2}]}\n')
    message = helpers.error_of(files.read_json, tmp_path / "a.json")
    assert message == f"{tmp_path / 'a.json'}: cannot be read as JSON (the key 'b' stands there twice)"
    assert "line 1: damaged; remove the line" in helpers.error_of(files.read_jsonl, tmp_path / "a.json")


# ----------------------------------------------------------------------------------------------------------------------
# Sampling


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    args = dict(n_layer=1, n_embd=16, n_head=2, block_size=16, vocab_size=11)
    return {name: GPT(GPTConfig(**args, attention=name)).eval() for name in MIXERS}


@pytest.mark.parametrize("name", MIXERS)
def test_a_tiny_temperature_is_greedy(models, name):
    idx = torch.tensor([[1, 2, 3]])
    greedy = models[name].generate(idx, 9, temperature=0.0)
    for keys in (dict(temperature=1e-38), dict(temperature=1e-320), dict(top_p=1e-320), dict(top_k=1)):
        assert torch.equal(models[name].generate(idx, 9, **keys), greedy), keys


@pytest.mark.parametrize(
    "idx, keys, expected",
    [
        ([], {}, "the prompt is empty"),
        ([3, 11], {}, "the prompt has token id 11; the model knows 0 to 10"),
        ([-1], {}, "the prompt has token id -1"),
        ([3], dict(temperature=float("nan")), "temperature 0"),
        ([3] * 10, dict(max_new_tokens=8), "position 17 is past block_size=16"),
    ],
)
def test_what_cannot_be_sampled_is_said_before_anything_is_drawn(models, helpers, idx, keys, expected):
    keys = dict(max_new_tokens=2) | keys
    assert expected in helpers.error_of(models["cosformer"].stream, torch.tensor([idx], dtype=torch.long), **keys)


def test_a_prompt_that_is_too_long_is_refused_before_it_is_written(text, tmp_path, helpers, capsys):
    out = helpers.train(text, tmp_path / "out", attention="cosformer", max_iters=1)
    capsys.readouterr()
    words = helpers.words(checkpoint=out, start="The", max_new_tokens=31, device="cpu")
    assert "past block_size=32" in helpers.error_of(sample.main, words)
    assert capsys.readouterr().out == ""


# ----------------------------------------------------------------------------------------------------------------------
# Memory: the peak of a fresh process, in MB, after some of the work and after all of it

PEAK = """
import resource, sys, torch
torch.set_num_threads(1)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
"""
BATCHES = """
from data.shards import open_dataset
dataset = open_dataset(sys.argv[1])
def read(steps):
    for step in steps:
        dataset.batch("train", step, seed=0, batch_size=16, block_size=64)
read(range(1500))  # more than five epochs: whatever is kept of an epoch is there
before = peak()
read(range(1500, 6000))
print(peak() - before)
"""
SAMPLE = """
from model import GPT, GPTConfig
model = GPT(GPTConfig(attention=sys.argv[1], n_layer=1, n_embd=64, n_head=1, block_size=64, vocab_size=64)).eval()
stream = model.stream(torch.zeros(1, 1, dtype=torch.long), 2000)
for _ in range(500):
    next(stream)
before = peak()
for _ in stream:
    pass
print(peak() - before)
"""


@pytest.mark.parametrize("code, word", [(BATCHES, "data"), (SAMPLE, "gla"), (SAMPLE, "gated_deltanet")])
def test_thousands_of_batches_or_tokens_take_no_more_memory(tmp_path, helpers, code, word):
    if word == "data":
        texts, word = {"train": ["a text of some length. " * 10_000], "val": ["text"]}, tmp_path
        write_stream(tmp_path, texts, tokenizer=get_tokenizer("byte"), **ABOUT)
    ended = helpers.script("-c", PEAK + code, word)
    assert float(ended.stdout) < 3, ended.stderr.decode()
