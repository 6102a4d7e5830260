"""The claims of an experiment: which contrasts they ask about, what the rows say of each, and what limits a verdict.

    judged = judge_claims(config, rows, choices)    every claim in every setting, with its verdict and its flags
    claims_table(judged)                            a line per claim, as experiment.py prints it
    record(claim)                                   what claims.json keeps of it

stats.py has the tests and intervals, power.py what a claim can show before anything has run.
"""

import configurator

import importlib
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from study import stats
from study.names import joined

TOP, BOTTOM = 0.95, 0.05  # of the way from chance to 1: arms beyond these are at the ceiling, or at chance

RATIO = "ratio of steps"
BY_LOG = ("log", "log_steps")  # numbers that are compared by their logarithms
BEYOND = {False: "over", True: "other than"}  # {a change in either direction is asked about: how a threshold is named}
HIGHER = ("accuracy", "slices")
SHARES = {"share", "uniform", "sink", "sink_max", "sink_baseline", "gate_below_0.1"}  # meters
LOWER = ("val_loss", "loss", "perplexity", "word_perplexity", "bits_per_byte", "log_steps", "lost")
UNITS = {  # {unit: (how a number of the rows is shown in it, its format)}
    "of the residual stream": (lambda x: x, "+.3f"), "nats a token": (lambda x: x, "+.4f"), RATIO: (math.exp, ".2f"),
    "ratio": (math.exp, ".3f"), "steps": (math.exp, ",.0f"), "%": (lambda x: 100 * x, "+.1f"),
    "points": (lambda x: 100 * x, "+.1f"), "as in the rows": (lambda x: x, "+.4g"),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Questions


def is_across_settings(claim: dict) -> bool:
    return any(isinstance(weights, dict) for weights in claim["contrast"].values())


def contrasts_of(config, claim: dict) -> dict[str | None, dict[tuple, float]]:
    """{setting or None: {(setting, arm): weight}}. A claim across settings gives one contrast; any other claim gives
    one in each setting."""
    contrast = claim["contrast"]
    if is_across_settings(claim):
        return {None: {(s, arm): weight for s, weights in contrast.items() for arm, weight in weights.items()}}
    return {s: {(s, arm): weight for arm, weight in contrast.items()} for s in config.settings or [None]}


def seeds_of_claim(config, weights: dict[tuple, float]) -> list[int]:
    """The seeds that all arms of a contrast are run with."""
    return [seed for seed in config.seeds if all(seed in config.seeds_of.get(arm, [seed]) for _, arm in weights)]


def questions(config) -> list[dict]:
    """[{claim, setting, of, rule, weights, seeds, exploratory, family}]: every claim in every setting that it is judged
    in. rule: the claim itself. weights: {(setting, arm): weight}.

    Claims about one number of the rows, in all settings, are one family, unless they name another ("family"). The
    exploratory ones are a family of their own.
    """
    asked = []
    for name, rule in config.claims.items():
        path, is_exploratory = rule.get("of", [config.metric]), rule.get("exploratory", config.exploratory)
        about = {"claim": name, "of": path, "metric": config.metric, "rule": rule, "exploratory": is_exploratory}
        about["family"] = is_exploratory, rule.get("family") or tuple(path)
        for setting, weights in contrasts_of(config, rule).items():
            seeds = seeds_of_claim(config, weights)
            asked.append(about | {"setting": setting, "weights": weights, "seeds": seeds})
    return asked


# ----------------------------------------------------------------------------------------------------------------------
# Verdicts


def judge_claims(config, rows: list[dict], choices: Iterable[dict] = ()) -> list[dict]:
    """Every question with what stats.judge finds out about it, and by_seed, missing, lost (see `unseen`) and flags.

    choices: of learning rates, as plan.choose_rates gives them, for the flags about them.
    """
    judged, families, choices = [], {}, list(choices)
    for question in questions(config):
        values = stats.contrast(rows, question["weights"], question["of"])
        result = question | {"by_seed": values} | unseen(rows, question, values)
        result["flags"] = flags(config, rows, choices, question)
        judged.append(result)
        if "in" in question["rule"] and result["missing"]:
            result |= {"verdict": "not run", "n": len(values), "threshold": question["rule"]["above"]}
        else:
            families.setdefault(question["family"], []).append(result)
    for family in families.values():
        asked = [(list(result["by_seed"].values()), result["rule"]) for result in family]
        for result, numbers in zip(family, stats.judge(asked), strict=True):
            result.update(numbers)
    for result in judged:  # each was corrected for in the family that it was declared in
        if result["verdict"] != "not run" and (words := undeclared_look(rows, result)):
            result |= {"exploratory": True, "flags": [*words, *result["flags"]]}
    return judged


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
    seeds, planned = question["seeds"], {}
    cells = [row for row in rows if (row.get("setting"), row["arm"]) in question["weights"]]
    for row in cells:
        planned.setdefault((row.get("setting"), row["arm"]), set()).update(row.get("planned_seeds", seeds))
    words = ["the seeds so far are no declared look"] if question["missing"] else []
    left_out = sorted(set.intersection(*planned.values()) - set(seeds)) if planned else []
    words += [f"seeds {', '.join(map(str, left_out))} were planned and are left out"] if left_out else []
    counts = (sum(seed in row.get("planned_seeds", seeds) for seed in seeds) for row in cells)
    first = next((n for n in counts if n < len(seeds)), len(seeds))
    if first < len(seeds):
        words.append(f"seeds were added to the {first} that were planned at first, without a declared look")
    return words


# ----------------------------------------------------------------------------------------------------------------------
# What limits a verdict


def flags(config, rows: list[dict], choices: list[dict], question: dict) -> list[str]:
    """What a reader of the verdict must know: ceiling, floor, edge ... choices: as plan.choose_rates gives them."""
    cells = {cell: [r for r in rows if (r.get("setting"), r["arm"]) == cell] for cell in question["weights"]}
    if not all(cells.values()):
        return []
    words = ends_of_the_scale(config, cells, question["of"]) + unlike_pairs(cells)
    tried = {(setting, config.rate_of.get(arm, arm)) for setting, arm in cells}
    of_these = [choice for choice in choices if (choice["setting"], choice["arm"]) in tried]
    return list(dict.fromkeys([*words, *edges(of_these), *(word for choice in of_these for word in margins(choice))]))


def ends_of_the_scale(config, cells: dict[tuple, list[dict]], path: list) -> list[str]:
    """Ceiling or floor, where all arms are at the top or at chance: no difference can be seen there."""
    if path != ["accuracy"] and "slices" not in path:
        return []
    places = []
    for rows in cells.values():
        least = chance(config, rows[0], path)
        values = [value for row in rows if (value := stats.look_up(row, path)) is not None]
        if least is None or not values:
            return []
        places.append((statistics.fmean(values) - least) / (1 - least))
    words = ["ceiling: all arms are at the top"] if min(places) > TOP else []
    return words + (["floor: all arms are at chance"] if max(places) < BOTTOM else [])


def chance(config, row: dict, path: list) -> float | None:
    """The accuracy that guessing gives, which the data set knows, or None. A slice is named length/pairs."""
    module = importlib.import_module(f"data.{config.prepare}.prepare")
    if not hasattr(module, "chance"):
        return None
    if "slices" not in path:
        return module.chance(configurator.build(module.Config, row["data"]))
    pairs = path[-1].partition("/")[2]
    return 1 / int(pairs) if pairs.isdecimal() else None


def unlike_pairs(cells: dict[tuple, list[dict]]) -> list[str]:
    """What differs between the runs of a seed besides their keys: commit, dtype, device, threads."""
    by_seed, words = {}, []
    for rows in cells.values():
        for row in rows:
            by_seed.setdefault(row["seed"], []).append(row)
    for name, word in {"code": "commits", "dtype": "dtypes", "device": "devices", "threads": "threads"}.items():
        mixed = [seed for seed, rows in by_seed.items() if is_mixed(rows, name)]
        if mixed:
            words.append(f"mixed {word} within {len(mixed)} of {len(by_seed)} seeds")
    return words


def is_mixed(rows: list[dict], name: str) -> bool:
    if name == "code":  # where a hash of the code that the numbers depend on is stored, the commits may differ
        name = "code_sha256" if all(row.get("code_sha256") for row in rows) else "git_commit"
    return len({value for row in rows if (value := made_by(row, name)) is not None}) > 1


def made_by(row: dict, name: str) -> Any:
    """dtype, device, threads or code_sha256 of a row; None for a row of a version that did not store it."""
    value = row.get(name) or row["config"].get(name)
    return None if value in ("auto", 0) else value


def edges(choices: list[dict]) -> list[str]:
    """Edge: a chosen rate is the lowest or the highest of those tried."""
    by_rate: dict = {}
    for choice in choices:
        if choice.get("is_edge"):
            by_rate.setdefault(choice["rate"], {})[choice["arm"]] = None
    names = {rate: ", ".join(arms) if len(arms) < 4 else f"{len(arms)} arms" for rate, arms in by_rate.items()}
    return [f"edge: {arms} chose {rate:g} at the end of the grid" for rate, arms in names.items()]


def margins(choice: dict) -> list[str]:
    """Margin: the next best rate is within a standard error, over the selection seeds, of the difference."""
    arm, rate, other = (choice.get(name) for name in ("arm", "rate", "other"))
    if other is None or not math.isfinite(choice["margin"]):
        return []
    if math.isnan(choice["error"]):
        return [f"one selection seed: the margin of {arm}'s rate over {other:g} has no standard error"]
    is_close = abs(choice["margin"]) < choice["error"]
    return [f"margin: {arm}'s rate {rate:g} and {other:g} are within a standard error"] if is_close else []


# ----------------------------------------------------------------------------------------------------------------------
# Units and words


def unit_of(claim: dict) -> str:
    """The unit that a claim's numbers are shown in, one of UNITS."""
    of, what = claim["of"], measured(claim)
    if of[0] == "log_steps":
        return RATIO if abs(sum(claim["weights"].values())) < 1e-9 else "steps"
    if of[0] == "log":
        return "ratio"
    if what in ("val_loss", "loss"):
        return "nats a token"
    if what in ("perplexity", "word_perplexity", "bits_per_byte"):
        return "as in the rows"
    if of[0] == "meters":
        return "of the residual stream" if of[-1] == "effective" else "%" if SHARES & set(of) else "as in the rows"
    return "points" if what in ("accuracy", "slices", "lost") else "as in the rows"


def measured(claim: dict) -> str | None:
    """The name of what a claim is about, if it is one that is better high or low."""
    return next((word for word in claim["of"] if word in HIGHER + LOWER), None)


def number_shown(claim: dict) -> Callable[..., str]:
    """The function that shows a number of the claim as text: number(value), or number(value, format) for what was
    declared. A logarithm is shown as what it is of."""
    if claim["of"][0] not in BY_LOG:
        return lambda value, form="+.4f": f"{value:{form}}"
    convert, unit_form = UNITS[unit_of(claim)]
    return lambda value, form="": f"{convert(value):{unit_form}}"


def distance_shown(claim: dict, value: float, sign: str = "") -> str:
    """A distance from a threshold or from zero, as text; between logarithms it is a factor."""
    return f"a factor of {math.exp(value):.3g}" if claim["of"][0] in BY_LOG else f"{sign}{value:.3g}"


def record(claim: dict) -> dict:
    """What claims.json keeps of a judged claim, with all numbers in its unit.

    null: an end that too few seeds leave open, and what a claim does not have. detectable: so far beyond the threshold,
    or, of a ratio, by this factor.
    """
    unit = unit_of(claim)
    convert, _ = UNITS[unit]

    def shown(value: float | None) -> float | None:
        return None if value is None or not math.isfinite(value) else float(f"{convert(value):.6g}")

    values = claim["by_seed"]
    numbers = {name: shown(claim.get(name)) for name in ("low", "high", "student_low", "student_high", "threshold")}
    numbers |= {name: shown(claim.get(name)) for name in ("within", "detectable", "detectable_within")}
    tests = {name: claim.get(name) for name in ("p", "p_holm", "p_within_holm", "over", "needed", "sides")}
    about = {"name": claim["claim"], "setting": claim["setting"], "of": " ".join(map(str, claim["of"])), "unit": unit}
    about |= {"verdict": claim["verdict"], "exploratory": claim["exploratory"]}
    about["either_way"] = "other_than" in claim["rule"]
    # sum and not fmean: the last digits of the files that are there
    about |= {"estimate": shown(sum(values.values()) / len(values)) if values else None} | numbers | tests
    return about | {"seeds": {str(seed): shown(value) for seed, value in values.items()}, "flags": notes(claim)}


def notes(claim: dict) -> list[str]:
    """What a reader must know beside the verdict: seeds without a value, and the flags."""
    words = []
    for name, text in {"lost": "no value in seeds", "missing": "a look before all seeds have run, without"}.items():
        words += [f"{text} {', '.join(map(str, claim[name]))}"] if claim[name] else []
    return words + claim["flags"]


def claims_table(judged: list[dict]) -> str:
    """A line per claim: its verdict, and the numbers behind it. Accuracies are fractions, losses are in nats, and
    differences of logarithms are ratios."""
    return "\n".join(map(line_of, judged))


def line_of(claim: dict) -> str:
    words = f"exploratory: {claim['verdict']}" if claim["exploratory"] else claim["verdict"]
    if "over" in claim:
        number = number_shown(claim)
        values = ", ".join(map(number, claim["by_seed"].values()))
        count = f"{claim['over']} of {claim['n'] + len(claim['lost'])} seeds over {number(claim['threshold'], 'g')}"
        words += f" ({count}, {claim['needed']} needed: {values})"
    elif "mean" in claim:
        words += f" ({numbers_of(claim)})"
    remarks = notes(claim) if claim["verdict"] != "not run" else []
    return f"{joined(claim['claim'], claim['setting'])}: " + "; ".join([words, *remarks])


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
        patterns = f"{stats.RANDOM_PATTERNS:,} random sign patterns"
        sampled = f" +-{claim['p_error']:.1g}, {patterns}" if claim["p_error"] else ""
        beyond = BEYOND["other_than" in claim["rule"]]
        parts.append(f"{beyond} {threshold}: p {claim['p']:.3g}{sampled}, {claim['p_holm']:.3g} after Holm")
    if "p_within" in claim:
        p = f"p {claim['p_within']:.3g}, {claim['p_within_holm']:.3g} after Holm"
        parts.append(f"within {distance_shown(claim, claim['within'], '+-')}: {p}")
    if "detectable" in claim and math.isinf(claim["detectable"]):
        parts.append("too few seeds to see anything")
    elif "detectable" in claim:
        parts.append(f"sees {distance_shown(claim, claim['detectable'])} beyond {threshold} in 80% of cases")
    if "detectable_within" in claim:
        parts.append(f"shows a band of {distance_shown(claim, claim['detectable_within'], '+-')} in 80% of cases")
    return "; ".join([*parts, f"{claim['n']} seeds"])
