"""Measures the gates of a checkpoint and what they do: sinks, activations, pruning, 8-bit arithmetic.

    python meters.py --checkpoint=out/best.pt                    a table, and out/meters.json
    python meters.py --checkpoint=out/best.pt --maps=0.1,3.0     maps of layer.head 0.1 and 3.0
    python meters.py --checkpoint=early/ckpt.pt,late/ckpt.pt     several checkpoints, to compare
    python meters.py --checkpoint=A,B --published=true           layer by layer, for models of any size
    python plot.py out                                           draws out/meters.json: out/page.png

It prints a table and, as the last line, one JSON object of means; the file has every layer, head
and map. All meters read the same first rows of the split, in the run's dtype:

    gate        the factor on y (an additive gate: what it adds to y), per layer, position and head,
                as an absolute value. A gate has collapsed if every value is within 0.05 of its
                value at g = 0 (0.5 for a sigmoid), or below 0.05
    sink        share of key 0 in the weights of queries 1..T-1, |w_i0| / sum_j |w_ij|, mean over
                queries and rows. softmax and cosformer: their own weights. Other mixers: a proxy,
                the weights that the recurrence implies, which have both signs (mean_weight keeps
                the sign). Baseline: uniform weights, the mean of 1/(i+1) over the same queries
    token_0     norm of token 0's part of a head's readout over the sum of the norms of all tokens'
                parts, mean over the same queries, before norm and gates and as the output
                projection gets it. A gate with one number per head cannot change it
    effective   effective sink, |W_o (g_i * w_i0 v_0)| / |x_i|: the norm of what a head writes of
                token 0 over that of the residual stream it is added to; * is the gate and all else
                that multiplies the readout. Beside it the same with uniform weights, 1/(i+1)
    value_norm  |v_0| over the median of the other tokens' |v|
    rank        effective rank (Roy & Vetterli 2007), exp of the entropy of the normalised singular
                values: of each head's readout (tokens x width) before the gate and as the output
                projection gets it, and of W_v W_o
    branch      |y| / |x|, the norm of the mixer's output over that of the residual stream it is added
                to, mean over tokens
    residual    largest |h| after a block, its ratio to the median |h|, and where it is
    pruning     loss with the gate values below a threshold set to zero
    decoding    with --skip_below: tokens/s, with and without the softmax heads that a headwise
                gate closes
    quantised   loss with 8-bit weights and inputs in every linear layer of the blocks

A data set may name kinds of query, as data/backcopy does: a list of tokens each. Sink, token_0,
effective, gates and loss are then measured for each kind apart, and for all other queries.
--queries=REGEX makes a kind of the queries whose token's text matches: '\\s+' is white space.

What pruning, skipping and 8 bits do is in study/interventions.py; published=true, in
study/layerwise.py, measures the numbers of Qiu et al. alone, with the memory of one layer.

Sinks grow with training, and tiny models may have none. heads_above is the share of heads whose
sink is above 0.3 on the first 64 tokens (Gu et al. 2024).
"""

import configurator
from configurator import UserError, key

import dataclasses
import itertools
import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from data.shards import Dataset, open_dataset
from data.tokenizer import tokenizer_of
from gate import ADDITIVE_ACTIVATIONS, Gate
from model import GPT, Mixer, Softmax
from ops import IGNORE
from ops.recurrence import at_least_float32
from runs import memory
from runs.checkpoint import check_vocabulary, load_model, open_model
from runs.files import check_output, write_output
from runs.hardware import DTYPES, Processes, autocast
from study import layerwise
from study.interventions import DECODED_TOKENS, decoding_speed, loss_of, pruning_curve, quantised

BINS = 20  # bins of width 0.05 from 0 to 1; one more bin holds the values above 1
COLLAPSE = 0.05
SINK_HEAD = 0.3
SINK_TOKENS = 64  # of Gu et al.'s count of heads
MAP_TOKENS = 64
SINK_KINDS = {
    "weights": "softmax weights",
    "share": "cosFormer's own weights, as a share",
    "proxy": "a proxy, the absolute share of the weights the recurrence implies",
}
GATE_COLUMNS = {"mean": "6.3f", "below_0.1": "6.1%", "above_0.9": "6.1%"}  # columns of the table, and their formats
WEIGHTS_AT_ONCE = 1 << 22  # entries of the weights that the sink meter holds at once, at least a row's
TRAINING_TOKENS = 16384  # that the meters in the training log look at, in at least four rows
SPIKE_WINDOW, SPIKE_AT_LEAST, SPIKE_DEVIATIONS = 100, 20, 5

# ----------------------------------------------------------------------------------------------------------------------
# Looking inside


@torch.no_grad()
def probe(model: GPT, inputs: torch.Tensor, measure: Callable, dtype: str = "float32") -> list:
    """Runs the model on inputs (B, T) and calls measure(block, seen) after each block. Returns the results by layer.

    seen: stream and x (B, T, C), the inputs of the block and of its mixer; y (B, T, C), the mixer's output; residual
    (B, T, C), the block's output; before and after (B, T, H, D), the readout as its first gate gets it and as the
    output projection gets it. The model is left as it was, without hooks.
    """
    seen, results, handles, was_training = {}, [], [], model.training

    def of_gate(gate, args, output):
        seen.setdefault("before", args[0])

    def of_projection(projection, args, output):
        seen["after"] = args[0]

    def of_mixer(mixer, args, output):
        seen["x"], seen["y"] = args[0], output[0]

    def of_block(block, args, output):
        seen["after"] = seen["after"].unflatten(-1, (block.mixer.n_head, -1))
        seen.setdefault("before", seen["after"])  # no gate
        results.append(measure(block, seen | {"stream": args[0], "residual": output[0]}))
        seen.clear()

    try:
        model.eval()
        for block in model.blocks:
            gates = block.mixer.gates
            handles += [gates[name].register_forward_hook(of_gate) for name in ("native", "readout") if name in gates]
            handles.append(block.mixer.out_proj.register_forward_hook(of_projection))
            handles.append(block.mixer.register_forward_hook(of_mixer))
            handles.append(block.register_forward_hook(of_block))
        with autocast(inputs.device.type, dtype):
            model.features(inputs)
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    return results


def numbers(x: torch.Tensor | list | float):
    """A tensor, list or number, rounded to four digits, as lists and numbers; not finite: None, as JSON has no NaN."""
    if isinstance(x, torch.Tensor):
        return numbers(x.tolist())
    if isinstance(x, list):
        return [numbers(item) for item in x]
    return float(f"{x:.4g}") if math.isfinite(x) else None


# ----------------------------------------------------------------------------------------------------------------------
# The meters of a layer


def gate_meter(gate: Gate, x: torch.Tensor) -> dict:
    """x (..., C) -> the distribution of the gate's values, one entry per head (shared, scalar: one in all)."""
    values = gate.value(gate.logits(x)).float().abs()  # (..., heads or 1, width or 1)
    start = float(gate.value(x.new_zeros(1)).abs())
    heads = values.movedim(-2, 0).flatten(1)  # (heads, values)
    bins = (heads * BINS).clamp(max=BINS).long()
    counts = torch.stack([row.bincount(minlength=BINS + 1) for row in bins])
    collapsed = None
    if heads.max() < COLLAPSE:
        collapsed = f"all under {COLLAPSE}"
    elif (heads - start).abs().max() <= COLLAPSE:
        collapsed = f"all within {COLLAPSE} of {start:g}"
    return {
        "values": "addend" if gate.activation in ADDITIVE_ACTIVATIONS else "factor",
        "mean": numbers(heads.mean(1)),
        "std": numbers(heads.std(1, correction=0)),
        "below_0.1": numbers((heads < 0.1).float().mean(1)),
        "above_0.9": numbers((heads > 0.9).float().mean(1)),
        "histogram": numbers(counts / heads.shape[1]),
        "collapsed": collapsed,
    }


def gate_meters(mixer: Mixer, x: torch.Tensor) -> dict[str, dict]:
    """{position: the meter of its gate}, over the tokens of x (..., C)."""
    return {position: gate_meter(gate, x) for position, gate in mixer.gates.items()}


def baseline(T: int) -> float:
    """The sink of uniform weights: the mean of 1/(i+1) over queries i = 1..T-1."""
    return statistics.fmean(1 / (i + 1) for i in range(1, T)) if T > 1 else math.nan


def sink_meter(mixer: Mixer, seen: dict, kinds: dict[str, torch.Tensor]) -> dict:
    """What the queries 1..T-1 get from token 0, as the docstring of this file defines it: numbers per head.

    kinds: {name: (B, T) bool}, the queries that are measured apart; their gates, too.
    """
    x, stream = seen["x"], seen["stream"]
    B, T = x.shape[:2]
    rows = rows_at_once(mixer, T)  # the weights of every head are large
    parts = [query_meters(mixer, *part) for part in zip(x.split(rows), stream.split(rows), strict=True)]
    by_query = {name: torch.cat([part[name] for part in parts])[..., 1:] for name in parts[0]}  # (B, H, T - 1) each
    by_query["uniform"] = (1 / torch.arange(2, T + 1, device=x.device)).expand(B, 1, -1)

    def means(mask):  # (B, T - 1)
        return {name: numbers(values.transpose(1, 2)[mask].mean(0)) for name, values in by_query.items()}

    everything = means(torch.ones(B, T - 1, dtype=torch.bool, device=x.device))
    early = by_query["share"][..., : SINK_TOKENS - 1].mean((0, 2))  # (H,)
    norms = values_of(mixer, x).norm(dim=-1)  # (B, T, H)
    others = norms[:, 1:].median(1).values if T > 1 else torch.full_like(norms[:, 0], math.nan)
    return everything | {
        "kind": "weights" if isinstance(mixer, Softmax) else "share" if mixer.has_nonnegative_weights else "proxy",
        "heads_above": numbers((early > SINK_HEAD).float().mean().item()),
        "value_norm": numbers((norms[:, 0] / others.clamp(min=1e-30)).mean(0)),
        "key_norm": key_norms(mixer, x),
        "kinds": {
            name: means(mask[:, 1:])
            | {"queries": int(mask[:, 1:].sum()), "gates": gate_meters(mixer, x[mask]) if mask.any() else {}}
            for name, mask in kinds.items()
        },
    }


def rows_at_once(mixer: Mixer, T: int) -> int:
    return max(1, WEIGHTS_AT_ONCE // max(1, mixer.n_head * T * T))


def query_meters(mixer: Mixer, x: torch.Tensor, stream: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each query gets from token 0 in the rows x, stream (B, T, C): {name: (B, H, T)}."""
    weights, v = mixer.weights(x), values_of(mixer, x)  # (B, H, T, T); (B, T, H, D)
    size = weights.abs()
    o = torch.einsum("bhij,bjhd->bihd", weights.to(v.dtype), v)
    skip = mixer.gated_projection(x, None, 0).skip
    factor = readout_factor(mixer, x, o if skip is None else o + skip)  # (B, T, H, D)

    def token_0_share(factor):
        # |w_ij (f_i * v_j)|^2 = w_ij^2 (f_i^2 . v_j^2)
        parts = size * (factor.square().transpose(1, 2) @ v.square().permute(0, 2, 3, 1)).sqrt()  # (B, H, T, T)
        return parts[..., 0] / parts.sum(-1).clamp(min=1e-30)

    out = mixer.out_proj.weight.unflatten(1, (mixer.n_head, -1)).to(v.dtype)  # (C, H, D)
    written = torch.einsum("bihd,chd->bihc", factor * v[:, :1], out)  # by a weight of one on token 0
    if "output" in mixer.gates and mixer.gates["output"].activation not in ADDITIVE_ACTIVATIONS:
        written = written * mixer.gates["output"].value(mixer.gates["output"].logits(x))
    reach = written.norm(dim=-1) / stream.to(v.dtype).norm(dim=-1, keepdim=True).clamp(min=1e-30)  # (B, T, H)
    reach = reach.transpose(1, 2)
    return {
        "share": size[..., 0] / size.sum(-1).clamp(min=1e-30),
        "mean_weight": weights[..., 0],
        "token_0_before": token_0_share(torch.ones_like(factor)),
        "token_0_after": token_0_share(factor),
        "effective": size[..., 0] * reach,
        "effective_uniform": reach / torch.arange(1, x.shape[1] + 1, device=x.device),
    }


def values_of(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    """v (B, T, H, D) in at least float32, repeated where several heads share it."""
    v = mixer.gated_projection(x, None, 0).v
    return at_least_float32(v).repeat_interleave(mixer.n_head // v.shape[2], dim=2)


def readout_factor(mixer: Mixer, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """What norm, activation, gates and scale multiply the readout o (B, T, H, D) by, entry by entry; no addends."""
    factor = torch.ones_like(o)
    for step in mixer.readout_steps:
        if step in mixer.gates:
            gate = mixer.gates[step]
            if gate.activation not in ADDITIVE_ACTIVATIONS:
                factor = factor * gate.value(gate.logits(x))
            o = gate(o, x)
        else:
            after = mixer.readout_step(step, o, x)
            factor = factor * torch.where(o == 0, 0.0, after / o)
            o = after
    return factor


def key_norms(mixer: Mixer, x: torch.Tensor) -> list[list]:
    """[[first position, mean norm of its keys], ...] for the positions 0, 1, 2-3, 4-7, ..."""
    norms = mixer.gated_projection(x, None, 0).k.float().norm(dim=-1).mean((0, 2))  # (T,)
    starts = [0] + [1 << i for i in range((len(norms) - 1).bit_length())]
    parts = zip(starts, [*starts[1:], len(norms)], strict=True)
    return [[start, numbers(norms[start:end].mean().item())] for start, end in parts]


def kinds_of(inputs: torch.Tensor, kinds: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """{kind: (B, T) bool}: the queries behind token 0 whose token is in the kind's list; "other": those in none."""
    if not kinds:
        return {}
    found = {name: torch.isin(inputs, torch.tensor(ids, device=inputs.device)) for name, ids in kinds.items()}
    found["other"] = ~torch.stack(list(found.values())).any(0)
    is_query = torch.arange(inputs.shape[1], device=inputs.device) > 0
    return {name: mask & is_query for name, mask in found.items()}


def effective_rank(singular_values: torch.Tensor) -> torch.Tensor:
    """(..., n) -> (...): exp of the entropy of the singular values over their sum (Roy & Vetterli 2007)."""
    share = singular_values / singular_values.sum(-1, keepdim=True).clamp(min=1e-30)
    return torch.special.entr(share).sum(-1).exp()


def readout_rank(readout: torch.Tensor) -> torch.Tensor:
    """Effective rank of each head: (B, T, H, D) -> (H,), from the D x D Gram matrix in float64."""
    tokens = readout.flatten(0, 1).transpose(0, 1).cpu().double()  # (H, B T, D)
    return effective_rank(torch.linalg.eigvalsh(tokens.mT @ tokens).clamp(min=0).sqrt())


def value_weight(mixer: Mixer) -> torch.Tensor | None:
    """W_v (Hv, D, C): the rows that the mixer's value_rows names. None if the mixer has no such layer."""
    layer, before = mixer.value_rows
    if not hasattr(mixer, layer):
        return None
    start, n = sum(math.prod(mixer.shapes[name]) for name in before), math.prod(mixer.shapes["value"])
    return getattr(mixer, layer).weight[start : start + n].unflatten(0, (-1, mixer.value_width))


def projection_rank(mixer: Mixer) -> torch.Tensor | None:
    """Effective rank (H,) of W_v W_o by head, or None; a convolution and a SiLU between the two are left out."""
    value = value_weight(mixer)
    if value is None:
        return None
    value = value.repeat_interleave(mixer.n_head // len(value), dim=0).cpu().double()  # (H, D, C)
    output = mixer.out_proj.weight.unflatten(1, (mixer.n_head, -1)).transpose(0, 1).cpu().double()  # (H, C, D)
    # W_o W_v has the singular values of R_o R_v^T, which is D x D
    return effective_rank(torch.linalg.svdvals(torch.linalg.qr(output).R @ torch.linalg.qr(value.mT).R.mT))


def rank_meter(mixer: Mixer, seen: dict) -> dict:
    of_projection = projection_rank(mixer)
    return {
        "before": numbers(readout_rank(seen["before"])),
        "after": numbers(readout_rank(seen["after"])),
        "value_output": None if of_projection is None else numbers(of_projection),
    }


def residual_meter(inputs: torch.Tensor, seen: dict) -> dict:
    """Largest |h| and its place; inputs (B, T) are the tokens, of which the one at that place is named."""
    size = seen["residual"].float().abs()  # (B, T, C)
    row, position, channel = (int(i) for i in torch.unravel_index(size.argmax(), size.shape))
    largest, median = float(size.max()), float(size.median())
    where = {"row": row, "position": position, "token": int(inputs[row, position]), "channel": channel}
    return {"max": numbers(largest), "max_over_median": numbers(largest / max(median, 1e-30))} | where


def branch_norm(seen: dict) -> float | None:
    """|y| / |stream|, mean over tokens: how much the mixer's branch adds to the residual stream."""
    y, stream = (seen[name].float().norm(dim=-1) for name in ("y", "stream"))
    return numbers((y / stream.clamp(min=1e-30)).mean().item())


def layer_meters(model: GPT, inputs: torch.Tensor, kinds: dict[str, torch.Tensor], dtype: str) -> list[dict]:
    """[{meter: its numbers}], one dict per layer; inputs (B, T), kinds as kinds_of gives them."""

    def measure(block, seen):
        mixer = block.mixer
        return {
            "gates": gate_meters(mixer, seen["x"]),
            "sink": sink_meter(mixer, seen, kinds),
            "rank": rank_meter(mixer, seen),
            "branch": branch_norm(seen),
            "residual": residual_meter(inputs, seen),
        }

    names = [name for name, _ in model.config.layers()]
    layers = probe(model, inputs, measure, dtype)
    return [{"mixer": name} | layer for name, layer in zip(names, layers, strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# The cheap ones, for the training log


def training_rows(T: int) -> int:
    return max(4, TRAINING_TOKENS // T)


def training_meters(
    model: GPT, inputs: torch.Tensor, targets: torch.Tensor, kinds: dict[str, list[int]], dtype: str
) -> dict:
    """The `summary` of one forward pass on inputs (B, T), for a line of metrics.jsonl; kinds: the token ids of each."""
    masks = kinds_of(inputs, kinds)

    def measure(block, seen):
        meters = {"gates": gate_meters(block.mixer, seen["x"]), "sink": sink_meter(block.mixer, seen, masks)}
        return meters | {"branch": branch_norm(seen), "residual": residual_meter(inputs, seen)}

    found = summary(probe(model, inputs, measure, dtype), inputs.shape[1])
    for name, loss in losses_by_kind(model, inputs, targets, masks, dtype).items():
        found["kinds"][name]["loss"] = loss
    return found


@torch.no_grad()
def losses_by_kind(
    model: GPT, inputs: torch.Tensor, targets: torch.Tensor, masks: dict[str, torch.Tensor], dtype: str
) -> dict[str, float | None]:
    """{kind: nats a label, of the labels at its queries}; None where it has none."""
    losses, was_training = {}, model.training
    model.eval()
    with autocast(inputs.device.type, dtype):
        for name, mask in masks.items():
            labels = targets.masked_fill(~mask, IGNORE)
            losses[name] = numbers(model(inputs, labels).item()) if (labels != IGNORE).any() else None
    model.train(was_training)
    return losses


def summary(layers: list[dict], T: int) -> dict:
    """Means of gates (by position) and sinks over layers and heads, the largest activation, the collapsed gates."""
    gates = {}
    for layer in layers:
        for position, gate in layer["gates"].items():
            gates.setdefault(position, []).append(gate)
    return {
        "gate_mean": {position: mean(x for gate in own for x in gate["mean"]) for position, own in gates.items()},
        "gate_below_0.1": {
            position: mean(x for gate in own for x in gate["below_0.1"]) for position, own in gates.items()
        },
        "sink": mean(x for layer in layers for x in layer["sink"]["share"]),
        "sink_max": max((x for layer in layers for x in layer["sink"]["share"] if x is not None), default=None),
        "sink_baseline": numbers(baseline(T)),
        "effective_sink": mean(x for layer in layers for x in layer["sink"]["effective"]),
        "value_norm": mean(x for layer in layers for x in layer["sink"]["value_norm"]),
        "heads_above": mean(layer["sink"]["heads_above"] for layer in layers),
        "branch": [layer["branch"] for layer in layers],
        "max_activation": maximum(layer["residual"]["max"] for layer in layers),
        "max_over_median": maximum(layer["residual"]["max_over_median"] for layer in layers),
        "collapsed": collapsed_gates(layers),
        "kinds": {
            name: kind_summary([layer["sink"]["kinds"][name] for layer in layers])
            for name in layers[0]["sink"]["kinds"]
        },
    }


def kind_summary(kinds: list[dict]) -> dict:
    """One kind of query, given by layer: means over layers and heads, and the largest share of a head."""
    names = ("share", "uniform", "effective", "effective_uniform", "token_0_before", "token_0_after")
    gates = {}
    for position, gate in (item for kind in kinds for item in kind["gates"].items()):
        gates.setdefault(position, []).extend(gate["mean"])
    found = {name: mean(x for kind in kinds for x in kind[name]) for name in names}
    largest = max((x for kind in kinds for x in kind["share"] if x is not None), default=None)
    return found | {"share_max": largest, "gate_mean": {position: mean(own) for position, own in gates.items()}}


def collapsed_gates(layers: list[dict]) -> list[str]:
    """A line of text for each gate that has collapsed."""
    gates = [(i, position, gate) for i, layer in enumerate(layers) for position, gate in layer["gates"].items()]
    return [f"layer {i}, {position}: {gate['collapsed']}" for i, position, gate in gates if gate["collapsed"]]


def mean(values: Iterable[float | None]) -> float | None:
    values = [x for x in values if x is not None]  # no gate, or a number that is not finite
    return numbers(statistics.fmean(values)) if values else None


def maximum(values: Iterable[float | None]) -> float | None:
    values = list(values)
    return None if None in values else max(values)


def is_spike(loss: float, earlier: list[float]) -> bool:
    """Whether loss is over 5 standard deviations above the mean of the last 100 logged losses (at least 20)."""
    window = earlier[-SPIKE_WINDOW:]
    if len(window) < SPIKE_AT_LEAST:
        return False
    return loss > statistics.fmean(window) + SPIKE_DEVIATIONS * statistics.pstdev(window)


# ----------------------------------------------------------------------------------------------------------------------
# A checkpoint


def first_rows(dataset: Dataset, split: str, rows: int, block_size: int) -> tuple:
    """The first batch of the split, (inputs, targets, slice): whole windows of a text, or rows of one slice."""
    if dataset.kind == "stream":
        block_size = min(block_size, dataset.counts(split)["tokens"] - 1)
        rows = min(rows, dataset.examples_per_epoch(split, block_size))
    return next(dataset.eval_batches(split, rows, block_size))


def packing(dataset: Dataset) -> str:
    """How the rows begin, in words: it decides which token is at position 0."""
    if dataset.kind == "stream":
        return "no BOS; windows of running text, which begin anywhere in it"
    if dataset.name == "mqar":
        return "no BOS; each row is an example of its own and begins with the first key of its pairs"
    return "each row is an example of its own"


@dataclasses.dataclass
class MetersConfig:
    checkpoint: list[str] = key(["out/best.pt"], "checkpoints, earliest first (a folder: its ckpt.pt)")
    dataset: str | None = key(None, "folder of the data (None: the data that the first checkpoint was trained on)")
    split: str = key("val", "the split of the data to read")
    queries: str | None = key(
        None, r"a regular expression: queries whose token's text it matches are measured apart, as in '\s+'"
    )
    rows: int = key(16, "how many of the split's first rows the meters read", at_least=1)
    score_batches: int = key(4, "number of batches of that many rows for the losses", at_least=1)
    skip_below: float | None = key(
        None, "time decoding without softmax heads whose headwise gate is below this (None: do not)", above=0
    )
    published: bool = key(
        False, "true: sinks, activations and gates alone, beside published numbers, with the memory of one layer"
    )
    tokens: int | None = key(None, "published: tokens of each row (None: the model's block_size)", at_least=2)
    maps: list[str] = key([], "attention maps to keep, as layer.head (empty: the heads of largest and smallest sink)")
    dtype: str | None = key(None, "dtype of matrix products (None: the run's)", choices=tuple(DTYPES))
    out: str | None = key(
        None, "file for the JSON (None: meters.json or published.json beside the last checkpoint)", is_path=True
    )
    draw: bool = key(False, "true: draw page.png beside the JSON, too, as plot.py does")
    device: str = key("auto", "device to compute on", choices=("auto", "cpu", "cuda", "mps"))
    threads: int = key(0, "CPU threads (0: cores)", at_least=0)
    memory_check: bool = key(True, "refuse to run if more memory is needed than is left")


def main(argv: list[str]) -> None:
    config = configurator.load(MetersConfig, argv, positional=None, program="meters.py", description=__doc__)
    if not config.checkpoint:
        raise UserError("checkpoint=[]: give at least one, as in --checkpoint=out/best.pt")
    last = Path(config.checkpoint[-1])
    name = "published.json" if config.published else "meters.json"
    out = Path(config.out) if config.out else (last if os.path.isdir(last) else last.parent) / name
    if config.published and (config.maps or config.queries or config.skip_below):
        raise UserError("published=True: has no maps, queries or skip_below; leave them out, or published")
    if config.tokens and not config.published:
        raise UserError(f"tokens={config.tokens}: is for published=true; the other meters read rows of block_size")
    if config.draw and (config.published or out.name != "meters.json"):
        raise UserError("draw=True: the page is drawn of meters.json; leave out and published as they are")
    processes = Processes(config.device, config.threads)
    dataset, results = None, []
    for path in config.checkpoint:
        model, checkpoint = (open_model if config.published else load_model)(path, processes.device)
        if dataset is None:
            check_output("out", out, "checkpoints")
            dataset = open_dataset(config.dataset or checkpoint.get("data", {}).get("path", ""))
        check_vocabulary(model.config.vocab_size, checkpoint, dataset)
        if config.published:
            results.append(published_meters_of(model, checkpoint, path, dataset, config))
            continue
        results.append(meters_of(model, checkpoint, path, dataset, config))
        print(table(results[-1]), end="\n\n")
    if config.published:
        print(layerwise.table(results))
    text = json.dumps({"checkpoints": results}) + "\n"
    write_output("out", out, lambda file: file.write(text.encode()))
    print(f"written: {out}")
    if config.draw:
        from plot import page  # here, since it loads matplotlib

        print(f"written: {page(out.parent)}")
    names = ("checkpoint", "step", "loss", "accuracy", "quantised")
    if config.published:
        short = [{"checkpoint": r["checkpoint"]} | layerwise.over_layers(r["layers"]) for r in results]
    else:
        short = [{name: r[name] for name in names} | summary(r["layers"], r["tokens"]) for r in results]
    print(json.dumps({"checkpoints": short}))


def meters_of(model: GPT, checkpoint: dict, path: Path | str, dataset: Dataset, config: MetersConfig) -> dict:
    """Every number of one checkpoint, ready for JSON. Raises UserError if the loss is not finite."""
    dtype, T = config.dtype or checkpoint.get("dtype", "float32"), model.config.block_size
    memory.check_metering(config, model, dataset, dtype)
    batches = list(itertools.islice(dataset.eval_batches(config.split, config.rows, T), config.score_batches))
    scores = loss_of(model, batches, T)
    if not math.isfinite(scores["loss"]):
        raise UserError(f"{path}: its loss is {scores['loss']}: its weights are broken, or the run has diverged")
    inputs, targets, name = first_rows(dataset, config.split, config.rows, T)
    inputs, targets = inputs.to(model.wte.weight.device), targets.to(model.wte.weight.device)
    kinds = kinds_of(inputs, dataset.kinds if config.queries is None else matching_tokens(dataset, config.queries))
    result = {"checkpoint": str(path), "step": checkpoint.get("iter_num"), "attention": model.config.attention}
    result |= {"gate": model.config.gate, "gate_activation": model.config.gate_activation}
    result |= {"dataset": dataset.name, "split": config.split, "slice": name, "dtype": dtype}
    result |= {"rows": len(inputs), "tokens": inputs.shape[1], "packing": packing(dataset)}
    result |= {"sink_baseline": baseline(inputs.shape[1]), "layers": layer_meters(model, inputs, kinds, dtype)}
    result["losses"] = losses_by_kind(model, inputs, targets, kinds, dtype)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(dataset.vocab_size, inputs.shape, generator=generator).to(inputs.device)
    controls = probe(model, noise, lambda block, seen: sink_meter(block.mixer, seen, {}), dtype)
    for layer, control in zip(result["layers"], controls, strict=True):
        layer["sink"]["random_tokens"] = control["share"]
    result["maps"] = attention_maps(model, inputs, result["layers"], kinds, config.maps, dtype)
    result |= scores | {"labels": sum(int((targets != IGNORE).sum()) for _, targets, _ in batches)}
    if config.skip_below is not None:
        result["decoding"] = decoding_speed(model, inputs[:1, : max(1, T - DECODED_TOKENS - 1)], config.skip_below)
    with quantised(model):
        in_8_bits = loss_of(model, batches, T)
    return result | {"pruning": pruning_curve(model, batches, T), "quantised": in_8_bits}


def published_meters_of(model: GPT, checkpoint: dict, path: Path | str, dataset: Dataset, config: MetersConfig) -> dict:
    """The numbers that Qiu et al. print, by layer, of a model of open_model."""
    dtype, config = config.dtype or checkpoint.get("dtype", "float32"), dataclasses.replace(config)
    config.tokens = min(config.tokens or model.config.block_size, model.config.block_size)
    inputs, _, _ = first_rows(dataset, config.split, config.rows, config.tokens)
    config.tokens = inputs.shape[1]
    memory.check_layer_by_layer(config, model, dtype)
    layers = layerwise.layer_numbers(model, inputs.to(model.norm.weight.device), dtype, probe)
    about = {"checkpoint": str(path), "step": checkpoint.get("iter_num"), "gate": model.config.gate, "dtype": dtype}
    about |= {"dataset": dataset.name, "split": config.split, "rows": len(inputs), "tokens": inputs.shape[1]}
    layers = [{name: numbers(x) if type(x) is float else x for name, x in layer.items()} for layer in layers]
    return about | {"layers": layers}


def matching_tokens(dataset: Dataset, expression: str) -> dict[str, list[int]]:
    """{expression: the ids of the tokens whose text it matches as a whole}. Raises UserError if there is none."""
    tokenizer = tokenizer_of(dataset)
    texts = {i: tokenizer.decode_bytes([i]).decode(errors="replace") for i in range(tokenizer.vocab_size)}
    try:
        found = [i for i, text in texts.items() if re.fullmatch(expression, text)]
    except re.error as error:
        raise UserError(f"queries={expression!r}: is no regular expression ({error})") from None
    if not found:
        raise UserError(f"queries={expression!r}: matches none of the {len(texts):,} tokens of {dataset.folder}")
    return {expression: found}


def attention_maps(
    model: GPT, inputs: torch.Tensor, layers: list[dict], kinds: dict, wanted: list[str], dtype: str
) -> list[dict]:
    """The wanted heads' maps on the first row's first t <= MAP_TOKENS tokens: [{layer, head, weights, gate, queries}].

    weights: (t, t). gate: (t,), the mean over the head's channels of the gate on its readout; empty if none multiplies.
    queries: {kind: their positions}, without those of kind "other".
    """
    sinks = {(i, head): share for i, layer in enumerate(layers) for head, share in enumerate(layer["sink"]["share"])}
    heads = []
    for text in wanted:
        layer, _, number = text.partition(".")
        if not (layer.isdigit() and number.isdigit() and (int(layer), int(number)) in sinks):
            raise UserError(f"maps={text!r}: write layer.head, from 0.0 to {'.'.join(map(str, max(sinks)))}")
        heads.append((int(layer), int(number)))
    heads = heads or list(dict.fromkeys([max(sinks, key=sinks.get), min(sinks, key=sinks.get)]))
    prefix = inputs[:1, :MAP_TOKENS]  # causal: the first tokens' weights do not depend on the others

    def measure(block, seen):
        mixer, gate = block.mixer, None
        name = next((name for name in ("readout", "native") if name in mixer.gates), None)
        if name and mixer.gates[name].activation not in ADDITIVE_ACTIVATIONS:
            values = mixer.gates[name].value(mixer.gates[name].logits(seen["x"])).mean(-1)  # a static one has no B, T
            gate = values.expand(*prefix.shape, mixer.n_head)[0]  # (t, H)
        return mixer.weights(seen["x"])[0], gate

    seen = probe(model, prefix, measure, dtype)
    marks = {name: mask[0, :MAP_TOKENS].nonzero().flatten().tolist() for name, mask in kinds.items() if name != "other"}
    maps = []
    for layer, head in heads:
        weights, gate = seen[layer]
        values = [] if gate is None else numbers(gate[:, head])
        maps.append({"layer": layer, "head": head, "weights": numbers(weights[head]), "gate": values, "queries": marks})
    return maps


def table(result: dict) -> str:
    """The numbers of a checkpoint as text, a line per layer."""
    gate = result["gate"] if result["gate"] in ("none", "native") else f"{result['gate']} {result['gate_activation']}"
    lines = [
        f"{result['checkpoint']} (step {result['step']}, {result['attention']}, gate {gate}), {result['dtype']}",
        f"on the first {result['rows']} rows of {result['tokens']} tokens of {result['dataset']}, {result['split']}",
        f"packing: {result['packing']}",
        f"sink of uniform weights: {result['sink_baseline']:.1%}; random: the same on tokens drawn at random",
        "",
        "                        gate                  sink             heads    token 0 of      rank of      rank of",
        "layer mixer             mean   <0.1   >0.9    mean  random     >0.3   the readout  the readout      W_v W_o"
        "  max |h|  over median, at position (token) channel",
    ]
    for i, layer in enumerate(result["layers"]):
        _, gate = shown_gate(layer)
        sink, rank, residual = (layer[name] for name in ("sink", "rank", "residual"))
        where = f"{residual['position']} ({residual['token']}) {residual['channel']}"
        cells = [
            f"{i:<5} {layer['mixer']:<14}",
            *(show(mean(gate.get(name, ())), form) for name, form in GATE_COLUMNS.items()),
            f" {show(mean(sink['share']))} {show(mean(sink['random_tokens']), '7.1%')}",
            show(sink["heads_above"], "8.0%"),
            f"{show(mean(sink['token_0_before']))} {show(mean(sink['token_0_after']))}",
            f"{show(mean(rank['before']), '6.1f')} {show(mean(rank['after']), '5.1f')}",
            f"{show(mean(rank['value_output'] or ()), '12.1f')}",
            f"{show(residual['max'], '8.4g')} {show(residual['max_over_median'], '12.4g')}, {where}",
        ]
        lines.append(" ".join(cells))
    for i, layer in enumerate(result["layers"]):
        for position, gate in layer["gates"].items():
            if (position, gate) != shown_gate(layer):
                numbers_of = (show(mean(gate[name]), form) for name, form in GATE_COLUMNS.items())
                lines.append(f"{i:<5} {'@' + position:<14} {' '.join(numbers_of)}")
    kinds = dict.fromkeys(layer["sink"]["kind"] for layer in result["layers"])
    lines += [f"sink: {SINK_KINDS[kind]}" for kind in kinds]
    lines += kinds_table(result)
    lines += [f"collapsed: {line}" for line in collapsed_gates(result["layers"])]
    lines += ["", f"loss {result['loss']:.4f}, accuracy {result['accuracy']:.1%}, over {result['labels']:,} labels"]
    for row in result["pruning"]:
        lines.append(
            f"gate values under {row['threshold']:<4} set to zero: {row['zeroed']:6.1%} of them, {change(row, result)}"
        )
    if "decoding" in result:
        row = result["decoding"]
        skipping = f"{row['heads_skipped']:.1%} of the heads skipped, {row['skipping']:,.0f} tokens/s"
        lines.append(f"decoding: {row['tokens_per_second']:,.0f} tokens/s; below {row['threshold']}, {skipping}")
    return "\n".join([*lines, f"8-bit weights and inputs: {change(result['quantised'], result)}"])


def kinds_table(result: dict) -> list[str]:
    """A line per layer and kind of query; means over the heads. Empty if the data set names no kinds."""
    if not result["losses"]:
        return []
    lines = [
        "",
        "queries                          sink    effective sink    token 0 of    gate    loss",
        "layer kind      number   mean uniform     mean  uniform   the readout    mean",
    ]
    for i, layer in enumerate(result["layers"]):
        for name, kind in layer["sink"]["kinds"].items():
            _, gate = shown_gate(kind)
            cells = [
                f"{i:<5} {name[:9]:<9} {kind['queries']:>6,}",
                f"{show(mean(kind['share']))} {show(mean(kind['uniform']), '7.1%')}",
                f"{show(mean(kind['effective']), '8.3f')} {show(mean(kind['effective_uniform']), '8.3f')}",
                f"{show(mean(kind['token_0_before']))} {show(mean(kind['token_0_after']))}",
                f"{show(mean(gate.get('mean', ())), '7.3f')} {show(result['losses'][name], '7.4f')}",
            ]
            lines.append(" ".join(cells))
        lines.append(f"{i:<5} value norm of token 0 over the median: {show(mean(layer['sink']['value_norm']), '.2f')}")
    return [*lines, ""]


def shown_gate(layer: dict) -> tuple[str | None, dict]:
    """(position, meter) of the gate in a layer's line of the table: the gate of the readout, if there is one."""
    gates = layer["gates"]
    position = next((name for name in ("readout", "native", *gates) if name in gates), None)
    return position, gates.get(position, {})


def show(x: float | None, form: str = "6.1%") -> str:
    return "-".rjust(len(format(1.0, form))) if x is None else format(x, form)


def change(row: dict, result: dict) -> str:
    return f"loss {row['loss']:.4f} ({row['loss'] - result['loss']:+.4f}), accuracy {row['accuracy']:.1%}"


if __name__ == "__main__":
    configurator.run(main)
