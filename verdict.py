"""What a comparison over paired seeds says: intervals, exact tests, and one word.

    supported       the whole 95% interval of the mean lies beyond the threshold, and Holm's correction leaves p < 0.05
    not supported   the whole interval lies short of the threshold
    inconclusive    anything else
    not run         fewer than two seeds have what the claim compares

A claim is a contrast: {(setting, arm): weight}, summed within each seed, so that what a seed's runs share (data, order,
initial weights) cancels. "gla gated" 1 and "gla" -1 is the gate's gain on GLA; with "softmax gated" -1 and "softmax" 1
added it is that gain over softmax's; with another setting's it is how much the gain changes between the two.
"""

import itertools
import math
import statistics

WORDS = ("supported", "not supported", "inconclusive", "not run")


def contrast(rows, weights, path):
    """{seed: sum of weight * value}, of the seeds in which every (setting, arm) has a finite value.

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


def look_up(row, path):
    """What lies there, or None."""
    for name in path:
        row = row.get(name) if isinstance(row, dict) else None
    return row


def judge(claims):
    """claims: [(values by seed, threshold), ...], one family -> [{verdict, mean, low, high, p, p_holm, p_exact, n}]."""
    judged = []
    for values, threshold in claims:
        result = {"verdict": "not run", "n": len(values), "threshold": threshold}
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


def t_interval(values, level=0.95):
    """(mean, low, high): Student's interval of the mean of at least two values."""
    mean, n = statistics.fmean(values), len(values)
    half = t_quantile((1 + level) / 2, n - 1) * statistics.stdev(values) / math.sqrt(n)
    return mean, mean - half, mean + half


def t_test(values, threshold=0.0):
    """Two-sided p of Student's test that the mean is the threshold. Values that are all the same leave no doubt."""
    difference, spread = statistics.fmean(values) - threshold, statistics.stdev(values)
    if spread == 0:
        return float(difference == 0)
    t = abs(difference) / spread * math.sqrt(len(values))
    return 2 * (1 - t_cumulative(t, len(values) - 1))


def sign_flip_test(values, threshold=0.0):
    """Exact two-sided p: the share of all sign patterns whose sum is at least as far from 0. 2 / 2^n at the least."""
    differences = [value - threshold for value in values]
    observed = abs(sum(differences)) * (1 - 1e-12)  # sums of the same numbers, in another order
    patterns = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in patterns]
    return sum(total >= observed for total in sums) / len(sums)


def holm(p_values):
    """Holm's step-down correction (1979): p values that may be read at 0.05 together."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def t_cumulative(t, freedom, steps=2000):
    """P(T <= t) for t >= 0, Student's t. The density in u, t = sqrt(freedom) tan(u), is cos(u)^(freedom - 1)."""
    end = math.atan(t / math.sqrt(freedom))
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(math.pi) * math.gamma(freedom / 2))
    width = end / steps
    weights = (1, *((4, 2) * (steps // 2))[: steps - 1], 1)  # Simpson's rule
    area = sum(w * math.cos(i * width) ** (freedom - 1) for i, w in enumerate(weights)) * width / 3
    return 0.5 + scale * area


def t_quantile(probability, freedom):
    """The t with P(T <= t) = probability, for probability >= 0.5."""
    low, high = 0.0, 1e5
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cumulative(middle, freedom) < probability else (low, middle)
    return high
