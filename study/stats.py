"""What a comparison over paired seeds shows: an exact test, the interval that inverts it, and one
word as the verdict.

    supported       the test's p, corrected by Holm (1979) over the family, is under 0.05, and the mean is over the
                    threshold, or on either side of it if the claim is of a change ("other_than")
    not supported   the upper bound lies under the threshold that is to be exceeded
    refuted         the upper bound lies under zero, and that threshold does not
    equivalent      the claim declares a band ("within"), and two one-sided tests place the mean inside it
    inconclusive    none of these
    could not be    none of these, and the seeds could give no corrected p under 0.05: UNDECIDABLE, which
    decided         claims.judge_claims tells apart, since it knows the design
    passed, failed  a count ("in"): as many seeds as the claim asks for are above the threshold, or fewer
    not run         fewer than two seeds have all values that the claim compares; of a count, not all runs, or no values

A claim is about a contrast, {arm: weight}. The weighted values are summed within each seed, so that
whatever the runs of a seed share (data, order, initial weights) cancels.

The test flips the signs of the seeds' distances from the threshold, in all 2^n ways. It is exact if
their distribution is symmetric about zero. Where one arm alone now and then loses a run, it is not,
and neither this interval nor Student's covers the mean: the claim to make then is about "lost"
(curves.py).
"""

import functools
import itertools
import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy import special, stats

from study import curves

LEVEL = 0.05
UNDECIDABLE = "could not be decided"
POWER = 0.8
# up to this many the power of the exact test is simulated; beyond, Student's is within 3% for a
# claim without a family
SIMULATED_SEEDS = 12
SIMULATIONS = 4000
# up to this many seeds all 2^n sign patterns are listed; with more, RANDOM_PATTERNS are drawn
EXACT_SEEDS = 16
RANDOM_PATTERNS = 100_000
MODES_LEVEL = 0.01  # the share of normal samples that would be taken for two modes
MODES_SEEDS = 6  # with fewer seeds nobody looks for two modes
NORMAL_SAMPLES = 20_000


def contrast(rows: list[dict], weights: dict[str, float], path: Sequence) -> dict[int, float]:
    """{seed: sum of weight * value}, for the seeds in which every arm has a finite value. weights:
    {arm: weight}; path: as `look_up` takes it; where it leads to no number there is no value."""
    by_run = {(row["arm"], row["seed"]): look_up(row, path) for row in rows}
    sums = {}
    for seed in sorted({seed for _, seed in by_run}):
        total = 0.0
        for arm, weight in weights.items():
            value = by_run.get((arm, seed))
            total += math.nan if value is None else weight * value
        if math.isfinite(total):
            sums[seed] = total
    return sums


def look_up(row: dict, path: Sequence) -> float | None:
    """The number at the end of the path, or None where it leads to none. These are the kinds of
    path:

        ["scores", "longer", "slices", "320/40"]    names, one within the other
        ["meters", "induction"]                     the same; of a list (here of heads) the largest
        ["log_steps", 0.9]                          a number of the learning curve (curves.METRICS)
        ["log", "val_loss"]                         the logarithm of what the rest leads to
    """
    first, *rest = path
    if first in curves.METRICS:
        return curves.METRICS[first](row, *rest)
    if first == "log":
        number = look_up(row, rest)
        return math.log(number) if number is not None and number > 0 else None
    value: Any = row
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, list) and not any(isinstance(part, dict | str) for part in value):
        # None is NaN; layers may differ in their numbers of heads
        parts = [np.array(part, dtype=float).ravel() for part in value]
        return float(np.nanmax(np.concatenate([[-math.inf], *parts])))
    return value if isinstance(value, int | float) else None


def judge(asked: Sequence[tuple[Sequence[float], dict]]) -> list[dict]:
    """One family of claims, [(the values of its seeds, claim)] -> what came of each, in order.
    Claims that have no two values yet count in the correction, as they will when they have run.

    A claim has a threshold, "above" or "other_than", or "within", half the width of a band around
    zero, or both. It has two "sides" if it names none. With "in", it is a count, and in no family.
    Each result holds

        verdict, n, threshold, sides
        over, needed                        of a count: numbers of seeds
        mean, sd, low, high                 of two values or more; low and high are the exact interval
        student_low, student_high           Student's interval, None of identical values
        p, p_holm                           of the sign flips about the threshold
        within, p_within, p_within_holm     of the two one-sided tests of a band
        detectable, detectable_within       what a comparison of this spread sees in 80% of cases: see `detectable`
    """
    judged, family = [], []
    for values, claim in asked:
        result = numbers_of(values, claim)
        judged.append(result)
        family += [(result, name, sides) for name, sides in tests_of(claim)]
    corrected = holm([result.get(name, 1.0) for result, name, _ in family])
    for (result, name, sides), p in zip(family, corrected, strict=True):
        if name not in result:
            continue
        result[f"{name}_holm"] = p
        if result["student_low"] is not None:  # the values differ
            seen = result["sd"] * detectable(result["n"], LEVEL / len(family) / sides, name)
            result["detectable" if name == "p" else "detectable_within"] = seen
    for (values, claim), result in zip(asked, judged, strict=True):
        if "mean" in result:
            result["verdict"] = verdict(values, result, either_way="other_than" in claim)
    return judged


def numbers_of(values: Sequence[float], claim: dict) -> dict:
    """What `judge` says of a claim but for the correction over its family: the verdict of a count,
    and "not run" of all others."""
    threshold, sides = threshold_of(claim), claim.get("sides", 2)
    result = {"verdict": "not run", "n": len(values), "threshold": threshold, "sides": sides}
    result["within"] = None  # a band is kept with its test
    if "in" in claim and values:
        over = sum(value > threshold for value in values)
        word = "passed" if over >= claim["in"] else "failed"
        return result | {"over": over, "needed": claim["in"], "verdict": word}
    if len(values) < 2:
        return result
    result["mean"] = fmean(values)
    result["sd"] = stdev(values)
    result["low"], result["high"] = exact_interval(values, sides)
    result["student_low"], result["student_high"] = t_interval(values, sides)
    if threshold is not None:
        tail = "greater" if sides == 1 else "two-sided"
        result["p"] = sign_flip_test(values, threshold, tail)
    if "within" in claim:
        band = claim["within"]
        low, high = sign_flip_test(values, -band, "greater"), sign_flip_test(values, band, "less")
        result |= {"within": band, "p_within": max(low, high)}
    return result


def threshold_of(claim: dict) -> float | None:
    """What a claim's mean is to be above, or other than; None if it is only to be within a band."""
    return claim.get("above", claim.get("other_than"))


def tests_of(claim: dict) -> list[tuple[str, int]]:
    """[("p" of the threshold or "p_within" of the band, sides)] of a claim; a count has no test."""
    tests = []
    if "in" not in claim and threshold_of(claim) is not None:
        tests.append(("p", claim.get("sides", 2)))
    if "within" in claim:
        tests.append(("p_within", 1))
    return tests


def verdict(values: Sequence[float], result: dict, either_way: bool) -> str:
    """The word for a claim whose numbers `judge` has computed."""
    threshold, band = result["threshold"], result.get("within")

    def is_beyond(bound, tail="less"):  # the interval's end is; the test says so despite rounding
        return sign_flip_test(values, bound, tail) < LEVEL / result["sides"]

    is_over = either_way or threshold is not None and result["mean"] > threshold
    if is_over and result["p_holm"] < LEVEL:
        return "supported"
    if band is not None and result["p_within_holm"] < LEVEL:
        return "equivalent"
    if either_way:
        return "inconclusive"
    if threshold is None:
        is_outside = is_beyond(-band) or is_beyond(band, "greater")
        return "not supported" if is_outside else "inconclusive"
    if threshold >= 0 and is_beyond(0.0):
        return "refuted"
    return "not supported" if is_beyond(threshold) else "inconclusive"


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (1979): p-values that may all be compared with 0.05."""
    order, n = np.argsort(p_values, kind="stable"), len(p_values)
    corrected = np.empty(n)
    corrected[order] = np.maximum.accumulate(np.array(p_values)[order] * np.arange(n, 0, -1))
    return corrected.clip(max=1.0).tolist()


@functools.cache
def subsets(n: int) -> np.ndarray:
    """(subsets, n), 1 for a member, else 0: the empty subset, then all 2^n - 1 others; of more than
    EXACT_SEEDS values RANDOM_PATTERNS others."""
    if n <= EXACT_SEEDS:
        return (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    drawn = np.random.default_rng(0).integers(0, 2, (RANDOM_PATTERNS, n))
    return np.concatenate([np.zeros_like(drawn[:1]), drawn])


def subset_means(values: Sequence[float]) -> np.ndarray:
    """The sorted means of the `subsets` of the values. The empty one comes first, as -inf.

    To flip the signs of the distances x - t in a subset leaves a sum as large as the observed one,
    or larger, if the subset's mean is at most t. So the share of these means that are at most t is
    the one-sided p of the threshold t, and the t whose p is 0.05 is one of them (Hartigan 1969,
    "Using subsample values as typical values").
    """
    members = subsets(len(values))
    sizes = members.sum(axis=1)
    means = members @ np.array(values) / np.maximum(sizes, 1)
    return np.sort(np.where(sizes > 0, means, -math.inf))


def sign_flip_test(
    values: Sequence[float], threshold: float = 0.0, alternative: str = "two-sided"
) -> float:
    """p of the hypothesis that the values are symmetric about the threshold: the share of all sign
    patterns whose sum is at least as far out; of more than EXACT_SEEDS values, of RANDOM_PATTERNS
    fixed patterns and the values' own, with a standard error of sqrt(p (1 - p) / RANDOM_PATTERNS).
    alternative: "greater", "less" or "two-sided", as in scipy.
    """
    if alternative == "two-sided":
        greater = sign_flip_test(values, threshold, "greater")
        less = sign_flip_test(values, threshold, "less")
        return min(1.0, 2 * min(greater, less))
    sign = 1 if alternative == "greater" else -1
    means = subset_means([sign * value for value in values])
    return float((means <= sign * threshold + rounding(values, threshold)).mean())


def exact_interval(values: Sequence[float], sides: int = 2) -> tuple[float, float]:
    """(low, high): the thresholds that the sign-flip test does not reject; with too few values it
    is the whole line. sides 2: the interval of 1 - LEVEL. sides 1: two bounds, each of which holds
    with 1 - LEVEL by itself."""

    def bound(numbers):  # the smallest t whose one-sided p is at least LEVEL / sides
        means = subset_means(numbers)
        return float(means[math.ceil(LEVEL / sides * len(means)) - 1])

    return bound(values), -bound([-value for value in values])


def t_interval(values: Sequence, sides: int = 2) -> tuple:
    """(low, high): Student's interval of the mean of at least two values, with the level of
    exact_interval; None, None for identical ones."""
    if are_identical(values):
        return None, None
    ends = stats.ttest_1samp(values, 0.0).confidence_interval(1 - 2 * LEVEL / sides)
    return float(ends.low), float(ends.high)


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """(low, high), the 95% interval of a mean that tables and figures show: exact where that is
    finite, from six values on, else Student's. None, None for fewer than two values, identical
    ones, or one that is not finite."""
    if len(values) < 2 or not np.isfinite(values).all():
        return None, None
    low, high = exact_interval(values)
    if are_identical(values) or not math.isfinite(low):
        return t_interval(values)
    return low, high


def two_modes(arms: Sequence[Sequence[float]]) -> float | None:
    """The split of an outcome with two modes, a number between them; None where the seeds show no
    two modes.

    arms: of each arm a value per seed. All values together are split at their widest gap. There are
    two modes if the means of the two groups leave a smaller share of the sum of squares than in all
    but MODES_LEVEL of normal samples as large (Engelman & Hartigan 1969 have that share where it is
    least), and the split goes through an arm: a quarter of its seeds, at least two, lie on either
    side. Where there are only two different values, they are a yes or no, or steps of a grid: None.

    Simulated, two arms of 6 to 20 seeds: of normal arms of one spread, however far apart, up to
    2.1% are taken for two modes; where one spreads five times as wide, up to 25%, since so few
    seeds look like a mixture then. Where in both arms half of the seeds lie five spreads away, 45%
    are found with 6 seeds, 67% with 8, 95% with 16; six away, 70%, 90%, all.
    """
    values = sorted(itertools.chain(*arms))
    n_seeds = len(arms[0])
    if n_seeds < MODES_SEEDS or len(set(values)) < 3:
        return None
    splits, shares = widest_gaps(np.array([values]))
    if shares[0] >= share_of_normals(len(values)):
        return None
    least = max(2, math.ceil(n_seeds / 4))
    for arm in arms:
        under = sum(value < splits[0] for value in arm)
        if least <= under <= n_seeds - least:
            return float(splits[0])
    return None


def widest_gaps(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of samples (S, n), each sorted: the middle of the widest gap with two values or more on
    either side (S,), and the share of the sum of squares about the mean that is left about the
    means of the two groups (S,)."""
    n, rows = samples.shape[1], np.arange(len(samples))
    gaps = samples[:, 2 : n - 1] - samples[:, 1 : n - 2]  # below the values 2 to n - 2
    first = gaps.argmax(axis=1) + 2  # the first value above the gap: so many lie under it
    is_low = np.arange(n) < first[:, None]  # (S, n)
    low = (samples * is_low).sum(axis=1) / first
    high = (samples * ~is_low).sum(axis=1) / (n - first)
    left = (samples - np.where(is_low, low[:, None], high[:, None])) ** 2
    total = (samples - samples.mean(axis=1, keepdims=True)) ** 2
    split = (samples[rows, first - 1] + samples[rows, first]) / 2
    return split, left.sum(axis=1) / total.sum(axis=1)


@functools.cache
def share_of_normals(n: int) -> float:
    """Of normal samples of n, MODES_LEVEL have a share under this one (see widest_gaps)."""
    samples = np.random.default_rng(0).normal(size=(NORMAL_SAMPLES, n))
    _, shares = widest_gaps(np.sort(samples, axis=1))
    return float(np.quantile(shares, MODES_LEVEL))


def sign_test(first: Sequence[bool], second: Sequence[bool]) -> float:
    """McNemar's exact test of paired yes and no: p of the pairs that differ, as throws of a fair
    coin."""
    differing = [one for one, other in zip(first, second, strict=True) if one != other]
    return float(stats.binomtest(sum(differing), len(differing)).pvalue) if differing else 1.0


def are_identical(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= rounding(values)


def rounding(values: Sequence[float], threshold: float = 0.0) -> float:
    """Numbers this close are equal: the same sums may be added up in another order."""
    return 1e-12 * (max(map(abs, values)) + abs(threshold))


def smallest_p(n: int, sides: int = 2) -> float:
    """The smallest p that n seeds can give: that of n values on one side of the threshold."""
    return min(1.0, sides / (2**n if n <= EXACT_SEEDS else RANDOM_PATTERNS + 1))


@functools.cache
def detectable(n: int, level: float, test: str) -> float:
    """What n seeds show in 80% of cases, where a one-sided p has to be under `level`, in units of the
    spread of the differences.

    test: "p": the effect, a mean so far over the threshold is seen to be over it. "p_within": the
    band, where the mean is zero, it is seen to lie within so much of zero. It is infinite if n seeds
    give no p under the level.

    Differences are taken as normal. Up to SIMULATED_SEEDS seeds these are quantiles over
    SIMULATIONS sets of differences around zero: a shift of all values shifts the bounds of the test
    with them. Beyond, the effect is that of Student's test, by the noncentral t, and the band
    is the critical t plus the normal quantile of (1 - POWER) / 2, over sqrt(n).
    """
    if smallest_p(n, 1) >= level:
        return math.inf
    if n > SIMULATED_SEEDS:
        critical = stats.t.isf(level, n - 1)
        effect = special.nctdtrinc(n - 1, 1 - POWER, critical)  # of the noncentral t
        band = critical + stats.norm.isf((1 - POWER) / 2)
        return float((effect if test == "p" else band) / math.sqrt(n))
    members = subsets(n)[1:]
    share = members / members.sum(axis=1, keepdims=True)
    rng = np.random.default_rng(0)
    k = math.ceil(level * 2**n) - 2
    low, high = [], []
    for _ in range(SIMULATIONS // 500):
        means = share @ rng.normal(size=(n, 500))
        means.partition((k, -1 - k), axis=0)
        low.extend(-means[k])
        high.extend(means[-1 - k])
    return float(np.quantile(low if test == "p" else np.maximum(low, high), POWER))
