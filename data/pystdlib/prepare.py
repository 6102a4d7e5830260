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
sha256 of their names each is taken that fits, and is no more than a sixth of it. The share of its
runs of 4 lines that stand in training, too, is printed, and is `shared_runs` in meta.json. The seed
decides the order of the training files, of which most_bytes takes each that fits. Other versions of
Python give other text, so meta.json holds the version.
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

import configurator
from configurator import UserError, key
from data.tokenizer import get_tokenizer
from data.writing import Output, claim, fitting, report, write_stream

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
    shard_tokens: int = key(100_000_000, "most tokens in one file", at_least=1)
    seed: int = key(
        0, "seeds the order of the training files, and so what most_bytes takes", at_least=0
    )


def main(argv):
    config = configurator.load(
        Config, argv, positional=None, program=GENERATOR, description=__doc__
    )
    splits = split_units(clean(read_sources()), config)
    facts = dict(
        python=platform.python_version(), shared_runs=shared_runs(splits["train"], splits["val"])
    )
    out_dir, about = claim(config, GENERATOR, VERSION, **facts)
    about |= dict(
        name="pystdlib", tokenizer=get_tokenizer("byte"), shard_tokens=config.shard_tokens
    )
    report(
        write_stream(out_dir, {split: texts.values() for split, texts in splits.items()}, **about),
        out_dir,
    )
    print(
        f"near-duplicates: {facts['shared_runs']:.1%} of validation's runs of {RUN} lines stand in training, too"
    )


def read_sources():
    """{path: text} of the standard library, sorted by path, without tests, packages, empty files
    and invalid UTF-8."""
    root, texts = Path(sysconfig.get_path("stdlib")), {}
    for file in root.rglob("*.py"):
        path = file.relative_to(root)
        # _sysconfigdata is made when Python is built, and holds the paths of that machine
        if (
            LEFT_OUT & set(path.parts)
            or path.name.startswith("_sysconfigdata")
            or not file.is_file()
        ):
            continue
        with contextlib.suppress(UnicodeDecodeError):
            texts[path.as_posix()] = file.read_bytes().decode()
    texts = {path: texts[path] for path in sorted(texts) if texts[path]}
    if len(texts) < 2:
        raise UserError(
            "this Python comes without its sources; run data/text/prepare.py on your own text"
        )
    return texts


def clean(texts):
    kept, seen = {}, set()
    for name, text in texts.items():
        runs = runs_of(text)
        # config-*: made by a build
        is_generated = name.startswith("config-") or GENERATED.search(text[:300])
        lines = [line for line in text.splitlines() if line.strip()]
        is_table = 2 * sum(len(line) for line in lines if TABLE_LINE.match(line)) > sum(
            map(len, lines)
        )
        if not (
            name.startswith(TABLES) or is_table or is_generated or len(runs & seen) > len(runs) / 2
        ):
            kept[name] = text
            seen |= runs
    return kept


def runs_of(text):
    """The runs of RUN lines of a text, as a set of hashes, which take a tenth of the memory of
    lines; a shorter text is one run."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {hash(tuple(lines[i : i + RUN])) for i in range(max(1, len(lines) - RUN + 1))}


def shared_runs(train, val):
    """The share of validation's runs of lines that stand in training, too, of two {path: text}."""
    of_train = set().union(*map(runs_of, train.values()))
    of_val = set().union(*map(runs_of, val.values()))
    return round(len(of_train & of_val) / len(of_val), 4)


def split_units(texts, config):
    """{"train": {path: text}, "val": ...} of {path: text}. Raises UserError if nothing is left for
    training."""
    sizes, units = {name: len(text.encode()) for name, text in texts.items()}, collections.Counter()
    # its top-level package or module
    unit_of = {name: name.partition("/")[0].removesuffix(".py") for name in texts}
    for name, size in sizes.items():
        units[unit_of[name]] += size
    most = config.most_bytes or math.inf
    room = config.val_fraction * min(most, sum(sizes.values()))
    by_hash = sorted(units, key=lambda unit: hashlib.sha256(unit.encode()).digest())
    chosen = fitting({unit: units[unit] for unit in by_hash if units[unit] <= room / 6}, room)
    chosen = chosen or [min(units, key=units.get)]
    val = {name: text for name, text in texts.items() if unit_of[name] in chosen}
    others = [name for name in texts if name not in val]
    order = np.random.default_rng(config.seed).permutation(len(others))
    train = fitting(
        {others[i]: sizes[others[i]] for i in order}, most - sum(sizes[name] for name in val)
    )
    if not train:
        raise UserError(
            f"most_bytes={most}: no file is left for training beside {', '.join(chosen)}; raise it"
        )
    return {"train": {name: texts[name] for name in train}, "val": val}


if __name__ == "__main__":
    configurator.run(main)
