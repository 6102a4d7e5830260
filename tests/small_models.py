"""What several test files do with small models. It imports torch alone, since test_fla.py needs it so."""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT
from runs.probe import names_of_gates, recording


@torch.no_grad()
def off_its_start(config, dtype=torch.float64, noise=0.1):
    """A model with noise on every weight, in evaluation: gates that begin at zero would hide mistakes."""
    torch.manual_seed(0)
    model = GPT(config).to(dtype).eval()
    for p in model.parameters():
        p.add_(torch.randn_like(p) * noise)
    return model


@torch.no_grad()
def logits_of_pieces(model, idx, lengths):
    """The logits of idx, read in pieces of these lengths with the state kept."""
    state, start, parts = model.init_state(len(idx), dtype=model.wte.weight.dtype), 0, []
    for length in lengths:
        x, state = model.features(idx[:, start : start + length], state, start)
        parts, start = [*parts, model.logits(x)], start + length
    return torch.cat(parts, dim=1)


def attention_flops(q, k, *args, **kwargs):
    """Two products of (T, D) and (D, S) for each head."""
    B, H, T, D = q.shape
    return 2 * 2 * B * H * T * k.shape[2] * D


def fft_flops(x, *args, out_val, **kwargs):
    """5 n log2(n) for n numbers, as is usual."""
    n = max(x.numel(), out_val.numel())
    return 5 * n * math.log2(max(2, n))


def flops_of():
    """{operation: its FLOPs as a function of its arguments}. torch's registry imports Triton, which test_fla.py must be
    the first to do: so it is imported here, when FLOPs are counted."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry | {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        torch.ops.aten._fft_r2c: fft_flops,
        torch.ops.aten._fft_c2r: fft_flops,
        torch.ops.aten._fft_c2c: fft_flops,
    }


class FlopCounter(TorchDispatchMode):
    """total: FLOPs of products, of attention and of FFTs, and one for each entry that all else makes."""

    def __init__(self):
        super().__init__()
        self.total, self.flops_of = 0, flops_of()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = operation(*args, **kwargs)
        if operation.overloadpacket in self.flops_of:
            self.total += self.flops_of[operation.overloadpacket](*args, **kwargs, out_val=output)
        elif isinstance(output, torch.Tensor) and not operation.is_view:
            self.total += output.numel()
        return output


@torch.no_grad()
def count_flops(call):
    """FLOPs of a call on a CPU."""
    with FlopCounter() as counter:
        call()
    return counter.total


@torch.no_grad()
def seen_of(mixer, x, stream=None):
    """What the meters see of a mixer that runs alone on x (B, T, C), in a block whose input is stream (None: x)."""
    names = {gate: path.removeprefix("gates.") for gate, path in names_of_gates(mixer).items()}
    with recording([mixer], names) as seen:
        mixer(x)
    seen.stream = x if stream is None else stream
    seen.residual = seen.stream + seen.y
    return seen
