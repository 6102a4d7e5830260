"""Do the arms of an experiment come in a published order? Spearman's rank correlation, by seed and over the seeds.

    ranks = {"table 1": {"baseline": 0.0, "headwise": 0.040, ...}}      in a config: each arm's published gain

    found = records(config, rows)       the numbers, as claims.json keeps them
    table(found), lines(config)         the table of the report; what --dry_run says of it

The correlation is that of the published gains with the arms' mean metric, over the seeds that all these arms have; a
loss counts as better where it is lower. Its interval is a bootstrap over the seeds, in which all arms of a seed are
drawn together, because no test of paired differences applies to an order. Noise only ever disturbs an order, and a
bootstrap adds noise: the correlations that it draws are too low, and where the true one is 1, the percentile interval
alone misses it in most simulated cases. So the interval reaches up as far as it reaches down (the basic bootstrap): it
is the union of both, which covers in 92 to 97% of cases, six seeds (tests/test_ranks.py).

p is the share of all orders of the arms that agree with the published one as well, or better: of 100,000 at random.
"""

import math
import statistics

import numpy as np
from scipy.stats import rankdata

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
    found = float(spearman(values.mean(0), published))
    drawn = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    low, high = np.nanquantile(spearman(values[drawn].mean(1), published), [0.025, 0.975])
    ends = (low, high, 2 * found - low, 2 * found - high)
    return max(-1.0, float(min(ends))), min(1.0, float(max(ends)))


def random_orders(published: np.ndarray) -> np.ndarray:
    """The correlations (ORDERS,) of random orders of the arms with the published one."""
    rng = np.random.default_rng(0)
    return spearman(rng.permuted(np.tile(np.arange(len(published)), (ORDERS, 1)), axis=1), published)


def records(config, rows: list[dict]) -> list[dict]:
    """For each published order and setting: the correlation by seed, that of the means, its interval and p."""
    found = []
    for name, order in config.ranks.items():
        published = np.array(list(order.values()), dtype=float)
        for setting in config.settings or [None]:
            by_arm = [stats.contrast(rows, {(setting, arm): 1.0}, [config.metric]) for arm in order]
            seeds = sorted(set.intersection(*(set(own) for own in by_arm)))
            record: dict = {"name": name, "setting": setting, "arms": len(order), "seeds": {}}
            if seeds:
                sign = 1 if config.metric == "accuracy" else -1
                values = sign * np.array([[own[seed] for own in by_arm] for seed in seeds])  # (seeds, arms)
                each = spearman(values, published)
                rho = float(spearman(values.mean(0), published))
                record["seeds"] = {str(seed): shown(value) for seed, value in zip(seeds, each, strict=True)}
                record["of_means"] = shown(rho)
                has_order = math.isfinite(rho)  # not if all means are equal
                ends = interval(values, published) if len(seeds) > 1 and has_order else (math.nan, math.nan)
                record |= {"low": shown(ends[0]), "high": shown(ends[1])}
                at_least = random_orders(published) >= rho - 1e-9
                record["p"] = float((1 + at_least.sum()) / (1 + ORDERS)) if has_order else None
            found.append(record)
    return found


def shown(value: float) -> float | None:
    """What JSON can hold; None where there is no correlation."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def table(found: list[dict]) -> Table | None:
    """A row per order: the correlation of the means with its interval, and what single seeds give."""
    header = ["order", "of the means", "95% interval", "p", "mean of single seeds", "lowest, highest", "seeds", "arms"]
    cells = []
    for one in found:
        name = ", ".join(filter(None, (one["name"], one["setting"])))
        each = [value for value in one["seeds"].values() if value is not None]
        if not one["seeds"] or one["of_means"] is None:
            why = "all means are equal" if one["seeds"] else "not run"
            cells.append([name, why, *[""] * 4, str(len(one["seeds"])), str(one["arms"])])
            continue
        ends = "-" if one["low"] is None else f"{one['low']:+.2f} to {one['high']:+.2f}"
        single = [f"{statistics.fmean(each):+.2f}", f"{min(each):+.2f}, {max(each):+.2f}"] if each else ["", ""]
        cells.append(
            [name, f"{one['of_means']:+.2f}", ends, f"{one['p']:.2g}", *single, str(len(each)), str(one["arms"])]
        )
    title = "Spearman's correlation with a published order: bootstrap over seeds, p over random orders (one-sided)"
    return Table(title, header, cells) if found else None


def lines(config) -> list[str]:
    """What each order can show, for --dry_run."""
    said = []
    for name, order in config.ranks.items():
        needed = np.quantile(random_orders(np.array(list(order.values()), dtype=float)), 1 - stats.LEVEL)
        said.append(
            f"{name}: {len(order)} arms; a correlation over {needed:.2f} is seen in 1 of 20 random orders (one-sided); "
            "its interval is a bootstrap over the seeds"
        )
    return said
