"""
Bad numbers, bad disks, damaged files, strange prompts, impossible configs: one clear line, and nothing lost. Memory.

    python -m pytest tests/test_robust.py
"""

import configurator
from configurator import UserError

import dataclasses
import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
import time
import types

import pytest
import torch

import bench
import data.shards
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
from runs import files, outdir
from study import runner

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


def test_a_log_that_does_not_fit_on_the_disk_is_named_although_closing_it_fails_too(run, text, monkeypatch, helpers):
    def fail(*words):
        raise OSError(28, "No space left on device")

    start = outdir.OutDir._start

    def start_full(out, *words):
        start(out, *words)
        out.metrics = types.SimpleNamespace(write=len, flush=fail, close=fail, fileno=out.metrics.fileno)

    monkeypatch.setattr(outdir.OutDir, "_start", start_full)
    message = helpers.error_of(run, "out", dataset=text, max_iters=1)
    assert "metrics.jsonl: cannot be written (No space left on device)" in message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_bad_step_is_named_though_the_log_looks_later_and_the_weights_stay_good(
    run, tmp_path, helpers, capfd, monkeypatch, slow_dtypes, dtype
):
    poison(monkeypatch, 5, float("nan"))
    with pytest.raises(SystemExit) as stopped:
        run("out", dtype=dtype, eval_interval=3, log_interval=100, max_iters=30)
    assert stopped.value.code == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert "is not finite at step 5, learning rate 0.00292; " in line
    assert "first bad tensor: gradient of " in line  # the forward pass was right
    assert "out/ckpt.pt holds the last good step saved, 3;" in line
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


def test_float16_that_overflows_at_any_scale_ends(run, helpers, capfd, monkeypatch, slow_dtypes):
    update = torch.amp.GradScaler.update
    monkeypatch.setattr(torch.amp.GradScaler, "update", lambda scaler: update(scaler, 0.5))
    with pytest.raises(SystemExit):
        run("out", dtype="float16")
    assert "float16's loss scale fell below 1 and the gradient still overflows at step 0" in capfd.readouterr().err


@pytest.mark.parametrize("value", [-1e300, 3.5e38])
@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(train.TrainConfig) if "float" in str(f.type)])
def test_a_number_that_float32_has_not_is_refused_by_every_key(name, value, helpers, tmp_path):
    for set_key in (
        lambda: train.main(helpers.words(**{name: value}, out_dir=tmp_path / "out")),
        lambda: configurator.build(train.TrainConfig, {name: value}),
    ):
        assert re.match(rf"{name}=.*: must be a number (of at|above) ", helpers.error_of(set_key))


def test_the_largest_gate_bias_is_finite_in_the_weights():
    keys = dict(n_layer=1, n_embd=8, n_head=2, vocab_size=8, gate="elementwise", gate_bias=-3.4e38)
    model = GPT(GPTConfig(**keys))
    assert all(p.isfinite().all() for p in model.parameters()) and model(torch.arange(8)[None]).isfinite().all()


# ----------------------------------------------------------------------------------------------------------------------
# Disks


def test_a_disk_that_fills_up_leaves_the_checkpoint_before_and_says_what_to_do(run, tmp_path, monkeypatch, helpers):
    save, seen = torch.save, []

    def fills_up(checkpoint, file):
        save(checkpoint, file)
        seen.append(checkpoint["iter_num"])
        if checkpoint["iter_num"] == 8:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fills_up)
    message = helpers.error_of(run, "out", max_iters=12)
    assert "cannot write the checkpoint (No space left on device); the one before it is untouched: make room" in message
    assert checkpoints.load(tmp_path / "out")["iter_num"] == 4 and 8 in seen
    monkeypatch.setattr(torch, "save", save)
    run("out", max_iters=12, init_from="resume")
    run("whole", max_iters=12)
    ours, theirs = (checkpoints.load(tmp_path / name)["model"] for name in ("out", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_log_that_cannot_be_written_is_one_line(run, monkeypatch, helpers):
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    assert "cannot be written (Read-only file system)" in helpers.error_of(run, "out")


def test_a_shard_that_is_cut_short_during_a_run_ends_it_with_a_line_and_the_checkpoint_stays(
    run, mqar, tmp_path, monkeypatch, helpers
):
    shutil.copytree(mqar, tmp_path / "mqar")
    learning_rate = train.learning_rate

    def cut(config, step):
        if step == 5:
            os.truncate(tmp_path / "mqar" / "train_0000.npy", 200)
        return learning_rate(config, step)

    monkeypatch.setattr(train, "learning_rate", cut)
    message = helpers.error_of(run, "out", dataset=tmp_path / "mqar")
    assert "train_0000.npy: was cut short after it was opened" in message
    assert checkpoints.load(tmp_path / "out")["iter_num"] == 4
    monkeypatch.setattr(train, "learning_rate", learning_rate)
    run("out", init_from="resume")
    run("whole")
    ours, theirs = (checkpoints.load(tmp_path / name)["model"] for name in ("out", "whole"))
    assert helpers.equal(ours, theirs)


# ----------------------------------------------------------------------------------------------------------------------
# Damaged files


def test_every_flipped_bit_of_a_tensor_is_found(tmp_path, helpers):
    args = dict(n_layer=1, n_embd=8, n_head=2, block_size=16, vocab_size=11)
    file = tmp_path / "ckpt.pt"
    checkpoints.save(file, {"model": GPT(GPTConfig(**args)).state_dict(), "model_args": args, "iter_num": 7})
    whole = file.read_bytes()
    weight = checkpoints.load(file)["model"]["wte.weight"].numpy().tobytes()
    begin = whole.index(weight)
    for bit in range(8 * len(weight)):
        damaged = bytearray(whole)
        damaged[begin + bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert "damaged, the checksum of" in helpers.error_of(checkpoints.load, file)


def test_a_shard_is_read_through_once_and_again_when_it_was_touched(tmp_path, monkeypatch, helpers):
    write_stream(tmp_path, {"train": ["a text. " * 99], "val": ["text"]}, tokenizer=get_tokenizer("byte"), **ABOUT)
    hashed, check = [], data.shards.Shard.check
    monkeypatch.setattr(
        data.shards.Shard, "check", lambda shard, *args: hashed.append(shard.path.name) or check(shard, *args)
    )
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**8)  # the files are of this very second
    open_dataset(tmp_path)
    assert not (tmp_path / ".verified.json").exists()
    hashed.clear()
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**10)
    open_dataset(tmp_path)
    assert sorted(hashed) == ["train_0000.npy", "train_documents.npy", "val_0000.npy", "val_documents.npy"]
    for damage in (b"", b"garbage", b"[]", b"{}", b'{"train_0000.npy": []}'):  # of what is remembered
        hashed.clear()
        open_dataset(tmp_path)
        assert hashed == []
        (tmp_path / ".verified.json").write_bytes(damage)
        open_dataset(tmp_path)
        assert len(hashed) == 4
    content = bytearray((tmp_path / "train_0000.npy").read_bytes())
    content[-3] ^= 1
    (tmp_path / "train_0000.npy").write_bytes(content)
    os.utime(tmp_path / "train_0000.npy", ns=(now, now))
    assert "train_0000.npy: is not the file that meta.json describes" in helpers.error_of(open_dataset, tmp_path)


def test_a_data_set_in_a_folder_that_cannot_be_written_to_opens(tmp_path, monkeypatch):
    write_stream(tmp_path, {"train": ["a text"], "val": ["text"]}, tokenizer=get_tokenizer("byte"), **ABOUT)
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**10)
    refused = []

    def refuse(*args):
        refused.append(args)
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(data.shards, "write_text", refuse)
    open_dataset(tmp_path)
    assert refused and not (tmp_path / ".verified.json").exists()


def test_a_config_that_asks_for_terabytes_is_refused_before_they_are(tmp_path, helpers):
    args = dict(n_layer=1, n_embd=8, n_head=2, block_size=16, vocab_size=11)
    weights = GPT(GPTConfig(**args)).state_dict()
    for name, value in [
        ("n_layer", 10**9),
        ("n_layer", 9999),
        ("head_dim", 2**30),
        ("mlp_ratio", 1e9),
        ("n_embd", 2**20),
    ]:
        checkpoints.save(tmp_path / "ckpt.pt", {"model": weights, "model_args": args | {name: value}})
        assert helpers.error_of(checkpoints.load_model, tmp_path).startswith(str(tmp_path))


FIELDS = {
    "iter_num": [-5, True, 2**70, "3", None, [3], 3.0],
    "best_val_loss": ["low", math.nan, [], 10**400, True],
    "seconds": [math.nan, -1.0, "x", math.inf],
    "eval_seconds": [math.nan, -1.0, "x"],
    "dtype": ["float13", 32, ["float32"]],
    "rng": [torch.zeros(3, dtype=torch.uint8), torch.zeros(5056), "x", [1] * 5056, None],
    "run_id": [7, "x" * 5000],
    "model_args": [[], 3],
    "config": [[], {3: 1}, "x"],
    "optimizer": [[], 3],
    "versions": [3, {"torch": 2}],
    "data": [
        [],
        {"path": "x" * 5000},
        {"path": 3},
        {"tokenizer": ["byte"]},
        {"sha256": 1},
        {"name": {}},
        {"vocab_size": -1},
        {"first_ids": 0},
        {"first_ids": [-1]},
    ],
}


def test_a_field_of_a_checkpoint_that_is_not_what_it_should_be_is_named_before_out_dir_is_touched(
    run, text, tmp_path, helpers
):
    right = checkpoints.load(run("out", dataset=text, max_iters=1))
    out = tmp_path / "other"
    out.mkdir()
    for name, values in FIELDS.items():
        for value in values:
            torch.save(right | {name: value}, out / "ckpt.pt")
            before = (out / "ckpt.pt").read_bytes()
            for call in (
                lambda: run("other", dataset=text, init_from="resume"),
                lambda: sample.main(helpers.words(checkpoint=out, device="cpu", max_new_tokens=1)),
                lambda: evaluate.main(helpers.words(checkpoint=out, device="cpu")),
            ):
                message = helpers.error_of(call)
                assert "no checkpoint of this project" in message and name in message, (name, value)
            assert [file.name for file in out.iterdir()] == ["ckpt.pt"]
            assert (out / "ckpt.pt").read_bytes() == before


def test_a_tensor_that_repeats_one_number_a_billion_times_is_refused(tmp_path, helpers):
    args = dict(n_layer=1, n_embd=8, n_head=2, block_size=16, vocab_size=11)
    weights = GPT(GPTConfig(**args)).state_dict()
    weights |= {"wte.weight": torch.zeros(1, 1).expand(2**40, 8)}
    checkpoint = {"format": 1, "model": weights, "model_args": args | {"vocab_size": 2**40}}
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert "'wte.weight' is no plain tensor" in helpers.error_of(checkpoints.load_model, tmp_path)


def test_a_name_that_stands_twice_in_a_json_file_is_refused(tmp_path, helpers):
    (tmp_path / "a.json").write_text('{"a": [{"b": 1, "b": 2}]}\n')
    message = helpers.error_of(files.read_json, tmp_path / "a.json")
    assert message == f"{tmp_path / 'a.json'}: cannot be read as JSON (the key 'b' stands there twice)"
    assert "line 1: damaged; remove the line" in helpers.error_of(files.read_jsonl, tmp_path / "a.json")


NO_OUTPUTS = {
    "too long": ("x" * 251 + ".json", "must be the name of a file or folder, at most 255 bytes"),
    "no folder": ("gone/a.json", "No such file or directory"),
    "in a file": ("file/a.json", "Not a directory"),
    "a folder": ("folder.json", "is something else already"),
    "closed": ("/proc/a.json", "cannot be written"),
}


@pytest.mark.parametrize("case", NO_OUTPUTS)
@pytest.mark.parametrize("script", [evaluate, meters])
def test_an_out_that_cannot_be_written_is_refused_before_anything_is_measured(
    script, case, tmp_path, helpers, monkeypatch
):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").write_text("")
    name, reason = NO_OUTPUTS[case]
    monkeypatch.setattr(script, "load_model", lambda *words, **keys: (None, {}))
    monkeypatch.setattr(script, "open_dataset", lambda *words: pytest.fail("the work has begun"))
    message = helpers.error_of(script.main, [f"--out={tmp_path / name}", "--checkpoint=x", "--device=cpu"])
    assert message.startswith("out=") and reason in message
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.json"]


def test_a_folder_that_cannot_be_written_is_refused_before_the_benchmark_and_before_the_figure(
    tmp_path, helpers, monkeypatch
):
    monkeypatch.setattr(bench, "PARTS", {"ops": lambda config, report: pytest.fail("the work has begun")})
    for folder in ("/proc/a", __file__, f"{__file__}/a"):
        assert "cannot be written" in helpers.error_of(bench.main, ["ops", f"--out_dir={folder}", "--device=cpu"])
    monkeypatch.setattr(plot, "read_jsonl", lambda file: pytest.fail("the work has begun"))
    assert "cannot be written" in helpers.error_of(plot.main, ["/proc/self"])


@pytest.mark.parametrize("path", ["", "x" * 5000, "x/" * 2500, "a\0b", "/dev/zero", "pipe"])
def test_a_path_that_is_no_file_is_one_line_in_every_script(path, tmp_path, helpers, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for main in (evaluate.main, sample.main, export.main, meters.main):
        helpers_words = [f"--checkpoint={path}"]
        with pytest.raises(UserError) as caught:
            main(helpers_words)
        assert len(str(caught.value)) < 1000
    for main in (lambda words: plot.main(words), lambda words: text_prepare.main(words)):
        with pytest.raises(UserError) as caught:
            main([path or " "])
        assert len(str(caught.value)) < 1000
    for call in (open_dataset, configurator.read_config_file, lambda path: configurator.read_config_file(f"{path}.py")):
        with pytest.raises(UserError) as caught:
            call(path)
        assert len(str(caught.value)) < 1000
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


def test_an_export_without_a_name_is_refused(run, tmp_path, helpers):
    out = run("out", max_iters=1)
    assert "safetensors=''" in helpers.error_of(export.main, helpers.words(checkpoint=out, safetensors=""))


@pytest.mark.parametrize("out_dir", ["", " ", "a\0b", "x" * 5000, "a/" + "ä" * 128])
def test_an_out_dir_that_is_no_name_is_refused_by_every_script_and_nothing_is_written(
    out_dir, mqar, tmp_path, helpers, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = helpers.words(out_dir=out_dir)
    for main, more in [
        (train.main, helpers.words(**helpers.tiny, dataset=mqar)),
        (experiment.main, [str(experiment.HERE / "config" / "experiments" / "minimum.py")]),
        (bench.main, []),
        (text_prepare.main, [__file__]),
    ]:
        message = helpers.error_of(main, [*more, *words])
        assert "out_dir=" in message and "must be the name of a file or folder" in message
    assert not list(tmp_path.iterdir())


def test_a_benchmark_writes_into_no_folder_of_somebody_else(tmp_path, helpers, monkeypatch):
    monkeypatch.setattr(bench, "PARTS", {"ops": lambda config, report: report.row(form="no decay", T=1024, ms=1.0)})
    monkeypatch.setattr(bench, "gemm_rate", lambda device, dtype: 1e9)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    (theirs / "data.json").write_text('{"theirs": 1}')
    words = ["ops", "--device=cpu", "--threads=1"]
    message = helpers.error_of(bench.main, [*words, f"--out_dir={theirs}"])
    assert message.startswith(f"{theirs}: holds what is not of a bench (data.json); name another folder, or add --over")
    assert [file.name for file in theirs.iterdir()] == ["data.json"]
    bench.main([*words, f"--out_dir={ours}"])
    bench.main([*words, f"--out_dir={ours}"])
    assert (ours / ".nanogate").read_text() == "bench\n" and (ours / "ops.json").is_file()


def test_processes_that_share_a_folder_may_claim_it_at_once(tmp_path):
    at_once = 8
    claim = "import sys; from runs.files import claim; claim(sys.argv[1], 'experiment'); open(sys.argv[1] + '/a', 'w')"
    command = [sys.executable, "-c", claim, str(tmp_path / "shared")]
    processes = [subprocess.Popen(command, cwd=experiment.HERE) for _ in range(at_once)]
    assert [process.wait(timeout=300) for process in processes] == [0] * at_once
    assert sorted(file.name for file in (tmp_path / "shared").iterdir()) == [".nanogate", "a"]


# ----------------------------------------------------------------------------------------------------------------------
# Links, where our files are written


def write_data(folder):
    write_stream(folder, {"train": ["a text " * 99], "val": ["text"]}, tokenizer=get_tokenizer("byte"), **ABOUT)


# {script: (names that it writes in its folder, or that could be guessed for a file that it writes there)}
WRITTEN = {
    "train": "config.json ckpt.pt best.pt code .config.json.tmp .metrics.jsonl.tmp .ckpt.pt.tmp .best.pt.tmp "
    "..nanogate.tmp",
    "data": "meta.json train_0000.npy val_0000.npy train_documents.npy .verified.json ..verified.json.tmp "
    ".new/meta.json .new/.meta.json.tmp .new/train_0000.npy .new/.train_0000.npy.tmp",
    "meters": ".meters.json.tmp page.png .page.png.tmp",
    "evaluate": ".lengths.json.tmp",
    "plot": "page.png .page.png.tmp",
    "export": "model.safetensors config.json .model.safetensors.tmp .config.json.tmp .nanogate",
    "bench": ".ops.json.tmp ops.json .nanogate",
    "experiment": "claims.json report.html .claims.json.tmp .report.html.tmp .accuracy.png.tmp accuracy.png .nanogate",
}


@pytest.fixture
def written(tmp_path, text, run, helpers, monkeypatch):
    """written(script) -> (the folder that a script writes to, which it has written to before; a call that does)."""
    out, of = tmp_path / "out", ["--device=cpu", f"--checkpoint={tmp_path / 'out'}"]

    def call(script):
        if script == "data":
            return write_data(out) or open_dataset(out)
        if script == "experiment":
            config = experiment.HERE / "config" / "experiments" / "minimum.py"
            return experiment.main([str(config), f"--out_dir={out}", "--run=false"])
        if script == "bench":
            return bench.main(["ops", f"--out_dir={out}", "--device=cpu", "--threads=1"])
        if script == "train" or not out.exists():
            (out / ".nanogate").unlink(missing_ok=True)  # the folder of somebody else
            run("out", dataset=text, max_iters=1, overwrite=True)
        return {
            "train": lambda: None,
            "meters": lambda: meters.main([*of, "--rows=2", "--score_batches=1", "--draw=true"]),
            "evaluate": lambda: evaluate.main([*of, f"--out={out / 'lengths.json'}", "--lengths=16,32"]),
            "plot": lambda: plot.main([str(out)]),
            "export": lambda: export.main([of[1], f"--safetensors={out / 'export'}"]),
        }[script]()

    now = time.time_ns() + 10**10
    monkeypatch.setattr(time, "time_ns", lambda: now)  # the data are not of this very second

    def prepared(script):
        if script == "experiment":
            out.mkdir()
            shutil.copy(experiment.HERE / "results" / "minimum" / "rows.jsonl", out)
        return out / "export" if script == "export" else out, lambda: call(script)

    monkeypatch.setattr(bench, "PARTS", {"ops": lambda config, report: report.row(form="no decay", T=1024, ms=1.0)})
    monkeypatch.setattr(bench, "gemm_rate", lambda device, dtype: 1e9)
    return prepared


@pytest.mark.parametrize("script", WRITTEN)
def test_a_link_at_a_name_that_is_written_is_replaced_or_left_alone_and_never_followed(script, written, tmp_path):
    folder, call = written(script)
    call()
    precious = {name: tmp_path / f"precious{i}" for i, name in enumerate(WRITTEN[script].split())}
    for name, file in precious.items():
        file.write_text((folder / name).read_text() if name == ".nanogate" else "{}")
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.rmtree(folder / name) if name == "code" else (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(file)
    before = {name: file.read_bytes() for name, file in precious.items()}
    call()
    assert {name: file.read_bytes() for name, file in precious.items()} == before
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp") and name not in precious]


OPENED = []  # (path, flags) of every file that is opened to be written, while a test listens


def listen(event, args):
    if event == "open" and OPENED and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
        OPENED.append((str(args[0]), args[2]))


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="this system opens links in no other way")
@pytest.mark.parametrize("script", WRITTEN)
def test_every_file_is_opened_so_that_no_link_is_followed(script, written, tmp_path):
    """An audit of the interpreter sees every file that Python opens: a writer that is added later is found, too."""
    if "listening" not in vars(os):
        os.listening = sys.addaudithook(listen)  # it cannot be removed
    _, call = written(script)
    OPENED[:] = [("", 0)]
    try:
        call()
        call()
        opened = [(path, flags) for path, flags in OPENED[1:] if path.startswith(str(tmp_path))]
    finally:
        OPENED.clear()
    assert len(opened) > 1
    assert not [path for path, flags in opened if not flags & (os.O_EXCL | os.O_NOFOLLOW)]


KINDS_OF_LINK = {"link": os.symlink, "hard link": os.link, "pipe": lambda precious, path: os.mkfifo(path)}


@pytest.mark.parametrize("kind", KINDS_OF_LINK)
@pytest.mark.parametrize(
    ("name", "write"),
    {
        "lock": lambda out, run: run("out", overwrite=True),
        "lock of a resumed run": lambda out, run: run("out", init_from="auto"),
        "metrics.jsonl": lambda out, run: run("out", init_from="resume", max_iters=2),
        ".new/lock": lambda out, run: write_data(out),
        "rows.jsonl": lambda out, run: runner.append_row(out, {}),
        "log.txt": lambda out, run: runner.start_process(["train.py", {}], out, 1, None, 1),
    }.items(),
)
def test_a_file_that_is_locked_or_appended_to_is_no_link_and_no_pipe(name, write, kind, run, text, tmp_path, helpers):
    out, precious = tmp_path / "out", tmp_path / "precious"
    run("out", dataset=text, max_iters=1)
    saved, path = (out / "ckpt.pt").read_bytes(), out / name.split()[0]
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    precious.write_text("")  # no row, so that nothing else is wrong with it
    KINDS_OF_LINK[kind](precious, path)
    message = helpers.error_of(write, out, lambda *words, **keys: run(*words, dataset=text, **keys))
    assert message == f"{path}: is a link, a pipe or a device, where a file of this project belongs; remove it"
    assert precious.read_bytes() == b"" and (out / "ckpt.pt").read_bytes() == saved


def test_a_folder_for_new_data_that_is_a_link_is_refused_and_its_target_keeps_its_files(tmp_path, helpers):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "precious").write_text("x")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / ".new").symlink_to(tmp_path / "theirs")
    assert f"{tmp_path / 'data' / '.new'}: is a link" in helpers.error_of(write_data, tmp_path / "data")
    assert os.listdir(tmp_path / "theirs") == ["precious"]


def test_even_a_temporary_name_that_somebody_knows_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "0" * 2 * n)
    (tmp_path / "precious").write_text("x")
    (tmp_path / f".out.json.{'0' * 16}.tmp").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        files.write_whole(tmp_path / "out.json", lambda file: file.write(b"y"))
    assert (tmp_path / "precious").read_text() == "x" and not (tmp_path / "out.json").exists()


KILLED = """
import os, sys
from runs.files import write_whole
write_whole(sys.argv[1], lambda file: (file.write(b"half"), file.flush(), os._exit(9)))
"""


def test_what_kills_leave_of_a_file_goes_with_the_next_write_of_it_and_what_is_being_written_stays(tmp_path, helpers):
    pytest.importorskip("fcntl")
    file, theirs = tmp_path / "out.json", tmp_path / ".out.json.123.tmp"
    theirs.write_text("no name that we give")
    for i in range(2):
        assert helpers.script("-c", KILLED, file).returncode == 9
        assert len(list(tmp_path.glob(".*.tmp"))) == 2, i

    def write(outer):
        outer.write(b"outer")
        files.write_whole(file, lambda inner: inner.write(b"inner"))  # another process, in the middle of this write
        assert file.read_bytes() == b"inner"

    files.write_whole(file, write)
    assert file.read_bytes() == b"outer" and set(tmp_path.iterdir()) == {file, theirs}


def test_a_name_of_the_greatest_length_can_be_written(tmp_path):
    file = tmp_path / ("ä" * 127)  # 254 bytes
    files.write_whole(file, lambda out: out.write(b"x"))
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("logger", ["jsonl", "tensorboard"])
@pytest.mark.parametrize("how", [{"overwrite": True}, {"init_from": "resume", "max_iters": 2}])
def test_event_files_of_others_are_never_removed(run, text, tmp_path, helpers, how, logger):
    pytest.importorskip("tensorboard")
    out, theirs = run("out", dataset=text, max_iters=1), tmp_path / "theirs"
    for folder in (theirs, out / "tensorboard"):
        folder.mkdir()
        (folder / "events.out.tfevents.1.host.2").write_text("of another program")
    (theirs / "events.out.tfevents.1.host.2.nanogate").write_text("of another run")
    run("out", dataset=text, logger=logger, **how)
    assert (out / "tensorboard" / "events.out.tfevents.1.host.2").read_text() == "of another program"
    shutil.rmtree(out / "tensorboard")
    (out / "tensorboard").symlink_to(theirs)
    saved = (out / "ckpt.pt").read_bytes()
    if logger == "tensorboard":
        message = helpers.error_of(run, "out", dataset=text, logger=logger, **how | {"max_iters": 3})
        assert message == f"{out / 'tensorboard'}: is a link, and event files are written to no other folder; remove it"
        assert (out / "ckpt.pt").read_bytes() == saved
    else:
        run("out", dataset=text, logger=logger, **how)
    assert len(list(theirs.iterdir())) == 2


# ----------------------------------------------------------------------------------------------------------------------
# safetensors


def test_an_export_gives_the_same_model_and_starts_runs(run, text, tmp_path, helpers, capsys):
    pytest.importorskip("safetensors")
    out, exported = run("out", dataset=text, attention="mamba2", gate="elementwise"), tmp_path / "export"
    export.main(helpers.words(checkpoint=out, safetensors=exported))
    assert {file.name for file in exported.iterdir()} == {".nanogate", "model.safetensors", "config.json"}
    (a, _), (b, about) = (checkpoints.load_model(path) for path in (out, exported))
    idx = torch.arange(20)[None]
    assert torch.equal(a(idx), b(idx)) and about["iter_num"] == 8 and about["data"]["tokenizer"] == "byte"
    for path in (exported, exported / "model.safetensors"):
        capsys.readouterr()
        again = run(
            "again", dataset=text, attention="mamba2", gate="elementwise", init_from=path, max_iters=1, overwrite=True
        )
        taken, of = re.search(rf"starting from {path}: (\d+) of (\d+) tensors taken", capsys.readouterr().out).groups()
        assert taken == of == str(len(a.state_dict()))
        first, last = helpers.metrics(again, "eval")[0], helpers.metrics(out, "eval")[-1]
        assert first["val_loss"] == last["val_loss"]
    for overwrite in (False, True):
        message = helpers.error_of(export.export, out, out, overwrite)
        assert message == f"{out}: holds the model that is to be written; name another folder"
    export.export(out, exported)  # once more, into its own
    content = bytearray((exported / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (exported / "model.safetensors").write_bytes(content)
    assert "model.safetensors: damaged, or not the file that" in helpers.error_of(checkpoints.load_model, exported)


@pytest.mark.parametrize("write", ["safetensors", "to_hf"])
def test_an_export_brings_the_tokenizer_of_the_data_if_it_is_still_the_one_of_the_run(write, tmp_path, helpers):
    pytest.importorskip("safetensors")
    file, model = tmp_path / "tokenizer.json", GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=9, mlp="swiglu"))
    file.write_text("{}")
    about = {"path": str(tmp_path), "tokenizer": f"tokenizer.json {hashlib.sha256(b'{}').hexdigest()[:16]}"}
    (tmp_path / "run").mkdir()
    state = {"model": model.state_dict(), "model_args": vars(model.config), "data": about}
    checkpoints.save(tmp_path / "run" / "ckpt.pt", state)
    export.main(helpers.words(checkpoint=tmp_path / "run", **{write: tmp_path / "export"}))
    assert (tmp_path / "export" / "tokenizer.json").read_text() == "{}"
    file.write_text("[]")  # of other data, which were written there since
    export.main(helpers.words(checkpoint=tmp_path / "run", **{write: tmp_path / "other"}))
    assert not (tmp_path / "other" / "tokenizer.json").exists()


def test_without_safetensors_one_line_says_how_to_get_it(run, tmp_path, helpers, monkeypatch):
    out = run("out", max_iters=1)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    message = helpers.error_of(export.export, out, tmp_path / "export")
    assert message == "safetensors is not installed: pip install safetensors"


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
        ([3], dict(temperature=-1.0), "temperature=-1.0: must be at least 0"),
        ([3], dict(temperature=float("nan")), "temperature=nan: must be at least 0"),
        ([3], dict(top_k=0), "top_k=0: must be at least 1, or None"),
        ([3], dict(top_p=0.0), "top_p=0.0: must be above 0 and at most 1, or None"),
        ([3] * 10, dict(max_new_tokens=8), "cosformer: position 17 is past block_size=16"),
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


@pytest.mark.parametrize("name", MIXERS)
def test_a_model_in_bfloat16_runs_and_is_near_the_other(name):
    torch.manual_seed(0)
    keys = dict(n_layer=2, n_embd=32, n_head=2, block_size=16, vocab_size=11, gate="elementwise", qk_norm=True)
    model, idx = GPT(GPTConfig(**keys, attention=name)).eval(), torch.arange(11)[None]
    expected = model(idx)
    model.bfloat16()
    torch.testing.assert_close(model(idx), expected, atol=0.02, rtol=0.05)
    assert model.generate(idx, 4).shape == (1, 15)


# ----------------------------------------------------------------------------------------------------------------------
# Impossible configs


def test_what_is_impossible_has_its_message(run, text, mqar, tmp_path, helpers):
    for keys, expected in [
        (dict(n_embd=17), "n_embd=17: must be a multiple of n_head=2"),
        (dict(max_iters=0), "max_iters=0: must be a whole number of at least 1"),
        (dict(attention="mamba"), "did you mean 'mamba2'?"),
        (dict(dataset=text, block_size=10**6), "fewer than block_size + 1"),
        (dict(vocab_size=5), "vocab_size=5: "),
        (dict(keep_checkpoints=-1), "keep_checkpoints=-1: must be a whole number of at least 0"),
    ]:
        assert expected in helpers.error_of(run, "out", **keys), keys
    for content, expected in [
        (b"", "empty"),
        (b"\xff\n", "is not UTF-8 text (byte 0)"),
        (b"one line", "one line of text"),
    ]:
        (tmp_path / "a.txt").write_bytes(content)
        words = [str(tmp_path / "a.txt"), f"--out_dir={tmp_path / 'data'}"]
        assert expected in helpers.error_of(text_prepare.main, words)


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


@pytest.mark.skipif(sys.platform == "win32", reason="no getrusage")
def test_thousands_of_batches_take_no_more_memory(tmp_path, helpers):
    texts = {"train": ["a text of some length. " * 10_000], "val": ["text"]}
    write_stream(tmp_path, texts, tokenizer=get_tokenizer("byte"), **ABOUT)
    ended = helpers.script("-c", PEAK + BATCHES, tmp_path)
    assert float(ended.stdout) < 3, ended.stderr.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="no getrusage")
@pytest.mark.parametrize("name", ["gla", "gated_deltanet"])
def test_a_long_sample_takes_no_more_memory_than_a_short_one(helpers, name):
    ended = helpers.script("-c", PEAK + SAMPLE, name)
    assert float(ended.stdout) < 3, ended.stderr.decode()
