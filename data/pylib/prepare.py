"""
The Python sources of the packages that requirements.txt pins and of their dependencies, behind the
standard library's: a text that every machine has on which this project runs, about ten times as
large as data/pystdlib.

    python data/pylib/prepare.py
    python data/pylib/prepare.py --tokenizer=bpe:4096 --out_dir=data/pylib_bpe4096

With Python 3.11.7 and the pinned packages the first has 108.8 MB for training and 2.2 for validation, the second 32.8
and 0.65 million tokens of 4,096 ids.

What is left out, and how training is told from validation, are the rules of data/pystdlib: no
tests, tables, generated files or near-duplicates (also of the standard library's files), and
validation is whole packages and top-level modules, the same for every seed. Files come from what
the installer recorded of each package. Other versions of Python and of the packages give other
text, so meta.json names every package with its version.
"""

import contextlib
import importlib.metadata
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import configurator
from base.files import DATA, one_line, read_regular
from configurator import UserError, key
from data.pystdlib import prepare as pystdlib
from data.pystdlib.prepare import LEFT_OUT, clean, read_sources, shared_runs, split_units
from data.tokenizer import CHOICES, choose_tokenizer
from data.writing import claim, report, write_stream

GENERATOR = "data/pylib/prepare.py"
VERSION = 1  # raise it when the same packages no longer give the same text
TESTS = {"testing", "conftest.py"}  # beside pystdlib's LEFT_OUT


@dataclass
class Config(pystdlib.Config):
    requirements: str | None = key(
        None, "file whose packages are read, one a line; None: that of this repository"
    )
    tokenizer: str = key("byte", CHOICES)
    val_fraction: float = key(0.02, "share of the bytes that is validation", above=0, below=1)


def main(argv):
    config = configurator.load(
        Config, argv, positional=None, program=GENERATOR, description=__doc__
    )
    versions, texts = read_packages(config.requirements or DATA.parent / "requirements.txt")
    train, val = split_units(clean(read_sources() | texts), config)
    shared = shared_runs(train, val)
    facts = {"python": platform.python_version(), "packages": versions, "shared_runs": shared}
    out_dir, about = claim(config, GENERATOR, VERSION, **facts)
    meta = write_stream(
        out_dir,
        {"train": train.values(), "val": val.values()},
        name="pylib",
        tokenizer=choose_tokenizer(config.tokenizer, train.values()),
        shard_tokens=config.shard_tokens,
        **about,
    )
    report(meta, out_dir)
    print(f"packages: {', '.join(f'{name} {version}' for name, version in versions.items())}")
    print(f"near-duplicates: {shared:.1%} of validation's runs of lines stand in training, too")


def read_packages(requirements):
    """({package: version}, {path: text}) of the packages that the file names and those that they
    need, as far as they are installed; both sorted. Raises UserError where a package that the file
    names is not."""
    # which matplotlib needs, too
    from packaging.requirements import InvalidRequirement, Requirement

    content = read_regular(requirements, 1 << 20)
    waiting = []
    with one_line(f"{requirements}: cannot be read", InvalidRequirement):
        for line in content.decode(errors="replace").splitlines():
            line = line.partition("#")[0].strip()
            if line and not line.startswith("-"):
                waiting.append(Requirement(line))
    named = {normal(one.name) for one in waiting if is_wanted(one)}
    found = {}
    while waiting:
        requirement = waiting.pop()
        name = normal(requirement.name)
        if name in found or not is_wanted(requirement):
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if name in named:
                raise UserError(
                    f"{name}: is not installed; run pip install -r {requirements}"
                ) from None
            continue  # a dependency that this environment does without
        waiting += [Requirement(text) for text in found[name].requires or []]
    texts = {}
    for distribution in found.values():
        texts |= sources_of(distribution)
    versions = {name: found[name].version for name in sorted(found)}
    return versions, {path: texts[path] for path in sorted(texts)}


def normal(name):
    """The name of a package as PEP 503 spells it."""
    return name.lower().replace("_", "-").replace(".", "-")


def is_wanted(requirement):
    """Whether the requirement is for this Python and system, and for no extra of the package that
    has it."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def sources_of(distribution):
    """{path: text} of a package's .py files, without tests, empty files and invalid UTF-8."""
    texts = {}
    for path in distribution.files or []:
        parts = set(path.parts)
        is_test = path.name.startswith("test_") or parts & LEFT_OUT or parts & TESTS
        if path.suffix != ".py" or ".." in parts or is_test:
            continue
        file = Path(distribution.locate_file(path))
        if not file.is_file():
            continue
        with contextlib.suppress(UnicodeDecodeError):
            text = file.read_bytes().decode()
            if text.strip():
                texts[path.as_posix()] = text
    return texts


if __name__ == "__main__":
    configurator.run(main)
