"""Arms compared mixer by mixer: the forest. Rows are made by hand.

python -m pytest tests/test_mixers.py
"""

import configurator

import dataclasses
import math
import random

import pytest
from made_rows import ROOT

import experiment
from study import claims, mixers

LOSS = {"softmax": 1.20, "cosformer": 1.35, "gla": 1.22, "mamba2": 1.10, "gated_deltanet": 1.08}
GAIN = {"none": 0.0, "sigmoid": 0.04, "wide": 0.05, "matched": 0.03, "native": 0.07}


def load(name):
    return configurator.load(experiment.ExperimentConfig, [str(ROOT / f"config/experiments/{name}.py")])


def text_rows():
    """Seeds far apart, arms of a seed close together; the gate of softmax gains half as much."""
    config, rng, rows = load("text"), random.Random(0), []
    level = {seed: rng.gauss(0, 0.08) for seed in config.seeds}
    for run in experiment.runs_of(config, config.seeds, dict.fromkeys(config.arms, 1e-3)):
        mixer, _, variant = run["arm"].partition(" ")
        gain = GAIN[variant or "none"] * (0.5 if mixer == "softmax" else 1)
        loss = LOSS[mixer] + level[run["seed"]] - gain + rng.gauss(0, 0.008)
        row = run | {"finite": True, "val_loss": loss, "metric": "val_loss", "curve": [[0, 5.0], [1500, loss]]}
        row |= {"scores": {}, "horizon": 1500}
        if run["seed"] in config.seeds_of.get(run["arm"], config.seeds):
            rows.append(row)
    return config, rows


def recall_rows():
    """A start at a half is slower in softmax and cosformer; two runs of mamba2's native gate never get there."""
    config, rng, rows = load("recall"), random.Random(0), []
    factor = {"wide half": 1.3, "sigmoid": 1.25, "fixed half": 1.22, "static one": 1.1, "native": 1.6}
    for run in experiment.runs_of(config, config.seeds, dict.fromkeys(config.arms, 1e-3)):
        mixer, _, variant = run["arm"].partition(" ")
        slows = factor.get(variant, 1.0) if mixer in ("softmax", "cosformer") or variant == "native" else 1.0
        steps = round(500 * slows * math.exp(rng.gauss(0, 0.14)) / 25) * 25
        lost = run["arm"] == "mamba2 native" and run["seed"] < 2
        curve = [[0, 0.1], [3000, 0.5]] if lost else [[0, 0.1], [steps, 0.95], [steps + 25, 0.99]]
        about = {"finite": True, "accuracy": curve[-1][1], "val_loss": 1.0, "metric": "accuracy", "curve": curve}
        rows.append(run | about | {"horizon": 3000, "scores": {}})
    return config, rows


def forest_of(made, path):
    config, rows = made
    judged = claims.judge_claims(config, rows)
    mixers.forest(judged, rows, path)
    return judged, rows


def test_every_pair_that_claims_compare_in_all_mixers_has_a_panel_with_every_seed(tmp_path, drawn):
    judged, rows = forest_of(text_rows(), tmp_path / "text.png")
    panels = {axes.get_title(): axes for axes in drawn["text.png"].axes if axes.axison}
    pairs = ["none minus sigmoid", "none minus matched", "sigmoid minus wide", "sigmoid minus native"]
    assert list(panels) == pairs
    dots = [line for line in panels["none minus sigmoid"].lines if line.get_marker() == "."]
    assert len(dots) == 6 * 7 and "none lower    sigmoid lower" in panels["none minus sigmoid"].get_xlabel()
    names = [label.get_text() for label in panels["none minus sigmoid"].get_yticklabels()]
    assert names == [*LOSS, "mean of these"]
    natives = {line.get_ydata()[0] for line in panels["sigmoid minus native"].lines if line.get_marker() == "o"}
    assert natives == {-2, -3, -4, -5}  # softmax and cosformer have no native gate
    assert mixers.pairs_of(judged, [row for row in rows if row["arm"] == "gla"]) == {}


def test_a_ratio_is_shown_as_one_and_a_seed_that_never_got_there_is_hollow(tmp_path, drawn):
    forest_of(recall_rows(), tmp_path / "recall.png")
    panels = {axes.get_title(): axes for axes in drawn["recall.png"].axes if axes.axison}
    order = ["wide half / wide one", "static one / wide one", "sigmoid / fixed half", "half init / none"]
    looks = [f"{arm} / none (exploratory)" for arm in ("wide one", "fixed half", "native")]
    assert list(panels) == [*order, "native / silu from one", "sigmoid / none", *looks]
    assert {axes.get_xscale() for axes in panels.values()} == {"log"}
    native = panels["native / silu from one"]
    hollow = [line for line in native.lines if line.get_fillstyle() == "none"]
    assert [line.get_ydata()[0] for line in hollow] == pytest.approx([-3.22] * 2)
    means = [line.get_xdata()[0] for line in panels["wide half / wide one"].lines if line.get_markersize() == 7]
    assert 1.1 < means[0] < 1.6 and 0.85 < means[2] < 1.15
    assert "wide half sooner    wide one sooner" in panels["wide half / wide one"].get_xlabel()


def test_a_threshold_is_drawn_only_where_the_mean_is_that_of_its_claim(tmp_path, drawn):
    config, rows = text_rows()
    gain = {"contrast": {"gla": 1, "gla sigmoid": -1}, "above": 0.01, "sides": 1}
    pooled = {f"{mixer}{variant}": sign / 5 for mixer in LOSS for variant, sign in (("", 1), (" sigmoid", -1))}
    for claims_of, is_drawn in (({"one": gain}, 0), ({"one": gain, "all": gain | {"contrast": pooled}}, 1)):
        judged = claims.judge_claims(dataclasses.replace(config, claims=claims_of), rows)
        mixers.forest(judged, rows, tmp_path / f"{is_drawn}.png")
        (axes,) = [axes for axes in drawn[f"{is_drawn}.png"].axes if axes.axison]
        assert sum(line.get_linestyle() == ":" for line in axes.lines) == is_drawn


@pytest.mark.parametrize(
    "of, words, unit",
    [
        (["val_loss"], "← A lower    B lower →", "nats a token"),
        (["accuracy"], "← B higher    A higher →", "points"),
        (["lost", 0.9], "← A lost less often    B lost less often →", "points"),
        (["log_steps", 0.9], "← A sooner    B sooner →", "ratio of steps"),
        (["log", "scores", "test", "word_perplexity"], "← A lower    B lower →", "ratio"),
        (["scores", "longer", "slices", "320/40"], "← B higher    A higher →", "points"),
        (["meters", "kinds", "other", "effective"], "", "of the residual stream"),
    ],
)
def test_a_panel_says_which_side_is_better_for_which_arm(of, words, unit):
    claim = {"of": of, "metric": "val_loss", "weights": {"A": 1.0, "B": -1.0}}
    assert mixers.label_of(claim, "A", "B").partition("\n")[2] == words and claims.unit_of(claim) == unit
