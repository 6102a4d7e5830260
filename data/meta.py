"""
How a data set lies on disk: a folder of .npy shards, and a meta.json that lists and describes them.

Shards are uint16, or uint32 for more than 65,536 token ids. There are three kinds of data sets:

    stream    shards of shape (tokens,) hold running text: the shards of a split are one long row of tokens
    examples  shards of shape (rows, 2, T) hold tokens and labels. Where the label is 0, nothing is predicted
    drawn     examples, but the train split has no shards: data/drawn.py draws its rows anew for every step

data/writing.py writes such a folder, and data/shards.py reads it. No torch is imported here, so that
the prepare scripts start quickly.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from base.configurator import UserError
from base.files import read_json
from base.rules import show, wrong_field
from data import drawn

FORMAT = 1
UINT16_VOCAB = 1 << 16  # the most token ids of uint16
MAX_VOCAB = 1 << 31  # the most token ids at all
# a meta.json may come from a stranger, and none of these names leads to another folder
FILE_NAME = re.compile(r"[\w .-]{1,80}_(\d{4,9}|documents)\.npy|tokenizer\.json")

# What a meta.json must hold to be read, as rules of base/rules.py
TEXT = (str, 1, 99)
COUNT = (int, 1, 1 << 60)
MANY = 1 << 20
FILE = {"file": TEXT, "sha256": (str, 64, 64)}
STREAM_SPLIT: dict = {
    "documents": COUNT,
    "bytes": COUNT,
    "tokens": COUNT,
    "document_offsets": FILE,
    "shards": [FILE | {"tokens": COUNT}, 1, MANY],
}
ROWS_FILE = FILE | {"rows": COUNT, "seq_len": COUNT, "slice": TEXT, "perfect_loss?": (float, 0, 99)}
ROWS_SPLIT: dict = {"rows": COUNT, "tokens": COUNT, "shards": [ROWS_FILE, 1, MANY]}
# a function of drawn.TASKS draws the rows; seed is the data set's, and a run adds its own
DRAWN_SPLIT: dict = {
    "drawn": {
        "task": set(drawn.TASKS),
        "length": (int, 1, drawn.LONGEST),
        "seed": (int, 0, 1 << 63),
        "version": (int, drawn.VERSION, drawn.VERSION),
    },
    "shards": [ROWS_FILE, 0, 0],
}
ANY_KIND: dict = {
    "format": (int, FORMAT, FORMAT),
    "name": TEXT,
    "tokenizer": TEXT,
    "vocab_size": (int, 1, MAX_VOCAB),
    "tokenizer_file?": FILE,
    "kinds?": {str: [(int, 0, MAX_VOCAB - 1), 1, MAX_VOCAB]},
}
# parameters are the keys of the prepare script; published_words give the word perplexity of a text
STREAM_PARAMETERS = {"text?": {str: {"published_words?": COUNT}}, "version?": TEXT}
ROWS_PARAMETERS = {"alphabet?": (str, 1, MAX_VOCAB)}
META = {
    "stream": ANY_KIND | {"parameters": STREAM_PARAMETERS, "splits": {str: STREAM_SPLIT}},
    "examples": ANY_KIND | {"parameters": ROWS_PARAMETERS, "splits": {str: ROWS_SPLIT}},
    "drawn": ANY_KIND
    | {"parameters": ROWS_PARAMETERS, "splits": {str: ROWS_SPLIT, "train": DRAWN_SPLIT}},
}


def dtype_of(vocab_size: int) -> np.dtype:
    """The dtype of shards with so many token ids."""
    return np.dtype(np.uint16 if vocab_size <= UINT16_VOCAB else np.uint32)


def read_meta(folder: Path) -> dict:
    """The content of a folder's meta.json, every field checked. Raises UserError."""
    file = folder / "meta.json"
    meta = read_json(file)
    wrong = wrong_field(meta, {"kind": set(META)}) or wrong_field(meta, META[meta["kind"]])
    if wrong:
        raise UserError(f"{file}: {wrong}")
    for entry in files_of(meta):
        name = entry["file"]
        if not FILE_NAME.fullmatch(name):
            raise UserError(f"{file}: names {show(name)}, which is not the name of a shard")
    return meta


def files_of(meta: dict) -> Iterator[dict]:
    """The entry of each file in a meta.json: its name, sha256, size, and what it holds."""
    for facts in meta["splits"].values():
        yield from facts["shards"]
        if meta["kind"] == "stream":
            yield facts["document_offsets"]
    if "tokenizer_file" in meta:
        yield meta["tokenizer_file"]
