"""The error of a mean over text, whose neighbouring tokens are alike, by a block bootstrap.

A model that is better on one line of a file is better on the next one too, so the losses of n tokens say less than n
independent ones would. Blocks of many tokens in a row are nearly independent: whole blocks are drawn with replacement,
as many as there are, and the mean of what was drawn varies from draw to draw as the mean would from text to text.

The error is that of the text: how much the number would differ on other text of the same kind. It holds nothing about
the seed of a run.
"""

import numpy as np

DRAWS = 2000  # the standard error itself then has a relative error of 1.6%


def block_sums(rows: np.ndarray, rows_per_block: int) -> np.ndarray:
    """(n, 2) sums and counts of rows in the order of the text -> (blocks, 2). The last block may be smaller."""
    starts = range(0, len(rows), rows_per_block)
    return np.array([rows[start : start + rows_per_block].sum(0) for start in starts])


def standard_error(blocks: np.ndarray, draws: int = DRAWS, seed: int = 0) -> float:
    """The standard error of sum / count over all blocks; blocks (n, 2): the sum and the count of each.

    Of a paired difference the sums are differences: two models have read the same tokens, and what both find hard
    cancels.
    """
    rng, n = np.random.default_rng(seed), len(blocks)
    drawn = np.array([blocks[rng.integers(n, size=n)].sum(0) for _ in range(draws)])
    # n / (n - 1): the n blocks spread less around their own mean than around that of all text
    return float(np.std(drawn[:, 0] / drawn[:, 1], ddof=1) * np.sqrt(n / (n - 1)))
