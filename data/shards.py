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
from rules import wrong_field
from runs.files import read_json, write_whole
from runs.limits import allow_open_files

FORMAT = 1
UINT16_VOCAB, MAX_VOCAB = 1 << 16, 1 << 31  # the most token ids of uint16, and at all
DATA = Path(__file__).resolve().parent
MOST_META = 1 << 26  # bytes of a meta.json
VERIFIED = ".verified.json"

# meta.json, as rules of rules.wrong_field
TEXT, COUNT = (str, 1, 99), (int, 1, 1 << 60)
FILE = {"file": (str, 1, 99), "sha256": (str, 64, 64), "bytes": COUNT}
ROWS = FILE | {"rows": COUNT, "seq_len": COUNT, "tokens": COUNT, "slice": TEXT, "perfect_loss?": (float, 0, 99)}
ABOUT = {
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
    if not os.path.isfile(folder / "meta.json"):
        raise UserError(f"{folder}: has no meta.json, so it is no data set, or a run that did not finish; {prepare}")
    try:
        meta = _read_meta(folder / "meta.json")
        allow_open_files(sum(len(facts["shards"]) for facts in meta["splits"].values()))
        return Dataset(folder, meta, _open_shards(folder, meta))
    except UserError as error:
        raise UserError(f"{error}; {prepare} again") from None
    except OSError:  # verify lets no other pass
        raise UserError(
            f"{folder}: more shards than this process may open; raise `ulimit -n`, or shard_tokens"
        ) from None


def _read_meta(file):
    """The content of a meta.json, every field checked. Raises UserError."""
    meta = read_json(file, MOST_META)
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        number = meta.get("format") if isinstance(meta, dict) else None
        raise UserError(f"{file}: format {show(number)}, where this version reads {FORMAT}")
    if wrong := wrong_field(meta, {"kind": set(META)}) or wrong_field(meta, META[meta["kind"]]):
        raise UserError(f"{file}: {wrong}")
    if half := next((c for c in meta["parameters"].get("alphabet", "") if "\ud800" <= c <= "\udfff"), None):
        raise UserError(f"{file}: its alphabet holds {half!r}, half of a character")
    for split, facts in meta["splits"].items():
        for name in ("tokens",) if meta["kind"] == "stream" else ("tokens", "rows"):
            if sum(shard[name] for shard in facts["shards"]) != facts[name]:
                raise UserError(f"{file}: the shards of {split} do not add up to its {facts[name]} {name}")
        for shard in facts["shards"] if meta["kind"] == "examples" else ():
            if shard["rows"] * shard["seq_len"] != shard["tokens"]:
                raise UserError(f"{file}: {shard['file'][:40]} of {split} does not have rows * seq_len tokens")
    return meta


def _open_shards(folder, meta):
    """{split: its Shards}, after a check of every file. Raises UserError, and OSError for too many open files."""
    try:
        before = read_json(folder / VERIFIED, MOST_META)
    except UserError:
        before = {}
    verified = dict(before) if isinstance(before, dict) else {}
    shards, is_text, limit = {}, meta["kind"] == "stream", meta["vocab_size"]
    for split, facts in meta["splits"].items():
        shapes = [(s["tokens"],) if is_text else (s["rows"], 2, s["seq_len"]) for s in facts["shards"]]
        shards[split] = [
            verify(folder, shard, dtype_of(limit), shape, limit, verified)
            for shard, shape in zip(facts["shards"], shapes, strict=True)
        ]
        if is_text:
            offsets, shape = facts["document_offsets"], (facts["documents"] + 1,)
            verify(folder, offsets, np.int64, shape, facts["tokens"] + 1, verified)
    if verified != before:
        with contextlib.suppress(UserError):  # in a folder that cannot be written to, the files are read each time
            write_whole(folder / VERIFIED, lambda out: out.write(json.dumps(verified).encode()))
    return shards


def verify(
    folder: Path, entry: dict, dtype: type, shape: tuple[int, ...], limit: int, verified: dict[str, list]
) -> "Shard":
    """The Shard of one file, after a check that its size, shape and sha256 match meta.json and its values are < limit.

    verified: {file name: mark}; a file with the same mark as there is not read again, and others are added, because
    reading 100M tokens once is enough. A mark has the times of a file, which change when it is written to or replaced.
    Raises UserError, and OSError for too many open files.
    """
    name, path = entry["file"], folder / entry["file"]
    # a meta.json may come from a stranger: it names files of its own folder, nothing else
    if name != os.path.basename(name) or not name.endswith(".npy") or "\\" in name or "\0" in name:
        raise UserError(f"{folder / 'meta.json'}: names {name[:80]!r}, which is not a .npy file of the folder itself")
    if not os.path.isfile(path):
        raise UserError(f"{path}: is missing")
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size != entry["bytes"]:
                raise UserError(f"{path}: has {stat.st_size} bytes where meta.json says {entry['bytes']}")
            found = _read_header(file, path)
            shard = Shard(file, path, np.dtype(dtype), shape)
            if found != (shape, False, shard.dtype) or shard.start + shard.row_bytes * shape[0] != stat.st_size:
                raise UserError(f"{path}: holds {found[2]} {found[0]} where meta.json says {shard.dtype} {shape}")
            mark = [entry["sha256"], limit, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
            is_old = time.time_ns() - stat.st_ctime_ns > 1e9  # a second write to a young file may leave the same times
            if verified.get(name) != mark:
                _check_content(file, path, entry["sha256"], shard, limit)
            if is_old:
                verified[name] = mark
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return shard


def _read_header(file, path):
    """(shape, fortran_order, dtype) of a .npy file, which is then read up to its first number. Raises UserError."""
    try:
        if np.lib.format.read_magic(file) == (1, 0):
            return np.lib.format.read_array_header_1_0(file)
    except OSError:
        raise
    except Exception:  # a damaged header may raise anything: SyntaxError, tokenize.TokenError, EOFError
        pass
    raise UserError(f"{path}: is not a .npy file of numbers")


def _check_content(file, path, sha256, shard, limit):
    """Checks the sha256 of the whole file and its largest number in one reading. Raises UserError."""
    file.seek(0)
    digest, largest, size = hashlib.sha256(file.read(shard.start)), 0, shard.dtype.itemsize
    while block := file.read(1 << 20):
        digest.update(block)
        largest = max(largest, int(np.frombuffer(block, shard.dtype, len(block) // size).max(initial=0)))
    if digest.hexdigest() != sha256:
        raise UserError(f"{path}: is not the file that meta.json describes (its sha256 differs)")
    if largest >= limit:
        raise UserError(f"{path}: holds {largest} where every value must be below {limit}")


# ----------------------------------------------------------------------------------------------------------------------
# Reading


class Shard:
    """The numbers of an open .npy file. shard[start:stop] reads them from the file by position.

    A memory map would be no faster, and would end the process with SIGBUS if the file were cut short meanwhile.
    """

    def __init__(self, file, path, dtype, shape):
        self.path, self.dtype, self.shape, self.start = path, dtype, shape, file.tell()
        self.row_bytes = dtype.itemsize * math.prod(shape[1:])
        self.file = os.fdopen(os.dup(file.fileno()), "rb", buffering=0)
        weakref.finalize(self, self.file.close)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        start, stop, _ = rows.indices(len(self))
        size = (stop - start) * self.row_bytes
        try:
            self.file.seek(self.start + start * self.row_bytes)
            data = self.file.read(size)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read any more ({error.strerror})") from None
        if len(data) < size:
            raise UserError(f"{self.path}: was cut short after it was opened; prepare the data set again")
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])


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
        self.vocab_size, self.splits, self.kinds = meta["vocab_size"], list(meta["splits"]), meta.get("kinds", {})
        parameters = meta["parameters"]
        # of data/backcopy and data/pystdlib
        self.first_ids = [0] if parameters.get("first_token") or parameters.get("row_len") else []
        self.alphabet = parameters.get("alphabet") if self.kind == "examples" else None
        listed = [shard for facts in meta["splits"].values() for shard in facts["shards"]]
        self.slices = list(dict.fromkeys(shard["slice"] for shard in listed)) if self.kind == "examples" else []
        means = self.kind, self.vocab_size, self.tokenizer, self.first_ids, self.alphabet, self.kinds
        shas = {split: [[s["sha256"], s.get("slice")] for s in of["shards"]] for split, of in meta["splits"].items()}
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
        self._check_length(split, block_size)
        length = self._starts[split][-1]
        if self.kind == "stream" and length < block_size + 1:
            raise UserError(
                f"{self.folder}: {split} has {length} tokens, fewer than block_size + 1 = {block_size + 1}; "
                "lower block_size or prepare more text"
            )
        return (length - 1) // block_size if self.kind == "stream" else length

    def tokens_per_example(self, split: str, block_size: int) -> float:
        """The mean length of a row; block_size for a stream."""
        facts = self._facts(split)
        return facts["tokens"] / facts["rows"] if self.kind == "examples" else block_size

    def batch(
        self, split: str, step: int, *, seed: int, batch_size: int, block_size: int, micro_step: int = 0,
        gradient_accumulation_steps: int = 1, same_length: bool = False,
    ) -> tuple:  # fmt: skip
        """
        (inputs, targets) of one micro-step, both int64 (B, T). Epochs follow each other without end, each in its own
        order. The global batch of a step is the next batch_size * gradient_accumulation_steps examples; micro-step m
        is its m-th part, and processes divide the micro-steps among them. same_length: every batch is as long as the
        longest row of the split, because torch.compile takes minutes for each new length.
        """
        if not 0 <= micro_step < gradient_accumulation_steps:
            raise ValueError(f"micro_step {micro_step} of {gradient_accumulation_steps}")
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
        """The number of labels in these micro-steps: a process counts the others' so. sizes: the keys of `batch`."""
        if self.kind == "stream":
            return sizes["batch_size"] * sizes["block_size"] * len(list(micro_steps))
        return sum(int((self.batch(split, step, micro_step=m, **sizes)[1] != IGNORE).sum()) for m in micro_steps)

    def eval_batches(
        self, split: str, batch_size: int, block_size: int, rank: int = 0, world_size: int = 1,
        stride: int | None = None, tokens: int | None = None,
    ) -> Iterator[tuple]:  # fmt: skip
        """
        Yields (inputs, targets, slice) over the whole split, in order, so that every token is scored once. A process
        gets the batches rank, rank + world_size, ... A stream is read in windows of block_size; all tokens but the
        first are scored, and the slice is None. With a stride below block_size windows overlap, and each scores what
        lies behind the window before it; a larger stride would leave tokens out, and raises UserError. All examples of
        a batch are of one slice.

        tokens: read a sample of about that many tokens instead, the same in every call: windows or rows that are evenly
        spread over the split, of each slice its share
        """
        stride, is_text = stride or block_size, self.kind == "stream"
        if stride > block_size:
            raise UserError(f"stride={stride}: windows of block_size={block_size} would leave tokens between them out")
        self._check_length(split, block_size)
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
            inputs, targets = _collate(examples, block_size if is_text else 0)
            if is_text:
                targets[int(places[0] == 0) :, : block_size - stride] = IGNORE  # the window before has scored them
            yield inputs, targets, name

    def _facts(self, split):
        if split not in self.meta["splits"]:
            raise UserError(f"{self.folder}: has no split {split!r}; it has {', '.join(self.splits)}")
        return self.meta["splits"][split]

    def _longest(self, split, block_size):
        """The length of the longest row; block_size for a stream."""
        facts = self._facts(split)
        return block_size if self.kind == "stream" else max(shard["seq_len"] for shard in facts["shards"])

    def _check_length(self, split, block_size):
        if (longest := self._longest(split, block_size)) > block_size:
            raise UserError(
                f"{self.folder}: {split} has rows of {longest} tokens; block_size={block_size} is too small"
            )

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
