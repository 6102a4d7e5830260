"""bench.py: its intervals and verdicts, its sides, and that its parts take every mixer. No test here asserts a time."""

import json
import os
import re
import types

import numpy as np
import pytest
import torch
from conftest import ROOT

import bench
from data.pystdlib import prepare as pystdlib
from data.shards import Dataset
from model import GLA, MIXERS, GPTConfig
from ops.recurrence import recurrent
from speed import costs, forms, gaterun, measure
from speed.config import BenchConfig
from speed.costs import of_any_length

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
        TOKENS=3,
    ).items():  # fmt: skip
        monkeypatch.setattr(costs, name, value)
    monkeypatch.setattr(forms, "forms", lambda T, device: of_length(T // 64, device))
    monkeypatch.setattr(gaterun, "in_new_processes", lambda function, tasks, at_once: [function(*t) for t in tasks])
    monkeypatch.setattr(gaterun, "OF_NANOGPT", gaterun.OF_NANOGPT + " --max_iters=6 --learning_rate=1e-2")
    monkeypatch.setattr(gaterun, "RECIPES", {"record": "config/gaterun.py --max_iters=3", "other": "--block_size=64"})
    monkeypatch.setitem(bench.PARTS, "gpu", lambda config, report: None)  # test_bench_gpu.py


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


def test_a_ratio_is_of_pairs_measured_in_turn_and_a_target_makes_it_a_claim(cpu, capsys):
    report = measure.Report("mine")
    report.ratio("memory", [3.0], [2.0])
    report.compare(cpu, "time", lambda: None, lambda: None, 6, target=1e9, at_most=True)
    assert report.ratios[0]["ratio"] == 1.5 and len(report.claims[0]["pairs"]) == 6
    assert report.claims[0]["met"] == "met" and "at most 1e+09: met" in capsys.readouterr().out


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

    mixers = of_any_length()  # monarch's texts have at most 64 tokens
    assert len(mixers) == 12 and {"softmax", "mamba3"} < set(mixers)
    names = {name: [ratio["name"] for ratio in part["ratios"]] for name, part in parts.items()}
    assert names["length"] == [f"{mixer}: tokens/s at 1,024 / at 1,024" for mixer in mixers]
    assert names["decode"][: len(mixers)] == [f"{mixer}: token at context 4,096 / at 64" for mixer in mixers]
    assert len(names["decode"]) == len(mixers) + 2 and len(names["ops"]) == 18 and len(names["overhead"]) == 10
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


@pytest.mark.parametrize("words", ["--block_size=32", "--block_size=64 --gradient_accumulation_steps=4"])
def test_a_recipe_that_the_gate_run_would_measure_otherwise_is_refused(words, cpu, text, monkeypatch, helpers):
    monkeypatch.setattr(gaterun, "RECIPES", {"mine": words})
    assert "a recipe of the gate run has" in helpers.error_of(gaterun.run_of, cpu, str(text), 0, "mine")
    for word, said in [("--seeds=", "name one"), ("--against=.", "is no file"), ("--recipes=a", "recipes='a'")]:
        assert said in helpers.error_of(bench.main, ["gaterun", word])
    assert "against=None" in helpers.error_of(bench.main, ["train"])


def test_a_part_that_is_killed_in_a_process_of_its_own_is_one_line(cpu, helpers):
    assert "was killed" in helpers.error_of(measure.in_new_processes, os._exit, [(9,)])


@pytest.mark.parametrize("name", ["softmax", "gated_deltanet"])
def test_a_timed_call_of_decoding_makes_the_tokens_that_generate_makes(name, monkeypatch):
    model = measure.GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=32, attention=name))
    expected = model.generate(torch.zeros(2, 8, dtype=torch.long), costs.TOKENS, temperature=0)
    positions, features = [], model.features
    monkeypatch.setattr(model, "features", lambda *args: positions.append(args[2]) or features(*args))
    assert costs.prefilled(model, 7, B=2)() == expected[:, -1:].tolist()
    assert positions == [0, *range(7, 7 + costs.TOKENS)]


def test_the_forms_compute_what_the_loop_computes_on_the_same_inputs(monkeypatch):
    found = forms.forms(70, "cpu", H=2, D=8)
    outputs = {name: function(**inputs) for name, (function, inputs) in found.items()}
    for function, inputs in found.values():
        gradients = forms.both_ways(function, inputs)()
        assert len(gradients) == len(inputs) and all(g.abs().max() > 0 for g in gradients)
    q, k, v = found["no decay"][1].values()
    torch.testing.assert_close(forms.softmax(q, k, v)[:, 0], v[:, 0])  # causal, and heads are not mixed
    monkeypatch.setattr(forms, "chunked", recurrent)
    for name, (function, inputs) in found.items():
        torch.testing.assert_close(outputs[name], function(**inputs), rtol=1e-3, atol=1e-3)


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
    for gain in gaterun.gains_of_gates(stored["rows"]):
        low, high = gain["interval"]
        assert f"| {gain['lower_by']:.3f} [{low:.3f}, {high:.3f}] | {gain['p']:.3f} |" in page
    assert f"| nanoGPT | 2,000 | 1 | {theirs['val_loss']:.3f} | {theirs['spread']:.3f} |" in page
