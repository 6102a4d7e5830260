"""Cross entropy of a language model whose (tokens, vocabulary) matrix of logits is never held whole.

The loss is a sum over chunks of tokens, and its gradient is found in the same pass, while a chunk's logits are
at hand: plain operations, nothing recomputed. Equal to float32 cross entropy of the whole matrix.
"""

import torch

from data.shards import IGNORE
from recurrence import at_least_float32

CHUNK_TOKENS = 512


def cross_entropy_sum(x, weight, targets, *, vocab_size, softcap=None):
    """Sum over tokens of -log softmax(x @ weight.T)[target], in nats: a float32 scalar.

    x (..., C) hidden states; weight (V, C) with V >= vocab_size, rows past vocab_size do not count;
    targets (...) ids, -100 where nothing is predicted; softcap c makes the logits c * tanh(logits / c).
    Under autocast the two operands are cast to its dtype on purpose, and everything after the product is float32.
    """
    x, targets = x.flatten(0, -2), targets.flatten()
    if targets.device.type == "cpu":  # on a GPU the count would have to be waited for
        labelled = targets != IGNORE
        if not labelled.all():
            x, targets = x[labelled], targets[labelled]
    return _ChunkedCrossEntropy.apply(x, weight, targets, vocab_size, softcap)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, softcap):
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        needs_grad = any(ctx.needs_input_grad[:2])
        with torch.autocast(device, enabled=False):
            w = weight.to(dtype)
            loss = at_least_float32(x.new_zeros(()))
            dx = torch.empty_like(x) if needs_grad else None
            dw = torch.zeros_like(weight, dtype=loss.dtype) if needs_grad else None
            for start in range(0, len(x), CHUNK_TOKENS):
                rows = slice(start, start + CHUNK_TOKENS)
                x_rows, target = x[rows].to(dtype), targets[rows, None]
                counts = target != IGNORE
                logits = at_least_float32(x_rows @ w.T)  # (rows, V)
                if softcap is not None:
                    capped = torch.tanh(logits / softcap)
                    logits = softcap * capped
                logits[:, vocab_size:] = -torch.inf
                target = target.masked_fill(~counts, 0)  # any other id that is none is an error, not id 0
                log_sum = logits.logsumexp(-1, keepdim=True)
                loss = loss + ((log_sum - logits.gather(-1, target)) * counts).sum()
                if needs_grad:
                    grad = logits.sub_(log_sum).exp_()  # softmax, then minus one at the target
                    grad.scatter_add_(-1, target, torch.full_like(target, -1, dtype=grad.dtype))
                    grad.mul_(counts)
                    if softcap is not None:
                        grad.mul_(1 - capped * capped)
                    grad = grad.to(dtype)
                    dx[rows] = grad @ w
                    dw += grad.T @ x_rows
        ctx.save_for_backward(dx, dw)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        dx, dw = ctx.saved_tensors
        return (grad_loss * dx).to(dx.dtype), (grad_loss * dw).to(dw.dtype), None, None, None
