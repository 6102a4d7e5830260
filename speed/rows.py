"""What bench.py writes: rows, each at once a line of out_dir/PART.jsonl.

A row belongs to a table, which is the name of a part unless the part says otherwise, and has a name
there. Of rows with the same names the last one counts.
"""

import contextlib
import gc
import json
import math
import statistics
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from scipy.stats import quantile_test

from base import files
from runs.outdir import ROOT
from speed.config import BenchConfig
from speed.measure import interleave


class Rows:
    """Where a part puts what it measures. name: of its file, if that is not the part's."""

    def __init__(self, config: BenchConfig, part: str, name: str = ""):
        self.config = config
        self.part = part
        self.file = Path(config.out_dir) / f"{name or part}.jsonl"

    def write(self, row: str, table: str | None = None, **numbers: Any) -> None:
        """Adds a row, in one write, so that parts side by side do not cut each other's."""
        values = {"table": table or self.part, "row": row}
        for name, value in numbers.items():
            values[name] = rounded(value)
        with files.open_to_append(self.file) as file:
            file.write(json.dumps(values) + "\n")
        shown = {name: value for name, value in values.items() if name not in ("pairs", "runs")}
        print(f"  {json.dumps(shown)}", flush=True)

    @contextlib.contextmanager
    def attempt(self, row: str) -> Iterator[None]:
        """An error inside becomes a row: it must not cost the rows behind it."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            words = f"{type(error).__name__}: {error}".replace(f"{ROOT}/", "")
            self.write(row, error=words[:200])
        finally:
            gc.collect()
            torch.cuda.empty_cache()
            torch.compiler.reset()

    def compare(self, row: str, above: Callable, below: Callable) -> None:
        """Calls both in turn, and writes the ratio of their seconds."""
        seconds = interleave({"above": above, "below": below}, self.config)
        self.ratio(row, seconds["above"], seconds["below"])

    def ratio(self, row: str, above: list, below: list) -> None:
        """above is divided by below, pair by pair, as measured side by side."""
        pairs = list(zip(above, below, strict=True))
        ratio, low, high = median_interval([a / b for a, b in pairs])
        self.write(row, ratio=ratio, low=low, high=high, pairs=pairs)


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """(median, low, high): the median of at least 6 values, and its 95% interval by order
    statistics.

    A single value is a size in bytes, which does not vary: it is its own interval.
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    interval = quantile_test(values, p=0.5).confidence_interval(0.95)
    return statistics.median(values), float(interval.low), float(interval.high)


def rounded(value: Any) -> Any:
    """Four digits of a number, which are more than a measurement has; JSON has no infinity, which
    becomes a text."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)
