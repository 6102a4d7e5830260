"""
Shards: how a data set lies on disk, how it is checked, and in which order training and evaluation
read it.

A data set is a folder of .npy shards and a meta.json that lists them. Shards are uint16, or uint32
for more than 65,536 token ids. There are three kinds:

    stream    shards of shape (tokens,) hold running text: the shards of a split are one long row of tokens
    examples  shards of shape (rows, 2, T) hold tokens and labels. Where the label is 0, nothing is predicted
    drawn     examples, but the train split has no shards: data/drawn.py draws its rows anew for every step

open_dataset("data/mqar") checks every shard against its sha256, and returns a Dataset. A mixture
has a name like "data/a:7,data/b:3".
"""

import bisect
import functools
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from base.files import (
    find_data,
    how_to_prepare,
    is_no_file,
    parts_of_mixture,
    read_json,
    sha256_of_file,
)
from base.rules import DataError, show, wrong_field
from configurator import UserError
from data import drawn
from ops import IGNORE

FORMAT = 1
UINT16_VOCAB, MAX_VOCAB = 1 << 16, 1 << 31  # the most token ids of uint16, and at all
# no folder: a meta.json may come from a stranger
SHARD_NAME = re.compile(r"[\w .-]{1,80}_(\d{4,9}|documents)\.npy|tokenizer\.json")

# meta.json, as rules of rules.wrong_field
TEXT, COUNT = (str, 1, 99), (int, 1, 1 << 60)
FILE = {"file": TEXT, "sha256": (str, 64, 64), "bytes": COUNT}
ROWS = FILE | {
    "rows": COUNT,
    "seq_len": COUNT,
    "tokens": COUNT,
    "slice": TEXT,
    "perfect_loss?": (float, 0, 99),
}
ABOUT = {
    "format": (int, FORMAT, FORMAT),
    "name": TEXT,
    "tokenizer": TEXT,
    "vocab_size": (int, 1, MAX_VOCAB),
    "tokenizer_file?": FILE,
    "kinds?": {str: [(int, 0, MAX_VOCAB - 1), 1, MAX_VOCAB]},
}
STREAM: dict = dict.fromkeys(("documents", "words", "bytes", "tokens"), COUNT)
STREAM |= {"document_offsets": FILE, "shards": [FILE | {"tokens": COUNT}, 1, 1 << 20]}
EXAMPLES: dict = dict.fromkeys(("rows", "tokens", "labels"), COUNT) | {"shards": [ROWS, 1, 1 << 20]}
# how rows are drawn: by a function of drawn.TASKS, of this version; seed is the data set's, and a
# run adds its own
DRAWN = {"task": set(drawn.TASKS), "length": (int, 1, drawn.LONGEST), "seed": (int, 0, 1 << 63)}
DRAWN |= {"version": (int, drawn.VERSION, drawn.VERSION)}
# parameters are the keys of the prepare script; word perplexity of a text is computed from
# published_words
OF_TEXT = {"text?": {str: {"published_words?": COUNT}}, "version?": TEXT}
META = {
    "stream": ABOUT | {"parameters": OF_TEXT, "splits": {str: STREAM}},
    "examples": ABOUT
    | {"parameters": {"alphabet?": (str, 1, MAX_VOCAB)}, "splits": {str: EXAMPLES}},
}
META["drawn"] = META["examples"] | {
    "splits": {str: EXAMPLES, "train": {"drawn": DRAWN, "shards": [ROWS, 0, 0]}}
}


def dtype_of(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= UINT16_VOCAB else np.uint32)


def open_dataset(path: Path | str, mask_documents: bool = False) -> "Dataset":
    """A Dataset whose files have all been checked. Raises UserError, which names the file and what
    to do.

    mask_documents: a row of a stream is a document, or a part of one (rows of examples stay as they
    are)
    """
    if not str(path):
        make = "python data/text/prepare.py FILE --tokenizer=CHECKPOINT --out_dir=FOLDER makes one"
        raise UserError(
            f"dataset=None: the checkpoint names no data set; name one: --dataset=FOLDER ({make})"
        )
    find_data(path)
    parts, folder = parts_of_mixture(path), Path(path)
    if len(parts) > 1:
        return Mixture(
            str(path), [open_dataset(part, mask_documents) for part in parts], list(parts.values())
        )
    try:
        meta, shards, documents = read_meta(folder), {}, {}
        is_text, vocab_size = meta["kind"] == "stream", meta["vocab_size"]
        for split, facts in meta["splits"].items():
            shards[split] = []
            for entry in facts["shards"]:
                shape = (entry["tokens"],) if is_text else (entry["rows"], 2, entry["seq_len"])
                shards[split].append(
                    _open_shard(folder, entry, dtype_of(vocab_size), shape, vocab_size)
                )
            if is_text:
                entry, shape, n = (
                    facts["document_offsets"],
                    (facts["documents"] + 1,),
                    facts["tokens"],
                )
                offsets = documents[split] = _open_shard(
                    folder, entry, np.dtype(np.int64), shape, n + 1
                )
                if offsets[0] != 0 or offsets[-1] != n or (np.diff(offsets) < 0).any():
                    raise UserError(f"{folder / entry['file']}: must rise from 0 to {n}")
        dataset = Dataset(folder, meta, shards, documents if mask_documents else {})
        dataset.remember_files()
        return dataset
    except UserError as error:
        raise DataError(str(error), how_to_prepare(folder)) from None


def read_meta(folder: Path) -> dict:
    """The content of a folder's meta.json, every field checked. Raises UserError."""
    file = folder / "meta.json"
    meta = read_json(file)
    if wrong := wrong_field(meta, {"kind": set(META)}) or wrong_field(meta, META[meta["kind"]]):
        raise UserError(f"{file}: {wrong}")
    if meta["kind"] == "drawn":
        task, vocab_size = meta["splits"]["train"]["drawn"]["task"], meta["vocab_size"]
        if (n := drawn.TASKS[task][2]) != vocab_size:
            raise UserError(f"{file}: vocab_size={vocab_size}: must be {n}, the ids of task={task}")
    for entry in files_of(meta):
        if not SHARD_NAME.fullmatch(entry["file"]):
            raise UserError(
                f"{file}: names {show(entry['file'])}, which is not the name of a shard"
            )
    return meta


def files_of(meta: dict) -> Iterator[dict]:
    """What a meta.json says about each file: its name, sha256 and size."""
    for facts in meta["splits"].values():
        yield from facts["shards"]
        if meta["kind"] == "stream":
            yield facts["document_offsets"]
    if "tokenizer_file" in meta:
        yield meta["tokenizer_file"]


def _open_shard(folder, entry, dtype, shape, limit):
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
    if (array.dtype, array.shape, array.flags.c_contiguous) != (dtype, shape, True):
        raise UserError(
            f"{path}: holds {array.dtype} {array.shape} where meta.json says {dtype} {shape}"
        )
    if sha256_of_file(path) != entry["sha256"]:
        raise UserError(f"{path}: is not the file that meta.json describes (its sha256 differs)")
    if (largest := int(array.max())) >= limit:
        raise UserError(f"{path}: holds {largest} where every value must be below {limit}")
    return array


# what the ids of a data set mean
MEANING = ("kind", "vocab_size", "tokenizer", "first_ids", "alphabet", "kinds")


class Dataset:
    """
    An open data set, which open_dataset makes. Shards stay on disk, and meta is the content of
    meta.json.

    kind: "stream" or "examples", also where the rows of training are drawn slices: the names of the
    slices ("64/4"), none for a stream sha256: one digest of the shards of each split, or of how it
    is drawn, and of what their ids mean kinds: {name: token ids} of the queries that meters.py
    measures apart alphabet: the characters that the ids 1, 2, ... of data/backcopy stand for, or
    None first_ids: the ids that every row begins with and that stand for no text: [0] for <s>, or
    none mask_documents: whether a row of a stream is a document or a part of one parts, weights:
    the data sets of a Mixture and their shares of the examples; otherwise this one alone
    """

    def __init__(
        self, folder: Path, meta: dict, shards: dict[str, list], documents: dict | None = None
    ):
        """documents: {split: where its documents begin, then its length}; none: a split of a stream
        is one document."""
        self.folder, self.meta, self._shards = folder, meta, shards
        self.name, self.tokenizer = meta["name"], meta["tokenizer"]
        self.kind = "stream" if meta["kind"] == "stream" else "examples"
        self.vocab_size, self.splits, self.kinds = (
            meta["vocab_size"],
            list(meta["splits"]),
            meta.get("kinds", {}),
        )
        parameters, is_text = meta["parameters"], self.kind == "stream"
        self.first_ids = [0] if parameters.get("first_token") else []  # of data/backcopy
        self.alphabet = None if is_text else parameters.get("alphabet")
        means = [getattr(self, name) for name in MEANING]
        shas = {
            split: [[s["sha256"], s.get("slice")] for s in of["shards"]]
            for split, of in meta["splits"].items()
        }
        self.slices = (
            []
            if is_text
            else list(dict.fromkeys(name for pairs in shas.values() for _, name in pairs))
        )
        # how the rows of a split are drawn (DRAWN), if they are
        self._drawn = {split: of["drawn"] for split, of in meta["splits"].items() if "drawn" in of}
        self.sha256 = hashlib.sha256(
            json.dumps([*means, shas | self._drawn], sort_keys=True).encode()
        ).hexdigest()
        # where each shard begins in its split, then the split's length: in tokens, or in rows
        self._starts = {
            split: [0, *itertools.accumulate(map(len, parts))] for split, parts in shards.items()
        }
        # {split: the state of each shard's file when it was opened}; empty unless open_dataset has
        # read the files
        self._opened: dict[str, list] = {}
        self.mask_documents = bool(documents)
        self._is_running_text = is_text and not documents
        self._documents = documents or {
            split: np.array([0, starts[-1]]) for split, starts in self._starts.items()
        }
        remember = functools.lru_cache(maxsize=4)
        self._places, self._epoch = remember(self._find_places), remember(self._draw_epoch)
        self._labels_of_rows = remember(self._count_labels_of_rows)
        self.parts, self.weights = [self], [1.0]

    def counts(self, split: str) -> dict[str, int]:
        """documents, words, bytes, tokens of a stream; rows, tokens, labels of examples."""
        return {name: value for name, value in self._facts(split).items() if isinstance(value, int)}

    def perfect_loss(self, split: str) -> float | None:
        """Nats a token of the predictor that knows how the rows were drawn, if meta.json gives it
        for every shard."""
        shards = self._facts(split)["shards"]
        if any("perfect_loss" not in shard for shard in shards):
            return None
        return sum(shard["perfect_loss"] * shard["tokens"] for shard in shards) / sum(
            s["tokens"] for s in shards
        )

    def examples_per_epoch(self, split: str, block_size: int) -> int:
        """The number of rows, sys.maxsize if they are drawn, or of windows. UserError if block_size
        does not fit."""
        self.longest(split, block_size)
        if split in self._drawn:
            return sys.maxsize
        length = self._starts[split][-1]
        if self._is_running_text and length <= block_size:
            raise DataError(
                f"{self.folder}: {split} has {length} tokens, fewer than block_size + 1 = {block_size + 1}"
            )
        return (
            (length - 1) // block_size
            if self._is_running_text
            else len(self._places(split, block_size, block_size))
        )

    def tokens_per_example(self, split: str, block_size: int) -> float:
        """The mean length of a row; block_size for a stream whose documents are not masked."""
        if self.mask_documents:
            return float(
                self._lengths(split, self._places(split, block_size, block_size), block_size).mean()
            )
        if split in self._drawn or self._is_running_text:
            return self.longest(split, block_size)
        facts = self._facts(split)
        return facts["tokens"] / facts["rows"]

    def batch(
        self, split: str, step: int, *, seed: int, batch_size: int, block_size: int, micro_step: int = 0,
        gradient_accumulation_steps: int = 1, same_length: bool = False,
    ) -> tuple:  # fmt: skip
        """
        (inputs, targets) of one micro-step, both int64 (B, T), a pure function of (seed, step,
        micro_step). The global batch of a step is the next batch_size * gradient_accumulation_steps
        examples, and micro-step m is its m-th part. Each epoch has an order of its own; drawn rows
        have no epochs, and none is read twice.

        same_length: every batch is as long as the longest row, since torch.compile takes minutes
        for each new length
        """
        start = (step * gradient_accumulation_steps + micro_step) * batch_size
        examples = self._examples(split, start, start + batch_size, seed, block_size)
        return _collate(examples, self.longest(split, block_size) if same_length else 0)

    def count_labels(self, split: str, start: int, stop: int, seed: int, block_size: int) -> int:
        """How many labels the examples start, ..., stop - 1 of training have. None of them is
        read."""
        if self._is_running_text:
            return (stop - start) * block_size
        if how := self._drawn.get(split):  # where labels stand depends on the position alone
            return (stop - start) * int(
                np.count_nonzero(drawn.rows(how["task"], how["length"], "", 0, 1)[1])
            )
        places, is_text = (
            self._in_order(split, start, stop, seed, block_size),
            self.kind == "stream",
        )
        labels = (
            self._lengths(split, places, block_size)
            if is_text
            else self._labels_of_rows(split)[places]
        )
        return int(labels.sum())

    def _count_labels_of_rows(self, split):
        """The number of labels of each row, which reads all rows."""
        return np.concatenate(
            [np.count_nonzero(rows[:, 1], axis=1) for rows in self._shards[split]]
        )

    def _examples(self, split, start, stop, seed, block_size):
        """[(inputs, targets)] of the examples start, ..., stop - 1 of training."""
        if how := self._drawn.get(split):
            tokens, labels = drawn.rows(
                how["task"], how["length"], f"{how['seed']} {seed}", start, stop - start
            )
            return list(zip(tokens, np.where(labels == 0, IGNORE, labels), strict=True))
        places = self._in_order(split, start, stop, seed, block_size)
        return [self._example(split, place, block_size) for place in places]

    def _in_order(self, split, start, stop, seed, block_size):
        """Where the examples start, ..., stop - 1 of training begin in the split: their first
        tokens, or their rows."""
        n = self.examples_per_epoch(split, block_size)
        return [
            self._epoch(split, seed, index // n, n, block_size)[index % n]
            for index in range(start, stop)
        ]

    def _draw_epoch(self, split, seed, epoch, n, block_size):
        """Where the n examples of an epoch begin, in its order. It is called as _epoch, which
        remembers."""
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(n)
        if not self._is_running_text:
            return self._places(split, block_size, block_size)[order]
        # the phase moves the borders of the windows from epoch to epoch; the last window ends with
        # the split
        return np.minimum(
            order * block_size + rng.integers(block_size), self._starts[split][-1] - block_size - 1
        )

    def eval_batches(
        self, split: str, batch_size: int, block_size: int, rank: int = 0, world_size: int = 1,
        stride: int | None = None, tokens: int | None = None,
    ) -> Iterator[tuple]:  # fmt: skip
        """
        Yields (inputs, targets, slice) over the whole split, in order, so that every token but the
        first of a stream is scored once: the batches rank, rank + world_size, ..., and a row
        without labels where other ranks have one more. All examples of a batch are of one slice,
        which is None for a stream. Its windows have block_size tokens; with a smaller stride they
        overlap, and each scores what lies behind the one before it (UserError for a larger one).
        Each masked document has windows of its own, the longest first.

        tokens: read about that many tokens instead, the same in every call, evenly spread over the
        split and its slices
        """
        stride, is_text = stride or block_size, self.kind == "stream"
        self.longest(split, block_size)  # raises where a row does not fit
        if stride > block_size:
            raise UserError(
                f"stride={stride}: windows of block_size={block_size} would leave tokens between them out"
            )
        facts, starts, documents = self._facts(split), self._starts[split], self._documents[split]
        slices: dict = {None: self._places(split, block_size, stride)} if is_text else {}
        for shard, start in zip(() if is_text else facts["shards"], starts, strict=False):
            slices.setdefault(shard["slice"], []).extend(range(start, start + shard["rows"]))
        batches = []
        for name, places in slices.items():
            places = np.array(places)
            # n of them at even distances, each in the middle of its n-th part
            if tokens is not None:
                n = min(-(-tokens * len(places) // facts["tokens"]), len(places))
                places = places[(2 * np.arange(n) + 1) * len(places) // (2 * n)]
            # rows of about the same length stand together, so that little is padded
            if self.mask_documents:
                places = places[
                    np.argsort(-self._lengths(split, places, block_size), kind="stable")
                ]
            batches += [
                (name, places[i : i + batch_size]) for i in range(0, len(places), batch_size)
            ]
        n, (name, places) = len(batches), batches[-1]
        batches += [(name, places[:1])] * (-n % world_size)
        for i, (name, places) in itertools.islice(enumerate(batches), rank, None, world_size):
            examples = [self._example(split, place, block_size) for place in places]
            inputs, targets = _collate(examples, block_size if self._is_running_text else 0)
            if is_text:
                # window of its document
                is_first = documents[np.searchsorted(documents, places)] == places
                # what a later window has in common with the one before it was scored there
                targets[np.flatnonzero(~is_first), : block_size - stride] = IGNORE
            if i >= n:
                targets[:] = IGNORE
            yield inputs, targets, name

    def _facts(self, split):
        if split not in self.meta["splits"]:
            raise UserError(
                f"{self.folder}: has no split {split!r}; it has {', '.join(self.splits)}"
            )
        if split in self._drawn:
            raise UserError(
                f"{self.folder}: {split} has no end: its rows are drawn anew; take split=val"
            )
        return self.meta["splits"][split]

    def longest(self, split: str, block_size: int) -> int:
        """The length of the longest row; block_size for a stream. Raises UserError if it does not
        fit block_size."""
        if how := self._drawn.get(split):
            n = how["length"]
        else:
            shards = self._facts(split)["shards"]
            n = block_size if self.kind == "stream" else max(shard["seq_len"] for shard in shards)
        if n > block_size:
            raise DataError(
                f"{self.folder}: {split} has rows of {n} tokens; block_size={block_size} is too small"
            )
        return n

    def _find_places(self, split, block_size, stride):
        """The rows, or where the windows of a stream begin: at a document's start, then every
        `stride` tokens until each token but its first is a target. UserError where there is none.
        Called as _places, which remembers."""
        if self.kind == "examples":
            return np.arange(self._starts[split][-1])
        documents = self._documents[split]
        targets = np.diff(documents) - 1
        counts = np.where(targets > 0, 1 + np.maximum(0, -(-(targets - block_size) // stride)), 0)
        if not counts.any():
            raise DataError(
                f"{self.folder}: no text of {split} has two tokens, so there is nothing to predict"
            )
        firsts = np.repeat(documents[:-1], counts)
        return firsts + stride * (
            np.arange(len(firsts)) - np.repeat(counts.cumsum() - counts, counts)
        )

    def _lengths(self, split, places, block_size):
        """How long the windows at these places of a stream are: block_size, or less where the
        document ends before."""
        documents = self._documents[split]
        return np.minimum(
            documents[np.searchsorted(documents, places, side="right")] - 1 - places, block_size
        )

    def _example(self, split, place, block_size):
        """Inputs and targets of a row, or of a document's next block_size tokens, or of as many as
        are left."""
        if self.kind == "stream":
            tokens = self._read(split, place, place + self._lengths(split, place, block_size) + 1)
            return tokens[:-1], tokens[1:]
        tokens, labels = self._read(split, place, place + 1)[0]
        return tokens, np.where(labels == 0, IGNORE, labels)

    def _read(self, split, start, stop):
        """The tokens or rows start, ..., stop - 1 of a split, as many as there are; its shards are
        read as one."""
        starts, shards = self._starts[split], self._shards[split]
        first, last = (
            bisect.bisect_right(starts, start) - 1,
            bisect.bisect_left(starts, min(stop, starts[-1])),
        )
        for i in range(first, last):
            self._check_whole(split, i)
        parts = [
            shards[i][max(start - starts[i], 0) : stop - starts[i]] for i in range(first, last)
        ]
        return np.concatenate(parts).astype(np.int64)

    def remember_files(self) -> None:
        """From here on a shard that is cut short is found before it is read."""
        for split, facts in self.meta["splits"].items():
            self._opened[split] = [
                os.stat(self.folder / entry["file"]) for entry in facts["shards"]
            ]

    def _check_whole(self, split, i):
        """Raises UserError where a shard's file was cut short since it was opened: to read what its
        map has lost would end the process by SIGBUS. One that was removed or replaced is still
        mapped as it was."""
        if split not in self._opened:
            return
        before, path = (
            self._opened[split][i],
            self.folder / self.meta["splits"][split]["shards"][i]["file"],
        )
        if not os.path.exists(path):
            return
        now = os.stat(path)
        if now.st_ino == before.st_ino and now.st_size < before.st_size:
            raise UserError(
                f"{path}: was cut short after it was opened; prepare the data set again"
            )


class Mixture(Dataset):
    """
    Data sets mixed by weight, a Dataset too. Examples of training come in blocks of sum(shares):
    part d has shares[d] of them, at places drawn from (seed, block). So it has given shares[d] * b
    before block b, and its k-th example in the mixture is its k-th example alone: every part has
    epochs of its own. evaluate.py reads each part by itself.
    """

    def __init__(self, name: str, parts: list[Dataset], shares: list[int]):
        self.parts, self._shares, first = parts, tuple(shares), parts[0]
        for what in MEANING:
            setattr(self, what, ours := getattr(first, what))
            for part in parts:
                if (theirs := getattr(part, what)) != ours:
                    two = f"{what}={show(ours)} and {what}={show(theirs)}"
                    raise UserError(
                        f"{first.folder} and {part.folder} cannot be mixed: they have {two}"
                    )
        self.folder, self.name, self.meta = (
            Path(name),
            f"mixture of {len(parts)}",
            {"parameters": {}},
        )
        self.mask_documents = first.mask_documents
        self.slices = max((part.slices for part in parts), key=len)
        self.weights = [share / sum(shares) for share in shares]
        hashes = [[share, part.sha256] for share, part in zip(shares, parts, strict=True)]
        self.sha256 = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    def counts(self, split: str) -> dict[str, int]:
        counts = [part.counts(split) for part in self.parts]
        return {name: sum(of_part[name] for of_part in counts) for name in counts[0]}

    def perfect_loss(self, split: str) -> None:
        return None

    def examples_per_epoch(self, split: str, block_size: int) -> int:
        return sum(part.examples_per_epoch(split, block_size) for part in self.parts)

    def tokens_per_example(self, split: str, block_size: int) -> float:
        lengths = [part.tokens_per_example(split, block_size) for part in self.parts]
        return sum(weight * length for weight, length in zip(self.weights, lengths, strict=True))

    def longest(self, split: str, block_size: int) -> int:
        return max(part.longest(split, block_size) for part in self.parts)

    def count_labels(self, split: str, start: int, stop: int, seed: int, block_size: int) -> int:
        _, places = self._deal(start, stop, seed)
        return sum(part.count_labels(split, *of_part, seed, block_size) for part, of_part in places)

    def _examples(self, split, start, stop, seed, block_size):
        order, places = self._deal(start, stop, seed)
        of_parts = [
            iter(part._examples(split, *of_part, seed, block_size)) for part, of_part in places
        ]
        return [next(of_parts[d]) for d in order]

    def _deal(self, start, stop, seed):
        """([the number of each example's part], [(part, (the number of its own first example, its
        last one's + 1))])"""
        block, skipped = divmod(start, sum(self._shares))
        blocks = range(block, -(-stop // sum(self._shares)))
        order = np.concatenate([_block(seed, b, self._shares) for b in blocks])[
            : skipped + stop - start
        ]
        before = [np.bincount(order[:n], minlength=len(self.parts)) for n in (skipped, len(order))]
        own = (np.array(before) + block * np.array(self._shares)).T.tolist()
        return order[skipped:].tolist(), list(zip(self.parts, own, strict=True))


@functools.lru_cache(maxsize=4)
def _block(seed, block, shares):
    """Which part each example of a block of a mixture is of."""
    rng = np.random.default_rng([seed, block, 1])  # 1: other numbers than those of an epoch's order
    return rng.permutation(np.repeat(np.arange(len(shares)), shares))


def _collate(examples, length=0):
    """Examples of (inputs, targets) -> two (B, T) tensors; T is at least `length`; padding has no
    target."""
    import torch  # here, so that the prepare scripts start without it

    length = max(length, *(len(inputs) for inputs, _ in examples))
    batch = np.zeros((2, len(examples), length), np.int64)
    batch[1] = IGNORE
    for i, example in enumerate(examples):
        batch[:, i, : len(example[0])] = example
    return tuple(torch.from_numpy(batch))
