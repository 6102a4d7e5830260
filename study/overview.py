"""The claims of all experiments in one figure and on one page, from the claims.json of each and from nothing else.

python plot.py results      # results/claims.png and results/claims.html

experiment.py writes claims.json beside the rows. Claims of one unit share a panel: points of accuracy, per cent of a
weight, nats, ratios of steps.
"""

from configurator import UserError

import html
from pathlib import Path

from runs.files import read_json, wrong_field
from runs.outdir import write_text
from study import claims, stats
from study.page import figure_html, page, paragraphs, table_html

ABOUT = (
    "Every claim of every experiment of this folder: the mean of its contrast within seeds with the exact 95% interval "
    "(two bounds of 95% each where the claim is one-sided), its threshold, and each seed. Claims of one unit share a "
    "panel. Where few seeds leave the exact interval open, Student's is drawn; hollow marks are exploratory. "
    "'Can see' is the effect beyond the threshold that a comparison of this spread shows in 80% of cases "
    "(nothing: its seeds give no p under the level). "
    "How claims are judged: docs/experiments.md."
)

NUMBER = (float, -1e30, 1e30, None)
RECORD = {
    "name": (str, 0, 999), "setting": (str, 0, 999, None), "of": (str, 0, 999), "unit": set(claims.UNITS),
    "verdict": set(stats.WORDS), "exploratory": (bool, 0, 1), "either_way": (bool, 0, 1), "estimate": NUMBER,
    "low": NUMBER, "high": NUMBER, "student_low": NUMBER, "student_high": NUMBER, "threshold": NUMBER,
    "within": NUMBER, "detectable": NUMBER, "detectable_within": NUMBER,
    "p": NUMBER, "p_holm": NUMBER, "p_within_holm": NUMBER,
    "over": (int, 0, 1 << 30, None), "needed": (int, 0, 1 << 30, None), "seeds": {str: (float, -1e30, 1e30)},
    "flags": [(str, 0, 9999), 0, 999],
}  # fmt: skip


def read_claims(folder: Path) -> dict[str, list[dict]]:
    """{experiment: its claims}, from the claims.json in each folder of this one. Raises UserError for a damaged one."""
    found = {}
    for file in sorted(folder.glob("*/claims.json")):
        about = read_json(file)
        if wrong := wrong_field(about, {"claims": [RECORD, 0, 1 << 16]}):
            raise UserError(f"{file}: cannot be drawn: {wrong}")
        found[file.parent.name] = about["claims"]
    return {name: own for name, own in found.items() if own}


def draw(folder: Path) -> list[Path]:
    """Writes claims.png and claims.html into the folder, and returns their paths. Raises UserError."""
    found = read_claims(folder)
    records = [one | {"experiment": name} for name, own in found.items() for one in own]
    records = [one for one in records if one["verdict"] != "not run" and one["seeds"]]
    if not records:
        raise UserError(f"{folder}: no claim of an experiment has been judged yet, nothing to draw")
    declared, units = {one["experiment"] for one in records if not one["exploratory"]}, list(claims.UNITS)
    records.sort(key=lambda one: (units.index(one["unit"]), one["experiment"] not in declared))
    figure = claims.forest(records, folder / "claims.png", "unit")
    parts = [*paragraphs(ABOUT), figure_html(figure)]
    for name, own in found.items():
        link = f"{html.escape(name)}/report.html"
        parts += [f'<h2><a href="{link}">{html.escape(name)}</a></h2>', table_html(claims.table(own))]
    write_text(folder / "claims.html", page("Claims", parts))
    return [figure, folder / "claims.html"]
