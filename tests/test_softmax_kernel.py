"""The kernel of the loss, in Triton's interpreter, which needs no GPU, and compiled for one.

The interpreter has to be asked for before Triton is imported, so that it runs in a process of its own.
"""

import importlib.util
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from ops import IGNORE, loss

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs it: pip install triton==3.7.1")


def interpret():
    """Has this process interpret kernels, on the CPU."""
    os.environ["TRITON_INTERPRET"] = "1"


def plain(x, weight, targets):
    return F.cross_entropy(x @ weight.T, targets, reduction="sum", ignore_index=IGNORE)


def with_gradients(function, x, weight, targets):
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    total = function(x, weight, targets)
    return total, *torch.autograd.grad(3 * total, (x, weight))


def against_float64(dtype, V, most):
    """Distances of the loss and its gradients, over their size. most: logits a program holds at once."""
    from ops import softmax_kernel

    loss.takes_kernel = lambda logits: True
    softmax_kernel.MOST = most
    torch.manual_seed(V)
    x, weight, targets = torch.randn(30, 16), torch.randn(V, 16), torch.randint(V, (30,))
    targets[3] = IGNORE
    expected = with_gradients(plain, x.double(), weight.double(), targets)
    ours = with_gradients(loss.cross_entropy_sum, x.to(dtype), weight.to(dtype), targets)
    with torch.no_grad():
        assert loss.cross_entropy_sum(x.to(dtype), weight.to(dtype), targets) == ours[0]
    return [float((a - b).norm() / b.norm()) for a, b in zip(ours, expected, strict=True)]


def test_the_loss_and_its_gradients_are_those_of_the_definition():
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=interpret) as process:
        # the interpreter has no bfloat16; a row is one block, several, or several and a part
        for dtype, limit in ((torch.float32, 1e-6), (torch.float16, 2e-3)):
            for V, most in ((64, 64), (256, 64), (300, 64), (300, 1024), (3, 64)):
                distances = process.submit(against_float64, dtype, V, most).result()
                assert max(distances) < limit, (dtype, V, most, distances)


def test_it_compiles_for_an_h100_and_holds_its_row_in_registers():
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ops import softmax_kernel as kernel

    for logits in ("*bf16", "*fp16", "*fp32"):
        signature = dict(logits=logits, log_sums="*fp32", stride="i32", V="constexpr")
        signature |= dict(is_written="constexpr", BLOCK="constexpr")
        source = ASTSource(kernel.softmax_of_rows, signature, {(3,): 50_304, (4,): True, (5,): kernel.MOST})
        compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": kernel.WARPS})
        assert ".local" not in compiled.asm["ptx"]
