"""Cross entropy of a language model whose (tokens, vocabulary) matrix of logits is never held
whole: a sum over chunks of tokens, whose gradient is computed in the same pass, while the logits
are at hand.
"""

import functools
import importlib.util

import torch
from torch import Tensor

from ops import IGNORE
from ops.fast import Function, at_least_float32

# measured on a CPU; a GPU takes more, since every chunk rewrites the (V, C) gradient
CHUNK_TOKENS = 512


def chunk_tokens(weight: Tensor) -> int:
    """How many tokens a chunk has. On a GPU 4,096 to 8,192, and a GB of float32 logits where that
    is in between."""
    if weight.device.type in ("cpu", "mps"):
        return CHUNK_TOKENS
    return min(max(4096, 2**28 // len(weight)), 8192)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def takes_kernel(logits: Tensor) -> bool:
    """Whether softmax_kernel.py computes the softmax of these logits."""
    return logits.is_cuda and logits.dtype != torch.float64 and has_triton()


def cross_entropy_sum(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum over tokens of -log softmax(x @ weight.T)[target], in nats: a float32 scalar.

    x (..., C) are hidden states, weight is (V, C). targets (...) are ids; only -100 is masked, and
    any other invalid id raises. Under autocast the operands of the product are cast to its dtype,
    and all else is float32.
    """
    x = x.flatten(0, -2)
    targets = targets.flatten()
    # rows of a task have few labels. A GPU would wait for their number, and a compiler begin anew
    if x.is_cpu and not torch.compiler.is_compiling():
        labelled = targets != IGNORE
        if not labelled.all():
            x = x[labelled]
            targets = targets[labelled]
    return ChunkedCrossEntropy.apply(x, weight, targets)


class ChunkedCrossEntropy(Function):
    """F.cross_entropy(x @ weight.T, targets, reduction="sum"). x (tokens, C), targets
    (tokens,)."""

    def forward(ctx, x, weight, targets):
        device = x.device.type
        dtype = weight.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        function = one_node if torch.compiler.is_compiling() else loss_and_gradients
        needs_grad = any(ctx.needs_input_grad[:2])
        loss, dx, dw = function(x, weight, targets, dtype, needs_grad)
        ctx.save_for_backward(dx, dw)
        return loss

    def backward(ctx, grad_loss):
        dx, dw = ctx.saved_tensors
        return (grad_loss * dx).to(dx.dtype), (grad_loss * dw).to(dw.dtype), None


def outputs(x: Tensor, weight: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for what loss_and_gradients returns; without gradients, two tensors of no element."""
    loss = at_least_float32(x.new_zeros(()))
    if not needs_grad:
        return loss, x.new_empty(0), loss.new_empty(0)
    return loss, torch.empty_like(x), torch.zeros_like(weight, dtype=loss.dtype)


def loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and its gradients dx in the dtype of x and dw in at least float32. dtype: of the
    products."""
    with torch.autocast(x.device.type, enabled=False):
        w, size = weight.to(dtype), chunk_tokens(weight)
        loss, dx, dw = outputs(x, weight, grad)
        # the large tensors are made once, and every chunk writes to them: fresh memory costs more
        # than the sums
        products = torch.empty(min(len(x), size), len(w), dtype=dtype, device=x.device)
        buffers = []
        if not takes_kernel(products):
            buffers = [torch.empty_like(products, dtype=loss.dtype) for _ in range(2)]
        dw_chunk = torch.empty_like(w)
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            target = targets[rows, None]
            counts = target != IGNORE
            # zeros replace ignored tokens, which may hold an infinity: inf * 0 would be NaN below
            x_rows = x[rows].to(dtype).masked_fill(~counts, 0)
            product = torch.mm(x_rows, w.T, out=products[: len(x_rows)])
            # only -100 becomes id 0; any other invalid id must raise
            target = target.masked_fill(~counts, 0)
            of_target = softmax_(product, target, buffers, grad)
            loss = loss - (of_target * counts).sum()
            if grad:
                # the gradient of the logits: the softmax, less one at the target
                product.scatter_(-1, target, (of_target.exp() - 1).to(dtype))
                # ignored tokens get no gradient; in dw their x is already zero
                dx[rows] = (product @ w) * counts
                dw += torch.mm(product.T, x_rows, out=dw_chunk)
    return loss, dx, dw


def softmax_(product: Tensor, target: Tensor, buffers: list[Tensor], is_written: bool) -> Tensor:
    """log softmax(product)[target] of each row, in at least float32: product (rows, V), target (rows,
    1) -> (rows, 1). If is_written, product becomes its softmax, rounded to its dtype. buffers: two
    of at least its rows, which softmax_kernel.py does without."""
    if not buffers:
        from ops import softmax_kernel

        of_target = product.gather(-1, target).float()
        return of_target - softmax_kernel.softmax_(product, is_written)
    logits, log_shares = (buffer[: len(product)] for buffer in buffers)
    log_share = torch.log_softmax(logits.copy_(product), -1, out=log_shares)
    of_target = log_share.gather(-1, target)
    if is_written:
        # a GPU rounds on the way out; a CPU would first make a copy
        if product.is_cpu and product.dtype != log_share.dtype:
            product.copy_(log_share.exp_())
        else:
            torch.exp(log_share, out=product)
    return of_target


# torch.compile would unroll the loop, 33 nodes a chunk
one_node = torch.library.custom_op(
    "nanogate::loss_and_gradients", loss_and_gradients, mutates_args=()
)
one_node.register_fake(lambda x, weight, *keys: outputs(x, weight, needs_grad=keys[-1]))
