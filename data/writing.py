"""
Writing a data set. A prepare script claims its folder, and then writes a stream or examples:

    out_dir, about = claim(config, "data/text/prepare.py", VERSION)
    meta = write_stream(out_dir, {"train": texts, "val": texts}, name="text", tokenizer=tokenizer, **about)
    report(meta, out_dir)

The new files replace those of the old data set when all of them are complete: a script that fails
leaves the old one as it was. A script that is killed while they take their places leaves a folder
that is refused. data/meta.py describes the files.
"""

import contextlib
import dataclasses
import json
import os
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from base import files
from base.files import DATA, read_json
from base.rules import show, wrong_field
from configurator import UserError, key
from data.meta import FILE_NAME, FORMAT, dtype_of, files_of, read_meta
from data.tokenizer import TOKENIZER_FILE

# the keys of prepare scripts that do not decide which data they make
NO_PARAMETERS = ("from_dir", "from_file", "out_dir", "overwrite", "threads")
# what tells how a data set was made
MADE_BY: dict = {
    "generator": object,
    "generator_version": object,
    "parameters": (dict, 0, 1 << 20),
}


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
    Marks the folder as a data set. Returns its Path, and how a script, the generator, makes the
    data, for meta.json: parameters are the keys that decide which data it makes, and `more`.

    Raises UserError, unless overwrite, where the folder holds another data set or something else.
    The folder of a script under data/ needs no mark.
    """
    out_dir = Path(config.out_dir) if config.out_dir else (DATA.parent / generator).parent
    is_scripts = out_dir.resolve().parent == DATA and os.path.isfile(out_dir / "prepare.py")
    is_marked = os.path.isfile(out_dir / files.MARKER)
    if is_scripts or is_marked:  # files.claim refuses any other
        check_files(out_dir, config.overwrite)
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


def names_of_old(folder: Path) -> list[str]:
    """The names of the files of the data set that is in the folder, but for meta.json. Where that
    file is damaged, or a kill has left none, they are all files with the name of a shard, if the
    folder has our mark."""
    with contextlib.suppress(UserError):
        return [entry["file"] for entry in files_of(read_meta(folder))]
    is_ours = os.path.isfile(folder / files.MARKER)
    is_damaged = os.path.isfile(folder / "meta.json")
    was_killed = os.path.isfile(folder / files.NEW / files.MARKER)
    if is_ours and (is_damaged or was_killed):
        return names_of_shards(folder)
    return []


def names_of_shards(folder: Path) -> list[str]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name for name in names if FILE_NAME.fullmatch(name))


def check_files(folder: Path, overwrite: bool) -> None:
    """Raises UserError, before any work, for a file that the new data set would replace and that is
    not of the old one, and for a folder or a device in its place. With overwrite a file may be
    replaced, and nothing else."""
    ours = names_of_old(folder)
    strangers = [name for name in names_of_shards(folder) if name not in ours]
    files.check_inside(folder, ["meta.json", *ours, *strangers])
    has_meta = os.path.lexists(folder / "meta.json")
    if has_meta and not os.path.isfile(folder / files.MARKER):
        try:
            read_meta(folder)
        except UserError:
            strangers.append("meta.json")
    if strangers and not overwrite:
        raise UserError(
            f"{folder}: {strangers[0]} is no file of the data set there, and may be replaced; move it away, or add "
            "--overwrite=true"
        )


def refuse_another(out_dir: Path, about: dict) -> None:
    """Raises UserError, which names what differs, where the folder holds a data set that was made
    in another way."""
    try:
        meta = read_json(out_dir / "meta.json")
    except UserError:
        return  # there is no data set, or one that must be made again
    if wrong_field(meta, MADE_BY):
        return
    there = flat(meta)
    now = flat(json.loads(json.dumps(about)))  # as meta.json would give it back
    differing = [name for name in now | there if there.get(name) != now.get(name)]
    if differing:
        values = []
        for name in differing[:3]:
            values.append(f"{name}={show(there.get(name))} there, {show(now.get(name))} now")
        raise UserError(
            f"{out_dir}: holds another data set ({'; '.join(values)}); name another --out_dir, or add "
            "--overwrite=true, which replaces it"
        )


def flat(meta: dict) -> dict:
    """{name: value} of the script, its version and its parameters in a meta.json. A parameter that
    is a dict, as that of the texts of WikiText-103, is taken apart: text.train.sha256."""
    found = {name: meta[name] for name in ("generator", "generator_version")}
    waiting = list(meta["parameters"].items())
    while waiting:
        name, value = waiting.pop(0)
        if isinstance(value, dict):
            inner = [(f"{name}.{inner_name}", part) for inner_name, part in value.items()]
            waiting = inner + waiting
        else:
            found[name] = value
    return found


# -- Writing -------------------------------------------------------------------------------------


def encode(text: str, tokenizer, count_words: Callable[[str], int] | None = None) -> tuple:
    """((words, bytes, tokens), ids) of a document. count_words=None: words stand between spaces."""
    ids = tokenizer.encode_array(text)
    words = count_words(text) if count_words else len(text.split())
    return (words, len(text.encode()), len(ids)), ids


def write_stream(
    out_dir: Path | str,
    splits: dict[str, Iterable],
    *,
    name: str,
    tokenizer,
    shard_tokens: int = 100_000_000,
    **about,
) -> dict:
    """Writes running text and returns the content of meta.json. Raises UserError.

    splits: {"train": documents, ...}, each an iterable of str, or of what `encode` returned.
    Nothing is put between them. about: what claim returned.
    """
    meta = {
        "format": FORMAT,
        "kind": "stream",
        "name": name,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        **about,
    }
    with files.new_folder(out_dir, "meta.json", names_of_old(Path(out_dir))) as folder:
        written = {}
        for split, documents in splits.items():
            written[split] = write_text_split(folder, split, documents, tokenizer, shard_tokens)
        # the data set has a copy, so that it can be decoded wherever it lies
        if hasattr(tokenizer, "content"):
            file = folder / TOKENIZER_FILE
            files.write_whole(file, lambda opened: opened.write(tokenizer.content))
            meta["tokenizer_file"] = entry_of(file)
        meta["splits"] = written
        write_meta(folder, meta)
    return meta


def write_text_split(
    folder: Path, split: str, documents: Iterable, tokenizer, shard_tokens: int
) -> dict:
    """Writes the shards of a split of text. Returns its part of meta.json."""
    shards: list[dict] = []
    counts = []  # of each document
    tokens = array(dtype_of(tokenizer.vocab_size).char)  # those that no shard has yet
    for document in documents:
        if isinstance(document, str):
            document = encode(document, tokenizer)
        of_document, ids = document
        counts.append(of_document)
        tokens.frombytes(ids.tobytes())
        while len(tokens) >= shard_tokens:
            file = shard_file(folder, split, shards)
            shards.append(save(file, tokens[:shard_tokens]) | {"tokens": shard_tokens})
            del tokens[:shard_tokens]
    if tokens:
        file = shard_file(folder, split, shards)
        shards.append(save(file, tokens) | {"tokens": len(tokens)})
    table = np.array(counts, np.int64).reshape(-1, 3)  # words, bytes, tokens
    words, n_bytes, n_tokens = table.sum(0).tolist()
    if words == 0:
        raise UserError(
            f"the {split} split would hold only white space; name more, or raise val_fraction"
        )
    offsets = np.concatenate([[0], table[:, 2].cumsum()])
    return {
        "documents": len(counts),
        "words": words,
        "bytes": n_bytes,
        "tokens": n_tokens,
        "document_offsets": save(folder / f"{split}_documents.npy", offsets),
        "shards": shards,
    }


def write_examples(
    out_dir: Path | str,
    splits: dict[str, Iterable[tuple]],
    *,
    name: str,
    tokenizer: str,
    vocab_size: int,
    drawn: dict | None = None,
    **about,
) -> dict:
    """Writes separate examples and returns the content of meta.json. Raises UserError.

    splits: {"train": slices, ...}, an iterable of (examples (N, 2, T), facts for meta.json) each,
    where facts["slice"] is a name such as "64/4". drawn: how the rows of training are drawn
    (DRAWN_SPLIT of data/meta.py), if they are; `splits` then has no "train". about: what claim
    returned, and kinds={name: ids}, queries that meters.py measures apart.
    """
    meta = {
        "format": FORMAT,
        "kind": "drawn" if drawn else "examples",
        "name": name,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        **about,
    }
    written: dict = {"train": {"drawn": drawn, "shards": []}} if drawn else {}
    with files.new_folder(out_dir, "meta.json", names_of_old(Path(out_dir))) as folder:
        for split, slices in splits.items():
            written[split] = write_rows_split(folder, split, slices, vocab_size)
        meta["splits"] = written
        write_meta(folder, meta)
    return meta


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
        labels += int(np.count_nonzero(examples[:, 1]))
        file = shard_file(folder, split, shards)
        entry = save(file, examples.astype(dtype_of(vocab_size), copy=False))
        shards.append(entry | {"rows": n, "seq_len": length, "tokens": n * length} | facts)
    if labels == 0:
        raise UserError(f"the {split} split would hold no label: nothing to predict")
    return {"rows": rows, "tokens": tokens, "labels": labels, "shards": shards}


def shard_file(folder: Path, split: str, shards: list[dict]) -> Path:
    """The path of the shard behind these: train_0000.npy, train_0001.npy, ..."""
    return folder / f"{split}_{len(shards):04d}.npy"


def save(path: Path, values) -> dict:
    """Writes an array to a .npy file. Returns the file's entry in meta.json."""
    contiguous = np.ascontiguousarray(values)
    files.write_whole(path, lambda file: np.save(file, contiguous))
    return entry_of(path)


def entry_of(path: Path) -> dict:
    return {"file": path.name, "sha256": files.sha256_of_file(path), "bytes": path.stat().st_size}


def write_meta(folder: Path, meta: dict) -> None:
    files.write_text(folder / "meta.json", json.dumps(meta, indent=1) + "\n")


def report(meta: dict, out_dir: Path | str) -> None:
    """Prints the counts of every split, and where the data set lies: the end of a prepare
    script."""
    for split, facts in meta["splits"].items():
        counts = [f"{n:,} {what}" for what, n in facts.items() if isinstance(n, int)]
        print(f"{split}: {', '.join(counts) or 'drawn anew for every step'}")
    print(f"written to {out_dir}: {meta['vocab_size']:,} ids")


# -- Which texts ---------------------------------------------------------------------------------


def fitting(sizes: dict, room: float) -> list:
    """In the order given, each name of {name: size} that keeps the sum of the sizes taken at or
    below room."""
    taken = []
    for name, size in sizes.items():
        if size <= room:
            taken.append(name)
            room -= size
    return taken
