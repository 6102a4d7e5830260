"""What an experiment says about sinks: its table, its sentences and its figures, from rows made by hand."""

import pytest
from made_rows import made_row

from study import report, sinks


def kind(share, gate=None, loss=1.0):
    gates = {} if gate is None else {"readout": gate}
    return {"share": share, "effective": share / 10, "gate_mean": gates, "loss": loss}


def row(arm, seed, share, gate=None, norm=0.5):
    ends = {"other": kind(share, gate and gate / 10, 2.0), "trigger": kind(0.0, gate, 0.5)}
    points = [{"step": 0, "value_norm": 1.0, "trigger": kind(0.06, gate), "other": kind(0.06, gate)}]
    points.append({"step": 10, "value_norm": norm} | ends)
    meters = {"kinds": {"other": {"uniform": 0.0625}, "trigger": {"uniform": 0.05}}}
    return made_row({"arm": arm, "seed": seed}, 0.5) | {"sinks": points, "meters": meters}


ROWS = [row("headwise", s, 0.5, 0.9) for s in range(2)] + [row("none", s, (0.8, 0.9)[s], norm=0.1) for s in range(2)]


def test_the_table_has_a_line_per_arm_with_its_means_and_spread():
    found = sinks.table(ROWS)
    title, (gated, plain) = found.header, found.cells
    assert title[:5] == ["arm", "seeds", "weight, other", "weight, trigger", "sd"]
    by_name = dict(zip(title, plain, strict=True))
    assert (by_name["weight, other"], by_name["sd"], by_name["|v_0|"]) == ("85.0%", "7.1%", "0.10")
    assert (by_name["effective, other"], by_name["gate, other"], by_name["loss, other"]) == ("0.085", "-", "2.0000")
    assert dict(zip(title, gated, strict=True))["gate, trigger"] == "0.90"


def test_every_seed_is_a_line_and_the_gate_has_one_for_each_kind(tmp_path, drawn):
    report.figures([*ROWS, row("gla", 0, 0.1)], tmp_path)  # an arm with fewer seeds is in the table alone
    weight, effective, norm, gate = drawn["sink.png"].axes
    assert [len(axes.lines) for axes in (weight, effective, norm, gate)] == [7, 6, 6, 6]  # weight: the uniform one
    black = [line for line in weight.lines if line.get_color() == "#000000"]
    assert sorted(line.get_ydata()[-1] for line in black) == [80.0, pytest.approx(85.0), 90.0]  # none, and the mean
    assert sorted(round(line.get_ydata()[-1], 2) for line in gate.lines) == [0.09] * 3 + [0.9] * 3


def test_of_many_arms_the_ends_are_drawn_each_above_its_name(tmp_path, drawn):
    many = [row(f"gate {i}", seed, 0.1 * i + 0.01 * seed, 0.5) for i in range(8) for seed in range(2)]
    report.figures(many, tmp_path)
    weight, _, _, gate = drawn["sink.png"].axes
    assert [name.get_text() for name in weight.get_xticklabels()] == [f"gate {i}" for i in range(8)]
    *strokes, _ = weight.lines  # the last one is that of uniform weights
    ends = {(round(sum(line.get_xdata()) / 2), round(line.get_ydata()[0], 1)) for line in strokes}
    assert ends == {(i, 10 * i + end) for i in range(8) for end in (0, 0.5, 1)}  # two seeds, and their mean
    assert len(gate.lines) == 2 * len(strokes) and not gate.get_legend_handles_labels()[1]
