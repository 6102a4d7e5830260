"""The error of a mean over text, whose neighbouring tokens are alike, by a block bootstrap.

The losses of n neighbouring tokens say less than n independent ones would, but blocks of many tokens in a row are
nearly independent: whole blocks are drawn with replacement, as many as there are, and the mean of what was drawn varies
from draw to draw as it would from text to text. The error is that of the text, and holds nothing about the seed of a
run.
"""

import numpy as np

DRAWS = 2000  # the standard error itself then has a relative error of 1.6%


def block_sums(rows: np.ndarray, rows_per_block: int) -> np.ndarray:
    """(n, 2) sums and counts of rows in the order of the text -> (blocks, 2). The last block may be smaller."""
    return np.array([rows[i : i + rows_per_block].sum(0) for i in range(0, len(rows), rows_per_block)])


def standard_error(blocks: np.ndarray, draws: int = DRAWS, seed: int = 0) -> float:
    """The standard error of sum / count over all blocks; blocks (n, 2): the sum and the count of each. Of a paired
    difference the sums are differences: what two models both find hard cancels."""
    rng, n = np.random.default_rng(seed), len(blocks)
    drawn = np.array([blocks[rng.integers(n, size=n)].sum(0) for _ in range(draws)])
    # n / (n - 1): the n blocks spread less around their own mean than around that of all text
    return float(np.std(drawn[:, 0] / drawn[:, 1], ddof=1) * np.sqrt(n / (n - 1)))
