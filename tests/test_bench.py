"""bench.py: its intervals, its sides, and what its parts measure. No test here asserts a time."""

import json
import math
import re
import statistics
import types

import numpy as np
import pytest
import torch
from conftest import ROOT

import bench
import model
from data.pystdlib import prepare as pystdlib
from data.shards import Dataset
from keys import TrainConfig
from model import GPT, MIXERS, MLPS, GPTConfig, token_losses
from ops.recurrence import recurrent
from speed import costs, gaterun, ideas, measure, rows
from speed.config import BenchConfig
from study.stats import exact_interval, sign_flip_test

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


def rows_of(file):
    """{row: its numbers} of a file of bench.py."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["row"]: row for row in found if row["table"] != "about"}


@pytest.fixture
def cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(pystdlib, "sysconfig", types.SimpleNamespace(get_path=lambda name: json.__path__[0]))
    return BenchConfig(device="cpu", dtype="float32", threads=1, pairs=6, out_dir=str(tmp_path))


@pytest.fixture
def beside_nanogpt(cpu, tmp_path):
    cpu.against = str(tmp_path / "model.py")
    (tmp_path / "model.py").write_text(NANOGPT)
    return cpu


@pytest.fixture
def in_this_process(monkeypatch):
    """Parts without processes of their own, and short recipes of the gate run."""

    def call(function, tasks, at_once=1):
        return [function(*task) for task in tasks]

    monkeypatch.setattr(gaterun, "in_new_processes", call)
    monkeypatch.setattr(costs, "in_new_processes", call)
    monkeypatch.setattr(gaterun, "OF_NANOGPT", gaterun.OF_NANOGPT + " --max_iters=6 --learning_rate=1e-2")
    monkeypatch.setattr(gaterun, "RECIPES", {"record": "config/gaterun.py --max_iters=3", "other": "--block_size=64"})
    monkeypatch.setitem(bench.PARTS, "gpu", lambda config, rows: None)  # test_bench_gpu.py


# -- Pairs, ratios, intervals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, low, high", [(6, 1, 6), (9, 2, 8), (20, 6, 15), (30, 10, 21)])
def test_the_interval_of_a_median_is_that_of_the_tables(n, low, high):
    values = np.random.default_rng(0).permutation(np.arange(1.0, n + 1))  # the value is its rank
    assert rows.median_interval(values) == ((n + 1) / 2, low, high)
    assert rows.median_interval([0.5]) == (0.5, 0.5, 0.5)


def test_a_ratio_is_of_pairs_measured_in_turn(cpu, tmp_path):
    written = rows.Rows(cpu, "mine")
    written.ratio("memory", [3.0], [2.0])
    written.compare("time", lambda: None, lambda: None)
    found = rows_of(tmp_path / "mine.jsonl")
    assert found["memory"]["ratio"] == 1.5 and len(found["time"]["pairs"]) == 6


def test_sides_are_warmed_once_and_then_take_turns_in_both_orders(cpu):
    calls = []
    seconds = measure.interleave({name: lambda name=name: calls.append(name) for name in "ab"}, cpu)
    assert "".join(calls) == "ab" + "abba" * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 6, "b": 6}


@pytest.mark.parametrize("name", ["gla", measure.NANOGPT])
def test_a_side_is_trained_on_its_batch_by_steps_of_a_run(name, beside_nanogpt):
    sizes = dict(B=2, n_layer=1, n_head=2, n_embd=16, vocab_size=11, block_size=8)
    side = measure.Side(beside_nanogpt, name, **sizes)
    losses = [side.loss().item(), side() or side.loss().item()]
    assert losses[1] < losses[0]
    assert all(p.grad is None for p in side.model.parameters())
    torch.manual_seed(1)
    again = measure.Side(beside_nanogpt, name, **sizes)
    assert again.loss().item() == losses[0]  # sides start alike


# -- The parts, and results/bench --------------------------------------------------------------------------------------

PAGE = ROOT / "results" / "bench" / "README.md"
GATERUN = PAGE.parents[1] / "gaterun"
CLAIMS = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE.read_text(), re.M))


def test_all_parts_measure_every_mixer_and_claim(
    in_this_process, beside_nanogpt, tmp_path, monkeypatch, capsys, helpers
):
    seen, batch, out = [], Dataset.batch, tmp_path / "out"
    monkeypatch.setattr(Dataset, "batch", lambda *args, **keys: seen.append(batch(*args, **keys)) or seen[-1])
    words = dict(rehearse=True, dtype="float32", threads=1, pairs=6, against=beside_nanogpt.against, out_dir=out)
    bench.main(["all", *helpers.words(**words)])
    printed = capsys.readouterr().out
    parts = {file.stem: rows_of(file) for file in out.glob("*.jsonl")}
    ratios = {name: row for part in parts.values() for name, row in part.items() if "pairs" in row}
    assert set(parts) == set(bench.PARTS) and CLAIMS.keys() < ratios.keys()
    for name, row in ratios.items():
        n = 1 if "memory" in name else 8 if "processor time" in name else 6
        assert len(row["pairs"]) == n and name in printed and "pairs" not in printed
        assert row["ratio"] == pytest.approx(np.median([above / below for above, below in row["pairs"]]), rel=1e-3)

    mixers = ("softmax", *measure.RECURRENT)
    assert {*parts["length"]} == {f"{mixer}: tokens/s at 16,384 / at 1,024" for mixer in mixers}
    assert {*parts["decode"]} > {f"{mixer}: token at context 4,096 / at 64" for mixer in mixers}
    assert [len(parts[name]) for name in ("train", "overhead", "decode", "ops")] == [5, 8, len(mixers) + 4, 12]
    assert {line for line in printed.splitlines() if line.startswith("asked")} == {f"asked for {measure.TOKENS}"}
    text, theirs, ours = (parts["gaterun"][name] for name in ("text", "nanoGPT", "record"))
    assert set(text["sha256_of_text"]) == {"train", "val"} and theirs["p"] == 1.0
    assert (theirs["steps"], ours["steps"]) == (6, 3)
    for row in (theirs, ours):
        losses = [run["val_loss"] for run in row["runs"]]
        assert [run["seed"] for run in row["runs"]] == [*range(8)]
        assert row["val_loss"] == pytest.approx(sum(losses) / 8, rel=1e-3)
    theirs, ours, next_seed = (seen[i][0] for i in (0, 6, 9))  # the first batch of a run
    assert torch.equal(theirs, ours[:12]) and not torch.equal(theirs, next_seed)  # rows of a batch are 12 and 32


@pytest.mark.parametrize("words", ["--block_size=32", "--block_size=64 --gradient_accumulation_steps=4"])
def test_a_recipe_that_the_gate_run_would_measure_otherwise_is_refused(words, cpu, text, monkeypatch, helpers):
    monkeypatch.setattr(gaterun, "RECIPES", {"mine": words})
    assert "a recipe of the gate run has" in helpers.error_of(gaterun.run_of, cpu, str(text), 0, "mine")
    for word, said in [("--against=none.py", "no such file"), ("--recipes=a", "recipes='a'")]:
        assert said in helpers.error_of(bench.main, ["gaterun", word])
    assert "against=None" in helpers.error_of(bench.main, ["train"])


@pytest.fixture(autouse=True)
def edits_of_the_gate_run_end_with_the_test(monkeypatch):
    monkeypatch.setattr(model, "MIXERS", dict(MIXERS))
    monkeypatch.setattr(model, "MLPS", dict(MLPS))


ALL_RECIPES = gaterun.RECIPES | gaterun.LOWEST


@pytest.mark.parametrize("name", ALL_RECIPES)
def test_every_recipe_of_the_gate_run_learns_within_its_number_of_parameters(name, cpu, text, monkeypatch):
    short = ALL_RECIPES[name] + " --max_iters=4 --warmup_iters=1 --schedule=constant --decay_iters=None"
    monkeypatch.setattr(gaterun, "RECIPES", {name: short})
    monkeypatch.setattr(gaterun, "LOWEST", {})
    row = gaterun.run_of(cpu, str(text), 0, name)
    assert row["steps"] == 4 and row["parameters"] <= gaterun.MOST_PARAMETERS
    assert row["val_loss"] < math.log(256)


def test_ideas_belong_to_recipes():
    assert ideas.GPTS.keys() | ideas.SIZES.keys() < gaterun.RECIPES.keys()


def test_ideas_of_the_gate_run_are_their_formulas():
    ideas.register()
    keys = dict(n_layer=2, n_embd=16, n_head=2, vocab_size=11, block_size=8, ngram_rows=5)
    idx = torch.arange(8)[None] % 11

    def made(gpt, **more):
        torch.manual_seed(0)
        return gpt(GPTConfig(**keys | more)).double()

    plain = made(GPT)
    torch.testing.assert_close(made(ideas.FirstAgain)(idx), plain(idx))  # its numbers start at 0
    capped = made(ideas.SoftCappedLogits)
    torch.testing.assert_close(capped(idx), 15 * torch.tanh(plain(idx) / 15))
    torch.testing.assert_close(capped(idx, idx), token_losses(capped(idx), idx).mean())
    assert (made(ideas.HeadFromZero, tie_embeddings=False)(idx) == 0).all()
    squared = made(GPT, mlp="relu_squared").blocks[0].mlp
    x = torch.randn(3, 16, dtype=torch.float64)
    torch.testing.assert_close(squared(x), (x @ squared.up.weight.T).clamp(min=0) ** 2 @ squared.down.weight.T)

    embedded = made(ideas.ValueEmbeddings, attention="value_embedded")
    embedded(idx)
    mixer, of_softmax = embedded.blocks[0].mixer, plain.blocks[0].mixer
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    added = mixer.project(x, None, 0).v - of_softmax.project(x, None, 0).v
    torch.testing.assert_close(added.flatten(2), mixer.of_ids(idx))

    first, second = [block.mixer for block in made(ideas.ValueResidual, attention="residual_values").blocks]
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    v = first.project(x, None, 0).v
    torch.testing.assert_close(v, of_softmax.project(x, None, 0).v)
    own = plain.blocks[1].mixer.project(x, None, 0).v
    torch.testing.assert_close(second.project(x, None, 0).v, (own + v) / 2)


@pytest.mark.parametrize("name", ideas.SIZES)
def test_a_schedule_of_sizes_keeps_the_tokens_of_the_whole_run(name):
    train = TrainConfig(batch_size=24, block_size=64, max_iters=30, eval_interval=30)
    sizes = [ideas.SIZES[name](step, train) for step in range(30)]
    assert sum(rows * length for rows, length in sizes) == 30 * 24 * 64
    assert len(set(sizes)) > 1 and max(length for _, length in sizes) == 64


def test_a_step_of_the_gate_run_has_the_rates_that_train_py_gives_each_group(cpu, text, monkeypatch):
    def note(side):
        rates.update(group["lr"] for optimizer in side.optimizers for group in optimizer.param_groups)

    rates = set()
    monkeypatch.setattr(measure.Side, "__call__", note)
    monkeypatch.setattr(gaterun, "RECIPES", {"mine": "config/gaterun.py --max_iters=1"})
    gaterun.run_of(cpu, str(text), 0, "mine")
    assert sorted(rates) == pytest.approx([10e-3 / 5, 2.5 * 10e-3 / 5])  # the first of 4 steps of warmup


@pytest.mark.parametrize("name", ["softmax", "gated_deltanet"])
def test_a_timed_call_of_decoding_makes_the_tokens_that_generate_makes(name, monkeypatch):
    model = measure.GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=32, attention=name))
    expected = model.generate(torch.zeros(2, 8, dtype=torch.long), measure.TOKENS, temperature=0)
    positions, features = [], model.features
    monkeypatch.setattr(model, "features", lambda *args: positions.append(args[2]) or features(*args))
    assert measure.prefilled(model, 7, B=2)() == expected[:, -1:].tolist()
    assert positions == [0, *range(7, 7 + measure.TOKENS)]


def test_the_forms_compute_what_the_loop_computes_on_the_same_inputs(monkeypatch):
    found = costs.forms(70, "cpu", H=2, D=8)
    outputs = {name: function(**inputs) for name, (function, inputs) in found.items()}
    for function, inputs in found.values():
        gradients = costs.both_ways(function, inputs)()
        assert len(gradients) == len(inputs) and all(g.abs().max() > 0 for g in gradients)
    q, k, v = found["no decay"][1].values()
    torch.testing.assert_close(costs.softmax(q, k, v)[:, 0], v[:, 0])  # causal, and heads are not mixed
    monkeypatch.setattr(costs, "chunked", recurrent)
    for name, (function, inputs) in found.items():
        torch.testing.assert_close(outputs[name], function(**inputs), rtol=1e-3, atol=1e-3)


def judge(low, high, target, at_most=False):
    """Compares the interval with the target, as results/bench/README.md does."""
    if at_most:
        low, high, target = -high, -low, -target
    if low >= target:
        return "met"
    return "missed" if high < target else "unresolved"


def test_the_page_has_every_claim_as_its_stored_pairs_give_it_and_a_reason_where_it_is_not_met():
    claims = []
    for file in PAGE.parent.rglob("*.json"):
        stored = json.loads(file.read_text())
        for ratio in stored["ratios"] + stored["claims"]:
            numbers = rows.median_interval([a / b for a, b in ratio["pairs"]])
            assert numbers == pytest.approx((ratio["ratio"], ratio["low"], ratio["high"]))
            assert "met" not in ratio or ratio["met"] == judge(*numbers[1:], ratio["target"], ratio["at_most"])
        claims += stored["claims"] if file.parent == PAGE.parent else []
    assert set(CLAIMS) == {claim["name"] for claim in claims} and len(claims) <= 18
    for claim in claims:
        numbers, target, verdict = CLAIMS[claim["name"]].split(" | ")
        interval = "" if claim["low"] == claim["high"] else f" [{claim['low']:.2f}, {claim['high']:.2f}]"
        assert numbers == f"{claim['ratio']:.2f}{interval}"
        assert target == ("at most " * claim["at_most"] + f"{claim['target']:g}")
        assert verdict.partition(":")[0] == claim["met"] and (claim["met"] == "met" or ": " in verdict)


def test_the_tables_of_the_gate_run_are_its_file_s_and_its_recipes_are_those_of_the_code():
    stored, page = rows_of(GATERUN / "gaterun.jsonl"), (GATERUN / "README.md").read_text()
    text = stored["text"]
    assert all(text["sha256_of_text"][split] in page for split in ("train", "val")) and text["python"] in page
    recipes = {name: row["command"] for name, row in stored.items() if row.get("command")}
    assert recipes == gaterun.RECIPES
    for name in recipes:
        row, ratio = stored[name], stored[f"{name}: processor time, ours / nanoGPT's"]
        time = f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        assert f"| {name} | {row['steps']:,} | {time} | {row['val_loss']:.3f} | {row['spread']:.3f} |" in page
        assert f"| {row['p']:.3f} |" in page
    of_gates = {
        "record": "without the gate",
        "a gate from one": "without the gate",
        "a headwise gate": "without the gate",
        "a gate of 12 channels": "without the gate",
        "gates by AdamW": "record",
        "four times as long": "four times as long without the gate",
    }
    for gated, base in of_gates.items():
        pairs = zip(stored[base]["runs"], stored[gated]["runs"], strict=True)
        gains = [without["val_loss"] - with_gate["val_loss"] for without, with_gate in pairs]
        low, high = exact_interval(gains)
        numbers = f"| {statistics.fmean(gains):.3f} [{low:.3f}, {high:.3f}] | {sign_flip_test(gains):.3f} |"
        assert numbers in page
    theirs = stored["nanoGPT"]
    assert f"| nanoGPT | 2,000 | 1 | {theirs['val_loss']:.3f} | {theirs['spread']:.3f} |" in page

    lowest = rows_of(GATERUN / "lowest.jsonl")
    assert {name: row["command"] for name, row in lowest.items() if row.get("command")} == gaterun.LOWEST
    for name in gaterun.LOWEST:
        row = lowest[name]
        time = row["cpu_seconds"] / lowest["nanoGPT"]["cpu_seconds"]
        assert time < 1.5 and len(row["runs"]) == 3
        assert f"| {name} | {row['steps']:,} | {time:.2f} | {row['val_loss']:.3f} | {row['spread']:.3f} |" in page
