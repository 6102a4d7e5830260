"""What every part of bench.py fills: pairs of times, ratios with intervals, and a Report.

seconds = interleave({"theirs": step, "ours": step}, config.pairs, config)
report.ratio("step, theirs / ours", seconds["theirs"], seconds["ours"], target=1.0)
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scipy.stats import quantile_test

from runs.hardware import seconds_of
from speed.config import BenchConfig


def interleave(sides: dict, pairs: int, config: BenchConfig) -> dict:
    """{name: [seconds, ...]}: calls each side once untimed, then all in turn, every other round in reverse order."""
    seconds = {name: [] for name in sides}
    for call in sides.values():
        seconds_of(call, config.device)
    for i in range(pairs):
        for name in list(sides)[:: -1 if i % 2 else 1]:
            seconds[name].append(seconds_of(sides[name], config.device))
    return seconds


def side_by_side(above: Callable, below: Callable, pairs: int, config: BenchConfig) -> tuple[list, list]:
    """(seconds of the one call, seconds of the other), which take turns."""
    return tuple(interleave({"above": above, "below": below}, pairs, config).values())


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """(median, low, high): the median of at least 6 values, and its 95% interval by order statistics.

    A single value is a size in bytes, which does not vary: it is its own interval.
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    interval = quantile_test(values, p=0.5).confidence_interval(0.95)
    return statistics.median(values), float(interval.low), float(interval.high)


def judge(low: float, high: float, target: float, at_most: bool = False) -> str:
    """Compares the interval with the target: met, missed or unresolved."""
    if at_most:
        low, high, target = -high, -low, -target
    return "met" if low >= target else "missed" if high < target else "unresolved"


@dataclass
class Report:
    """What a part measured: rows of a table, ratios with their raw pairs, and claims: ratios with a target."""

    part: str
    rows: list = field(default_factory=list)
    ratios: list = field(default_factory=list)
    claims: list = field(default_factory=list)

    def row(self, **values: object) -> None:
        self.rows.append(values)

    def ratio(
        self, name: str, above: Iterable, below: Iterable, *, target: float | None = None, at_most: bool = False
    ) -> None:
        """above is divided by below, pair by pair, as measured side by side.

        A target makes it a claim. It is what a user could take instead (1.0), or a limit, and never a guess.
        """
        pairs = list(zip(above, below, strict=True))
        middle, low, high = median_interval([a / b for a, b in pairs])
        ratio = {"name": name, "ratio": middle, "low": low, "high": high, "pairs": pairs}
        if target is None:
            self.ratios.append(ratio)
        else:
            self.claims.append(ratio | {"target": target, "at_most": at_most, "met": judge(low, high, target, at_most)})

    def __str__(self):
        def show(value):
            return f"{value:,.4g}" if isinstance(value, float) else str(value)

        rows = [[pair for pair in row.items() if pair[0] != "runs"] for row in self.rows]  # they are for the JSON file
        lines = [f"\n{self.part}", *("".join(f"  {name} {show(value)}" for name, value in row) for row in rows)]
        for ratio in self.ratios + self.claims:
            line = f"  {ratio['name']:<58}{ratio['ratio']:>8.3f}  [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            if "target" in ratio:
                line += f"  {'<=' if ratio['at_most'] else '>='} {ratio['target']:g}: {ratio['met']}"
            lines.append(line)
        return "\n".join(lines)
