"""Spearman's correlation of an experiment's arms with a published order, from rows made by hand."""

import json

import made_rows
import pytest

from study import ranks

PUBLISHED = {"d": 0.03, "a": 0.0, "c": 0.02, "b": 0.01}


def ordered(**keys):
    about = dict(metric="val_loss", arms={name: {} for name in "abcd"}, seeds=[0, 1, 2, 3])
    return made_rows.listed(**about | {"ranks": {"table 1": PUBLISHED}, "exploratory": True} | keys)


def rows_of(config, losses):
    """losses: {arm: by seed}."""
    rows = made_rows.rows_of(config)
    return [row | {"metric": "val_loss", "val_loss": losses[row["arm"]][row["seed"]]} for row in rows]


def test_a_lower_loss_is_better_and_p_counts_all_orders():
    losses = {"a": [3, 3, 3, 3], "b": [2, 2, 2, 3.5], "c": [1, 1, 1, 1.5], "d": [0, 0, 0, 0]}
    config = ordered()
    (record,) = ranks.records(config, rows_of(config, losses))
    assert record["seeds"] == {"0": 1.0, "1": 1.0, "2": 1.0, "3": 0.8}
    assert record["of_means"] == 1.0 and record["p"] == pytest.approx(1 / 24)  # one of the orders of four arms
    assert ranks.table([record]).cells == [["table 1", "+1.00", "+0.80 to +1.00", "0.042", "4", "4"]]
    (equal,) = ranks.records(config, rows_of(config, dict.fromkeys("abcd", [1] * 4)))
    assert (equal["of_means"], equal["p"]) == (None, None)
    assert ranks.table([equal]).cells == [["table 1", "all means are equal", "", "", "4", "4"]]
    # two neighbours in the other order: of 24 orders, the right one and three like this one agree as well
    (record,) = ranks.records(config, rows_of(config, losses | {"b": [3.5] * 4}))
    assert record["of_means"] == 0.8 and record["p"] == pytest.approx(4 / 24)


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
