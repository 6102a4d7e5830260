"""
A data set of the Hugging Face hub, or a copy of one, which `datasets` finds and reads as a stream:
pip install datasets tokenizers

    python data/hub/prepare.py roneneldan/TinyStories --val_split=validation --tokenizer=bpe:4096 --threads=4
    python data/hub/prepare.py HuggingFaceFW/fineweb-edu --config=sample-10BT --threads=8 --out_dir=data/fineweb
    python data/hub/prepare.py Skylion007/openwebtext --documents=100_000 --val_fraction=0.01
    python data/hub/prepare.py copies/ --column=story        # no internet needed

A folder in place of the name holds a copy: parquet, jsonl or jsonl.gz files, as the hub has them.

A row that is not empty is a document. It ends with a line end, which is added where the text has
none. Without val_split the sha256 of a text decides whether it is held out for validation: no copy
of it is on the other side.

The data are the same for any number of threads. Where a call was stopped, the same call goes on: it
reads the rows before again, over the network, too, but does not encode them. Texts that
are held out wait in a file without a name in out_dir. The bar has a total for parquet, and for
jsonl in a folder, whose rows are counted before.
"""

import hashlib
import itertools
import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from base import configurator
from base.configurator import UserError, key
from base.files import one_line
from data.tokenizer import CHOICES, choose_tokenizer
from data.writing import Output, claim, write_stream

GENERATOR = "data/hub/prepare.py"
VERSION = 1
AT_ONCE = 100  # rows that are read at once


@dataclass
class Config(Output):
    name: list[str] = key([], "of the hub, as in roneneldan/TinyStories, or a folder with a copy")
    config: str | None = key(None, "its configuration, where it has several, as in sample-10BT")
    revision: str | None = key(None, "its commit or branch; None: the newest")
    column: str = key("text", "the column that holds the text")
    split: str = key("train", "the split to train on")
    val_split: str | None = key(
        None, "the split to validate on; None: val_fraction of the documents of `split`"
    )
    val_fraction: float = key(
        0.005, "share of the documents that is validation, if no split is", above=0, below=1
    )
    documents: int | None = key(
        None, "take the first documents of each split only; None: all", at_least=1
    )
    tokenizer: str = key("gpt2", CHOICES)
    threads: int = key(1, "how many documents are encoded side by side", at_least=1, at_most=1024)


def main(argv):
    config = configurator.load(Config, argv, positional="name")
    if len(config.name) != 1:
        raise UserError("name one data set of the hub, or a folder with a copy")
    train = Split(config, config.split)
    totals = {"train": train.count()}
    val = None
    if config.val_split is not None:
        val = Split(config, config.val_split)
        totals["val"] = val.count()
    out_dir, about = claim(config, GENERATOR, VERSION)
    with tempfile.TemporaryFile("w+", encoding="utf-8", dir=out_dir) as file:
        held_out = HeldOut(file)  # is filled while the documents of training are written
        write_stream(
            out_dir,
            {"train": training_texts(config, train, held_out.append), "val": val or held_out},
            name=Path(config.name[0]).resolve().name,
            tokenizer=choose_tokenizer(config.tokenizer, training_texts(config, train)),
            threads=config.threads,
            totals=totals,
            **about,
        )


class HeldOut:
    """Texts that wait in a file, since those of a large data set would fill the memory."""

    def __init__(self, file):
        self.file = file
        self.n = 0

    def append(self, text):
        self.file.write(f"{json.dumps(text)}\n")
        self.n += 1

    def __len__(self):
        return self.n

    def __iter__(self):
        self.file.seek(0)
        return map(json.loads, self.file)


def failure(config, what):
    """Turns whatever `datasets` raises into a line with the way out."""
    advice = "a folder with a copy in parquet or jsonl needs no network"
    return one_line(f"{config.name[0]}: cannot be {what}; {advice}")


class Split:
    """The documents of a split, as str, as often as one iterates. Raises UserError where the data
    set has no such split or column."""

    def __init__(self, config, split):
        with one_line("pip install datasets", ImportError):
            import datasets
        self.config = config
        with failure(config, "opened"):
            builder = datasets.load_dataset_builder(
                config.name[0], config.config, revision=config.revision
            )
            found = builder.as_streaming_dataset()
            configurator.check_choice("split", split, found)
            rows = found[split]
            # jsonl has no names, only rows
            columns = rows.column_names or next(iter(rows), {})
            configurator.check_choice("column", config.column, columns)
        # no other column is decoded: a picture there may be damaged
        self.rows = rows.select_columns([config.column]).with_format("arrow")
        files = (builder.config.data_files or {}).get(split, [])
        self.parquet = [str(file) for file in files if str(file).endswith(".parquet")]

    def __iter__(self):
        column = self.config.column
        with failure(self.config, "read"):
            values = itertools.chain.from_iterable(t[column].to_pylist() for t in self.tables())
            for text in itertools.islice(filter(None, values), self.config.documents):
                if not isinstance(text, str):
                    what = type(text).__name__
                    raise UserError(f"column={column}: holds {what}, which is no text")
                yield text if text.endswith("\n") else f"{text}\n"

    def tables(self):
        if not self.parquet:
            yield from self.rows.iter(AT_ONCE)
        for file in self.open_parquet():
            yield from file.iter_batches(AT_ONCE, columns=[self.config.column])

    def open_parquet(self):
        """Yields each file. `datasets` would read them ahead, gigabytes of them."""
        import fsspec
        import pyarrow.parquet

        for name in self.parquet:
            with fsspec.open(name, "rb") as file:
                yield pyarrow.parquet.ParquetFile(file, pre_buffer=False)

    def count(self):
        """The number of rows, at most `documents`: of parquet as the files say; those of a folder
        are counted; or None."""
        n = None
        with failure(self.config, "read"):
            if self.parquet:
                n = sum(file.metadata.num_rows for file in self.open_parquet())
            elif os.path.isdir(self.config.name[0]):
                n = sum(table.num_rows for table in self.tables())
        return n if self.config.documents is None else min(n or math.inf, self.config.documents)


def training_texts(config, rows, hold_out=lambda text: None):
    """Yields the documents of the split of training. Without val_split some are for validation, and
    are given to `hold_out` instead."""
    for text in rows:
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
        if config.val_split is None and place < config.val_fraction:
            hold_out(text)
        else:
            yield text


if __name__ == "__main__":
    configurator.run(main)
