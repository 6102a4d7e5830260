"""What a comparison over paired seeds shows: an interval, an exact test, and one word as the verdict.

    supported       the whole 95% interval of the mean lies beyond the threshold, and Holm's correction leaves p < 0.05
    not supported   the whole interval lies short of the threshold
    inconclusive    neither of the two
    not run         fewer than two seeds have all values that the claim compares

A claim is about a contrast: {(setting, arm): weight}. The weighted values are summed within each seed, so that whatever
the runs of a seed share (data, order, initial weights) cancels. Three examples: {"gla gated": 1, "gla": -1} is the gain
of the gate on GLA; {"gla gated": 1, "gla": -1, "softmax gated": -1, "softmax": 1} is how much larger this gain is than
the gain on softmax; the same arms of two settings, with opposite signs, show how the gain changes between the settings.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy import stats

EXACT_SEEDS = 40  # up to this many seeds all sign patterns are counted; with more seeds, RANDOM_PATTERNS are drawn
RANDOM_PATTERNS = 100_000

WORDS = ("supported", "not supported", "inconclusive", "not run")


def contrast(rows: list[dict], weights: dict[tuple, float], path: Sequence[str]) -> dict[int, float]:
    """{seed: sum of weight * value}, for the seeds in which every (setting, arm) has a finite value.

    path: the keys that lead to the value in a row, ["accuracy"] or ["scores", "longer", "slices", "320/40"].
    """
    values = {((row.get("setting"), row["arm"]), row["seed"]): look_up(row, path) for row in rows}
    seeds = sorted({seed for _, seed in values})
    sums = {}
    for seed in seeds:
        found = [values.get((arm, seed)) for arm in weights]
        if all(value is not None and math.isfinite(value) for value in found):  # a run that diverged has None
            sums[seed] = sum(weight * value for weight, value in zip(weights.values(), found, strict=True))
    return sums


def look_up(row: dict, path: Iterable[str]) -> Any:
    """The value at the end of the path, or None."""
    for name in path:
        row = row.get(name) if isinstance(row, dict) else None
    return row


def judge(claims: Iterable[tuple[Sequence[float], float]]) -> list[dict]:
    """claims: [(values by seed, threshold), ...], one family -> [{verdict, mean, low, high, p, p_holm, p_exact, n}]."""
    judged = []
    for values, threshold in claims:
        result: dict = {"verdict": "not run", "n": len(values), "threshold": threshold}
        if len(values) >= 2:
            mean, low, high = t_interval(values)
            result |= {"mean": mean, "low": low, "high": high, "p": t_test(values, threshold)}
            result["p_exact"] = sign_flip_test(values, threshold)
        judged.append(result)
    run = [result for result in judged if "p" in result]
    for result, corrected in zip(run, holm([result["p"] for result in run]), strict=True):
        result["p_holm"] = corrected
        if result["low"] > result["threshold"] and corrected < 0.05:
            result["verdict"] = "supported"
        else:
            result["verdict"] = "not supported" if result["high"] < result["threshold"] else "inconclusive"
    return judged


def t_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high): Student's interval of the mean of at least two values."""
    mean, n = statistics.fmean(values), len(values)
    half = stats.t.ppf((1 + level) / 2, n - 1) * statistics.stdev(values) / math.sqrt(n)
    return mean, float(mean - half), float(mean + half)


def t_test(values: Sequence[float], threshold: float = 0.0) -> float:
    """Two-sided p of Student's test that the mean is the threshold. If all values are equal, it is 0 or 1."""
    difference, spread = statistics.fmean(values) - threshold, statistics.stdev(values)
    if spread == 0:
        return float(difference == 0)
    t = abs(difference) / spread * math.sqrt(len(values))
    return float(2 * stats.t.sf(t, len(values) - 1))


def sign_flip_test(values: Sequence[float], threshold: float = 0.0) -> float:
    """Two-sided p: the share of all sign patterns whose sum is at least as far from 0. It is never below 2 / 2^n.

    It is exact up to EXACT_SEEDS values: each sum is a sum over the first half plus a sum over the second half, so only
    2 * 2^(n/2) sums are listed instead of 2^n. With more values it is the share among RANDOM_PATTERNS fixed patterns.
    """
    differences = np.asarray(values) - threshold
    slack = 1e-12 * np.abs(differences).sum()  # rounding: the same numbers summed in another order
    observed = abs(differences.sum()) - slack
    if len(differences) > EXACT_SEEDS:
        signs = np.random.default_rng(0).choice(np.array([-1.0, 1.0]), (RANDOM_PATTERNS, len(differences)))
        return float((1 + (np.abs(signs @ differences) >= observed).sum()) / (1 + RANDOM_PATTERNS))
    first, second = (signed_sums(half) for half in np.array_split(differences, 2))
    second.sort()
    # the number of sums >= observed; by symmetry as many are <= -observed
    far = (len(second) - np.searchsorted(second, observed - first)).sum()
    return min(1.0, float(2 * far / 2 ** len(differences)))


def signed_sums(values: Iterable[float]) -> np.ndarray:
    """The 2^n sums of all sign patterns."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (1979): p-values that may all be compared with 0.05."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected
