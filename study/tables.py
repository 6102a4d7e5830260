"""The tables of an experiment, made from its rows and from nothing else.

    judged = claims.judge_claims(config, rows)
    print(summary(config, rows, judged))

page.py makes text and HTML of a table; report.py draws the figures and writes the page that shows everything.
"""

import collections
import math
import statistics

from study import curves, gains, ranks, sinks, stats
from study.claims import claims_table, made_by
from study.names import by_learning_rate, has_diverged, joined, number, plain_arms
from study.page import Table

HARM = 0.1  # nats over the best rate's loss: from there on a rate does harm


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
        shown += [table(config, here, setting), "\n".join(unlike_arms(here)), gains_table(config, here)]
        shown += [*slices_tables(here), gains.lengths_table(here), *sinks_tables(here)]
        if config.baseline is not None and {config.baseline, config.treatment} <= {row["arm"] for row in here}:
            shown.append(f"verdict: {verdict(config, here)}\ncost of the gate: {cost(config, here)}")
    if config.learning_rates and not config.selection_seeds:
        shown.append(divergence(rows))
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
    header = ["arm", *map(str, config.seeds), "mean", "95% interval"]
    header += [] if solved_above is None else ["solved", "steps to it"]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        by_seed = {row["seed"]: row for row in rows if row["arm"] == arm}
        ends = {seed: number(row[config.metric]) for seed, row in by_seed.items()}
        line = [arm, *(f"{ends[seed]:{form}}" if seed in ends else "not run" for seed in config.seeds)]
        line += [f"{statistics.fmean(ends.values()):{form}}", interval_text(list(ends.values()), form)]
        if solved_above is not None:
            steps = [curves.steps_to(row, solved_above) for row in by_seed.values()]
            reached = [step for step in steps if step is not None]
            line.append(f"{sum(end > solved_above for end in ends.values())}/{len(ends)}")
            line.append(f"{statistics.median(reached):,.0f}" if reached else "-")
        if has_rates:
            rates = dict.fromkeys(row["config"].get("learning_rate") for row in by_seed.values())
            line.append(", ".join("-" if rate is None else f"{float(rate):g}" for rate in rates))
        cells.append(line)
    return Table(title, [*header, *["rate"] * has_rates], cells)


def interval_text(values: list[float], form: str) -> str:
    """The 95% interval of the mean, as the figures draw it; "-" where there is none."""
    low, high = stats.interval(values)
    return "-" if low is None or high is None else f"{low:{form}} to {high:{form}}"


def unlike_arms(rows: list[dict]) -> list[str]:
    """A line for each of dtype, device and threads that differs between the arms of a seed; it names the first seed."""
    lines = []
    for name in ("dtype", "device", "threads"):
        by_seed = {}
        for row in rows:
            if made_by(row, name) is not None:
                by_seed.setdefault(row["seed"], {}).setdefault(made_by(row, name), []).append(row["arm"])
        unlike = {seed: arms for seed, arms in by_seed.items() if len(arms) > 1}
        for seed, arms in list(unlike.items())[:1]:
            which = "; ".join(f"{value}: {', '.join(own)}" for value, own in arms.items())
            lines.append(f"not paired: {name} differs between the arms of {len(unlike)} seeds (seed {seed}: {which})")
    return lines


def origins(rows: list[dict]) -> str:
    """One line if the rows were made by different or unknown code, dtypes, devices or numbers of threads."""
    parts = []
    for name, word in {"code_sha256": "code", "dtype": "dtype", "device": "device", "threads": "threads"}.items():
        counts = collections.Counter(made_by(row, name) for row in rows)
        if len(counts) > 1 or None in counts:
            which = (f"{str(value or 'unknown')[:12]} ({count} of {len(rows)} rows)" for value, count in counts.items())
            parts.append(f"{word} {', '.join(which)}")
    return f"made by: {'; '.join(parts)}" if parts else ""


def gains_table(config, rows: list[dict]) -> Table | None:
    """One line per arm that is compared with another (names.plain_arms). Not corrected.

    A gain is an accuracy minus the other's; of losses it is the difference. In a sweep both arms have the same
    learning rate; where each arm chose its own rate, the two rates may differ.
    """
    cells, plain, setting = [], plain_arms(rows), rows[0].get("setting")
    for arm in dict.fromkeys(row["arm"] for row in rows):
        if (other := plain.get((setting, arm))) is None:
            continue
        values = list(stats.contrast(rows, {(setting, arm): 1, (setting, other): -1}, [config.metric]).values())
        if len(values) >= 2:
            mean, low, high = stats.t_interval(values)
            interval = "identical in all seeds" if low is None else f"{low:+.4f} to {high:+.4f}"
            solved = [] if config.solved_above is None else [compare_steps(config, rows, arm, other)]
            cells.append([arm, f"{mean:+.4f}", interval, *solved, str(len(values))])
    is_loss = config.metric == "val_loss"
    header = ["arm", "difference" if is_loss else "gain", "Student's 95% interval"]
    header += [] if config.solved_above is None else ["solved later, sooner, of seeds that both solve"]
    title = "Loss minus that of the same without a gate" if is_loss else "Gain over the same without a gate"
    return Table(f"{title}: mean, not corrected for their number", [*header, "seeds"], cells) if cells else None


def compare_steps(config, rows: list[dict], arm: str, other: str) -> str:
    """In how many of the seeds that both arms solve the first arm gets above solved_above later, and sooner."""
    steps = {(row["arm"], row["seed"]): curves.steps_to(row, config.solved_above) for row in rows}
    pairs = [(steps.get((arm, seed)), steps.get((other, seed))) for seed in config.seeds]
    both = [one - two for one, two in pairs if None not in (one, two)]
    later, sooner = sum(step > 0 for step in both), sum(step < 0 for step in both)
    return f"{later}, {sooner} of {len(both)}" if both else "-"


def slices_tables(rows: list[dict]) -> list[Table]:
    """A table per score: one line per arm, its accuracy by length/pairs, averaged over the seeds."""
    tables = []
    for name in rows[0].get("scored", {}):
        by_arm: dict = {row["arm"]: [] for row in rows}
        for row in rows:
            by_arm[row["arm"]] += [row["scores"][name].get("slices", {})] if name in row["scores"] else []
        slices = dict.fromkeys(part for scores in by_arm.values() for score in scores for part in score)
        cells = []
        for arm, scores in by_arm.items():
            values = ([score[part] for score in scores if score.get(part) is not None] for part in slices)
            cells.append([arm, *(f"{statistics.fmean(ends) if ends else math.nan:.1%}" for ends in values)])
        title = f"{name}: accuracy by length/pairs, means over the seeds"
        tables += [Table(title, ["arm", *slices], cells)] if slices else []
    return tables


def sinks_tables(rows: list[dict]) -> list[Table]:
    """What token 0 gets by kind of query: a line per arm."""
    rows = sinks.with_sinks(rows)
    if not rows:
        return []
    title = "token 0 by kind of query, means over the seeds; effective: written of it over the residual stream"
    header, *cells = sinks.table(rows)
    return [Table(title, header, cells)]


def divergence(rows: list[dict]) -> Table:
    """Where each arm diverges: its loss is not finite, or its validation loss is higher at the end than at first; and
    the highest rate whose mean loss is less than HARM above that of the best rate."""
    cells = []
    for setting in dict.fromkeys(row.get("setting") for row in rows):
        for arm, rates in by_learning_rate([row for row in rows if row.get("setting") == setting]).items():
            lost = [rate for rate, own in rates.items() if any(map(has_diverged, own))]
            ends = {r: statistics.fmean(row["val_loss"] for row in own) for r, own in rates.items() if r not in lost}
            harmless = [rate for rate, end in ends.items() if end < min(ends.values()) + HARM]
            highest = [f"{max(rates):g}" if rates else "none" for rates in (harmless, list(ends))]
            cells.append([joined(arm, setting), *highest, f"{min(lost):g}" if lost else "none"])
    return Table("", ["arm", f"highest within {HARM:g} nats of the best", "highest without", "diverges at"], cells)


def verdict(config, rows: list[dict]) -> str:
    """success, failure or in between, by the rules of the config, with the numbers behind the word."""
    base = [row for row in rows if row["arm"] == config.baseline]
    treated = [row for row in rows if row["arm"] == config.treatment]
    planned = [config.seeds_of.get(arm, config.seeds) for arm in (config.baseline, config.treatment)]
    found = [{row["seed"] for row in own} & set(seeds) for own, seeds in zip((base, treated), planned, strict=True)]
    if (n := sum(map(len, found))) < (total := sum(map(len, planned))):
        return f"not run yet ({n} of {total} runs have rows)"
    if not all(row["finite"] for row in base + treated):
        return "failure (a run was not finite)"
    gain = statistics.fmean(row["accuracy"] for row in treated) - statistics.fmean(row["accuracy"] for row in base)
    numbers = (
        f"({config.treatment} - {config.baseline} = {100 * gain:+.1f} points over {len(base)} seeds; success is above "
        f"{config.success_above:.0%} against below {config.success_below:.0%} in every seed, failure is within "
        f"{100 * config.failure_within:.0f} points)"
    )
    gated_high = all(row["accuracy"] > config.success_above for row in treated)
    if gated_high and all(row["accuracy"] < config.success_below for row in base):
        return f"success {numbers}"
    return f"failure {numbers}" if abs(gain) <= config.failure_within else f"in between {numbers}"


def cost(config, rows: list[dict]) -> str:
    """What the treatment costs beside the baseline: parameters, FLOPs and speed."""

    def median(name, arm):
        return statistics.median(number(row[name]) for row in rows if row["arm"] == arm)

    def more(name):
        return median(name, config.treatment) / median(name, config.baseline) - 1

    slower = 1 - median("tokens_per_second", config.treatment) / median("tokens_per_second", config.baseline)
    return (
        f"{more('n_params'):+.1%} parameters, {more('flops_per_token'):+.1%} FLOPs a token, "
        f"{-slower:+.1%} tokens/s in training (median over the runs, side by side on one machine)"
    )
