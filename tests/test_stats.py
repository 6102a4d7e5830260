"""The statistics on made-up rows with known answers.

python -m pytest tests/test_stats.py
"""

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from study import stats


@pytest.mark.parametrize(("n", "t"), [(2, 12.7062), (3, 4.3027), (5, 2.7764), (10, 2.2622), (401, 1.96591)])
def test_intervals_are_those_of_the_tables_of_student(n, t):
    values = [(-1.0) ** i for i in range(n)]
    mean, low, high = stats.t_interval(values)
    assert (high - mean, mean - low) == pytest.approx((t * statistics.stdev(values) / math.sqrt(n),) * 2, rel=1e-4)


def all_patterns(values, threshold):
    """The definition: the share of the 2^n sign patterns whose sum is at least as far from 0 as the values' own."""
    differences = [value - threshold for value in values]
    patterns = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in patterns]
    return sum(total >= abs(sum(differences)) - 1e-12 for total in sums) / len(sums)


@given(st.lists(st.integers(-6, 6), min_size=2, max_size=9), st.sampled_from([0, 1, 0.5]))
def test_the_sign_flip_test_is_the_share_of_all_patterns(tenths, threshold):  # many ties: few different numbers
    values = [value / 10 for value in tenths]
    assert stats.sign_flip_test(values, threshold) == all_patterns(values, threshold)


def test_forty_seeds_are_exact_and_more_are_drawn():
    low = [0.1] * 20 + [-0.1] * 10  # 30 coins: at least 20 on one side
    chance = 2 * sum(math.comb(30, k) for k in range(20, 31)) / 2**30
    assert stats.sign_flip_test(low) == pytest.approx(chance, rel=1e-12)
    assert stats.sign_flip_test([1.0] * stats.EXACT_SEEDS) == 2 / 2**stats.EXACT_SEEDS
    many = [0.1] * 40 + [-0.1] * 20
    chance = 2 * sum(math.comb(60, k) for k in range(40, 61)) / 2**60  # 0.0135
    assert stats.sign_flip_test(many) == pytest.approx(chance, rel=0.1)
    assert stats.sign_flip_test(many) == stats.sign_flip_test(many)
    assert stats.sign_flip_test([1.0] * 60) == 1 / (1 + stats.RANDOM_PATTERNS)  # the values' own pattern


def test_interval_and_tests_by_hand():
    mean, low, high = stats.t_interval([1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)
    assert (mean, low, high) == pytest.approx((2.0, 2 - half, 2 + half), abs=1e-4)
    # t = 2 sqrt(3), 2 degrees of freedom: p = 1 - t / sqrt(2 + t^2)
    assert stats.t_test([1.0, 2.0, 3.0]) == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-6)
    assert stats.sign_flip_test([1.0, 2.0, 3.0]) == 2 / 8
    assert stats.sign_flip_test([1.0, 2.0, -3.0]) == 1.0
    assert stats.sign_flip_test([0.1, 0.2, 0.3, 0.4, 0.5]) == 2 / 32
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


@pytest.mark.parametrize(
    ("values", "threshold", "expected"),
    [
        ([0.20, 0.22, 0.21, 0.19, 0.20], 0.05, "supported"),
        ([0.20, 0.22, 0.21, 0.19, 0.20], 0.30, "not supported"),
        ([-0.1, 0.3, 0.0, 0.2, 0.1], 0.05, "inconclusive"),
        ([0.0, 0.0, 0.0], 0.05, "not supported"),  # ties: no spread, and no doubt
        ([0.25, 0.25, 0.25], 0.25, "inconclusive"),  # at the threshold: neither beyond nor short of it
        ([0.2], 0.05, "not run"),
        ([], 0.05, "not run"),
    ],
)
def test_the_word_follows_from_the_whole_interval(values, threshold, expected):
    assert stats.judge([(values, threshold)])[0]["verdict"] == expected


def test_a_claim_among_many_needs_more():
    close = [0.10, 0.30, 0.15, 0.35, 0.20]
    (alone,) = stats.judge([(close, 0.05)])
    assert alone["verdict"] == "supported" and 0.01 < alone["p"] < 0.05
    together = stats.judge([(close, 0.05)] * 8)
    assert {claim["verdict"] for claim in together} == {"inconclusive"}
    assert together[0]["p_holm"] == pytest.approx(8 * alone["p"])


def test_a_contrast_is_within_seeds_and_leaves_out_a_seed_that_lacks_a_run():
    scores = {"a": {0: 0.5, 1: 0.6, 2: math.nan, 3: 0.1}, "b": {0: 0.7, 1: 0.9, 2: 0.9}}
    rows = [{"arm": arm, "seed": seed, "accuracy": x} for arm, by_seed in scores.items() for seed, x in by_seed.items()]
    assert stats.contrast(rows, {(None, "b"): 1, (None, "a"): -1}, ["accuracy"]) == pytest.approx({0: 0.2, 1: 0.3})
