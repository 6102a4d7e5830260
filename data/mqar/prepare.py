"""
MQAR, multi-query associative recall (Arora et al. 2023, "Zoology"): the model must name the value
shown with a key.

    python data/mqar/prepare.py                                   # length 64, 4 pairs, 100,000 + 3,000 rows
    python data/mqar/prepare.py --slices=64/4,128/8,256/16        # several lengths / numbers of pairs in one set
    python data/mqar/prepare.py --task=forgetting                 # or composition: two more tasks, below

A row shows `pairs` key-value pairs, and then repeats keys, the queries, at some of the remaining
even positions. The label stands at the query: there the model must name the key's value. For length
16, 3 pairs, vocabulary 16 (keys 1..7, values 8..15) and zero filler:

    position   0  1  2  3  4  5 | 6  7  8  9 10 11 12 13 14 15
    token      3  9  7 14  1  8 | 7  0  0  0  3  0  1  0  0  0
    label      .  .  .  .  .  . |14  .  .  .  9  .  8  .  .  .
              a key, its value ... slot 1      slot 3, slot 4

Keys are drawn without replacement from 1..V/2-1, values from V/2..V-1; 0 is filler, and as a label,
"nothing to predict". Slots are drawn without replacement, slot i = 1, 2, ... with a probability ~
i^(power - 1), and given to the queried keys in the order of their pairs: with the paper's
power=0.01 most queries follow soon after the pairs, with power=1 all slots are equally likely. A
row of validation that is also one of training is drawn again.

Zoology has two more such tasks (its forgetting_mqar.py, compositional_ar.py), drawn here for 4
pairs and 24 ids. In forgetting some keys are shown again behind all pairs, and the label is a key's
last value. In composition a value, of the last third of the ids, belongs to two keys, of the first
and the second third; the pairs are a grid, so that neither key tells the value. A query repeats
both keys, the label stands at the second, and a slot has 3 positions.

    forgetting  token   10  15   8  13   7  14   6  12   7  17   6  22   8   .   6   .   7   .  10   .
                label    .   .   .   .   .   .   .   .   .   .   .   .  13   .  22   .  17   .  15   .
    composition token    6  10  16   6  12  18   5  12  22   5  10  17   6  10   .   6  12   .   5  10   .   5  12   .
                label    .   .   .   .   .   .   .   .   .   .   .   .   .  16   .   .  18   .   .  17   .   .  22   .

In Zoology a new value may by chance be the one forgotten, and positions without a pair or a query
hold random tokens by default.
"""

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from base import configurator
from base.configurator import UserError, key
from base.rules import show
from data.meta import UINT16_VOCAB
from data.writing import Output, claim, write_examples

GENERATOR = "data/mqar/prepare.py"
VERSION = 1  # raise it when the same seed no longer gives the same rows
# rows made at a time, to bound the memory; another number would give other rows for the same seed
BLOCK = 1024
SIZES = {"recall": 2, "forgetting": 2, "composition": 3}  # task: positions of a pair, and of a slot


@dataclass
class Config(Output):
    task: str = key("recall", "what a query asks for", choices=SIZES)
    slices: list[str] | None = key(
        None, "length/pairs, as in 64/4,128/8; None: the one slice of seq_len and pairs"
    )
    seq_len: int = key(64, "length of a row, even", at_least=2)
    pairs: int = key(4, "key-value pairs in a row", at_least=1)
    updates: int | None = key(
        None, "forgetting: how many keys get another value; None: half of them", at_least=1
    )
    vocab_size: int = key(
        8192,
        "keys are 1..V/2-1, values V/2..V-1; composition: thirds of it",
        at_least=4,
        at_most=UINT16_VOCAB,
    )
    power: float = key(
        0.01,
        "slot i is drawn with a probability ~ i^(power-1); 1: all alike",
        at_least=0,
        at_most=10,
    )
    shift: int = key(
        0,
        "filler in front of each row, of zeros: with 1 the keys stand at odd positions",
        at_least=0,
    )
    train_size: int = key(100_000, "rows of training, for each slice", at_least=1)
    val_size: int = key(3_000, "rows of validation, for each slice", at_least=1)
    seed: int = key(0, "seeds all rows", at_least=0)


def main(argv):
    config = configurator.load(
        Config, argv, positional=None, program=GENERATOR, description=__doc__
    )
    slices = parse_slices(config)
    out_dir, about = claim(config, GENERATOR, VERSION)
    write_examples(
        out_dir,
        generate_splits(config, slices),
        name="mqar" if config.task == "recall" else f"mqar {config.task}",
        tokenizer="mqar",
        vocab_size=config.vocab_size,
        **about,
    )


def parse_slices(config):
    """[(length, pairs), ...], each of them checked."""
    texts = config.slices
    if texts is None:
        texts = [f"{config.seq_len}/{config.pairs}"]
    elif config.seq_len != Config.seq_len or config.pairs != Config.pairs:
        raise UserError("slices names lengths and pairs; leave out seq_len and pairs")
    if config.updates and config.task != "forgetting":
        raise UserError(f"updates={config.updates}: is of task=forgetting")
    slices = []
    for text in texts:
        numbers = re.fullmatch(r" *(\d{1,18}) */ *(\d{1,18}) *", text, re.ASCII)
        if numbers:
            slices.append((int(numbers[1]), int(numbers[2])))
    if not texts or len(set(slices)) < len(texts):
        raise UserError(
            f"slices={show(','.join(texts))}: write length/pairs, each once, as in 64/4,128/8"
        )
    for seq_len, pairs in slices:
        check_slice(config, seq_len, pairs)
    return slices


def check_slice(config, seq_len, pairs):
    """Raises UserError where no row has this length and number of pairs."""
    size = SIZES[config.task]
    updates = updates_of(config, pairs)
    most = min(config.vocab_size // size - 1 - updates, (seq_len // size - updates) // 2)
    is_possible = seq_len % 2 == 0 and max(1, updates) <= pairs <= most
    if config.task == "composition":
        is_possible = is_possible and math.isqrt(pairs) ** 2 == pairs
    if not is_possible:
        raise UserError(
            f"slice {seq_len}/{pairs}: needs an even length, 1 to {most} pairs (composition: a square "
            f"number), and no more updates ({updates}) than pairs"
        )


def updates_of(config, pairs):
    """How many of a slice's keys get another value."""
    if config.task != "forgetting":
        return 0
    return config.updates or (pairs + 1) // 2


def chance(config) -> float:
    """The accuracy of a guess among the values in context, over all queries of all slices."""
    right = 0.0
    asked = 0
    for _, pairs in parse_slices(config):
        right += pairs / (pairs + updates_of(config, pairs))
        asked += pairs
    return right / asked


def generate(rng, rows, config, seq_len, pairs):
    """Rows of one slice, drawn independently: tokens and labels as (rows, 2, seq_len) uint16."""
    size = SIZES[config.task]
    updates = updates_of(config, pairs)
    n_shown = size * (pairs + updates)  # tokens of all pairs
    slots = seq_len // size - pairs - updates
    rates = np.arange(1, slots + 1) ** (config.power - 1.0)
    examples = np.zeros((rows, 2, seq_len), np.uint16)
    for start in range(0, rows, BLOCK):
        tokens, labels = examples[start : start + BLOCK].swapaxes(0, 1)  # each (n, seq_len), views
        n = len(tokens)
        row = np.arange(n)[:, None]
        if config.task == "composition":
            shown, keys, values = draw_grid(rng, n, pairs, config.vocab_size)
        else:
            shown, keys, values = draw_pairs(rng, n, pairs, updates, config.vocab_size)
        tokens[:, :n_shown] = shown

        draw(rng, n, pairs, 0, pairs)  # is not used; without it the rows of a seed would be others
        # slots without replacement: those of the clocks that ring first, each at its rate
        times = rng.exponential(size=(n, slots)) / rates
        positions = n_shown + size * np.argsort(times, axis=1)[:, :pairs]
        for i, part in enumerate(keys):
            tokens[row, positions + i] = part
        labels[row, positions + size - 2] = values
    return examples


def draw_pairs(rng, n, pairs, updates, vocab_size):
    """What recall and forgetting show (n, 2 (pairs + updates)), [keys], and the values that count
    (n, pairs)."""
    row = np.arange(n)[:, None]
    half = vocab_size // 2
    keys = draw(rng, n, pairs, 1, half)
    values = draw(rng, n, pairs + updates, half, vocab_size)
    updated = draw(rng, n, updates, 0, pairs)
    last = values[:, :pairs].copy()
    last[row, updated] = values[:, pairs:]
    shown_keys = np.concatenate([keys, keys[row, updated]], axis=1)
    return np.stack([shown_keys, values], axis=2).reshape(n, -1), [keys], last


def draw_grid(rng, n, pairs, vocab_size):
    """What composition shows (n, 3 pairs), [first keys, second keys], and the values, each (n,
    pairs)."""
    row = np.arange(n)[:, None]
    side = math.isqrt(pairs)
    third = vocab_size // 3
    firsts = draw(rng, n, side, 1, third)
    seconds = draw(rng, n, side, third, 2 * third)
    cells = draw(rng, n, pairs, 0, pairs)
    values = draw(rng, n, pairs, 2 * third, vocab_size)
    keys = [firsts[row, cells // side], seconds[row, cells % side]]
    return np.stack([*keys, values], axis=2).reshape(n, -1), keys, values


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


def generate_splits(config, slices):
    """{"train": [(rows of a slice, facts)], "val": ...}. No row is in both, and no slice depends on
    another."""
    splits = {"train": [], "val": []}
    for seq_len, pairs in slices:
        train_rng = np.random.default_rng([config.seed, 0, seq_len, pairs])
        train = generate(train_rng, config.train_size, config, seq_len, pairs)
        val_rng = np.random.default_rng([config.seed, 1, seq_len, pairs])
        val = generate(val_rng, config.val_size, config, seq_len, pairs)
        replace_rows_of(train, val, val_rng, config, seq_len, pairs)
        facts = {"slice": f"{seq_len}/{pairs}", "pairs": pairs}
        for split, examples in (("train", train), ("val", val)):
            padded = np.pad(examples, ((0, 0), (0, 0), (config.shift, 0)))
            splits[split].append((padded, facts))
    return splits


def replace_rows_of(train, val, rng, config, seq_len, pairs):
    """Draws the rows of validation that training has, too, again, in place. Raises UserError if
    some are left after 100 turns."""
    rows = {row.tobytes() for row in train[:, 0]}
    for _ in range(100):
        seen = [i for i, row in enumerate(val[:, 0]) if row.tobytes() in rows]
        if not seen:
            return
        val[seen] = generate(rng, len(seen), config, seq_len, pairs)
    what = f"so few rows are possible that {len(seen)} for validation are also for training"
    raise UserError(f"slice {seq_len}/{pairs}: {what}; raise vocab_size or lower train_size")


if __name__ == "__main__":
    configurator.run(main)
