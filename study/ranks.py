"""Do the arms of an experiment come in a published order? Spearman's rank correlation, by seed and over the seeds.

    ranks = {"table 1": {"baseline": 0.0, "headwise": 0.040, ...}}      in a config: each arm's published gain

The correlation is that of the published gains with the arms' mean metric, over the seeds that all these arms have; a
loss counts as better where it is lower. Its interval is a bootstrap over the seeds, in which all arms of a seed are
drawn together. Its noise only ever disturbs an order, so the interval reaches up as far as it reaches down: the union
of the percentile and the basic interval covers in 92 to 97% of cases, six seeds (tests/test_ranks.py). p is the
share of all orders of the arms that agree with the published one as well, or better: of 100,000 at random.
"""

import math

import numpy as np
from scipy.stats import rankdata

from runs.probe import numbers
from study import stats
from study.page import Table

DRAWS = 10_000
ORDERS = 100_000


def spearman(values: np.ndarray, published: np.ndarray) -> np.ndarray:
    """values (..., arms), published (arms,) -> Spearman's correlation (...), ties with their mean rank; NaN if all are
    equal."""
    ranks, other = rankdata(values, axis=-1), rankdata(published)
    ranks, other = ranks - ranks.mean(-1, keepdims=True), other - other.mean()
    with np.errstate(invalid="ignore"):
        return (ranks @ other) / np.sqrt((ranks**2).sum(-1) * (other**2).sum())


def interval(values: np.ndarray, published: np.ndarray) -> tuple[float, float]:
    """(low, high) of the correlation of the means; values (seeds, arms), of at least two seeds."""
    rho = float(spearman(values.mean(0), published))
    drawn = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    low, high = np.nanquantile(spearman(values[drawn].mean(1), published), [0.025, 0.975])
    ends = (low, high, 2 * rho - low, 2 * rho - high)
    return max(-1.0, float(min(ends))), min(1.0, float(max(ends)))


def records(config, rows: list[dict]) -> list[dict]:
    """For each published order: the correlation by seed, that of the means, its interval and p, as
    claims.json keeps them. None: all means are equal, or of an interval, there is one seed."""
    kept = []
    for name, order in config.ranks.items():
        published, sign = np.array(list(order.values()), dtype=float), 1 if config.metric == "accuracy" else -1
        by_arm = [stats.contrast(rows, {arm: sign}, [config.metric]) for arm in order]
        seeds = sorted(set.intersection(*map(set, by_arm)))
        record: dict = {"name": name, "arms": len(order), "seeds": {}}
        kept.append(record)
        if not seeds:
            continue
        values = np.array([[by_seed[seed] for by_seed in by_arm] for seed in seeds])  # (seeds, arms)
        rho = float(spearman(values.mean(0), published))
        low, high = interval(values, published) if len(seeds) > 1 and math.isfinite(rho) else (math.nan, math.nan)
        record["seeds"] = dict(zip(map(str, seeds), numbers(spearman(values, published).tolist()), strict=True))
        record |= {"of_means": numbers(rho), "low": numbers(low), "high": numbers(high)}
        orders = np.random.default_rng(0).permuted(np.tile(np.arange(len(order)), (ORDERS, 1)), axis=1)
        at_least = int((spearman(orders, published) >= rho - 1e-9).sum())
        record["p"] = (1 + at_least) / (1 + ORDERS) if math.isfinite(rho) else None
    return kept


def table(records: list[dict]) -> Table | None:
    """A row per order: the correlation of the means with its interval, over how many seeds."""
    cells = []
    for one in records:
        cell = ["not run" if not one["seeds"] else "all means are equal", "", ""]
        if one.get("of_means") is not None:
            interval = "-" if one["low"] is None else f"{one['low']:+.2f} to {one['high']:+.2f}"
            cell = [f"{one['of_means']:+.2f}", interval, f"{one['p']:.2g}"]
        cells.append([one["name"], *cell, str(len(one["seeds"])), str(one["arms"])])
    title = "Spearman's correlation with a published order: bootstrap over seeds, p over random orders (one-sided)"
    return Table(title, ["order", "of the means", "95% interval", "p", "seeds", "arms"], cells) if cells else None
