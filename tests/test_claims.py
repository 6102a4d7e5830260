"""The claims of an experiment: how they are judged, what limits them, their lines and figures.

Rows are made by hand. The tests and intervals are in test_stats.py; test_rows.py judges the claims of results/.
"""

import math
import statistics

import pytest
from made_rows import GAIN, listed, rows_of

import experiment
from study import claims, report, stats


def config_of(asked, n=8, **keys):
    return listed(**dict(seeds=list(range(n)), claims=asked) | keys)


def cells_of(judged):
    return claims.cells_of(claims.record(judged))


def helped(run):
    return 0.5 + (run["arm"] == "gated") * (0.1 + run["seed"] / 1000)


def test_a_count_is_judged_when_all_its_runs_are_there_and_a_run_without_a_value_is_not_above():
    asked = {"most": {"contrast": "gated", "above": 0.4, "in": 2}}
    rows = rows_of(config := config_of(asked, 3), lambda run: {0: 0.5, 1: None, 2: 0.6}[run["seed"]])
    (judged,) = claims.judge_claims(config, rows)
    assert cells_of(judged) == ["passed", "+55.0", "over +40.0, in 2 seeds: 2", "points", *["-"] * 3, "2"]
    assert claims.remarks([claims.record(judged)]) == "no value in seeds 1: most"
    few = [row for row in rows if row["seed"] < 2]
    assert cells_of(*claims.judge_claims(config, few))[0] == "not run"
    some = config_of(asked, 3, seeds_of={"gated": [0, 1]})
    assert claims.judge_claims(some, few)[0]["verdict"] == "failed"  # no other seed is to be run
    asked["most"]["of"] = ["meters", "max_over_median"]  # which these rows do not have
    (judged,) = claims.judge_claims(config_of(asked, 3), rows)
    assert judged["verdict"] == "not run" and judged["flags"] == ["no value in seeds 0, 1, 2"]


APART = {"family": "apart", "family_reason": "another paper asks it"}


def test_a_claim_is_corrected_for_all_of_the_experiment_also_those_not_run_or_about_other_numbers():
    gain = {"contrast": GAIN, "above": 0.01}
    asked = {"a": gain, "b": gain | {"of": ["val_loss"]}, "late": gain | {"contrast": "late - none"}}
    asked |= {"mine": gain | APART, "look": gain | {"exploratory": True}}
    arms = {"none": {}, "gated": {"gate": "elementwise"}, "late": {"gate": "headwise"}}
    rows = rows_of(config := config_of(asked, arms=arms), helped)
    judged = {claim["claim"]: claim for claim in claims.judge_claims(config, [r for r in rows if r["arm"] != "late"])}
    assert judged.pop("late")["verdict"] == "not run"
    assert [claim["p_holm"] / claim["p"] for claim in judged.values()] == [3, 3, 1, 1]
    seen = judged["a"]["sd"] * stats.detectable(8, 0.05 / 2 / 3, "p")
    assert judged["a"]["detectable"] == pytest.approx(seen)
    words = [cells_of(claim)[0] for claim in judged.values()]
    assert words[0] == "supported" and words[-1] == "exploratory: supported"


def test_a_look_that_its_seeds_can_never_support_could_not_be_decided():
    arms = {"none": {}, "gated": {"gate": "elementwise"}, "late": {"gate": "headwise"}}
    gain = {"contrast": GAIN, "above": 0, "exploratory": True}
    asked = {"gated": gain, "late": gain | {"contrast": "late - none"}}
    words = {}
    for n in (6, 7):  # after Holm over two claims the least p is 0.062, then 0.031
        rows = rows_of(config := config_of(asked, n, arms=arms), lambda run: 0.5 + run["seed"] / 100)
        words[n] = {claim["verdict"] for claim in claims.judge_claims(config, rows)}
    assert words == {6: {stats.UNDECIDABLE}, 7: {"inconclusive"}}
    lower = config_of({"gated": gain}, 6)
    (judged,) = claims.judge_claims(lower, rows_of(lower, lambda run: 0.5 - (run["arm"] == "gated") * 0.1))
    assert judged["verdict"] == "refuted"  # a bound can still decide against the claim
    whole = config_of({"gated": gain}, 8)  # of which four seeds have run, and could show nothing
    rows = [row for row in rows_of(whole, helped) if row["seed"] < 4]
    (early,) = claims.judge_claims(whole, rows)
    assert early["verdict"] == stats.UNDECIDABLE


def test_a_verdict_that_holds_in_its_family_alone_is_flagged_with_p_over_all_declared_tests():
    gain = {"contrast": GAIN, "above": 0, "sides": 1}
    names = {f"claim {i}": gain | APART | {"family": f"family {i}"} for i in range(13)}
    asked = names | {"look": gain | {"exploratory": True}}
    rows = rows_of(config := config_of(asked), helped)
    *declared, look = claims.judge_claims(config, rows)
    assert {claim["verdict"] for claim in declared} == {"supported"}
    assert {claim["p_holm"] for claim in declared} == {2**-8} and {claim["p_all"] for claim in declared} == {13 * 2**-8}
    assert declared[0]["flags"] == ["in its family alone: p is 0.051 over all 13 tests of the experiment"]
    assert "p_all" not in look and look["flags"] == []
    band = {"same": gain | {"within": 0.05}, "more": gain}  # in a band, and over zero by less than it takes
    same, _ = claims.judge_claims(both := config_of(band), rows_of(both, lambda run: 0.5))
    assert same["verdict"] == "equivalent" and same["p_all"] == 3 * 2**-8  # and not the p of its threshold, 1
    twelve = config_of(dict(list(names.items())[:12]))
    assert claims.judge_claims(twelve, rows_of(twelve, helped))[0]["flags"] == []


def test_a_claim_that_its_seeds_cannot_support_is_refused_unless_it_is_exploratory(helpers):
    def error(seeds, **keys):
        return helpers.error_of(listed, seeds=list(range(seeds)), **keys)

    claim = {"contrast": GAIN, "above": 0.05}
    message = "claims: it helps: 5 seeds give no p under 0.062, so it cannot be supported; at most 6 are needed, or"
    assert error(5, claims={"it helps": claim}).startswith(message)
    assert "4 seeds give no p under 0.062" in error(4, claims={"it is equal": {"contrast": GAIN, "within": 0.05}})
    said = "6 seeds give no p under 0.062 after Holm's correction for 2 tests, so it cannot be supported; at most 7"
    assert said in error(6, claims={"a": claim, "b": claim})
    assert "4 seeds" in error(6, claims={"a": claim}, seeds_of={"gated": [0, 1, 2, 3]})
    for count, asked in [
        (6, {"a": claim}), (5, {"a": claim | {"sides": 1}}), (6, {"a": claim, "b": claim | APART}),
        (6, {"a": claim, "b": claim | {"in": 3}}), (2, {"a": claim | {"exploratory": True}}),
    ]:  # fmt: skip
        config_of(asked, count)
    listed(seeds=[0], claims={"a": claim}, claim_base={"exploratory": True})


def test_a_family_smaller_than_the_experiment_needs_its_reason_which_is_shown_and_kept(helpers):
    claim = {"contrast": GAIN, "above": 0.05}

    def error(of_claim, **base):
        return helpers.error_of(listed, claims={"a": claim | of_claim}, claim_base={"exploratory": True} | base)

    assert error({"family": "x"}).startswith("claims: a: family: say in family_reason why it is corrected for")
    assert "family_reason" in error({"family": "x", "family_reason": ""})
    asked = {"a": claim | {"family": "x"}, "b": claim | {"family": "y"}, "c": claim}
    config = config_of(asked, claim_base={"family_reason": "the paper's own"})
    line = "in a family smaller than the experiment, the paper's own: a; b"
    records = list(map(claims.record, claims.judge_claims(config, rows_of(config))))
    assert claims.remarks(records).splitlines()[-1] == line
    assert [(one["family"], one["family_reason"]) for one in records] == [
        ("x", "the paper's own"), ("y", "the paper's own"), (None, None),
    ]  # fmt: skip


def test_a_dry_run_says_what_each_claim_can_show():
    claim = {"contrast": GAIN, "above": 0.05}
    asked = {"it helps": claim | {"sides": 1}, "equal": {"contrast": GAIN, "within": 0.1}, "most": claim | {"in": 3}}
    config = config_of(asked, pair_spread=0.2)
    effect, band = (stats.detectable(8, 0.05 / 2, test) for test in ("p", "p_within"))  # two tests in the family
    assert claims.reach_table(config, []).cells == [
        ["it helps", "above", "8", "0.0078", "2", f"{20 * effect:.1f}", "points", "0.2, assumed"],
        ["equal", "within", "8", "0.0078", "2", f"{20 * band:.1f}", "points", "0.2, assumed"],
    ]
    rows = rows_of(config, lambda run: 0.5 + (run["arm"] == "gated") * 0.1 * run["seed"] / 7)
    spread = statistics.stdev(0.1 * seed / 7 for seed in range(8))
    seen = [f"{100 * spread * effect:.1f}", "points", f"{spread:.3g}, of 8 seeds"]
    assert claims.reach_table(config, rows).cells[0][5:] == seen
    others = [row | {"config": row["config"] | {"max_iters": 9}} for row in rows]  # of what the config was before
    assert "0.2, assumed" in experiment.listed(config, others)
    asked = {"equal": {"contrast": GAIN, "within": 0.1, "exploratory": True}}
    (few,) = claims.judge_claims(config_of(asked, 3), [row for row in rows if row["seed"] < 3])
    assert cells_of(few)[6] == "-"
    slow = config_of({"slow": {"contrast": "gated", "above": 5.0, "of": ["log_steps", 0.4]}}, pair_spread=0.2)
    effect = stats.detectable(8, 0.05 / 2, "p")
    factor = f"{math.exp(0.2 * math.sqrt(0.5) * effect):.2f}"  # and not a number of steps
    assert claims.reach_table(slow, []).cells[0][5:7] == [factor, "steps"]
    look = {"it helps": claim | {"exploratory": True}}
    (line,) = claims.reach_table(config_of(look, 3, pair_spread=0.2), []).cells
    assert line == ["it helps", "above", "3", "0.25", "1", "nothing", "points", "0.2, assumed"]


def test_an_outcome_with_two_modes_is_flagged_and_counted_beside_its_verdict():
    late = {2, 5}  # seeds in which the arm without a gate has not begun to copy
    config = config_of({"a": {"contrast": GAIN, "other_than": 0, "of": ["val_loss"]}}, metric="val_loss")

    def loss(run):
        copies = run["arm"] == "none" and run["seed"] not in late
        return (1.0 if copies else 1.5) + run["seed"] / 100

    (judged,) = claims.judge_claims(config, rows_of(config, loss))
    kept = claims.record(judged)
    assert kept["modes"] == {"split": "1.2850 nats a token", "over": {"gated": 8, "none": 2}, "n": 8, "p": 2 / 2**6}
    counts = "over 1.2850 nats a token are gated 8, none 2 of 8 seeds (sign test p 0.031)"
    assert kept["flags"] == [f"two modes, and a mean is neither: {counts}"]
    assert kept["verdict"] == "supported"
    rows = rows_of(config, lambda run: 1.0 + (run["arm"] == "gated") + run["seed"] / 100)
    (apart,) = claims.judge_claims(config, rows)  # each arm has one mode of its own
    assert claims.record(apart)["modes"] is None and apart["flags"] == []


def test_of_more_than_two_arms_the_contrast_is_what_may_have_two_modes_and_of_one_arm_there_is_no_test():
    arms = {"none": {}, "gated": {"gate": "elementwise"}, "late": {"gate": "headwise"}}
    asked = {
        "three": {"contrast": "gated - 0.5 * none - 0.5 * late", "above": 0},
        "one": {"contrast": "gated", "above": 0},
    }
    rows = rows_of(
        config := config_of(asked, arms=arms), lambda run: helped(run) + (run["arm"] == "gated") * (run["seed"] > 4) / 4
    )
    three, one = (claims.record(judged)["modes"] for judged in claims.judge_claims(config, rows))
    assert three["over"] == {"the contrast": 3} and one["over"] == {"gated": 3}
    assert three["p"] is one["p"] is None and one["split"] == "73.0 points"


# -- Flags -------------------------------------------------------------------------------------------------------------


def flags_of(values, choices=(), **keys):
    """The flags of the gain in made-up rows. values: {arm: accuracy}."""
    config = config_of({"a": {"contrast": GAIN, "above": 0}}, **keys)
    return claims.judge_claims(config, rows_of(config, lambda run: values[run["arm"]]), choices)[0]["flags"]


def test_a_verdict_at_the_ceiling_or_at_chance_is_flagged():
    assert flags_of({"none": 0.99, "gated": 1.0}) == ["ceiling: all arms are at the top"]
    assert flags_of({"none": 0.26, "gated": 0.25}) == ["floor: all arms are at chance"]  # of 4 pairs: a quarter
    assert flags_of({"none": 0.26, "gated": 0.6}) == flags_of({"none": 0.9, "gated": 1.0}) == []
    for arms in ({"none": 0.95, "gated": 0.96}, {"none": 0.3, "gated": 0.31}):  # not within a twentieth of either end
        assert flags_of(arms) == []
    # the queries of each slice count
    several = dict(data={"slices": "80/2,80/5,80/10,80/20", "vocab_size": 96, "train_size": 200, "val_size": 50})
    assert flags_of({"none": 4 / 37 + 0.04, "gated": 4 / 37}, **several) == ["floor: all arms are at chance"]


def test_a_pair_of_unlike_commits_dtypes_or_threads_is_flagged():
    rows = rows_of(config := config_of({"a": {"contrast": GAIN, "above": 0}}))
    rows = [row | {"git_commit": "a", "threads": 1, "dtype": "float32", "code_sha256": "x"} for row in rows]
    for change, mixed in [
        ({"git_commit": "b", "threads": 2}, ["threads"]),  # of the same code
        ({"code_sha256": "y", "dtype": "bfloat16"}, ["commits", "dtypes", "threads"]),
    ]:
        rows[0] |= change
        flags = claims.judge_claims(config, rows)[0]["flags"]
        assert flags == [f"mixed {name} within 1 of 8 seeds" for name in mixed]


def test_a_rate_at_the_end_of_its_grid_or_within_a_standard_error_is_flagged():
    values, keys = {"none": 0.5, "gated": 0.7}, dict(selection_seeds=[20, 21], learning_rates=[0.001, 0.01])
    chosen = {"rate": 0.01, "other": 0.001, "margin": 0.2, "error": 0.1, "is_edge": False, "values": {0.01: [0.5] * 5}}
    two_seeds = {"values": {0.01: [0.5, 0.6]}}
    none, gated = (chosen | {"arm": arm} for arm in ("none", "gated"))
    edge, margin = "edge: none chose 0.01 at the end of the grid", "0.01 and 0.001 are within a standard error"
    no_error = "margin: none's rate 0.01 over 0.001: one seed does not tell what noise is"
    for choices, expected in [
        ([none, gated], []),
        ([none | {"is_edge": True}, gated | {"error": 0.3}], [edge, f"margin: gated's rate {margin}"]),
        ([none | {"error": math.nan}, gated], [no_error]),
        ([none | two_seeds, gated | two_seeds], ["rates: a standard error of 2 seeds, too few to tell"]),
        ([{"arm": "none", "rate": None}], []),  # not chosen yet
    ]:
        assert flags_of(values, choices=choices, **keys) == expected


def test_arms_of_one_mixer_with_unlike_rates_are_flagged():
    values, low, high = {"none": 0.5, "gated": 0.7}, {"learning_rate": 0.001}, {"learning_rate": 0.01}
    gate = {"gate": "elementwise"}
    other = {"none": low, "gated": gate | high | {"attention": "gla"}}  # another mixer has a rate of its own
    assert flags_of(values, arms={"none": low, "gated": gate | high}) == ["rates differ: gated 0.01, none 0.001"]
    assert flags_of(values, arms={"none": low, "gated": gate | low}) == flags_of(values, arms=other) == []


# -- Looks, and all experiments together -------------------------------------------------------------------------------


def test_seeds_that_were_added_without_a_declared_look_make_a_claim_exploratory():
    config = config_of({"a": {"contrast": GAIN, "above": 0.0, "sides": 1}}, 12)

    def looked_at(n_seeds, planned):
        """The claim, of n_seeds seeds of twelve that have rows, each of which was planned with `planned`."""
        rows = [row for row in rows_of(config, helped) if row["seed"] < n_seeds]
        return claims.judge_claims(config, [row | {"planned_seeds": list(range(planned))} for row in rows])[0]

    whole = looked_at(12, planned=12)
    assert not whole["exploratory"] and whole["flags"] == [] and whole["p_holm"] == whole["p"] == 2**-12
    added = looked_at(12, planned=6)
    words = "seeds were added to the 6 that were planned at first, without a declared look"
    assert added["exploratory"] and added["flags"] == [words]
    assert cells_of(added)[0] == "exploratory: supported"
    early = looked_at(7, planned=12)  # before all seeds have run
    missing = "a look before all seeds have run, without 7, 8, 9, 10, 11"
    assert early["exploratory"] and early["flags"] == [missing]
    config = config_of(config.asked["claims"], seeds=[seed for seed in range(12) if seed != 7])
    assert looked_at(12, planned=12)["flags"] == ["seeds 7 were planned and are left out"]


def test_seeds_that_one_arm_alone_was_planned_with_are_not_left_out():
    arms = {"all": [{"planned_seeds": [0, 1, 2, 3]}], "few": [{"planned_seeds": [0, 1]}]}
    assert claims.undeclared_looks(arms, {"seeds": [0, 1], "missing": []}) == []


def test_the_claims_of_an_experiment_stand_in_one_figure(tmp_path, drawn):
    asked = {"it helps <more>": {"contrast": GAIN, "above": 0.05}}
    asked["later"] = {"contrast": GAIN, "above": 0, "of": ["log_steps", 0.4], "exploratory": True}
    rows = rows_of(config := config_of(asked), lambda run: 0.5 + run["seed"] / 100)
    helps, later = records = list(map(claims.record, claims.judge_claims(config, rows)))
    assert (helps["unit"], helps["verdict"], helps["estimate"], helps["threshold"]) == ("points", "not supported", 0, 5)
    assert (later["unit"], later["estimate"], later["seeds"]["0"]) == ("ratio of steps", 1, 1)
    units = [claims.unit_of(of, {"gated": 1.0}) for of in (["lost", 0.9], ["step_ms"], ["log_steps", 0.9])]
    assert units == ["points", "as in the rows", "steps"]  # results/ has the others
    assert claims.unit_of(["meters", "kinds", "share", "loss"], {"a": 1.0}) == claims.unit_of(["loss"], {"a": 1.0})
    of_log = [claims.unit_of(["log", "val_loss"], weights) for weights in ({"a": 1.0}, {"a": 1.0, "b": -1.0})]
    assert of_log == ["geometric mean", "ratio"]  # of one arm it is no ratio
    report.claims_figure(records, tmp_path / "claims.png", {})
    points, ratios = ([label.get_text() for label in axes.get_yticklabels()] for axes in drawn["claims.png"].axes)
    assert (points, ratios) == (["it helps <more>: not supported"], [f"later: {later['verdict']}"])
    title = f"Claims: 1 not supported, 1 exploratory: {later['verdict']}"
    assert drawn["claims.png"].get_suptitle() == title
    assert report.claims_figure([], tmp_path / "claims.png", {}) == []
