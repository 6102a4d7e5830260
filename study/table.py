"""A table as text.

print(Table("End accuracy", ["arm", "seed 0", "mean"], [["none", "25.1%", "25.1%"]]))
"""

import dataclasses


@dataclasses.dataclass
class Table:
    title: str
    header: list[str]
    cells: list[list[str]]  # a list per row; the first cell is the row's name

    def __bool__(self) -> bool:
        return bool(self.cells)

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
