"""
State tracking: at every position the model must name the state that the tokens so far lead to.

    python data/states/prepare.py --task=s3                         # rows of 32 tokens; validation also 64, 128, 256
    python data/states/prepare.py --task=parity --length=40 --slices=256

parity      bits, and their sum so far modulo 2
arithmetic  digits 0 to 4 with + - * between them, and, at digits, the value so far modulo 5: * goes before + and -, and
            there are no brackets (Deletang et al. 2022; Grazzi et al. 2024)
s3, s5      permutations of 3 or 5 things, all as likely, and their product so far, where (g h)(i) = g(h(i)): the word
            problem of the symmetric group (Merrill et al. 2024, "The Illusion of State in State-Space Models")

Tokens and states share their ids: 1 + a bit or a digit, 6, 7, 8 for + - *, and 1, 2, ... for
permutations in alphabetic order. The first row of training for length 8, data seed 0 and run seed
0; a dot is label 0, nothing to predict:

    parity      token    2   2   1   2   2   2   2   2
                label    2   1   1   2   1   2   1   2
    arithmetic  token    1   6   2   6   5   7   2   8
                label    1   .   2   .   1   .   5   .           0, 0 + 1, 0 + 1 + 4, 0 + 1 + 4 - 1
    s3          token    5   5   3   5   5   3   2   5
                label    5   4   6   2   3   1   2   3
    s5          token    7 103  79   7  40  96  74  57
                label    7 109  35  45 100  81  14  41

The sources of arithmetic label only the end of an expression; here every prefix counts, as in word
problems. Rows of training are no files: each is drawn once, from the seeds and its number
(data/drawn.py). Each length of validation is a slice, and counts only positions beyond the length
before. block_size must be at least the longest.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from base import configurator
from base.configurator import UserError, key
from data import drawn
from data.drawn import LONGEST, STATES, TASKS, rows
from data.writing import Output, write_drawn

GENERATOR = "data/states/prepare.py"
VERSION = drawn.VERSION  # which rows of an experiment have


@dataclass
class Config(Output):
    task: str = key("parity", "which states are tracked", choices=STATES)
    length: int = key(32, "tokens of a row of training", at_least=1, at_most=LONGEST)
    slices: list[int] = key(
        [64, 128, 256], "longer rows of validation", at_least=2, at_most=LONGEST
    )
    val_size: int = key(500, "rows of validation, for each length", at_least=1)
    seed: int = key(
        0, "seeds all rows; those of training depend on the run's seed, too", at_least=0
    )


def main(argv):
    config = configurator.load(Config, argv, positional=None)
    lengths = [config.length, *config.slices]
    if sorted(set(lengths)) != lengths:
        raise UserError(
            f"slices={config.slices}: must grow, and be longer than length={config.length}"
        )
    val = []
    shorter = 0
    for length in lengths:
        tokens, labels = rows(config.task, length, f"{config.seed} val", 0, config.val_size)
        labels[:, :shorter] = 0
        val.append((tokens, labels))
        shorter = length
    write_drawn(config, GENERATOR, config.task, val, tokenizer=f"states/{config.task}")


def chance(config) -> float:
    """The accuracy of a guess among the states, all of which are about as likely."""
    return 1 / TASKS[config.task][1]


if __name__ == "__main__":
    configurator.run(main)
