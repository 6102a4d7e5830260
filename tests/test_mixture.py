"""Mixtures of data sets by weight: which examples a step reads, how the parts are scored, what cannot be mixed."""

import itertools
import json
import math
import shutil
from collections import Counter
from pathlib import Path

import pytest
from conftest import Helpers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import rows_of, stream

import evaluate
import meters
import sample
from base.files import find_data, parts_of_mixture
from data.shards import Mixture, open_dataset
from data.states import prepare as states

KEYS = dict(meters=False, schedule="constant")
error_of, words = Helpers.error_of, Helpers.words


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(0, 5), st.sampled_from([(12, 1), (3, 4)]))
def test_parts_have_their_shares_and_each_epoch_of_a_part_is_every_window_once(shares, seed, sizes):
    parts = [stream(9 + 4 * i, name=f"part{i}", first=1000 * (i + 1)) for i in range(len(shares))]
    mixture, size, n_steps = Mixture("x", parts, shares), sum(shares), 30
    keys = dict(batch_size=sizes[0], gradient_accumulation_steps=sizes[1], block_size=2)
    rows = rows_of(mixture, "train", seed, range(n_steps), **keys)
    which = [inputs[0] // 1000 - 1 for inputs, _ in rows]
    for start in range(0, len(rows) - size, size):
        assert sorted(Counter(which[start : start + size]).items()) == list(enumerate(shares))
    for i, part in enumerate(parts):  # the part's own order, which test_data.py looks at
        of_part = [row for row, of in zip(rows, which, strict=True) if of == i]
        assert of_part == rows_of(part, "train", seed, range(len(of_part)), batch_size=1, block_size=2)


def test_the_seed_draws_the_order_of_the_parts_anew_in_each_block():
    mixture = Mixture("x", [stream(99, name=f"part{i}", first=1000 * (i + 1)) for i in range(2)], [3, 2])
    steps = itertools.product((0, 1), ([0], [1]))  # of two seeds
    rows = [rows_of(mixture, "train", *at, batch_size=10, block_size=2) for at in steps]
    assert len({tuple(inputs[0] // 1000 for inputs, _ in of_step) for of_step in rows}) == 4


def test_a_mixture_is_folders_with_whole_weights():
    assert parts_of_mixture("c/a:1, c:2/b:2,x:30") == {"c/a": 1, "c:2/b": 2, "x": 30}
    assert parts_of_mixture("a:1") == {"a:1": 1}  # a folder
    for wrong in ("a,b", "a:1,b", "a:1,b:0", "a:1,a:2", "a:1,b:-1", "a:0.7,b:0.3", "a:1,b:10000"):
        assert "as in data/a:7,data/b:3" in error_of(parts_of_mixture, wrong)


@pytest.fixture
def two(text, tmp_path):
    """Two folders of text, the second of other lines and other length."""
    return str(text), str(Helpers.write_text(tmp_path / "digits", ["0123456789 " * 50], ["9876543210 " * 9]))


def test_what_cannot_be_mixed_is_one_line_that_names_both(two, mqar, tmp_path):
    assert "nowhere/meta.json: no such file" in error_of(find_data, f"{two[0]}:1,nowhere:1")
    message = error_of(open_dataset, f"{two[0]}:1,{mqar}:1")
    assert f"{two[0]}:1,{mqar}:1: cannot be mixed: kind differs ('stream', 'examples')" in message
    other = Path(shutil.copytree(two[1], tmp_path / "other"))
    (other / "meta.json").write_text((other / "meta.json").read_text().replace('"byte"', '"bytes"'))
    assert "tokenizer differs ('byte', 'byte', 'bytes')" in error_of(open_dataset, f"{two[0]}:1,{two[1]}:1,{other}:1")


def test_a_run_is_scored_by_part_resumes_to_the_bit_and_keeps_its_weights(run, two, helpers, capsys, evaluated):
    mixture = "{}:3,{}:1".format(*two)
    whole = run("whole", dataset=mixture, meters=True)
    for more in (dict(max_iters=4), dict(init_from="resume")):
        half = run("half", dataset=mixture, **more)
    assert helpers.losses(half) == helpers.losses(whole)
    assert "not the data" in error_of(run, "half", dataset="{}:1,{}:1".format(*two), init_from="resume", max_iters=9)
    capsys.readouterr()
    (end,), again = helpers.metrics(whole, "end"), evaluated(whole, batch_size=2)  # a checkpoint names its mixture
    parts = {folder: evaluated(whole, batch_size=2, dataset=folder) for folder in two}
    for folder, alone in parts.items():
        for name in ("loss", "bits_per_byte", "labels"):
            assert end["parts"][folder][name] == pytest.approx(alone[name]) == again["parts"][folder][name]
    mean = sum(weight * parts[folder]["loss"] for folder, weight in zip(two, (0.75, 0.25), strict=True))
    assert end["val_loss"] == pytest.approx(mean) == again["loss"]
    sample.main(words(checkpoint=whole, max_new_tokens=2, num_samples=1))
    meters.main(words(checkpoint=whole, rows=2, device="cpu"))
    assert json.loads((whole / "meters.json").read_text())["checkpoints"][0]["folder"] == two[0]
    evaluate.main(words(checkpoint=whole))
    assert f"parts {two[1]} loss" in capsys.readouterr().out


def test_the_numbers_of_a_mixture_are_the_means_of_its_parts_by_weight(monkeypatch):
    mixture = Mixture("x", [stream(9, name="a"), stream(9, name="b")], [3, 1])
    for part, folder in zip(mixture.parts, "ab", strict=True):
        part.folder = Path(folder)
    numbers = {"a": dict(loss=1.0, accuracy=0.2, labels=10), "b": dict(loss=3.0, accuracy=1.0, labels=90)}
    monkeypatch.setattr(evaluate, "evaluate_part", lambda model, part, split, tokens: numbers[str(part.folder)])
    found = evaluate.evaluate(None, mixture, "val")
    assert found.pop("parts") == numbers
    expected = dict(loss=1.5, perplexity=math.exp(1.5), accuracy=0.4, labels=100)
    assert found == pytest.approx(expected)


def test_drawn_rows_mix_and_a_sample_has_its_share_of_each_part(run, tmp_path, helpers):
    for name, length in (("a", 8), ("b", 12)):
        states.main(words(task="parity", length=length, slices=20, val_size=10, out_dir=tmp_path / name))
    a, b = (str(tmp_path / name) for name in "ab")
    out = run("out", dataset=f"{a}:3,{b}:1", eval_tokens=200, eval_whole="false")
    (end,) = helpers.metrics(out, "end")
    assert {name: part["slices"].keys() for name, part in end["parts"].items()} == {a: {"8", "20"}, b: {"12", "20"}}
    assert [part["labels"] for part in end["parts"].values()] == [120, 40]  # whole rows of each slice
