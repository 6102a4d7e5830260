"""The figures of runs and of an experiment, from rows made by hand."""

import json
import math

import pytest
from made_rows import line_of, listed, made_row, rows_of, write_rows

import plot
from base import files
from study import drawing, report


def test_a_mixer_has_a_panel_and_every_kind_of_arm_a_line_of_its_own(tmp_path, drawn):
    kinds = {
        "none": {}, "native": {"gate": "native"}, "sigmoid": {"gate": "elementwise"},
        "wide": {"gate": "elementwise", "gate_bias": 1.0}, "matched": {"gate": "elementwise", "match_params": True},
    }  # fmt: skip
    arms = {f"{m} {kind}": {"attention": m} | keys for m in ("gla", "mamba2") for kind, keys in kinds.items()}
    rows = rows_of(listed(arms=arms), lambda run: 0.5 + 0.1 * run["seed"])
    rows[0] = made_row(rows[0], None) | {"curve": [[0, 0.1], [50, 0.5]]}  # not finite
    rows.append(rows[0] | {"seed": 2})
    report.figure(rows, tmp_path)
    assert list(drawn) == ["accuracy.png"]
    assert len({str(look) for look in drawing.arm_looks(map(str, range(20))).values()}) == 21
    panels = drawn["accuracy.png"].axes
    assert [axes.get_title() for axes in panels] == ["gla", "mamba2"]
    for axes in panels:
        colours = [line_of(axes, kind).get_color() for kind in kinds]
        assert colours[0] == "#000000" and len(set(colours)) == 5
    assert [len(axes.lines) for axes in panels] == [5 * (2 + 1) + 1, 5 * (2 + 1)]
    mean = line_of(panels[0], "none")  # not behind the last evaluation of a run that was not finite
    finite = dict(zip(mean.get_xdata(), map(math.isfinite, mean.get_ydata()), strict=True))
    assert finite == {0: True, 50: True, 51: False, 100: False}


def test_runs_named_together_are_drawn_in_one_figure(tmp_path, drawn):
    for name, loss in {"a": 4, "b": 3}.items():
        rows = [{"event": "eval", "step": step, "val_loss": loss - step / 10} for step in (0, 10)]
        write_rows(tmp_path / name, rows, "metrics.jsonl")
    plot.main([str(tmp_path / name) for name in "ab"])
    (axes,) = drawn["curves.png"].axes
    assert line_of(axes, str(tmp_path / "b")).get_xydata().tolist() == [[0, 3], [10, 2]]


def test_a_figure_of_two_runs_leaves_the_folder_around_them_free_for_the_default_run(tmp_path):
    out = tmp_path / "out"
    for name in "ab":
        files.claim(out / name, "run")
        rows = [{"event": "eval", "step": step, "val_loss": 3 - step} for step in (0, 1)]
        write_rows(out / name, rows, "metrics.jsonl")
    plot.main([str(out / name) for name in "ab"])
    assert (out / "a" / "curves.png").is_file()
    assert not files.claim(out, "run")  # raises where it holds what is not of a run


def test_the_page_of_several_checkpoints_is_of_the_last(tmp_path, drawn):
    sink = {"share": [0.5], "effective": [0.1], "value_norm": [1.0]}
    layer = {"sink": sink, "residual": {"max": 1.0, "max_over_median": 2.0}, "gates": {}}
    checkpoints = [{"attention": "gla", "gate": "none", "step": step, "layers": [layer]} for step in (1, 9)]
    (tmp_path / "meters.json").write_text(json.dumps({"checkpoints": checkpoints}))
    plot.main([str(tmp_path)])
    assert drawn["page.png"].get_suptitle() == "gla, gate none, step 9: numbers by layer"


def test_weight_times_gate_is_drawn_beside_the_weights_in_one_scale(tmp_path, drawn):
    shown = {"weights": [[1.0, 0.0], [0.5, 0.5]], "queries": {}, "layer": 0, "head": 1}
    layers = [{"sink": {"share": [0.7, 0.75]}}]
    both = [("softmax", "none", []), ("gla", "headwise", [0.0, 1.0])]
    checkpoints = [{"attention": a, "gate": b, "maps": [shown | {"gate": c}], "layers": layers} for a, b, c in both]
    (tmp_path / "meters.json").write_text(json.dumps({"checkpoints": checkpoints}))
    plot.main([str(tmp_path / "meters.json")])
    assert drawn["maps.png"].axes[1].get_title() == "gla, gate headwise\nlayer 0, head 1"
    _, gated, product = (axes.images[0] for axes in drawn["maps.png"].axes[:3])
    assert product.get_array().tolist() == [[0, 0], [0.5, 0.5]] and product.get_clim() == gated.get_clim() == (0, 1)


# -- Sinks -------------------------------------------------------------------------------------------------------------


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


def test_every_seed_is_a_line_in_the_panel_of_each_number(tmp_path, drawn):
    report.figure([*ROWS, row("gla", 0, 0.1)], tmp_path)  # an arm with fewer seeds is left out
    panels = {axes.get_title(): axes for axes in drawn["sink.png"].axes}
    weight, gate = panels["weight, other"], panels["gate on readout, trigger"]
    assert len(weight.lines) == 6 and len(gate.lines) == 3
    black = [line for line in weight.lines if line.get_color() == "#000000"]
    assert sorted(line.get_ydata()[-1] for line in black) == [0.8, pytest.approx(0.85), 0.9]  # none, and the mean
    assert [line.get_ydata()[-1] for line in gate.lines] == [0.9] * 3
