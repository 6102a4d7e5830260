"""Did it help? Two files of numbers, one number for each seed, before and after a change, from any
project.

    python study/compare.py before.json after.json

A file is a JSON list of numbers, or an object {seed: number}. Where both files have the same seeds
the runs are paired, and the exact sign-flip test decides; else they are two independent groups, and
a permutation test of the means does, beside Welch's interval. The sentence that is printed has the
difference, after minus before, its 95% interval, p, and the difference that 80% of such comparisons
would have seen. docs/verdict.md has an example.
"""

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import configurator
from base.configurator import UserError, key
from base.files import read_json
from study import stats

PATTERNS = 100_000  # of a permutation test whose groupings are too many to be listed


@dataclass
class Config:
    files: list[str] = key([], "two files: the numbers before a change, and after it")


def main(argv: list[str]) -> None:
    config = configurator.load(
        Config, argv, positional="files", program="study/compare.py", description=__doc__
    )
    if len(config.files) != 2:
        words = "files: name two, the numbers before a change and after it"
        raise UserError(f"{len(config.files)} {words}")
    before, after = config.files
    print(sentence(compare(read_numbers(before), read_numbers(after)), before, after))


def read_numbers(file: str) -> dict[str, float]:
    """{seed: number} of a file; seeds are "#1", "#2" ... where it has none. Raises UserError, also
    for a run that diverged: it is a result, and no number says which."""
    found = read_json(file)
    if isinstance(found, list):
        found = {f"#{i}": value for i, value in enumerate(found, 1)}
    if not isinstance(found, dict) or not found:
        raise UserError(f"{file}: must be a list of numbers, or an object of seeds and numbers")
    for name, value in found.items():
        if type(value) not in (int, float):
            words = "is no number; compare how many runs were lost instead"
            raise UserError(f"{file}: {name}: {value!r} {words}")
    return found


def compare(before: dict[str, float], after: dict[str, float]) -> dict:
    """What the numbers say of a difference: verdict, n (of each group), is_paired, difference
    (after minus before) and, from two runs on, low, high, p, the least p that so few numbers can
    give, and could_see; None is what the runs leave open."""
    is_paired = before.keys() == after.keys() and "#1" not in before
    result: dict = {
        "is_paired": is_paired,
        "n": (len(before), len(after)),
        "difference": statistics.fmean(after.values()) - statistics.fmean(before.values()),
        "verdict": stats.UNDECIDABLE,
    }
    if min(result["n"]) < 2:
        return result
    if is_paired:
        result |= of_pairs([after[name] - before[name] for name in before])
    else:
        result |= of_groups(list(before.values()), list(after.values()))
    if result["least_p"] < stats.LEVEL:
        is_seen = result["p"] < stats.LEVEL
        result["verdict"] = "supported" if is_seen else "inconclusive"
    return result


def of_pairs(values: list[float]) -> dict:
    """The sign-flip test of the differences of each seed, its interval, and what it could have
    seen."""
    n = len(values)
    low, high = stats.interval(values)
    effect, _ = stats.detectable(n, stats.LEVEL / 2)
    return {
        "low": low,
        "high": high,
        "p": stats.sign_flip_test(values),
        "least_p": stats.smallest_p(n),
        "could_see": None if low is None else statistics.stdev(values) * effect,
    }


def of_groups(before: list[float], after: list[float]) -> dict:
    """The permutation test of two independent groups, Welch's interval, and what a t-test of them
    could have seen."""
    n, m = len(before), len(after)
    scale = max(map(abs, before + after)) or 1.0

    def difference(x, y, axis):
        change = np.mean(x, axis=axis) - np.mean(y, axis=axis)
        return np.round(change / scale, 12)  # the same sums in another order are a tie

    test = scipy.stats.permutation_test((after, before), difference, n_resamples=PATTERNS, rng=0)
    least_p = 2 / min(math.comb(n + m, n), PATTERNS)
    result = {"p": float(test.pvalue), "least_p": least_p, "low": None}
    spread = math.sqrt(statistics.variance(before) / n + statistics.variance(after) / m)
    if spread > 0:
        welch = scipy.stats.ttest_ind(after, before, equal_var=False)
        result["low"], result["high"] = welch.confidence_interval()
        quantiles = scipy.stats.t.isf([stats.LEVEL / 2, 1 - stats.POWER], welch.df)
        result["could_see"] = spread * quantiles.sum()
    return result


def sentence(result: dict, before: str, after: str) -> str:
    """What `compare` found, in words."""
    n, m = result["n"]
    change, p = result["difference"], result.get("p")
    direction = "higher" if change > 0 else "lower"
    said = (
        f"{result['verdict']}: the mean of {after} is {abs(change):.4g} {direction} than that of "
    )
    said += f"{before}; "
    if result.get("low") is not None:
        ends = f"{result['low']:+.4g} to {result['high']:+.4g}"
        said += f"95% interval of the difference {ends}; "
    runs, test = f"{n} runs before and {m} after, not paired", "permutation test"
    if result["is_paired"]:
        runs, test = f"{n} paired seeds", "exact sign-flip test"
    said += f"{runs}." if p is None else f"{runs}, p {p:.2g} ({test})."
    if result["verdict"] == stats.UNDECIDABLE:
        least = "no p at all" if p is None else f"no p under {result['least_p']:.2g}"
        few = "another seed alone may have made this difference"
        return f"{said} So few runs can give {least}: {few}. Add seeds."
    if result.get("low") is not None:
        said += f" 80% of such comparisons would see a difference of {result['could_see']:.4g}."
    return said


if __name__ == "__main__":
    configurator.run(main)
