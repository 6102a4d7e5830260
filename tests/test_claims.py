"""The claims of an experiment: how they are judged, what limits them, their lines and figures.

Rows are made by hand; the tests and intervals themselves are in test_stats.py.

python -m pytest tests/test_claims.py
"""

from configurator import UserError

import dataclasses
import json
import math
import statistics

import pytest
from made_rows import GAIN, labels_of, listed, made_row

import experiment
import plot
from study import claims, overview, stats


def config_of(asked, n=8, **keys):
    return listed(**dict(seeds=list(range(n)), settings={}, claims=asked) | keys)


def rows_of(config, value=lambda run: 0.5, seeds=None):
    """A row of every run of the config, with the accuracy that value(run) gives."""
    runs = experiment.runs_of(config, config.seeds if seeds is None else seeds, [])
    return [made_row(run, value(run)) for run in runs]


def helped(run):
    return 0.5 + (run["arm"] == "gated") * (0.1 + run["seed"] / 1000)


def verdicts(judged):
    return {claim["claim"]: claim["verdict"] for claim in judged}


def test_claims_may_be_about_other_numbers_of_the_rows_each_with_its_own_correction(tmp_path, drawn):
    gain = {"contrast": GAIN, "above": 0.01}
    longer = {"of": ["scores", "longer", "slices", "64/8"]}
    asked = {"it helps": gain, "it helps on more pairs": gain | longer, "it helps there, too": gain | longer}
    asked["it is sparse"] = {"contrast": {"gated": 1}, "above": 0.5, "of": ["meters", "gate_below_0.1", "readout"]}
    config = config_of(asked, 7)
    rows = rows_of(config, helped)
    for row in rows:
        row["scores"] = {"longer": {"slices": {"64/8": helped(row) - 0.2}}}
        row["meters"] = {"gate_below_0.1": {"readout": 0.2 + row["seed"] / 1000}} if row["arm"] == "gated" else {}
    judged = {claim["claim"]: claim for claim in claims.judge_claims(config, rows)}
    assert list(verdicts(judged.values()).values()) == [*["supported"] * 3, "not supported"]
    alone, paired = judged["it helps"], judged["it helps on more pairs"]
    assert paired["p"] == alone["p"] == alone["p_holm"] == 2 / 2**7
    assert paired["p_holm"] == 2 * paired["p"]
    assert judged["it is sparse"]["by_seed"] == pytest.approx({seed: 0.2 + seed / 1000 for seed in range(7)})
    overview.forest(list(map(claims.record, judged.values())), tmp_path / "claims.png")
    assert [axes.get_xlabel() for axes in drawn["claims.png"].axes] == ["%", "points"]
    del rows[0]["scores"]["longer"]  # as in a run that was not finite
    assert claims.judge_claims(config, rows)[1]["n"] == 6


def legend_of(figure):
    return {text.get_text() for text in figure.legends[0].get_texts()}


def test_claims_have_a_figure_of_their_intervals_thresholds_and_seeds(tmp_path, drawn):
    gain = {"contrast": GAIN, "above": 0.05}
    asked = {"it helps": gain, "it helps in two seeds": gain | {"in": 2}}
    asked["it is equal"] = {"contrast": GAIN, "within": 0.2}
    config = listed(seeds=list(range(7)), claims=asked)
    rows = rows_of(config, lambda run: 0.5 + run["seed"] / 100 * (run["arm"] == "gated"))
    rows = [row for row in rows if row["setting"] == "d16" or row["seed"] == 0]  # one seed: not run
    judged = claims.judge_claims(config, rows)
    overview.forest(list(map(claims.record, judged)), tmp_path / "claims.png")
    axes = drawn["claims.png"].axes[0]
    names = ["it helps, d16", "it helps in two seeds, d16", "it is equal, d16"]
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    of = {label: [line for line in axes.lines if line.get_label() == label] for label in labels_of(axes)}
    assert [list(line.get_xdata()) for line in of["threshold"]] == [[5], [5]]  # the third claim has none
    ends = [100 * judged[0][end] for end in ("low", "high")]
    assert list(of[judged[0]["verdict"]][0].get_xdata()) == pytest.approx(ends)
    means = [line for line in axes.lines if line.get_marker() == "o"]
    assert [list(line.get_xdata()) for line in means] == [pytest.approx([3])] * 3
    assert [list(line.get_xdata()) for line in of["a seed"]] == [pytest.approx([0, 1, 2, 3, 4, 5, 6])] * 3
    words = {claim["verdict"] for claim in judged if claim["setting"] == "d16"}
    assert legend_of(drawn["claims.png"]) == {"threshold", "a seed", *words}  # of what is there
    few = claims.judge_claims(config, rows[:6])  # the exact interval is the whole line
    overview.forest(list(map(claims.record, few)), tmp_path / "few.png")
    is_open = "exact interval open: too few seeds"
    edge = next(line for line in drawn["few.png"].axes[0].lines if line.get_label() == is_open)
    assert list(edge.get_xdata()) == pytest.approx([0, 1])
    marks = {"mean, exploratory", is_open, "Student's, there", "inconclusive"}
    assert legend_of(drawn["few.png"]) == {"threshold", "a seed", *marks}


def test_a_count_is_judged_when_all_its_runs_are_there_and_a_run_without_a_value_is_not_above():
    asked = {"most": {"contrast": {"gated": 1}, "above": 0.4, "in": 2}}
    rows = rows_of(config := config_of(asked, 3), lambda run: {0: 0.5, 1: None, 2: 0.6}[run["seed"]])
    (judged,) = claims.judge_claims(config, rows)
    said = "most: passed (2 of 3 seeds over 0.4, 2 needed: +0.5000, +0.6000); no value in seeds 1"
    assert judged["verdict"] == "passed" and claims.claims_table([judged]) == said
    few = [row for row in rows if row["seed"] < 2]
    assert claims.claims_table(claims.judge_claims(config, few)) == "most: not run"
    some = config_of(asked, 3, seeds_of={"gated": [0, 1]})
    assert claims.judge_claims(some, few)[0]["verdict"] == "failed"  # no other seed is to be run


def test_a_claim_is_corrected_within_its_question_also_for_those_that_have_not_run_and_exploratory_ones_apart():
    gain = {"contrast": GAIN, "above": 0.01}
    asked = {"a": gain, "b": gain, "late": gain | {"contrast": {"late": 1, "none": -1}}}
    asked |= {"mine": gain | {"family": "another question"}, "look": gain | {"exploratory": True}}
    arms = {"none": {}, "gated": {"gate": "elementwise"}, "late": {"gate": "headwise"}}
    rows = rows_of(config := config_of(asked, arms=arms), helped)
    judged = {claim["claim"]: claim for claim in claims.judge_claims(config, [r for r in rows if r["arm"] != "late"])}
    assert judged.pop("late")["verdict"] == "not run"
    assert [claim["p_holm"] / claim["p"] for claim in judged.values()] == [3, 3, 1, 1]
    seen = judged["a"]["sd"] * stats.detectable(8, 0.05 / 2 / 3)[0]
    assert judged["a"]["detectable"] == pytest.approx(seen)
    lines = claims.claims_table(list(judged.values())).splitlines()
    assert lines[0].startswith("a: supported (") and lines[-1].startswith("look: exploratory: supported (")


def test_a_claim_that_its_seeds_cannot_support_is_refused_unless_it_is_exploratory(helpers):
    def error(seeds, **keys):
        return helpers.error_of(listed, seeds=list(range(seeds)), settings={}, **keys)

    claim = {"contrast": GAIN, "above": 0.05}
    message = "claims: it helps: 5 seeds give no p under 0.062, so it cannot be supported; it needs 6 seeds, or exp"
    assert error(5, claims={"it helps": claim}).startswith(message)
    assert "4 seeds give no p under 0.062" in error(4, claims={"it helps": claim | {"sides": 1}})
    assert "4 seeds" in error(4, claims={"it is equal": {"contrast": GAIN, "within": 0.05}})
    said = "6 seeds give no p under 0.062 after Holm's correction for 2 claims, so it cannot be supported; it needs 7"
    assert said in error(6, claims={"a": claim, "b": claim})
    assert "4 seeds" in error(6, claims={"a": claim}, seeds_of={"gated": [0, 1, 2, 3]})
    assert "in=7: is more than the seeds" in error(6, claims={"most": claim | {"in": 7}})
    for count, asked in [
        (6, {"a": claim}), (5, {"a": claim | {"sides": 1}}), (6, {"a": claim, "b": claim | {"family": "b"}}),
        (6, {"a": claim, "b": claim | {"in": 3}}), (2, {"a": claim | {"exploratory": True}}),
    ]:  # fmt: skip
        config_of(asked, count)
    listed(seeds=[0], claims={"a": claim}, exploratory=True)


def test_a_dry_run_says_what_each_claim_can_show():
    claim = {"contrast": GAIN, "above": 0.05}
    asked = {"it helps": claim | {"sides": 1}, "equal": {"contrast": GAIN, "within": 0.1}, "most": claim | {"in": 3}}
    config = config_of(asked, jobs=1)
    rows = rows_of(config, lambda run: 0.5 + (run["arm"] == "gated") * 0.1 * run["seed"] / 7)
    spread = statistics.stdev(0.1 * seed / 7 for seed in range(8))
    effect, band = stats.detectable(8, 0.05 / 2)  # two tests in the family
    of = f"in 80% of cases (spread {spread:.3g}, of 8 seeds of its rows)"
    assert experiment.estimate(config, rows).splitlines()[1:] == [
        f"it helps: 8 seeds give no p under 0.0078 after Holm, 2 claims; sees {spread * effect:.3g} beyond 0.05 {of}",
        f"equal: 8 seeds give no p under 0.0078 after Holm, 2 claims; shows a band of +-{spread * band:.3g} {of}",
        "most: a count: 3 of 8 seeds pass it",
    ]
    assert "; no rows to take a spread from" in claims.reach_lines(config, [])[0]
    pooled = {"pooled": {"contrast": {"gated": 0.5, "none": -0.5}, "above": 0, "sides": 1}}
    assumed = dataclasses.replace(config, claims=pooled, pair_spread=0.2)
    seen = f"sees {0.1 * stats.detectable(8, 0.05)[0]:.3g} beyond 0 in 80% of cases (spread 0.1, assumed)"
    assert seen in claims.reach_lines(assumed, [])[0]
    (said,) = claims.reach_lines(config_of({"it helps": claim}, 3, exploratory=True), rows)
    assert said.startswith("it helps: exploratory: 3 seeds give no p under 0.25; too few seeds to see anything")


# ----------------------------------------------------------------------------------------------------------------------
# Flags


def flags_of(values, choices=(), changes=None, **keys):
    """The flags of the gain in made-up rows. values: {arm: accuracy}. changes: what else the gated rows hold."""
    config = config_of({"a": {"contrast": GAIN, "above": 0}}, **keys)
    chosen = {(None, arm): 0.01 for arm in values} if choices else None
    rows = [made_row(run, values[run["arm"]]) for run in experiment.runs_of(config, config.seeds, [], chosen)]
    rows = [row | (changes or {}) if row["arm"] == "gated" else row for row in rows]
    return claims.judge_claims(config, rows, choices)[0]["flags"]


def test_a_verdict_at_the_ceiling_or_at_chance_is_flagged():
    assert flags_of({"none": 0.99, "gated": 1.0}) == ["ceiling: all arms are at the top"]
    assert flags_of({"none": 0.26, "gated": 0.25}) == ["floor: all arms are at chance"]  # of 4 pairs: a quarter
    assert flags_of({"none": 0.26, "gated": 0.6}) == flags_of({"none": 0.9, "gated": 1.0}) == []
    # the queries of each slice count
    several = dict(data={"slices": "80/2,80/5,80/10,80/20", "vocab_size": 96, "train_size": 200, "val_size": 50})
    assert flags_of({"none": 4 / 37 + 0.04, "gated": 4 / 37}, **several) == ["floor: all arms are at chance"]
    assert flags_of({"none": 4 / 37 + 0.05, "gated": 4 / 37}, **several) == []
    assert flags_of({"none": 0.0, "gated": 0.0}, prepare="pystdlib", data={}) == []  # nothing knows its chance


def test_a_pair_of_unlike_commits_dtypes_or_threads_is_flagged():
    values = {"none": 0.5, "gated": 0.7}
    assert flags_of(values, changes={"dtype": "bfloat16"}) == ["mixed dtypes within 8 of 8 seeds"]
    assert flags_of(values, changes={"threads": 2, "git_commit": "b"}) == []  # the other rows do not store them
    config = config_of({"a": {"contrast": GAIN, "above": 0}})
    rows = [row | {"git_commit": "a", "threads": 1, "code_sha256": "x"} for row in rows_of(config)]
    rows[0] |= {"git_commit": "b", "threads": 2}
    assert claims.judge_claims(config, rows)[0]["flags"] == ["mixed threads within 1 of 8 seeds"]  # of the same code
    rows[0]["code_sha256"] = "y"
    line = claims.claims_table(claims.judge_claims(config, rows))
    assert line.endswith("; mixed commits within 1 of 8 seeds; mixed threads within 1 of 8 seeds")


def test_a_rate_at_the_end_of_its_grid_or_within_a_standard_error_is_flagged():
    values, keys = {"none": 0.5, "gated": 0.7}, dict(selection_seeds=[20, 21], learning_rates=[0.001, 0.01])
    chosen = {"setting": None, "rate": 0.01, "other": 0.001, "margin": 0.2, "error": 0.1, "is_edge": False}
    none, gated = (chosen | {"arm": arm} for arm in ("none", "gated"))
    edge, margin = "edge: none chose 0.01 at the end of the grid", "0.01 and 0.001 are within a standard error"
    no_error = "one selection seed: the margin of none's rate over 0.001 has no standard error"
    for choices, expected in [
        ([none, gated], []),
        ([none | {"is_edge": True}, gated | {"error": 0.3}], [edge, f"margin: gated's rate {margin}"]),
        ([none | {"error": math.nan}, gated], [no_error]),
        ([none | {"margin": -0.2}, gated], []),
        ([none | {"margin": math.nan, "error": math.nan}, gated], []),
        ([{"setting": None, "arm": "none", "rate": None}], []),  # not chosen yet
    ]:
        assert flags_of(values, choices=choices, **keys) == expected
    edges = [chosen | {"arm": arm, "is_edge": True} for arm in "abcde"]
    assert claims.doubts(edges[:2]) == ["edge: a, b chose 0.01 at the end of the grid"]
    assert claims.doubts([*edges, gated]) == ["edge: 5 arms chose 0.01 at the end of the grid"]


# ----------------------------------------------------------------------------------------------------------------------
# Units and words


def test_a_claim_may_be_about_the_curve_and_pool_settings(helpers):
    half = {arm: weight / 2 for arm, weight in GAIN.items()}
    asked = {
        "sooner": {"contrast": {"none": 1, "gated": -1}, "above": 0, "of": ["log_steps", 0.6]},
        "pooled": {"contrast": {"d16": half, "d32": half}, "above": 0, "of": ["lost", 0.6], "sides": 1},
    }
    rows = rows_of(config := listed(seeds=list(range(8)), claims=asked), lambda run: 0.9)
    for row in rows:
        is_gated = row["arm"] == "gated"
        row["curve"] = [[0, 0.1], [50, 0.7 if is_gated and row["setting"] == "d16" else 0.5], [100, 0.9]]
        if not is_gated and row["setting"] == "d32":
            row["curve"][2][1] = 0.55  # it never gets there
    d16, d32, pooled = claims.judge_claims(config, rows)
    assert "(2.00, exact 95% interval 2.00 to 2.00, identical in all seeds; over 1.00: p" in claims.claims_table([d16])
    assert d16["by_seed"] == pytest.approx(dict.fromkeys(range(8), math.log(2))) and d16["verdict"] == "supported"
    assert set(d32["by_seed"].values()) == {0} and d32["verdict"] == "inconclusive"
    assert pooled["by_seed"] == pytest.approx(dict.fromkeys(range(8), -0.5))  # the mean of 0 and -1


@pytest.mark.parametrize(
    "path", [["log_steps", 1, 2], ["log_steps"], ["lost", "x"], ["log_steps", True], [1], [["auc"]], ["scores", 1], []]
)
def test_a_path_that_is_none_is_refused(path, helpers):
    claim = {"contrast": GAIN, "above": 0, "of": path}
    assert "claims: a: of=" in helpers.error_of(config_of, {"a": claim})


def test_with_many_seeds_the_sign_flip_test_is_called_what_it_is():
    config = config_of({"it helps": {"contrast": {"gated": 1}, "above": 0.4}}, 50)
    rows = rows_of(config, lambda run: 0.5 + run["seed"] / 100)
    said = claims.claims_table(claims.judge_claims(config, rows))
    assert "; over 0.4: p 2e-05, 100,000 random sign patterns, 2e-05 after Holm; sees 0.0589 beyond" in said
    some = claims.claims_table(claims.judge_claims(config, rows[:30]))  # two arms
    assert "; over 0.4: p 6.1e-05, 6.1e-05 after Holm; sees" in some


@pytest.mark.parametrize(
    "of, unit",
    [
        (["accuracy"], "points"), (["lost", 0.9], "points"), (["val_loss"], "nats a token"),
        (["scores", "longer", "slices", "64/4"], "points"), (["meters", "kinds", "other", "share"], "%"),
        (["meters", "sink"], "%"), (["meters", "gate_below_0.1", "readout"], "%"),
        (["meters", "value_norm"], "as in the rows"), (["step_ms"], "as in the rows"),
        (["meters", "kinds", "other", "effective"], "of the residual stream"),
        (["scores", "test", "word_perplexity"], "as in the rows"), (["log", "val_loss"], "ratio"),
        (["log_steps", 0.9], "ratio of steps"),
    ],
)  # fmt: skip
def test_only_shares_are_shown_as_points_or_per_cent(of, unit):
    (question,) = claims.questions(config_of({"a": {"contrast": GAIN, "above": 0.0, "of": of}}))
    assert claims.unit_of(question) == unit
    (alone,) = claims.questions(config_of({"a": {"contrast": {"gated": 1}, "above": 0.0, "of": of}}))
    assert claims.unit_of(alone) == ("steps" if of[0] == "log_steps" else unit)


# ----------------------------------------------------------------------------------------------------------------------
# Looks, and all experiments together


def test_seeds_that_were_added_without_a_declared_look_make_a_claim_exploratory():
    config = config_of({"a": {"contrast": GAIN, "above": 0.0, "sides": 1}}, 12)

    def looked_at(n_seeds, planned):
        """The claim, of n_seeds seeds of twelve that have rows, each of which was planned with `planned`."""
        rows = rows_of(config, helped, list(range(n_seeds)))
        return claims.judge_claims(config, [row | {"planned_seeds": list(range(planned))} for row in rows])[0]

    whole = looked_at(12, planned=12)
    assert not whole["exploratory"] and whole["flags"] == [] and whole["p_holm"] == whole["p"] == 2**-12
    added = looked_at(12, planned=6)
    words = "seeds were added to the 6 that were planned at first, without a declared look"
    assert added["exploratory"] and added["flags"] == [words]
    assert claims.claims_table([added]).startswith("a: exploratory: supported (")
    early = looked_at(7, planned=12)  # before all seeds have run
    assert early["exploratory"] and early["flags"] == ["the seeds so far are no declared look"]


def test_seeds_that_were_planned_and_are_left_out_make_a_claim_exploratory():
    asked, all_seeds = {"a": {"contrast": GAIN, "above": 0.0, "sides": 1}}, list(range(12))
    kept = [seed for seed in all_seeds if seed != 7]
    rows = [row | {"planned_seeds": all_seeds} for row in rows_of(config_of(asked, 12), helped)]
    config = config_of(asked, seeds=kept)
    (judged,) = claims.judge_claims(config, rows)
    assert judged["exploratory"] and judged["flags"] == ["seeds 7 were planned and are left out"]
    # an arm may have been planned with more seeds than the other: those that both have count
    rows = [row | {"planned_seeds": kept + [7] * (row["arm"] == "gated")} for row in rows]
    assert not claims.judge_claims(config, rows)[0]["exploratory"]


def test_a_score_that_is_not_computed_yet_is_missing_and_not_lost():
    asked = {"longer": {"contrast": GAIN, "above": 0.01, "of": ["scores", "longer", "accuracy"]}}
    rows = rows_of(config := config_of(asked, scores={"longer": {}}))
    for row in rows[:12]:
        row["scores"] = {"longer": {"accuracy": helped(row)}}
    (judged,) = claims.judge_claims(config, rows)
    assert judged["missing"] == [6, 7] and judged["lost"] == [] and judged["exploratory"]
    rows[0] |= {"finite": False, "scores": {}}  # such a run is never scored
    (judged,) = claims.judge_claims(config, rows)
    assert judged["missing"] == [6, 7] and judged["lost"] == [0]


def test_all_claims_of_all_experiments_stand_in_one_figure(tmp_path, capsys, drawn):
    asked = {"it helps <more>": {"contrast": GAIN, "above": 0.05}}
    asked["later"] = {"contrast": GAIN, "above": 0, "of": ["log_steps", 0.4], "exploratory": True}
    rows = rows_of(config := config_of(asked), lambda run: 0.5 + run["seed"] / 100)
    helps, later = records = list(map(claims.record, claims.judge_claims(config, rows)))
    assert (helps["unit"], helps["verdict"], helps["estimate"], helps["threshold"]) == ("points", "not supported", 0, 5)
    assert (later["unit"], later["estimate"], later["seeds"]["0"]) == ("ratio of steps", 1, 1)
    for name in ("one", "two", "empty"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "claims.json").write_text(json.dumps({"claims": records if name != "empty" else []}))
    plot.main([str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path / 'claims.png'}\n"
    ratios, points = ([label.get_text() for label in axes.get_yticklabels()] for axes in drawn["claims.png"].axes)
    assert points == ["one", "it helps <more>", "two", "it helps <more>"] and ratios == ["one", "later", "two", "later"]
    weights = [label.get_fontweight() for label in drawn["claims.png"].axes[0].get_yticklabels()]
    assert weights == ["bold", "normal", "bold", "normal"]
    (tmp_path / "two" / "claims.json").write_text('{"claims": [{"name": 3}]}')
    with pytest.raises(UserError, match=r"two/claims.json: cannot be drawn \(KeyError: 'verdict'\)"):
        plot.main([str(tmp_path)])
