"""evaluate.py and sample.py: the numbers and the text of checkpoints trained for a moment."""

import math
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import evaluate
import sample
from data.shards import open_dataset
from runs.checkpoint import load_model
from study import interventions

MIXERS = ["softmax", "cosformer", "gla"]


@pytest.fixture(scope="module")
def text_runs(text, tmp_path_factory, helpers):
    """mixer -> a run that has begun to learn the text."""
    folder = tmp_path_factory.mktemp("text_runs")
    keys = dict(max_iters=30, learning_rate=1e-2, gate="elementwise", eval_interval=1000)
    return {name: helpers.train(text, folder / name, attention=name, **keys) for name in MIXERS}


@pytest.fixture(scope="module")
def mqar_run(mixed_mqar, tmp_path_factory, helpers):
    keys = dict(n_embd=32, max_iters=60, learning_rate=1e-2, eval_interval=1000)
    return helpers.train(mixed_mqar, tmp_path_factory.mktemp("mqar_run") / "out", **keys)


@pytest.fixture
def sampled(helpers, capsys):
    """sampled(checkpoint, key=value, ...) -> the samples that sample.py writes, prompts and all."""

    def call(checkpoint, **keys):
        keys = dict(num_samples=1, max_new_tokens=12, device="cpu") | keys
        sample.main(helpers.words(checkpoint=checkpoint, **keys))
        texts = capsys.readouterr().out.split("\n" + "-" * 80 + "\n")
        assert texts.pop() == "" and len(texts) == keys["num_samples"]
        return texts

    return call


# -- evaluate.py -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", MIXERS)
def test_perplexity_is_the_cross_entropy_of_the_whole_split(text_runs, text, evaluated, mixer):
    model, _ = load_model(text_runs[mixer])
    tokens = torch.from_numpy(np.load(text / "val_0000.npy").astype(np.int64))
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 32):
            window = tokens[start : start + 33]
            nats += F.cross_entropy(model(window[None, :-1])[0].double(), window[1:], reduction="sum").item()
    assert (len(tokens) - 1) % 32  # the last window is a short one
    n_bytes = open_dataset(text).counts("val")["bytes"]
    for batch_size in (1, 5):
        result = evaluated(text_runs[mixer], batch_size=batch_size)
        assert (result["labels"], result["bytes"]) == (len(tokens) - 1, n_bytes) and "word_perplexity" not in result
        assert result["loss"] == pytest.approx(nats / (len(tokens) - 1), rel=1e-6)
        assert result["perplexity"] == pytest.approx(math.exp(nats / (len(tokens) - 1)), rel=1e-5)
        assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-6)


def test_accuracy_is_counted_at_the_labels_and_by_slice(mqar_run, mixed_mqar, evaluated):
    model, _ = load_model(mqar_run)
    right, asked = {}, {}
    for shard, name in enumerate(("16/2", "32/4", "32/7")):
        rows = torch.from_numpy(np.load(mixed_mqar / f"val_{shard:04d}.npy").astype(np.int64))
        tokens, labels = rows.unbind(1)
        with torch.no_grad():
            answers = model(tokens).argmax(-1)
        right[name] = int((answers == labels)[labels > 0].sum())
        asked[name] = int((labels > 0).sum())
    result = evaluated(mqar_run)
    assert result["slices"] == pytest.approx({name: right[name] / asked[name] for name in right})
    assert result["accuracy"] == pytest.approx(sum(right.values()) / sum(asked.values()))
    assert result["labels"] == sum(asked.values())
    assert 0 < result["accuracy"] < 1


@pytest.mark.parametrize(("keys", "change"), [
    ({"prune_below": 0.7}, lambda model: interventions.pruned(model, 0.7)),
    ({"eight_bits": True}, interventions.quantised),
])  # fmt: skip
def test_a_split_is_read_with_closed_gates_or_in_8_bits(text_runs, text, evaluated, keys, change):
    """As the contexts of study/interventions.py change the model."""
    checkpoint, dataset = text_runs["softmax"], open_dataset(text)
    model, _ = load_model(checkpoint)
    with change(model):
        expected = evaluate.evaluate(model, dataset, "val", batch_size=32, block_size=model.config.block_size)["loss"]
    found = evaluated(checkpoint=checkpoint, dtype="float32", **keys)
    assert found["loss"] == pytest.approx(expected, rel=1e-6) and found | keys == found
    assert found["loss"] != evaluated(checkpoint=checkpoint, dtype="float32")["loss"]


def test_evaluate_refuses_what_it_cannot_score(text_runs, mqar_run, text, evaluated, helpers):
    for checkpoint, keys, expected in [
        (text_runs["softmax"], dict(split="test"), "has no split 'test'; it has train, val"),
        (text_runs["softmax"], dict(stride=64), "would leave tokens between them out"),
        (text_runs["cosformer"], dict(block_size=64), "past block_size=32"),
        (mqar_run, dict(dataset=text), "256 token ids, the model knows 16"),
        (mqar_run, dict(prune_below=0.1), "has no gate that multiplies"),
    ]:
        assert expected in helpers.error_of(evaluated, checkpoint, **keys)


# -- sample.py: text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", MIXERS)
def test_greedy_text_is_the_argmax_of_the_full_forward(text_runs, sampled, mixer):
    model, _ = load_model(text_runs[mixer])
    ids = list(b"The quick")
    with torch.no_grad():
        for _ in range(20):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    (text,) = sampled(text_runs[mixer], start="The quick", temperature=0, max_new_tokens=20)
    assert text == bytes(ids).decode(errors="replace")
    assert sampled(text_runs[mixer], start="The quick", top_k=1, temperature=1.5, max_new_tokens=20) == [text]


def test_the_same_seed_gives_the_same_text(text_runs, sampled):
    keys = dict(start="The", num_samples=3, max_new_tokens=20)
    first, again, other = (sampled(text_runs["softmax"], seed=seed, **keys) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 3 and all(text.startswith("The") for text in first)


def test_processes_that_share_a_model_print_the_text_of_one(text_runs, sampled, helpers):
    keys = dict(checkpoint=text_runs["gla"], num_samples=1, max_new_tokens=12, device="cpu", start="The")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--", "sample.py"]
    together = helpers.script(*launch, *helpers.words(**keys))
    assert together.stdout.decode() == sampled(**keys)[0] + "\n" + "-" * 80 + "\n", together.stderr.decode()


def test_a_prompt_comes_from_the_command_line_or_a_file(text_runs, sampled, tmp_path, helpers):
    prompt = "Zwölf 🙂"
    (tmp_path / "prompt.txt").write_text(prompt, encoding="utf-8")
    starts = (prompt, f"FILE:{tmp_path / 'prompt.txt'}")
    texts = [sampled(text_runs["softmax"], start=start, temperature=0) for start in starts]
    assert texts[0][0].startswith(prompt) and texts[0] == texts[1]
    (tmp_path / "latin1.txt").write_bytes("Zwölf".encode("latin-1"))
    message = helpers.error_of(sampled, text_runs["softmax"], start=f"FILE:{tmp_path / 'latin1.txt'}")
    assert "is not UTF-8 text" in message


@pytest.fixture(scope="module")
def recites(tmp_path_factory, helpers):
    """A model that has learned one line by heart, whose characters take 3 and 4 bytes."""
    folder, line = tmp_path_factory.mktemp("recites"), "名は。🙂"
    data = helpers.write_text(folder / "data", [line * 40], [line * 4])
    keys = dict(n_layer=1, n_embd=32, max_iters=100, learning_rate=1e-2, eval_interval=1000)
    return helpers.train(data, folder / "out", **keys)


def test_characters_of_several_tokens_are_written_whole(recites, helpers, monkeypatch):
    pieces = []
    monkeypatch.setattr(sys.stdout, "write", pieces.append)
    keys = dict(num_samples=1, temperature=0, device="cpu", start="名")
    sample.main(helpers.words(checkpoint=recites, max_new_tokens=23, **keys))  # a line has 13 bytes
    assert "".join(pieces).startswith("名は。🙂名は。🙂\n---")
    assert [piece for piece in pieces[1:] if piece][:7] == list("は。🙂名は。🙂")  # after the prompt


# -- sample.py: past the context length --------------------------------------------------------------------------------


@pytest.mark.parametrize(("mixer", "n_new"), [("cosformer", 30), ("gla", 500)])
def test_without_max_new_tokens_it_is_500_or_as_many_as_there_can_be(text_runs, helpers, sampled, mixer, n_new):
    keys = dict(checkpoint=text_runs[mixer], start="The", temperature=0)
    assert sampled(max_new_tokens=None, **keys) == sampled(max_new_tokens=n_new, **keys)
    if n_new < 500:
        message = helpers.error_of(sampled, max_new_tokens=n_new + 1, **keys)
        assert f"max_new_tokens={n_new} works" in message
