"""The claims of an experiment: what they ask, what they can show, what the rows say of each, and
what limits a verdict.

stats.py has the tests and intervals.
"""

import itertools
import math
from collections.abc import Sequence
from statistics import fmean, stdev

from base import configurator
from base.configurator import UserError
from study import stats
from study.arms import seeds_of_arms
from study.rows import mixer_of, script_of
from study.table import Table

FEW_SEEDS = 5  # with fewer a standard error says little: of two, it may be off by a factor of 32
# of the way from chance to 1: arms beyond these are at the ceiling, or at chance
TOP, BOTTOM = 0.95, 0.05

# {unit that numbers are shown in: their format}
UNITS = {
    "of the residual stream": "+z.3f",
    "nats a token": "+z.4f",
    "ratio of steps": ".2f",
    "ratio": ".3f",
    "geometric mean": ".4g",
    "steps": ",.0f",
    "%": "+z.1f",
    "points": "+z.1f",
    "as in the rows": "+z.4g",
}
RATIOS = ("ratio of steps", "ratio", "geometric mean", "steps")  # shown of logarithms
PERCENT = ("%", "points")  # shown of fractions
# {a name in the path of a claim: the unit}
UNIT_OF = {
    "accuracy": "points",
    "slices": "points",
    "lost": "points",
    "val_loss": "nats a token",
    "loss": "nats a token",
    "log_steps": "ratio of steps",
}
# meters that are fractions
SHARES = ["share", "uniform", "sink", "to_sink", "sink_max", "sink_baseline", "gate_below_0.1"]
SHARES += ["induction"]
# of a path that begins with "meters", and has no name of UNIT_OF
UNIT_OF_METER = {"effective": "of the residual stream"} | dict.fromkeys(SHARES, "%")


def convert(value: float | None, unit: str) -> float | None:
    """A number of the rows in a unit."""
    if value is None:
        return None
    if unit in RATIOS:
        return math.exp(value)
    return 100 * value if unit in PERCENT else value


def with_interval(mean: float, low: float | None, high: float | None, unit: str) -> str:
    """A mean and its interval, if it has one, which are given in the unit."""
    form = UNITS[unit]
    return f"{mean:{form}}" if low is None else f"{mean:{form}} ({low:{form}} to {high:{form}})"


def effect_format(unit: str) -> str:
    """The format of an effect, which of a number of steps, or of another mean, is a factor."""
    return ".2f" if unit in ("steps", "geometric mean") else UNITS[unit]


def unit_of(of: Sequence, weights: dict[str, float]) -> str:
    """The unit that the numbers of a claim are shown in, one of UNITS."""
    is_difference = abs(sum(weights.values())) <= 1e-9
    if of[0] == "log_steps" and not is_difference:
        return "steps"
    if of[0] == "log":
        return "ratio" if is_difference else "geometric mean"
    names = [name for name in of if name in UNIT_OF]
    if names:
        return UNIT_OF[names[0]]
    names = [name for name in of if name in UNIT_OF_METER]
    if names and of[0] == "meters":
        return UNIT_OF_METER[names[0]]
    return "as in the rows"


# -- What a claim asks, and what it can show -------------------------------------------------------


def questions(config) -> list[dict]:
    """Each claim with all that it asks: its keys, and claim (its name), of, exploratory, unit,
    seeds, and tests: [(name and sides as in stats.tests_of, smallest p after Holm, size of the
    family)]."""
    asked = []
    families = {}
    for name, claim in config.claims.items():
        question = {"of": [config.metric], "exploratory": False} | claim
        question["claim"] = name
        question["unit"] = unit_of(question["of"], claim["contrast"])
        question["seeds"] = seeds_of_arms(config, claim["contrast"])
        question["tests"] = []
        asked.append(question)
        family = families.setdefault(family_of(question), [])
        for test, sides in stats.tests_of(claim):
            least = stats.smallest_p(len(question["seeds"]), sides)
            family.append((question, test, sides, least))
    for family in families.values():
        corrected = stats.holm([least for *_, least in family])
        for (question, test, sides, _), p in zip(family, corrected, strict=True):
            question["tests"].append((test, sides, p, len(family)))
    return asked


def family_of(question: dict) -> tuple:
    """What the claims of a family share. All that are declared are one, and all exploratory ones
    another, but for those that name a smaller one."""
    return question["exploratory"], question.get("family")


def check_reach(config) -> None:
    """UserError for a claim whose seeds can give no p under 0.05."""
    for question in questions(config):
        for _, sides, p, size in question["tests"]:
            if p < stats.LEVEL or question["exploratory"]:
                continue
            needed = 2
            while size * stats.smallest_p(needed, sides) >= stats.LEVEL:
                needed += 1
            few = f"{len(question['seeds'])} seeds give no p under {p:.2g}"
            few += f" after Holm's correction for {size} tests" if size > 1 else ""
            words = f"so it cannot be supported; at most {needed} are needed, or exploratory=true"
            raise UserError(f"claims: {question['claim']}: {few}, {words}")


def reach_table(config, rows: list[dict]) -> Table:
    """A line per test of a claim: what it can show in 80% of cases, from the spread of the compared
    rows there are, or from `pair_spread`."""
    lines = []
    for question in questions(config):
        n = len(question["seeds"])
        weights = question["contrast"]
        unit = question["unit"]
        values = list(stats.contrast(rows, weights, question["of"]).values())
        if len(values) > 1 and not stats.are_identical(values):
            spread = stdev(values)
            source = f"{spread:.3g}, of {len(values)} seeds"
        else:  # pair_spread is of a pair; arms are taken to differ independently
            spread = (config.pair_spread or math.nan) * math.hypot(*weights.values()) / math.sqrt(2)
            source = f"{spread:.3g}, assumed"
        for test, sides, p, size in question["tests"]:
            sees = spread * stats.detectable(n, stats.LEVEL / size / sides, test)
            seen = "nothing"
            if math.isfinite(sees):
                seen = f"{convert(sees, unit):{effect_format(unit)}}".lstrip("+")
            kind = "within" if test == "p_within" else "above"
            numbers = [str(n), f"{p:.2g}", str(size), seen, unit, source]
            lines.append([question["claim"], kind, *numbers])
    title = """What each claim can show: the least p of its seeds, after Holm's correction, and what 80% of cases see
(nothing: the seeds are too few, or no spread is known)"""
    header = ["claim", "test", "seeds", "least p", "in family", "sees", "unit", "spread"]
    return Table(title, header, lines)


# -- What the rows say -----------------------------------------------------------------------------


def judge_claims(config, rows: list[dict], choices: Sequence[dict] = ()) -> list[dict]:
    """Every question with what stats.judge finds out about it, and

        by_seed     {seed: its value}
        missing     seeds in which an arm has no row
        lost        seeds in which every arm has a row, but one lacks the number: it was not finite
        p_all       p over all tests of the experiment (correct_over_all)
        modes       of an outcome with two modes (modes_of), else None
        flags       what a reader must know beside the verdict

    choices: of learning rates, as plan.choose_rates gives them."""
    judged = []
    families = {}
    for question in questions(config):
        values = stats.contrast(rows, question["contrast"], question["of"])
        # of the seeds in which every arm has a row, whatever the number is
        ran = stats.contrast(rows, question["contrast"], ["seed"])
        missing = [seed for seed in question["seeds"] if seed not in ran]
        lost = [seed for seed in question["seeds"] if seed in ran and seed not in values]
        result = question | {"by_seed": values, "missing": missing, "lost": lost, "modes": None}
        judged.append(result)
        counted = [] if missing and "in" in result else list(values.values())
        families.setdefault(family_of(result), []).append((counted, result))
    for asked in families.values():
        for (_, result), numbers in zip(asked, stats.judge(asked), strict=True):
            result.update(numbers)
    correct_over_all(judged)
    for result in judged:  # each was corrected for in the family that it was declared in
        result["flags"] = flags_of(config, result, rows, choices)
    return judged


def flags_of(config, result: dict, rows: list[dict], choices: Sequence[dict]) -> list[str]:
    """What a reader must know beside the verdict. Makes a claim exploratory that was looked at in a
    way that was not declared, and adds its modes."""
    flags = []
    if result["lost"]:
        flags.append(f"no value in seeds {listed(result['lost'])}")
    if result["verdict"] == "not run":
        return flags
    can_be_supported = any(
        p < stats.LEVEL and stats.smallest_p(result["n"], sides) < stats.LEVEL
        for _, sides, p, _ in result["tests"]
    )
    if result["verdict"] == "inconclusive" and not can_be_supported:
        result["verdict"] = stats.UNDECIDABLE
    arms = {arm: [] for arm in result["contrast"]}
    for row in rows:
        if row["arm"] in arms:
            arms[row["arm"]].append(row)
    looks = undeclared_looks(arms, result)
    result["exploratory"] |= bool(looks)
    flags += looks
    holds = result["verdict"] in ("supported", "equivalent")
    if holds and result.get("p_all", 0.0) >= stats.LEVEL:
        over = f"over all {result['n_all']} tests of the experiment"
        flags.append(f"in its family alone: p is {result['p_all']:.2g} {over}")
    modes = None if "in" in result else modes_of(rows, result)
    result["modes"] = modes
    if modes:
        counts = ", ".join(f"{name} {n}" for name, n in modes["over"].items())
        p = "" if modes["p"] is None else f" (sign test p {modes['p']:.2g})"
        over = f"over {modes['split']} are {counts} of {modes['n']} seeds{p}"
        flags.append(f"two modes, and a mean is neither: {over}")
    if result["of"] == ["accuracy"]:
        flags += ends_of_the_scale(config, arms)
    choosing = {config.rate_of.get(arm, arm) for arm in arms}
    chosen = [choice for choice in choices if choice["arm"] in choosing]
    return flags + unlike_pairs(arms) + unlike_rates(arms) + doubts(chosen)


def correct_over_all(judged: list[dict]) -> None:
    """Adds "p_all", p of the test that a claim's verdict rests on after Holm's correction over all
    confirmatory tests of the experiment, and "n_all", their number. A test that has not run counts,
    with p = 1. Claims that were declared exploratory get neither."""
    tests = []
    for result in judged:
        if not result["exploratory"]:
            tests += [(result, test, result.get(test, 1.0)) for test, *_ in result["tests"]]
    corrected = stats.holm([p for *_, p in tests])
    for (result, test, _), p in zip(tests, corrected, strict=True):
        rests_on = "p_within" if result["verdict"] == "equivalent" else "p"
        if result["verdict"] != "not run" and (test == rests_on or len(result["tests"]) == 1):
            result["p_all"] = p
            result["n_all"] = len(tests)


def undeclared_looks(arms: dict[str, list[dict]], question: dict) -> list[str]:
    """Why this is a look at the verdict that was not declared before the runs; empty if it is none.
    The declared look is the one when all seeds have run. A row holds the seeds that its arm was to
    be run with (older rows do not). Seeds of the config that are not among them were added later,
    and those of them that the config lacks were left out.
    """
    seeds = set(question["seeds"])
    of_arms = []  # the seeds that each arm was ever to be run with
    first = len(seeds)
    for of_arm in arms.values():
        ever = set()
        for row in of_arm:
            planned = set(row.get("planned_seeds", seeds))
            ever |= planned
            first = min(first, len(planned & seeds))
        of_arms.append(ever)
    words = []
    if question["missing"]:
        words.append(f"a look before all seeds have run, without {listed(question['missing'])}")
    left_out = sorted(set.intersection(*of_arms) - seeds)
    if left_out:
        words.append(f"seeds {listed(left_out)} were planned and are left out")
    if first < len(seeds):
        planned = f"the {first} that were planned at first"
        words.append(f"seeds were added to {planned}, without a declared look")
    return words


def listed(seeds: list) -> str:
    return ", ".join(map(str, seeds))


def modes_of(rows: list[dict], question: dict) -> dict | None:
    """A claim's runs as a count, where its outcome has two modes: the split between them, how many
    seeds of each arm are over it, out of how many, and p of the sign test of two arms that are
    compared. {split, over, n, p}; None: the runs show no two modes. Of more than two arms, whose
    levels differ, the contrast itself is looked at."""
    weights = question["contrast"]
    by_seed = question["by_seed"]
    path = question["of"]
    unit = question["unit"]
    values = {"the contrast": list(by_seed.values())}
    if len(weights) <= 2:
        unit = unit_of(path, {"an arm": 1.0})
        values = {}
        for arm in weights:
            of_arm = stats.contrast(rows, {arm: 1.0}, path)
            values[arm] = [of_arm[seed] for seed in by_seed]
    split = stats.two_modes(list(values.values()))
    if split is None:
        return None
    is_over = {}
    for name, of_name in values.items():
        is_over[name] = [value > split for value in of_name]
    is_a_difference = len(weights) == 2 and math.prod(weights.values()) < 0
    return {
        "split": f"{convert(split, unit):{UNITS[unit]}} {unit}".lstrip("+"),
        "over": {name: sum(of_name) for name, of_name in is_over.items()},
        "n": len(by_seed),
        "p": stats.sign_test(*is_over.values()) if is_a_difference else None,
    }


def ends_of_the_scale(config, arms: dict[str, list[dict]]) -> list[str]:
    """Ceiling or floor, where all arms are at the top or at chance, which the data set knows: no
    difference can be seen there."""
    script = script_of(config.prepare)
    if not hasattr(script, "chance"):
        return []
    chance = script.chance(configurator.build(script.Config, config.data))
    places = []
    for rows in arms.values():
        mean = fmean(row["accuracy"] for row in rows if row["accuracy"] is not None)
        places.append((mean - chance) / (1 - chance))
    if min(places) > TOP:
        return ["ceiling: all arms are at the top"]
    return ["floor: all arms are at chance"] if max(places) < BOTTOM else []


def unlike_pairs(arms: dict[str, list[dict]]) -> list[str]:
    """What differs between the runs of a seed besides their keys. The commits may differ where the
    hash of the code that the numbers depend on does not. Older rows do not hold all of them."""
    fields = {
        "commits": "code_sha256",
        "dtypes": "dtype",
        "devices": "device",
        "threads": "threads",
    }
    words = []
    for kind, field in fields.items():
        by_seed = {}
        for row in itertools.chain(*arms.values()):
            by_seed.setdefault(row["seed"], set()).add(row.get(field))
        n = sum(len(values - {None}) > 1 for values in by_seed.values())
        if n:
            words.append(f"mixed {kind} within {n} of {len(by_seed)} seeds")
    return words


def unlike_rates(arms: dict[str, list[dict]]) -> list[str]:
    """The learning rates of arms of one mixer, where they are not the same."""
    by_mixer = {}
    for arm, rows in sorted(arms.items()):
        by_mixer.setdefault(mixer_of(rows[0]), {})[arm] = rows[0]["config"].get("learning_rate")
    words = []
    for rates in by_mixer.values():
        if len(set(rates.values())) > 1:
            named = ", ".join(f"{arm} {rate}" for arm, rate in rates.items())
            words.append(f"rates differ: {named}")
    return words


def doubts(choices: list[dict]) -> list[str]:
    """What to doubt of the chosen rates. Edge: one is the lowest or the highest of those tried.
    Margin: the next best rate is within a standard error, which one seed does not have. Rates: the
    seeds are so few that a standard error says little."""
    margins = []
    few = []
    at_edge = {}
    for choice in choices:
        arm, rate = choice["arm"], choice["rate"]
        if rate is None:
            continue
        if choice["is_edge"]:
            at_edge.setdefault(rate, []).append(arm)
        other, margin, error = choice["other"], choice["margin"], choice["error"]
        about = f"margin: {arm}'s rate {rate:g}"
        if abs(margin) < error:
            margins.append(f"{about} and {other:g} are within a standard error")
        elif math.isfinite(margin) and math.isnan(error):
            margins.append(f"{about} over {other:g}: one seed does not tell what noise is")
        n = len(choice["values"][rate])
        if 1 < n < FEW_SEEDS:
            few = [f"rates: a standard error of {n} seeds, too few to tell"]
    edges = []
    for rate, arms in at_edge.items():
        names = ", ".join(arms) if len(arms) < 4 else f"{len(arms)} arms"
        edges.append(f"edge: {names} chose {rate:g} at the end of the grid")
    return edges + margins + few


# -- How a claim is kept and shown -----------------------------------------------------------------


# what claims.json keeps of a judged claim: numbers, which are shown in its unit, and others
IN_UNIT = ("low", "high", "student_low", "student_high", "threshold", "within")
IN_UNIT += ("detectable", "detectable_within")
AS_THEY_ARE = ("p", "p_holm", "p_within_holm", "p_all", "over", "needed", "sides", "modes")


def record(claim: dict) -> dict:
    """What claims.json keeps of a judged claim, with all numbers in its unit. null: an end that too
    few seeds leave open, and what a claim does not have. detectable: so far beyond the threshold;
    of ratios, steps: by this factor."""
    values = claim["by_seed"]

    def shown(value: float | None) -> float | None:
        if value is None or not math.isfinite(value):
            return None
        return float(f"{convert(value, claim['unit']):.6g}")

    kept = {
        "name": claim["claim"],
        "of": " ".join(map(str, claim["of"])),
        "unit": claim["unit"],
        "verdict": claim["verdict"],
        "exploratory": claim["exploratory"],
        "either_way": "other_than" in claim,
        "family": claim.get("family"),
        "family_reason": claim.get("family_reason") if "family" in claim else None,
        # sum and not fmean: the last digits of the files that are there
        "estimate": shown(sum(values.values()) / len(values)) if values else None,
    }
    kept |= {name: shown(claim.get(name)) for name in IN_UNIT}
    kept |= {name: claim.get(name) for name in AS_THEY_ARE}
    kept["seeds"] = {str(seed): shown(value) for seed, value in values.items()}
    return kept | {"flags": claim["flags"]}


def table(records: list[dict]) -> Table:
    """A line per claim, of what claims.json keeps of it; all numbers but p and seeds are in its
    unit."""
    title = """Claims: the mean over the seeds with its exact 95% interval (one-sided: two bounds;
where few seeds leave it open, Student's), p after Holm's correction over its family, and over all
tests of the experiment that were declared, and the effect or the band that 80% would show"""
    header = ["claim", "verdict", "mean (interval)", "asked", "unit"]
    header += ["p", "p over all", "could see", "seeds"]
    return Table(title, header, [[one["name"], *cells_of(one)] for one in records])


def cells_of(one: dict) -> list[str]:
    """The cells of a claim's line behind its name."""
    unit, n = one["unit"], str(len(one["seeds"]))
    verdict = "exploratory: " * one["exploratory"] + one["verdict"]
    if one["verdict"] == "not run":
        return [verdict, *["-"] * 6, n]
    form = UNITS[unit]
    low, high = one["low"], one["high"]
    if None in (low, high):
        low, high = one["student_low"], one["student_high"]
    mean = with_interval(one["estimate"], low, high, unit)
    asked = []
    if one["threshold"] is not None:
        word = "other than" if one["either_way"] else "over"
        asked.append(f"{word} {one['threshold']:{form}}")
    if one["within"] is not None:
        asked.append(f"within {one['within']:{form}}")
    if one["over"] is not None:
        asked.append(f"in {one['needed']} seeds: {one['over']}")
    p = numbers_in(one, ("p_holm", "p_within_holm"), ".2g")
    over_all = numbers_in(one, ("p_all",), ".2g")
    effects = numbers_in(one, ("detectable", "detectable_within"), effect_format(unit))
    return [verdict, mean, ", ".join(asked), unit, p, over_all, effects.replace("+", ""), n]


def numbers_in(one: dict, names: Sequence[str], form: str) -> str:
    """The numbers of these names that a claim has, or "-"."""
    numbers = [f"{one[name]:{form}}" for name in names if one.get(name) is not None]
    return ", ".join(numbers) or "-"


def remarks(records: list[dict]) -> str:
    """A line per flag and per reason of a smaller family, with the claims that have it: what a
    reader must know beside the numbers."""
    names = {}
    for one in records:
        words = list(one["flags"])
        if one["family_reason"]:
            words.append(f"in a family smaller than the experiment, {one['family_reason']}")
        for line in words:
            names.setdefault(line, []).append(one["name"])
    lines = []
    for line, of_line in names.items():
        are_all = len(of_line) == len(records) > 1
        lines.append(f"{line}: {'all claims' if are_all else '; '.join(of_line)}")
    return "\n".join(lines)
