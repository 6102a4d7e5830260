"""The statistics on made-up rows with known answers.

python -m pytest tests/test_stats.py
"""

import itertools
import math
import statistics

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from study import stats


@pytest.mark.parametrize(("n", "t"), [(2, 12.7062), (3, 4.3027), (5, 2.7764), (10, 2.2622), (401, 1.96591)])
def test_intervals_are_those_of_the_tables_of_student(n, t):
    values = [(-1.0) ** i for i in range(n)]
    mean, low, high = stats.t_interval(values)
    assert (high - mean, mean - low) == pytest.approx((t * statistics.stdev(values) / math.sqrt(n),) * 2, rel=1e-4)


def all_patterns(values, threshold, alternative):
    """The definition: the share of the 2^n sign patterns whose sum is at least as far out as the values' own."""
    differences = [value - threshold for value in values]
    sums = [
        sum(sign * difference for sign, difference in zip(signs, differences, strict=True))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    far = {"greater": lambda x: x, "less": lambda x: -x, "two-sided": abs}[alternative]
    return sum(far(total) >= far(sum(differences)) - 1e-12 for total in sums) / len(sums)


TENTHS = st.lists(st.integers(-6, 6), min_size=2, max_size=9)  # many ties: few different numbers


@given(TENTHS, st.sampled_from([0, 1, 0.5]), st.sampled_from(["greater", "less", "two-sided"]))
def test_the_sign_flip_test_is_the_share_of_all_patterns(tenths, threshold, alternative):
    values = [value / 10 for value in tenths]
    assert stats.sign_flip_test(values, threshold, alternative) == all_patterns(values, threshold, alternative)


@pytest.mark.parametrize("alternative", ["greater", "less", "two-sided"])
def test_the_sign_flip_test_is_scipys_permutation_test(alternative):
    values = np.random.default_rng(1).normal(0.1, 0.3, 12)
    theirs = scipy.stats.permutation_test(
        (values - 0.05,),
        np.mean,
        permutation_type="samples",
        alternative=alternative,
        vectorized=True,
        n_resamples=2**12,
    )
    assert stats.sign_flip_test(values, 0.05, alternative) == theirs.pvalue


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
    (judged,) = stats.judge([(many, {"above": 0.0})])
    assert judged["p_error"] == pytest.approx(math.sqrt(chance / stats.RANDOM_PATTERNS), rel=0.1)
    assert abs(judged["p"] - chance) < 5 * judged["p_error"]
    assert stats.sign_flip_test(many) == judged["p"]  # the patterns are fixed
    assert stats.sign_flip_test([1.0] * 60) == 2 / (1 + stats.RANDOM_PATTERNS) == stats.smallest_p(60)
    normal = np.random.default_rng(0).normal(0.3, 1, 60).tolist()
    assert stats.exact_interval(normal) == pytest.approx(stats.t_interval(normal)[1:], abs=0.03)


def test_interval_and_tests_by_hand():
    mean, low, high = stats.t_interval([1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)
    assert (mean, low, high) == pytest.approx((2.0, 2 - half, 2 + half), abs=1e-4)
    (judged,) = stats.judge([([1.0, 2.0, 3.0], {"above": 0.0})])
    # t = 2 sqrt(3), 2 degrees of freedom: p = 1 - t / sqrt(2 + t^2)
    assert judged["p_student"] == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-6)
    assert judged["p"] == 2 / 8 and (judged["low"], judged["high"]) == (-math.inf, math.inf)
    assert stats.sign_flip_test([1.0, 2.0, 3.0], alternative="greater") == 1 / 8
    assert stats.sign_flip_test([1.0, 2.0, -3.0]) == 1.0
    assert stats.sign_flip_test([0.1, 0.2, 0.3, 0.4, 0.5]) == 2 / 32
    # of six values two-sided the smallest mean is the bound: only the empty subset is left out, 2 / 64 < 0.05
    assert stats.exact_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (1.0, 6.0)
    # of seven, 0.025 * 128 = 3.2: three are left out, the empty one, {1} and {1, 2}; the next are {2} and {1, 3}
    assert stats.exact_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == (2.0, 6.0)
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


HIGH, MIXED, LOW = (
    [0.20, 0.22, 0.21, 0.19, 0.20, 0.23],
    [-0.1, 0.3, 0.0, 0.2, 0.1, 0.1],
    [-0.2, -0.1, -0.3, -0.1, -0.2, -0.1],
)


@pytest.mark.parametrize(
    ("values", "claim", "expected"),
    [
        (HIGH, {"above": 0.05}, "supported"),
        (HIGH[:5], {"above": 0.05}, "inconclusive"),  # 2 / 32 > 0.05
        (HIGH[:5], {"above": 0.05, "sides": 1}, "supported"),
        (HIGH[:4], {"above": 0.05, "sides": 1}, "inconclusive"),
        (HIGH, {"above": 0.30}, "not supported"),
        (MIXED, {"above": 0.05}, "inconclusive"),
        (LOW, {"above": 0.05}, "refuted"),
        (LOW, {"above": 0.0}, "refuted"),
        (LOW, {"above": -0.05}, "not supported"),  # it may be as low as the claim allows
        ([0.0] * 6, {"above": 0.05}, "not supported"),
        ([0.0] * 4, {"above": 0.05}, "inconclusive"),  # identical: no spread, but no certainty
        ([0.25] * 6, {"above": 0.25}, "inconclusive"),  # at the threshold: neither beyond nor short of it
        (HIGH, {"above": 0.30, "within": 0.25}, "equivalent"),
        (HIGH, {"within": 0.25}, "equivalent"),
        (HIGH, {"within": 0.215}, "inconclusive"),
        (HIGH, {"within": 0.1}, "not supported"),
        (HIGH, {"above": 0.05, "within": 0.25}, "supported"),
        (HIGH, {"above": 0.2, "in": 3}, "passed"),
        (HIGH, {"above": 0.2, "in": 4}, "failed"),
        (HIGH[:1], {"above": 0.05}, "not run"),
        ([], {"above": 0.05}, "not run"),
    ],
)
def test_the_word_follows_from_the_exact_test(values, claim, expected):
    assert stats.judge([(values, claim)])[0]["verdict"] == expected


def test_identical_differences_are_not_certain():
    (judged,) = stats.judge([([0.3 - 0.2, 0.5 - 0.4, 0.1, 0.7 - 0.6, 0.2 - 0.1], {"above": 0.0})])  # 0.1 to rounding
    assert judged["identical"] and judged["p"] == 2 / 32 and judged["verdict"] == "inconclusive"
    assert judged["p_student"] is judged["student_low"] is judged["student_high"] is None
    assert not stats.judge([(HIGH, {"above": 0.0})])[0]["identical"]


def test_a_claim_among_many_needs_more():
    close = [0.10, 0.30, 0.15, 0.35, 0.20, 0.25]
    (alone,) = stats.judge([(close, {"above": 0.05})])
    assert alone["verdict"] == "supported" and alone["p_holm"] == alone["p"] == 2 / 64
    together = stats.judge([(close, {"above": 0.05})] * 2 + [(close, {"above": 0.05, "in": 2})])
    assert [claim["verdict"] for claim in together] == ["inconclusive", "inconclusive", "passed"]
    assert together[0]["p_holm"] == 2 * alone["p"]  # a count is in no family
    banded = stats.judge([(close, {"above": 0.05, "within": 0.5})])[0]  # two questions
    assert banded["p_within"] == 1 / 64 and banded["p_within_holm"] == banded["p_holm"] == 2 / 64


def test_a_contrast_is_within_seeds_and_leaves_out_a_seed_that_lacks_a_run():
    scores = {"a": {0: 0.5, 1: 0.6, 2: math.nan, 3: 0.1}, "b": {0: 0.7, 1: 0.9, 2: 0.9}}
    rows = [{"arm": arm, "seed": seed, "accuracy": x} for arm, by_seed in scores.items() for seed, x in by_seed.items()]
    assert stats.contrast(rows, {(None, "b"): 1, (None, "a"): -1}, ["accuracy"]) == pytest.approx({0: 0.2, 1: 0.3})
