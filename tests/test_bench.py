"""
bench.py: its intervals and verdicts, its sides, and that its parts take every mixer. No test here asserts a time.

    python -m pytest tests/test_bench.py
"""

import functools
import json
import re
import types

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch.autograd.profiler_util import EventList

import bench
from data.pystdlib import prepare as pystdlib
from data.shards import Dataset
from model import GLA, MIXERS, GPTConfig, Softmax
from speed import costs, figures, forms, loss, report, sides
from speed.report import BenchConfig, Report
from study.drawing import MIXER_COLOURS, mixer_colours

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
        return self(idx)[0][:, -1:].argmax(-1)
'''


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
    losses, loss_of = [], sides.Side.loss
    monkeypatch.setattr(sides.Side, "loss", lambda *args: losses.append(loss_of(*args)) or losses[-1])
    return losses


# ----------------------------------------------------------------------------------------------------------------------
# Pairs, ratios, intervals


@pytest.mark.parametrize("n, low, high", [(6, 1, 6), (9, 2, 8), (20, 6, 15), (30, 10, 21)])
def test_the_interval_of_a_median_is_that_of_the_tables(n, low, high):
    values = np.random.default_rng(0).permutation(np.arange(1.0, n + 1))  # the value is its rank
    assert report.median_interval(values) == ((n + 1) / 2, low, high)


def test_one_value_is_its_own_interval():
    assert report.median_interval([0.5]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    "low, high, at_most, expected",
    [
        (2.0, 3.0, False, "met"),
        (1.9, 3.0, False, "unresolved"),
        (1.0, 1.9, False, "missed"),
        (1.0, 2.0, True, "met"),
        (1.0, 2.1, True, "unresolved"),
        (2.1, 3.0, True, "missed"),
    ],
)
def test_a_claim_is_met_where_its_whole_interval_clears_the_target(low, high, at_most, expected):
    assert report.judge(low, high, 2.0, at_most) == expected


def test_a_report_keeps_ratios_and_claims_with_their_raw_pairs():
    part, pairs = Report("part"), [(2.0 * i, 1.0 * i) for i in range(1, 7)]
    part.ratio("slow / fast", pairs, 1.5)
    part.ratio("fast / slow", [(b, a) for a, b in pairs], 0.4, at_most=True)
    part.ratio("slow / fast, longer", pairs)
    part.row(side="ours", ms=1.5)
    about = part.as_dict()
    assert about["part"] == "part" and about["rows"] == [{"side": "ours", "ms": 1.5}]
    measured = {"name": "slow / fast", "ratio": 2.0, "low": 2.0, "high": 2.0, "pairs": pairs}
    assert about["claims"][0] == measured | {"target": 1.5, "at_most": False, "met": "met"}
    assert about["claims"][1]["met"] == "missed" and len(about["claims"]) == 2
    assert about["ratios"] == [measured | {"name": "slow / fast, longer"}]
    assert "slow / fast" in str(part) and ">= 1.5: met" in str(part) and "<= 0.4: missed" in str(part)
    assert "side ours  ms 1.5" in str(part) and "slow / fast, longer" in str(part)


def test_sides_are_warmed_once_and_then_take_turns_in_both_orders(cpu):
    calls = []
    seconds = report.interleave({name: lambda name=name: calls.append(name) for name in "ab"}, 4, cpu)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab" + "ba"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4}


# ----------------------------------------------------------------------------------------------------------------------
# The sides


def test_nanogpt_is_any_file_with_its_classes(beside_nanogpt, seen_losses, capsys):
    batch = sides.random_batch(beside_nanogpt, 11, 2, 16)
    side = sides.Side(beside_nanogpt, sides.NANOGPT, batch, **sides.SMALL, vocab_size=11)
    keys = side.model.keys
    assert (keys["n_layer"], keys["n_embd"], keys["vocab_size"], keys["dropout"]) == (6, 384, 11, 0.0)
    side(), side()
    assert len(seen_losses) == 2 and seen_losses[1] < seen_losses[0]
    (group,) = side.optimizers[0].param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-4, (0.9, 0.95), 0.1)
    assert capsys.readouterr().out == ""  # nanoGPT's own prints do not mix with the table


def test_a_side_is_trained_on_its_batch_by_steps_of_a_run(cpu):
    keys = dict(n_layer=1, n_head=2, n_embd=16, vocab_size=11, block_size=8)
    batch, other = sides.random_batch(cpu, 11, 2, 8), sides.random_batch(cpu, 11, 4, 8)
    side = sides.Side(cpu, "gla", batch, **keys)
    before = [p.clone() for p in side.model.parameters()]
    losses = [side.loss().item(), side() or side.loss().item(), side.loss(other).item()]
    assert losses[1] < losses[0] and losses[2] != losses[1]
    assert any(not torch.equal(a, b) for a, b in zip(before, side.model.parameters(), strict=True))
    assert all(p.grad is None for p in side.model.parameters())
    torch.manual_seed(1)
    again = sides.Side(cpu, "gla", batch, **keys)  # sides start alike
    assert again.loss().item() == losses[0]


def test_a_compiled_side_that_would_run_eager_in_part_is_an_error(cpu, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    cpu.compile = True
    keys = dict(n_layer=1, n_head=2, n_embd=16, vocab_size=11, block_size=8)
    plain, side = (sides.Side(cpu, "softmax", sides.random_batch(cpu, 11, 2, 8), **keys) for _ in range(2))
    assert side.loss().item() == pytest.approx(plain.model(*plain.batch).item())
    forward = sides.GPT.forward
    monkeypatch.setattr(sides.GPT, "forward", lambda *args: torch._dynamo.graph_break() or forward(*args))
    broken = sides.Side(cpu, "softmax", side.batch, **keys)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        broken.loss()
    torch._dynamo.reset()


def test_peak_memory_is_that_of_a_process_that_trains(cpu):
    keys = dict(n_layer=1, n_head=2, n_embd=16, block_size=8)
    batch = sides.random_batch(cpu, 11, 2, 8)
    small, large = (sides.peak_mb(cpu, "softmax", batch, **keys, vocab_size=n) for n in (11, 500_000))
    # 32 MB of weights, as much of their gradients and twice as much of the moments of AdamW
    assert large - small > 4 * 30


def test_profile_lists_the_operations_of_a_step_of_any_attention_and_of_nanogpt(
    beside_nanogpt, monkeypatch, helpers, capsys
):
    monkeypatch.setattr(bench, "SMALL", dict(n_layer=2, n_head=2, n_embd=16))
    monkeypatch.setattr(bench, "random_batch", lambda config, V, B, T: sides.random_batch(config, V, 1, 8))
    table = EventList.table  # all of its rows: which are the first 20 depends on the machine
    monkeypatch.setattr(EventList, "table", lambda *args, **keys: table(*args, **keys | {"row_limit": -1}))
    tables, is_nanogpt = {}, {}
    for name in ("softmax", "cosformer,gla", "nanoGPT"):
        beside_nanogpt.profile = name
        tables[name] = bench.profile(beside_nanogpt)
        is_nanogpt[name] = "number of parameters" in capsys.readouterr().err
    assert "aten::mm" in tables["softmax"] and "_scaled_dot_product" in tables["softmax"]
    assert "_scaled_dot_product" not in tables["cosformer,gla"]
    assert is_nanogpt == {"softmax": False, "cosformer,gla": False, "nanoGPT": True}
    beside_nanogpt.against = None
    assert "no such file; it is model.py of a copy of nanoGPT" in helpers.error_of(bench.profile, beside_nanogpt)
    beside_nanogpt.profile = "sotfmax"
    assert "did you mean 'softmax'" in helpers.error_of(bench.profile, beside_nanogpt)


# ----------------------------------------------------------------------------------------------------------------------
# Mixers: those of model.py, and one that a user adds


@pytest.fixture
def with_another_mixer(monkeypatch):
    """MIXERS with a class and a line more, which says nothing of colours or states."""
    monkeypatch.setitem(MIXERS, "mine", type("Mine", (GLA,), {}))
    monkeypatch.setitem(MIXERS, "my_softmax", type("MySoftmax", (Softmax,), {}))


@pytest.fixture
def small_parts(monkeypatch):
    """The parts of bench.py on models of one narrow layer, without processes of their own."""
    small = dict(n_layer=1, n_head=2, n_embd=16, state_size=4)
    monkeypatch.setattr(sides, "GPTConfig", lambda **keys: GPTConfig(**keys | small))
    monkeypatch.setattr(costs, "peak_mb", lambda *arguments, **keys: 1.0)


def test_every_part_measures_every_mixer_and_draws_it(with_another_mixer, small_parts, beside_nanogpt, tmp_path):
    beside_nanogpt.longest, out_dir = 512, tmp_path / "out"
    out_dir.mkdir()
    for name in ("length", "decode"):
        part = Report(name)
        bench.PARTS[name](beside_nanogpt, part)
        assert {row["mixer"] for row in part.rows if "mixer" in row} == set(MIXERS)
        (out_dir / f"{name}.json").write_text(json.dumps(part.as_dict()))
        names = [ratio["name"] for ratio in part.ratios]
        if name == "length":
            assert names == [f"{mixer}: step at 512, share of the GEMM rate" for mixer in MIXERS]
    # only a state that does not grow promises a time that does not
    grown = {name.partition(":")[0] for name in names if name.endswith("token at context 4,096 / at 64")}
    assert grown == set(MIXERS) - {"softmax", "my_softmax"}
    assert [(claim["name"], claim["target"]) for claim in part.claims] == [
        (f"token at context 256, nanoGPT / ours with a {side}", 1.0) for side in ("state", "cache")
    ]
    in_rows = [name for name in names if "rows" in name]
    assert in_rows == [f"token at context 256 in {B} rows, nanoGPT / ours with a state" for B in (8, 32)]
    assert figures.draw(out_dir) == [out_dir / "cost.png"]


@pytest.mark.parametrize("name", ["softmax", "gated_deltanet"])
def test_a_timed_call_of_decoding_makes_the_tokens_that_generate_makes(name, monkeypatch):
    torch.manual_seed(0)
    model = sides.GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=32, attention=name))
    expected = model.generate(torch.zeros(2, 8, dtype=torch.long), costs.TOKENS, temperature=0)
    positions, features = [], model.features
    monkeypatch.setattr(model, "features", lambda *args: positions.append(args[2]) or features(*args))
    assert costs.prefilled(model, 7, B=2)() == expected[:, -1:].tolist()
    assert positions == [0, *range(7, 7 + costs.TOKENS)]


def test_nanogpt_makes_as_many_tokens_a_call(small_parts, beside_nanogpt, monkeypatch):
    asked = []
    text = NANOGPT.replace("def generate(self, idx, max_new_tokens):", "def generate(self, idx, n):\n        ASKED(n)")
    names = {"ASKED": asked.append, "__name__": "nanogpt_model"}
    exec(text, names)
    monkeypatch.setattr(sides, "nanogpt", lambda path: types.SimpleNamespace(**names))
    monkeypatch.setattr(costs, "MIXERS", {name: MIXERS[name] for name in ("softmax", "gla")})
    bench.PARTS["decode"](beside_nanogpt, Report("decode"))
    assert set(asked) == {costs.TOKENS}


def test_a_gate_is_measured_beside_the_ungated_model_and_claimed_at_its_flops(small_parts, cpu):
    part = Report("overhead")
    bench.PARTS["overhead"](cpu, part)
    share = {row["gate"]: row["flops"] for row in part.rows}
    assert share["elementwise"] > share["headwise"] > 1 and share["elementwise, match_params"] < share["elementwise"]
    assert {(claim["name"], claim["target"], claim["at_most"]) for claim in part.claims} == {
        (f"training step, {gate} / none", round(share[gate] + 0.02, 4), True) for gate in ("elementwise", "headwise")
    }
    assert [ratio["name"] for ratio in part.ratios] == [f"training step, {gate} / none" for gate in [*share][2:]]
    assert all({"step", "forward", "decode", "memory"} <= row.keys() for row in part.rows)


def test_every_mixer_has_a_colour_of_its_own(with_another_mixer):
    colours = mixer_colours(["gla,softmax", "mine", "gla", "a mixer of an older version"])
    assert len(set(colours.values())) == len(colours) == len(MIXERS) + 2
    assert colours["gla"] == MIXER_COLOURS["gla"] and colours["mine"] == mixer_colours(["mine"])["mine"]


# ----------------------------------------------------------------------------------------------------------------------
# The command


def test_the_last_line_is_one_json_object_that_holds_every_claim_and_ratio(tmp_path, monkeypatch, capsys):
    """The part ops, at lengths of 16 and 64."""
    op_inputs = forms.op_inputs
    monkeypatch.setattr(forms, "op_inputs", lambda T, device: op_inputs(T // 64, device))
    words = ["--device=cpu", "--dtype=float32", "--threads=1", "--pairs=6", "--long_pairs=6", f"--out_dir={tmp_path}"]
    bench.main(["ops", *words])
    said = capsys.readouterr().out.splitlines()
    about, part = json.loads(said[-1]), json.loads((tmp_path / "ops.json").read_text())
    assert about["kernels"] == "plain PyTorch, compile off" and about["gemm_gflops"]["float32"] > 0
    assert (len(about["claims"]), len(about["ratios"])) == (6, 12)
    names = [ratio["name"] for kind in ("claims", "ratios") for ratio in about[kind]]
    assert len(set(names)) == 18
    for kind in ("claims", "ratios"):
        for ratio, raw in zip(about[kind], part[kind], strict=True):
            assert raw == ratio | {"pairs": raw["pairs"]} and len(raw["pairs"]) == 6
            assert any(ratio["name"] in line and ratio.get("met", "") in line for line in said)
    assert not (tmp_path / "cost.png").exists()  # no length, no decode


def test_the_forms_compute_what_the_loop_computes_on_the_same_inputs():
    for name, inputs in forms.op_inputs(70, "cpu", H=2, D=8).items():
        function = forms.cosformer if name == "cosFormer" else forms.decayed
        o, gradients = function(**inputs), forms.both_ways(function, inputs)()
        torch.testing.assert_close(o, function(**inputs, form=forms.recurrent), rtol=1e-3, atol=1e-3)
        assert len(gradients) == len(inputs) and all(g.abs().max() > 0 for g in gradients)
        attended = forms.softmax(inputs["q"], inputs["k"], inputs["v"])
        assert attended.shape == o.shape
        torch.testing.assert_close(attended[:, 0], inputs["v"][:, 0])  # causal, and heads are not mixed


def test_the_figure_shows_every_part_that_was_measured(tmp_path, monkeypatch, helpers):
    length = [dict(mixer="gla", T=T, tokens_s=1e3, peak_mb=T / 4) for T in (256, 512)]
    for name, rows in (("length", length), ("decode", [dict(mixer="gla", context=64, ms=7.0)]), ("ops", [dict(T=4)])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"claims": [], "rows": rows}))
    drawn = []
    monkeypatch.setattr(figures, "write", lambda figure, path: drawn.append(figure) or path)
    assert figures.draw(tmp_path) == [tmp_path / "cost.png"]
    assert [axes.get_title() for axes in drawn[0].axes] == [
        "training (tokens/s)", "training, peak memory (MB)", "decoding (ms a token)",
    ]  # fmt: skip
    assert all(len(axes.lines) == 1 for axes in drawn[0].axes)
    helpers.assert_plain_ticks(drawn[0])
    plt.close(drawn[0])


def test_a_wrong_part_and_a_missing_file_are_one_line(cpu, tmp_path, helpers):
    assert "did you mean 'decode'" in helpers.error_of(bench.main, ["decod"])
    message = helpers.error_of(sides.nanogpt, str(tmp_path / "none.py"))
    assert "none.py': no such file; it is model.py of a copy of nanoGPT" in message


def test_kernels_are_those_that_run_on_the_device(cpu, monkeypatch):
    monkeypatch.setattr(bench, "has_fla", lambda: True)  # a GPU is there, and the CPU is measured
    assert bench.describe(cpu)["kernels"] == "plain PyTorch, compile off"


# ----------------------------------------------------------------------------------------------------------------------
# Training against nanoGPT: steps, loss against processor time


def test_a_step_is_compared_with_nanogpts_in_float32_and_with_autocast(beside_nanogpt, monkeypatch, seen_losses):
    beside_nanogpt.dtype = "bfloat16"
    monkeypatch.setattr(costs, "SMALL", dict(n_layer=1, n_head=2, n_embd=16))
    memory = {"softmax": 1.0, "nanoGPT": 2.0}
    monkeypatch.setattr(
        costs, "peak_mb", lambda config, name, *rest, **keys: memory[name] * (config.dtype == "float32")
    )
    monkeypatch.setattr(costs, "random_batch", lambda config, V, B, T: sides.random_batch(config, V, 1, 8))
    part = Report("train")
    bench.PARTS["train"](beside_nanogpt, part)
    assert [(claim["name"], claim["target"], claim["at_most"]) for claim in part.claims] == [
        *(
            (f"step in {dtype}, {ids} ids, nanoGPT / ours", 1.0, False)
            for ids in ("256", "50,304")
            for dtype in ("float32", "bfloat16")
        ),
        ("peak memory, float32, 50,304 ids, ours / nanoGPT", 1.0, True),
    ]
    assert part.claims[-1]["ratio"] == 0.5
    assert len(seen_losses) == 2 * 4 * (1 + 6)


def test_loss_is_followed_on_the_same_batches_for_every_side_and_seed(beside_nanogpt, monkeypatch, tmp_path):
    beside_nanogpt.seeds, seen = [0, 1], []
    batch = Dataset.batch
    monkeypatch.setattr(pystdlib, "sysconfig", types.SimpleNamespace(get_path=lambda name: json.__path__[0]))
    monkeypatch.setattr(loss, "all_alone", lambda function, tasks: [function(*task) for task in tasks])
    monkeypatch.setattr(loss, "EVAL_WINDOWS", 8)
    monkeypatch.setattr(loss, "SIZE", dict(n_layer=1, n_head=2, n_embd=16, block_size=16))
    monkeypatch.setattr(loss, "SCHEDULE", loss.SCHEDULE | dict(max_iters=6, warmup_iters=1, learning_rate=1e-2))
    monkeypatch.setattr(Dataset, "batch", lambda *args, **keys: seen.append(batch(*args, **keys)) or seen[-1])
    part = Report("loss")
    bench.PARTS["loss"](beside_nanogpt, part)
    runs = [row for row in part.rows if "curve" in row]
    assert [(run["side"], run["seed"]) for run in runs] == [(side, seed) for seed in (0, 1) for side in loss.SIDES]
    for run in runs:
        steps, seconds, losses = zip(*run["curve"], strict=True)
        assert steps == tuple(range(7)) and sorted(seconds) == list(seconds) and losses[-1] < losses[0]
    firsts = [inputs for inputs, _ in seen[::6]]  # the first batch of each run
    assert all(torch.equal(firsts[0], x) for x in firsts[:3]) and not torch.equal(firsts[0], firsts[3])
    assert [claim["name"].partition(":")[0] for claim in part.claims] == ["softmax", "gated_deltanet"]
    assert {claim["target"] for claim in part.claims} == {1.0}


def test_the_time_to_a_loss_lies_on_the_line_between_two_evaluations():
    curve = [(0, 0.0, 5.0), (10, 1.0, 4.0), (20, 2.0, 2.0), (30, 3.0, 3.0)]
    assert loss.seconds_to(4.5, curve) == 0.5 and loss.seconds_to(3.0, curve) == 1.5
    assert loss.seconds_to(1.0, curve) is None


# ----------------------------------------------------------------------------------------------------------------------
# results/bench


PAGE = bench.Path(bench.__file__).parent / "results" / "bench" / "README.md"


def test_the_page_has_every_claim_with_its_measured_numbers_and_a_reason_where_it_is_not_met():
    rows = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE.read_text(), re.M))
    claims = [claim for file in PAGE.parent.glob("*.json") for claim in json.loads(file.read_text())["claims"]]
    assert set(rows) == {claim["name"] for claim in claims} and len(claims) <= 17  # the part gpu has three more
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
