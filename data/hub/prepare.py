"""
A data set of the Hugging Face hub, or a copy of one, read as a stream by `datasets`: pip install
datasets tokenizers

    python data/hub/prepare.py roneneldan/TinyStories --val_split=validation --tokenizer=bpe:4096 --threads=4
    python data/hub/prepare.py HuggingFaceFW/fineweb-edu --config=sample-10BT --threads=8 --out_dir=data/fineweb
    python data/hub/prepare.py Skylion007/openwebtext --documents=100_000 --val_fraction=0.01
    python data/hub/prepare.py --from_dir=copies --column=story        # no internet needed

--from_dir names a folder with parquet, jsonl or jsonl.gz files, as the hub has them, or one that save_to_disk wrote.

A row that is not empty is a document. It ends with a line end, which is added where the text has
none. Without val_split the sha256 of a text decides whether it is held out for validation: no copy
of it is on the other side.

Threads encode documents side by side while the next ones are read, since tokenizers and tiktoken
let other threads run meanwhile. The data are the same for any number of threads.
"""

import collections
import hashlib
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import configurator
from base.files import one_line
from configurator import UserError, key
from data.tokenizer import CHOICES, choose_tokenizer
from data.writing import Output, claim, encode, report, write_stream

GENERATOR = "data/hub/prepare.py"
VERSION = 1
READ_AHEAD = 64  # documents that are read ahead, for each thread
WAY_OUT = " over the network; --from_dir=FOLDER takes parquet, jsonl, or what save_to_disk wrote"


@dataclass
class Config(Output):
    name: list[str] = key([], "the data set on the hub, as in roneneldan/TinyStories")
    config: str | None = key(None, "its configuration, where it has several, as in sample-10BT")
    revision: str | None = key(None, "its commit or branch; None: the newest")
    from_dir: str | None = key(None, "folder with a copy, in place of a name")
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
    shard_tokens: int = key(100_000_000, "most tokens in one file", at_least=1)


def main(argv):
    config = configurator.load(
        Config, argv, positional="name", program=GENERATOR, description=__doc__
    )
    if len(config.name) + (config.from_dir is not None) != 1:
        raise UserError("name one data set of the hub, or a folder with a copy: --from_dir=FOLDER")
    if config.val_split == config.split:
        raise UserError(
            f"val_split={config.split!r}: is the split to train on; name another, or leave val_split out"
        )
    streams = open_streams(config)
    # elsewhere from_dir has a copy of known data; here it decides which data are made
    out_dir, about = claim(config, GENERATOR, VERSION, from_dir=config.from_dir)
    texts = texts_of(config, streams["train"])
    for_training = (text for text in texts if not is_held_out(config, text))
    tokenizer = choose_tokenizer(config.tokenizer, for_training)
    held_out = []  # is filled while the documents of training are written
    splits = {}
    for split, stream in streams.items():
        splits[split] = encoded(config, stream, tokenizer, held_out)
    splits.setdefault("val", held_out)
    meta = write_stream(
        out_dir,
        splits,
        name=config.name[0] if config.name else "hub",
        tokenizer=tokenizer,
        shard_tokens=config.shard_tokens,
        **about,
    )
    report(meta, out_dir)


def open_streams(config):
    """{"train": the rows of the split to train on, and "val", if it is a split}, of the one column.
    Raises UserError."""
    try:
        import datasets
    except ImportError:
        raise UserError("datasets is not installed: pip install datasets") from None
    folder = config.from_dir
    if folder and not os.path.isdir(folder):  # datasets would look for it on the hub
        raise UserError(f"from_dir={folder}: is no folder; name the one that holds the files")
    streams = {}
    with one_line(f"{source_of(config)}: cannot be opened{way_out_of(config)}"):
        if folder and {"state.json", "dataset_dict.json"} & set(os.listdir(folder)):
            found = datasets.load_from_disk(folder)
            if not isinstance(found, dict):
                found = {str(found.split or "train"): found}
        else:
            found = datasets.load_dataset(
                source_of(config), config.config, revision=config.revision, streaming=True
            )
        streams["train"] = column_of(config, found, "split")
        if config.val_split is not None:
            streams["val"] = column_of(config, found, "val_split")
    return streams


def column_of(config, found, key):
    """The rows of the split that a key of the config names, of the one column."""
    split = getattr(config, key)
    configurator.check_choice(key, split, tuple(found))
    # jsonl has no names, only rows
    columns = found[split].column_names or next(iter(found[split]), [config.column])
    configurator.check_choice("column", config.column, tuple(columns))
    # no other column is decoded: a picture there may be damaged
    stream = found[split].select_columns([config.column])
    if next(iter(stream), None) is None:
        raise UserError(f"{key}={split!r}: has no rows; name another split")
    return stream


def source_of(config):
    return config.from_dir or config.name[0]


def way_out_of(config):
    return "" if config.from_dir else WAY_OUT


def texts_of(config, stream):
    """Yields the documents of a stream as str."""
    with one_line(f"{source_of(config)}: cannot be read{way_out_of(config)}"):
        texts = (row[config.column] for row in stream)
        for text in itertools.islice(filter(None, texts), config.documents):
            if not isinstance(text, str):
                what = type(text).__name__
                raise UserError(f"column={config.column}: holds {what}, which is no text")
            yield text if text.endswith("\n") else f"{text}\n"


def is_held_out(config, text):
    """Whether a document of the split of training is for validation."""
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
    return config.val_split is None and place < config.val_fraction


def encoded(config, stream, tokenizer, held_out):
    """Yields the documents of a stream, encoded, in its order; those that are held out go to
    `held_out` instead."""
    texts = tqdm(texts_of(config, stream), unit=" documents")
    for text, document in encode_in_threads(texts, tokenizer, config.threads):
        if is_held_out(config, text):
            held_out.append(document)
        else:
            yield document


def encode_in_threads(texts, tokenizer, threads):
    """Yields (text, what `encode` returns) of each text, in their order."""
    waiting = collections.deque()
    with ThreadPoolExecutor(threads) as pool:
        for text in texts:
            waiting.append((text, pool.submit(encode, text, tokenizer)))
            if len(waiting) == READ_AHEAD * threads:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


if __name__ == "__main__":
    configurator.run(main)
