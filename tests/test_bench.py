"""bench.py: its intervals and verdicts, its sides, and that its parts take every mixer. No test here asserts a time.

python -m pytest tests/test_bench.py
"""

import functools
import json
import re
import resource
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
from data.pystdlib import prepare as pystdlib
from data.shards import Dataset
from model import GLA, MIXERS, GPTConfig, Softmax
from speed import baselines, costs, figures, forms, loss, report
from speed.report import BenchConfig, Report

NANOGPT = '''
import torch


class GPTConfig:
    def __init__(self, **keys):
        self.keys = keys


class GPT(torch.nn.Module):
    """The part of nanoGPT's model.py that bench.py calls."""

    def __init__(self, config):
        super().__init__()
        print("number of parameters: 0.00M")
        self.keys, self.wte = config.keys, torch.nn.Embedding(config.keys["vocab_size"], 8)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)

    def forward(self, idx, targets=None):
        logits = self.wte(idx) @ self.wte.weight.T
        if targets is None:
            return logits, None
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def generate(self, idx, max_new_tokens):
        print("asked for", max_new_tokens)
'''
TINY = dict(n_layer=1, n_head=2, n_embd=16, vocab_size=11, block_size=8)


@pytest.fixture
def cpu():
    return BenchConfig(device="cpu", dtype="float32", threads=1, pairs=6, long_pairs=6)


@pytest.fixture
def beside_nanogpt(cpu, tmp_path):
    cpu.against = str(tmp_path / "model.py")
    (tmp_path / "model.py").write_text(NANOGPT)
    return cpu


@pytest.fixture
def seen_losses(monkeypatch):
    """Collects the losses of all steps that follow."""
    losses, loss_of = [], baselines.Side.loss
    monkeypatch.setattr(baselines.Side, "loss", lambda *args: losses.append(loss_of(*args)) or losses[-1])
    return losses


@pytest.fixture
def small_parts(monkeypatch):
    """The parts of bench.py on models of one narrow layer, without processes of their own; MIXERS has two classes more,
    which say nothing of colours or states. A batch is one row of 8 tokens."""
    monkeypatch.setitem(MIXERS, "mine", type("Mine", (GLA,), {}))
    monkeypatch.setitem(MIXERS, "my_softmax", type("MySoftmax", (Softmax,), {}))
    small = dict(n_layer=1, n_head=2, n_embd=16, state_size=4)
    monkeypatch.setattr(baselines, "GPTConfig", lambda **keys: GPTConfig(**keys | small))
    monkeypatch.setattr(costs, "peak_mb", lambda config, name, batch, keys: 2.0 if name == "nanoGPT" else 1.0)
    monkeypatch.setattr(costs, "random_batch", lambda config, V, B, T: baselines.random_batch(config, V, 1, 8))
    monkeypatch.setattr(costs, "CONTEXTS", (64, 4096))
    monkeypatch.setattr(costs, "TOKENS", 3)
    monkeypatch.setattr(costs, "STEPS", 2)
    monkeypatch.setattr(costs, "gemm_rate", lambda device, dtype: 1e9)


def run_part(name, config):
    part = Report(name)
    bench.PARTS[name](config, part)
    return part


def claims_of(part):
    return [(claim["name"], claim["target"], claim["at_most"]) for claim in part.claims]


# ----------------------------------------------------------------------------------------------------------------------
# Pairs, ratios, intervals


@pytest.mark.parametrize("n, low, high", [(6, 1, 6), (9, 2, 8), (20, 6, 15), (30, 10, 21)])
def test_the_interval_of_a_median_is_that_of_the_tables(n, low, high):
    values = np.random.default_rng(0).permutation(np.arange(1.0, n + 1))  # the value is its rank
    assert report.median_interval(values) == ((n + 1) / 2, low, high)
    assert report.median_interval([0.5]) == (0.5, 0.5, 0.5)


def test_a_claim_is_met_where_its_whole_interval_clears_the_target():
    for interval, to_reach, not_to_exceed in (
        ((2.1, 3.0), "met", "missed"),
        ((2.0, 3.0), "met", "unresolved"),
        ((1.9, 2.1), "unresolved", "unresolved"),
        ((1.0, 2.0), "unresolved", "met"),
        ((1.0, 1.9), "missed", "met"),
    ):
        assert report.judge(*interval, 2.0) == to_reach and report.judge(*interval, 2.0, at_most=True) == not_to_exceed


def test_sides_are_warmed_once_and_then_take_turns_in_both_orders(cpu):
    calls = []
    seconds = report.interleave({name: lambda name=name: calls.append(name) for name in "ab"}, 4, cpu)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab" + "ba"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4}


# ----------------------------------------------------------------------------------------------------------------------
# The sides


def test_nanogpt_is_any_file_with_its_classes(beside_nanogpt, capsys, tmp_path, helpers):
    side = baselines.Side(beside_nanogpt, baselines.NANOGPT, **baselines.SMALL, vocab_size=11)
    keys = side.model.keys
    assert (keys["n_layer"], keys["n_embd"], keys["vocab_size"], keys["dropout"]) == (6, 384, 11, 0.0)
    (group,) = side.optimizers[0].param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-4, (0.9, 0.95), 0.1)
    assert capsys.readouterr().out == ""  # nanoGPT's own prints do not mix with the table
    message = helpers.error_of(baselines.nanogpt, str(tmp_path / "none.py"))
    assert "none.py': no such file; it is model.py of a copy of nanoGPT" in message


@pytest.mark.parametrize("name", ["gla", baselines.NANOGPT])
def test_a_side_is_trained_on_its_batch_by_steps_of_a_run(name, beside_nanogpt):
    batch, other = (baselines.random_batch(beside_nanogpt, 11, B, 8) for B in (2, 4))
    side = baselines.Side(beside_nanogpt, name, batch, **TINY)
    losses = [side.loss().item(), side() or side.loss().item(), side.loss(other).item()]
    assert losses[1] < losses[0] and losses[2] != losses[1]
    assert all(p.grad is None for p in side.model.parameters())
    torch.manual_seed(1)
    assert baselines.Side(beside_nanogpt, name, batch, **TINY).loss().item() == losses[0]  # sides start alike


def test_a_compiled_side_that_would_run_eager_in_part_is_an_error(cpu, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    cpu.compile = True
    plain, side = (baselines.Side(cpu, "softmax", baselines.random_batch(cpu, 11, 2, 8), **TINY) for _ in range(2))
    assert side.loss().item() == pytest.approx(plain.model(*plain.batch).item())
    forward = baselines.GPT.forward
    monkeypatch.setattr(baselines.GPT, "forward", lambda *args: torch._dynamo.graph_break() or forward(*args))
    broken = baselines.Side(cpu, "softmax", side.batch, **TINY)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        broken.loss()
    torch._dynamo.reset()


def test_peak_memory_is_that_of_three_steps_in_a_process_of_its_own(cpu, seen_losses, monkeypatch):
    calls = []
    monkeypatch.setattr(baselines, "in_new_processes", lambda *call: calls.append(call) or [3_000_000])
    assert baselines.peak_mb(cpu, "softmax", batch := baselines.random_batch(cpu, 11, 2, 8), TINY) == 3.0
    assert calls == [(baselines.peak_bytes, [(cpu, "softmax", batch, TINY)])]
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    assert resident <= baselines.peak_bytes(cpu, "softmax", batch, TINY) < 100 * resident and len(seen_losses) == 3


@pytest.mark.slow
def test_peak_memory_has_weights_gradients_and_moments(cpu):
    batch, large = baselines.random_batch(cpu, 11, 2, 8), TINY | dict(vocab_size=500_000)
    # 32 MB of weights, as much of their gradients and twice as much of the moments of AdamW
    assert baselines.peak_mb(cpu, "softmax", batch, large) - baselines.peak_mb(cpu, "softmax", batch, TINY) > 4 * 30


# ----------------------------------------------------------------------------------------------------------------------
# The parts, with every mixer and one that a user adds


def test_length_and_decoding_of_every_mixer_are_measured_and_drawn(
    small_parts, beside_nanogpt, tmp_path, capsys, drawn, helpers
):
    beside_nanogpt.longest, out_dir = 512, tmp_path / "out"
    out_dir.mkdir()
    parts = {name: run_part(name, beside_nanogpt) for name in ("length", "decode")}
    for name, part in parts.items():
        assert {row["mixer"] for row in part.rows} == set(MIXERS)
        (out_dir / f"{name}.json").write_text(json.dumps({"rows": part.rows}))
    names = {name: [ratio["name"] for ratio in part.ratios] for name, part in parts.items()}
    assert names["length"] == [f"{mixer}: step at 512, share of the GEMM rate" for mixer in MIXERS]
    # only a state that does not grow promises a time that does not
    grown = [f"{mixer}: token at context 4,096 / at 64" for mixer in MIXERS if mixer not in ("softmax", "my_softmax")]
    others = [f"token at context 1,024, nanoGPT / ours with a {side}" for side in ("state", "cache")]
    others += [f"token at context 256 in {B} rows, nanoGPT / ours with a state" for B in (8, 32)]
    assert names["decode"] == grown + others
    assert claims_of(parts["decode"]) == [
        (f"token at context 256, nanoGPT / ours with a {side}", 1.0, False) for side in ("state", "cache")
    ]
    asked = {line for line in capsys.readouterr().out.splitlines() if line.startswith("asked")}
    assert asked == {"asked for 3"}  # nanoGPT makes as many tokens a call
    for shown in (figures.PANELS, figures.PANELS[2:]):  # a panel for what was measured
        assert figures.draw(out_dir) == [out_dir / "cost.png"]
        panels = drawn["cost.png"].axes
        assert [axes.get_title() for axes in panels] == [title for _, _, title in shown]
        assert all(len(axes.lines) == len(MIXERS) for axes in panels)
        helpers.assert_plain_ticks(drawn["cost.png"])
        (out_dir / "length.json").unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["softmax", "gated_deltanet"])
def test_a_timed_call_of_decoding_makes_the_tokens_that_generate_makes(name, monkeypatch):
    torch.manual_seed(0)
    model = baselines.GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=32, attention=name))
    expected = model.generate(torch.zeros(2, 8, dtype=torch.long), costs.TOKENS, temperature=0)
    positions, features = [], model.features
    monkeypatch.setattr(model, "features", lambda *args: positions.append(args[2]) or features(*args))
    assert costs.prefilled(model, 7, B=2)() == expected[:, -1:].tolist()
    assert positions == [0, *range(7, 7 + costs.TOKENS)]


@pytest.mark.parametrize("name", ["overhead", "gpu"])
def test_a_gate_is_measured_beside_the_ungated_model_and_claimed_at_its_flops(name, small_parts, cpu, monkeypatch):
    part = run_part(name, cpu)
    gates = {row["gate"]: row for row in part.rows if "gate" in row}
    share = {gate: row["flops"] for gate, row in gates.items()}
    assert share["elementwise"] > share["headwise"] > 1
    assert sorted(claims_of(part)) == [
        (f"training step, {gate} / none", round(share[gate] + 0.02, 4), True) for gate in ("elementwise", "headwise")
    ]
    assert [ratio["name"] for ratio in part.ratios] == [f"training step, {gate} / none" for gate in [*gates][2:]]
    assert all({"step", "forward", "decode", "memory"} <= row.keys() for row in gates.values())
    for claim in part.claims:
        assert re.search(f"{claim['name']} .* <= {claim['target']:g}: {claim['met']}", str(part))
    if name == "overhead":
        assert share["elementwise, match_params"] < share["elementwise"] and "gate rank 16  flops 1.0" in str(part)
        return
    runs = [row for row in part.rows if "mfu" in row]
    assert [row["run"] for row in runs] == [*MIXERS] and all(row["mfu"] > 0 for row in runs)
    assert all(row["tokens_s"] * row["ms"] / 1e3 == pytest.approx(16 * 1024) for row in runs)


def test_without_a_gpu_its_part_is_one_line_and_all_leaves_it_out(tmp_path, helpers, monkeypatch):
    words, run = ["--device=cpu", "--threads=1", f"--out_dir={tmp_path / 'out'}"], []
    message = helpers.error_of(bench.main, ["gpu", *words])
    assert "what=gpu: measures on a GPU, and the device is cpu" in message and not (tmp_path / "out").exists()
    parts = {name: lambda config, report, name=name: run.append(name) for name in bench.PARTS}
    monkeypatch.setattr(bench, "PARTS", parts)
    monkeypatch.setattr(bench, "gemm_rate", lambda device, dtype: 1e9)
    bench.main(["all", *words])
    assert run == [name for name in parts if name != "gpu"]


def test_a_step_is_compared_with_nanogpts_in_float32_and_with_autocast(small_parts, beside_nanogpt, seen_losses):
    beside_nanogpt.dtype = "bfloat16"
    part = run_part("train", beside_nanogpt)
    names = [f"step in {d}, {ids} ids, nanoGPT / ours" for ids in ("256", "50,304") for d in ("float32", "bfloat16")]
    memory = ("peak memory, float32, 50,304 ids, ours / nanoGPT", 1.0, True)
    assert claims_of(part) == [*((name, 1.0, False) for name in names), memory] and part.claims[-1]["ratio"] == 0.5
    assert len(seen_losses) == 2 * 4 * (1 + 6)


def test_the_forms_compute_what_the_loop_computes_on_the_same_inputs():
    for function, inputs in forms.forms(70, "cpu", H=2, D=8).values():
        o, gradients = function(forms.chunked, **inputs), forms.both_ways(function, inputs, forms.chunked)()
        torch.testing.assert_close(o, function(forms.recurrent, **inputs), rtol=1e-3, atol=1e-3)
        assert len(gradients) == len(inputs) and all(g.abs().max() > 0 for g in gradients)
        attended = forms.softmax(inputs["q"], inputs["k"], inputs["v"])
        assert attended.shape == o.shape
        torch.testing.assert_close(attended[:, 0], inputs["v"][:, 0])  # causal, and heads are not mixed


def test_loss_is_followed_on_the_same_batches_for_every_side_and_seed(beside_nanogpt, monkeypatch):
    beside_nanogpt.seeds, seen, batch = [0, 1], [], Dataset.batch
    monkeypatch.setattr(pystdlib, "sysconfig", types.SimpleNamespace(get_path=lambda name: json.__path__[0]))
    monkeypatch.setattr(loss, "in_new_processes", lambda function, tasks, at_once: [function(*task) for task in tasks])
    monkeypatch.setattr(loss, "EVAL_WINDOWS", 8)
    monkeypatch.setattr(loss, "SIZE", dict(n_layer=1, n_head=2, n_embd=16, block_size=16))
    monkeypatch.setattr(loss, "SCHEDULE", loss.SCHEDULE | dict(max_iters=6, warmup_iters=1, learning_rate=1e-2))
    monkeypatch.setattr(Dataset, "batch", lambda *args, **keys: seen.append(batch(*args, **keys)) or seen[-1])
    part = run_part("loss", beside_nanogpt)
    assert [(run["side"], run["seed"]) for run in part.rows] == [(side, seed) for seed in (0, 1) for side in loss.SIDES]
    for run in part.rows:
        steps, seconds, losses = zip(*run["curve"], strict=True)
        assert steps == tuple(range(7)) and sorted(seconds) == list(seconds) and losses[-1] < losses[0]
    firsts = [inputs for inputs, _ in seen[::6]]  # the first batch of each run
    assert all(torch.equal(firsts[0], x) for x in firsts[:3]) and not torch.equal(firsts[0], firsts[3])
    names = (
        f"{side}: processor time to nanoGPT's final loss, nanoGPT / ours" for side in ("softmax", "gated_deltanet")
    )
    assert claims_of(part) == [(name, 1.0, False) for name in names]


def test_the_time_to_a_loss_lies_on_the_line_between_two_evaluations():
    curve = [(0, 0.0, 5.0), (10, 1.0, 4.0), (20, 2.0, 2.0), (30, 3.0, 3.0)]
    assert loss.seconds_to(4.5, curve) == 0.5 and loss.seconds_to(3.0, curve) == 1.5
    assert loss.seconds_to_same_loss([(0, 0.0, 5.0), (10, 4.0, 4.0)], curve) == (4.0, 1.0)
    assert loss.seconds_to_same_loss([(0, 0.0, 5.0), (10, 4.0, 1.0)], curve) == (0.0, 3.0)  # ours never gets there


# ----------------------------------------------------------------------------------------------------------------------
# The command, and results/bench


def test_the_last_line_is_one_json_object_that_holds_every_claim_and_ratio(tmp_path, monkeypatch, capsys, helpers):
    """The part ops, at lengths of 16 and 64."""
    of_length = forms.forms
    monkeypatch.setattr(forms, "forms", lambda T, device: of_length(T // 64, device))
    words = ["--device=cpu", "--dtype=float32", "--threads=1", "--pairs=6", "--long_pairs=6", f"--out_dir={tmp_path}"]
    monkeypatch.setattr(bench, "has_fla", lambda: True)  # a GPU is there, and the CPU is measured
    bench.main(["ops", *words])
    printed = capsys.readouterr().out.splitlines()
    about, part = json.loads(printed[-1]), json.loads((tmp_path / "ops.json").read_text())
    assert about["kernels"] == "plain PyTorch, compile off" and about["gemm_gflops"]["float32"] > 0
    assert (part["part"], len(about["claims"]), len(about["ratios"])) == ("ops", 6, 12)
    assert len({ratio["name"] for kind in ("claims", "ratios") for ratio in about[kind]}) == 18
    for kind in ("claims", "ratios"):
        for ratio, raw in zip(about[kind], part[kind], strict=True):
            assert raw == ratio | {"pairs": raw["pairs"]} and len(raw["pairs"]) == 6
            assert any(ratio["name"] in line and ratio.get("met", "") in line for line in printed)
    assert "did you mean 'decode'" in helpers.error_of(bench.main, ["decod"])


PAGE = Path(bench.__file__).parent / "results" / "bench" / "README.md"


def test_the_page_has_every_claim_with_its_measured_numbers_and_a_reason_where_it_is_not_met():
    rows = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE.read_text(), re.M))
    claims = [claim for file in PAGE.parent.glob("*.json") for claim in json.loads(file.read_text())["claims"]]
    assert set(rows) == {claim["name"] for claim in claims} and len(claims) <= 18  # the part gpu has two more
    for claim in claims:
        numbers, target, verdict = rows[claim["name"]].split(" | ")
        interval = "" if claim["low"] == claim["high"] else f" [{claim['low']:.2f}, {claim['high']:.2f}]"
        assert numbers == f"{claim['ratio']:.2f}{interval}"
        assert target == ("at most " * claim["at_most"] + f"{claim['target']:g}")
        assert verdict.partition(":")[0] == claim["met"] and (claim["met"] == "met" or ": " in verdict)


def test_verdicts_of_the_stored_claims_follow_from_their_pairs():
    for file in PAGE.parent.rglob("*.json"):
        stored = json.loads(file.read_text())
        for ratio in stored["ratios"] + stored["claims"]:
            summary = loss.interval_over_seeds if stored["part"] == "loss" else report.median_interval
            numbers = summary([a / b for a, b in ratio["pairs"]])
            assert numbers == pytest.approx((ratio["ratio"], ratio["low"], ratio["high"]))
            assert "met" not in ratio or ratio["met"] == report.judge(*numbers[1:], ratio["target"], ratio["at_most"])
