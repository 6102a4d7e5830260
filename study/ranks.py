"""Do the arms of an experiment come in a published order? Spearman's rank correlation, by seed and of the means.

    ranks = {"table 1": {"baseline": 0.0, "headwise": 0.040, ...}}      in a config: each arm's published number

The correlation is that of the published numbers with the arms' mean metric, over the seeds that all these arms have; a
loss counts as better where it is lower. p is the share of all orders of the arms that agree as well, or better.
"""

import itertools
from collections.abc import Sequence
from statistics import fmean

from scipy.stats import spearmanr

from study import stats
from study.page import Table


def agreement(values: Sequence[float], published: Sequence[float]) -> float | None:
    """Spearman's correlation, ties with their mean rank; None if all values are equal."""
    return None if min(values) == max(values) else float(f"{spearmanr(values, published).statistic:.4g}")


def records(config, rows: list[dict]) -> list[dict]:
    """For each published order: the correlation by seed, that of the means and its p, as claims.json keeps them."""
    kept = []
    for name, order in config.ranks.items():
        published, sign = list(order.values()), 1 if config.metric == "accuracy" else -1
        by_arm = [stats.contrast(rows, {arm: sign}, [config.metric]) for arm in order]
        seeds = sorted(set.intersection(*map(set, by_arm)))
        by_seed = {str(seed): agreement([of_arm[seed] for of_arm in by_arm], published) for seed in seeds}
        means = [fmean(of_arm[seed] for seed in seeds) for of_arm in by_arm] if seeds else [0.0]
        rho, orders = agreement(means, published), itertools.permutations(means)
        p = None if rho is None else fmean(agreement(other, published) >= rho for other in orders)
        kept.append({"name": name, "arms": len(order), "seeds": by_seed, "of_means": rho, "p": p})
    return kept


def table(records: list[dict]) -> Table | None:
    """A row per order: the correlation of the means, that of single seeds, and over how many seeds."""
    cells = []
    for one in records:
        by_seed = [rho for rho in one["seeds"].values() if rho is not None]
        cell = ["not run" if not one["seeds"] else "all means are equal", "", ""]
        if one["of_means"] is not None:
            cell = [f"{one['of_means']:+.2f}", f"{min(by_seed):+.2f} to {max(by_seed):+.2f}", f"{one['p']:.2g}"]
        cells.append([one["name"], *cell, str(len(one["seeds"])), str(one["arms"])])
    title = "Spearman's correlation with a published order; p over all orders of the arms (one-sided)"
    return Table(title, ["order", "of the means", "by seed", "p", "seeds", "arms"], cells) if cells else None
