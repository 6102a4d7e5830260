"""A table as text, and a page of HTML that needs no other file, made of texts, tables and figures.

print(Table("End accuracy", ["arm", "seed 0", "mean"], [["none", "25.1%", "25.1%"]]))
"""

import base64
import dataclasses
import html
from collections.abc import Iterable
from pathlib import Path


@dataclasses.dataclass
class Table:
    title: str
    header: list[str]
    cells: list[list[str]]  # a list per row; the first cell is the row's name

    def __str__(self) -> str:
        return "\n".join([*filter(None, [self.title]), *aligned([self.header, *self.cells])])


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows of cells as lines: names to the left, all other columns to the right, each as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = (zip(row, widths, strict=True) for row in rows)
    return ["  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(row)) for row in cells]


def mean_text(form: str, mean: float, low: float | None, high: float | None) -> str:
    """A mean and its interval, if it has one: "1.2500 (1.2000 to 1.3000)"."""
    return f"{mean:{form}}" + ("" if low is None else f" ({low:{form}} to {high:{form}})")


def page(title: str, parts: Iterable[str | Table | Path]) -> str:
    """The whole page. A Path is the file of a figure: the page holds the image itself, and not a link to it."""
    return PAGE.format(title=html.escape(title), body="\n".join(map(part_html, parts)))


def part_html(part: str | Table | Path) -> str:
    if isinstance(part, Path):
        image = base64.b64encode(part.read_bytes()).decode()
        return f'<img alt="{html.escape(part.stem)}" src="data:image/png;base64,{image}">'
    kind = "table" if isinstance(part, Table) else "text"
    return f'<pre class="{kind}">{html.escape(str(part))}</pre>'


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
img {{ max-width: 100%; display: block; margin: 1rem 0 }}
pre {{ margin: 1.2rem 0 }} .text {{ font: inherit; white-space: pre-wrap; overflow-wrap: anywhere }}
.table {{ font-size: 12px; overflow-x: auto }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""
