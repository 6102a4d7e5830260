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

import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from base import configurator
from base.configurator import UserError, key
from base.files import DATA, one_line, read_regular
from data.pystdlib import prepare as pystdlib
from data.pystdlib.prepare import LEFT_OUT, read_sources, read_texts, write_sources
from data.tokenizer import CHOICES

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
    config = configurator.load(Config, argv, positional=None)
    found = find_packages(config.requirements or DATA.parent / "requirements.txt")
    files = {}
    for distribution in found.values():
        files |= files_of(distribution)
    versions = {name: found[name].version for name in sorted(found)}
    texts = read_sources() | read_texts(files)
    write_sources(config, GENERATOR, VERSION, texts, config.tokenizer, packages=versions)


def find_packages(requirements):
    """{name: distribution} of the packages that the file names and those that they need, as far as
    they are installed. Raises UserError where a package that the file names is not."""
    from packaging.requirements import Requirement  # matplotlib needs packaging, too
    from packaging.utils import canonicalize_name

    with one_line(f"{requirements}: cannot be read"):
        lines = read_regular(requirements, 1 << 20).decode().splitlines()
        texts = [line.partition("#")[0].strip() for line in lines]
        named = [Requirement(text) for text in texts if text and not text.startswith("-")]
    found = {}
    waiting = list(named)
    for requirement in waiting:  # which grows
        name = canonicalize_name(requirement.name)
        # of this Python and system, and of no extra of the package that has it
        is_wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if name in found or not is_wanted:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if requirement in named:
                advice = f"run pip install -r {requirements}"
                raise UserError(f"{name}: is not installed; {advice}") from None
            continue  # a dependency that this environment does without
        waiting += [Requirement(text) for text in found[name].requires or []]
    return found


def files_of(distribution):
    """{path: file} of a package's .py files, without tests."""
    files = {}
    for path in distribution.files or []:
        is_test = path.name.startswith("test_") or set(path.parts) & (LEFT_OUT | TESTS)
        if path.suffix == ".py" and ".." not in path.parts and not is_test:
            files[path.as_posix()] = Path(distribution.locate_file(path))
    return files


if __name__ == "__main__":
    configurator.run(main)
