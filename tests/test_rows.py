"""
An experiment's list and what is made of its rows: rates, claims, verdicts, tables, figures. No run is started.

    python -m pytest tests/test_rows.py
"""

import configurator
from configurator import UserError

import dataclasses
import html
import json
import math
import statistics
import types
from pathlib import Path

import pytest

import experiment
from model import MIXERS
from study import claims as claim_figures
from study import curves, power, report, runner, stats, tables
from study.plan import compared_runs, rates_of
from study.rows import by_run, read_rows, text_of

DATA = dict(seq_len=32, vocab_size=16, pairs=4, train_size=200, val_size=50)
BASE = {"n_head": 2, "dtype": "float32"}
RULE = dict(success_above=0.75, success_below=0.55, failure_within=0.03)


def made_row(run, value):
    """A row as a finished run writes it, with that accuracy."""
    row = run | {"finite": value is not None, "accuracy": value, "val_loss": 1.0, "metric": "accuracy"}
    row |= {"curve": [[0, 0.1], [50, 0.5], [100, value or 0.0]], "horizon": 100}
    return row | {"seconds": 36.0, "scores": {}}


def listed(**keys):
    arms = {"none": {"gate": "none"}, "gated": {"gate": "elementwise"}}
    settings = {"d16": {"n_embd": 16, "data": {"pairs": 2}}, "d32": {"n_embd": 32}}
    return experiment.ExperimentConfig(
        **dict(name="listed", arms=arms, settings=settings, seeds=[0, 1], data=DATA, base=BASE) | keys
    )


def write_rows(out_dir, rows, name="rows.jsonl"):
    out_dir.mkdir(exist_ok=True)
    (out_dir / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_settings_and_mixers_have_figures_of_their_ends(tmp_path):
    arms = {mixer: {"attention": mixer} for mixer in ("softmax", "gla")}
    arms |= {f"{mixer} gated": keys | {"gate": "elementwise"} for mixer, keys in arms.items()}
    config = listed(arms=arms)
    rows = [made_row(run, 0.5 + 0.1 * run["seed"]) for run in experiment.runs_of(config, config.seeds, [])]
    rows[0] = made_row(rows[0], None)  # not finite: it has no end
    rows = [row | {"state_bytes": 512} for row in rows]
    assert [figure.name for figure in report.figures(rows, tmp_path)] == ["accuracy.png", "ends.png", "state.png"]
    rows = [row for row in rows if row["setting"] == "d16" and row["config"]["attention"] == "gla"]
    assert [figure.name for figure in report.figures(rows, tmp_path)] == ["accuracy.png"]


@pytest.fixture
def drawn(monkeypatch):
    """{name of a figure file: its panels}, of what is drawn from here on."""
    panels, write = {}, report.write
    for module in (report, claim_figures):
        monkeypatch.setattr(
            module, "write", lambda figure, path: panels.update({path.name: figure.axes}) or write(figure, path)
        )
    return panels


def labels_of(axes):
    return {line.get_label() for line in axes.lines if not line.get_label().startswith("_")}


def test_many_arms_have_a_panel_each_beside_the_ungated_runs_and_scores_one_for_each_setting(tmp_path, drawn):
    kinds = {
        "none": {}, "native": {"gate": "native"}, "sigmoid": {"gate": "elementwise"},
        "matched": {"gate": "elementwise", "match_params": True},
    }  # fmt: skip
    arms = {f"{m} {kind}": {"attention": m} | keys for m in ("gla", "mamba2") for kind, keys in kinds.items()}
    config = listed(arms=arms)
    slices = {"32/4": 0.9, "64/4": 0.8, "64/8": 0.4}
    about = {"state_bytes": 512, "scores": {"longer": {"slices": slices}}}
    rows = [made_row(run, 0.5) | about for run in experiment.runs_of(config, config.seeds, [])]
    report.figures(rows, tmp_path)
    assert list(drawn) == ["accuracy.png", "state.png", "slices.png"]
    panels, chance = drawn["accuracy.png"], {"chance among the values in context"}
    kinds_down = ("none", "matched", "native", "sigmoid")
    assert [axes.get_title() for axes in panels] == [f"{m}, {kind}" for kind in kinds_down for m in ("gla", "mamba2")]
    for axes in panels:
        grey = 0 if axes.get_title().endswith("none") else 2 * 2
        assert len(axes.lines) == grey + 2 * 2 + 1  # none's seeds in both settings; its own; chance
        assert len({line.get_color() for line in axes.lines}) == (3 if grey == 0 else 4)
    assert [axes.get_title().partition(":")[0] for axes in drawn["slices.png"]] == ["d16", "d16", "d32", "d32"]
    shown = {f"{mixer}, gate {gate}" for mixer in ("gla", "mamba2") for gate in ("none", "elementwise")}
    assert all(labels_of(axes) - chance == shown for axes in drawn["slices.png"])


def test_every_mixer_and_a_pattern_of_mixers_have_every_figure_of_an_experiment(tmp_path, drawn, monkeypatch):
    monkeypatch.setitem(MIXERS, "mine", type("Mine", (MIXERS["gla"],), {}))
    mixers = [*MIXERS, "gla,softmax"]
    arms = {f"{m} {gate}": {"attention": m, "gate": gate} for m in mixers for gate in ("none", "elementwise")}
    about = {"state_bytes": 512, "scores": {"longer": {"slices": {"32/4": 0.9, "64/8": 0.4}}}}
    rows = [made_row(run, 0.5) | about for run in experiment.runs_of(listed(arms=arms), [0], [])]
    report.figures(rows, tmp_path)
    assert list(drawn) == ["accuracy.png", "state.png", "slices.png"]
    assert set(mixers) <= labels_of(drawn["state.png"][0])
    assert len({look["color"] for look in report.styles(rows).values()}) == len(mixers)


def test_claims_may_be_about_other_numbers_of_the_rows_each_with_its_own_correction(tmp_path, drawn):
    gain = {"contrast": {"gated": 1, "none": -1}, "above": 0.01}
    longer = {"of": ["scores", "longer", "slices", "64/8"]}
    claims = {"it helps": gain, "it helps on more pairs": gain | longer, "it helps there, too": gain | longer}
    claims["it is sparse"] = {"contrast": {"gated": 1}, "above": 0.5, "of": ["meters", "gate_below_0.1", "readout"]}
    config, rows = listed(seeds=list(range(7)), settings={}, claims=claims), []
    for run in experiment.runs_of(config, config.seeds, []):
        noise, is_gated = run["seed"] / 1000, run["arm"] == "gated"
        row = made_row(run, 0.5 + is_gated * (0.1 + noise))
        row["scores"] = {"longer": {"slices": {"64/8": 0.3 + is_gated * (0.1 + noise)}}}
        row["meters"] = {"gate_below_0.1": {"readout": 0.2 + noise}} if is_gated else {}
        rows.append(row)
    judged = {claim["claim"]: claim for claim in tables.judge_claims(config, rows)}
    words = ["supported", "supported", "supported", "not supported"]
    assert [claim["verdict"] for claim in judged.values()] == words
    alone, paired = judged["it helps"], judged["it helps on more pairs"]
    assert paired["p"] == alone["p"] == alone["p_holm"] == 2 / 2**7
    assert paired["p_holm"] == 2 * paired["p"]
    assert judged["it is sparse"]["by_seed"] == pytest.approx({seed: 0.2 + seed / 1000 for seed in range(7)})
    claim_figures.forest(list(judged.values()), tmp_path / "claims.png")
    names = ["accuracy (points)", "scores longer slices 64/8 (points)", "meters gate_below_0.1 readout (%)"]
    assert [axes.get_xlabel() for axes in drawn["claims.png"]] == names
    del rows[0]["scores"]["longer"]  # as in a run that was not finite
    assert tables.judge_claims(config, rows)[1]["n"] == 6


def test_claims_have_a_figure_of_their_intervals_thresholds_and_seeds(tmp_path, drawn):
    gain = {"contrast": {"gated": 1, "none": -1}, "above": 0.05}
    claims = {"it helps": gain, "it helps in two seeds": gain | {"in": 2}, "it is equal": gain | {"within": 0.2}}
    del claims["it is equal"]["above"]
    config = listed(seeds=list(range(7)), claims=claims)
    rows = [
        made_row(run, 0.5 + run["seed"] / 100 * (run["arm"] == "gated"))
        for run in experiment.runs_of(config, config.seeds, [])
        if run["setting"] == "d16" or run["seed"] == 0  # one seed: not run
    ]
    judged = tables.judge_claims(config, rows)
    claim_figures.forest(judged, tmp_path / "claims.png")
    axes = drawn["claims.png"][0]
    names = ["it helps, d16", "it helps in two seeds, d16", "it is equal, d16"]
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    first, second, interval, mean = axes.lines[:4]
    assert list(first.get_xdata()) == list(second.get_xdata()) == [5]  # thresholds; the third claim has none
    assert list(interval.get_xdata()) == pytest.approx([100 * judged[0]["low"], 100 * judged[0]["high"]])
    assert list(mean.get_xdata()) == pytest.approx([3])
    assert any(list(line.get_xdata()) == pytest.approx([0, 1, 2, 3, 4, 5, 6]) for line in axes.lines)
    claim_figures.forest(
        tables.judge_claims(config, rows[:6]), tmp_path / "few.png"
    )  # the exact interval is the whole line
    edge = drawn["few.png"][0].lines[0]
    assert list(edge.get_xdata()) == pytest.approx([0, 1])


def test_a_count_is_judged_when_all_its_runs_are_there_and_a_run_without_a_value_is_not_above():
    claims = {"most": {"contrast": {"gated": 1}, "above": 0.4, "in": 2}}
    config = listed(seeds=[0, 1, 2], settings={}, claims=claims)
    values = {0: 0.5, 1: None, 2: 0.6}  # seed 1 is not finite
    rows = [made_row(run, values[run["seed"]]) for run in experiment.runs_of(config, config.seeds, [])]
    (judged,) = tables.judge_claims(config, rows)
    said = "most: passed (2 of 3 seeds over 0.4, 2 needed: +0.5000, +0.6000); no value in seeds 1"
    assert judged["verdict"] == "passed" and tables.claims_table([judged]) == said
    few = [row for row in rows if row["seed"] < 2]
    assert tables.claims_table(tables.judge_claims(config, few)) == "most: not run"
    some = listed(seeds=[0, 1, 2], settings={}, claims=claims, seeds_of={"gated": [0, 1]})
    assert tables.judge_claims(some, few)[0]["verdict"] == "failed"  # no other seed is to be run


def test_a_claim_is_corrected_within_its_question_and_exploratory_ones_by_themselves():
    gain = {"contrast": {"gated": 1, "none": -1}, "above": 0.01}
    claims = {name: gain for name in ("a", "b", "c")} | {"mine": gain | {"family": "another question"}}
    claims |= {f"look {i}": gain | {"exploratory": True} for i in range(2)}
    config = listed(seeds=list(range(8)), settings={}, claims=claims)
    gated = {"none": 0, "gated": 0.1}
    runs = experiment.runs_of(config, config.seeds, [])
    rows = [made_row(run, 0.5 + gated[run["arm"]] * (1 + run["seed"] / 100)) for run in runs]
    judged = {claim["claim"]: claim for claim in tables.judge_claims(config, rows)}
    sizes = {name: claim["p_holm"] / claim["p"] for name, claim in judged.items()}
    assert sizes == {"a": 3, "b": 3, "c": 3, "mine": 1, "look 0": 2, "look 1": 2}
    lines = tables.claims_table(list(judged.values())).splitlines()
    assert lines[0].startswith("a: supported (") and lines[-1].startswith("look 1: exploratory: supported (")


GAIN = {"gated": 1, "none": -1}


def test_a_claim_that_its_seeds_cannot_support_is_refused_unless_it_is_exploratory(helpers):
    def error(seeds, **keys):
        return helpers.error_of(listed, seeds=list(range(seeds)), settings={}, **keys)

    claim = {"contrast": GAIN, "above": 0.05}
    message = "claims: it helps: 5 seeds give no p under 0.062, so it cannot be supported; it needs 6 seeds, or exp"
    assert error(5, claims={"it helps": claim}).startswith(message)
    assert "4 seeds give no p under 0.062" in error(4, claims={"it helps": claim | {"sides": 1}})
    assert "4 seeds" in error(4, claims={"it is equal": {"contrast": GAIN, "within": 0.05}})
    message = (
        "6 seeds give no p under 0.062 after Holm's correction for 2 claims, so it cannot be supported; it needs 7"
    )
    assert message in error(6, claims={"a": claim, "b": claim})
    assert "4 seeds" in error(6, claims={"a": claim}, seeds_of={"gated": [0, 1, 2, 3]})
    assert "in=7: is more than the seeds" in error(6, claims={"most": claim | {"in": 7}})
    for count, claims in [
        (6, {"a": claim}), (5, {"a": claim | {"sides": 1}}), (6, {"a": claim, "b": claim | {"family": "b"}}),
        (6, {"a": claim, "b": claim | {"in": 3}}), (2, {"a": claim | {"exploratory": True}}),
    ]:  # fmt: skip
        listed(seeds=list(range(count)), settings={}, claims=claims)
    listed(seeds=[0], claims={"a": claim}, exploratory=True)


def test_a_dry_run_says_what_each_claim_can_show(tmp_path, helpers):
    claim = {"contrast": GAIN, "above": 0.05}
    claims = {"it helps": claim | {"sides": 1}, "equal": {"contrast": GAIN, "within": 0.1}, "most": claim | {"in": 3}}
    config = listed(seeds=list(range(8)), settings={}, claims=claims, jobs=1)
    runs = experiment.runs_of(config, config.seeds, [])
    rows = [made_row(run, 0.5 + (run["arm"] == "gated") * 0.1 * run["seed"] / 7) for run in runs]
    spread = statistics.stdev(0.1 * seed / 7 for seed in range(8))
    effect, band = stats.detectable(8, 0.05 / 2)  # two tests in the family
    of = f"(spread {spread:.3g}, of 8 seeds of"
    assert experiment.estimate(config, rows).splitlines()[1:] == [
        "it helps: 8 seeds give no p under 0.0078 after Holm, 2 claims; "
        f"sees {spread * effect:.3g} beyond 0.05 in 80% of cases {of} its rows)",
        f"equal: 8 seeds give no p under 0.0078 after Holm, 2 claims; shows a band of +-{spread * band:.3g} in 80% of "
        f"cases {of} its rows)",
        "most: a count: 3 of 8 seeds pass it",
    ]
    assert "; no rows to take a spread from" in power.lines(config, [])[0]
    pilot = dataclasses.replace(config, pilot=str(tmp_path))
    assert "has no rows" in helpers.error_of(power.lines, pilot, [])
    write_rows(tmp_path, rows)
    assert power.lines(pilot, [])[0].endswith(f"{of} {tmp_path})")
    few = listed(seeds=[0, 1, 2], settings={}, claims={"it helps": claim}, exploratory=True)
    (said,) = power.lines(few, rows)
    assert said.startswith("it helps: exploratory: 3 seeds give no p under 0.25; cannot be supported; even Student's")


def test_the_dry_run_of_the_matrix_says_that_it_could_not_have_shown_a_gain_of_a_point():
    config = configurator.load(experiment.ExperimentConfig, [str(ROOT / "config/experiments/matrix.py")])
    lines = power.lines(config, read_rows(ROOT / "results/matrix"))
    own = [line for line in lines if line.startswith("it adds more than a point") and "320 tokens" not in line]
    assert len(own) == 10 and all("cannot be supported; even Student's test would see no less than" in x for x in own)
    least = [float(line.partition("no less than ")[2].split()[0]) for line in own]
    assert min(least) > 0.01


def flags_of(values, settings=None, choices=(), changes=None, **keys):
    """The flags of the gain in made-up rows. values: {arm: accuracy}. changes: what else the gated rows hold."""
    config = listed(
        seeds=list(range(8)),
        settings=settings or {},
        claims={"a": {"contrast": GAIN, "above": 0}} | keys.pop("claims", {}),
        **keys,
    )
    chosen = {(None, arm): 0.01 for arm in values} if keys else None
    rows = [made_row(run, values[run["arm"]]) for run in experiment.runs_of(config, config.seeds, [], chosen)]
    rows = [row | (changes or {}) if row["arm"] == "gated" else row for row in rows]
    return tables.judge_claims(config, rows, choices)[0]["flags"]


def test_a_verdict_at_the_ceiling_or_at_chance_is_flagged():
    assert flags_of({"none": 0.99, "gated": 1.0}) == ["ceiling: all arms are at the top"]
    assert flags_of({"none": 0.26, "gated": 0.25}) == ["floor: all arms are at chance"]  # of 4 pairs: a quarter
    assert flags_of({"none": 0.26, "gated": 0.6}) == flags_of({"none": 0.9, "gated": 1.0}) == []
    config = listed(data={"slices": "80/2,80/5,80/10,80/20", "vocab_size": 96})
    row = {"data": dataclasses.asdict(config)["data"]}
    assert power.chance(config, row, ["accuracy"]) == pytest.approx(4 / 37)
    assert power.chance(config, row, ["scores", "longer", "slices", "320/40"]) == 1 / 40
    assert power.chance(listed(prepare="pystdlib", data={}, settings={}), row, ["accuracy"]) is None


def test_a_pair_of_unlike_commits_dtypes_or_threads_is_flagged():
    values = {"none": 0.5, "gated": 0.7}
    for changes, expected in [
        ({"dtype": "bfloat16"}, ["mixed dtypes within 8 of 8 seeds"]),
        ({"threads": 2}, []),  # the other rows do not store it
        ({"git_commit": "b"}, []),
    ]:
        assert flags_of(values, changes=changes) == expected
    config = listed(seeds=list(range(8)), settings={}, claims={"a": {"contrast": GAIN, "above": 0}})
    about = {"git_commit": "a", "threads": 1, "code_sha256": "x"}
    rows = [made_row(run, values[run["arm"]]) | about for run in experiment.runs_of(config, config.seeds, [])]
    rows[0] |= {"git_commit": "b", "threads": 2}
    assert tables.judge_claims(config, rows)[0]["flags"] == ["mixed threads within 1 of 8 seeds"]  # of the same code
    del rows[0]["code_sha256"]
    (line,) = tables.claims_table(tables.judge_claims(config, rows)).splitlines()
    assert line.endswith("; mixed commits within 1 of 8 seeds; mixed threads within 1 of 8 seeds")


def test_a_rate_at_the_end_of_its_grid_or_within_a_standard_error_is_flagged():
    values, keys = {"none": 0.5, "gated": 0.7}, dict(selection_seeds=[20, 21], learning_rates=[0.001, 0.01])
    chosen = {"setting": None, "rate": 0.01, "other": 0.001, "margin": 0.2, "error": 0.1, "is_edge": False}
    none, gated = (chosen | {"arm": arm} for arm in ("none", "gated"))
    assert flags_of(values, choices=[none, gated], **keys) == []
    assert flags_of(values, choices=[none | {"is_edge": True}, gated | {"error": 0.3}], **keys) == [
        "edge: none chose 0.01 at the end of its grid",
        "margin: gated's rate 0.01 and 0.001 are within a standard error",
    ]
    said = "one selection seed: the margin of none's rate over 0.001 has no standard error"
    assert flags_of(values, choices=[none | {"error": math.nan}, gated], **keys) == [said]
    assert flags_of(values, choices=[none | {"margin": math.nan, "error": math.nan}, gated], **keys) == []
    assert flags_of(values, choices=[{"setting": None, "arm": "none", "rate": None}], **keys) == []  # not chosen yet


def test_a_claim_may_be_about_the_curve_and_pool_settings(helpers):
    half = {arm: weight / 2 for arm, weight in GAIN.items()}
    claims = {
        "sooner": {"contrast": {"none": 1, "gated": -1}, "above": 0, "of": ["log_steps", 0.6]},
        "pooled": {"contrast": {"d16": half, "d32": half}, "above": 0, "of": ["auc"], "sides": 1},
    }
    config = listed(seeds=list(range(8)), claims=claims)
    rows = []
    for run in experiment.runs_of(config, config.seeds, []):
        row, is_gated = made_row(run, 0.9), run["arm"] == "gated"
        row["horizon"], row["curve"] = (
            100,
            [[0, 0.1], [50, 0.7 if is_gated and run["setting"] == "d16" else 0.5], [100, 0.9]],
        )
        rows.append(row)
    d16, d32, pooled = tables.judge_claims(config, rows)
    assert d16["by_seed"] == pytest.approx(dict.fromkeys(range(8), math.log(2))) and d16["verdict"] == "supported"
    assert set(d32["by_seed"].values()) == {0} and d32["verdict"] == "inconclusive"
    assert pooled["by_seed"] == pytest.approx(dict.fromkeys(range(8), 0.05))  # the mean of 0.1 and 0
    for path in (["auc", 1], ["log_steps"], ["lost", "x"], ["log_steps", True], [1], [["auc"]], ["scores", 1], []):
        claim = {"contrast": GAIN, "above": 0, "of": path}
        assert "claims: a: of=" in helpers.error_of(listed, seeds=list(range(8)), claims={"a": claim})


def test_every_setting_has_every_arm_and_its_own_data():
    runs = experiment.runs_of(listed(), [0, 1], [])
    assert [experiment.name_of(run) for run in runs] == [
        "d16-none-seed0", "d16-gated-seed0", "d32-none-seed0", "d32-gated-seed0",
        "d16-none-seed1", "d16-gated-seed1", "d32-none-seed1", "d32-gated-seed1",
    ]  # fmt: skip
    assert [run["data"]["pairs"] for run in runs[:4]] == [2, 2, 4, 4]
    assert [run["config"]["n_embd"] for run in runs[:4]] == [16, 16, 32, 32]
    assert all("data" not in run["config"] for run in runs)


# ----------------------------------------------------------------------------------------------------------------------
# Learning rates


@pytest.fixture
def made(monkeypatch):
    """made(value) -> the names of the runs that are made from here on; value(run) is the accuracy of a run, or None."""

    def call(value):
        names, process = [], types.SimpleNamespace(returncode=0, poll=lambda: 0, terminate=int, wait=int)

        def start(config, run, out_dir, threads, gpu):
            names.append(experiment.name_of(run))
            job = {"item": run, "name": names[-1], "folder": out_dir / names[-1], "gpu": gpu}
            return job | {"process": process, "commands": []}

        monkeypatch.setattr(runner, "start", start)
        monkeypatch.setattr(runner, "finish", lambda config, job: made_row(job["item"], value(job["item"])))
        monkeypatch.setattr(runner.time, "sleep", lambda seconds: None)
        return names

    return call


def choosing(**keys):
    about = dict(settings={}, seeds=[0], selection_seeds=[7, 8], learning_rates=[0.001, 0.01, 0.1], jobs=8)
    return listed(**about | {"arms": {"none": {"gate": "none"}}, "base": BASE | {"max_iters": 400}} | keys)


def by_rate(values):
    """A value(run) that depends on the rate alone."""
    return lambda run: values[run["config"]["learning_rate"]]


def test_rates_are_chosen_on_the_selection_seeds_and_the_seeds_run_at_them(tmp_path, made, capsys):
    config = listed(settings={}, seeds=[0], selection_seeds=[7, 8], learning_rates=[0.001, 0.01])
    scores = {("none", 0.001): 0.6, ("none", 0.01): 0.5, ("gated", 0.001): 0.6, ("gated", 0.01): 0.7}

    def value(run):
        rate, seed = run["config"]["learning_rate"], run["seed"]
        diverged = (run["arm"], rate, seed) == ("none", 0.001, 8)  # one seed of the better rate is not finite
        return None if diverged else scores.get((run["arm"], rate), 0.3)

    made(value)
    rows = experiment.run_all(config, tmp_path)
    assert [(row["arm"], row["seed"], row["config"]["learning_rate"]) for row in rows] == [
        ("none", 0, 0.01), ("gated", 0, 0.01)
    ]  # fmt: skip
    assert "learning rate of none: 0.01 (" in capsys.readouterr().out
    every = read_rows(tmp_path)
    assert len(every) == 2 * 3 * 2 + 2
    compared = report.figures(rows, tmp_path)[0].read_bytes()
    assert report.figures(every, tmp_path)[0].read_bytes() == compared  # runs that chose a rate are in no figure
    with pytest.raises(UserError, match="no row of a compared run yet"):
        report.figures([row for row in every if "purpose" in row], tmp_path)


def test_all_rates_get_short_runs_and_the_best_two_full_ones_in_one_call(tmp_path, made, capsys):
    config = choosing(learning_rates=[0.001, 0.003, 0.01, 0.03])
    names = made(by_rate({0.001: 0.2, 0.003: 0.6, 0.01: 0.7, 0.03: 0.1}))
    rows = experiment.run_all(config, tmp_path)
    short = [f"none-lr{rate}-short-seed{seed}" for rate in (0.001, 0.003, 0.01, 0.03) for seed in (7, 8)]
    full = [f"none-lr{rate}-seed{seed}" for rate in (0.003, 0.01) for seed in (7, 8)]
    assert names == [*short, *full, "none-seed0"] and rows[0]["config"]["learning_rate"] == 0.01
    said = capsys.readouterr().out
    assert "none: 0.01 (mean area under the curve 45.0%; +2.5 over 0.003, standard error 0.0 points)\n" in said
    assert experiment.run_all(config, tmp_path) == rows and len(names) == 13
    (choice,) = experiment.choose_rates(config, read_rows(tmp_path))  # again from the rows alone
    assert (choice["rate"], choice["other"], choice["is_edge"]) == (0.01, 0.003, False)
    assert choice["margin"] == pytest.approx(0.025) and choice["error"] == pytest.approx(0)


def test_a_short_run_is_the_run_scaled_down_with_a_schedule_of_its_own():
    keys = dict(max_iters=400, warmup_iters=40, eval_interval=50, lr_decay_iters=400)
    config = choosing(base=BASE | keys)
    (choice,) = experiment.choose_rates(config, [])
    run = choice["runs"][0]
    assert {name: run["config"][name] for name in keys} == {name: steps // 4 for name, steps in keys.items()}
    assert run["purpose"] == "short selection" and run["config"]["learning_rate"] == 0.001
    assert "lr_decay_iters" not in experiment.choose_rates(choosing(), [])[0]["runs"][0]["config"]  # max_iters
    cheap = choosing(base=BASE | keys, selection_iters=[200, 320])
    assert experiment.choose_rates(cheap, [])[0]["runs"][0]["config"]["eval_interval"] == 25
    choices, _ = chosen(cheap, by_rate({0.001: 0.1, 0.01: 0.5, 0.1: 0.4}))
    longest = choices[0]["runs"][-1]
    assert longest["purpose"] == "selection"
    assert {name: longest["config"][name] for name in keys} == {name: 4 * n // 5 for name, n in keys.items()}


def chosen(config, value):
    """The choices, all runs that they ask for made, and how many that were."""
    rows = []
    while True:
        choices = experiment.choose_rates(config, rows)
        lacking = [run for choice in choices for run in choice["runs"] if text_of(run) not in by_run(rows)]
        if not lacking:
            return choices, len(rows)
        rows += [made_row(run, value(run)) for run in lacking]


@pytest.mark.parametrize(
    "values, rate, n_full, is_edge",
    [
        ({0.001: 0.1, 0.01: 0.5, 0.1: 0.4}, 0.01, 2, False),
        ({0.001: 0.1, 0.01: 0.5, 0.1: 0.6, 1.0: 0.2}, 0.1, 3, False),
        ({0.001: 0.1, 0.01: 0.5, 0.1: 0.6, 1.0: 0.7, 10.0: 0.9}, 1.0, 3, True),  # once on each side
        ({0.001: 0.6, 0.01: 0.5, 0.1: 0.1, 0.0001: 0.7}, 0.0001, 3, True),
        ({0.001: 0.5, 0.01: 0.1, 0.1: 0.6, 1.0: 0.2}, 0.1, 3, False),
    ],
)
def test_a_choice_at_the_edge_widens_the_grid_by_one_full_run_once_on_each_side(values, rate, n_full, is_edge):
    (choice,), n_runs = chosen(choosing(), by_rate(values))
    assert (choice["rate"], choice["is_edge"]) == (rate, is_edge)
    assert n_runs == 2 * (3 + n_full)
    said = tables.rate_lines(choosing(), [choice])[0]
    assert ("at the edge of the rates" in said) == is_edge


@pytest.mark.parametrize("noise, rate", [(0.0, 0.1), (0.05, 0.01)])
def test_of_two_rates_within_a_standard_error_the_smaller_one_is_taken(noise, rate):
    values = {0.001: 0.1, 0.01: 0.5, 0.1: 0.52, 1.0: 0.2}
    config = choosing()
    signs = {(0.1, 7): 1, (0.1, 8): -1}
    (choice,), _ = chosen(
        config, lambda run: (r := run["config"]["learning_rate"]) and values[r] + noise * signs.get((r, run["seed"]), 0)
    )
    assert choice["rate"] == rate
    assert ("margin under a standard error" in tables.rate_lines(config, [choice])[0]) == (noise > 0)


def test_one_seed_has_no_standard_error_and_a_loss_is_better_when_lower():
    config = choosing(selection_seeds=[7], metric="val_loss")

    def row(run):
        loss = {0.001: 3.0, 0.01: 2.0, 0.1: 2.1}[run["config"]["learning_rate"]]
        return made_row(run, 0.5) | {"val_loss": loss, "metric": "val_loss", "curve": [[0, 4.0], [100, loss]]}

    rows = []
    for _ in range(3):
        (choice,) = experiment.choose_rates(config, rows)
        rows = [row(run) for run in choice["runs"]]
    assert choice["rate"] == 0.01 and math.isnan(choice["error"])
    (line,) = tables.rate_lines(config, [choice])
    assert line == "learning rate of none: 0.01 (mean area under the curve 3.0000; +0.0500 over 0.1, one seed)"


def test_a_rate_that_diverged_in_a_seed_is_never_chosen_over_one_that_did_not():
    values = by_rate({0.001: 0.1, 0.01: 0.2, 0.1: 0.9, 1.0: 0.1})
    (choice,), _ = chosen(choosing(), lambda run: None if (run["seed"], values(run)) == (8, 0.9) else values(run))
    assert choice["rate"] == 0.01


def test_the_area_of_a_run_that_was_solved_early_counts_up_to_the_horizon():
    run = {"finite": True, "curve": [[0, 0.0], [10, 1.0], [20, 1.0]]}
    assert curves.area(run) == pytest.approx(0.75)
    assert curves.area(run | {"horizon": 100}) == pytest.approx(0.95)
    assert curves.area(run | {"curve": [[0, 0.5]], "horizon": 0}) == 0.5
    assert curves.area(run | {"finite": False}) is None


def test_older_experiments_choose_by_the_end_of_full_runs_and_widen_nothing():
    config = choosing(select_by="end")
    (choice,), n_runs = chosen(config, by_rate({0.001: 0.1, 0.01: 0.5, 0.1: 0.6}))
    assert (choice["rate"], choice["is_edge"], n_runs) == (0.1, True, 6)


def test_the_rates_table_has_every_run_that_chose_a_rate_and_the_end_table_the_rate(tmp_path, made, capsys):
    config = choosing(arms={"none": {"gate": "none"}, "gated": {"gate": "elementwise"}})
    made(by_rate({0.001: 0.2, 0.01: 0.5, 0.1: 0.3}))
    keys = dataclasses.asdict(config)
    experiment.main([f"--config_override={json.dumps(keys)}", f"--out_dir={tmp_path}"])
    said = capsys.readouterr().out
    lines = [line.split() for line in said[said.index("Learning rates: accuracy at the end") :].splitlines()]
    assert lines[1] == "arm rate steps seed 7 seed 8 mean area".split()
    assert lines[2:7] == [
        "none 0.001 100 20.0% 20.0% 20.0% 32.5%".split(),
        "none 0.01 100 50.0% 50.0% 50.0% 40.0%".split(),
        "none 0.1 100 30.0% 30.0% 30.0% 35.0%".split(),
        "none 0.01 * 400 50.0% 50.0% 50.0% 40.0%".split(),
        "none 0.1 400 30.0% 30.0% 30.0% 35.0%".split(),
    ]
    assert "arm        0   mean  rate\nnone   50.0%  50.0%  0.01\n" in said
    assert said[said.index("Learning rates: ") : said.index("written: ")].strip() in html.unescape(
        (tmp_path / "report.html").read_text()
    )
    first = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    experiment.main([f"--config_override={json.dumps(keys | {'run': False})}", f"--out_dir={tmp_path}"])
    assert capsys.readouterr().out.endswith(said[said.index("End accuracy") :])
    again = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    assert {name for name in first if first[name] != again[name]} <= {"report.html"}  # it has the command


def test_one_arm_and_one_setting_may_choose_the_rate_for_others(tmp_path, capsys):
    arms = {"none": {}, "gated": {"gate": "elementwise"}, "matched": {"gate": "elementwise", "match_params": True}}
    keys = dict(selection_seeds=[7], learning_rates=[0.001, 0.01], rate_of={"matched": "gated"}, rates_at="d32")
    config = listed(arms=arms, seeds=[0], scores={"longer": {"lengths": [64]}}, run=False, **keys)
    tried = [run for choice in experiment.choose_rates(config, []) for run in choice["runs"]]
    assert {(run["setting"], run["arm"]) for run in tried} == {("d32", "none"), ("d32", "gated")} and len(tried) == 4
    best = {"none": 0.001, "gated": 0.01}
    value = lambda run: 0.9 if run["config"]["learning_rate"] == best[run["arm"]] else 0.5  # noqa: E731
    choices, _ = chosen(config, value)
    rows = [made_row(run, value(run)) for choice in choices for run in choice["runs"]]
    assert rates_of(config, choices) == {(s, arm): best.get(arm, 0.01) for s in ("d16", "d32") for arm in arms}
    rows += [made_row(run, 0.5) for run in compared_runs(config, choices)]
    write_rows(tmp_path, rows)
    assert len(experiment.run_all(config, tmp_path)) == 6
    assert "learning rate of matched: 0.01 (that of gated)\n" in capsys.readouterr().out
    assert experiment.choose_rates(config, rows[1:])[0]["rate"] is None
    assert experiment.estimate(config, rows[1:]).startswith("d32-none-lr0.001-seed7 ")


# ----------------------------------------------------------------------------------------------------------------------
# Scenarios, estimates, tables


def test_a_scenario_holds_where_all_its_claims_have_their_verdicts():
    claims = {name: {"contrast": {"gated": 1, "none": -1}, "above": above} for name, above in (("a", 0.1), ("b", 0.3))}
    scenarios = {
        "one": {"a": "supported", "b": "not supported"},
        "two": {"a": "not supported"},
        "three": {"a": "not run"},
    }
    config = listed(seeds=list(range(8)), claims=claims, scenarios=scenarios)
    rows = []
    for run in experiment.runs_of(config, config.seeds, []):
        gain = {"d16": 0.2, "d32": 0.04 * run["seed"]}[run["setting"]]
        rows.append(made_row(run, 0.5 + run["seed"] / 100 + (gain if run["arm"] == "gated" else 0)))
    said = tables.scenarios_table(config, tables.judge_claims(config, rows))
    assert said == "scenario, d16: one\nscenario, d32: none of them"
    none = tables.scenarios_table(config, tables.judge_claims(config, rows[:4]))  # one seed
    assert none == "scenario, d16: three\nscenario, d32: three"
    assert tables.scenarios_table(listed(), []) == ""


def test_a_dry_run_lists_what_is_left_and_estimates_its_hours(tmp_path, capsys):
    config = listed(jobs=1)
    runs = experiment.runs_of(config, config.seeds, [])
    text = experiment.estimate(config, [made_row(runs[0], 0.5)]).splitlines()
    assert len(text) == 8 and text[3].startswith("d16-none-seed1") and text[3].endswith(" 36 s")  # as its arm's row
    assert not any(line.startswith("d16-none-seed0") for line in text)
    assert text[-1].startswith("7 of 8 runs to do: about ") and text[-1].endswith(" hours, 1 at a time")


def test_claims_are_judged_by_setting_and_tables_are_made_again_from_the_rows(tmp_path, capsys):
    gain = {"gated": 1, "none": -1}
    claims = {"it helps": {"contrast": gain, "above": 0.05}}  # in each setting
    claims["it helps at 16"] = {"contrast": gain, "above": 0.05, "setting": "d16"}
    claims["it helps more at 16"] = {"contrast": {"d16": gain, "d32": {"gated": -1, "none": 1}}, "above": 0.0}
    config = listed(seeds=list(range(8)), claims=claims, solved_above=0.75, run=False)
    value = {("d16", "none"): 0.5, ("d16", "gated"): 0.8, ("d32", "none"): 0.5, ("d32", "gated"): 0.5}
    runs = experiment.runs_of(config, config.seeds, [])
    rows = [made_row(run, value[run["setting"], run["arm"]] + run["seed"] / 1000) for run in runs]
    write_rows(tmp_path, rows)
    judged = tables.judge_claims(config, experiment.run_all(config, tmp_path))
    assert [claim["setting"] for claim in judged] == ["d16", "d32", "d16", None]
    assert [claim["verdict"] for claim in judged] == ["supported", "not supported", "supported", "supported"]
    for claim, gained in zip(judged, (0.3, 0.0, 0.3, 0.3), strict=True):
        assert claim["by_seed"] == pytest.approx(dict.fromkeys(range(8), gained), abs=1e-12)
    said = "it helps, d16: supported (+0.3000, exact 95% interval +0.3000 to +0.3000, identical in all seeds; over 0.05"
    assert said in tables.claims_table(judged)
    words = [f"--config_override={json.dumps(dataclasses.asdict(config))}", f"--out_dir={tmp_path}"]
    capsys.readouterr()
    experiment.main(words)
    first = capsys.readouterr().out
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    page = html.unescape(files["report.html"].decode())
    assert "claims.png" in files and tables.summary(config, rows, judged) in first
    assert first.split("\n\n")[1] in page and "<code>python experiment.py --config_override=" in page
    gains = tables.gains_table(config, [row for row in rows if row["setting"] == "d16"])
    assert gains.splitlines()[1:] == ["gated  +0.3000  identical in all seeds"] and gains in first
    assert "gated  80.0%  80.1%  80.2%  80.3%  80.4%  80.5%  80.6%  80.7%  80.4%     8/8          100" in first
    experiment.main(words)
    assert capsys.readouterr().out == first
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files


def test_the_gain_is_over_the_arm_that_lacks_the_keys_of_the_gate_and_no_others():
    gated = {"gate": "elementwise"}
    arms = {"none": {}, "static": gated | {"gate_input": "static"}, "other": gated | {"readout_norm": "none"}}
    config = listed(arms=arms, settings={}, seeds=[0, 1])
    rows = [made_row(run, 0.5 + 0.1 * (run["arm"] == "static")) for run in experiment.runs_of(config, config.seeds, [])]
    assert tables.gains_table(config, rows).splitlines()[1:] == ["static  +0.1000  identical in all seeds"]


def test_in_a_sweep_the_gain_is_over_the_same_rate_and_with_chosen_rates_over_whichever_was_chosen():
    sweep = listed(settings={}, learning_rates=[0.001, 0.1], metric="val_loss")
    ends = {"none at 0.001": 1.0, "none at 0.1": 2.0, "gated at 0.001": 0.9, "gated at 0.1": 1.5}
    runs = experiment.runs_of(sweep, sweep.seeds, sweep.learning_rates)
    rows = [made_row(run, 0.5) | {"val_loss": ends[run["arm"]]} for run in runs[::-1]]  # 0.1 comes first
    said = {line.split("  ")[0]: line.split()[3] for line in tables.gains_table(sweep, rows).splitlines()[1:]}
    assert said == {"gated at 0.1": "-0.5000", "gated at 0.001": "-0.1000"}
    chosen = listed(settings={}, learning_rates=[0.001, 0.1], selection_seeds=[7])
    rates = {(None, "none"): 0.001, (None, "gated"): 0.1}
    runs = experiment.runs_of(chosen, chosen.seeds, chosen.learning_rates, rates)
    rows = [made_row(run, 0.5 + 0.2 * (run["arm"] == "gated")) for run in runs]
    assert tables.gains_table(chosen, rows[1:]).splitlines()[1:] == []  # one pair
    assert tables.gains_table(chosen, rows).splitlines()[1:] == ["gated  +0.2000  identical in all seeds"]
    three = dataclasses.replace(chosen, seeds=[0, 1, 2])
    rows = [made_row(run, 0.5) for run in experiment.runs_of(three, three.seeds, chosen.learning_rates, rates)]
    assert tables.gains_table(three, rows[1:]).splitlines()[1:]  # though the first seed lacks an arm


def test_arms_of_a_seed_that_were_run_in_other_ways_are_named_and_so_is_unknown_code(tmp_path):
    config = listed(settings={}, seeds=[0, 1])
    about = {"dtype": "float32", "device": "cpu", "threads": 1, "code_sha256": "c0de" * 16}
    rows = [made_row(run, 0.5) | about for run in experiment.runs_of(config, config.seeds, [])]
    said = tables.summary(config, rows, [])
    assert "not paired" not in said and "made by" not in said
    one, two, *others = rows
    said = tables.summary(config, [one, two | {"threads": 2}, *others], [])
    assert "not paired: threads differs between the arms of 1 seeds (seed 0: 1: none; 2: gated)" in said
    assert "made by: threads 1 (3 of 4 rows), 2 (1 of 4 rows)" in said
    said = tables.summary(config, [one | {"dtype": "bfloat16", "device": "cuda"}, two, *others], [])
    assert "not paired: dtype differs" in said and "not paired: device differs" in said
    said = tables.summary(config, [one, two | {"code_sha256": "beef" * 16}, *others], [])
    assert "made by: code c0dec0dec0de (3 of 4 rows), beefbeefbeef (1 of 4 rows)\n" in said
    old = [{name: value for name, value in row.items() if name not in about} for row in rows]
    said = tables.summary(config, [*rows[:2], *old[2:]], [])
    assert "made by: code c0dec0dec0de (2 of 4 rows), unknown (2 of 4 rows); device cpu (2" in said
    assert "not paired" not in said  # the config gives the dtype, and what is not known is not known to differ
    report.page(rows, [], tmp_path / "report.html")
    assert "c0dec0dec0de" in (tmp_path / "report.html").read_text()


def test_a_row_that_other_code_made_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "start", lambda *words: pytest.fail("a run was started"))
    config = listed()
    rows = [made_row(run, 0.5) for run in experiment.runs_of(config, config.seeds, [])]
    rows = [row | {"code_sha256": str(i), "threads": i} for i, row in enumerate(rows)]
    write_rows(tmp_path, rows)
    assert [row["code_sha256"] for row in experiment.run_all(config, tmp_path)] == list("01234567")


def test_rows_of_other_keys_are_counted_and_what_differs_is_named(tmp_path, capsys):
    config = listed(run=False)
    rows = [made_row(run, 0.5) for run in experiment.runs_of(config, config.seeds, [])]
    for row in rows[1:]:
        del row["config"]["dtype"]
    rows[-1]["data"]["pairs"] = 3
    write_rows(tmp_path, rows)
    assert len(experiment.run_all(config, tmp_path)) == 1
    said = capsys.readouterr().out
    assert "8 runs, 40,000 steps; 1 runs are done already" in said and "7 of 8 runs have no row yet" in said
    left_out = "of their rows have other keys, and are left out: dtype not given in the row, 'float32' in the config"
    assert f"  6 {left_out}\n" in said and f"  1 {left_out}; pairs 3 in the row, 4 in the config\n" in said


ROOT = Path(experiment.__file__).parent
CONFIGS = sorted((ROOT / "config" / "experiments").glob("*.py"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_committed_experiment_fixes_its_dtype_and_device(file):
    config = configurator.load(experiment.ExperimentConfig, [str(file)])
    assert {"dtype", "device"} <= config.base.keys() and config.name == file.stem


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_committed_row_is_found_by_its_config(file):
    config = configurator.load(experiment.ExperimentConfig, [str(file), "--run=false"])
    rows = read_rows(ROOT / "results" / config.name)
    if not any("dtype" in row["config"] for row in rows):
        pytest.skip("these rows are from before the config fixed the dtype")
    assert experiment.estimate(config, rows).startswith("0 of ")
    found = experiment.run_all(config, ROOT / "results" / config.name)
    assert len(found) == len(rows) - sum(len(choice["runs"]) for choice in experiment.choose_rates(config, rows))
    assert all(row["scores"].keys() == config.scores.keys() for row in found)


def test_base_and_data_on_the_command_line_are_added_to_those_of_the_file():
    words = ['--base={"n_layer": 4}', '--data={"pairs": 8}', '--arms={"none": {}, "elementwise": {}}']
    config = configurator.load(experiment.ExperimentConfig, [str(ROOT / "config/experiments/minimum.py"), *words])
    assert (config.base["n_layer"], config.base["n_embd"], config.base["dtype"]) == (4, 64, "float32")
    assert (config.data["pairs"], config.data["queries"]) == (8, 2)
    assert config.arms == {"none": {}, "elementwise": {}}


def test_a_dry_run_knows_the_chosen_rates_and_guesses_what_is_not_chosen_yet():
    config, value = choosing(seeds=[0, 1], selection_seeds=[7], jobs=1), by_rate({0.001: 0.3, 0.01: 0.5, 0.1: 0.4})
    choices, _ = chosen(config, value)
    selection = [made_row(run, value(run)) for choice in choices for run in choice["runs"]]
    rows = selection + [made_row(run, 0.5) for run in compared_runs(config, choices)]
    assert experiment.estimate(config, rows).startswith("0 of 7 runs to do")
    assert experiment.estimate(config, rows[:-1]).splitlines()[0].startswith("none-seed1 ")
    assert experiment.estimate(config, selection).splitlines()[-1].startswith("2 of 7 runs to do")
    lines = [line.split()[:2] for line in experiment.estimate(config, selection[:2]).splitlines()]
    assert lines == [  # a step of a short run, which took 36 s here, costs as much as one of a full run
        ["none-lr0.1-short-seed7", "36"], ["none-lr0.001-seed7", "144"], ["none-lr0.01-seed7", "144"],
        ["none-seed0", "144"], ["none-seed1", "144"], ["5", "of"],
    ]  # fmt: skip
    scored = dataclasses.replace(config, scores={"longer": {}})
    assert experiment.estimate(scored, rows).endswith("; 2 finished runs lack a score")


def test_with_many_seeds_the_sign_flip_test_is_called_what_it_is():
    config = listed(settings={}, seeds=list(range(50)), claims={"it helps": {"contrast": {"gated": 1}, "above": 0.4}})
    rows = [made_row(run, 0.5 + run["seed"] / 100) for run in experiment.runs_of(config, config.seeds, [])]
    said = tables.claims_table(tables.judge_claims(config, rows))
    assert "; over 0.4: p 2e-05 +-1e-05, 100,000 random sign patterns, 2e-05 after Holm; sees 0.0589 beyond" in said
    some = tables.claims_table(tables.judge_claims(config, rows[:30]))  # two arms
    assert "; over 0.4: p 6.1e-05, 6.1e-05 after Holm; sees" in some


def test_a_verdict_has_no_thresholds_of_its_own_and_is_about_accuracy(helpers):
    about = dict(baseline="none", treatment="gated")
    message = helpers.error_of(listed, **about)
    assert message == "success_above, success_below, failure_within: the verdict needs them, too"
    assert "baseline, treatment: the verdict needs" in helpers.error_of(listed, **RULE)
    assert "write a claim" in helpers.error_of(listed, **about, **RULE, metric="val_loss")
    assert helpers.error_of(listed, solved_above=0.9, metric="val_loss").startswith("solved_above: is about accuracy")
    assert listed(metric="val_loss").success_above is None


def test_which_arm_is_solved_later_is_counted_over_the_seeds_that_both_solve():
    config, reached = listed(seeds=[0, 1, 2, 3], solved_above=0.75), {"gated": (20, 10, 30, 10), "none": (10, 10, 10)}
    rows = [
        {"arm": arm, "seed": seed, "curve": [[0, 0.1], [step, 0.9]]}
        for arm, steps in reached.items()
        for seed, step in enumerate(steps)
    ]
    rows.append({"arm": "none", "seed": 3, "curve": [[0, 0.1], [10, 0.5]]})  # never solved
    said = "; solved later in 2, sooner in 0 of 3 seeds that both solve"
    assert tables.compare_steps(config, rows, "gated", "none") == said
    assert tables.compare_steps(config, rows[-1:], "gated", "none") == ""
    assert tables.compare_steps(listed(), rows, "gated", "none") == ""


def test_what_is_there_is_shown_before_the_rest_has_run(tmp_path, capsys):
    claims = {"it helps": {"contrast": {"gated": 1}, "above": 0.5}}
    config = listed(baseline="none", treatment="gated", **RULE, claims=claims, exploratory=True)
    runs = experiment.runs_of(config, config.seeds, [])
    write_rows(tmp_path, [made_row(runs[0], 0.4)])  # of one arm, in one setting
    keys = dataclasses.asdict(config) | {"run": False}
    experiment.main([f"--config_override={json.dumps(keys)}", f"--out_dir={tmp_path}"])
    said = capsys.readouterr().out
    assert "7 of 8 runs have no row yet" in said and "d32: none of its runs has a row yet" in said
    assert (
        "verdict:" not in said
        and "it helps, d16: exploratory: not run" in said
        and "it helps, d32: exploratory: not run" in said
    )


def test_every_arm_is_run_at_every_rate_and_where_it_diverges_is_said(tmp_path):
    keys = dict(arms={"a": {"gate": "none"}, "b": {}}, learning_rates=[0.001, 0.1, 3], metric="val_loss", base=BASE)
    config = experiment.ExperimentConfig(**keys)
    runs = experiment.runs_of(config, [0], config.learning_rates)
    assert [run["arm"] for run in runs] == ["a at 0.001", "a at 0.1", "a at 3", "b at 0.001", "b at 0.1", "b at 3"]
    assert runs[2]["config"] == BASE | {"gate": "none", "learning_rate": 3, "seed": 0}
    ends = [1.0, 1.5, 2.1, 1.0, math.nan, 1.9]  # of runs that begin at 2
    about = dict(metric="val_loss", data={})
    rows = [
        run | about | {"scores": {}, "val_loss": end, "finite": not math.isnan(end), "curve": [[0, 2.0], [6, end]]}
        for run, end in zip(runs, ends, strict=True)
    ]
    said = [line.split() for line in tables.divergence(rows).splitlines()[1:]]
    assert said == [["a", "0.1", "3"], ["b", "3", "0.1"]]
    assert tables.divergence(rows) in tables.summary(config, rows, [])
    assert [figure.name for figure in report.figures(rows, tmp_path)] == ["learning_rates.png"]


# ----------------------------------------------------------------------------------------------------------------------
# Judging


def judging(arms, **keys):
    about = dict(baseline="none", treatment="elementwise", base=BASE) | RULE
    return experiment.ExperimentConfig(arms=arms, **about | keys)


def judged(plain, gated, **keys):
    """The verdict on made-up accuracies, seed by seed; None is a run that was not finite."""
    config = judging({"none": {}, "elementwise": {}}, **keys)
    rows = [
        {"arm": arm, "seed": seed, "accuracy": accuracy or math.nan, "finite": accuracy is not None}
        for arm, accuracies in (("none", plain), ("elementwise", gated))
        for seed, accuracy in enumerate(accuracies)
    ]
    return tables.verdict(config, rows)


@pytest.mark.parametrize(
    "plain, gated, expected",
    [
        ([0.54, 0.30, 0.50], [0.76, 0.99, 0.80], "success"),
        ([0.54, 0.30, 0.56], [0.76, 0.99, 0.80], "in between"),  # one seed of the baseline is too good
        ([0.54, 0.30, 0.50], [0.76, 0.99, 0.75], "in between"),  # one seed of the treatment is not above
        ([0.50, 0.60, 0.70], [0.53, 0.63, 0.72], "failure"),
        ([0.50, 0.60, 0.70], [0.47, 0.58, 0.70], "failure"),
        ([0.50, 0.60, 0.70], [0.54, 0.64, 0.74], "in between"),
        ([0.90, 0.90, 0.90], [0.30, 0.30, 0.30], "in between"),  # the gate harms: neither of the two
        ([0.50, 0.50, 0.50], [0.80, 0.80, None], "failure (a run was not finite)"),
        ([0.50, None, 0.50], [0.80, 0.80, 0.80], "failure (a run was not finite)"),
    ],
)
def test_verdict_follows_the_rules_of_the_config(plain, gated, expected):
    assert judged(plain, gated).startswith(expected)


def test_the_rules_are_keys_of_the_config():
    plain, gated = [0.5, 0.6], [0.7, 0.8]
    assert judged(plain, gated).startswith("in between")
    assert judged(plain, gated, success_above=0.65, success_below=0.61).startswith("success")
    assert judged(plain, gated, failure_within=0.21).startswith("failure")
    assert "(elementwise - none = +20.0 points over 2 seeds;" in judged(plain, gated)


def test_other_arms_than_the_two_do_not_count():
    config = judging({"none": {}, "elementwise": {}, "conv": {}})
    scores = {"none": 0.4, "elementwise": 0.9, "conv": math.nan}
    rows = [{"arm": arm, "seed": 0, "accuracy": x, "finite": not math.isnan(x)} for arm, x in scores.items()]
    assert tables.verdict(config, rows).startswith("success")
