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


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    about = dict(name="made", generator="test", generator_version=1, parameters={}, seed=0)
    write_stream(folder, {"train": [TEXT], "val": [TEXT]}, tokenizer=get_tokenizer("byte"), **about)
    return open_dataset(folder)


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

    def model(inputs):
        return torch.tensor([0.5, 0.25, 0.25]).log().expand(*inputs.shape, 3)

    inputs = torch.tensor([[0, 0, 1], [2, 0, 0]])
    targets = torch.tensor([[0, 1, 2], [0, 0, IGNORE]])
    sums = evaluate.score(model, [(inputs, targets, None)], block_size=3)
    # by position: (0, 0), (1, 0), (2): two, one and no zero among them
    expected = torch.tensor([[2 * math.log(2), 2, 2], [math.log(4) + math.log(2), 2, 1], [math.log(4), 1, 0]])
    torch.testing.assert_close(sums[None].sum(0).float(), expected)
    assert math.exp(nats(sums) / 5) == pytest.approx(2 ** (7 / 5))


@pytest.mark.parametrize("block_size", [1, 7, 32, 1000])
@pytest.mark.parametrize("stride", [1, 3, 7, None])
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


@pytest.mark.parametrize("attention", ["gla", "mamba2", "gated_deltanet", "gla,mamba2"])
@pytest.mark.parametrize("block_size", [10, 64])
def test_carried_state_equals_one_long_forward(text, attention, block_size):
    model, ids = make_model(attention=attention, gate="native"), torch.tensor([list(TEXT.encode())])
    expected = F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="sum").detach()
    assert nats(evaluate.score_carried(model, text, "val", block_size)) == pytest.approx(float(expected), rel=1e-9)


def test_cosformers_state_begins_anew_at_its_m(text):
    model = make_model(attention="cosformer", block_size=40)
    windows = evaluate.score(model, text.eval_batches("val", 4, 40), block_size=40)
    assert nats(evaluate.score_carried(model, text, "val", 20)) == pytest.approx(nats(windows), rel=1e-9)


@pytest.mark.parametrize("keys", [dict(attention="softmax"), dict(attention="gla", position="learned")])
def test_what_has_no_state_to_carry_says_so(text, keys):
    with pytest.raises(UserError, match="no state that goes on"):
        evaluate.score_carried(make_model(**keys), text, "val", 16)


def test_the_numbers_of_a_text_follow_from_its_nats_words_and_bytes(text):
    model = make_model(attention="gla")
    result = evaluate.evaluate(model, text, "val", batch_size=4, block_size=32)
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


def test_a_split_without_a_label_is_named(text):
    sums = {"8/2": torch.zeros(2, 8, 3, dtype=torch.float64)}
    with pytest.raises(UserError, match="no token of val has a label"):
        evaluate.summarize(sums, text, "val")


def test_padded_ids_do_not_count(text):
    padded, model = make_model(pad_vocab_to=100), make_model()
    padded.load_state_dict(model.state_dict() | {"wte.weight": F.pad(model.wte.weight, (0, 0, 0, 44), value=9.0)})
    results = [evaluate.evaluate(m, text, "val", batch_size=4, block_size=32) for m in (model, padded)]
    parts = [result.pop("loss_of") for result in results]
    assert results[0] == pytest.approx(results[1]) and parts[0] == pytest.approx(parts[1])


@pytest.mark.parametrize("scaling", ["none", "ntk", "yarn"])
def test_a_rope_factor_of_one_changes_nothing(scaling):
    frequency, amplitude = rope_frequencies(16, 1e4, scaling, 1.0, 64)
    torch.testing.assert_close(frequency, rope_frequencies(16, 1e4, "none", 1.0, 64)[0])
    assert amplitude == 1.0


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

    def save(dataset=text, **keys):
        model = make_model(**keys).float()
        data = {"path": str(dataset.folder), "tokenizer": "byte", "sha256": dataset.sha256}
        checkpoints.save(
            tmp_path / "ckpt.pt", {"model": model.state_dict(), "model_args": vars(model.config), "data": data}
        )
        return tmp_path

    return save


def test_processes_share_the_windows_and_print_one_table(checkpoint, helpers):
    folder, words = checkpoint(), ["--device=cpu", "--batch_size=3", "--stride=20"]
    alone = helpers.script("evaluate.py", f"--checkpoint={folder}", *words)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "evaluate.py"]
    together = helpers.script(*launch, f"--checkpoint={folder}", *words)
    assert (alone.returncode, together.returncode) == (0, 0), together.stderr.decode()
    printed = [ended.stdout.decode().splitlines() for ended in (alone, together)]
    assert len(printed[0]) == len(printed[1])
    one, two = (json.loads(lines[-1]) for lines in printed)
    assert two.pop("loss_of") == pytest.approx(one.pop("loss_of")) and two == pytest.approx(one)


def test_a_length_past_the_reach_of_the_only_rank_with_a_batch_is_named_by_all(checkpoint, helpers):
    folder, words = checkpoint(attention="cosformer"), ["--device=cpu", "--batch_size=999", "--lengths=64,32"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "evaluate.py"]
    together = helpers.script(*launch, f"--checkpoint={folder}", *words)
    assert together.returncode == 0, together.stderr.decode()
    refused, scored = json.loads(together.stdout.decode().splitlines()[-1])["lengths"]
    assert "past block_size=32" in refused["limit"] and scored["loss"] > 0


def test_a_slice_without_a_label_in_the_sample_has_no_accuracy(tmp_path, helpers):
    labelled = np.array([[[1, 2, 3, 4], [2, 3, 4, 5]]] * 8)
    slices = lambda: [(labelled, {"slice": "a"}), (labelled * [[1], [0]], {"slice": "b"})]  # noqa: E731
    about = dict(name="w", tokenizer="w", generator="tests", generator_version=1, parameters={}, seed=0)
    write_examples(tmp_path / "data", {"train": slices(), "val": slices()}, vocab_size=16, **about)
    out = helpers.train(tmp_path / "data", tmp_path / "out", max_iters=1, meters="false")
    assert list(helpers.metrics(out, "end")[0]["slices"]) == ["a"]


def test_a_carried_state_has_a_column_of_its_own(checkpoint, capsys):
    evaluate.main([f"--checkpoint={checkpoint(attention='gla')}", "--device=cpu", "--carry=true"])
    *table, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert table[2].split() == ["reading", "windows,", "stride", "32", "carried", "state"]
    assert table[3].split() == ["loss", f"{result['loss']:.4f}", f"{result['carried']['loss']:.4f}"]
    assert result["carried"]["labels"] == result["labels"] and result["carried"]["loss"] != result["loss"]


def test_the_table_names_the_version_and_raw_text_is_divided_by_the_published_words(checkpoint, tmp_path, capsys):
    texts = {"val": {"whole": True, "published_words": 1000}}
    about = dict(name="wikitext103-raw", generator="test", generator_version=1, seed=0)
    about["parameters"] = {"version": "raw", "text": texts}
    write_stream(tmp_path / "raw", {"train": [TEXT], "val": [TEXT]}, tokenizer=get_tokenizer("byte"), **about)
    dataset = open_dataset(tmp_path / "raw")
    evaluate.main([f"--checkpoint={checkpoint(dataset)}", "--device=cpu"])
    title, *_, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert title.endswith("on wikitext103-raw (raw), val, tokenizer byte") and result["version"] == "raw"
    assert result["words"] == 1000
    assert result["word_perplexity"] == pytest.approx(math.exp(result["loss"] * result["labels"] / 1000))


def test_the_difference_of_two_checkpoints_comes_with_its_error_over_blocks_of_text(
    checkpoint, tmp_path, capsys, helpers
):
    long = dict(name="made", generator="test", generator_version=1, parameters={}, seed=0)
    write_stream(tmp_path / "long", {"train": [TEXT], "val": [60 * TEXT]}, tokenizer=get_tokenizer("byte"), **long)
    (tmp_path / "a").write_bytes((checkpoint() / "ckpt.pt").read_bytes())
    words = [f"--checkpoint={tmp_path / 'a'}", f"--dataset={tmp_path / 'long'}", "--device=cpu"]
    checkpoint(gate="elementwise")
    evaluate.main([*words, f"--against={tmp_path / 'ckpt.pt'}"])
    *table, line = capsys.readouterr().out.splitlines()
    first, found = json.loads(line), json.loads(line)["against"]
    assert found["difference"] == pytest.approx(first["loss"] - found["loss"]) != 0
    assert found["blocks"] == -(-(first["labels"] // 32 + 1) // (4096 // 32)) and 0 < found["standard_error"] < 0.1
    assert table[-1].startswith(
        f"  loss minus that of {tmp_path / 'ckpt.pt'}: {found['difference']:+.4f} (standard error"
    )
    evaluate.main([*words, f"--against={tmp_path / 'a'}"])
    same = json.loads(capsys.readouterr().out.splitlines()[-1])["against"]
    assert same["difference"] == same["standard_error"] == 0
    evaluate.main([f"--checkpoint={tmp_path}", f"--against={tmp_path}", "--device=cpu"])
    *table, line = capsys.readouterr().out.splitlines()
    assert json.loads(line)["against"]["standard_error"] is None and table[-1].endswith("(one block: no error)")


def test_lengths_past_a_mixers_reach_are_named_and_the_others_scored(checkpoint, tmp_path, capsys):
    words = ["--lengths=16,32,64", f"--out={tmp_path / 'lengths.json'}", "--device=cpu"]
    evaluate.main([f"--checkpoint={checkpoint(attention='cosformer')}", *words])
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads((tmp_path / "lengths.json").read_text())
    assert [row["block_size"] for row in printed["lengths"]] == [16, 32, 64]
    assert "past block_size=32" in printed["lengths"][2]["limit"]
    assert [first for first, _ in printed["lengths"][1]["by_position"]] == list(range(0, 32, 2))


def test_a_length_that_there_is_no_memory_for_now_is_not_kept_as_a_limit(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "memory_available", lambda *words: (1 << 10, "the machine"))
    words = ["--lengths=16,32", f"--out={tmp_path / 'lengths.json'}", "--device=cpu"]
    with pytest.raises(UserError, match="of memory would be needed"):
        evaluate.main([f"--checkpoint={checkpoint()}", *words])
    assert not (tmp_path / "lengths.json").exists()


@pytest.mark.parametrize("has_changed", [False, True])
def test_data_that_changed_since_training_are_named(checkpoint, tmp_path, capsys, has_changed):
    about = dict(name="made", generator="test", generator_version=1, parameters={}, seed=0)
    splits = {"train": [TEXT], "val": [TEXT]}
    write_stream(tmp_path / "data", splits, tokenizer=get_tokenizer("byte"), **about)
    folder = checkpoint(open_dataset(tmp_path / "data"))
    if has_changed:
        write_stream(tmp_path / "data", splits | {"train": [TEXT[::-1]]}, tokenizer=get_tokenizer("byte"), **about)
    evaluate.main([f"--checkpoint={folder}", "--device=cpu"])
    *printed, line = capsys.readouterr().out.splitlines()
    assert json.loads(line)["data_has_changed"] is has_changed
    assert ("is no longer the data that the model was trained on" in printed[-1]) is has_changed


def test_other_data_than_those_of_the_training_are_no_changed_data(checkpoint, text, tmp_path, capsys):
    about = dict(name="made", generator="test", generator_version=1, parameters={}, seed=0)
    write_stream(tmp_path / "b", {"train": [TEXT], "val": [TEXT[::-1]]}, tokenizer=get_tokenizer("byte"), **about)
    evaluate.main([f"--checkpoint={checkpoint()}", f"--dataset={tmp_path / 'b'}", "--device=cpu"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["data_has_changed"] is None


@pytest.mark.parametrize("words", [[], ["--against=CKPT"], ["--carry=true"]], ids=" ".join)
def test_finite_weights_whose_loss_is_not_are_one_line_and_no_json(checkpoint, tmp_path, capsys, helpers, words):
    """A weight of 3e38 is finite, and the sum of two is not."""
    folder = checkpoint(attention="gla")
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "ckpt.pt").write_bytes((folder / "ckpt.pt").read_bytes())
    loaded = checkpoints.load(folder)
    loaded["model"]["blocks.0.mixer.out_proj.weight"].fill_(3e38)
    checkpoints.save(folder / "ckpt.pt", loaded)
    first = tmp_path / "good" if words == ["--against=CKPT"] else folder
    out = tmp_path / "out.json"
    words = [f"--checkpoint={first}", *(word.replace("CKPT", str(folder)) for word in words), "--device=cpu"]
    message = helpers.error_of(evaluate.main, [*words, f"--out={out}"])
    assert re.search(f"^{folder}: its loss is (nan|inf): its weights are broken, or the run has diverged", message)
    assert not out.exists() and not capsys.readouterr().out
    message = helpers.error_of(meters.main, [f"--checkpoint={folder}", f"--out={out}", "--device=cpu"])
    assert message.startswith(f"{folder}: ") and "diverged" in message and not out.exists()
