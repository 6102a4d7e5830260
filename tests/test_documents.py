"""mask_documents: rows are packed with whole documents, and each is read alone. The definition is the model on it."""

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
from data.shards import Mixture, best_fit, open_dataset
from model import GLA, GPT, MIXERS, GPTConfig
from ops import IGNORE, layers
from ops.documents import Documents

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


def documents_of(inputs, targets, document):
    """The same of a batch of packed rows, whose padding has no targets, and which predict the next token."""
    for x, y, places in zip(inputs.tolist(), targets.tolist(), document.tolist(), strict=True):
        for place in sorted(set(places)):
            here = [i for i, of_token in enumerate(places) if of_token == place]
            assert here == list(range(place, place + len(here)))  # it begins where its tokens say
            scored = [i for i in here if y[i] != IGNORE]
            if scored:  # else padding, or a process without a batch in the last turn
                part = [*x[place : scored[-1] + 1], y[scored[-1]]]
                assert scored[-1] == here[-1] and [y[i] for i in scored] == part[-len(scored) :]
                yield part, len(scored)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 30), max_size=9), st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_every_token_of_a_document_but_its_first_is_a_target_once_within_it(sizes, block_size, stride, n):
    sizes, stride = [9, *sizes], min(stride, block_size)
    tokens = np.arange(1000, 1000 + sum(sizes))
    dataset = stream(len(tokens), [7], documents=np.cumsum([0, *sizes]).tolist())
    batches = [b[:3] for rank in range(n) for b in dataset.eval_batches("train", n, block_size, rank, n, stride)]
    found = [part for batch in batches for part in documents_of(*batch)]
    assert sorted(found) == sorted(parts_of(tokens, sizes, block_size, stride))

    keys = dict(seed=n, batch_size=1, block_size=block_size)
    epoch = range(dataset.examples_per_epoch("train", block_size))
    batches = [dataset.batch("train", step, **keys) for step in epoch]
    assert {inputs.shape for inputs, _, _ in batches} == {(1, block_size)}
    found = [part for batch in batches for part in documents_of(*batch)]
    parts = parts_of(tokens, sizes, block_size, block_size)
    assert sorted(found) == sorted(parts)
    labels = sum(n_labels for _, n_labels in found)
    assert dataset.tokens_per_example("train", block_size) == pytest.approx(labels / len(epoch))


def test_a_sample_of_an_evaluation_packs_whole_windows_that_are_spread_over_the_split():
    sizes = np.random.default_rng(0).integers(2, 40, 200).tolist()
    dataset = stream(sum(sizes), [], documents=np.cumsum([0, *sizes]).tolist())
    samples = [list(dataset.eval_batches("train", 4, 16, tokens=400)) for _ in range(2)]
    assert all(torch.equal(one[0], other[0]) for one, other in zip(*samples, strict=True))
    found = [part for batch in samples[0] for part in documents_of(*batch[:3])]
    assert sum(n for _, n in found) == pytest.approx(400, rel=0.1)
    whole = parts_of(np.arange(1000, 1000 + sum(sizes)), sizes, 16, 16)
    assert all(part in whole for part in found)
    places = sorted(part[0] - 1000 for part, _ in found)
    assert places[0] < sum(sizes) / 10 and places[-1] > sum(sizes) * 9 / 10


LENGTHS = {  # of documents
    "50 to 5,000": lambda rng: rng.integers(50, 5001, 2000),
    "1,000 on average": lambda rng: rng.exponential(1000, 2000).astype(int) + 2,
    "few tokens, and some documents of many": lambda rng: (rng.pareto(1.1, 3000) * 100).astype(int) + 2,
}


@pytest.mark.parametrize("lengths", LENGTHS)
def test_at_most_one_percent_of_the_packed_rows_is_padding(lengths):
    sizes = LENGTHS[lengths](np.random.default_rng(0)).tolist()
    dataset = stream(sum(sizes), [], documents=np.cumsum([0, *sizes]).tolist())
    for block_size in (256, 1024):
        assert dataset.tokens_per_example("train", block_size) > 0.99 * block_size


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 30))
def test_best_fit_puts_each_length_into_one_row_and_opens_none_for_what_has_room(lengths, size):
    rows = best_fit(np.array(lengths, dtype=int), size)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert max(filled, default=0) <= size
    assert sum(2 * n <= size for n in filled) <= 1  # two rows that are half empty would be one


def test_the_rows_of_a_step_are_a_function_of_the_seed_and_the_step_in_a_mixture_too():
    sizes = np.random.default_rng(0).integers(2, 40, 50).tolist()
    parts = [stream(sum(sizes), [], documents=np.cumsum([0, *sizes]).tolist(), name=name) for name in "ab"]
    for made in (parts[0], Mixture("mixed", parts, [2, 1])):
        keys = dict(batch_size=3, block_size=16)
        batches = [made.batch("train", step, seed=1, **keys) for step in range(60)]  # several epochs
        again = [made.batch("train", step, seed=1, **keys) for step in (59, 7)]
        for one, other in zip((batches[59], batches[7]), again, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
        assert len({tuple(inputs.flatten().tolist()) for inputs, _, _ in batches}) == 60
        assert not torch.equal(made.batch("train", 0, seed=2, **keys)[0], batches[0][0])


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
    for step in range(3):  # all rows of the epoch, and some of the next
        inputs, targets, document = dataset.batch("train", step, seed=0, batch_size=4, block_size=T)
        logits = model(inputs, document=document)
        for row, y, y_targets, places in zip(inputs, logits, targets, document, strict=True):
            for place in places.unique():
                here = (places == place) & (y_targets != IGNORE)
                if here.any():
                    assert (y[here] - alone[*row[here].tolist()]).abs().max() < 1e-12
    nats = sum(F.cross_entropy(alone[*part[:-1]], torch.tensor(part[1:]), reduction="sum") for part in parts)
    batches = dataset.eval_batches("val", 3, T)
    total = sum(model(x, y, reduction="sum", document=document) for x, y, document, _ in batches)
    torch.testing.assert_close(total, nats, rtol=1e-12, atol=0)


@torch.no_grad()
def test_positions_of_rope_may_count_through_the_row():
    """Its scores depend on differences alone, so that only a gate on what was turned can tell."""
    idx, document = torch.arange(8)[None] % 5, torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3]])
    differences = []
    for gate in ("none", "elementwise@query"):
        keys = dict(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=5, gate=gate)
        one, other = (off_its_start(GPTConfig(**keys, rope_restarts=restarts)) for restarts in (True, False))
        differences.append(float((one(idx, document=document) - other(idx, document=document)).abs().max()))
        assert torch.equal(one(idx), other(idx))
    assert differences[0] < 1e-12 and differences[1] > 1e-3


@torch.no_grad()
def test_a_mixer_that_does_not_take_document_is_refused_and_reads_text(monkeypatch, helpers, text, keys):
    class Plain(GLA):
        def project(self, x, state, start):
            return super().project(x, state, start)

    monkeypatch.setitem(MIXERS, "plain", Plain)
    model = GPT(GPTConfig(attention="gla,plain", n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=5))
    idx = torch.zeros(1, 8, dtype=torch.long)
    told = "plain cannot keep packed documents apart: its `project` takes no `document`"
    assert model(idx).isfinite().all()
    assert told in helpers.error_of(model, idx, document=torch.zeros_like(idx))
    of_run = keys("refused", dataset=text, attention="plain", mask_documents=True)
    assert told in helpers.error_of(helpers.train, **of_run)
    told = "with mask_documents each batch has other lengths"
    assert told in helpers.error_of(helpers.train, **of_run | {"attention": "gla", "compile": "true"})


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
    meters.main([f"--checkpoint={out}", "--device=cpu"])  # each of the longest documents in a row of its own
    assert "on the first 5 rows of 32 tokens" in capsys.readouterr().out
    unmasked = [f"--out_dir={out}", "--init_from=resume", "--max_iters=9", "--mask_documents=false"]
    assert "ckpt.pt has True, which a resumed run keeps" in helpers.error_of(train.main, unmasked)
    assert f"{mqar} has rows" in helpers.error_of(helpers.train, **keys("rows", dataset=mqar, mask_documents=True))


# -- FlashAttention, which reads all documents in one call -------------------------------------------------------------


DOCUMENTS = Documents(torch.tensor([[0, 0, 0, 0, 0, 5, 6, 6, 6, 6, 6, 6], [0] * 12]))


def attention_by_document(q, k, v, of_q, of_k, most_q, most_k, window_size):
    """What torch's varlen_attn computes, written as the definition: q, k and v (tokens, H, D)."""
    assert of_q is of_k and of_q.dtype == torch.int32 and most_q == most_k == of_q.diff().max() and window_size[1] == 0
    outputs = []
    for begin, end in zip(of_q[:-1], of_q[1:], strict=True):
        i = torch.arange(end - begin)
        distance = i[:, None] - i
        sees = distance >= 0
        if window_size[0] >= 0:
            sees &= distance <= window_size[0]
        one = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        outputs.append(F.scaled_dot_product_attention(*one, attn_mask=sees)[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 3])
def test_one_call_of_flash_attention_reads_each_document_alone(window, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attention_by_document)
    q, k, v = torch.randn(3, 2, 12, 4, 8, dtype=torch.float64)
    o = layers.flash_attention_of_documents(q, k, v, DOCUMENTS, window)
    for begin, end, row in ((0, 5, 0), (5, 6, 0), (6, 12, 0), (0, 12, 1)):
        one = [x[row, begin:end].transpose(0, 1) for x in (q, k, v)]
        i = torch.arange(end - begin)
        sees = (i[:, None] >= i) & (i[:, None] - i < (window or 12))
        expected = F.scaled_dot_product_attention(*one, attn_mask=sees).transpose(0, 1)
        torch.testing.assert_close(o[row, begin:end], expected, rtol=1e-12, atol=1e-12)


def test_torch_takes_what_flash_attention_is_called_with():
    """On the device meta, which computes shapes."""
    q = torch.empty(2, 12, 4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    k = torch.empty(2, 12, 2, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    o = layers.attention_of_documents(q, k, k, DOCUMENTS, window=3)
    assert o.shape == q.shape and o.dtype == q.dtype
    dq, dk = torch.autograd.grad(o.sum(), (q, k))
    assert dq.shape == q.shape and dk.shape == k.shape


@pytest.mark.parametrize("T", [12, 600])
def test_attention_that_trains_in_blocks_reads_each_document_alone(T):
    """In bfloat16 on a CPU; the definition is a call for each document. 600 tokens are three blocks of keys."""
    cuts = [[0, T // 3, T // 3 + 1, T // 2], [0]]
    places = torch.zeros(2, T, dtype=torch.long)
    for row, begins in enumerate(cuts):
        for begin in begins:
            places[row, begin:] = begin
    q, k, v, do = 3 * torch.randn(4, 2, T, 4, 16)
    inputs = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    assert layers.takes_documents(inputs[0], None)
    o = layers.attention_of_documents(*inputs, Documents(places), None)
    gradients = torch.autograd.grad(o, inputs, do.bfloat16())
    exact = [x.detach().double().requires_grad_() for x in inputs]
    outputs = []
    for row, begins in enumerate(cuts):
        for begin, end in zip(begins, [*begins[1:], T], strict=True):
            one = [x[row, begin:end].transpose(0, 1) for x in exact]
            outputs.append(F.scaled_dot_product_attention(*one, is_causal=True).transpose(0, 1))
    expected = torch.cat(outputs).view_as(q)
    of_exact = torch.autograd.grad(expected, exact, do.double())
    for found, right in zip((o, *gradients), (expected, *of_exact), strict=True):
        assert (found - right).norm() < 0.02 * right.norm()
