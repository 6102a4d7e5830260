"""The rows of the part gpu: a line of out_dir/gpu.jsonl each, as soon as it is known, and the page
made of them.

A row belongs to a table, which is the name of a part unless the part says otherwise, and has a name
there. A row that is measured again counts instead of the earlier one.
"""

import gc
import json
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from base import files
from speed.config import BenchConfig

NAME = "gpu.jsonl"


class Rows:
    """Where a part puts what it measures."""

    def __init__(self, config: BenchConfig, part: str):
        self.file = Path(config.out_dir) / NAME
        self.part = part

    def write(self, row: str, table: str | None = None, **numbers: Any) -> None:
        """Adds a row, in one write, so that parts side by side do not cut each other's."""
        values = {name: rounded(value) for name, value in numbers.items()}
        line = json.dumps({"table": table or self.part, "row": row} | values)
        with files.open_to_append(self.file) as file:
            file.write(line + "\n")
        print(f"  {line}", flush=True)

    def attempt(self, row: str, measure: Callable, *args: Any, **keys: Any) -> None:
        """Calls measure. An error becomes a row: it must not cost the rows behind it."""
        try:
            measure(*args, **keys)
        except Exception as error:
            traceback.print_exc()
            self.write(row, error=f"{type(error).__name__}: {error}"[:200])
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def rounded(value: Any) -> Any:
    """Four digits of a number, which are more than a measurement has; JSON has no infinity, which
    becomes a text."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def newest(file: Path | str) -> list[dict]:
    """The rows of a gpu.jsonl, each once, as it was measured last."""
    found = {}
    for row in files.read_jsonl(file, {"table": (str, 0, 999), "row": (str, 0, 999)}):
        found[row["table"], row["row"]] = row
    return list(found.values())


def page(about: dict, rows: list[dict]) -> str:
    """gpu.md: what it ran on, then a table of Markdown for each table of the rows."""
    tables: dict[str, list[dict]] = {}
    for row in rows:
        tables.setdefault(row["table"], []).append(row)
    lines = [f"- {name}: {value}" for name, value in about.items()]
    for table, of_table in tables.items():
        columns = dict.fromkeys(name for row in of_table for name in row if name != "table")
        lines += ["", f"## {table}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for row in of_table:
            cells = [str(row.get(name, "")).replace("|", "/") for name in columns]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
