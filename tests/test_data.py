"""
Data sets: the order of batches, what a damaged folder says, how the files of one take the places of another's.

    python -m pytest tests/test_data.py
"""

import functools
import itertools
import json
import math
import operator
import os
import re
import resource
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import Helpers
from hypothesis import given, settings
from hypothesis import strategies as st

from data import shards, writing
from data.mqar import prepare as mqar
from data.shards import Dataset, open_dataset
from data.text import prepare as text
from data.tokenizer import get_tokenizer
from data.writing import write_examples, write_stream
from ops import IGNORE

ABOUT = dict(name="text", generator="data/text/prepare.py", generator_version=1, parameters={}, seed=0)
BYTES = dict(tokenizer=get_tokenizer("byte"), **ABOUT)
error_of = Helpers.error_of


def contents_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and file.name != ".nanogate"}


# ----------------------------------------------------------------------------------------------------------------------
# The order of batches


def stream(n, cuts=()):
    """A stream of the tokens 1000, 1001, ..., in shards cut anywhere."""
    parts = [part for part in np.split(np.arange(1000, 1000 + n, dtype=np.uint16), sorted(cuts)) if len(part)]
    facts = {"tokens": n, "shards": [{"sha256": ""}] * len(parts)}
    meta = dict(name="x", kind="stream", tokenizer="x", vocab_size=1 << 16, parameters={}, splits={"train": facts})
    return Dataset(Path("x"), meta, {"train": parts})


def rows_of(dataset, split, seed, steps, **sizes):
    """The rows of the global batches of `steps`, as tuples."""
    rows = []
    for step, micro_step in itertools.product(steps, range(sizes.get("gradient_accumulation_steps", 1))):
        inputs, targets = dataset.batch(split, step, seed=seed, micro_step=micro_step, **sizes)
        rows += [(tuple(x), tuple(y)) for x, y in zip(inputs.tolist(), targets.tolist(), strict=True)]
        count = int((targets != IGNORE).sum())
        assert dataset.count_labels(split, step, [micro_step], seed=seed, **sizes) == count
    return rows


def batches_of(dataset, split, batch_size, block_size, world_size, **keys):
    """The batches of all processes, one of each process in turn."""
    ranks = (dataset.eval_batches(split, batch_size, block_size, i, world_size, **keys) for i in range(world_size))
    return [batch for turn in itertools.zip_longest(*ranks) for batch in turn if batch is not None]


@st.composite
def streams(draw, extra=1):
    block_size = draw(st.integers(1, 12))
    n = draw(st.integers(block_size + extra if extra > 0 else 2, 120))
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
    write_examples(tmp_path / "rows", splits, tokenizer="x", vocab_size=300, **ABOUT)
    return open_dataset(tmp_path / "rows")


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_of_examples_is_every_row_once_and_short_rows_are_padded(two_slices, epoch):
    rows = rows_of(two_slices, "train", 3, range(epoch * 2, epoch * 2 + 2), batch_size=7, block_size=8)
    assert sorted(inputs[0] - 100 for inputs, _ in rows) == [*range(5), *range(10, 16), *range(20, 23)]
    for inputs, targets in rows:
        length = 8 if 110 <= inputs[0] < 120 else 4
        assert inputs == (inputs[0],) * length + (0,) * (8 - length)
        assert targets == (IGNORE,) * (length - 1) + (7,) + (IGNORE,) * (8 - length)


@settings(deadline=None, max_examples=40)
@given(streams(), st.integers(0, 3), st.integers(0, 30), st.sampled_from([(12, 1), (4, 3), (3, 4), (1, 12)]))
def test_the_global_batch_does_not_depend_on_how_micro_steps_are_dealt_out(case, seed, step, parts):
    _, block_size, dataset = case
    whole = rows_of(dataset, "train", seed, [step], batch_size=12, block_size=block_size)
    sizes = dict(batch_size=parts[0], gradient_accumulation_steps=parts[1], block_size=block_size)
    assert rows_of(dataset, "train", seed, [step], **sizes) == whole


def test_a_batch_depends_on_seed_and_step_alone_and_every_epoch_and_seed_has_its_order(two_slices):
    sizes = dict(batch_size=5, block_size=8, gradient_accumulation_steps=2)
    in_order = [rows_of(two_slices, "train", 0, [step], **sizes) for step in range(6)]  # over several epochs
    shards._epoch.cache_clear()  # as in another process
    for step in (4, 1, 5, 0, 3, 2):
        list(two_slices.eval_batches("val", 3, 8))
        rows_of(two_slices, "val", 9, [step], **sizes)
        np.random.seed(step)
        assert rows_of(two_slices, "train", 0, [step], **sizes) == in_order[step]
    epochs = itertools.product((0, 1), ([0], [1]))  # seeds and steps
    orders = {tuple(rows_of(two_slices, "train", *at, batch_size=14, block_size=8)) for at in epochs}
    assert len(orders) == 4


@settings(deadline=None, max_examples=40)
@given(streams(extra=0), st.integers(1, 5), st.integers(1, 4))
def test_evaluation_scores_every_token_of_a_stream_but_the_first_once(case, batch_size, world_size):
    n, block_size, dataset = case
    scored = []
    for inputs, targets, name in batches_of(dataset, "train", batch_size, block_size, world_size):
        assert name is None and inputs.shape == targets.shape and inputs.shape[1] == block_size
        assert (targets != IGNORE).any(1).all()
        assert (inputs[targets != IGNORE] + 1 == targets[targets != IGNORE]).all()
        scored += targets[targets != IGNORE].tolist()
    assert scored == list(range(1001, 1000 + n))  # in order, once each


@pytest.mark.parametrize("world_size", [1, 2, 9])
def test_evaluation_reads_every_row_once_and_one_slice_at_a_time(two_slices, world_size):
    seen = {}
    for inputs, targets, name in batches_of(two_slices, "val", 3, 8, world_size):
        assert inputs.shape == targets.shape and name == f"{inputs.shape[1]}/1" and len(inputs) <= 3
        seen.setdefault(name, []).extend((inputs[:, 0] - 200).tolist())
    assert seen == {"4/1": [*range(5), *range(20, 23)], "8/1": [*range(10, 16)]}
    assert list(seen) == two_slices.slices


@settings(deadline=None, max_examples=40)
@given(streams(extra=0), st.integers(1, 90), st.integers(1, 5), st.integers(1, 4))
def test_a_sample_is_windows_evenly_spread_and_the_same_for_all_batches_and_processes(case, tokens, rows, world_size):
    n, block_size, dataset = case
    whole = [int(inputs[0, 0]) for inputs, _, _ in dataset.eval_batches("train", 1, block_size)]
    batches = batches_of(dataset, "train", rows, block_size, world_size, tokens=tokens)
    places = [whole.index(first) for inputs, _, _ in batches for first in inputs[:, 0].tolist()]
    wanted = min(len(whole), math.ceil(tokens * len(whole) / n))
    assert len(places) == wanted
    assert {b - a for a, b in itertools.pairwise(places)} <= {len(whole) // wanted, len(whole) // wanted + 1}
    assert abs(places[0] - (len(whole) - 1 - places[-1])) <= 1


def test_a_sample_of_rows_has_each_slice_in_its_share(two_slices):
    batches = list(two_slices.eval_batches("val", 2, 8, tokens=40))  # of 80 tokens: 8 rows of 4, 6 of 8
    assert [(name, inputs[:, 0].tolist()) for inputs, _, name in batches] == [
        ("4/1", [201, 203]), ("4/1", [220, 222]), ("8/1", [211, 213]), ("8/1", [215])
    ]  # fmt: skip


def test_what_does_not_fit_the_block_size_is_one_line(two_slices):
    sizes = dict(batch_size=2, block_size=7)
    assert "rows of 8 tokens; block_size=7" in error_of(two_slices.batch, "train", 0, seed=0, **sizes)
    assert "rows of 8 tokens" in error_of(lambda: list(two_slices.eval_batches("val", **sizes)))
    assert "has no split 'test'; it has train, val" in error_of(two_slices.batch, "test", 0, seed=0, **sizes)
    assert "7 tokens, fewer than block_size + 1 = 8" in error_of(stream(7).batch, "train", 0, seed=0, **sizes)
    assert "nothing to predict" in error_of(lambda: list(stream(1).eval_batches("train", **sizes)))


# ----------------------------------------------------------------------------------------------------------------------
# A damaged folder


@pytest.fixture
def folder(tmp_path):
    splits = {"train": ["ab cd\n", "", "é" * 50], "val": ["xyz " * 20]}
    write_stream(writing.claim(tmp_path / "text", False, ABOUT["generator"]), splits, shard_tokens=40, **BYTES)
    return tmp_path / "text"


def test_a_stream_is_counted_and_its_documents_are_found_again(folder):
    dataset = open_dataset(folder)
    assert dataset.counts("train") == {"documents": 3, "words": 3, "bytes": 106, "tokens": 106}
    assert [shard["tokens"] for shard in dataset.meta["splits"]["train"]["shards"]] == [40, 40, 26]
    assert np.load(folder / "train_documents.npy").tolist() == [0, 6, 6, 106]
    assert (dataset.name, dataset.kind, dataset.tokenizer, dataset.vocab_size) == ("text", "stream", "byte", 256)
    assert dataset.splits == ["train", "val"] and dataset.slices == [] and len(dataset.sha256) == 64
    inputs, targets, _ = next(dataset.eval_batches("train", 1, 105))
    assert bytes([*inputs[0].tolist(), targets[0, -1].item()]) == b"ab cd\n" + "é".encode() * 50


MEANINGS = {
    "splits": lambda meta: {"splits": {"val": meta["splits"]["train"], "train": meta["splits"]["val"]}},
    "tokenizer": lambda meta: {"tokenizer": "another"},
    "vocab_size": lambda meta: {"vocab_size": meta["vocab_size"] + 1},
    "first ids": lambda meta: {"parameters": {"row_len": 9}},
    "alphabet": lambda meta: {"parameters": {"alphabet": "ab"}},
    "slice": lambda meta: json.loads(json.dumps(meta).replace("16/2", "16/3")),
    "kinds": lambda meta: {"kinds": {"trigger": [1]}},
}


@pytest.mark.parametrize("what", MEANINGS)
def test_the_hash_of_the_data_covers_what_the_shards_mean(what, folder, mixed_mqar, tmp_path):
    if what in ("alphabet", "slice", "kinds"):  # of examples
        folder = Path(shutil.copytree(mixed_mqar, tmp_path / "mqar"))
    before, meta = open_dataset(folder), json.loads((folder / "meta.json").read_text())
    for change, is_same in (({"generator_version": 99, "seed": 5}, True), (MEANINGS[what](meta), False)):
        (folder / "meta.json").write_text(json.dumps(meta | change))
        assert (open_dataset(folder).sha256 == before.sha256) == is_same  # how they were made is no part of it


def change(*path, value):
    """A damage: set one entry of meta.json."""

    def damage(folder):
        meta = json.loads((folder / "meta.json").read_text())
        functools.reduce(operator.getitem, path[:-1], meta)[path[-1]] = value
        (folder / "meta.json").write_text(json.dumps(meta))

    return damage


def replace(content):
    """A damage: train_0000.npy with another content, of which meta.json knows the size and sha256."""

    def damage(folder):
        for name, value in writing._save(folder / "train_0000.npy", content).items():
            change(*SHARD, name, value=value)(folder)

    return damage


def edit(name, function):
    """A damage: a file with function(its bytes)."""
    return lambda folder: (folder / name).write_bytes(function((folder / name).read_bytes()))


SHARD, TRAIN = ("splits", "train", "shards", 0), ("splits", "train")
PUBLISHED = {"text": {"val": {"published_words": "x"}}}
DAMAGES = {
    "no meta.json": (lambda folder: (folder / "meta.json").unlink(), "meta.json: cannot be read .No such file"),
    "another JSON": (edit("meta.json", lambda content: b"[]"), "meta.json: it=..: must be a dict"),
    "a later format": (change("format", value=2), "meta.json: format=2: must be"),
    "unknown kind": (change("kind", value="video"), "meta.json: kind='video'"),
    "vocabulary too large": (change("vocab_size", value=1 << 40), "meta.json: .*vocab_size=1099511627776"),
    "ids of another width": (change("vocab_size", value=65_537), "train_0000.npy: holds uint16 .* says uint32"),
    "missing shard": (lambda folder: (folder / "train_0001.npy").unlink(), "train_0001.npy: is missing"),
    "a pipe": (lambda folder: (folder / "val_0000.npy").unlink() or os.mkfifo(folder / "val_0000.npy"), "is missing"),
    "missing offsets": (lambda folder: (folder / "val_documents.npy").unlink(), "val_documents.npy: is missing"),
    "truncated": (edit("train_0001.npy", lambda data: data[:150]), "train_0001.npy: cannot be read as a .npy file of"),
    "longer": (edit("train_0001.npy", lambda data: data + b"0"), "train_0001.npy: .*sha256 differs"),
    "flipped bit": (
        edit("train_0002.npy", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        "train_0002.*sha256 differs",
    ),
    "swapped": (lambda folder: shutil.copy(folder / "train_0001.npy", folder / "train_0000.npy"), "sha256 differs"),
    "wrong dtype": (replace(np.zeros(40, np.int64)), "train_0000.npy: holds int64 .40,. where"),
    "wrong shape": (replace(np.zeros((2, 20), np.uint16)), "train_0000.npy: holds uint16 .2, 20. where"),
    "id outside the vocabulary": (replace(np.full(40, 256, np.uint16)), "train_0000.npy: holds 256 where .* below 256"),
    "pickle": (replace(np.array([{}] * 40, object)), "train_0000.npy: cannot be read as a .npy"),
    "half a header": (replace(b"\x93NUMPY\x01\x00\x76\x00{'descr'"), "train_0000.npy: cannot be read as a .npy"),
    "path up": (change(*SHARD, "file", value="../train_0000.npy"), "meta.json: names '../train_0000.npy', which is no"),
    "bad sum": (change(*TRAIN, "tokens", value=107), "do not add up to its 107 tokens"),
    "wrong type": (change(*SHARD, "tokens", value="40"), "train.shards.0..tokens='40': must be a whole number"),
    "no words": (change(*TRAIN, "words", value=0), "splits.train.words=0: must be a whole number of at least 1"),
    "published words a text": (change("parameters", value=PUBLISHED), "text.val.published_words='x': must be a whole"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_line_that_names_the_file_and_the_way_out(folder, name, monkeypatch):
    (damage, expected), now = DAMAGES[name], time.time_ns()
    for file in folder.iterdir():
        os.utime(file, (0, 0))
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**10)
    open_dataset(folder)  # its files are remembered as whole
    assert (folder / ".verified.json").is_file()
    damage(folder)
    message = error_of(open_dataset, folder)
    assert re.search(expected, message)
    assert message.startswith(str(folder)) and message.endswith("; run python data/text/prepare.py")


def test_rows_that_do_not_add_up_and_numbers_in_another_order_are_one_line(two_slices):
    folder = two_slices.folder
    before, rows = (folder / "meta.json").read_bytes(), np.load(folder / "train_0000.npy")
    for damage, expected in (
        (change(*TRAIN, "rows", value=15), "the shards of train do not add up to its 15 rows"),
        (change(*SHARD, "seq_len", value=5), "a shard of train does not have rows * seq_len tokens"),
        (replace(np.asfortranarray(rows)), "train_0000.npy: holds uint16 (5, 2, 4) where"),
    ):
        damage(folder)
        assert expected in error_of(open_dataset, folder)
        (folder / "meta.json").write_bytes(before)


def test_no_folder_says_how_to_make_one(tmp_path, monkeypatch):
    assert error_of(open_dataset, tmp_path / "mqar").endswith("; run python data/mqar/prepare.py")
    assert error_of(open_dataset, tmp_path / "mine").endswith("; run python data/<name>/prepare.py")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "meta.json").write_text("")
    monkeypatch.setattr(shards, "DATA", tmp_path)
    monkeypatch.chdir(tmp_path / "text")
    assert error_of(open_dataset, "text").endswith("; write --dataset=data/text")


def test_an_open_shard_that_is_replaced_is_read_as_it_was_and_one_that_is_cut_short_is_one_line(folder, two_slices):
    sizes = dict(batch_size=64, block_size=8)
    dataset = open_dataset(folder)
    before = rows_of(dataset, "train", 0, [0], **sizes)
    write_stream(folder, {"train": ["other" * 40], "val": ["y" * 20]}, **BYTES)
    assert rows_of(dataset, "train", 0, [0], **sizes) == before
    for dataset in (open_dataset(folder), two_slices):
        for file in dataset.folder.glob("*_0*.npy"):
            os.truncate(file, 130)  # two bytes, behind the header
        assert "was cut short after it was opened" in error_of(dataset.batch, "train", 0, seed=0, **sizes)
        assert "was cut short after it was opened" in error_of(list, dataset.eval_batches("val", **sizes))


def test_more_shards_than_the_soft_limit_on_open_files_are_opened(tmp_path):
    write_stream(tmp_path / "out", {"train": ["abcd" * 20], "val": ["y"]}, shard_tokens=4, **BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, hard))
        assert open_dataset(tmp_path / "out").counts("train")["tokens"] == 80
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ----------------------------------------------------------------------------------------------------------------------
# Writing

SMALL = {"train": ["x"], "val": ["y"]}


def test_a_prepare_that_fails_leaves_the_old_data_set_as_it_was(folder, tmp_path):
    def documents():
        yield "some text " * 10
        raise KeyboardInterrupt

    before, first = contents_of(folder), writing.claim(tmp_path / "first", False, ABOUT["generator"])
    for out in (folder, first):
        with pytest.raises(KeyboardInterrupt):
            write_stream(out, {"train": documents()}, shard_tokens=40, **BYTES)
    assert contents_of(folder) == before and contents_of(first) == {}
    assert writing.claim(first, False, ABOUT["generator"]) == first  # the next call may have the folder


def test_a_smaller_data_set_leaves_nothing_of_the_larger_one_and_nothing_else_is_touched(folder, tmp_path):
    outside = tmp_path / "train_0009.npy"
    outside.write_text("somebody's")
    (folder / "notes.txt").write_text("mine")
    names = {"meta.json", "train_0000.npy", "train_documents.npy", "val_0000.npy", "val_documents.npy", "notes.txt"}
    write_stream(folder, {"train": ["xyz" * 9], "test": ["y"], "val": ["y"]}, shard_tokens=2, **BYTES)
    assert (folder / "train_0013.npy").is_file() and (folder / "test_documents.npy").is_file()
    write_stream(folder, SMALL, **BYTES)
    assert contents_of(folder).keys() == names
    for stranger in ("../train_0009.npy", "notes.txt"):
        change(*SHARD, "file", value=stranger)(folder)
        write_stream(folder, SMALL, **BYTES)
        assert contents_of(folder).keys() == names and outside.read_text() == "somebody's"


@pytest.mark.parametrize("moved, had_one", [(0, False), (3, False), (4, False), (0, True), (4, True)])
def test_a_kill_while_the_new_files_take_their_places_leaves_a_data_set_that_is_refused(
    folder, tmp_path, monkeypatch, moved, had_one
):
    file, rename, done = tmp_path / "a.txt", os.replace, []
    file.write_text("a\nb\n")
    out = folder if had_one else tmp_path / "out"

    def killed(source, target):
        if ".new" in Path(source).parts and ".new" not in Path(target).parts:
            if len(done) == moved:
                raise KeyboardInterrupt
            done.append(target)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            text.main([str(file), f"--out_dir={out}"])
    assert "run python data/" in error_of(open_dataset, out)  # meta.json goes first and comes last
    text.main([str(file), f"--out_dir={out}"])
    text.main([str(file), f"--out_dir={tmp_path / 'once'}"])
    assert {**contents_of(out), ".verified.json": b""} == {**contents_of(tmp_path / "once"), ".verified.json": b""}


def test_two_prepares_at_once_do_not_mix(folder):
    def documents():
        assert "is running in it" in error_of(write_stream, folder, SMALL, **BYTES)
        yield "the first one"

    write_stream(folder, {"train": documents(), "val": ["z"]}, **BYTES)
    assert open_dataset(folder).counts("train")["bytes"] == len("the first one")


def test_a_folder_that_holds_something_else_is_refused_unless_overwrite_says_so(tmp_path, monkeypatch):
    out = tmp_path / "out"
    (tmp_path / "a.txt").write_text("a\nb\n")
    out.mkdir()
    words, rows = [str(tmp_path / "a.txt"), f"--out_dir={out}"], ["--train_size=9", "--val_size=3", f"--out_dir={out}"]
    for name, content in {"meta.json": '{"format": "somebody\'s"}', "thesis.txt": "mine"}.items():
        (out / name).write_text(content)
        message = error_of(text.main, words)
        assert name in message and "--overwrite=true" in message and contents_of(out)[name] == content.encode()
    text.main([*words, "--overwrite=true"])
    assert open_dataset(out).counts("val")["bytes"] == 2 and (out / "thesis.txt").read_text() == "mine"
    text.main(words)  # a data set is ours; that of another script is something else
    message = error_of(mqar.main, rows)
    assert f"{out}: holds the data set of 'data/text/prepare.py'; name another --out_dir, or add --over" in message
    mqar.main([*rows, "--overwrite=true"])
    assert open_dataset(out).name == "mqar"
    monkeypatch.setattr(writing, "DATA", tmp_path / "data")  # the folder of a script is ours without a mark
    for name in ("data/mqar", "others"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "prepare.py").write_text("")
    assert writing.claim(None, False, "data/mqar/prepare.py") == tmp_path / "data" / "mqar"
    assert "holds what is not of a data set (prepare.py)" in error_of(writing.claim, tmp_path / "others", False, "x")


def test_what_cannot_be_written_is_one_line(tmp_path):
    out, rows = tmp_path / "out", np.full((4, 2, 8), 1)
    for splits in ({"val": [""]}, {"val": []}, {"val": [" \n"]}):
        assert "no text, or nothing but white space" in error_of(write_stream, out, splits, **BYTES)
    misread = BYTES | {"parameters": {"text": "book.txt"}}
    assert "parameters.text='book.txt': must be" in error_of(write_stream, out, SMALL, **misread)
    about, splits = ABOUT | {"tokenizer": "x"}, {"train": [(rows, {"slice": "8"})]}
    assert "1099511627776" in error_of(write_examples, out, splits, vocab_size=1 << 40, **about)
    for wrong in (70_000, -1):  # ids that the vocabulary lacks are refused, not wrapped
        rows[2, 0, 3] = wrong
        message = error_of(write_examples, out, splits, vocab_size=5000, **about)
        assert f"ids from {min(1, wrong)} to {max(1, wrong)}, and vocab_size=5000" in message
    rows[:] = [[[1] * 8, [0] * 8]]
    assert "would hold no label" in error_of(write_examples, out, splits, vocab_size=5000, **about)
    assert not list(out.iterdir())
