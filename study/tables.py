"""The tables of an experiment, made from its rows and from nothing else.

    print(summary(config, rows, claims.judge_claims(config, rows)))

page.py makes text and HTML of a table; report.py draws the figures and writes the page that shows everything.
"""

import collections
import statistics

from study import curves, gains, ranks, sinks, stats
from study.claims import claims_table
from study.names import joined, made_by, number, plain_arms
from study.page import Table


def summary(config, rows: list[dict], judged: list[dict]) -> str:
    """The whole report on the rows as text: tables and verdicts by setting, then the claims."""
    shown = [*parts(config, rows), claims_table(judged)]
    return "\n" + "\n\n".join(str(part) for part in shown if part) + "\n"


def parts(config, rows: list[dict]) -> list[str | Table]:
    """What the report has beside the claims: tables, and texts of one or more lines."""
    shown: list[str | Table | None] = []
    for setting in config.settings or [None]:
        here = [row for row in rows if row.get("setting") == setting]
        if not here:
            shown.append(f"{setting}: none of its runs has a row yet")
            continue
        shown += [table(config, here, setting), gains_table(config, here)]
        shown += [gains.lengths_table(here), sinks_table(here)]
    shown += [ranks.table(ranks.records(config, rows)), origins(rows)]
    return [part for part in shown if part]


def show(config, row: dict) -> str:
    end = number(row[config.metric])
    return f"accuracy {end:.1%}" if config.metric == "accuracy" else f"loss {end:.4f}"


def table(config, rows: list[dict], setting: str | None = None) -> Table:
    """One line per arm that shows every seed, and the mean with its interval; with solved_above also how many seeds
    solved the task, and how soon. The last column is the learning rate, where the rows name it.
    """
    is_accuracy, solved_above = config.metric == "accuracy", config.solved_above
    title = joined("End accuracy" if is_accuracy else "Validation loss at the end (nats a token)", setting, "by seed")
    form, cells, has_rates = ".1%" if is_accuracy else ".4f", [], any("learning_rate" in row["config"] for row in rows)
    for arm in dict.fromkeys(row["arm"] for row in rows):
        by_seed = {row["seed"]: row for row in rows if row["arm"] == arm}
        ends = {seed: number(row[config.metric]) for seed, row in by_seed.items()}
        low, high = stats.interval(list(ends.values()))
        line = [arm, *(f"{ends[seed]:{form}}" if seed in ends else "not run" for seed in config.seeds)]
        line += [f"{statistics.fmean(ends.values()):{form}}", "-" if low is None else f"{low:{form}} to {high:{form}}"]
        if solved_above is not None:
            reached = [step for row in by_seed.values() if (step := curves.steps_to(row, solved_above)) is not None]
            line.append(f"{sum(end > solved_above for end in ends.values())}/{len(ends)}")
            line.append(f"{statistics.median(reached):,.0f}" if reached else "-")
        if has_rates:
            rates = dict.fromkeys(row["config"].get("learning_rate") for row in by_seed.values())
            line.append(", ".join("-" if rate is None else f"{float(rate):g}" for rate in rates))
        cells.append(line)
    header = ["arm", *map(str, config.seeds), "mean", "95% interval"]
    header += ["solved", "steps to it"] * (solved_above is not None) + ["rate"] * has_rates
    return Table(title, header, cells)


def gains_table(config, rows: list[dict]) -> Table | None:
    """One line per arm that is compared with another (names.plain_arms). Not corrected.

    A gain is an accuracy minus the other's; of losses it is the difference. In a sweep both arms have the same
    learning rate; where each arm chose its own rate, the two rates may differ.
    """
    cells, is_loss = [], config.metric == "val_loss"
    for (setting, arm), other in plain_arms(rows).items():
        values = list(stats.contrast(rows, {(setting, arm): 1, (setting, other): -1}, [config.metric]).values())
        if len(values) >= 2:
            mean, low, high = stats.t_interval(values)
            interval = "identical in all seeds" if low is None else f"{low:+.4f} to {high:+.4f}"
            cells.append([arm, f"{mean:+.4f}", interval, str(len(values))])
    title = "Loss minus that of the same without a gate" if is_loss else "Gain over the same without a gate"
    header = ["arm", "difference" if is_loss else "gain", "Student's 95% interval", "seeds"]
    return Table(f"{title}: mean, not corrected for their number", header, cells) if cells else None


def sinks_table(rows: list[dict]) -> Table | None:
    """What token 0 gets by kind of query: a line per arm."""
    if not (rows := sinks.with_sinks(rows)):
        return None
    title = "token 0 by kind of query, means over the seeds; effective: written of it over the residual stream"
    header, *cells = sinks.table(rows)
    return Table(title, header, cells)


def origins(rows: list[dict]) -> str:
    """One line if the rows were made by different or unknown code, dtypes, devices or numbers of threads."""
    parts = []
    for name in ("code", "dtype", "device", "threads"):
        counts = collections.Counter(made_by(row, name) for row in rows)
        if len(counts) > 1 or None in counts:
            which = (f"{str(value or 'unknown')[:12]} ({count} of {len(rows)} rows)" for value, count in counts.items())
            parts.append(f"{name} {', '.join(which)}")
    return f"made by: {'; '.join(parts)}" if parts else ""
