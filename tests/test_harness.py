"""lm-evaluation-harness: log-likelihoods are those of whole forwards, and the library runs a local task."""

import functools
import json
import math
import shutil
import types

import published
import pytest
import test_huggingface
import tokenizers
import torch
import transformers

from hub import export
from model import MIXERS
from runs import checkpoint as checkpoints

pytest.importorskip("lm_eval")  # make test-all installs it

from hub import harness  # noqa: E402


@pytest.fixture(scope="module")
def trained(text, helpers, tmp_path_factory):
    """trained(mixer) -> the folder of a run on bytes, made once."""
    keys = dict(gate="elementwise", state_size=8, meters="false", max_iters=2, block_size=32)
    return functools.cache(lambda mixer: helpers.train(text, tmp_path_factory.mktemp("run"), attention=mixer, **keys))


def requests(*arguments):
    return [types.SimpleNamespace(args=args) for args in arguments]


def definition(model, context, continuation):
    """(nats, greedy) by one forward over the whole text."""
    logits = model(torch.tensor([[*context, *continuation[:-1]]]))[0, len(context) - 1 :].log_softmax(-1)
    targets = torch.tensor(continuation, dtype=torch.long)
    return float(logits.gather(1, targets[:, None]).sum()), bool((logits.argmax(-1) == targets).all())


@pytest.mark.parametrize("mixer", MIXERS)
def test_scores_are_those_of_whole_forwards(mixer, trained):
    own = harness.NanogateLM(checkpoint=str(trained(mixer)), device="cpu")
    pairs = [("The quick", " brown fox"), ("Boxkämpfer jagen", " Eva"), ("x", "yz")]
    for (context, continuation), (nats, greedy) in zip(pairs, own.loglikelihood(requests(*pairs)), strict=True):
        expected = definition(own.model, list(context.encode()), list(continuation.encode()))
        assert (nats, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])


def dummy_prefix(file):
    """A tokenizer as Llama 2's: a space, spelled U+2581, is put before a text, and "ab" is one piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "c", "ab"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(vocab=vocab, merges=[("a", "b")], byte_fallback=True, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    steps = tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")
    made.normalizer = tokenizers.normalizers.Sequence(list(steps))
    parts = tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()
    made.decoder = tokenizers.decoders.Sequence(list(parts))
    special = [("<s>", 1), ("</s>", 2)]
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", None, special)
    made.save(str(file))


@pytest.fixture
def hub(tmp_path):
    """hub(save) -> the model in a folder of a Llama whose tokenizer.json save(file) writes."""

    def make(save):
        test_huggingface.save("Llama", tmp_path / "hub", dict(bos_token_id=1, eos_token_id=2))
        save(tmp_path / "hub" / "tokenizer.json")
        return harness.NanogateLM(checkpoint=str(tmp_path / "hub"), device="cpu")

    return make


def test_no_space_is_put_before_a_continuation_and_only_what_precedes_a_text_before_a_prompt(hub):
    own = hub(dummy_prefix)
    assert own.coder.first_ids() == own.first_ids == [1]  # and not </s>
    space, _ = own.coder.encode("ab")
    a, c = (own.coder.encode(text)[-1] for text in "ac")
    ((nats, _),) = own.loglikelihood(requests(("a", "c")))
    assert nats == pytest.approx(definition(own.model, [1, space, a], [c])[0], abs=1e-5)


def test_an_id_that_is_put_first_stands_before_a_text_and_is_not_scored(hub):
    own = hub(dummy_prefix)
    space, ab = own.coder.encode("ab")
    (found,) = own.loglikelihood_rolling(requests(("abab",)))
    assert found == pytest.approx(definition(own.model, [1], [space, ab, ab])[0], abs=1e-5)


def test_a_long_text_is_read_in_windows_and_the_first_one_behind_a_line_end(trained, helpers):
    own, n = harness.NanogateLM(checkpoint=str(trained("softmax")), device="cpu"), 32
    written = "The quick brown fox jumps over the lazy dog, and again over the other one."
    ids = [*b"\n", *written.encode()]
    assert own.prefix_token_id == ids[0]
    windows = [(ids[:1], ids[1 : n + 1]), (ids[n : n + 1], ids[n + 1 : 2 * n + 1])]
    windows.append((ids[-n - 1 : 2 * n + 1], ids[2 * n + 1 :]))
    (found,) = own.loglikelihood_rolling(requests((written,)))
    assert found == pytest.approx(sum(definition(own.model, *window)[0] for window in windows), abs=3e-4)
    contexts = {"": ids[:1], "The quick": [*b"The quick"], written: ids[2 - n :]}  # cut at its start
    for context, behind in contexts.items():
        ((nats, _),) = own.loglikelihood(requests((context, " It")))
        assert nats == pytest.approx(definition(own.model, behind, list(b" It"))[0], abs=3e-5)
    for text in ("", "b" * (n + 1)):
        message = helpers.error_of(own.loglikelihood, requests(("a", text)))
        assert message == f"a continuation of {len(text)} tokens cannot be scored (1 to block_size={n}): {text!r}"


def test_an_imported_model_has_the_special_tokens_of_its_folder(trained, tmp_path):
    folder = shutil.copytree(trained("gla"), tmp_path / "out")
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 5, "eos_token_id": [7, 115]}))
    own = harness.NanogateLM(checkpoint=str(folder), device="cpu")
    assert own.prefix_token_id == own.eot_token_id == 7
    (found,) = own.loglikelihood(requests(("", "fox")))
    assert found[0] == pytest.approx(definition(own.model, [7], list(b"fox"))[0], rel=1e-5)
    plain = harness.NanogateLM(checkpoint=str(trained("gla")), device="cpu")
    assert plain.prefix_token_id == ord("\n") and plain.ends == []
    ids = own.model.generate(torch.tensor([list(b"The quick")]), 12, temperature=0)[0, 9:].tolist()
    own.ends = [ids[4]]
    shorter = bytes(ids[: ids.index(ids[4])]).decode(errors="replace")
    assert own.generate_until(requests(("The quick", {"max_gen_toks": 12}))) == [shorter]


def test_a_model_whose_tokenizer_puts_an_id_before_a_text_has_the_scores_of_the_library_s_hf_model(tmp_path, helpers):
    published.save_tokenizer(tmp_path / "made.json", 300)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "made.json"))
    made.post_processor = tokenizers.processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 299)])
    words = dict(bos_token="<|im_start|>", eos_token="<|end|>")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **words).save_pretrained(tmp_path / "theirs")
    test_huggingface.save("Llama", tmp_path / "theirs", dict(bos_token_id=299, eos_token_id=298))
    export.main(helpers.words(from_hf=tmp_path / "theirs", out_dir=tmp_path / "ours"))
    own = harness.NanogateLM(checkpoint=str(tmp_path / "ours"), device="cpu")
    assert checkpoints.load(tmp_path / "ours")["data"]["first_ids"] == [299]  # sample.py puts it first, too
    plain = own.tok_encode("The quick", add_special_tokens=False)
    assert len(plain) == 9 and own.tok_encode("The quick") == [299, *plain]
    hf = pytest.importorskip("lm_eval.models.huggingface")
    theirs = hf.HFLM(pretrained=str(tmp_path / "theirs"), device="cpu", dtype="float32")
    pairs = [("The quick", " brown fox"), ("", "x"), ("a", "b"), ("The qui", "ck")]
    pairs = [own.loglikelihood(requests(*pairs)), theirs.loglikelihood(requests(*pairs))]
    assert [nats for nats, _ in pairs[0]] == pytest.approx([nats for nats, _ in pairs[1]], abs=1e-4)
    rolling = [lm.loglikelihood_rolling(requests(("The quick",)))[0] for lm in (own, theirs)]
    once, twice = (definition(own.model, [299], [*more, *plain])[0] for more in ([], [299]))
    assert rolling == pytest.approx([once, twice], abs=1e-3)  # theirs scores the id before a text as a part of it
    written = [lm.generate_until(requests(("The quick", {"max_gen_toks": 9, "until": []}))) for lm in (own, theirs)]
    assert written[0] == written[1]


@pytest.mark.parametrize("content", ['{"eos_token_id": "x"}', "[]", '{"eos_token_id": [null]}'])
def test_an_end_that_is_no_id_is_one_line(content, helpers, tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text(content)
    assert str(file) in helpers.error_of(harness.ids_that_end, file)
    file.write_text('{"bos_token_id": null, "eos_token_id": null}')
    assert harness.ids_that_end(file) == [] == harness.ids_that_end(tmp_path / "none")


def test_text_is_written_up_to_a_stop_string_or_as_far_as_the_layers_go(trained):
    own = harness.NanogateLM(checkpoint=str(trained("gla")), device="cpu")
    (whole,) = own.generate_until(requests(("The quick", {"max_gen_toks": 12, "until": []})))
    idx = own.model.generate(torch.tensor([list(b"The quick")]), 12, temperature=0)[0, 9:]
    assert whole == bytes(idx.tolist()).decode(errors="replace")
    stop = whole[5:7]
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
        keys = {name: 12, "until": ["no such text"], "do_sample": False, "temperature": 0.8, "top_k": 0}
        assert own.generate_until(requests(("The quick", keys))) == [whole]
    keys["until"] += [stop]
    assert own.generate_until(requests(("The quick", keys))) == [whole[: whole.index(stop)]]
    own = harness.NanogateLM(checkpoint=str(trained("cosformer")), device="cpu")
    expected = own.model.generate(torch.tensor([list(b"The quick")]), 24, temperature=0)[0, 9:].tolist()
    assert own.generate_until(requests(("The quick", {}))) == [bytes(expected).decode(errors="replace")]


def test_the_library_runs_a_local_task_on_a_checkpoint(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    rows = [{"question": "The quick", "right": i % 2, "text": "The quick brown fox."} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    every = dict(dataset_path="json", dataset_kwargs=files, test_split="test", doc_to_text="{{question}}")
    every["doc_to_target"] = "{{text}}"
    for name, kind, metric, more in [
        ("choice", "multiple_choice", "acc", dict(doc_to_choice=[" brown", " f"], doc_to_target="right")),
        ("whole", "loglikelihood_rolling", "bits_per_byte", dict(doc_to_text="")),
        ("written", "generate_until", "exact_match", dict(generation_kwargs={"max_gen_toks": 4})),
    ]:
        task = every | dict(task=name, output_type=kind, metric_list=[{"metric": metric}]) | more
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML, too
    folder = trained("gla")
    words = ["run", "--model", "nanogate", "--model_args", f"checkpoint={folder}", "--tasks", "choice,whole,written"]
    words += ["--include_path", str(tmp_path), "--output_path"]
    harness.main([*words, str(tmp_path / "results")])
    (file,) = (tmp_path / "results").rglob("results_*.json")
    found = json.loads(file.read_text())["results"]
    model, _ = checkpoints.load_model(folder)
    scores = [definition(model, list(b"The quick"), list(words))[0] for words in (b" brown", b" f")]
    right = scores.index(max(scores))
    assert found["choice"]["acc,none"] == sum(row["right"] == right for row in rows) / len(rows)
    nats = -definition(model, [10], list(b"The quick brown fox."))[0]
    assert found["whole"]["bits_per_byte,none"] == pytest.approx(nats / math.log(2) / 20, rel=1e-4)
    assert found["written"]["exact_match,none"] == 0
