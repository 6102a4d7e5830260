"""Muon (Jordan et al. 2024), which `--optimizer=muon` gives to the matrices of the blocks; AdamW
has all the rest.

    parts = matrices_of(model)                          # {weight: the rows of each matrix in it}
    Muon([{"params": named, "weight_decay": 0.1}], parts, lr=6e-4)

A step goes along U V^T, where U S V^T is the singular value decomposition of the mean gradient of
one matrix. A fused projection is several matrices, which a FusedLinear declares: its q, k, v, beta
and decay each step alone; with split="head" each head of q, k and v does. torch.optim.Muon takes a
parameter for one matrix, and orthogonalises in bfloat16 on a CPU, too.
"""

import functools
import itertools

import torch
import torch.nn as nn
from torch import Tensor

from gate import Gate
from ops.fast import at_least_float32
from ops.layers import FusedLinear
from runs.parallel import on_whole

# Jordan's and torch's: steep at 0, so that small singular values grow fast
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def matrices_of(
    model, with_gates: bool = True, split: str = "projection"
) -> dict[Tensor, list[int]]:
    """{weight of a linear layer in a block: the rows of each matrix in it}. Moonlight gives Muon
    the same ones (Liu et al. 2025): small ones such as beta's too, but no embedding, output layer,
    convolution or vector.

    with_gates=False leaves out the weights of gates, which some trainers keep in AdamW
    (modded-nanogpt, Marin). split="head" divides each part of a FusedLinear that has heads into one
    matrix a head; out_proj and the MLP stay whole.
    """
    left_out = set()
    for module in model.modules():
        if isinstance(module, Gate) and not with_gates:
            left_out.update(module.modules())
    parts = {}
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear) and module not in left_out:
            parts[module.weight] = getattr(module, "parts", [module.out_features])
            if split == "head" and isinstance(module, FusedLinear):
                parts[module.weight] = rows_of_heads(module)
    return parts


def rows_of_heads(linear: FusedLinear) -> list[int]:
    """The rows of each head of its parts; of a part without heads all."""
    rows = []
    for n, heads in zip(linear.parts, linear.heads, strict=True):
        rows += [n // heads] * heads
    return rows


def orthogonalised(matrix: Tensor) -> Tensor:
    """(n, m) -> about U V^T of its singular value decomposition, by five steps of a Newton-Schulz
    iteration; (N, n, m) -> that of each of N matrices.

    Singular values end between 0.7 and 1.2, and not at 1; lower where they were under 0.003 of the
    matrix's norm. In bfloat16 on a GPU, elsewhere in at least float32.
    """
    a, b, c = COEFFICIENTS
    add_product = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    x = matrix.bfloat16() if matrix.is_cuda else at_least_float32(matrix)
    n, m = x.shape[-2:]
    is_tall = n > m
    x = x.mT if is_tall else x  # the smaller of the two products
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    if matrix.is_cuda or max(n, m) < 2 * min(n, m):
        for _ in range(5):
            gram = x @ x.mT
            # (a + b gram + c gram^2) x
            x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    else:
        # takes half of the time where m = 4 n; in bfloat16 the powers of a Gram matrix would lose
        # small singular values
        eye = torch.eye(min(n, m), dtype=x.dtype, device=x.device)
        gram, factor = x @ x.mT, eye
        for _ in range(5):
            step = add_product(a * eye + b * gram, gram, gram, alpha=c)
            gram, factor = step @ gram @ step, step @ factor
        x = factor @ x
    return (x.mT if is_tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Each matrix W steps by W -= lr (0.2 sqrt(max(n, m)) orthogonalised(nesterov mean of
    gradients) + weight_decay W).

    The factor makes the RMS of the step's entries about 0.2, which is AdamW's: a rate and a weight
    decay of AdamW's serve Muon, too (Liu et al. 2025; "match_rms_adamw" of torch.optim.Muon).
    parts: see matrices_of; in_batches: see step_of_matrices.

    `found_inf`, which a caller may set as on a fused AdamW, is a tensor on the device: where it is
    1 a step changes nothing, and the host need not read it.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: list[dict],
        parts: dict[Tensor, list[int]],
        lr: float,
        momentum: float = 0.95,
        in_batches: bool = False,
    ):
        super().__init__(groups, dict(lr=lr, momentum=momentum, weight_decay=0.0))
        self.parts = parts
        self.in_batches = in_batches

    @torch.no_grad()
    def step(self, closure=None):
        skip = None if self.found_inf is None else self.found_inf != 0
        for group in self.param_groups:
            momentum = group["momentum"]
            lr = group["lr"]
            kept = 1 - lr * group["weight_decay"]  # of the weight
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                mean = state["momentum_buffer"].lerp(p.grad, 1 - momentum)
                given = dict(rows=self.parts[p], in_batches=self.in_batches)
                make_step = functools.partial(step_of_matrices, **given)
                step = on_whole(make_step, p.grad.lerp(mean, momentum))
                new = p * kept - lr * step
                if skip is not None:
                    mean = torch.where(skip, state["momentum_buffer"], mean)
                    new = torch.where(skip, p, new)
                state["momentum_buffer"].copy_(mean)
                p.copy_(new)


def step_of_matrices(weight: Tensor, rows: list[int], in_batches: bool = False) -> Tensor:
    """The step of a weight, at a learning rate of 1, each of its matrices by itself. rows: how many
    each has. in_batches: neighbours of equal shape are computed together, which is faster where
    they are small, and rounds differently."""
    steps = []
    start = 0
    for n, neighbours in itertools.groupby(rows):
        end = start + sum(neighbours)
        matrices = weight[start:end].unflatten(0, (-1, n))  # (N, n, m)
        scale = 0.2 * max(matrices.shape[1:]) ** 0.5
        if in_batches:
            steps.append(scale * orthogonalised(matrices))
        else:
            steps += [scale * orthogonalised(matrix)[None] for matrix in matrices]
        start = end
    return torch.cat([step.flatten(0, 1) for step in steps])
