"""
WikiText-103: what its documents and words are, what is said offline; GPT-2's tokenizer.

    python -m pytest tests/test_wikitext103.py
"""

import os
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from conftest import ROOT, Helpers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiktoken_ext.openai_public import r50k_pat_str

from data import tokenizer
from data.shards import open_dataset
from data.wikitext103 import prepare

REAL = ROOT.parent / "shared" / "data"
GPT2 = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or REAL / "tiktoken_cache")
real_files = pytest.mark.skipif(
    not (REAL / "wikitext103").is_dir() or not GPT2.is_dir(), reason="the real files are not on this machine"
)

TITLES = [" \n = Alpha = \n \n", " \n = The Beta = Gamma = \n \n", " \n = Δέλτα = \n \n"]
BODIES = [
    " One two @-@ three .\n \n = = Section = = \n \n Four <unk> .\n",  # 5 + 0 + 5 + 0 + 3
    " a b\n = Qualified for the next round \n = National record = \n c\n",  # 2 + 6 + 4 + 1: neither is a title
    " μ ν\u3000ξ <|endoftext|>\n",  # 4: a space is what str.split takes for one
]
MADE = "".join(title + body for title, body in zip(TITLES, BODIES, strict=True))
WORDS = (3 + 5 + 5 + 3) + (6 + 2 + 6 + 4 + 1) + (3 + 4)
LINES = MADE.count("\n")


@pytest.fixture
def made(tmp_path):
    """A folder with all three splits: three times the made text, twice, and once."""
    (tmp_path / "made").mkdir()
    for i, source in enumerate(("train", "valid", "test")):
        (tmp_path / "made" / f"wiki.{source}.tokens").write_bytes(MADE.encode() * (3 - i))
    return tmp_path / "made"


def run(out_dir, from_dir, *words, tokenizer="byte"):
    from_dir = [f"--from_dir={from_dir}"] if from_dir else []
    prepare.main([f"--out_dir={out_dir}", *from_dir, f"--tokenizer={tokenizer}", *words])
    return open_dataset(out_dir)


def tokens_of(dataset, split):
    listed = dataset.meta["splits"][split]["shards"]
    return np.concatenate([np.load(dataset.folder / shard["file"]) for shard in listed])


def articles(dataset, split):
    decode = tokenizer.get_tokenizer(dataset.tokenizer).decode_bytes
    parts = np.split(tokens_of(dataset, split), np.load(dataset.folder / f"{split}_documents.npy")[1:-1])
    return [decode(part.tolist()) for part in parts]


# ----------------------------------------------------------------------------------------------------------------------
# Documents, words, bytes


def test_words_are_what_stands_between_spaces_and_one_for_the_end_of_each_line(made, tmp_path):
    dataset, size = run(tmp_path / "out", made), len(MADE.encode())
    for split, n in {"train": 3, "val": 2, "test": 1}.items():
        counts = {"documents": 3 * n, "words": (WORDS + LINES) * n, "bytes": size * n, "tokens": size * n}
        assert dataset.counts(split) == counts
        about = dataset.meta["parameters"]["text"][split]
        assert about["lines"] == LINES * n and about["whole"] is False and "published_words" not in about
    assert dataset.meta["parameters"]["version"] == "tokens" and dataset.name == "wikitext103"


@settings(deadline=None, max_examples=100)
@given(st.text(st.sampled_from("ab \n\t\r\x1c\x1f\x85\xa0\u1680\u2009\u200b\u2028\u3000é中🙂")))
@example("a b\n\nc")
def test_the_count_of_words_is_the_count_by_definition(text):
    lines = text.split("\n")
    ends = len(lines) - (lines[-1] == "")
    assert prepare.count_words(text) == len(text.split()) + ends


def test_an_article_begins_at_a_title_between_empty_lines_and_nothing_is_put_between_two(made, tmp_path):
    dataset = run(tmp_path / "out", made, "--shard_tokens=50")
    assert [shard["tokens"] for shard in dataset.meta["splits"]["test"]["shards"]][:-1] == [50] * (
        len(MADE.encode()) // 50
    )
    found = articles(dataset, "test")
    # the empty line before a title ends the article before it; the one before the first title has no other place
    assert found[0] == f"{TITLES[0]}{BODIES[0]} \n".encode()
    assert found[1].startswith(b" = The Beta = Gamma = \n") and found[2].startswith(" = Δέλτα = \n".encode())
    assert b"".join(found) == MADE.encode()


def test_text_before_the_first_title_is_a_document_of_its_own():
    for documents in (
        ["the rest of one\n \n", " = A = \n \n a\n"],
        [" = A = \n \n a\n \n", " = B = \n \n b"],
        ["\n = A = \n\n", " = B = \n\n"],
        [" = A = \n \n = A note = \n a\n"],
        ["no title"],
    ):
        assert list(prepare.documents("".join(documents).encode(), "train")) == documents


def test_the_hubs_files_give_the_same_shards_as_the_text(made, tmp_path, monkeypatch, refusal):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    import huggingface_hub

    copies, asked = tmp_path / "copies" / "wikitext-103-v1", []
    copies.mkdir(parents=True)
    for source, name in {"train": "train", "valid": "validation", "test": "test"}.items():
        lines = (made / f"wiki.{source}.tokens").read_text().splitlines(keepends=True)
        rows = ["" if line == " \n" else line for line in lines]  # as the hub has them
        for i, part in enumerate((rows[:7], rows[7:])):
            parquet.write_table(pyarrow.table({"text": part}), copies / f"{name}-0000{i}-of-00002.parquet")

    def snapshot_download(*words, **keys):
        asked.append((*words, *keys.values()))
        return str(copies.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    wanted = run(tmp_path / "text", made)
    for from_dir in (copies.parent, copies, None):
        assert run(tmp_path / "out", from_dir).meta == wanted.meta
    assert asked == [("Salesforce/wikitext", "dataset", "wikitext-103-v1/*")]
    (copies / "train-00000-of-00002.parquet").write_bytes(b"PAR1 no more")
    assert refusal(copies).endswith("is not a parquet file with a column 'text'")


def test_mini_trains_on_the_validation_articles_under_a_name_of_its_own(made, tmp_path):
    dataset = run(tmp_path / "out", made, "--mini=true")
    assert dataset.name == "wikitext103-mini" and dataset.splits == ["train", "val"]
    assert b"".join(articles(dataset, "train")) == MADE.encode() * 2
    assert b"".join(articles(dataset, "val")) == MADE.encode()
    assert dataset.meta["parameters"]["text"]["train"]["source"] == "valid"


def test_splits_that_are_missing_are_named_and_the_others_prepared(made, tmp_path, capsys):
    (made / "wiki.train.tokens").unlink()
    assert run(tmp_path / "out", made).splits == ["val", "test"]
    out = capsys.readouterr().out
    assert "no train split" in out and f"val: valid, {2 * LINES} lines (partial, of 3,760)" in out


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes, and no internet


@pytest.fixture
def refusal(tmp_path):
    """The one line that is said where a run is refused."""
    return lambda from_dir, *words: Helpers.error_of(run, tmp_path / "refused", from_dir, *words)


def test_copies_that_cannot_be_used_are_one_line(made, tmp_path, refusal):
    assert "gone: has no text in wiki.{train,valid,test}.tokens or" in refusal(tmp_path / "gone")
    assert "wiki.{train,valid,test}.raw or" in refusal(made, "--version=raw")
    for content, reason in {
        b"good \n\xff\xfe": "val: is not UTF-8 text (byte 6)",
        b" \n" * 3761: "valid: has 3,761 lines, where WikiText-103's valid split has 3,760",
        b"": "the val split would hold no text",
        b" some words\n" * 3760: "11,280 words, where 217,646 are published",
    }.items():
        (made / "wiki.valid.tokens").write_bytes(content)
        assert reason in refusal(made)
    assert not (tmp_path / "refused" / "meta.json").exists()
    for source in ("train", "valid", "test"):  # of the raw version no count is published
        (made / f"wiki.{source}.tokens").rename(made / f"wiki.{source}.raw")
    about = run(tmp_path / "raw", made, "--version=raw").meta["parameters"]["text"]["val"]
    assert about["whole"] is True and about["published_words"] == 217_646


def test_without_the_internet_one_line_names_the_ways_out_with_exit_status_2(tmp_path, monkeypatch):
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")}.items():
        monkeypatch.setenv(name, value)
    done = Helpers.script("data/wikitext103/prepare.py", f"--out_dir={tmp_path / 'out'}", "--tokenizer=byte")
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    assert all(word in done.stderr for word in (b"(LocalEntryNotFoundError)", b"--from_dir", b"TIKTOKEN_CACHE_DIR"))


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers and the real text


@pytest.fixture
def gpt2(monkeypatch):
    """The tokenizer. Where its files are not on this machine, tiktoken has one of the same pattern and three merges."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(GPT2))
    if not GPT2.is_dir():
        ranks = {bytes([i]): i for i in range(256)} | {b" t": 256, b" =": 257, b"ee": 258}
        special = {"<|endoftext|>": tokenizer.END_OF_TEXT}
        made = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
        monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": made}.get)
    return tokenizer.get_tokenizer("gpt2")


def test_tokenizers_give_every_byte_back_and_special_tokens_are_text(gpt2):
    assert not GPT2.is_dir() or gpt2.encode("Hello world") == [15496, 995]
    byte = tokenizer.get_tokenizer("byte")
    assert byte.encode("aé\n") == [97, 0xC3, 0xA9, 10] and byte.decode_bytes([0xC3]) == b"\xc3"
    for one in (gpt2, byte):
        for text in (MADE, "", "Hello world<|endoftext|> é中\n\n  x", "🙂\r\n\t é"):
            ids = one.encode_array(text)
            assert ids.dtype == np.uint16 and ids.tolist() == one.encode(text)
            assert tokenizer.END_OF_TEXT not in ids and one.decode_bytes(ids.tolist()) == text.encode()
    assert "'bpe': must be one of byte, gpt2" in Helpers.error_of(tokenizer.get_tokenizer, "bpe")


def test_gpt2_without_its_files_names_the_way_to_get_them(monkeypatch):
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: open("/no/route/to/host"))
    message = Helpers.error_of(tokenizer.get_tokenizer, "gpt2")
    assert "(FileNotFoundError). Without the internet, set TIKTOKEN_CACHE_DIR" in message


@pytest.mark.parametrize("keys", [[], ["--shard_tokens=7", "--workers=3"]])
def test_cutting_into_articles_changes_no_token(keys, gpt2, made, tmp_path):
    dataset = run(tmp_path / "out", made, *keys, tokenizer="gpt2")
    assert tokens_of(dataset, "train").tolist() == gpt2.encode(MADE * 3)


@real_files
def test_the_real_articles_have_the_published_words_and_come_back_byte_for_byte(gpt2, tmp_path):
    dataset = run(tmp_path / "out", REAL / "wikitext103", "--mini=true", tokenizer="gpt2")
    for split, source, words, size, n in (
        ("train", "valid", 217_646, 1_142_309, 249_735),
        ("val", "test", 245_569, 1_281_077, 285_234),
    ):
        assert dataset.counts(split) == {"documents": 60, "words": words, "bytes": size, "tokens": n}
        assert dataset.meta["parameters"]["text"][split]["whole"] is True
        text = (REAL / "wikitext103" / f"wiki.{source}.tokens").read_bytes()
        found = articles(dataset, split)
        assert b"".join(found) == text and all(b" = \n" in article[:200] for article in found)
        assert tokens_of(dataset, split).tolist() == gpt2.encode(text.decode())
    inputs, targets = dataset.batch("train", 0, seed=0, batch_size=2, block_size=64)
    assert inputs.shape == targets.shape == (2, 64)
