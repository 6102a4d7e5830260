"""ngram_rows: hashed embeddings of the last two, three and four tokens, added to the token's own."""

import pytest
import torch

from base.configurator import UserError
from model import GPT, GPTConfig, NGrams

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


def test_every_row_learns_and_a_negative_number_of_rows_is_refused():
    torch.manual_seed(4)
    model = GPT(GPTConfig(**KEYS))
    idx = torch.arange(3 * 32).view(3, 32)
    model(idx, idx).backward()
    for table in model.ngrams.tables:
        assert (table.weight.grad.abs().sum(1) > 0).sum() > 40  # of 97 rows, 96 drawn with repetition
    with pytest.raises(UserError, match="ngram_rows"):
        GPTConfig(**KEYS | {"ngram_rows": -1})
