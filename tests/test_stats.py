"""The statistics on made-up rows with known answers."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_rows import ROOT

from study import curves, stats
from study.rows import read_rows


def judge(values, claim):
    return stats.judge([(values, claim)])[0]


@pytest.mark.parametrize(("n", "t"), [(2, 12.7062), (3, 4.3027), (10, 2.2622), (401, 1.96591)])
def test_intervals_are_those_of_the_tables_of_student(n, t):
    values = [(-1.0) ** i for i in range(n)]
    mean, (low, high) = statistics.fmean(values), stats.t_interval(values)
    assert (high - mean, mean - low) == pytest.approx((t * statistics.stdev(values) / math.sqrt(n),) * 2, rel=1e-4)


def all_patterns(values, threshold, alternative):
    """The definition: the share of the 2^n sign patterns whose sum is at least as far out as the values' own."""
    differences = [value - threshold for value in values]
    patterns = itertools.product((1, -1), repeat=len(values))
    sums = [sum(sign * x for sign, x in zip(signs, differences, strict=True)) for signs in patterns]
    far = {"greater": lambda x: x, "less": lambda x: -x, "two-sided": abs}[alternative]
    return sum(far(total) >= far(sum(differences)) - 1e-12 for total in sums) / len(sums)


TENTHS = st.lists(st.integers(-6, 6), min_size=2, max_size=9)  # many ties: few different numbers


@given(TENTHS, st.sampled_from([0, 1, 0.5]), st.sampled_from(["greater", "less", "two-sided"]))
def test_the_sign_flip_test_is_the_share_of_all_patterns(tenths, threshold, alternative):
    values = [value / 10 for value in tenths]
    assert stats.sign_flip_test(values, threshold, alternative) == all_patterns(values, threshold, alternative)


@given(st.lists(st.integers(-40, 40), min_size=2, max_size=9, unique=True), st.sampled_from([1, 2]))
def test_the_interval_holds_the_thresholds_that_the_test_does_not_reject(numbers, sides):
    low, high = stats.exact_interval([float(number) for number in numbers], sides)
    level = stats.LEVEL / sides
    assert math.isinf(low) == math.isinf(high) == (1 / 2 ** len(numbers) >= level)
    for bound, tail, outward in ((low, "greater", -1), (high, "less", 1)):
        if math.isfinite(bound):  # at the bound the definition does not reject, and a little further out it does
            assert all_patterns(numbers, bound, tail) >= level > all_patterns(numbers, bound + outward * 1e-6, tail)


def test_sixteen_seeds_are_exact_and_of_more_patterns_are_drawn():
    assert stats.sign_flip_test([1.0] * stats.EXACT_SEEDS) == 2 / 2**stats.EXACT_SEEDS
    many = [0.1] * 40 + [-0.1] * 20
    chance = 2 * sum(math.comb(60, k) for k in range(40, 61)) / 2**60  # 0.0135
    p = stats.sign_flip_test(many)
    assert abs(p - chance) < 5 * math.sqrt(chance / stats.RANDOM_PATTERNS)
    assert stats.sign_flip_test(many) == p  # the patterns are fixed
    assert stats.sign_flip_test([1.0] * 60) == 2 / (1 + stats.RANDOM_PATTERNS) == stats.smallest_p(60)


def test_holm_multiplies_the_smallest_p_by_the_most_and_never_lowers_one_below_a_smaller_one():
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


HIGH = [0.20, 0.22, 0.21, 0.19, 0.20, 0.23]
MIXED = [-0.1, 0.3, 0.0, 0.2, 0.1, 0.1]
LOW = [-0.2, -0.1, -0.3, -0.1, -0.2, -0.1]


@pytest.mark.parametrize(
    ("values", "claim", "expected"),
    [
        (HIGH, {"above": 0.05}, "supported"), (HIGH[:1], {"above": 0.05}, "not run"),
        (HIGH[:5], {"above": 0.05}, "inconclusive"),  # 2 / 32 > 0.05
        (HIGH[:5], {"above": 0.05, "sides": 1}, "supported"), (HIGH, {"above": 0.30}, "not supported"),
        (MIXED, {"above": 0.05}, "inconclusive"), (LOW, {"above": 0.0}, "refuted"),
        (LOW, {"above": -0.05}, "not supported"),  # it may be as low as the claim allows
        (LOW, {"other_than": 0.0}, "supported"),  # a change, if downwards
        (MIXED, {"other_than": 0.0}, "inconclusive"),
        ([0.01, -0.01, 0.02, -0.02, 0.0, 0.01], {"other_than": 0.0, "within": 0.1}, "equivalent"),
        ([0.0] * 6, {"above": 0.05}, "not supported"),
        ([0.0] * 4, {"above": 0.05}, "inconclusive"),  # identical: no spread, but no certainty
        ([0.25] * 6, {"above": 0.25}, "inconclusive"),  # at the threshold: neither beyond nor short of it
        (HIGH, {"above": 0.30, "within": 0.25}, "equivalent"), (HIGH, {"above": 0.05, "within": 0.25}, "supported"),
        (HIGH, {"within": 0.25}, "equivalent"), (HIGH, {"within": 0.215}, "inconclusive"),
        (HIGH, {"within": 0.1}, "not supported"), (LOW, {"within": 0.05}, "not supported"),
        (HIGH, {"above": 0.2, "in": 3}, "passed"), (HIGH, {"above": 0.2, "in": 4}, "failed"),
    ],
)  # fmt: skip
def test_the_word_follows_from_the_exact_test(values, claim, expected):
    assert judge(values, claim)["verdict"] == expected


def test_a_claim_among_many_needs_more():
    close = [0.10, 0.30, 0.15, 0.35, 0.20, 0.25]
    alone = judge(close, {"above": 0.05})
    assert alone["verdict"] == "supported" and alone["p_holm"] == alone["p"] == 2 / 64
    together = stats.judge([(close, {"above": 0.05})] * 2 + [(close, {"above": 0.05, "in": 2})])
    assert [claim["verdict"] for claim in together] == ["inconclusive", "inconclusive", "passed"]
    assert together[0]["p_holm"] == 2 * alone["p"]  # a count is in no family
    banded = judge(close, {"above": 0.05, "within": 0.5})  # two questions
    assert banded["p_within"] == 1 / 64 and banded["p_within_holm"] == banded["p_holm"] == 2 / 64


@pytest.mark.parametrize(("n", "sides"), [(6, 2), (8, 1), (13, 2)])
def test_an_effect_that_a_comparison_can_see_is_seen_in_four_cases_of_five(n, sides):
    rng, trials = np.random.default_rng(1), 300
    effect = stats.detectable(n, stats.LEVEL / sides, "p")
    alternative = "greater" if sides == 1 else "two-sided"
    draws = rng.normal(0, 0.3, (trials, n))
    seen = sum(stats.sign_flip_test(draw + 0.3 * effect, 0.0, alternative) < stats.LEVEL for draw in draws)
    assert seen / trials == pytest.approx(0.8, abs=0.05)
    band = stats.detectable(n, stats.LEVEL, "p_within")
    inside = sum(judge(draw.tolist(), {"within": 0.3 * band})["verdict"] == "equivalent" for draw in draws)
    assert inside / trials == pytest.approx(0.8, abs=0.05)


def test_what_seeds_can_see_is_that_of_the_tables_and_of_five_nothing_two_sided():
    # Cohen 1988: d = 0.5, one sample, two-sided 0.05, 80%: 34 pairs; d = 0.8: 15 pairs
    assert stats.detectable(34, 0.025, "p") == pytest.approx(0.495, abs=0.005)
    assert stats.detectable(15, 0.025, "p") == pytest.approx(0.78, abs=0.01)
    assert stats.detectable(5, 0.025, "p") == stats.detectable(5, 0.025, "p_within") == math.inf
    assert math.isfinite(stats.detectable(5, 0.05, "p"))


# -- Two modes ---------------------------------------------------------------------------------------------------------


def arms_of(experiment, of, *arms):
    """The values by seed of arms of results/."""
    rows = [row for row in read_rows(ROOT / "results" / experiment) if "purpose" not in row]
    return [list(stats.contrast(rows, {arm: 1.0}, of).values()) for arm in arms]


def test_two_modes_are_found_where_runs_of_an_arm_copy_or_do_not_and_solve_a_task_or_do_not():
    none, sigmoid = arms_of("horizon", ["val_loss"], "none", "sigmoid")
    split = stats.two_modes([none, sigmoid])
    copying = [seed for seed, score in enumerate(*arms_of("horizon", ["meters", "induction"], "none")) if score > 0.05]
    assert copying == [seed for seed, loss in enumerate(none) if loss < split] and len(copying) == 6
    assert all(loss > split for loss in sigmoid)
    accuracy = ["scores", "whole", "slices", "64"]
    assert 0.4 < stats.two_modes(arms_of("s3", accuracy, "gated_deltanet", "gated_deltanet to 2")) < 0.65
    assert stats.two_modes(arms_of("horizon", ["val_loss"], "none 1,500", "sigmoid 1,500")) is None
    assert stats.two_modes(arms_of("parity", accuracy, "gated_deltanet", "gated_deltanet to 2")) is None  # far apart


@pytest.mark.parametrize("n", [6, 8, 12, 20])
def test_of_normal_seeds_few_are_taken_for_two_modes_and_of_half_far_away_most_are_found(n):
    rng, trials = np.random.default_rng(n), 1500
    for shift in (0.0, 1.5, 3.0):
        normal = rng.normal(size=(trials, 2, n)) + [[0.0], [shift]]
        assert sum(stats.two_modes(arms.tolist()) is not None for arms in normal) / trials < 0.025
    alone = rng.normal(size=(trials, 1, n))
    assert sum(stats.two_modes(arm.tolist()) is not None for arm in alone) / trials < 0.02
    mixed = rng.normal(size=(trials, 2, n)) + 6 * (rng.random((trials, 2, n)) < 0.5)
    assert sum(stats.two_modes(arms.tolist()) is not None for arms in mixed) / trials > 0.65


@given(st.lists(st.integers(-50, 50), min_size=6, max_size=12).filter(lambda numbers: len(set(numbers)) > 2))
def test_the_split_is_the_middle_of_the_widest_gap_and_the_share_is_what_two_means_leave(numbers):
    values = sorted(map(float, numbers))
    gaps = {k: values[k] - values[k - 1] for k in range(2, len(values) - 1)}  # two or more on either side
    first = max(gaps, key=gaps.get)
    total = sum((value - statistics.fmean(values)) ** 2 for value in values)
    groups = values[:first], values[first:]
    left = sum((value - statistics.fmean(group)) ** 2 for group in groups for value in group)
    (split,), (share,) = stats.widest_gaps(np.array([values]))
    assert split == (values[first - 1] + values[first]) / 2 and share == pytest.approx(left / total, abs=1e-9)


def test_an_outlier_few_seeds_and_a_grid_of_two_values_are_no_two_modes():
    low, high = [0.0, 0.01, 0.02, 0.03], [1.0, 1.01, 1.02, 1.03]
    assert stats.two_modes([low + high]) == pytest.approx(0.515)
    assert stats.two_modes([low + low[:3] + high[:1]]) is None  # one seed alone
    assert stats.two_modes([low, low]) is stats.two_modes([low[:2] + high[:3]]) is None  # five seeds
    assert stats.two_modes([[0.0] * 4 + [1.0] * 4]) is None
    # of twenty seeds two are under a quarter
    assert stats.two_modes([[x / 100 for x in range(18)] + high[:2], [1 + x / 100 for x in range(20)]]) is None


def test_the_sign_test_counts_the_pairs_that_differ():
    assert stats.sign_test([True] * 6 + [False] * 2, [False] * 8) == 2 / 2**6
    assert stats.sign_test([True, False], [True, False]) == 1.0
    first, second = [True] * 7 + [False], [False] * 7 + [True]
    assert stats.sign_test(first, second) == stats.sign_test(second, first) == pytest.approx(2 * 9 / 2**8)


# -- Learning curves, contrasts, errors of a text ----------------------------------------------------------------------


def run_of(*values, horizon=None, finite=True, metric="accuracy"):
    curve = [[100 * i, value] for i, value in enumerate(values)]
    return {"curve": curve, "metric": metric, "finite": finite} | ({"horizon": horizon} if horizon else {})


def test_the_area_under_a_curve_is_its_mean_height_up_to_the_horizon():
    assert curves.area(run_of(0.0, 0.5, 1.0)) == 0.5
    assert curves.area(run_of(0.0, 1.0, horizon=400)) == 0.875  # it stopped early, and stays at 1
    assert curves.area(run_of(0.5) | {"horizon": 0}) == 0.5
    assert curves.area(run_of() | {"curve": [[300, 0.5], [400, 0.5]]}) == 0.5  # of a branch
    assert curves.area(run_of(0.0, 0.5, None, finite=False)) is curves.area(run_of(0.0, 0.5, finite=False)) is None


def test_steps_to_a_threshold_are_censored_at_the_horizon_and_two_censored_runs_are_a_tie():
    solved, unsolved = run_of(0.1, 0.8, 0.95), run_of(0.1, 0.2, 0.3)
    assert stats.look_up(solved, ["log_steps", 0.9]) == math.log(200)
    assert stats.look_up(unsolved, ["log_steps", 0.25]) == stats.look_up(unsolved, ["log_steps", 0.9]) == math.log(200)
    assert [stats.look_up(unsolved, ["lost", bar]) for bar in (0.25, 0.9)] == [0, 1]
    assert stats.look_up(run_of(0.1, 0.8, horizon=1000, finite=False), ["log_steps", 0.9]) == math.log(1000)
    assert stats.look_up(run_of(3.0, 2.0, 1.0, metric="val_loss"), ["log_steps", 2.5]) == math.log(100)
    assert stats.look_up(run_of(0.1, None, 0.95), ["log_steps", 0.9]) == math.log(200)  # a gap is not over it
    exactly = run_of(0.1, 0.9, 0.95)  # over the threshold, and not on it
    assert stats.look_up(exactly, ["log_steps", 0.9]) == math.log(200) and stats.look_up(exactly, ["lost", 0.95]) == 1
    assert stats.look_up({"loss": {"far": 2.0}}, ["log", "loss", "far"]) == math.log(2)
    assert stats.look_up({"meters": {"induction": [[0.1, None], [0.3, 0.2]]}}, ["meters", "induction"]) == 0.3
    assert stats.look_up({"val_loss": 0.0}, ["log", "val_loss"]) is None
    parts = [{"step": 0, "near": 3.0}, {"step": 100, "near": 2.0, "repeated": 0.9}, {"step": 200, "repeated": 0.7}]
    text = run_of(3.0, 2.0, 1.0, metric="val_loss") | {"loss_curve": parts}
    assert stats.look_up(text, ["log_steps", "repeated", 0.8]) == math.log(200)
    assert [stats.look_up(text, ["lost", "repeated", level]) for level in (0.8, 0.7)] == [0, 1]  # under it, not on it
    assert stats.look_up(text | {"finite": False}, ["lost", "repeated", 0.8]) == 1
    rows = [run_of(0.1, 0.2) | {"arm": arm, "seed": 0} for arm in "ab"]
    assert stats.contrast(rows, {"a": 1, "b": -1}, ["log_steps", 0.9]) == {0: 0}


def test_a_contrast_is_within_seeds_and_leaves_out_a_seed_that_lacks_a_run():
    scores = {"a": {0: 0.5, 1: 0.6, 2: math.nan, 3: 0.1}, "b": {0: 0.7, 1: 0.9, 2: 0.9}}
    rows = [{"arm": arm, "seed": seed, "accuracy": x} for arm, by_seed in scores.items() for seed, x in by_seed.items()]
    assert stats.contrast(rows, {"b": 1, "a": -1}, ["accuracy"]) == pytest.approx({0: 0.2, 1: 0.3})
    row = {"meters": {"induction": [[0.1, None], [0.2, 0.7, 0.3]]}}  # layers of unlike numbers of heads
    assert stats.look_up(row, ["meters", "induction"]) == 0.7
    assert stats.look_up({"scores": {"longer": {"loss": 1.0}}}, ["log", "scores", "longer"]) is None
    assert stats.look_up({"sinks": [{"step": 1}]}, ["sinks"]) is None


def test_a_run_that_has_solved_its_task_keeps_its_last_value_until_the_horizon():
    row = {"curve": [[0, 0.1], [50, 0.99]], "finite": True, "horizon": 200}
    assert [curves.value_at(row, step) for step in (0, 50, 150, 201)] == [0.1, 0.99, 0.99, None]
    assert curves.value_at(row | {"finite": False}, 150) is None
