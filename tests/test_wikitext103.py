"""WikiText-103: what its documents and words are; GPT-2's tokenizer."""

import numpy as np
import pytest
import tiktoken
from conftest import ROOT, Helpers
from pyarrow import parquet, table
from tiktoken_ext.openai_public import r50k_pat_str

from base.configurator import read_config_file
from data import tokenizer
from data.shards import open_dataset
from data.wikitext103 import prepare

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


def test_words_are_what_stands_between_spaces_and_one_for_the_end_of_each_line(made, tmp_path, monkeypatch):
    dataset, size = run(tmp_path / "out", made), len(MADE.encode())
    for split, n in {"train": 3, "val": 2, "test": 1}.items():
        counts = {"documents": 3 * n, "words": (WORDS + LINES) * n, "bytes": size * n, "tokens": size * n}
        assert dataset.counts(split) == counts
        assert "published_words" not in dataset.meta["parameters"]["text"][split]  # is not the whole split
    mini = run(tmp_path / "mini", made, "--mini=true")
    assert (mini.name, list(mini.shards)) == ("wikitext103-mini", ["train", "val"])
    assert [mini.counts(split)["bytes"] for split in mini.shards] == [size * 2, size]
    monkeypatch.setitem(prepare.LINES, "test", LINES)
    monkeypatch.setitem(prepare.WORDS, "test", WORDS + LINES)
    published = run(tmp_path / "whole", made).meta["parameters"]["text"]["test"]["published_words"]
    assert published == WORDS + LINES
    assert [prepare.describe(text, "test", "raw")["lines"] for text in (b" a\n b\n", b" a\n b")] == [2, 2]


def test_the_configs_have_the_tokens_a_step_and_the_budgets_that_they_name():
    base, larger = (read_config_file(ROOT / "config/wikitext103" / name) for name in ("base.py", "budget_3.8B.py"))
    step = base["batch_size"] * base["gradient_accumulation_steps"] * base["block_size"]
    assert step == 524_288
    for keys, tokens in ((base, 0.6e9), (larger, 3.8e9)):
        assert keys["max_iters"] * step == pytest.approx(tokens, rel=0.01)


def test_copies_of_another_text_are_another_data_set(made, tmp_path):
    before = run(tmp_path / "out", made).meta
    (made / "wiki.test.tokens").write_text(" another text \n")
    message = Helpers.error_of(run, tmp_path / "out", made)
    assert "holds another data set (another text)" in message
    assert open_dataset(tmp_path / "out").meta == before
    assert run(tmp_path / "out", made, "--overwrite=true").meta != before


def test_an_article_begins_at_a_title_between_empty_lines_and_text_before_the_first_is_one_of_its_own():
    for documents in (
        # the empty line before a title ends the article before it; the one before the first title has no other place
        [f"{TITLES[0]}{BODIES[0]} \n", f"{TITLES[1][2:]}{BODIES[1]} \n", f"{TITLES[2][2:]}{BODIES[2]}"],
        ["the rest of one\n \n", " = A = \n \n a\n"], [" = A = \n \n a\n \n", " = B = \n \n b"],
        [" = A = \n \n = A note = \n a\n"], ["no title"],
    ):  # fmt: skip
        assert list(prepare.documents("".join(documents).encode())) == documents


def test_the_hubs_files_give_the_same_shards_as_the_text(made, tmp_path, monkeypatch):
    copies = tmp_path / "copies" / "wikitext-103-v1"
    copies.mkdir(parents=True)
    for source, name in {"train": "train", "valid": "validation", "test": "test"}.items():
        lines = (made / f"wiki.{source}.tokens").read_text().splitlines(keepends=True)
        rows = ["" if line == " \n" else line for line in lines]  # as the hub has them
        for i, part in enumerate((rows[:7], rows[7:])):
            parquet.write_table(table({"text": part}), copies / f"{name}-0000{i}-of-00002.parquet")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *words, **keys: str(copies.parent))
    wanted = run(tmp_path / "text", made)
    for from_dir in (copies.parent, copies, None):
        assert run(tmp_path / "out", from_dir).meta == wanted.meta


def test_copies_that_cannot_be_used_are_one_line_and_a_whole_split_has_the_published_words(made, tmp_path):
    for content, reason in {
        b"good \n\xff\xfe": "is not UTF-8 ('utf-8' codec can't decode byte 0xff in position 6",
        b" some words\n" * 3760: "valid: has 11,280 words, where 217,646 are published",
    }.items():
        (made / "wiki.valid.tokens").write_bytes(content)
        assert reason in Helpers.error_of(run, tmp_path / "refused", made)
    assert not (tmp_path / "refused" / "meta.json").exists()
    (made / "wiki.valid.tokens").rename(made / "wiki.valid.raw")  # of the raw version no count is published
    dataset = run(tmp_path / "raw", made, "--version=raw")
    assert list(dataset.shards) == ["val"] and dataset.meta["parameters"]["text"]["val"]["published_words"] == 217_646


@pytest.fixture
def gpt2(monkeypatch):
    """A tokenizer of GPT-2's pattern with three merges, since tiktoken would download its files."""
    ranks = {bytes([i]): i for i in range(256)} | {b" t": 256, b" =": 257, b"ee": 258}
    special = {"<|endoftext|>": tokenizer.END_OF_TEXT}
    made = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": made}.get)
    return tokenizer.get_tokenizer("gpt2")


def test_tokenizers_give_every_byte_back_and_special_tokens_are_text(gpt2):
    byte = tokenizer.get_tokenizer("byte")
    assert byte.encode("aé\n") == [97, 0xC3, 0xA9, 10] and byte.decode_bytes([0xC3]) == b"\xc3"
    for one in (gpt2, byte):
        for text in (MADE, "", "Hello world<|endoftext|> é中\n\n  x 🙂\r\n\t é"):
            ids = one.encode_array(text)
            assert ids.dtype == np.uint16 and ids.tolist() == one.encode(text)
            assert tokenizer.END_OF_TEXT not in ids and one.decode_bytes(ids.tolist()) == text.encode()


def test_a_text_on_which_gpt_2_s_tokenizer_fails_is_one_line(gpt2):
    for encode in (gpt2.encode, gpt2.encode_array):
        message = Helpers.error_of(encode, " " * 1_100_000 + "a")
        assert "tokenizer gpt2: fails on a text of 1,100,001 characters" in message


def test_cutting_into_articles_changes_no_token(gpt2, made, tmp_path):
    dataset = run(tmp_path / "out", made, tokenizer="gpt2")
    assert dataset.shards["train"].read(0, dataset.counts("train")["tokens"]).tolist() == gpt2.encode(MADE * 3)
