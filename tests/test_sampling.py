"""Ids are drawn as asked, one at a time, with the state kept; what cannot be drawn is refused."""

import math
import warnings

import pytest
import torch
from small_models import off_its_start
from test_model import T, make_config

from configurator import UserError
from model import MIXERS
from ops.sampling import draw


def make_model(**keys):
    return off_its_start(make_config(**keys))


@pytest.mark.parametrize("name", MIXERS)
def test_greedy_with_the_cache_is_greedy_without(name):
    model, idx = make_model(attention=name), torch.randint(50, (3, 5))
    expected = idx
    for _ in range(12):
        expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    for options in (dict(temperature=0), dict(temperature=0.7, top_k=1), dict(top_p=1e-6)):
        assert torch.equal(model.generate(idx, 12, **options), expected)


def test_ids_that_are_padding_or_unknown_to_the_tokenizer_are_never_drawn():
    model, idx = make_model(pad_vocab_to=64), torch.zeros(4, 1, dtype=torch.long)
    with torch.no_grad():
        model.wte.weight[45:] *= 30  # what would be likeliest
    assert model.wte.weight.shape[0] == 64 and model(idx).shape[-1] == 50
    assert 45 <= model.generate(idx, 30).max() < 50
    assert model.generate(idx, 30, n_tokens=45).max() < 45


def test_top_p_keeps_the_fewest_ids_that_reach_it():
    def drawn(logits, top_k, top_p):
        return set(draw(logits.expand(2000, -1), 1.0, top_k, top_p).flatten().tolist())

    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert drawn(logits, None, 0.79) == {0, 1} and drawn(logits, None, 0.81) == drawn(logits, 3, None) == {0, 1, 2}
    assert len(drawn(torch.zeros(4), None, 0.5)) == 2  # two of four equal ones reach one half exactly


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(temperature):
    n_draws, logits = 20_000, torch.tensor([0.0, 1.0, 2.0])
    share = draw(logits.expand(n_draws, -1), temperature, None, None).flatten().bincount(minlength=3) / n_draws
    torch.testing.assert_close(share, (logits / temperature).softmax(0), rtol=0, atol=0.02)  # five standard errors


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error_and_not_a_token(broken):
    model = make_model()
    with torch.no_grad():
        model.norm.weight[0] = broken
    with pytest.raises(UserError, match="not finite"):
        model.generate(torch.zeros(1, 1, dtype=torch.long), 1)


def test_past_block_size_a_window_rolls_with_a_warning_and_a_recurrence_goes_on():
    idx = torch.zeros(1, 3, dtype=torch.long)
    with pytest.warns(UserWarning, match="some layers see the last 40 tokens only") as printed:
        assert make_model().generate(idx, 2 * T).shape == (1, 3 + 2 * T)
    assert len(printed) == 1
    with warnings.catch_warnings(action="error"):
        assert make_model(attention="gla").generate(idx, 2 * T).shape == (1, 3 + 2 * T)


@pytest.mark.parametrize("keys", [dict(attention="cosformer"), dict(position="learned")], ids=str)
def test_past_block_size_a_state_that_ends_is_refused(keys):
    model = make_model(**keys)
    with pytest.raises(UserError, match="position 82 is past block_size=40"):
        model.generate(torch.zeros(1, 3, dtype=torch.long), 2 * T)
    with pytest.raises(UserError, match="past block_size=40"):  # also where nobody asks for a token
        model(torch.zeros(1, T + 1, dtype=torch.long))
