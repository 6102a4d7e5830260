"""Spearman's correlation of an experiment's arms with a published order, from rows made by hand."""

import json

import made_rows
import numpy as np
import pytest
from scipy import stats

from study import ranks

PUBLISHED = {"d": 0.03, "a": 0.0, "c": 0.02, "b": 0.01}
GAINS = np.array([0.045, 0.040, 0.035, 0.030, 0.018, 0.009, 0.002, 0.034, 0.021, 0.0])


def ordered(**keys):
    about = dict(metric="val_loss", arms={name: {} for name in "abcd"}, seeds=[0, 1, 2, 3])
    return made_rows.listed(**about | {"ranks": {"table 1": PUBLISHED}, "exploratory": True} | keys)


def rows_of(config, losses):
    """losses: {arm: by seed}."""
    rows = made_rows.rows_of(config)
    return [row | {"metric": "val_loss", "val_loss": losses[row["arm"]][row["seed"]]} for row in rows]


def test_the_correlation_is_scipys_and_a_lower_loss_is_better():
    rng = np.random.default_rng(1)
    values, published = rng.normal(size=(5, 8)).round(1), rng.normal(size=8).round(1)  # with ties
    expected = [stats.spearmanr(row, published).statistic for row in values]
    assert ranks.spearman(values, published) == pytest.approx(expected)
    values = np.arange(8) + 3 * rng.normal(size=(6, 8))
    rho, (low, high) = ranks.spearman(values.mean(0), np.arange(8)), ranks.interval(values, np.arange(8))
    assert high == pytest.approx(min(1.0, 2 * rho - low)) and low < rho  # up as far as down
    losses = {"a": [3, 3, 3, 3], "b": [2, 2, 2, 3.5], "c": [1, 1, 1, 1.5], "d": [0, 0, 0, 0]}
    config = ordered()
    (record,) = ranks.records(config, rows_of(config, losses))
    assert record["seeds"] == {"0": 1.0, "1": 1.0, "2": 1.0, "3": 0.8}
    assert record["of_means"] == record["high"] == 1.0 and 0 < record["low"] < 1
    assert record["p"] == pytest.approx(1 / 24, abs=0.005)  # one of the orders of four arms
    (equal,) = ranks.records(config, rows_of(config, dict.fromkeys("abcd", [1] * 4)))
    assert (equal["of_means"], equal["low"], equal["high"], equal["p"]) == (None, None, None, None)
    assert ranks.table([equal]).cells == [["table 1", "all means are equal", "", "", "4", "4"]]


def test_the_order_is_printed_kept_and_judged_on_the_seeds_that_all_its_arms_have(tmp_path, capsys):
    config = ordered()
    rows = rows_of(config, {"a": [3] * 4, "b": [2] * 4, "c": [1] * 4, "d": [0] * 4})
    few = [row for row in rows if (row["arm"], row["seed"]) != ("b", 3)]
    assert list(ranks.records(config, few)[0]["seeds"]) == ["0", "1", "2"]
    empty = ranks.records(config, [row for row in rows if row["arm"] != "b"])
    assert ranks.table(empty).cells == [["table 1", "not run", "", "", "0", "4"]]
    made_rows.write_rows(tmp_path, rows)
    made_rows.show(config, tmp_path)
    (kept,) = json.loads((tmp_path / "claims.json").read_text())["ranks"]
    assert kept["of_means"] == 1.0 and "+1.00 to +1.00" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.006, 0.02])
@pytest.mark.parametrize("own", [0.0, 0.01, 0.04])  # what an arm's true gain has that the published one lacks
def test_the_interval_covers_the_correlation_of_the_true_means(own, noise, monkeypatch):
    monkeypatch.setattr(ranks, "DRAWS", 1000)
    rng, covered, n = np.random.default_rng(0), 0, 300
    for _ in range(n):
        true = GAINS + own * rng.normal(size=10)
        low, high = ranks.interval(true + noise * rng.normal(size=(6, 10)), GAINS)
        covered += low - 1e-9 <= ranks.spearman(true, GAINS) <= high + 1e-9
    assert covered / n > 0.89
