"""The files of an export that say how text becomes tokens: copies, and those without which
transformers takes another tokenizer than the model was trained with.

AutoTokenizer chooses a class by the model_type where a folder has no tokenizer_config.json. That
class brings a way of splitting words and special tokens of its own, whose ids may lie past the
embedding.
"""

import itertools
import json
import math
import os
from pathlib import Path

from base.files import read_regular
from configurator import UserError
from data.tokenizer import (
    BYTE_OF,
    MOST_TOKENIZER,
    TOKENIZER_FILE,
    ByteTokenizer,
    GPT2Tokenizer,
    name_of_file,
)

CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
# tokenizer_config.json with the class that reads tokenizer.json alone; special tokens in a text are
# plain text, as here
AS_IT_IS = json.dumps(
    {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    },
    indent=2,
).encode()
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}


def copied_files(file: Path, data: dict) -> dict[str, bytes]:
    """{name: content} of the files of a model's tokenizer. file: one of the model's, beside which
    they lie; data: what a checkpoint keeps of its data set, whose folder has a trained run's
    tokenizer.json. Raises UserError."""
    there = [name for name in TOKENIZER_FILES if os.path.exists(file.parent / name)]
    contents = {name: read_regular(file.parent / name, MOST_TOKENIZER) for name in there}
    of_data = Path(data.get("path") or ".") / TOKENIZER_FILE
    if TOKENIZER_FILE not in contents and os.path.isfile(of_data):
        content = read_regular(of_data, MOST_TOKENIZER)
        contents |= (
            {TOKENIZER_FILE: content} if name_of_file(content) == data.get("tokenizer") else {}
        )
    return contents


def files_for_transformers(file: Path, data: dict) -> dict[str, bytes]:
    """copied_files, and what AutoTokenizer needs beside them. None at all, if the data's ids stand
    for no text, or if GPT-2's tokenizer cannot be had here."""
    contents = copied_files(file, data)
    if TOKENIZER_FILE not in contents and data.get("tokenizer") == "byte":
        content = file_of_bpe(
            {bytes([i]): i for i in range(ByteTokenizer.vocab_size)}, {}, splits_words=False
        )
        contents[TOKENIZER_FILE] = content
    if TOKENIZER_FILE not in contents and data.get("tokenizer") == "gpt2":
        try:
            encoding = GPT2Tokenizer().encoding
            ids, special = encoding._mergeable_ranks, encoding._special_tokens
            contents[TOKENIZER_FILE] = file_of_bpe(ids, special, splits_words=True)
        except UserError:  # tiktoken has no copy of it, and no network
            return contents
    if TOKENIZER_FILE in contents and CONFIG_FILE not in contents:
        contents[CONFIG_FILE] = AS_IT_IS
    return contents


def file_of_bpe(ids: dict[bytes, int], special: dict[str, int], splits_words: bool) -> bytes:
    """The tokenizer.json of a byte-level BPE.

    ids: of each token; the lower it is, the earlier the token's two parts are merged. special: of
    the special tokens. splits_words: whether nothing is merged across the borders of words, as
    GPT-2 finds them.
    """
    spelled = {token: "".join(CHARACTER_OF[byte] for byte in token) for token in ids}
    merges = []
    for token in sorted(ids, key=ids.__getitem__):
        if len(token) > 1:
            merges.append([spelled[part] for part in parts_of_token(token, ids)])
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": splits_words,
    }
    added = dict(special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text} | added for text, i in special.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spelled[token]: i for token, i in ids.items()} | special,
            "merges": merges,
        },
    }
    return json.dumps(content, ensure_ascii=False).encode()


def parts_of_token(token: bytes, ids: dict[bytes, int]) -> list[bytes]:
    """The two tokens that BPE merges last into this one: of all neighbours it merges those of the
    lowest id first."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        merged = [ids.get(a + b, math.inf) for a, b in itertools.pairwise(parts)]
        i = merged.index(min(merged))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts
