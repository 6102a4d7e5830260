"""Softmax layers with a forget gate or softpick's weights, in float64: python -m pytest tests/test_softmax.py"""

import edits
import pytest
import torch
from small_models import off_its_start
from test_edits import CLOSE
from test_model import C, D, T, in_pieces, make_config, random_x

from model import MIXERS, Softmax
from ops.layers import softpick
from runs.probe import weights_of


def definition(mixer, x):
    """(weights, output): a query sees the last T keys, and what it forgets is a product of f."""
    L = x.shape[1]
    q, k, v = (y.view(2, L, -1, D) for y in (x @ mixer.qkv.weight.T).split([C, C // 2, C // 2], dim=-1))
    k, v = (y.repeat_interleave(2, dim=2) for y in (k, v))
    x_ij, i, j = torch.einsum("bihd,bjhd->bhij", q, k) / D**0.5, torch.arange(L)[:, None], torch.arange(L)
    x_ij = x_ij if mixer.bias is None else x_ij + mixer.bias(i, j)
    x_ij = x_ij.masked_fill((i < j) | (i - j >= T), -torch.inf)
    if mixer.forget is None:
        sees, eps = x_ij.isfinite(), 1e-8 * x_ij.amax(-1, keepdim=True).clamp(min=0).exp()  # eps as published
        weights = x_ij.expm1().relu() / ((x_ij.expm1().abs() * sees).sum(-1, keepdim=True) + eps)
    else:
        f = (x @ mixer.forget.weight.T + mixer.forget.bias).sigmoid().cumprod(1).mT  # (B, H, L)
        weights = x_ij.exp() * f[..., None] / f[..., None, :]
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2) @ mixer.out_proj.weight.T


@torch.no_grad()
@pytest.mark.parametrize("cls", [Softmax, edits.WindowedALiBi])
@pytest.mark.parametrize("keys", [dict(attention_weights="softpick"), dict(forget_gate=True)], ids=str)
def test_softpick_and_a_forget_gate_are_their_definitions_also_where_the_ring_turns(cls, keys, monkeypatch):
    monkeypatch.setitem(MIXERS, "mine", cls)
    config = make_config(attention="mine", position="none", n_kv_head=2, **keys)
    mixer = off_its_start(config, noise=0.2).blocks[0].mixer
    x = random_x(2 * T + 5)
    weights, expected = definition(mixer, x)
    torch.testing.assert_close(mixer(x[:, :T]), expected[:, :T], **CLOSE)
    torch.testing.assert_close(weights_of(mixer, x[:, :T]), weights[..., :T, :T], **CLOSE)
    for pieces in ((9, 20), (T + 3, 6), (T - 12,)):
        torch.testing.assert_close(in_pieces(mixer, x, *pieces), expected, **CLOSE)


def test_softpick_is_finite_at_any_score_and_so_is_its_gradient():
    scores = torch.tensor([[1e4, 9e3, -1e4], [-200.0, -1e4, -torch.inf]]).requires_grad_()
    assert softpick(scores).tolist() == [[1, 0, 0], [0, 0, 0]]
    assert torch.autograd.grad(softpick(scores)[:, 0].sum(), scores)[0].isfinite().all()
