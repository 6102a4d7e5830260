"""What the layers of a model compute in one pass, noted as it runs, and the meters made of it.

Whatever an edit changes (what a gate is fed, where it stands, what a layer takes from another), the
notes are of the pass itself. docs/meters.md says what each meter means. meters.py prints them for a
checkpoint, train.py logs a summary of them, and the page of a text (study/token_page.py) shows them
token by token.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from base.configurator import UserError
from data.shards import Dataset, PackedDocuments
from gate import Gate
from mixer import DENOMINATOR_MIN, Mixer, Projection
from model import GPT, Softmax
from ops import IGNORE
from ops.fast import at_least_float32
from runs.hardware import autocast

BINS = 20  # bins of width 0.05 from 0 to 1; one more bin holds the values above 1
INDUCTION_ROWS = 4
# what query_meters measures
BY_QUERY = ("share", "to_sink", "effective", "entropy")
# entries of the weights that the sink meter holds at once, at least a row's
WEIGHTS_AT_ONCE = 1 << 22
TRAINING_TOKENS = 16384  # that the meters in the training log look at, in at least four rows
TRAINING_LENGTH = 2048  # of each row, at most: the weights of more would take GBs

# -- What the layers compute in a pass -------------------------------------------------------------


class GateCall(NamedTuple):
    """One call of a gate: output = act(y, g)."""

    gate: Gate
    y: torch.Tensor  # (B, T, heads, width)
    g: torch.Tensor  # (B, T, heads or 1, width or 1)
    output: torch.Tensor  # (B, T, heads, width)

    def value(self) -> torch.Tensor:
        """The factor on y, or what was added to it, of g's shape."""
        return self.gate.value(self.g)


@dataclass
class Seen:
    """What one layer computed in a pass. A tensor is None if the mixer has a `forward` of its own
    that makes no such tensor."""

    mixer: Mixer = None
    x: torch.Tensor = None  # (B, T, C), the input of the mixer
    y: torch.Tensor = None  # (B, T, C), its output
    projection: Projection = None  # what the mixer's `read` got
    o: torch.Tensor = None  # what `read` returned
    readout: torch.Tensor = None  # (B, T, H D), what out_proj got
    projected: torch.Tensor = None  # (B, T, C), what out_proj returned
    stream: torch.Tensor = None  # (B, T, C), the input of the block
    residual: torch.Tensor = None  # (B, T, C), its output
    # {name of a gate: its calls, in their order}. The name is the gate's position if it is a
    # mixer's, its path in the block if it is another of a block, else its path in the model
    calls: dict[str, list[GateCall]] = field(default_factory=dict)
    has_weights: bool = False  # whether the weight of each value in each readout is known


@torch.no_grad()
def probe(
    model: GPT, inputs: torch.Tensor, measure: Callable[[Seen], Any], dtype: str = "float32"
) -> tuple[list, torch.Tensor]:
    """Runs the model, which is in evaluation mode, on inputs (B, T) and calls measure(seen) after
    each block. Returns the results by layer, and the hidden states after the last norm (B, T, C).

    A gate that is in no block, but runs before one, is seen in that layer. The model is left as it
    was. Raises UserError where an edit has given blocks another hidden state than (B, T, C).
    """
    results = []
    seen = Seen()
    expected = (*inputs.shape, model.config.n_embd)

    def note(block, taken, made, method, x, *others, **keys):
        """method(x, ...), whose x and output become the fields `taken` and `made`."""
        nonlocal seen
        output = method(x, *others, **keys)
        vars(seen).update({taken: x, made: output})
        if made != "residual":
            return output
        if x.shape != expected:
            raise UserError(
                f"meters: the hidden state of a block is {tuple(x.shape)}, not the expected "
                f"(batch, tokens, n_embd), {expected}; train with --meters=false"
            )
        seen.mixer = block.mixer
        needed = (seen.mixer.explicit_weights, seen.projection, seen.readout)
        seen.has_weights = all(part is not None for part in needed)
        results.append(measure(seen))
        seen = Seen()
        return output

    def note_gate(gate, name, act, y, g):
        output = act(y, g)
        if g.dim() == 2:  # a static gate has no B and T
            g = g.expand(*y.shape[:2], -1, -1)
        seen.calls.setdefault(name, []).append(GateCall(gate, y, g, output))
        return output

    with contextlib.ExitStack() as stack:
        for block in model.blocks:
            mixer = block.mixer
            for module, name, taken, made in (
                (block, "forward", "stream", "residual"),
                (mixer, "forward", "x", "y"),
                (mixer, "read", "projection", "o"),
                (mixer.out_proj, "forward", "readout", "projected"),
            ):
                noting = functools.partial(note, block, taken, made, getattr(module, name))
                stack.enter_context(patch.object(module, name, noting))
        for path, gate in model.named_modules():
            if isinstance(gate, Gate):
                name = re.sub(r"^blocks\.\d+\.(mixer\.gates\.)?", "", path)
                noting = functools.partial(note_gate, gate, name, gate.act)
                stack.enter_context(patch.object(gate, "act", noting))
        stack.enter_context(autocast(inputs.device.type, dtype))
        hidden, _ = model.features(inputs)
    return results, hidden


def to_json(x: torch.Tensor | list | float) -> Any:
    """A tensor, list or number, rounded to four digits, as lists and numbers; not finite: None, as
    JSON has no NaN."""
    if isinstance(x, torch.Tensor):
        x = x.tolist()
    if isinstance(x, list):
        return [to_json(item) for item in x]
    return float(f"{x:.4g}") if math.isfinite(x) else None


def first_rows(
    dataset: Dataset, split: str, rows: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first batch of the split, inputs and targets: whole windows of a text, or rows of one
    slice. Where documents are packed, the longest ones, each in a row of its own."""
    if dataset.kind == "examples":
        return next(dataset.eval_batches(split, rows, block_size))[:2]
    if isinstance(dataset, PackedDocuments):
        return dataset.alone(split, rows, block_size)
    most = dataset.counts(split)["tokens"] - 1
    inputs, targets, *_ = next(dataset.eval_batches(split, rows, min(block_size, most)))
    whole = targets[:, -1] != IGNORE  # padding is no text
    return inputs[whole], targets[whole]


# -- Gates -----------------------------------------------------------------------------------------


def gate_meter(gate: Gate, g: torch.Tensor) -> dict:
    """g (..., heads, width) -> the distribution of the gate's values, one entry per head (shared,
    scalar: one).

    open: the mean value, 0 where the activation is least and 1 where it is most; None where it has
    no such bounds. logits: the root mean square of g.
    """
    g = g.movedim(-2, 0).flatten(1)  # (heads, values)
    heads = gate.value(g).float().abs()
    bounds = bounds_of(gate, g)
    openness = [None] * len(heads)
    if bounds is not None:
        least, most = bounds
        openness = to_json((heads.mean(1) - least) / (most - least))
    bins = (heads * BINS).clamp(max=BINS).long() - (heads == 1).long()
    counts = torch.stack([row.bincount(minlength=BINS + 1) for row in bins])
    return {
        "mean": to_json(heads.mean(1)),
        "below_0.1": to_json((heads < 0.1).float().mean(1)),
        "histogram": to_json(counts / heads.shape[1]),
        "open": openness,
        "logits": to_json(g.float().square().mean(1).sqrt()),
    }


def bounds_of(gate: Gate, g: torch.Tensor) -> tuple[float, float] | None:
    """The least and the most that a gate multiplies by, such as (0, 2) of sigmoid2: its values at
    very small and very large g. None where these go on growing (SiLU), are negative (tanh), or are
    added to y. g: a tensor of the dtype and device to use."""
    far = gate.value(g.new_tensor([-200.0, -100.0, 100.0, 200.0])).tolist()
    least = min(far)
    most = max(far)
    is_bounded = abs(far[0] - far[1]) + abs(far[2] - far[3]) < 1e-6
    if gate.is_factor and is_bounded and -1e-6 < least < most:
        return least, most
    return None


def gate_meters(seen: Seen, mask: torch.Tensor | None = None) -> dict[str, dict]:
    """{name: the meter of a gate}, at the tokens of the mask (B, T), which has some; None: at
    all."""
    gates = {}
    for name, calls in seen.calls.items():
        logits = []
        for call in calls:
            g = call.g
            if mask is not None:  # a token may have several, as the sub-tokens of deltaproduct
                g = g.unflatten(1, (mask.shape[1], -1))[mask]
            logits.append(g.flatten(0, -3))  # (tokens, heads, width)
        gates[name] = gate_meter(calls[-1].gate, torch.cat(logits))
    return gates


def head_gates(seen: Seen) -> torch.Tensor | None:
    """(B, T, H), the mean size of the gate on a head's readout; None if none multiplies it."""
    calls = seen.calls.get("readout") or seen.calls.get("native")
    if not calls or not calls[-1].gate.is_factor:
        return None
    return calls[-1].value().abs().mean(-1).expand(-1, -1, seen.mixer.n_head)


# -- What queries get from token 0 -----------------------------------------------------------------


def baseline(T: int) -> float:
    """The sink of uniform weights: the mean of 1/(i+1) over queries i = 1..T-1."""
    return fmean(1 / (i + 1) for i in range(1, T))


def query_masks(inputs: torch.Tensor, kinds: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """{kind: (B, T) bool}: the queries behind token 0 whose token is in the kind's list; "other":
    those in none."""
    masks: dict[str, torch.Tensor] = {}
    rest = torch.ones_like(inputs, dtype=torch.bool)
    rest[:, 0] = False
    for name, ids in kinds.items():
        masks[name] = rest & torch.isin(inputs, torch.tensor(ids, device=inputs.device))
        rest = rest & ~masks[name]
    return masks | {"other": rest} if kinds else masks


def places_of(masks: dict[str, torch.Tensor], length: int) -> dict[str, list[int]]:
    """{kind: its positions among the first `length` tokens of the first row}, without those of kind
    "other"."""
    places = {}
    for name, mask in masks.items():
        if name != "other":
            places[name] = mask[0, :length].nonzero().flatten().tolist()
    return places


def sink_meter(seen: Seen, masks: dict[str, torch.Tensor]) -> dict:
    """What the queries 1..T-1 get from token 0, and the entropy of their weights in nats, as
    docs/meters.md defines them: means over the queries, per head.

    masks: {kind: (B, T) bool}, the queries that are measured apart; their gates, too. Without
    weights every number is None.
    """
    mixer = seen.mixer
    B, T, _ = seen.x.shape
    H = mixer.n_head
    by_query = dict.fromkeys(BY_QUERY, seen.x.new_full((B, H, T), math.nan))
    kind = "none"
    norms = [None] * H
    if seen.has_weights:
        # what the sink is a share of: docs/meters.md
        kind = "proxy"
        if mixer.has_positive_weights:
            kind = "weights" if isinstance(mixer, Softmax) else "share"
        by_query = query_meters(seen)
        sizes = at_least_float32(seen.projection.v).norm(dim=-1)  # (B, T, Hk)
        median = sizes[:, 1:].median(1).values.clamp(min=1e-30)
        of_keys = (sizes[:, 0] / median).mean(0)
        norms = to_json(of_keys.repeat_interleave(H // len(of_keys)))
    is_behind = torch.arange(T, device=seen.x.device).expand(B, T) > 0
    kinds: dict = {}
    for name, mask in {None: is_behind, **masks}.items():
        kinds[name] = {}
        for number, values in by_query.items():
            kinds[name][number] = to_json(values.transpose(1, 2)[mask].mean(0))
    for name, mask in masks.items():
        kinds[name]["gates"] = gate_meters(seen, mask) if mask.any() else {}
    return kinds.pop(None) | {"kind": kind, "value_norm": norms, "kinds": kinds}


def weights_of(seen: Seen, rows: slice = slice(None)) -> torch.Tensor:
    """(B, H, T, T) of these rows: each value's weight in each readout, before RMSNorm and gates.
    UserError without any."""
    if not seen.has_weights:
        raise UserError(
            f"{type(seen.mixer).__name__}: its readout is its own, so explicit_weights must be, too"
        )
    of_rows = {}
    for name, y in seen.projection._asdict().items():
        if y is not None and len(y) > 1:
            of_rows[name] = y[rows]
    weights = seen.mixer.explicit_weights(seen.projection.replace(**of_rows))
    if seen.mixer.norm_kind == "denominator":
        weights = weights / denominator_of(seen)[rows].transpose(1, 2)
    return weights


def denominator_of(seen: Seen) -> torch.Tensor:
    """(B, T, H, 1), behind a gate on it."""
    denominator = seen.o[..., -1:]
    if "denominator" in seen.calls:
        denominator = seen.calls["denominator"][-1].output
    return denominator.clamp(min=DENOMINATOR_MIN)


def query_meters(seen: Seen) -> dict[str, torch.Tensor]:
    """What each query gets from token 0, and how widely it looks: {name of BY_QUERY: (B, H, T)}."""
    v = at_least_float32(seen.projection.v[:, :1])
    value = v.repeat_interleave(seen.mixer.n_head // v.shape[2], dim=2)  # (B, 1, H, D), of token 0
    o = readout_factor(seen) * value  # the readout, with a weight of one on token 0
    B, T, H, _ = o.shape
    n = max(1, WEIGHTS_AT_ONCE // (H * T * T))
    parts: dict = {name: [] for name in BY_QUERY}
    for i in range(0, B, n):
        rows = slice(i, i + n)
        size = weights_of(seen, rows).abs()  # (n, H, T, T)
        total = size.sum(-1)
        to_sink = torch.full_like(total, math.nan)
        if seen.projection.sink is not None:  # softmax weights and the sink's sum to one
            to_sink = 1 - total
        whole = (total + to_sink.nan_to_num()).clamp(min=1e-30)
        # -sum_j a_j ln a_j of the shares a_j = size_j / whole, and of the sink's; a head at a time
        # stays in the processor's cache
        entr = [torch.special.entr(of_head).sum(-1) for of_head in size.unbind(1)]
        of_keys = (torch.stack(entr, 1) + total * whole.log()) / whole
        of_sink = torch.special.entr(to_sink.clamp(min=0)).nan_to_num()
        parts["share"].append(size[..., 0] / whole)
        parts["to_sink"].append(to_sink)
        parts["effective"].append(size[..., 0] * written_by_heads(seen, o[rows], rows))
        parts["entropy"].append(of_keys + of_sink)
    return {name: torch.cat(part) for name, part in parts.items()}


def written_by_heads(seen: Seen, o: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
    """o (B, T, H, D) of these rows, as out_proj gets it -> (B, H, T): the norm of what each head
    writes, over that of the stream."""
    out = seen.mixer.out_proj.weight.unflatten(1, (seen.mixer.n_head, -1)).to(o.dtype)  # (C, H, D)
    written = torch.einsum("bihd,chd->bihc", o, out)
    calls = seen.calls.get("output")
    if calls and calls[-1].gate.is_factor:
        written = written * calls[-1].value()[rows]
    stream = at_least_float32(seen.stream[rows])
    scale = 1 / stream.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return (written * scale[:, :, None]).norm(dim=-1).transpose(1, 2)


def readout_factor(seen: Seen) -> torch.Tensor:
    """(B, T, H, D): what the pass multiplied the readout by, entry by entry, up to out_proj: its
    norm, its activation, its gates and its scale, but not what a gate added."""
    o = seen.o
    if seen.mixer.norm_kind == "denominator":
        o = o[..., :-1] / denominator_of(seen)
    if seen.projection.skip is not None:
        o = o + seen.projection.skip
    steps: list[tuple] = []  # (what a gate got, what it multiplied by, what it returned)
    for calls in seen.calls.values():
        gate, y, _, output = calls[-1]
        if gate in (*seen.mixer.before_norm, *seen.mixer.after_norm):
            steps.append((y, calls[-1].value() if gate.is_factor else 1.0, output))
    steps.append((seen.readout.view_as(o), 1.0, None))
    factor: Any = 1.0
    for y, value, output in steps:
        # by what stands in front of it, as the norm
        change = torch.where(o == 0, 0.0, at_least_float32(y) / at_least_float32(o))
        factor = factor * change * value
        o = output
    return factor


# -- All meters of a model -------------------------------------------------------------------------


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
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(inputs.numel(), (INDUCTION_ROWS, half), generator=generator)
    rows = inputs.flatten()[drawn.to(inputs.device)].repeat(1, 2)  # (4, 2 half)

    def measure(seen):
        if not seen.has_weights:
            return [None] * seen.mixer.n_head
        shares = []
        for i in range(INDUCTION_ROWS):  # the weights of one row at a time
            size = weights_of(seen, slice(i, i + 1)).abs()  # (1, H, 2 half, 2 half)
            followed = size.diagonal(1 - half, 2, 3)[..., 1:]  # queries half, half + 1, ...
            shares.append(followed / size[:, :, half:].sum(-1).clamp(min=1e-30))
        return to_json(torch.cat(shares).mean((0, 2)))

    return probe(model, rows, measure, dtype)[0]


def layer_meters(
    model: GPT, inputs: torch.Tensor, masks: dict[str, torch.Tensor], dtype: str
) -> tuple[list[dict], torch.Tensor]:
    """([{meter: its numbers}], one dict per layer; the hidden states after the last norm (B, T,
    C)); inputs (B, T), masks as query_masks gives them. Raises UserError for rows of one token."""
    if inputs.shape[1] < 2:
        raise UserError("meters: rows of one token have no other to look at; use --meters=false")

    def measure(seen):
        branch = seen.y.float().norm(dim=-1) / seen.stream.float().norm(dim=-1).clamp(min=1e-30)
        size = seen.residual.float().abs()  # (B, T, C)
        row, position, channel = torch.unravel_index(size.argmax(), size.shape)
        residual = {
            "max": to_json(size.max()),
            "max_over_median": to_json(size.max().item() / max(size.median().item(), 1e-30)),
            "position": int(position),
            "token": int(inputs[row, position]),
            "channel": int(channel),
        }
        return {
            "gates": gate_meters(seen),
            "sink": sink_meter(seen, masks),
            "branch": to_json(branch.mean()),
            "residual": residual,
        }

    layers, hidden = probe(model, inputs, measure, dtype)
    inductions = induction_meters(model, inputs, dtype)
    for layer, (name, _), induction in zip(layers, model.config.layers(), inductions, strict=True):
        layer["mixer"] = name
        layer["induction"] = induction
    return layers, hidden


@torch.no_grad()
def losses_by_kind(
    model: GPT, hidden: torch.Tensor, targets: torch.Tensor, masks: dict, dtype: str
) -> dict:
    """{kind: GPT.loss a label, of the labels at its queries}, of the hidden states (B, T, C) that
    layer_meters returns; None where it has none."""
    losses = {}
    with autocast(hidden.device.type, dtype):
        for name, mask in masks.items():
            labels = targets.masked_fill(~mask, IGNORE)
            n = (labels != IGNORE).sum()
            loss = (model.loss(hidden, labels) / n).item() if n else math.nan
            losses[name] = loss if math.isfinite(loss) else None
    return losses


# -- Their summary in the training log -------------------------------------------------------------


def training_meters(
    model: GPT, dataset: Dataset, block_size: int, dtype: str, tokens: int = TRAINING_TOKENS
) -> dict:
    """The `summary` of one forward pass on the first rows of the validation split, for a line of
    metrics.jsonl. tokens: at most so many are read, but never fewer than four rows."""
    length = dataset.longest("val", block_size)
    rows = max(4, min(tokens, TRAINING_TOKENS) // length)
    inputs, targets = first_rows(dataset, "val", rows, block_size)
    device = model.wte.weight.device
    inputs = inputs[:, :TRAINING_LENGTH].to(device)
    targets = targets[:, :TRAINING_LENGTH].to(device)
    masks = query_masks(inputs, dataset.kinds)
    was_training = model.training
    model.eval()
    layers, hidden = layer_meters(model, inputs, masks, dtype)
    meters = summary(layers, inputs.shape[1])
    for name, loss in losses_by_kind(model, hidden, targets, masks, dtype).items():
        meters["kinds"][name]["loss"] = loss
    model.train(was_training)
    return meters


def summary(layers: list[dict], T: int) -> dict:
    """Means of gates (by position) and sinks over layers and heads, the largest activation."""
    sinks = [layer["sink"] for layer in layers]
    kinds: dict = {}
    for name in sinks[0]["kinds"]:
        of_kind = [sink["kinds"][name] for sink in sinks]
        kinds[name] = {number: mean_of(of_kind, number) for number in BY_QUERY}
        kinds[name]["gate_mean"] = mean_by_position(of_kind, "mean")
    openness = {}  # by gate, as "3.readout" in layer 3
    logits = {}
    for i, layer in enumerate(layers):
        for position, gate in layer["gates"].items():
            name = f"{i}.{position}"
            openness[name] = mean_of([gate], "open")
            logits[name] = mean_of([gate], "logits")
    largest: dict = {}
    for name in ("max", "max_over_median"):
        found = [layer["residual"][name] for layer in layers]
        largest[name] = None if None in found else max(found)  # not finite
    return {
        "gate_mean": mean_by_position(layers, "mean"),
        "gate_below_0.1": mean_by_position(layers, "below_0.1"),
        "gate_open": openness,
        "gate_logits": logits,
        "sink": mean_of(sinks, "share"),
        "to_sink": mean_of(sinks, "to_sink"),
        "sink_baseline": to_json(baseline(T)),
        "effective_sink": mean_of(sinks, "effective"),
        "entropy": mean_of(sinks, "entropy"),
        "value_norm": mean_of(sinks, "value_norm"),
        "branch": [layer["branch"] for layer in layers],
        "max_activation": largest["max"],
        "max_over_median": largest["max_over_median"],
        "kinds": kinds,
        "induction": [layer["induction"] for layer in layers],
    }


def mean_by_position(layers: list[dict], name: str) -> dict[str, float | None]:
    """{position: mean of a number of its gates over layers and heads}"""
    gates: dict = {}
    for layer in layers:
        for position, gate in layer["gates"].items():
            gates.setdefault(position, []).append(gate)
    return {position: mean_of(its_gates, name) for position, its_gates in gates.items()}


def mean_of(meters: list[dict], name: str) -> float | None:
    """Over layers and heads that have the number."""
    values = []
    for meter in meters:
        values += [x for x in meter[name] if x is not None]
    return to_json(fmean(values)) if values else None
