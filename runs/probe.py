"""Looks inside a model as it runs, by hooks that live as long as one call: a layer's meters, the
first bad tensor.

What each meter means is in docs/meters.md; meters.py prints them for a checkpoint, and train.py
logs the cheap ones.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from statistics import fmean, pstdev
from typing import Any

import torch

from configurator import UserError
from data.shards import Dataset
from gate import Gate
from mixer import DENOMINATOR_MIN
from model import GPT, Softmax
from ops import IGNORE
from ops.fast import at_least_float32
from runs.hardware import autocast
from runs.parallel import all_finite
from runs.recorder import Seen, all_gates, names_of_gates, recording, some_rows

BINS = 20  # bins of width 0.05 from 0 to 1; one more bin holds the values above 1
COLLAPSE = 0.05
INDUCTION_ROWS = 4
# what query_meters measures
BY_QUERY = ("share", "to_sink", "token_0_before", "token_0_after", "effective", "effective_uniform")
# entries of the weights that the sink meter holds at once, at least a row's
WEIGHTS_AT_ONCE = 1 << 22
TRAINING_TOKENS = 16384  # that the meters in the training log look at, in at least four rows
TRAINING_LENGTH = 2048  # of each row, at most: the weights of more would take GBs
SPIKE_WINDOW, SPIKE_AT_LEAST, SPIKE_DEVIATIONS = 100, 20, 5


@torch.no_grad()
def probe(
    model: GPT, inputs: torch.Tensor, measure: Callable[[Seen], Any], dtype: str = "float32"
) -> list:
    """Runs the model on inputs (B, T) and calls measure(seen) after each block. Returns the results
    by layer.

    A gate that is in no block, but runs before one, is seen in that layer. The model is left
    without hooks.
    """
    results, was_training = [], model.training
    names = {block: names_of_gates(model, block) for block in model.blocks}

    def of_block(block, args, output):
        stream, y = args[0], notes.y
        check_stream(stream, inputs, model.config.n_embd)
        scale = 1 / at_least_float32(stream).norm(dim=-1, keepdim=True).clamp(min=1e-30)
        gates: dict = {
            name: [call for call in notes.calls if call.gate is gate]
            for gate, name in names[block].items()
        }
        seen = Seen(
            block.mixer, notes.x, y, notes.projection, notes.o, notes.readout,
            gates={name: calls for name, calls in gates.items() if calls},
            stream=stream, residual=output, scale=scale,
        )  # fmt: skip
        notes.clear()
        results.append(measure(seen))

    with contextlib.ExitStack() as stack:
        stack.callback(model.train, was_training)
        model.eval()
        notes = stack.enter_context(
            recording([block.mixer for block in model.blocks], all_gates(model))
        )
        for block in model.blocks:
            # before FSDP's own, which lets go of the block's weights
            stack.enter_context(block.register_forward_hook(of_block, prepend=True))
        with autocast(inputs.device.type, dtype):
            model.features(inputs)
    return results


def check_stream(stream: torch.Tensor, inputs: torch.Tensor, n_embd: int) -> None:
    """Raises UserError where an edit has given blocks another hidden state than (B, T, C), which
    meters read."""
    expected = (*inputs.shape, n_embd)
    if tuple(stream.shape) != expected:
        raise UserError(
            f"meters: the hidden state of a block is {tuple(stream.shape)}, and they read one of (batch, tokens, "
            f"n_embd), {expected}; train with --meters=false"
        )


def numbers(x: torch.Tensor | list | float):
    """A tensor, list or number, rounded to four digits, as lists and numbers; not finite: None, as
    JSON has no NaN."""
    if isinstance(x, torch.Tensor):
        return numbers(x.tolist())
    if isinstance(x, list):
        return [numbers(item) for item in x]
    return float(f"{x:.4g}") if math.isfinite(x) else None


def first_rows(dataset: Dataset, split: str, rows: int, block_size: int) -> tuple:
    """The first batch of the split, (inputs, targets, slice): whole windows of a text, or rows of
    one slice."""
    if dataset.kind == "stream":
        block_size = min(block_size, dataset.counts(split)["tokens"] - 1)
    inputs, targets, name = next(dataset.eval_batches(split, rows, block_size))
    # padding is no text
    whole = targets[:, -1] != IGNORE if dataset.kind == "stream" else slice(None)
    return inputs[whole], targets[whole], name


def gate_meter(gate: Gate, g: torch.Tensor) -> dict:
    """g (..., heads, width) -> the distribution of the gate's values, one entry per head (shared,
    scalar: one)."""
    values = gate.value(g).float().abs()
    start = float(gate.value(g.new_zeros(1)).abs())
    heads = values.movedim(-2, 0).flatten(1)  # (heads, values)
    bins = (heads * BINS).clamp(max=BINS).long() - (heads == 1).long()
    counts = torch.stack([row.bincount(minlength=BINS + 1) for row in bins])
    near = (
        f"all within {COLLAPSE} of {start:g}" if (heads - start).abs().max() <= COLLAPSE else None
    )
    return {
        "mean": numbers(heads.mean(1)),
        "below_0.1": numbers((heads < 0.1).float().mean(1)),
        "above_0.9": numbers((heads > 0.9).float().mean(1)),
        "histogram": numbers(counts / heads.shape[1]),
        "collapsed": f"all under {COLLAPSE}" if heads.max() < COLLAPSE else near,
    }


def gate_meters(seen: Seen, mask: torch.Tensor | None = None) -> dict[str, dict]:
    """{name: the meter of a gate}, at the tokens of the mask (B, T), which has some; None: at
    all."""
    meters = {}
    for name, calls in seen.gates.items():
        logits = [call.g for call in calls]  # (B, T, heads, width) each
        if mask is not None:
            # a token may have several, as the sub-tokens of deltaproduct
            logits = [
                g.unflatten(1, (mask.shape[1], -1))[mask]
                for g in logits
                if g.shape[1] % mask.shape[1] == 0
            ]
        if logits:
            meters[name] = gate_meter(calls[0].gate, torch.cat([g.flatten(0, -3) for g in logits]))
    return meters


def head_gates(seen: Seen) -> torch.Tensor | None:
    """(B, T, H), the mean size of the gate on a head's readout; None if none multiplies it."""
    call = seen.last_call("readout") or seen.last_call("native")
    if call is None or not call.gate.is_factor:
        return None
    return call.value().abs().mean(-1).expand(-1, -1, seen.mixer.n_head)


def collapsed_gates(layers: list[dict]) -> list[str]:
    gates = [
        (i, position, gate)
        for i, layer in enumerate(layers)
        for position, gate in layer["gates"].items()
    ]
    return [
        f"layer {i}, {position}: {gate['collapsed']}"
        for i, position, gate in gates
        if gate["collapsed"]
    ]


def baseline(T: int) -> float:
    """The sink of uniform weights: the mean of 1/(i+1) over queries i = 1..T-1."""
    return fmean(1 / (i + 1) for i in range(1, T)) if T > 1 else math.nan


def query_masks(inputs: torch.Tensor, kinds: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """{kind: (B, T) bool}: the queries behind token 0 whose token is in the kind's list; "other":
    those in none."""
    if not kinds:
        return {}
    masks = {
        name: torch.isin(inputs, torch.tensor(ids, device=inputs.device))
        for name, ids in kinds.items()
    }
    masks["other"] = ~torch.stack(list(masks.values())).any(0)
    is_query = torch.arange(inputs.shape[1], device=inputs.device) > 0
    return {name: mask & is_query for name, mask in masks.items()}


def sink_meter(seen: Seen, masks: dict[str, torch.Tensor]) -> dict:
    """What the queries 1..T-1 get from token 0, as docs/meters.md defines it: numbers per head.

    masks: {kind: (B, T) bool}, the queries that are measured apart; their gates, too. Without
    weights every number is None, but for "uniform".
    """
    mixer, x = seen.mixer, seen.x
    (B, T), H = x.shape[:2], mixer.n_head
    parts = [dict.fromkeys(BY_QUERY, x.new_full((B, H, T), math.nan))]
    if seen.has_weights:
        rows = max(1, WEIGHTS_AT_ONCE // (H * T * T))
        parts = [query_meters(some_rows(seen, slice(i, i + rows))) for i in range(0, B, rows)]
    # (B, H, T - 1) each
    by_query = {name: torch.cat([part[name] for part in parts])[..., 1:] for name in BY_QUERY}
    by_query["uniform"] = (1 / torch.arange(2, T + 1, device=x.device)).expand(B, 1, -1)

    def means(mask):  # (B, T - 1)
        return {
            name: numbers(values.transpose(1, 2)[mask].mean(0)) for name, values in by_query.items()
        }

    def means_apart(mask):  # (B, T)
        gates = gate_meters(seen, mask) if mask.any() else {}
        return means(mask[:, 1:]) | {"queries": int(mask[:, 1:].sum()), "gates": gates}

    everything, norms = means(torch.ones(B, T - 1, dtype=torch.bool, device=x.device)), [None] * H
    if seen.has_weights and T > 1:  # of token 0's value, over the median of the other tokens'
        of_values = values_of(seen).norm(dim=-1)  # (B, T, H)
        norms = numbers(
            (of_values[:, 0] / of_values[:, 1:].median(1).values.clamp(min=1e-30)).mean(0)
        )
    # what the sink is a share of: docs/meters.md
    kind = (
        "weights"
        if isinstance(mixer, Softmax)
        else "share"
        if mixer.has_positive_weights
        else "proxy"
    )
    return everything | {
        "kind": kind if seen.has_weights else "none",
        "value_norm": norms,
        "kinds": {name: means_apart(mask) for name, mask in masks.items()},
    }


def readout_of(seen: Seen) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `read` returned, as (the readout (B, T, H, D), its denominator (B, T, H, 1) behind a
    gate on it or None)."""
    if seen.mixer.norm_kind != "denominator":
        return seen.o, None
    o, denominator = seen.o.split([seen.o.shape[-1] - 1, 1], dim=-1)
    call = seen.last_call("denominator")
    return o, (denominator if call is None else call.output).clamp(min=DENOMINATOR_MIN)


def weights_of(seen: Seen) -> torch.Tensor:
    """(B, H, T, T): each value's weight in each readout, before RMSNorm and gates. UserError
    without any."""
    if not seen.has_weights:
        raise UserError(
            f"{type(seen.mixer).__name__}: its readout is its own, so explicit_weights must be, too"
        )
    weights, (_, denominator) = seen.mixer.explicit_weights(seen.projection), readout_of(seen)
    return weights if denominator is None else weights / denominator.transpose(1, 2)


def query_meters(seen: Seen) -> dict[str, torch.Tensor]:
    """What each query gets from token 0: {name of BY_QUERY: (B, H, T)}."""
    weights, v = weights_of(seen), values_of(seen)  # (B, H, T, T); (B, T, H, D)
    size, factor = weights.abs(), readout_factor(seen)  # factor (B, T, H, D)

    def token_0_share(factor):
        # |w_ij (f_i * v_j)|^2 = w_ij^2 (f_i^2 . v_j^2)
        # (B, H, T, T)
        parts = size * (factor.square().transpose(1, 2) @ v.square().permute(0, 2, 3, 1)).sqrt()
        return parts[..., 0] / parts.sum(-1).clamp(min=1e-30)

    reach = written_by_heads(seen, factor * v[:, :1])  # with a weight of one on token 0
    # softmax weights and the sink's sum to one; without a sink nobody asks what it gets
    to_sink = (
        torch.full_like(size[..., 0], math.nan)
        if seen.projection.sink is None
        else 1 - size.sum(-1)
    )
    return {
        "share": size[..., 0] / (size.sum(-1) + to_sink.nan_to_num()).clamp(min=1e-30),
        "to_sink": to_sink,
        "token_0_before": token_0_share(torch.ones_like(factor)),
        "token_0_after": token_0_share(factor),
        "effective": size[..., 0] * reach,
        "effective_uniform": reach / torch.arange(1, v.shape[1] + 1, device=v.device),
    }


def written_by_heads(seen: Seen, o: torch.Tensor) -> torch.Tensor:
    """o (B, T, H, D), as out_proj gets it -> (B, H, T): the norm of what each head writes, over
    that of the stream."""
    out = seen.mixer.out_proj.weight.unflatten(1, (seen.mixer.n_head, -1)).to(o.dtype)  # (C, H, D)
    written, call = torch.einsum("bihd,chd->bihc", o, out), seen.last_call("output")
    if call is not None and call.gate.is_factor:
        written = written * call.value()
    return (written * seen.scale[:, :, None]).norm(dim=-1).transpose(1, 2)


def values_of(seen: Seen) -> torch.Tensor:
    """v (B, T, H, D) in at least float32, repeated where several heads share it."""
    v = seen.projection.v
    return at_least_float32(v).repeat_interleave(seen.mixer.n_head // v.shape[2], dim=2)


def readout_factor(seen: Seen) -> torch.Tensor:
    """(B, T, H, D): what the pass multiplied the readout by, entry by entry, up to out_proj: its
    norm, its activation, its gates and its scale, but not what a gate added."""

    def ratio(after, before):
        return torch.where(before == 0, 0.0, at_least_float32(after) / at_least_float32(before))

    (o, denominator), skip = readout_of(seen), seen.projection.skip
    o = o if denominator is None else o / denominator
    o = o if skip is None else o + skip
    calls, factor = {call.gate: call for of_gate in seen.gates.values() for call in of_gate}, 1.0
    for gate in (*seen.mixer.before_norm, *seen.mixer.after_norm):
        factor = factor * ratio(calls[gate].y, o)
        if gate.is_factor:
            factor = factor * calls[gate].value()
        o = calls[gate].output
    return factor * ratio(seen.readout.view_as(o), o)


@torch.no_grad()
def induction_meters(model: GPT, inputs: torch.Tensor, dtype: str) -> list[list]:
    """The induction score of each head, by layer: how much a head looks at what followed the same
    token before.

    Four rows of two equal halves are drawn from the tokens of inputs (B, T), alike in each call.
    The score is the share of its weights that a query of the second half gives to the token behind
    its own in the first, mean over queries and rows (Olsson et al. 2022). It is None for the heads
    of a mixer that has no weights.
    """
    half = inputs.shape[1] // 2
    drawn = torch.randint(
        inputs.numel(), (INDUCTION_ROWS, half), generator=torch.Generator().manual_seed(0)
    )
    rows = inputs.flatten()[drawn.to(inputs.device)].repeat(1, 2)  # (4, 2 half)

    def measure(seen):
        if not seen.has_weights:
            return [None] * seen.mixer.n_head
        shares = []
        for row in range(len(seen.x)):  # the weights of one row at a time
            # (1, H, 2 half, 2 half)
            weights = weights_of(some_rows(seen, slice(row, row + 1))).abs()
            share = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
            shares.append(share.diagonal(1 - half, 2, 3)[..., 1:])  # queries half, half + 1, ...
        return numbers(torch.cat(shares).mean((0, 2)))

    return (
        probe(model, rows, measure, dtype)
        if half
        else [[None] * block.mixer.n_head for block in model.blocks]
    )


def layer_meters(
    model: GPT, inputs: torch.Tensor, masks: dict[str, torch.Tensor], dtype: str
) -> list[dict]:
    """[{meter: its numbers}], one dict per layer; inputs (B, T), masks as query_masks gives
    them."""

    def measure(seen):
        y, stream = (part.float().norm(dim=-1) for part in (seen.y, seen.stream))
        size = seen.residual.float().abs()  # (B, T, C)
        row, position, channel = (int(i) for i in torch.unravel_index(size.argmax(), size.shape))
        largest, median = float(size.max()), float(size.median())
        where = {
            "row": row,
            "position": position,
            "token": int(inputs[row, position]),
            "channel": channel,
        }
        return {
            "gates": gate_meters(seen),
            "sink": sink_meter(seen, masks),
            "branch": numbers((y / stream.clamp(min=1e-30)).mean().item()),
            "residual": {
                "max": numbers(largest),
                "max_over_median": numbers(largest / max(median, 1e-30)),
            }
            | where,
        }

    names = [name for name, _ in model.config.layers()]
    layers = zip(
        names,
        probe(model, inputs, measure, dtype),
        induction_meters(model, inputs, dtype),
        strict=True,
    )
    return [{"mixer": name} | meters | {"induction": heads} for name, meters, heads in layers]


@torch.no_grad()
def losses_by_kind(
    model: GPT, inputs: torch.Tensor, targets: torch.Tensor, masks: dict, dtype: str
) -> dict:
    """{kind: nats a label, of the labels at its queries}; None where it has none."""
    losses, was_training = {}, model.training
    model.eval()
    with autocast(inputs.device.type, dtype):
        for name, mask in masks.items():
            labels = targets.masked_fill(~mask, IGNORE)
            loss = model(inputs, labels).item() if (labels != IGNORE).any() else math.nan
            losses[name] = loss if math.isfinite(loss) else None
    model.train(was_training)
    return losses


def training_meters(model: GPT, dataset: Dataset, block_size: int, dtype: str) -> dict:
    """The `summary` of one forward pass on the first rows of the validation split, for a line of
    metrics.jsonl."""
    rows, device = (
        max(4, TRAINING_TOKENS // dataset.longest("val", block_size)),
        model.wte.weight.device,
    )
    inputs, targets = (
        x[:, :TRAINING_LENGTH].to(device) for x in first_rows(dataset, "val", rows, block_size)[:2]
    )
    masks = query_masks(inputs, dataset.kinds)
    layers = layer_meters(model, inputs, masks, dtype)
    meters = summary(layers, inputs.shape[1])
    for name, loss in losses_by_kind(model, inputs, targets, masks, dtype).items():
        meters["kinds"][name]["loss"] = loss
    return meters | {"induction": [layer["induction"] for layer in layers]}


def summary(layers: list[dict], T: int) -> dict:
    """Means of gates (by position) and sinks over layers and heads, the largest activation, the
    collapsed gates."""
    sinks, residuals = [layer["sink"] for layer in layers], [layer["residual"] for layer in layers]
    kinds: dict = {}
    for name in sinks[0]["kinds"]:
        of_kind = [sink["kinds"][name] for sink in sinks]
        kinds[name] = {number: mean_of(of_kind, number) for number in (*BY_QUERY, "uniform")}
        kinds[name]["gate_mean"] = mean_by_position(of_kind, "mean")
    return {
        "gate_mean": mean_by_position(layers, "mean"),
        "gate_below_0.1": mean_by_position(layers, "below_0.1"),
        "sink": mean_of(sinks, "share"),
        "to_sink": mean_of(sinks, "to_sink"),
        "sink_baseline": numbers(baseline(T)),
        "effective_sink": mean_of(sinks, "effective"),
        "value_norm": mean_of(sinks, "value_norm"),
        "branch": [layer["branch"] for layer in layers],
        "max_activation": maximum(residual["max"] for residual in residuals),
        "max_over_median": maximum(residual["max_over_median"] for residual in residuals),
        "collapsed": collapsed_gates(layers),
        "kinds": kinds,
    }


def mean_by_position(layers: list[dict], name: str) -> dict[str, float | None]:
    """{position: mean of a number of its gates over layers and heads}"""
    gates = [of_position for layer in layers for of_position in layer["gates"].items()]
    return {place: mean_of([gate for at, gate in gates if at == place], name) for place, _ in gates}


def mean_of(meters: list[dict], name: str) -> float | None:
    """Over layers and heads."""
    return mean(x for meter in meters for x in meter[name])


def mean(values: Iterable[float | None]) -> float | None:
    values = [x for x in values if x is not None]  # no gate, or a number that is not finite
    return numbers(fmean(values)) if values else None


def maximum(values: Iterable[float | None]) -> float | None:
    values = list(values)
    return None if None in values else max(values)


def is_spike(loss: float, earlier: list[float]) -> bool:
    """Whether loss is over 5 standard deviations above the mean of the last 100 logged losses (at
    least 20)."""
    window = earlier[-SPIKE_WINDOW:]
    return len(window) >= SPIKE_AT_LEAST and loss > fmean(window) + SPIKE_DEVIATIONS * pstdev(
        window
    )


def bad_weight(model: torch.nn.Module) -> str | None:
    return next((name for name, p in model.named_parameters() if not all_finite(p)), None)


def first_bad_tensor(model: torch.nn.Module, losses: Iterable[torch.Tensor]) -> str | None:
    """Names the first bad weight, output of a module or gradient, or returns None if all are
    finite.

    losses: an iterator whose every item is a loss, computed when it is asked for: of a sharded
    model all of them, since the other processes wait for this one in each. The gradients stay in
    the model.
    """
    if name := bad_weight(model):
        return name
    bad = []

    def look_at(name, module, inputs, output):
        output = output[0] if isinstance(output, tuple) else output
        if not output.isfinite().all():
            bad.append(f"output of {name or 'the model'}")

    hooks = [
        m.register_forward_hook(functools.partial(look_at, name))
        for name, m in model.named_modules()
    ]
    for loss in losses:
        loss.backward()
        # the backward pass comes to the last layer first
        gradients = (
            (name, p.grad)
            for name, p in reversed(list(model.named_parameters()))
            if p.grad is not None
        )
        bad += [f"gradient of {name}" for name, gradient in gradients if not all_finite(gradient)]
    for hook in hooks:
        hook.remove()
    return next(iter(bad), None)
