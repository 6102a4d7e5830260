"""Loss at several context lengths with a gate and without, from rows made by hand."""

import copy

import pytest
from made_rows import listed

import experiment
from study import gains, report

ARMS = {f"{m}{gate}": {"attention": m} | keys for m in ("softmax", "gla", "cosformer")
        for gate, keys in (("", {}), (" sigmoid", {"gate": "elementwise"}))}  # fmt: skip


def scored_rows(n=6):
    """The loss is 2, and 0.05 lower with the gate (and 0.001 per seed) at every length that the mixer reaches."""
    config = listed(arms=ARMS, seeds=list(range(n)), metric="val_loss", base={"dtype": "float32"})
    rows = []
    for run in experiment.runs_of(config, config.seeds):
        mixer, loss = run["config"]["attention"], 2 - ("gate" in run["config"]) * (0.05 + run["seed"] / 1000)
        reached = [{"block_size": size, "loss": loss} for size in (256, 512, 1024)]
        if mixer == "cosformer":
            reached = reached[:1] + [{"block_size": size, "limit": "past M"} for size in (512, 1024)]
        names = ["as trained", "NTK"] if mixer == "softmax" else ["as trained"]
        scores = {name: {"lengths": copy.deepcopy(reached), "trained_length": 256} for name in names}
        about = {"finite": True, "val_loss": 2.0, "metric": "val_loss", "curve": [[0, 3.0], [9, 2.0]]}
        rows.append(run | about | {"scores": scores, "scored": {}})
    return config, rows


def test_each_gated_arm_is_compared_with_its_mixers_ungated_one_at_every_length_it_reaches():
    config, rows = scored_rows()
    table = gains.lengths_table(rows)
    assert table.header == ["arm, reading", "256 tokens", "512 tokens", "1,024 tokens", "seeds"]
    lines = {line[0]: line[1:] for line in table.cells[::-1]}
    assert lines["cosformer, as trained"][1:] == ["refused", "refused", "6"]
    after = [line for before, line in zip(table.cells, table.cells[1:], strict=False) if "sigmoid" in before[0]]
    assert [line[0] for line in after] == ["... minus no gate"] * 4
    for line in after:
        mean, low, _, high = line[1].replace("(", "").replace(")", "").split()
        assert float(low) < float(mean) < float(high) < 0 and float(mean) == pytest.approx(-0.0525, abs=0.003)
    assert table in report.tables(config, rows, [])
    of = {(row["arm"], row["seed"]): row["scores"]["as trained"]["lengths"] for row in rows}
    of["gla sigmoid", 0][2]["loss"] = None  # not finite
    of["gla sigmoid", 1][1:] = [{"block_size": 512, "limit": "memory"}, {"block_size": 1024, "limit": "memory"}]
    lines = {line[0]: line for line in gains.lengths_table(rows).cells[::-1]}
    assert all("(" in number for number in lines["gla sigmoid, as trained"][1:4])
    assert lines["gla sigmoid, as trained"][3].endswith("[4 of 6 seeds]")
    assert "minus" not in str(gains.lengths_table([row for row in rows if "gate" in row["config"]]))


def test_an_arm_is_compared_with_the_one_that_lacks_its_gate_alone_in_any_order():
    _, rows = scored_rows(2)
    half = {"arm": "gla fixed half", "config": rows[2]["config"] | {"branch_scale": 0.5}}
    other = [row | half for row in rows if row["arm"] == "gla"]
    short = [row | {"arm": f"{row['arm']} short", "config": row["config"] | {"max_iters": 9}} for row in rows]
    names = [f"{mixer}{{}}{part}" for mixer in ("softmax", "gla", "cosformer") for part in ("", " short")]
    wanted = {name.format(" sigmoid"): name.format("") for name in names}
    for every in (other + rows + short, short + rows + other):
        assert gains.plain_arms(every) == wanted | {"gla fixed half": "gla"}
    late = [row | {"init_from": {"arm": "gla"}} for row in rows if row["arm"] == "gla sigmoid"]  # of another length
    assert "minus" not in str(gains.lengths_table([row for row in rows if row["arm"] == "gla"] + late))


def test_the_gain_is_of_the_run_of_the_seed_that_has_no_gate_and_else_the_same_keys(drawn, tmp_path):
    rows = []
    for arm, keys, seed, loss in (
        ("none", {}, 0, 2.0), ("none", {}, 1, 2.5), ("none short", {"max_iters": 9}, 0, 3.0),
        ("sigmoid", {"gate": "elementwise", "learning_rate": 1e-2}, 0, 1.5),
        ("sigmoid", {"gate": "elementwise"}, 1, 2.6),
        ("sigmoid short", {"gate": "elementwise", "max_iters": 9}, 0, 3.5), ("gla", {"attention": "gla"}, 0, 1.0),
    ):  # fmt: skip
        about = {"seed": seed, "finite": True, "val_loss": loss, "metric": "val_loss", "curve": [[0, 5.0], [9, loss]]}
        parts = [{"step": step, "near": loss + 1, "far": loss - 1} for step in (0, 9)]
        rows.append(about | {"arm": arm, "config": {"max_iters": 18} | keys, "loss_curve": parts})
    panels = gains.gains(rows)
    for curves in panels.values():
        assert curves == {"sigmoid": [[(9, 0.5)], [(9, pytest.approx(-0.1))]], "sigmoid short": [[(9, -0.5)]]}
    assert gains.PARTS["all"] not in gains.gains([row | {"metric": "accuracy"} for row in rows])
    report.figures(rows, tmp_path)
    assert [axes.get_title() for axes in drawn["gain.png"].axes] == [gains.PARTS[p] for p in ("all", "near", "far")]
