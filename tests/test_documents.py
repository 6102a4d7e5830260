"""mask_documents: the model reads each document of a text alone. The definition is the model on that document."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import off_its_start
from test_data import stream

import meters
import train
from data.shards import open_dataset
from model import MIXERS, GPTConfig
from ops import IGNORE

T = 8
# one token, fewer than a convolution reads, the window and one less and more, several windows; some of them are empty
SIZES = [1, 2, 3, T - 1, 0, T, T + 1, 1, T + 2, 3 * T + 1, 5, 0]


def parts_of(tokens, sizes, block_size, stride):
    """The definition: [(tokens, how many of them are scored as targets)] of each window of each document."""
    parts = []
    for document in np.split(tokens, np.cumsum(sizes)[:-1]):
        start, left = 0, len(document) - 1  # the first token is no target
        while left > 0:
            part = document[start : start + block_size + 1].tolist()
            new = len(part) - 1 if start == 0 else min(stride, left)
            parts.append((part, new))
            start, left = start + stride, left - new
    return parts


def rows_of(inputs, targets):
    """The same of a batch, whose padding has no targets, and which predicts the next token."""
    for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
        scored = [i for i, target in enumerate(y) if target != IGNORE]
        if not scored:  # a process has no batch left in the last turn
            continue
        part = [*x[: scored[-1] + 1], y[scored[-1]]]
        assert [y[i] for i in scored] == part[-len(scored) :]
        yield part, len(scored)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 30), max_size=9), st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_every_token_of_a_document_but_its_first_is_a_target_once_within_it(sizes, block_size, stride, n):
    sizes, stride = [9, *sizes], min(stride, block_size)
    tokens = np.arange(1000, 1000 + sum(sizes))
    dataset = stream(len(tokens), [7], documents=np.cumsum([0, *sizes]).tolist())
    batches = [b for rank in range(n) for b in dataset.eval_batches("train", n, block_size, rank, n, stride)]
    found = [row for inputs, targets, _ in batches for row in rows_of(inputs, targets)]
    assert sorted(found) == sorted(parts_of(tokens, sizes, block_size, stride))

    keys = dict(seed=n, batch_size=1, block_size=block_size)
    epoch = range(dataset.examples_per_epoch("train", block_size))
    batches = [dataset.batch("train", step, **keys, same_length=step % 2 == 0) for step in epoch]
    found = [row for batch in batches for row in rows_of(*batch)]
    parts = parts_of(tokens, sizes, block_size, block_size)
    assert sorted(found) == sorted(parts)
    widths = [inputs.shape[1] for inputs, _, _ in dataset.eval_batches("train", n, block_size)]
    assert widths == sorted((len(part) - 1 for part, _ in parts), reverse=True)[::n]  # long rows stand together
    labels = [n_labels for _, n_labels in found]
    assert dataset.tokens_per_example("train", block_size) == pytest.approx(np.mean(labels))


OPTIONS = [dict(attention=mixer, gate=gate) for mixer in MIXERS for gate in ("none", "elementwise")]
OPTIONS += [dict(attention=mixer, gate="native", short_conv=3) for mixer in MIXERS if MIXERS[mixer].native_gate]
OPTIONS += [dict(attention=mixer, levels=levels) for mixer in ("mamba2", "kda") for levels in ("log_linear", "merged")]
OPTIONS += [dict(attention="sink_token", position="learned", window="3"), dict(attention="fox", n_kv_head=1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, helpers):
    """A stream of documents of SIZES random letters, in shards of 20 tokens."""
    out, rng = tmp_path_factory.mktemp("documents"), np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, n))) for n in SIZES]
    return helpers.write_text(out, texts, texts, shard_tokens=20)


@torch.no_grad()
@pytest.mark.parametrize("keys", OPTIONS, ids=lambda keys: " ".join(map(str, keys.values())))
def test_each_document_is_read_as_the_model_reads_it_alone(keys, folder):
    dataset, sizes = open_dataset(folder, mask_documents=True), dict(n_layer=2, n_head=2, n_embd=16, state_size=8)
    model = off_its_start(GPTConfig(block_size=T, vocab_size=256, **sizes | keys))
    parts = [part for part, _ in parts_of(dataset.shards["val"].read(0, sum(SIZES)), SIZES, T, T)]
    alone = {tuple(part[:-1]): model(torch.tensor([part[:-1]]))[0] for part in parts}
    for step in range(3):  # all of the 11 parts, and one of the next epoch
        inputs, targets = dataset.batch("train", step, seed=0, batch_size=4, block_size=T)
        for row, y, labelled in zip(inputs, model(inputs), targets != IGNORE, strict=True):
            assert (y[labelled] - alone[*row[labelled].tolist()]).abs().max() < 1e-12
    nats = sum(F.cross_entropy(alone[*part[:-1]], torch.tensor(part[1:]), reduction="sum") for part in parts)
    total = sum(model(x, y, reduction="sum") for x, y, _ in dataset.eval_batches("val", 3, T))
    torch.testing.assert_close(total, nats, rtol=1e-12, atol=0)


def test_a_run_masks_in_every_evaluation_and_after_a_resume(text, mqar, run, keys, helpers, capsys, evaluated):
    of_run, dataset = dict(mask_documents=True, schedule="constant"), open_dataset(text, mask_documents=True)
    out = run("out", dataset=text, max_iters=4, **of_run)
    counts = dataset.counts("val")
    assert {row["labels"] for row in helpers.metrics(out, "eval")} == {counts["tokens"] - counts["documents"]}
    assert f"{round(4 * dataset.tokens_per_example('train', 32))} tokens a step" in capsys.readouterr().out
    whole = run("whole", dataset=text, **of_run)
    train.main([f"--out_dir={out}", "--init_from=resume", "--max_iters=8"])
    assert helpers.losses(out) == helpers.losses(whole)
    assert evaluated(out)["labels"] == counts["tokens"] - counts["documents"]
    assert evaluated(out, mask_documents="false")["labels"] == counts["tokens"] - 1
    meters.main([f"--checkpoint={out}", "--device=cpu"])  # on whole windows, without padding
    assert "on the first 5 rows of 32 tokens" in capsys.readouterr().out
    unmasked = [f"--out_dir={out}", "--init_from=resume", "--max_iters=9", "--mask_documents=false"]
    assert "ckpt.pt has True, which a resumed run keeps" in helpers.error_of(train.main, unmasked)
    assert f"{mqar} has rows" in helpers.error_of(helpers.train, **keys("rows", dataset=mqar, mask_documents=True))
