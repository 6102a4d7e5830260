"""
Writing a data set. The new files replace those of the old one when all of them are complete: a
prepare script that fails leaves the old data set as it was. One that is killed while they take
their places leaves a folder that is refused. data/shards.py describes the files, and opens them.
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
from base.rules import show
from configurator import UserError, key
from data.shards import FORMAT, SHARD_NAME, dtype_of, files_of, read_meta
from data.tokenizer import TOKENIZER_FILE


@dataclasses.dataclass
class Output:
    """The keys of every prepare script."""

    out_dir: str | None = key(None, "where to write; None: beside this script")
    overwrite: bool = key(
        False, "write to a folder that holds another data set, or something else, too"
    )


def claim(config: Output, generator: str, version: int, **more) -> tuple[Path, dict]:
    """Marks the folder as a data set. Returns its Path, and how a script, the generator, makes the
    data, for meta.json: parameters are the keys that decide which data it makes, and `more`.
    UserError where the folder holds another data set or something else, unless overwrite. That of a
    script under data/ needs no mark."""
    out_dir = Path(config.out_dir) if config.out_dir else (DATA.parent / generator).parent
    is_scripts = out_dir.resolve().parent == DATA and os.path.isfile(out_dir / "prepare.py")
    if is_scripts or os.path.isfile(out_dir / files.MARKER):  # or claim refuses it
        check_files(out_dir, config.overwrite)
    files.claim(out_dir, "data set", config.overwrite or is_scripts)
    keys, others = (
        dataclasses.asdict(config),
        ("from_dir", "from_file", "out_dir", "overwrite", "processes"),
    )
    parameters = {name: value for name, value in keys.items() if name not in others} | more
    about = dict(
        generator=generator,
        generator_version=version,
        parameters=parameters,
        seed=keys.get("seed", 0),
    )
    if not config.overwrite:
        refuse_another(out_dir, about)
    return out_dir, about


def names_of_old(folder: Path) -> list[str]:
    """The names of the files of the data set that is in the folder, but for meta.json. Where that
    file is damaged, or a kill has left none, they are all files with the name of a shard, if the
    folder has our mark."""
    with contextlib.suppress(UserError):
        return [entry["file"] for entry in files_of(read_meta(folder))]
    is_damaged = os.path.isfile(folder / "meta.json") or os.path.isfile(
        folder / files.NEW / files.MARKER
    )
    return names_of_shards(folder) if is_damaged and os.path.isfile(folder / files.MARKER) else []


def names_of_shards(folder: Path) -> list[str]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name for name in names if SHARD_NAME.fullmatch(name))


def check_files(folder: Path, overwrite: bool) -> None:
    """Raises UserError, before any work, for what the new data set may replace and what is not of
    the old one. With overwrite a file may be replaced, and nothing else."""
    ours = names_of_old(folder)
    strangers = [name for name in names_of_shards(folder) if name not in ours]
    files.check_inside(folder, ["meta.json", *ours, *strangers])
    if os.path.lexists(folder / "meta.json") and not os.path.isfile(folder / files.MARKER):
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
        there = made_by(read_json(out_dir / "meta.json"))
    # there is no data set, or one that must be made again
    except (UserError, KeyError, TypeError, AttributeError):
        return
    now = made_by(json.loads(json.dumps(about)))  # as meta.json would give it back
    names = [name for name in now | there if there.get(name) != now.get(name)]
    if names:
        different = [
            f"{name}={show(there.get(name))} there, {show(now.get(name))} now" for name in names[:3]
        ]
        raise UserError(
            f"{out_dir}: holds another data set ({'; '.join(different)}); name another --out_dir, or add "
            "--overwrite=true, which replaces it"
        )


def made_by(meta: dict) -> dict:
    """What decides which data a script makes, as a meta.json has it: the script, its version and
    its parameters. One that is a dict, as that of the texts of WikiText-103, is taken apart:
    text.train.sha256."""
    made = {name: meta[name] for name in ("generator", "generator_version")}
    waiting = list(meta["parameters"].items())
    while waiting:
        name, value = waiting.pop(0)
        if isinstance(value, dict):
            waiting = [(f"{name}.{inner}", part) for inner, part in value.items()] + waiting
        else:
            made[name] = value
    return made


def fitting(sizes: dict, room: float) -> list:
    """In the order given, each name of {name: size} that keeps the sum of the sizes taken at or
    below room."""
    taken = []
    for name, size in sizes.items():
        if size <= room:
            taken.append(name)
            room -= size
    return taken


def report(meta: dict, out_dir: Path | str) -> None:
    """Prints the counts of every split, and where the data set lies: the end of a prepare
    script."""
    for split, facts in meta["splits"].items():
        counts = ", ".join(
            f"{value:,} {name}" for name, value in facts.items() if isinstance(value, int)
        )
        print(f"{split}: {counts or 'drawn anew for every step'}")
    print(f"written to {out_dir}: {meta['vocab_size']:,} ids")


def encode(
    text: str, tokenizer, count_words: Callable[[str], int] = lambda text: len(text.split())
) -> tuple:
    """((words, bytes, tokens), ids) of a document."""
    ids = tokenizer.encode_array(text)
    return (count_words(text), len(text.encode()), len(ids)), ids


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
    meta = dict(
        format=FORMAT,
        kind="stream",
        name=name,
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
    )
    meta, written = meta | about, {}
    with _new_folder(out_dir, meta, written) as folder:
        for split, documents in splits.items():
            shards, counts, tokens = [], [], array(dtype_of(tokenizer.vocab_size).char)
            for document in documents:
                count, ids = encode(document, tokenizer) if isinstance(document, str) else document
                counts.append(count)
                tokens.frombytes(ids.tobytes())
                while len(tokens) >= shard_tokens:
                    _save_shard(folder, split, shards, tokens[:shard_tokens], tokens=shard_tokens)
                    del tokens[:shard_tokens]
            if tokens:
                _save_shard(folder, split, shards, tokens, tokens=len(tokens))
            table = np.array(counts, np.int64).reshape(-1, 3)
            total = dict(zip(("words", "bytes", "tokens"), table.sum(0).tolist(), strict=True))
            if not total["words"]:
                raise UserError(
                    f"the {split} split would hold only white space; name more, or raise val_fraction"
                )
            saved = _save(
                folder / f"{split}_documents.npy", np.concatenate([[0], table[:, 2].cumsum()])
            )
            written[split] = (
                {"documents": len(counts)} | total | {"document_offsets": saved, "shards": shards}
            )
        # the data set has a copy, so that it can be decoded wherever it lies
        if hasattr(tokenizer, "content"):
            meta["tokenizer_file"] = _save(folder / TOKENIZER_FILE, tokenizer.content)
    return meta


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
    (shards.DRAWN), if they are; `splits` then has no "train". about: what claim returned, and
    kinds={name: ids}, queries that meters.py measures apart.
    """
    kind = "drawn" if drawn else "examples"
    meta = (
        dict(format=FORMAT, kind=kind, name=name, tokenizer=tokenizer, vocab_size=vocab_size)
        | about
    )
    written = {"train": {"drawn": drawn, "shards": []}} if drawn else {}
    with _new_folder(out_dir, meta, written) as folder:
        for split, slices in splits.items():
            shards, labels = [], 0
            for examples, facts in slices:
                if examples.size and not 0 <= examples.min() <= examples.max() < vocab_size:
                    ids = f"ids from {examples.min()} to {examples.max()}"
                    raise UserError(f"the {split} split has {ids}, and vocab_size={vocab_size}")
                labels += int(np.count_nonzero(examples[:, 1]))
                size = dict(
                    rows=len(examples), seq_len=examples.shape[2], tokens=examples.size // 2
                )
                _save_shard(
                    folder,
                    split,
                    shards,
                    examples.astype(dtype_of(vocab_size), copy=False),
                    **size,
                    **facts,
                )
            if not labels:
                raise UserError(f"the {split} split would hold no label: nothing to predict")
            counts = {what: sum(shard[what] for shard in shards) for what in ("rows", "tokens")}
            written[split] = counts | {"labels": labels, "shards": shards}
    return meta


@contextlib.contextmanager
def _new_folder(out_dir, meta, splits):
    """A folder to write to. At the end its files and meta.json replace the data set in out_dir.
    Raises UserError."""
    with files.new_folder(out_dir, "meta.json", names_of_old(Path(out_dir))) as new:
        yield new
        meta["splits"] = splits
        files.write_text(new / "meta.json", json.dumps(meta, indent=1) + "\n")


def _save_shard(folder, split, shards, values, **facts):
    """Writes one more shard, and adds its entry to `shards`."""
    shards.append(
        _save(folder / f"{split}_{len(shards):04d}.npy", np.ascontiguousarray(values)) | facts
    )


def _save(path, content):
    """Writes an array, or bytes as they are. Returns the entry of the file in meta.json."""
    is_array = isinstance(content, np.ndarray)
    files.write_whole(
        path, lambda file: np.save(file, content) if is_array else file.write(content)
    )
    return {"file": path.name, "sha256": files.sha256_of_file(path), "bytes": path.stat().st_size}
