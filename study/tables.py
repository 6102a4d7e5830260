"""The tables and verdicts of an experiment, made from its rows and from nothing else.

    judged = judge_claims(config, rows)
    print(summary(config, rows, judged))

stats.py computes the statistics; page.py makes text and HTML of a table; report.py draws the figures and writes the
page that shows everything.
"""

import collections
import math
import statistics
from collections.abc import Iterable
from typing import Any

from study import curves, gains, lengths, mixers, power, ranks, report, sinks, stats
from study.claims import BEYOND, distance_shown, notes, number_shown
from study.page import Table

HARM = 0.1  # nats over the best rate's loss: from there on a rate does harm


def number(value: float | None) -> float:
    return math.nan if value is None else value


def summary(config, rows: list[dict], judged: list[dict]) -> str:
    """The whole report on the rows as text: tables and verdicts by setting, then the claims."""
    shown = [*parts(config, rows), claims_table(judged)]
    return "\n" + "\n\n".join(str(part) for part in shown if part) + "\n"


def parts(config, rows: list[dict]) -> list[str | Table]:
    """What the report has beside the claims: tables, and texts of one or more lines."""
    found: list[str | Table | None] = []
    for setting in config.settings or [None]:
        own = [row for row in rows if row.get("setting") == setting]
        if not own:
            found.append(f"{setting}: none of its runs has a row yet")
            continue
        found += [table(config, own, setting), "\n".join(unlike_arms(own)), gains_table(config, own)]
        found += [*slices_tables(own), lengths.table(own), *sinks_tables(own)]
        if config.baseline is not None and {config.baseline, config.treatment} <= {row["arm"] for row in own}:
            found.append(f"verdict: {verdict(config, own)}\ncost of the gate: {cost(config, own)}")
    if config.learning_rates and not config.selection_seeds:
        found.append(divergence(rows))
    found += [ranks.table(ranks.records(config, rows)), mixers.predicted(config, rows)]
    return [part for part in [*found, origins(rows)] if part]


def show(config, row: dict) -> str:
    end = number(row[config.metric])
    return f"accuracy {end:.1%}" if config.metric == "accuracy" else f"loss {end:.4f}"


def table(config, rows: list[dict], setting: str | None = None) -> Table:
    """One line per arm that shows every seed, and the mean with its interval; with solved_above also how many seeds
    solved the task, and how soon. The last column is the learning rate, where the rows name it.
    """
    title = "End accuracy" if config.metric == "accuracy" else "Validation loss at the end (nats a token)"
    title += f", {setting}" if setting else ""
    header = ["arm", *map(str, config.seeds), "mean", "95% interval"]
    header += ["solved", "steps to it"] if config.solved_above is not None else []
    has_rates, cells = any("learning_rate" in row["config"] for row in rows), []
    header += ["rate"] if has_rates else []
    form = ".1%" if config.metric == "accuracy" else ".4f"
    for arm in dict.fromkeys(row["arm"] for row in rows):
        by_seed = {row["seed"]: row for row in rows if row["arm"] == arm}
        ends = [number(row[config.metric]) for row in by_seed.values()]
        line = [f"{number(by_seed[s][config.metric]):{form}}" if s in by_seed else "not run" for s in config.seeds]
        line = [arm, *line, f"{statistics.fmean(ends):{form}}", interval_text(ends, form)]
        if config.solved_above is not None:
            steps = [curves.steps_to(row, config.solved_above) for row in by_seed.values()]
            reached = [step for step in steps if step is not None]
            solved = sum(end > config.solved_above for end in ends)
            line += [f"{solved}/{len(ends)}", f"{statistics.median(reached):,.0f}" if reached else "-"]
        rates = dict.fromkeys(row["config"].get("learning_rate") for row in by_seed.values())
        line += [", ".join("-" if rate is None else f"{float(rate):g}" for rate in rates)] if has_rates else []
        cells.append(line)
    return Table(f"{title}, by seed", header, cells)


def interval_text(values: list[float], form: str) -> str:
    """The 95% interval of the mean, as the figures draw it; "-" where there is none."""
    low, high = stats.interval(values)
    return "-" if low is None or high is None else f"{low:{form}} to {high:{form}}"


def made_by(row: dict, name: str) -> Any:
    """dtype, device, threads or code_sha256 of a row; None for a row of a version that did not store it."""
    value = row.get(name) or row["config"].get(name)
    return None if value in ("auto", 0) else value


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
    """One line per arm that is compared with another (gains.plain_arms). Not corrected.

    A gain is an accuracy minus the other's; of losses it is the difference. In a sweep both arms have the same
    learning rate; where each arm chose its own rate, the two rates may differ.
    """
    cells, plain, setting = [], gains.plain_arms(rows), rows[0].get("setting")
    for arm in dict.fromkeys(row["arm"] for row in rows):
        other = plain.get((setting, arm))
        if other is None:
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
    header += ["seeds"]
    title = "Loss minus that of the same without a gate" if is_loss else "Gain over the same without a gate"
    return Table(f"{title}: mean, not corrected for their number", header, cells) if cells else None


def compare_steps(config, rows: list[dict], arm: str, other: str) -> str:
    """In how many of the seeds that both arms solve the first arm gets above solved_above later, and sooner."""
    steps = {(row["arm"], row["seed"]): curves.steps_to(row, config.solved_above) for row in rows}
    pairs = [(steps.get((arm, seed)), steps.get((other, seed))) for seed in config.seeds]
    both = [one - two for one, two in pairs if None not in (one, two)]
    later, sooner = sum(step > 0 for step in both), sum(step < 0 for step in both)
    return f"{later}, {sooner} of {len(both)}" if both else "-"


def slices_tables(rows: list[dict]) -> list[Table]:
    """A table per score: one line per arm, its accuracy by length/pairs, averaged over the seeds."""
    found, arms = [], list(dict.fromkeys(row["arm"] for row in rows))
    for name in rows[0].get("scored", {}):
        scored = [row for row in rows if name in row["scores"]]
        scores = {arm: [row["scores"][name] for row in scored if row["arm"] == arm] for arm in arms}
        slices = dict.fromkeys(part for own in scores.values() for score in own for part in score.get("slices", ()))
        if not slices:
            continue
        cells = []
        for arm, own in scores.items():
            each = [[v for score in own if (v := score["slices"].get(part)) is not None] for part in slices]
            cells.append([arm, *(f"{statistics.fmean(values) if values else math.nan:.1%}" for values in each)])
        title = f"{name}: accuracy by length/pairs, means over the seeds"
        found.append(Table(title, ["arm", *slices], cells))
    return found


def sinks_tables(rows: list[dict]) -> list[str | Table]:
    """What token 0 gets by kind of query: the reading in sentences, then a line per arm."""
    rows = sinks.with_sinks(rows)
    if not rows:
        return []
    title = "token 0 by kind of query, means over the seeds; effective: written of it over the residual stream"
    header, *cells = sinks.table(rows)
    return ["\n".join(sinks.reading(rows)), Table(title, header, cells)]


def is_across_settings(claim: dict) -> bool:
    return any(isinstance(weights, dict) for weights in claim["contrast"].values())


def contrasts_of(config, claim: dict) -> dict[str | None, dict[tuple, float]]:
    """{setting or None: {(setting, arm): weight}}. A claim across settings gives one contrast; any other claim gives
    one in each setting."""
    if is_across_settings(claim):
        return {None: {(s, arm): w for s, weights in claim["contrast"].items() for arm, w in weights.items()}}
    settings = config.settings or [None]
    return {setting: {(setting, arm): w for arm, w in claim["contrast"].items()} for setting in settings}


def questions(config) -> list[dict]:
    """[{claim, setting, of, rule, weights, seeds, exploratory, family}]: every claim in every setting that it is judged
    in. rule: the claim itself. weights: {(setting, arm): weight}.

    Claims about one number of the rows, in all settings, are one family, unless they name another ("family"). The
    exploratory ones are a family of their own.
    """
    found = []
    for name, rule in config.claims.items():
        path, is_exploratory = rule.get("of", [config.metric]), rule.get("exploratory", config.exploratory)
        about = {"claim": name, "of": path, "metric": config.metric, "rule": rule, "exploratory": is_exploratory}
        about["family"] = is_exploratory, rule.get("family") or tuple(path)
        for setting, weights in contrasts_of(config, rule).items():
            seeds = seeds_of_claim(config, weights)
            found.append(about | {"setting": setting, "weights": weights, "seeds": seeds})
    return found


def judge_claims(config, rows: list[dict], choices: Iterable[dict] = ()) -> list[dict]:
    """Every question with what stats.judge finds out about it, and by_seed, missing, lost (see `unseen`) and flags.

    choices: of learning rates, as plan.choose_rates gives them, for the flags about them.
    """
    judged, families = [], {}
    for question in questions(config):
        values = stats.contrast(rows, question["weights"], question["of"])
        result = question | {"by_seed": values} | unseen(rows, question, values)
        result["flags"] = power.flags(config, rows, list(choices), question)
        judged.append(result)
        if "in" in question["rule"] and result["missing"]:
            result |= {"verdict": "not run", "n": len(values), "threshold": question["rule"]["above"]}
        else:
            families.setdefault(question["family"], []).append(result)
    for family in families.values():
        asked = [(list(result["by_seed"].values()), result["rule"]) for result in family]
        for result, found in zip(family, stats.judge(asked), strict=True):
            result.update(found)
    for result in judged:  # each was corrected for in the family that it was declared in
        if result["verdict"] != "not run" and (words := undeclared_look(rows, result)):
            result |= {"exploratory": True, "flags": [*words, *result["flags"]]}
    return judged


def seeds_of_claim(config, weights: dict[tuple, float]) -> list[int]:
    """The seeds that all arms of a contrast are run with."""
    return [seed for seed in config.seeds if all(seed in config.seeds_of.get(arm, [seed]) for _, arm in weights)]


def unseen(rows: list[dict], question: dict, values: dict[int, float]) -> dict[str, list[int]]:
    """The seeds without a value: "missing" where a run has no row, or not yet the score that the claim is about; "lost"
    where all have one, but one lacks the number, as that of a run that was not finite does."""
    path = question["of"][question["of"][0] == "log" :]
    score = path[1] if path[0] == "scores" else None
    there = {
        (row.get("setting"), row["arm"], row["seed"])
        for row in rows
        if score is None or not row["finite"] or score in row["scores"]
    }
    seeds = question["seeds"]
    missing = [seed for seed in seeds if any((*cell, seed) not in there for cell in question["weights"])]
    return {"missing": missing, "lost": [seed for seed in seeds if seed not in values and seed not in missing]}


def undeclared_look(rows: list[dict], question: dict) -> list[str]:
    """Why this is a look at the verdict that was not declared before the runs; empty if it is none.

    One look is declared, when all seeds have run. Each row holds the seeds that its arm was to be run with: seeds that
    were not among these were added later; those that the config no longer has were left out. Older rows do not hold it.
    """
    seeds, words = question["seeds"], []
    if question["missing"]:
        words.append("the seeds so far are no declared look")
    cells = [row for row in rows if (row.get("setting"), row["arm"]) in question["weights"]]
    planned_of: dict = {}
    for row in cells:
        planned_of.setdefault((row.get("setting"), row["arm"]), set()).update(row.get("planned_seeds", seeds))
    left_out = sorted(set.intersection(*planned_of.values()) - set(seeds)) if planned_of else []
    if left_out:
        words.append(f"seeds {', '.join(map(str, left_out))} were planned and are left out")
    for row in cells:
        planned = [seed for seed in seeds if seed in row.get("planned_seeds", seeds)]
        if planned != seeds:
            words.append(f"seeds were added to the {len(planned)} that were planned at first, without a declared look")
            break
    return words


def claims_table(judged: list[dict]) -> str:
    """A line per claim: its verdict, and the numbers behind it. Accuracies are fractions, losses are in nats, and
    differences of logarithms are ratios."""
    return "\n".join(f"{name}: {words}" for name, words in claim_lines(judged))


def claim_lines(judged: list[dict]) -> list[tuple[str, str]]:
    """[(claim and setting, verdict and numbers)]."""
    lines = []
    for claim in judged:
        name = ", ".join(filter(None, (claim["claim"], claim["setting"])))
        words = f"exploratory: {claim['verdict']}" if claim["exploratory"] else claim["verdict"]
        if "over" in claim:
            number = number_shown(claim)
            values = ", ".join(map(number, claim["by_seed"].values()))
            count = f"{claim['over']} of {claim['n'] + len(claim['lost'])} seeds over {number(claim['threshold'], 'g')}"
            words += f" ({count}, {claim['needed']} needed: {values})"
        elif "mean" in claim:
            words += f" ({numbers_of(claim)})"
        if claim["verdict"] != "not run":
            words += "".join(f"; {flag}" for flag in notes(claim))
        lines.append((name, words))
    return lines


def numbers_of(claim: dict) -> str:
    """The mean of a claim, its intervals and its tests, in words."""
    number = number_shown(claim)
    level = f"{100 * (1 - stats.LEVEL):g}%"
    interval = f"{level} interval" if claim["sides"] == 2 else f"one-sided {level} bounds"
    parts = [f"{number(claim['mean'])}, exact {interval} {number(claim['low'])} to {number(claim['high'])}"]
    if claim["identical"]:
        parts[0] += ", identical in all seeds"
    else:
        parts[0] += f", Student's {number(claim['student_low'])} to {number(claim['student_high'])}"
    threshold = "" if claim["threshold"] is None else number(claim["threshold"], "g")
    if "p" in claim:
        sampled = (
            f" +-{claim['p_error']:.1g}, {stats.RANDOM_PATTERNS:,} random sign patterns" if claim["p_error"] else ""
        )
        beyond = BEYOND["other_than" in claim["rule"]]
        parts.append(f"{beyond} {threshold}: p {claim['p']:.3g}{sampled}, {claim['p_holm']:.3g} after Holm")
    if "p_within" in claim:
        p = f"p {claim['p_within']:.3g}, {claim['p_within_holm']:.3g} after Holm"
        parts.append(f"within {distance_shown(claim, claim['within'], '+-')}: {p}")
    seen = []
    if "detectable" in claim and math.isinf(claim["detectable"]):
        seen.append("too few seeds to see anything")
    elif "detectable" in claim:
        seen.append(f"sees {distance_shown(claim, claim['detectable'])} beyond {threshold} in 80% of cases")
    if "detectable_within" in claim:
        seen.append(f"shows a band of {distance_shown(claim, claim['detectable_within'], '+-')} in 80% of cases")
    return "; ".join([*parts, *seen, f"{claim['n']} seeds"])


def divergence(rows: list[dict]) -> Table:
    """Where each arm diverges: its loss is not finite, or its validation loss is higher at the end than at first; and
    the highest rate whose mean loss is less than HARM above that of the best rate."""
    cells = []
    for setting in dict.fromkeys(row.get("setting") for row in rows):
        for arm, rates in report.by_learning_rate([row for row in rows if row.get("setting") == setting]).items():
            lost = [rate for rate, own in rates.items() if any(map(report.has_diverged, own))]
            ends = {r: statistics.fmean(row["val_loss"] for row in own) for r, own in rates.items() if r not in lost}
            harmless = [rate for rate, end in ends.items() if end < min(ends.values()) + HARM]
            name = ", ".join(filter(None, (arm, setting)))
            highest = [f"{max(found):g}" if found else "none" for found in (harmless, list(ends))]
            cells.append([name, *highest, f"{min(lost):g}" if lost else "none"])
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
