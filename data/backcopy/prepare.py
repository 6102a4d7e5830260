"""
Bigram-Backcopy (Guo et al. 2024, "Active-Dormant Attention Heads"): a chain of characters in which
a few, the triggers, ask for a copy. A head has work at triggers and nowhere else.

    python data/backcopy/prepare.py                                # length 64, 8 triggers, 64,000 + 1,000 rows
    python data/backcopy/prepare.py --text=shakespeare.txt         # another text for the table of character pairs

A row is a chain behind a first token, <s>. After a trigger the character before the trigger is
repeated. After another character the next is drawn from a table: how often each character follows
it in the text. For the trigger "e":

    position   0   1  2  3  4  5  6  7  8
    token      <s> t  h  e  h  a  v  e  v
    label      t   h  e  h  a  v  e  v  ...
                         copies h     copies v

The text is by default the source code of Python's standard library, of which the `characters` most
frequent ones are taken; pairs with any other are not counted. Ids are 0 for <s>, then the
characters by falling frequency, so that the triggers, the most frequent ones, are 1 .. n_triggers.
The first character is drawn by frequency, and is no trigger: it would copy <s>. So no two triggers
ever stand side by side.

meta.json names the triggers as a kind of query, which meters.py measures apart, and holds the loss
of a predictor that knows the table and the rule: the entropy of the next token, which is 0 behind a
trigger.
"""

import platform
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import entr

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from base import configurator
from base.configurator import UserError, key
from data.drawn import cumulated, draw_next
from data.meta import UINT16_VOCAB
from data.pystdlib.prepare import read_sources
from data.text.prepare import read_text
from data.writing import Output, write_examples

GENERATOR = "data/backcopy/prepare.py"
VERSION = 1  # raise it when the same seed no longer gives the same rows


@dataclass
class Config(Output):
    text: str | None = key(
        None, "a text file for the table of pairs (None: Python's standard library)"
    )
    characters: int = key(
        96, "how many, the most frequent of the text", at_least=2, at_most=UINT16_VOCAB - 1
    )
    triggers: int = key(8, "how many of them, the most frequent, are triggers", at_least=1)
    seq_len: int = key(64, "length of a row", at_least=3)
    train_size: int = key(64_000, "rows of training", at_least=1)
    val_size: int = key(1_000, "rows of validation", at_least=1)
    seed: int = key(0, "seeds the rows; the table does not depend on it", at_least=0)


def main(argv):
    config = configurator.load(Config, argv, positional=None)
    alphabet, table, first = chain_of(config)
    sizes = {"train": config.train_size, "val": config.val_size}
    splits = {}
    for i, (split, size) in enumerate(sizes.items()):
        rng = np.random.default_rng([config.seed, i])
        examples = generate(rng, size, config.seq_len, table, first, config.triggers)
        loss = perfect_loss(examples[:, 0], table, first, config.triggers)
        splits[split] = [(examples, {"slice": str(config.seq_len), "perfect_loss": loss})]
    write_examples(
        config,
        GENERATOR,
        VERSION,
        splits,
        name="backcopy",
        vocab_size=len(alphabet) + 1,
        kinds={"trigger": list(range(1, config.triggers + 1))},
        alphabet=alphabet,
        python=None if config.text else platform.python_version(),
    )
    triggers = alphabet[: config.triggers]
    print(f"triggers: {triggers!r}; the perfect predictor loses {loss:.4f} nats on val")


def chain_of(config):
    """The alphabet, and the probabilities of the chain by id: pairs (K + 1, K + 1) and first
    character (K + 1,)."""
    text = read_text(config.text) if config.text else "".join(read_sources().values())
    count_of = Counter(text)
    K = config.characters
    if not config.triggers < K <= len(count_of):
        raise UserError(
            f"characters={K}: must be more than triggers={config.triggers}, and at most "
            f"{len(count_of)}, those of the text"
        )
    # of two that are as frequent, the one of the smaller code is first
    frequent = sorted(sorted(count_of), key=count_of.get, reverse=True)
    alphabet = "".join(frequent[:K])
    counts = np.array([0, *map(count_of.get, alphabet)])
    id_of = {character: i for i, character in enumerate(alphabet, 1)}
    ids = np.array([id_of.get(character, 0) for character in text])
    pairs = np.zeros((K + 1, K + 1), np.int64)
    np.add.at(pairs, (ids[:-1], ids[1:]), 1)
    pairs[:, 0] = 0
    # a character that no other follows is followed by any, as often as each occurs
    pairs[pairs.sum(1) == 0] = counts
    pairs[0] = 0
    table = pairs / np.maximum(pairs.sum(1, keepdims=True), 1)
    # id 0 and the triggers: no first character
    first = np.where(np.arange(K + 1) > config.triggers, counts, 0)
    return alphabet, table, first / first.sum()


def generate(rng, rows, seq_len, table, first, triggers):
    """Rows drawn independently: tokens and labels as (rows, 2, seq_len) uint16. table (K + 1, K +
    1) and first (K + 1,) are the probabilities of the next and of the first character."""
    sums = cumulated(table)
    tokens = np.zeros((rows, seq_len + 1), np.uint16)
    tokens[:, 1] = rng.choice(len(first), rows, p=first)
    for t in range(2, seq_len + 1):
        now = tokens[:, t - 1].astype(np.int64)
        drawn = draw_next(sums, now, rng.random(rows), len(table))
        tokens[:, t] = np.where(now <= triggers, tokens[:, t - 2], drawn)
    return np.stack([tokens[:, :-1], tokens[:, 1:]], axis=1)


def perfect_loss(tokens, table, first, triggers):
    """Nats a token: the mean entropy of the next token after those of `tokens` (N, T), 0 being
    <s>."""
    entropy = entr(table).sum(1)
    entropy[0] = entr(first[first > 0]).sum()
    entropy[1 : triggers + 1] = 0.0
    counts = np.bincount(tokens.ravel(), minlength=len(table))
    return float((counts * entropy).sum() / tokens.size)


if __name__ == "__main__":
    configurator.run(main)
