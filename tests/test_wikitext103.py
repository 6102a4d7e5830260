"""
WikiText-103: what its documents and words are, what is said offline.

    python -m pytest tests/test_wikitext103.py
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiktoken_ext.openai_public import r50k_pat_str

from data import tokenizer
from data.shards import open_dataset
from data.wikitext103 import prepare

ROOT = Path(__file__).resolve().parents[1]
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
    """A folder with all three splits: the made text, and twice and three times of it."""
    folder = tmp_path / "made"
    folder.mkdir()
    for i, source in enumerate(("train", "valid", "test")):
        (folder / f"wiki.{source}.tokens").write_bytes(MADE.encode() * (3 - i))
    return folder


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


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# ----------------------------------------------------------------------------------------------------------------------
# Documents, words, bytes


def test_words_are_what_stands_between_spaces_and_one_for_the_end_of_each_line(made, tmp_path):
    dataset = run(tmp_path / "out", made)
    size = len(MADE.encode())
    for split, times in {"train": 3, "val": 2, "test": 1}.items():
        assert dataset.counts(split) == {
            "documents": 3 * times,
            "words": (WORDS + LINES) * times,
            "bytes": size * times,
            "tokens": size * times,
        }
        about = dataset.meta["parameters"]["text"][split]
        assert about["lines"] == LINES * times and about["whole"] is False and "published_words" not in about
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
    assert len(dataset.meta["splits"]["test"]["shards"]) > 3
    assert all(shard["tokens"] == 50 for shard in dataset.meta["splits"]["test"]["shards"][:-1])
    found = articles(dataset, "test")
    # the empty line before a title ends the article before it; the one before the first title has no other place
    assert found[0] == f"{TITLES[0]}{BODIES[0]} \n".encode()
    assert found[1].startswith(b" = The Beta = Gamma = \n") and found[2].startswith(" = Δέλτα = \n".encode())
    assert b"".join(found) == MADE.encode()


def test_text_before_the_first_title_is_a_document_of_its_own(tmp_path):
    for text, expected in {
        "the rest of one\n \n = A = \n \n a\n": ["the rest of one\n \n", " = A = \n \n a\n"],
        " = A = \n \n a\n \n = B = \n \n b": [" = A = \n \n a\n \n", " = B = \n \n b"],
        "\n = A = \n\n = B = \n\n": ["\n = A = \n\n", " = B = \n\n"],
        " = A = \n \n = A note = \n a\n": [" = A = \n \n = A note = \n a\n"],
        "no title": ["no title"],
    }.items():
        assert list(prepare.documents(text.encode(), "train")) == expected


def test_the_parquet_files_of_the_hub_give_the_same_shards_as_the_text(made, tmp_path, refusal):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    copies = tmp_path / "copies" / "wikitext-103-v1"
    copies.mkdir(parents=True)
    for source, name in {"train": "train", "valid": "validation", "test": "test"}.items():
        lines = (made / f"wiki.{source}.tokens").read_text().splitlines(keepends=True)
        rows = ["" if line == " \n" else line for line in lines]  # as the hub has them
        for i, part in enumerate((rows[:7], rows[7:])):
            table = pyarrow.table({"text": part})
            parquet.write_table(table, copies / f"{name}-0000{i}-of-00002.parquet")
    assert run(tmp_path / "a", copies.parent).meta == run(tmp_path / "b", made).meta
    assert files(tmp_path / "a") == files(tmp_path / "b")
    (copies / "train-00000-of-00002.parquet").write_bytes(b"PAR1 no more")
    assert refusal(copies).endswith("is not a parquet file with a column 'text'")


def test_a_download_gives_the_same_shards_as_the_text(made, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*words):
        asked.append(words)
        rows = {
            name: [line if line != " \n" else "" for line in (made / file).read_text().splitlines(keepends=True)]
            for name, file in {"train": "wiki.train.tokens", "validation": "wiki.valid.tokens"}.items()
        }
        return datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": rows[name]}) for name in rows})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(prepare, "hub_answers", lambda hub: True)
    (made / "wiki.test.tokens").unlink()
    run(tmp_path / "a", None)
    run(tmp_path / "b", made)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    run(tmp_path / "a", None, "--version=raw")
    assert asked == [("Salesforce/wikitext", name) for name in ("wikitext-103-v1", "wikitext-103-raw-v1")]


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
def refusal(helpers, tmp_path):
    """The one line that is said where a run is refused."""
    return lambda from_dir, *words: helpers.error_of(run, tmp_path / "refused", from_dir, *words)


def test_copies_that_cannot_be_used_are_one_line(made, tmp_path, refusal):
    assert refusal(tmp_path / "gone").endswith("gone: no such folder")
    message = refusal(made, "--version=raw")
    assert "wiki.{train,valid,test}.raw" in message and "--version=tokens finds some" in message
    (made / "wiki.valid.tokens").write_bytes(b"good \n\xff\xfe")
    assert refusal(made) == "val: is not UTF-8 text (byte 6)"
    (made / "wiki.valid.tokens").write_bytes(b" \n" * 3761)
    assert "has 3,761 lines, where WikiText-103's valid split has 3,760" in refusal(made)
    (made / "wiki.valid.tokens").write_bytes(b"")
    assert "val split would hold no text" in refusal(made)


def test_a_whole_split_must_have_the_published_words(made, tmp_path, refusal):
    (made / "wiki.valid.tokens").write_bytes(b" some words\n" * 3760)
    message = refusal(made)
    assert "11,280 words, where 217,646 are published" in message
    assert not (tmp_path / "refused" / "meta.json").exists()
    for source in ("train", "valid", "test"):  # of the raw version no count is published
        (made / f"wiki.{source}.tokens").rename(made / f"wiki.{source}.raw")
    about = run(tmp_path / "raw", made, "--version=raw").meta["parameters"]["text"]["val"]
    assert about["whole"] is True and about["published_words"] == 217_646


def test_without_the_internet_one_line_names_the_ways_out(refusal, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def offline(*words):
        assert datasets.config.HF_HUB_OFFLINE  # no minutes of retries
        raise ConnectionError("no route to host\nnor to any other")

    import huggingface_hub

    for place in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(place, "HF_HUB_OFFLINE", False)  # and put back at the end
    monkeypatch.setattr(prepare, "hub_answers", lambda hub: False)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    message = refusal(None)
    assert "(ConnectionError)" in message
    assert all(word in message for word in ("--from_dir", "TIKTOKEN_CACHE_DIR", "--tokenizer=byte"))


def test_the_script_says_it_in_seconds_with_exit_status_2(tmp_path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")}
    command = [sys.executable, str(ROOT / "data" / "wikitext103" / "prepare.py"), f"--out_dir={tmp_path / 'out'}"]
    done = subprocess.run([*command, "--tokenizer=byte"], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and "--from_dir" in done.stderr
    assert done.stderr.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------------------
# GPT-2's BPE and the real text


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


def test_gpt2_reads_special_tokens_as_text_and_gives_every_byte_back(gpt2):
    text = "Hello world<|endoftext|> é中\n\n  x"
    assert not GPT2.is_dir() or gpt2.encode("Hello world") == [15496, 995]
    assert 50256 not in gpt2.encode(text) and gpt2.decode_bytes(gpt2.encode(text)) == text.encode()


def test_encode_array_gives_the_ids_of_encode(gpt2):
    for name in tokenizer.TOKENIZERS:
        found = tokenizer.get_tokenizer(name)
        for text in (MADE, "", "<|endoftext|>", "🙂\r\n\t é"):
            ids = found.encode_array(text)
            assert ids.dtype == np.uint16 and ids.tolist() == found.encode(text)


@pytest.mark.parametrize("keys", [[], ["--shard_tokens=7", "--workers=3"]])
def test_cutting_into_articles_changes_no_token(keys, gpt2, made, tmp_path):
    dataset = run(tmp_path / "out", made, *keys, tokenizer="gpt2")
    assert tokens_of(dataset, "train").tolist() == gpt2.encode(MADE * 3)


@real_files
@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_the_real_articles_have_the_published_words_and_come_back_byte_for_byte(name, gpt2, tmp_path):
    dataset = run(tmp_path / "out", REAL / "wikitext103", tokenizer=name)
    assert dataset.splits == ["val", "test"]
    tokens = {"gpt2": (249_735, 285_234), "byte": (1_142_309, 1_281_077)}[name]
    for split, source, words, size, n in (
        ("val", "valid", 217_646, 1_142_309, tokens[0]),
        ("test", "test", 245_569, 1_281_077, tokens[1]),
    ):
        assert dataset.counts(split) == {"documents": 60, "words": words, "bytes": size, "tokens": n}
        assert dataset.meta["parameters"]["text"][split]["whole"] is True
        text = (REAL / "wikitext103" / f"wiki.{source}.tokens").read_bytes()
        found = articles(dataset, split)
        assert b"".join(found) == text and all(b" = \n" in article[:200] for article in found)
        if name == "gpt2":
            assert tokens_of(dataset, split).tolist() == gpt2.encode(text.decode())


@real_files
def test_mini_on_the_real_text_can_be_trained_on(gpt2, tmp_path):
    dataset = run(tmp_path / "out", REAL / "wikitext103", "--mini=true", tokenizer="gpt2")
    assert dataset.counts("train")["words"] == 217_646 and dataset.counts("val")["words"] == 245_569
    inputs, targets = dataset.batch("train", 0, seed=0, batch_size=2, block_size=64)
    assert inputs.shape == targets.shape == (2, 64)
