"""
The data: what MQAR rows are, what order batches come in, what a damaged folder says.

    python -m pytest tests/test_data.py
"""

from configurator import UserError

import copy
import itertools
import json
import math
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import shards, tokenizer, writing
from data.mqar import prepare as mqar
from data.pystdlib import prepare as pystdlib
from data.shards import Dataset, open_dataset
from data.text import prepare as text
from data.writing import write_examples, write_stream
from ops import IGNORE

ROOT = Path(__file__).resolve().parents[1]
ABOUT = dict(generator="data/text/prepare.py", generator_version=1, parameters={}, seed=0)
# 99.9% quantiles of chi-square by degrees of freedom. The seeds are fixed: these tests do not fail by chance.
CHI2 = {5: 20.5, 6: 22.5, 23: 49.7, 27: 55.5, 29: 58.3, 41: 74.7}


def user_error(function, *args, **kwargs):
    """The text of the UserError that the call must raise, which must be one line."""
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


def chi2(observed, expected):
    assert observed.sum() == pytest.approx(expected.sum())
    return ((observed - expected) ** 2 / expected).sum()


# ----------------------------------------------------------------------------------------------------------------------
# MQAR

SETTINGS = [
    dict(seq_len=64, pairs=4),
    dict(seq_len=64, pairs=4, vocab_size=16, queries=2, power=1.0),
    dict(seq_len=64, pairs=4, vocab_size=16, filler="random"),
    dict(seq_len=32, pairs=7, vocab_size=17, queries=3, power=2.0),  # every key is used; odd vocabulary
    dict(seq_len=28, pairs=7, vocab_size=16, filler="random"),  # every slot is used, and one token is left for filler
    dict(seq_len=4, pairs=1, vocab_size=4, filler="random"),  # the smallest there is
]


def check_row(tokens, labels, *, pairs, queries, vocab_size=8192, filler="zero"):
    """The definition of a row, read off the row alone."""
    keys, values = tokens[0 : 2 * pairs : 2].tolist(), tokens[1 : 2 * pairs : 2].tolist()
    value_of = dict(zip(keys, values, strict=True))
    assert len(set(keys)) == len(set(values)) == pairs
    assert all(1 <= k < vocab_size // 2 <= v < vocab_size for k, v in value_of.items())
    asked = np.flatnonzero(labels)
    assert len(asked) == len(set(tokens[asked].tolist())) == queries
    assert (asked >= 2 * pairs).all() and (asked % 2 == 0).all()
    assert [value_of[k] for k in tokens[asked].tolist()] == labels[asked].tolist()
    rest = np.delete(tokens, np.concatenate([np.arange(2 * pairs), asked])).tolist()
    if filler == "zero":
        assert not any(rest)
    else:
        assert all(0 < token < vocab_size for token in rest) and not set(rest) & {*keys, *values}


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_label_is_the_value_of_the_key_at_its_position(setting):
    examples = mqar.generate(np.random.default_rng(0), 1500, **setting)
    assert examples.shape == (1500, 2, setting["seq_len"]) and examples.dtype == np.uint16
    facts = {name: setting[name] for name in ("pairs", "vocab_size", "filler") if name in setting}
    for tokens, labels in examples.astype(int):
        check_row(tokens, labels, queries=setting.get("queries", setting["pairs"]), **facts)
    density = np.count_nonzero(examples[:, 1]) / examples[:, 1].size
    assert density == setting.get("queries", setting["pairs"]) / setting["seq_len"]


def test_the_row_drawn_in_the_docstring_is_one():
    rows = {line.split()[0]: line.replace("|", " ").split()[1:] for line in mqar.__doc__.splitlines() if "|" in line}
    tokens, labels = np.array(rows["token"], int), np.array([0 if x == "." else int(x) for x in rows["label"]])
    assert [int(x) for x in rows["position"]] == list(range(16)) and len(tokens) == len(labels) == 16
    check_row(tokens, labels, pairs=3, queries=3, vocab_size=16)


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_a_single_query_falls_on_slot_i_as_i_to_the_power_minus_1(power):
    examples = mqar.generate(np.random.default_rng(1), 30_000, 64, 4, queries=1, power=power)
    slots = (examples[:, 1].argmax(1) - 8) // 2
    law = np.arange(1, 29) ** (power - 1)
    assert chi2(np.bincount(slots, minlength=28), 30_000 * law / law.sum()) < CHI2[27]


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_further_queries_are_drawn_without_replacement_in_the_order_of_the_pairs(power):
    examples = mqar.generate(np.random.default_rng(2), 30_000, 16, 2, power=power).astype(int)
    slots = []
    for pair in (0, 1):  # where the key of this pair is asked for
        key = examples[:, 0, 2 * pair]
        slots.append(((examples[:, 0, 4:] == key[:, None]).argmax(1)) // 2)
    p = np.arange(1, 7) ** (power - 1)
    p = p / p.sum()
    ordered = list(itertools.permutations(range(6), 2))
    law = np.array([p[i] * p[j] / (1 - p[i]) for i, j in ordered])
    seen = np.bincount(slots[0] * 6 + slots[1], minlength=36)
    assert chi2(np.array([seen[i * 6 + j] for i, j in ordered]), 30_000 * law) < CHI2[29]


def test_the_first_key_of_many_has_the_first_draw():
    examples = mqar.generate(np.random.default_rng(4), 30_000, 64, 8).astype(int)
    slots = (examples[:, 0, 16:] == examples[:, 0, [0]]).argmax(1) // 2
    law = np.arange(1, 25) ** -0.99
    assert chi2(np.bincount(slots, minlength=24), 30_000 * law / law.sum()) < CHI2[23]


@pytest.mark.parametrize("count", [1, 5, 20])
def test_a_draw_is_the_first_steps_of_a_card_shuffle(count):
    decks, rng = [list(range(7, 27)) for _ in range(300)], np.random.default_rng(count)
    for i in range(count):
        for deck, place in zip(decks, rng.integers(i, 20, size=300), strict=True):
            deck[i], deck[place] = deck[place], deck[i]
    assert mqar.draw(np.random.default_rng(count), 300, count, 7, 27).tolist() == [deck[:count] for deck in decks]


def test_keys_pairs_asked_for_and_filler_are_uniform():
    examples = mqar.generate(
        np.random.default_rng(3), 30_000, 20, 4, vocab_size=16, queries=2, power=1.0, filler="random"
    ).astype(int)
    keys = examples[:, 0, 0] * 16 + examples[:, 0, 2]
    ordered = [i * 16 + j for i, j in itertools.permutations(range(1, 8), 2)]
    assert chi2(np.bincount(keys, minlength=256)[ordered], np.full(42, 30_000 / 42)) < CHI2[41]
    asked = [(examples[:, 1] == examples[:, 0, [2 * pair + 1]]).any(1) << pair for pair in range(4)]
    both = [(1 << i) + (1 << j) for i, j in itertools.combinations(range(4), 2)]
    assert chi2(np.bincount(sum(asked), minlength=16)[both], np.full(6, 5_000)) < CHI2[5]
    # position 9 is odd, so it is always filler; its rank among the 7 tokens that are not in the row's pairs
    allowed = examples[:, 0, :8, None] != np.arange(1, 16)
    ranks = (allowed.all(1) & (np.arange(1, 16) < examples[:, 0, [9]])).sum(1)
    assert chi2(np.bincount(ranks, minlength=7), np.full(7, 30_000 / 7)) < CHI2[6]


def test_a_validation_row_is_never_a_training_row():
    # 2 keys, 3 values, 3 slots: 18 rows are possible
    config = mqar.Config(train_size=8, val_size=50, seq_len=8, pairs=1, vocab_size=6)
    splits = mqar.generate_splits(config, mqar.parse_slices(config))
    (train,), (val,) = splits["train"], splits["val"]
    first_draw = mqar.generate(np.random.default_rng([0, 1, 8, 1]), 50, 8, 1, vocab_size=6)
    seen = {row.tobytes() for row in train}
    assert any(row.tobytes() in seen for row in first_draw)  # or this test would show nothing
    assert not any(row.tobytes() in seen for row in val)
    config.train_size = 2000
    assert "so few rows are possible" in user_error(mqar.generate_splits, config, [(8, 1)])


def test_a_seed_is_the_bytes_of_every_file(tmp_path, capsys):
    def files(folder, seed, slices="16/2,32/4"):
        sizes = ["--train_size=1100", "--val_size=20", "--vocab_size=64"]
        mqar.main([f"--slices={slices}", f"--seed={seed}", f"--out_dir={tmp_path / folder}", *sizes])
        return contents_of(tmp_path / folder)

    first, second, third, alone = files("a", 0), files("b", 0), files("c", 1), files("d", 0, "32/4")
    assert set(first) == {"meta.json", *(f"{split}_000{i}.npy" for split in ("train", "val") for i in (0, 1))}
    assert first == second
    assert all(first[name] != third[name] for name in first)
    assert alone["train_0000.npy"] == first["train_0001.npy"]  # a slice is the same beside others
    dataset = open_dataset(tmp_path / "a")
    assert dataset.slices == ["16/2", "32/4"] and dataset.kind == "examples" and dataset.tokenizer == "mqar"
    assert dataset.counts("val") == {"rows": 40, "tokens": 20 * 48, "labels": 20 * 6}
    assert dataset.sha256 == open_dataset(tmp_path / "b").sha256 != open_dataset(tmp_path / "c").sha256
    out = capsys.readouterr().out
    assert "16/2: 2 of 2 pairs asked for, 12.50% of positions labelled; chance 50.00%" in out and "3.12%" in out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--pairs=8", "--vocab_size=16"], "8 pairs need as many keys, and vocab_size=16 has 7"),
        (["--slices=64/4,15/2"], "slice 15/2: the length must be even"),
        (["--seq_len=10", "--pairs=4"], "4 queries need as many slots, and 1 are left"),
        (["--seq_len=4", "--pairs=4"], "and 0 are left"),
        (["--queries=5"], "queries=5 is more than its pairs"),
        (["--slices=64x4"], "write length/pairs"),
        (["--slices=64/"], "write length/pairs"),
        (["--slices=64/0"], "at least one pair"),
        (["--slices=64/4,64/4"], "each once"),
        (["--slices="], "at least one"),
        (["--vocab_size=65538"], "at most 65536"),
        (["--fillers=zero"], "did you mean 'filler'"),
    ],
)
def test_an_impossible_setting_is_refused_with_the_reason(words, reason, tmp_path):
    assert reason in user_error(mqar.main, [*words, f"--out_dir={tmp_path}"])
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------------------------
# The order of batches


def stream(n, cuts=()):
    """A stream of the tokens 1000, 1001, ..., in shards cut anywhere."""
    parts = np.split(np.arange(1000, 1000 + n, dtype=np.uint16), sorted(cuts))
    parts = [part for part in parts if len(part)]
    meta = dict(name="x", kind="stream", tokenizer="x", vocab_size=1 << 16, parameters={})
    return Dataset(Path("x"), meta | {"splits": {"train": {"shards": [{"sha256": ""}] * len(parts)}}}, {"train": parts})


def rows_of(dataset, split, seed, steps, **sizes):
    """The rows of the global batches of `steps`, as tuples."""
    parts = sizes.get("gradient_accumulation_steps", 1)
    rows = []
    for step, micro_step in itertools.product(steps, range(parts)):
        inputs, targets = dataset.batch(split, step, seed=seed, micro_step=micro_step, **sizes)
        rows += [(tuple(x), tuple(y)) for x, y in zip(inputs.tolist(), targets.tolist(), strict=True)]
    return rows


@st.composite
def streams(draw, extra=1):
    block_size = draw(st.integers(1, 12))
    n = draw(st.integers(block_size + extra if extra > 0 else 2, 120))
    return n, block_size, stream(n, draw(st.lists(st.integers(1, n - 1), max_size=5, unique=True)))


@settings(deadline=None, max_examples=60)
@given(streams(), st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_of_a_stream_is_every_window_once(case, seed, epoch):
    n, block_size, dataset = case
    windows = dataset.examples_per_epoch("train", block_size)
    assert windows == (n - 1) // block_size
    rows = rows_of(
        dataset, "train", seed, range(epoch * windows, (epoch + 1) * windows), batch_size=1, block_size=block_size
    )
    for inputs, targets in rows:  # running text, and the target is the next token
        assert inputs + targets[-1:] == tuple(range(inputs[0], inputs[0] + block_size + 1))
    starts = sorted(inputs[0] - 1000 for inputs, _ in rows)
    steps = np.diff(starts)
    assert 0 <= starts[0] < block_size and starts[-1] + block_size < n
    assert (steps[:-1] == block_size).all() and (steps > 0).all() and (steps <= block_size).all()


def test_the_window_borders_move_until_every_token_was_a_target():
    rows = rows_of(stream(45, [7, 30]), "train", 0, range(60), batch_size=5, block_size=8)
    assert {inputs[0] % 8 for inputs, _ in rows} == set(range(8))
    assert {target for _, targets in rows for target in targets} == set(range(1001, 1045))


@pytest.fixture
def two_slices(tmp_path):
    """Examples of two lengths; the first token numbers the rows."""

    def rows(first, n, length):
        examples = np.zeros((n, 2, length), np.uint16)
        examples[:, 0] = np.arange(first, first + n)[:, None]
        examples[:, 1, -1] = 7
        return examples

    def some(start):
        for i, (n, length) in enumerate([(5, 4), (6, 8), (3, 4)]):  # the slice of length 4 has two shards
            yield rows(start + 10 * i, n, length), {"slice": f"{length}/1", "pairs": 1}

    write_examples(tmp_path, {"train": some(100), "val": some(200)}, name="x", tokenizer="x", vocab_size=300, **ABOUT)
    return open_dataset(tmp_path)


NUMBERS = [*range(5), *range(10, 16), *range(20, 23)]


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_of_examples_is_every_row_once_and_short_rows_are_padded(two_slices, epoch):
    rows = rows_of(two_slices, "train", 3, range(epoch * 2, epoch * 2 + 2), batch_size=7, block_size=8)
    assert sorted(inputs[0] - 100 for inputs, _ in rows) == NUMBERS
    for inputs, targets in rows:
        length = 8 if 110 <= inputs[0] < 120 else 4
        assert inputs == (inputs[0],) * length + (0,) * (8 - length)
        assert targets == (IGNORE,) * (length - 1) + (7,) + (IGNORE,) * (8 - length)


def test_epochs_and_seeds_have_their_own_order(two_slices):
    orders = [
        tuple(inputs[0] for inputs, _ in rows_of(two_slices, "train", seed, [step], batch_size=14, block_size=8))
        for seed, step in [(0, 0), (0, 1), (1, 0), (1, 1)]
    ]
    assert len(set(orders)) == 4


@settings(deadline=None, max_examples=40)
@given(streams(), st.integers(0, 3), st.integers(0, 30), st.sampled_from([(12, 1), (4, 3), (3, 4), (1, 12)]))
def test_the_global_batch_does_not_depend_on_how_micro_steps_are_dealt_out(case, seed, step, parts):
    _, block_size, dataset = case
    whole = rows_of(dataset, "train", seed, [step], batch_size=12, block_size=block_size)
    sizes = dict(batch_size=parts[0], gradient_accumulation_steps=parts[1], block_size=block_size)
    assert rows_of(dataset, "train", seed, [step], **sizes) == whole


def test_a_batch_depends_on_seed_and_step_alone(two_slices):
    sizes = dict(batch_size=5, block_size=8, gradient_accumulation_steps=2)
    in_order = [rows_of(two_slices, "train", 0, [step], **sizes) for step in range(6)]  # over several epochs
    shards._epoch.cache_clear()  # as in another process
    for step in (4, 1, 5, 0, 3, 2):
        list(two_slices.eval_batches("val", 3, 8))
        rows_of(two_slices, "val", 9, [step], **sizes)
        np.random.seed(step)
        assert rows_of(two_slices, "train", 0, [step], **sizes) == in_order[step]
    with pytest.raises(ValueError):
        two_slices.batch("train", 0, seed=0, batch_size=5, block_size=8, micro_step=1)


@settings(deadline=None, max_examples=60)
@given(streams(extra=0), st.integers(1, 5), st.integers(1, 4))
def test_evaluation_scores_every_token_of_a_stream_but_the_first_once(case, batch_size, world_size):
    n, block_size, dataset = case
    by_rank = [
        list(dataset.eval_batches("train", batch_size, block_size, rank, world_size)) for rank in range(world_size)
    ]
    batches = [batch for turn in itertools.zip_longest(*by_rank) for batch in turn if batch is not None]
    scored = []
    for inputs, targets, name in batches:
        assert name is None and inputs.shape == targets.shape and inputs.shape[1] == block_size
        assert (targets != IGNORE).any(1).all()
        assert (inputs[targets != IGNORE] + 1 == targets[targets != IGNORE]).all()
        scored += targets[targets != IGNORE].tolist()
    assert scored == list(range(1001, 1000 + n))  # in order, once each


@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_evaluation_reads_every_row_once_and_one_slice_at_a_time(two_slices, world_size):
    seen = {}
    for rank in range(world_size):
        for inputs, targets, name in two_slices.eval_batches("val", 3, 8, rank, world_size):
            assert inputs.shape == targets.shape and name == f"{inputs.shape[1]}/1" and len(inputs) <= 3
            seen.setdefault(name, []).extend((inputs[:, 0] - 200).tolist())
    assert sorted(seen["4/1"]) == [*range(5), *range(20, 23)] and sorted(seen["8/1"]) == [*range(10, 16)]
    if world_size == 1:
        assert list(seen) == two_slices.slices == ["4/1", "8/1"] and seen["4/1"] == sorted(seen["4/1"])


@settings(deadline=None, max_examples=60)
@given(streams(extra=0), st.integers(1, 90), st.integers(1, 5), st.integers(1, 4))
def test_a_sample_is_windows_evenly_spread_and_the_same_for_all_batches_and_processes(case, tokens, rows, world_size):
    n, block_size, dataset = case
    whole = [int(inputs[0, 0]) for inputs, _, _ in dataset.eval_batches("train", 1, block_size)]
    by_rank = [
        dataset.eval_batches("train", rows, block_size, rank, world_size, tokens=tokens) for rank in range(world_size)
    ]
    chosen = sorted(int(first) for batches in by_rank for inputs, _, _ in batches for first in inputs[:, 0])
    wanted = min(len(whole), math.ceil(tokens * len(whole) / n))
    assert len(chosen) == wanted and set(chosen) <= set(whole)
    places = [whole.index(first) for first in chosen]
    assert {b - a for a, b in itertools.pairwise(places)} <= {len(whole) // wanted, len(whole) // wanted + 1}
    assert abs(places[0] - (len(whole) - 1 - places[-1])) <= 1


def test_a_sample_of_rows_has_each_slice_in_its_share(two_slices):
    batches = list(two_slices.eval_batches("val", 2, 8, tokens=40))  # of 80 tokens: 8 rows of 4, 6 of 8
    assert [(name, inputs[:, 0].tolist()) for inputs, _, name in batches] == [
        ("4/1", [201, 203]), ("4/1", [220, 222]), ("8/1", [211, 213]), ("8/1", [215])
    ]  # fmt: skip


def test_what_does_not_fit_the_block_size_is_one_line(two_slices):
    sizes = dict(batch_size=2, block_size=7)
    assert "rows of 8 tokens; block_size=7" in user_error(two_slices.batch, "train", 0, seed=0, **sizes)
    assert "rows of 8 tokens" in user_error(lambda: list(two_slices.eval_batches("val", **sizes)))
    assert "has no split 'test'; it has train, val" in user_error(two_slices.batch, "test", 0, seed=0, **sizes)
    short = stream(7)
    assert "7 tokens, fewer than block_size + 1 = 8" in user_error(short.batch, "train", 0, seed=0, **sizes)
    assert "nothing to predict" in user_error(lambda: list(stream(1).eval_batches("train", **sizes)))


# ----------------------------------------------------------------------------------------------------------------------
# A damaged folder


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "text"
    splits = {"train": ["ab cd\n", "", "é" * 50], "val": ["xyz " * 20]}
    write_stream(folder, splits, tokenizer=tokenizer.get_tokenizer("byte"), shard_tokens=40, name="text", **ABOUT)
    return folder


def test_a_stream_is_counted_and_its_documents_are_found_again(folder):
    dataset = open_dataset(folder)
    assert dataset.counts("train") == {"documents": 3, "words": 3, "bytes": 106, "tokens": 106}
    assert [shard["tokens"] for shard in dataset.meta["splits"]["train"]["shards"]] == [40, 40, 26]
    assert dataset.document_offsets("train").tolist() == [0, 6, 6, 106]
    assert (dataset.name, dataset.kind, dataset.tokenizer, dataset.vocab_size) == ("text", "stream", "byte", 256)
    assert dataset.splits == ["train", "val"] and dataset.slices == [] and len(dataset.sha256) == 64
    inputs, targets, _ = next(dataset.eval_batches("train", 1, 105))
    assert bytes([*inputs[0].tolist(), targets[0, -1].item()]) == b"ab cd\n" + "é".encode() * 50


def change(path):
    """A damage: set one entry of meta.json, given as path=value."""
    *path, value = path

    def damage(folder):
        meta = json.loads((folder / "meta.json").read_text())
        entry = meta
        for name in path[:-1]:
            entry = entry[name]
        entry[path[-1]] = value
        (folder / "meta.json").write_text(json.dumps(meta))

    return damage


MEANINGS = {
    "splits": lambda meta: meta | {"splits": {"val": meta["splits"]["train"], "train": meta["splits"]["val"]}},
    "tokenizer": lambda meta: meta | {"tokenizer": "another"},
    "vocab_size": lambda meta: meta | {"vocab_size": meta["vocab_size"] + 1},
    "first ids": lambda meta: meta | {"parameters": {"row_len": 9}},
    "alphabet": lambda meta: meta | {"parameters": {"alphabet": "ab"}},
    "slice": lambda meta: json.loads(json.dumps(meta).replace("16/2", "16/3")),
    "kinds": lambda meta: meta | {"kinds": {"trigger": [1]}},
}


@pytest.mark.parametrize("what", MEANINGS)
def test_the_hash_of_the_data_covers_what_the_shards_mean(what, folder, mixed_mqar, tmp_path):
    is_of_examples = what in ("alphabet", "slice", "kinds")
    folder = Path(shutil.copytree(mixed_mqar, tmp_path / "mqar")) if is_of_examples else folder
    before, meta = open_dataset(folder), json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"generator_version": 99, "seed": 5}))
    assert open_dataset(folder).sha256 == before.sha256  # how they were made is no part of it
    (folder / "meta.json").write_text(json.dumps(MEANINGS[what](meta)))
    assert open_dataset(folder).sha256 != before.sha256


def overwrite(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def cut(name, size):
    return lambda folder: os.truncate(folder / name, size)


def swap(folder):
    (folder / "train_0000.npy").rename(folder / "x")
    (folder / "train_0001.npy").rename(folder / "train_0000.npy")
    (folder / "x").rename(folder / "train_0001.npy")


def replace(values):
    """train_0000.npy with other values, of which meta.json knows the new size and sha256."""

    def damage(folder):
        file = folder / "train_0000.npy"
        np.save(file, values) if isinstance(values, np.ndarray) else file.write_bytes(values)
        change(["splits", "train", "shards", 0, "bytes", file.stat().st_size])(folder)
        change(["splits", "train", "shards", 0, "sha256", writing._sha256(file)])(folder)

    return damage


def flip_a_bit(folder):
    content = bytearray((folder / "train_0002.npy").read_bytes())
    content[-1] ^= 1
    (folder / "train_0002.npy").write_bytes(content)


SHARD = ["splits", "train", "shards", 0]
DAMAGES = {
    "no meta.json": (lambda folder: (folder / "meta.json").unlink(), "has no meta.json"),
    "broken JSON": (cut("meta.json", 100), "meta.json: cannot be read as JSON"),
    "not UTF-8": (overwrite("meta.json", b"\xff\xfe\x00"), "meta.json: cannot be read as JSON"),
    "deep JSON": (overwrite("meta.json", b"[" * 100_000), "meta.json: cannot be read as JSON"),
    "another JSON": (overwrite("meta.json", b"[]"), "meta.json: format None"),
    "a later format": (change(["format", 2]), "meta.json: format 2, where this version reads 1"),
    "unknown kind": (change(["kind", "video"]), "meta.json: kind='video'"),
    "vocabulary too large": (change(["vocab_size", 1 << 40]), "meta.json: .*vocab_size=1099511627776"),
    "ids of another width": (change(["vocab_size", 65_537]), "train_0000.npy: holds uint16 .* says uint32"),
    "missing shard": (lambda folder: (folder / "train_0001.npy").unlink(), "train_0001.npy: is missing"),
    "missing offsets": (lambda folder: (folder / "val_documents.npy").unlink(), "val_documents.npy: is missing"),
    "truncated": (cut("train_0001.npy", 150), "train_0001.npy: has 150 bytes where meta.json says 208"),
    "empty": (cut("val_0000.npy", 0), "val_0000.npy: has 0 bytes"),
    "flipped bit": (flip_a_bit, "train_0002.npy: .*sha256 differs"),
    "swapped": (swap, "train_0000.npy: .*sha256 differs"),
    "wrong dtype": (replace(np.zeros(40, np.int64)), "train_0000.npy: holds int64 .40,. where"),
    "wrong shape": (replace(np.zeros((2, 20), np.uint16)), "train_0000.npy: holds uint16 .2, 20. where"),
    "id outside the vocabulary": (replace(np.full(40, 256, np.uint16)), "train_0000.npy: holds 256 where .* below 256"),
    "no .npy": (replace(b"no numbers"), "train_0000.npy: is not a .npy file"),
    "pickle": (replace(np.array([{}] * 40, object)), "train_0000.npy: holds object .40,. where"),
    "zip": (replace(b"PK\x05\x06" + bytes(18)), "train_0000.npy: is not a .npy file"),
    "half a header": (replace(b"\x93NUMPY\x01\x00\x76\x00{'descr'"), "train_0000.npy: is not a .npy file"),
    "path up": (change([*SHARD, "file", "../train_0000.npy"]), "meta.json: names '../train_0000.npy', which is not"),
    "absolute path": (change([*SHARD, "file", "/etc/passwd"]), "meta.json: names '/etc/passwd'"),
    "zero byte": (change([*SHARD, "file", "a\0.npy"]), "meta.json: names"),
    "long name": (
        change([*SHARD, "file", "a" * 5000 + ".npy"]),
        "shards.0..file='aaa.*must be a text of length 1 to 99",
    ),
    "bad sum": (change(["splits", "train", "tokens", 107]), "do not add up to its 107 tokens"),
    "no shards": (change(["splits", "train", "shards", []]), "splits.train.shards=..: must be a list of length 1"),
    "wrong type": (change([*SHARD, "tokens", "40"]), "train.shards.0..tokens='40': must be a whole number"),
    "parameters a list": (change(["parameters", []]), "parameters=..: must be a dict"),
    "no words": (change(["splits", "train", "words", 0]), "splits.train.words=0: must be a whole number of at least 1"),
    "very many words": (change(["splits", "train", "words", 10**400]), "splits.train.words=1000.*: must be a whole"),
    "true is no number": (change(["splits", "val", "words", True]), "splits.val.words=True: must be a whole number"),
    "tokenizer a list": (change(["tokenizer", []]), "tokenizer=..: must be a text"),
    "a long name": (change(["name", "x" * 5000]), "name='xxx.*must be a text of length 1 to 99"),
    "published words a text": (
        change(["parameters", {"text": {"val": {"published_words": "x"}}}]),
        "parameters.text.val.published_words='x': must be a whole number",
    ),
    "NaN": (overwrite("meta.json", b'{"format": NaN}'), "meta.json: cannot be read as JSON"),
    "a pipe": (lambda folder: (folder / "val_0000.npy").unlink() or os.mkfifo(folder / "val_0000.npy"), "is missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_line_that_names_the_file_and_the_way_out(folder, name):
    damage, expected = DAMAGES[name]
    damage(folder)
    with pytest.raises(UserError, match=expected):
        open_dataset(folder)
    message = user_error(open_dataset, folder)
    assert message.startswith(str(folder)) and "run python data/text/prepare.py" in message


def test_no_folder_says_how_to_make_one(tmp_path):
    assert "no such data set; run python data/mqar/prepare.py" in user_error(open_dataset, tmp_path / "mqar")
    assert "run python data/<name>/prepare.py" in user_error(open_dataset, tmp_path / "mine")


def test_nothing_in_meta_json_makes_more_than_a_user_error(folder, two_slices):
    def leaves(entry, path=()):
        for name in entry if isinstance(entry, dict) else range(len(entry)):
            yield (*path, name)
            if isinstance(entry[name], dict | list):
                yield from leaves(entry[name], (*path, name))

    refused = 0
    for meta_json in (folder / "meta.json", two_slices.folder / "meta.json"):
        whole = json.loads(meta_json.read_text())
        for path, value in itertools.product(list(leaves(whole)), (None, -1, 1e400, 10**30, "x", [1], {"a": []})):
            meta = entry = copy.deepcopy(whole)
            for name in path[:-1]:
                entry = entry[name]
            entry[path[-1]] = value
            meta_json.write_text(json.dumps(meta))
            try:
                open_dataset(meta_json.parent)
            except UserError:
                refused += 1
    assert refused > 300


def contents_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and file.name != ".nanogate"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("no text"), MemoryError])
def test_a_prepare_that_fails_leaves_the_old_data_set_as_it_was(folder, tmp_path, error):
    def documents():
        yield "some text " * 10
        raise error

    keys = dict(tokenizer=tokenizer.get_tokenizer("byte"), shard_tokens=40, name="text")
    before = contents_of(folder)
    with pytest.raises((KeyboardInterrupt, UserError, MemoryError)):
        write_stream(folder, {"train": documents()}, **keys, **ABOUT)
    assert contents_of(folder) == before
    open_dataset(folder)
    with pytest.raises((KeyboardInterrupt, UserError, MemoryError)):
        write_stream(tmp_path / "first", {"train": documents()}, **keys, **ABOUT)
    assert "a run that did not finish" in user_error(open_dataset, tmp_path / "first")
    assert (
        writing.claim(tmp_path / "first", False, ABOUT["generator"]) == tmp_path / "first"
    )  # the next call may have the folder


def test_a_smaller_data_set_leaves_nothing_of_the_larger_one_and_nothing_else_is_touched(folder, tmp_path):
    byte = tokenizer.get_tokenizer("byte")
    (folder / "notes.txt").write_text("mine")
    meta = json.loads((folder / "meta.json").read_text())
    outside = tmp_path / "train_0009.npy"
    outside.write_text("somebody's")
    meta["splits"]["train"]["shards"] += [{"file": "../train_0009.npy"}, {"file": "notes.txt"}, {"file": 3}]
    (folder / "meta.json").write_text(json.dumps(meta))  # that of a stranger
    write_stream(folder, {"train": ["x"], "val": ["y"]}, tokenizer=byte, name="text", **ABOUT)
    names = {"meta.json", "train_0000.npy", "train_documents.npy", "val_0000.npy", "val_documents.npy"}
    assert contents_of(folder).keys() == names | {"notes.txt"}
    (folder / "notes.txt").unlink()
    larger = dict(tokenizer=byte, shard_tokens=2, name="text")
    write_stream(folder, {"train": ["xyz" * 9], "test": ["y"], "val": ["y"]}, **larger, **ABOUT)
    assert (folder / "train_0013.npy").is_file() and (folder / "test_documents.npy").is_file()
    write_stream(folder, {"train": ["x"], "val": ["y"]}, tokenizer=byte, name="text", **ABOUT)
    assert contents_of(folder).keys() == names and outside.read_text() == "somebody's"


@pytest.mark.parametrize("moved, had_one", [*((i, False) for i in range(5)), *((i, True) for i in (0, 3, 9))])
def test_a_kill_while_the_new_files_take_their_places_leaves_a_whole_data_set(
    folder, tmp_path, monkeypatch, moved, had_one
):
    file, replace, done = tmp_path / "a.txt", os.replace, []
    file.write_text("a\nb\n")
    out = folder if had_one else tmp_path / "out"

    def killed(source, target):
        if ".new" in Path(source).parts and ".new" not in Path(target).parts:
            if len(done) == moved:
                raise KeyboardInterrupt
            done.append(target)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            text.main([str(file), f"--out_dir={out}"])
    if had_one:  # all files become links, one rename switches them, and they become files again
        assert open_dataset(out).counts("train")["bytes"] == (106 if moved < 9 else 2)
    else:
        assert "run python data/" in user_error(open_dataset, out)
    text.main([str(file), f"--out_dir={out}"])
    text.main([str(file), f"--out_dir={tmp_path / 'once'}"])
    assert {**contents_of(out), ".verified.json": b""} == {**contents_of(tmp_path / "once"), ".verified.json": b""}


def test_two_prepares_at_once_do_not_mix(folder):
    byte, before = tokenizer.get_tokenizer("byte"), contents_of(folder)

    def documents():
        keys = dict(tokenizer=byte, name="text")
        assert "is running in it" in user_error(write_stream, folder, {"train": ["x"], "val": ["y"]}, **keys, **ABOUT)
        assert contents_of(folder) == before
        yield "the first one"

    write_stream(folder, {"train": documents(), "val": ["z"]}, tokenizer=byte, name="text", **ABOUT)
    assert open_dataset(folder).counts("train")["bytes"] == len("the first one")


def test_a_folder_that_holds_something_else_is_refused_unless_overwrite_says_so(tmp_path):
    file, out = tmp_path / "a.txt", tmp_path / "out"
    file.write_text("a\nb\n")
    out.mkdir()
    for name, content in {"thesis.txt": "mine", "meta.json": '{"format": "somebody\'s"}'}.items():
        (out / name).write_text(content)
        for main, words in (
            (text.main, [str(file)]),
            (mqar.main, ["--train_size=9", "--val_size=3", "--vocab_size=64"]),
        ):
            message = user_error(main, [*words, f"--out_dir={out}"])
            assert name in message and "--overwrite=true" in message
        assert contents_of(out) == {name: content.encode()}
        (out / name).unlink()
    (out / "thesis.txt").write_text("mine")
    text.main([str(file), f"--out_dir={out}", "--overwrite=true"])
    assert open_dataset(out).counts("val")["bytes"] == 2 and (out / "thesis.txt").read_text() == "mine"
    assert "overwrite" not in open_dataset(out).meta["parameters"]
    text.main([str(file), f"--out_dir={out}"])  # a data set is ours
    assert "out_dir=''" in user_error(text.main, [str(file), "--out_dir="])


def test_the_data_set_of_another_script_is_replaced_only_where_overwrite_says_so(tmp_path):
    file, out = tmp_path / "a.txt", tmp_path / "out"
    file.write_text("a\nb\n")
    text.main([str(file), f"--out_dir={out}"])
    words = [f"--out_dir={out}", "--train_size=9", "--val_size=3", "--vocab_size=64"]
    message = user_error(mqar.main, words)
    assert f"{out}: holds the data set of 'data/text/prepare.py'; name another --out_dir, or add --over" in message
    assert open_dataset(out).name == "text"
    mqar.main([*words, "--overwrite=true"])
    mqar.main([*words, "--seed=1"])  # its own
    assert open_dataset(out).name == "mqar"


def test_a_name_without_its_folder_is_told_the_folder(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for name in ("prepare.py", "meta.json"):
        (tmp_path / "text" / name).write_text("")
    monkeypatch.setattr(shards, "DATA", tmp_path)
    monkeypatch.chdir(tmp_path / "text")
    assert user_error(open_dataset, "text") == "text: no such folder; write --dataset=data/text"


def test_a_folder_without_a_mark_is_ours_where_an_older_version_a_script_or_a_lock_was(tmp_path, monkeypatch):
    byte, older, others = tokenizer.get_tokenizer("byte"), tmp_path / "older", tmp_path / "others"
    write_stream(older, {"train": ["x"], "val": ["y"]}, tokenizer=byte, name="text", **ABOUT)
    monkeypatch.setattr(writing, "DATA", tmp_path / "data")
    for name in ("data/mqar/prepare.py", "data/mqar/__pycache__/prepare.pyc", "locked/lock", "others/prepare.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert not (older / ".nanogate").exists()
    for folder in (older, tmp_path / "data" / "mqar", tmp_path / "locked", tmp_path / "new"):
        for _ in range(2):
            assert writing.claim(folder, False, ABOUT["generator"]) == folder
        assert (folder / ".nanogate").read_text() == "data set\n"
    assert "holds what is not of a data set (prepare.py)" in user_error(writing.claim, others, False, "tests")
    (others / ".nanogate").write_text("run\n")
    assert "is the folder of another kind of output, 'run'" in user_error(writing.claim, others, True, "tests")
    (tmp_path / "file").write_text("")
    assert "cannot be written" in user_error(writing.claim, tmp_path / "file", False, "tests")


def test_what_cannot_be_read_leaves_no_folder(tmp_path):
    assert "no such file" in user_error(text.main, [str(tmp_path / "gone.txt"), f"--out_dir={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_a_shard_that_is_cut_short_while_it_is_read_is_one_line(folder, two_slices):
    sizes = dict(batch_size=64, block_size=8)
    for dataset in (open_dataset(folder), two_slices):
        for split in ("train", "val"):
            for file in dataset.folder.glob(f"{split}_0*.npy"):
                os.truncate(file, 130)  # two bytes, behind the header
            for read in (
                lambda dataset=dataset, split=split: dataset.batch(split, 0, seed=0, **sizes),
                lambda dataset=dataset, split=split: list(dataset.eval_batches(split, **sizes)),
            ):
                message = user_error(read)
                assert (
                    message.startswith(f"{dataset.folder}/{split}_0") and "was cut short after it was opened" in message
                )


@pytest.mark.parametrize("place", ["meta.json", ".verified.json", ".new/train_0000.npy"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder, place):
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).unlink(missing_ok=True)
    os.mkfifo(folder / place)
    if place == "meta.json":
        assert "has no meta.json" in user_error(open_dataset, folder)
    else:
        open_dataset(folder)
        keys = dict(tokenizer=tokenizer.get_tokenizer("byte"), name="text")
        write_stream(folder, {"train": ["x"], "val": ["y"]}, **keys, **ABOUT)


def test_what_cannot_be_written_is_one_line(folder, tmp_path):
    byte, one = tokenizer.get_tokenizer("byte"), np.zeros((1, 2, 4), np.uint16)
    (tmp_path / "file").write_text("")
    about = ABOUT | {"name": "x"}
    assert "cannot be written" in user_error(write_stream, tmp_path / "file", {}, tokenizer=byte, **about)
    assert "would hold no text" in user_error(write_stream, tmp_path / "a", {"val": [""]}, tokenizer=byte, **about)
    splits = {"train": [(one, {"slice": "4/1"})]}
    message = user_error(write_examples, tmp_path / "b", splits, vocab_size=1 << 40, tokenizer="x", **about)
    assert "1099511627776" in message and not (tmp_path / "b").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Text and its tokenizers


def test_the_byte_tokenizer_is_utf8():
    byte = tokenizer.get_tokenizer("byte")
    assert byte.encode("aé\n") == [97, 0xC3, 0xA9, 10] and byte.decode_bytes([0xC3]) == b"\xc3"
    assert "'bpe': must be one of byte, gpt2" in user_error(tokenizer.get_tokenizer, "bpe")


def test_gpt2_without_its_files_names_the_way_to_get_them(monkeypatch):
    def offline(*args):
        raise OSError("no route to host")

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    assert "(OSError). Without the internet, set TIKTOKEN_CACHE_DIR" in user_error(tokenizer.get_tokenizer, "gpt2")


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 1000), min_size=2, max_size=30), st.floats(0.01, 0.99), st.integers(0, 9))
def test_validation_documents_are_at_most_their_share_and_never_all_or_none(sizes, fraction, seed):
    is_val = writing.split_documents(sizes, fraction, seed)
    share = np.array(sizes)[is_val].sum() / sum(sizes)
    assert is_val.any() and not is_val.all()
    assert share <= fraction or (is_val.sum() == 1 and sizes[is_val.argmax()] == min(sizes))


def contents(dataset, split):
    return [
        bytes(part.astype(np.uint8))
        for part in np.split(
            np.concatenate(
                [np.load(dataset.folder / shard["file"]) for shard in dataset.meta["splits"][split]["shards"]]
            ),
            dataset.document_offsets(split)[1:-1],
        )
    ]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Writes {path: text} as the standard library, and returns {split: documents} of what prepare.py makes of it."""
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))

    def make(sources, **keys):
        for name, content in sources.items():
            (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "lib" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        out = tmp_path / "-".join(map(str, ("out", *keys.values())))
        pystdlib.main([f"--out_dir={out}", *(f"--{k}={v}" for k, v in keys.items())])
        dataset = open_dataset(out)
        return {split: contents(dataset, split) for split in ("train", "val")} | {"meta": dataset.meta}

    return make


def code(name, lines=8):
    return "".join(f"def {name}_{i}(x):\n    return x + {i}\n" for i in range(lines // 2))


def test_the_standard_library_becomes_a_stream_of_its_files(library):
    kept = {"b.py": "b = 1\r\n", "a/z.py": "é", "a.py": "a", "c/testing.py": "c"}
    left_out = ["test/a.py", "x/tests/a.py", "site-packages/a.py", "__pycache__/a.py", "_sysconfigdata_x.py", "a.txt"]
    found = library(kept | dict.fromkeys(left_out, "no") | {"empty.py": "", "latin.py": b"\xe9"}, val_fraction=0.5)
    assert sorted(found["train"] + found["val"]) == sorted(text.encode() for text in kept.values())
    assert found["meta"]["parameters"]["python"].startswith("3.") and found["meta"]["generator_version"] == 2


def test_tables_generated_files_and_near_duplicates_are_left_out(library, capsys):
    kept = {f"{name}.py": code(name, 20) for name in "abcdef"}
    kept["docs.py"] = '"""What it is."""\n\n' + code("docs") + "    # 'quoted'\n"
    half = code("h", 20)
    kept["g/half.py"] = half[: len(half) // 2] + code("g", 14)  # 7 of 21 runs of 4 lines stand in a file before
    kept["f/h.py"] = half
    left_out = {
        "encodings/latin.py": code("latin"),
        "entities.py": "x = {\n" + "".join(f"    'e{i}': {i},\n" for i in range(9)) + "}\n",
        "numbers.py": code("n", 2) + "".join(f"  [({i}, {i}),\n" for i in range(9)),
        "config-3/made.py": code("made"),
        "token.py": '"""Tokens."""\n# Auto-generated by x.py\n' + code("token"),
        "z/copy.py": half.replace("    ", "\t").replace("h_1(x)", "h_1(y)") + "\n\n",
    }
    found = library(kept | left_out)
    assert sorted(found["train"] + found["val"]) == sorted(text.encode() for text in kept.values())
    out = capsys.readouterr().out
    for reason, names in {
        "3 tables": ("encodings/latin.py", "entities.py", "numbers.py"),
        "2 generated files": ("config-3/made.py", "token.py"),
        "1 near-duplicates": ("z/copy.py",),
    }.items():
        assert f"left out: {reason}, {sum(len(left_out[name]) for name in names):,} bytes\n" in out


def test_validation_is_whole_packages_the_same_for_every_seed_which_orders_the_training_files(library):
    sources = {f"m{i:02}.py": code(f"m{i}", 10) for i in range(40)}
    sources |= {f"package/{name}.py": code(name, 10) for name in "abc"} | {"large.py": code("large", 90)}
    found = [library(sources, val_fraction=0.2, seed=seed) for seed in (0, 1, 2)]
    first, val = found[0], found[0]["val"]
    assert all(other["val"] == val for other in found)
    assert len({tuple(other["train"]) for other in found}) == 3
    assert len({frozenset(other["train"]) for other in found}) == 1
    everything = {text.encode() for text in sources.values()}
    assert {*first["train"], *val} == everything and len(first["train"]) + len(val) == len(sources)
    room = 0.2 * sum(map(len, everything))
    assert 0.9 * room < sum(map(len, val)) <= room and sources["large.py"].encode() not in val  # over a sixth of it
    assert sum(sources[f"package/{name}.py"].encode() in val for name in "abc") in (0, 3)
    more = library({"added.py": code("added", 4)}, val_fraction=0.2, seed=3)
    assert len({*more["val"]} ^ {*val}) <= 2  # another version of Python has other modules
    assert first["meta"]["parameters"]["shared_runs"] == 0


def test_the_share_of_validation_that_stands_in_training_is_kept(library, capsys):
    sources = {"one.py": code("same", 6) + code("one", 6), "two.py": code("two", 30) + code("same", 6)}
    found = library(sources)
    assert found["val"] == [sources["one.py"].encode()]  # none is small enough: the smallest
    assert found["meta"]["parameters"]["shared_runs"] == 0.3333  # 3 of 9 runs of 4 lines
    assert "33.3% of its runs of 4 lines stand in training, too" in capsys.readouterr().out


def test_most_bytes_takes_the_first_training_files_beside_a_smaller_validation(library):
    sources = {f"{i:02}.py": bytes([65 + i]) * (10 + i) for i in range(40)}

    def taken(**keys):
        found = library(sources, val_fraction=0.4, **keys)
        assert found["meta"]["parameters"]["most_bytes"] == keys.get("most_bytes")
        return found["train"], found["val"]

    (train, val), everything = taken(most_bytes=600, seed=1), taken()
    size = sum(map(len, train + val))
    assert 590 < size <= 600 and 0 < sum(map(len, val)) <= 240 and {*val} <= {*everything[1]}
    assert len({*train, *val}) == len(train + val) and {*train, *val} <= {*everything[0], *everything[1]}
    other = taken(most_bytes=600, seed=2)
    assert other[1] == val and {*other[0]} != {*train}
    assert taken(most_bytes=10**9) == everything
    message = user_error(library, sources, most_bytes=20)
    assert "most_bytes=20: no file is left for training beside 00; raise it" in message


def test_this_python_has_megabytes_of_it(tmp_path, capsys):
    pystdlib.main([f"--out_dir={tmp_path / 'out'}"])
    meta = open_dataset(tmp_path / "out").meta
    sizes = {split: facts["bytes"] for split, facts in meta["splits"].items()}
    assert sum(sizes.values()) > 5_000_000 and 0.045 < sizes["val"] / sum(sizes.values()) <= 0.05
    assert meta["parameters"]["shared_runs"] < 0.05
    validation = capsys.readouterr().out.partition("validation: ")[2].partition("\n")[0].split(", ")
    assert len(validation) > 10 and not {"encodings", "pydoc_data", "test"} & {*validation}


def test_one_file_is_split_at_the_border_of_its_lines(tmp_path):
    file = tmp_path / "book.txt"
    file.write_bytes(b"".join(b"line %d\r\n" % i for i in range(100)))
    text.main([str(file), f"--out_dir={tmp_path / 'out'}", "--val_fraction=0.1"])
    dataset = open_dataset(tmp_path / "out")
    (train,), (val,) = contents(dataset, "train"), contents(dataset, "val")
    assert train + val == file.read_bytes() and val.startswith(b"line ") and train.endswith(b"\r\n")
    assert 0.1 <= len(val) / len(train + val) < 0.12
    assert text.split_lines("a\n" + "b" * 100, 0.05, file) == ("a\n", "b" * 100)
    assert text.split_lines("b" * 100 + "\na\n", 0.5, file) == ("b" * 100 + "\n", "a\n")


def test_folders_are_searched_and_a_file_named_twice_is_taken_once(tmp_path):
    for name in ("n/b.md", "n/sub/a.txt", "n/c.rst", "n/empty.txt", "d.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else name)
    (tmp_path / "n" / "link.txt").symlink_to(tmp_path / "d.log")
    paths = [str(tmp_path / name) for name in ("d.log", "n", "n/b.md")]
    assert sorted(file.resolve().name for file in text.find_files(paths, [".txt", ".md"])) == ["a.txt", "b.md", "d.log"]
    text.main([*paths, "--ext=.rst,.md", "--val_fraction=0.4", f"--out_dir={tmp_path / 'out'}"])
    dataset = open_dataset(tmp_path / "out")
    assert sorted(contents(dataset, "train") + contents(dataset, "val")) == [b"d.log", b"n/b.md", b"n/c.rst"]


def test_linked_folders_are_read_once_and_blank_files_are_left_out(tmp_path):
    for name in ("notes/a.txt", "notes/in/b.txt", "elsewhere/c.txt", "notes/blank.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(" \n" if "blank" in name else name)
    (tmp_path / "notes" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "notes")
    found = text.find_files([str(tmp_path / "notes")], [".txt"])
    assert sorted(file.resolve().name for file in found) == ["a.txt", "b.txt", "c.txt"]


def test_ids_that_the_vocabulary_lacks_are_refused_not_wrapped(tmp_path):
    about = dict(name="w", tokenizer="w", **ABOUT)
    for wrong in (70_000, -1):
        rows = np.full((4, 2, 8), 1)
        rows[2, 0, 3] = wrong
        splits = {"train": [(rows, {"slice": "8"})], "val": [(rows, {"slice": "8"})]}
        message = user_error(write_examples, tmp_path / "out", splits, vocab_size=5000, **about)
        assert f"ids from {min(1, wrong)} to {max(1, wrong)}, and vocab_size=5000" in message


def test_parameters_that_a_reader_would_misread_are_refused_when_they_are_written(tmp_path):
    keys = dict(tokenizer=tokenizer.get_tokenizer("byte"), name="text", **ABOUT) | {"parameters": {"text": "book.txt"}}
    message = user_error(write_stream, tmp_path / "out", {"train": ["x"], "val": ["y"]}, **keys)
    assert "parameters.text='book.txt': must be" in message and not (tmp_path / "out" / "meta.json").exists()


def test_more_shards_than_the_soft_limit_on_open_files_are_opened(tmp_path):
    keys = dict(tokenizer=tokenizer.get_tokenizer("byte"), name="text", shard_tokens=4, **ABOUT)
    write_stream(tmp_path / "out", {"train": ["abcd" * 300], "val": ["y"]}, **keys)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (250, hard))
        assert open_dataset(tmp_path / "out").counts("train")["tokens"] == 1200
        resource.setrlimit(resource.RLIMIT_NOFILE, (250, hard))
        with mock.patch.object(shards, "allow_open_files"):
            assert "raise `ulimit -n`, or shard_tokens" in user_error(open_dataset, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_part_of_a_split_file_is_blank(tmp_path):
    # two lines, of which the second is short; lines that are followed by empty ones
    assert text.split_lines("a line\nb\n", 0.05, "x") == ("a line\n", "b\n")
    assert text.split_lines("a line\nb\n \n\n\n\n\n", 0.05, "x") == ("a line\n", "b\n \n\n\n\n\n")
    assert text.split_lines("\n\na\n" + "b" * 99, 0.5, "x") == ("\n\na\n", "b" * 99)


def test_files_that_are_not_utf8_are_named_and_left_out_where_errors_skip(tmp_path, capsys):
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_bytes(b"\xff" if name in "be" else name.encode())
    out = tmp_path / "out"
    words = [str(tmp_path), f"--out_dir={out}", "--val_fraction=0.4"]
    assert "b.txt: is not UTF-8 text (byte 0); --errors=skip" in user_error(text.main, words)
    text.main([*words, "--errors=skip"])
    dataset = open_dataset(out)
    assert sorted(contents(dataset, "train") + contents(dataset, "val")) == [b"a", b"c", b"d", b"f"]
    said = capsys.readouterr().out
    assert f"left out: {tmp_path / 'b.txt'}" in said and f"left out: {tmp_path / 'e.txt'}" in said
    assert "2 of 6 files are not UTF-8 and were left out" in said
    assert "no file is UTF-8" in user_error(text.main, [str(tmp_path / "b.txt"), f"--out_dir={out}", "--errors=skip"])


def test_text_that_cannot_be_used_is_one_line(tmp_path):
    for name, content in {"empty.txt": b"", "bin.txt": b"ok\n\xff\n", "one.txt": b"one line\n"}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "blank.txt").write_text("\n \n one line \n\n \n")
    (tmp_path / "bare").mkdir()
    (tmp_path / "white").mkdir()
    for name in "ab":
        (tmp_path / "white" / f"{name}.txt").write_text(" \n")
    os.mkfifo(tmp_path / "pipe")
    out = f"--out_dir={tmp_path / 'out'}"
    for words, reason in {
        (): "name files or folders",
        ("empty.txt",): "empty.txt: empty",
        ("bin.txt",): "bin.txt: is not UTF-8 text (byte 3)",
        ("bin.txt", "one.txt"): "bin.txt: is not UTF-8 text",
        ("one.txt",): "one.txt: has one line of text",
        ("blank.txt",): "blank.txt: has one line of text",
        ("white/",): "white: empty, or nothing but white space",
        ("pipe",): "pipe: is neither a file nor a folder",
        ("bare",): "bare: no file in this folder ends in .txt, .md",
        ("gone.txt",): "gone.txt: no such file or folder",
    }.items():
        assert reason in user_error(text.main, [*(str(tmp_path / word) for word in words), out])


@pytest.mark.parametrize("name", ["mqar", "pystdlib", "text"])
def test_the_scripts_run_from_any_folder_and_exit_with_2_for_a_users_mistake(name, tmp_path):
    command = [sys.executable, str(ROOT / "data" / name / "prepare.py")]
    done = subprocess.run([*command, "--sed=1"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1 and "'seed'" in done.stderr


def test_a_script_ends_with_the_counts_of_every_split_and_its_folder(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a\nb\n")
    text.main([str(tmp_path / "a.txt"), f"--out_dir={tmp_path / 'out'}"])
    mqar.main([f"--out_dir={tmp_path / 'mqar'}", "--train_size=3", "--val_size=2", "--seq_len=16"])
    lines = capsys.readouterr().out.splitlines()
    counts = "1 documents, 1 words, 2 bytes, 2 tokens"
    assert lines[:3] == [f"train: {counts}", f"val: {counts}", f"written to {tmp_path / 'out'}"]
    assert lines[-3:-1] == ["train: 3 rows, 48 tokens, 12 labels", "val: 2 rows, 32 tokens, 8 labels"]
    assert lines[-1] == f"written to {tmp_path / 'mqar'}"
