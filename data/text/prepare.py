"""
A data set of your own text: of files, and of folders that are searched for files.

    python data/text/prepare.py book.txt
    python data/text/prepare.py notes/ more/ --ext=.txt,.md,.rst --tokenizer=gpt2 --threads=2 --out_dir=data/notes
    python data/text/prepare.py notes/ --val=notes/2024.md,letters/ --tokenizer=bpe:4096
    python data/text/prepare.py book.txt --tokenizer=Qwen3-0.6B --out_dir=data/qwen3    # the tokenizer of a model

Without --val several files are split by file, a single one by position: its last lines are for
validation. Files are taken in the order of their paths, once each; blank ones, and hidden ones in
folders, are left out, and those of --val are not trained on.

Files are read one at a time: first for their sizes, which decide the split, then to encode them
(bpe:N reads the first ones once more). A file is one document, and must fit in memory. After a
stop, the same command goes on where it was stopped. The data are the same for any number of
threads.
"""

import glob
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from base import configurator
from base.configurator import UserError, key
from base.files import one_line, read_regular
from data.tokenizer import CHOICES, choose_tokenizer
from data.writing import Output, claim, fitting, write_stream

GENERATOR = "data/text/prepare.py"
# 2: blank files are left out, linked folders are read; 3: hidden files and byte order marks are left
# out
VERSION = 3


@dataclass
class Config(Output):
    paths: list[str] = key([], "text files, and folders to search")
    ext: list[str] = key([".txt", ".md"], "endings of the files to take from folders")
    tokenizer: str = key("byte", CHOICES)
    val: list[str] = key([], "files and folders for validation; none: val_fraction of `paths`")
    val_fraction: float = key(
        0.05, "validation's share of the bytes (one file: of its characters)", above=0, below=1
    )
    seed: int = key(0, "seeds the choice of the files for validation", at_least=0)
    threads: int = key(1, "how many documents are encoded side by side", at_least=1, at_most=1024)


def main(argv):
    config = configurator.load(Config, argv, positional="paths")
    sizes = find_files(config.paths, config.ext)
    # older versions had a key `errors`, which is still in meta.json: "stop" is what is done now
    out_dir, about = claim(config, GENERATOR, VERSION, errors="stop")
    if len(sizes) == 1 and not config.val:
        (path,) = sizes
        train, val = split_at_a_line(read_text(path), config.val_fraction)
    else:
        of_val = find_files(config.val, config.ext) if config.val else held_out(sizes, config)
        train = Texts([path for path in sizes if path not in of_val])
        val = Texts(list(of_val))
    if not train:
        raise UserError(f"val={','.join(config.val)}: leaves no file for training; name more files")
    tokenizer = choose_tokenizer(config.tokenizer, train)
    write_stream(
        out_dir,
        {"train": train, "val": val},
        name="text",
        tokenizer=tokenizer,
        threads=config.threads,
        **about,
    )


@dataclass
class Texts:
    """The texts of files, each of which is read when it is needed."""

    paths: list[str]

    def __len__(self):
        return len(self.paths)

    def __iter__(self):
        return map(read_text, self.paths)


def find_files(paths, ext):
    """{real path: bytes of its text} of the named files, and of those in the named folders that end
    in one of `ext` and are not hidden: in the order of their paths, once each, none blank."""
    found = []
    for path in paths:
        if os.path.isdir(path):
            inside = glob.iglob(f"{glob.escape(path)}/**", recursive=True)
            found += [f for f in inside if f.endswith(tuple(ext)) and os.path.isfile(f)]
        else:
            found.append(path)
    sizes = {}
    for file in sorted(map(Path, found), key=Path.as_posix):
        text = read_text(file)
        if text and not text.isspace():
            # by real path, so that a file with two names is one: in both splits it would make the
            # validation loss meaningless
            sizes[os.path.realpath(file)] = len(text.encode())
    if not sizes:
        where = ", ".join(paths) or "nothing"
        raise UserError(f"no text in {where}: name files, or folders with {', '.join(ext)}")
    return sizes


def read_text(file):
    """The text of a file, without a byte order mark. Raises UserError if it is not UTF-8."""
    content = read_regular(file, 1 << 40)
    with one_line(f"{file}: is not UTF-8 text", UnicodeDecodeError):
        return content.decode().removeprefix("\ufeff")


def held_out(sizes, config):
    """{path: bytes} for validation: in a random order, each file that fits into what is left of
    val_fraction of all bytes; where none fits, the smallest."""
    order = np.random.default_rng(config.seed).permutation(len(sizes))
    paths = list(sizes)
    taken = fitting(sizes, [paths[i] for i in order], config.val_fraction * sum(sizes.values()))
    taken = set(taken) or {min(sizes, key=sizes.get)}
    return {path: size for path, size in sizes.items() if path in taken}


def split_at_a_line(text, val_fraction):
    """([text for training], [text for validation]): cut at the last end of a line before the final
    val_fraction, or else at the first one."""
    # the last line that is not blank is for validation, with the blank ones after it
    latest = min(round(len(text) * (1 - val_fraction)), len(text.rstrip()))
    cut = text.rfind("\n", 0, latest) + 1
    if cut == 0:  # no line ends before
        cut = text.find("\n") + 1
    if not text[:cut].strip() or not text[cut:].strip():
        raise UserError(
            "one part of the text would be blank; name more files, or another val_fraction"
        )
    return [text[:cut]], [text[cut:]]


if __name__ == "__main__":
    configurator.run(main)
