"""What the claims of an experiment can show, said before the first run, and what limits a verdict, said after it.

check_reach(config)                         UserError if a claim has too few seeds for any p under 0.05
lines(config, rows)                         a line per claim, for --dry_run: its smallest p, the effect it can see
flags(config, rows, selection, question)    what a reader of the verdict must know: ceiling, floor, edge ...
"""

import configurator
from configurator import UserError

import importlib
import math
import statistics
from pathlib import Path

from study import stats, tables
from study.claims import BY_LOG, distance_shown, number_shown
from study.rows import read_rows

TOP, BOTTOM = 0.95, 0.05  # of the way from chance to 1: arms beyond these are at the ceiling, or at chance


def reach(config) -> list[tuple[dict, str, float, int]]:
    """[(question, "above" or "within", smallest p after Holm, size of the family)], for all but the counts."""
    families = {}
    for question in tables.questions(config):
        claim = question["rule"]
        above, within = ("above", stats.threshold_of(claim), claim.get("sides", 2)), ("within", claim.get("within"), 1)
        for kind, asked, sides in (above, within):
            if asked is not None and "in" not in claim:
                p = stats.smallest_p(len(question["seeds"]), sides)
                families.setdefault(question["family"], []).append((question, kind, p))
    found = []
    for family in families.values():
        corrected = stats.holm([p for _, _, p in family])
        found += [(q, kind, p, len(family)) for (q, kind, _), p in zip(family, corrected, strict=True)]
    return found


def check_reach(config) -> None:
    for question, kind, p, size in reach(config):
        if p >= stats.LEVEL and not question["exploratory"]:
            sides = question["rule"].get("sides", 2) if kind == "above" else 1
            needed = next(n for n in range(2, 64) if size * stats.smallest_p(n, sides) < stats.LEVEL)
            n, others = len(question["seeds"]), f" after Holm's correction for {size} claims" if size > 1 else ""
            raise UserError(
                f"claims: {question['claim']}: {n} seeds give no p under {p:.2g}{others}, so it cannot be "
                f"supported; it needs {needed} seeds, or exploratory=true (docs/experiments.md, Claims)"
            )


def lines(config, rows: list[dict]) -> list[str]:
    """What each claim can show, from the spread of the rows there are, of those in `pilot`, or from `pair_spread`."""
    sources = [("its rows", rows)]
    if config.pilot is not None:
        sources.append((config.pilot, read_rows(Path(config.pilot))))
        if not sources[1][1]:
            raise UserError(f"pilot={config.pilot!r}: has no rows")
    found = {(q["claim"], q["setting"]): q for q in tables.questions(config)}
    said = {name: [] for name in found}
    for question, kind, p, size in reach(config):
        rule, n = question["rule"], len(question["seeds"])
        level = stats.LEVEL / size / (rule.get("sides", 2) if kind == "above" else 1)
        words = [f"{n} seeds give no p under {p:.2g}" + f" after Holm, {size} claims" * (size > 1)]
        words += ["cannot be supported"] if p >= stats.LEVEL else []
        spread, source, count = spread_of(question, sources)
        of = f"of {count} seeds of {source}"
        if spread is None and config.pair_spread is not None:  # of a pair; arms are taken to differ independently
            spread, of = config.pair_spread * math.sqrt(sum(w * w for w in question["weights"].values()) / 2), "assumed"
        if spread is not None and n > 1:
            of = f"(spread {spread:.3g}{' of the logarithm' * (question['of'][0] in BY_LOG)}, {of})"
            effect, band = stats.detectable(n, level)
            above = number_shown(question)(stats.threshold_of(rule) or 0.0, "g")
            if kind == "within":
                words.append(f"shows a band of {distance_shown(question, spread * band, '+-')} in 80% of cases {of}")
            elif math.isfinite(effect):
                words.append(f"sees {distance_shown(question, spread * effect)} beyond {above} in 80% of cases {of}")
            else:
                least = distance_shown(question, spread * stats.student_detectable(n, level))
                words.append(f"even Student's test would see no less than {least} beyond {above} {of}")
        else:
            words.append("no rows to take a spread from")
        said[question["claim"], question["setting"]].append("; ".join(words))
    text = []
    for name, question in found.items():
        rule, where = question["rule"], ", ".join(filter(None, name))
        exploratory = "exploratory: " * question["exploratory"]
        count = [f"a count: {rule['in']} of {len(question['seeds'])} seeds pass it"] if "in" in rule else []
        text.append(f"{where}: {exploratory}{'; '.join(said[name] or count)}")
    return text


def spread_of(question: dict, sources: list[tuple[str, list[dict]]]) -> tuple[float | None, str, int]:
    """(standard deviation of the contrast, where from, its seeds), of the first source with two seeds that differ."""
    for source, rows in sources:
        compared = [row for row in rows if "purpose" not in row]
        values = list(stats.contrast(compared, question["weights"], question["of"]).values())
        if len(values) > 1 and not stats.are_identical(values):
            return statistics.stdev(values), source, len(values)
    return None, "", 0


# ----------------------------------------------------------------------------------------------------------------------
# After the runs


def flags(config, rows: list[dict], choices: list[dict], question: dict) -> list[str]:
    """Words on what limits the verdict of a question. choices: of learning rates, as plan.choose_rates gives them."""
    cells = {cell: [r for r in rows if (r.get("setting"), r["arm"]) == cell] for cell in question["weights"]}
    if not all(cells.values()):
        return []
    words = ends_of_the_scale(config, cells, question["of"]) + unlike_pairs(cells)
    tried = {(setting, config.rate_of.get(arm, arm)) for setting, arm in cells}
    own = [choice for choice in choices if (choice["setting"], choice["arm"]) in tried]
    return list(dict.fromkeys([*words, *edges(own), *(word for choice in own for word in margins(choice))]))


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
    return len({value for row in rows if (value := tables.made_by(row, name)) is not None}) > 1


def edges(choices: list[dict]) -> list[str]:
    """Edge: a chosen rate is the lowest or the highest of those tried."""
    arms: dict = {}
    for choice in choices:
        if choice.get("is_edge"):
            arms.setdefault(choice["rate"], {})[choice["arm"]] = None
    names = {rate: ", ".join(own) if len(own) < 4 else f"{len(own)} arms" for rate, own in arms.items()}
    return [f"edge: {own} chose {rate:g} at the end of the grid" for rate, own in names.items()]


def margins(choice: dict) -> list[str]:
    """Margin: the next best rate is within a standard error, over the selection seeds, of the difference."""
    arm, rate, other = (choice.get(name) for name in ("arm", "rate", "other"))
    if other is None or not math.isfinite(choice["margin"]):
        return []
    if math.isnan(choice["error"]):
        return [f"one selection seed: the margin of {arm}'s rate over {other:g} has no standard error"]
    is_close = abs(choice["margin"]) < choice["error"]
    return [f"margin: {arm}'s rate {rate:g} and {other:g} are within a standard error"] if is_close else []
