"""
MQAR, multi-query associative recall (Arora et al. 2023, "Zoology"): the model must name the value
shown with a key.

    python data/mqar/prepare.py                                # length 64, 4 pairs, 100,000 + 3,000 rows
    python data/mqar/prepare.py --slices=64/4,128/8,256/16     # several lengths / numbers of pairs in one set

A row shows key-value pairs, and then repeats their keys, the queries, at even positions. The label
stands at the query: there the model must name the key's value. For length 16, 3 pairs, vocabulary
16 (keys 1..7, values 8..15):

    position   0  1  2  3  4  5 | 6  7  8  9 10 11 12 13 14 15
    token      3  9  7 14  1  8 | 7  0  0  0  3  0  1  0  0  0
    label      .  .  .  .  .  . |14  .  .  .  9  .  8  .  .  .
              a key, its value ... slot 1      slot 3, slot 4

Keys are drawn without replacement from 1..V/2-1, values from V/2..V-1; 0 is filler, and as a label,
"nothing to predict". Slots are drawn without replacement, slot i = 1, 2, ... with a probability ~
i^(power - 1), and given to the keys in the order of their pairs: with the paper's power=0.01 most
queries follow soon after the pairs, with power=1 all slots are equally likely. A row of validation
that is also one of training is drawn again.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from base import configurator
from base.configurator import UserError, key
from data.meta import UINT16_VOCAB
from data.writing import Output, write_examples

GENERATOR = "data/mqar/prepare.py"
VERSION = 1  # raise it when the same seed no longer gives the same rows
# rows made at a time, to bound the memory; another number would give other rows for the same seed
BLOCK = 1024


@dataclass
class Config(Output):
    slices: list[str] = key(["64/4"], "lengths of rows / numbers of pairs, as in 64/4,128/8")
    vocab_size: int = key(
        8192, "keys are 1..V/2-1, values V/2..V-1", at_least=4, at_most=UINT16_VOCAB
    )
    power: float = key(
        0.01, "slot i has a probability ~ i^(power-1); 1: all alike", at_least=0, at_most=10
    )
    shift: int = key(
        0, "zeros in front of each row: with 1 the keys stand at odd positions", at_least=0
    )
    train_size: int = key(100_000, "rows of training, for each slice", at_least=1)
    val_size: int = key(3_000, "rows of validation, for each slice", at_least=1)
    seed: int = key(0, "seeds all rows", at_least=0)


def main(argv):
    config = configurator.load(Config, argv, positional=None)
    splits = generate_splits(config)
    write_examples(config, GENERATOR, VERSION, splits, name="mqar", vocab_size=config.vocab_size)


def parse_slices(config):
    """[(length, pairs), ...]. Raises UserError for a slice of which there is no row."""
    slices = []
    for text in config.slices:
        numbers = re.fullmatch(r" *(\d{1,9}) */ *(\d{1,9}) *", text, re.ASCII)
        if not numbers:
            raise UserError(f"slice {text!r}: write length/pairs, as in 64/4")
        length, pairs = int(numbers[1]), int(numbers[2])
        most = min(config.vocab_size // 2 - 1, length // 4)
        if length % 2 or not 1 <= pairs <= most:
            raise UserError(f"slice {text}: needs an even length, and 1 to {most} pairs")
        slices.append((length, pairs))
    if len(set(slices)) != len(slices) or not slices:
        raise UserError(f"slices={config.slices}: name some, each once, as in 64/4,128/8")
    return slices


def generate_splits(config):
    """{"train": [(rows of a slice, facts)], "val": ...}. No row is in both, and no slice depends on
    another."""
    splits = {"train": [], "val": []}
    for length, pairs in parse_slices(config):
        train_rng = np.random.default_rng([config.seed, 0, length, pairs])
        train = generate(train_rng, config.train_size, config, length, pairs)
        val_rng = np.random.default_rng([config.seed, 1, length, pairs])
        val = generate(val_rng, config.val_size, config, length, pairs)
        replace_rows_of(train, val, val_rng, config, length, pairs)
        facts = {"slice": f"{length}/{pairs}", "pairs": pairs}
        for split, examples in (("train", train), ("val", val)):
            padded = np.pad(examples, ((0, 0), (0, 0), (config.shift, 0)))
            splits[split].append((padded, facts))
    return splits


def generate(rng, rows, config, length, pairs):
    """Rows of one slice, drawn independently: tokens and labels as (rows, 2, length) uint16."""
    half = config.vocab_size // 2
    slots = length // 2 - pairs
    rates = np.arange(1, slots + 1) ** (config.power - 1.0)
    examples = np.zeros((rows, 2, length), np.uint16)
    for start in range(0, rows, BLOCK):
        tokens, labels = examples[start : start + BLOCK].swapaxes(0, 1)  # each (n, length), views
        n = len(tokens)
        keys = draw(rng, n, pairs, 1, half)
        values = draw(rng, n, pairs, half, config.vocab_size)
        tokens[:, 0 : 2 * pairs : 2] = keys
        tokens[:, 1 : 2 * pairs : 2] = values

        draw(rng, n, pairs, 0, pairs)  # is not used; without it the rows of a seed would be others
        # slots without replacement: those of the clocks that ring first, each at its rate
        times = rng.exponential(size=(n, slots)) / rates
        positions = 2 * pairs + 2 * np.argsort(times, axis=1)[:, :pairs]
        row = np.arange(n)[:, None]
        tokens[row, positions] = keys
        labels[row, positions] = values
    return examples


def draw(rng, n, count, low, high):
    """(n, count): in each row distinct numbers of low..high-1 in random order, by the first steps
    of a card shuffle."""
    decks = np.tile(np.arange(low, high, dtype=np.uint16), (n, 1))  # (n, cards)
    drawn = np.empty((n, count), np.uint16)
    row = np.arange(n)
    for i in range(count):  # swap the card at place i with one that lies there or behind it
        place = rng.integers(i, high - low, size=n)
        drawn[:, i] = decks[row, place]
        decks[row, place] = decks[:, i]
    return drawn


def replace_rows_of(train, val, rng, config, length, pairs):
    """Draws again, in place, the rows of validation that are also rows of training. Raises
    UserError if some are left after 100 turns."""
    rows = {row.tobytes() for row in train[:, 0]}
    for _ in range(100):
        seen = [i for i, row in enumerate(val[:, 0]) if row.tobytes() in rows]
        if not seen:
            return
        val[seen] = generate(rng, len(seen), config, length, pairs)
    what = f"so few rows are possible that {len(seen)} for validation are also for training"
    raise UserError(f"slice {length}/{pairs}: {what}; raise vocab_size or lower train_size")


def chance(config) -> float:
    """The accuracy of a guess among the values in context, over all queries of all slices."""
    slices = parse_slices(config)
    return len(slices) / sum(pairs for _, pairs in slices)


if __name__ == "__main__":
    configurator.run(main)
