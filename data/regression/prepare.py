"""
In-context linear regression (Garg et al. 2022, "What Can Transformers Learn In-Context?"), on
tokens: a task that a copy of an earlier answer does not solve.

    python data/regression/prepare.py                               # rows of 12 examples, 36 tokens of 81 ids

A row has a linear function of its own, y = w1 x1 + w2 x2, and shows examples of it: x1 x2 y x1 x2 y
... Both weights are drawn from -2, ..., 2 and all x from 1, ..., 8, each value as likely, so that y
is one of -32, ..., 32. Ids are 1, ..., 8 for x1, 9, ..., 16 for x2 and 17, ..., 81 for y. The label
of an x2 is the y behind it. Nothing else is predicted, since x1 and x2 are drawn at random. The
first row of training for 5 examples, data seed 0 and run seed 0, which has w1 = -1 and w2 = 2; a
dot is label 0:

    regression  token    2  11  53   1  15  62   8  10  45   3  10  50   7  10  46
                label    .  53   .   .  62   .   .  45   .   .  50   .   .  46   .
                value    2   3   4   1   7  13   8   2  -4   3   2   1   7   2  -3

Validation counts a y behind at least six examples. There, on 4,000 rows (24,000 labels), the
accuracy is:

    the best constant, y = 0                                              6.7%
    the y of the nearest earlier x (of equally near ones, the last)      28.3%
    the mean of earlier y, weighted by a Gaussian of the distance to x   30.7%  (the best of five widths)
    an earlier y, chosen by somebody who knows the answer                53.0%
    least squares on the earlier examples, rounded                      100.0%

So no way to choose an earlier y and copy it is right in more than 53%. Least squares is exact as
soon as two examples are not proportional.

Pilots of a small softmax model without a gate chose these values. Where x was one of -4, ..., 4,
with these weights, it was at 35% after 2,200 steps. Where the weights had 64 values, it was at 37%
after 900.

Rows of training are no files: each is drawn once, from the seeds and its number (data/drawn.py).
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from base import configurator
from base.configurator import key
from data import drawn
from data.drawn import LONGEST, WEIGHTS, X_LEVELS, rows
from data.writing import Output, write_drawn

GENERATOR = "data/regression/prepare.py"
VERSION = drawn.VERSION  # which rows of an experiment have
KNOWN = 6  # examples that stand before a y that counts


@dataclass
class Config(Output):
    examples: int = key(
        12, "examples of a row, three tokens each", at_least=KNOWN + 1, at_most=LONGEST // 3
    )
    val_size: int = key(256, "rows of validation", at_least=1)
    seed: int = key(
        0, "seeds all rows; those of training depend on the run's seed, too", at_least=0
    )


def main(argv):
    config = configurator.load(Config, argv, positional=None)
    tokens, labels = rows(
        "regression", 3 * config.examples, f"{config.seed} val", 0, config.val_size
    )
    labels[:, : 3 * KNOWN] = 0
    write_drawn(config, GENERATOR, "regression", [(tokens, labels)])


def chance(config) -> float:
    """The accuracy of the best constant, y = 0: over all weights and x, how often it is right."""
    weights = np.arange(WEIGHTS) - WEIGHTS // 2
    x = np.arange(1, X_LEVELS + 1)
    terms = np.outer(weights, x).ravel()  # w1 x1, and as often w2 x2
    y = terms[:, None] + terms
    return float((y == 0).mean())


if __name__ == "__main__":
    configurator.run(main)
