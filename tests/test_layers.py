"""Compares the parts of ops/layers.py with their definitions; second derivatives of every backward written by hand."""

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import variants  # noqa: F401
from mixer import Projection
from model import GPT, GPTConfig
from ops import fast, layers
from ops.layers import Angles, RMSNorm, ShortConv, l2_norm, quarter_turn, rope_frequencies, rotate


def random(*shape):
    torch.manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def randomized(module):
    for p in module.parameters():
        nn.init.normal_(p)
    return module


def assert_same(y, expected, inputs):
    """Two functions of the inputs, and the gradients of both."""
    torch.testing.assert_close(y, expected)
    gradients = (torch.autograd.grad(z.sin().sum(), inputs, retain_graph=True) for z in (y, expected))
    torch.testing.assert_close(*gradients)


def test_the_norms_are_their_definitions():
    norm, x = randomized(RMSNorm(8, eps=1e-5)).double(), random(2, 3, 8)
    assert_same(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight, (x, norm.weight))
    zeros = torch.zeros(1, 8, requires_grad=True)
    assert not norm(zeros).any() and torch.autograd.grad(norm(zeros).sum(), zeros)[0].isfinite().all()
    for x in (random(2, 3, 4), (1e-3 * random(2, 3, 4)).detach().requires_grad_()):
        assert_same(l2_norm(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), (x,))


@pytest.mark.parametrize("T", [1, 2, 9])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_a_convolution_is_its_definition(T, bias, has_state):
    conv, x, past = randomized(ShortConv(6, 4, bias)).double(), random(2, T, 6), random(2, 3, 6)
    padded = torch.cat([past if has_state else torch.zeros_like(past), x], dim=1)
    expected = F.conv1d(padded.mT, conv.weight.T[:, None], conv.bias, groups=6).mT
    assert_same(conv(x, {"conv": past} if has_state else None), expected, (x, *conv.parameters()))


@pytest.mark.parametrize(
    "module", [RMSNorm(16, eps=1e-5), ShortConv(16, 4, bias=True), l2_norm], ids=["RMSNorm", "ShortConv", "l2_norm"]
)
def test_in_bfloat16_a_part_rounds_once_forward_and_backward(module):
    x, dy = torch.randn(2, 9, 16).bfloat16().requires_grad_(), torch.randn(2, 9, 16).bfloat16()
    fine, rest = x.detach().float().requires_grad_(), [None] * isinstance(module, ShortConv)
    parameters = [] if module is l2_norm else list(randomized(module).parameters())
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, *rest)
    expected = module(fine, *rest)
    assert torch.equal(y, expected.bfloat16()) and y.dtype == torch.bfloat16
    dx, *gradients = torch.autograd.grad(y, (x, *parameters), dy)
    exact_dx, *exact = torch.autograd.grad(expected, (fine, *parameters), dy.float())
    assert torch.equal(dx, exact_dx.bfloat16())
    torch.testing.assert_close(gradients, exact)


def test_a_rotation_is_its_definition_and_its_gradient_turns_back():
    x = random(2, 5, 3, 6)
    angle = torch.arange(7, 12).double()[:, None, None] * 100.0 ** (-torch.arange(3).double() / 3)
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    plain, yarn = Angles(rope_frequencies, 6, 100.0), Angles(rope_frequencies, 6, 100.0, "yarn", 4.0, 8)
    assert_same(rotate(x, 7, plain), torch.cat([turned.real, turned.imag], -1), (x,))
    assert torch.autograd.gradcheck(lambda x: rotate(x, 7, yarn), x)


def test_features_of_two_positions_have_the_product_times_the_cosine_of_their_distance():
    q, k = random(1, 5, 2, 3), random(1, 5, 2, 4)[..., :3]
    features = [fast.CosSinFeatures.apply(x, *Angles(quarter_turn, 9)(x, 0)) for x in (q, k)]
    angle = torch.arange(5).double() * math.pi / 18
    expected = torch.einsum("bihd,bjhd->bhij", q, k) * (angle[:, None] - angle).cos()
    assert_same(torch.einsum("bihd,bjhd->bhij", *features), expected, (q, k))


def test_the_angles_of_the_first_positions_are_kept_and_those_past_them_are_computed_again():
    angles = Angles(rope_frequencies, 6, 100.0, "yarn", 4.0, 8)
    with torch.inference_mode():  # which may ask first
        angles(torch.zeros(2, 5, 3, 6), 7)
    table = angles.table
    assert table.shape == (2, 24, 1, 3) and not angles.state_dict()
    for dtype, start in ((torch.float32, 0), (torch.float32, 19), (torch.float32, 20), (torch.float64, 20)):
        x = torch.zeros(2, 5, 3, 6, dtype=dtype, requires_grad=True)
        rotate(x, start, angles).sum().backward()
        assert (angles.table is table) == (start < 20)
        for ours, exact in zip(angles(x, start), angles.computed(start, start + 5, dtype, x.device), strict=True):
            assert ours.dtype == dtype and torch.equal(ours, exact)
    with torch._subclasses.FakeTensorMode():  # whose angles are not met again
        Angles(quarter_turn, 9)(torch.zeros(1, 4, 1, 6), 0)


@pytest.mark.parametrize("window", [40, 7])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_a_sink_is_a_headwise_gate_at_the_scores_log_sum_less_its_logit_and_so_are_its_gradients(dtype, error, window):
    inputs = [torch.randn(2, 3, 40, *width).to(dtype).requires_grad_() for width in ([8], [8], [8], [])]
    q, k, v, s = exact = [x.detach().double().requires_grad_() for x in inputs]
    sees = torch.ones(40, 40, dtype=torch.bool).tril().triu(1 - window)
    scores = (q @ k.mT / 8**0.5).masked_fill(~sees, -torch.inf)
    gate = (scores.logsumexp(-1) - s).sigmoid()[..., None]  # (B, H, T, 1)
    expected = gate * (scores.softmax(-1) @ v)
    config = GPTConfig(attention="sink_zero", n_head=3, n_embd=24, vocab_size=1)
    mixer, is_causal = GPT(config).blocks[0].mixer, window == 40
    p = Projection(*(x.transpose(1, 2) for x in inputs[:3]), sink=inputs[3].mT)
    o = mixer.attend(*inputs[:3], None if is_causal else sees, p)
    mixer.layer, mixer.config.window = 0, "none" if is_causal else str(window)
    weights = mixer.explicit_weights(Projection(*(x.transpose(1, 2) for x in exact[:3]), sink=exact[3].mT))
    assert (weights - gate * scores.softmax(-1)).abs().max() < 1e-15
    do = torch.randn(2, 3, 40, 8).to(dtype)
    gradients, exact_gradients = torch.autograd.grad(o, inputs, do), torch.autograd.grad(expected, exact, do.double())
    for y, exact_y in zip((o, *gradients), (expected, *exact_gradients), strict=True):
        assert y.dtype == dtype and (y - exact_y).norm() < error * exact_y.norm()


def test_every_second_derivative_of_a_backward_written_by_hand_is_refused():
    """A backward treats saved intermediates as constants: it would silently miss a part."""
    p = random(2, 8)
    for function in (RMSNorm(8, eps=1e-5).double(), l2_norm):
        (gradient,) = torch.autograd.grad(function(p).sin().sum(), p, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


def written_out(q, k, v, mask):
    return layers.scores(q, k, mask).softmax(-1) @ layers.for_all_heads(v, q.shape[1])


@pytest.mark.parametrize(("T", "heads", "width"), [(20, 2, 6), (100, 2, 24), (600, 3, 32)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
def test_causal_attention_and_its_gradients_are_the_definition(T, heads, width, dtype, error):
    torch.manual_seed(T)
    qk, v, do = (torch.randn(2, T, n, width).to(dtype).transpose(1, 2) for n in (2 * heads, heads, heads))
    qkv = [x.requires_grad_() for x in (*(3 * qk).split(heads, dim=1), v)]  # views, as in a model; peaked weights
    exact = [x.detach().double().requires_grad_() for x in qkv]
    sees = torch.ones(T, T, dtype=torch.bool).tril()
    o, expected = fast.CausalAttention.apply(*qkv), written_out(*exact, sees)
    gradients, exact_gradients = torch.autograd.grad(o, qkv, do), torch.autograd.grad(expected, exact, do.double())
    for y, exact_y in zip((o, *gradients), (expected, *exact_gradients), strict=True):
        assert y.dtype == dtype and (y - exact_y).norm() < error * exact_y.norm()


@pytest.mark.parametrize("vocab_size", [7, 4096, 10_000])
def test_logits_in_blocks_are_the_logits_of_one_product(vocab_size):
    x, weight = torch.randn(3, 5, 8).bfloat16(), torch.randn(vocab_size, 8).bfloat16()
    with torch.no_grad():
        y = layers.float_linear(x, weight)
    assert y.dtype == torch.float32
    assert torch.equal(y, F.linear(x, weight).float())
    assert torch.equal(layers.float_linear(x, weight), y)  # with a gradient: one product


def test_a_function_called_without_a_gradient_gives_what_it_gives_with_one():
    x = torch.randn(2, 3, 8, requires_grad=True)
    y = fast.L2Norm.call(x)
    assert y.requires_grad
    with torch.no_grad():
        called = fast.L2Norm.call(x)
    assert torch.equal(called, y) and not called.requires_grad
    with torch.inference_mode():
        assert torch.equal(fast.L2Norm.call(x), y)
