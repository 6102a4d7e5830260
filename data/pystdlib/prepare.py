"""
The sources of Python's standard library as bytes: about 12 MB of real text that every machine has.

    python data/pystdlib/prepare.py
    python data/pystdlib/prepare.py --row_len=512 --out_dir=data/rows      # rows of 512, each behind the byte 0
    python data/pystdlib/prepare.py --most_bytes=1_000_000 --out_dir=data/megabyte

The script takes the .py files of the Python that runs it, without tests and installed packages, in
the order of their paths, and splits them by file. Other versions of Python give other text, so
meta.json holds the version. With row_len the text is not one stream but rows of its own, and all rows
begin with the same first token: the setting in which attention sinks are strongest (Gu et al. 2024).
"""

import platform
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import configurator  # noqa: E402
from configurator import UserError, key  # noqa: E402

from data.tokenizer import get_tokenizer  # noqa: E402
from data.writing import claim, parameters_of, report, split_documents, write_examples, write_stream  # noqa: E402

GENERATOR = "data/pystdlib/prepare.py"
VERSION = 1
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass
class Config:
    val_fraction: float = key(0.05, "share of the bytes that is validation", above=0, below=1)
    most_bytes: int | None = key(None, "take a random choice of files, of at most this size (None: all)", at_least=1)
    row_len: int | None = key(None, "rows of this length that begin with the byte 0 (None: running text)", at_least=2)
    shard_tokens: int = key(100_000_000, "most tokens in one file", at_least=1)
    seed: int = key(0, "seeds the choice of the files, for validation and for most_bytes", at_least=0)
    out_dir: str | None = key(None, "where to write; None: beside this script", is_path=True)
    overwrite: bool = key(False, "write to a folder that holds something else, too")


def main(argv):
    config = configurator.load(Config, argv, positional=None, program="data/pystdlib/prepare.py", description=__doc__)
    files = find_sources(Path(sysconfig.get_path("stdlib")))
    if config.most_bytes is not None:
        files = choose_files(files, config.most_bytes, config.seed)
    out_dir = claim(config.out_dir or Path(__file__).resolve().parent, config.overwrite, GENERATOR)
    is_val = split_documents([file.stat().st_size for file in files], config.val_fraction, config.seed)
    splits = {"train": [], "val": []}
    for file, validates in zip(files, is_val, strict=True):
        splits["val" if validates else "train"].append(file.read_bytes().decode())
    about = dict(
        name="pystdlib",
        generator=GENERATOR,
        generator_version=VERSION,
        parameters=parameters_of(config) | {"python": platform.python_version()},
        seed=config.seed,
    )
    if config.row_len is None:
        meta = write_stream(out_dir, splits, tokenizer=get_tokenizer("byte"), shard_tokens=config.shard_tokens, **about)
    else:
        rows = {split: rows_of("".join(texts), config.row_len) for split, texts in splits.items()}
        slices = {split: [(examples, {"slice": str(config.row_len)})] for split, examples in rows.items()}
        meta = write_examples(out_dir, slices, tokenizer="byte", vocab_size=256, **about)
    report(meta, out_dir)


def rows_of(text, row_len):
    """(N, 2, row_len) uint16: tokens and labels. Each byte but those of the last, broken row is a label once."""
    data = np.frombuffer(text.encode(), np.uint8)
    labels = data[: len(data) // row_len * row_len].reshape(-1, row_len).astype(np.uint16)
    if not len(labels):
        raise UserError(f"row_len={row_len}: a split has {len(data):,} bytes, not one row")
    return np.stack([np.pad(labels[:, :-1], ((0, 0), (1, 0))), labels], axis=1)


def choose_files(files, most_bytes, seed):
    """A random choice of the files that has at most this size, in the order given. Raises UserError for fewer than two.

    What is missing to most_bytes is less than any of the files left out.
    """
    sizes = [file.stat().st_size for file in files]
    is_chosen = split_documents(sizes, min(1.0, most_bytes / sum(sizes)), seed)
    chosen = [file for file, is_in in zip(files, is_chosen, strict=True) if is_in]
    if len(chosen) < 2:
        raise UserError(f"most_bytes={most_bytes:,}: holds fewer than two files, and validation needs one; raise it")
    return chosen


def find_sources(root):
    """The .py files under `root`, sorted by path, without tests, installed packages, empty files and invalid UTF-8."""
    found = []
    for file in root.rglob("*.py"):
        path = file.relative_to(root)
        # _sysconfigdata is made when Python is built, and holds the paths of that machine
        if LEFT_OUT & set(path.parts) or path.name.startswith("_sysconfigdata") or not file.is_file():
            continue
        try:
            if file.read_bytes().decode():
                found.append((path.as_posix(), file))
        except UnicodeDecodeError:
            pass
    if len(found) < 2:
        raise UserError(
            "this Python comes without the sources of its standard library; run data/text/prepare.py on your own text"
        )
    return [file for _, file in sorted(found)]


if __name__ == "__main__":
    configurator.run(main)
