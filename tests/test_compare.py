"""study/compare.py: two files of numbers, and the sentence about them."""

import itertools
import json
import re
from statistics import fmean

import numpy as np
import pytest
from conftest import Helpers

from study import compare, stats

error_of = Helpers.error_of
BEFORE = {"1": 1.10, "2": 1.12, "3": 1.09, "4": 1.11, "5": 1.13, "6": 1.08}
AFTER = {"6": 1.079, "1": 1.09, "2": 1.10, "3": 1.085, "4": 1.10, "5": 1.10}  # in another order


@pytest.fixture
def files(tmp_path):
    """Writes both sides and returns their paths."""

    def write(before=BEFORE, after=AFTER, is_paired=True):
        paths = []
        for name, numbers in (("before", before), ("after", after)):
            paths.append(tmp_path / f"{name}.json")
            text = json.dumps(numbers if is_paired else [*numbers.values()])
            paths[-1].write_text(text, encoding="utf-8")
        return list(map(str, paths))

    return write


def test_files_with_the_same_seeds_are_paired(files, capsys):
    before, after = files()
    compare.main([before, after])
    differences = [AFTER[seed] - BEFORE[seed] for seed in BEFORE]
    low, high = stats.exact_interval(differences)
    seen = capsys.readouterr().out
    words = f"supported: the mean of {after} is {-fmean(differences):.4g} lower than that of {before}; 95% interval of "
    words += f"the difference {low:+.4g} to {high:+.4g}; 6 paired seeds, p 0.031 (exact sign-flip"
    assert seen.startswith(words)
    assert float(re.search(r"a difference of ([\d.]+)\.$", seen.strip())[1]) > 0


def test_runs_without_seeds_are_two_groups_and_their_p_is_that_of_all_regroupings(files, capsys):
    compare.main(files(is_paired=False))
    seen = capsys.readouterr().out
    values = [*BEFORE.values(), *AFTER.values()]
    found = fmean(AFTER.values()) - fmean(BEFORE.values())
    changes = []
    for chosen in itertools.combinations(range(12), 6):
        others = [values[i] for i in range(12) if i not in chosen]
        changes.append(fmean(others) - fmean(values[i] for i in chosen))
    p = 2 * min(
        fmean(change <= found + 1e-12 for change in changes), fmean(change >= found - 1e-12 for change in changes)
    )
    assert f"6 runs before and 6 after, not paired, p {p:.2g} (permutation test)" in seen
    assert seen.startswith("inconclusive: ")


@pytest.mark.parametrize("n, m, is_paired", [(1, 1, True), (5, 5, True), (1, 9, False), (3, 3, False)])
def test_too_few_runs_could_not_be_decided_however_large_the_difference(n, m, is_paired, files, capsys):
    before, after = ({str(i): value + i / 1e6 for i in range(k)} for k, value in ((n, 3.0), (m, 1.0)))
    compare.main(files(before, after, is_paired))
    seen = capsys.readouterr().out
    assert seen.startswith("could not be decided: ") and seen.strip().endswith("Add seeds.")
    assert f"{n} paired seeds" in seen or f"{n} runs before and {m} after" in seen


def test_a_difference_of_nothing_but_seeds_is_seldom_supported():
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(200):
        one, other = ({str(i): value for i, value in enumerate(rng.normal(size=8).tolist())} for _ in range(2))
        found += compare.compare(one, other)["verdict"] == "supported"
    assert 1 <= found <= 18  # 5% of 200, within three standard errors


def test_what_is_no_number_of_a_seed_is_one_line(files, tmp_path):
    before, _ = files()
    assert error_of(compare.main, [before]) == "1 files: name two, the numbers before a change and after it"
    for text, words in [
        ('{"1": NaN}', "NaN is no JSON"), ('{"1": "x"}', "'x' is no number"), ('{"1": true}', "True is no number"),
        ("3", "must be a list of numbers"), ("[]", "must be a list of numbers"), ("{}", "must be a list"),
        ("[[1]]", "is no number"), ('[{"seed": 1, "a": 2}]', "is no number"),
        ('{"1": 2, "1": 3}', "the key '1' stands there twice"),
    ]:  # fmt: skip
        (tmp_path / "odd.json").write_text(text, encoding="utf-8")
        assert words in error_of(compare.main, [str(tmp_path / "odd.json"), before]), text
