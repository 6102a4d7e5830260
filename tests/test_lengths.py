"""Loss at several context lengths with a gate and without, from rows made by hand.

python -m pytest tests/test_lengths.py
"""

import random

import pytest
from made_rows import listed

import experiment
from study import gains, report, tables

ARMS = {f"{m}{gate}": {"attention": m} | keys for m in ("softmax", "gla", "cosformer")
        for gate, keys in (("", {}), (" sigmoid", {"gate": "elementwise"}))}  # fmt: skip


def scored_rows(n=6):
    """Loss 2 falling by position, 0.05 lower with the gate (and 0.001 per seed); past 256 softmax as trained rises."""
    rng = random.Random(0)
    config = listed(arms=ARMS, settings={}, seeds=list(range(n)), metric="val_loss", base={"dtype": "float32"})
    rows = []
    for run in experiment.runs_of(config, config.seeds, []):
        mixer, gated = run["config"]["attention"], "gate" in run["config"]
        scores = {}
        for name, slope in {"as trained": 0.6, "NTK": 0.2}.items():
            if name == "NTK" and mixer != "softmax":
                continue
            slope = slope if mixer == "softmax" else 0.0
            results = []
            for size in (256, 512, 1024):
                if mixer == "cosformer" and size > 256:
                    results.append({"block_size": size, "limit": "past M"})
                    continue
                gain = gated * (0.05 + run["seed"] / 1000)
                at = [i * size // 16 for i in range(16)]
                curve = [[i, 2 - 0.3 * min(i / 128, 1) + slope * max(0, i - 256) / 768 - gain] for i in at]
                curve = [[i, loss + gated * rng.gauss(0, 0.004)] for i, loss in curve]
                results.append({"block_size": size, "loss": sum(x for _, x in curve) / 16, "by_position": curve})
            scores[name] = {"lengths": results, "trained_length": 256}
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
    assert str(table) in tables.summary(config, rows, [])


def test_the_difference_by_position_has_a_panel_per_mixer_a_line_per_seed_and_a_mean(tmp_path, drawn):
    _, rows = scored_rows()
    gains.by_position(rows, tmp_path / "gain.png")
    panels = {axes.get_title(): axes for axes in drawn["gain.png"].axes if axes.axison}
    assert list(panels) == ["softmax sigmoid", "gla sigmoid", "cosformer sigmoid"]
    assert len(panels["softmax sigmoid"].lines) == 2 * (6 + 1) + 2 and len(panels["gla sigmoid"].lines) == 6 + 1 + 2
    assert panels["gla sigmoid"].lines[0].get_xdata()[-1] == 960
    assert panels["cosformer sigmoid"].lines[0].get_xdata()[-1] == 240
    assert gains.pairs([row for row in rows if "gate" in row["config"]]) == {}


def only(rows, arms, sizes):
    """The rows of these arms with, of each score, the lengths that sizes[arm] names."""
    kept = []
    for row in rows:
        if row["arm"] in arms:
            own = {name: [one for one in score["lengths"] if one["block_size"] in sizes[row["arm"]]]
                   for name, score in row["scores"].items()}  # fmt: skip
            scores = {name: {"lengths": results, "trained_length": 256} for name, results in own.items()}
            kept.append(row | {"scores": scores})
    return kept


def test_arms_that_share_no_length_or_no_seed_have_no_difference(tmp_path, drawn):
    _, rows = scored_rows()
    names = ["cosformer", "cosformer sigmoid"]
    refused = only(rows, names, dict.fromkeys(names, (512, 1024)))
    assert gains.lengths_table(refused).cells[0][1:3] == ["refused", "refused"] and gains.panels_of(refused) == {}
    others = only(rows, ["gla", "gla sigmoid"], {"gla": (256,), "gla sigmoid": (256, 512)})
    difference = gains.lengths_table(others).cells[-1]
    assert difference[0] == "... minus no gate" and difference[2] == "-" != difference[1]
    apart = [row for row in others if (row["seed"] == 0) == (row["arm"] == "gla")]
    assert gains.lengths_table(apart).cells[-1][1:] == ["-", "-", "0"] and gains.panels_of(apart) == {}
    for name, some in (("refused", refused), ("apart", apart), ("others", others)):
        (tmp_path / name).mkdir()
        drawn.pop("lengths_gain.png", None)
        report.figures(some, tmp_path / name)
        assert ("lengths_gain.png" in drawn) == (name == "others")
    assert max(drawn["lengths_gain.png"].axes[0].lines[0].get_xdata()) == 240  # of 256 tokens, the longest of both


def test_a_second_arm_without_a_gate_is_not_compared_as_if_it_had_one():
    _, rows = scored_rows(2)
    half = [row | {"arm": "gla fixed half"} for row in rows if row["arm"] == "gla"]
    gated = {f"{mixer} sigmoid" for mixer in ("softmax", "gla", "cosformer")}
    assert {key[2] for key in gains.pairs(rows + half)} == gated


def test_an_arm_of_another_length_of_training_is_compared_with_its_own():
    arms = {"none": {}, "sigmoid": {"gate": "elementwise"}}
    arms |= {f"{name} short": keys | {"max_iters": 9} for name, keys in arms.items()}
    config = listed(arms=arms, settings={}, seeds=[0], metric="val_loss", base={"dtype": "float32"})
    rows = [
        run | {"scores": {"read": {"lengths": [{"block_size": 256, "loss": 1.0}]}}}
        for run in experiment.runs_of(config, [0], [])
    ]
    lines = [line[0] for line in gains.lengths_table(rows).cells]
    assert lines == ["none, read", "sigmoid, read", "... minus no gate"] + [
        "none short, read", "sigmoid short, read", "... minus no gate"
    ]  # fmt: skip
    assert [(key[2], other) for key, other in gains.pairs(rows).items()] == [
        ("sigmoid", gains.readings(rows)[None, "softmax", "none", "read"]),
        ("sigmoid short", gains.readings(rows)[None, "softmax", "none short", "read"]),
    ]


def test_the_mixer_alone_is_compared_with_whatever_the_order_of_the_arms():
    _, rows = scored_rows(2)
    other = [row | {"arm": "gla RMS"} for row in rows if row["arm"] == "gla"]
    for each in (other + rows, rows + other):
        own = {key[2]: plain for key, plain in gains.pairs(each).items()}["gla sigmoid"]
        assert own is gains.readings(each)[None, "gla", "gla", "as trained"] or own == {
            row["seed"]: row["scores"]["as trained"]["lengths"] for row in rows if row["arm"] == "gla"
        }


def test_a_loss_that_was_not_finite_or_a_length_that_some_seeds_lack_is_left_out(tmp_path, drawn):
    _, rows = scored_rows()
    of = {(row["arm"], row["seed"]): row["scores"]["as trained"]["lengths"] for row in rows}
    of["gla sigmoid", 0][2] |= {"loss": None, "by_position": [[0, 2.0], [64, None]]}
    of["gla sigmoid", 1][1:] = [{"block_size": 512, "limit": "memory"}, {"block_size": 1024, "limit": "memory"}]
    lines = {line[0]: line for line in gains.lengths_table(rows).cells[::-1]}
    assert all("(" in number for number in lines["gla sigmoid, as trained"][1:4])
    assert lines["gla sigmoid, as trained"][3].endswith("[4 of 6 seeds]")
    assert lines["cosformer, as trained"][2] == "refused"
    report.figures(rows, tmp_path)
    (axes,) = [axes for axes in drawn["lengths_gain.png"].axes if axes.get_title().startswith("gla")]
    shown = [line for line in axes.lines if line.get_linestyle() == "-" and len(line.get_xdata()) > 2]
    assert shown and max(max(line.get_xdata()) for line in shown) <= 256  # where all seeds have numbers
