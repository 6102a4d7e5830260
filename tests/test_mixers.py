"""Arms compared mixer by mixer: the forest. Rows are made by hand."""

import random

import pytest
from made_rows import ROOT

import configurator
import experiment
from study import claims, forests

LOSS = {"softmax": 1.20, "cosformer": 1.35, "gla": 1.22, "mamba2": 1.10, "gated_deltanet": 1.08}
GAIN = {"none": 0.0, "sigmoid": 0.04, "wide": 0.05, "matched": 0.03, "native": 0.07}


def text_rows():
    """Seeds far apart, arms of a seed close together; the gate of softmax gains half as much."""
    config = configurator.load(experiment.ExperimentConfig, [str(ROOT / "config/experiments/text.py")])
    rng, rows = random.Random(0), []
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


def test_every_pair_that_claims_compare_in_all_mixers_has_a_panel_with_every_seed(tmp_path, drawn):
    config, rows = text_rows()
    judged = claims.judge_claims(config, rows)
    forests.of_mixers(forests.pairs_of(judged, rows), rows, tmp_path / "text.png")
    panels = {axes.get_title(): axes for axes in drawn["text.png"].axes if axes.axison}
    pairs = ["none minus sigmoid", "none minus matched", "sigmoid minus wide", "sigmoid minus native"]
    assert list(panels) == pairs
    dots = [len(line.get_xdata()) for line in panels["none minus sigmoid"].lines if line.get_marker() == "."]
    assert dots == [7] * 6 and panels["none minus sigmoid"].get_xlabel() == "val_loss (nats a token)"
    means = [line.get_xdata()[0] for line in panels["none minus sigmoid"].lines if line.get_marker() == "o"]
    assert means == pytest.approx([0.02, 0.04, 0.04, 0.04, 0.04, 0.036], abs=0.015)  # softmax gains half as much
    names = [label.get_text() for label in panels["none minus sigmoid"].get_yticklabels()]
    assert names == [*LOSS, "mean of these"]
    natives = {line.get_ydata()[0] for line in panels["sigmoid minus native"].lines if line.get_marker() == "o"}
    assert natives == {-2, -3, -4, -5}  # softmax and cosformer have no native gate
    assert forests.pairs_of(judged, [row for row in rows if row["arm"] == "gla"]) == {}
