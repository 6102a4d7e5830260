"""
Data sets as training and evaluation read them: which examples a step reads, and in which order an
evaluation goes through a split.

    dataset = open_dataset("data/mqar")                  # a folder; every shard is checked against its sha256
    inputs, targets, document = dataset.batch("train", 7, seed=0, batch_size=4, block_size=64)
    for inputs, targets, document, slice_name in dataset.eval_batches("val", 4, 64): ...

    Stream           running text: an example is a window of block_size tokens
    PackedDocuments  the same text under mask_documents: an example is a row of whole documents
    Rows             separate rows with labels, of files or drawn anew for every step
    Mixture          several of them, mixed by weight: "data/a:7,data/b:3"

document is None but for packed documents: there it has, for each token, the position in the row at
which its document begins. A slice is a group of the rows of validation that is scored apart, such
as "64/4", those of 64 tokens with 4 pairs.

The examples of training have numbers 0, 1, 2, ..., over all epochs, and each is a pure function of
the seed and its number. data/meta.py says how a data set lies on disk.
"""

import bisect
import collections
import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from base.configurator import UserError
from base.files import find_data, how_to_prepare, one_line, parts_of_mixture, sha256_of_file
from base.rules import show
from data import drawn
from data.meta import dtype_of, read_meta
from ops import IGNORE

# what the ids of a data set mean
MEANING = ("kind", "vocab_size", "tokenizer", "first_ids", "alphabet", "kinds")


def open_dataset(path: Path | str, mask_documents: bool = False) -> "Dataset":
    """A Dataset whose files have all been checked. Raises UserError, which names the file and what
    to do. mask_documents: a text is read by document, and these are packed; rows stay as they are."""
    if not str(path):
        raise UserError(
            "dataset=None: the checkpoint names no data set; name one: --dataset=FOLDER"
        )
    find_data(path)
    weights = parts_of_mixture(path)
    if len(weights) > 1:
        parts = [open_dataset(part, mask_documents) for part in weights]
        return Mixture(str(path), parts, list(weights.values()))
    folder = Path(path)
    try:
        meta = read_meta(folder)
        is_text = meta["kind"] == "stream"
        shards = {}
        offsets = {}
        for split, facts in meta["splits"].items():
            arrays = []
            for entry in facts["shards"]:
                shape = (entry["tokens"],) if is_text else (entry["rows"], 2, entry["seq_len"])
                arrays.append(open_file(folder, entry, dtype_of(meta["vocab_size"]), shape))
            shards[split] = Shards(arrays)
            if is_text:
                shape = (facts["documents"] + 1,)
                found = open_file(folder, facts["document_offsets"], np.dtype(np.int64), shape)
                offsets[split] = found if mask_documents else found[[0, -1]]
    except UserError as error:
        raise UserError(f"{error}; {how_to_prepare(folder)}") from None
    if not is_text:
        return Rows(folder, meta, shards)
    kind = PackedDocuments if mask_documents else Stream
    return kind(folder, meta, shards, offsets)


# -- Files ---------------------------------------------------------------------------------------


def open_file(folder: Path, entry: dict, dtype: np.dtype, shape: tuple) -> np.ndarray:
    """A .npy file as a memory map, which reads a file that is replaced later as it was. Raises
    UserError if it is not what its entry in meta.json says."""
    path = folder / entry["file"]
    with one_line(f"{path}: cannot be read as a .npy file of numbers"):
        array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    if array.dtype != dtype or array.shape != shape:
        raise UserError(
            f"{path}: holds {array.dtype} {array.shape} where meta.json says {dtype} {shape}"
        )
    if sha256_of_file(path) != entry["sha256"]:
        raise UserError(f"{path}: is not the file that meta.json describes (its sha256 differs)")
    return array


class Shards:
    """The shards of a split, read as one array of tokens or of rows."""

    def __init__(self, arrays: list[np.ndarray]):
        self.arrays = arrays
        # where each shard begins, then the length of all
        self.starts = [0, *itertools.accumulate(len(array) for array in arrays)]

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens or rows start, ..., stop - 1, as many as there are, as int64."""
        parts = []
        for first, array in zip(self.starts, self.arrays, strict=False):
            part = array[max(start - first, 0) : max(stop - first, 0)]
            if len(part):
                parts.append(part)
        return np.concatenate(parts).astype(np.int64)


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

    The methods that raise NotImplementedError are those that each kind has in its own way. A place
    says where an example lies: it is a row's number in its split, the first token of a window, or
    the first tokens of all windows in a packed row.
    """

    kind = ""
    mask_documents = False

    def __init__(self, folder: Path, meta: dict, shards: dict[str, Shards]):
        self.folder = folder
        self.meta = meta
        self.shards = shards
        self.name = meta["name"]
        self.tokenizer = meta["tokenizer"]
        self.vocab_size = meta["vocab_size"]
        self.kinds = meta.get("kinds", {})
        self.alphabet = meta["parameters"].get("alphabet") if self.kind == "examples" else None
        self.first_ids = [0] if self.alphabet else []
        self.slices: list[str] = []
        self.parts: list[Dataset] = [self]
        self.weights = [1.0]
        self._epoch = functools.lru_cache(maxsize=4)(self._draw_epoch)
        contents = {}
        for split, facts in meta["splits"].items():
            contents[split] = [[shard["sha256"], shard.get("slice")] for shard in facts["shards"]]
        if meta["kind"] == "drawn":
            contents["train"] = meta["splits"]["train"]["drawn"]
        means = [getattr(self, name) for name in MEANING]
        text = json.dumps([*means, contents], sort_keys=True)
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()

    def facts(self, split: str) -> dict:
        """What meta.json says about a split. Raises UserError where there is no such split."""
        if split not in self.meta["splits"]:
            raise UserError(
                f"{self.folder}: has no split {split!r}; it has {', '.join(self.meta['splits'])}"
            )
        return self.meta["splits"][split]

    def counts(self, split: str) -> dict[str, int]:
        """{"tokens": number, ...}: "labels" and "rows" of examples, "documents", "words" and "bytes"
        of a stream."""
        return {name: n for name, n in self.facts(split).items() if isinstance(n, int)}

    def perfect_loss(self, split: str) -> float | None:
        """Nats a token of the predictor that knows how the rows were drawn, if meta.json gives it
        (data/backcopy, which has one shard a split)."""
        return None

    def longest(self, split: str, block_size: int) -> int:
        """The length of the longest row; block_size for a stream. Raises UserError if it does not
        fit block_size."""
        return block_size

    def examples_per_epoch(self, split: str, block_size: int) -> int:
        """The number of rows, sys.maxsize if they are drawn, or of windows. Raises UserError if
        block_size does not fit."""
        raise NotImplementedError

    def tokens_per_example(self, split: str, block_size: int) -> float:
        """The mean length of an example."""
        return self.longest(split, block_size)

    def examples(
        self, split: str, start: int, stop: int, seed: int, block_size: int
    ) -> list[tuple[np.ndarray, ...]]:
        """(inputs, targets) of the examples start, ..., stop - 1 of training, each (T,) int64; of
        packed documents (inputs, targets, document)."""
        n = self.examples_per_epoch(split, block_size)
        examples = []
        for number in range(start, stop):
            places = self._epoch(split, seed, number // n, block_size)
            examples.append(self._example(split, places[number % n], block_size, block_size))
        return examples

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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """
        (inputs, targets, document) of one micro-step, all int64 (B, T), a pure function of (seed,
        step, micro_step). The global batch of a step is the next batch_size * gradient_accumulation_steps
        examples, and micro-step m is its m-th part. Each epoch has an order of its own; drawn rows
        have no epochs, and none is read twice.

        same_length: every batch is as long as the longest row, since torch.compile takes minutes
        for each new length; packed rows have block_size tokens in any case
        """
        start = (step * gradient_accumulation_steps + micro_step) * batch_size
        examples = self.examples(split, start, start + batch_size, seed, block_size)
        is_longest = same_length or self.mask_documents
        return collate(examples, self.longest(split, block_size) if is_longest else 0)

    def eval_batches(
        self,
        split: str,
        batch_size: int,
        block_size: int,
        rank: int = 0,
        world_size: int = 1,
        stride: int | None = None,
        tokens: int | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, str | None]]:
        """
        Yields (inputs, targets, document, slice) of the whole split, in order: every token but the
        first of a stream (of packed rows: of each document) is scored once. A rank gets the batches
        rank, rank + world_size, ..., and a row without labels where other ranks have one batch
        more. All examples of a batch are of
        one slice, which is None for a stream. The windows of a stream have block_size tokens. With
        a smaller stride they overlap, and each scores what lies behind the one before it; a larger
        stride is a UserError.

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
                n = min(-(-tokens * len(places) // n_tokens), len(places))  # rounded up
                # each in the middle of an n-th part of the places
                places = places[(2 * np.arange(n) + 1) * len(places) // (2 * n)]
            places = self._as_rows(split, places, block_size)
            for i in range(0, len(places), batch_size):
                batches.append((name, places[i : i + batch_size]))
        # the last window of a text may be shorter, and is padded
        length = block_size if self.kind == "stream" and not self.mask_documents else 0
        n_batches = len(batches)
        name, places = batches[-1]
        batches += [(name, places[:1])] * (-n_batches % world_size)
        for i in range(rank, len(batches), world_size):
            name, places = batches[i]
            examples = [self._example(split, place, block_size, stride) for place in places]
            inputs, targets, document = collate(examples, length)
            if i >= n_batches:
                targets[:] = IGNORE
            yield inputs, targets, document, name

    def _draw_epoch(self, split, seed, epoch, block_size):
        """(n,): the places of all examples, in the order of an epoch. `_epoch` calls it once for
        each epoch, and caches what it returns."""
        n = self.examples_per_epoch(split, block_size)
        return np.random.default_rng([seed, epoch]).permutation(n)

    def _example(self, split, place, block_size, stride):
        """(inputs, targets), or (inputs, targets, document), of the example at a place. A window has
        no targets where the window `stride` tokens before it has them, too."""
        raise NotImplementedError

    def _as_rows(self, split, places, block_size):
        """What an evaluation reads as a row of its batches: one place each. PackedDocuments puts
        several into a row."""
        return places

    def _places_of_slices(self, split, block_size, stride):
        """{slice: its places in the order of the split}."""
        raise NotImplementedError


def collate(
    examples: list[tuple], length: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Examples of (inputs, targets), or (inputs, targets, document) -> (B, T) tensors, document None
    where they have none. T is at least `length`. Padding has no targets, and is a document of its
    own."""
    length = max(length, *(len(example[0]) for example in examples))
    inputs = torch.zeros(len(examples), length, dtype=torch.long)
    targets = torch.full_like(inputs, IGNORE)
    document = torch.zeros_like(inputs) if len(examples[0]) == 3 else None
    for i, (ids, labels, *begins) in enumerate(examples):
        n = len(ids)
        inputs[i, :n] = torch.from_numpy(ids)
        targets[i, :n] = torch.from_numpy(labels)
        if document is not None:
            document[i, :n] = torch.from_numpy(begins[0])
            document[i, n:] = n
    return inputs, targets, document


def best_fit(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Best-fit-decreasing bin packing. Packs pieces of these lengths into rows of at most `size`, and
    returns the numbers of the pieces in each row: from the longest on, each goes to the row where it
    leaves the least room, or begins a row."""
    n = len(lengths)
    rows: list[list[int]] = [[] for _ in range(n)]
    with_room: list[list[int]] = [[] for _ in range(size + 1)]  # numbers of rows, by their room
    with_room[size] = list(reversed(range(n)))
    rooms = [size]  # those that some row has, in order
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        at = bisect.bisect_left(rooms, length)
        room = rooms[at]
        row = with_room[room].pop()
        rows[row].append(i)
        if not with_room[room]:
            del rooms[at]
        if not with_room[room - length]:
            bisect.insort(rooms, room - length)
        with_room[room - length].append(row)
    return [row for row in rows if row]


# -- Text ----------------------------------------------------------------------------------------


class Stream(Dataset):
    """Running text. An epoch of training is windows of block_size tokens, side by side, whose
    borders move from epoch to epoch."""

    kind = "stream"

    def __init__(
        self, folder: Path, meta: dict, shards: dict[str, Shards], offsets: dict[str, np.ndarray]
    ):
        """offsets: {split: where its texts begin, each of which is read alone, then its length}. Without
        mask_documents a split is one text."""
        super().__init__(folder, meta, shards)
        self.offsets = offsets

    def examples_per_epoch(self, split, block_size):
        n = self.facts(split)["tokens"]
        if n <= block_size:
            needed = f"fewer than block_size + 1 = {block_size + 1}"
            raise UserError(f"{self.folder}: {split} has {n} tokens, {needed}")
        return (n - 1) // block_size

    def _draw_epoch(self, split, seed, epoch, block_size):
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(self.examples_per_epoch(split, block_size))
        shift = rng.integers(block_size)  # how far this epoch's borders move
        last = len(self.shards[split]) - block_size - 1  # the last window ends with the split
        return np.minimum(order * block_size + shift, last)

    def _example(self, split, place, block_size, stride):
        offsets = self.offsets[split]
        next_text = np.searchsorted(offsets, place, side="right")
        stop = min(place + block_size + 1, offsets[next_text])
        tokens = self.shards[split].read(place, stop)
        targets = tokens[1:].copy()
        if place > offsets[next_text - 1]:  # not the first window of its text
            targets[: block_size - stride] = IGNORE
        return tokens[:-1], targets

    def _windows(self, split, block_size, stride):
        """(windows,): where the windows of an evaluation begin: at a text's start, then every
        `stride` tokens until each token but the text's first is a target. Raises UserError where
        there is none."""
        self.facts(split)  # raises where there is no such split
        places: list[int] = []
        for start, stop in itertools.pairwise(self.offsets[split].tolist()):
            n_targets = stop - start - 1
            if n_targets > 0:
                behind_the_first = max(0, n_targets - block_size)
                places.extend(range(start, start + behind_the_first + stride, stride))
        if not places:
            raise UserError(
                f"{self.folder}: no text of {split} has two tokens, so there is nothing to predict"
            )
        return np.array(places)

    def _places_of_slices(self, split, block_size, stride):
        return {None: self._windows(split, block_size, stride)}


class PackedDocuments(Stream):
    """A stream under mask_documents: a row is filled with whole documents, which are read apart. One
    longer than a row is cut into windows of block_size tokens and a rest, which count as documents.
    A row holds the same documents in every epoch, since none reads another; the order of the rows
    changes."""

    mask_documents = True

    def __init__(self, folder, meta, shards, offsets):
        super().__init__(folder, meta, shards, offsets)
        self._rows = functools.lru_cache(maxsize=4)(self._fill_rows)

    def examples_per_epoch(self, split, block_size):
        return len(self._rows(split, block_size))

    def tokens_per_example(self, split, block_size):
        rows = self._rows(split, block_size)
        n_tokens = self._lengths(split, np.concatenate(rows), block_size).sum()
        return float(n_tokens / len(rows))

    def alone(self, split: str, rows: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of the first of the longest windows, at most `rows`, each a row of its
        own."""
        windows = self._windows(split, block_size, block_size)
        lengths = self._lengths(split, windows, block_size)
        longest = windows[lengths == lengths.max()][:rows]
        examples = [self._example(split, [place], block_size, block_size) for place in longest]
        inputs, targets, _ = collate(examples)
        return inputs, targets

    def _fill_rows(self, split, block_size):
        """The rows of an epoch, each (windows,) places. Called as _rows, which remembers."""
        return self._as_rows(split, self._windows(split, block_size, block_size), block_size)

    def _as_rows(self, split, places, block_size):
        lengths = self._lengths(split, places, block_size)
        return [places[row] for row in best_fit(lengths, block_size)]

    def _lengths(self, split, places, block_size):
        """The lengths of the windows at these places: block_size, or less where the document ends
        before."""
        offsets = self.offsets[split]
        ends = offsets[np.searchsorted(offsets, places, side="right")]
        return np.minimum(ends - 1 - places, block_size)

    def _draw_epoch(self, split, seed, epoch, block_size):
        rows = self._rows(split, block_size)
        order = np.random.default_rng([seed, epoch]).permutation(len(rows))
        return [rows[i] for i in order]

    def _example(self, split, row, block_size, stride):
        parts = []
        begin = 0
        for place in row:
            inputs, targets = super()._example(split, place, block_size, stride)
            parts.append((inputs, targets, np.full(len(inputs), begin)))
            begin += len(inputs)
        return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


# -- Rows ----------------------------------------------------------------------------------------


class Rows(Dataset):
    """Separate rows of tokens and labels. An epoch of training is all rows in a random order; or
    data/drawn.py draws the rows of training, each once."""

    kind = "examples"

    def __init__(self, folder: Path, meta: dict, shards: dict[str, Shards]):
        super().__init__(folder, meta, shards)
        names = []
        for facts in meta["splits"].values():
            names += [shard["slice"] for shard in facts["shards"]]
        self.slices = list(dict.fromkeys(names))
        self.drawn = {}  # {"train": how its rows are drawn}; empty for files
        if meta["kind"] == "drawn":
            self.drawn["train"] = meta["splits"]["train"]["drawn"]

    def facts(self, split):
        if split in self.drawn:
            raise UserError(
                f"{self.folder}: train has no end: its rows are drawn anew; take split=val"
            )
        return super().facts(split)

    def perfect_loss(self, split):
        return self.facts(split)["shards"][0].get("perfect_loss")

    def longest(self, split, block_size):
        if split in self.drawn:
            length = self.drawn[split]["length"]
        else:
            length = max(shard["seq_len"] for shard in self.facts(split)["shards"])
        if length > block_size:
            words = f"rows of {length} tokens; block_size={block_size} is too small"
            raise UserError(f"{self.folder}: {split} has {words}")
        return length

    def examples_per_epoch(self, split, block_size):
        self.longest(split, block_size)  # raises where a row does not fit
        return sys.maxsize if split in self.drawn else len(self.shards[split])

    def tokens_per_example(self, split, block_size):
        if split in self.drawn:
            return self.longest(split, block_size)
        facts = self.facts(split)
        return facts["tokens"] / facts["rows"]

    def examples(self, split, start, stop, seed, block_size):
        if split not in self.drawn:
            return super().examples(split, start, stop, seed, block_size)
        how = self.drawn[split]
        key = f"{how['seed']} {seed}"
        tokens, labels = drawn.rows(how["task"], how["length"], key, start, stop - start)
        return list(zip(tokens, targets_of(labels), strict=True))

    def _example(self, split, place, block_size, stride):
        tokens, labels = self.shards[split].read(place, place + 1)[0]
        return tokens, targets_of(labels)

    def _places_of_slices(self, split, block_size, stride):
        entries = self.facts(split)["shards"]
        places = collections.defaultdict(list)
        for entry, start in zip(entries, self.shards[split].starts, strict=False):
            places[entry["slice"]].extend(range(start, start + entry["rows"]))
        return {name: np.array(of_slice) for name, of_slice in places.items()}


def targets_of(labels: np.ndarray) -> np.ndarray:
    return np.where(labels == 0, IGNORE, labels)


# -- Mixtures ------------------------------------------------------------------------------------


class Mixture(Dataset):
    """
    Data sets mixed by weight. Examples of training come in blocks of sum(shares): part d has
    shares[d] of them, in an order drawn from (seed, block). The k-th example of a part in the
    mixture is its k-th example alone, so that every part has epochs of its own. evaluate.py reads
    each part by itself.
    """

    def __init__(self, name: str, parts: list[Dataset], shares: list[int]):
        for what in MEANING:
            values = [getattr(part, what) for part in parts]
            if values != values[:1] * len(parts):
                raise UserError(
                    f"{name}: cannot be mixed: {what} differs ({', '.join(map(show, values))})"
                )
            setattr(self, what, values[0])
        self.folder = Path(name)
        self.name = f"mixture of {len(parts)}"
        self.meta = {"parameters": {}}
        self.mask_documents = parts[0].mask_documents
        self.slices = parts[0].slices
        self.parts = parts
        self.shares = tuple(shares)
        self.weights = [share / sum(shares) for share in shares]
        hashes = [[share, part.sha256] for share, part in zip(shares, parts, strict=True)]
        self.sha256 = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    def counts(self, split):
        total = collections.Counter()
        for part in self.parts:
            total.update(part.counts(split))
        return dict(total)

    def longest(self, split, block_size):
        return max(part.longest(split, block_size) for part in self.parts)

    def examples_per_epoch(self, split, block_size):
        return sum(part.examples_per_epoch(split, block_size) for part in self.parts)

    def tokens_per_example(self, split, block_size):
        of_parts = [part.tokens_per_example(split, block_size) for part in self.parts]
        return float(np.dot(self.weights, of_parts))

    def examples(self, split, start, stop, seed, block_size):
        examples = []
        for number in range(start, stop):
            block, place = divmod(number, sum(self.shares))
            order = draw_block(seed, block, self.shares)
            d = order[place]
            # each block before has shares[d] examples of this part
            of_part = self.shares[d] * block + int(np.count_nonzero(order[:place] == d))
            examples += self.parts[d].examples(split, of_part, of_part + 1, seed, block_size)
        return examples


@functools.lru_cache(maxsize=4)
def draw_block(seed: int, block: int, shares: tuple[int, ...]) -> np.ndarray:
    """(sum(shares),): the number of the part of each example of a block of a mixture."""
    rng = np.random.default_rng([seed, block, 1])  # 1: other numbers than those of an epoch's order
    return rng.permutation(np.repeat(np.arange(len(shares)), shares))
