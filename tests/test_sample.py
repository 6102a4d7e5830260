"""evaluate.py and sample.py: the numbers and the text of checkpoints trained for a moment, and how ids are drawn."""

import json
import math
import sys
import warnings
from statistics import fmean

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import off_its_start
from test_model import T, make_config

import evaluate
import sample
from base.configurator import UserError
from data import tokenizer
from data.shards import open_dataset
from model import MIXERS
from ops.sampling import draw
from runs.checkpoint import load_model

# of an added token, in a tokenizer.json
MARK = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)

THREE = ["softmax", "cosformer", "gla"]


@pytest.fixture(scope="module")
def text_runs(text, tmp_path_factory, helpers):
    """mixer -> a run that has begun to learn the text."""
    folder = tmp_path_factory.mktemp("text_runs")
    keys = dict(max_iters=30, learning_rate=1e-2, gate="elementwise", eval_interval=1000)
    return {name: helpers.train(text, folder / name, attention=name, **keys) for name in THREE}


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


@torch.no_grad()
@pytest.mark.parametrize("mixer", THREE)
def test_perplexity_is_the_cross_entropy_of_the_whole_split(text_runs, text, evaluated, mixer):
    model, _ = load_model(text_runs[mixer])
    tokens = torch.from_numpy(np.load(text / "val_0000.npy").astype(np.int64))
    windows = [tokens[start : start + 33] for start in range(0, len(tokens) - 1, 32)]
    nats = sum(F.cross_entropy(model(w[None, :-1])[0].double(), w[1:], reduction="sum").item() for w in windows)
    assert (len(tokens) - 1) % 32  # the last window is a short one
    n_bytes = open_dataset(text).counts("val")["bytes"]
    for batch_size in (1, 5):
        result = evaluated(text_runs[mixer], batch_size=batch_size)
        assert (result["labels"], result["bytes"]) == (len(tokens) - 1, n_bytes) and "word_perplexity" not in result
        assert result["loss"] == pytest.approx(nats / (len(tokens) - 1), rel=1e-6)
        assert result["perplexity"] == pytest.approx(math.exp(nats / (len(tokens) - 1)), rel=1e-5)
        assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-6)


@torch.no_grad()
def test_accuracy_is_counted_at_the_labels_and_by_slice(mqar_run, mixed_mqar, evaluated):
    model, _ = load_model(mqar_run)
    right = {}
    for shard, name in enumerate(("16/2", "32/4", "32/7")):
        rows = torch.from_numpy(np.load(mixed_mqar / f"val_{shard:04d}.npy").astype(np.int64))
        tokens, labels = rows.unbind(1)
        right[name] = (model(tokens).argmax(-1) == labels)[labels > 0].tolist()
    result, whole = evaluated(mqar_run), sum(right.values(), [])
    assert result["slices"] == pytest.approx({name: fmean(answers) for name, answers in right.items()})
    assert result["labels"] == len(whole) and result["accuracy"] == pytest.approx(fmean(whole))
    assert 0 < result["accuracy"] < 1


@pytest.mark.parametrize(("keys", "change"), [
    ({"prune_below": 0.7}, lambda model: evaluate.prune_gates(model, 0.7)),
    ({"eight_bits": True}, evaluate.quantise),
])  # fmt: skip
def test_a_split_is_read_with_closed_gates_or_in_8_bits(text_runs, text, evaluated, keys, change):
    checkpoint, dataset = text_runs["softmax"], open_dataset(text)
    model, _ = load_model(checkpoint)
    change(model)
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
    ]:
        assert expected in helpers.error_of(evaluated, checkpoint, **keys)


# -- sample.py ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", THREE)
def test_greedy_text_is_what_the_model_generates(text_runs, sampled, mixer):
    ids = load_model(text_runs[mixer])[0].generate(torch.tensor([list(b"The quick")]), 20, temperature=0)[0].tolist()
    (text,) = sampled(text_runs[mixer], start="The quick", temperature=0, max_new_tokens=20)
    assert text == bytes(ids).decode(errors="replace")
    assert sampled(text_runs[mixer], start="The quick", top_k=1, temperature=1.5, max_new_tokens=20) == [text]


def test_the_same_seed_gives_the_same_text(text_runs, sampled):
    keys = dict(start="The", num_samples=3, max_new_tokens=20)
    first, again, other = (sampled(text_runs["softmax"], seed=seed, **keys) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 3 and all(text.startswith("The") for text in first)


def test_a_prompt_comes_from_the_command_line_or_a_file(text_runs, sampled, tmp_path):
    prompt = "Zwölf 🙂"
    (tmp_path / "prompt.txt").write_text(prompt, encoding="utf-8")
    starts = (prompt, f"FILE:{tmp_path / 'prompt.txt'}")
    texts = [sampled(text_runs["softmax"], start=start, temperature=0) for start in starts]
    assert texts[0][0].startswith(prompt) and texts[0] == texts[1]


def test_characters_of_several_tokens_are_written_whole(tmp_path, helpers, monkeypatch):
    """By a model that has learned one line by heart, whose characters take 3 and 4 bytes."""
    data = helpers.write_text(tmp_path / "data", ["名は。🙂" * 40], ["名は。🙂" * 4])
    keys = dict(n_layer=1, n_embd=32, max_iters=100, learning_rate=1e-2, eval_interval=1000)
    recites, pieces = helpers.train(data, tmp_path / "out", **keys), []
    monkeypatch.setattr(sys.stdout, "write", pieces.append)
    keys = dict(num_samples=1, temperature=0, device="cpu", start="名")
    sample.main(helpers.words(checkpoint=recites, max_new_tokens=23, **keys))  # a line has 13 bytes
    assert "".join(pieces).startswith("名は。🙂名は。🙂\n---")
    assert [piece for piece in pieces[1:] if piece][:7] == list("は。🙂名は。🙂")  # after the prompt


@pytest.mark.parametrize(("mixer", "n_new"), [("cosformer", 30), ("gla", 500)])
def test_without_max_new_tokens_it_is_500_or_as_many_as_there_can_be(text_runs, helpers, sampled, mixer, n_new):
    keys = dict(checkpoint=text_runs[mixer], start="The", temperature=0)
    assert sampled(max_new_tokens=None, **keys) == sampled(max_new_tokens=n_new, **keys)
    if n_new < 500:
        message = helpers.error_of(sampled, max_new_tokens=n_new + 1, **keys)
        assert f"the prompt, of 3 tokens, and max_new_tokens may have {3 + n_new} together" in message


# -- The ids that are drawn, one at a time, with the state kept --------------------------------------------------------


def make_model(**keys):
    return off_its_start(make_config(**keys))


@pytest.mark.parametrize("name", MIXERS)
def test_greedy_with_the_cache_is_greedy_without(name):
    model, idx = make_model(attention=name), torch.randint(50, (3, 5))
    expected = idx
    for _ in range(12):
        expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    for options in (dict(temperature=0), dict(temperature=0.7, top_k=1), dict(top_p=1e-6)):
        assert torch.equal(model.generate(idx, 12, **options), expected)


def test_ids_that_are_unknown_to_the_tokenizer_are_never_drawn():
    model, idx = make_model(), torch.zeros(4, 1, dtype=torch.long)
    model.wte.weight.data[45:] *= 30  # what would be likeliest
    assert 45 <= model.generate(idx, 30).max()
    assert model.generate(idx, 30, n_tokens=45).max() < 45


def test_top_p_keeps_the_fewest_ids_that_reach_it():
    def drawn(logits, top_k, top_p):
        return set(draw(logits.expand(2000, -1), 1.0, top_k, top_p).flatten().tolist())

    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert drawn(logits, None, 0.79) == {0, 1} and drawn(logits, None, 0.81) == drawn(logits, 3, None) == {0, 1, 2}
    assert len(drawn(torch.zeros(4), None, 0.5)) == 2  # two of four equal ones reach one half exactly
    assert drawn(logits, None, 1e-60) == {0}  # float32 rounds it to 0


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(temperature):
    n_draws, logits = 20_000, torch.tensor([0.0, 1.0, 2.0])
    share = draw(logits.expand(n_draws, -1), temperature, None, None).flatten().bincount(minlength=3) / n_draws
    torch.testing.assert_close(share, (logits / temperature).softmax(0), rtol=0, atol=0.02)  # five standard errors


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error_and_not_a_token(broken):
    model = make_model()
    model.norm.weight.data[0] = broken
    with pytest.raises(UserError, match="not finite"):
        model.generate(torch.zeros(1, 1, dtype=torch.long), 1)


def test_past_block_size_a_window_rolls_with_a_warning_and_a_recurrence_goes_on():
    idx = torch.zeros(1, 3, dtype=torch.long)
    with pytest.warns(UserWarning, match="some layers see the last 40 tokens only") as printed:
        assert make_model().generate(idx, 2 * T).shape == (1, 3 + 2 * T)
    assert len(printed) == 1
    with pytest.warns(UserWarning, match="some layers see"):  # the model reads T + 1 tokens
        make_model().generate(idx, T - 1)
    with warnings.catch_warnings(action="error"):
        assert make_model(attention="gla").generate(idx, 2 * T).shape == (1, 3 + 2 * T)
        make_model().generate(idx, T - 2)  # it never reads the last token that it draws


def test_an_empty_prompt_of_a_bpe_begins_a_line_or_behind_its_end_of_text(tmp_path):
    trained = tokenizer.choose_tokenizer("bpe:300", ["one\ntwo\n" * 9])
    assert trained.decode_bytes([trained.end_of_text]) == b"\n"
    marked = json.loads(trained.content)
    marked["added_tokens"] = [dict(MARK, id=trained.vocab_size, content="<|endoftext|>")]
    (tmp_path / "tokenizer.json").write_text(json.dumps(marked))
    of_model = tokenizer.choose_tokenizer(str(tmp_path), [])
    assert of_model.end_of_text == trained.vocab_size


def test_every_tokenizer_has_a_name():
    assert tokenizer.AlphabetTokenizer("ab").name == "alphabet"  # hub/harness.py asks


def test_a_bpe_to_be_trained_is_no_tokenizer_of_a_checkpoint(trained, helpers):
    message = helpers.error_of(sample.main, [f"--checkpoint={trained}", "--tokenizer=bpe:300"])
    assert message == "tokenizer 'bpe:300': name the folder of the tokenizer.json that was trained"


def test_a_model_with_more_ids_than_its_tokenizer_draws_text_alone(text, tmp_path, helpers, sampled):
    out = helpers.train(text, tmp_path / "out", vocab_size=512, max_iters=1)
    assert sampled(out, start="a", max_new_tokens=30, temperature=9)  # an id past 255 is no byte, and an error


def test_a_window_wider_than_block_size_remembers_block_size_tokens():
    state = make_model(window=str(2 * T)).init_state(length=3 * T)
    assert {tensor.shape[2] for layer in state for tensor in layer.values()} == {T}


@pytest.mark.parametrize("keys", [dict(attention="cosformer"), dict(position="learned")], ids=str)
def test_past_block_size_a_state_that_ends_is_refused(keys):
    model = make_model(**keys)
    with pytest.raises(UserError, match="position 82 is past block_size=40"):
        model.generate(torch.zeros(1, 3, dtype=torch.long), 2 * T)
    with pytest.raises(
        UserError, match="its state ends: the prompt, of 41 tokens, and max_new_tokens may have 41 together"
    ):
        model.generate(torch.zeros(1, T + 1, dtype=torch.long), 1)
    with pytest.raises(UserError, match="past block_size=40"):  # also where nobody asks for a token
        model(torch.zeros(1, T + 1, dtype=torch.long))
