"""The figures of runs and of an experiment, from rows made by hand."""

import json
import math

import pytest
from made_rows import line_of, listed, made_row, rows_of, write_rows

import plot
from base import files
from study import drawing, report
from study.rows import mixer_of


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
    titles = [axes.get_title() for axes in panels]  # runs of one arm are as good as those of another, but for the one
    assert titles == ["gla: matched leads", "mamba2: matched leads"]
    for axes in panels:
        colours = [line_of(axes, kind).get_color() for kind in kinds]
        assert colours[0] == "#000000" and len(set(colours)) == 5
    assert [len(axes.lines) for axes in panels] == [5 * (2 + 1) + 1, 5 * (2 + 1)]
    mean = line_of(panels[0], "none")  # not behind the last evaluation of a run that was not finite
    finite = dict(zip(mean.get_xdata(), map(math.isfinite, mean.get_ydata()), strict=True))
    assert finite == {0: True, 50: True, 51: False, 100: False}


def test_a_panel_has_at_most_eight_arms_and_each_part_the_first(tmp_path, drawn):
    arms = {f"gla {name}": {"attention": "gla"} for name in "abcdefghi"} | {"gla": {"attention": "gla"}}
    report.figure(rows_of(listed(arms=arms)), tmp_path)
    shown = []
    for axes in drawn["accuracy.png"].axes:
        shown.append([line.get_label() for line in axes.lines if not line.get_label().startswith("_")])
    assert shown == [["none", *"abcde"], ["none", *"fghi"]]


def test_a_gain_is_drawn_where_another_run_of_the_mixer_had_no_gate_the_same_seed_and_as_many_steps(tmp_path, drawn):
    arms = {"none": {}, "sigmoid": {"gate": "elementwise"}, "short": {"gate": "elementwise", "max_iters": 50}}
    rows = []
    for row in rows_of(listed(arms=arms)):
        loss = 2.0 - 0.1 * (row["arm"] == "sigmoid")
        curve = [[0, 5.0], [50, loss + 1], [100, loss]]
        parts = [{"step": step, "near": loss, "far": None} for step, _ in curve]
        row |= {"metric": "val_loss", "curve": curve, "loss_curve": parts, "horizon": 100}
        rows.append(row | ({"horizon": 50} if row["arm"] == "short" else {}))
    assert report.gain_curves(rows, tmp_path / "gain.png") == [tmp_path / "gain.png"]
    panels = {axes.get_title(): axes for axes in drawn["gain.png"].axes}
    assert list(panels) == ["all of the text", "first eighth of the window"]
    assert line_of(panels["all of the text"], "sigmoid").get_ydata() == pytest.approx([0.1, 0.1])
    assert "in 1 of 1 arms" in drawn["gain.png"].get_suptitle().replace("\n", " ")
    mixers = {name: mixer_of({"config": {"attention": name}}) for name in ("fox", "xsa", "kda_fla", "gla")}
    assert mixer_of({"config": {"attention": "gated"}}) == "softmax"
    of_accuracy = [row | {"metric": "accuracy"} for row in rows]
    assert report.gain_curves(of_accuracy, tmp_path / "none.png") == []  # the curve is of no loss
    assert mixers == {"fox": "softmax", "xsa": "softmax", "kda_fla": "kda_fla", "gla": "gla"}
    assert report.gain_curves([row | {"loss_curve": []} for row in rows], tmp_path / "gain.png") == []
    twice = [*rows, *(row | {"arm": "softmax"} for row in rows if row["arm"] == "none")]  # two arms without a gate
    gap = [row | {"curve": [*row["curve"][:2], [100, None]]} if row["arm"] == "sigmoid" else row for row in twice]
    report.gain_curves(gap, tmp_path / "gain.png")
    (axes, _) = drawn["gain.png"].axes
    assert axes.get_legend_handles_labels()[1] == ["sigmoid"]
    assert math.isnan(line_of(axes, "sigmoid").get_ydata()[-1])


@pytest.mark.parametrize("of, contrast, side", [
    (["val_loss"], {"none": 1, "gated": -1}, "gate better →"),
    (["log_steps", 0.9], {"gated": 1, "none": -1}, "← gate better"),
    (["log", "val_loss"], {"gated": 1, "none": -1}, "← gate better"),
    (["accuracy"], {"gated": 1, "none": -1}, "gate better →"),
    (["accuracy"], {"gated": 1, "wide": -1}, ""),
    (["val_loss"], {"none": 1, "gated": -1, "short": -1, "wide": 1}, ""),
    (["loss", "far_minus_near"], {"gated": 1, "none": -1}, ""),
])  # fmt: skip
def test_an_arrow_says_where_the_gate_is_better_if_the_claim_is_about_a_gate(of, contrast, side):
    assert report.gate_side({"of": of, "contrast": contrast}, {"gated", "wide"}) == side


def test_runs_named_together_are_drawn_in_one_figure(tmp_path, drawn):
    for name, loss in {"a": 4, "b": 3}.items():
        rows = [{"event": "eval", "step": step, "val_loss": loss - step / 10} for step in (0, 10)]
        write_rows(tmp_path / name, rows, "metrics.jsonl")
    plot.main([str(tmp_path / name) for name in "ab"])
    (axes,) = drawn["curves.png"].axes
    assert line_of(axes, str(tmp_path / "b")).get_xydata().tolist() == [[0, 3], [10, 2]]
    assert axes.get_title().replace("\n", " ").endswith("/b, 2.0000")


def test_a_figure_of_one_arm_says_where_it_ends(tmp_path, drawn):
    report.figure(rows_of(listed(arms={"gla": {"attention": "gla"}}), lambda run: 0.5), tmp_path)
    assert drawn["accuracy.png"].get_suptitle() == "gla ends at 50%, by the mean of its seeds"


def test_more_than_eight_heads_are_drawn_as_three_lines():
    layer = {"sink": {"share": [0.1 * i for i in range(9)], "effective": [0.1], "value_norm": [1.0]}}
    layer |= {"residual": {"max": 1.0, "max_over_median": 2.0}, "gates": {}}
    heads = plot.numbers_of(layer)["Weight of each head on token 0"]
    assert heads == {"highest head": 0.8, "mean": pytest.approx(0.4), "lowest head": 0.0}


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
    assert drawn["maps.png"].axes[1].get_title() == "gla, gate headwise\nlayer 0, head 1\ntoken 0 gets 50%"
    assert drawn["maps.png"].axes[2].get_title() == "weight times gate:\ntoken 0 gets 50%"
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


def test_sinks_of_a_model_that_has_none_are_no_figure_and_the_metric_is_drawn(tmp_path, drawn):
    nothing = {"share": None, "effective": None, "gate_mean": {}}
    rows = [one | {"sinks": [{"step": 0, "value_norm": None, "other": nothing}]} for one in ROWS]
    assert report.figure([one | {"config": {}} for one in rows], tmp_path) == tmp_path / "accuracy.png"


def test_every_seed_is_a_line_in_the_panel_of_each_number(tmp_path, drawn):
    report.figure([*ROWS, row("gla", 0, 0.1)], tmp_path)  # an arm with fewer seeds is left out
    panels = {axes.get_title(): axes for axes in drawn["sink.png"].axes}
    weight, gate = panels["weight on token 0, other queries"], panels["gate on readout, trigger queries"]
    assert len(weight.lines) == 6 and len(gate.lines) == 3
    black = [line for line in weight.lines if line.get_color() == "#000000"]
    assert sorted(line.get_ydata()[-1] for line in black) == [0.8, pytest.approx(0.85), 0.9]  # none, and the mean
    assert [line.get_ydata()[-1] for line in gate.lines] == [0.9] * 3
    assert (
        drawn["sink.png"]
        .get_suptitle()
        .replace("\n", " ")
        .endswith("with headwise: 0.050 of the residual stream; without a gate 0.085")
    )
