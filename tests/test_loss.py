"""The chunked cross entropy is plain cross entropy, loss and gradients."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from test_gpu import without_values
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ops import IGNORE
from ops.loss import CHUNK_TOKENS, chunk_tokens, cross_entropy_sum

C = 16
CLOSE = dict(rtol=1e-12, atol=1e-12)


def plain(x, weight, targets):
    return F.cross_entropy(x @ weight.T, targets, reduction="sum", ignore_index=IGNORE)


def with_gradients(function, x, weight, targets):
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    loss = function(x, weight, targets)
    return loss, *torch.autograd.grad(3 * loss, (x, weight))  # 3: the gradient that comes in is not always 1


def make_inputs(tokens, share_ignored=0.0):
    targets = torch.randint(40, (tokens,))
    targets[torch.rand(tokens) < share_ignored] = IGNORE
    return torch.randn(tokens, C).double(), torch.randn(40, C).double(), targets


@pytest.mark.parametrize("tokens", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 7])
@pytest.mark.parametrize("share_ignored", [0.0, 0.7, 1.0])
def test_loss_and_gradients_are_those_of_the_whole_matrix(tokens, share_ignored):
    x, weight, targets = make_inputs(tokens, share_ignored)
    ours = with_gradients(cross_entropy_sum, x, weight, targets)
    torch.testing.assert_close(ours, with_gradients(plain, x, weight, targets), **CLOSE)
    assert not ours[1][targets == IGNORE].any()
    with torch.no_grad():
        assert cross_entropy_sum(x, weight, targets) == ours[0]


@pytest.mark.parametrize("label", [-1, 40], ids=["nanoGPT's -1", "past the matrix"])
def test_a_label_that_is_no_id_is_an_error(label):
    x, weight, targets = make_inputs(9)
    targets[3] = label
    with pytest.raises(RuntimeError, match=f"index {label} is out of bounds"):
        cross_entropy_sum(x, weight, targets)


@pytest.mark.parametrize("dtype, of_loss, of_gradients", [("float32", 1e-6, 1e-5), ("bfloat16", 1e-3, 0.01)])
def test_a_large_vocabulary_stays_near_plain_float32(dtype, of_loss, of_gradients):
    """50,304 ids, where torch's own linear_cross_entropy in bfloat16 was seen to return 9.19 for 10.90."""
    x, weight, targets = torch.randn(200, 64), 0.02 * torch.randn(50_304, 64), torch.randint(50_304, (200,))
    expected = with_gradients(plain, x, weight, targets)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        ours = with_gradients(cross_entropy_sum, x, weight, targets)
    for value, reference, limit in zip(ours, expected, (of_loss, of_gradients, of_gradients), strict=True):
        assert value.dtype == torch.float32 and (value - reference).norm() < limit * reference.norm()


class Traffic(TorchDispatchMode):
    """Counts the bytes of tensors of one shape that are read or written."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.bytes = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if "empty" not in str(function) and not function.is_view:
            # what an operator writes to is an argument and a result
            tensors = {id(y): y for y in tree_leaves((args, kwargs, result)) if isinstance(y, torch.Tensor)}
            self.bytes += sum(y.nbytes for y in tensors.values() if y.shape == self.shape)
        return result


@pytest.mark.parametrize("V, C, most", [(50_304, 768, 4e9), (151_936, 1024, 15e9)])
def test_a_gpu_moves_the_gradient_of_the_output_layer_a_few_times_a_step(V, C, most):
    """16k tokens in bfloat16, on the device meta, which counts as a GPU; 512 tokens a chunk move 21 and 83 GB."""
    with without_values():
        x, weight = (torch.empty(n, C, dtype=torch.bfloat16, requires_grad=True) for n in (16_384, V))
        assert 4096 <= chunk_tokens(weight) <= 8192
        with Traffic(weight.shape) as traffic:
            cross_entropy_sum(x, weight, torch.zeros(len(x), dtype=torch.long)).backward()
    assert 1e9 < traffic.bytes < most


def test_a_gpu_reads_and_writes_the_logits_no_more_often_than_it_must():
    """26 bytes a logit: rounded by the product (2), copied to float32 (6), log-softmax (8), its exponential (6), two
    products that read it (4). Counted are 6 more, of which a gather and a scatter touch one number a token, and not the
    2 of the product that reads a transpose."""
    with without_values():
        x, weight = (torch.empty(n, 768, dtype=torch.bfloat16, requires_grad=True) for n in (5336, 50_304))
        assert chunk_tokens(weight) == len(x)
        with Traffic((len(x), len(weight))) as traffic:
            cross_entropy_sum(x, weight, torch.zeros(len(x), dtype=torch.long)).backward()
    assert traffic.bytes / len(x) / len(weight) == 26 + 6 - 2


def test_compiled_it_is_the_same_and_its_graph_does_not_grow_with_the_tokens():
    sizes = []

    def counting(graph, inputs):
        sizes.append(len(graph.graph.nodes))
        return make_boxed_func(graph)

    for tokens in (9, 20 * CHUNK_TOKENS):
        torch._dynamo.reset()
        compiled = torch.compile(cross_entropy_sum, backend=aot_autograd(fw_compiler=counting), dynamic=False)
        inputs = make_inputs(tokens, share_ignored=0.3)
        ours = with_gradients(compiled, *inputs)
        plain = with_gradients(cross_entropy_sum, *inputs)  # of the labelled tokens alone
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-15)
        with torch.no_grad():
            assert compiled(*inputs) == ours[0]
    assert len(sizes) >= 4 and max(sizes) < 20 and sizes[: len(sizes) // 2] == sizes[len(sizes) // 2 :]
