"""
Writing a data set: the shards first, meta.json last, in the folder .new until all files are complete.

    write_stream(folder, {"train": documents, "val": documents}, tokenizer=get_tokenizer("byte"), **about)
    write_examples(folder, {"train": [(examples, facts)], "val": [(examples, facts)]}, vocab_size=64, **about)

The new files replace those of the old data set when they are complete: a prepare script that fails or is killed leaves
the old data set as it was. data/shards.py describes the files, and opens them.
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data.shards import DATA, FORMAT, MAX_VOCAB, MOST_META, PARAMETERS, dtype_of
from data.tokenizer import MOST_TOKENIZER, TOKENIZER_FILE
from runs import files
from runs.files import read_json, write_whole, wrong_field
from runs.limits import disk_free, ram_available, show_bytes

OURS = re.compile(r"\w{1,80}_(\d{4,9}|documents)\.npy")  # the names that _save_shard and write_stream give


def claim(out_dir: Path | str, overwrite: bool, generator: str) -> Path:
    """Marks the folder as a data set, and returns its Path. UserError where it holds something else, unless overwrite.

    Three kinds of folder need no mark: a data set of an older version, a script's own folder under data/, and a folder
    that holds nothing but a lock and what a stopped script has left in .new. generator: the script that asks; the data
    set of another script is something else.
    """
    out_dir = Path(out_dir)
    found = _generator_of(out_dir)
    if found not in (None, generator) and not overwrite:
        what = f"{out_dir}: holds the data set of {show(found)}"
        raise UserError(f"{what}; name another --out_dir, or add --overwrite=true, which replaces it")
    with contextlib.suppress(OSError):  # files.claim meets the same error and reports it
        is_scripts = os.path.dirname(os.path.realpath(out_dir)) == str(DATA) and (out_dir / "prepare.py").is_file()
        overwrite = overwrite or is_scripts or bool(_listed(out_dir)) or set(os.listdir(out_dir)) <= {"lock", files.NEW}
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


def _generator_of(folder):
    """The script that made the data set in a folder, or None."""
    try:
        meta = read_json(folder / "meta.json", MOST_META)
    except UserError:
        return None
    return meta.get("generator") if isinstance(meta, dict) and meta.get("format") == FORMAT else None


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
def _new_folder(out_dir, vocab_size):
    """A folder to write to. At the end its files replace those of the data set in out_dir. Raises UserError."""
    if vocab_size > MAX_VOCAB:
        raise UserError(f"vocabulary of {vocab_size}: a shard holds ids below {MAX_VOCAB}")
    with files.new_folder(out_dir) as new:
        yield new
        old, written = _listed(Path(out_dir)), _listed(new)
        gone = [name for name in old - written if OURS.fullmatch(name)]  # a stranger's meta.json may name any file
        files.switch(out_dir, [*gone, *sorted(written - {"meta.json"}), "meta.json"])


def write_stream(
    out_dir: Path | str,
    splits: dict[str, Iterable[str]],
    *,
    tokenizer,
    shard_tokens: int = 100_000_000,
    workers: int = 1,
    count_words: Callable[[str], int] | None = None,
    check: Callable[[str, dict], object] | None = None,
    **about,
) -> dict:
    """
    Writes running text and returns the content of meta.json. `splits` is {"train": documents, ...}, an iterable of str
    each; `tokenizer` is one of data/tokenizer.py. Documents are joined with nothing in between; the offset of each is
    stored.

    workers: how many threads encode
    count_words(text): counts words differently than len(text.split())
    check(split, counts): is called when a split is written; if it raises UserError, no meta.json is written
    about: the other keywords of _write_meta
    """
    about |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    dtype = dtype_of(tokenizer.vocab_size)
    with _new_folder(out_dir, tokenizer.vocab_size) as folder:
        written = {}
        for split, documents in splits.items():
            shards, counts, tokens = [], [], array(np.dtype(dtype).char)
            for ids, words, n_bytes in _encode(documents, tokenizer, workers, count_words or _count_words):
                counts.append((len(ids), words, n_bytes))
                tokens.frombytes(ids.tobytes())
                while len(tokens) >= shard_tokens:
                    shards.append(_save_shard(folder, split, len(shards), tokens[:shard_tokens], dtype))
                    del tokens[:shard_tokens]
            if tokens:
                shards.append(_save_shard(folder, split, len(shards), tokens, dtype))
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
    if wrong := wrong_field(parameters, PARAMETERS[kind], "parameters"):
        raise UserError(f"{wrong}; a reader takes its meaning from there, so use another name for yours")
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
