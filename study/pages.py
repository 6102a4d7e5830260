"""Writes the numbers of the pages again, from claims.json and rows.jsonl. `make results` calls it:

    python study/pages.py

A page is Markdown. What stands between two marks is written here, and by nobody else:

    <!-- claims: sink -->           the claims of results/sink/claims.json, as a table
    ...
    <!-- end -->
    <!-- table: horizon gains -->   one of TABLES, at the end of this file: numbers of the rows
    ...
    <!-- end -->

    <!-- claim: sink: headwise halves the effective --> ... <!-- end -->    in a sentence: mean, interval and verdict of
                                                                            the claim whose name begins so
    <!-- verdict: sink: headwise halves the effective --> ... <!-- end -->  its verdict alone
    <!-- mean: horizon: none 1,500 - sigmoid 1,500: val_loss --> ... <!-- end -->    a contrast's mean and interval
    <!-- minutes: horizon --> ... <!-- end -->                              core-minutes: the seconds of the rows

A name that leads nowhere is an error. tests/test_pages.py fails where a page is not what this
script writes.
"""

import html
import math
import re
import sys
from collections.abc import Callable
from functools import partial
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
PAGES = ("README.md", "docs/gates.md", "results/README.md", "results/EARLIER.md")
MARK = re.compile(r"<!-- (\w+): ([^>]+?) -->(.*?)<!-- end -->", re.DOTALL)
# flags that a page repeats: those that say what a claim's rows are, and not how rates were chosen
# or where they ran
SHOWN_FLAGS = ("two modes", "a look", "seeds", "no value", "ceiling", "floor")

# {label: (arm without, arm with)}: the columns of a table
Columns = dict[str, tuple[str, str]]
# {label: (contrast, in which {0} is the arm without and {1} the arm with; the path to a number; its
# format)}: the lines
Lines = dict[str, tuple[str, str, str]]


def main(argv: list[str]) -> None:
    if argv:
        raise UserError("study/pages.py takes no keys: it writes the pages of results/ again")
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
        kind, what = found[1], found[2]
        if kind not in KINDS:
            raise UserError(f"{page}: <!-- {kind}: {what} -->: the marks are {', '.join(KINDS)}")
        try:
            inside = KINDS[kind](what)
        except UserError as error:
            raise UserError(f"{page}: <!-- {kind}: {what} -->: {error}") from error
        return f"<!-- {kind}: {what} -->{inside}<!-- end -->"

    ends = text.count("<!-- end -->")
    if not ends == len(re.findall(r"<!-- \w+: ", text)) == len(MARK.findall(text)):
        raise UserError(f"{page}: a mark has no <!-- end -->, or an end has no mark")
    return MARK.sub(made, text)


# -- Claims ----------------------------------------------------------------------------------------


def claims_of(experiment: str) -> list[dict]:
    return read_json(ROOT / "results" / experiment / "claims.json")["claims"]


def claims_table(experiment: str) -> str:
    """A line per claim, then the flags that a reader must know."""
    records = claims_of(experiment)
    header = ["claim", "asked", "mean (95% interval)", "unit", "verdict", "p (Holm)"]
    header += ["p over all", "could see", "seeds"]
    lines, notes = [], {}
    for one in records:
        _, mean, asked, unit, p, over_all, _, seen, n = claims.cells_of(one)
        asked = re.sub(r"[+]?\b0[.]0+\b", "0", asked).replace("+", "")
        asked += ", one-sided" * (one["sides"] == 1)
        name = html.escape(one["name"], quote=False)
        lines.append([name, asked, mean, unit, verdict_of(one), p, over_all, seen, n])
        for flag in one["flags"]:
            if flag.startswith(SHOWN_FLAGS):
                notes.setdefault(flag, []).append(name)
    text = markdown(header, lines)
    for flag, names in notes.items():
        few = f"*{'; '.join(names)}*"
        of = few if len(names) < 4 else f"{len(names)} of the {len(records)} claims"
        text += f"- {of}: {html.escape(flag, quote=False)}.\n"
    return text + "\n" * bool(notes)


def verdict_of(one: dict) -> str:
    """A verdict as pages write it: a dagger where it holds in its family alone."""
    mark = "†" if any(flag.startswith("in its family alone") for flag in one["flags"]) else ""
    return "exploratory, " * one["exploratory"] + f"**{one['verdict']}**{mark}"


def claim_named(what: str) -> dict:
    """EXPERIMENT: the beginning of a claim's name."""
    experiment, _, beginning = what.partition(": ")
    found = [one for one in claims_of(experiment) if one["name"].startswith(beginning)]
    if len(found) != 1:
        raise UserError(f"{len(found)} claims of {experiment} begin so; name one")
    return found[0]


def claim_in_line(what: str) -> str:
    one = claim_named(what)
    _, mean, *_ = claims.cells_of(one)
    return f"{mean}, {verdict_of(one)}"


def verdict_in_line(what: str) -> str:
    return verdict_of(claim_named(what))


# -- Rows ------------------------------------------------------------------------------------------


def compared(experiment: str) -> list[dict]:
    """The rows of the runs that are compared."""
    return [row for row in read_rows(ROOT / "results" / experiment) if "purpose" not in row]


def ends_of_trials(experiment: str, arm: str, rate: float) -> list[float]:
    """The losses at the end of the runs that chose the rate of an arm, at one of the rates."""
    ends = []
    for row in read_rows(ROOT / "results" / experiment):
        if "purpose" in row and (row["arm"], row["config"]["learning_rate"]) == (arm, rate):
            ends.append(row["val_loss"])
    return ends


def path_of(text: str) -> list:
    """The path of a claim, whose names have slashes between them here."""
    names: list = text.split("/")
    if names[0] in curves.METRICS:
        names[-1] = float(names[-1])
    return names


def values_of(rows: list[dict], contrast: str, path: str) -> list[float]:
    """A contrast of each seed."""
    return list(stats.contrast(rows, weights_of(contrast), path_of(path)).values())


def mean_in_line(what: str) -> str:
    """EXPERIMENT: CONTRAST: the names that lead to a number of a row."""
    if what.count(": ") != 2:
        words = "write EXPERIMENT: CONTRAST: the names that lead to a number, with spaces between"
        raise UserError(words)
    experiment, contrast, words = what.split(": ")
    path = words.replace(" ", "/")
    values = values_of(compared(experiment), contrast, path)
    if not values:
        raise UserError("no seed has these numbers")
    convert, form = claims.UNITS[claims.unit_of(path_of(path), weights_of(contrast))]
    low, high = stats.interval(values)
    text = f"{convert(fmean(values)):{form}}"
    return text if low is None else f"{text} ({convert(low):{form}} to {convert(high):{form}})"


def minutes_in_line(experiment: str) -> str:
    return f"{sum(row['seconds'] for row in read_rows(ROOT / 'results' / experiment)) / 60:,.0f}"


# -- Tables ----------------------------------------------------------------------------------------


def markdown(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n"


def mean(values: list[float], form: str) -> str:
    return f"{fmean(values):{form}}"


def span(values: list[float], form: str) -> str:
    return f"{fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def grid(
    experiment: str, columns: Columns, lines: Lines, cell: Callable = mean, is_by_column=False
) -> str:
    """A table of numbers of the rows, each the mean over the seeds of a contrast; "-": the arms do
    not have it. is_by_column: columns become lines."""
    rows, table = compared(experiment), [["", *columns]]
    for label, (contrast, path, form) in lines.items():
        line = [label]
        for arms in columns.values():
            values = values_of(rows, contrast.format(*arms), path)
            line.append(cell(values, form) if values else "-")
        table.append(line)
    if is_by_column:
        table = list(map(list, zip(*table, strict=True)))
    return markdown(table[0], table[1:])


def by_seed(experiment: str, columns: Lines) -> str:
    """A line per seed that has a number, and a column per contrast."""
    rows, lines = compared(experiment), {}
    for i, (contrast, path, form) in enumerate(columns.values(), 1):
        found = stats.contrast(rows, weights_of(contrast), path_of(path))
        for seed, value in found.items():
            line = lines.setdefault(seed, [str(seed)] + ["-"] * len(columns))
            line[i] = f"{value:{form}}"
    return markdown(["seed", *columns], [lines[seed] for seed in sorted(lines)])


def tried_rates(experiment: str, arms: list[str], rates: list[float]) -> str:
    """A line per arm, a column per rate: what each selection seed ended at."""
    lines = []
    for arm in arms:
        line = [arm]
        for rate in rates:
            ends = [f"{end:.3f}" for end in ends_of_trials(experiment, arm, rate)]
            line.append(", ".join(ends))
        lines.append(line)
    return markdown(["rate", *(f"{rate:g}" for rate in rates)], lines)


PARTS: Lines = {
    "all of the text": ("{0} - {1}", "val_loss", "+.3f"),
    "first eighth of a window": ("{0} - {1}", "loss/near", "+.3f"),
    "second half": ("{0} - {1}", "loss/far", "+.3f"),
    "behind 8 bytes that the window holds already": ("{0} - {1}", "loss/repeated", "+.3f"),
    "elsewhere": ("{0} - {1}", "loss/elsewhere", "+.3f"),
}
LOSSES: Lines = {
    "loss without": ("{0}", "val_loss", ".3f"),
    "loss with": ("{1}", "val_loss", ".3f"),
}


FIVE: Columns = {
    "softmax": ("softmax", "softmax sigmoid"),
    "cosFormer": ("cosformer", "cosformer sigmoid"),
    "GLA": ("gla", "gla sigmoid"),
    "Mamba-2": ("mamba2", "mamba2 sigmoid"),
    "Gated DeltaNet": ("gated_deltanet", "gated_deltanet sigmoid"),
}


def worth_of_flops() -> str:
    """What the gate's FLOPs would buy without it: as much of the fall of the loss from runs of
    1,500 steps to runs of 6,000 as they are of the logarithm of the steps."""
    rows = compared("one_harness")
    lines = [["more FLOPs a token"], ["worth, by the fall of the loss"], ["lower by"]]
    for none, sigmoid in FIVE.values():
        flops = fmean(values_of(rows, f"{sigmoid} - {none}", "log/flops_per_token"))
        (rate,) = set(values_of(rows, none, "config/learning_rate"))
        fall = fmean(ends_of_trials("one_harness", none, rate))
        fall -= fmean(values_of(rows, none, "val_loss"))
        lines[0].append(f"{math.exp(flops) - 1:.1%}")
        lines[1].append(f"{fall / math.log(6000 / 1500) * flops:.3f}")
        lines[2].append(f"{fmean(values_of(rows, f'{none} - {sigmoid}', 'val_loss')):+.3f}")
    return markdown(["", *FIVE], lines)


OF_SINK: Lines = {
    "weight on the first token": ("{0}", "meters/kinds/other/share", ".0%"),
    "effective sink": ("{0}", "meters/kinds/other/effective", ".3f"),
    "value norm": ("{0}", "meters/value_norm", ".2f"),
    "gate, idle": ("{0}", "meters/kinds/other/gate_mean/readout", ".2f"),
    "gate at triggers": ("{0}", "meters/kinds/trigger/gate_mean/readout", ".2f"),
    "gate on values, idle": ("{0}", "meters/kinds/other/gate_mean/value", ".2f"),
    "... at triggers": ("{0}", "meters/kinds/trigger/gate_mean/value", ".2f"),
}


def sinks(experiment: str, arms: list[str]) -> str:
    columns = {arm: (arm, arm) for arm in arms}
    return grid(experiment, columns, OF_SINK, cell=span, is_by_column=True)


LOSS, INDUCTION = "val_loss", "meters/induction"
TABLES: dict[str, Callable[[], str]] = {
    "horizon gains": partial(
        grid,
        "horizon",
        {
            "sigmoid, 1,500 steps": ("none 1,500", "sigmoid 1,500"),
            "sigmoid, 6,000": ("none", "sigmoid"),
            "from one (`sigmoid2`)": ("none", "wide"),
            "one per head": ("none", "headwise"),
        },
        LOSSES
        | PARTS
        | {
            "values under 0.1": ("{1}", "meters/gate_below_0.1/readout", ".0%"),
            "loss with these at zero": ("{1}", "scores/pruned/loss", ".4f"),
            "loss with weights and inputs in 8 bits": ("{1}", "scores/8 bits/loss", ".4f"),
            "... without the gate": ("{0}", "scores/8 bits/loss", ".4f"),
        },
    ),
    "horizon by seed": partial(
        by_seed,
        "horizon",
        {
            "loss, no gate": ("none", LOSS, ".3f"),
            "sigmoid": ("sigmoid", LOSS, ".3f"),
            "lower by": ("none - sigmoid", LOSS, "+.3f"),
            "... after 1,500 steps": ("none 1,500 - sigmoid 1,500", LOSS, "+.3f"),
            "induction, no gate": ("none", INDUCTION, ".1%"),
            "sigmoid ": ("sigmoid", INDUCTION, ".1%"),
            "from one": ("wide", INDUCTION, ".1%"),
            "one per head": ("headwise", INDUCTION, ".1%"),
        },
    ),
    "rivals on text": partial(
        grid,
        "rivals_on_text",
        {
            "sigmoid gate": ("none", "sigmoid"),
            "token's sink": ("none", "sink token"),
            "headwise gate": ("none", "headwise"),
            "head's sink": ("none", "sink head"),
            "softpick": ("none", "softpick"),
            "FoX": ("none", "FoX"),
        },
        LOSSES
        | PARTS
        | {
            "ms a step": ("{1}", "step_ms", ".0f"),
            "... without": ("{0}", "step_ms", ".0f"),
        },
    ),
    "rates of rivals": partial(
        tried_rates,
        "rivals_on_text",
        ["none", "sigmoid", "sink token"],
        [0.0015, 0.003, 0.006, 0.012],
    ),
    "gains of mixers": partial(
        grid,
        "one_harness",
        FIVE,
        {
            "rate without": ("{0}", "config/learning_rate", "g"),
            "rate with": ("{1}", "config/learning_rate", "g"),
        }
        | LOSSES
        | PARTS
        | {"lower at step 1,500, on 100,000 bytes, by": ("{0} - {1}", "at/1500", "+.3f")},
    ),
    "worth of FLOPs": worth_of_flops,
    "rates of softmax": partial(
        tried_rates,
        "one_harness",
        ["softmax", "softmax sigmoid"],
        [0.0015, 0.003, 0.006, 0.012],
    ),
    "sink": partial(
        sinks,
        "sink",
        [
            "none",
            "elementwise",
            "sigmoid2",
            "headwise",
            "elementwise@value",
            "static",
            "non_sparse",
            "gla",
            "mamba2",
            "gated_deltanet",
            "cosformer",
        ],
    ),
    "sink of rivals": partial(
        sinks,
        "sink_rivals",
        [
            "none",
            "elementwise",
            "headwise",
            "elementwise@value",
            "FoX",
            "softpick",
            "sink zero",
            "sink head",
            "sink token",
            "window",
        ],
    ),
    "log-linear": partial(
        grid,
        "log_linear",
        {
            "plain": ("plain", "plain sigmoid"),
            "Guo": ("guo", "guo sigmoid"),
            "merged": ("merged", "merged sigmoid"),
        },
        {
            "no convolution: accuracy after 1,500 steps": ("{0}", "accuracy", ".1%"),
            "... with a sigmoid gate": ("{1}", "accuracy", ".1%"),
            "convolution of 4: accuracy": ("conv {0}", "accuracy", ".1%"),
            "... with a sigmoid gate ": ("conv {1}", "accuracy", ".1%"),
        },
    ),
}


def table(name: str) -> str:
    if name not in TABLES:
        raise UserError(f"the tables are {', '.join(TABLES)}")
    return TABLES[name]()


KINDS: dict[str, Callable[[str], str]] = {
    "claims": claims_table,
    "claim": claim_in_line,
    "verdict": verdict_in_line,
    "mean": mean_in_line,
    "minutes": minutes_in_line,
    "table": table,
}

if __name__ == "__main__":
    configurator.run(main)
