"""Bigram-Backcopy: the rows against a literal reading of the rule, the table and the perfect predictor against counts.

python -m pytest tests/test_backcopy.py
"""

from configurator import UserError

import collections
import itertools
import json
import math
import re
import string

import numpy as np
import pytest
import torch

import evaluate
import meters
import sample
from data.backcopy import prepare
from data.pystdlib import prepare as pystdlib
from data.shards import open_dataset
from data.tokenizer import tokenizer_of
from model import GPT
from runs import probe
from runs.files import read_jsonl

TEXT = "the tree there, the theatre; see the sea, tess! " * 40 + "zebra.\n"
K, TRIGGERS = 8, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("backcopy")
    (place / "text.txt").write_text(TEXT)
    words = [f"--text={place / 'text.txt'}", f"--characters={K}", f"--triggers={TRIGGERS}", "--seq_len=24"]
    prepare.main([*words, "--train_size=3000", "--val_size=500", f"--out_dir={place / 'data'}", "--seed=3"])
    return place


def counted():
    """The alphabet by falling frequency and {(character, next): how often}, counted one by one."""
    frequency = collections.Counter(TEXT)
    alphabet = "".join(sorted(frequency, key=lambda c: (-frequency[c], c))[:K])
    pairs = collections.Counter(pair for pair in itertools.pairwise(TEXT) if set(pair) <= set(alphabet))
    return alphabet, frequency, pairs


def rows_of(folder, split="train"):
    dataset = open_dataset(folder / "data")
    n = dataset.counts(split)["rows"]
    inputs, targets, _ = next(dataset.eval_batches(split, n, 24))
    return dataset, inputs.numpy(), targets.numpy()


def test_every_row_obeys_the_rule_and_the_labels_are_the_next_tokens(folder):
    dataset, tokens, labels = rows_of(folder)
    alphabet, _, pairs = counted()
    assert dataset.meta["parameters"]["alphabet"] == alphabet and dataset.vocab_size == K + 1
    assert dataset.kinds == {"trigger": [1, 2]}
    for row, targets in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert row[1:] == targets[:-1] and row[0] == 0 and 0 not in targets
        chain = [*row, targets[-1]]
        assert chain[1] > TRIGGERS
        for before, now, after in zip(chain, chain[1:], chain[2:], strict=False):
            if now <= TRIGGERS:
                assert after == before
            else:
                assert (alphabet[now - 1], alphabet[after - 1]) in pairs


def test_the_literal_loop_gives_the_same_rows():
    rng = np.random.default_rng(0)
    table = rng.random((6, 6)) * (rng.random((6, 6)) > 0.3)
    table[:, 0] = table[0] = 0
    table[1:, 1] += 0.1
    table[1:] /= table[1:].sum(1, keepdims=True)
    first = np.array([0, 0, 0, 0.5, 0.25, 0.25])
    for first_token in (True, False):
        found = prepare.generate(np.random.default_rng(7), 50, 12, table, first, 2, first_token)
        rng = np.random.default_rng(7)
        chains = [[0] * first_token + [int(c)] for c in rng.choice(6, 50, p=first)]
        while len(chains[0]) < 13:
            for chain, u in zip(chains, rng.random(50), strict=True):
                total, drawn = 0.0, -1
                while total <= u:  # the first character whose cumulated probability is above u
                    drawn += 1
                    total += table[chain[-1], drawn]
                chain.append(chain[-2] if 0 < chain[-1] <= 2 else drawn)
        assert found.tolist() == [[chain[:-1], chain[1:]] for chain in chains]


def test_pairs_behind_other_characters_are_as_frequent_as_in_the_text(folder):
    _, tokens, labels = rows_of(folder)
    alphabet, frequency, pairs = counted()
    drawn = collections.Counter(zip(tokens.ravel().tolist(), labels.ravel().tolist(), strict=True))
    for now in range(TRIGGERS + 1, K + 1):
        total = sum(n for (character, _), n in pairs.items() if character == alphabet[now - 1])
        n = sum(count for (token, _), count in drawn.items() if token == now)
        for after in range(1, K + 1):
            p = pairs[alphabet[now - 1], alphabet[after - 1]] / total
            assert drawn[now, after] == pytest.approx(n * p, abs=4.5 * math.sqrt(n * p * (1 - p)) + 1e-9)
    others = {i: frequency[alphabet[i - 1]] for i in range(TRIGGERS + 1, K + 1)}
    for character, count in others.items():
        p = count / sum(others.values())
        assert drawn[0, character] == pytest.approx(3000 * p, abs=4.5 * math.sqrt(3000 * p * (1 - p)))


def test_the_perfect_predictors_loss_is_what_its_probabilities_give_on_the_rows(folder):
    dataset, tokens, labels = rows_of(folder)
    alphabet, frequency, pairs = counted()
    others = sum(frequency[c] for c in alphabet[TRIGGERS:])
    nats = []
    for now, after in zip(tokens.ravel().tolist(), labels.ravel().tolist(), strict=True):
        if now == 0:
            nats.append(-math.log(frequency[alphabet[after - 1]] / others))
        elif now > TRIGGERS:
            total = sum(n for (character, _), n in pairs.items() if character == alphabet[now - 1])
            nats.append(-math.log(pairs[alphabet[now - 1], alphabet[after - 1]] / total))
        else:
            nats.append(0.0)
    error = 4 * np.std(nats) / math.sqrt(len(nats))
    assert dataset.perfect_loss("train") == pytest.approx(np.mean(nats), abs=error)
    assert dataset.perfect_loss("val") == pytest.approx(dataset.perfect_loss("train"), abs=0.02)


def test_a_character_that_nothing_follows_is_followed_by_any():
    _, ids = prepare.most_frequent("ababab!", 3)
    table, counts = prepare.pair_table(ids, 3)
    assert table[3].tolist() == pytest.approx([0, 3 / 7, 3 / 7, 1 / 7]) and counts.tolist() == [0, 3, 3, 1]
    assert table[1].tolist() == [0, 0, 1, 0] and table[0].tolist() == [0] * 4


SMALL = ["--train_size=20", "--val_size=20", "--seq_len=16"]


def test_a_seed_is_the_same_rows(folder, tmp_path):
    words = [*SMALL, f"--text={folder / 'text.txt'}", "--characters=8", "--triggers=2"]
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare.main([*words, f"--seed={seed}", f"--out_dir={tmp_path / name}"])
    shas = [json.loads((tmp_path / name / "meta.json").read_text())["splits"]["train"]["shards"] for name in "abc"]
    assert shas[0] == shas[1] and shas[0][0]["sha256"] != shas[2][0]["sha256"]


def test_the_table_is_the_standard_librarys_by_default(tmp_path, capsys):
    prepare.main([*SMALL, f"--out_dir={tmp_path}"])
    dataset = open_dataset(tmp_path)
    alphabet = dataset.meta["parameters"]["alphabet"]
    assert set(string.ascii_letters) <= set(alphabet) and len(alphabet) == 96
    said = capsys.readouterr().out
    assert f"loss of the perfect predictor: {dataset.perfect_loss('val'):.4f} nats" in said.split("written")[0]
    assert f"triggers: {alphabet[0]!r}" in said


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--triggers=8"], "triggers=8: must be fewer than characters=8"),
        (["--characters=40", "--triggers=2"], "different characters; lower characters=40"),
        (["--text=nowhere.txt"], "nowhere.txt"),
        (["--seq_len=2"], "seq_len=2: must be a whole number of at least 3"),
        (["--train_size=99999999999999"], "lower train_size, val_size or seq_len"),
    ],
)
def test_what_cannot_be_made_is_one_line(folder, tmp_path, words, reason):
    usual = [f"--text={folder / 'text.txt'}", "--characters=8", "--triggers=2", f"--out_dir={tmp_path / 'x'}"]
    with pytest.raises(UserError, match=".*") as caught:
        prepare.main([*usual, *words])
    assert reason in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "x").exists()


def test_a_model_of_it_is_sampled_measured_by_kind_and_told_its_floor(folder, tmp_path, helpers, capsys):
    keys = dict(block_size=24, position="learned", gate="headwise", n_layer=1, n_head=1, max_iters=2, eval_interval=1)
    helpers.train(folder / "data", tmp_path / "run", **keys)
    assert f"validation loss is {open_dataset(folder / 'data').perfect_loss('val'):.4f}" in capsys.readouterr().out
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    kinds = [row for row in rows if row["event"] == "eval"][-1]["meters"]["kinds"]
    assert kinds.keys() == {"trigger", "other"} and kinds["other"]["gate_mean"].keys() == {"readout"}
    sample.main([f"--checkpoint={tmp_path / 'run'}", "--start=the", "--max_new_tokens=9", "--num_samples=1"])
    written = capsys.readouterr().out
    assert written.startswith("the") and set(written.split("\n-")[0]) <= set(counted()[0]) | {"\n"}
    with pytest.raises(UserError, match="'q' is not among the 8 characters"):
        sample.main([f"--checkpoint={tmp_path / 'run'}", "--start=q"])
    for words, name in (([], "trigger"), (["--queries=[a-h]"], "[a-h]")):
        meters.main([f"--checkpoint={tmp_path / 'run'}", "--rows=4", "--score_batches=1", "--device=cpu", *words])
        found = json.loads((tmp_path / "run" / "meters.json").read_text())["checkpoints"][0]
        assert found["layers"][0]["sink"]["kinds"].keys() == {name, "other"} == found["losses"].keys()
        positions = found["maps"][0]["queries"][name]
        inputs, _, _ = probe.first_rows(open_dataset(folder / "data"), "val", 4, 24)
        wanted = [1, 2] if not words else [i + 1 for i, c in enumerate(counted()[0]) if "a" <= c <= "h"]
        assert positions == [i for i, token in enumerate(inputs[0].tolist()) if i and token in wanted]
        assert len(found["maps"][0]["gate"]) == len(found["maps"][0]["weights"]) == 24
        assert re.search(rf"^ *0 +{re.escape(name)} ", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(("make", "first"), [({}, [0]), ({"first_token": False}, []), ({"row_len": 24}, [0])])
def test_a_sample_begins_with_the_token_that_rows_begin_with(make, first, folder, tmp_path, helpers, monkeypatch):
    if "row_len" in make:
        for name in ("a", "b"):
            (tmp_path / f"{name}.py").write_text(f"# {name}\n{TEXT}")
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
        pystdlib.main(helpers.words(out_dir=tmp_path / "data", val_fraction=0.3, **make))
    else:
        sizes = dict(text=folder / "text.txt", characters=K, triggers=TRIGGERS, seq_len=24, train_size=50, val_size=9)
        prepare.main(helpers.words(out_dir=tmp_path / "data", **sizes, **make))
    helpers.train(tmp_path / "data", tmp_path / "run", n_layer=1, max_iters=1, meters="false")
    read, stream = [], GPT.stream
    monkeypatch.setattr(
        GPT, "stream", lambda self, idx, *args, **keys: read.append(idx) or stream(self, idx, *args, **keys)
    )
    sample.main(helpers.words(checkpoint=tmp_path / "run", start="the", max_new_tokens=2, num_samples=1, device="cpu"))
    assert read[0].tolist() == [first + tokenizer_of(open_dataset(tmp_path / "data")).encode("the")]


def test_a_model_does_not_read_another_alphabet(folder, tmp_path, helpers):
    sizes = dict(characters=K, triggers=TRIGGERS, seq_len=24, train_size=50, val_size=9, out_dir=tmp_path / "data")
    prepare.main(helpers.words(text=folder / "text.txt", **sizes))
    helpers.train(tmp_path / "data", tmp_path / "run", n_layer=1, max_iters=1, meters="false")
    (tmp_path / "other.txt").write_text((folder / "text.txt").read_text().swapcase())
    prepare.main(helpers.words(text=tmp_path / "other.txt", **sizes))
    for main in (sample.main, evaluate.main):
        message = helpers.error_of(main, helpers.words(checkpoint=tmp_path / "run", device="cpu"))
        assert "the model was trained with" in message


@pytest.mark.parametrize("half", ["\ud800", "\udcff", "\udfff"])
def test_an_alphabet_with_half_a_character_is_one_line(half, folder, tmp_path, helpers):
    sizes = dict(characters=K, triggers=TRIGGERS, seq_len=24, train_size=50, val_size=9, out_dir=tmp_path / "data")
    prepare.main(helpers.words(text=folder / "text.txt", **sizes))
    file = tmp_path / "data" / "meta.json"
    meta = json.loads(file.read_text())
    meta["parameters"]["alphabet"] = meta["parameters"]["alphabet"][:-1] + half
    file.write_text(json.dumps(meta))
    message = helpers.error_of(open_dataset, tmp_path / "data")
    assert message.startswith(f"{file}: its alphabet holds '\\u{ord(half):x}', half of a character; run python")


def test_queries_that_match_nothing_or_no_expression_are_one_line(folder):
    dataset = open_dataset(folder / "data")
    tokenizer = tokenizer_of(dataset)
    assert tokenizer.decode_bytes(tokenizer.encode("the tree")) == b"the tree"
    assert meters.matching_tokens(dataset, "[th]")["[th]"] == sorted(tokenizer.encode("th"))
    for expression, reason in (("(", "is no regular expression"), ("Q", "matches none of the 9 tokens")):
        with pytest.raises(UserError, match=reason):
            meters.matching_tokens(dataset, expression)


def test_rows_of_text_begin_with_byte_0_and_every_byte_is_a_label_once(tmp_path):
    text = "".join(chr(33 + i % 90) for i in range(50))
    examples = pystdlib.rows_of(text, 16)
    assert examples.shape == (3, 2, 16) and examples.dtype == np.uint16
    assert bytes(examples[:, 1].ravel().astype(np.uint8)) == text[:48].encode()
    assert (examples[:, 0, 0] == 0).all() and (examples[:, 0, 1:] == examples[:, 1, :-1]).all()
    with pytest.raises(UserError, match="row_len=64: a split has 50 bytes, not one row"):
        pystdlib.rows_of(text, 64)


def test_the_standard_library_in_rows_is_a_data_set_of_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text(f"# {name}\n" * 40)
    pystdlib.main([f"--out_dir={tmp_path / 'rows'}", "--row_len=32", "--val_fraction=0.3"])
    dataset = open_dataset(tmp_path / "rows")
    assert (dataset.kind, dataset.tokenizer, dataset.vocab_size, dataset.slices) == ("examples", "byte", 256, ["32"])
    assert dataset.kinds == {} and dataset.perfect_loss("val") is None and dataset.first_ids == [0]
    inputs, targets, _ = next(dataset.eval_batches("train", 99, 32))
    assert (inputs[:, 0] == 0).all() and torch.equal(inputs[:, 1:], targets[:, :-1])
