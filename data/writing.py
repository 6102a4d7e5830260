"""
Writing a data set. The new files replace those of the old one when all of them are complete: a prepare script that
fails or is killed leaves the old data set as it was. data/shards.py describes the files, and opens them.

A prepare script loads its keys, makes the text or the rows, claims its folder, writes and reports:

    out_dir = claim(config.out_dir, config.overwrite, GENERATOR)
    meta = write_stream(out_dir, splits, tokenizer=tokenizer, name="text", **made_by(config, GENERATOR, VERSION))
    report(meta, out_dir)
"""

from configurator import UserError, read_regular

import contextlib
import dataclasses
import hashlib
import itertools
import json
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data.shards import DATA, FORMAT, META, dtype_of, npy_files, read_meta
from data.tokenizer import MOST_TOKENIZER, TOKENIZER_FILE
from rules import show, wrong_field
from runs import files
from runs.limits import ram_available, show_bytes

# ----------------------------------------------------------------------------------------------------------------------
# The steps of a prepare script


def check_room(size: int, keys: str) -> None:
    """Raises UserError if less than that many bytes of memory are left. keys: what the user may lower."""
    available, where = ram_available()
    if size > available:
        left = show_bytes(available)
        raise UserError(f"about {show_bytes(size)} would be needed, and {where} has {left} left; lower {keys}")


def claim(out_dir: Path | str | None, overwrite: bool, generator: str) -> Path:
    """Marks the folder as a data set, and returns its Path. UserError where it holds something else, unless overwrite.

    generator: the script that asks; the data set of another script is something else. The folder of a script under
    data/ needs no mark; out_dir=None is that of the script itself.
    """
    out_dir = Path(out_dir) if out_dir else (DATA.parent / generator).parent
    other = _old_meta(out_dir).get("generator", generator)
    if other != generator and not overwrite:
        advice = "name another --out_dir, or add --overwrite=true, which replaces it"
        raise UserError(f"{out_dir}: holds the data set of {show(other)}; {advice}")
    is_scripts = out_dir.resolve().parent == DATA and (out_dir / "prepare.py").is_file()
    files.claim(out_dir, "data set", overwrite or is_scripts)
    return out_dir


def made_by(config, generator: str, version: int, **more) -> dict:
    """How a script made its data, for meta.json. parameters: the keys that decide which data it makes, and `more`."""
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
    Writes running text and returns the content of meta.json. Raises UserError.

    splits: {"train": documents, ...}, an iterable of str each; they are joined with nothing in between
    tokenizer: one of data/tokenizer.py; workers: how many threads encode
    check(split, counts): is called when a split is written; if it raises UserError, no meta.json is written
    about: the other keywords of _write_meta
    """

    def encode(text):
        return tokenizer.encode_array(text), count_words(text), len(text.encode())

    dtype, written = dtype_of(tokenizer.vocab_size), {}
    with _new_folder(out_dir) as folder:
        for split, documents in splits.items():
            shards, counts, tokens = [], [], array(dtype.char)
            for ids, n_words, n_bytes in _in_threads(encode, documents, workers):
                counts.append((n_words, n_bytes, len(ids)))
                tokens.frombytes(ids.tobytes())
                while len(tokens) >= shard_tokens:
                    shards.append(_save_shard(folder, split, len(shards), tokens[:shard_tokens], dtype))
                    del tokens[:shard_tokens]
            if tokens:
                shards.append(_save_shard(folder, split, len(shards), tokens, dtype))
            table = np.array(counts, np.int64).reshape(-1, 3)
            n_words, n_bytes, n_tokens = table.sum(0).tolist()
            total = {"documents": len(counts), "words": n_words, "bytes": n_bytes, "tokens": n_tokens}
            if not n_words:
                raise UserError(f"the {split} split would hold no text, or nothing but white space")
            check(split, total)
            saved = _save(folder / f"{split}_documents.npy", np.concatenate([[0], table[:, 2].cumsum()]))
            written[split] = total | {"document_offsets": saved, "shards": shards}
        if hasattr(tokenizer, "file"):  # the data set has a copy, so that it can be decoded wherever it lies
            about["tokenizer_file"] = _save(folder / TOKENIZER_FILE, read_regular(tokenizer.file, MOST_TOKENIZER))
        about |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
        return _write_meta(folder, written, kind="stream", **about)


def write_examples(out_dir: Path | str, splits: dict[str, Iterable[tuple]], *, vocab_size: int, **about) -> dict:
    """
    Writes separate examples and returns the content of meta.json. Raises UserError.

    splits: {"train": slices, ...}, an iterable of (examples (N, 2, T), facts) each. The facts go to meta.json; one of
        them is the name of the "slice", such as "64/4"
    about: the other keywords of _write_meta; kinds={name: token ids} are queries that meters.py measures apart
    """
    written = {}
    with _new_folder(out_dir) as folder:
        for split, slices in splits.items():
            shards, labels = [], 0
            for examples, facts in slices:
                if examples.size and not 0 <= examples.min() <= examples.max() < vocab_size:
                    ids = f"ids from {examples.min()} to {examples.max()}"
                    raise UserError(f"the {split} split has {ids}, and vocab_size={vocab_size}")
                labels += int(np.count_nonzero(examples[:, 1]))
                shards.append(_save_shard(folder, split, len(shards), examples, dtype_of(vocab_size)) | facts)
            if not labels:
                raise UserError(f"the {split} split would hold no label: nothing to predict")
            counts = {name: sum(shard[name] for shard in shards) for name in ("rows", "tokens")}
            written[split] = counts | {"labels": labels, "shards": shards}
        return _write_meta(folder, written, kind="examples", vocab_size=vocab_size, **about)


def _in_threads(function, items, workers):
    """Yields function(item) of each in order. Threads are enough: tiktoken releases the GIL."""
    items = iter(items)
    with ThreadPoolExecutor(workers) as pool:
        while block := list(itertools.islice(items, 4 * workers)):  # so that no whole split is in memory
            yield from pool.map(function, block)


@contextlib.contextmanager
def _new_folder(out_dir):
    """A folder to write to. At the end its files replace those of the data set in out_dir. Raises UserError."""
    with files.new_folder(out_dir) as new:
        yield new
        old = {entry["file"] for entry in npy_files(_old_meta(Path(out_dir)))}
        written = {file.name for file in new.iterdir()} - {"lock", "meta.json"}
        files.switch(out_dir, [*(old - written), *sorted(written), "meta.json"])


def _old_meta(folder):
    """The content of the meta.json in a folder, or that of an empty data set where there is none that can be read."""
    try:
        return read_meta(folder)
    except UserError:
        return {"splits": {}}


def _save_shard(folder, split, number, values, dtype):
    values = np.ascontiguousarray(values, dtype)
    shape = {"rows": len(values), "seq_len": values.shape[2]} if values.ndim == 3 else {}
    tokens = len(values) * shape.get("seq_len", 1)
    return _save(folder / f"{split}_{number:04d}.npy", values) | shape | {"tokens": tokens}


def _save(path, content):
    """Writes an array, or bytes as they are. Returns the entry of the file in meta.json."""
    is_array = isinstance(content, np.ndarray)
    files.write_whole(path, lambda file: np.save(file, content) if is_array else file.write(content))
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"file": path.name, "sha256": digest, "bytes": file.tell()}


def _write_meta(
    folder, splits, *, kind, name, tokenizer, vocab_size, generator, generator_version, parameters, seed, **more
):
    """`generator` is the script that made the data and `parameters` are its keys; with the seed they reproduce it."""
    meta = {"format": FORMAT, "kind": kind, "name": name, "tokenizer": tokenizer, "vocab_size": vocab_size}
    meta |= {"generator": generator, "generator_version": generator_version, "parameters": parameters, "seed": seed}
    text = json.dumps(meta | more | {"splits": splits}, indent=1) + "\n"
    meta = json.loads(text)
    if wrong := wrong_field(meta, META[kind]):
        raise UserError(f"{wrong}; a reader takes its meaning from there, so use another name for yours")
    files.write_text(folder / "meta.json", text)
    return meta
