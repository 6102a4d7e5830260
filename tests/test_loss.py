"""The chunked cross entropy is plain cross entropy, loss and gradients.

python -m pytest tests/test_loss.py
"""

import math

import pytest
import torch
import torch.nn.functional as F

from ops import IGNORE
from ops.loss import CHUNK_TOKENS, _ChunkedCrossEntropy, cross_entropy_sum

C = 16


def plain(x, weight, targets, vocab_size, softcap=None):
    logits = x @ weight[:vocab_size].T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE)


def with_gradients(function, x, weight, *rest, **options):
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    loss = function(x, weight, *rest, **options)
    return loss, *torch.autograd.grad(3 * loss, (x, weight))  # 3: the gradient that comes in is not always 1


def make_inputs(tokens, rows, vocab_size, share_ignored):
    torch.manual_seed(0)
    targets = torch.randint(vocab_size, (tokens,))
    targets[torch.rand(tokens) < share_ignored] = IGNORE
    return torch.randn(tokens, C).double(), torch.randn(rows, C).double(), targets


@pytest.mark.parametrize("tokens", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 7])
@pytest.mark.parametrize("share_ignored", [0.0, 0.7])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_loss_and_gradients_are_those_of_the_whole_matrix(tokens, share_ignored, padding, softcap):
    x, weight, targets = make_inputs(tokens, 40 + padding, 40, share_ignored)
    ours = with_gradients(cross_entropy_sum, x, weight, targets, vocab_size=40, softcap=softcap)
    expected = with_gradients(plain, x, weight, targets, 40, softcap)
    for value, reference in zip(ours, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-12)
    assert not ours[2][40:].any()  # padded ids have no part in anything


def test_no_label_gives_no_loss_and_no_gradient():
    x, weight, _ = make_inputs(30, 40, 40, 0.0)
    targets = torch.full((30,), IGNORE)
    loss, dx, dw = with_gradients(cross_entropy_sum, x, weight, targets, vocab_size=40)
    assert loss == 0 and not dx.any() and not dw.any()


def test_ignored_labels_that_stay_in_the_matrix_count_for_nothing():
    """On a GPU the model leaves them in: counting them would make the host wait."""
    x, weight, targets = make_inputs(CHUNK_TOKENS + 9, 45, 40, 0.5)
    ours = with_gradients(_ChunkedCrossEntropy.apply, x, weight, targets, 40, None)
    expected = with_gradients(plain, x, weight, targets, 40)
    for value, reference in zip(ours, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-12)
    assert not ours[1][targets == IGNORE].any()


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_value_that_is_not_finite_counts_for_nothing_where_no_label_is(broken, softcap):
    x, weight, targets = make_inputs(CHUNK_TOKENS + 9, 45, 40, 0.5)
    expected = with_gradients(_ChunkedCrossEntropy.apply, x, weight, targets, 40, softcap)
    x[targets == IGNORE] = broken
    for value, reference in zip(
        with_gradients(_ChunkedCrossEntropy.apply, x, weight, targets, 40, softcap), expected, strict=True
    ):
        assert torch.equal(value, reference)


@pytest.mark.parametrize("label", [-1, 40, 44, 45], ids=["nanoGPT's -1", "padding", "last padding", "past the matrix"])
def test_a_label_that_is_no_id_is_an_error(label):
    x, weight, targets = make_inputs(9, 45, 40, 0.0)
    targets[3] = label
    with pytest.raises(RuntimeError, match=f"index {label} is out of bounds"):
        cross_entropy_sum(x, weight, targets, vocab_size=40)


def test_the_value_is_the_same_without_gradients():
    x, weight, targets = make_inputs(700, 40, 40, 0.3)
    loss, _, _ = with_gradients(cross_entropy_sum, x, weight, targets, vocab_size=40)
    with torch.no_grad():
        assert cross_entropy_sum(x, weight, targets, vocab_size=40) == loss


@pytest.mark.parametrize("dtype, of_loss, of_gradients", [("float32", 1e-6, 1e-5), ("bfloat16", 1e-3, 0.01)])
def test_a_large_vocabulary_stays_near_plain_float32(dtype, of_loss, of_gradients):
    """50,304 ids, where torch's own linear_cross_entropy in bfloat16 was seen to return 9.19 for 10.90."""
    torch.manual_seed(0)
    width, vocab_size, tokens = 64, 50_304, 600
    x, weight = torch.randn(tokens, width), 0.02 * torch.randn(vocab_size, width)
    targets = torch.randint(vocab_size, (tokens,))
    expected = with_gradients(plain, x, weight, targets, vocab_size)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        loss, dx, dw = with_gradients(cross_entropy_sum, x, weight, targets, vocab_size=vocab_size)
    assert abs(loss - expected[0]) / expected[0] < of_loss and loss.dtype == torch.float32
    for value, reference in ((dx, expected[1]), (dw, expected[2])):
        assert (value - reference).norm() / reference.norm() < of_gradients


def test_under_autocast_only_the_operands_are_bfloat16():
    torch.manual_seed(0)
    tokens, vocab_size = 16 * CHUNK_TOKENS, 40
    x, weight, targets = torch.randn(tokens, C), torch.randn(vocab_size, C), torch.randint(vocab_size, (tokens,))
    rounded = x.bfloat16().float(), weight.bfloat16().float()
    expected = with_gradients(plain, *rounded, targets, vocab_size)
    with torch.autocast("cpu", torch.bfloat16):
        loss, dx, dw = with_gradients(cross_entropy_sum, x, weight, targets, vocab_size=vocab_size)
    float_logits = plain(x, weight, targets, vocab_size)
    # the logits of a product are rounded to bfloat16 (2**-9), which averages out; a sum in bfloat16 would not
    assert abs(loss - expected[0]) / expected[0] < 1e-4 and loss != float_logits
    for value, reference, limit in ((dx, expected[1], 0.006), (dw, expected[2], 0.0015)):  # measured 0.0038, 0.0008
        assert value.dtype == torch.float32 and (value - reference).norm() / reference.norm() < limit
