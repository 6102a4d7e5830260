"""A table as text, and a page of HTML that needs no other file, made of texts, tables and figures.

print(Table("End accuracy", ["arm", "seed 0", "mean"], [["none", "25.1%", "25.1%"]]))
"""

import base64
import dataclasses
import html
from collections.abc import Iterable
from pathlib import Path

from base.files import REPORT_END, check_output, write_text


@dataclasses.dataclass
class Table:
    title: str
    header: list[str]
    cells: list[list[str]]  # a list per row; the first cell is the row's name

    def __str__(self) -> str:
        return "\n".join([self.title, *aligned([self.header, *self.cells])])


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows of cells as lines: names to the left, all other columns to the right, each as wide as
    its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        line = name.ljust(widths[0])
        for cell, width in zip(cells, widths[1:], strict=True):
            line += "  " + cell.rjust(width)
        lines.append(line.rstrip())
    return lines


def write_page(path: Path, parts: Iterable[str | Table | Path]) -> Path:
    """Writes texts, tables and figures as one page, which holds each image itself, and not a link.
    Returns the path."""
    check_output(path, "report")
    body = []
    for part in filter(None, parts):
        if isinstance(part, Path):
            image = base64.b64encode(part.read_bytes()).decode()
            body.append(f'<img alt="{html.escape(part.stem)}" src="data:image/png;base64,{image}">')
        else:
            kind = "table" if isinstance(part, Table) else "text"
            body.append(f'<pre class="{kind}">{html.escape(str(part))}</pre>')
    title = html.escape(path.parent.resolve().name)
    write_text(path, PAGE.format(title=title, body="\n".join(body)))
    return path


# its policy lets a browser load nothing and run nothing that a name or a text might have brought in
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
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
PAGE += f"{REPORT_END}\n"  # by which a later call knows the file as its own
