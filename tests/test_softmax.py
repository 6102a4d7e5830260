"""Softmax layers with a forget gate or softpick's weights, against their definitions in float64.

python -m pytest tests/test_softmax.py
"""

import math

import edits
import pytest
import torch
import torch.nn.functional as F
from test_edits import CLOSE, C, D, H, T, in_pieces, make_config, random_x, randomized

from gate import parse_gate
from model import Softmax
from ops.layers import softpick
from runs.probe import weights_of


def definition(mixer, x):
    """(weights, output): a query sees the last T keys, and what it forgets is a product of f."""
    B, L, cap = *x.shape[:2], mixer.config.attention_softcap
    q, k, v = (x @ mixer.qkv.weight.T).split([C, C // 2, C // 2], dim=-1)
    q, k, v = (y.view(B, L, -1, D).repeat_interleave(H * D // y.shape[-1], dim=2) for y in (q, k, v))
    q, k = (F.rms_norm(y, (D,), norm.weight, eps=1e-5) for y, norm in ((q, mixer.q_norm), (k, mixer.k_norm)))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    i, j = torch.arange(L)[:, None], torch.arange(L)
    scores = scores if mixer.bias is None else scores + mixer.bias(i, j)
    sees, eps = (i >= j) & (i - j < T) & scores.isfinite(), 0.0
    if mixer.config.attention_weights == "softpick":
        weights, size = (scores.exp() - 1).relu(), (scores.exp() - 1).abs()
        eps = 1e-8 * torch.where(sees, scores, 0.0).amax(-1, keepdim=True).exp()  # as published
    else:
        f = (x @ mixer.forget.weight.T + mixer.forget.bias).sigmoid().cumprod(1).mT  # (B, H, L)
        weights = size = scores.exp() * f[..., None] / f[..., None, :]
    weights = weights * sees / ((size * sees).sum(-1, keepdim=True) + eps)
    return weights, torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2) @ mixer.out_proj.weight.T


@torch.no_grad()
@pytest.mark.parametrize("bias", [Softmax, edits.WindowedALiBi], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "keys",
    [dict(attention_weights="softpick"), dict(forget_gate=True), dict(forget_gate=True, attention_softcap=0.5)],
    ids=str,
)
def test_softpick_and_a_forget_gate_are_their_definitions_also_where_the_ring_turns(bias, keys):
    config = make_config(position="none", qk_norm=True, n_kv_head=2, **keys)
    mixer, x = randomized(bias(config, parse_gate("none"))), random_x(2 * T + 5)
    weights, expected = definition(mixer, x)
    torch.testing.assert_close(mixer(x[:, :T]), expected[:, :T], **CLOSE)
    torch.testing.assert_close(weights_of(mixer, x[:, :T]), weights[..., :T, :T], **CLOSE)
    for pieces in ((9, 20), (T + 3, 6), (T - 12,)):
        torch.testing.assert_close(in_pieces(mixer, x, *pieces), expected, **CLOSE)
    state = mixer.bfloat16().init_state(1, dtype=torch.bfloat16)
    assert mixer(x[:1].bfloat16(), state, 0).isfinite().all()
    assert not keys.get("forget_gate") or state["log_decay"].dtype == torch.float32


def test_softpick_is_finite_at_any_score_and_so_is_its_gradient():
    scores = torch.tensor([[1e4, 9e3, -1e4], [-200.0, -1e4, -math.inf], [0.0, 0.0, -math.inf], [1.0, -1.0, 0.5]])
    scores.requires_grad_()
    x = torch.tensor([1.0, -1.0, 0.5]).expm1()
    expected = torch.stack([torch.tensor([1.0, 0, 0]), *torch.zeros(2, 3), x.relu() / x.abs().sum()])
    torch.testing.assert_close(softpick(scores), expected)
    (gradient,) = torch.autograd.grad((softpick(scores) * torch.arange(3)).sum(), scores)
    assert gradient.isfinite().all() and (gradient[3] != 0).all()
