"""Every token once, whatever the window: perplexities that can be compared."""

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from small_models import off_its_start
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import evaluate
from data.shards import open_dataset
from model import GPTConfig
from ops import IGNORE
from ops.layers import rope_frequencies
from runs import checkpoint as checkpoints

TEXT = "a few words,\nand a few more of them; é is two bytes\n" * 7


@pytest.fixture(scope="module")
def text(tmp_path_factory, helpers):
    return open_dataset(helpers.write_text(tmp_path_factory.mktemp("text"), [TEXT], [TEXT]))


def make_model(**keys):
    keys = dict(n_layer=2, n_head=2, n_embd=16, block_size=32, vocab_size=256) | keys
    return off_its_start(GPTConfig(**keys), noise=0.2)


class OfLogits:
    """As much of a GPT as add_scores asks for; logits: a function of inputs (B, T) to (B, T, V)."""

    def __init__(self, logits):
        self.logits_of = logits

    def features(self, inputs, document=None):
        return self.logits_of(inputs), None

    def logits(self, x):
        return x


def test_the_perplexity_of_a_three_token_model_is_the_hand_computed_one():
    """Ids 0, 1, 2 with probabilities 1/2, 1/4, 1/4 whatever came before: log 2 for a 0, log 4 for the others."""
    inputs, targets = torch.tensor([[0, 0, 1], [2, 0, 0]]), torch.tensor([[0, 1, 2], [0, 0, IGNORE]])
    logits = torch.tensor([0.5, 0.25, 0.25]).log().expand(2, 3, 3)
    sums = torch.zeros(2, 3, 3, dtype=torch.float64)
    evaluate.add_scores(sums, OfLogits(lambda inputs: logits), inputs, targets)
    # by position: (0, 0), (1, 0), (2): two, one and no zero among them
    expected = torch.tensor([[2 * math.log(2), 2, 2], [math.log(4) + math.log(2), 2, 1], [math.log(4), 1, 0]])
    torch.testing.assert_close(sums.sum(0).float(), expected)
    assert math.exp(sums[..., 0].sum() / 5) == pytest.approx(2 ** (7 / 5))


@pytest.mark.parametrize(("block_size", "stride"), [(32, 32), (32, 5), (20, 8), (7, 3)])
def test_windows_score_what_the_usual_recipe_scores(text, block_size, stride):
    """The sliding windows of HF's "perplexity of fixed-length models", on an HF model with random weights."""
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
    sums = torch.zeros(2, block_size, 3, dtype=torch.float64)
    for inputs, targets, *_ in text.eval_batches("val", 3, block_size, stride=stride):
        evaluate.add_scores(sums, OfLogits(lambda inputs: oracle(inputs).logits), inputs, targets)
    assert float(sums[..., 0].sum()) == pytest.approx(total, rel=1e-5)


def test_a_string_is_repeated_where_it_has_stood_earlier_in_its_window():
    rows = [b"the cat sat, the cat sat", b"abababababababababababab", b"nothing here comes again"]
    rows.append(b"short, b" + b"then the cat sat")  # what stands in another row is no repetition
    expected = [[row[max(0, i - 7) : i + 1] in row[:i] and i >= 7 for i in range(len(row))] for row in rows]
    inputs, whole = torch.tensor([list(row) for row in rows]), torch.zeros(4, 24, dtype=torch.long)
    found = evaluate.is_repeated(inputs, whole)
    assert found.tolist() == expected and sum(map(sum, expected)) == 19
    assert not evaluate.is_repeated(whole[:, :8], whole[:, :8]).any()


def test_a_string_over_the_border_of_two_documents_is_not_repeated_and_repeats_nothing():
    row = torch.tensor([list(b"abcdefghijabcdefghijabcdefghij")])
    for border in range(1, 30):
        document = (torch.arange(30) >= border).long()[None] * border
        parts = row[:, :border], row[:, border:]
        alone = torch.cat([evaluate.is_repeated(part, torch.zeros_like(part)) for part in parts], dim=1)
        assert torch.equal(evaluate.is_repeated(row, document), alone), border


def test_the_parts_of_a_texts_loss_are_means_over_their_labels(text):
    model, nats_of = make_model(attention="gla", block_size=64), {}
    for inputs, targets, *_ in text.eval_batches("val", 4, 64):
        loss = F.cross_entropy(model(inputs).mT, targets, reduction="none", ignore_index=IGNORE).detach()
        again = evaluate.is_repeated(inputs, torch.zeros_like(inputs))
        for row, i in (targets != IGNORE).nonzero().tolist():
            places = ["near"] * (i < 8) + ["far"] * (i >= 32) + ["repeated" if again[row, i] else "elsewhere"]
            for place in places:
                nats_of.setdefault(place, []).append(float(loss[row, i]))
    found = evaluate.evaluate(model, text, "val", batch_size=3, block_size=64)["loss_of"]
    mean = {place: sum(values) / len(values) for place, values in nats_of.items()}
    mean["far_minus_near"] = mean["far"] - mean["near"]
    mean["repeated_minus_elsewhere"] = mean["repeated"] - mean["elsewhere"]
    assert found == pytest.approx(mean, rel=1e-9)


def test_a_row_that_only_longer_contexts_have_is_in_the_table(checkpoint, helpers, capsys):
    evaluate.main(helpers.words(checkpoint=checkpoint(attention="gla"), device="cpu", lengths="4,8,128"))
    rows = re.findall("(?m)^loss_of ([a-z_]+) +([0-9.-]+) +([0-9.-]+) +([0-9.-]+)$", capsys.readouterr().out)
    assert [(name, numbers.count("-")) for name, *numbers in rows] == [
        ("near", 1), ("far", 0), ("repeated", 2), ("elsewhere", 0),
        ("far_minus_near", 1), ("repeated_minus_elsewhere", 2),
    ]  # fmt: skip


def test_bits_per_byte_are_those_of_the_whole_split_and_a_sample_has_none(text):
    model, keys = make_model(attention="gla"), dict(batch_size=3, block_size=32)
    whole = evaluate.evaluate(model, text, "val", **keys)
    sample = evaluate.evaluate(model, text, "val", **keys, tokens=64)
    assert whole["labels"] == len(TEXT.encode()) - 1
    assert whole["bits_per_byte"] == pytest.approx(whole["loss"] * whole["labels"] / math.log(2) / len(TEXT.encode()))
    assert sample["labels"] < whole["labels"] and not {"bits_per_byte", "bytes"} & sample.keys()


def test_a_sample_without_a_label_is_one_line_also_where_several_processes_have_none(text, helpers):
    assert "no token of val has a label" in helpers.error_of(evaluate.summarize, torch.zeros(1, 2, 32, 3), text, "val")


def test_ntk_keeps_the_fastest_pair_and_slows_the_slowest_by_the_factor():
    plain, slowed = (rope_frequencies(64, 1e4, scaling, 4.0, 1024)[0] for scaling in ("none", "ntk"))
    assert slowed[0] == plain[0] and slowed[-1] * 4 == pytest.approx(plain[-1])


def test_llama3_ramp_is_that_of_transformers():
    """D = 64, trained at 1,024: pairs on both sides of the ramp, and on it."""
    parameters = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    parameters["original_max_position_embeddings"] = 1024
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters=parameters)
    theirs, amplitude = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    ours = rope_frequencies(64, 1e4, "llama3", 8.0, 1024)
    torch.testing.assert_close(ours[0].float(), theirs, rtol=1e-5, atol=0)
    assert ours[1] == amplitude == 1
    slowed = ours[0] / rope_frequencies(64, 1e4)[0]
    on_the_ramp = (slowed > 1 / 8 + 0.01) & (slowed < 0.99)
    assert (slowed == 1).any() and (slowed == 1 / 8).any() and on_the_ramp.sum() >= 3


@pytest.fixture
def checkpoint(text, tmp_path):
    """checkpoint(key=value, ...) -> the folder of a checkpoint with random weights, trained on the made text."""

    def save(dataset=text, **keys):
        model = make_model(**keys).float()
        data = {"path": str(dataset.folder), "tokenizer": "byte", "sha256": dataset.sha256}
        state = {"model": model.state_dict(), "model_args": vars(model.config), "data": data}
        checkpoints.save(tmp_path / "ckpt.pt", state)
        return tmp_path

    return save


def test_processes_share_the_windows_and_write_one_object(checkpoint, tmp_path, helpers, evaluated):
    keys = dict(checkpoint=checkpoint(attention="cosformer"), batch_size=3, lengths="32,16")
    alone, out = evaluated(**keys), tmp_path / "together.json"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "evaluate.py", "--device=cpu"]
    together = helpers.script(*launch, *helpers.words(**keys, out=out))
    assert together.returncode == 0, together.stderr.decode()
    for one, two in zip(alone["lengths"], json.loads(out.read_text())["lengths"], strict=True):
        assert len(one["by_position"]) == 16
        for nested in ("loss_of", "by_position"):
            assert two.pop(nested) == pytest.approx(one.pop(nested))
        assert two == pytest.approx(one)


def test_raw_text_is_divided_by_the_published_words(checkpoint, tmp_path, evaluated, helpers):
    parameters = {"version": "raw", "text": {"val": {"whole": True, "published_words": 1000}}}
    folder = helpers.write_text(tmp_path / "raw", [TEXT], [TEXT], name="wikitext103-raw", parameters=parameters)
    result = evaluated(checkpoint(open_dataset(folder)))
    assert result["version"] == "raw" and result["words"] == 1000
    assert result["word_perplexity"] == pytest.approx(math.exp(result["loss"] * result["labels"] / 1000))


def test_finite_weights_whose_loss_is_not_are_one_line_and_no_json(checkpoint, tmp_path, capsys, helpers):
    """A weight of 3e38 is finite, and the sum of two is not."""
    bad, out = checkpoint(attention="gla"), tmp_path / "out.json"
    loaded = checkpoints.load(bad)
    loaded["model"]["blocks.0.mixer.out_proj.weight"].fill_(3e38)
    checkpoints.save(bad / "ckpt.pt", loaded)
    words = [f"--checkpoint={bad}", "--device=cpu", f"--out={out}"]
    message = helpers.error_of(evaluate.main, words)
    assert re.search(f"^{bad}: its loss is (nan|inf): its weights are broken, or the run has diverged", message)
    assert not out.exists() and not capsys.readouterr().out
    assert helpers.error_of(evaluate.main, [*words, "--lengths=4,8"]) == message  # which is no limit of a length
    assert "no split 'tset'" in helpers.error_of(evaluate.main, [*words, "--lengths=4,8", "--split=tset"])
