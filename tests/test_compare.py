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
    """Writes both sides in a format and returns their paths."""

    def write(kind, before=BEFORE, after=AFTER):
        paths = []
        for name, numbers in (("before", before), ("after", after)):
            rows = [{"seed": seed, "val_loss": value, "steps": 10} for seed, value in numbers.items()]
            lines = ["seed,val_loss,steps", *(f"{row['seed']},{row['val_loss']},10" for row in rows)]
            texts = {
                "json": json.dumps(numbers), "csv": "\n".join(lines) + "\n",
                "jsonl": "".join(json.dumps(row) + "\n" for row in rows), "list.json": json.dumps([*numbers.values()]),
            }  # fmt: skip
            paths.append(tmp_path / f"{name}.{kind}")
            paths[-1].write_text(texts[kind], encoding="utf-8")
        return list(map(str, paths))

    return write


@pytest.mark.parametrize("kind", ["json", "csv", "jsonl"])
def test_files_of_every_kind_with_the_same_seeds_are_paired(kind, files, capsys):
    before, after = files(kind)
    compare.main([before, after, "--of=val_loss"])
    differences = [AFTER[seed] - BEFORE[seed] for seed in BEFORE]
    low, high = stats.exact_interval(differences)
    seen = capsys.readouterr().out
    words = (
        f"supported: val_loss of {after} is {-fmean(differences):.4g} lower than that of {before}; 95% interval of the "
    )
    assert seen.startswith(words + f"difference {low:+.4g} to {high:+.4g}; 6 paired seeds, p 0.031 (exact sign-flip")
    assert float(re.search(r"a difference of ([\d.]+)\.$", seen.strip())[1]) > 0


def test_runs_without_seeds_are_two_groups_and_their_p_is_that_of_all_regroupings(files, capsys):
    compare.main(files("list.json"))
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


FEW = [(1, 1, True), (5, 5, True), (1, 9, False), (3, 3, False), (3, 4, False)]


@pytest.mark.parametrize("n, m, is_paired", FEW)
def test_too_few_runs_could_not_be_decided_however_large_the_difference(n, m, is_paired, files, capsys):
    before, after = ({str(i): value + i / 1e6 for i in range(k)} for k, value in ((n, 3.0), (m, 1.0)))
    kind = "json" if is_paired else "list.json"
    compare.main(files(kind, before, after))
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
    before, after = files("csv")
    assert error_of(compare.main, [before]) == "1 files: name two, the numbers before a change and after it"
    assert "name the column of the numbers, as in --of=val_loss" in error_of(compare.main, [before, after])
    assert "its row 1 has no 'loss'" in error_of(compare.main, [before, after, "--of=loss"])
    for text, words in [
        ('{"1": NaN}', "NaN is no JSON"), ('{"1": "x"}', "'x' is no finite number"), ('{"1": true}', "no finite"),
        ("3", "must be a list of numbers"), ("[]", "must be a list of numbers"), ("{}", "must be a list"),
        (f"[1{400 * '0'}]", "is no finite number"), ("[[1]]", "no finite number"),
        ('[{"seed": 1, "a": 2}]', "no finite number"),
    ]:  # fmt: skip
        (tmp_path / "odd.json").write_text(text, encoding="utf-8")
        assert words in error_of(compare.main, [str(tmp_path / "odd.json"), before]), text
    (tmp_path / "odd.jsonl").write_text('{"seed": 1, "a": 2}\n{"seed": 1, "a": 3}\n', encoding="utf-8")
    assert "two rows have seed 1" in error_of(compare.main, [str(tmp_path / "odd.jsonl"), before])
