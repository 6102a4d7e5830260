"""Did it help? Two files of numbers, one number for each seed, before and after a change, from any
project.

    python study/compare.py before.json after.json
    python study/compare.py before.csv after.jsonl --of=val_loss --seed=seed

A file is a JSON list of numbers or {seed: number}, or JSON lines or CSV with a column for the
number (`of`), and maybe one for the seed. Where both files have the same seeds the runs are paired,
and the exact sign-flip test decides; else they are two independent groups, and a permutation test
of the means does, beside Welch's interval. The sentence that is printed has the difference, after
minus before, its 95% interval, p, and the difference that 80% of such comparisons would have seen.
docs/verdict.md has an example.
"""

import contextlib
import csv
import io
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

import numpy as np
import scipy.stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import configurator
from base.configurator import UserError, key, show
from base.files import parse_json, read_jsonl, read_regular
from study import stats

PATTERNS = 100_000  # of a permutation test whose groupings are too many to be listed


@dataclass
class Config:
    files: list[str] = key([], "two files: the numbers before a change, and after it")
    of: str | None = key(
        None, "JSON lines and CSV: the column of the numbers (None: the only one beside the seed)"
    )
    seed: str = key("seed", "JSON lines and CSV: the column of the seeds")


def main(argv: list[str]) -> None:
    config = configurator.load(Config, argv, positional="files")
    if len(config.files) != 2:
        n = len(config.files)
        raise UserError(f"{n} files: name two, the numbers before a change and after it")
    before, after = config.files
    numbers = [read_numbers(file, config.of, config.seed) for file in config.files]
    print(sentence(compare(*numbers), before, after, config.of))


def read_numbers(file: str, of: str | None, seed: str) -> dict[str, float]:
    """{seed: number} of a file; seeds are "#1", "#2" ... where it has none. Raises UserError."""
    if file.endswith(".jsonl"):
        return of_rows(read_jsonl(file), file, of, seed)
    text = read_regular(file, 1 << 26).decode("utf-8", errors="replace")
    if file.endswith(".csv"):
        return of_rows(list(csv.DictReader(io.StringIO(text))), file, of, seed)
    found = parse_json(text, file)
    if isinstance(found, list):
        found = {f"#{i}": value for i, value in enumerate(found, 1)}
    if not isinstance(found, dict) or not found:
        raise UserError(f"{file}: must be a list of numbers, or an object of seeds and numbers")
    return {name: number(value, file, name) for name, value in found.items()}


def of_rows(rows: list[dict], file: str, of: str | None, seed: str) -> dict[str, float]:
    """{seed: number} of rows with a column for each. Raises UserError."""
    if of is None:
        columns = set(rows[0] if rows else ()) - {seed}
        if len(columns) != 1:
            raise UserError(f"{file}: name the column of the numbers, as in --of=val_loss")
        (of,) = columns
    found = {}
    for i, row in enumerate(rows, 1):
        if of not in row:
            raise UserError(f"{file}: its row {i} has no {of!r}")
        name = str(row.get(seed, f"#{i}"))
        if name in found:
            raise UserError(f"{file}: two rows have {seed} {name}; leave one row for each run")
        found[name] = number(row[of], file, name)
    return found


def number(value: Any, file: str, name: str) -> float:
    """A finite number. Raises UserError, also for a run that diverged: it is a result, and no
    number says which."""
    with contextlib.suppress(ValueError):
        found = float(str(value))  # True is no number, and 10**400 is infinite
        if math.isfinite(found):
            return found
    words = "is no finite number; compare how many runs were lost instead"
    raise UserError(f"{file}: {name}: {show(value)} {words}")


def compare(before: dict[str, float], after: dict[str, float]) -> dict:
    """What the numbers say of a difference: verdict, n (of each group), is_paired, difference
    (after minus before), low and high (None: open), p and the least that so few numbers can give,
    could_see (None: nothing to tell)."""
    has_seeds = not any(name.startswith("#") for name in before)
    is_paired = has_seeds and before.keys() == after.keys()
    difference = fmean(after.values()) - fmean(before.values())
    result: dict = {
        "is_paired": is_paired,
        "n": (len(before), len(after)),
        "difference": difference,
    }
    result |= {"low": None, "high": None, "p": None, "least_p": 1.0, "could_see": None}
    if min(result["n"]) > 1:
        if is_paired:
            result |= of_pairs([after[name] - before[name] for name in before])
        else:
            result |= of_groups(list(before.values()), list(after.values()))
    if result["least_p"] >= stats.LEVEL:
        return result | {"verdict": stats.UNDECIDABLE}
    is_seen = result["p"] < stats.LEVEL
    return result | {"verdict": "supported" if is_seen else "inconclusive"}


def of_pairs(values: list[float]) -> dict:
    """The sign-flip test of the differences of each seed, its interval, and what it could have
    seen."""
    low, high = stats.interval(values)
    seen = stdev(values) * stats.detectable(len(values), stats.LEVEL / 2, "p")
    return {
        "low": low,
        "high": high,
        "p": stats.sign_flip_test(values),
        "least_p": stats.smallest_p(len(values)),
        "could_see": seen if 0 < seen < math.inf else None,
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
    result = {"p": float(test.pvalue), "least_p": 2 / min(math.comb(n + m, n), PATTERNS)}
    spread = math.sqrt(variance(before) / n + variance(after) / m)
    if spread > 0:
        welch = scipy.stats.ttest_ind(after, before, equal_var=False)
        ends = welch.confidence_interval()
        result["low"], result["high"] = float(ends.low), float(ends.high)
        quantiles = scipy.stats.t.isf([stats.LEVEL / 2, 1 - stats.POWER], welch.df)
        result["could_see"] = float(spread * quantiles.sum())
    return result


def sentence(result: dict, before: str, after: str, of: str | None) -> str:
    """What `compare` found, in words."""
    change = result["difference"]
    low = result["low"]
    p = result["p"]
    n, m = result["n"]
    direction = "higher" if change > 0 else "lower"
    said = f"{result['verdict']}: {of or 'the mean'} of {after} is {abs(change):.4g} {direction}"
    said += f" than that of {before}; "
    if low is not None:
        said += f"95% interval of the difference {low:+.4g} to {result['high']:+.4g}; "
    if result["is_paired"]:
        runs = f"{n} paired seeds"
        test = "exact sign-flip test" if n <= stats.EXACT_SEEDS else "sign-flip test"
    else:
        runs = f"{n} runs before and {m} after, not paired"
        test = "permutation test"
    said += f"{runs}." if p is None else f"{runs}, p {p:.2g} ({test})."
    if result["verdict"] == stats.UNDECIDABLE:
        least = "no p at all" if p is None else f"no p under {result['least_p']:.2g}"
        few = "another seed alone may have made this difference"
        said += f" So few runs can give {least}: {few}. Add seeds."
    elif result["could_see"] is not None:
        said += f" 80% of such comparisons would see a difference of {result['could_see']:.4g}."
    return said


if __name__ == "__main__":
    configurator.run(main)
