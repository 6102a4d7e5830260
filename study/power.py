"""What the claims of an experiment can show, before the first run.

check_reach(config)         UserError if a claim has too few seeds for any p under 0.05
lines(config, rows)         a line per claim, for --dry_run: its smallest p, the effect it can see
"""

from configurator import UserError

import math
import statistics
from pathlib import Path

from study import stats
from study.claims import BY_LOG, distance_shown, number_shown, questions
from study.names import joined
from study.rows import read_rows


def reach(config) -> list[tuple[dict, str, float, int]]:
    """[(question, "above" or "within", smallest p after Holm, size of the family)], for all but the counts."""
    families = {}
    for question in questions(config):
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
    seen: dict = {}
    for question, kind, p, size in reach(config):
        words = [f"{len(question['seeds'])} seeds give no p under {p:.2g}" + f" after Holm, {size} claims" * (size > 1)]
        words += ["cannot be supported"] if p >= stats.LEVEL else []
        words.append(effect_seen(config, question, kind, size, sources))
        seen.setdefault((question["claim"], question["setting"]), []).append("; ".join(words))
    text = []
    for question in questions(config):
        name, rule = (question["claim"], question["setting"]), question["rule"]
        count = [f"a count: {rule['in']} of {len(question['seeds'])} seeds pass it"] if "in" in rule else []
        exploratory = "exploratory: " * question["exploratory"]
        text.append(f"{joined(*name)}: {exploratory}{'; '.join(seen.get(name, count))}")
    return text


def effect_seen(config, question: dict, kind: str, size: int, sources: list[tuple[str, list[dict]]]) -> str:
    """The effect, or the band (kind "within"), that a claim in a family of so many shows in 80% of cases, in words."""
    rule, n = question["rule"], len(question["seeds"])
    level = stats.LEVEL / size / (rule.get("sides", 2) if kind == "above" else 1)
    spread, source, count = spread_of(question, sources)
    of = f"of {count} seeds of {source}"
    if spread is None and config.pair_spread is not None:  # of a pair; arms are taken to differ independently
        spread, of = config.pair_spread * math.sqrt(sum(w * w for w in question["weights"].values()) / 2), "assumed"
    if spread is None or n < 2:
        return "no rows to take a spread from"
    of = f"(spread {spread:.3g}{' of the logarithm' * (question['of'][0] in BY_LOG)}, {of})"
    effect, band = stats.detectable(n, level)
    above = number_shown(question)(stats.threshold_of(rule) or 0.0, "g")
    if kind == "within":
        return f"shows a band of {distance_shown(question, spread * band, '+-')} in 80% of cases {of}"
    if math.isfinite(effect):
        return f"sees {distance_shown(question, spread * effect)} beyond {above} in 80% of cases {of}"
    least = distance_shown(question, spread * stats.student_detectable(n, level))
    return f"even Student's test would see no less than {least} beyond {above} {of}"


def spread_of(question: dict, sources: list[tuple[str, list[dict]]]) -> tuple[float | None, str, int]:
    """(standard deviation of the contrast, where from, its seeds), of the first source with two seeds that differ."""
    for source, rows in sources:
        compared = [row for row in rows if "purpose" not in row]
        values = list(stats.contrast(compared, question["weights"], question["of"]).values())
        if len(values) > 1 and not stats.are_identical(values):
            return statistics.stdev(values), source, len(values)
    return None, "", 0
