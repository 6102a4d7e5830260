"""
tinyshakespeare (Karpathy 2015, char-rnn), the megabyte that nanoGPT begins with, as bytes: each
character is one.

    python data/shakespeare_char/prepare.py                          # downloads one file
    python data/shakespeare_char/prepare.py --from_file=input.txt    # no internet needed

The first nine tenths are for training, the rest for validation, as in nanoGPT: 1,003,854 and
111,540 characters. A loss is in nats a character, as nanoGPT's is; but the vocabulary is the 256
bytes, not the 65 characters that occur.
"""

import hashlib
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from base import configurator
from base.configurator import UserError, key
from base.files import one_line, read_regular
from data.tokenizer import get_tokenizer
from data.writing import Output, claim, write_stream

GENERATOR = "data/shakespeare_char/prepare.py"
VERSION = 1
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@dataclass
class Config(Output):
    from_file: str | None = key(None, "a local copy of the file; None: download it")


def main(argv):
    config = configurator.load(Config, argv, positional=None)
    # the folder, marked as ours, and for its meta.json how the data are made
    out_dir, about = claim(config, GENERATOR, VERSION)
    if config.from_file:
        data = read_regular(config.from_file, most=1 << 24)
    else:
        with one_line(f"{URL}: cannot be downloaded; --from_file=FILE takes a copy"):
            with urllib.request.urlopen(URL, timeout=60) as answer:
                data = answer.read()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise UserError(
            f"{config.from_file or URL}: is not tinyshakespeare: its sha256 is not {SHA256}"
        )
    text = data.decode()
    cut = len(text) * 9 // 10
    splits = {"train": [text[:cut]], "val": [text[cut:]]}
    tokenizer = get_tokenizer("byte")
    write_stream(out_dir, splits, name="shakespeare_char", tokenizer=tokenizer, **about)


if __name__ == "__main__":
    configurator.run(main)
