"""bench.py gpu: its parts on a CPU, its limits, its rows and what docs/gpu.md expects. No test here asserts a time."""

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from conftest import ROOT, wait_until
from test_bench import NANOGPT

import bench
from base import files
from data.pystdlib import prepare as pystdlib
from model import GPT, MIXERS, GPTConfig
from speed import agreement, gpu, rows, scripts, steps
from speed.config import BenchConfig
from speed.measure import TINY

EXPECTED = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", (ROOT / "docs" / "gpu.md").read_text(), re.M))


@pytest.fixture
def cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(pystdlib, "sysconfig", types.SimpleNamespace(get_path=lambda name: json.__path__[0]))
    (tmp_path / "model.py").write_text(NANOGPT)
    (tmp_path / "out").mkdir()
    keys = dict(device="cpu", dtype="bfloat16", threads=1, against=str(tmp_path / "model.py"), rehearse=True)
    return BenchConfig(**keys, out_dir=str(tmp_path / "out"))


def table_of(config, name):
    """{row: its numbers} of a table of gpu.jsonl."""
    return {row["row"]: row for row in files.read_jsonl(f"{config.out_dir}/gpu.jsonl") if row["table"] == name}


def measured(config, part, monkeypatch):
    """Runs a part in this process. No row may be an error."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    call, _ = gpu.PARTS[part]
    call(config, rows.Rows(config, part, "gpu"))
    assert [row for row in files.read_jsonl(f"{config.out_dir}/gpu.jsonl") if "error" in row] == []
    return table_of(config, part)


# -- Each part, tiny ---------------------------------------------------------------------------------------------------


def test_the_table_of_agreement_has_every_mixer_both_dtypes_plain_compiled_and_fla(cpu, monkeypatch):
    for part in ("agreement", "agreement_compiled", "agreement_fla", "agreement_fla_compiled"):
        measured(cpu, part, monkeypatch)
    table = table_of(cpu, "agreement")
    assert all(row["agrees"] and row["differs"] == "" for row in table.values())
    found = {tuple(name.split(", ")) for name in table}
    dtypes = ("float32", "bfloat16")
    assert {(name, "kernels=torch", "plain", dtype) for name in MIXERS for dtype in dtypes} < found
    assert {(name, "kernels=torch", "compiled", dtype) for name in ("softmax", "gla") for dtype in dtypes} < found
    assert {("gla", "kernels=auto", "plain", dtype) for dtype in dtypes} < found
    assert ("gla", "kernels=auto", "compiled", "bfloat16") in found
    assert {row["form"] for row in table.values()} == {"attention", "plain PyTorch, chunk by chunk"}
    assert all(("decoding" in row) == ("plain" in name) for name, row in table.items())


WRONG = {  # what a card may compute wrongly, and how it shows
    "logits": lambda model: setattr(model, "logits", lambda x, of=model.logits: 1.01 * of(x)),
    "gradient": lambda model: model.blocks[0].mixer.out_proj.weight.register_hook(lambda gradient: 1.01 * gradient),
    "missing": lambda model: model.norm.weight.requires_grad_(False),
    "nan": lambda model: model.norm.weight.register_hook(lambda gradient: torch.nan * gradient),
    "cache": lambda model: setattr(model, "features", functools.partial(forgetful, model.features)),
}


def forgetful(features, idx, state=None, start=0, document=None):
    """A cache that has lost what a step reads."""
    for tensor in (tensor for layer in state or [] for tensor in layer.values()):
        tensor.zero_()
    return features(idx, state, start)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_number_of_the_card_does_not_agree(what, cpu, monkeypatch):
    def of_card(model, *args, step_of=agreement.step_of):
        step_model = step_of(model, *args)
        WRONG[what](model)
        return step_model

    monkeypatch.setattr(agreement, "step_of", of_card)
    monkeypatch.setattr(agreement, "MIXERS", {"softmax": MIXERS["softmax"]})
    agreement.measure("torch", False, cpu, rows.Rows(cpu, "agreement", "gpu"))
    row = table_of(cpu, "agreement")["softmax, kernels=torch, plain, float32"]
    assert not row["agrees"] and (row["differs"] == "") == (what == "cache")


def test_a_card_may_err_three_times_as_much_as_the_cpu_in_the_same_dtype():
    exact, ones = {"logits": torch.ones(4), "loss": torch.ones(()), "gradient of a": torch.ones(4)}, torch.ones(4)
    usual = exact | {"gradient of a": 1.1 * ones}
    for off, agrees in ((1.29, True), (1.31, False)):
        row = agreement.verdict(exact | {"gradient of a": off * ones}, exact, usual, 0.03)
        assert row["agrees"] == agrees and ("gradient of a: 0.31, allowed 0.3" == row["differs"]) == (not agrees)
    assert not agreement.verdict(exact | {"loss": torch.tensor(1.04)}, exact, usual, 0.03)["agrees"]


def test_the_scripts_are_run_and_a_run_that_was_stopped_ends_with_the_same_bits(cpu, monkeypatch):
    def in_this_process(command, start=subprocess.run, **keys):
        name, *words = command[1:]
        if not name.startswith(str(ROOT)):
            return start(command, **keys)
        importlib.import_module(name.removeprefix(f"{ROOT}/").removesuffix(".py")).main(words)
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(scripts.subprocess, "run", in_this_process)
    table = measured(cpu, "scripts", monkeypatch)
    assert all(row["agrees"] for row in table.values()) and table["SIGTERM"]["status"] == 143
    assert {"train, Muon", "sample.py", "evaluate.py", "meters.py", "resumed = whole"} < table.keys()


def test_the_speeds_of_the_parts_are_there_for_both_sides_every_mixer_and_way_to_decode(cpu, monkeypatch):
    cpu.pairs = 6
    names = ("gla", "gated_deltanet")
    lengths = (1024, 4096)
    # one mixer is compiled: the delta rule takes ten seconds
    for part, measured_names, is_compiled in (("mixers", names, False), ("mixers_compiled", names[:1], True)):
        call = functools.partial(steps.mixers, measured_names, lengths, "auto", is_compiled)
        monkeypatch.setitem(gpu.PARTS, part, (call, 100))
    monkeypatch.setattr(steps, "peak_flops", lambda device, dtype: (1e12, ""))
    table = measured(cpu, "step", monkeypatch)
    flops, row = 3 * GPT(GPTConfig(**TINY, block_size=32)).flops_per_token(), table["ours, plain"]
    assert row["mfu"] == pytest.approx(flops * row["tokens_s"] / 1e12, rel=1e-3)
    sides = ("ours", "nanoGPT", "ours, Muon", "ours, elementwise gate")
    assert {f"{side}, {how}" for side in sides for how in ("plain", "compiled")} < {*table}
    assert table["nanoGPT, plain / ours, plain"]["ratio"] > 0
    assert all(row["mfu"] > 0 for name, row in table.items() if "nanoGPT" not in name)
    table = measured(cpu, "mixers", monkeypatch)
    assert {*table} == {f"{name}, {T:,} tokens, kernels=auto, plain" for name in names for T in lengths}
    assert len(measured(cpu, "decode", monkeypatch)) == 2 * 2 * len(steps.HOW)
    table = measured(cpu, "mixers_compiled", monkeypatch)
    assert len(table) == 2
    assert {(row["graphs"], row["breaks"]) for row in table.values()} == {(1, 0)}


def test_a_step_is_profiled_by_its_parts_and_by_its_kernels(cpu, monkeypatch):
    assert {*measured(cpu, "profile", monkeypatch)} == {"forward", "backward", "clipping", "optimizer"}
    for how in ("plain", "compiled"):
        assert "aten::mm" in (Path(cpu.out_dir) / f"kernels_{how}.txt").read_text()


# -- The driver: processes, limits, rows -------------------------------------------------------------------------------


def fake(config, written):
    """What the process of a part does."""
    part = written.part
    if part == "mixers":
        raise SystemExit(3)
    written.write("one")
    if part == "profile":
        written.write("one", again=True)
    if part == "step":
        subprocess.run([sys.executable, "-c", f"open({config.against!r}, 'w').write('{os.getpid()}'); {SLEEP}"])
    if part == "decode":
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)
    other = {"agreement": "scripts", "scripts": "agreement"}.get(part)
    wait_until(lambda: other is None or f'"table": "{other}"' in written.file.read_text())


SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def fakes(cpu, monkeypatch):
    """Parts whose processes do what `fake` does. Returns a call of bench.py gpu."""

    def call(parts, **more):
        keys = dict(device="cpu", dtype="float32", threads=1, out_dir=cpu.out_dir, against=cpu.against) | more
        bench.main(["gpu", f"--parts={parts}", *(f"--{name}={value}" for name, value in keys.items())])

    fork = multiprocessing.get_context("fork")  # a new process would import for seconds
    monkeypatch.setattr(gpu.multiprocessing, "get_context", lambda kind: fork)
    limits = {name: (fake, 1000) for name in gpu.PARTS} | {"step": (fake, 3 / gpu.SLOWER)}
    for parts in (gpu.UNTIMED, gpu.TIMED, gpu.PARTS):
        for name in parts:
            monkeypatch.setitem(parts, name, limits[name])
    return call


def test_a_part_that_fails_or_runs_past_its_limit_keeps_its_rows_and_the_next_one_runs(cpu, fakes):
    fakes("step,mixers,profile")
    parts = table_of(cpu, "parts")
    assert parts["step"]["outcome"] == "stopped: ran past its limit" and "one" in table_of(cpu, "step")
    assert parts["mixers"]["outcome"] == "failed with status 3" and parts["profile"]["outcome"] == "passed"
    assert table_of(cpu, "profile") == {"one": {"table": "profile", "row": "one", "again": True}}  # the newer one
    assert table_of(cpu, "about")["about"]["device"].startswith("cpu, ")
    with contextlib.suppress(ProcessLookupError):  # what a part has started is killed with it
        group = int((ROOT / cpu.against).read_text())
        wait_until(lambda: os.killpg(group, 0))


def test_named_parts_add_to_the_rows_and_a_whole_call_starts_anew(cpu, fakes, monkeypatch):
    fakes("profile")
    with open(f"{cpu.out_dir}/gpu.jsonl", "a", encoding="utf-8") as file:
        file.write('{"table": "profile", "ro')  # cut short by a kill
    fakes("mixers")
    assert table_of(cpu, "profile") and {*table_of(cpu, "parts")} == {"profile", "mixers"}
    monkeypatch.setattr(gpu, "PARTS", {"mixers": gpu.PARTS["mixers"]})
    fakes("all")
    assert not table_of(cpu, "profile") and {*table_of(cpu, "parts")} == {"mixers"}


def test_what_has_no_time_left_is_skipped(cpu, fakes):
    fakes("profile,mixers", seconds=gpu.LEAST - 1)
    assert {row["outcome"] for row in table_of(cpu, "parts").values()} == {"skipped: no time left"}
    assert not table_of(cpu, "profile")


def test_a_part_is_stopped_where_the_time_of_the_call_is_over(cpu, fakes, monkeypatch):
    monkeypatch.setattr(gpu, "LEAST", 0)
    fakes("agreement", seconds=1)  # which waits for a part that is not there
    assert table_of(cpu, "parts")["agreement"]["outcome"] == "stopped: ran past its limit"


def test_a_call_that_is_stopped_keeps_what_it_has(cpu, fakes):
    with pytest.raises(SystemExit, match="143"):
        fakes("profile,decode,mixers")
    assert table_of(cpu, "decode") and not table_of(cpu, "profile")


def test_parts_that_time_nothing_run_side_by_side(cpu, fakes):
    fakes("agreement,scripts")  # each waits for the other
    assert [row["outcome"] for row in table_of(cpu, "parts").values()] == ["passed", "passed"]


def test_a_part_runs_in_a_process_of_its_own(tmp_path):
    words = ["--rehearse", "--parts=decode", "--dtype=float32", "--threads=1", f"--out_dir={tmp_path}/out"]
    bench.main(["gpu", *words])
    found = {row["row"]: row for row in files.read_jsonl(tmp_path / "out" / "gpu.jsonl")}
    assert found["softmax, autocast, 64 rows"]["tokens_s"] > 0 and found["decode"]["outcome"] == "passed"


def test_an_unknown_part_is_one_line(helpers):
    assert "parts='mixer': must be" in helpers.error_of(bench.main, ["gpu", "--parts=mixer"])


@pytest.mark.slow
def test_the_whole_rehearsal_passes_in_processes_of_its_own(tmp_path, helpers):
    (tmp_path / "model.py").write_text(NANOGPT)
    words = ["--rehearse", f"--against={tmp_path}/model.py", f"--out_dir={tmp_path}/out", "--seconds=7200"]
    subprocess.run([sys.executable, ROOT / "bench.py", "gpu", *words], check=True)
    found = files.read_jsonl(tmp_path / "out" / "gpu.jsonl")
    assert {row["row"] for row in found if row.get("outcome") == "passed"} == {*gpu.PARTS}
    assert [row for row in found if "error" in row or row.get("agrees") is False] == []


def test_a_row_that_fails_says_why_and_an_infinity_is_a_text(cpu):
    written = rows.Rows(cpu, "mixers", "gpu")
    with written.attempt("gla"):
        raise ValueError("out of memory")
    written.write("kda", ms=float("inf"), rate=1 / 3)
    table = table_of(cpu, "mixers")
    assert table["gla"]["error"] == "ValueError: out of memory"
    assert (table["kda"]["ms"], table["kda"]["rate"]) == ("inf", 0.3333)


def test_what_docs_gpu_expects_follows_from_the_model_and_the_card():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50_304))
    expected = {name: [float(number) for number in re.findall(r"[\d.]+", line)] for name, line in EXPECTED.items()}
    flops = {name: expected[name].pop(0) for name in ("forward", "backward")}  # of the kernels, in TFLOP
    least, parameters, tokens = {name: numbers[0] for name, numbers in expected.items()}, model.n_params(), 12 * 1024
    clipping, optimizer = (parameters * n for n in (12 / 3.35e9, 28 / 3.35e9))  # ms
    parts = least["forward"] + least["backward"] + clipping + optimizer
    found = (least["all"], least["clipping"], least["optimizer"], least["ours, plain"])
    assert found == pytest.approx((parts, clipping, optimizer, tokens / parts * 500), rel=0.05)
    assert 1e12 * sum(flops.values()) == pytest.approx(3 * tokens * model.flops_per_token(1024), rel=0.02)
