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

import csv
import io
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import configurator
from base.files import parse_json, read_jsonl, read_regular
from configurator import UserError, key
from study import stats

# what a comparison has no number for is None
NOTHING = dict.fromkeys(("low", "high", "p", "least_p", "could_see"))
PATTERNS = 100_000  # of a permutation test whose groupings are too many to be listed


@dataclass
class Config:
    files: list[str] = key([], "two files: the numbers before a change, and after it")
    of: str | None = key(
        None, "JSON lines and CSV: the column of the numbers (None: the only one beside the seed)"
    )
    seed: str = key("seed", "JSON lines and CSV: the column of the seeds")


def main(argv: list[str]) -> None:
    program = "study/compare.py"
    config = configurator.load(
        Config, argv, positional="files", program=program, description=__doc__
    )
    if len(config.files) != 2:
        raise UserError(
            f"{len(config.files)} files: name two, the numbers before a change and after it"
        )
    before, after = config.files
    result = compare(
        read_numbers(before, config.of, config.seed), read_numbers(after, config.of, config.seed)
    )
    print(sentence(result, before, after, config.of))


def read_numbers(file: str, of: str | None, seed: str) -> dict[str, float]:
    """{seed: number} of a file; seeds are "#1", "#2" ... where it has none. Raises UserError."""
    if file.endswith(".jsonl"):
        return of_rows(read_jsonl(file), file, of, seed)
    text = read_regular(file, 1 << 26).decode("utf-8", errors="replace")
    if file.endswith(".csv"):
        return of_rows(list(csv.DictReader(io.StringIO(text))), file, of, seed)
    found = parse_json(text, file)
    if isinstance(found, list) and any(isinstance(one, dict) for one in found):
        return of_rows(found, file, of, seed)
    if isinstance(found, list):
        found = {f"#{i}": value for i, value in enumerate(found, 1)}
    if not isinstance(found, dict) or not found:
        raise UserError(
            f"{file}: must be a list of numbers, an object of seeds and numbers, or rows"
        )
    return {str(name): number(value, file, name) for name, value in found.items()}


def of_rows(rows: list[dict], file: str, of: str | None, seed: str) -> dict[str, float]:
    """{seed: number} of rows with a column for each. Raises UserError."""
    names = [name for name in rows[0] if name != seed] if rows and isinstance(rows[0], dict) else []
    if of is None and len(names) != 1:
        raise UserError(
            f"{file}: name the column of the numbers, as in --of={names[0] if names else 'val_loss'}"
        )
    column = names[0] if of is None else of
    found = {}
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict) or column not in row:
            raise UserError(f"{file}: its row {i} has no {column!r}")
        name = str(row.get(seed, f"#{i}"))
        if name in found:
            raise UserError(f"{file}: two rows have {seed} {name}; leave one row for each run")
        found[name] = number(row[column], file, name)
    return found


def number(value: Any, file: str, name: str) -> float:
    """A finite number. Raises UserError, also for a run that diverged: it is a result, and no
    number says which."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise UserError(
            f"{file}: {name}: {value!r} is no finite number; compare how many runs were lost instead"
        )
    return found


def compare(before: dict[str, float], after: dict[str, float]) -> dict:
    """What the numbers say of a difference: verdict, n (of each group), is_paired, difference
    (after minus before), low and high (None: open), p and the least that so few numbers can give,
    could_see (None: nothing to tell)."""
    has_seeds = not any(name.startswith("#") for name in (*before, *after))
    is_paired = has_seeds and before.keys() == after.keys()
    result: dict = {"is_paired": is_paired, "n": (len(before), len(after))}
    result["difference"] = statistics.fmean(after.values()) - statistics.fmean(before.values())
    if is_paired:
        result |= of_pairs([after[name] - before[name] for name in before])
    else:
        result |= of_groups(list(before.values()), list(after.values()))
    if result["least_p"] is None or result["least_p"] >= stats.LEVEL:
        result["verdict"] = stats.UNDECIDABLE
    else:
        result["verdict"] = "supported" if result["p"] < stats.LEVEL else "inconclusive"
    return result


def of_pairs(values: list[float]) -> dict:
    """The sign-flip test of the differences of each seed, its interval, and what it could have
    seen."""
    n = len(values)
    result: dict = dict(NOTHING)
    if n < 2:
        return result
    result["low"], result["high"] = stats.interval(values)
    result["p"] = stats.sign_flip_test(values)
    result["least_p"] = stats.smallest_p(n)
    seen = statistics.stdev(values) * stats.detectable(n, stats.LEVEL / 2)[0]
    result["could_see"] = seen if math.isfinite(seen) and seen > 0 else None
    return result


def of_groups(before: list[float], after: list[float]) -> dict:
    """The permutation test of two independent groups, Welch's interval, and what a t-test of them
    could have seen."""
    n, m = len(before), len(after)
    result: dict = dict(NOTHING)
    if min(n, m) < 2:
        return result
    groupings = math.comb(n + m, n)
    result["least_p"] = min(1.0, 2 / groupings) if groupings <= PATTERNS else 2 / PATTERNS
    scale = max(map(abs, before + after)) or 1.0

    def difference(x, y, axis):
        change = np.mean(x, axis=axis) - np.mean(y, axis=axis)
        return np.round(change / scale, 12)  # the same sums in another order are a tie

    test = scipy.stats.permutation_test(
        (after, before), difference, n_resamples=PATTERNS, vectorized=True, rng=0
    )
    result["p"] = float(test.pvalue)
    spread = math.sqrt(statistics.variance(before) / n + statistics.variance(after) / m)
    if spread > 0:
        welch = scipy.stats.ttest_ind(after, before, equal_var=False)
        ends = welch.confidence_interval()
        result["low"], result["high"] = float(ends.low), float(ends.high)
        quantiles = scipy.stats.t.isf(stats.LEVEL / 2, welch.df) + scipy.stats.t.isf(
            1 - stats.POWER, welch.df
        )
        result["could_see"] = float(spread * quantiles)
    return result


def sentence(result: dict, before: str, after: str, of: str | None) -> str:
    """What `compare` found, in words."""
    change, low, high = (result[name] for name in ("difference", "low", "high"))
    n, m = result["n"]
    runs = (
        f"{n} paired seeds" if result["is_paired"] else f"{n} runs before and {m} after, not paired"
    )
    direction = "higher" if change > 0 else "lower"
    words = [
        f"{result['verdict']}: {of or 'the mean'} of {after} is {abs(change):.4g} {direction} than of {before}"
    ]
    if low is not None:
        words.append(f"95% interval of the difference {low:+.4g} to {high:+.4g}")
    test = "exact sign-flip test" if result["is_paired"] else "permutation test"
    words.append(runs if result["p"] is None else f"{runs}, p {result['p']:.2g} ({test})")
    said = "; ".join(words) + "."
    if result["verdict"] == stats.UNDECIDABLE:
        least = (
            "no p at all" if result["least_p"] is None else f"no p under {result['least_p']:.2g}"
        )
        said += f" So few runs can give {least}: another seed alone may have made this difference. Add seeds."
    elif result["could_see"] is not None:
        said += f" 80% of such comparisons would see a difference of {result['could_see']:.4g}."
    return said


if __name__ == "__main__":
    configurator.run(main)
