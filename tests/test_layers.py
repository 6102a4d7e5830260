"""The parts of layers.py whose backward is written by hand, against their definitions.

python -m pytest tests/test_layers.py
"""

import pytest
import torch
import torch.nn.functional as F

from layers import RMSNorm, rope_frequencies, rotate
from model import GPT, GPTConfig


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
