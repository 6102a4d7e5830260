"""
Tokenizers by name, as the "tokenizer" of a data set's meta.json gives it.

    byte   UTF-8 bytes, 256 ids: needs no file
    gpt2   GPT-2's byte-level BPE, 50,257 ids, computed by tiktoken
    tokenizer.json and the first digits of its sha256   the file of a model from a hub, or of the BPE that bpe:4096
           trained on the data's own text; computed by tokenizers

    tokenizer.encode("Hello")                # a list of ints; special tokens in the text are plain text
    tokenizer.encode_array("Hello")          # the same as an array of integers
    tokenizer.decode_bytes(ids)              # b"Hello". Bytes: a cut can fall inside a character

data/backcopy has characters, which its meta.json lists; the ids of data/mqar stand for no text.
"""

import hashlib
import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from base.configurator import UserError
from base.files import find_checkpoint, one_line, read_regular
from data.meta import dtype_of

END_OF_TEXT = 50256  # of gpt2
TOKENIZER_FILE = "tokenizer.json"
MOST_TOKENIZER = 1 << 28  # bytes of a file of a tokenizer
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # as models call it
BPE_PIECES = 25_000  # a BPE is trained on the first pieces of the texts
BPE_PIECE = 4_096  # characters of a piece, at most
CHOICES = (
    "byte, gpt2, bpe:N (N ids, trained on the text for training), a folder with a tokenizer.json, or "
    "a GGUF file"
)


def tokenizer_of_checkpoint(path: Path | str, data: dict, choice: str | None = None) -> Any:
    """The tokenizer that a model was trained with. data: what its checkpoint keeps of the data set.
    choice: one of CHOICES but bpe:N, or char:FILE, the characters of a text in their order, as
    nanoGPT's data/shakespeare_char has them."""
    if choice is not None and choice.startswith("char:"):
        text = read_regular(choice.removeprefix("char:"), MOST_TOKENIZER)
        with one_line(f"tokenizer {choice!r}: is not UTF-8 text", UnicodeError):
            return AlphabetTokenizer("".join(sorted(set(text.decode()))), first_id=0)
    if choice is not None and choice.startswith("bpe:"):
        raise UserError(
            f"tokenizer {choice!r}: name the folder of the tokenizer.json that was trained"
        )
    if choice is not None:
        return choose_tokenizer(choice, [])
    if "alphabet" in data:
        return AlphabetTokenizer(data["alphabet"])
    if "tokenizer" not in data:
        raise UserError(
            f"{path}: does not say how text becomes tokens; add --tokenizer=gpt2, --tokenizer=byte or, "
            "for characters, --tokenizer=char:input.txt"
        )
    if "tokenizer_json" in data:
        return FileTokenizer(path, data["tokenizer_json"].encode())
    folder = path if os.path.isdir(path) else find_checkpoint(path).parent
    return get_tokenizer(data["tokenizer"], [folder, data.get("path") or "."])


def tokenizer_of(dataset) -> Any:
    """The tokenizer of an open data set (shards.Dataset). Raises UserError as get_tokenizer
    does."""
    if dataset.alphabet is not None:
        return AlphabetTokenizer(dataset.alphabet)
    return get_tokenizer(dataset.tokenizer, [dataset.folder])


def choose_tokenizer(choice: str, texts: Iterable[str]) -> Any:
    """The tokenizer that a prepare script's key names, one of CHOICES; bpe:N is trained on the first
    BPE_PIECES pieces of `texts`."""
    if choice.startswith("bpe:"):
        return train_bpe(choice, texts)
    if choice not in TOKENIZERS and os.path.isdir(choice):
        return FileTokenizer(Path(choice) / TOKENIZER_FILE)
    if choice.endswith(".gguf"):
        from hub.gguf_files import read_tokenizer  # with torch, which no other kind needs

        return FileTokenizer(choice, read_tokenizer(Path(choice)))
    return get_tokenizer(choice)


def get_tokenizer(name: str, folders: Iterable[Path | str] = ()) -> Any:
    """The tokenizer of that name, whose tokenizer.json may lie in `folders`. Raises UserError if it
    cannot be had."""
    if name in TOKENIZERS:
        return TOKENIZERS[name]()
    if not name.startswith(f"{TOKENIZER_FILE} "):
        raise UserError(f"tokenizer {name!r}: is no tokenizer of text; these are {CHOICES}")
    for folder in folders:
        file = Path(folder) / TOKENIZER_FILE
        if file.is_file():
            tokenizer = FileTokenizer(file)
            if tokenizer.name == name:
                return tokenizer
    where = ", ".join(str(folder) or "." for folder in folders)
    raise UserError(
        f"{name!r}: the {TOKENIZER_FILE} with this sha256 is not in {where}; copy it there"
    )


class Tokenizer:
    """What all have in common. A kind has encode_array, decode_bytes and vocab_size."""

    end_of_text = 0  # the id from which a text without a prompt is drawn

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        raise NotImplementedError


class AlphabetTokenizer(Tokenizer):
    """Characters as the ids first_id, first_id + 1, ... Those of a data set begin at 1; 0 is <s>,
    which may begin a row and is decoded as nothing."""

    name = "alphabet"

    def __init__(self, alphabet: str, first_id: int = 1):
        self.alphabet = alphabet
        self.first_id = first_id
        self.vocab_size = first_id + len(alphabet)

    def encode_array(self, text: str) -> np.ndarray:
        """Raises UserError for a character that is not in the alphabet."""
        strange = sorted(set(text) - set(self.alphabet))
        if strange:
            raise UserError(f"{strange[0]!r} is not among the characters of the data")
        ids = [self.alphabet.index(character) for character in text]
        return np.array(ids, np.int64) + self.first_id

    def decode_bytes(self, ids: list[int]) -> bytes:
        characters = [self.alphabet[i - self.first_id] for i in ids if i >= self.first_id]
        return "".join(characters).encode(errors="replace")


class ByteTokenizer(Tokenizer):
    name = "byte"
    vocab_size = 256
    end_of_text = ord("\n")

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return bytes(ids)


class GPT2Tokenizer(Tokenizer):
    name = "gpt2"
    vocab_size = 50257
    end_of_text = END_OF_TEXT

    def __init__(self):
        import tiktoken

        advice = "set TIKTOKEN_CACHE_DIR to a folder where tiktoken has cached its files on another machine"
        with one_line(f"tokenizer gpt2: cannot be had; {advice}"):
            self.encoding = tiktoken.get_encoding("gpt2")

    def encode_array(self, text: str) -> np.ndarray:
        """Raises UserError for a text on which tiktoken fails, as one of a million spaces in a
        row."""
        with one_line(f"tokenizer gpt2: fails on a text of {len(text):,} characters"):
            return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return self.encoding.decode_bytes(ids)


def name_of_file(content: bytes) -> str:
    """The name of the tokenizer whose tokenizer.json has this content."""
    return f"{TOKENIZER_FILE} {hashlib.sha256(content).hexdigest()[:16]}"


def import_tokenizers() -> Any:
    with one_line("tokenizers is not installed: pip install tokenizers", ImportError):
        import tokenizers
    return tokenizers


def train_bpe(choice: str, texts: Iterable[str]) -> "FileTokenizer":
    """A byte-level BPE, with GPT-2's borders of words; of fewer ids than asked for where the text
    has no more pairs."""
    n = choice.removeprefix("bpe:")
    if not (n.isdecimal() and 257 <= int(n) <= 1 << 20):
        raise UserError(
            f"tokenizer {choice!r}: write the number of ids, at least 257, as in bpe:4096"
        )
    library = import_tokenizers()
    letters = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = letters
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=int(n), initial_alphabet=letters.alphabet(), show_progress=False
    )
    pieces = itertools.chain.from_iterable(map(pieces_of, texts))
    made.train_from_iterator(itertools.islice(pieces, BPE_PIECES), trainer)
    return FileTokenizer(choice, made.to_str().encode())


def pieces_of(text: str) -> list[str]:
    """The text in pieces of at most BPE_PIECE characters."""
    return [text[start : start + BPE_PIECE] for start in range(0, len(text), BPE_PIECE)]


class FileTokenizer(Tokenizer):
    """The tokenizer of a tokenizer.json, as `tokenizers` computes it: byte-level BPE, or pieces
    with byte fallback."""

    def __init__(self, file: Path | str, content: bytes | None = None):
        library = import_tokenizers()
        self.content = content or read_regular(file, MOST_TOKENIZER)
        self.name = name_of_file(self.content)
        with one_line(f"{file}: damaged, or no tokenizer"):
            self._tokenizer = library.Tokenizer.from_buffer(self.content)
        self._added = self._tokenizer.get_added_tokens_decoder()  # {id: token}
        decoders = repr(self._tokenizer.decoder)  # one, or a sequence of several
        self._is_bytes = "ByteLevel" in decoders
        if not self._is_bytes and "ByteFallback" not in decoders:
            words = "its tokens are neither bytes nor pieces with byte fallback"
            raise UserError(f"{file}: {words}: only those are read")
        self._tokenizer.encode_special_tokens = True  # special tokens in a text are plain text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.end_of_text = self._find_end_of_text()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=0)

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self._encode(text, with_special=False), dtype_of(self.vocab_size))

    def _encode(self, text, with_special):
        # fast: no offsets
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=with_special)[0].ids

    def _find_end_of_text(self) -> int:
        """The token of that name; without any, the end of a line."""
        for name in ENDS_OF_TEXT:
            number = self._tokenizer.token_to_id(name)
            if number in self._added:
                return number
        return (self._encode("\n", with_special=False) or [0])[-1]

    def first_ids(self) -> list[int]:
        """The ids that its post-processor puts before a text, as Llama's <|begin_of_text|>: not
        those behind it."""
        first, *_ = self._encode("a", with_special=False)
        whole = self._encode("a", with_special=True)
        return whole[: whole.index(first)]

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self._bytes_of(token) for token in ids)

    def _bytes_of(self, token):
        text = self._tokenizer.id_to_token(token) or ""  # there may be ids that no token has
        if token in self._added:
            return text.encode()
        if self._is_bytes:
            spelled = [BYTE_OF.get(character) for character in text]
            return text.encode() if None in spelled else bytes(spelled)
        byte = re.fullmatch("<0x([0-9A-F]{2})>", text)
        if byte:
            return bytes([int(byte[1], 16)])
        return text.replace("\u2581", " ").encode()


# {character: byte} as byte-level BPE spells bytes: printable ones as themselves, the others from
# U+0100 on
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE}
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(OTHERS)}
TOKENIZERS: dict[str, type] = {"byte": ByteTokenizer, "gpt2": GPT2Tokenizer}
