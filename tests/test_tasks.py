"""State tracking and MQAR's family: rows against perfect predictors, rows drawn anew, and what such a set refuses."""

import functools
import json
import math
import re
from collections import Counter
from itertools import permutations, product

import numpy as np
import pytest
from conftest import Helpers

import evaluate
import meters
import sample
from data import drawn
from data.induction import prepare as induction
from data.mqar import prepare as mqar
from data.regression import prepare as regression
from data.shards import open_dataset
from data.states import prepare as states
from ops import IGNORE

error_of, words = Helpers.error_of, Helpers.words


def example(script, task):
    """The drawn example of a task in a docstring: tokens and labels, a dot being 0."""
    lines = re.search(rf"^    {task} +token([\d. ]+).*\n +label([\d. ]+)", script.__doc__, re.M).groups()
    return [[int(x) for x in line.split("    " * 2)[0].replace(".", "0").split()] for line in lines]


def state(task, word):
    """The label behind these tokens, by the definition of the task."""
    if task == "parity":
        return 1 + word.count(2) % 2
    if task == "arithmetic":
        terms = re.findall(r"([+-]?)([\d*]+)", "".join("01234+-*"[token - 1] for token in word))
        values = [(-1 if sign == "-" else 1) * math.prod(map(int, digits[::2])) for sign, digits in terms]
        return 1 + sum(values) % 5 if len(word) % 2 else 0
    elements = list(permutations(range(int(task[1:]))))
    product = [functools.reduce(lambda j, g: elements[g - 1][j], reversed(word), i) for i in elements[0]]  # of each i
    return 1 + elements.index(tuple(product))


def recalled(tokens, shown):
    """The labels of a row of MQAR, read off its tokens alone: the value that each key was shown with."""
    memory = dict(zip(tokens[0:shown:2], tokens[1:shown:2], strict=True))
    return [memory.get(token, 0) if i >= shown and i % 2 == 0 else 0 for i, token in enumerate(tokens)]


def make(folder, **keys):
    states.main(words(**dict(task="s3", length=8, slices="12,20", val_size=10, out_dir=folder) | keys))
    return open_dataset(folder)


@pytest.mark.parametrize("task", drawn.STATES)
def test_a_label_is_the_state_by_the_definition_and_the_example_is_what_is_drawn(task):
    assert example(states, task) == [rows[0].tolist() for rows in drawn.rows(task, 8, "0 0", 0, 1)]
    tokens, labels = drawn.rows(task, 33, "0 0", 0, 400)
    for row, found in zip(tokens[:60].tolist(), labels[:60].tolist(), strict=True):
        assert [state(task, row[: i + 1]) for i in range(33)] == found
    most = np.bincount(labels[labels > 0]).max() / (labels > 0).sum()
    assert most == pytest.approx(states.chance(states.Config(task=task)), abs=0.03)


def test_rows_of_induction_are_strings_of_the_chain_and_repeats_of_them_from_their_first_token_on():
    length, n = 96, 300
    tokens, labels = drawn.rows("induction", length, "0 0", 0, n)
    sources = drawn.sources_of(drawn.random_bits("induction", length, "0 0", 0, n))
    assert np.array_equal(labels[:, :-1], tokens[:, 1:]) and not labels[:, -1].any()
    assert np.array_equal(tokens, np.take_along_axis(tokens, sources, 1)) and tokens.min() == 1 and tokens.max() == 64
    pairs, n_repeats = [], 0
    for row, of_row in zip(tokens.tolist(), sources.tolist(), strict=True):
        starts_of_repeats = [t for t in range(1, length) if of_row[t] < t and of_row[t] != of_row[t - 1] + 1]
        n_repeats += len(starts_of_repeats)
        for start in starts_of_repeats:
            end = next((t for t in range(start + 1, length) if of_row[t] != of_row[t - 1] + 1), length)
            is_cut = end == length
            assert end - start >= 12 or is_cut
            assert of_row[of_row[start]] == of_row[start]  # what is repeated was new
        pairs += [(row[t - 1], row[t]) for t in range(1, length) if of_row[t] == t]
    found = np.zeros((64, 64))
    for before, after in pairs:
        found[before - 1, after - 1] += 1
    expected = drawn.bigram_table() * found.sum(1, keepdims=True)
    assert np.abs(found - expected).sum() / found.sum() < 0.45  # of counts of about 4 a pair; a flat table gives 0.66
    assert n_repeats > 2 * n


def test_a_copy_counts_behind_four_tokens_of_the_same_repeat_and_nothing_else_is_validated(tmp_path):
    induction.main(words(out_dir=tmp_path, length=64, val_size=40, seed=3))
    dataset = open_dataset(tmp_path)
    bits = drawn.random_bits("induction", 64, "3 val", 0, 40)
    tokens, sources = drawn.induction(bits)[0], drawn.sources_of(bits)
    ((inputs, targets, _, _),) = dataset.eval_batches("val", 40, 64)
    assert inputs.tolist() == tokens.tolist()
    counted = 0
    for row, of_row, labels in zip(tokens.tolist(), sources.tolist(), targets.tolist(), strict=True):
        for t, label in enumerate(labels):
            is_copy = t < 63 and t >= 3 and of_row[t + 1] < t + 1
            is_copy = is_copy and all(of_row[t + 1 - i] == of_row[t + 1] - i for i in range(1, 5))
            assert label == (row[t + 1] if is_copy else IGNORE)
            if is_copy:
                place = of_row[t + 1]
                assert row[place - 4 : place + 1] == row[t - 3 : t + 2]  # where the four before it stand, it follows
                counted += 1
    assert counted > 500 and induction.chance(None) == 1 / 64


def test_rows_of_regression_are_examples_of_one_linear_function_each():
    tokens, labels = (rows[0].tolist() for rows in drawn.rows("regression", 15, "0 0", 0, 1))
    assert example(regression, "regression") == [tokens, labels]
    n, T = 2000, 36
    tokens, labels = drawn.rows("regression", T, "0 0", 0, n)
    assert np.array_equal(labels[:, 1::3], tokens[:, 2::3])
    assert not labels[:, 0::3].any() and not labels[:, 2::3].any()
    x1, x2, y = tokens[:, 0::3], tokens[:, 1::3] - 8, tokens[:, 2::3] - 49
    pairs = []
    for row in range(n):
        fits = [w for w in product(range(-2, 3), repeat=2) if (w[0] * x1[row] + w[1] * x2[row] == y[row]).all()]
        assert len(fits) == 1
        pairs += fits
    counts = Counter(pairs)
    assert len(counts) == 25 and max(counts.values()) < 2 * min(counts.values())  # 80 of each on average
    for x in (x1, x2):
        assert np.abs(np.bincount(x.ravel(), minlength=9)[1:] / x.size - 1 / 8).max() < 0.01
        assert max(abs(np.corrcoef(x[:, i], w)[0, 1]) for i in range(12) for w in zip(*pairs, strict=True)) < 0.1
    for length in (1, 2, 4):  # a row may end within an example
        for cut in drawn.rows("regression", length, "0 0", 0, 3):
            assert cut.shape == (3, length)
    assert drawn.rows("regression", 6, "0 0", 10**9, 1)[0].tolist() == [[8, 11, 43, 8, 13, 39]]


def test_a_y_of_regression_counts_behind_six_examples_and_copying_does_not_solve_it(tmp_path):
    regression.main(words(out_dir=tmp_path, examples=12, val_size=4000))
    dataset = open_dataset(tmp_path)
    ((inputs, targets, _, name),) = dataset.eval_batches("val", 4000, 36)
    assert name == "36"
    drawn_tokens, labels = drawn.rows("regression", 36, "0 val", 0, 4000)
    labels[:, :18] = 0
    assert np.array_equal(inputs, drawn_tokens) and np.array_equal(targets, np.where(labels == 0, IGNORE, labels))
    x = np.stack([drawn_tokens[:, 0::3], drawn_tokens[:, 1::3]], axis=2) - [0, 8]
    y = drawn_tokens[:, 2::3] - 49
    right = {"constant": [], "nearest": [], "any": [], "least squares": []}
    for i in range(6, 12):
        distances = ((x[:, :i] - x[:, i : i + 1]) ** 2).sum(2)
        nearest = i - 1 - distances[:, ::-1].argmin(1)
        fitted = np.linalg.pinv(x[:, :i].astype(float)) @ y[:, :i, None]  # (4000, 2, 1)
        predicted = np.rint(x[:, i : i + 1] @ fitted)[:, 0, 0]
        right["constant"] += (y[:, i] == 0).tolist()
        right["nearest"] += (y[np.arange(4000), nearest] == y[:, i]).tolist()
        right["any"] += (y[:, :i] == y[:, i : i + 1]).any(1).tolist()
        right["least squares"] += (predicted == y[:, i]).tolist()
    shares = {what: f"{np.mean(of_what):.1%}" for what, of_what in right.items()}
    assert shares == {"constant": "6.7%", "nearest": "28.3%", "any": "53.0%", "least squares": "100.0%"}
    assert all(f" {share}\n" in regression.__doc__ for share in shares.values())  # as its docstring says
    commonest = max(Counter(y[:, 6:].ravel().tolist()).values()) / y[:, 6:].size
    assert regression.chance(None) == pytest.approx(commonest, abs=0.005) and regression.chance(None) == 0.07
    assert "at least 7" in error_of(regression.main, words(out_dir=tmp_path / "x", examples=6))


def test_a_row_is_a_function_of_its_number_alone():
    whole = np.stack(drawn.rows("s5", 5, "3 4", 0, 50))
    for first, n in ((0, 1), (7, 20), (49, 1)):
        assert np.array_equal(drawn.rows("s5", 5, "3 4", first, n), whole[:, first : first + n])
    assert len({row.tobytes() for row in drawn.rows("s5", 32, "3 4", 0, 5000)[0]}) == 5000
    assert not any(np.array_equal(whole, drawn.rows("s5", 5, key, 0, 50)) for key in ("4 3", "3 val"))
    assert drawn.rows("s5", 4, "0 0", 10**9, 1)[0].tolist() == [[62, 31, 65, 43]]  # rows of results depend on it


def test_the_global_batch_does_not_depend_on_how_it_is_dealt_out_and_batches_follow_each_other(tmp_path):
    dataset, rows = make(tmp_path, seed=5), drawn.rows("s3", 8, "5 2", 0, 36)
    for batch_size, parts in ((12, 1), (4, 3), (1, 12)):
        keys = dict(seed=2, batch_size=batch_size, block_size=20, gradient_accumulation_steps=parts)
        batches = [dataset.batch("train", step, micro_step=m, **keys)[:2] for step in range(3) for m in range(parts)]
        assert np.array_equal([np.concatenate(found) for found in zip(*batches, strict=True)], rows)
    assert dataset.batch("train", 0, **keys | {"seed": 3})[0].tolist() != rows[0][:1].tolist()


def test_a_slice_counts_what_lies_beyond_the_one_before(tmp_path):
    dataset = make(tmp_path)
    for tokens, labels, _, name in dataset.eval_batches("val", 10, 20):
        length, before = int(name), {"8": 0, "12": 8, "20": 12}[name]
        found = [[state("s3", row[: i + 1]) for i in range(before, length)] for row in tokens.tolist()]
        assert (labels[:, :before] == IGNORE).all() and labels[:, before:].tolist() == found


def test_the_hash_covers_how_rows_are_drawn_and_a_stranger_names_a_known_task(tmp_path):
    dataset = make(tmp_path)
    how = dataset.meta["splits"]["train"]["drawn"]
    for new, refusal in (({"task": "os.system"}, "must be one of"), ({"seed": 7}, "")):
        splits = dataset.meta["splits"] | {"train": {"drawn": how | new, "shards": []}}
        (tmp_path / "meta.json").write_text(json.dumps(dataset.meta | {"splits": splits}))
        assert not refusal or refusal in error_of(open_dataset, tmp_path)
    assert open_dataset(tmp_path).sha256 != dataset.sha256


def test_a_run_resumes_to_the_bit_is_scored_by_length_and_refuses_what_it_lacks(tmp_path, helpers):
    data, keys = make(tmp_path / "data"), dict(block_size=20, schedule="constant")
    helpers.train(data.folder, tmp_path / "whole", **keys)
    for more in (dict(max_iters=4), dict(init_from="resume")):
        helpers.train(data.folder, tmp_path / "half", **keys | more)
    assert helpers.losses(tmp_path / "half") == helpers.losses(tmp_path / "whole")
    assert helpers.metrics(tmp_path / "whole", "end")[0]["slices"].keys() == {"8", "12", "20"}
    run = words(checkpoint=tmp_path / "whole", device="cpu")
    meters.main([*run, "--rows=4"])
    assert "train has no end" in error_of(evaluate.main, [*run, "--split=train"])
    assert "tokenizer 'states/s3': is no tokenizer of text" in error_of(sample.main, run)
    other = make(tmp_path / "other", task="parity").folder
    assert "its tokenizer is 'states/parity'" in error_of(evaluate.main, [*run, f"--dataset={other}"])
    assert "block_size=19 is too small" in error_of(helpers.train, data.folder, tmp_path / "short", block_size=19)
    assert "must grow" in error_of(make, tmp_path / "x", slices="8,20")


SETTINGS = [
    dict(),
    dict(vocab_size=16, power=1.0),
    dict(slices=["32/7"], vocab_size=17, power=2.0),  # every key is used; odd vocabulary
    dict(slices=["28/7"], vocab_size=16),  # every slot is used
    dict(slices=["4/1"], vocab_size=4, val_size=1),  # the smallest there is: two rows
    dict(vocab_size=40, shift=1),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_label_of_mqar_is_what_its_key_was_shown_with(setting):
    config = mqar.Config(**dict(train_size=1, val_size=500) | setting)
    ((length, pairs),) = mqar.parse_slices(config)
    ((padded, _),) = mqar.generate_splits(config)["val"]
    examples = padded[:, :, config.shift :]
    assert not padded[:, :, : config.shift].any()
    assert examples.shape == (config.val_size, 2, length) and examples.dtype == np.uint16
    assert mqar.chance(config) == 1 / pairs
    assert mqar.chance(mqar.Config(slices=["64/2", "64/16"])) == 2 / 18  # of all queries, and not of slices
    half = config.vocab_size // 2
    for tokens, labels in examples.astype(int):
        assert recalled(tokens.tolist(), 2 * pairs) == labels.tolist()
        shown, rest = tokens[: 2 * pairs].reshape(pairs, 2), tokens[2 * pairs :]
        keys, values = set(shown[:, 0].tolist()), set(shown[:, 1].tolist())
        assert len(keys) == len(values) == pairs and set(labels[labels > 0].tolist()) == values
        assert 1 <= min(keys) <= max(keys) < half <= min(values) <= max(values) < config.vocab_size
        assert sorted(rest[rest > 0].tolist()) == sorted(keys)
