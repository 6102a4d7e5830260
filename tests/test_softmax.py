"""Softmax layers against their definitions, in float64; what torch's kernel gets of them."""

import functools
from types import SimpleNamespace

import edits
import pytest
import torch
import torch.nn.functional as F
from small_models import logits_of_pieces, off_its_start, seen_of
from test_edits import CLOSE
from test_model import C, D, H, T, in_pieces, make_config, random_x

import variants
from mixer import Projection
from model import GPT, MIXERS, Softmax
from ops import layers
from runs.probe import weights_of


def definition(mixer, x):
    """(weights, output): a query sees the last T keys, and what it forgets is a product of f."""
    L = x.shape[1]
    q, k, v = (y.view(2, L, -1, D) for y in (x @ mixer.qkv.weight.T).split([C, C // 2, C // 2], dim=-1))
    if mixer.config.position == "rope":
        q, k = (layers.rotate(y, 0, mixer.angles) for y in (q, k))
    k, v = (y.repeat_interleave(2, dim=2) for y in (k, v))
    x_ij, i, j = torch.einsum("bihd,bjhd->bhij", q, k) / D**0.5, torch.arange(L)[:, None], torch.arange(L)
    if isinstance(mixer, variants.SoftCapped):
        x_ij = mixer.cap * torch.tanh(x_ij / mixer.cap)
    if isinstance(mixer, edits.ALiBi):
        x_ij = x_ij - 4.0 ** -(1 + torch.arange(H)[:, None, None]) * (i - j)
    reach = 7 if isinstance(mixer, edits.Window | edits.WindowedALiBi) else T
    x_ij = x_ij.masked_fill((i < j) | (i - j >= reach), -torch.inf)
    if isinstance(mixer, variants.Softpick):
        sees, eps = x_ij.isfinite(), 1e-8 * x_ij.amax(-1, keepdim=True).clamp(min=0).exp()  # eps as published
        weights = x_ij.expm1().relu() / ((x_ij.expm1().abs() * sees).sum(-1, keepdim=True) + eps)
    else:
        weights = x_ij.exp()
        if isinstance(mixer, variants.FoX):
            f = (x @ mixer.forget.weight.T + mixer.forget.bias).sigmoid().cumprod(1).mT  # (B, H, L)
            weights = weights * f[..., None] / f[..., None, :]
        weights = weights / weights.sum(-1, keepdim=True)
    o = torch.einsum("bhij,bjhd->bihd", weights, v)
    if isinstance(mixer, variants.XSA):
        c = (o * v).sum(-1) / (v * v).sum(-1)  # (B, L, H)
        o, weights = o - c[..., None] * v, weights - torch.diag_embed(c.mT)
    return weights, o.flatten(2) @ mixer.out_proj.weight.T


class SoftCapped(variants.SoftCapped):
    cap = 2.0


def with_alibi(cls):
    """The class, with the bias and the window of WindowedALiBi."""
    return type(f"{cls.__name__}WithALiBi", (edits.WindowedALiBi, cls), {})


RIVALS = [SoftCapped, variants.Softpick, variants.FoX]
CASES = [(cls, dict(position="rope")) for cls in (Softmax, SoftCapped, edits.WindowedALiBi, with_alibi(SoftCapped))]
CASES += [(cls, dict(position="rope")) for cls in (variants.XSA, with_alibi(variants.XSA))]
CASES += [(cls, {}) for cls in (*RIVALS[1:], *map(with_alibi, RIVALS[1:]), edits.Window, edits.ALiBi)]


@torch.no_grad()
@pytest.mark.parametrize(("cls", "keys"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_softmax_layers_are_their_definitions_also_where_the_ring_turns(cls, keys, monkeypatch):
    monkeypatch.setitem(MIXERS, "mine", cls)
    config = make_config(attention="mine", n_kv_head=2, **dict(position="none") | keys)
    mixer = off_its_start(config, noise=0.2).blocks[0].mixer
    x = random_x(3 * T)
    weights, expected = definition(mixer, x)
    torch.testing.assert_close(mixer(x[:, :T]), expected[:, :T], **CLOSE)
    torch.testing.assert_close(weights_of(seen_of(mixer, x[:, :T])), weights[..., :T, :T], **CLOSE)
    for pieces in ((9, 20), (T + 3, 6), (T - 12,), (T - 3, 8), (2 * T + 3,), (T + 1, T)):
        torch.testing.assert_close(in_pieces(mixer, x, *pieces), expected, **CLOSE)


def test_softpick_is_finite_at_any_score_and_so_is_its_gradient():
    scores = torch.tensor([[1e4, 9e3, -1e4], [-200.0, -1e4, -torch.inf]]).requires_grad_()
    weights = variants.softpick(scores)
    assert weights.tolist() == [[1, 0, 0], [0, 0, 0]]
    assert torch.autograd.grad(weights[:, 0].sum(), scores)[0].isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-20])
def test_a_value_near_zero_takes_nothing_off_an_exclusive_readout_and_has_a_finite_gradient(size):
    config = make_config(attention="xsa", n_kv_head=2, position="none")
    mixer = off_its_start(config, torch.float32, noise=0.2).blocks[0].mixer
    p = mixer.gated_projection(random_x().float())
    last = torch.arange(T)[:, None, None] == T - 1
    v = torch.where(last, size, p.v.detach()).requires_grad_()
    o = mixer.read(p.replace(v=v), None, 0)
    plain = Softmax.attend(mixer, *(y.transpose(1, 2) for y in (p.q, p.k, v)), None, p).transpose(1, 2)
    torch.testing.assert_close(o[:, -1], plain[:, -1])
    assert mixer.explicit_weights(p.replace(v=v)).isfinite().all()
    assert torch.autograd.grad(o.square().sum(), v)[0].isfinite().all()


@torch.no_grad()
def test_an_exclusive_readout_has_no_part_along_its_own_value_also_where_that_is_gated():
    mixer = off_its_start(make_config(attention="xsa", gate="elementwise@value", n_kv_head=2)).blocks[0].mixer
    seen = seen_of(mixer, random_x())
    v = seen.projection.v.repeat_interleave(2, dim=2)  # (B, T, H, D)
    assert (seen.o * v).sum(-1).abs().max() < 1e-12 < seen.o[:, 1:].norm(dim=-1).min()


def test_autocast_does_not_round_the_scores():
    q, k = torch.randn(2, 1, 2, T, D, generator=torch.Generator().manual_seed(0)).bfloat16()
    sees = torch.ones(T, T, dtype=torch.bool).tril()
    exact = layers.scores(q.double(), k.double(), sees)
    with torch.autocast("cpu", torch.bfloat16):
        scores = layers.scores(q, k, sees)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["softmax", "xsa"])
def test_torchs_kernel_groups_heads_and_gets_no_mask_where_causal_says_the_same(name, monkeypatch):
    model, idx = off_its_start(make_config(attention=name, n_layer=1, n_kv_head=2)), torch.zeros(2, T, dtype=torch.long)
    seen = []

    def spy(q, k, v, attn_mask, is_causal, **options):
        seen.append((q.shape[2], k.shape[1], attn_mask is not None, is_causal))
        return kernel(q, k, v, attn_mask, is_causal=is_causal, **options)

    expected, kernel = model(idx), F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    logits = logits_of_pieces(model, idx, [T - 5, 1, 4])
    assert seen == [(T - 5, 2, False, True), (1, 2, False, False), (4, 2, True, False)]
    assert torch.equal(logits[:, : T - 5], model(idx[:, : T - 5])) and (logits - expected).abs().max() < 1e-10


def test_on_a_gpu_heads_are_grouped_for_flash_attention_alone(monkeypatch):
    q, mask = torch.zeros(1, 4, 3, 64, dtype=torch.float16), torch.ones(3, 3, dtype=torch.bool)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    for major, expected in ((7, False), (9, True)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, major=major: SimpleNamespace(major=major))
        assert layers.takes_groups(q, None) == expected
    assert not any(layers.takes_groups(*case) for case in ((q, mask), (q.float(), None), (q.repeat(1, 1, 1, 5), None)))


@torch.no_grad()
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("has_sink", [True, False])
@pytest.mark.parametrize("D", [12, 16])
def test_a_kernel_of_a_gpu_gets_heads_whose_width_is_a_multiple_of_8(D, has_sink, is_causal, monkeypatch):
    """Else a window, a sink in float32 or odd heads would have the (T, T) weights made."""
    (q, k, v), mask = torch.randn(3, 2, 4, T, D).unbind(), None if is_causal else torch.ones(T, T).tril(2).bool()
    attention = functools.partial(layers.attention, q, k, v, mask)
    if has_sink:
        mixer = GPT(make_config(attention="sink_zero", n_head=4, head_dim=D)).blocks[0].mixer
        p = Projection(q, k, v, sink=torch.randn(2, T, 4))
        attention = functools.partial(mixer.attend, q, k, v, mask, p)
    widths, kernel = [], F.scaled_dot_product_attention

    def spy(q, *others, **options):
        widths.append(q.shape[-1])
        return kernel(q, *others, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    expected = attention()
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    o = attention()
    torch.testing.assert_close(o, expected)
    assert widths == [D + has_sink, 16 if D + has_sink <= 16 else 24]
