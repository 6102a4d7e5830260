"""Bigram-Backcopy: rows against a literal reading of the rule, table and perfect predictor against counts."""

import collections
import itertools
import json
import math

import numpy as np
import pytest
from conftest import Helpers

import evaluate
import meters
import sample
from base.files import read_jsonl
from data.backcopy import prepare
from data.shards import open_dataset
from data.tokenizer import tokenizer_of
from model import GPT
from runs import probe

TEXT = "the tree there, the theatre; see the sea, tess! " * 40 + "zebra.\n"
K, TRIGGERS = 8, 2


def make(out, text, *words, **keys):
    """A small data set of that text. Returns its folder."""
    sizes = dict(text=text, characters=K, triggers=TRIGGERS, seq_len=24, train_size=50, val_size=9, out_dir=out)
    prepare.main([*Helpers.words(**sizes | keys), *words])
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("backcopy")
    (place / "text.txt").write_text(TEXT)
    make(place / "data", place / "text.txt", train_size=3000, val_size=500, seed=3)
    return place


def counted():
    """The alphabet by falling frequency and {(character, next): how often}, counted one by one."""
    frequency = collections.Counter(TEXT)
    alphabet = "".join(sorted(frequency, key=lambda c: (-frequency[c], c))[:K])
    pairs = collections.Counter(pair for pair in itertools.pairwise(TEXT) if set(pair) <= set(alphabet))
    return alphabet, frequency, pairs


def test_the_literal_loop_gives_the_same_rows():
    rng = np.random.default_rng(0)
    table = rng.random((6, 6)) * (rng.random((6, 6)) > 0.3)
    table[:, 0] = table[0] = 0
    table[1:, 1] += 0.1
    table[1:] /= table[1:].sum(1, keepdims=True)
    first = np.array([0, 0, 0, 0.5, 0.25, 0.25])
    found = prepare.generate(np.random.default_rng(7), 50, 12, table, first, 2)
    rng = np.random.default_rng(7)
    chains = [[0, int(c)] for c in rng.choice(6, 50, p=first)]
    while len(chains[0]) < 13:
        for chain, u in zip(chains, rng.random(50), strict=True):
            total, drawn = 0.0, -1
            while total <= u:  # the first character whose cumulated probability is above u
                drawn += 1
                total += table[chain[-1], drawn]
            chain.append(chain[-2] if 0 < chain[-1] <= 2 else drawn)
    assert found.tolist() == [[chain[:-1], chain[1:]] for chain in chains]


def test_the_table_is_the_pairs_of_the_text_and_the_perfect_predictor_knows_it(folder):
    config = prepare.Config(text=str(folder / "text.txt"), characters=K, triggers=TRIGGERS)
    alphabet, table, first = prepare.chain_of(config)
    characters, frequency, pairs = counted()
    counts = np.array([[pairs[a, b] for b in alphabet] for a in alphabet])
    assert alphabet == characters and not table[0].any() and not table[:, 0].any()
    np.testing.assert_allclose(table[1:, 1:], counts / counts.sum(1, keepdims=True))
    others = np.array([frequency[c] for c in alphabet[TRIGGERS:]])
    np.testing.assert_allclose(first, [*[0] * (1 + TRIGGERS), *others / others.sum()])
    dataset = open_dataset(folder / "data")
    assert (dataset.alphabet, dataset.vocab_size, dataset.kinds) == (alphabet, K + 1, {"trigger": [1, 2]})
    for i, (split, rows) in enumerate({"train": 3000, "val": 500}.items()):
        tokens, labels, *_ = next(dataset.eval_batches(split, rows, 24))
        drawn = prepare.generate(np.random.default_rng([3, i]), rows, 24, table, first, TRIGGERS)
        assert np.array_equal(drawn, np.stack([tokens, labels], axis=1))
        probability = np.where(tokens == 0, first[labels], np.where(tokens <= TRIGGERS, 1, table[tokens, labels]))
        nats, error = -np.log(probability), 4 * np.log(probability).std() / math.sqrt(tokens.numel())
        assert dataset.perfect_loss(split) == pytest.approx(nats.mean(), abs=error)


def test_a_model_of_it_is_sampled_measured_by_kind_and_told_its_floor(folder, tmp_path, helpers, capsys):
    keys = dict(block_size=24, position="learned", gate="headwise", n_layer=1, n_head=1, max_iters=2, eval_interval=1)
    helpers.train(folder / "data", tmp_path / "run", **keys)
    assert f"validation loss is {open_dataset(folder / 'data').perfect_loss('val'):.4f}" in capsys.readouterr().out
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    measured = [row for row in rows if row["event"] == "eval"][-1]["meters"]
    kinds = measured["kinds"]
    assert kinds.keys() == {"trigger", "other"} and kinds["other"]["gate_mean"].keys() == {"readout"}
    sample.main([f"--checkpoint={tmp_path / 'run'}", "--start=the", "--max_new_tokens=9", "--num_samples=1"])
    written = capsys.readouterr().out
    assert written.startswith("the") and set(written.split("\n-")[0]) <= set(counted()[0]) | {"\n"}
    meters.main(helpers.words(checkpoint=tmp_path / "run", rows=4, device="cpu"))
    found = json.loads((tmp_path / "run" / "meters.json").read_text())["checkpoints"][0]
    assert found["layers"][0]["sink"]["kinds"].keys() == found["losses"].keys() - {"all"} == {"trigger", "other"}
    inputs, _ = probe.first_rows(open_dataset(folder / "data"), "val", 4, 24)
    positions = [i for i, token in enumerate(inputs[0].tolist()) if token in (1, 2)]
    assert found["maps"][0]["queries"]["trigger"] == positions


def test_a_sample_begins_as_rows_do_and_another_alphabet_is_refused(folder, tmp_path, helpers, monkeypatch):
    data = make(tmp_path / "data", folder / "text.txt")
    helpers.train(data, tmp_path / "run", n_layer=1, max_iters=1, meters="false")
    read = []
    monkeypatch.setattr(GPT, "stream", lambda self, idx, *args, **keys: read.append(idx.tolist()) or [])
    expected = [[[0, *tokenizer_of(open_dataset(data)).encode("the")]]]
    data.rename(tmp_path / "elsewhere")
    sample.main(helpers.words(checkpoint=tmp_path / "run", start="the", num_samples=1, device="cpu"))
    assert read == expected
    (tmp_path / "other.txt").write_text(TEXT.swapcase())
    make(data, tmp_path / "other.txt")
    message = helpers.error_of(evaluate.main, helpers.words(checkpoint=tmp_path / "run", device="cpu"))
    assert "its alphabet is" in message and "the model was trained with" in message
