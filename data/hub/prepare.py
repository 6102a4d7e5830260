"""
A data set of the Hugging Face hub, or a copy of one, read as a stream by `datasets`: pip install datasets tokenizers

    python data/hub/prepare.py roneneldan/TinyStories --val_split=validation --tokenizer=bpe:4096 --processes=4
    python data/hub/prepare.py HuggingFaceFW/fineweb-edu --config=sample-10BT --processes=8 --out_dir=data/fineweb
    python data/hub/prepare.py Skylion007/openwebtext --documents=100_000 --val_fraction=0.01
    python data/hub/prepare.py --from_dir=copies --column=story        # no internet needed

--from_dir names a folder with parquet, jsonl or jsonl.gz files, as the hub has them, or one that save_to_disk wrote.

A row of the data set is a document, and the document ends with a line end, which is added where the text has none.
Without val_split a document is held out for validation by the sha256 of its text, so the same ones are in every run,
and two copies of a text are never on both sides. Each process encodes one file of the data set after the other, into a
file in out_dir which is removed when its turn has come: the data are the same for any number of processes.
"""

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import configurator
from configurator import UserError, key
from data.shards import dtype_of
from data.tokenizer import CHOICES, choose_tokenizer
from data.writing import claim, encode, made_by, report, write_stream

GENERATOR = "data/hub/prepare.py"
VERSION = 1
LOCAL_SHARDS = 64  # parts of a data set that save_to_disk wrote, if it has so many rows


@dataclass
class Config:
    name: list[str] = key([], "the data set on the hub, as in roneneldan/TinyStories")
    config: str | None = key(None, "its configuration, where it has several, as in sample-10BT")
    revision: str | None = key(None, "its commit or branch; None: the newest")
    from_dir: str | None = key(None, "folder with a copy, in place of a name")
    column: str = key("text", "the column that holds the text")
    split: str = key("train", "the split to train on")
    val_split: str | None = key(None, "the split to validate on; None: val_fraction of the documents of `split`")
    val_fraction: float = key(0.005, "share of the documents that is validation, if no split is", above=0, below=1)
    documents: int | None = key(None, "take the first documents of each split only; None: all", at_least=1)
    tokenizer: str = key("gpt2", CHOICES)
    processes: int = key(1, "how many read and encode side by side, each a file of the data set", at_least=1)
    shard_tokens: int = key(100_000_000, "most tokens in one file", at_least=1)
    out_dir: str | None = key(None, "where to write; None: beside this script")
    overwrite: bool = key(False, "write to a folder that holds something else, too")


def main(argv):
    config = configurator.load(Config, argv, positional="name", program=GENERATOR, description=__doc__)
    if len(config.name) + (config.from_dir is not None) != 1:
        raise UserError("name one data set of the hub, or a folder with a copy: --from_dir=FOLDER")
    streams = open_streams(config)
    out_dir = claim(config.out_dir, config.overwrite, GENERATOR)
    first = itertools.islice(texts_of(config, streams["train"]), config.documents)
    tokenizer = choose_tokenizer(config.tokenizer, (text for text in first if not is_held_out(config, text)))
    held_out = []  # filled while the documents for training are written
    splits = {split: encoded(config, stream, tokenizer, out_dir, held_out) for split, stream in streams.items()}
    splits.setdefault("val", held_out)
    about = made_by(config, GENERATOR, VERSION) | dict(name=Path(source_of(config)).resolve().name)
    report(write_stream(out_dir, splits, tokenizer=tokenizer, shard_tokens=config.shard_tokens, **about), out_dir)


def source_of(config):
    return config.from_dir or config.name[0]


@contextlib.contextmanager
def named_if_it_fails(config, step):
    """Whatever datasets, the hub, the network or a damaged file raises becomes a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        advice = "pass --from_dir=FOLDER with parquet, jsonl, or what save_to_disk wrote"
        where, advice = ("", "") if config.from_dir else (" from the hub", f"; {advice}")
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:180]}"
        raise UserError(f"{source_of(config)}: cannot be {step}{where} ({reason}){advice}") from None


def open_streams(config):
    """{"train": a datasets.IterableDataset of the column, and "val", if it is a split}. Raises UserError."""
    try:
        import datasets
    except ImportError:
        raise UserError("datasets is not installed: pip install datasets") from None
    if config.from_dir and not os.path.isdir(config.from_dir):
        raise UserError(f"from_dir={config.from_dir}: no such folder")
    with named_if_it_fails(config, "opened"):
        if config.from_dir and {"state.json", "dataset_dict.json"} & {*os.listdir(config.from_dir)}:
            saved = datasets.load_from_disk(config.from_dir)
            saved = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
            found = {split: rows.to_iterable_dataset(min(LOCAL_SHARDS, len(rows))) for split, rows in saved.items()}
        else:
            found = datasets.load_dataset(source_of(config), config.config, revision=config.revision, streaming=True)
    streams = {}
    for ours, theirs in {"train": config.split, "val": config.val_split}.items():
        if theirs is not None:
            configurator.check_choice("split" if ours == "train" else "val_split", theirs, tuple(found))
            with named_if_it_fails(config, "read"):  # the columns of jsonl are those of its first row
                columns = found[theirs].column_names or next(iter(found[theirs]))
            configurator.check_choice("column", config.column, tuple(columns))
            streams[ours] = found[theirs].select_columns([config.column])
    return streams


def texts_of(config, stream):
    """The documents of a stream as str."""
    with named_if_it_fails(config, "read"):
        for row in stream:
            text = row[config.column] or ""
            if not isinstance(text, str):
                raise UserError(f"column={config.column}: holds {type(text).__name__}, which is no text")
            yield text if text.endswith("\n") else f"{text}\n"


def is_held_out(config, text):
    """Whether a document of the split of training is for validation."""
    place = int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:8]) / 2**64
    return config.val_split is None and place < config.val_fraction


def encode_part(config, tokenizer, folder, part):
    """Encodes the documents of one part of a stream into a file, and returns it with what is known of each document."""
    number, stream = part
    path, facts = Path(folder) / str(number), []
    texts = itertools.islice(texts_of(config, stream), config.documents)
    with open(path, "wb") as file:
        for text in tqdm(texts, f"part {number}", unit=" documents", position=number % config.processes, leave=False):
            counts, ids = encode(text, tokenizer)
            file.write(ids.tobytes())
            facts.append((is_held_out(config, text), counts))
    return path, facts


@contextlib.contextmanager
def mapped(processes):
    """A function like map, which gives the results in their order, of so many processes."""
    if processes == 1:
        yield map
    else:  # a fork would share the sockets; Ctrl-C is for this process, which then ends the others
        with multiprocessing.get_context("spawn").Pool(
            processes, signal.signal, (signal.SIGINT, signal.SIG_IGN)
        ) as pool:
            yield pool.imap


def encoded(config, stream, tokenizer, out_dir, held_out):
    """The documents of a stream, encoded, in its order; those that are held out go to `held_out` instead."""
    parts = [(number, stream.shard(stream.num_shards, number)) for number in range(stream.num_shards)]
    with tempfile.TemporaryDirectory(dir=out_dir, prefix="parts-") as folder, mapped(config.processes) as run:
        left = config.documents or sys.maxsize
        for path, facts in run(partial(encode_part, config, tokenizer, folder), parts):
            with open(path, "rb") as file:
                for is_val, counts in facts[:left]:
                    document = counts, np.fromfile(file, dtype_of(tokenizer.vocab_size), counts[2])
                    if is_val:
                        held_out.append(document)
                    else:
                        yield document
            path.unlink()
            left -= len(facts)
            if left <= 0:
                return


if __name__ == "__main__":
    configurator.run(main)
