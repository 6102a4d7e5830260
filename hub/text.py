"""The files of an export that say how text becomes tokens: copies, and those without which
transformers takes another tokenizer than the model was trained with.

AutoTokenizer chooses a class by the model_type where a folder has no tokenizer_config.json. That
class brings a way of splitting words and special tokens of its own, whose ids may lie past the
embedding.
"""

import json
import os
from pathlib import Path

from base.files import read_regular
from data.tokenizer import MOST_TOKENIZER, TOKENIZER_FILE, name_of_file

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
# the class that reads tokenizer.json alone; special tokens in a text are plain text, as here
AS_IT_IS = json.dumps(
    {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
).encode()


def copied_files(file: Path, data: dict) -> dict[str, bytes]:
    """{name: content} of the files of a model's tokenizer, and what AutoTokenizer needs beside
    them. file: one of the model's, beside which they lie; data: what a checkpoint keeps of its data
    set, whose folder has a trained run's tokenizer.json. Raises UserError."""
    contents = {}
    for name in TOKENIZER_FILES:
        if os.path.exists(file.parent / name):
            contents[name] = read_regular(file.parent / name, MOST_TOKENIZER)
    of_data = Path(data.get("path") or ".") / TOKENIZER_FILE
    if "tokenizer_json" in data:  # of a GGUF file
        contents = {TOKENIZER_FILE: data["tokenizer_json"].encode()}
    elif TOKENIZER_FILE not in contents and os.path.isfile(of_data):
        content = read_regular(of_data, MOST_TOKENIZER)
        if name_of_file(content) == data.get("tokenizer"):
            contents[TOKENIZER_FILE] = content
    if TOKENIZER_FILE in contents:
        contents.setdefault(CONFIG_FILE, AS_IT_IS)
    return contents
