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

The global batch of a training step is a pure function of (seed, step). Nothing is remembered from call to call, so a
restart, an evaluation in between, or another number of processes cannot change what a step trains on.
"""

from configurator import UserError, show

import bisect
import contextlib
import errno
import functools
import hashlib
import itertools
import json
import math
import os
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ops import IGNORE
from runs.files import read_json, write_whole, wrong_field
from runs.limits import allow_open_files

FORMAT = 1
UINT16_VOCAB, MAX_VOCAB = 1 << 16, 1 << 31  # the most token ids of uint16, and at all
DATA = Path(__file__).resolve().parent
MOST_META = 1 << 26  # bytes of a meta.json
VERIFIED = ".verified.json"

# the fields of meta.json, as rules of files.wrong_field
TEXT, COUNT = (str, 1, 99), (int, 1, 1 << 60)
FILE = {"file": (str, 1, 99), "sha256": (str, 64, 64), "bytes": COUNT}


def dtype_of(vocab_size: int) -> type:
    """The dtype of the shards of a data set with so many token ids."""
    return np.uint16 if vocab_size <= UINT16_VOCAB else np.uint32


# ----------------------------------------------------------------------------------------------------------------------
# Opening: whatever is wrong with a folder is reported here, in one line, before training starts


def open_dataset(path: Path | str) -> "Dataset":
    """A Dataset whose files have all been checked. Raises UserError, which names the file and what to do."""
    if not str(path):
        raise UserError("dataset=None: the checkpoint names no data set; name one: --dataset=FOLDER")
    folder = Path(path)
    name = folder.name.split("-")[0]  # data/wikitext103/prepare.py makes wikitext103-mini, too
    known = os.path.isfile(DATA / name / "prepare.py")
    prepare = f"run python data/{name if known else '<name>'}/prepare.py"
    if not os.path.isdir(folder):
        if known and os.path.isfile(DATA / folder.name / "meta.json"):  # nanoGPT's spelling
            raise UserError(f"{folder}: no such folder; write --dataset=data/{folder.name}")
        raise UserError(f"{folder}: no such data set; {prepare}")
    file = folder / "meta.json"
    if not os.path.isfile(file):
        raise UserError(f"{folder}: has no meta.json, so it is no data set, or a run that did not finish; {prepare}")
    try:
        meta = read_json(file, MOST_META)
    except UserError as error:
        raise UserError(f"{error}; {prepare} again") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else None
        raise UserError(f"{file}: format {show(found)}, where this version reads {FORMAT}; {prepare} again")
    shards, before = {}, _read_verified(folder)
    verified = dict(before)
    try:
        _check_meta(meta)
        allow_open_files(sum(len(facts["shards"]) for facts in meta["splits"].values()))
        dtype = dtype_of(meta["vocab_size"])
        for split, facts in meta["splits"].items():
            shards[split] = []
            for shard in facts["shards"]:
                shape = (shard["tokens"],) if meta["kind"] == "stream" else (shard["rows"], 2, shard["seq_len"])
                shards[split].append(verify(folder, shard, dtype, shape, meta["vocab_size"], verified))
            if meta["kind"] == "stream":
                offsets = facts["document_offsets"]
                verify(folder, offsets, np.int64, (facts["documents"] + 1,), facts["tokens"] + 1, verified)
    except Damaged as damage:
        where, what = damage.args
        raise UserError(f"{folder / where}: {what}; {prepare} again") from None
    if verified != before:
        with contextlib.suppress(OSError):  # in a folder that cannot be written to, the files are read each time
            write_whole(folder / VERIFIED, lambda out: out.write(json.dumps(verified).encode()))
    return Dataset(folder, meta, shards)


def _read_verified(folder):
    """{file name: its mark} of the files that were found undamaged: reading 100M tokens once is enough."""
    try:
        marks = read_json(folder / VERIFIED, MOST_META)
    except UserError:
        return {}
    return marks if isinstance(marks, dict) else {}


class Damaged(Exception):
    """(file name, what is wrong with it)"""


META = {
    "kind": {"stream", "examples"},
    "name": TEXT,
    "tokenizer": TEXT,
    "vocab_size": (int, 1, MAX_VOCAB),
    "parameters": (dict, 0, 1 << 20),
    "tokenizer_file?": FILE,
    "kinds?": {str: [(int, 0, MAX_VOCAB - 1), 1, MAX_VOCAB]},
    "splits": {str: (dict, 1, 99)},
}
SPLITS = {
    "stream": {
        "documents": COUNT,
        "words": COUNT,
        "bytes": COUNT,
        "tokens": COUNT,
        "document_offsets": FILE,
        "shards": [FILE | {"tokens": COUNT}, 1, 1 << 20],
    },
    "examples": {
        "rows": COUNT,
        "tokens": COUNT,
        "labels": COUNT,
        "shards": [
            FILE | {"rows": COUNT, "seq_len": COUNT, "tokens": COUNT, "slice": TEXT, "perfect_loss?": (float, 0, 99)},
            1,
            1 << 20,
        ],
    },
}
PARAMETERS = {  # word perplexity of a text is computed from these
    "stream": {"text?": {str: {"published_words?": COUNT}}, "version?": TEXT},
    "examples": {"alphabet?": (str, 1, MAX_VOCAB)},
}


def _check_meta(meta):
    wrong = wrong_field(meta, META) or wrong_field(meta["splits"], {str: SPLITS[meta["kind"]]}, "splits")
    if wrong := wrong or wrong_field(meta["parameters"], PARAMETERS[meta["kind"]], "parameters"):
        raise Damaged("meta.json", wrong)
    if half := next((c for c in meta["parameters"].get("alphabet", "") if "\ud800" <= c <= "\udfff"), None):
        raise Damaged("meta.json", f"its alphabet holds {half!r}, half of a character")
    for split, facts in meta["splits"].items():
        sums = ("tokens",) if meta["kind"] == "stream" else ("tokens", "rows")
        for name in sums:
            if sum(shard[name] for shard in facts["shards"]) != facts[name]:
                raise Damaged("meta.json", f"the shards of {split} do not add up to its {facts[name]} {name}")
        for shard in facts["shards"] if meta["kind"] == "examples" else ():
            if shard["rows"] * shard["seq_len"] != shard["tokens"]:
                raise Damaged("meta.json", f"{shard['file'][:40]} of {split} does not have rows * seq_len tokens")


def verify(
    folder: Path, entry: dict, dtype: type, shape: tuple[int, ...], limit: int, verified: dict[str, list]
) -> "Shard":
    """The Shard of one file, after a check that its size, shape and sha256 match meta.json and its values are < limit.

    verified: {file name: mark}; a file with the same mark as there is not read again, and others are added. A mark has
    the times of a file, which change when it is written to or replaced. Raises Damaged.
    """
    name, size = entry["file"], entry["bytes"]
    # a meta.json may come from a stranger: it names files of its own folder, nothing else
    if name != os.path.basename(name) or not name.endswith(".npy") or len(name) > 99 or "\\" in name or "\0" in name:
        raise Damaged("meta.json", f"names {name[:80]!r}, which is not a .npy file of the folder itself")
    path = folder / name
    if not os.path.isfile(path):
        raise Damaged(name, "is missing")
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size != size:
                raise Damaged(name, f"has {stat.st_size} bytes where meta.json says {size}")
            found = _read_header(file)
            if found is None:
                raise Damaged(name, "is not a .npy file of numbers")
            shard = Shard(file, path, np.dtype(dtype), shape)
            if found != (shape, False, shard.dtype) or shard.start + shard.row_bytes * shape[0] != size:
                raise Damaged(name, f"holds {found[2]} {found[0]} where meta.json says {shard.dtype} {shape}")
            mark = [entry["sha256"], limit, size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
            is_old = time.time_ns() - stat.st_ctime_ns > 1e9  # a second write to a young file may leave the same times
            if verified.get(name) != mark:
                _check_content(file, name, entry["sha256"], shard, limit)
            if is_old:
                verified[name] = mark
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise UserError(
                f"{path}: more shards than this process may open; raise `ulimit -n`, or shard_tokens"
            ) from None
        raise Damaged(name, f"cannot be read ({error.strerror})") from None
    return shard


def _read_header(file):
    """(shape, fortran_order, dtype) of a .npy file, which is then read up to its first number; None for other files."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        return readers[np.lib.format.read_magic(file)](file)
    except OSError:
        raise
    except Exception:  # a damaged header may raise anything: SyntaxError, tokenize.TokenError, EOFError
        return None


def _check_content(file, name, sha256, shard, limit):
    """Checks the sha256 of the whole file and its largest number in one reading. Raises Damaged."""
    file.seek(0)
    digest, largest = hashlib.sha256(file.read(shard.start)), 0
    while block := file.read(1 << 20):
        digest.update(block)
        largest = max(
            largest, int(np.frombuffer(block, shard.dtype, len(block) // shard.dtype.itemsize).max(initial=0))
        )
    if digest.hexdigest() != sha256:
        raise Damaged(name, "is not the file that meta.json describes (its sha256 differs)")
    if largest >= limit:
        raise Damaged(name, f"holds {largest} where every value must be below {limit}")


# ----------------------------------------------------------------------------------------------------------------------
# Reading


class Shard:
    """The numbers of an open .npy file. shard[row] and shard[start:stop] read them from the file by position.

    A memory map would be no faster, and would end the process with SIGBUS if the file were cut short meanwhile.
    """

    def __init__(self, file, path, dtype, shape):
        self.path, self.dtype, self.shape, self.start = path, dtype, shape, file.tell()
        self.row_bytes = dtype.itemsize * math.prod(shape[1:])
        self.fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.fd)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        if not isinstance(rows, slice):
            return self[rows : rows + 1][0]
        start, stop, _ = rows.indices(len(self))
        size = (stop - start) * self.row_bytes
        try:
            read = _read_at(self.fd, size, self.start + start * self.row_bytes)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read any more ({error.strerror})") from None
        if len(read) < size:
            raise UserError(f"{self.path}: was cut short after it was opened; prepare the data set again")
        return np.frombuffer(read, self.dtype).reshape(-1, *self.shape[1:])


def _read_at(fd, size, start):
    if hasattr(os, "pread"):
        return os.pread(fd, size, start)
    os.lseek(fd, start, os.SEEK_SET)  # Windows
    return os.read(fd, size)


class Dataset:
    """
    An open data set, which open_dataset makes. Shards stay on disk.

    meta: the content of meta.json       name, kind, tokenizer, vocab_size: its fields
    splits: the names of the splits      slices: the names of the slices ("64/4"), none for a stream
    sha256: one digest of the shards of each split and of what their ids mean: two runs had the same data if it is the
        same
    kinds: {name: token ids} of the queries that meters.py measures apart; empty if the data set names none
    alphabet: the characters that the ids 1, 2, ... of data/backcopy stand for, or None
    first_ids: the ids that every row begins with and that stand for no text: [0] for <s>, or none
    """

    def __init__(self, folder, meta, shards):
        self.folder, self.meta, self._shards = folder, meta, shards
        self.name, self.kind, self.tokenizer = meta["name"], meta["kind"], meta["tokenizer"]
        self.vocab_size, self.splits = meta["vocab_size"], list(meta["splits"])
        listed = [shard for facts in meta["splits"].values() for shard in facts["shards"]]
        self.kinds = meta.get("kinds", {})
        # of data/backcopy and data/pystdlib
        self.first_ids = [0] if meta["parameters"].get("first_token") or meta["parameters"].get("row_len") else []
        self.alphabet = meta["parameters"].get("alphabet") if self.kind == "examples" else None
        self.slices = list(dict.fromkeys(shard["slice"] for shard in listed)) if self.kind == "examples" else []
        means = self.kind, self.vocab_size, self.tokenizer, self.first_ids, self.alphabet, self.kinds
        shas = {split: [[s["sha256"], s.get("slice")] for s in of["shards"]] for split, of in meta["splits"].items()}
        self.sha256 = hashlib.sha256(json.dumps([*means, shas], sort_keys=True).encode()).hexdigest()
        # where each shard begins in its split, then the split's length: in tokens, or in rows
        self._starts = {
            split: list(itertools.accumulate((len(shard) for shard in maps), initial=0))
            for split, maps in shards.items()
        }

    def counts(self, split: str) -> dict[str, int]:
        """documents, words, bytes, tokens of a stream; rows, tokens, labels of examples."""
        return {name: value for name, value in self._facts(split).items() if isinstance(value, int)}

    def perfect_loss(self, split: str) -> float | None:
        """Nats a token of the predictor that knows how the rows were drawn, if meta.json gives it for every shard."""
        shards = self._facts(split)["shards"]
        if any("perfect_loss" not in shard for shard in shards):
            return None
        return sum(shard["perfect_loss"] * shard["tokens"] for shard in shards) / sum(s["tokens"] for s in shards)

    def document_offsets(self, split: str) -> np.ndarray:
        """The token at which each document of a stream begins, and the end of the last one: (documents + 1,) int64."""
        return np.load(self.folder / self._facts(split)["document_offsets"]["file"], allow_pickle=False)

    def examples_per_epoch(self, split: str, block_size: int) -> int:
        """The number of rows, or of windows of block_size + 1 tokens. Raises UserError if block_size does not fit."""
        self._facts(split)
        length = self._starts[split][-1]
        if self.kind == "examples":
            self._check_lengths(split, block_size)
            return length
        if length < block_size + 1:
            raise UserError(
                f"{self.folder}: {split} has {length} tokens, fewer than block_size + 1 = {block_size + 1}; "
                "lower block_size or prepare more text"
            )
        return (length - 1) // block_size

    def tokens_per_example(self, split: str, block_size: int) -> float:
        """The mean length of a row; block_size for a stream."""
        facts = self._facts(split)
        return facts["tokens"] / facts["rows"] if self.kind == "examples" else block_size

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
    ) -> tuple:
        """
        (inputs, targets) of one micro-step, both int64 (B, T). Epochs follow each other without end, each in its own
        order. The global batch of a step is the next batch_size * gradient_accumulation_steps examples; micro-step m
        is its m-th part, and processes divide the micro-steps among them. same_length: every batch is as long as the
        longest row of the split, because torch.compile takes minutes for each new length.
        """
        if not 0 <= micro_step < gradient_accumulation_steps:
            raise ValueError(f"micro_step {micro_step} of {gradient_accumulation_steps}")
        first = (step * gradient_accumulation_steps + micro_step) * batch_size
        rows = []
        for number, phase in self._drawn(split, first, batch_size, seed, block_size):
            if self.kind == "examples":
                rows.append(self._row(split, number))
            else:
                # the phase moves the borders of the windows from epoch to epoch; the last window ends with the split
                last = self._starts[split][-1] - block_size - 1
                rows.append(self._window(split, min(phase + number * block_size, last), block_size))
        return _collate(rows, self._longest(split) if same_length and self.kind == "examples" else 0)

    def count_labels(
        self,
        split: str,
        step: int,
        *,
        seed: int,
        batch_size: int,
        block_size: int,
        micro_steps: Iterable[int],
        gradient_accumulation_steps: int,
    ) -> int:
        """The number of labels that `batch` gives in these micro-steps together: a process counts the others' so."""
        if self.kind == "stream":
            return batch_size * block_size * len(list(micro_steps))
        found = 0
        for micro_step in micro_steps:
            first = (step * gradient_accumulation_steps + micro_step) * batch_size
            for row, _ in self._drawn(split, first, batch_size, seed, block_size):
                found += int(np.count_nonzero(self._numbers(split, row)[1]))
        return found

    def _drawn(self, split, first, count, seed, block_size):
        """Yields (the row or window, the phase of its epoch) of examples first, first + 1, ..., epoch after epoch."""
        n = self.examples_per_epoch(split, block_size)
        for index in range(first, first + count):
            epoch, position = divmod(index, n)
            order, phase = _epoch(seed, epoch, n, block_size)
            yield int(order[position]), phase

    def eval_batches(
        self,
        split: str,
        batch_size: int,
        block_size: int,
        rank: int = 0,
        world_size: int = 1,
        stride: int | None = None,
        tokens: int | None = None,
    ) -> Iterator[tuple]:
        """
        Yields (inputs, targets, slice) over the whole split, in order, so that every token is scored once. A process
        gets the batches rank, rank + world_size, ... A stream is read in windows of block_size; all tokens but the
        first are scored, and the slice is None. With a stride below block_size windows overlap, and each scores what
        lies behind the window before it; a larger stride would leave tokens out, and raises UserError. All examples of
        a batch are of one slice.

        tokens: read a sample of about that many tokens instead, the same in every call: windows or rows that are evenly
        spread over the split, of each slice its share
        """
        stride = stride or block_size
        if stride > block_size:
            raise UserError(f"stride={stride}: windows of block_size={block_size} would leave tokens between them out")
        facts, length = self._facts(split), self._starts[split][-1]
        if self.kind == "stream":
            if length < 2:
                raise UserError(f"{self.folder}: {split} has {length} token, so there is nothing to predict")
            plan = [(None, range(0, max(1, length - 1 - block_size + stride), stride))]
        else:
            self._check_lengths(split, block_size)
            rows = {}
            for shard, start, stop in zip(facts["shards"], self._starts[split], self._starts[split][1:], strict=False):
                rows.setdefault(shard["slice"], []).extend(range(start, stop))
            plan = list(rows.items())
        if tokens is not None:
            size = length if self.kind == "stream" else facts["tokens"]
            plan = [(name, _spread(rows, -(-tokens * len(rows) // size))) for name, rows in plan]
        batches = ((name, rows[i : i + batch_size]) for name, rows in plan for i in range(0, len(rows), batch_size))
        for name, batch in itertools.islice(batches, rank, None, world_size):
            if self.kind == "stream":
                inputs, targets = _collate([self._window(split, start, block_size) for start in batch], block_size)
                targets[int(batch[0] == 0) :, : block_size - stride] = IGNORE  # the window before has scored them
                yield inputs, targets, name
            else:
                yield *_collate([self._row(split, row) for row in batch]), name

    def _facts(self, split):
        if split not in self.meta["splits"]:
            raise UserError(f"{self.folder}: has no split {split!r}; it has {', '.join(self.splits)}")
        return self.meta["splits"][split]

    def _longest(self, split):
        return max(shard["seq_len"] for shard in self._facts(split)["shards"])

    def _check_lengths(self, split, block_size):
        longest = self._longest(split)
        if longest > block_size:
            raise UserError(
                f"{self.folder}: {split} has rows of {longest} tokens; block_size={block_size} is too small"
            )

    def _window(self, split, start, block_size):
        """Inputs and targets: block_size tokens from `start` on, or as many as are left; shards are read as one row."""
        starts, stop = self._starts[split], min(start + block_size + 1, self._starts[split][-1])
        parts = []
        for i in range(bisect.bisect_right(starts, start) - 1, bisect.bisect_left(starts, stop)):
            parts.append(self._shards[split][i][max(start - starts[i], 0) : stop - starts[i]])
        tokens = np.concatenate(parts).astype(np.int64)
        return tokens[:-1], tokens[1:]

    def _row(self, split, row):
        tokens, labels = self._numbers(split, row).astype(np.int64)
        return tokens, np.where(labels == 0, IGNORE, labels)

    def _numbers(self, split, row):
        """The tokens and the labels of a row: (2, T)."""
        i = bisect.bisect_right(self._starts[split], row) - 1
        return self._shards[split][i][row - self._starts[split][i]]


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


def _collate(rows, length=0):
    """Rows of (inputs, targets) -> two (B, T) tensors; T is at least `length`; padding has no target."""
    import torch  # here, so that the prepare scripts start without it

    length = max(length, *(len(inputs) for inputs, _ in rows))
    batch = np.zeros((2, len(rows), length), np.int64)
    batch[1] = IGNORE
    for i, row in enumerate(rows):
        batch[:, i, : len(row[0])] = row
    return tuple(torch.from_numpy(batch))
