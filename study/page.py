"""A table as text for the terminal and as HTML that wraps, and a page of HTML that needs no other file.

    print(Table("End accuracy", ["arm", "seed 0", "mean"], [["none", "25.1%", "25.1%"]]))
    page("minimum", [heading("Tables"), table_html(table), figure_html(path)])

On a narrow screen each row of a table becomes a block: its name, then its cells, each with the name of its column.
"""

import base64
import csv
import dataclasses
import html
import io
import re
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


def page(title: str, parts: Iterable[str]) -> str:
    """The whole page; parts are HTML, and the title is text."""
    return PAGE.format(title=html.escape(title), body="\n".join(parts))


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def paragraphs(text: str) -> list[str]:
    """A paragraph for each part between empty lines; other line ends are spaces."""
    return [f"<p>{html.escape(part)}</p>" for part in text.split("\n\n") if part.strip()]


def lines_html(text: str) -> str:
    """A paragraph that keeps its line ends."""
    return f'<p class="lines">{html.escape(text)}</p>'


def figure_html(path: Path) -> str:
    """The image itself, and not a link to it."""
    image = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{image}"></figure>'


def table_html(table: Table) -> str:
    is_pairs = len(table.header) == 2  # names and values

    def cell(text: str, name: str) -> str:
        kind = ' class="empty"' if not text else ' class="number"' if NUMBER.match(text) and not is_pairs else ""
        return f'<td{kind} data-name="{html.escape(name)}">{html.escape(text)}</td>'

    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.header)
    rows = [
        "<tr>" + "".join(cell(text, name) for text, name in zip(row, table.header, strict=True)) + "</tr>"
        for row in table.cells
    ]
    caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
    kind = ' class="pairs"' if is_pairs else ""
    return "\n".join([f"<table{kind}>{caption}", f"<thead><tr>{head}</tr></thead><tbody>", *rows, "</tbody></table>"])


NUMBER = re.compile(r"[-+]?(\d|inf|nan)|-$|not run$")  # what stands on the right of its column


def csv_link(table: Table, name: str) -> str:
    """A link that holds the table as a file of comma-separated values."""
    text = io.StringIO()
    csv.writer(text).writerows([table.header, *table.cells])
    link = base64.b64encode(text.getvalue().encode()).decode()
    return f'<p><a download="{html.escape(name)}.csv" href="data:text/csv;base64,{link}">as CSV</a></p>'


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
figure {{ margin: 1rem 0 }} img {{ max-width: 100% }} code, p {{ overflow-wrap: anywhere }}
.lines {{ white-space: pre-line }} code {{ font-size: 13px }}
table {{ border-collapse: collapse; font-size: 13px; line-height: 1.35; margin: 1rem 0 1.6rem }}
caption {{ text-align: left; font-weight: bold; padding-bottom: .3rem }}
th, td {{ padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }}
th {{ vertical-align: bottom; font-weight: normal; color: #555 }} td {{ overflow-wrap: break-word; max-width: 30rem }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }}
@media (max-width: 700px) {{
  table, tbody, caption {{ display: block }} thead, .empty {{ display: none }}
  tr {{ display: flex; flex-wrap: wrap; gap: .1rem .9rem; border-bottom: 1px solid #ddd; padding: .4rem 0 }}
  td {{ border: 0; padding: 0; overflow-wrap: anywhere }} td:first-child {{ flex: 0 0 100%; font-weight: bold }}
  td:not(:first-child)::before {{ content: attr(data-name); display: block; color: #666; font-size: 11px }}
  .pairs td:first-child {{ flex: 0 0 45%; font-weight: normal }} .pairs td {{ flex: 1 }}
  .pairs td:not(:first-child)::before {{ display: none }}
}}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""
