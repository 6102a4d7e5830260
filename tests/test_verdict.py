"""The statistics on made-up rows with known answers.

python -m pytest tests/test_verdict.py
"""

import math

import pytest

import verdict


@pytest.mark.parametrize(
    ("freedom", "probability", "t"),
    [(1, 0.975, 12.7062), (2, 0.975, 4.3027), (4, 0.975, 2.7764), (9, 0.975, 2.2622), (4, 0.95, 2.1318)],
)
def test_t_quantiles_are_those_of_the_tables(freedom, probability, t):
    assert verdict.t_quantile(probability, freedom) == pytest.approx(t, abs=1e-4)
    assert verdict.t_cumulative(t, freedom) == pytest.approx(probability, abs=1e-5)


def test_interval_and_tests_by_hand():
    mean, low, high = verdict.t_interval([1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)
    assert (mean, low, high) == pytest.approx((2.0, 2 - half, 2 + half), abs=1e-4)
    # t = 2 sqrt(3), 2 degrees of freedom: p = 1 - t / sqrt(2 + t^2)
    assert verdict.t_test([1.0, 2.0, 3.0]) == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-6)
    assert verdict.sign_flip_test([1.0, 2.0, 3.0]) == 2 / 8
    assert verdict.sign_flip_test([1.0, 2.0, -3.0]) == 1.0
    assert verdict.sign_flip_test([0.1, 0.2, 0.3, 0.4, 0.5]) == 2 / 32
    assert verdict.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


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
    assert verdict.judge([(values, threshold)])[0]["verdict"] == expected


def test_a_claim_among_many_needs_more():
    close = [0.10, 0.30, 0.15, 0.35, 0.20]
    (alone,) = verdict.judge([(close, 0.05)])
    assert alone["verdict"] == "supported" and 0.01 < alone["p"] < 0.05
    together = verdict.judge([(close, 0.05)] * 8)
    assert {claim["verdict"] for claim in together} == {"inconclusive"}
    assert together[0]["p_holm"] == pytest.approx(8 * alone["p"])


def test_a_contrast_is_within_seeds_and_leaves_out_a_seed_that_lacks_a_run():
    scores = {"a": {0: 0.5, 1: 0.6, 2: math.nan, 3: 0.1}, "b": {0: 0.7, 1: 0.9, 2: 0.9}}
    rows = [{"arm": arm, "seed": seed, "accuracy": x} for arm, by_seed in scores.items() for seed, x in by_seed.items()]
    assert verdict.contrast(rows, {(None, "b"): 1, (None, "a"): -1}, ["accuracy"]) == pytest.approx({0: 0.2, 1: 0.3})
