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
        mixer, gated, scores = run["config"]["attention"], "gate" in run["config"], {}
        for name, slope in {"as trained": 0.6, "NTK": 0.2}.items() if mixer == "softmax" else [("as trained", 0.0)]:
            results = [{"block_size": size, "limit": "past M"} for size in (512, 1024) if mixer == "cosformer"]
            for size in (256, 512, 1024)[: 1 if mixer == "cosformer" else 3]:
                gain = gated * (0.05 + run["seed"] / 1000)
                at = [i * size // 16 for i in range(16)]
                curve = [[i, 2 - 0.3 * min(i / 128, 1) + slope * max(0, i - 256) / 768 - gain] for i in at]
                curve = [[i, loss + gated * rng.gauss(0, 0.004)] for i, loss in curve]
                results.append({"block_size": size, "loss": sum(x for _, x in curve) / 16, "by_position": curve})
            scores[name] = {"lengths": results, "trained_length": 256}
        about = {"finite": True, "val_loss": 2.0, "metric": "val_loss", "curve": [[0, 3.0], [9, 2.0]]}
        rows.append(run | about | {"scores": scores, "scored": {}})
    return config, rows


def test_each_gated_arm_is_compared_with_its_mixers_ungated_one_at_every_length_it_reaches(tmp_path, drawn):
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
    gains.by_position(rows, tmp_path / "gain.png")
    panels = {axes.get_title(): axes for axes in drawn["gain.png"].axes if axes.axison}
    assert list(panels) == ["softmax sigmoid", "gla sigmoid", "cosformer sigmoid"]
    # a line per seed and a mean of each reading; zero, and the trained length
    assert len(panels["softmax sigmoid"].lines) == 2 * (6 + 1) + 2 and len(panels["gla sigmoid"].lines) == 6 + 1 + 2
    (first, *_), (of_cosformer, *_) = (panels[name].lines for name in ("gla sigmoid", "cosformer sigmoid"))
    assert first.get_xdata()[-1] == 960 and of_cosformer.get_xdata()[-1] == 240
    (loss, *_), (plain, *_) = (
        [row["scores"]["as trained"]["lengths"][2]["by_position"] for row in rows if row["arm"] == arm]
        for arm in ("gla sigmoid", "gla")
    )
    assert list(first.get_ydata()) == pytest.approx([x - y for (_, x), (_, y) in zip(loss, plain, strict=True)])
    assert gains.pairs([row for row in rows if "gate" in row["config"]]) == {}


def only(rows, arms, sizes):
    """The rows of these arms with, of each score, the lengths that sizes[arm] names."""
    kept = []
    for row in (row for row in rows if row["arm"] in arms):
        scores = {name: score | {"lengths": [one for one in score["lengths"] if one["block_size"] in sizes[row["arm"]]]}
                  for name, score in row["scores"].items()}  # fmt: skip
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
    for some, is_drawn in ((refused, False), (apart, False), (others, True)):
        report.figures(some, tmp_path)
        assert ("lengths_gain.png" in drawn) == is_drawn
    assert max(drawn["lengths_gain.png"].axes[0].lines[0].get_xdata()) == 240  # of 256 tokens, the longest of both


def test_an_arm_is_compared_with_the_one_that_lacks_its_gate_alone_in_any_order():
    _, rows = scored_rows(2)
    other = [row | {"arm": "gla fixed half"} for row in rows if row["arm"] == "gla"]
    about = [
        (row | {"arm": f"{row['arm']} short"}, row["config"] | {"max_iters": 9}) for row in rows if row["seed"] == 0
    ]
    short = [row | {"config": config} for row, config in about]
    for every in (other + rows + short, short + rows + other):
        compared = {key[1]: plain for key, plain in gains.pairs(every).items() if key[2] == "as trained"}
        gated = {f"{mixer} sigmoid{part}" for mixer in ("softmax", "gla", "cosformer") for part in ("", " short")}
        assert compared.keys() == gated
        read = {key[1]: by_seed for key, by_seed in gains.readings(every).items() if key[2] == "as trained"}
        for name, plain in compared.items():
            assert plain == read[name.replace(" sigmoid", "")]
    late = [row | {"init_from": {"arm": "gla"}} for row in rows if row["arm"] == "gla sigmoid"]  # of another length
    assert gains.pairs([row for row in rows if row["arm"] == "gla"] + late) == {}


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
