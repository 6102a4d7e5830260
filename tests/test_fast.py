"""What torch 2.11 compiled wrongly: it left out gradients of functions of ops/fast.py without an error, and failed
where a layer's recurrence is not compiled, as fla's kernels are not."""

import pytest
import torch

import variants  # noqa: F401
from model import GPT, GPTConfig
from ops import fast, recurrence

R = torch.randn
CALLS = {
    "product": (fast.product, R(4, 8, 8), R(4, 8, 8)),
    "plain weights": (fast.PlainWeights.apply, R(2, 2, 2, 8, 4), R(2, 2, 2, 8, 4)),
    "convolution": (lambda x, w: fast.Convolution.apply(x, w, None), R(2, 11, 6), R(4, 6)),
    "convolution, bias": (fast.Convolution.apply, R(2, 11, 6), R(4, 6), R(6)),
    "norm": (lambda x, w: fast.Norm.apply(x, w, 1e-5), R(2, 11, 6), R(6)),
    "l2 norm": (fast.L2Norm.apply, R(2, 11, 6)),
    "chunks": (lambda q, k, v: recurrence.chunked(q, k, v, chunk_size=8)[0], *R(3, 2, 16, 2, 8)),
    "chunks, decay": (
        lambda q, k, v, a: recurrence.chunked(q, k, v, log_decay=-(a**2), chunk_size=8)[0],
        *R(4, 2, 16, 2, 8),
    ),
    "delta rule": (
        lambda q, k, v, b: recurrence.chunked(q, k / 9, v, beta=b[..., 0].sigmoid(), chunk_size=8)[0],
        *R(4, 2, 16, 2, 8),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_step_has_the_gradients_of_a_plain_one(name):
    call, *inputs = CALLS[name]
    inputs = [x.detach().requires_grad_() for x in inputs]

    def gradients(function):
        y = function(*inputs)
        outputs = y if isinstance(y, tuple) else (y,)
        return torch.autograd.grad(sum((x * x.detach().cos()).sum() for x in outputs), inputs)

    torch._dynamo.reset()
    plain = gradients(call)
    compiled = gradients(torch.compile(lambda *xs: call(*xs), backend="aot_eager"))
    for right, found in zip(plain, compiled, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gla", "mamba2", "gated_deltanet", "cosformer", "kda", "deltanet", "mamba3"])
def test_a_step_whose_recurrence_is_not_compiled_has_the_gradients_of_a_plain_one(name, monkeypatch):
    monkeypatch.setattr(recurrence, "chunked", torch.compiler.disable(recurrence.chunked))
    sizes = dict(n_layer=1, n_embd=16, n_head=2, vocab_size=32, block_size=32)
    model = GPT(GPTConfig(**sizes, attention=name, gate="elementwise"))
    idx = torch.randint(32, (2, 32))

    def gradients(function):
        return torch.autograd.grad(function(idx, idx), list(model.parameters()))

    torch._dynamo.reset()
    plain = gradients(model)
    compiled = gradients(torch.compile(model, backend="aot_eager"))
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
