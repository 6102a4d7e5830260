"""
Anyone's text: files, and folders that are searched for files, made into a data set.

    python data/text/prepare.py book.txt
    python data/text/prepare.py notes/ more/ --ext=.txt,.md,.rst --tokenizer=gpt2 --out_dir=data/notes

Several files are split by file, a single one by position: its last lines are validation. Files are
taken in the order of their paths, a file that is named twice once, an empty one not at all.
"""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import configurator  # noqa: E402
from configurator import UserError, key  # noqa: E402
from data.shards import split_documents, write_stream  # noqa: E402
from data.tokenizer import TOKENIZERS, get_tokenizer  # noqa: E402

VERSION = 1


@dataclass
class Config:
    paths: list[str] = key([], "text files, and folders to search")
    ext: list[str] = key([".txt", ".md"], "endings of the files to take from folders")
    tokenizer: str = key("byte", "how text becomes tokens", choices=tuple(TOKENIZERS))
    val_fraction: float = key(0.05, "share of the bytes that is validation", above=0, below=1)
    shard_tokens: int = key(100_000_000, "most tokens in one file", at_least=1)
    seed: int = key(0, "of the split into training and validation", at_least=0)
    out_dir: str | None = key(None, "where to write; None: beside this script")


def main(argv):
    config = configurator.load(Config, argv, positional="paths", program="data/text/prepare.py", description=__doc__)
    files = find_files(config.paths, config.ext)
    tokenizer = get_tokenizer(config.tokenizer)
    if len(files) == 1:
        train, val = split_lines(read_text(files[0]), config.val_fraction, files[0])
        splits = {"train": [train], "val": [val]}
    else:
        is_val = split_documents([file.stat().st_size for file in files], config.val_fraction, config.seed)
        splits = {"train": read_texts(files, ~is_val, "train"), "val": read_texts(files, is_val, "val")}
    parameters = asdict(config)
    del parameters["out_dir"]
    out_dir = config.out_dir or Path(__file__).resolve().parent
    meta = write_stream(
        out_dir,
        splits,
        tokenizer=tokenizer,
        shard_tokens=config.shard_tokens,
        name="text",
        generator="data/text/prepare.py",
        generator_version=VERSION,
        parameters=parameters,
        seed=config.seed,
    )
    for split, written in meta["splits"].items():
        counted = ", ".join(f"{written[count]:,} {count}" for count in ("documents", "words", "bytes", "tokens"))
        print(f"{split}: {counted}")
    print(f"written to {out_dir}")


def find_files(paths, ext):
    """The files that are named, and those of the folders that end in one of `ext`: sorted, each once, no empty one."""
    if not paths:
        raise UserError("no text: name files or folders, as in python data/text/prepare.py book.txt")
    found = {}
    for path in paths:
        if os.path.isdir(path):
            files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
            files = [file for file in files if file.endswith(tuple(ext)) and os.path.isfile(file)]
            if not files:
                raise UserError(f"{path}: no file in this folder ends in {', '.join(ext)}; --ext=... takes others")
        elif os.path.isfile(path):
            files = [path]
        else:
            raise UserError(f"{path}: no such file or folder")
        # by real path: the same text in training and in validation would make the loss a lie
        found |= {os.path.realpath(file): Path(file) for file in files}
    files = sorted((file for file in found.values() if file.stat().st_size), key=lambda file: file.as_posix())
    if not files:
        raise UserError(f"{', '.join(paths)}: empty")
    return files


def read_texts(files, wanted, split):
    """One text after the other, each read when its turn comes."""
    for i in tqdm(wanted.nonzero()[0], desc=split, unit="file"):
        yield read_text(files[i])


def read_text(file):
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None


def split_lines(text, val_fraction, file):
    """The text in two, cut at the border of lines nearest before its last val_fraction; else at the first border."""
    cut = text.rfind("\n", 0, round(len(text) * (1 - val_fraction))) + 1 or text.find("\n") + 1
    if cut in (0, len(text)):
        raise UserError(f"{file}: is one line, which cannot be split into training and validation; name more files")
    return text[:cut], text[cut:]


if __name__ == "__main__":
    configurator.run(main)
