"""bench.py: its intervals and verdicts, its sides, and that its parts take every mixer. No test here asserts a time."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import types

import numpy as np
import pytest
import torch
from conftest import ROOT

import bench
import train
from data.pystdlib import prepare as pystdlib
from data.shards import Dataset
from model import GLA, MIXERS, GPTConfig
from speed import costs, forms, gaterun, gpu, measure
from speed.config import BenchConfig

NANOGPT = '''
from types import SimpleNamespace as GPTConfig

import torch


class GPT(torch.nn.Module):
    """The part of nanoGPT's model.py that bench.py calls."""

    def __init__(self, config):
        super().__init__()
        print("number of parameters: 0.00M")
        self.wte = torch.nn.Embedding(config.vocab_size, 8)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)

    def forward(self, idx, targets):
        logits = self.wte(idx) @ self.wte.weight.T
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def generate(self, idx, max_new_tokens):
        print("asked for", max_new_tokens)
'''


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(pystdlib, "sysconfig", types.SimpleNamespace(get_path=lambda name: json.__path__[0]))
    return BenchConfig(device="cpu", dtype="float32", threads=1, pairs=6, long_pairs=6)


@pytest.fixture
def beside_nanogpt(cpu, tmp_path):
    cpu.against = str(tmp_path / "model.py")
    (tmp_path / "model.py").write_text(NANOGPT)
    return cpu


@pytest.fixture
def small_parts(monkeypatch):
    """The parts of bench.py on models of one narrow layer, without processes of their own; MIXERS has a class more. A
    batch is one row of 8 tokens."""
    monkeypatch.setitem(MIXERS, "mine", type("Mine", (GLA,), {}))
    small, of_length = dict(n_layer=1, n_head=2, n_embd=16), forms.forms
    monkeypatch.setattr(measure, "GPTConfig", lambda **keys: GPTConfig(**keys | small | dict(state_size=4)))
    for name, value in dict(
        peak_mb=lambda config, name, batch, keys: 2.0 if name == "nanoGPT" else 1.0,
        random_batch=lambda config, V, B, T: measure.random_batch(config, V, 1, 8),
        gemm_rate=lambda device, dtype: 1e9, CONTEXTS=(64, 4096), TOKENS=3,
    ).items():  # fmt: skip
        monkeypatch.setattr(costs, name, value)
    monkeypatch.setattr(forms, "forms", lambda T, device: of_length(T // 64, device))
    monkeypatch.setattr(gaterun, "in_new_processes", lambda function, tasks, at_once: [function(*t) for t in tasks])
    monkeypatch.setattr(gaterun, "OF_NANOGPT", gaterun.OF_NANOGPT + " --max_iters=6 --learning_rate=1e-2")
    monkeypatch.setattr(gaterun, "RECIPES", {"record": "config/gaterun.py --max_iters=3", "other": "--block_size=64"})
    monkeypatch.setitem(bench.PARTS, "gpu", lambda config, report: None)  # below


# -- Pairs, ratios, intervals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, low, high", [(6, 1, 6), (9, 2, 8), (20, 6, 15), (30, 10, 21)])
def test_the_interval_of_a_median_is_that_of_the_tables(n, low, high):
    values = np.random.default_rng(0).permutation(np.arange(1.0, n + 1))  # the value is its rank
    assert measure.median_interval(values) == ((n + 1) / 2, low, high)
    assert measure.median_interval([0.5]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    "interval, to_reach, not_to_exceed",
    [
        ((2.0, 3.0), "met", "unresolved"), ((1.9, 2.1), "unresolved", "unresolved"), ((1.0, 2.0), "unresolved", "met"),
        ((1.0, 1.9), "missed", "met"), ((2.1, 3.0), "met", "missed"),
    ],
)  # fmt: skip
def test_a_claim_is_met_where_its_whole_interval_clears_the_target(interval, to_reach, not_to_exceed):
    assert (measure.judge(*interval, 2.0), measure.judge(*interval, 2.0, at_most=True)) == (to_reach, not_to_exceed)


def test_sides_are_warmed_once_and_then_take_turns_in_both_orders(cpu):
    calls = []
    seconds = measure.interleave({name: lambda name=name: calls.append(name) for name in "ab"}, 4, cpu)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab" + "ba"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4}


@pytest.mark.parametrize("name", ["gla", measure.NANOGPT])
def test_a_side_is_trained_on_its_batch_by_steps_of_a_run(name, beside_nanogpt):
    batch, sizes = measure.random_batch(beside_nanogpt, 11, 2, 8), dict(n_layer=1, n_head=2, n_embd=16)
    side = measure.Side(beside_nanogpt, name, batch, vocab_size=11, block_size=8, **sizes)
    losses = [side.loss().item(), side() or side.loss().item()]
    assert losses[1] < losses[0]
    assert all(p.grad is None for p in side.model.parameters())
    torch.manual_seed(1)
    again = measure.Side(beside_nanogpt, name, batch, vocab_size=11, block_size=8, **sizes)
    assert again.loss().item() == losses[0]  # sides start alike


# -- The parts, with every mixer and one that a user adds, and results/bench -------------------------------------------

PAGE = ROOT / "results" / "bench" / "README.md"
GATERUN = PAGE.parents[1] / "gaterun"
EXPECTED = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", (ROOT / "docs" / "gpu.md").read_text(), re.M))
CLAIMS = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE.read_text(), re.M))


def test_all_parts_measure_every_mixer_and_claim(small_parts, beside_nanogpt, tmp_path, monkeypatch, capsys, helpers):
    seen, batch, out = [], Dataset.batch, tmp_path / "out"
    monkeypatch.setattr(Dataset, "batch", lambda *args, **keys: seen.append(batch(*args, **keys)) or seen[-1])
    words = dict(device="cpu", dtype="float32", threads=1, pairs=6, long_pairs=6, longest=1024)
    bench.main(["all", *helpers.words(**words, against=beside_nanogpt.against, out_dir=out)])
    printed = capsys.readouterr().out.splitlines()
    about, parts = json.loads(printed[-1]), {file.stem: json.loads(file.read_text()) for file in out.glob("*.json")}
    assert set(parts) == set(bench.PARTS) - {"gpu"} and {claim["name"] for claim in about["claims"]} == set(CLAIMS)
    for kind in ("claims", "ratios"):
        raw = {ratio["name"]: ratio for part in parts.values() for ratio in part[kind]}
        pairs = {name: ratio.pop("pairs") for name, ratio in raw.items()}
        assert raw == {ratio["name"]: ratio for ratio in about[kind]}
        for name, ratio in raw.items():
            n = 1 if "memory" in name else 8 if "processor time" in name else 6
            assert len(pairs[name]) == n and any(name in line and ratio.get("met", "") in line for line in printed)
            assert ratio["ratio"] == pytest.approx(np.median([above / below for above, below in pairs[name]]))
    flops = {f"training step, {row['gate']} / none": row["flops"] + 0.02 for row in parts["overhead"]["rows"]}
    for claim in about["claims"]:
        assert claim["at_most"] == ("at most" in CLAIMS[claim["name"]])
        assert claim["target"] == round(flops.get(claim["name"], 1.0), 4)

    mixers = [name for name in MIXERS if name != "monarch"]  # its texts have at most 64 tokens
    for part in (parts["length"], parts["decode"]):
        assert {row["mixer"] for row in part["rows"]} == set(mixers)
    names = {name: [ratio["name"] for ratio in part["ratios"]] for name, part in parts.items()}
    assert names["length"] == [f"{mixer}: step at 1,024, share of the GEMM rate" for mixer in mixers]
    # only a state that does not grow promises a time that does not
    grown = [f"{mixer}: token at context 4,096 / at 64" for mixer in mixers if mixer != "softmax"]
    assert names["decode"][: len(grown)] == grown and len(names["decode"]) == len(grown) + 4 and len(names["ops"]) == 24
    assert {line for line in printed if line.startswith("asked")} == {"asked for 3"}  # nanoGPT makes as many tokens
    text, theirs, ours = parts["gaterun"]["rows"]
    assert set(text["sha256_of_text"]) == {"train", "val"} and theirs["p"] == 1.0
    assert [(row["side"], row["steps"]) for row in (theirs, ours)] == [("nanoGPT", 6), ("record", 3)]
    for row in (theirs, ours):
        losses = [run["val_loss"] for run in row["runs"]]
        assert [run["seed"] for run in row["runs"]] == [*range(8)] and row["val_loss"] == pytest.approx(sum(losses) / 8)
        assert {run["labels"] for run in row["runs"]} == {theirs["runs"][0]["labels"]}
    theirs, ours, next_seed = (seen[i][0] for i in (0, 6, 9))  # the first batch of a run
    assert torch.equal(theirs, ours) and not torch.equal(theirs, next_seed)


def test_the_part_gpu_has_every_row_that_docs_gpu_expects_or_what_it_needs(cpu, tmp_path, monkeypatch, helpers):
    def run(command, **keys):  # a run of one process in this one
        if "--nproc_per_node=1" not in command:
            return start(command, **keys)
        train.main(command[command.index(f"{ROOT}/train.py") + 1 :])
        return types.SimpleNamespace(returncode=0)

    start = subprocess.run
    monkeypatch.setattr(subprocess, "run", run)
    bench.main(["gpu", *helpers.words(device="cpu", dtype="float32", threads=1, out_dir=tmp_path / "out")])
    stored, page = json.loads((tmp_path / "out/gpu.json").read_text()), (tmp_path / "out/gpu.md").read_text()
    rows = {row["row"]: row for row in stored["rows"]}
    assert stored["commit"] in page and all(f"| {name} | {row['measured']} |" in page for name, row in rows.items())
    assert EXPECTED.keys() <= rows.keys() | {name.partition(": ")[0] for name in rows}
    assert all(row["unit"] for row in stored["rows"])
    found = {name: row["measured"] for name, row in rows.items() if row["agrees"] == "not compared"}
    needs = {name: row["agrees"] for name, row in rows.items() if name not in found}
    few = {"memory / estimate": "needs a GPU", "compiled / plain": "needs 1 GPU", "8 processes / 1": "needs 8 GPUs"}
    assert few.items() <= needs.items() and len(needs) == len(few) + 9  # mixers that fla might compute
    assert [found.pop(name) for name in ("graphs", "attention", "waits")] == [1, "flash_attention_for_cpu", 0.0]
    assert all(value > 0 for value in found.values()) and found["loss / kernels"] < 1
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]


@pytest.mark.parametrize("words", ["--block_size=32", "--block_size=64 --gradient_accumulation_steps=4"])
def test_a_recipe_that_the_gate_run_would_measure_otherwise_is_refused(words, cpu, text, monkeypatch, helpers):
    monkeypatch.setattr(gaterun, "RECIPES", {"mine": words})
    assert "a recipe of the gate run has" in helpers.error_of(gaterun.run_of, cpu, str(text), 0, "mine")
    for word, said in [("--seeds=", "name one"), ("--against=.", "is no file"), ("--recipes=a", "recipes='a'")]:
        assert said in helpers.error_of(bench.main, ["gaterun", word])


def test_a_part_that_is_stopped_leaves_what_it_has_measured(cpu, tmp_path, monkeypatch, helpers):
    def part(config, report):
        report.row(row="one", measured=1.0, unit="ms", expected="", agrees="yes")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setitem(bench.PARTS, "gpu", part)
    with pytest.raises(SystemExit, match="143"):
        bench.main(["gpu", *helpers.words(device="cpu", dtype="float32", out_dir=tmp_path)])
    assert [row["row"] for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]] == ["one"]
    assert "| one | 1.0 | ms |" in (tmp_path / "gpu.md").read_text()
    assert "was killed" in helpers.error_of(measure.in_new_processes, os._exit, [(9,)])


def test_on_a_gpu_a_row_is_compared_and_one_that_fails_says_why(cpu, tmp_path, monkeypatch):
    def speed_of(words, folder, n, *more):
        if "--attention=gla" in more:
            raise ValueError("out of\nmemory")
        return {1: 300e3, 2: 290e3, 8: 100e3}[n]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(pystdlib, "main", lambda argv: None)
    monkeypatch.setattr(gpu, "profiled", lambda *args: {"attention": "math", "waits": 0.7, "launches: loss": 73})
    monkeypatch.setattr(gpu, "graphs", lambda *args: 2)
    monkeypatch.setattr(gpu, "speed_of", speed_of)
    filled = measure.Report("gpu")
    gpu.bench_gpu(dataclasses.replace(cpu, device="cuda", out_dir=str(tmp_path)), filled)
    agrees = {row["row"]: row["agrees"] for row in filled.rows}
    off = {"attention", "waits", "graphs", "8 processes / 1", "compiled / plain"}
    assert {name for name in agrees if agrees[name] == "no"} == off
    assert agrees.pop("fla / plain: gla") == "out of" and set(agrees.values()) == {"yes", "no"}


def test_what_docs_gpu_expects_follows_from_the_model_and_the_card():
    with torch.device("meta"):
        model = measure.GPT(GPTConfig(vocab_size=50_304))
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
    found = gpu.within([*events(f"{parts},{others}", cpu), *events("kernel 24 25, backward 21 40", cuda)])
    names = {part: [one.name for one in of if one.name != part] for part, of in found.items() if part}
    assert names == {"forward": ["before", "behind"], "loss": ["in_loss"], "backward": ["of_autograd"]}


@pytest.mark.parametrize("name", ["softmax", "gated_deltanet"])
def test_a_timed_call_of_decoding_makes_the_tokens_that_generate_makes(name, monkeypatch):
    model = measure.GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=32, attention=name))
    expected = model.generate(torch.zeros(2, 8, dtype=torch.long), costs.TOKENS, temperature=0)
    positions, features = [], model.features
    monkeypatch.setattr(model, "features", lambda *args: positions.append(args[2]) or features(*args))
    assert costs.prefilled(model, 7, B=2)() == expected[:, -1:].tolist()
    assert positions == [0, *range(7, 7 + costs.TOKENS)]


def test_the_forms_compute_what_the_loop_computes_on_the_same_inputs():
    for function, inputs in forms.forms(70, "cpu", H=2, D=8).values():
        o, gradients = function(forms.chunked, **inputs), forms.both_ways(function, inputs, forms.chunked)()
        torch.testing.assert_close(o, function(forms.recurrent, **inputs), rtol=1e-3, atol=1e-3)
        assert len(gradients) == len(inputs) and all(g.abs().max() > 0 for g in gradients)
        attended = forms.softmax(inputs["q"], inputs["k"], inputs["v"])
        torch.testing.assert_close(attended[:, 0], inputs["v"][:, 0])  # causal, and heads are not mixed


def test_the_page_has_every_claim_as_its_stored_pairs_give_it_and_a_reason_where_it_is_not_met():
    claims = []
    for file in PAGE.parent.rglob("*.json"):
        stored = json.loads(file.read_text())
        for ratio in stored["ratios"] + stored["claims"]:
            numbers = measure.median_interval([a / b for a, b in ratio["pairs"]])
            assert numbers == pytest.approx((ratio["ratio"], ratio["low"], ratio["high"]))
            assert "met" not in ratio or ratio["met"] == measure.judge(*numbers[1:], ratio["target"], ratio["at_most"])
        claims += stored["claims"] if file.parent == PAGE.parent else []
    assert set(CLAIMS) == {claim["name"] for claim in claims} and len(claims) <= 18
    for claim in claims:
        numbers, target, verdict = CLAIMS[claim["name"]].split(" | ")
        interval = "" if claim["low"] == claim["high"] else f" [{claim['low']:.2f}, {claim['high']:.2f}]"
        assert numbers == f"{claim['ratio']:.2f}{interval}"
        assert target == ("at most " * claim["at_most"] + f"{claim['target']:g}")
        assert verdict.partition(":")[0] == claim["met"] and (claim["met"] == "met" or ": " in verdict)


def test_the_tables_of_the_gate_run_are_its_json_file_s_and_its_recipes_are_those_of_the_code():
    stored, page = json.loads((GATERUN / "gaterun.json").read_text()), (GATERUN / "README.md").read_text()
    text, theirs, *rows = stored["rows"]
    assert all(text["sha256_of_text"][split] in page for split in ("train", "val")) and text["python"] in page
    assert {row["side"]: row["command"] for row in rows} == gaterun.RECIPES
    for row, ratio in zip(rows, stored["ratios"], strict=True):
        time = f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        assert f"| {row['side']} | {row['steps']:,} | {time} | {row['val_loss']:.3f} | {row['spread']:.3f} |" in page
        assert f"| {row['p']:.3f} |" in page
    for gain in gaterun.gains(stored["rows"]):
        low, high = gain["interval"]
        assert f"| {gain['lower_by']:.3f} [{low:.3f}, {high:.3f}] | {gain['p']:.3f} |" in page
    assert f"| nanoGPT | 2,000 | 1 | {theirs['val_loss']:.3f} | {theirs['spread']:.3f} |" in page
