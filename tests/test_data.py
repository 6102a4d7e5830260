"""Data sets: the order of batches, what a damaged folder says, how the files of one take the places of another's."""

import itertools
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import Helpers
from hypothesis import given, settings
from hypothesis import strategies as st

from data import writing
from data.shards import PackedDocuments, Shards, Stream, open_dataset
from data.text import prepare as text
from data.tokenizer import get_tokenizer, tokenizer_of
from data.writing import Output, write_examples, write_stream
from ops import IGNORE

ABOUT = dict(name="text", generator="data/text/prepare.py", generator_version=1, parameters={}, seed=0)
BYTES = dict(tokenizer=get_tokenizer("byte"), **ABOUT)
error_of = Helpers.error_of


def contents_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and file.name != ".nanogate"}


def documents_of(folder):
    """{split: its documents, as bytes} of a data set of text."""
    dataset, found = open_dataset(folder), {}
    for split, counts in dataset.meta["splits"].items():
        offsets = np.load(folder / f"{split}_documents.npy")
        parts = np.split(dataset.shards[split].read(0, counts["tokens"]), offsets[1:-1])
        found[split] = [tokenizer_of(dataset).decode_bytes(part.tolist()) for part in parts]
    return found


def stream(n, cuts=(), name="x", first=1000, documents=None):
    """A stream of the tokens 1000, 1001, ..., in shards cut anywhere. documents: where they begin, then n."""
    parts = [part for part in np.split(np.arange(first, first + n, dtype=np.uint16), sorted(cuts)) if len(part)]
    facts = {"tokens": n, "shards": [{"sha256": ""}] * len(parts)}
    meta = dict(name="x", kind="stream", tokenizer="x", vocab_size=1 << 16, parameters={}, splits={"train": facts})
    shards = {"train": Shards(parts)}
    kind = Stream if documents is None else PackedDocuments
    return kind(Path(name), meta, shards, {"train": np.array(documents or [0, n])})


def rows_of(dataset, split, seed, steps, **sizes):
    """The rows of the global batches of `steps`, as tuples."""
    rows, parts = [], sizes.get("gradient_accumulation_steps", 1)
    for step, micro_step in itertools.product(steps, range(parts)):
        inputs, targets, _ = dataset.batch(split, step, seed=seed, micro_step=micro_step, **sizes)
        rows += [(tuple(x), tuple(y)) for x, y in zip(inputs.tolist(), targets.tolist(), strict=True)]
    return rows


def batches_of(dataset, split, batch_size, block_size, world_size, **keys):
    """The batches of all processes, one of each process in turn: of each as many, and those without labels fill up."""
    ranks = (dataset.eval_batches(split, batch_size, block_size, i, world_size, **keys) for i in range(world_size))
    return [batch for turn in zip(*ranks, strict=True) for batch in turn if (batch[1] != IGNORE).any()]


@st.composite
def streams(draw):
    block_size = draw(st.integers(1, 12))
    n = draw(st.integers(block_size + 1, 120))
    return n, block_size, stream(n, draw(st.lists(st.integers(1, n - 1), max_size=5, unique=True)))


@settings(deadline=None, max_examples=40)
@given(streams(), st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_of_a_stream_is_every_window_once(case, seed, epoch):
    n, block_size, dataset = case
    windows = dataset.examples_per_epoch("train", block_size)
    assert windows == (n - 1) // block_size
    steps = range(epoch * windows, (epoch + 1) * windows)
    rows = rows_of(dataset, "train", seed, steps, batch_size=1, block_size=block_size)
    for inputs, targets in rows:  # running text, and the target is the next token
        assert inputs + targets[-1:] == tuple(range(inputs[0], inputs[0] + block_size + 1))
    starts = sorted(inputs[0] - 1000 for inputs, _ in rows)
    distances = np.diff(starts)
    assert 0 <= starts[0] < block_size and starts[-1] + block_size < n
    assert (distances[:-1] == block_size).all() and (distances > 0).all() and (distances <= block_size).all()


def test_the_window_borders_move_until_every_token_was_a_target():
    rows = rows_of(stream(45, [7, 30]), "train", 0, range(60), batch_size=5, block_size=8)
    assert {inputs[0] % 8 for inputs, _ in rows} == set(range(8))
    assert {target for _, targets in rows for target in targets} == set(range(1001, 1045))


@pytest.fixture
def two_slices(tmp_path):
    """Examples of two lengths; the first token numbers the rows."""

    def some(start):
        for i, (n, length) in enumerate([(5, 4), (6, 8), (3, 4)]):  # the slice of length 4 has two shards
            examples = np.zeros((n, 2, length), np.uint16)
            examples[:, 0] = np.arange(start + 10 * i, start + 10 * i + n)[:, None]
            examples[:, 1, -1] = 7
            yield examples, {"slice": f"{length}/1", "pairs": 1}

    splits = {"train": some(100), "val": some(200)}
    write_examples(Output(tmp_path / "rows"), "tests", 1, splits, name="x", vocab_size=300)
    return open_dataset(tmp_path / "rows")


def test_an_epoch_of_examples_is_every_row_once_and_short_rows_are_padded(two_slices):
    rows = rows_of(two_slices, "train", 3, range(12), batch_size=7, block_size=8)
    for epoch in np.split(np.array([inputs[0] - 100 for inputs, _ in rows]), 6):
        assert sorted(epoch) == [*range(5), *range(10, 16), *range(20, 23)]
    for inputs, targets in rows:
        length = 8 if 110 <= inputs[0] < 120 else 4
        assert inputs == (inputs[0],) * length + (0,) * (8 - length)
        assert targets == (IGNORE,) * (length - 1) + (7,) + (IGNORE,) * (8 - length)


def test_a_batch_depends_on_seed_and_step_alone_and_every_epoch_and_seed_has_its_order(two_slices):
    sizes = dict(batch_size=5, block_size=8, gradient_accumulation_steps=2)
    in_order = [rows_of(two_slices, "train", 0, [step], **sizes) for step in range(6)]  # over several epochs
    two_slices._epoch.cache_clear()  # as in another process
    for step in (4, 1, 5, 0, 3, 2):
        list(two_slices.eval_batches("val", 3, 8))
        rows_of(two_slices, "val", 9, [step], **sizes)
        np.random.seed(step)
        assert rows_of(two_slices, "train", 0, [step], **sizes) == in_order[step]
    epochs = itertools.product((0, 1), ([0], [1]))  # seeds and steps
    orders = {tuple(rows_of(two_slices, "train", *at, batch_size=14, block_size=8)) for at in epochs}
    assert len(orders) == 4


@pytest.mark.parametrize("world_size", [1, 2, 9])
def test_evaluation_reads_every_row_once_and_one_slice_at_a_time(two_slices, world_size):
    seen = {}
    for inputs, targets, _, name in batches_of(two_slices, "val", 3, 8, world_size):
        assert inputs.shape == targets.shape and name == f"{inputs.shape[1]}/1" and len(inputs) <= 3
        seen.setdefault(name, []).extend((inputs[:, 0] - 200).tolist())
    assert seen == {"4/1": [*range(5), *range(20, 23)], "8/1": [*range(10, 16)]}
    assert list(seen) == two_slices.slices


@settings(deadline=None, max_examples=40)
@given(streams(), st.integers(1, 140), st.integers(1, 5), st.integers(1, 4))
def test_evaluation_scores_every_token_of_a_text_but_the_first_in_order_or_evenly_spread_windows(
    case, tokens, B, ranks
):
    n, block_size, dataset = case
    whole, places = list(range(1000, 999 + n, block_size)), []  # the first tokens of all windows
    for inputs, targets, _, name in batches_of(dataset, "train", B, block_size, ranks, tokens=tokens):
        assert name is None and inputs.shape[1] == block_size
        for x, y in zip(inputs, targets, strict=True):
            assert y[y != IGNORE].tolist() == list(range(int(x[0]) + 1, min(int(x[0]) + 1 + block_size, 1000 + n)))
        places += [whole.index(first) for first in inputs[:, 0].tolist()]
    wanted = min(len(whole), math.ceil(tokens * len(whole) / n))  # tokens >= n: every window
    assert len(places) == wanted
    assert {b - a for a, b in itertools.pairwise(places)} <= {len(whole) // wanted, len(whole) // wanted + 1}
    assert abs(places[0] - (len(whole) - 1 - places[-1])) <= 1


@pytest.fixture
def folder(tmp_path):
    splits = {"train": ["ab cd\n", "", "é" * 50], "val": ["xyz " * 20]}
    writing.claim(text.Config(out_dir=tmp_path / "text"), ABOUT["generator"], 1)
    write_stream(tmp_path / "text", splits, shard_tokens=40, **BYTES)
    return tmp_path / "text"


def test_a_stream_is_counted_and_its_documents_are_found_again(folder):
    dataset = open_dataset(folder)
    assert dataset.counts("train") == {"documents": 3, "words": 3, "bytes": 106, "tokens": 106}
    assert [shard["tokens"] for shard in dataset.meta["splits"]["train"]["shards"]] == [40, 40, 26]
    assert np.load(folder / "train_documents.npy").tolist() == [0, 6, 6, 106]
    assert (dataset.kind, list(dataset.shards), dataset.slices) == ("stream", ["train", "val"], [])
    inputs, targets, *_ = next(dataset.eval_batches("train", 1, 105))
    assert bytes([*inputs[0].tolist(), targets[0, -1].item()]) == b"ab cd\n" + "é".encode() * 50


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ('"generator_version": 1', '"generator_version": 99', True),  # how they were made is no part of it
        ('"seed": 0', '"seed": 5', True),
        ('"train": {', '"test": {', False),
        ('"tokenizer": "mqar"', '"tokenizer": "another"', False),
        ('"parameters": {', '"parameters": {"alphabet": "ab",', False),
        ('"16/2"', '"16/3"', False),
        ('"labels":', '"drawn": 3, "labels":', True),  # what a meta.json may hold beside
        ('"splits": {', '"kinds": {"trigger": [1]}, "splits": {', False),
    ],
)
def test_the_hash_of_the_data_covers_what_the_shards_mean(old, new, is_same, mixed_mqar, tmp_path):
    folder = Path(shutil.copytree(mixed_mqar, tmp_path / "mqar"))
    edit("meta.json", lambda data: data.replace(old.encode(), new.encode()))(folder)
    assert (open_dataset(folder).sha256 == open_dataset(mixed_mqar).sha256) == is_same


def edit(name, function):
    """A damage: a file with function(its bytes)."""
    return lambda folder: (folder / name).write_bytes(function((folder / name).read_bytes()))


def meta(old, new):
    return edit("meta.json", lambda data: data.replace(old.encode(), new.encode(), 1))


DAMAGES = {
    "no meta.json": (lambda folder: (folder / "meta.json").unlink(), "meta.json: no such file; run python data/"),
    "wrong type": (meta('"tokens": 40', '"tokens": "40"'), "train.shards.0..tokens='40': must be a whole number"),
    "path up": (meta("train_0000", "../train_0000"), "meta.json: names '../train_0000.npy', which is no"),
    "ids of another width": (meta(": 256", ": 65537"), "train_0000.npy: holds uint16 .* says uint32"),
    "wrong shape": (meta('"tokens": 40', '"tokens": 39'), "train_0000.npy: holds uint16 .40,. where"),
    "missing": (lambda folder: (folder / "val_documents.npy").unlink(), "val_documents.npy: cannot be read"),
    "truncated": (edit("train_0001.npy", lambda data: data[:150]), "train_0001.npy: cannot be read as a .npy file of"),
    "longer": (edit("train_0001.npy", lambda data: data + b"0"), "train_0001.npy: .*sha256 differs"),
    "pickle": (lambda folder: np.save(folder / "train_0000.npy", np.array([{}] * 40)), "0000.npy: cannot be read as"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_line_that_names_the_file_and_the_way_out(folder, name):
    damage, expected = DAMAGES[name]
    open_dataset(folder)
    damage(folder)
    message = error_of(open_dataset, folder)
    assert re.search(expected, message)
    assert message.startswith(str(folder)) and "; run python data/text/prepare.py, with the keys" in message


@pytest.mark.parametrize(("renames", "is_kept"), [(0, True), (2, False), (5, False)])
def test_a_kill_leaves_the_old_data_set_or_one_that_is_refused(folder, tmp_path, monkeypatch, renames, is_kept):
    file, before, rename, done = tmp_path / "a.txt", contents_of(folder), os.replace, []
    file.write_text("a\nb\n")

    def killed(source, target):  # meta.json is written, and then four files and meta.json are moved
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(target)
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        text.main([str(file), f"--out_dir={folder}", "--overwrite=true"])
    if is_kept:
        assert contents_of(folder) == before
    else:
        assert "run python data/" in error_of(open_dataset, folder)  # meta.json goes first and comes last
    for out in (folder, tmp_path / "once"):
        text.main([str(file), f"--out_dir={out}", "--overwrite=true"])
    assert contents_of(folder) == contents_of(tmp_path / "once")


def test_a_folder_that_holds_something_else_is_refused_unless_overwrite_says_so(tmp_path):
    out = tmp_path / "out"
    (tmp_path / "a.txt").write_text("a\nb\n")
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    words = [str(tmp_path / "a.txt"), f"--out_dir={out}"]
    message = error_of(text.main, words)
    assert "thesis.txt" in message and "--overwrite=true" in message and [*out.iterdir()] == [out / "thesis.txt"]
    text.main([*words, "--overwrite=true"])
    text.main(words)  # a data set is ours
    assert open_dataset(out).counts("val")["bytes"] == 2 and (out / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("wrong", [70_000, -1])
def test_ids_that_the_vocabulary_lacks_are_refused_not_wrapped(wrong, tmp_path):
    splits = {"train": [(np.full((4, 2, 8), wrong), {"slice": "8"})]}
    message = error_of(write_examples, Output(tmp_path), "x", 1, splits, name="x", vocab_size=5000)
    assert f"ids from {wrong} to {wrong}, and vocab_size=5000" in message
