"""The figures of an experiment and of its claims, from rows made by hand.

python -m pytest tests/test_figures.py
"""

import itertools

import matplotlib.pyplot as plt
import pytest
from made_rows import labels_of, listed, made_row, write_rows

import experiment
import plot
from model import MIXERS
from study import claims, drawing, gains, report, tables
from study.drawing import mean_lines, mean_mark


def test_settings_and_mixers_have_figures_of_their_ends(tmp_path):
    arms = {mixer: {"attention": mixer} for mixer in ("softmax", "gla")}
    arms |= {f"{mixer} gated": keys | {"gate": "elementwise"} for mixer, keys in arms.items()}
    config = listed(arms=arms)
    rows = [made_row(run, 0.5 + 0.1 * run["seed"]) for run in experiment.runs_of(config, config.seeds, [])]
    rows[0] = made_row(rows[0], None)  # not finite: it has no end
    rows = [row | {"state_bytes": 512 if row["setting"] == "d16" else 1024} for row in rows]
    assert [figure.name for figure in report.figures(rows, tmp_path)] == ["accuracy.png", "ends.png", "state.png"]
    rows = [row for row in rows if row["setting"] == "d16" and row["config"]["attention"] == "gla"]
    assert [figure.name for figure in report.figures(rows, tmp_path)] == ["accuracy.png"]


def test_many_arms_have_a_panel_each_beside_the_ungated_runs_and_scores_one_for_each_setting(tmp_path, drawn):
    kinds = {
        "none": {}, "native": {"gate": "native"}, "sigmoid": {"gate": "elementwise"},
        "matched": {"gate": "elementwise", "match_params": True},
    }  # fmt: skip
    arms = {f"{m} {kind}": {"attention": m} | keys for m in ("gla", "mamba2") for kind, keys in kinds.items()}
    config = listed(arms=arms)
    slices = {"32/4": 0.9, "64/4": 0.8, "64/8": 0.4}
    about = {"scores": {"longer": {"slices": slices}}}
    rows = [
        made_row(run, 0.5) | about | {"state_bytes": 16 * run["config"]["n_embd"]}
        for run in experiment.runs_of(config, config.seeds, [])
    ]
    report.figures(rows, tmp_path)
    assert list(drawn) == ["accuracy.png", "state.png", "slices.png"]
    panels, chance = drawn["accuracy.png"].axes, {"chance among the values in context"}
    kinds_down = ("none", "matched", "native", "sigmoid")
    assert [axes.get_title() for axes in panels] == [f"{m}, {kind}" for kind in kinds_down for m in ("gla", "mamba2")]
    for axes in panels:
        grey = 0 if axes.get_title().endswith("none") else 2 * 2
        assert len(axes.lines) == grey + 2 * 2 + 2 + 1  # none's seeds in both settings; its own; their means; chance
        assert not axes.collections  # of two seeds no interval is drawn
        assert len({line.get_color() for line in axes.lines}) == (3 if grey == 0 else 4)
    assert [axes.get_title().partition(":")[0] for axes in drawn["slices.png"].axes] == ["d16", "d16", "d32", "d32"]
    shown = {f"{mixer}, gate {gate}" for mixer in ("gla", "mamba2") for gate in ("none", "elementwise")}
    assert all(labels_of(axes) - chance == shown for axes in drawn["slices.png"].axes)


def test_an_interval_is_drawn_from_three_seeds_on(drawn):
    for n in (2, 3):
        _, axes = plt.subplots()
        mean_lines(axes, [[[0, 1.0], [1, 2.0 + seed]] for seed in range(n)])
        assert len(axes.lines) == 1 and len(axes.collections) == (n == 3)
        mean_mark(axes, 0, list(range(n)), "black")
        assert len(axes.lines) == 1 + 2 + (n == 3)  # the seeds, the mean, its interval


@pytest.mark.parametrize("kinds", [["none"], ["none", "native", "sigmoid", "wide"]])
def test_a_loss_is_drawn_from_the_lowest_run_to_the_highest_behind_its_first_evaluation(kinds, tmp_path, drawn):
    arms = {f"{m} {kind}": {"attention": m} for m in ("gla", "mamba2") for kind in kinds}
    config = listed(arms=arms, metric="val_loss")
    rows = [made_row(run, 0.5) | {"metric": "val_loss"} for run in experiment.runs_of(config, config.seeds, [])]
    for i, row in enumerate(rows):  # every panel is a bit lower than the one before
        row["curve"] = [[0, 5.5], [50, 3 - 0.1 * i], [100, 2 - 0.1 * i]]
    report.figures(rows, tmp_path)
    low, high = 2 - 0.1 * (len(rows) - 1), 3
    for axes in drawn["val_loss.png"].axes:
        assert axes.get_ylim() == pytest.approx((low, high), abs=0.05 * (high - low))


def test_every_mixer_and_a_pattern_of_mixers_have_every_figure_of_an_experiment(tmp_path, drawn, monkeypatch):
    monkeypatch.setitem(MIXERS, "mine", type("Mine", (MIXERS["gla"],), {}))
    mixers = [*MIXERS, "gla,softmax"]
    arms = {f"{m} {gate}": {"attention": m, "gate": gate} for m in mixers for gate in ("none", "elementwise")}
    about = {"state_bytes": 512, "scores": {"longer": {"slices": {"32/4": 0.9, "64/8": 0.4}}}}
    rows = [made_row(run, 0.5) | about for run in experiment.runs_of(listed(arms=arms, settings={}), [0], [])]
    report.figures(rows, tmp_path)
    assert list(drawn) == ["accuracy.png", "state.png", "slices.png"]
    assert set(mixers) == {axes.get_title() for axes in drawn["state.png"].axes}
    assert len({look["color"] for look in report.styles(rows).values()}) == len(mixers)


# ----------------------------------------------------------------------------------------------------------------------
# Claims

ARMS = {"none": {}, "elementwise": {"gate": "elementwise"}}
CLAIMS = {
    "more": {"contrast": {"elementwise": 1, "none": -1}, "above": 0},
    "half": {"contrast": {"none": 0.5, "elementwise": -1}, "above": 0},
    "alone": {"contrast": {"none": 1}, "above": 0, "in": 1},
}
CURVES = {"none": (0.5, 0.95, 0.2), "elementwise": (0.99, 0.97, 0.4)}


def three_claims():
    config = experiment.ExperimentConfig(
        arms=ARMS, claims=CLAIMS, seeds=[0, 1, 2], base={"dtype": "float32", "max_iters": 100}, exploratory=True
    )
    rows = []
    for run in experiment.runs_of(config, config.seeds, []):
        end = CURVES[run["arm"]][run["seed"]]
        rows.append(
            run | {"finite": True, "accuracy": end, "metric": "accuracy", "curve": [[0, 0.1], [50, end], [100, end]]}
        )
    return tables.judge_claims(config, rows), rows


def test_a_claim_of_two_arms_shows_both_in_every_seed_and_a_count_is_no_pair(drawn, tmp_path):
    claims.figures(*three_claims(), 0.9, tmp_path)
    assert list(drawn) == ["claims.png", "pairs.png", "survival.png"]
    more, half = (axes for axes in drawn["pairs.png"].axes if axes.axison)
    assert [tick.get_text() for tick in more.get_xticklabels()] == ["none", "elementwise"]
    assert [list(line.get_ydata()) for line in more.lines] == [
        pytest.approx(ends) for ends in [[50.0, 99.0], [95.0, 97.0], [20.0, 40.0]]
    ]
    assert [tick.get_text() for tick in half.get_xticklabels()] == ["elementwise", "none"]
    assert [list(line.get_ydata()) for line in half.lines] == [
        pytest.approx(ends) for ends in [[99.0, 50.0], [97.0, 95.0], [40.0, 20.0]]
    ]


def test_runs_not_yet_solved_fall_at_their_steps_and_those_at_risk_are_counted(drawn, tmp_path):
    claims.figures(*three_claims(), 0.9, tmp_path)
    (axes,) = drawn["survival.png"].axes
    none, gated = axes.lines
    assert none.get_xdata().tolist() == [0, 50, 100, 100]
    assert none.get_ydata() == pytest.approx([100, 200 / 3, 200 / 3, 200 / 3])
    assert gated.get_ydata() == pytest.approx([100, 100 / 3, 100 / 3, 100 / 3])
    assert [text.get_text() for text in axes.texts] == ["3", "3", "2", "3", "3", "1"]  # at 0, 50 and 100 steps


def test_a_pair_is_coloured_by_the_claims_threshold_and_a_tie_is_grey(drawn, tmp_path):
    found, rows = three_claims()
    for claim, threshold in zip(found[:2], (0.1, 0.0), strict=True):
        claim["rule"] = claim["rule"] | {"above": threshold}
    for row in rows:
        if row["seed"] == 1:
            row["accuracy"] = 0.95
    claims.figures(found, rows, None, tmp_path)
    more, half = (axes for axes in drawn["pairs.png"].axes if axes.axison)
    over, under, tie = claims.SIDES.values()
    assert [line.get_color() for line in more.lines] == [over, tie, over]
    assert [line.get_color() for line in half.lines][::2] == [under, under]


@pytest.mark.parametrize("n", [8, 12])
def test_each_kind_of_arm_has_a_colour_of_its_own_which_is_the_same_in_all_figures(n, drawn, tmp_path):
    rows = []
    for mixer, i in itertools.product(("softmax", "gla"), range(n)):
        arm = f"{mixer} {i}" if i else mixer
        about = {"seed": 0, "finite": True, "accuracy": 0.9, "metric": "accuracy", "data": {}, "scores": {}}
        meters = {"step": [0, 9], "branch": [0.1, 0.2], "gate_mean": {}}
        keys = {"attention": mixer, "max_iters": 9}
        rows.append(about | {"arm": arm, "config": keys, "curve": [[0, 0.1], [9, 0.9]], "meter_curve": meters})
    report.figures(rows, tmp_path)
    claims.figures([], rows, 0.8, tmp_path)
    looks = []
    for name in ("branch.png", "survival.png"):
        for axes in drawn[name].axes:
            looks.append({line.get_label(): line.get_color() for line in axes.lines if line.get_label()[0] != "_"})
    assert all(look == looks[0] for look in looks) and len(set(looks[0].values())) == n


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
    assert gains.plain_arms(rows) == {(None, "sigmoid"): "none", (None, "sigmoid short"): "none short"}
    found = gains.gains(rows)
    assert set(found) == {(arm, part) for arm in ("sigmoid", "sigmoid short") for part in ("all", "near", "far")}
    for part in ("all", "near", "far"):
        assert found["sigmoid", part] == [(0, [(9, 0.5)]), (1, [(9, pytest.approx(-0.1))])]
        assert found["sigmoid short", part] == [(0, [(9, -0.5)])]
    report.figures([row | {"scores": {}} for row in rows], tmp_path)
    assert [axes.get_title() for axes in drawn["gain.png"].axes] == [gains.PARTS[p] for p in ("all", "near", "far")]


def test_numbers_stand_on_the_lowest_panel_of_each_column_and_the_first_of_each_row():
    figure, grid = plt.subplots(2, 3, sharex=True, sharey=True)
    for axes in (grid[1, 1], grid[1, 2], grid[0, 0]):
        axes.set_axis_off()
    drawing.label_edges(grid)
    figure.canvas.draw()
    below = [[axes.xaxis.get_tick_params()["labelbottom"] for axes in line] for line in grid]
    left = [[axes.yaxis.get_tick_params()["labelleft"] for axes in line] for line in grid]
    assert below[0][1:] == [True, True] and below[1][0] and left[0][1] and left[1][0] and not left[0][2]
    plt.close(figure)


def test_without_a_threshold_or_rows_there_is_no_figure_of_them(drawn, tmp_path):
    found, rows = three_claims()
    claims.figures(found, rows, None, tmp_path)
    assert list(drawn) == ["claims.png", "pairs.png"]
    assert claims.figures([], rows, None, tmp_path) == []


def test_long_claims_are_wrapped_between_words():
    assert claims.wrapped("one two three four", 8) == "one two\nthree\nfour"


def test_arms_that_have_the_same_kind_of_gate_are_never_drawn_as_seeds_of_one(tmp_path, drawn):
    kinds = {"none": {}, "sigmoid": {"gate": "elementwise"}, "wide": {"gate": "elementwise", "gate_bias": 1.0}}
    arms = {f"{m} {kind}": {"attention": m} | keys for m in ("gla", "mamba2") for kind, keys in kinds.items()}
    config = listed(arms=arms, settings={})
    about = {"state_bytes": 512, "scores": {"longer": {"slices": {"32/4": 0.9, "64/8": 0.4}}}}
    rows = [made_row(run, 0.5) | about for run in experiment.runs_of(config, config.seeds, [])]
    report.figures(rows, tmp_path)
    assert list(drawn) == ["accuracy.png", "slices.png"]  # an arrow to two arms says nothing
    names = {f"{m}, {kind}" for m in ("gla", "mamba2") for kind in kinds}
    assert all(labels_of(axes) - {"chance among the values in context"} == names for axes in drawn["slices.png"].axes)


def test_a_run_that_was_not_finite_has_no_mean_behind_its_last_evaluation(tmp_path, drawn):
    config = listed(settings={}, arms={"none": {}}, seeds=[0, 1, 2])
    rows = [made_row(run, 0.5) for run in experiment.runs_of(config, config.seeds, [])]
    rows[1] = made_row(rows[1], None) | {"curve": [[0, 0.1], [50, 0.5]]}
    report.figures(rows, tmp_path)
    (mean,) = [line for line in drawn["accuracy.png"].axes[0].lines if line.get_linewidth() == 2]
    assert list(mean.get_xdata()) == [0, 50]


def test_slices_without_a_number_of_pairs_and_settings_with_their_own_are_drawn(tmp_path, drawn):
    config = listed()
    runs = experiment.runs_of(config, config.seeds, [])
    named = [
        made_row(run, 0.5) | {"scores": {"other": {"slices": {"64": 0.9}}}, "scored": {"other": {}}} for run in runs
    ]
    report.figures(named, tmp_path)
    assert "slices.png" not in drawn and "90.0%" in str(tables.summary(config, named, []))
    pairs = {"d16": {"32/2": 0.9}, "d32": {"32/4": 0.5}}
    rows = [made_row(r, 0.5) | {"scores": {"a": {"slices": pairs[r["setting"]]}}, "scored": {"a": {}}} for r in runs]
    report.figures(rows, tmp_path)
    ticks = [[tick.get_text() for tick in axes.get_xticklabels()] for axes in drawn["slices.png"].axes]
    assert ticks == [["32 / 2"], ["32 / 2"], ["32 / 4"], ["32 / 4"]]
    other = [row | {"config": row["config"] | {"gate": "headwise"}} for row in rows]
    drawn.clear()
    report.figures(other, tmp_path)  # neither an arm without a gate nor an elementwise one
    assert "slices.png" not in drawn


def test_an_arm_may_have_at_in_its_name_without_a_learning_rate(tmp_path, drawn):
    config = listed(settings={}, arms={"gate at value": {"gate": "elementwise@value"}, "none": {}})
    rows = [made_row(run, 0.5) for run in experiment.runs_of(config, config.seeds, [])]
    report.figures(rows, tmp_path)
    assert list(drawn) == ["accuracy.png"]


def test_rows_of_two_versions_of_a_run_are_not_drawn_as_two_seeds(tmp_path, helpers):
    config = listed(settings={}, arms={"none": {}})
    rows = [made_row(run, 0.5) for run in experiment.runs_of(config, config.seeds, [])]
    write_rows(tmp_path, rows + [row | {"config": row["config"] | {"n_embd": 32}} for row in rows])
    assert "two rows of arm 'none', seed 0" in helpers.error_of(plot.draw_experiment, tmp_path)


def test_a_folder_whose_run_has_measured_nothing_yet_is_one_line(tmp_path, helpers):
    (tmp_path / "metrics.jsonl").write_text("")
    assert "nothing to draw yet" in helpers.error_of(plot.page, tmp_path)
