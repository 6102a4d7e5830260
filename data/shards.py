"""
Shards: how a data set lies on disk, how it is checked, and in which order training and evaluation read it.
data/writing.py writes them.

A data set is a folder of .npy shards and a meta.json that lists them. Shards are uint16; for more than 65,536 token
ids they are uint32. There are two kinds:

    stream    shards of shape (tokens,) hold running text: the shards of a split are one long row of tokens
    examples  shards of shape (rows, 2, T) hold tokens and labels. Where the label is 0, nothing is predicted

    dataset = open_dataset("data/mqar")         # checks every shard against its sha256, once; errors are one line
    dataset.batch("train", step, seed=0, batch_size=8, block_size=64, micro_step=0, gradient_accumulation_steps=4)
    dataset.eval_batches("val", batch_size=8, block_size=64)

The global batch of a training step is a pure function of (seed, step): a restart, an evaluation in between, or another
number of processes cannot change what a step trains on.
"""

from configurator import UserError

import bisect
import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ops import IGNORE
from rules import show, wrong_field
from runs.files import read_json, write_text
from runs.limits import allow_open_files

FORMAT = 1
UINT16_VOCAB, MAX_VOCAB = 1 << 16, 1 << 31  # the most token ids of uint16, and at all
DATA = Path(__file__).resolve().parent
VERIFIED = ".verified.json"
SHARD_NAME = re.compile(r"[\w .-]{1,80}_(\d{4,9}|documents)\.npy")  # no folder: a meta.json may come from a stranger

# meta.json, as rules of rules.wrong_field
TEXT, COUNT = (str, 1, 99), (int, 1, 1 << 60)
FILE = {"file": TEXT, "sha256": (str, 64, 64), "bytes": COUNT}
ROWS = FILE | {"rows": COUNT, "seq_len": COUNT, "tokens": COUNT, "slice": TEXT, "perfect_loss?": (float, 0, 99)}
ABOUT = {
    "format": (int, FORMAT, FORMAT),
    "name": TEXT,
    "tokenizer": TEXT,
    "vocab_size": (int, 1, MAX_VOCAB),
    "tokenizer_file?": FILE,
    "kinds?": {str: [(int, 0, MAX_VOCAB - 1), 1, MAX_VOCAB]},
}
PARAMETERS = {  # of the prepare script; word perplexity of a text is computed from these
    "stream": {"text?": {str: {"published_words?": COUNT}}, "version?": TEXT},
    "examples": {"alphabet?": (str, 1, MAX_VOCAB)},
}
SPLIT = {
    "stream": dict.fromkeys(("documents", "words", "bytes", "tokens"), COUNT)
    | {"document_offsets": FILE, "shards": [FILE | {"tokens": COUNT}, 1, 1 << 20]},
    "examples": dict.fromkeys(("rows", "tokens", "labels"), COUNT) | {"shards": [ROWS, 1, 1 << 20]},
}
META = {kind: ABOUT | {"parameters": PARAMETERS[kind], "splits": {str: SPLIT[kind]}} for kind in SPLIT}


def dtype_of(vocab_size: int) -> np.dtype:
    """The dtype of the shards of a data set with so many token ids."""
    return np.dtype(np.uint16 if vocab_size <= UINT16_VOCAB else np.uint32)


# ----------------------------------------------------------------------------------------------------------------------
# Opening: whatever is wrong with a folder is reported here, in one line, before training starts


def open_dataset(path: Path | str) -> "Dataset":
    """A Dataset whose files have all been checked. Raises UserError, which names the file and what to do."""
    if not str(path):
        raise UserError("dataset=None: the checkpoint names no data set; name one: --dataset=FOLDER")
    folder = Path(path)
    name = folder.name.split("-")[0]  # data/wikitext103/prepare.py makes wikitext103-mini, too
    advice = f"run python data/{name if os.path.isfile(DATA / name / 'prepare.py') else '<name>'}/prepare.py"
    if not os.path.isdir(folder) and os.path.isfile(DATA / folder.name / "meta.json"):
        advice = f"write --dataset=data/{folder.name}"  # nanoGPT's spelling
    try:
        meta = read_meta(folder)
        return Dataset(folder, meta, _open_shards(folder, meta))
    except UserError as error:
        raise UserError(f"{error}; {advice}") from None


def read_meta(folder: Path) -> dict:
    """The content of a folder's meta.json, every field checked. Raises UserError."""
    file = folder / "meta.json"
    meta = read_json(file)
    if wrong := wrong_field(meta, {"kind": set(META)}) or wrong_field(meta, META[meta["kind"]]):
        raise UserError(f"{file}: {wrong}")
    for split, facts in meta["splits"].items():
        shards, is_text = facts["shards"], meta["kind"] == "stream"
        for name in ("tokens",) if is_text else ("tokens", "rows"):
            if sum(shard[name] for shard in shards) != facts[name]:
                raise UserError(f"{file}: the shards of {split} do not add up to its {facts[name]} {name}")
        if not is_text and any(shard["rows"] * shard["seq_len"] != shard["tokens"] for shard in shards):
            raise UserError(f"{file}: a shard of {split} does not have rows * seq_len tokens")
    for entry in npy_files(meta):
        if not SHARD_NAME.fullmatch(entry["file"]):
            raise UserError(f"{file}: names {show(entry['file'])}, which is not the name of a shard")
    return meta


def npy_files(meta: dict) -> Iterator[dict]:
    """What a meta.json says about each .npy file: its name, sha256 and size."""
    for facts in meta["splits"].values():
        yield from facts["shards"]
        if meta["kind"] == "stream":
            yield facts["document_offsets"]


def _open_shards(folder, meta):
    """{split: its Shards}, after a check of every file. Raises UserError.

    A file with the same mark as in .verified.json is not read through again: once is enough for 100M tokens. A mark has
    the times of the file, which change when it is written to or replaced.
    """
    known, marks, shards = {}, {}, {}
    with contextlib.suppress(UserError):
        known = read_json(folder / VERIFIED)

    def checked(entry, dtype, shape, limit):
        shard = Shard(folder / entry["file"], dtype, shape)
        stat = os.fstat(shard.fd)
        mark = [entry["sha256"], limit, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
        if not isinstance(known, dict) or known.get(entry["file"]) != mark:
            shard.check(entry["sha256"], limit)
        if time.time_ns() - stat.st_ctime_ns > 1e9:  # a second write to a younger file may leave the same times
            marks[entry["file"]] = mark
        return shard

    is_text, vocab_size = meta["kind"] == "stream", meta["vocab_size"]
    allow_open_files(sum(len(facts["shards"]) for facts in meta["splits"].values()))
    for split, facts in meta["splits"].items():
        shards[split] = []
        for entry in facts["shards"]:
            shape = (entry["tokens"],) if is_text else (entry["rows"], 2, entry["seq_len"])
            shards[split].append(checked(entry, dtype_of(vocab_size), shape, vocab_size))
        if is_text:
            checked(facts["document_offsets"], np.dtype(np.int64), (facts["documents"] + 1,), facts["tokens"] + 1)
    if marks != known:
        with contextlib.suppress(UserError):  # in a folder that cannot be written to, the files are read each time
            write_text(folder / VERIFIED, json.dumps(marks))
    return shards


# ----------------------------------------------------------------------------------------------------------------------
# Reading


class Shard:
    """The numbers of a .npy file; shard[start:stop] reads them. Raises UserError for another dtype or shape.

    It reads by position: what a memory map has read counts as memory, and a file that is cut short ends it with SIGBUS.
    """

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...]):
        if not os.path.isfile(path):
            raise UserError(f"{path}: is missing")
        self.path, self.dtype, self.shape = path, dtype, shape
        self.fd = os.open(path, os.O_RDONLY)  # a shard that is replaced later is read as it was
        weakref.finalize(self, os.close, self.fd)
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            self.start, self.row_bytes, in_order = array.offset, array.nbytes // len(array), array.flags.c_contiguous
        except Exception as error:  # a damaged header may raise anything: SyntaxError, tokenize.TokenError, EOFError
            raise UserError(f"{path}: cannot be read as a .npy file of numbers ({error})") from None
        if (array.dtype, array.shape, in_order) != (dtype, shape, True):
            raise UserError(f"{path}: holds {array.dtype} {array.shape} where meta.json says {dtype} {shape}")

    def check(self, sha256: str, limit: int) -> None:
        """Reads the file through. Raises UserError if its sha256 is another, or a number is not below limit."""
        digest, largest = hashlib.sha256(os.pread(self.fd, self.start, 0)), 0
        step = max(1, (1 << 20) // self.row_bytes)
        for start in range(0, len(self), step):
            numbers = self[start : start + step]
            digest.update(numbers)
            largest = max(largest, int(numbers.max()))
        digest.update(os.pread(self.fd, 1, self.start + len(self) * self.row_bytes))  # what was appended, if anything
        if digest.hexdigest() != sha256:
            raise UserError(f"{self.path}: is not the file that meta.json describes (its sha256 differs)")
        if largest >= limit:
            raise UserError(f"{self.path}: holds {largest} where every value must be below {limit}")

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        start, stop, _ = rows.indices(len(self))
        data = os.pread(self.fd, (stop - start) * self.row_bytes, self.start + start * self.row_bytes)
        if len(data) < (stop - start) * self.row_bytes:
            raise UserError(f"{self.path}: was cut short after it was opened; prepare the data set again")
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])


class Dataset:
    """
    An open data set, which open_dataset makes. Shards stay on disk.

    meta: the content of meta.json       name, kind, tokenizer, vocab_size: its fields
    splits: the names of the splits      slices: the names of the slices ("64/4"), none for a stream
    sha256: one digest of the shards of each split and of what their ids mean
    kinds: {name: token ids} of the queries that meters.py measures apart; empty if the data set names none
    alphabet: the characters that the ids 1, 2, ... of data/backcopy stand for, or None
    first_ids: the ids that every row begins with and that stand for no text: [0] for <s>, or none
    """

    def __init__(self, folder: Path, meta: dict, shards: dict[str, list]):
        self.folder, self.meta, self._shards = folder, meta, shards
        self.name, self.kind, self.tokenizer = meta["name"], meta["kind"], meta["tokenizer"]
        self.vocab_size, self.splits, self.kinds = meta["vocab_size"], list(meta["splits"]), meta.get("kinds", {})
        parameters, is_text = meta["parameters"], self.kind == "stream"
        # of data/backcopy and data/pystdlib
        self.first_ids = [0] if parameters.get("first_token") or parameters.get("row_len") else []
        self.alphabet = None if is_text else parameters.get("alphabet")
        means = self.kind, self.vocab_size, self.tokenizer, self.first_ids, self.alphabet, self.kinds
        shas = {split: [[s["sha256"], s.get("slice")] for s in of["shards"]] for split, of in meta["splits"].items()}
        names = [name for pairs in shas.values() for _, name in pairs]
        self.slices = [] if is_text else list(dict.fromkeys(names))
        self.sha256 = hashlib.sha256(json.dumps([*means, shas], sort_keys=True).encode()).hexdigest()
        # where each shard begins in its split, then the split's length: in tokens, or in rows
        self._starts = {split: [0, *itertools.accumulate(map(len, parts))] for split, parts in shards.items()}

    def counts(self, split: str) -> dict[str, int]:
        """documents, words, bytes, tokens of a stream; rows, tokens, labels of examples."""
        return {name: value for name, value in self._facts(split).items() if isinstance(value, int)}

    def perfect_loss(self, split: str) -> float | None:
        """Nats a token of the predictor that knows how the rows were drawn, if meta.json gives it for every shard."""
        shards = self._facts(split)["shards"]
        if any("perfect_loss" not in shard for shard in shards):
            return None
        return sum(shard["perfect_loss"] * shard["tokens"] for shard in shards) / sum(s["tokens"] for s in shards)

    def examples_per_epoch(self, split: str, block_size: int) -> int:
        """The number of rows, or of windows of block_size + 1 tokens. Raises UserError if block_size does not fit."""
        self._longest(split, block_size)
        length = self._starts[split][-1]
        if self.kind == "examples":
            return length
        if length <= block_size:
            what = f"{split} has {length} tokens, fewer than block_size + 1 = {block_size + 1}"
            raise UserError(f"{self.folder}: {what}; lower block_size or prepare more text")
        return (length - 1) // block_size

    def tokens_per_example(self, split: str, block_size: int) -> float:
        """The mean length of a row; block_size for a stream."""
        facts = self._facts(split)
        return facts["tokens"] / facts["rows"] if self.kind == "examples" else block_size

    def batch(
        self, split: str, step: int, *, seed: int, batch_size: int, block_size: int, micro_step: int = 0,
        gradient_accumulation_steps: int = 1, same_length: bool = False,
    ) -> tuple:  # fmt: skip
        """
        (inputs, targets) of one micro-step, both int64 (B, T). Epochs follow each other, each in its own order. The
        global batch of a step is the next batch_size * gradient_accumulation_steps examples, and micro-step m is its
        m-th part. same_length: every batch is as long as the longest row of the split, because torch.compile takes
        minutes for each new length.
        """
        n, first = self.examples_per_epoch(split, block_size), step * gradient_accumulation_steps + micro_step
        examples = []
        for index in range(first * batch_size, (first + 1) * batch_size):
            epoch, position = divmod(index, n)
            order, phase = _epoch(seed, epoch, n, block_size)
            place = int(order[position])
            if self.kind == "stream":
                # the phase moves the borders of the windows from epoch to epoch; the last window ends with the split
                place = min(phase + place * block_size, self._starts[split][-1] - block_size - 1)
            examples.append(self._example(split, place, block_size))
        return _collate(examples, self._longest(split, block_size) if same_length else 0)

    def count_labels(self, split: str, step: int, micro_steps: Iterable[int], **sizes) -> int:
        """The number of labels in these micro-steps. sizes: the keys of `batch`."""
        if self.kind == "stream":
            return sizes["batch_size"] * sizes["block_size"] * len(list(micro_steps))
        return sum(int((self.batch(split, step, micro_step=m, **sizes)[1] != IGNORE).sum()) for m in micro_steps)

    def eval_batches(
        self, split: str, batch_size: int, block_size: int, rank: int = 0, world_size: int = 1,
        stride: int | None = None, tokens: int | None = None,
    ) -> Iterator[tuple]:  # fmt: skip
        """
        Yields (inputs, targets, slice) over the whole split, in order, so that every token is scored once; the batches
        rank, rank + world_size, ... All examples of a batch are of one slice. A stream has the slice None, and windows
        of block_size; all its tokens but the first are scored. With a stride below block_size windows overlap, and each
        scores what lies behind the one before it. Raises UserError for a larger stride.

        tokens: read about that many tokens instead, the same in every call, evenly spread over the split and its slices
        """
        stride, is_text, longest = stride or block_size, self.kind == "stream", self._longest(split, block_size)
        if stride > block_size:
            raise UserError(f"stride={stride}: windows of block_size={block_size} would leave tokens between them out")
        facts, starts = self._facts(split), self._starts[split]
        if is_text and starts[-1] < 2:
            raise UserError(f"{self.folder}: {split} has {starts[-1]} token, so there is nothing to predict")
        slices: dict = {None: range(0, max(1, starts[-1] - 1 - block_size + stride), stride)} if is_text else {}
        for shard, start in zip(() if is_text else facts["shards"], starts, strict=False):
            slices.setdefault(shard["slice"], []).extend(range(start, start + shard["rows"]))
        batches = []
        for name, places in slices.items():
            if tokens is not None:
                places = _spread(places, -(-tokens * len(places) // facts["tokens"]))
            batches += [(name, places[i : i + batch_size]) for i in range(0, len(places), batch_size)]
        for name, places in batches[rank::world_size]:
            examples = [self._example(split, place, block_size) for place in places]
            inputs, targets = _collate(examples, longest if is_text else 0)
            if is_text:
                targets[int(places[0] == 0) :, : block_size - stride] = IGNORE  # the window before has scored them
            yield inputs, targets, name

    def _facts(self, split):
        if split not in self.meta["splits"]:
            raise UserError(f"{self.folder}: has no split {split!r}; it has {', '.join(self.splits)}")
        return self.meta["splits"][split]

    def _longest(self, split, block_size):
        """The length of the longest row; block_size for a stream. Raises UserError if it does not fit block_size."""
        shards = self._facts(split)["shards"]
        longest = block_size if self.kind == "stream" else max(shard["seq_len"] for shard in shards)
        if longest > block_size:
            what = f"{split} has rows of {longest} tokens"
            raise UserError(f"{self.folder}: {what}; block_size={block_size} is too small")
        return longest

    def _example(self, split, place, block_size):
        """Inputs and targets of a row, or of the next block_size tokens of a stream, or of as many as are left."""
        if self.kind == "stream":
            tokens = self._read(split, place, place + block_size + 1)
            return tokens[:-1], tokens[1:]
        tokens, labels = self._read(split, place, place + 1)[0]
        return tokens, np.where(labels == 0, IGNORE, labels)

    def _read(self, split, start, stop):
        """The tokens or rows start, ..., stop - 1 of a split, as many as there are; its shards are read as one."""
        starts, shards = self._starts[split], self._shards[split]
        first, last = bisect.bisect_right(starts, start) - 1, bisect.bisect_left(starts, min(stop, starts[-1]))
        parts = [shards[i][max(start - starts[i], 0) : stop - starts[i]] for i in range(first, last)]
        return np.concatenate(parts).astype(np.int64)


def _spread(rows, n):
    """n of the rows at even distances, each in the middle of its n-th part; all of them where there are fewer."""
    n = min(n, len(rows))
    return [rows[(2 * i + 1) * len(rows) // (2 * n)] for i in range(n)]


@functools.lru_cache(maxsize=4)
def _epoch(seed, epoch, n, block_size):
    """The order of the n examples of an epoch, and where the windows of a stream begin."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(n)
    order.flags.writeable = False  # all callers share this array
    return order, int(rng.integers(block_size))


def _collate(examples, length=0):
    """Examples of (inputs, targets) -> two (B, T) tensors; T is at least `length`; padding has no target."""
    import torch  # here, so that the prepare scripts start without it

    length = max(length, *(len(inputs) for inputs, _ in examples))
    batch = np.zeros((2, len(examples), length), np.int64)
    batch[1] = IGNORE
    for i, example in enumerate(examples):
        batch[:, i, : len(example[0])] = example
    return tuple(torch.from_numpy(batch))
