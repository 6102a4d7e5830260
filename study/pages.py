"""Writes the numbers of the pages again, from claims.json and rows.jsonl. `make results` calls it:

    python study/pages.py

A page is Markdown. What stands between two marks is written here, and by nobody else:

    <!-- claims: sink --> ... <!-- end -->
        the claims of results/sink/claims.json, as a table
    <!-- claim: sink: headwise halves the effective --> ... <!-- end -->
        mean, interval and verdict of the claim whose name begins so, in a sentence
    <!-- verdict: sink: headwise halves the effective --> ... <!-- end -->
        its verdict alone
    <!-- mean: horizon: none 1,500 - sigmoid 1,500: val_loss --> ... <!-- end -->
        a contrast's mean and interval
    <!-- minutes: horizon --> ... <!-- end -->
        core-minutes: the seconds of the rows

A name that leads nowhere is an error. What stands between <!-- table: NAME --> and its end are
numbers of a finished experiment, which stay as they are. tests/test_pages.py fails where a page is
not what this script writes.
"""

import html
import re
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import configurator
from base.configurator import UserError
from base.files import read_json, read_regular, write_text
from study import claims, curves, stats
from study.arms import weights_of
from study.rows import read_rows

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "docs/gates.md",
    "results/README.md",
    "results/OTHERS.md",
    "results/EARLIER.md",
)
MARK = re.compile(r"<!-- (\w+): ([^>]+?) -->(.*?)<!-- end -->", re.DOTALL)
# flags that a page repeats: those that say what a claim's rows are, and not how rates were chosen
# or where they ran
SHOWN_FLAGS = ("two modes", "a look", "seeds", "no value", "ceiling", "floor")


def main(argv: list[str]) -> None:
    if argv:
        raise UserError("study/pages.py takes no keys: it writes the numbers of PAGES again")
    for name in PAGES:
        text = read_regular(ROOT / name, 1 << 24).decode("utf-8")
        made = rewritten(text, name)
        if made != text:
            write_text(ROOT / name, made)
        print(f"{name}: {'written' if made != text else 'as it was'}")


def rewritten(text: str, page: str) -> str:
    """The page with everything between its marks written again. Raises UserError for a mark that
    leads nowhere."""

    def made(found: re.Match) -> str:
        kind, what, inside = found.groups()
        if kind != "table":
            try:
                inside = written(kind, what)
            except UserError as error:
                raise UserError(f"{page}: <!-- {kind}: {what} -->: {error}") from error
        return f"<!-- {kind}: {what} -->{inside}<!-- end -->"

    ends = text.count("<!-- end -->")
    if not ends == len(re.findall(r"<!-- \w+: ", text)) == len(MARK.findall(text)):
        raise UserError(f"{page}: a mark has no <!-- end -->, or an end has no mark")
    return MARK.sub(made, text)


def written(kind: str, what: str) -> str:
    """What stands behind a mark."""
    if kind == "claims":
        return claims_table(claims_of(what))
    if kind == "claim":
        one = claim_named(what)
        _, mean, *_ = claims.cells_of(one)
        return f"{mean}, {verdict_of(one)}"
    if kind == "verdict":
        return verdict_of(claim_named(what))
    if kind == "mean":
        return mean_of(what)
    if kind == "minutes":
        rows = read_rows(ROOT / "results" / what)
        return f"{sum(row['seconds'] for row in rows) / 60:,.0f}"
    raise UserError("the marks are claims, claim, verdict, mean, minutes, table")


def claims_of(experiment: str) -> list[dict]:
    return read_json(ROOT / "results" / experiment / "claims.json")["claims"]


def claims_table(records: list[dict]) -> str:
    """A line per claim, then the flags that a reader must know."""
    header = ["claim", "asked", "mean (95% interval)", "unit", "verdict", "p (Holm)"]
    header += ["p over all", "could see", "seeds"]
    lines = [header, ["---"] * len(header)]
    notes = {}
    for one in records:
        _, mean, asked, unit, *numbers = claims.cells_of(one)
        asked = re.sub(r"[+]?\b0[.]0+\b", "0", asked).replace("+", "")
        if one["sides"] == 1:
            asked += ", one-sided"
        name = html.escape(one["name"], quote=False)
        lines.append([name, asked, mean, unit, verdict_of(one), *numbers])
        for flag in one["flags"]:
            if flag.startswith(SHOWN_FLAGS):
                notes.setdefault(flag, []).append(name)
    text = "\n\n"
    for line in lines:
        text += f"| {' | '.join(line)} |\n"
    text += "\n"
    for flag, names in notes.items():
        of = f"*{'; '.join(names)}*"
        if len(names) > 3:
            of = f"{len(names)} of the {len(records)} claims"
        text += f"- {of}: {html.escape(flag, quote=False)}.\n"
    return text + "\n" if notes else text


def verdict_of(one: dict) -> str:
    """A verdict as pages write it: a dagger where it holds in its family alone."""
    mark = "†" if any(flag.startswith("in its family alone") for flag in one["flags"]) else ""
    look = "exploratory, " if one["exploratory"] else ""
    return f"{look}**{one['verdict']}**{mark}"


def claim_named(what: str) -> dict:
    """The claim of EXPERIMENT: the beginning of its name."""
    experiment, _, beginning = what.partition(": ")
    found = [one for one in claims_of(experiment) if one["name"].startswith(beginning)]
    if len(found) != 1:
        raise UserError(f"{len(found)} claims of {experiment} begin so; name one")
    return found[0]


def mean_of(what: str) -> str:
    """Mean and interval of EXPERIMENT: CONTRAST: the names that lead to a number of a row."""
    if what.count(": ") != 2:
        words = "write EXPERIMENT: CONTRAST: the names that lead to a number, with spaces between"
        raise UserError(words)
    experiment, contrast, names = what.split(": ")
    path: list = names.split(" ")
    if path[0] in curves.METRICS:
        path[-1] = float(path[-1])
    rows = [row for row in read_rows(ROOT / "results" / experiment) if "purpose" not in row]
    weights = weights_of(contrast)
    values = list(stats.contrast(rows, weights, path).values())
    if not values:
        raise UserError("no seed has these numbers")
    unit = claims.unit_of(path, weights)
    numbers = [fmean(values), *stats.interval(values)]
    mean, low, high = (claims.convert(number, unit) for number in numbers)
    return claims.with_interval(mean, low, high, unit)


if __name__ == "__main__":
    configurator.run(main)
