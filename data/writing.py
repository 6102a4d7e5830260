"""
Writing a data set. A prepare script claims its folder, and writes a stream; or it writes examples:

    out_dir, about = claim(config, "data/text/prepare.py", VERSION)
    write_stream(out_dir, {"train": texts, "val": texts}, name="text", tokenizer=tokenizer, **about)

    splits = {"train": [(examples, {"slice": "64"})], "val": ...}    # examples (N, 2, T)
    write_examples(config, "data/mqar/prepare.py", VERSION, splits, name="mqar", vocab_size=64)

The new files replace those of the old data set when all of them are complete: a script that fails
leaves the old one as it was. A script that is killed while they take their places leaves a folder
that is refused. Where a script that writes a stream was stopped, also by kill -9, the same command
goes on after the last whole shard. data/meta.py describes the files.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from base import files
from base.configurator import UserError, key
from base.files import DATA
from data import drawn
from data.meta import FORMAT, dtype_of, files_of, read_meta
from data.tokenizer import TOKENIZER_FILE

# the keys of prepare scripts that do not decide which data they make
NO_PARAMETERS = ("from_dir", "from_file", "out_dir", "overwrite", "threads")
AT_ONCE = 64  # documents that wait to be encoded, for each thread
PROGRESS = ".{}.npz"  # beside the new files: how far this split has come


@dataclasses.dataclass
class Output:
    """The keys of every prepare script."""

    out_dir: str | None = key(None, "where to write; None: beside this script")
    overwrite: bool = key(
        False, "write to a folder that holds another data set, or something else, too"
    )


# -- The folder ----------------------------------------------------------------------------------


def claim(config: Output, generator: str, version: int, **more) -> tuple[Path, dict]:
    """
    Makes the folder and marks it as a data set. Returns its Path and a dict for meta.json: the script
    (generator), its version, the seed, and "parameters": the keys that decide which data it makes,
    and `more`.

    Raises UserError where the folder is another kind of output and, unless overwrite, where it holds
    another data set or other files. A script's own folder under data/ may hold other files.
    """
    out_dir = Path(config.out_dir) if config.out_dir else (DATA.parent / generator).parent
    is_scripts = out_dir.resolve().parent == DATA and os.path.isfile(out_dir / "prepare.py")
    files.claim(out_dir, "data set", config.overwrite or is_scripts)
    keys = dataclasses.asdict(config)
    parameters = {name: value for name, value in keys.items() if name not in NO_PARAMETERS}
    about = {
        "generator": generator,
        "generator_version": version,
        "parameters": parameters | more,
        "seed": keys.get("seed", 0),
    }
    if not config.overwrite:
        refuse_another(out_dir, about)
    return out_dir, about


def refuse_another(out_dir: Path, about: dict) -> None:
    """Raises UserError, which names what differs, where the folder holds a data set that was made
    in another way."""
    try:
        there = read_meta(out_dir)
    except UserError:
        return  # there is no data set, or one that must be made again
    now = json.loads(json.dumps(about))  # as meta.json would give it back
    now |= now.pop("parameters")
    there |= there.pop("parameters")
    different = [name for name, value in now.items() if there.get(name) != value]
    if different:
        raise UserError(
            f"{out_dir}: holds another data set (another {', '.join(different)}); "
            "name another --out_dir, or add --overwrite=true, which replaces it"
        )


# -- Writing -------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_data_set(out_dir: Path | str, progress: str = "", **meta) -> Iterator[tuple[Path, dict]]:
    """Yields the folder for the new files, and what their meta.json is to hold, whose "splits" the
    caller adds. At the end they replace the old data set, and what was written is printed.
    progress: the name of a file in that folder. If it is there when the work fails, the folder
    stays, and a later call goes on."""
    meta = {"format": FORMAT, **meta}
    old: list[str] = []
    with contextlib.suppress(UserError):
        old = [entry["file"] for entry in files_of(read_meta(Path(out_dir)))]
    with files.new_folder(out_dir, "meta.json", old, progress) as folder:
        yield folder, meta
        files.write_text(folder / "meta.json", json.dumps(meta, indent=1) + "\n")
    for split, facts in meta["splits"].items():
        counts = [f"{n:,} {what}" for what, n in facts.items() if isinstance(n, int)]
        print(f"{split}: {', '.join(counts) or 'drawn anew for every step'}")
    print(f"written to {out_dir}: {meta['vocab_size']:,} ids")


def words_between_spaces(text: str) -> int:
    return len(text.split())


def write_stream(
    out_dir: Path | str,
    splits: dict[str, Iterable[str]],
    *,
    name: str,
    tokenizer,
    shard_tokens: int = 100_000_000,
    threads: int = 1,
    totals: dict[str, int] | None = None,
    count_words: Callable[[str], int] = words_between_spaces,
    **about,
) -> None:
    """Writes running text. Raises UserError.

    splits: {"train": documents, ...}. Nothing is put between documents. threads: how many are
    encoded side by side, since tokenizers and tiktoken let other threads run meanwhile; the data
    are the same for any number. totals: about how many documents a split without a length has, for
    the progress bar. about: what claim returned.

    After a stop, the same call goes on after the last whole shard: it reads the earlier documents
    again, but does not encode them.
    """
    about |= {"name": name, "tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    first = next(iter(splits))
    # one file decides whether the folder stays: if the first split has saved nothing, all begins anew
    with new_data_set(out_dir, PROGRESS.format(first), kind="stream", **about) as (folder, meta):
        made = json.dumps([meta, shard_tokens])  # what decides the files, beside the texts
        written = {}
        for split, texts in splits.items():
            writer = TextSplit(folder, split, tokenizer.vocab_size, shard_tokens, made)
            documents = iter(texts)
            resumes = writer.go_on(documents)  # moves past the documents that are written
            if not resumes and split == first:
                files.clear(folder)  # what is in it is of another call
            total = len(texts) if isinstance(texts, Sized) else (totals or {}).get(split)
            with bar(split, total, writer.facts["documents"]) as shown:
                for text, ids in encoded(documents, tokenizer, threads):
                    writer.add(text, ids, count_words(text))
                    shown.update()
            writer.finish()
            written[split] = writer.facts
        # the data set has a copy, so that it can be decoded wherever it lies
        if hasattr(tokenizer, "content"):
            (folder / TOKENIZER_FILE).write_bytes(tokenizer.content)
            meta["tokenizer_file"] = entry_of(folder / TOKENIZER_FILE)
        meta["splits"] = written
        files.clear(
            folder, {entry["file"] for entry in files_of(meta)}
        )  # what a call before has left


class LogFile:
    """Stands in for a terminal where standard error is not one: each state of a bar is a line."""

    def write(self, text: str) -> None:
        if text.strip():
            sys.stderr.write(f"{text.strip()}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def bar(what: str, total: int | None, done: int = 0) -> tqdm:
    """A bar of documents with the time left; a line every 30 s in a log file."""
    terminal = sys.stderr.isatty()
    return tqdm(
        desc=what,
        total=total,
        initial=done,
        unit=" documents",
        file=sys.stderr if terminal else LogFile(),
        mininterval=0.1 if terminal else 30,
        miniters=1,  # a document may take as long as a thousand others
    )


def encoded(texts: Iterator[str], tokenizer, threads: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (text, ids) of each text, in order."""
    waiting: collections.deque[tuple[str, Future]] = collections.deque()
    with ThreadPoolExecutor(threads) as pool:
        for text in texts:
            waiting.append((text, pool.submit(tokenizer.encode_array, text)))
            if len(waiting) == AT_ONCE * threads:
                first, ids = waiting.popleft()
                yield first, ids.result()
        while waiting:
            first, ids = waiting.popleft()
            yield first, ids.result()


class TextSplit:
    """A split of text while it is written. facts: its part of meta.json, for the documents so far.
    made: what decides the data; only a call that makes the same goes on."""

    def __init__(self, folder: Path, split: str, vocab_size: int, shard_tokens: int, made: str):
        self.folder = folder
        self.split = split
        self.dtype = dtype_of(vocab_size)
        self.shard_tokens = shard_tokens
        self.made = made
        self.progress = folder / PROGRESS.format(split)
        counts = dict.fromkeys(("documents", "words", "bytes", "tokens"), 0)
        self.facts: dict[str, Any] = {**counts, "document_offsets": {}, "shards": []}
        self.checksum = 0  # of the text
        self.offsets = array("q", [0])  # where the documents begin, then the length of the split
        self.waiting = array(self.dtype.char)  # tokens that no shard has yet

    def add(self, text: str, ids: np.ndarray, words: int) -> None:
        """Adds a document, and writes the shards that it fills."""
        content = text.encode()
        self.checksum = zlib.crc32(content, self.checksum)
        self.facts["documents"] += 1
        self.facts["words"] += words
        self.facts["bytes"] += len(content)
        self.facts["tokens"] += len(ids)
        self.offsets.append(self.facts["tokens"])
        self.waiting.frombytes(ids.astype(self.dtype).tobytes())
        if len(self.waiting) >= self.shard_tokens:
            while len(self.waiting) >= self.shard_tokens:
                self.save_next_shard()
            self.save_progress()

    def save_next_shard(self) -> None:
        """Writes a shard of the first shard_tokens tokens that wait."""
        tokens = np.array(self.waiting[: self.shard_tokens])
        del self.waiting[: self.shard_tokens]
        save_shard(self.folder, self.split, self.facts["shards"], tokens, tokens=len(tokens))

    def finish(self) -> None:
        """Writes the last shard and the borders of the documents. Raises UserError for a split
        without words."""
        if self.waiting:
            self.save_next_shard()
        if self.facts["words"] == 0:
            raise UserError(
                f"the {self.split} split would hold only white space; name more, or raise "
                "val_fraction"
            )
        file = self.folder / f"{self.split}_documents.npy"
        self.facts["document_offsets"] = save(file, np.array(self.offsets))

    def save_progress(self) -> None:
        """Writes what a later call needs to go on."""
        about = json.dumps([self.made, self.facts, self.checksum])
        arrays = {"offsets": np.array(self.offsets), "waiting": np.array(self.waiting)}
        files.write_whole(self.progress, lambda file: np.savez(file, about=about, **arrays))

    def go_on(self, texts: Iterator[str]) -> bool:
        """Takes up what a stopped call has saved, and moves `texts` past the documents in it. Returns
        False, and moves nothing, if nothing was saved, if the other call had another `made`, or if
        a shard is damaged. Raises UserError if the documents have changed since."""
        if not self.progress.is_file():
            return False
        with np.load(self.progress, allow_pickle=False) as saved:
            made, facts, checksum = json.loads(str(saved["about"]))
            offsets, waiting = saved["offsets"], saved["waiting"]
        if made != self.made or not all(is_whole(self.folder, entry) for entry in facts["shards"]):
            return False
        self.facts = facts
        self.offsets = array("q", offsets.tobytes())
        self.waiting.frombytes(waiting.tobytes())
        done = facts["documents"]
        with bar(f"{self.split}, read again", done) as shown:
            for text in itertools.islice(texts, done):
                self.checksum = zlib.crc32(text.encode(), self.checksum)
                shown.update()
        if self.checksum != checksum:
            raise UserError(
                f"{self.folder}: holds the first shards of another text, of a call that was "
                "stopped; remove this folder to begin again"
            )
        return True


def is_whole(folder: Path, entry: dict) -> bool:
    """Whether a file of a data set is there and has the sha256 of its entry."""
    file = folder / entry["file"]
    return file.is_file() and files.sha256_of_file(file) == entry["sha256"]


def write_examples(
    config: Output,
    generator: str,
    version: int,
    splits: dict[str, Any],
    *,
    name: str,
    vocab_size: int,
    tokenizer: str | None = None,
    kinds: dict[str, list[int]] | None = None,
    **more,
) -> None:
    """Claims the folder, as `claim` does, and writes separate examples. Raises UserError.

    splits: {"train": slices, ...}. slices: an iterable of pairs (examples (N, 2, T), facts for
    meta.json); facts["slice"] is the slice's name, such as "64/4". Where the rows of training are
    drawn, "train" has a dict in place of slices, which says how (DRAWN_SPLIT of data/meta.py).
    tokenizer: the name of what the ids mean; None: `name`. kinds: {name: ids}, queries that
    meters.py measures apart.
    """
    out_dir, about = claim(config, generator, version, **more)
    about |= {"name": name, "tokenizer": tokenizer or name, "vocab_size": vocab_size}
    if kinds:
        about["kinds"] = kinds
    kind = "drawn" if isinstance(splits["train"], dict) else "examples"
    written: dict = {}
    with new_data_set(out_dir, kind=kind, splits=written, **about) as (folder, _):
        for split, slices in splits.items():
            if isinstance(slices, dict):
                written[split] = {"drawn": slices, "shards": []}
            else:
                written[split] = write_rows_split(folder, split, slices, vocab_size)


def write_drawn(
    config: Any, generator: str, task: str, val: list[tuple], tokenizer: str | None = None
) -> None:
    """Writes a data set of a task of data/drawn.py, whose rows of training are drawn anew for every
    step. val: (tokens, labels), each (N, T), of each slice of validation; rows of training are as
    long as those of the first."""
    slices = []
    for tokens, labels in val:
        slices.append((np.stack([tokens, labels], axis=1), {"slice": str(tokens.shape[1])}))
    length = val[0][0].shape[1]
    how = {"task": task, "length": length, "seed": config.seed, "version": drawn.VERSION}
    write_examples(
        config,
        generator,
        drawn.VERSION,
        {"train": how, "val": slices},
        name=task,
        tokenizer=tokenizer,
        vocab_size=drawn.TASKS[task][2],
    )


def write_rows_split(folder: Path, split: str, slices: Iterable[tuple], vocab_size: int) -> dict:
    """Writes the shards of a split of examples, one for each slice. Returns its part of
    meta.json."""
    rows = 0
    tokens = 0
    labels = 0
    shards: list[dict] = []
    for examples, facts in slices:
        n, _, length = examples.shape
        if n and not 0 <= examples.min() <= examples.max() < vocab_size:
            ids = f"ids from {examples.min()} to {examples.max()}"
            raise UserError(f"the {split} split has {ids}, and vocab_size={vocab_size}")
        rows += n
        tokens += n * length
        labels += int(np.count_nonzero(examples[:, 1]))  # on disk 0 is no label
        examples = examples.astype(dtype_of(vocab_size), copy=False)
        about = {"rows": n, "seq_len": length, "tokens": n * length}
        save_shard(folder, split, shards, examples, **about, **facts)
    if labels == 0:
        raise UserError(f"the {split} split would hold no label: nothing to predict")
    return {"rows": rows, "tokens": tokens, "labels": labels, "shards": shards}


def save_shard(folder: Path, split: str, shards: list[dict], values, **facts) -> None:
    """Writes the shard after these (train_0000.npy, train_0001.npy, ...), and adds its entry."""
    shards.append(save(folder / f"{split}_{len(shards):04d}.npy", values) | facts)


def save(path: Path, values) -> dict:
    """Writes an array to a .npy file. Returns the file's entry in meta.json."""
    np.save(path, np.ascontiguousarray(values))
    return entry_of(path)


def entry_of(path: Path) -> dict:
    return {"file": path.name, "sha256": files.sha256_of_file(path), "bytes": path.stat().st_size}


# -- Which texts ---------------------------------------------------------------------------------


def fitting(sizes: dict, names: Iterable, room: float) -> list:
    """Goes through the names in their order, and takes each whose size fits into what is left of
    `room`."""
    taken = []
    for name in names:
        if sizes[name] <= room:
            taken.append(name)
            room -= sizes[name]
    return taken
