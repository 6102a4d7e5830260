"""The claims of an experiment: what they ask, what they can show, what the rows say of each, and
what limits a verdict.

stats.py has the tests and intervals.
"""

import math
import statistics
from collections.abc import Sequence

import configurator
from configurator import UserError
from study import stats
from study.page import Table
from study.plan import LEAST_FREEDOM
from study.rows import mixer_of, script_of

# of the way from chance to 1: arms beyond these are at the ceiling, or at chance
TOP, BOTTOM = 0.95, 0.05

RATIO = "ratio of steps"
# meters
SHARES = {
    "share",
    "uniform",
    "sink",
    "to_sink",
    "sink_max",
    "sink_baseline",
    "gate_below_0.1",
    "induction",
}
NATS, AS_IT_IS = "nats a token", "as in the rows"
UNIT_OF = {
    "accuracy": "points", "slices": "points", "val_loss": NATS, "loss": NATS, "perplexity": AS_IT_IS,
    "word_perplexity": AS_IT_IS, "bits_per_byte": AS_IT_IS, "log_steps": RATIO, "lost": "points",
}  # fmt: skip
UNITS = {  # {unit: (how a number of the rows is shown in it, its format)}
    "of the residual stream": (lambda x: x, "+.3f"), NATS: (lambda x: x, "+.4f"), RATIO: (math.exp, ".2f"),
    "ratio": (math.exp, ".3f"), "steps": (math.exp, ",.0f"), "%": (lambda x: 100 * x, "+.1f"),
    "points": (lambda x: 100 * x, "+.1f"), AS_IT_IS: (lambda x: x, "+.4g"),
}  # fmt: skip
# the format of an effect, where it is a factor and no number of this unit
FACTORS = {"steps": ".2f"}


def seeds_of_claim(config, weights: dict[str, float]) -> list[int]:
    """The seeds that all arms of a contrast are run with."""
    return [
        seed
        for seed in config.seeds
        if all(seed in config.seeds_of.get(arm, [seed]) for arm in weights)
    ]


def questions(config) -> list[dict]:
    """[{claim, of, unit, rule, weights, seeds, exploratory, family, tests}] of each claim; rule:
    the claim. All claims that are declared are one family, and all exploratory ones another, but
    for those that name a smaller one. tests: what it asks, [("above" or "within", sides, smallest p
    after Holm, size of the family)]."""
    asked, families = [], {}
    for name, rule in config.claims.items():
        path, is_exploratory = rule.get("of", [config.metric]), rule.get("exploratory", False)
        about = {
            "claim": name,
            "of": path,
            "rule": rule,
            "weights": rule["contrast"],
            "exploratory": is_exploratory,
        }
        about |= {
            "unit": unit_of(path, rule["contrast"]),
            "seeds": seeds_of_claim(config, rule["contrast"]),
        }
        about |= {"family": (is_exploratory, rule.get("family")), "tests": []}
        asked.append(about)
        tests = families.setdefault(about["family"], [])
        if "in" not in rule:
            tests += [(about, "above", rule.get("sides", 2))] * (
                stats.threshold_of(rule) is not None
            )
            tests += [(about, "within", 1)] * ("within" in rule)
    for family in families.values():
        corrected = stats.holm(
            [stats.smallest_p(len(about["seeds"]), sides) for about, _, sides in family]
        )
        for (about, kind, sides), p in zip(family, corrected, strict=True):
            about["tests"].append((kind, sides, p, len(family)))
    return asked


def check_reach(config) -> None:
    """UserError for a claim whose seeds can give no p under 0.05."""
    for question in questions(config):
        for _, sides, p, size in question["tests"]:
            if p >= stats.LEVEL and not question["exploratory"]:
                needed = next(
                    n for n in range(2, 64) if size * stats.smallest_p(n, sides) < stats.LEVEL
                )
                n, others = (
                    len(question["seeds"]),
                    f" after Holm's correction for {size} claims" if size > 1 else "",
                )
                raise UserError(
                    f"claims: {question['claim']}: {n} seeds give no p under {p:.2g}{others}, so it cannot be "
                    f"supported; it needs {needed} seeds, or exploratory=true (docs/experiments.md, Claims)"
                )


def reach_table(config, rows: list[dict]) -> Table | None:
    """A line per test of a claim: what it can show, from the spread of the compared rows there are,
    or from `pair_spread`."""
    lines = []
    for question in questions(config):
        n, name = (
            len(question["seeds"]),
            question["claim"] + " (exploratory)" * question["exploratory"],
        )
        if "in" in question["rule"]:
            lines.append(
                [name, str(n), "-", "-", f"{question['rule']['in']} seeds pass it", "-", "-"]
            )
        for kind, sides, p, size in question["tests"]:
            shown = effect_seen(config, question, kind, stats.LEVEL / size / sides, rows)
            lines.append([name, str(n), f"{p:.2g}", str(size), *shown])
    title = "What each claim can show: the least p of its seeds, after Holm's correction, and what 80% of cases see"
    header = ["claim", "seeds", "least p", "in family", "sees", "unit", "spread"]
    return Table(title, header, lines) if lines else None


def family_reasons(config) -> str:
    """A line per reason of a smaller family, with its claims."""
    names: dict[str, list] = {}
    for name, rule in config.claims.items():
        for words in smaller_family(rule.get("family_reason")):
            names.setdefault(words, []).append(name)
    return lines_of(names, len(config.claims))


def effect_seen(config, question: dict, kind: str, level: float, rows: list[dict]) -> list[str]:
    """[the effect, or the band (kind "within"), that a claim shows in 80% of cases; its unit; the
    spread], in words."""
    n, weights, (convert, form) = (
        len(question["seeds"]),
        question["weights"],
        UNITS[question["unit"]],
    )
    values = list(stats.contrast(rows, weights, question["of"]).values())
    if len(values) > 1 and not stats.are_identical(values):
        spread, source = statistics.stdev(values), f"of {len(values)} seeds"
    else:  # pair_spread is of a pair; arms are taken to differ independently
        spread, source = (
            (config.pair_spread or 0) * math.sqrt(sum(w * w for w in weights.values()) / 2),
            "assumed",
        )
    effect, band = stats.detectable(n, level)
    if n < 2 or not spread or math.isinf(effect):
        return ["nothing: too few seeds" if spread else "no spread is known", question["unit"], "-"]
    numbers = stats.threshold_of(question["rule"]) or 0.0, spread * effect, spread * band
    forms = form, *[FACTORS.get(question["unit"], form)] * 2
    threshold, effect, band = (
        f"{convert(x):{of}}".lstrip("+") for x, of in zip(numbers, forms, strict=True)
    )
    sees = f"a band of {band}" if kind == "within" else f"{effect} beyond {threshold}"
    return [sees, question["unit"], f"{spread:.3g}, {source}"]


def judge_claims(config, rows: list[dict], choices: Sequence[dict] = ()) -> list[dict]:
    """Every question with what stats.judge finds out about it, and by_seed, missing, lost (see
    `unseen`) and flags, what a reader must know beside the verdict. choices: of learning rates, as
    plan.choose_rates gives them."""
    judged, families = [], {}
    for question in questions(config):
        values = stats.contrast(rows, question["weights"], question["of"])
        result = question | {"by_seed": values} | unseen(rows, question, values)
        judged.append(result)
        if "in" in question["rule"] and (result["missing"] or not values):
            result |= {
                "verdict": "not run",
                "n": len(values),
                "threshold": question["rule"]["above"],
            }
        else:
            families.setdefault(question["family"], []).append(result)
    for family in families.values():
        asked = [(list(result["by_seed"].values()), result["rule"]) for result in family]
        for result, numbers in zip(family, stats.judge(asked), strict=True):
            result.update(numbers)
    correct_over_all(judged)
    for result in judged:  # each was corrected for in the family that it was declared in
        if result["verdict"] == "inconclusive" and not can_be_supported(result):
            result["verdict"] = stats.UNDECIDABLE
        arms = {arm: [row for row in rows if row["arm"] == arm] for arm in result["weights"]}
        has_run, lost = result["verdict"] != "not run", ", ".join(map(str, result["lost"]))
        looks = undeclared_looks(arms, result) if has_run else []
        result["exploratory"] |= bool(looks)
        result["flags"] = (
            [f"no value in seeds {lost}"] * bool(lost) + looks + only_in_its_family(result)
        )
        result["modes"] = modes_of(rows, result) if has_run and "in" not in result["rule"] else None
        result["flags"] += mean_of_two_modes(result["modes"])
        if has_run:
            doubted = doubts(
                [
                    one
                    for one in choices
                    if one["arm"] in {config.rate_of.get(arm, arm) for arm in arms}
                ]
            )
            at_ends = ends_of_the_scale(config, arms) if result["of"] == ["accuracy"] else []
            result["flags"] += at_ends + unlike_pairs(arms) + unlike_rates(arms) + doubted
    return judged


def can_be_supported(question: dict) -> bool:
    """Whether the claim's seeds can give a corrected p under 0.05 in any of its tests."""
    return any(p < stats.LEVEL for _, _, p, _ in question["tests"])


def correct_over_all(judged: list[dict]) -> None:
    """Adds "p_all", the smallest p of a claim after Holm's correction over all confirmatory tests
    of the experiment, and "n_all", their number. A test that has not run counts, with p = 1.
    Exploratory claims get neither."""
    names = {"above": "p", "within": "p_within"}
    tests = []
    for result in judged:
        if not result["exploratory"]:
            tests += [(result, result.get(names[kind], 1.0)) for kind, *_ in result["tests"]]
    corrected = stats.holm([p for _, p in tests])
    for (result, _), p in zip(tests, corrected, strict=True):
        if result["verdict"] != "not run":
            result["p_all"] = min(p, result.get("p_all", 1.0))
            result["n_all"] = len(tests)


def only_in_its_family(result: dict) -> list[str]:
    """Says so where a verdict holds within the family of the claim, and not over all claims of the
    experiment."""
    if (
        result["verdict"] not in ("supported", "equivalent")
        or result.get("p_all", 0.0) < stats.LEVEL
    ):
        return []
    return [
        f"in its family alone: p is {result['p_all']:.2g} over all {result['n_all']} tests of the experiment"
    ]


def unseen(rows: list[dict], question: dict, values: dict[int, float]) -> dict[str, list[int]]:
    """The seeds without a value: "missing" where a run has no row, or not yet the score that the
    claim is about; "lost" where all have one, but one lacks the number, as that of a run that was
    not finite does."""
    path = question["of"][question["of"][0] == "log" :]
    score = path[1] if path[0] == "scores" else None
    have_it = (row for row in rows if score is None or not row["finite"] or score in row["scores"])
    there, seeds = {(row["arm"], row["seed"]) for row in have_it}, question["seeds"]
    missing = [
        seed for seed in seeds if any((arm, seed) not in there for arm in question["weights"])
    ]
    return {
        "missing": missing,
        "lost": [seed for seed in seeds if seed not in values and seed not in missing],
    }


def undeclared_looks(arms: dict[str, list[dict]], question: dict) -> list[str]:
    """Why this is a look at the verdict that was not declared before the runs; empty if it is none.
    One look is declared, when all seeds have run. A row holds the seeds that its arm was to be run
    with: others were added later, and those that the config no longer has were left out. Older rows
    do not hold them.
    """
    seeds, missing = question["seeds"], ", ".join(map(str, question["missing"]))
    planned = [[set(row.get("planned_seeds", seeds)) for row in of_arm] for of_arm in arms.values()]
    first = min(len(plan & set(seeds)) for of_arm in planned for plan in of_arm)
    words = [f"a look before all seeds have run, without {missing}"] * bool(missing)
    if left_out := sorted(
        set.intersection(*(set().union(*of_arm) for of_arm in planned)) - set(seeds)
    ):
        words.append(f"seeds {', '.join(map(str, left_out))} were planned and are left out")
    if first < len(seeds):
        words.append(
            f"seeds were added to the {first} that were planned at first, without a declared look"
        )
    return words


def modes_of(rows: list[dict], question: dict) -> dict | None:
    """A claim's runs as a count, where its outcome has two modes: the split between them, how many
    seeds of each arm are over it, out of how many, and p of the sign test of two arms that are
    compared. {split, over, n, p}; None: the runs show no two modes. Of more than two arms, whose
    levels differ, the contrast itself is looked at."""
    weights, by_seed = question["weights"], question["by_seed"]
    if len(weights) < 3:
        of_arms = {arm: stats.contrast(rows, {arm: 1.0}, question["of"]) for arm in weights}
        values = {arm: [of_arm[seed] for seed in by_seed] for arm, of_arm in of_arms.items()}
        unit = unit_of(question["of"], {"an arm": 1.0})
    else:
        values, unit = {"the contrast": list(by_seed.values())}, question["unit"]
    split = stats.two_modes(list(values.values()))
    if split is None:
        return None
    is_over = {name: [value > split for value in of_name] for name, of_name in values.items()}
    over = {name: sum(of_name) for name, of_name in is_over.items()}
    is_a_difference = len(weights) == 2 and math.prod(weights.values()) < 0
    p = stats.sign_test(*is_over.values()) if is_a_difference else None
    convert, form = UNITS[unit]
    return {
        "split": f"{convert(split):{form}}".lstrip("+") + f" {unit}",
        "over": over,
        "n": len(by_seed),
        "p": p,
    }


def mean_of_two_modes(modes: dict | None) -> list[str]:
    """Says of an outcome with two modes what its seeds are, since their mean is not."""
    if modes is None:
        return []
    counts = ", ".join(f"{name} {n}" for name, n in modes["over"].items())
    p = "" if modes["p"] is None else f" (sign test p {modes['p']:.2g})"
    return [
        f"two modes, and a mean is neither: over {modes['split']} are {counts} of {modes['n']} seeds{p}"
    ]


def ends_of_the_scale(config, arms: dict[str, list[dict]]) -> list[str]:
    """Ceiling or floor, where all arms are at the top or at chance, which the data set knows: no
    difference can be seen there."""
    script, places = script_of(config.prepare), []
    for rows in arms.values():
        values = [row["accuracy"] for row in rows if row["accuracy"] is not None]
        if not values or not hasattr(script, "chance"):
            return []
        chance = script.chance(configurator.build(script.Config, rows[0]["data"]))
        places.append((statistics.fmean(values) - chance) / (1 - chance))
    words = ["ceiling: all arms are at the top"] if min(places) > TOP else []
    return words + (["floor: all arms are at chance"] if max(places) < BOTTOM else [])


def unlike_pairs(arms: dict[str, list[dict]]) -> list[str]:
    """What differs between the runs of a seed besides their keys: commit, dtype, device, threads.
    The commits may differ where a hash of the code that the numbers depend on does not. Older rows
    do not hold all of them."""
    by_seed, words = {}, []
    for row in (row for rows in arms.values() for row in rows):
        made = {
            name: row.get(name) or row["config"].get(name)
            for name in ("dtype", "device", "threads")
        }
        made["commit"] = row.get("code_sha256") or row.get("git_commit")
        by_seed.setdefault(row["seed"], []).append(made)
    for name, word in {
        "commit": "commits",
        "dtype": "dtypes",
        "device": "devices",
        "threads": "threads",
    }.items():
        n = sum(
            len({made[name] for made in runs} - {None, "auto", 0}) > 1 for runs in by_seed.values()
        )
        words += [f"mixed {word} within {n} of {len(by_seed)} seeds"] if n else []
    return words


def unlike_rates(arms: dict[str, list[dict]]) -> list[str]:
    """The learning rates of arms of one mixer, where they are not the same."""
    by_mixer: dict = {}
    for arm, rows in sorted(arms.items()):
        by_mixer.setdefault(mixer_of(rows[0]), {})[arm] = rows[0]["config"].get("learning_rate")
    unlike = [rates for rates in by_mixer.values() if len(set(rates.values())) > 1]
    return [
        f"rates differ: {', '.join(f'{arm} {rate}' for arm, rate in rates.items())}"
        for rates in unlike
    ]


def doubts(choices: list[dict]) -> list[str]:
    """Edge: a chosen rate is the lowest or the highest of those tried. Margin: the next best rate
    is within a standard error of the difference, or nobody knows, since too few runs tell what
    noise is."""
    words, by_rate = [], {}
    for choice in choices:
        if choice.get("is_edge"):
            by_rate.setdefault(choice["rate"], []).append(choice["arm"])
    for rate, arms in by_rate.items():
        names = ", ".join(arms) if len(arms) < 4 else f"{len(arms)} arms"
        words.append(f"edge: {names} chose {rate:g} at the end of the grid")
    for choice in (choice for choice in choices if math.isfinite(choice.get("margin", math.nan))):
        arm, rate, other, error = (choice[name] for name in ("arm", "rate", "other", "error"))
        if math.isnan(error):
            words.append(
                f"margin: {arm}'s rate {rate:g} over {other:g}: too few runs tell what noise is"
            )
        elif abs(choice["margin"]) < error:
            words.append(f"margin: {arm}'s rate {rate:g} and {other:g} are within a standard error")
    noises = [choice["noise"] for choice in choices if choice["noise"] is not None]
    of_pairs = {noise["freedom"] for noise in noises if noise["spread"] is None}
    words += [
        f"rates: a standard error of {n + 1} seeds, too few to tell"
        for n in of_pairs
        if 0 < n < LEAST_FREEDOM
    ]
    return words


def unit_of(of: Sequence, weights: dict[str, float]) -> str:
    """The unit that the numbers of a claim are shown in, one of UNITS."""
    what = next((word for word in of if word in UNIT_OF), None)
    if of[0] == "log_steps" and abs(sum(weights.values())) > 1e-9:
        return "steps"
    if what is None and of[0] == "meters":
        return (
            "of the residual stream"
            if of[-1] == "effective"
            else "%"
            if SHARES & set(of)
            else AS_IT_IS
        )
    return "ratio" if of[0] == "log" else UNIT_OF.get(what, AS_IT_IS)


def record(claim: dict) -> dict:
    """What claims.json keeps of a judged claim, with all numbers in its unit. null: an end that too
    few seeds leave open, and what a claim does not have. detectable: so far beyond the threshold;
    of ratios, steps: by this factor."""
    values, (convert, _) = claim["by_seed"], UNITS[claim["unit"]]

    def shown(value: float | None) -> float | None:
        return None if value is None or not math.isfinite(value) else float(f"{convert(value):.6g}")

    numbers = (
        "low",
        "high",
        "student_low",
        "student_high",
        "threshold",
        "within",
        "detectable",
        "detectable_within",
    )
    return {
        "name": claim["claim"], "of": " ".join(map(str, claim["of"])), "unit": claim["unit"],
        "verdict": claim["verdict"], "exploratory": claim["exploratory"], "either_way": "other_than" in claim["rule"],
        "family": claim["rule"].get("family"), "family_reason": claim["rule"].get("family_reason"),
        # sum and not fmean: the last digits of the files that are there
        "estimate": shown(sum(values.values()) / len(values)) if values else None,
        **{name: shown(claim.get(name)) for name in numbers},
        **{name: claim.get(name) for name in ("p", "p_holm", "p_within_holm", "p_all", "over", "needed", "sides")},
        "modes": claim["modes"],
        "seeds": {str(seed): shown(value) for seed, value in values.items()}, "flags": claim["flags"],
    }  # fmt: skip


def table(records: list[dict]) -> Table | None:
    """A line per claim, of what claims.json keeps of it; all numbers but p and seeds are in its
    unit."""
    title = (
        "Claims: the mean over the seeds with its exact 95% interval (one-sided: two bounds; where few seeds leave it "
        "open, Student's),\np after Holm's correction over its family, and over all tests of the experiment that were "
        "declared, of two\nmodes how many seeds of each arm are in the upper one, and the effect or the band that 80% "
        "of such would show"
    )
    header = [
        "claim",
        "verdict",
        "mean (interval)",
        "asked",
        "unit",
        "p",
        "p over all",
        "modes",
        "could see",
        "seeds",
    ]
    return (
        Table(title, header, [[one["name"], *cells_of(one)] for one in records])
        if records
        else None
    )


def cells_of(one: dict) -> list[str]:
    """The cells of a claim's line behind its name."""
    form, n, verdict = (
        UNITS[one["unit"]][1],
        len(one["seeds"]),
        "exploratory: " * one["exploratory"] + one["verdict"],
    )
    if one["verdict"] == "not run" or one["estimate"] is None:
        return [verdict, *["-"] * 7, str(n)]
    exact, student = (one["low"], one["high"]), (one["student_low"], one["student_high"])
    low, high = student if None in exact else exact
    mean = f"{one['estimate']:{form}}" + (
        "" if low is None else f" ({low:{form}} to {high:{form}})"
    )
    words = {"threshold": "other than" if one["either_way"] else "over", "within": "within"}
    asked = [f"{word} {one[name]:{form}}" for name, word in words.items() if one[name] is not None]
    asked += [] if one["over"] is None else [f"in {one['needed']} seeds: {one['over']}"]
    p = [f"{one[name]:.2g}" for name in ("p_holm", "p_within_holm") if one[name] is not None]
    effects, form = (
        [one[name] for name in ("detectable", "detectable_within")],
        FACTORS.get(one["unit"], form),
    )
    seen = [f"{effect:{form}}".lstrip("+") for effect in effects if effect is not None]
    over_all = "-" if one.get("p_all") is None else f"{one['p_all']:.2g}"
    p, seen = (", ".join(part) or "-" for part in (p, seen))
    return [
        verdict,
        mean,
        ", ".join(asked),
        one["unit"],
        p,
        over_all,
        count_of_modes(one),
        seen,
        str(n),
    ]


def count_of_modes(one: dict) -> str:
    """'2, 8 of 8 (p 0.031)': so many seeds of each arm are over the split between two modes; '-':
    there are no two."""
    modes = one.get("modes")
    if modes is None:
        return "-"
    p = "" if modes["p"] is None else f" (p {modes['p']:.2g})"
    return f"{', '.join(map(str, modes['over'].values()))} of {modes['n']}{p}"


def remarks(records: list[dict]) -> str:
    """A line per flag and per reason of a smaller family, with the claims that have it: what a
    reader must know beside the numbers."""
    names: dict[str, list] = {}
    for one in records:
        for words in one["flags"] + smaller_family(one["family_reason"]):
            names.setdefault(words, []).append(one["name"])
    return lines_of(names, len(records))


def smaller_family(reason: str | None) -> list[str]:
    return [f"in a family smaller than the experiment, {reason}"] if reason else []


def lines_of(names: dict[str, list[str]], n_claims: int) -> str:
    """{words: the claims that they are about} as a line each."""
    lines = []
    for words, of_words in names.items():
        are_all = len(of_words) == n_claims > 1
        lines.append(f"{words}: {'all claims' if are_all else '; '.join(of_words)}")
    return "\n".join(lines)
