"""The rows of the part gpu: a line of out_dir/gpu.jsonl each, as soon as it is known, and the page
made of them.

A row belongs to a table, which is the name of a part unless the part says otherwise, and has a name
there. A row that is measured again counts instead of the earlier one.
"""

import gc
import json
import math
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from base import files
from runs.outdir import ROOT
from speed.config import BenchConfig

NAME = "gpu.jsonl"


class Rows:
    """Where a part puts what it measures."""

    def __init__(self, config: BenchConfig, part: str):
        self.file, self.part, self.is_gpu = (
            Path(config.out_dir) / NAME,
            part,
            config.device == "cuda",
        )

    def write(self, row: str, table: str | None = None, **numbers: Any) -> None:
        """Adds a row, in one write, so that parts side by side do not cut each other's."""
        values = {name: rounded(value) for name, value in numbers.items()}
        line = json.dumps({"table": table or self.part, "row": row} | values) + "\n"
        with files.open_to_append(self.file) as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        print("  " + line.strip(), flush=True)

    def predicted(self, row: str, value: Any, lacks: str = "") -> None:
        """Adds a row of docs/gpu.md's table, beside what is expected of an H100. lacks: why there
        is no value."""
        expected = predictions()
        unit, *limits = expected.get(row) or expected.get(row.partition(":")[0]) or [""]
        agrees = lacks or ("needs a GPU" if value is None else "not compared")
        if self.is_gpu and limits and value is not None:
            is_in = (
                value in limits
                if isinstance(value, str)
                else float(limits[0]) <= value <= float(limits[1])
            )
            agrees = "yes" if is_in else "no"
        self.write(
            row, "predicted", measured=value, unit=unit, expected=", ".join(limits), agrees=agrees
        )

    def attempt(self, row: str, measure: Callable, *args: Any) -> Any:
        """measure(*args), or None and a row with the error: it must not cost the rows behind it."""
        try:
            return measure(*args)
        except Exception as error:
            traceback.print_exc()
            lines = (str(error) or type(error).__name__).splitlines()
            self.write(row, error=f"{type(error).__name__}: {lines[0][:200]}")
            return None
        finally:
            gc.collect()
            if self.is_gpu:
                torch.cuda.empty_cache()


def rounded(value: Any) -> Any:
    """Four digits of a number, which are more than a measurement has; JSON has no infinity, which
    becomes a text."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def predictions() -> dict[str, list[str]]:
    """{row: [unit, least, most]} of the table of docs/gpu.md."""
    text = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    return {
        row: about
        for row, *about in re.findall(r"^\| `(.+?)` \| (.*?) \| (.*?) \| (.*?) \|", text, re.M)
    }


def newest(file: Path | str) -> list[dict]:
    """The rows of a gpu.jsonl, each once, as it was measured last."""
    found: dict = {}
    for row in files.read_jsonl(file, {"table": (str, 0, 999), "row": (str, 0, 999)}):
        found[row["table"], row["row"]] = row
    return list(found.values())


def page(about: dict, rows: list[dict]) -> str:
    """gpu.md: what it ran on, then a table of Markdown for each table of the rows."""
    lines = [f"- {name}: {value}" for name, value in about.items()]
    for table in dict.fromkeys(row["table"] for row in rows):
        of_table = [row for row in rows if row["table"] == table]
        columns = list(dict.fromkeys(name for row in of_table for name in row if name != "table"))
        lines += ["", f"## {table}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        for row in of_table:
            cells = [str(row.get(name, "")).replace("|", "/") for name in columns]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
