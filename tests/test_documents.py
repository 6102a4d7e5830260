"""mask_documents: the model reads each document of a text alone. The definition is the model on that document.

python -m pytest tests/test_documents.py
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import off_its_start

import evaluate
import meters
import train
from data.shards import Dataset, open_dataset
from data.tokenizer import get_tokenizer
from data.writing import write_stream
from model import MIXERS, GPTConfig
from ops import IGNORE

T = 8
# one token, fewer than a convolution reads, the window and one less and more, several windows; some of them are empty
SIZES = [1, 2, 3, T - 1, 0, T, T + 1, 1, T + 2, 3 * T + 1, 5, 0]


def documents_of(sizes):
    """Documents of the tokens 1000, 1001, ..."""
    return np.split(np.arange(1000, 1000 + sum(sizes)), np.cumsum(sizes)[:-1])


def dataset_of(sizes):
    offsets, tokens = np.cumsum([0, *sizes]), np.arange(1000, 1000 + sum(sizes), dtype=np.uint16)
    facts = {"tokens": sum(sizes), "shards": [{"sha256": ""}] * 2}
    meta = dict(name="x", kind="stream", tokenizer="x", vocab_size=1 << 16, parameters={}, splits={"train": facts})
    return Dataset(Path("x"), meta, {"train": [tokens[:7], tokens[7:]]}, {"train": offsets})


def parts_of(document, block_size, stride):
    """The definition: [(inputs, targets, how many of these were targets before)] of a document's windows."""
    parts, scored = [], 1
    for start in itertools.count(0, stride):
        if scored >= len(document):
            return parts
        tokens = document[start : start + block_size + 1].tolist()
        parts.append((tokens[:-1], tokens[1:], scored - start - 1))
        scored = start + len(tokens)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 30), max_size=9).map(lambda sizes: [9, *sizes]), st.integers(1, 12), st.integers(1, 12),
    st.integers(1, 5), st.integers(1, 3),
)  # fmt: skip
def test_every_token_of_a_document_but_its_first_is_a_target_once_within_it(sizes, block_size, stride, rows, world):
    dataset, stride = dataset_of(sizes), min(stride, block_size)
    expected = [part for document in documents_of(sizes) for part in parts_of(document, block_size, stride)]
    found = []
    for rank in range(world):
        for inputs, targets, _ in dataset.eval_batches("train", rows, block_size, rank, world, stride):
            assert len(inputs) <= rows
            for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
                n, old = sum(i > 0 for i in x), next(i for i, target in enumerate(y) if target != IGNORE)
                assert y == [IGNORE] * old + [i + 1 for i in x[old:n]] + [IGNORE] * (len(x) - n)
                found.append((x[:n], [i + 1 for i in x[:n]], old))
    assert sorted(found) == sorted(expected)

    whole = [part for document in documents_of(sizes) for part in parts_of(document, block_size, block_size)]
    n, keys = dataset.examples_per_epoch("train", block_size), dict(seed=3, batch_size=1, block_size=block_size)
    batches = [dataset.batch("train", step, **keys, same_length=step % 2 == 0) for step in range(n)]
    assert sorted(y[y != IGNORE].tolist() for _, y in batches) == sorted(targets for _, targets, _ in whole)
    labels = [int((targets != IGNORE).sum()) for _, targets in batches]
    assert [dataset.count_labels("train", step, [0], **keys) for step in range(n)] == labels
    assert dataset.tokens_per_example("train", block_size) == pytest.approx(sum(labels) / n)


OPTIONS = [dict(attention=mixer, gate=gate) for mixer in MIXERS for gate in ("none", "elementwise")]
OPTIONS += [dict(attention=mixer, gate="native", short_conv=3) for mixer in MIXERS if MIXERS[mixer].native_gate]
OPTIONS += [dict(attention=mixer, levels=levels) for mixer in ("mamba2", "kda") for levels in ("log_linear", "merged")]
OPTIONS += [dict(position="learned", sink="token", window="3"), dict(forget_gate=True, sink="head", n_kv_head=1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A stream of documents of SIZES random letters, in shards of 20 tokens."""
    out, rng = tmp_path_factory.mktemp("documents"), np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, n))) for n in SIZES]
    about = dict(name="text", generator="tests", generator_version=1, parameters={}, seed=0, shard_tokens=20)
    write_stream(out, {"train": texts, "val": texts}, tokenizer=get_tokenizer("byte"), **about)
    return out


@torch.no_grad()
@pytest.mark.parametrize("keys", OPTIONS, ids=lambda keys: " ".join(map(str, keys.values())))
def test_each_document_is_read_as_the_model_reads_it_alone(keys, folder):
    dataset = open_dataset(folder, mask_documents=True)
    sizes = dict(n_layer=2, n_head=2, n_embd=16, block_size=T, vocab_size=256, state_size=8)
    model, tokens = off_its_start(GPTConfig(**sizes | keys)), dataset._read("val", 0, sum(SIZES))
    logits, nats = {}, 0.0
    for document in np.split(tokens, np.cumsum(SIZES)[:-1]):
        for inputs, targets, _ in parts_of(document, T, T):
            logits[*inputs] = model(torch.tensor([inputs]))[0]
            nats += float(F.cross_entropy(logits[*inputs], torch.tensor(targets), reduction="sum"))
    n, total = dataset.examples_per_epoch("train", T), 0.0
    for step in range(n // 4 + 1):
        inputs, targets = dataset.batch("train", step, seed=0, batch_size=4, block_size=T)
        for row, y, labelled in zip(inputs, model(inputs), targets != IGNORE, strict=True):
            assert (y[labelled] - logits[*row[labelled].tolist()]).abs().max() < 1e-12
    for inputs, targets, _ in dataset.eval_batches("val", 3, T):
        total += float(model(inputs, targets, reduction="sum"))
    assert total == pytest.approx(nats, abs=1e-10)


def test_a_run_masks_in_every_evaluation_and_after_a_resume(text, mqar, run, keys, helpers, capsys):
    of_run, dataset = dict(mask_documents=True, schedule="constant"), open_dataset(text, mask_documents=True)
    out = run("out", dataset=text, max_iters=4, **of_run)
    labels = sum(max(0, n - 1) for n in np.diff(np.load(text / "val_documents.npy")))
    assert {row["labels"] for row in helpers.metrics(out, "eval")} == {labels}
    assert f"{round(4 * dataset.tokens_per_example('train', 32))} tokens a step" in capsys.readouterr().out
    whole = run("whole", dataset=text, **of_run)
    train.main([f"--out_dir={out}", "--init_from=resume", "--max_iters=8"])
    assert helpers.losses(out) == helpers.losses(whole)
    for words, shown in (([], "windows of documents, stride 32"), (["--mask_documents=false"], " windows, stride 32")):
        evaluate.main([f"--checkpoint={out}", "--device=cpu", *words])
        assert shown in capsys.readouterr().out
    meters.main([f"--checkpoint={out}", "--device=cpu"])  # on whole windows, without padding
    assert "on the first 5 rows of 32 tokens" in capsys.readouterr().out
    train.main([f"--out_dir={out}", "--init_from=resume", "--max_iters=9", "--mask_documents=false"])
    assert "mask_documents: False, where the checkpoint has True" in capsys.readouterr().out
    assert f"{mqar} has rows" in helpers.error_of(helpers.train, **keys("rows", dataset=mqar, mask_documents=True))
    words = [f"--checkpoint={run('rows', dataset=mqar)}", "--mask_documents=true"]
    assert "mask_documents are for text" in helpers.error_of(evaluate.main, words)
