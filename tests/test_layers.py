"""Compares the parts of ops/layers.py with their definitions; second derivatives of every backward written by hand.

python -m pytest tests/test_layers.py
"""

import inspect
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from model import GPT, MIXERS, GPTConfig
from ops import fast, layers
from ops.layers import (
    RMSNorm,
    cos_sin,
    cos_sin_features,
    l2_norm,
    make_conv,
    manual_attention,
    quarter_turn,
    rope_frequencies,
    rotate,
)


def norm_of(dtype):
    norm = RMSNorm(8, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    return norm


def test_the_norm_is_its_definition_and_so_is_its_gradient():
    norm, x = norm_of(torch.float64), torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)
    gradients = torch.autograd.grad(norm(x).sin().sum(), (x, norm.weight))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sin().sum(), (x, norm.weight)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_keeps_the_dtype_of_what_it_reads(dtype):
    norm, x = norm_of(torch.float32), torch.randn(2, 8).to(dtype)
    assert norm(x).dtype == dtype
    expected = F.rms_norm(x.double(), (8,), norm.weight.double(), 1e-5)
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_under_autocast_the_norm_rounds_once_and_its_gradient_is_float32():
    norm, x, dy = norm_of(torch.float32), torch.randn(2, 8, requires_grad=True), torch.randn(2, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    assert torch.equal(y, norm(x).bfloat16())
    gradients = torch.autograd.grad(y, (x, norm.weight), dy)
    assert all(map(torch.equal, gradients, torch.autograd.grad(norm(x), (x, norm.weight), dy.float())))


def test_the_norm_of_zeros_is_zero_with_a_finite_gradient():
    x = torch.zeros(1, 8, requires_grad=True)
    y = norm_of(torch.float32)(x)
    y.sum().backward()
    assert not y.any() and x.grad.isfinite().all()


def test_a_rotation_is_its_definition_and_its_gradient_turns_back():
    x = torch.randn(2, 5, 3, 6, dtype=torch.float64, requires_grad=True)
    frequency, _ = rope_frequencies(6, 100.0, "none", 1.0, 8)
    y = rotate(x, 7, 100.0)
    for t in range(5):
        for i in range(3):
            turn = torch.polar(torch.ones((), dtype=torch.float64), (7 + t) * frequency[i])
            pair = torch.complex(x[:, t, :, i], x[:, t, :, i + 3]) * turn
            torch.testing.assert_close(torch.complex(y[:, t, :, i], y[:, t, :, i + 3]), pair)
    assert torch.autograd.gradcheck(lambda x: rotate(x, 7, 100.0, "yarn", 4.0, 8), x)


def test_angles_are_kept_for_the_layers_and_steps_that_ask_again():
    layers._kept_cos_sin.cache_clear()
    x, rope = torch.randn(2, 5, 3, 6), (100.0, "yarn", 4.0, 8)
    expected = rotate(x, 7, *rope)
    assert torch.equal(rotate(x, 7, *rope), expected)
    assert (layers._kept_cos_sin.cache_info().misses, layers._kept_cos_sin.cache_info().hits) == (1, 1)
    for other in ((8, *rope), (7, 99.0, *rope[1:]), (7, 100.0)):
        assert not torch.equal(rotate(x, *other), expected)
    assert rotate(x.double(), 7, *rope).dtype == torch.float64
    assert layers._kept_cos_sin.cache_info().misses == 5


def test_angles_first_asked_for_in_inference_mode_serve_training():
    layers._kept_cos_sin.cache_clear()
    with torch.inference_mode():
        rotate(torch.randn(1, 4, 1, 6), 0, 100.0)
    rotate(torch.randn(1, 4, 1, 6, requires_grad=True), 0, 100.0).sum().backward()


def test_the_angles_of_a_fake_tensor_are_not_met_again():
    layers._kept_cos_sin.cache_clear()
    with torch._subclasses.FakeTensorMode():
        cos_sin(torch.zeros(1, 4, 1, 6), 0, quarter_turn, 9)
    assert type(cos_sin(torch.zeros(1, 4, 1, 6), 0, quarter_turn, 9)[0]) is torch.Tensor


@pytest.mark.parametrize("bias", [False, True])
def test_under_autocast_a_convolution_keeps_the_dtype_and_rounds_once(bias):
    config = GPTConfig(n_layer=1, n_embd=16, n_head=2, vocab_size=9)
    conv = make_conv(config, 16, published_width=4, bias=bias)
    for p in conv.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(2, 9, 16).bfloat16()
    y = conv(x, None)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, conv(x.float(), None).bfloat16())


@pytest.mark.parametrize("T", [1, 2, 9])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_a_convolution_and_its_gradients_are_their_definition(T, bias, has_state):
    config = GPTConfig(n_layer=1, n_embd=6, n_head=1, vocab_size=9)
    conv, x, past = make_conv(config, 6, published_width=4, bias=bias).double(), random(2, T, 6), random(2, 3, 6)
    inputs = [x, *[past] * has_state, *(torch.nn.init.normal_(p) for p in conv.parameters())]
    y = conv(x, {"conv": past} if has_state else None)
    padded = torch.cat([past if has_state else torch.zeros_like(past), x], dim=1)
    expected = F.conv1d(padded.mT, conv.weight.T[:, None], conv.bias, groups=6).mT
    torch.testing.assert_close(y, expected)
    gradients = torch.autograd.grad(y.sin().sum(), inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sin().sum(), inputs))


def test_a_convolution_compiles_with_its_backward():
    """torch.compile makes what is written in place functional, and refuses to write to a window of unfold."""
    conv, x = make_conv(GPTConfig(n_embd=6, n_head=1), 6, published_width=4, bias=True), random(2, 9, 6).float()
    for p in conv.parameters():
        torch.nn.init.normal_(p)
    torch._dynamo.reset()
    gradients = [
        torch.autograd.grad(call(x, None).square().sum(), list(conv.parameters()))
        for call in (conv, torch.compile(conv, backend="aot_eager"))
    ]
    torch.testing.assert_close(*gradients)


def test_under_autocast_a_convolutions_gradients_round_once():
    config = GPTConfig(n_layer=1, n_embd=16, n_head=2, vocab_size=9)
    conv, x = make_conv(config, 16, published_width=4, bias=True), torch.randn(2, 9, 16).bfloat16().requires_grad_()
    weights = [torch.nn.init.normal_(p) for p in conv.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        y = conv(x, None)
    exact_x = x.detach().float().requires_grad_()
    dx, *d_weights = torch.autograd.grad(y, (x, *weights), torch.ones_like(y))
    exact_dx, *exact = torch.autograd.grad(conv(exact_x, None).sum(), (exact_x, *weights))
    assert torch.equal(dx, exact_dx.bfloat16())
    torch.testing.assert_close(d_weights, exact)


def test_the_l2_norm_keeps_the_dtype_and_rounds_once():
    x = torch.randn(2, 9, 16).bfloat16()
    assert torch.equal(l2_norm(x), l2_norm(x.float()).bfloat16())


def test_the_l2_norm_and_its_gradient_are_their_definition():
    x = random(2, 3, 4)
    torch.testing.assert_close(l2_norm(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    assert torch.autograd.gradcheck(l2_norm, x) and torch.autograd.gradcheck(
        l2_norm, (1e-3 * x.detach()).requires_grad_()
    )


def test_features_of_two_positions_have_the_product_times_the_cosine_of_their_distance():
    q, k = random(1, 5, 2, 3), random(1, 5, 2, 4)[..., :3]
    features = [cos_sin_features(x, *cos_sin(x, 0, quarter_turn, 9)) for x in (q, k)]
    angle = torch.arange(5).double() * math.pi / 18
    expected = torch.einsum("bihd,bjhd->bhij", q, k) * (angle[:, None] - angle).cos()
    torch.testing.assert_close(torch.einsum("bihd,bjhd->bhij", *features), expected)
    assert torch.autograd.gradcheck(lambda x: cos_sin_features(x, *cos_sin(x, 0, quarter_turn, 9)), q)


@pytest.mark.parametrize(("T", "heads", "width"), [(20, 2, 6), (100, 2, 24), (256, 1, 8), (600, 3, 32)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
def test_causal_attention_and_its_gradients_are_the_definition(T, heads, width, dtype, error):
    torch.manual_seed(T)
    qk, v, do = (torch.randn(2, T, n, width).to(dtype).transpose(1, 2) for n in (2 * heads, heads, heads))
    qkv = [x.requires_grad_() for x in (*(3 * qk).split(heads, dim=1), v)]  # views, as in a model; peaked weights
    exact = [x.detach().double().requires_grad_() for x in qkv]
    o, expected = fast.CausalAttention.apply(*qkv), manual_attention(*exact, None, None, is_causal=True)[0]
    gradients, exact_gradients = torch.autograd.grad(o, qkv, do), torch.autograd.grad(expected, exact, do.double())
    for y, exact_y in zip((o, *gradients), (expected, *exact_gradients), strict=True):
        assert y.dtype == dtype and (y - exact_y).norm() < error * exact_y.norm()


def test_attention_in_bfloat16_trains_grouped_heads_as_the_definition(monkeypatch):
    model = GPT(GPTConfig(n_layer=1, n_embd=32, n_head=4, n_kv_head=2, vocab_size=9, block_size=300))
    idx, p = torch.randint(9, (2, 301)), model.blocks[0].mixer.qkv.weight

    def gradient():
        with torch.autocast("cpu", torch.bfloat16):
            return torch.autograd.grad(model(idx[:, :-1], idx[:, 1:]), p)[0]

    def definition(*arguments, is_causal):
        return manual_attention(*arguments, None, is_causal)[0]

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", None)  # not called
        ours = gradient()
    monkeypatch.setattr("ops.layers.attention", definition)
    assert (ours - gradient()).norm() < 0.03 * ours.norm()


# -- second derivatives ------------------------------------------------------------------------------------------------

ROOT = Path(layers.__file__).parents[1]


def own_functions():
    """Every autograd function of ops/, found among the subclasses of torch's own."""
    found = (f for f in torch.autograd.Function.__subclasses__() if ROOT in Path(inspect.getfile(f)).parents)
    return {f.__name__: f for f in found if f.__module__.partition(".")[0] == "ops"}


def random(*shape):
    torch.manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def strictly_lower(x):
    return x.tril(-1)


INPUTS = {  # {function: its inputs}: float64 tensors that have gradients, and its other arguments
    "Product": lambda: (random(2, 1, 3, 4), random(1, 3, 4, 2)),
    "Chunks": lambda: (
        random(4, 2, 2), random(4, 2, 3), random(4, 2, 3), random(4, 2, 2), random(4, 2, 3), random(4, 3, 1),
        random(1, 2, 3, 2),
    ),
    "PlainWeights": lambda: (random(1, 2, 2, 3, 2), random(1, 2, 2, 3, 2)),
    "HeadWeights": lambda: (random(1, 2, 2, 3, 2), random(1, 1, 2, 3, 2), random(1, 2, 2, 3, 1)),
    "ChannelWeights": lambda: (random(2, 4, 3), random(2, 4, 3), random(2, 4, 3)),
    "Inverse": lambda: (random(2, 4, 4),),
    "CausalAttention": lambda: (random(1, 1, 3, 2), random(1, 1, 3, 2), random(1, 1, 3, 2)),
    "Convolution": lambda: (random(2, 5, 3), random(3, 3), random(3)),
    "Norm": lambda: (random(2, 3, 4), random(4), 1e-5),
    "Rotation": lambda: (random(1, 2, 1, 4), random(2, 1, 2).detach(), random(1, 2, 2).view(2, 1, 2).detach()),
    "CosSinFeatures": lambda: (random(1, 2, 1, 4), random(2, 1, 1).detach(), random(1, 2, 1).view(2, 1, 1).detach()),
    "L2Norm": lambda: (random(2, 3, 4),),
    "_ChunkedCrossEntropy": lambda: (random(3, 4), random(5, 4), torch.tensor([1, 0, 3]), 5, None),
}  # fmt: skip
TWICE_DIFFERENTIABLE = ("Product", "Inverse", "PlainWeights", "CosSinFeatures", "Rotation")
ARGUMENT = {"Inverse": strictly_lower}  # {function: what makes a random input one that the function expects}


def refuses(derivative):
    """Whether derivative() raises our error for functions that are differentiable once. Other errors pass through."""
    try:
        derivative()
    except RuntimeError as error:
        if "no second derivatives" not in str(error):
            raise
        return True
    return False


def test_every_function_with_a_backward_of_its_own_has_inputs_to_test_it_with():
    assert own_functions().keys() == INPUTS.keys()


@pytest.mark.parametrize("name", INPUTS)
def test_a_second_derivative_is_right_or_refused(name):
    """A backward treats saved intermediates as constants, so a second derivative could silently miss a part."""
    function, argument = own_functions()[name].apply, ARGUMENT.get(name, lambda x: x)
    inputs = INPUTS[name]()

    def gradgradcheck():
        torch.autograd.gradgradcheck(lambda first, *rest: function(argument(first), *rest), inputs)

    assert refuses(gradgradcheck) == (name not in TWICE_DIFFERENTIABLE)


@pytest.mark.parametrize("attention", MIXERS)
def test_a_hessian_vector_product_of_a_gpt_is_right_or_refused(attention):
    torch.manual_seed(0)
    keys = dict(n_layer=1, n_embd=8, n_head=2, block_size=20, vocab_size=9, state_size=4, gate="native+elementwise")
    model = GPT(GPTConfig(attention=attention, **keys)).double()
    idx, p = torch.randint(9, (1, 21)), model.blocks[0].mixer.out_proj.weight
    v = torch.randn_like(p)

    def gradient(**options):
        return torch.autograd.grad(model(idx[:, :-1], idx[:, 1:]), p, **options)[0]

    def compare():
        (product,) = torch.autograd.grad((gradient(create_graph=True) * v).sum(), p)
        with torch.no_grad():
            gradients = []
            for step in (1e-5, -2e-5):
                p.add_(step * v)
                with torch.enable_grad():
                    gradients.append(gradient())
        torch.testing.assert_close(product, (gradients[0] - gradients[1]) / 2e-5, rtol=1e-4, atol=1e-8)

    refuses(compare)


def test_pytorchs_initialisation_is_that_of_its_modules():
    keys = dict(vocab_size=500, n_layer=1, n_embd=64, n_head=4, position="learned", block_size=300, gate="elementwise")
    model = GPT(GPTConfig(**keys, init="pytorch"))
    for embedding in (model.wte, model.wpe):
        assert abs(float(embedding.weight.detach().std()) - 1) < 0.02
    for linear in (model.blocks[0].mixer.qkv, model.blocks[0].mixer.out_proj, model.blocks[0].mlp.down):
        bound = linear.in_features**-0.5
        assert 0.98 * bound < float(linear.weight.detach().abs().max()) <= bound
        assert abs(float(linear.weight.detach().std()) - bound / 3**0.5) < 0.02 * bound
    assert not model.blocks[0].mixer.gates["readout"].proj.weight.any()  # a gate starts as it always does
