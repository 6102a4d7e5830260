"""Cross entropy of a language model whose (tokens, vocabulary) matrix of logits is never held whole: a sum over chunks
of tokens, whose gradient is computed in the same pass, while the logits are at hand.
"""

import torch
from torch import Tensor

from ops import IGNORE
from ops.fast import Function, at_least_float32

CHUNK_TOKENS = 512


def cross_entropy_sum(
    x: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, softcap: float | None = None
) -> Tensor:
    """Sum over tokens of -log softmax(x @ weight.T)[target], in nats: a float32 scalar.

    x (..., C) are hidden states. weight is (V, C) with V >= vocab_size; rows past vocab_size get no probability.
    targets (...) are ids; only -100 is masked, and any other invalid id raises. With softcap c the logits are
    c * tanh(logits / c). Under autocast the operands of the product are cast to its dtype, and all else is float32.
    """
    return ChunkedCrossEntropy.apply(x.flatten(0, -2), weight, targets.flatten(), vocab_size, softcap)


class ChunkedCrossEntropy(Function):
    """F.cross_entropy(softcapped x @ weight.T, targets, reduction="sum"). x (tokens, C), targets (tokens,)."""

    def forward(ctx, x, weight, targets, vocab_size, softcap):
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        needs_grad = any(ctx.needs_input_grad[:2])
        with torch.autocast(device, enabled=False):
            w = weight.to(dtype)
            loss = at_least_float32(x.new_zeros(()))
            dx = torch.empty_like(x) if needs_grad else None
            dw = torch.zeros_like(weight, dtype=loss.dtype) if needs_grad else None
            # the large tensors are made once, and every chunk writes to them: fresh memory costs more than the sums
            products = torch.empty(min(len(x), CHUNK_TOKENS), len(w), dtype=dtype, device=x.device)
            logits, log_shares = (torch.empty_like(products, dtype=loss.dtype) for _ in range(2))
            dw_chunk = torch.empty_like(w)
            for start in range(0, len(x), CHUNK_TOKENS):
                rows = slice(start, start + CHUNK_TOKENS)
                target = targets[rows, None]
                counts = target != IGNORE
                # zeros replace ignored tokens, which may hold an infinity: inf * 0 would be NaN below
                x_rows = x[rows].to(dtype).masked_fill(~counts, 0)
                product = torch.mm(x_rows, w.T, out=products[: len(x_rows)])
                logit = logits[: len(x_rows)].copy_(product)  # (rows, V)
                if softcap is not None:
                    capped = torch.tanh(logit / softcap)
                    logit.copy_(capped).mul_(softcap)
                logit[:, vocab_size:] = -torch.inf
                target = target.masked_fill(~counts, 0)  # only -100 becomes id 0; any other invalid id must raise
                log_share = torch.log_softmax(logit, -1, out=log_shares[: len(x_rows)])
                # the columns end with the vocabulary, so that gather raises for the id of a padding row
                loss = loss - (log_share[:, :vocab_size].gather(-1, target) * counts).sum()
                if needs_grad:
                    grad = log_share.exp_()  # softmax, then minus one at the target
                    grad.scatter_add_(-1, target, torch.full_like(target, -1, dtype=grad.dtype))
                    if softcap is not None:
                        grad.mul_(1 - capped * capped)
                    product.copy_(grad)
                    # ignored tokens get no gradient; in dw their x is already zero
                    dx[rows] = (product @ w) * counts
                    dw += torch.mm(product.T, x_rows, out=dw_chunk)
        ctx.save_for_backward(dx, dw)
        return loss

    def backward(ctx, grad_loss):
        dx, dw = ctx.saved_tensors
        return (grad_loss * dx).to(dx.dtype), (grad_loss * dw).to(dw.dtype), None, None, None
