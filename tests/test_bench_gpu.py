"""bench.py gpu: its parts on a CPU, its limits, its rows and what docs/gpu.md expects. No test here asserts a time."""

import contextlib
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import types

import pytest
import torch
from conftest import ROOT, wait_until
from test_bench import NANOGPT

import bench
from base.files import read_jsonl
from data.pystdlib import prepare as pystdlib
from model import GPT, MIXERS, GPTConfig
from speed import agreement, gpu, profiles, rows, scripts, steps
from speed.config import BenchConfig

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
    found = rows.newest(f"{config.out_dir}/gpu.jsonl")
    return {row["row"]: row for row in found if row["table"] == name}


def measured(config, part, monkeypatch):
    """Runs a part in this process. No row may be an error."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    gpu.PARTS[part].measure(config, rows.Rows(config, part))
    assert [row for row in rows.newest(f"{config.out_dir}/gpu.jsonl") if "error" in row] == []
    return table_of(config, part)


# -- Each part, tiny ---------------------------------------------------------------------------------------------------


def test_the_table_of_agreement_has_every_mixer_both_dtypes_plain_compiled_and_fla(cpu, monkeypatch):
    for part in ("agreement", "agreement_compiled", "agreement_fla"):
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


def forgetful(features, idx, state=None, start=0):
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
    agreement.compare(cpu, rows.Rows(cpu, "agreement"), "softmax", "torch", False)
    row = table_of(cpu, "agreement")["softmax, kernels=torch, plain, float32"]
    assert not row["agrees"] and (row["differs"] == "") == (what == "cache")


def test_a_card_may_err_three_times_as_much_as_the_cpu_in_the_same_dtype():
    exact, ones = {"logits": torch.ones(4), "loss": torch.ones(()), "gradient of a": torch.ones(4)}, torch.ones(4)
    usual = exact | {"gradient of a": 1.1 * ones}
    for off, agrees in ((1.29, True), (1.31, False)):
        row = agreement.verdict(exact | {"gradient of a": off * ones}, exact, usual, 0.03)
        assert row["agrees"] == agrees and row["of"] == "a" and row["allowed"] == pytest.approx(0.3)
    assert not agreement.verdict(exact | {"loss": torch.tensor(1.04)}, exact, usual, 0.03)["agrees"]


def test_the_scripts_are_run_and_a_run_that_was_stopped_ends_with_the_same_bits(cpu, monkeypatch):
    def in_this_process(command, start=subprocess.run, **keys):
        name, *words = command[1:]
        if not name.startswith(str(ROOT)):
            return start(command, **keys)
        importlib.import_module(name.removeprefix(f"{ROOT}/").removesuffix(".py")).main(words)
        return types.SimpleNamespace(returncode=0, stdout="recurrence: a form\n", stderr="")

    monkeypatch.setattr(scripts.subprocess, "run", in_this_process)
    table = measured(cpu, "scripts", monkeypatch)
    assert all(row["agrees"] for row in table.values()) and table["SIGTERM, softmax"]["status"] == 143
    assert {"train, Muon", "sample.py", "evaluate.py", "meters.py", "resumed = whole, gla,softmax"} < table.keys()
    assert table["train, softmax"]["form"] == "a form" and table["resumed = whole, softmax"]["most"] == 0


def test_the_speeds_of_the_parts_are_there_for_both_sides_every_mixer_and_way_to_decode(cpu, monkeypatch):
    assert "versions" in measured(cpu, "card", monkeypatch)
    table = measured(cpu, "step", monkeypatch)
    assert {f"{side}, {how}" for side in ("ours", "nanoGPT", "nanoGPT / ours") for how in ("plain", "compiled")} < {
        *table
    }
    assert all(row["ms"] > 0 and row["mfu"] > 0 for name, row in table.items() if "/" not in name)
    assert len(table_of(cpu, "kernels of a compiled step")) == 15
    table = measured(cpu, "mixers", monkeypatch)
    assert {f"{mixer}, {T}, kernels=torch" for mixer in steps.RECURRENT for T in ("1,024 tokens", "4,096 tokens")} < {
        *table
    }
    assert {f"fla / plain: {name}" for name in steps.RECURRENT} < table_of(cpu, "predicted").keys()
    assert len(measured(cpu, "decode", monkeypatch)) == 2 * 2 * len(steps.HOW)
    table = measured(cpu, "compiled_gla", monkeypatch)
    assert table["gla, kernels=torch: graphs"]["graphs"] == 1 and not table["gla, kernels=torch: graphs"]["breaks"]


def test_the_kernel_that_torch_takes_is_named_for_each_kind_of_softmax_layer(cpu, monkeypatch):
    table = measured(cpu, "attention", monkeypatch)
    assert len(table) == 2 * len(steps.KERNELS)
    kernels = {name: table[f"{name}, float32"]["kernel"] for name in steps.KERNELS}
    written_out = {name for name, kernel in kernels.items() if kernel == "none"}
    assert written_out == {"forget gate", "soft-cap"} and set(kernels.values()) == {"none", "flash_attention_for_cpu"}


def test_every_row_that_docs_gpu_expects_is_measured_or_says_what_it_needs(cpu, monkeypatch):
    def run(command, start=subprocess.run, **keys):  # a run of one process in this one
        if "--nproc_per_node=1" not in command:
            return start(command, **keys)
        profiles.train.main(command[command.index(f"{ROOT}/train.py") + 1 :])
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(profiles.subprocess, "run", run)
    for part in ("profile", "processes"):
        measured(cpu, part, monkeypatch)
    table = table_of(cpu, "predicted")
    others = {"compiled / plain", "fla / plain"}  # of the parts step and mixers
    assert EXPECTED.keys() - others <= table.keys() | {name.partition(": ")[0] for name in table}
    assert all(row["unit"] for row in table.values())
    found = {name: row["measured"] for name, row in table.items() if row["agrees"] == "not compared"}
    needs = {name: row["agrees"] for name, row in table.items() if name not in found}
    assert needs == {"memory / estimate": "needs a GPU", "8 processes / 1": "needs 8 GPUs"}
    assert [found.pop(name) for name in ("graphs", "attention", "waits")] == [1, "flash_attention_for_cpu", 0.0]
    assert all(value > 0 for value in found.values()) and found["loss / kernels"] < 1


# -- The driver: processes, limits, rows -------------------------------------------------------------------------------

FAKES = {  # what the process of a part does
    "card": "write('card', 'one'); write('card', 'one', again=True)",
    "step": "write('step', 'one'); time.sleep(600)",
    "decode": "write('decode', 'one'); os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)",
    "mixers": "raise SystemExit(3)",
    "agreement": "wait_for('scripts'); write('agreement', 'one')",
    "scripts": "write('scripts', 'one'); wait_for('agreement')",
}


@pytest.fixture
def fakes(cpu, monkeypatch):
    """Parts whose processes do what FAKES says. Returns a call of bench.py gpu."""

    def call(parts, **more):
        keys = dict(device="cpu", dtype="float32", threads=1, out_dir=cpu.out_dir) | more
        bench.main(["gpu", f"--parts={parts}", *helpers_words(keys)])

    def command_of(config, name):
        return [sys.executable, "-c", f"file = {config.out_dir!r} + '/gpu.jsonl'\n{WRITE}\n{FAKES[name]}"]

    def helpers_words(keys):
        return [f"--{name}={value}" for name, value in keys.items()]

    monkeypatch.setattr(gpu, "command_of", command_of)
    monkeypatch.setitem(gpu.PARTS, "step", gpu.PARTS["step"]._replace(limit=3 / gpu.SLOWER))
    return call


WRITE = """
import json, os, signal, time

def wait_for(table):
    while table not in open(file).read():
        time.sleep(0.01)

def write(table, row, **numbers):
    with open(file, "a") as rows:
        rows.write(json.dumps(dict(table=table, row=row) | numbers) + chr(10))
"""


def test_a_part_that_fails_or_runs_past_its_limit_keeps_its_rows_and_the_next_one_runs(cpu, fakes):
    fakes("step,mixers,card")
    parts = table_of(cpu, "parts")
    assert parts["step"]["outcome"] == "stopped: ran past its limit" and "one" in table_of(cpu, "step")
    assert parts["mixers"]["outcome"].startswith("failed with status 3") and parts["card"]["outcome"] == "passed"
    assert table_of(cpu, "card") == {"one": {"table": "card", "row": "one", "again": True}}  # the newer one
    page = (ROOT / cpu.out_dir / "gpu.md").read_text()
    assert "## card\n\n| row | again |\n|---|---|\n| one | True |" in page
    stored = json.loads((ROOT / cpu.out_dir / "gpu.json").read_text())
    assert stored["rows"] == rows.newest(f"{cpu.out_dir}/gpu.jsonl") and stored["commit"] in page


def test_named_parts_add_to_the_rows_and_a_whole_call_starts_anew(cpu, fakes, monkeypatch):
    fakes("card")
    with open(f"{cpu.out_dir}/gpu.jsonl", "a", encoding="utf-8") as file:
        file.write('{"table": "card", "ro')  # cut short by a kill
    fakes("mixers")
    assert table_of(cpu, "card") and {*table_of(cpu, "parts")} == {"card", "mixers"}
    monkeypatch.setattr(gpu, "PARTS", {"mixers": gpu.PARTS["mixers"]})
    fakes("all")
    assert not table_of(cpu, "card") and {*table_of(cpu, "parts")} == {"mixers"}


def test_what_has_no_time_left_is_skipped(cpu, fakes):
    fakes("card,mixers", seconds=gpu.LEAST - 1)
    assert {row["outcome"] for row in table_of(cpu, "parts").values()} == {"skipped: no time left"}
    assert not table_of(cpu, "card")


def test_a_call_that_is_stopped_keeps_what_it_has_and_leaves_no_process(cpu, fakes):
    with pytest.raises(SystemExit, match="143"):
        fakes("card,decode,mixers")
    found = json.loads((ROOT / cpu.out_dir / "gpu.json").read_text())
    assert found["stopped"] and found["rows"][-1]["table"] == "decode"
    assert "## decode" in (ROOT / cpu.out_dir / "gpu.md").read_text()


def test_parts_that_time_nothing_run_side_by_side_and_all_others_alone(cpu, fakes):
    assert gpu.groups([*gpu.PARTS])[:3] == [
        ["card"], ["agreement", "agreement_compiled", "agreement_fla", "scripts"], ["step"],
    ]  # fmt: skip
    fakes("agreement,scripts")  # each waits for the other
    assert [row["outcome"] for row in table_of(cpu, "parts").values()] == ["passed", "passed"]


def test_a_process_is_killed_with_what_it_has_started(tmp_path):
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with open(tmp_path / "log", "w", encoding="utf-8") as log, gpu.process_of([sys.executable, "-c", code], log):
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    with contextlib.suppress(ProcessLookupError):  # it may not have been waited for yet
        wait_until(lambda: os.kill(pid, 0) or b"State:\tZ" in open(f"/proc/{pid}/status", "rb").read())


def test_the_command_of_a_part_runs_it_in_a_process_of_its_own(cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "PARTS", {"card": gpu.PARTS["card"]})
    monkeypatch.chdir(tmp_path)
    words = ["--rehearse", "--dtype=float32", "--threads=1", "--out_dir=out"]
    bench.main(["gpu", *words])
    found = {row["row"]: row for row in read_jsonl("out/gpu.jsonl")}
    assert found["versions"]["torch"] == torch.__version__ and found["card"]["outcome"] == "passed"
    assert "==== card" in (tmp_path / "out/gpu.log").read_text()


def test_an_unknown_part_is_one_line(helpers):
    assert "parts='mixer': must be" in helpers.error_of(bench.main, ["gpu", "--parts=mixer"])


@pytest.mark.slow
def test_the_whole_rehearsal_passes_in_processes_of_its_own(tmp_path, helpers):
    (tmp_path / "model.py").write_text(NANOGPT)
    words = ["--rehearse", f"--against={tmp_path}/model.py", f"--out_dir={tmp_path}/out", "--seconds=7200"]
    subprocess.run([sys.executable, ROOT / "bench.py", "gpu", *words], check=True)
    found = rows.newest(tmp_path / "out" / "gpu.jsonl")
    assert {row["row"] for row in found if row.get("outcome") == "passed"} == {*gpu.PARTS}
    assert [row for row in found if "error" in row or row.get("agrees") is False] == []


# -- What a row says on a GPU, and what is expected of it --------------------------------------------------------------


def test_on_a_gpu_a_row_is_compared_and_one_that_fails_says_why(cpu):
    written = rows.Rows(cpu, "profile")
    written.is_gpu = True

    def fails():
        raise ValueError("out of\nmemory")

    for name, value in {"attention": "math", "waits": 0.7, "loss": 9.0, "graphs": 1, "fla / plain: gla": 1.5}.items():
        written.predicted(name, value)
    written.predicted("8 processes / 1", None, "needs 8 GPUs")
    assert written.attempt("graphs", fails) is None
    agrees = {name: row["agrees"] for name, row in table_of(cpu, "predicted").items()}
    assert agrees == {
        "attention": "no", "waits": "no", "loss": "yes", "graphs": "yes", "fla / plain: gla": "yes",
        "8 processes / 1": "needs 8 GPUs",
    }  # fmt: skip
    assert table_of(cpu, "profile")["graphs"]["error"] == "ValueError: out of"


def test_a_mixer_whose_step_does_not_fit_is_tried_with_a_quarter_of_the_rows(cpu, monkeypatch):
    asked = []

    def alone(config, written, row, mixer, T, keys):
        asked.append(keys.get("rows"))
        if len(asked) == 1:
            raise torch.OutOfMemoryError("too large")
        return 5.0

    monkeypatch.setattr(steps, "alone", alone)
    assert steps.mixer_alone(cpu, rows.Rows(cpu, "mixers"), "gla", 4096, "torch") == 5.0 and asked == [None, 1]
    assert steps.mixer_alone(cpu, None, "gla", 4096, "auto") is None  # without fla it is the same
    monkeypatch.setattr(cpu, "rehearse", False)
    assert [steps.sizes(cpu, T)[0] * T for T in steps.LENGTHS] == [12_288, 12_288]


def test_what_docs_gpu_expects_follows_from_the_model_and_the_card():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50_304))
    expected = {name: [float(number) for number in re.findall(r"[\d.]+", line)] for name, line in EXPECTED.items()}
    least, parameters, tokens = {name: numbers[0] for name, numbers in expected.items()}, model.n_params(), 12 * 1024
    clipping, optimizer, size = (parameters * n for n in (12 / 3.35e9, 28 / 3.35e9, 12 / 1e9))  # ms, ms, GB
    parts = least["forward"] + least["loss"] + least["backward"] + clipping + optimizer
    found = (least["kernels"], least["optimizer"], least["train.py"], least["ckpt.pt"])
    assert found == pytest.approx((parts, optimizer, tokens / parts * 500, size), rel=0.05)
    flops = 1e12 * (expected["forward"][3] + expected["backward"][3] + expected["loss"][4])
    assert flops == pytest.approx(3 * tokens * model.flops_per_token(1024), rel=0.02)
    for n in (2, 8):
        sent = 2 * (n - 1) / n * 4 * parameters
        assert expected[f"{n} processes / 1"][2:4] == pytest.approx([sent / 1e9, sent / 450e6], rel=0.1)


def test_what_runs_on_the_thread_of_autograd_belongs_to_the_part_that_waits_for_it():
    def events(text, device):  # "name start end, ..."
        for name, start, end in (words.split() for words in text.split(",")):
            span = types.SimpleNamespace(start=int(start), end=int(end))
            yield types.SimpleNamespace(name=name, device_type=device, time_range=span)

    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    parts = "loss 0 2, optimizer 2 3, forward 10 20, loss 15 19, backward 20 30"  # the first step warms up
    others = "in_first_step 0 1, before 11 12, in_loss 16 17, behind 19 20, of_autograd 22 23, log 31 32"
    found = profiles.within([*events(f"{parts},{others}", cpu), *events("kernel 24 25, backward 21 40", cuda)])
    names = {part: [one.name for one in of if one.name != part] for part, of in found.items() if part}
    assert names == {"forward": ["before", "behind"], "loss": ["in_loss"], "backward": ["of_autograd"]}
