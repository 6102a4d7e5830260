"""
Writing a data set: the shards first, meta.json last, in the folder .new until all files are complete.

    write_stream(folder, {"train": documents, "val": documents}, tokenizer=get_tokenizer("byte"), **about)
    write_examples(folder, {"train": [(examples, facts)], "val": [(examples, facts)]}, vocab_size=64, **about)

The new files replace those of the old data set when they are complete: a prepare script that fails or is killed leaves
the old data set as it was. data/shards.py describes the files, and opens them.

A prepare script loads its keys, makes the text or the rows, claims its folder, writes and reports:

    out_dir = claim(config.out_dir, config.overwrite, GENERATOR)
    meta = write_stream(out_dir, splits, tokenizer=tokenizer, name="text", **made_by(config, GENERATOR, VERSION))
    report(meta, out_dir)
"""

import configurator
from configurator import UserError, show

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import re
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data.shards import DATA, FORMAT, MAX_VOCAB, MOST_META, PARAMETERS, dtype_of
from data.tokenizer import MOST_TOKENIZER, TOKENIZER_FILE
from rules import wrong_field
from runs import files
from runs.files import read_json, write_whole
from runs.limits import disk_free, ram_available, show_bytes

OURS = re.compile(r"\w{1,80}_(\d{4,9}|documents)\.npy")  # the names of shards and offsets


# ----------------------------------------------------------------------------------------------------------------------
# The steps of a prepare script


def check_room(out_dir: Path | str | None, memory: int, disk: int, what: str, keys: str) -> None:
    """Raises UserError if less than that many bytes of memory or of disk are left, before anything is computed.

    what: the rows, in words, which take `disk` bytes; keys: what the user may lower.
    """
    ram, where = ram_available()
    out_dir = out_dir or DATA
    for need, available, place in ((memory, ram, where), (disk, disk_free(out_dir), f"the disk of {out_dir}")):
        if need > available:
            raise UserError(
                f"about {show_bytes(need)} would be needed, and {place} has {show_bytes(available)} left: "
                f"{what} are {show_bytes(disk)}; lower {keys}"
            )


def claim(out_dir: Path | str | None, overwrite: bool, generator: str) -> Path:
    """Marks the folder as a data set, and returns its Path. UserError where it holds something else, unless overwrite.

    Three kinds of folder need no mark: a data set of an older version, a script's own folder under data/, and a folder
    that holds nothing but a lock and what a stopped script has left in .new. generator: the script that asks; the data
    set of another script is something else. out_dir=None is the folder of the script.
    """
    out_dir = Path(out_dir or DATA.parent / os.path.dirname(generator))
    meta = _meta_of(out_dir)
    if meta.get("generator") not in (None, generator) and not overwrite:
        what = f"{out_dir}: holds the data set of {show(meta['generator'])}"
        raise UserError(f"{what}; name another --out_dir, or add --overwrite=true, which replaces it")
    with contextlib.suppress(OSError):  # files.claim meets the same error and reports it
        is_scripts = os.path.dirname(os.path.realpath(out_dir)) == str(DATA) and (out_dir / "prepare.py").is_file()
        overwrite = overwrite or is_scripts or bool(_named_in(meta)) or set(os.listdir(out_dir)) <= {"lock", files.NEW}
    files.claim(out_dir, "data set", overwrite)
    return out_dir


def made_by(config, generator: str, version: int, **more) -> dict:
    """How a script made its data, for meta.json: its name, version and seed, and as parameters the keys that decide
    which data it makes, all but those about folders and threads, and `more`."""
    keys, about_folders = dataclasses.asdict(config), ("from_dir", "out_dir", "overwrite", "workers")
    parameters = {name: value for name, value in keys.items() if name not in about_folders} | more
    return dict(generator=generator, generator_version=version, parameters=parameters, seed=keys.get("seed", 0))


def fitting(sizes: dict, room: float) -> list:
    """In the order given, each name of {name: size} that keeps the sum of the sizes taken at or below room."""
    taken = []
    for name, size in sizes.items():
        if size <= room:
            taken.append(name)
            room -= size
    return taken


def report(meta: dict, out_dir: Path | str) -> None:
    """Prints the counts of every split, and where the data set lies: the end of a prepare script."""
    for split, facts in meta["splits"].items():
        counts = ", ".join(f"{value:,} {name}" for name, value in facts.items() if isinstance(value, int))
        print(f"{split}: {counts}")
    print(f"written to {out_dir}")


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def write_stream(
    out_dir: Path | str,
    splits: dict[str, Iterable[str]],
    *,
    tokenizer,
    shard_tokens: int = 100_000_000,
    workers: int = 1,
    count_words: Callable[[str], int] = lambda text: len(text.split()),
    check: Callable[[str, dict], object] = lambda split, counts: None,
    **about,
) -> dict:
    """
    Writes running text and returns the content of meta.json. `splits` is {"train": documents, ...}, an iterable of str
    each; `tokenizer` is one of data/tokenizer.py. Documents are joined with nothing in between; the offset of each is
    stored.

    workers: how many threads encode
    check(split, counts): is called when a split is written; if it raises UserError, no meta.json is written
    about: the other keywords of _write_meta
    """

    def encode(text):
        return tokenizer.encode_array(text), count_words(text), len(text.encode())

    about |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    dtype = dtype_of(tokenizer.vocab_size)
    with _new_folder(out_dir, tokenizer.vocab_size) as folder:
        written = {}
        for split, documents in splits.items():
            shards, counts, tokens = [], [], array(np.dtype(dtype).char)
            for ids, n_words, n_bytes in _map_in_threads(encode, documents, workers):
                counts.append((len(ids), n_words, n_bytes))
                tokens.frombytes(ids.tobytes())
                while len(tokens) >= shard_tokens:
                    shards.append(_save_shard(folder, split, len(shards), tokens[:shard_tokens], dtype))
                    del tokens[:shard_tokens]
            if tokens:
                shards.append(_save_shard(folder, split, len(shards), tokens, dtype))
            if not shards:
                raise UserError(f"the {split} split would hold no text")
            n_tokens, n_words, n_bytes = (sum(column) for column in zip(*counts, strict=True))
            total = {"documents": len(counts), "words": n_words, "bytes": n_bytes, "tokens": n_tokens}
            if not n_words:
                raise UserError(f"the {split} split would hold nothing but white space")
            check(split, total)
            offsets = np.cumsum([0] + [length for length, _, _ in counts], dtype=np.int64)
            saved = _save(folder / f"{split}_documents.npy", lambda file, offsets=offsets: np.save(file, offsets))
            written[split] = total | {"document_offsets": saved, "shards": shards}
        if hasattr(tokenizer, "file"):  # the data set has a copy, so that it can be decoded wherever it lies
            content = configurator.read_regular(tokenizer.file, MOST_TOKENIZER)
            about["tokenizer_file"] = _save(folder / TOKENIZER_FILE, lambda file: file.write(content))
        return _write_meta(folder, written, kind="stream", **about)


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
                examples = np.asarray(examples)
                if examples.size and not 0 <= examples.min() <= examples.max() < vocab_size:
                    ids = f"ids from {examples.min()} to {examples.max()}"
                    raise UserError(f"the {split} split has {ids}, and vocab_size={vocab_size}")
                labels += int(np.count_nonzero(examples[:, 1]))
                shards.append(_save_shard(folder, split, len(shards), examples, dtype_of(vocab_size)) | facts)
            if not labels:
                raise UserError(f"the {split} split would hold no label: nothing to predict")
            rows, tokens = sum(shard["rows"] for shard in shards), sum(shard["tokens"] for shard in shards)
            written[split] = {"rows": rows, "tokens": tokens, "labels": labels, "shards": shards}
        return _write_meta(folder, written, kind="examples", vocab_size=vocab_size, **about)


def _map_in_threads(function, items, workers):
    """map(function, items). Threads are enough: tiktoken releases the GIL."""
    if workers == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        waiting = collections.deque()  # a few for each thread, so that no whole split is in memory
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextlib.contextmanager
def _new_folder(out_dir, vocab_size):
    """A folder to write to. At the end its files replace those of the data set in out_dir. Raises UserError."""
    if vocab_size > MAX_VOCAB:
        raise UserError(f"vocabulary of {vocab_size}: a shard holds ids below {MAX_VOCAB}")
    with files.new_folder(out_dir) as new:
        yield new
        old, written = _named_in(_meta_of(Path(out_dir))), _named_in(_meta_of(new))
        gone = [name for name in old - written if OURS.fullmatch(name)]  # a stranger's meta.json may name any file
        files.switch(out_dir, [*gone, *sorted(written - {"meta.json"}), "meta.json"])


def _meta_of(folder):
    """The content of the meta.json of a data set; {} where there is none of our format."""
    try:
        meta = read_json(folder / "meta.json", MOST_META)
    except UserError:
        return {}
    return meta if isinstance(meta, dict) and meta.get("format") == FORMAT else {}


def _named_in(meta):
    """The names of the files of a data set, meta.json among them; none where its meta.json is damaged."""
    try:
        entries = [meta.get("tokenizer_file", {})]
        for facts in meta["splits"].values():
            entries += [*facts["shards"], facts.get("document_offsets", {})]
        return {"meta.json", *(entry["file"] for entry in entries if isinstance(entry.get("file"), str))}
    except (LookupError, TypeError, AttributeError):
        return set()


def _save_shard(folder, split, number, values, dtype):
    values = np.asarray(values, dtype)
    shape = {"rows": len(values), "seq_len": values.shape[2]} if values.ndim == 3 else {}
    saved = _save(folder / f"{split}_{number:04d}.npy", lambda file: np.save(file, values, allow_pickle=False))
    return saved | shape | {"tokens": len(values) * shape.get("seq_len", 1)}


def _save(path, write):
    """write_whole. Returns the entry of the file in meta.json."""
    write_whole(path, write)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"file": path.name, "sha256": digest, "bytes": file.tell()}


def _write_meta(
    folder, splits, *, kind, name, tokenizer, vocab_size, generator, generator_version, parameters, seed, kinds=None,
    tokenizer_file=None,
):  # fmt: skip
    """`generator` is the script that made the data and `parameters` are its keys; with the seed they reproduce it."""
    if wrong := wrong_field(parameters, PARAMETERS[kind], "parameters"):
        raise UserError(f"{wrong}; a reader takes its meaning from there, so use another name for yours")
    meta = {"format": FORMAT, "kind": kind, "name": name, "tokenizer": tokenizer, "vocab_size": vocab_size}
    meta |= {"generator": generator, "generator_version": generator_version, "parameters": parameters, "seed": seed}
    meta |= {"kinds": kinds} if kinds else {}
    meta |= {"tokenizer_file": tokenizer_file} if tokenizer_file else {}
    text = json.dumps(meta | {"splits": splits}, indent=1) + "\n"
    write_whole(folder / "meta.json", lambda file: file.write(text.encode()))
    return json.loads(text)
