"""
A data set of your own text: of files, and of folders that are searched for files.

    python data/text/prepare.py book.txt
    python data/text/prepare.py notes/ more/ --ext=.txt,.md,.rst --tokenizer=gpt2 --out_dir=data/notes
    python data/text/prepare.py notes/ --val=notes/2024.md,letters/ --tokenizer=bpe:4096
    python data/text/prepare.py book.txt --tokenizer=Qwen3-0.6B --out_dir=data/qwen3    # the tokenizer of a model

Without --val several files are split by file, a single one by position: its last lines are for
validation. Files are taken in the order of their paths, once each; blank ones, and hidden ones in
folders, are left out, and those of --val are not trained on.
"""

import glob
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import configurator
from base.files import find_path, is_no_file, one_line
from configurator import UserError, key
from data.tokenizer import CHOICES, choose_tokenizer
from data.writing import Output, claim, fitting, report, write_stream

GENERATOR = "data/text/prepare.py"
# 3: hidden files and byte order marks are left out; 2: blank files are, and linked folders are read
VERSION = 3


@dataclass
class Config(Output):
    paths: list[str] = key([], "text files, and folders to search")
    ext: list[str] = key([".txt", ".md"], "endings of the files to take from folders")
    tokenizer: str = key("byte", CHOICES)
    val: list[str] = key([], "files and folders for validation; none: val_fraction of `paths`")
    val_fraction: float = key(0.05, "share of the bytes that is validation", above=0, below=1)
    shard_tokens: int = key(100_000_000, "most tokens in one file", at_least=1)
    seed: int = key(0, "seeds the choice of the files for validation", at_least=0)


def main(argv):
    config = configurator.load(
        Config, argv, positional="paths", program=GENERATOR, description=__doc__
    )
    files = find_files(config.paths, config.ext)
    out_dir, about = claim(config, GENERATOR, VERSION, errors="stop")
    if len(files) == 1 and not config.val:
        train, val = split_lines(read_text(files[0]), config.val_fraction, files[0])
        tokenizer = choose_tokenizer(config.tokenizer, [train])
        splits = {"train": [train], "val": [val]}
    else:
        train, val = split_files(files, config)
        tokenizer = choose_tokenizer(config.tokenizer, map(read_text, train))
        splits = {"train": map(read_text, train), "val": map(read_text, val)}
    meta = write_stream(
        out_dir,
        splits,
        name="text",
        tokenizer=tokenizer,
        shard_tokens=config.shard_tokens,
        **about,
    )
    report(meta, out_dir)


def find_files(paths, ext):
    """The named files, and those in the named folders that end in one of `ext` and are not hidden:
    sorted, once each, none blank."""
    found = []
    for path in paths:
        find_path(path)
        if os.path.isdir(path):
            inside = glob.iglob(f"{glob.escape(path)}/**", recursive=True)
            found += [file for file in inside if file.endswith(tuple(ext))]
        else:
            found.append(path)
    # by real path: the same text in training and in validation would make the loss meaningless
    files = {os.path.realpath(file): Path(file) for file in found if os.path.isfile(file)}
    with_text = [file for file in files.values() if read_text(file).strip()]
    if not with_text:
        where = ", ".join(paths) or "nothing"
        raise UserError(f"no text in {where}: name files, or folders with {', '.join(ext)}")
    return sorted(with_text, key=Path.as_posix)


def read_text(file):
    """The text of a file, without a byte order mark. Raises UserError if it is not UTF-8."""
    # ValueError: a zero byte in the name
    with one_line(f"{file}: cannot be read", OSError, ValueError):
        if is_no_file(file):
            raise OSError("is no file")
        content = file.read_bytes()
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is not UTF-8 text (byte {error.start})") from None


def split_files(files, config):
    """(those for training, those for validation)."""
    if config.val:
        val = find_files(config.val, config.ext)
    else:
        val = validation_files(files, config)
    held_out = {os.path.realpath(file) for file in val}
    train = [file for file in files if os.path.realpath(file) not in held_out]
    if not train:
        raise UserError(f"val={','.join(config.val)}: leaves no file for training; name more files")
    return train, val


def validation_files(files, config):
    """In a random order, each that keeps validation at or below val_fraction of all; if none does,
    the smallest."""
    sizes = [file.stat().st_size for file in files]
    order = np.random.default_rng(config.seed).permutation(len(sizes)).tolist()
    taken = fitting({i: sizes[i] for i in order}, config.val_fraction * sum(sizes))
    if not taken:
        taken = [sizes.index(min(sizes))]
    return [files[i] for i in sorted(taken)]


def split_lines(text, val_fraction, file):
    """The text in two parts, cut at the last end of a line before the final val_fraction, or else
    at the first one. Neither part is blank: blank lines at the end stay with the line before
    them."""
    begin = len(text) - len(text.lstrip())
    end = len(text.rstrip())
    latest = min(round(len(text) * (1 - val_fraction)), end)
    cut = text.rfind("\n", begin, latest) + 1
    if cut == 0:
        cut = text.find("\n", begin) + 1
    if not 0 < cut < end:
        raise UserError(f"{file}: has one line of text, which cannot be split; name more files")
    return text[:cut], text[cut:]


if __name__ == "__main__":
    configurator.run(main)
