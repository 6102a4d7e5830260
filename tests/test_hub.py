"""data/hub/prepare.py on copies of a data set, and a BPE trained on its text. The hub itself is not asked."""

import json
import math
import sys
import types

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import documents_of

import sample
from data.hub import prepare
from data.shards import open_dataset
from data.tokenizer import choose_tokenizer

TEXTS = [f"Story {i} of a fox and {'der Zwölf ' * (i % 5)}名 🙂.{chr(10) * (i % 2)}" for i in range(120)]
TEXTS[7:10] = [None, "", TEXTS[3]]
ROWS = {"n": list(range(120)), "story": TEXTS}


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """{kind: a folder with the rows}, three files of parquet and jsonl, or one file for each of two splits."""
    folders, rows = {}, datasets.Dataset.from_dict(ROWS)
    for kind in ("parquet", "jsonl"):
        folders[kind] = tmp_path_factory.mktemp(kind)
        for i in range(3):
            file, part = str(folders[kind] / f"train-{i}.{kind}"), rows.shard(3, i)
            part.to_parquet(file) if kind == "parquet" else part.to_json(file)
    folders["two"] = tmp_path_factory.mktemp("two")
    for split, part in {"train": rows, "test": rows.select([5])}.items():
        part.to_parquet(str(folders["two"] / f"{split}-0.parquet"))
    return folders


def run(out, from_dir, *words, tokenizer="byte"):
    prepare.main([str(from_dir), f"--out_dir={out}", "--column=story", f"--tokenizer={tokenizer}", *words])
    return open_dataset(out)


def test_every_kind_of_copy_and_any_number_of_threads_give_the_same_files(copies, tmp_path):
    words, first = ("--val_fraction=0.2", "--documents=100"), None
    for name, threads in [("parquet", 1), ("parquet", 2), ("jsonl", 7), ("two", 1)]:
        out = tmp_path / f"{name}{threads}"
        (out / ".new").mkdir(parents=True)
        (out / ".new" / "part7").write_bytes(b"of a call that was killed")
        (out / ".nanogate").write_text("data set\n")
        run(out, copies[name], *words, f"--threads={threads}", tokenizer="bpe:300")
        files = {file.name: file.read_bytes() for file in out.iterdir()}
        meta = json.loads(files.pop("meta.json"))
        assert meta["parameters"].pop("name") == [str(copies[name])] and meta.pop("name")
        files["meta"] = meta
        first = first or files
        assert files == first and {"tokenizer.json", "train_0000.npy", "val_0000.npy"} <= files.keys()


def test_documents_end_with_a_line_end_and_a_text_is_held_out_by_its_hash(copies, tmp_path, helpers):
    lines = [(text if text.endswith("\n") else f"{text}\n").encode() for text in TEXTS if text]
    words = copies["parquet"], "--val_fraction=0.2"
    whole, first = run(tmp_path / "whole", *words), run(tmp_path / "first", *words, "--documents=50")
    found = documents_of(whole.folder)
    val = found["val"]
    assert 10 < len(val) < 40 and val == [line for line in lines if line in val]
    assert found["train"] == [line for line in lines if line not in val]  # no copy is on both sides
    assert documents_of(first.folder)["val"] == [line for line in lines[:50] if line in val]
    assert "(another name)" in helpers.error_of(run, whole.folder, copies["jsonl"], "--val_fraction=0.2")
    other = run(tmp_path / "split", copies["two"], "--val_split=test")
    assert documents_of(other.folder) == {"train": lines, "val": lines[5:6]}


def test_what_cannot_be_read_is_one_line_that_lists_what_there_is(copies, tmp_path, helpers, monkeypatch):
    def error(*words, from_dir=copies["jsonl"]):
        return helpers.error_of(run, tmp_path / "out", from_dir, *words)

    assert "column='text': must be one of n, story" in error("--column=text")
    assert "column=n: holds int, which is no text" in error("--column=n", "--threads=2")
    assert "split='test': must be one of train" in error("--split=test")
    assert "split='val': must be one of train, test" in error("--val_split=val", from_dir=copies["two"])
    assert f"{tmp_path}: cannot be opened; " in error(from_dir=tmp_path)
    assert "name one data set" in error("roneneldan/TinyStories")
    assert "raise val_fraction" in error("--val_fraction=1e-9")
    assert "at least 257" in error("--tokenizer=bpe:256") and "bpe:N" in error("--tokenizer=bpe4096")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert error().startswith("pip install datasets")


def fail(*words, **keys):
    raise ConnectionError("Couldn't reach\nthe hub")


def rows_of_a_network_that_fails():
    yield {"text": "the first"}
    fail()


def test_a_network_that_fails_is_one_line_with_the_way_without_it(tmp_path, helpers, monkeypatch):
    words = ["a/b", f"--out_dir={tmp_path / 'out'}", "--tokenizer=byte"]
    stream = datasets.IterableDataset.from_generator(rows_of_a_network_that_fails)
    rows_config = types.SimpleNamespace(data_files=None)
    builder = types.SimpleNamespace(config=rows_config, as_streaming_dataset=lambda: {"train": stream})
    for step, load in {"opened": fail, "read": lambda *words, **keys: builder}.items():
        monkeypatch.setattr(datasets, "load_dataset_builder", load)
        message = helpers.error_of(prepare.main, words)
        assert message.startswith(f"a/b: cannot be {step}; a folder with a copy in parquet or jsonl")
        assert message.endswith("(ConnectionError: Couldn't reach the hub)")
    assert [file.name for file in (tmp_path / "out").iterdir()] == [".nanogate"]


BPE = choose_tokenizer("bpe:400", [text for text in TEXTS if text])


@settings(deadline=None, max_examples=60)
@given(st.text() | st.lists(st.sampled_from([*TEXTS[:5], "\r\n", "  ", "<|endoftext|>", "\x00"])).map("".join))
def test_a_trained_bpe_gives_every_text_back(text):
    ids = BPE.encode_array(text)
    assert BPE.decode_bytes(ids.tolist()) == text.encode() and (ids < BPE.vocab_size).all() and BPE.vocab_size <= 400


def test_a_model_trains_on_a_bpe_of_its_own_and_its_bits_are_per_byte(copies, tmp_path, helpers, capsys, evaluated):
    data = run(tmp_path / "data", copies["parquet"], "--val_fraction=0.2", tokenizer="bpe:300")
    out = helpers.train(data.folder, tmp_path / "out", max_iters=30)
    capsys.readouterr()
    sample.main(helpers.words(checkpoint=out, start="Story 1", num_samples=1, max_new_tokens=20, device="cpu"))
    assert capsys.readouterr().out.startswith("Story 1")
    numbers, counts = evaluated(out), data.counts("val")
    assert counts["tokens"] < counts["bytes"] / 2
    bits = numbers["loss"] / math.log(2) * (counts["tokens"] - 1) / counts["bytes"]
    assert numbers["bits_per_byte"] == pytest.approx(bits, rel=0.01)
