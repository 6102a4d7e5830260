"""
Repeated strings, the task of an induction head (Olsson et al. 2022, "In-context Learning and
Induction Heads"): what followed the same token before, follows it again.

    python data/induction/prepare.py                                # rows of 128 tokens of 64 ids

A row is a sequence of strings of 12 to 27 tokens. One string in four is drawn from a chain with a
fixed table of pairs; the others repeat one of the row's strings, however long ago. The table can be
learned by looking at one token, and is learned first. To copy, a model needs two layers: one that
brings to each token the token before it, and one that looks for the place where the present token
stood before. Here with shorter strings, a b c d e f and g h i; a star marks a label that counts:

    token    a b c d e f g h i a b c d e f g
    label    b c d e f g h i a b c d e f g .
    copies                           * *

Training predicts every next token. Validation counts copies alone: tokens of a repeat behind at
least 4 others of it. Rows of training are no files: each is drawn once, from the seeds and its
number (data/drawn.py).
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from base import configurator
from base.configurator import key
from data import drawn
from data.drawn import INDUCTION_IDS, LONGEST, induction, random_bits, sources_of
from data.writing import Output, write_drawn

GENERATOR = "data/induction/prepare.py"
VERSION = drawn.VERSION  # which rows of an experiment have
KNOWN = 4  # tokens of a repeat that stand before a copy that counts


@dataclass
class Config(Output):
    length: int = key(128, "tokens of a row", at_least=64, at_most=LONGEST)
    val_size: int = key(256, "rows of validation", at_least=8)
    seed: int = key(
        0, "seeds all rows; those of training depend on the run's seed, too", at_least=0
    )


def main(argv):
    config = configurator.load(Config, argv, positional=None)
    bits = random_bits("induction", config.length, f"{config.seed} val", 0, config.val_size)
    tokens, labels = induction(bits)
    labels[~is_copy(sources_of(bits))] = 0
    write_drawn(config, GENERATOR, "induction", [(tokens, labels)])


def is_copy(sources: np.ndarray) -> np.ndarray:
    """(n, T) -> bool (n, T): whether the label of each position, the next token, is a copy that
    counts: it and the KNOWN tokens before it repeat one string."""
    repeats = sources < np.arange(sources.shape[1])
    first = sources[:, :-KNOWN]
    last = sources[:, KNOWN:]
    counts = np.zeros(sources.shape, bool)
    counts[:, KNOWN - 1 : -1] = repeats[:, :-KNOWN] & (last - first == KNOWN)
    return counts


def chance(config) -> float:
    """The accuracy of a guess among the ids."""
    return 1 / INDUCTION_IDS


if __name__ == "__main__":
    configurator.run(main)
