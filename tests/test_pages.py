"""The numbers of the pages are those of the rows: what stands between marks is what study/pages.py writes there."""

import re

import house
import pytest
from conftest import ROOT

from base.configurator import UserError
from study import pages

TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in pages.PAGES}


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_is_what_its_rows_give(name):
    assert pages.rewritten(TEXT[name], name) == TEXT[name], "run: make results"
    assert pages.MARK.search(TEXT[name])


def test_no_line_begins_with_a_number_of_the_rows():
    """A line that begins with a comment is HTML for Markdown: what follows on it would not be read."""
    for name, text in TEXT.items():
        assert not re.search(r"^\s*<!-- (mean|claim|verdict|minutes): ", text, re.M), name


def test_no_other_decimals_stand_in_the_prose_of_results():
    """One behind the point may be a size, a rate or a word's; two or more are measured, and so is an interval."""
    _, front = TEXT["README.md"].split("## The result\n")
    prose = house.prose_of(TEXT["results/README.md"] + front.split("\n## ")[0] + TEXT["docs/gates.md"])
    found = re.findall(r"\d[.]\d\d+(?!M\b)", prose)  # sizes of models
    assert [number for number in found if number != "0.05"] == []  # the level of a test


@pytest.mark.parametrize("name", ["horizon", "one_harness", "recall", "sink_rivals", "onset", "s3", "text"])
def test_every_claim_of_a_published_experiment_stands_in_a_table(name):
    (table,) = re.findall(rf"<!-- claims: {name} -->(.*?)<!-- end -->", "".join(TEXT.values()), re.DOTALL)
    assert table.count("\n| ") == len(pages.claims_of(name)) + 2


def test_an_edited_number_is_written_again_and_the_prose_around_it_stays():
    mark = "<!-- claim: sink: headwise halves the effective -->"
    page = f"Before {mark}+9.999<!-- end -->, behind.\n"
    made = pages.rewritten(page, "a page")
    assert made == f"Before {mark}+0.055 (+0.041 to +0.069), **supported**<!-- end -->, behind.\n"
    assert pages.rewritten("<!-- verdict: s3: beta to 2 --><!-- end -->", "") == (
        "<!-- verdict: s3: beta to 2 -->**supported**†<!-- end -->"
    )


@pytest.mark.parametrize(
    "mark, said",
    [
        ("claim: sink: headwise halves", "2 claims of sink begin so; name one"),
        ("claim: sink: nobody says this", "0 claims of sink begin so"),
        ("claims: no_such_experiment", "no_such_experiment"),
        ("tables: horizon gains", "the marks are claims, claim, verdict, mean, minutes, table"),
        ("mean: horizon: none - nobody: val_loss", "no seed has these numbers"),
        ("mean: horizon: none", "write EXPERIMENT: CONTRAST: the names that lead to a number"),
    ],
)
def test_a_mark_that_leads_nowhere_is_one_line(mark, said):
    with pytest.raises(UserError) as error:
        pages.rewritten(f"<!-- {mark} --><!-- end -->", "a page")
    assert str(error.value).startswith(f"a page: <!-- {mark} -->: ") and said in str(error.value)
    assert "\n" not in str(error.value)


def test_numbers_of_a_finished_experiment_stay_as_they_are():
    page = "<!-- table: old -->\n| 1.23 |\n<!-- end -->\n"
    assert pages.rewritten(page, "a page") == page


def test_a_mark_without_an_end_is_refused():
    for page in ("<!-- claims: sink -->\n", "<!-- end -->", "<!-- claims: sink --><!-- end --> <!-- end -->"):
        with pytest.raises(UserError, match="a page: a mark has no <!-- end -->, or an end has no mark"):
            pages.rewritten(page, "a page")


def test_a_table_says_which_verdicts_hold_in_their_family_alone_and_which_outcomes_have_two_modes():
    one = dict.fromkeys(("low", "high", "student_low", "student_high", "within", "detectable", "detectable_within"))
    one |= dict.fromkeys(("p_within_holm", "over", "needed")) | {"unit": "points", "either_way": True, "threshold": 0.0}
    one |= {"verdict": "supported", "exploratory": False, "estimate": 12.0, "p_holm": 0.01, "p_all": 0.2, "sides": 2}
    flags = ["in its family alone: p is 0.2 over all", "two modes, and a mean is neither: over 5", "rates: few"]
    records = [one | {"name": "a <s>", "seeds": {"0": 1.0}, "flags": flags}]
    *_, line, nothing, note, _, _ = pages.claims_table(records).split("\n")
    cells = ["a &lt;s&gt;", "other than 0", "+12.0", "points", "**supported**†", "0.01", "0.2", "-", "1"]
    assert line == f"| {' | '.join(cells)} |" and nothing == ""
    assert note == "- *a &lt;s&gt;*: two modes, and a mean is neither: over 5."
