"""Every token once, whatever the window: perplexities that can be compared.

python -m pytest tests/test_evaluate.py
"""

from configurator import UserError

import json
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import evaluate
import meters
from data.shards import open_dataset
from data.tokenizer import get_tokenizer
from data.writing import write_examples, write_stream
from model import GPT, GPTConfig
from ops import IGNORE
from ops.layers import rope_frequencies
from runs import checkpoint as checkpoints
from runs import memory

TEXT = "a few words,\nand a few more of them; é is two bytes\n" * 7


def write(folder, train=TEXT, val=TEXT, **keys):
    about = dict(name="made", generator="test", generator_version=1, parameters={}, seed=0) | keys
    write_stream(folder, {"train": [train], "val": [val]}, tokenizer=get_tokenizer("byte"), **about)
    return open_dataset(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write(tmp_path_factory.mktemp("text"))


def make_model(**keys):
    torch.manual_seed(0)
    keys = dict(n_layer=2, n_head=2, n_embd=16, block_size=32, vocab_size=256) | keys
    model = GPT(GPTConfig(**keys)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def nats(sums):
    return sum(float(rows[..., 0].sum()) for rows in sums.values())


def test_the_perplexity_of_a_three_token_model_is_the_hand_computed_one():
    """Ids 0, 1, 2 with probabilities 1/2, 1/4, 1/4 whatever came before: log 2 for a 0, log 4 for the others."""
    inputs, targets = torch.tensor([[0, 0, 1], [2, 0, 0]]), torch.tensor([[0, 1, 2], [0, 0, IGNORE]])
    logits, rows = torch.tensor([0.5, 0.25, 0.25]).log().expand(2, 3, 3), []
    sums = evaluate.score(lambda inputs: logits, [(inputs, targets, None)], block_size=3, by_row=rows)
    # by position: (0, 0), (1, 0), (2): two, one and no zero among them
    expected = torch.tensor([[2 * math.log(2), 2, 2], [math.log(4) + math.log(2), 2, 1], [math.log(4), 1, 0]])
    torch.testing.assert_close(sums[None].sum(0).float(), expected)
    assert math.exp(nats(sums) / 5) == pytest.approx(2 ** (7 / 5))
    assert [x for row in rows for x in row] == pytest.approx([math.log(32), 3, math.log(4), 2])


@pytest.mark.parametrize("block_size", [1, 7, 1000])
@pytest.mark.parametrize("stride", [1, 3, None])
def test_scored_tokens_are_all_but_the_first(text, block_size, stride):
    if (stride or 0) > block_size:
        with pytest.raises(UserError, match="would leave tokens between them out"):
            list(text.eval_batches("val", 5, block_size, stride=stride))
        return
    seen = []
    for inputs, targets, _ in text.eval_batches("val", 5, block_size, stride=stride):
        assert inputs.shape == targets.shape
        seen += targets[targets != IGNORE].tolist()
    assert bytes(seen) == TEXT.encode()[1:]


@pytest.mark.parametrize(("block_size", "stride"), [(32, 32), (32, 5), (20, 8)])
def test_windows_score_what_the_usual_recipe_scores(text, block_size, stride):
    """The sliding windows of HF's "perplexity of fixed-length models", on an HF model with random weights."""
    torch.manual_seed(0)
    oracle = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=16, n_layer=2, n_head=2)).eval()
    ids = torch.tensor([list(TEXT.encode())])
    total, previous_end = 0.0, 1
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + block_size + 1, ids.shape[1])  # block_size inputs, and the target of the last
        with torch.no_grad():
            logits = oracle(ids[:, begin : end - 1]).logits[0]
        new = end - previous_end  # targets that no window before has scored
        total += float(F.cross_entropy(logits[-new:], ids[0, end - new : end], reduction="sum"))
        previous_end = end
        if end == ids.shape[1]:
            break
    batches = text.eval_batches("val", 3, block_size, stride=stride)
    sums = evaluate.score(lambda inputs: oracle(inputs).logits, batches, block_size=block_size)
    assert nats(sums) == pytest.approx(total, rel=1e-5)


def carried(model, text, block_size):
    return nats(evaluate.score(model, text.eval_batches("val", 1, block_size), block_size=block_size, carry=True))


@pytest.mark.parametrize("attention, block_size", [("gla", 10), ("mamba2,gated_deltanet", 64)])
def test_carried_state_equals_one_long_forward(text, attention, block_size):
    model, ids = make_model(attention=attention, gate="native"), torch.tensor([list(TEXT.encode())])
    expected = F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="sum").detach()
    assert carried(model, text, block_size) == pytest.approx(float(expected), rel=1e-9)


def test_cosformers_state_begins_anew_at_its_m(text):
    model = make_model(attention="cosformer", block_size=40)
    windows = evaluate.score(model, text.eval_batches("val", 4, 40), block_size=40)
    assert carried(model, text, 20) == pytest.approx(nats(windows), rel=1e-9)


@pytest.mark.parametrize("keys", [dict(attention="softmax"), dict(attention="gla", position="learned")])
def test_what_has_no_state_to_carry_says_so(checkpoint, helpers, keys):
    message = helpers.error_of(evaluate.main, [f"--checkpoint={checkpoint(**keys)}", "--carry=true", "--device=cpu"])
    assert "no state that goes on" in message


def test_the_numbers_of_a_text_follow_from_its_nats_words_and_bytes(text):
    result = evaluate.evaluate(make_model(attention="gla"), text, "val", batch_size=4, block_size=32)
    n_bytes, n_words = len(TEXT.encode()), len(TEXT.split())
    total = result["loss"] * (n_bytes - 1)
    assert (result["bytes"], result["words"], result["labels"]) == (n_bytes, n_words, n_bytes - 1)
    assert result["word_perplexity"] == pytest.approx(math.exp(total / n_words))
    assert result["bits_per_byte"] == pytest.approx(total / math.log(2) / n_bytes)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))


def test_a_string_is_repeated_where_it_has_stood_earlier_in_its_window():
    rows = [b"the cat sat, the cat sat", b"abababababababababababab", b"nothing here comes again"]
    rows.append(b"short, b" + b"then the cat sat")  # what stands in another row is no repetition
    expected = [[row[max(0, i - 7) : i + 1] in row[:i] and i >= 7 for i in range(len(row))] for row in rows]
    found = evaluate.is_repeated(torch.tensor([list(row) for row in rows]))
    assert found.tolist() == expected and sum(map(sum, expected)) == 19
    assert not evaluate.is_repeated(torch.zeros(2, 8, dtype=torch.long)).any()


def test_the_parts_of_a_texts_loss_are_means_over_their_labels(text):
    model, nats_of = make_model(attention="gla", block_size=64), {}
    for inputs, targets, _ in text.eval_batches("val", 4, 64):
        loss = F.cross_entropy(model(inputs).mT, targets, reduction="none", ignore_index=IGNORE).detach()
        again = evaluate.is_repeated(inputs)
        for row, i in (targets != IGNORE).nonzero().tolist():
            places = ["near"] * (i < 8) + ["far"] * (i >= 32) + ["repeated" if again[row, i] else "elsewhere"]
            for place in places:
                nats_of.setdefault(place, []).append(float(loss[row, i]))
    found = evaluate.evaluate(model, text, "val", batch_size=3, block_size=64)["loss_of"]
    mean = {place: sum(values) / len(values) for place, values in nats_of.items()}
    mean["far_minus_near"] = mean["far"] - mean["near"]
    mean["repeated_minus_elsewhere"] = mean["repeated"] - mean["elsewhere"]
    assert found == pytest.approx(mean, rel=1e-9)


def test_padded_ids_do_not_count(text):
    padded, model = make_model(pad_vocab_to=100), make_model()
    padded.load_state_dict(model.state_dict() | {"wte.weight": F.pad(model.wte.weight, (0, 0, 0, 44), value=9.0)})
    results = [evaluate.evaluate(m, text, "val", batch_size=4, block_size=32) for m in (model, padded)]
    parts = [result.pop("loss_of") for result in results]
    assert results[0] == pytest.approx(results[1]) and parts[0] == pytest.approx(parts[1])


@pytest.mark.parametrize("scaling", ["ntk", "yarn"])
def test_a_rope_factor_of_one_changes_nothing(scaling):
    plain, scaled = (rope_frequencies(16, 1e4, name, 1.0, 64) for name in ("none", scaling))
    assert torch.allclose(plain[0], scaled[0]) and scaled[1] == plain[1] == 1.0


def test_yarn_is_the_published_one():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=4096, rope_parameters=rope)
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    frequency, amplitude = rope_frequencies(64, 1e4, "yarn", 4.0, 1024)
    torch.testing.assert_close(frequency.float(), expected, rtol=1e-5, atol=1e-8)
    assert amplitude == pytest.approx(scale)


def test_ntk_keeps_the_fastest_pair_and_slows_the_slowest_by_the_factor():
    plain, slowed = (rope_frequencies(64, 1e4, scaling, 4.0, 1024)[0] for scaling in ("none", "ntk"))
    assert slowed[0] == plain[0] and slowed[-1] * 4 == pytest.approx(plain[-1])


@pytest.fixture
def checkpoint(text, tmp_path):
    """checkpoint(key=value, ...) -> the folder of a checkpoint with random weights, trained on the made text."""

    def save(dataset=text, folder=tmp_path, **keys):
        model = make_model(**keys).float()
        data = {"path": str(dataset.folder), "tokenizer": "byte", "sha256": dataset.sha256}
        state = {"model": model.state_dict(), "model_args": vars(model.config), "data": data}
        folder.mkdir(exist_ok=True)
        checkpoints.save(folder / "ckpt.pt", state)
        return folder

    return save


@pytest.fixture
def printed(capsys):
    """printed(word, ...) -> (the lines of evaluate.py before the last one, the object in that)."""

    def run(*words):
        evaluate.main([*map(str, words), "--device=cpu", "--threads=1"])
        *lines, line = capsys.readouterr().out.splitlines()
        return lines, json.loads(line)

    return run


def test_processes_share_the_windows_and_print_one_table(checkpoint, helpers, printed):
    """Of 370 tokens there is one window: the rank that has it finds that it is past cosformer's reach."""
    words = [f"--checkpoint={checkpoint(attention='cosformer')}", "--batch_size=3", "--lengths=370,32"]
    table, alone = printed(*words)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "evaluate.py", "--device=cpu"]
    together = helpers.script(*launch, *words)
    assert together.returncode == 0, together.stderr.decode()
    *lines, last = together.stdout.decode().splitlines()
    (refused, one), (refused_by_all, two) = alone["lengths"], json.loads(last)["lengths"]
    assert refused == refused_by_all and "past block_size=32" in refused["limit"] and len(lines) == len(table)
    for nested in ("loss_of", "by_position"):
        assert dict(two.pop(nested)) == pytest.approx(dict(one.pop(nested)))
    assert two == pytest.approx(one)


def test_a_slice_without_a_label_in_the_sample_has_no_accuracy(tmp_path, helpers):
    labelled = np.array([[[1, 2, 3, 4], [2, 3, 4, 5]]] * 8)
    slices = lambda: [(labelled, {"slice": "a"}), (labelled * [[1], [0]], {"slice": "b"})]  # noqa: E731
    about = dict(name="w", tokenizer="w", generator="tests", generator_version=1, parameters={}, seed=0)
    write_examples(tmp_path / "data", {"train": slices(), "val": slices()}, vocab_size=16, **about)
    out = helpers.train(tmp_path / "data", tmp_path / "out", max_iters=1, meters="false")
    assert list(helpers.metrics(out, "end")[0]["slices"]) == ["a"]


def test_a_carried_state_has_a_column_of_its_own(checkpoint, printed):
    table, result = printed(f"--checkpoint={checkpoint(attention='gla')}", "--carry=true")
    assert table[2].split() == ["reading", "windows,", "stride", "32", "carried", "state"]
    assert table[3].split() == ["loss", f"{result['loss']:.4f}", f"{result['carried']['loss']:.4f}"]
    assert result["carried"]["labels"] == result["labels"] and result["carried"]["loss"] != result["loss"]


def test_the_table_names_the_version_and_raw_text_is_divided_by_the_published_words(checkpoint, tmp_path, printed):
    parameters = {"version": "raw", "text": {"val": {"whole": True, "published_words": 1000}}}
    dataset = write(tmp_path / "raw", name="wikitext103-raw", parameters=parameters)
    (title, *_), result = printed(f"--checkpoint={checkpoint(dataset)}")
    assert title.endswith("on wikitext103-raw (raw), val, tokenizer byte") and result["version"] == "raw"
    assert result["words"] == 1000
    assert result["word_perplexity"] == pytest.approx(math.exp(result["loss"] * result["labels"] / 1000))


def test_the_difference_of_two_checkpoints_comes_with_its_error_over_blocks_of_text(checkpoint, tmp_path, printed):
    long = write(tmp_path / "long", val=25 * TEXT)
    a, b = checkpoint(folder=tmp_path / "a"), checkpoint(folder=tmp_path / "b", gate="elementwise")
    words = [f"--checkpoint={a}", f"--dataset={long.folder}"]
    table, first = printed(*words, f"--against={b}")
    other = first["against"]
    assert other["difference"] == pytest.approx(first["loss"] - other["loss"]) != 0
    assert other["blocks"] == -(-(first["labels"] // 32 + 1) // (4096 // 32)) and 0 < other["standard_error"] < 0.1
    assert table[-1].startswith(f"  loss minus that of {b}: {other['difference']:+.4f} (standard error")
    _, same = printed(*words, f"--against={a}")
    assert same["against"]["difference"] == same["against"]["standard_error"] == 0
    table, short = printed(f"--checkpoint={a}", f"--against={a}")
    assert short["against"]["standard_error"] is None and table[-1].endswith("(one block: no error)")


def test_lengths_past_a_mixers_reach_are_named_and_the_others_scored(checkpoint, tmp_path, printed):
    folder, out = checkpoint(attention="cosformer"), tmp_path / "lengths.json"
    _, result = printed(f"--checkpoint={folder}", "--lengths=16,32,64", f"--out={out}")
    assert result == json.loads(out.read_text())
    assert [row["block_size"] for row in result["lengths"]] == [16, 32, 64]
    assert "past block_size=32" in result["lengths"][2]["limit"]
    assert [first for first, _ in result["lengths"][1]["by_position"]] == list(range(0, 32, 2))


def test_a_length_that_there_is_no_memory_for_now_is_not_kept_as_a_limit(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "ram_available", lambda: 1 << 10)
    words = ["--lengths=16,32", f"--out={tmp_path / 'lengths.json'}", "--device=cpu"]
    with pytest.raises(UserError, match="of memory would be needed"):
        evaluate.main([f"--checkpoint={checkpoint()}", *words])
    assert not (tmp_path / "lengths.json").exists()


def test_data_that_changed_since_training_are_named_and_other_data_are_no_changed_ones(checkpoint, tmp_path, printed):
    folder = checkpoint(write(tmp_path / "data"))
    other = write(tmp_path / "other", val=TEXT[::-1]).folder
    assert printed(f"--checkpoint={folder}")[1]["data_has_changed"] is False
    assert printed(f"--checkpoint={folder}", f"--dataset={other}")[1]["data_has_changed"] is None
    write(tmp_path / "data", train=TEXT[::-1])
    lines, result = printed(f"--checkpoint={folder}")
    assert result["data_has_changed"] is True
    assert "is no longer the data that the model was trained on" in lines[-1]


@pytest.mark.parametrize("words", [[], ["--against=BAD"], ["--carry=true"]], ids=" ".join)
def test_finite_weights_whose_loss_is_not_are_one_line_and_no_json(checkpoint, tmp_path, capsys, helpers, words):
    """A weight of 3e38 is finite, and the sum of two is not."""
    good, bad = (checkpoint(folder=tmp_path / name, attention="gla") for name in ("good", "bad"))
    loaded, out = checkpoints.load(bad), tmp_path / "out.json"
    loaded["model"]["blocks.0.mixer.out_proj.weight"].fill_(3e38)
    checkpoints.save(bad / "ckpt.pt", loaded)
    words = [f"--checkpoint={good if '--against=BAD' in words else bad}", *words, "--device=cpu", f"--out={out}"]
    message = helpers.error_of(evaluate.main, [word.replace("BAD", str(bad)) for word in words])
    assert re.search(f"^{bad}: its loss is (nan|inf): its weights are broken, or the run has diverged", message)
    assert not out.exists() and not capsys.readouterr().out
    message = helpers.error_of(meters.main, [f"--checkpoint={bad}", f"--out={out}", "--device=cpu"])
    assert message.startswith(f"{bad}: ") and "diverged" in message and not out.exists()
