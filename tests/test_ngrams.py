"""ngram_rows: hashed embeddings of the last two, three and four tokens, added to the token's own."""

import pytest
import torch

from base.configurator import UserError
from hub.export_hf import as_family
from model import GPT, GPTConfig, NGrams
from runs.resume import take_weights

KEYS = dict(n_layer=2, n_embd=16, n_head=2, vocab_size=50_000, block_size=32, ngram_rows=97)


def row_of(ngram, rows):
    """The definition, in Python's integers: ngram has the latest token last; None is before the text."""
    *earlier, hashed = ngram
    for token in reversed(earlier):
        hashed = (hashed * 1_000_003 + (0 if token is None else token + 1)) % (2**31 - 1)
    return (hashed ^ (hashed >> 15)) % rows


def test_a_token_gets_the_rows_of_the_two_three_and_four_tokens_that_end_with_it():
    ngrams = NGrams(GPTConfig(**KEYS))
    torch.manual_seed(0)
    idx = torch.randint(50_000, (3, 12))
    x = ngrams(idx)
    for b, row in enumerate(idx.tolist()):
        ids = [None, None, None, *row]
        for t in range(12):
            expected = 0
            for n, table in zip((2, 3, 4), ngrams.tables, strict=True):
                expected = expected + table.weight[row_of(ids[t + 4 - n : t + 4], 97)]
            torch.testing.assert_close(x[b, t], expected)


@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5, 1, 1, 5]])
def test_a_text_read_in_pieces_has_the_features_of_the_whole(pieces):
    torch.manual_seed(1)
    model = GPT(GPTConfig(**KEYS)).double()
    idx = torch.randint(50_000, (2, 12))
    whole, _ = model.features(idx)
    state = model.init_state(2, dtype=torch.float64)
    start = 0
    for piece in idx.split(pieces, dim=1):
        x, state = model.features(piece, state, start)
        torch.testing.assert_close(x, whole[:, start : start + piece.shape[1]])
        start += piece.shape[1]


def test_packed_documents_do_not_see_the_tokens_of_the_one_before():
    torch.manual_seed(2)
    model = GPT(GPTConfig(**KEYS)).double()
    idx = torch.randint(50_000, (1, 9))
    document = torch.tensor([[0, 0, 0, 0, 4, 5, 5, 7, 7]])
    packed, _ = model.features(idx, document=document)
    for begin, end in ((0, 4), (4, 5), (5, 7), (7, 9)):
        alone, _ = model.features(idx[:, begin:end])
        torch.testing.assert_close(packed[:, begin:end], alone)


def test_ngrams_are_parameters_without_flops_and_others_start_as_without_them():
    torch.manual_seed(3)
    plain = GPT(GPTConfig(**KEYS | {"ngram_rows": 0}))
    torch.manual_seed(3)
    model = GPT(GPTConfig(**KEYS))
    assert model.n_params() - plain.n_params() == 3 * 97 * 16
    assert model.flops_per_token() == plain.flops_per_token()
    started = model.state_dict()
    for name, start in plain.state_dict().items():
        torch.testing.assert_close(started[name], start, rtol=0, atol=0)
    assert 0.015 < model.ngrams.tables[1].weight.std() < 0.025


def test_ids_of_any_integer_type_and_rows_of_a_batch_that_are_chosen_anew_keep_their_ngrams():
    torch.manual_seed(5)
    model = GPT(GPTConfig(**KEYS)).double()
    idx = torch.randint(50_000, (3, 9))
    whole, _ = model.features(idx)
    assert torch.equal(model.features(idx.int())[0], whole)
    _, state = model.features(idx[:, :6], model.init_state(3, dtype=torch.float64))
    order = torch.tensor([2, 0, 0])  # as a beam search does
    state = [{name: tensor[order] for name, tensor in layer.items()} for layer in state]
    x, _ = model.features(idx[order, 6:], state, 6)
    torch.testing.assert_close(x, whole[order, 6:])


def test_a_model_in_bfloat16_and_one_under_autocast_read_ngrams():
    idx = torch.arange(12).view(2, 6)
    model = GPT(GPTConfig(**KEYS))
    with torch.autocast("cpu", torch.bfloat16):
        model(idx, idx).backward()
    assert model.ngrams.tables[0].weight.grad.dtype == torch.float32
    assert model.bfloat16().generate(idx, 3).shape == (2, 9)


def test_tables_that_a_checkpoint_lacks_start_at_zero_and_change_nothing_at_first():
    torch.manual_seed(6)
    trained = GPT(GPTConfig(**KEYS | {"ngram_rows": 0}))
    model = GPT(GPTConfig(**KEYS))
    notes = take_weights(model, trained.state_dict(), "there")
    assert "ngrams.tables.0.weight" in notes[1]
    idx = torch.arange(12).view(2, 6)
    assert torch.equal(model(idx), trained(idx))
    again = GPT(GPTConfig(**KEYS))
    take_weights(again, GPT(GPTConfig(**KEYS)).state_dict(), "there")
    assert again.ngrams.tables[0].weight.abs().sum() > 0


def test_a_family_of_transformers_has_no_ngrams():
    model = GPT(GPTConfig(**KEYS, mlp="swiglu"))
    with pytest.raises(UserError, match="ngram_rows=97"):
        as_family(model.config, model.state_dict(), "llama")


def test_every_row_learns_and_a_negative_number_of_rows_is_refused():
    torch.manual_seed(4)
    model = GPT(GPTConfig(**KEYS))
    idx = torch.arange(3 * 32).view(3, 32)
    model(idx, idx).backward()
    for table in model.ngrams.tables:
        assert (table.weight.grad.abs().sum(1) > 0).sum() > 40  # of 97 rows, 96 drawn with repetition
    with pytest.raises(UserError, match="ngram_rows"):
        GPTConfig(**KEYS | {"ngram_rows": -1})
