"""The one Triton kernel of this repository: the softmax of the loss, on a GPU. In PyTorch its copies,
log-softmax and exponential took 8 of the 34 ms of a step's kernels (docs/gpu.md); this reads the logits
twice and writes them once."""

import torch
import triton
import triton.language as tl

MOST = 32_768  # logits that one program holds at once
WARPS = 16 if torch.version.hip else 32  # of one program


@triton.jit
def softmax_of_rows(
    logits,
    log_sums,
    stride,
    V: tl.constexpr,
    is_written: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: its log-sum-exp and, if is_written, its softmax in place of the logits."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    columns = tl.arange(0, BLOCK)
    largest = -float("inf")
    total = 0.0  # of exp(x - largest)
    for start in range(0, V, BLOCK):
        at = start + columns
        x = tl.load(logits + at, mask=at < V, other=-float("inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(before, tl.max(x, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(x - largest), 0)
    tl.store(log_sums + row, largest + tl.log(total))
    if is_written:
        for start in range(0, V, BLOCK):
            at = start + columns
            x = tl.load(logits + at, mask=at < V, other=-float("inf")).to(tl.float32)
            share = tl.exp(x - largest) / total
            tl.store(logits + at, share.to(logits.dtype.element_ty), mask=at < V)


def softmax_(logits: torch.Tensor, is_written: bool) -> torch.Tensor:
    """The log-sum-exp of each row of logits (rows, V), as float32 (rows, 1). If is_written, the
    logits become their softmax. The sums are float32."""
    rows, V = logits.shape
    log_sums = torch.empty(rows, 1, device=logits.device)
    block = min(MOST, triton.next_power_of_2(V))
    keys = dict(is_written=is_written, BLOCK=block, num_warps=WARPS)
    softmax_of_rows[(rows,)](logits, log_sums, logits.stride(0), V, **keys)
    return log_sums
