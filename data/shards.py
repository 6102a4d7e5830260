"""
Shards: how a data set lies on disk, how it is checked, and in which order training and evaluation read it.

A data set is a folder of .npy shards and a meta.json that lists them. Shards are uint16; for more than 65,536 token
ids they are uint32. There are two kinds:

    stream    shards of shape (tokens,) hold running text: the shards of a split are one long row of tokens
    examples  shards of shape (rows, 2, T) hold tokens and labels. Where the label is 0, nothing is predicted

    dataset = open_dataset("data/mqar")         # checks every shard against its sha256, once; errors are one line
    dataset.batch("train", step, seed=0, batch_size=8, block_size=64, micro_step=0, gradient_accumulation_steps=4)
    dataset.eval_batches("val", batch_size=8, block_size=64)

The global batch of a training step is a pure function of (seed, step). Nothing is remembered from call to call, so a
restart, an evaluation in between, or another number of processes cannot change what a step trains on.

A new data set is written to .new inside its folder, and replaces the old one when it is complete: a prepare script that
fails or is killed leaves the old data set as it was.
"""

import configurator
from configurator import UserError, show

import bisect
import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data.tokenizer import MOST_TOKENIZER, TOKENIZER_FILE
from ops import IGNORE
from runs import files
from runs.files import lock, read_json, write_whole, wrong_field
from runs.limits import disk_free, ram_available, show_bytes

FORMAT = 1
UINT16_VOCAB, MAX_VOCAB = 1 << 16, 1 << 31  # the most token ids of uint16, and at all
DATA = Path(__file__).resolve().parent
MOST_META = 1 << 26  # bytes of a meta.json

# the fields of meta.json and progress.json, as rules of files.wrong_field
TEXT, COUNT = (str, 1, 99), (int, 1, 1 << 60)
FILE = {"file": (str, 1, 99), "sha256": (str, 64, 64), "bytes": COUNT}

# ----------------------------------------------------------------------------------------------------------------------
# Writing: the shards first, meta.json last, in the folder .new until all files are complete

NEW = ".new"
OURS = re.compile(r"\w{1,80}_(\d{4,9}|documents)\.npy")  # the names that _save_shard and write_stream give


def claim(out_dir: Path | str, overwrite: bool) -> Path:
    """Marks the folder as a data set, and returns its Path. UserError where it holds something else, unless overwrite.

    Three kinds of folder need no mark: a data set of an older version, a script's own folder under data/, and a folder
    that holds nothing but a lock and what a stopped script has left in .new.
    """
    out_dir = Path(out_dir)
    with contextlib.suppress(OSError):  # files.claim meets the same error and reports it
        is_scripts = os.path.dirname(os.path.realpath(out_dir)) == str(DATA) and (out_dir / "prepare.py").is_file()
        overwrite = overwrite or is_scripts or bool(_listed(out_dir)) or set(os.listdir(out_dir)) <= {"lock", NEW}
    files.claim(out_dir, "data set", overwrite)
    return out_dir


def check_room(out_dir: Path | str, memory: int, disk: int, what: str, keys: str) -> None:
    """Raises UserError if less than that many bytes of memory or of disk are left, before anything is computed.

    what: the rows, in words, which take `disk` bytes; keys: what the user may lower.
    """
    ram, where = ram_available()
    for need, available, place in ((memory, ram, where), (disk, disk_free(out_dir), f"the disk of {out_dir}")):
        if need > available:
            raise UserError(
                f"about {show_bytes(need)} would be needed, and {place} has {show_bytes(available)} left: "
                f"{what} are {show_bytes(disk)}; lower {keys}"
            )


def report(meta: dict, out_dir: Path | str) -> None:
    """Prints the counts of every split, and where the data set lies: the end of a prepare script."""
    for split, facts in meta["splits"].items():
        counts = ", ".join(f"{value:,} {name}" for name, value in facts.items() if isinstance(value, int))
        print(f"{split}: {counts}")
    print(f"written to {out_dir}")


def parameters_of(config) -> dict:
    """The keys of a prepare script that decide which data it makes, for meta.json: all but those about the folder."""
    keys = dataclasses.asdict(config)
    return {name: value for name, value in keys.items() if name not in ("out_dir", "overwrite")}


def dtype_of(vocab_size: int) -> type:
    """The dtype of the shards of a data set with so many token ids."""
    return np.uint16 if vocab_size <= UINT16_VOCAB else np.uint32


def _listed(folder):
    """meta.json and the files that it names. The set is empty unless the folder has a meta.json of our format."""
    try:
        meta = read_json(folder / "meta.json", MOST_META)
        splits = meta["splits"].values() if meta["format"] == FORMAT else ()
        entries = [entry for facts in splits for entry in (*facts["shards"], facts.get("document_offsets", {}))]
        entries.append(meta.get("tokenizer_file", {}))
        return (
            {"meta.json", *(entry["file"] for entry in entries if isinstance(entry.get("file"), str))}
            if splits
            else set()
        )
    except (UserError, LookupError, TypeError, AttributeError):
        return set()


@contextlib.contextmanager
def _new_folder(out_dir, vocab_size, restartable=False):
    """A folder to write to. At the end its files replace those of the data set in out_dir. Raises UserError.

    restartable: after an error or a kill its files stay there for the next call.
    """
    if vocab_size > MAX_VOCAB:
        raise UserError(f"vocabulary of {vocab_size}: a shard holds ids below {MAX_VOCAB}")
    out_dir = Path(out_dir)
    new = out_dir / NEW
    try:
        new.mkdir(parents=True, exist_ok=True)
        with lock(new):
            try:
                if not restartable:
                    for left in new.iterdir():  # files of a run that was killed
                        if left.name != "lock":
                            left.unlink()
                yield new
            except BaseException:
                if not restartable:
                    shutil.rmtree(new, ignore_errors=True)
                raise
            _swap(new, out_dir)
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{error.filename or out_dir}: cannot be written ({error.strerror or error})") from None


def _swap(new, out_dir):
    """Moves the files of `new` to out_dir, meta.json last, and removes the shards that only the old data set had.

    A kill in between leaves new shards beside the old meta.json. Their sha256 differ, so open_dataset refuses them.
    """
    old, written = _listed(out_dir), _listed(new)
    for name in sorted(written - {"meta.json"}) + ["meta.json"]:
        os.replace(new / name, out_dir / name)
    for name in old - written:
        if OURS.fullmatch(name):  # the old meta.json may come from a stranger and name any file
            (out_dir / name).unlink(missing_ok=True)


def write_stream(
    out_dir: Path | str,
    splits: dict[str, Iterable[str]],
    *,
    tokenizer,
    shard_tokens: int = 100_000_000,
    workers: int = 1,
    count_words: Callable[[str], int] | None = None,
    check: Callable[[str, dict], object] | None = None,
    restartable: bool = False,
    **about,
) -> dict:
    """
    Writes running text and returns the content of meta.json. `splits` is {"train": documents, ...}, an iterable of str
    each; `tokenizer` is one of data/tokenizer.py. Documents are joined with nothing in between; the offset of each is
    stored.

    workers: how many threads encode
    count_words(text): counts words differently than len(text.split())
    check(split, counts): is called when a split is written; if it raises UserError, no meta.json is written
    restartable: after a kill, a call with the same parameters goes on behind the last whole shard, which progress.json
        lists. The parameters must identify the text, for instance by a sha256
    about: the other keywords of _write_meta
    """
    about |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    dtype = dtype_of(tokenizer.vocab_size)
    with _new_folder(out_dir, tokenizer.vocab_size, restartable) as folder:
        written = {}
        progress = _read_progress(folder, about | {"shard_tokens": shard_tokens}) if restartable else {"splits": {}}
        for split, documents in splits.items():
            shards, counts = _still_whole(folder, progress["splits"].get(split), tokenizer.vocab_size)
            progress["splits"][split] = {"shards": shards, "documents": counts}  # both lists grow below
            skip = sum(shard["tokens"] for shard in shards) - sum(tokens for tokens, _, _ in counts)
            documents, tokens = (
                itertools.islice(documents, len(counts), None),
                array(np.dtype(dtype).char),
            )

            def save(split=split, shards=shards, tokens=tokens):
                shards.append(_save_shard(folder, split, len(shards), tokens[:shard_tokens], dtype))
                del tokens[:shard_tokens]
                if restartable:
                    text = json.dumps(progress)
                    _write_whole(folder / "progress.json", lambda out: out.write(text.encode()))

            for ids, words, n_bytes in _encode(documents, tokenizer, workers, count_words or _count_words):
                counts.append((len(ids), words, n_bytes))
                tokens.frombytes(ids[skip:].tobytes())
                skip = 0  # the first document began in the last whole shard
                while len(tokens) >= shard_tokens:
                    save()
            if tokens:
                save()
            if not shards:
                raise UserError(f"the {split} split would hold no text")
            offsets = np.cumsum([0] + [tokens for tokens, _, _ in counts], dtype=np.int64)
            _, n_words, n_bytes = (sum(column) for column in zip(*counts, strict=True))
            total = {"documents": len(counts), "words": n_words, "bytes": n_bytes, "tokens": int(offsets[-1])}
            if not n_words:
                raise UserError(f"the {split} split would hold nothing but white space")
            if check:
                check(split, total)
            saved = _save_npy(folder / f"{split}_documents.npy", offsets)
            written[split] = total | {"document_offsets": saved, "shards": shards}
        if hasattr(tokenizer, "file"):  # the data set has a copy, so that it can be decoded wherever it lies
            about["tokenizer_file"] = _save_tokenizer(folder, tokenizer)
        return _write_meta(folder, written, kind="stream", **about)


def _count_words(text):
    return len(text.split())


def _encode(documents, tokenizer, workers, count_words):
    """Yields (ids, words, bytes) of each document, in order."""

    def encode(text):
        return tokenizer.encode_array(text), count_words(text), len(text.encode())

    if workers == 1:
        yield from map(encode, documents)
        return
    with ThreadPoolExecutor(workers) as pool:  # threads are enough: tiktoken releases the GIL
        waiting = collections.deque()  # a few for each thread, so that no whole split is in memory
        for text in documents:
            waiting.append(pool.submit(encode, text))
            if len(waiting) > 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _read_progress(out_dir, of):
    """The progress.json of a killed run with the same parameters `of`, or an empty one."""
    of = json.loads(json.dumps(of))
    try:
        progress = read_json(out_dir / "progress.json", MOST_META)
    except UserError:
        progress = None
    is_right = wrong_field(progress, PROGRESS) is None and progress["of"] == of
    return progress if is_right else {"of": of, "splits": {}}


PROGRESS = {
    "of": (dict, 0, 99),
    "splits": {
        str: {
            "shards": [FILE | {"tokens": COUNT}, 0, 1 << 20],
            "documents": [[(int, 0, 1 << 60), 3, 3], 0, 1 << 60],
        }
    },
}


def _still_whole(out_dir, left, vocab_size):
    """The leading shards of a split that match progress.json, and the counts of the documents that end in them."""
    shards, left = [], left or {"shards": [], "documents": []}
    for shard in left["shards"]:
        try:
            verify(out_dir, shard, dtype_of(vocab_size), (shard["tokens"],), vocab_size)
        except _Damaged:
            break
        shards.append(shard)
    end, ends = sum(shard["tokens"] for shard in shards), itertools.accumulate(row[0] for row in left["documents"])
    return shards, [row for row, stop in zip(left["documents"], ends, strict=True) if stop <= end]


def write_examples(
    out_dir: Path | str, splits: dict[str, Iterable[tuple[np.ndarray, dict]]], *, vocab_size: int, **about
) -> dict:
    """
    Writes separate examples and returns the content of meta.json. `splits` is {"train": slices, ...}, an iterable of
    (examples (N, 2, T), facts) each. The facts go to meta.json; one of them is the name of the "slice", such as "64/4".
    kinds: {name: token ids}: the kinds of query that meters.py measures apart; all other tokens are one more kind.
    """
    with _new_folder(out_dir, vocab_size) as folder:
        written = {}
        for split, slices in splits.items():
            shards, labels = [], 0
            for examples, facts in slices:
                labels += int(np.count_nonzero(examples[:, 1]))
                shards.append(_save_shard(folder, split, len(shards), examples, dtype_of(vocab_size)) | facts)
            if not labels:
                raise UserError(f"the {split} split would hold no label: nothing to predict")
            rows, tokens = sum(shard["rows"] for shard in shards), sum(shard["tokens"] for shard in shards)
            written[split] = {"rows": rows, "tokens": tokens, "labels": labels, "shards": shards}
        return _write_meta(folder, written, kind="examples", vocab_size=vocab_size, **about)


def split_documents(sizes: Sequence[int], val_fraction: float, seed: int) -> np.ndarray:
    """
    A bool array: which documents are for validation. In a random order, each document is taken that keeps validation at
    or below val_fraction of the total size. If no document is small enough, the smallest one is taken.
    """
    sizes = np.asarray(sizes)
    is_val, room = np.zeros(len(sizes), bool), val_fraction * sizes.sum()
    for i in np.random.default_rng(seed).permutation(len(sizes)):
        if sizes[i] <= room:
            is_val[i], room = True, room - sizes[i]
    if not is_val.any():
        is_val[sizes.argmin()] = True
    return is_val


def _save_tokenizer(out_dir, tokenizer):
    file, content = out_dir / TOKENIZER_FILE, configurator.read_regular(tokenizer.file, MOST_TOKENIZER)
    size = _write_whole(file, lambda out: out.write(content))
    return {"file": file.name, "sha256": _sha256(file), "bytes": size}


def _save_shard(out_dir, split, number, values, dtype):
    values = np.asarray(values, dtype)
    saved = _save_npy(out_dir / f"{split}_{number:04d}.npy", values)
    if values.ndim == 1:
        return saved | {"tokens": values.size}
    return saved | {"rows": len(values), "seq_len": values.shape[2], "tokens": len(values) * values.shape[2]}


def _save_npy(file, values):
    size = _write_whole(file, lambda out: np.save(out, values, allow_pickle=False))
    return {"file": file.name, "sha256": _sha256(file), "bytes": size}


def _sha256(file):
    with open(file, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _write_meta(
    out_dir, splits, *, kind, name, tokenizer, vocab_size, generator, generator_version, parameters, seed, kinds=None,
    tokenizer_file=None,
):  # fmt: skip
    """`generator` is the script that made the data and `parameters` are its keys; with the seed they reproduce it."""
    meta = {"format": FORMAT, "kind": kind, "name": name, "tokenizer": tokenizer, "vocab_size": vocab_size}
    meta |= {"generator": generator, "generator_version": generator_version, "parameters": parameters, "seed": seed}
    meta |= {"kinds": kinds} if kinds else {}
    meta |= {"tokenizer_file": tokenizer_file} if tokenizer_file else {}
    text = json.dumps(meta | {"splits": splits}, indent=1) + "\n"
    _write_whole(out_dir / "meta.json", lambda out: out.write(text.encode()))
    return json.loads(text)


def _write_whole(file, write):
    try:
        return write_whole(file, write)
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror or error})") from None


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
    shards, verified = {}, _Verified(folder)
    try:
        _check_meta(meta)
        dtype = dtype_of(meta["vocab_size"])
        for split, facts in meta["splits"].items():
            shards[split] = []
            for shard in facts["shards"]:
                shape = (shard["tokens"],) if meta["kind"] == "stream" else (shard["rows"], 2, shard["seq_len"])
                shards[split].append(verify(folder, shard, dtype, shape, meta["vocab_size"], verified))
            if meta["kind"] == "stream":
                offsets = facts["document_offsets"]
                verify(folder, offsets, np.int64, (facts["documents"] + 1,), facts["tokens"] + 1, verified)
    except _Damaged as damage:
        where, what = damage.args
        raise UserError(f"{folder / where}: {what}; {prepare} again") from None
    verified.save()
    return Dataset(folder, meta, shards)


class _Verified:
    """Remembers in .verified.json which files were found undamaged: reading 100M tokens once is enough.

    A file is recognised by its size, inode and times, which change when it is written to or replaced.
    """

    def __init__(self, folder):
        self.file, self.now = folder / ".verified.json", {}
        try:
            self.before = read_json(self.file, MOST_META)
        except UserError:
            self.before = {}

    def knows(self, name, stat, sha256, limit):
        mark = [sha256, limit, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
        # a file younger than a second is left out: a second write could leave it the same times
        if time.time_ns() - stat.st_ctime_ns > 1e9:
            self.now[name] = mark
        return isinstance(self.before, dict) and self.before.get(name) == mark

    def save(self):
        if self.now and self.now != self.before:
            with contextlib.suppress(OSError):  # in a folder that cannot be written to, the files are read each time
                write_whole(self.file, lambda out: out.write(json.dumps(self.now).encode()))


class _Damaged(Exception):
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
    "stream": {"text?": {str: {"published_words?": COUNT}}},
    "examples": {"alphabet?": (str, 1, MAX_VOCAB)},
}


def _check_meta(meta):
    wrong = wrong_field(meta, META) or wrong_field(meta["splits"], {str: SPLITS[meta["kind"]]}, "splits")
    if wrong := wrong or wrong_field(meta["parameters"], PARAMETERS[meta["kind"]], "parameters"):
        raise _Damaged("meta.json", wrong)
    for split, facts in meta["splits"].items():
        sums = ("tokens",) if meta["kind"] == "stream" else ("tokens", "rows")
        for name in sums:
            if sum(shard[name] for shard in facts["shards"]) != facts[name]:
                raise _Damaged("meta.json", f"the shards of {split} do not add up to its {facts[name]} {name}")
        for shard in facts["shards"] if meta["kind"] == "examples" else ():
            if shard["rows"] * shard["seq_len"] != shard["tokens"]:
                raise _Damaged("meta.json", f"{shard['file'][:40]} of {split} does not have rows * seq_len tokens")


def verify(
    folder: Path, entry: dict, dtype: type, shape: tuple[int, ...], limit: int, verified: "_Verified | None" = None
) -> "Shard":
    """The Shard of one file, after a check that its size, shape and sha256 match meta.json and its values are < limit.

    verified: a _Verified; the content of a file that it knows is not read again. Raises _Damaged.
    """
    name, size = entry["file"], entry["bytes"]
    # a meta.json may come from a stranger: it names files of its own folder, nothing else
    if name != os.path.basename(name) or not name.endswith(".npy") or len(name) > 99 or "\\" in name or "\0" in name:
        raise _Damaged("meta.json", f"names {name[:80]!r}, which is not a .npy file of the folder itself")
    path = folder / name
    if not os.path.isfile(path):
        raise _Damaged(name, "is missing")
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size != size:
                raise _Damaged(name, f"has {stat.st_size} bytes where meta.json says {size}")
            found = _read_header(file)
            if found is None:
                raise _Damaged(name, "is not a .npy file of numbers")
            shard = Shard(file, path, np.dtype(dtype), shape)
            if found != (shape, False, shard.dtype) or shard.start + shard.row_bytes * shape[0] != size:
                raise _Damaged(name, f"holds {found[2]} {found[0]} where meta.json says {shard.dtype} {shape}")
            if verified is None or not verified.knows(name, stat, entry["sha256"], limit):
                _check_content(file, name, entry["sha256"], shard, limit)
    except OSError as error:
        raise _Damaged(name, f"cannot be read ({error.strerror})") from None
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
    """Checks the sha256 of the whole file and its largest number in one reading. Raises _Damaged."""
    file.seek(0)
    digest, largest = hashlib.sha256(file.read(shard.start)), 0
    while block := file.read(1 << 20):
        digest.update(block)
        largest = max(
            largest, int(np.frombuffer(block, shard.dtype, len(block) // shard.dtype.itemsize).max(initial=0))
        )
    if digest.hexdigest() != sha256:
        raise _Damaged(name, "is not the file that meta.json describes (its sha256 differs)")
    if largest >= limit:
        raise _Damaged(name, f"holds {largest} where every value must be below {limit}")


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
    sha256: one digest of all shards: two runs had the same data if it is the same
    kinds: {name: token ids} of the queries that meters.py measures apart; empty if the data set names none
    """

    def __init__(self, folder, meta, shards):
        self.folder, self.meta, self._shards = folder, meta, shards
        self.name, self.kind, self.tokenizer = meta["name"], meta["kind"], meta["tokenizer"]
        self.vocab_size, self.splits = meta["vocab_size"], list(meta["splits"])
        listed = [shard for facts in meta["splits"].values() for shard in facts["shards"]]
        self.kinds = meta.get("kinds", {})
        self.slices = list(dict.fromkeys(shard["slice"] for shard in listed)) if self.kind == "examples" else []
        self.sha256 = hashlib.sha256("\n".join(shard["sha256"] for shard in listed).encode()).hexdigest()
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
