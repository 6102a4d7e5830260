"""What a run computes on: dtypes, devices, their peaks, steps without a wait, compiled steps."""

import contextlib
import functools
import importlib
import json
import math
import os
import re
import shutil
import signal
import time
import traceback
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import evaluate
import meters
import model as nanogate
import train
from data.mqar import prepare as mqar_prepare
from data.shards import Dataset
from model import GPT, MIXERS, GPTConfig
from runs import checkpoint as checkpoints
from runs import hardware, outdir, parallel

KEYS = dict(meters=False)


def test_threads_are_the_keys_or_the_environments_or_the_cores_shared_by_the_processes(monkeypatch):
    cores = hardware.usable_cores()
    for environment, key, processes, threads in [
        ("3", 0, 1, 3), ("3", 2, 1, 2), ("3", 0, 2, 3), ("1", 0, 1, 1), ("", 0, 1, cores),
        ("1", 0, 2, max(1, cores // 2)),  # torchrun's own
    ]:  # fmt: skip
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
        assert hardware.cpu_threads(key, processes) == threads


def test_a_signal_that_comes_twice_at_once_is_one_and_a_later_one_ends_a_process_that_is_alone(monkeypatch):
    kill, seen, killed = os.kill, [], []
    monkeypatch.setattr(hardware.os, "kill", lambda pid, number: killed.append(number))
    with hardware.signals_to(seen.append):
        for late, expected in ((0, []), (0, []), (2, [signal.SIGTERM])):
            now = time.monotonic() + late
            monkeypatch.setattr(hardware.time, "monotonic", lambda now=now: now)
            kill(os.getpid(), signal.SIGTERM)
            assert (seen, killed) == ([signal.SIGTERM], expected)


def test_what_torch_cannot_do_on_mps_is_refused(monkeypatch, helpers):
    monkeypatch.setattr(hardware, "pick_device", lambda name: "mps")
    monkeypatch.setattr(hardware, "places_of_torchrun", lambda: (0, 2, 0, 2))
    assert "is for one process" in helpers.error_of(hardware.Processes, "auto", 1)
    config = train.TrainConfig(activation_checkpointing=True, dropout=0.1, vocab_size=8)
    processes = SimpleNamespace(device_type="mps", world_size=1)
    assert "another dropout" in helpers.error_of(parallel.share_out, None, config, processes, False, "float32")


def test_every_script_takes_tf32_with_its_gpu(monkeypatch):
    precisions = []
    monkeypatch.setattr(hardware, "pick_device", lambda name: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    assert hardware.Processes("auto", 1).device == "cuda:0"
    assert precisions == ["high"]
    scripts = [outdir.ROOT / f"{name}.py" for name in ("train", "evaluate", "meters", "hub/harness")]
    assert all("Processes(" in script.read_text() for script in scripts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_the_cpu_stays_near_float32(run, tmp_path, helpers, float16_on_a_cpu, dtype):
    half, full = (helpers.losses(run(name, dtype=name)) for name in (dtype, "float32"))
    assert half == pytest.approx(full, rel=5e-3) and half != full
    weights = checkpoints.load(tmp_path / dtype)["model"].values()
    assert {tensor.dtype for tensor in weights} == {torch.float32}


def test_float16_on_a_cpu_is_refused_by_every_script_before_it_writes(run, trained, mqar, tmp_path, helpers):
    half = shutil.copytree(trained, tmp_path / "half")  # trained on a GPU that has no bfloat16
    scaler = dict(scale=1.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, _growth_tracker=0)
    whole = checkpoints.load(trained)
    checkpoints.save(half / "ckpt.pt", whole | dict(dtype="float16", scaler=scaler))
    asked = dict(device="cpu", dtype="float16")
    of_trained = dict(checkpoint=trained, dataset=mqar)
    calls = {
        "train": functools.partial(run, "new", dtype="float16"),
        "resume": functools.partial(run, "half", init_from="resume", dtype="auto"),
        "evaluate": lambda: evaluate.main(helpers.words(**of_trained, **asked, out=tmp_path / "new.json")),
        "evaluate in the dtype of the run": lambda: evaluate.main(helpers.words(checkpoint=half, device="cpu")),
        "meters": lambda: meters.main(helpers.words(**of_trained, **asked, out=tmp_path / "new.json")),
        "bench": lambda: bench.main(["ops", *helpers.words(**asked, out_dir=tmp_path / "new")]),
    }
    with contextlib.suppress(SystemExit):  # lm-eval is not installed
        harness = importlib.import_module("hub.harness")
        calls["harness"] = lambda: harness.NanogateLM(checkpoint=trained, **asked)
    for name, call in calls.items():
        message = helpers.error_of(call)
        assert message.startswith("dtype=float16: on a cpu it is several times slower than float32; take float32"), name
        assert not (tmp_path / "new").exists() and not (tmp_path / "new.json").exists()


def test_a_step_whose_float16_gradient_overflows_is_skipped_and_its_row_is_json(
    run, helpers, monkeypatch, float16_on_a_cpu
):
    start_too_high = functools.partial(torch.amp.GradScaler, init_scale=2.0**60)
    monkeypatch.setattr(torch.amp, "GradScaler", start_too_high)
    out = run("half", dtype="float16", max_iters=1)
    (row,) = helpers.metrics(out, "train")  # which refuses Infinity
    assert row["grad_norm"] is None and math.isfinite(row["loss"])
    before, after = helpers.metrics(out, "eval")
    assert before["val_loss"] == after["val_loss"]
    assert checkpoints.load(out)["scaler"]["scale"] == 2.0**59


class HostReads(TorchDispatchMode):
    """The functions of ours that read a tensor's value or a count of its elements: they would wait for a GPU there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if torch.Tag.data_dependent_output in function.tags or torch.Tag.dynamic_output_shape in function.tags:
            frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(OURS)]
            places.add((frames[-1].name, frames[-1].lineno))
        return function(*args, **(kwargs or {}))


WATCHED = ("ops/", "runs/", "train.py", "model.py", "gate.py")
OURS, places = tuple(f"{outdir.ROOT}/{name}" for name in WATCHED), set()


@pytest.mark.parametrize(
    ("mixer", "dtype", "optimizer"),
    [
        ("softmax", "float32", "adamw"), ("softmax", "float16", "adamw"), ("softmax", "float32", "muon"),
        *((mixer, "bfloat16", "adamw") for mixer in ("gla", "mamba2", "kda")),
    ],
)  # fmt: skip
def test_no_step_waits_for_a_gpu(run, text, monkeypatch, float16_on_a_cpu, mixer, dtype, optimizer):
    micro_loss, zero_grad, watch = train.micro_loss, GPT.zero_grad, contextlib.ExitStack()

    def loss(*args):  # a step begins with its first one, and ends with zero_grad
        if args[3] not in watched:
            watched.append(args[3])
            watch.enter_context(HostReads())
        return micro_loss(*args)

    def last(*args, **keys):
        zero_grad(*args, **keys)
        watch.close()

    watched = places.clear() or []
    monkeypatch.setattr(train, "micro_loss", loss)
    monkeypatch.setattr(GPT, "zero_grad", last)
    keys = dict(dropout=0.1, gradient_accumulation_steps=2, max_iters=2, log_interval=1000, optimizer=optimizer)
    run("out", dataset=text, attention=mixer, gate="elementwise", dtype=dtype, **keys)
    assert watched == [0, 1] and {name for name, _ in places} <= {"cross_entropy_sum"}  # on a CPU only, for labels


def test_the_peak_of_a_gpu_is_its_data_sheets_or_measured(monkeypatch):
    monkeypatch.setattr(hardware, "gemm_rate", lambda device, dtype: 7e12)
    for name, expected in {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 PCIe": 756e12, "another": 7e12}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert hardware.peak_flops("cuda", "bfloat16")[0] == expected


def test_mfu_is_three_forward_passes_over_the_peak(run, text, helpers, capsys, monkeypatch):
    monkeypatch.setattr(train, "peak_flops", lambda device, dtype: (2e9, f"a matrix product in {dtype}, measured"))
    out = run("out", dataset=text)
    assert "MFU: against 0.002 TFLOP/s a process, a matrix product in float32, measured" in capsys.readouterr().out
    flops = json.loads((out / "config.json").read_text())["flops_per_token"]
    for row in helpers.metrics(out, "train"):
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * 3 * flops / 2e9)


def test_mfu_of_two_processes_is_over_the_peaks_of_both():
    for n in (1, 2):
        run = SimpleNamespace(processes=SimpleNamespace(world_size=n), flops_per_token=3e6, peak=(1e9, ""))
        assert train.mfu(run, 100.0) == pytest.approx(100 * 3e6 / (n * 1e9))


def test_compile_auto_is_for_long_runs_on_a_gpu():
    for asked, device, steps, is_on in [
        ("true", "cpu", 1, True), ("false", "cuda", 9999, False), ("auto", "cpu", 9999, False),
        ("auto", "cuda", 499, False), ("auto", "cuda", 500, True),
    ]:  # fmt: skip
        assert train.is_compiled(train.TrainConfig(compile=asked, max_iters=steps), device) is is_on


@pytest.mark.parametrize(  # monarch's loop over tokens is compiled once for each length
    "mixer",
    [pytest.param(m, marks=() if m in ("softmax", "gla") else pytest.mark.slow) for m in MIXERS if m != "monarch"],
)
def test_rows_of_four_lengths_are_compiled_once_and_learn_the_same(mixer, run, tmp_path, helpers, monkeypatch):
    data, compiled, seen = tmp_path / "data", [], set()
    sizes = dict(slices="10/2,16/2,24/4,32/4", vocab_size=16, train_size=40, val_size=8)
    mqar_prepare.main(helpers.words(**sizes, out_dir=data))

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


@pytest.fixture
def compiled_graphs(monkeypatch):
    """The graphs that torch.compile has made by then, each run as it is."""
    found = []

    def counting(graph, inputs):
        found.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counting))
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("asked", [{}, dict(attention="gla"), dict(optimizer="muon", dropout=0.1)])
def test_a_compiled_run_of_text_is_one_graph_whatever_it_evaluates(asked, run, text, compiled_graphs, monkeypatch):
    shapes, features = set(), GPT.features

    def spied(model, idx, *args, **keys):
        shapes.add(idx.shape)
        return features(model, idx, *args, **keys)

    monkeypatch.setattr(GPT, "features", spied)
    run("out", dataset=text, compile="true", gradient_accumulation_steps=2, meters=True, **asked)
    assert len(shapes) > 2 and len(compiled_graphs) == 1


def test_sampling_of_a_compiled_model_compiles_nothing(compiled_graphs):
    config = train.TrainConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=16, block_size=32)
    model, idx = GPT(config), torch.zeros(2, 8, dtype=torch.long)
    alone = SimpleNamespace(device="cpu", device_type="cpu", world_size=1)
    step_model = parallel.share_out(model, config, alone, True, "float32")
    step_model(idx, idx).backward()
    step_model.generate(idx, 12)
    assert len(compiled_graphs) == 1


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_run_prints_once_which_form_of_the_recurrence_each_layer_took(compiled, run, text, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    run("one", dataset=text, attention="gla,softmax", compile=compiled)
    assert capsys.readouterr().out.count("recurrence: plain PyTorch, chunk by chunk, in 1 of 2 layers\n") == 1
    run("levels", dataset=text, attention="mamba2", levels="log_linear", compile=compiled)
    assert capsys.readouterr().out.count("recurrence: plain PyTorch, by levels, in 2 of 2 layers\n") == 1
    run("none", dataset=text, compile=compiled)
    assert "recurrence" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["softmax", "lightning"])
def test_twelve_blocks_that_read_the_number_of_their_layer_are_all_compiled(name, monkeypatch):
    """By block, one layer after the other: none is left to run as it is, and a second step compiles nothing."""
    (code,) = re.findall(r"```python\n(class Lightning.*?)```", (outdir.ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=8, fail_on_recompile_limit_hit=True):
        monkeypatch.setitem(MIXERS, "lightning", None)
        exec(code, vars(nanogate).copy())
        model = GPT(GPTConfig(n_layer=12, n_head=2, n_embd=8, block_size=8, vocab_size=8, attention=name))
        keys, alone = train.TrainConfig(activation_checkpointing=True), SimpleNamespace(world_size=1, device="cpu")
        step_model, idx = parallel.share_out(model, keys, alone, True, "float32"), torch.zeros(1, 8).long()
        counted = []
        for _ in range(2):
            step_model(idx, idx).backward()
            counted.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert counted == [12, 12]
