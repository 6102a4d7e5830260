"""
A data set of your own text: of files, and of folders that are searched for files.

    python data/text/prepare.py book.txt
    python data/text/prepare.py notes/ more/ --ext=.txt,.md,.rst --tokenizer=gpt2 --out_dir=data/notes
    python data/text/prepare.py book.txt --tokenizer=out/qwen3 --out_dir=data/qwen3    an imported model's tokenizer

Several files are split by file. A single file is split by position: its last lines are for validation. Files are taken
in the order of their paths. A file that is named twice is taken once, and empty files are left out. A file that is not
UTF-8 ends the script; with --errors=skip it is named and left out.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import configurator  # noqa: E402
from configurator import UserError, key  # noqa: E402

from data.tokenizer import TOKENIZER_FILE, TOKENIZERS, FileTokenizer, get_tokenizer  # noqa: E402
from data.writing import claim, fitting, made_by, report, write_stream  # noqa: E402

GENERATOR = "data/text/prepare.py"
VERSION = 2  # 2: blank files are left out, linked folders are read


@dataclass
class Config:
    paths: list[str] = key([], "text files, and folders to search")
    ext: list[str] = key([".txt", ".md"], "endings of the files to take from folders")
    tokenizer: str = key("byte", f"{', '.join(TOKENIZERS)}, or a folder with a tokenizer.json, as a hub's or ours")
    val_fraction: float = key(0.05, "share of the bytes that is validation", above=0, below=1)
    shard_tokens: int = key(100_000_000, "most tokens in one file", at_least=1)
    seed: int = key(0, "seeds the choice of the files for validation", at_least=0)
    errors: str = key("stop", "a file that is not UTF-8 ends the script, or is left out", choices=("stop", "skip"))
    out_dir: str | None = key(None, "where to write; None: beside this script")
    overwrite: bool = key(False, "write to a folder that holds something else, too")


def main(argv):
    config = configurator.load(Config, argv, positional="paths", program=GENERATOR, description=__doc__)
    files = find_files(config.paths, config.ext)
    out_dir = claim(config.out_dir, config.overwrite, GENERATOR)
    if config.errors == "skip" and not (files := [file for file in files if is_text(file)]):
        raise UserError(f"{', '.join(config.paths)}: no file is UTF-8 text")
    is_folder = config.tokenizer not in TOKENIZERS and os.path.isdir(config.tokenizer)
    tokenizer = FileTokenizer(Path(config.tokenizer) / TOKENIZER_FILE) if is_folder else get_tokenizer(config.tokenizer)
    if len(files) == 1:
        train, val = split_lines(read_text(files[0]), config.val_fraction, files[0])
        splits = {"train": [train], "val": [val]}
    else:
        val = validation_files([file.stat().st_size for file in files], config.val_fraction, config.seed)
        named = {"train": [file for i, file in enumerate(files) if i not in val], "val": [files[i] for i in val]}
        # each file is read only when it is needed
        splits = {split: map(read_text, tqdm(files, desc=split, unit="file")) for split, files in named.items()}
    about = made_by(config, GENERATOR, VERSION)
    meta = write_stream(out_dir, splits, tokenizer=tokenizer, shard_tokens=config.shard_tokens, name="text", **about)
    report(meta, out_dir)


def find_files(paths, ext):
    """The named files, and the files in the named folders that end in one of `ext`: sorted, once each, none blank."""
    # by real path: the same text in training and in validation would make the loss meaningless
    files = {os.path.realpath(file): Path(file) for path in paths for file in walk(path, tuple(ext))}
    files = sorted((file for file in files.values() if file.read_bytes().strip()), key=lambda file: file.as_posix())
    if not files:
        where, endings = ", ".join(paths) or "nothing", ", ".join(ext)
        raise UserError(f"no text in {where}: name files, or folders with {endings} files")
    return files


def walk(path, ext):
    """Yields a named file, or the files of a folder and of its subfolders, linked ones too, each folder once."""
    if not os.path.isdir(path):
        if not os.path.isfile(path):  # to open a pipe would wait for its writer
            raise UserError(f"{path}: no such file or folder")
        yield path
    seen = set()
    for folder, subfolders, names in os.walk(path, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            subfolders.clear()
            continue
        seen.add(real)
        files = (os.path.join(folder, name) for name in names if name.endswith(ext))
        yield from filter(os.path.isfile, files)


def read_text(file):
    """The text of a file. Raises UserError if it is not UTF-8."""
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is not UTF-8 text (byte {error.start}); --errors=skip leaves it out") from None


def is_text(file):
    """Whether a file is UTF-8 text; prints its name if it is not."""
    try:
        read_text(file)
    except UserError as error:
        print(f"left out: {error}")
        return False
    return True


def validation_files(sizes, val_fraction, seed):
    """Which files are for validation, by number. In a random order, each is taken that keeps validation at or below
    val_fraction of the total size. If no file is small enough, the smallest one is taken."""
    order = np.random.default_rng(seed).permutation(len(sizes)).tolist()
    taken = fitting({i: sizes[i] for i in order}, val_fraction * sum(sizes))
    return sorted(taken) or [sizes.index(min(sizes))]


def split_lines(text, val_fraction, file):
    """The text in two parts, cut at the last end of a line before the final val_fraction, or else at the first one.

    Neither part is blank: blank lines at the end stay with the line before them.
    """
    end = len(text.rstrip())
    cut = text.rfind("\n", 0, min(round(len(text) * (1 - val_fraction)), end)) + 1 or text.find("\n") + 1
    if not 0 < cut < end or text[:cut].isspace():
        raise UserError(f"{file}: has one line of text, which cannot be split; name more files")
    return text[:cut], text[cut:]


if __name__ == "__main__":
    configurator.run(main)
