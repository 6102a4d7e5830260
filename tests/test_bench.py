"""
bench.py: its intervals and verdicts, its sides, and that its parts take every mixer. No test here asserts a time.

    python -m pytest tests/test_bench.py
"""

import contextlib
import json
import types

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import bench
import train
from data.pystdlib import prepare as pystdlib
from data.shards import Dataset
from model import GLA, MIXERS, GPTConfig, Softmax
from speed import data as speed_data
from speed import decoding, figures, forms, loss, report, sides, training
from speed.report import BenchConfig, Report
from study.drawing import mixer_colours

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
    losses, update = [], sides.update
    monkeypatch.setattr(sides, "update", lambda *args: losses.append(args[2].item()) or update(*args))
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


def test_a_report_keeps_the_claim_and_its_raw_pairs():
    part, pairs = Report("part"), [(2.0 * i, 1.0 * i) for i in range(1, 7)]
    part.claim("slow / fast", pairs, 1.5)
    part.claim("fast / slow", [(b, a) for a, b in pairs], 0.4, at_most=True)
    part.row(side="ours", ms=1.5)
    about = part.as_dict()
    assert about["part"] == "part" and about["rows"] == [{"side": "ours", "ms": 1.5}]
    assert about["claims"][0] == {
        "name": "slow / fast", "ratio": 2.0, "low": 2.0, "high": 2.0, "target": 1.5, "at_most": False, "met": "met",
        "pairs": pairs,
    }  # fmt: skip
    assert about["claims"][1]["met"] == "missed"
    assert "slow / fast" in str(part) and ">= 1.5: met" in str(part) and "<= 0.4: missed" in str(part)


def test_sides_are_warmed_once_and_then_take_turns_in_both_orders(cpu):
    calls = []
    seconds = report.interleave({name: lambda name=name: calls.append(name) for name in "ab"}, 4, cpu)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab" + "ba"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4}


# ----------------------------------------------------------------------------------------------------------------------
# The sides


def test_nanogpt_is_any_file_with_its_classes(beside_nanogpt, seen_losses, capsys):
    model = sides.nanogpt_model(beside_nanogpt, **sides.SMALL, vocab_size=11)
    assert (model.keys["n_layer"], model.keys["n_embd"], model.keys["vocab_size"]) == (6, 384, 11)
    sides.nanogpt_step(beside_nanogpt, "float32", sides.random_batch(beside_nanogpt, 11, 2, 16), vocab_size=11)()
    assert len(seen_losses) == 1
    assert capsys.readouterr().out == ""  # nanoGPT's own prints do not mix with the table


def test_profile_lists_the_operations_of_a_step_of_any_attention_and_of_nanogpt(
    beside_nanogpt, monkeypatch, helpers, capsys
):
    monkeypatch.setattr(bench, "SMALL", dict(n_layer=2, n_head=2, n_embd=16))
    monkeypatch.setattr(bench, "random_batch", lambda config, V, B, T: sides.random_batch(config, V, 1, 8))
    tables, is_nanogpt = {}, {}
    for name in ("softmax", "cosformer,gla", "nanoGPT"):
        beside_nanogpt.profile = name
        tables[name] = bench.profile(beside_nanogpt)
        is_nanogpt[name] = "number of parameters" in capsys.readouterr().err
    assert "aten::mm" in tables["softmax"] and "_scaled_dot_product" in tables["softmax"]
    assert "_scaled_dot_product" not in tables["cosformer,gla"]
    assert is_nanogpt == {"softmax": False, "cosformer,gla": False, "nanoGPT": True}
    beside_nanogpt.against = None
    assert "say with --against where its model.py is" in helpers.error_of(bench.profile, beside_nanogpt)
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
    for module in (sides, decoding):
        monkeypatch.setattr(module, "GPTConfig", lambda **keys: GPTConfig(**keys | small))
    monkeypatch.setattr(training, "alone", lambda *arguments: 1)
    monkeypatch.setattr(decoding, "decoding_speed", lambda *arguments: {})


def test_every_part_measures_every_mixer_and_draws_it(with_another_mixer, small_parts, beside_nanogpt, tmp_path):
    beside_nanogpt.longest, out_dir = 512, tmp_path / "out"
    out_dir.mkdir()
    for name in ("length", "decode"):
        part = Report(name)
        bench.PARTS[name](beside_nanogpt, part)
        assert {row["mixer"] for row in part.rows if "mixer" in row} == set(MIXERS)
        # only a state that does not grow promises a time that does not
        claimed = {claim["name"].partition(":")[0] for claim in part.claims if ":" in claim["name"]}
        assert claimed == set(MIXERS) - {"softmax", "my_softmax"}
        (out_dir / f"{name}.json").write_text(json.dumps(part.as_dict()))
    in_rows = [claim["name"] for claim in part.claims if "rows" in claim["name"]]
    assert in_rows == [f"token at context 256 in {B} rows, nanoGPT / ours with a state" for B in (8, 32)]
    assert out_dir / "cost.png" in figures.draw(out_dir)


@pytest.mark.parametrize("name", ["softmax", "gated_deltanet"])
def test_a_timed_call_of_decoding_makes_the_tokens_that_generate_makes(name, monkeypatch):
    torch.manual_seed(0)
    model = sides.GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=32, attention=name))
    expected = model.generate(torch.zeros(2, 8, dtype=torch.long), decoding.TOKENS, temperature=0)
    positions, features = [], model.features
    monkeypatch.setattr(model, "features", lambda *args: positions.append(args[2]) or features(*args))
    assert decoding.prefilled(model, 7, B=2)() == expected[:, -1:].tolist()
    assert positions == [0, *range(7, 7 + decoding.TOKENS)]


def test_nanogpt_makes_as_many_tokens_a_call(small_parts, beside_nanogpt, monkeypatch):
    asked, nanogpt_model = [], decoding.nanogpt_model

    def with_generate(*args, **keys):
        model = nanogpt_model(*args, **keys)
        model.generate = lambda idx, n: asked.append(n)
        return model

    monkeypatch.setattr(decoding, "nanogpt_model", with_generate)
    monkeypatch.setattr(decoding, "MIXERS", {name: MIXERS[name] for name in ("softmax", "gla")})
    bench.PARTS["decode"](beside_nanogpt, Report("decode"))
    assert set(asked) == {decoding.TOKENS}


def test_checkpointing_is_measured_in_time_and_memory(small_parts, cpu, monkeypatch):
    recomputed, part = [], Report("checkpointing")
    monkeypatch.setattr(sides, "recompute", recomputed.append)
    bench.PARTS["checkpointing"](cpu, part)
    assert len(recomputed) == 2  # the one block of the side that computes it again, for either mixer
    rows = [(row["mixer"], row["blocks"]) for row in part.rows]
    assert rows == [(mixer, side) for mixer in ("softmax", "gla") for side in ("kept", "again")]
    names = [
        f"{mixer}: {what}, activation_checkpointing / without"
        for mixer, _ in rows[::2]
        for what in ("step", "peak memory")
    ]
    assert [claim["name"] for claim in part.claims] == names and all(claim["at_most"] for claim in part.claims)


def test_every_mixer_has_a_colour_of_its_own(with_another_mixer):
    colours = mixer_colours(["gla,softmax", "mine", "gla", "a mixer of an older version"])
    assert len(set(colours.values())) == len(colours) == len(MIXERS) + 2
    assert colours["gla"] == GLA.colour and colours["mine"] == mixer_colours(["mine"])["mine"]


# ----------------------------------------------------------------------------------------------------------------------
# The command


def test_the_last_line_is_one_json_object_that_holds_every_claim(tmp_path, monkeypatch, capsys):
    """The part ops, at lengths of 16 and 64."""
    op_inputs = forms.op_inputs
    monkeypatch.setattr(forms, "op_inputs", lambda T, device: op_inputs(T // 64, device))
    words = ["--device=cpu", "--dtype=float32", "--threads=1", "--pairs=6", "--long_pairs=6", f"--out_dir={tmp_path}"]
    bench.main(["ops", *words])
    said = capsys.readouterr().out.splitlines()
    about, part = json.loads(said[-1]), json.loads((tmp_path / "ops.json").read_text())
    assert about["kernels"] == "plain PyTorch, compile off" and about["gemm_gflops"]["float32"] > 0
    names = [claim["name"] for claim in about["claims"]]
    assert len(names) == len(set(names)) == 3 * len(forms.OPS)
    for claim, raw in zip(about["claims"], part["claims"], strict=True):
        assert raw == claim | {"pairs": raw["pairs"]} and len(raw["pairs"]) == 6
        assert any(claim["name"] in line and claim["met"] in line for line in said)
    assert (tmp_path / "ratios.png").is_file() and not (tmp_path / "cost.png").exists()  # no length, no decode


def test_the_figures_show_every_part_that_was_measured(tmp_path, monkeypatch, helpers):
    claim = dict(name="a step", ratio=2.0, low=1.8, high=2.2, target=1.5, at_most=False, met="met")
    length = [dict(mixer="gla", T=T, tokens_s=1e3, peak_mb=T / 4) for T in (256, 512)]
    decode = [dict(mixer="gla", context=64, ms=7.0), dict(mixer="gla", batch=8, tokens_s=1.0)]
    for name, claims, rows in (("train", [claim], []), ("length", [], length), ("decode", [], decode)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"claims": claims, "rows": rows}))
    drawn = []
    monkeypatch.setattr(figures, "write", lambda figure, path: drawn.append(figure) or path)
    assert figures.draw(tmp_path) == [tmp_path / "ratios.png", tmp_path / "cost.png"]
    for figure in drawn:
        helpers.assert_plain_ticks(figure)
        plt.close(figure)


def test_a_wrong_part_and_a_missing_file_are_one_line(cpu, tmp_path, helpers):
    assert "did you mean 'decode'" in helpers.error_of(bench.main, ["decod"])
    message = helpers.error_of(sides.nanogpt, str(tmp_path / "none.py"))
    assert "none.py': no such file; it is model.py of a copy of nanoGPT" in message


def test_kernels_are_those_that_run_on_the_device(cpu, monkeypatch):
    monkeypatch.setattr(bench, "has_fla", lambda: True)  # a GPU is there, and the CPU is measured
    assert bench.describe(cpu)["kernels"] == "plain PyTorch, compile off"


def test_a_warning_says_where_a_compiled_function_ran_eager(cpu, capsys):
    def length_added(x, words):
        return x + len(words)

    def run(call, limit):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with torch._dynamo.config.patch(recompile_limit=limit):
            for n in range(4):
                call(torch.zeros(1), "a" * n)
        for is_compiled in (False, True):
            cpu.compile = is_compiled
            bench.compiled_ran_eager(cpu)
        return capsys.readouterr().err

    def broken(x, words):
        torch._dynamo.graph_break()
        return x + 1

    compiled = torch.compile(length_added, backend="eager")
    assert run(compiled, limit=8) == ""
    (line,) = run(compiled, limit=2).splitlines()
    assert line.startswith("warning: a compiled function ran eager in part: ") and "recompile limit" in line
    assert "graph_break()" in run(torch.compile(broken, backend="eager"), limit=8)
    torch._dynamo.utils.counters.clear()


# ----------------------------------------------------------------------------------------------------------------------
# Training against nanoGPT: steps, tiny steps, loss against processor time


def test_a_step_is_compared_with_nanogpts_in_float32_and_with_autocast(beside_nanogpt, monkeypatch, seen_losses):
    beside_nanogpt.dtype = "bfloat16"
    monkeypatch.setattr(training, "SMALL", dict(n_layer=1, n_head=2, n_embd=16))
    monkeypatch.setattr(training, "alone", lambda *arguments: 1)
    monkeypatch.setattr(training, "random_batch", lambda config, V, B, T: sides.random_batch(config, V, 1, 8))
    part = Report("train")
    bench.PARTS["train"](beside_nanogpt, part)
    targets = {claim["name"]: claim["target"] for claim in part.claims[:-1]}
    assert targets == {
        f"step in {dtype}, {ids} ids, nanoGPT / ours": target
        for ids in ("256", "50,304")
        for dtype, target in (("float32", 1.0), ("bfloat16", 1.05))
    }
    assert len(seen_losses) == 2 * 4 * (1 + 6)


def test_tiny_steps_are_compared_alone_and_two_at_a_time(beside_nanogpt, monkeypatch):
    class Inline(contextlib.nullcontext):
        def starmap(self, function, tasks, chunksize):
            assert len(tasks) == 2 and [function(*task, steps=1) for task in tasks]

    context = types.SimpleNamespace(Pool=lambda n, **keys: Inline(Inline()))
    monkeypatch.setattr(training.multiprocessing, "get_context", lambda name: context)
    part = Report("tiny")
    bench.PARTS["tiny"](beside_nanogpt, part)
    assert [(claim["name"], claim["target"], claim["at_most"]) for claim in part.claims] == [
        ("tiny step, nanoGPT / ours", 1.6, False),
        ("tiny step, gated_deltanet, nanoGPT / ours", 1.6, False),
        ("two tiny runs at a time, ours / nanoGPT", 0.65, True),
        ("two tiny runs at a time, gated_deltanet, ours / nanoGPT", 0.65, True),
    ]
    operations = {row["side"]: row["operations"] for row in part.rows}
    assert operations["gated_deltanet"] > operations["softmax"] > operations["nanoGPT"] > 5  # a stand-in of one product


def test_operations_of_a_step_are_counted_as_it_runs():
    x = torch.zeros(4, requires_grad=True)
    # the product, the sum, its gradient of ones, the expanded gradient times 2
    assert training.operations_of(lambda: (2 * x.view(2, 2)).sum().backward()) == 4
    assert training.operations_of(lambda: torch.empty(3).view(3, 1)) == 0


@pytest.fixture
def small_data(monkeypatch):
    """The part data on few rows and steps, and train.py in this process."""
    monkeypatch.setattr(speed_data, "ROWS", 200)
    monkeypatch.setattr(speed_data, "LOOPED", 20)
    monkeypatch.setattr(speed_data, "STEPS", 2)
    monkeypatch.setattr(pystdlib, "sysconfig", types.SimpleNamespace(get_path=lambda name: json.__path__[0]))
    words = ["--n_layer=1", "--n_embd=8", "--threads=1"]
    here = types.SimpleNamespace(run=lambda command, **keys: train.main([*command[2:], *words]))
    monkeypatch.setattr(speed_data, "subprocess", here)


def test_the_part_data_makes_its_claims(small_data, cpu):
    part = Report("data")
    bench.PARTS["data"](cpu, part)
    targets = {
        claim["name"]: (claim["target"], claim["at_most"]) for claim in part.claims if "BPE" not in claim["name"]
    }
    assert targets == {
        "MQAR, 200 rows of 64, a Python loop / ours": (50, False),
        "loader / the tiny model's step": (0.02, True),
        "train.py, start to end of one step, seconds": (2, True),
        "evaluations / a text run of 4 x 128": (0.1, True),
    }
    share = part.claims[-1]["pairs"][0]
    run = next(row for row in part.rows if "eval_seconds" in row)
    # 11 evaluations and 5,000 steps from 2 and 2
    evaluating, stepping = 11 / 2 * run["eval_seconds"], 2500 * (run["seconds"] - run["eval_seconds"])
    assert share == pytest.approx((evaluating, evaluating + stepping))


def test_the_loop_makes_rows_of_the_same_kind():
    rng = np.random.default_rng(0)
    tokens, labels = speed_data.one_row(rng, 64, 4, 8192)
    shown = dict(zip(tokens[0:8:2], tokens[1:8:2], strict=True))
    asked = np.flatnonzero(labels)
    assert len(asked) == 4 and {tokens[i]: labels[i] for i in asked} == shown and all(asked % 2 == 0)
    assert set(np.flatnonzero(tokens)) == {*range(8), *asked}
    assert all(0 < key < 4096 <= value < 8192 for key, value in shown.items())


def test_loss_is_followed_on_the_same_batches_for_every_side_and_seed(beside_nanogpt, monkeypatch, tmp_path):
    beside_nanogpt.seeds, seen = [0, 1], []
    batch = Dataset.batch
    monkeypatch.setattr(pystdlib, "sysconfig", types.SimpleNamespace(get_path=lambda name: json.__path__[0]))
    monkeypatch.setattr(loss, "each_alone", lambda function, tasks, n: [function(*task) for task in tasks])
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
    (tmp_path / "loss.json").write_text(json.dumps(part.as_dict()))
    assert tmp_path / "loss.png" in figures.draw(tmp_path)


def test_the_time_to_a_loss_lies_on_the_line_between_two_evaluations():
    curve = [(0, 0.0, 5.0), (10, 1.0, 4.0), (20, 2.0, 2.0), (30, 3.0, 3.0)]
    assert loss.seconds_to(4.5, curve) == 0.5 and loss.seconds_to(3.0, curve) == 1.5
    assert loss.seconds_to(1.0, curve) is None


# ----------------------------------------------------------------------------------------------------------------------
# What is not met, and why


def test_a_claim_that_is_not_met_is_printed_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("## Why a target is not met\n\n| `slow / fast` | it is slow |\n\n## Next\n")
    monkeypatch.setattr(report, "REASONS", tmp_path / "README.md")
    part = Report("part")
    part.claim("slow / fast", [(1, 1)], 2.0)
    assert "missed\n      it is slow" in str(part)
    part.claims[0]["met"] = "met"
    assert "it is slow" not in str(part)


def test_the_page_gives_a_reason_for_every_measured_claim_that_is_not_met_and_for_no_other():
    claims = [
        claim for file in report.REASONS.parent.glob("*.json") for claim in json.loads(file.read_text())["claims"]
    ]
    assert set(report.reasons()) == {claim["name"] for claim in claims if claim["met"] != "met"}
