"""
The sources of Python's standard library as bytes: about 9.7 MB of real text that every machine has.

    python data/pystdlib/prepare.py

The script takes the .py files of the Python that runs it, without tests and installed packages, and
leaves out

    tables            the packages encodings and pydoc_data, and files in which more than half of the text stands in
                      lines that begin with a quote, a digit or a backslash, behind brackets
    generated files   whose first lines say that they are, and those with the paths of this machine
    near-duplicates   files of which more than half of the runs of 4 lines stand in files before them, in the order of
                      the paths; blank lines and indents do not count

Validation is whole top-level packages and modules, the same for every seed: in the order of the
sha256 of their names, each is taken that still fits and is at most a sixth of validation. The seed
decides the order of the training files. Under most_bytes, each is taken that still fits. Other
versions of Python give other text, so meta.json holds the version.
"""

import collections
import contextlib
import hashlib
import math
import platform
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from base import configurator
from base.configurator import UserError, key
from data.tokenizer import choose_tokenizer
from data.writing import Output, claim, fitting, write_stream

GENERATOR = "data/pystdlib/prepare.py"
VERSION = 2  # 1: with tables and near-duplicates, split at random by file
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TABLES = ("encodings/", "pydoc_data/")
TABLE_LINE = re.compile(r"""[ \t]*[(\[{]*(?!\"{3}|'{3})['"\d\\].*""")
GENERATED = re.compile(r"auto-?generated|automatically generated|file is generated", re.IGNORECASE)
RUN = 4  # lines


@dataclass
class Config(Output):
    val_fraction: float = key(0.05, "share of the bytes that is validation", above=0, below=1)
    most_bytes: int | None = key(
        None, "validation and the first training files, at most; None: all", at_least=1
    )
    seed: int = key(
        0, "seeds the order of the training files, and so what most_bytes takes", at_least=0
    )


def main(argv):
    config = configurator.load(Config, argv, positional=None)
    write_sources(config, GENERATOR, VERSION, read_sources(), "byte")


def write_sources(config, generator, version, texts, tokenizer, **facts):
    """Writes a data set of the sources {path: text}, whose facts meta.json is to hold."""
    train, val = split_units(clean(texts), config)
    facts["python"] = platform.python_version()
    out_dir, about = claim(config, generator, version, **facts)
    write_stream(
        out_dir,
        {"train": train.values(), "val": val.values()},
        name=Path(generator).parent.name,
        tokenizer=choose_tokenizer(tokenizer, train.values()),
        **about,
    )


def read_sources():
    """{path: text} of the standard library, sorted by path, without tests and packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {}
    for file in root.rglob("*.py"):
        path = file.relative_to(root)
        # _sysconfigdata is made when Python is built, and holds the paths of that machine
        if not path.name.startswith("_sysconfigdata") and not LEFT_OUT & set(path.parts):
            files[path.as_posix()] = file
    if len(files) < 2:
        raise UserError(
            "this Python comes without its sources; run data/text/prepare.py on your own text"
        )
    return read_texts(files)


def read_texts(files):
    """{path: text} of {path: file}, sorted by path, without blank files and invalid UTF-8."""
    texts = {}
    for path, file in sorted(files.items()):
        with contextlib.suppress(UnicodeDecodeError, OSError):
            text = file.read_bytes().decode()
            if text.strip():
                texts[path] = text
    return texts


def clean(texts):
    """The texts without tables, generated files and near-duplicates of those before them."""
    kept = {}
    seen = set()  # the runs of lines of those that are kept
    for path, text in texts.items():
        # config-*: made by a build
        if path.startswith((*TABLES, "config-")) or GENERATED.search(text[:300]) or is_table(text):
            continue
        runs = runs_of(text)
        if len(runs & seen) <= len(runs) / 2:
            kept[path] = text
            seen |= runs
    return kept


def is_table(text):
    """Whether more than half of a text stands in lines of data."""
    lines = [line for line in text.splitlines() if line.strip()]
    of_tables = sum(len(line) for line in lines if TABLE_LINE.match(line))
    return 2 * of_tables > sum(map(len, lines))


def runs_of(text):
    """The runs of RUN lines of a text, as a set of hashes, which take a tenth of the memory of
    lines; a shorter text is one run."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {hash(tuple(lines[i : i + RUN])) for i in range(max(1, len(lines) - RUN + 1))}


def split_units(texts, config):
    """({path: text} for training, {path: text} for validation) of {path: text}. Raises UserError if
    nothing is left for training."""
    sizes = {path: len(text.encode()) for path, text in texts.items()}
    of_units = collections.Counter()
    for path, size in sizes.items():
        of_units[unit_of(path)] += size
    most = config.most_bytes or math.inf
    room = config.val_fraction * min(most, sum(sizes.values()))
    small = [unit for unit in sorted(of_units, key=sha256_of) if of_units[unit] <= room / 6]
    chosen = fitting(of_units, small, room) or [min(of_units, key=of_units.get)]
    val = {path: text for path, text in texts.items() if unit_of(path) in chosen}
    others = [path for path in texts if path not in val]
    order = np.random.default_rng(config.seed).permutation(len(others))
    room = most - sum(sizes[path] for path in val)
    train = fitting(sizes, [others[i] for i in order], room)
    if not train:
        raise UserError(f"most_bytes={most}: no file is left for training; raise it")
    return {path: texts[path] for path in train}, val


def unit_of(path):
    """The top-level package or module of a file."""
    return path.partition("/")[0].removesuffix(".py")


def sha256_of(name):
    return hashlib.sha256(name.encode()).digest()


if __name__ == "__main__":
    configurator.run(main)
