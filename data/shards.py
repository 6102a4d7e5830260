"""
Data sets as training and evaluation read them: which examples a step reads, and in which order an
evaluation goes through a split.

    dataset = open_dataset("data/mqar")                  # a folder; every shard is checked against its sha256
    inputs, targets = dataset.batch("train", 7, seed=0, batch_size=4, block_size=64)
    for inputs, targets, slice in dataset.eval_batches("val", 4, 64): ...

    Stream     running text: an example is a window of block_size tokens
    Documents  the same text under mask_documents: an example is a document, or a part of a long one
    Rows       separate rows with labels
    Drawn      rows whose train split is drawn anew for every step
    Mixture    several of them, mixed by weight: "data/a:7,data/b:3"

The examples of training have numbers 0, 1, 2, ..., over all epochs, and each is a pure function of
the seed and its number. data/meta.py says how a data set lies on disk.
"""

import bisect
import functools
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from base.files import find_data, how_to_prepare, is_no_file, parts_of_mixture, sha256_of_file
from base.rules import DataError, show
from configurator import UserError
from data import drawn
from data.meta import dtype_of, read_meta
from ops import IGNORE

# what the ids of a data set mean
MEANING = ("kind", "vocab_size", "tokenizer", "first_ids", "alphabet", "kinds")


def open_dataset(path: Path | str, mask_documents: bool = False) -> "Dataset":
    """A Dataset whose files have all been checked. Raises UserError, which names the file and what
    to do. mask_documents: a text is read by document; rows stay as they are."""
    if not str(path):
        make = "python data/text/prepare.py FILE --tokenizer=CHECKPOINT --out_dir=FOLDER makes one"
        raise UserError(
            f"dataset=None: the checkpoint names no data set; name one: --dataset=FOLDER ({make})"
        )
    find_data(path)
    weights = parts_of_mixture(path)
    if len(weights) > 1:
        parts = [open_dataset(part, mask_documents) for part in weights]
        return Mixture(str(path), parts, list(weights.values()))
    folder = Path(path)
    try:
        meta = read_meta(folder)
        splits = meta["splits"]
        shards = {split: open_shards(folder, meta, facts) for split, facts in splits.items()}
        if meta["kind"] == "examples":
            return Rows(folder, meta, shards)
        if meta["kind"] == "drawn":
            return Drawn(folder, meta, shards)
        documents = {split: open_documents(folder, facts) for split, facts in splits.items()}
        if mask_documents:
            return Documents(folder, meta, shards, documents)
        return Stream(folder, meta, shards)
    except UserError as error:
        raise DataError(str(error), how_to_prepare(folder)) from None


# -- Files ---------------------------------------------------------------------------------------


def open_shards(folder: Path, meta: dict, facts: dict) -> "Shards":
    """The shards of a split, each checked. facts: what meta.json says about the split."""
    arrays = []
    paths = []
    for entry in facts["shards"]:
        is_text = meta["kind"] == "stream"
        shape = (entry["tokens"],) if is_text else (entry["rows"], 2, entry["seq_len"])
        vocab_size = meta["vocab_size"]
        arrays.append(open_file(folder, entry, dtype_of(vocab_size), shape, vocab_size))
        paths.append(folder / entry["file"])
    return Shards(arrays, paths)


def open_documents(folder: Path, facts: dict) -> np.ndarray:
    """(documents + 1,): where the documents of a split begin, then its length in tokens."""
    entry = facts["document_offsets"]
    n = facts["tokens"]
    offsets = open_file(folder, entry, np.dtype(np.int64), (facts["documents"] + 1,), n + 1)
    if offsets[0] != 0 or offsets[-1] != n or (np.diff(offsets) < 0).any():
        raise UserError(f"{folder / entry['file']}: must rise from 0 to {n}")
    return offsets


def open_file(folder: Path, entry: dict, dtype: np.dtype, shape: tuple, limit: int) -> np.ndarray:
    """A .npy file as a memory map, which reads a file that is replaced later as it was. Raises
    UserError if it is not what its entry in meta.json says, or a number is not below limit."""
    path = folder / entry["file"]
    if is_no_file(path):
        raise UserError(f"{path}: is a folder, a pipe or a device, and no file")
    try:
        array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    # a damaged header may raise anything: SyntaxError, tokenize.TokenError, EOFError
    except Exception as error:
        raise UserError(f"{path}: cannot be read as a .npy file of numbers ({error})") from None
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise UserError(
            f"{path}: holds {array.dtype} {array.shape} where meta.json says {dtype} {shape}"
        )
    if sha256_of_file(path) != entry["sha256"]:
        raise UserError(f"{path}: is not the file that meta.json describes (its sha256 differs)")
    largest = int(array.max())
    if largest >= limit:
        raise UserError(f"{path}: holds {largest} where every value must be below {limit}")
    return array


class Shards:
    """The shards of a split, read as one array of tokens or of rows."""

    def __init__(self, arrays: list[np.ndarray], paths: list[Path]):
        self.arrays = arrays
        self.files = [(path, os.stat(path)) for path in paths]
        # where each shard begins, then the length of all
        self.starts = [0, *itertools.accumulate(len(array) for array in arrays)]

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens or rows start, ..., stop - 1, as many as there are, as int64."""
        first = bisect.bisect_right(self.starts, start) - 1
        last = bisect.bisect_left(self.starts, min(stop, len(self)))
        for path, opened in self.files[first:last]:
            refuse_cut_file(path, opened)
        parts = []
        for i in range(first, last):
            begin = self.starts[i]
            parts.append(self.arrays[i][max(start - begin, 0) : stop - begin])
        return np.concatenate(parts).astype(np.int64)


def refuse_cut_file(path: Path, opened: os.stat_result) -> None:
    """Raises UserError where a file was cut short since it was opened: to read what its map has lost
    would end the process by SIGBUS. A file that was removed or replaced is still mapped as it was."""
    if not os.path.exists(path):
        return
    now = os.stat(path)
    if now.st_ino == opened.st_ino and now.st_size < opened.st_size:
        raise UserError(f"{path}: was cut short after it was opened; prepare the data set again")


# -- What all data sets have in common -----------------------------------------------------------


class Dataset:
    """
    An open data set, which open_dataset makes. Its shards stay on disk.

    kind: "stream" or "examples", the latter also where the rows of training are drawn
    meta: the content of meta.json
    slices: the names of the slices ("64/4"), none for a stream
    sha256: one digest of all shards, or of how they are drawn, and of what their ids mean
    kinds: {name: token ids} of the queries that meters.py measures apart
    alphabet: the characters that the ids 1, 2, ... of data/backcopy stand for, or None
    first_ids: the ids that every row begins with and that stand for no text: [0] for <s>, or none
    mask_documents: whether a text is read by document
    parts, weights: the data sets of a Mixture and their shares of the examples; else this one alone

    The methods that raise NotImplementedError are those that each kind has in its own way.
    """

    kind = ""
    mask_documents = False

    def __init__(self, folder: Path, meta: dict, shards: dict[str, Shards]):
        parameters = meta["parameters"]
        self.folder = folder
        self.meta = meta
        self.shards = shards
        self.name = meta["name"]
        self.tokenizer = meta["tokenizer"]
        self.vocab_size = meta["vocab_size"]
        self.splits = list(meta["splits"])
        self.kinds = meta.get("kinds", {})
        self.first_ids = [0] if parameters.get("first_token") else []  # of data/backcopy
        self.alphabet = parameters.get("alphabet") if self.kind == "examples" else None
        self.slices: list[str] = []
        means = [getattr(self, name) for name in MEANING]
        contents = {split: self._contents(split) for split in self.splits}
        text = json.dumps([*means, contents], sort_keys=True)
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.parts: list[Dataset] = [self]
        self.weights = [1.0]
        self._epoch = functools.lru_cache(maxsize=4)(self._draw_epoch)

    def facts(self, split: str) -> dict:
        """What meta.json says about a split. Raises UserError where there is no such split."""
        if split not in self.meta["splits"]:
            raise UserError(
                f"{self.folder}: has no split {split!r}; it has {', '.join(self.splits)}"
            )
        return self.meta["splits"][split]

    def counts(self, split: str) -> dict[str, int]:
        """{"tokens": number, ...}: "labels" and "rows" of examples, "documents", "words" and "bytes"
        of a stream."""
        return {name: n for name, n in self.facts(split).items() if isinstance(n, int)}

    def perfect_loss(self, split: str) -> float | None:
        """Nats a token of the predictor that knows how the rows were drawn, if meta.json gives it
        for every shard."""
        nats = 0.0
        tokens = 0
        for shard in self.facts(split)["shards"]:
            if "perfect_loss" not in shard:
                return None
            nats += shard["perfect_loss"] * shard["tokens"]
            tokens += shard["tokens"]
        return nats / tokens

    def longest(self, split: str, block_size: int) -> int:
        """The length of the longest row; block_size for a stream. Raises UserError if it does not
        fit block_size."""
        raise NotImplementedError

    def examples_per_epoch(self, split: str, block_size: int) -> int:
        """The number of rows, sys.maxsize if they are drawn, or of windows. Raises UserError if
        block_size does not fit."""
        raise NotImplementedError

    def tokens_per_example(self, split: str, block_size: int) -> float:
        """The mean length of an example."""
        raise NotImplementedError

    def count_labels(self, split: str, start: int, stop: int, seed: int, block_size: int) -> int:
        """How many labels the examples start, ..., stop - 1 of training have. None of them is read."""
        raise NotImplementedError

    def examples(
        self, split: str, start: int, stop: int, seed: int, block_size: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """(inputs, targets) of the examples start, ..., stop - 1 of training, each (T,) int64."""
        places = self._places_of(split, start, stop, seed, block_size)
        return [self._example(split, place, block_size) for place in places]

    def batch(
        self,
        split: str,
        step: int,
        *,
        seed: int,
        batch_size: int,
        block_size: int,
        micro_step: int = 0,
        gradient_accumulation_steps: int = 1,
        same_length: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        (inputs, targets) of one micro-step, both int64 (B, T), a pure function of (seed, step,
        micro_step). The global batch of a step is the next batch_size * gradient_accumulation_steps
        examples, and micro-step m is its m-th part. Each epoch has an order of its own; drawn rows
        have no epochs, and none is read twice.

        same_length: every batch is as long as the longest row, since torch.compile takes minutes
        for each new length
        """
        start = (step * gradient_accumulation_steps + micro_step) * batch_size
        examples = self.examples(split, start, start + batch_size, seed, block_size)
        return collate(examples, self.longest(split, block_size) if same_length else 0)

    def eval_batches(
        self,
        split: str,
        batch_size: int,
        block_size: int,
        rank: int = 0,
        world_size: int = 1,
        stride: int | None = None,
        tokens: int | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, str | None]]:
        """
        Yields (inputs, targets, slice) over the whole split, in order, so that every token but the
        first of a stream is scored once: the batches rank, rank + world_size, ..., and a row
        without labels where other ranks have one more. All examples of a batch are of one slice,
        which is None for a stream. Its windows have block_size tokens; with a smaller stride they
        overlap, and each scores what lies behind the one before it (UserError for a larger one).

        tokens: read about that many tokens instead, the same in every call, evenly spread over the
        split and its slices
        """
        stride = stride or block_size
        self.longest(split, block_size)  # raises where a row does not fit
        if stride > block_size:
            raise UserError(
                f"stride={stride}: windows of block_size={block_size} would leave tokens between them out"
            )
        n_tokens = self.facts(split)["tokens"]
        batches: list[tuple] = []
        for name, places in self._places_of_slices(split, block_size, stride).items():
            if tokens is not None:
                n = -(-tokens * len(places) // n_tokens)  # rounded up
                places = evenly_spread(places, min(n, len(places)))
            places = self._in_reading_order(split, places, block_size)
            for i in range(0, len(places), batch_size):
                batches.append((name, places[i : i + batch_size]))
        n_batches = len(batches)
        name, places = batches[-1]
        batches += [(name, places[:1])] * (-n_batches % world_size)
        for i in range(rank, len(batches), world_size):
            name, places = batches[i]
            inputs, targets = self._eval_batch(split, places, block_size, stride)
            if i >= n_batches:
                targets[:] = IGNORE
            yield inputs, targets, name

    def _contents(self, split):
        """What sha256 covers of a split."""
        shards = self.meta["splits"][split]["shards"]
        return [[shard["sha256"], shard.get("slice")] for shard in shards]

    # A place is the row's number in its split, or the first token of a window.

    def _places_of(self, split, start, stop, seed, block_size):
        """The places of the examples start, ..., stop - 1 of training."""
        n = self.examples_per_epoch(split, block_size)
        places = []
        for number in range(start, stop):
            epoch = self._epoch(split, seed, number // n, n, block_size)
            places.append(epoch[number % n])
        return places

    def _draw_epoch(self, split, seed, epoch, n, block_size):
        """(n,): the places of an epoch's examples, in its order. Called as _epoch, which remembers."""
        raise NotImplementedError

    def _example(self, split, place, block_size):
        """(inputs, targets) of the example at a place."""
        raise NotImplementedError

    def _places_of_slices(self, split, block_size, stride):
        """{slice: its places in the order of the split}."""
        raise NotImplementedError

    def _in_reading_order(self, split, places, block_size):
        """The places of a slice, in the order in which an evaluation reads them."""
        return places

    def _eval_batch(self, split, places, block_size, stride):
        """(inputs, targets) of a batch of an evaluation, each (B, T)."""
        raise NotImplementedError


def evenly_spread(places: np.ndarray, n: int) -> np.ndarray:
    """n of the places, each in the middle of an n-th part of them."""
    return places[(2 * np.arange(n) + 1) * len(places) // (2 * n)]


def collate(examples: list[tuple], length: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples of (inputs, targets) -> two (B, T) tensors; T is at least `length`; padding has no
    target."""
    length = max(length, *(len(inputs) for inputs, _ in examples))
    batch = np.zeros((2, len(examples), length), np.int64)
    batch[1] = IGNORE
    for i, example in enumerate(examples):
        batch[:, i, : len(example[0])] = example
    inputs, targets = torch.from_numpy(batch)
    return inputs, targets


# -- Text ----------------------------------------------------------------------------------------


class Stream(Dataset):
    """Running text. An epoch of training is windows of block_size tokens, side by side, whose
    borders move from epoch to epoch."""

    kind = "stream"

    def __init__(self, folder: Path, meta: dict, shards: dict[str, Shards]):
        super().__init__(folder, meta, shards)
        # {split: where its texts begin, each of which is read alone, then its length}
        self.offsets = {split: np.array([0, len(of_split)]) for split, of_split in shards.items()}
        self._windows = functools.lru_cache(maxsize=4)(self._find_windows)

    def longest(self, split, block_size):
        self.facts(split)  # raises where there is no such split
        return block_size

    def examples_per_epoch(self, split, block_size):
        self.facts(split)
        n = len(self.shards[split])
        if n <= block_size:
            needed = f"fewer than block_size + 1 = {block_size + 1}"
            raise DataError(f"{self.folder}: {split} has {n} tokens, {needed}")
        return (n - 1) // block_size

    def tokens_per_example(self, split, block_size):
        return self.longest(split, block_size)

    def count_labels(self, split, start, stop, seed, block_size):
        return (stop - start) * block_size

    def _draw_epoch(self, split, seed, epoch, n, block_size):
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(n)
        shift = rng.integers(block_size)  # how far this epoch's borders move
        last = len(self.shards[split]) - block_size - 1  # the last window ends with the split
        return np.minimum(order * block_size + shift, last)

    def _example(self, split, place, block_size):
        length = self._lengths(split, place, block_size)
        tokens = self.shards[split].read(place, place + length + 1)
        return tokens[:-1], tokens[1:]

    def _lengths(self, split, places, block_size):
        """The lengths of the windows at these places: block_size, or less where the text ends
        before."""
        offsets = self.offsets[split]
        ends = offsets[np.searchsorted(offsets, places, side="right")]
        return np.minimum(ends - 1 - places, block_size)

    def _find_windows(self, split, block_size, stride):
        """(windows,): where the windows of an evaluation begin: at a text's start, then every
        `stride` tokens until each token but the text's first is a target. Called as _windows, which
        remembers. Raises UserError where there is none."""
        offsets = self.offsets[split]
        targets = np.diff(offsets) - 1  # (texts,); -1 for an empty one
        more = -(-(targets - block_size) // stride)  # windows behind the first, rounded up
        counts = np.where(targets > 0, 1 + np.maximum(0, more), 0)
        if not counts.any():
            raise DataError(
                f"{self.folder}: no text of {split} has two tokens, so there is nothing to predict"
            )
        # for each window: where its text begins, and how many windows the texts before have
        begins = np.repeat(offsets[:-1], counts)
        n_before = np.repeat(counts.cumsum() - counts, counts)
        return begins + stride * (np.arange(len(begins)) - n_before)

    def _places_of_slices(self, split, block_size, stride):
        return {None: self._windows(split, block_size, stride)}

    def _eval_batch(self, split, places, block_size, stride):
        examples = [self._example(split, place, block_size) for place in places]
        inputs, targets = collate(examples, 0 if self.mask_documents else block_size)
        offsets = self.offsets[split]
        is_first = offsets[np.searchsorted(offsets, places)] == places  # a text begins there
        # what a later window has in common with the one before it was scored there
        targets[np.flatnonzero(~is_first), : block_size - stride] = IGNORE
        return inputs, targets


class Documents(Stream):
    """A stream under mask_documents: each document is read alone, in windows of its own. A window
    that its document does not fill is shorter, and is padded."""

    mask_documents = True

    def __init__(
        self, folder: Path, meta: dict, shards: dict[str, Shards], documents: dict[str, np.ndarray]
    ):
        """documents: {split: where its documents begin, then its length}."""
        super().__init__(folder, meta, shards)
        self.offsets = documents

    def examples_per_epoch(self, split, block_size):
        self.facts(split)
        return len(self._windows(split, block_size, block_size))

    def tokens_per_example(self, split, block_size):
        self.facts(split)
        windows = self._windows(split, block_size, block_size)
        return float(self._lengths(split, windows, block_size).mean())

    def count_labels(self, split, start, stop, seed, block_size):
        places = self._places_of(split, start, stop, seed, block_size)
        return int(self._lengths(split, places, block_size).sum())

    def _draw_epoch(self, split, seed, epoch, n, block_size):
        order = np.random.default_rng([seed, epoch]).permutation(n)
        return self._windows(split, block_size, block_size)[order]

    def _in_reading_order(self, split, places, block_size):
        """The longest windows first: those of about the same length share a batch, and little is
        padded."""
        lengths = self._lengths(split, places, block_size)
        return places[np.argsort(-lengths, kind="stable")]


# -- Rows ----------------------------------------------------------------------------------------


class Rows(Dataset):
    """Separate rows of tokens and labels. An epoch of training is all rows in a random order."""

    kind = "examples"

    def __init__(self, folder: Path, meta: dict, shards: dict[str, Shards]):
        super().__init__(folder, meta, shards)
        for facts in meta["splits"].values():
            for shard in facts["shards"]:
                if shard["slice"] not in self.slices:
                    self.slices.append(shard["slice"])
        self._labels_of_rows = functools.lru_cache(maxsize=4)(self._count_labels_of_rows)

    def longest(self, split, block_size):
        length = max(shard["seq_len"] for shard in self.facts(split)["shards"])
        return self._check_length(split, length, block_size)

    def _check_length(self, split, length, block_size):
        """The length of a split's longest row. Raises UserError where it does not fit block_size."""
        if length > block_size:
            raise DataError(
                f"{self.folder}: {split} has rows of {length} tokens; block_size={block_size} is too small"
            )
        return length

    def examples_per_epoch(self, split, block_size):
        self.longest(split, block_size)  # raises where a row does not fit
        return len(self.shards[split])

    def tokens_per_example(self, split, block_size):
        facts = self.facts(split)
        return facts["tokens"] / facts["rows"]

    def count_labels(self, split, start, stop, seed, block_size):
        places = self._places_of(split, start, stop, seed, block_size)
        return int(self._labels_of_rows(split)[places].sum())

    def _count_labels_of_rows(self, split):
        """(rows,): the number of labels of each row. Called as _labels_of_rows, which remembers:
        it reads all rows."""
        counts = []
        for rows in self.shards[split].arrays:
            counts.append(np.count_nonzero(rows[:, 1], axis=1))
        return np.concatenate(counts)

    def _draw_epoch(self, split, seed, epoch, n, block_size):
        return np.random.default_rng([seed, epoch]).permutation(n)

    def _example(self, split, place, block_size):
        tokens, labels = self.shards[split].read(place, place + 1)[0]
        return tokens, np.where(labels == 0, IGNORE, labels)

    def _places_of_slices(self, split, block_size, stride):
        places = {}
        start = 0
        for entry in self.facts(split)["shards"]:
            stop = start + entry["rows"]
            places.setdefault(entry["slice"], []).extend(range(start, stop))
            start = stop
        return {name: np.array(of_slice) for name, of_slice in places.items()}

    def _eval_batch(self, split, places, block_size, stride):
        return collate([self._example(split, place, block_size) for place in places])


class Drawn(Rows):
    """Rows of which those of training are drawn by data/drawn.py, each once. The other splits are
    files."""

    def __init__(self, folder: Path, meta: dict, shards: dict[str, Shards]):
        super().__init__(folder, meta, shards)
        how = meta["splits"]["train"]["drawn"]
        self.task = how["task"]
        self.length = how["length"]
        self.seed = how["seed"]

    def facts(self, split):
        if split == "train":
            raise UserError(
                f"{self.folder}: train has no end: its rows are drawn anew; take split=val"
            )
        return super().facts(split)

    def _contents(self, split):
        if split != "train":
            return super()._contents(split)
        return self.meta["splits"]["train"]["drawn"]

    def longest(self, split, block_size):
        if split != "train":
            return super().longest(split, block_size)
        return self._check_length(split, self.length, block_size)

    def examples_per_epoch(self, split, block_size):
        if split != "train":
            return super().examples_per_epoch(split, block_size)
        self.longest(split, block_size)
        return sys.maxsize

    def tokens_per_example(self, split, block_size):
        if split != "train":
            return super().tokens_per_example(split, block_size)
        return self.longest(split, block_size)

    def count_labels(self, split, start, stop, seed, block_size):
        if split != "train":
            return super().count_labels(split, start, stop, seed, block_size)
        # labels stand at the same positions of every row
        _, labels = drawn.rows(self.task, self.length, "", 0, 1)
        return (stop - start) * int(np.count_nonzero(labels))

    def examples(self, split, start, stop, seed, block_size):
        if split != "train":
            return super().examples(split, start, stop, seed, block_size)
        key = f"{self.seed} {seed}"
        tokens, labels = drawn.rows(self.task, self.length, key, start, stop - start)
        targets = np.where(labels == 0, IGNORE, labels)
        return list(zip(tokens, targets, strict=True))


# -- Mixtures ------------------------------------------------------------------------------------


class Mixture(Dataset):
    """
    Data sets mixed by weight. Examples of training come in blocks of sum(shares): part d has
    shares[d] of them, in an order drawn from (seed, block). The k-th example of a part in the
    mixture is its k-th example alone, so that every part has epochs of its own. evaluate.py reads
    each part by itself.
    """

    def __init__(self, name: str, parts: list[Dataset], shares: list[int]):
        first = parts[0]
        for what in MEANING:
            ours = getattr(first, what)
            setattr(self, what, ours)
            for part in parts:
                theirs = getattr(part, what)
                if theirs != ours:
                    two = f"{what}={show(ours)} and {what}={show(theirs)}"
                    raise UserError(
                        f"{first.folder} and {part.folder} cannot be mixed: they have {two}"
                    )
        self.folder = Path(name)
        self.name = f"mixture of {len(parts)}"
        self.meta = {"parameters": {}}
        self.mask_documents = first.mask_documents
        self.slices = max((part.slices for part in parts), key=len)
        self.parts = parts
        self.shares = tuple(shares)
        self.weights = [share / sum(shares) for share in shares]
        hashes = [[share, part.sha256] for share, part in zip(shares, parts, strict=True)]
        self.sha256 = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    def counts(self, split):
        total = {}
        for part in self.parts:
            for name, n in part.counts(split).items():
                total[name] = total.get(name, 0) + n
        return total

    def perfect_loss(self, split):
        return None

    def longest(self, split, block_size):
        return max(part.longest(split, block_size) for part in self.parts)

    def examples_per_epoch(self, split, block_size):
        return sum(part.examples_per_epoch(split, block_size) for part in self.parts)

    def tokens_per_example(self, split, block_size):
        mean = 0.0
        for part, weight in zip(self.parts, self.weights, strict=True):
            mean += weight * part.tokens_per_example(split, block_size)
        return mean

    def count_labels(self, split, start, stop, seed, block_size):
        _, ranges = self._deal(start, stop, seed)
        n = 0
        for part, (first, end) in zip(self.parts, ranges, strict=True):
            n += part.count_labels(split, first, end, seed, block_size)
        return n

    def examples(self, split, start, stop, seed, block_size):
        order, ranges = self._deal(start, stop, seed)
        of_parts = []
        for part, (first, end) in zip(self.parts, ranges, strict=True):
            of_parts.append(iter(part.examples(split, first, end, seed, block_size)))
        return [next(of_parts[d]) for d in order]

    def _deal(self, start, stop, seed):
        """How the examples start, ..., stop - 1 are dealt: the number of each one's part, and for
        each part (first, end): it gives its own examples first, ..., end - 1."""
        size = sum(self.shares)
        block = start // size  # before it, part d has given shares[d] * block examples
        blocks = range(block, -(-stop // size))
        order = np.concatenate([draw_block(seed, b, self.shares) for b in blocks])
        before = order[: start - block * size]
        order = order[len(before) : len(before) + stop - start]
        ranges = []
        for d, share in enumerate(self.shares):
            first = share * block + np.count_nonzero(before == d)
            ranges.append((first, first + np.count_nonzero(order == d)))
        return order.tolist(), ranges


@functools.lru_cache(maxsize=4)
def draw_block(seed: int, block: int, shares: tuple[int, ...]) -> np.ndarray:
    """(sum(shares),): the number of the part of each example of a block of a mixture."""
    rng = np.random.default_rng([seed, block, 1])  # 1: other numbers than those of an epoch's order
    return rng.permutation(np.repeat(np.arange(len(shares)), shares))
