"""What a model loses and gains when its gates are pruned, its closed heads are skipped, or its arithmetic has 8 bits.

    with pruned(model, 0.1) as counts:              # gate values under 0.1 are zero
        model(idx, targets)
    decoding_speed(model, prompt, 0.1)              # heads whose gate is under 0.1 are skipped: tokens/s
    with quantised(model):                          # weights and inputs have 8 bits
        model(idx, targets)

meters.py prints these beside what it measures in one forward pass of the model as it is; evaluate.py reads a split so.
"""

from configurator import UserError

import collections
import contextlib
import time
from collections.abc import Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F

from gate import ADDITIVE_ACTIVATIONS, Gate
from model import GPT, Mixer, Softmax

DECODED_TOKENS = 64


@contextlib.contextmanager
def pruned(model: GPT, threshold: float) -> Iterator[list[int]]:
    """A context in which gate values are zero if their absolute value is below the threshold.

    It yields the counts [zeroed, all], which grow as the model runs. Gates on the denominator and additive gates are
    left alone: a zero there closes nothing. If only some tokens have labels, the last layer computes and counts those.
    """
    counts, handles = [0, 0], []

    def prune(gate, args, output):
        closed = gate.value(gate.logits(args[1])).abs() < threshold
        counts[0] += int(closed.sum())
        counts[1] += closed.numel()
        return output.masked_fill(closed, 0.0)

    try:
        for gate in gates_to_prune(model):
            handles.append(gate.register_forward_hook(prune))
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def gates_to_prune(model: GPT) -> list[Gate]:
    """The gates that multiply, but for those on the denominator."""
    gates = [item for block in model.blocks for item in block.mixer.gates.items() if item[0] != "denominator"]
    return [gate for _, gate in gates if gate.activation not in ADDITIVE_ACTIVATIONS]


def share_of(counts: list[int]) -> float:
    """Of [some, all], rounded to four digits."""
    return float(f"{counts[0] / counts[1]:.4g}")


@contextlib.contextmanager
def closed_heads_skipped(model: GPT, threshold: float) -> Iterator[list[int]]:
    """A context in which decoding one sequence skips the cache of heads whose headwise gate is below the threshold.

    The result is that of `pruned`, at a lower cost. It yields the counts [skipped, all] of heads, which grow.
    Softmax layers only: a recurrent head has to write its state whether it is read or not.
    """
    counts, mixers, handles = [0, 0], [block.mixer for block in model.blocks if has_heads_to_skip(block.mixer)], []

    def skip(mixer):
        box = {}

        def of_input(mixer, args):
            box["x"] = args[0]

        def read(p, state, start):
            if p.q.shape[:2] != (1, 1):  # the prefill
                return Softmax.read(mixer, p, state, start)
            gate, q = mixer.gates["readout"], p.q.transpose(1, 2)  # (1, H, 1, D)
            k, v, mask = mixer.remember(p.k.transpose(1, 2), p.v.transpose(1, 2), state, start)
            heads = (gate.value(gate.logits(box["x"])).abs().flatten() >= threshold).nonzero().flatten()
            shared = heads // (mixer.n_head // k.shape[1])  # the key and value heads that these use
            o = torch.zeros_like(q)
            attention = nn.functional.scaled_dot_product_attention
            o[:, heads] = attention(q[:, heads], k[:, shared], v[:, shared], attn_mask=mask)
            counts[0] += mixer.n_head - len(heads)
            counts[1] += mixer.n_head
            return o.transpose(1, 2)

        handles.append(mixer.register_forward_pre_hook(of_input))
        mixer.read = read

    try:
        for mixer in mixers:
            skip(mixer)
        yield counts
    finally:
        for mixer, handle in zip(mixers, handles, strict=True):
            handle.remove()
            del mixer.read  # uncovers the method of the class


def has_heads_to_skip(mixer: Mixer) -> bool:
    gate = mixer.gates["readout"] if "readout" in mixer.gates else None
    is_headwise = gate is not None and gate.static is None and gate.shape == (mixer.n_head, 1)
    is_factor = is_headwise and gate.activation not in ADDITIVE_ACTIVATIONS
    return is_factor and type(mixer).read is Softmax.read and mixer.config.attention_softcap is None


def decoding_speed(model: GPT, prompt: torch.Tensor, threshold: float) -> dict:
    """Tokens/s of greedy decoding after prompt (1, T), as usual and with closed heads skipped; the share of those."""
    if not any(has_heads_to_skip(block.mixer) for block in model.blocks):
        raise UserError(f"skip_below={threshold}: no softmax layer has a headwise gate on its readout")

    def seconds():
        stream = model.stream(prompt, DECODED_TOKENS + 1, temperature=0)
        next(stream)  # reads the prompt
        started = time.perf_counter()
        int(collections.deque(stream, maxlen=1)[0])  # int() waits until a GPU has drawn the last id
        return time.perf_counter() - started

    usual, fewer = [], []
    with closed_heads_skipped(model, threshold) as counts:
        seconds()
        share = share_of(counts)
    for _ in range(3):  # in turns: a noisy neighbour disturbs both
        usual.append(seconds())
        with closed_heads_skipped(model, threshold):
            fewer.append(seconds())
    speeds = {"tokens_per_second": DECODED_TOKENS / min(usual), "skipping": DECODED_TOKENS / min(fewer)}
    return {"threshold": threshold, "heads_skipped": share} | speeds


@contextlib.contextmanager
def quantised(model: GPT) -> Iterator[None]:
    """Inside, every nn.Linear of the blocks rounds its weight and its input, as 8-bit arithmetic would.

    Both are rounded to 255 levels, symmetric around zero: weights with one scale per row, inputs with one per tensor,
    from the largest |x| of the batch. The embedding, which is also the output layer, stays as it is. A weight is
    rounded when it is used, so that this takes the memory of one more weight and not of one more model.
    """

    def round_to_8_bits(x, largest):
        scale = largest.clamp(min=1e-30) / 127
        return (x / scale).round() * scale

    def rounded(linear):
        def forward(x):
            weight = round_to_8_bits(linear.weight, linear.weight.abs().amax(1, keepdim=True))
            return F.linear(round_to_8_bits(x, x.abs().max()), weight, linear.bias)

        return forward

    linears = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
    try:
        for linear in linears:
            vars(linear)["forward"] = rounded(linear)
        yield
    finally:
        for linear in linears:
            vars(linear).pop("forward", None)
