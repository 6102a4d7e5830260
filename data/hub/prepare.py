"""
A data set of the Hugging Face hub, or a copy of one, read as a stream by `datasets`: pip install
datasets tokenizers

    python data/hub/prepare.py roneneldan/TinyStories --val_split=validation --tokenizer=bpe:4096 --processes=4
    python data/hub/prepare.py HuggingFaceFW/fineweb-edu --config=sample-10BT --processes=8 --out_dir=data/fineweb
    python data/hub/prepare.py Skylion007/openwebtext --documents=100_000 --val_fraction=0.01
    python data/hub/prepare.py --from_dir=copies --column=story        # no internet needed

--from_dir names a folder with parquet, jsonl or jsonl.gz files, as the hub has them, or one that save_to_disk wrote.

A row that is not empty is a document. It ends with a line end, which is added where the text has
none. Without val_split the sha256 of a text decides whether it is held out for validation: no copy
of it is on the other side.

A process encodes one shard of the stream (a file of the data set) after the other, into files that
are removed when they have been joined, in their order: the data are the same for any number of
processes.
"""

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import configurator
from base.files import NEW, one_line
from configurator import UserError, key
from data.shards import dtype_of
from data.tokenizer import CHOICES, choose_tokenizer
from data.writing import Output, claim, encode, report, write_stream

GENERATOR = "data/hub/prepare.py"
VERSION = 1
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
    processes: int = key(
        1, "how many read and encode side by side, each a file of the data set", at_least=1
    )
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
    # here it is the source
    out_dir, about = claim(config, GENERATOR, VERSION, from_dir=config.from_dir)
    train = (text for text in texts_of(config, streams["train"]) if not is_held_out(config, text))
    tokenizer = choose_tokenizer(config.tokenizer, train)
    held_out = []  # is filled while the documents of training are written
    splits = {
        split: encoded(config, stream, tokenizer, out_dir / NEW, held_out)
        for split, stream in streams.items()
    }
    splits.setdefault("val", held_out)
    about |= dict(
        name=[*config.name, "hub"][0], tokenizer=tokenizer, shard_tokens=config.shard_tokens
    )
    report(write_stream(out_dir, splits, **about), out_dir)


def open_streams(config):
    """{"train": a datasets.IterableDataset of the column, and "val", if it is a split}. Raises
    UserError."""
    try:
        import datasets
    except ImportError:
        raise UserError("datasets is not installed: pip install datasets") from None
    folder, streams = config.from_dir, {}
    if folder and not os.path.isdir(folder):  # datasets would look for it on the hub
        raise UserError(f"from_dir={folder}: is no folder; name the one that holds the files")
    with one_line(f"{folder or config.name[0]}: cannot be opened{WAY_OUT * (folder is None)}"):
        if folder and {"state.json", "dataset_dict.json"} & {*os.listdir(folder)}:
            saved = datasets.load_from_disk(folder)
            saved = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
            # 64 shards
            found = {
                split: rows.to_iterable_dataset(min(64, len(rows))) for split, rows in saved.items()
            }
        else:
            where = folder or config.name[0], config.config
            found = datasets.load_dataset(*where, revision=config.revision, streaming=True)
        for ours, name in {"train": "split", "val": "val_split"}.items():
            if (theirs := getattr(config, name)) is not None:
                configurator.check_choice(name, theirs, tuple(found))
                # jsonl has no names, only rows. No other column is decoded: a picture there may be
                # damaged
                columns = found[theirs].column_names or next(iter(found[theirs]), [config.column])
                configurator.check_choice("column", config.column, tuple(columns))
                streams[ours] = found[theirs].select_columns([config.column])
                if next(iter(streams[ours]), None) is None:
                    raise UserError(f"{name}={theirs!r}: has no rows; name another split")
    return streams


def texts_of(config, stream):
    """The documents of a stream as str."""
    with one_line(
        f"{config.from_dir or config.name[0]}: cannot be read{WAY_OUT * (config.from_dir is None)}"
    ):
        texts = filter(None, (row[config.column] for row in stream))
        for text in itertools.islice(texts, config.documents):
            if not isinstance(text, str):
                raise UserError(
                    f"column={config.column}: holds {type(text).__name__}, which is no text"
                )
            yield text if text.endswith("\n") else f"{text}\n"


def is_held_out(config, text):
    """Whether a document of the split of training is for validation."""
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
    return config.val_split is None and place < config.val_fraction


def encoded(config, stream, tokenizer, folder, held_out):
    """The documents of a stream, encoded, in its order; those that are held out go to `held_out`
    instead."""
    # as bytes: multiprocessing itself would pass datasets' tensor of the epoch through a socket of
    # this process
    shards = [
        (i, pickle.dumps(stream.shard(stream.num_shards, i))) for i in range(stream.num_shards)
    ]
    left = config.documents or sys.maxsize
    with mapping(config.processes) as side_by_side:
        for path, facts in side_by_side(partial(encode_shard, config, tokenizer, folder), shards):
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


@contextlib.contextmanager
def mapping(n):
    """A `map` of n processes, which end with the block."""
    if n == 1:
        yield map
        return
    pool = ProcessPoolExecutor(n, multiprocessing.get_context("spawn"), start_worker)
    try:
        with one_line(
            f"processes={n}: one was killed; take fewer --processes, or more memory",
            BrokenProcessPool,
        ):
            yield pool.map
    finally:
        for worker in multiprocessing.active_children():
            worker.terminate()
        pool.shutdown(cancel_futures=True)


def start_worker():
    # Ctrl-C is for the first process, which ends the others
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # tqdm's own lock would be reported as leaked when they are ended
    tqdm.set_lock(threading.RLock())
    # where the first process is killed, a worker would wait forever
    gone = multiprocessing.parent_process().join
    threading.Thread(target=lambda: (gone(), os._exit(1)), daemon=True).start()


def encode_shard(config, tokenizer, folder, numbered):
    """Writes the tokens of one shard's documents to a file, whose dot keeps it out of the data set.
    Returns its path, and what is known of each document."""
    (number, shard), facts, path = numbered, [], folder / f".part{numbered[0]}"
    bar = dict(
        desc=f"shard {number}", unit=" documents", position=number % config.processes, leave=False
    )
    with open(path, "wb") as file:
        for text in tqdm(texts_of(config, pickle.loads(shard)), **bar):
            counts, ids = encode(text, tokenizer)
            file.write(ids.tobytes())
            facts.append((is_held_out(config, text), counts))
    return path, facts


if __name__ == "__main__":
    configurator.run(main)
