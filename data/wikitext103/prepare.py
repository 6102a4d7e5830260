"""
WikiText-103 (Merity et al. 2016), the tokenised or the raw version, in GPT-2's BPE or as bytes.

    python data/wikitext103/prepare.py                                # downloads the tokenised one
    python data/wikitext103/prepare.py --from_dir=copies --mini=true  # no internet needed, seconds

--from_dir names a folder with wiki.{train,valid,test}.tokens, the same files in .raw, or the hub's parquet files; a
missing split is left out. --mini=true trains on the validation articles and validates on the test articles, as the data
set wikitext103-mini, because its perplexities are not WikiText-103's.

A document is an article, which begins with a line " = Title = ". No token is put between documents:
the shards of a split decode to the bytes of its file. Words are counted as for published
perplexities: whatever stands between spaces is a word, and so is the end of each line, also of an
empty one. If a split of the tokenised version is whole (has the published number of lines), its
number of words must be the published one.
"""

import hashlib
import itertools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from base import configurator
from base.configurator import UserError, key
from base.files import DATA, one_line
from data.tokenizer import CHOICES, choose_tokenizer
from data.writing import Output, claim, write_stream

GENERATOR = "data/wikitext103/prepare.py"
VERSION = 1
HUB = "Salesforce/wikitext"
HUB_CONFIG = {"tokens": "wikitext-103-v1", "raw": "wikitext-103-raw-v1"}
SOURCES = {"train": "train", "val": "valid", "test": "test"}  # our split: theirs
MINI_SOURCES = {"train": "valid", "val": "test"}
LINES = {"train": 1_801_350, "valid": 3_760, "test": 4_358}  # the same in both versions
WORDS = {"train": 103_227_021, "valid": 217_646, "test": 245_569}  # of the tokenised version
# A title stands between two empty lines; " = = Section = = " and the " = note " under a table are
# no titles. The pattern begins with a plain newline and looks back from there: that is ten times as
# fast as a search for "^ ?\n = "
TITLE = re.compile(rb"\n(?:(?<=\n \n)|(?<=\n\n)|(?<=\A \n)|(?<=\A\n)) = (?!= )[^\n]+ = \n(?= ?\n)")


@dataclass
class Config(Output):
    version: str = key(
        "tokens", "tokens: words apart, rare ones <unk>; raw: as written", choices=HUB_CONFIG
    )
    from_dir: str | None = key(None, "folder with local copies; None: download them")
    tokenizer: str = key("gpt2", CHOICES)
    mini: bool = key(False, "train on the validation articles, validate on the test articles")
    out_dir: str | None = key(None, "where to write; None: data/wikitext103, with -raw and -mini")


def main(argv):
    config = configurator.load(Config, argv, positional=None)
    name = "wikitext103"
    if config.version == "raw":
        name += "-raw"
    if config.mini:
        name += "-mini"
    config.out_dir = config.out_dir or str(DATA / name)
    folder = Path(config.from_dir or download(HUB_CONFIG[config.version]))
    texts = {}
    facts = {}
    for split, source in (MINI_SOURCES if config.mini else SOURCES).items():
        data = read_copy(folder, source, config.version)
        if data:
            texts[split] = data
            facts[split] = describe(data, source, config.version)
    if not texts:
        raise UserError(f"{folder}: has no text in wiki.*.{config.version} or *.parquet")
    out_dir, about = claim(config, GENERATOR, VERSION, text=facts)
    # after the text: without the internet, the error about the text names the ways to get both
    first = next(iter(texts.values()))
    tokenizer = choose_tokenizer(config.tokenizer, documents(first))
    write_stream(
        out_dir,
        {split: documents(data) for split, data in texts.items()},
        name=name,
        tokenizer=tokenizer,
        shard_tokens=10_000_000,
        count_words=count_words,
        **about,
    )


def download(name):
    """The folder of the hub's files, or of those that an earlier download left. Raises
    UserError."""
    advice = "--from_dir=FOLDER takes copies; the gpt2 tokenizer needs a filled TIKTOKEN_CACHE_DIR"
    with one_line(f"{HUB} {name}: cannot be downloaded; {advice}"):
        import huggingface_hub

        return huggingface_hub.snapshot_download(
            HUB, repo_type="dataset", allow_patterns=f"{name}/*"
        )


def read_copy(folder, source, version):
    """The text of wiki.SOURCE.VERSION, or of the hub's parquet files in the folder or in the hub's
    subfolder of it. None where there is neither."""
    file = folder / f"wiki.{source}.{version}"
    if file.is_file():
        return file.read_bytes()
    for place in (folder / HUB_CONFIG[version], folder):
        files = sorted(place.glob(f"{source}*.parquet"))
        if files:
            return b"".join(read_parquet(file) for file in files)
    return None


def read_parquet(file):
    """The bytes of the original file. Each row is a line of it; the hub emptied the rows of blank
    lines, " \\n"."""
    with one_line(f"{file}: is not a parquet file with a column 'text'"):
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(file, columns=["text"])["text"].to_pylist()
    return "".join(row or " \n" for row in rows).encode()


def describe(data, source, version):
    """What identifies the text, for meta.json. A text with the published number of lines is the
    whole split."""
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    facts = {
        "source": source,
        "sha256": hashlib.sha256(data).hexdigest(),
        "lines": lines,
        "whole": lines == LINES[source],
    }
    if facts["whole"]:
        # word perplexities of the raw version, too, are published per word of the tokenised one
        facts["published_words"] = WORDS[source]
        words = sum(count_words(document) for document in documents(data))
        if version == "tokens" and words != WORDS[source]:
            what = f"{source}: has {words:,} words, where {WORDS[source]:,} are published"
            raise UserError(f"{what}; the copy is damaged or not the tokenised version")
    return facts


def documents(data):
    """Yields the articles as str. Text before the first title is a document of its own, unless it
    is blank."""
    starts = [match.start() + 1 for match in TITLE.finditer(data)]
    if starts and data[: starts[0]].isspace():
        del starts[0]
    with one_line("the text is not UTF-8", UnicodeDecodeError):
        for start, stop in itertools.pairwise([0, *starts, len(data)]):
            yield data[start:stop].decode()


def count_words(text):
    """The number of words as WikiText-103's language models count them, where the end of each line
    is a word, too."""
    return len(text.split()) + text.count("\n") + (text[-1:] not in ("", "\n"))


if __name__ == "__main__":
    configurator.run(main)
