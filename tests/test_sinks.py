"""What an experiment says about sinks: its table, its sentences and its figures, from rows made by hand.

python -m pytest tests/test_sinks.py
"""

import configurator
from configurator import UserError

import json
from pathlib import Path

import pytest

import experiment
import plot
from study import report, sinks, tables

ROOT = Path(__file__).resolve().parents[1]


def kind(share, gate=None, loss=1.0):
    gates = {} if gate is None else {"readout": gate}
    return {"share": share, "effective": share / 10, "gate_mean": gates, "loss": loss}


def row(arm, seed, share, gate=None, norm=0.5, attention="softmax"):
    ends = {"other": kind(share, gate and gate / 10, 2.0), "trigger": kind(0.0, gate, 0.5)}
    points = [{"step": 0, "value_norm": 1.0, "trigger": kind(0.06, gate), "other": kind(0.06, gate)}]
    points.append({"step": 10, "value_norm": norm} | ends)
    keys = {"attention": attention, "gate": "none" if gate is None else "headwise"}
    about = {"finite": True, "accuracy": 0.5, "val_loss": 1.0, "metric": "val_loss", "data": {}, "config": keys}
    meters = {"kinds": {"other": {"share": share, "uniform": 0.0625}, "trigger": {"share": 0.0, "uniform": 0.05}}}
    curve = {"curve": [[0, 2.0], [10, 1.0]], "sinks": points, "meters": meters}
    return {"arm": arm, "seed": seed, "scores": {}, "state_bytes": 4} | about | curve


ROWS = [row("headwise", s, 0.5, 0.9) for s in range(2)] + [row("none", s, (0.8, 0.9)[s], norm=0.1) for s in range(2)]


def test_the_table_has_a_line_per_arm_with_its_means_and_spread():
    title, gated, plain = sinks.table(ROWS)
    assert title[:5] == ["arm", "seeds", "weight, other", "weight, trigger", "sd"]
    by_name = dict(zip(title, plain, strict=True))
    assert (by_name["weight, other"], by_name["sd"], by_name["|v_0|"]) == ("85.0%", "7.1%", "0.10")
    assert (by_name["effective, other"], by_name["gate, other"], by_name["loss, other"]) == ("0.085", "-", "2.0000")
    assert dict(zip(title, gated, strict=True))["gate, trigger"] == "0.90"
    assert tables.sinks_table([{"sinks": []}, {}]) is None


@pytest.mark.parametrize("others", [ROWS, []])
def test_an_arm_without_weights_has_no_number_and_no_line(others, tmp_path, drawn):
    bare = row("none", 2, 0.5) | {"arm": "conv"}
    rows = json.loads(json.dumps([*others, bare, bare | {"seed": 3}]))
    for at in (point for one in rows[-2:] for point in one["sinks"]):
        at["value_norm"] = at["other"]["share"] = at["other"]["effective"] = None
        at["trigger"]["share"] = at["trigger"]["effective"] = None
    title, *lines = sinks.table(rows)
    cells = dict(zip(title, lines[-1], strict=True))
    assert {cells[name] for name in title if name.startswith(("weight", "effective", "sd", "|v_0|"))} == {"-"}
    assert cells["loss, other"] == "2.0000"
    sinks.curves(rows, ["none", "conv"] if others else ["conv"], tmp_path / "sink.png")
    assert len(drawn["sink.png"].axes[0].lines) == (4 if others else 1)  # two seeds, their mean and uniform weights
    sinks.small_multiples(rows, ["conv"], tmp_path / "sink_arms.png")


def test_arms_with_fewer_seeds_have_panels_of_their_own(tmp_path):
    more = [*ROWS, row("gla", 0, 0.1, attention="gla"), row("gla gated", 0, 0.1, 0.3, attention="gla")]
    assert sinks.arms_by_seeds(more) == (["headwise", "none"], ["gla", "gla gated"])
    names = [path.name for path in report.figures(more, tmp_path)]
    assert names == ["sink.png", "sink_arms.png"]
    assert [path.name for path in report.figures(ROWS, tmp_path)] == ["sink.png"]


def test_every_seed_is_a_line_and_the_gate_has_one_for_each_kind(tmp_path, drawn):
    sinks.figures(ROWS, tmp_path)
    weight, effective, norm, gate = drawn["sink.png"].axes
    assert [len(axes.lines) for axes in (weight, effective, norm, gate)] == [7, 6, 6, 6]  # weight: the uniform one
    black = [line for line in weight.lines if line.get_color() == "#000000"]
    assert sorted(line.get_ydata()[-1] for line in black) == [80.0, pytest.approx(85.0), 90.0]  # none, and the mean
    assert sorted(round(line.get_ydata()[-1], 2) for line in gate.lines) == [0.09] * 3 + [0.9] * 3


def test_maps_stand_side_by_side_with_their_triggers_and_gates(tmp_path, drawn):
    residual = {"max": 1.0, "max_over_median": 2.0, "position": 0, "channel": 0}
    names = ("share", "random_tokens", "token_0_before", "token_0_after", "effective")
    sink = {name: [0.5] for name in names} | {"kind": "weights", "kinds": {}}
    layer = {"mixer": "softmax", "gates": {}, "residual": residual, "sink": sink}
    about = {"attention": "softmax", "step": 1, "rows": 1, "tokens": 2, "dataset": "backcopy", "split": "val"}
    about |= {"packing": "", "dtype": "float32", "sink_baseline": 0.5, "layers": [layer], "pruning": []}
    shown = {"layer": 0, "head": 0, "weights": [[1.0, 0.0], [0.25, 0.75]], "queries": {"trigger": [1]}}
    plain = about | {"gate": "none", "maps": [shown | {"gate": []}]}
    gated = about | {"gate": "headwise", "maps": [shown | {"gate": [0.1, 0.9]}]}
    file = tmp_path / "meters.json"
    file.write_text(json.dumps({"checkpoints": [plain, gated]}))
    assert plot.draw_json(file) == [tmp_path / "maps.png"]
    left, right, colours = drawn["maps.png"].axes
    assert (left.get_title(), right.get_title()) == ("without a gate", "gate headwise")
    assert [len(axes.child_axes) for axes in (left, right)] == [0, 1]
    assert right.child_axes[0].images[0].get_array().ravel().tolist() == [0.1, 0.9]
    assert left.lines[0].get_ydata().tolist() == [1]


def runs_with(**keys):
    arms = {"a": {}, "b": {}, "c": {}}
    config = experiment.ExperimentConfig(arms=arms, seeds=[0, 1], base={"dtype": "float32"}, **keys)
    return [(run["arm"], run["seed"]) for run in experiment.runs_of(config, config.seeds, [])]


def test_runs_are_those_of_seeds_of_and_those_of_first_arms_go_first_in_all_seeds():
    by_seed = [(arm, seed) for seed in (0, 1) for arm in "abc"]
    assert runs_with() == by_seed and runs_with(seeds_of={"b": [1]}) == [run for run in by_seed if run != ("b", 0)]
    first = [("b", 0), ("c", 0), ("b", 1), ("c", 1), ("a", 0), ("a", 1)]
    assert runs_with(first_arms=["c", "b"]) == first
    for keys in ({"seeds_of": {"nobody": [1]}}, {"seeds_of": {"a": [-1]}}, {"seeds_of": {"a": "0"}}):
        with pytest.raises(UserError, match="seeds_of"):
            runs_with(**keys)
    with pytest.raises(UserError, match="first_arms"):
        runs_with(first_arms=["nobody"])


def test_the_demo_has_arms_of_the_experiment():
    whole, demo = (
        configurator.load(experiment.ExperimentConfig, [str(ROOT / f"config/experiments/{name}.py")])
        for name in ("sink", "sink_demo")
    )
    assert all(whole.arms[arm] == keys for arm, keys in demo.arms.items())
    assert demo.base | {"max_iters": whole.base["max_iters"]} == whole.base and not demo.claims
