"""The figures of an experiment and of its claims, from rows made by hand.

python -m pytest tests/test_figures.py
"""

import itertools
import math

import matplotlib.pyplot as plt
import pytest
from made_rows import labels_of, line_of, listed, made_row, write_rows

import experiment
import plot
from model import MIXERS
from study import drawing, gains, report
from study.drawing import mean_lines
from study.names import plain_arms

CHANCE = {"chance among the values in context"}


def test_a_setting_and_mixer_have_a_panel_and_every_kind_of_arm_a_line_of_its_own(tmp_path, drawn):
    kinds = {
        "none": {}, "native": {"gate": "native"}, "sigmoid": {"gate": "elementwise"},
        "wide": {"gate": "elementwise", "gate_bias": 1.0}, "matched": {"gate": "elementwise", "match_params": True},
    }  # fmt: skip
    arms = {f"{m} {kind}": {"attention": m} | keys for m in ("gla", "mamba2") for kind, keys in kinds.items()}
    config = listed(arms=arms)
    rows = [made_row(run, 0.5 + 0.1 * run["seed"]) for run in experiment.runs_of(config, config.seeds, [])]
    rows[0] = made_row(rows[0], None)  # not finite
    report.figures(rows, tmp_path)
    assert list(drawn) == ["accuracy.png"]
    panels = drawn["accuracy.png"].axes
    assert [axes.get_title() for axes in panels] == [f"{s}, {m}" for m in ("gla", "mamba2") for s in ("d16", "d32")]
    for axes in panels:
        assert labels_of(axes) - CHANCE == set(kinds)
        assert len(axes.lines) == 5 * (2 + 1) + 1 and not axes.collections  # of two seeds no interval is drawn
        assert line_of(axes, "none").get_color() == "#000000"
    assert len({line.get_color() for line in panels[0].lines}) == 5


def test_an_interval_is_drawn_from_three_seeds_on(drawn):
    for n in (2, 3):
        _, axes = plt.subplots()
        mean_lines(axes, [[[0, 1.0], [1, 2.0 + seed]] for seed in range(n)])
        assert len(axes.lines) == 1 and len(axes.collections) == (n == 3)


def test_a_loss_is_drawn_from_the_lowest_run_to_the_highest_behind_its_first_evaluation(tmp_path, drawn):
    arms = {f"{m} {kind}": {"attention": m} for m in ("gla", "mamba2") for kind in ("none", "native", "wide")}
    config = listed(arms=arms, metric="val_loss")
    rows = [made_row(run, 0.5) | {"metric": "val_loss"} for run in experiment.runs_of(config, config.seeds, [])]
    for i, row in enumerate(rows):  # every panel is a bit lower than the one before
        row["curve"] = [[0, 5.5], [50, 3 - 0.1 * i], [100, 2 - 0.1 * i]]
    report.figures(rows, tmp_path)
    low, high = 2 - 0.1 * (len(rows) - 1), 3
    for axes in drawn["val_loss.png"].axes:
        assert axes.get_ylim() == pytest.approx((low, high), abs=0.05 * (high - low))


def test_every_mixer_and_a_pattern_of_mixers_have_a_panel_and_a_colour(tmp_path, drawn, monkeypatch):
    monkeypatch.setitem(MIXERS, "mine", type("Mine", (MIXERS["gla"],), {}))
    names = [*MIXERS, "gla,softmax", "a mixer of an older version"]
    arms = {f"{m} {gate}": {"attention": m, "gate": gate} for m in names[:-1] for gate in ("none", "elementwise")}
    rows = [made_row(run, 0.5) for run in experiment.runs_of(listed(arms=arms, settings={}), [0], [])]
    report.figures(rows, tmp_path)
    assert set(names[:-1]) == {axes.get_title() for axes in drawn["accuracy.png"].axes if axes.axison}
    colours = drawing.mixer_colours(names)
    assert len(set(colours.values())) == len(names)
    assert colours["gla"] == drawing.MIXER_COLOURS["gla"] and colours["mine"] == drawing.mixer_colours(["mine"])["mine"]


def test_each_kind_of_arm_has_a_colour_of_its_own_which_is_the_same_in_all_figures(drawn, tmp_path):
    n, rows = 12, []
    for mixer, i in itertools.product(("softmax", "gla"), range(n)):
        arm = f"{mixer} {i}" if i else mixer
        about = {"seed": 0, "finite": True, "accuracy": 0.9, "metric": "accuracy", "data": {}, "scores": {}}
        meters = {"step": [0, 9], "branch": [0.1, 0.2], "gate_mean": {"readout": [0.5, 0.6], "value": [0.1, 0.3]}}
        meters["induction"] = [[[0.1, None], [0.2, 0.4]], [[0.1, None], [0.7, 0.4]]]
        keys = {"attention": mixer, "max_iters": 9}
        rows.append(about | {"arm": arm, "config": keys, "curve": [[0, 0.1], [9, 0.9]], "meter_curve": meters})
    report.figures(rows, tmp_path)
    panels = {axes.get_title(): axes for name in ("accuracy.png", "branch.png") for axes in drawn[name].axes}
    measures = ("", "\n|branch| / |residual|", "\nmean of the gate", "\nhighest induction score")
    assert list(panels) == [mixer + measure for measure in measures for mixer in ("gla", "softmax")]
    gates = panels.pop("gla" + measures[2]), panels.pop("softmax" + measures[2])
    looks = [{line.get_label(): line.get_color() for line in axes.lines if line.get_label()[0] != "_"}
             for axes in panels.values()]  # fmt: skip
    assert all(look == looks[0] for look in looks) and len(set(looks[0].values())) == n
    for axes in gates:
        assert labels_of(axes) == {f"{arm}, {position}" for arm in looks[0] for position in ("readout", "value")}
        assert list(line_of(axes, "none, value").get_ydata()) == [0.1, 0.3]
    assert list(line_of(panels["gla" + measures[3]], "none").get_ydata()) == [0.4, 0.7]


def test_the_gain_is_of_the_run_of_the_seed_that_has_no_gate_and_else_the_same_keys(drawn, tmp_path):
    rows = []
    for arm, keys, seed, loss in (
        ("none", {}, 0, 2.0), ("none", {}, 1, 2.5), ("none short", {"max_iters": 9}, 0, 3.0),
        ("sigmoid", {"gate": "elementwise", "learning_rate": 1e-2}, 0, 1.5),
        ("sigmoid", {"gate": "elementwise"}, 1, 2.6),
        ("sigmoid short", {"gate": "elementwise", "max_iters": 9}, 0, 3.5), ("gla", {"attention": "gla"}, 0, 1.0),
    ):  # fmt: skip
        about = {"seed": seed, "finite": True, "accuracy": 0.1, "val_loss": loss, "metric": "val_loss", "data": {}}
        parts = [{"step": step, "near": loss + 1, "far": loss - 1} for step in (0, 9)]
        curve = [[0, 5.0], [9, loss]]
        rows.append(about | {"arm": arm, "config": {"max_iters": 18} | keys, "curve": curve, "loss_curve": parts})
    assert plain_arms(rows) == {(None, "sigmoid"): "none", (None, "sigmoid short"): "none short"}
    found = gains.gains(rows)
    assert list(found) == ["all", "near", "far"]
    for curves in found.values():
        assert curves == {"sigmoid": [[(9, 0.5)], [(9, pytest.approx(-0.1))]], "sigmoid short": [[(9, -0.5)]]}
    report.figures([row | {"scores": {}} for row in rows], tmp_path)
    assert [axes.get_title() for axes in drawn["gain.png"].axes] == [gains.PARTS[p] for p in ("all", "near", "far")]


def test_a_run_that_was_not_finite_has_no_mean_behind_its_last_evaluation(tmp_path, drawn):
    config = listed(settings={}, arms={"none": {}}, seeds=[0, 1, 2])
    rows = [made_row(run, 0.5) for run in experiment.runs_of(config, config.seeds, [])]
    rows[1] = made_row(rows[1], None) | {"curve": [[0, 0.1], [50, 0.5]]}
    report.figures(rows, tmp_path)
    mean = line_of(drawn["accuracy.png"].axes[0], "none")
    finite = dict(zip(mean.get_xdata(), map(math.isfinite, mean.get_ydata()), strict=True))
    assert finite == {0: True, 50: True, 51: False, 100: False}


def test_rows_of_two_versions_of_a_run_are_not_drawn_as_two_seeds(tmp_path, helpers):
    config = listed(settings={}, arms={"none": {}})
    rows = [made_row(run, 0.5) for run in experiment.runs_of(config, config.seeds, [])]
    write_rows(tmp_path, rows + [row | {"config": row["config"] | {"n_embd": 32}} for row in rows])
    assert "two rows of arm 'none', seed 0" in helpers.error_of(plot.draw_experiment, tmp_path)


def test_a_folder_whose_run_has_measured_nothing_yet_is_one_line(tmp_path, helpers):
    (tmp_path / "metrics.jsonl").write_text("")
    assert "nothing to draw yet" in helpers.error_of(plot.page, tmp_path)
