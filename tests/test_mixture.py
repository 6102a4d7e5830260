"""Mixtures of data sets by weight: which examples a step reads, how the parts are scored, what cannot be mixed."""

import itertools
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from conftest import Helpers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import batches_of, rows_of, stream

import evaluate
from data.shards import Mixture, open_dataset
from data.states import prepare as states
from data.tokenizer import get_tokenizer
from data.writing import write_stream
from runs import checkpoint as checkpoints
from runs.files import find_data, parts_of_mixture

KEYS = dict(meters=False, lr_decay_iters=8)
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
    parts = [stream(99, name=f"part{i}", first=1000 * (i + 1)) for i in range(2)]
    keys = dict(batch_size=10, block_size=2)
    orders = {
        tuple(inputs[0] // 1000 for inputs, _ in rows_of(Mixture("x", parts, [3, 2]), "train", seed, [step], **keys))
        for seed, step in itertools.product((0, 1), (0, 1))
    }
    assert len(orders) == 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a:0.7,b:0.3", {"a": 7, "b": 3}),
        ("c/a:1, c:2/b:2,x:3", {"c/a": 1, "c:2/b": 2, "x": 3}),
        ("a:50,b:25", {"a": 2, "b": 1}),
        ("a", {"a": 1}),
        ("a:1", {"a:1": 1}),
        *((wrong, None) for wrong in ("a,b", "a:1,b", "a:1,b:0", "a:1,a:2", "a:1,b:-1", "a:9999,b:0.0001")),
    ],
)
def test_a_mixture_is_folders_with_weights(name, expected):
    if expected is None:
        assert "is written as data/a:0.7,data/b:0.3" in error_of(parts_of_mixture, name)
    else:
        assert parts_of_mixture(name) == expected


@pytest.fixture
def two(text, tmp_path):
    """Two folders of text, the second of other lines and other length."""
    about = dict(generator="tests", generator_version=1, parameters={}, seed=0, name="text")
    splits = {"train": ["0123456789 " * 50], "val": ["9876543210 " * 9]}
    write_stream(tmp_path / "digits", splits, tokenizer=get_tokenizer("byte"), **about)
    return str(text), str(tmp_path / "digits")


def test_what_cannot_be_mixed_is_one_line_that_names_both(two, mqar, tmp_path):
    message = error_of(open_dataset, f"{two[0]}:1,{mqar}:1")
    assert f"{two[0]} and {mqar} cannot be mixed" in message and "kind='stream' and kind='examples'" in message
    other = Path(shutil.copytree(two[1], tmp_path / "other"))
    (other / "meta.json").write_text((other / "meta.json").read_text().replace('"byte"', '"bytes"'))
    assert "tokenizer='byte' and tokenizer='bytes'" in error_of(open_dataset, f"{two[0]}:1,{two[1]}:1,{other}:1")
    assert "nowhere/meta.json: no such file" in error_of(find_data, f"{two[0]}:1,nowhere:1")


def test_a_run_is_scored_by_part_resumes_to_the_bit_and_keeps_its_weights(run, two, tmp_path, helpers, capsys):
    mixture = "{}:0.75,{}:0.25".format(*two)
    whole = run("whole", dataset=mixture)
    for more in (dict(max_iters=4), dict(init_from="resume")):
        half = run("half", dataset=mixture, **more)
    assert helpers.losses(half) == helpers.losses(whole)
    keys = dict(init_from="resume", max_iters=9)
    assert "not the data" in error_of(run, "half", dataset="{}:1,{}:1".format(*two), **keys)
    run("half", dataset="{}:3,{}:1".format(*two), **keys)  # the same weights
    (end,) = helpers.metrics(whole, "end")
    capsys.readouterr()
    losses = []
    for dataset in (*two, mixture):
        evaluate.main(words(checkpoint=whole, dataset=dataset, json="true", batch_size=2))
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert [end["loss_of"][part] for part in two] == pytest.approx(losses[:2])
    assert end["val_loss"] == pytest.approx(0.75 * losses[0] + 0.25 * losses[1]) == pytest.approx(losses[2])
    assert "near" in end["loss_of"] and "bits_per_byte" not in end
    assert checkpoints.load(whole)["data"]["path"] == mixture


def test_drawn_rows_and_rows_of_files_mix_and_their_slices_bear_the_names_of_the_parts(run, tmp_path, helpers):
    for name, task, length in (("a", "parity", 8), ("b", "parity", 12)):
        states.main(words(task=task, length=length, slices=20, val_size=10, out_dir=tmp_path / name))
    a, b = (str(tmp_path / name) for name in "ab")
    (end,) = helpers.metrics(run("out", dataset=f"{a}:1,{b}:1"), "end")
    assert end["slices"].keys() == {f"{a} 8", f"{a} 20", f"{b} 12", f"{b} 20"} and end["loss_of"].keys() == {a, b}
    mixture = open_dataset(f"{a}:1,{b}:1")
    batches = batches_of(mixture, "val", 3, 32, 2)
    assert sum(len(inputs) for inputs, _, _ in batches) == 40
    sampled = Counter(name for _, _, name in batches_of(mixture, "val", 1, 32, 2, tokens=200))
    assert sampled.keys() == set(mixture.slices) and sum(sampled.values()) < 40
