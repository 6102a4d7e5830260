"""
lm-evaluation-harness: log-likelihoods with a state are those of whole forwards, and the library runs a local task.

    python -m pytest tests/test_harness.py        without lm-eval a small stand-in takes the place of its base class
"""

import importlib
import importlib.util
import json
import math
import shutil
import sys
import types

import pytest
import torch

from model import MIXERS
from runs import checkpoint as checkpoints
from runs.checkpoint import load_model

HAS_LIBRARY = importlib.util.find_spec("lm_eval") is not None
if not HAS_LIBRARY:  # what harness.py takes from it; make test-all installs the library itself

    class TemplateLM:
        def __init__(self):
            self.cache_hook = types.SimpleNamespace(add_partial=lambda *args: None)

        @property
        def prefix_token_id(self):
            return self.eot_token_id

        def loglikelihood(self, requests):
            pairs = []
            for context, continuation in (request.args for request in requests):
                ids = self.tok_encode(context) or [self.prefix_token_id]
                pairs.append(((context, continuation), ids, self.tok_encode(continuation)))
            return self._loglikelihood_tokens(pairs)

    for path, names in (
        ("lm_eval", {}),
        ("lm_eval.__main__", {"cli_evaluate": None}),
        ("lm_eval.api", {}),
        ("lm_eval.api.model", {"TemplateLM": TemplateLM}),
        ("lm_eval.api.registry", {"register_model": lambda name: lambda cls: cls}),
    ):
        sys.modules[path] = types.ModuleType(path)
        vars(sys.modules[path]).update(names)

import harness  # noqa: E402
from rules import UserError  # noqa: E402

CONTEXTS = ["The quick", "The quick", "Boxkämpfer jagen", "The quick", "x", "Boxkämpfer jagen"]
CONTINUATIONS = [" brown fox", " f", " Eva", "", "yz", " dogs and foxes"]


@pytest.fixture(scope="module")
def trained(text, helpers, tmp_path_factory):
    """trained(mixer) -> the folder of a run on bytes, made once."""
    folders = {}

    def call(mixer):
        if mixer not in folders:
            keys = dict(attention=mixer, gate="elementwise", state_size=8, meters="false", max_iters=2, block_size=32)
            folders[mixer] = helpers.train(text, tmp_path_factory.mktemp("run") / "out", **keys)
        return folders[mixer]

    return call


def requests(*arguments):
    return [types.SimpleNamespace(args=args) for args in arguments]


def definition(model, context, continuation):
    """(nats, greedy) by one forward over the whole text."""
    logits = model(torch.tensor([[*context, *continuation[:-1]]]))[0, len(context) - 1 :].log_softmax(-1)
    targets = torch.tensor(continuation, dtype=torch.long)
    return float(logits.gather(1, targets[:, None]).sum()), bool((logits.argmax(-1) == targets).all())


@pytest.mark.parametrize("mixer", MIXERS)
def test_scores_with_a_state_are_those_of_whole_forwards_and_a_shared_context_is_read_once(mixer, trained, monkeypatch):
    own = harness.NanogateLM(checkpoint=str(trained(mixer)), device="cpu", batch_size=2)
    pairs, read, features = list(zip(CONTEXTS, CONTINUATIONS, strict=True)), [], own.model.features

    def watch(idx, state=None, start=0, only=None):
        read.append((start, tuple(idx.shape)))
        return features(idx, state, start, only)

    monkeypatch.setattr(own.model, "features", watch)
    monkeypatch.setattr(harness, "CHUNK_TOKENS", 7)
    found = own.loglikelihood(requests(*pairs))
    begun = [shape for start, shape in read if start == 0]
    assert len(begun) == len(set(CONTEXTS))
    monkeypatch.undo()
    for (context, continuation), (nats, greedy) in zip(pairs, found, strict=True):
        context, continuation = list(context.encode()), list(continuation.encode())
        expected = definition(own.model, context, continuation) if continuation else (0.0, True)
        assert (nats, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])
    own.dtype = "bfloat16"
    for (nats, _), (rounded, _) in zip(found, own.loglikelihood(requests(*pairs)), strict=True):
        assert rounded == pytest.approx(nats, rel=0.03, abs=0.1)


@pytest.mark.parametrize("mixer", ["softmax", "gla", "cosformer"])
def test_a_long_text_is_read_in_windows_or_where_all_layers_are_recurrent_at_once(mixer, trained, text):
    own = harness.NanogateLM(checkpoint=str(trained(mixer)), device="cpu")
    written = "The quick brown fox jumps over the lazy dog, and again over the other one."
    ids = [10, *written.encode()]
    (found,) = own.loglikelihood_rolling(requests((written,)))
    if mixer == "gla":
        expected = definition(own.model, ids[:1], ids[1:])[0]
    else:
        expected = definition(own.model, ids[:1], ids[1:33])[0] + definition(own.model, ids[32:33], ids[33:65])[0]
        expected += definition(own.model, ids[-33:65], ids[65:])[0]
    assert found == pytest.approx(expected, abs=1e-3)
    assert own.loglikelihood(requests((written, "!")))[0][0] < 0  # a context is cut at its start
    ((nats, _),) = own.loglikelihood(requests((written, " It")))
    context = ids[1:] if mixer == "gla" else ids[-30:]
    assert nats == pytest.approx(definition(own.model, context, list(b" It"))[0], abs=1e-3)
    assert sum(len(predicted) for _, predicted in harness.windows(ids, 32)) == len(ids) - 1


@pytest.mark.parametrize("mixer", ["softmax", "gla"])
def test_a_model_whose_rows_began_with_an_id_reads_it_before_every_text(mixer, trained, tmp_path):
    folder = shutil.copytree(trained(mixer), tmp_path / "out")
    checkpoint = checkpoints.load(folder)
    checkpoint["data"]["first_ids"] = [0]
    checkpoints.save(folder / "ckpt.pt", checkpoint)
    own = harness.NanogateLM(checkpoint=str(folder), device="cpu")
    assert own.prefix_token_id == 0
    for context in ("", "The quick"):
        (found,) = own.loglikelihood(requests((context, " fox")))
        assert found[0] == pytest.approx(definition(own.model, [0, *context.encode()], list(b" fox"))[0], rel=1e-5)
    written = "The quick brown fox jumps over the lazy dog."
    (found,) = own.loglikelihood_rolling(requests((written,)))
    ids, size = [0, *written.encode()], len(written) + 1 if mixer == "gla" else 31
    expected = definition(own.model, ids[:1], ids[1 : size + 1])[0]
    if mixer == "softmax":  # 31 bytes behind the first id make a row of 32
        expected += definition(own.model, [0, *ids[-32 : size + 1]], ids[size + 1 :])[0]
    assert found == pytest.approx(expected, abs=1e-3)
    ids = own.model.generate(torch.tensor([[0, *b"The quick"]]), 12, temperature=0)[0, 10:].tolist()
    expected = bytes(ids).decode(errors="replace")
    assert own.generate_until(requests(("The quick", {"max_gen_toks": 12}))) == [expected]


@pytest.mark.parametrize("ends", [7, [7, 115], None])
def test_an_imported_model_has_the_special_tokens_of_its_folder(ends, trained, tmp_path, helpers):
    folder = shutil.copytree(trained("gla"), tmp_path / "out")
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 5, "eos_token_id": ends}))
    own = harness.NanogateLM(checkpoint=str(folder), device="cpu")
    assert own.prefix_token_id == 5 and own.eot_token_id == (ord("\n") if ends is None else 7)
    (found,) = own.loglikelihood(requests(("", "fox")))
    assert found[0] == pytest.approx(definition(own.model, [5], list(b"fox"))[0], rel=1e-5)
    plain = harness.NanogateLM(checkpoint=str(trained("gla")), device="cpu")
    assert plain.prefix_token_id == ord("\n") and plain.ends == []
    ((nats, _),) = plain._loglikelihood_tokens([(("\n", "def"), [], list(b"def"))])
    assert nats == pytest.approx(definition(plain.model, [ord("\n")], list(b"def"))[0], rel=1e-5)
    ids = own.model.generate(torch.tensor([list(b"The quick")]), 12, temperature=0)[0, 9:].tolist()
    own.ends = [ids[4]]
    shorter = bytes(ids[: ids.index(ids[4])]).decode(errors="replace")
    assert own.generate_until(requests(("The quick", {"max_gen_toks": 12}))) == [shorter]
    for wrong in ({"eos_token_id": "</s>"}, {"eos_token_id": ["</s>"]}, {"bos_token_id": -1}, [7]):
        (folder / "generation_config.json").write_text(json.dumps(wrong))
        assert "generation_config.json" in helpers.error_of(harness.special_tokens, folder)


def test_text_is_written_up_to_a_stop_string(trained):
    own = harness.NanogateLM(checkpoint=str(trained("gla")), device="cpu")
    (whole,) = own.generate_until(requests(("The quick", {"max_gen_toks": 12, "until": []})))
    idx = own.model.generate(torch.tensor([list(b"The quick")]), 12, temperature=0)[0, 9:]
    assert whole == bytes(idx.tolist()).decode(errors="replace")
    stop = whole[5:7]
    keys = {"max_gen_toks": 12, "until": [stop, "no such text"], "do_sample": False, "temperature": 0.8}
    assert own.generate_until(requests(("The quick", keys))) == [whole[: whole.index(stop)]]


def test_an_answer_is_as_long_as_asked_after_the_whole_prompt_or_ends_where_the_layers_do(trained):
    for mixer, prompt, asked, length in [("softmax", 9, 32, 32), ("cosformer", 9, 32, 24), ("cosformer", 40, 99, 1)]:
        own = harness.NanogateLM(checkpoint=str(trained(mixer)), device="cpu")
        ids = list(("The quick " * 9)[:prompt].encode())
        expected = own.model.generate(torch.tensor([ids[-32:]]), length, temperature=0)[0, len(ids[-32:]) :].tolist()
        (text,) = own.generate_until(requests((bytes(ids).decode(), {"max_gen_toks": asked})))
        assert text == bytes(expected).decode(errors="replace")


def test_a_request_without_a_temperature_is_greedy_unless_it_asks_for_a_sample(trained, monkeypatch):
    own, asked, at = harness.NanogateLM(checkpoint=str(trained("gla")), device="cpu"), [], {"temperature": 0.7}
    monkeypatch.setattr(own.model, "stream", lambda *args, temperature, **keys: asked.append(temperature) or [])
    cases = [{}, at, {"do_sample": True}, at | {"do_sample": True}, at | {"do_sample": False}]
    own.generate_until(requests(*(("The", keys) for keys in cases)))
    assert asked == [0.0, 0.7, 1.0, 0.7, 0.0]


def test_what_cannot_be_scored_is_one_line(trained, mqar, helpers, tmp_path):
    own = harness.NanogateLM(checkpoint=str(trained("softmax")), device="cpu")
    message = helpers.error_of(own.loglikelihood, requests(("a", "b" * 33)))
    assert message == "a continuation of 33 tokens is longer than block_size=32"
    out = helpers.train(mqar, tmp_path / "out", max_iters=1, meters="false")
    assert "tokenizer 'mqar'" in helpers.error_of(harness.NanogateLM, str(out), device="cpu")
    assert "dtype='int8'" in helpers.error_of(harness.NanogateLM, str(trained("softmax")), dtype="int8", device="cpu")


def test_the_device_is_ours_unless_one_is_named_and_not_the_librarys_cuda(monkeypatch):
    found = []
    monkeypatch.setattr(harness, "cli_evaluate", lambda: found.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", [])
    asked = ["--model", "nanogate", "--device", "cpu"]
    as_they_are = [["ls", "tasks"], ["--help"], ["run", "--config", "with_a_device.yaml"]]
    for words in (["run", *asked], asked, *as_they_are):
        harness.main(words)
    assert found == [["run", "--device=auto", *asked]] * 2 + as_they_are


@pytest.mark.skipif(not HAS_LIBRARY, reason="needs lm-eval")
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 29])
def test_the_windows_are_those_of_the_library(length):
    utils, ids = importlib.import_module("lm_eval.utils"), list(range(100, 100 + length))
    expected = map(utils.make_disjoint_window, utils.get_rolling_token_windows(ids, 0, 8, 1))
    assert list(harness.windows([0, *ids], 8)) == list(expected)


@pytest.mark.parametrize(
    "words", ["--output_path {}/" + "x" * 300, "--output_path={}/file/results", "-o {}/file/a.json"]
)
def test_an_output_path_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch, words):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(harness, "cli_evaluate", lambda: pytest.fail("the work has begun"))
    with pytest.raises((UserError, OSError)):
        harness.main(["run", "--model", "nanogate", *words.format(tmp_path).split()])


@pytest.mark.skipif(not HAS_LIBRARY, reason="needs lm-eval")
def test_the_library_runs_a_local_task_on_a_checkpoint(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    rows = [{"question": "The quick", "right": i % 2, "text": "The quick brown fox."} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, lines in {
        "choice": ["output_type: multiple_choice", 'doc_to_choice: [" brown", " f"]', "doc_to_target: right"],
        "whole": ["output_type: loglikelihood_rolling", 'doc_to_target: "{{text}}"'],
        "written": ["output_type: generate_until", 'doc_to_target: "{{text}}"', "generation_kwargs: {max_gen_toks: 4}"],
    }.items():
        metric = {"choice": "acc", "whole": "bits_per_byte", "written": "exact_match"}[name]
        text = '""' if name == "whole" else '"{{question}}"'
        files = json.dumps({"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")})
        head = [f"task: {name}", "dataset_path: json", f"dataset_kwargs: {files}", "test_split: test"]
        lines = [*head, f"doc_to_text: {text}", *lines, f"metric_list: [{{metric: {metric}}}]"]
        (tmp_path / f"{name}.yaml").write_text("\n".join(lines) + "\n")
    folder = trained("gla")
    words = ["run", "--model", "nanogate", "--model_args", f"checkpoint={folder}", "--tasks", "choice,whole,written"]
    words += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "results")]
    harness.main(words)
    (file,) = (tmp_path / "results").rglob("results_*.json")
    found = json.loads(file.read_text())["results"]
    model, _ = load_model(folder)
    scores = [definition(model, list(b"The quick"), list(words))[0] for words in (b" brown", b" f")]
    right = scores.index(max(scores))
    assert found["choice"]["acc,none"] == sum(row["right"] == right for row in rows) / len(rows)
    nats = -definition(model, [10], list(b"The quick brown fox."))[0]
    assert found["whole"]["bits_per_byte,none"] == pytest.approx(nats / math.log(2) / 20, rel=1e-4)
    assert found["written"]["exact_match,none"] == 0
