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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn as nn

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
    name: str
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

    mixer: Mixer | None = None
    x: torch.Tensor | None = None  # (B, T, C), the input of the mixer
    y: torch.Tensor | None = None  # (B, T, C), its output
    projection: Projection | None = None  # what the mixer's `read` got
    o: torch.Tensor | None = None  # what `read` returned
    readout: torch.Tensor | None = None  # (B, T, H D), what out_proj got
    calls: list[GateCall] = field(default_factory=list)  # of all gates, in their order
    stream: torch.Tensor | None = None  # (B, T, C), the input of the block
    residual: torch.Tensor | None = None  # (B, T, C), its output

    @property
    def has_weights(self) -> bool:
        """Whether the weight of each value in each readout is known."""
        return (
            self.mixer.explicit_weights is not None
            and self.projection is not None
            and self.readout is not None
        )

    def last_call(self, name: str) -> GateCall | None:
        """Of the gate of this name, if there is one."""
        calls = [call for call in self.calls if call.name == name]
        return calls[-1] if calls else None


def some_rows(value: Any, rows: slice) -> Any:
    """A Seen, or a part of one, of these rows of the batch alone."""
    if isinstance(value, torch.Tensor):
        return value[rows] if len(value) > 1 else value
    if isinstance(value, Seen):
        return Seen(**{name: some_rows(part, rows) for name, part in vars(value).items()})
    if isinstance(value, list):
        return [some_rows(part, rows) for part in value]
    if isinstance(value, tuple):  # a Projection, a GateCall
        return type(value)(*(some_rows(part, rows) for part in value))
    return value


def names_of_gates(model: nn.Module) -> dict[Gate, str]:
    """{gate: its name}: its position if it is a mixer's, its path in the block if it is another of a
    block, else its path in the model."""
    names = {}
    for path, module in model.named_modules():
        if isinstance(module, Gate):
            names[module] = re.sub(r"^blocks\.\d+\.(mixer\.gates\.)?", "", path)
    return names


@contextlib.contextmanager
def replaced(module: nn.Module, name: str, wrapper: Callable) -> Iterator[None]:
    """Inside, module.name(...) is wrapper(the method that it was, ...)."""
    own = vars(module).get(name)
    setattr(module, name, functools.partial(wrapper, getattr(module, name)))
    try:
        yield
    finally:
        delattr(module, name)
        if own is not None:  # what another one put there
            setattr(module, name, own)


@contextlib.contextmanager
def recording(mixers: Iterable[Mixer], names: dict[Gate, str]) -> Iterator[Seen]:
    """Inside, the Seen gets what these mixers and gates compute. At the end all hooks are gone."""
    seen = Seen()

    def of_mixer(mixer, args, output):
        seen.mixer = mixer
        seen.x = args[0]
        seen.y = output

    def of_out_proj(out_proj, args):
        seen.readout = args[0]

    def of_read(read, projection, *args, **keys):
        o = read(projection, *args, **keys)
        seen.projection = projection
        seen.o = o
        return o

    def of_gate(gate, act, y, g):
        output = act(y, g)
        if g.dim() == 2:  # a static gate has no B and T
            g = g.expand(*y.shape[:2], -1, -1)
        seen.calls.append(GateCall(gate, names[gate], y, g, output))
        return output

    with contextlib.ExitStack() as stack:
        for mixer in mixers:
            stack.enter_context(mixer.register_forward_hook(of_mixer))
            stack.enter_context(mixer.out_proj.register_forward_pre_hook(of_out_proj))
            stack.enter_context(replaced(mixer, "read", of_read))
        for gate in names:
            stack.enter_context(replaced(gate, "act", functools.partial(of_gate, gate)))
        yield seen


@torch.no_grad()
def probe(
    model: GPT, inputs: torch.Tensor, measure: Callable[[Seen], Any], dtype: str = "float32"
) -> tuple[list, torch.Tensor]:
    """Runs the model, which is in evaluation mode, on inputs (B, T) and calls measure(seen) after
    each block. Returns the results by layer, and the hidden states after the last norm (B, T, C).

    A gate that is in no block, but runs before one, is seen in that layer. The model is left
    without hooks. Raises UserError where an edit has given blocks another hidden state than (B, T,
    C).
    """
    results = []
    expected = (*inputs.shape, model.config.n_embd)

    def of_block(block, args, output):
        seen.stream = args[0]
        seen.residual = output
        if seen.stream.shape != expected:
            raise UserError(
                f"meters: the hidden state of a block is {tuple(seen.stream.shape)}, not the expected "
                f"(batch, tokens, n_embd), {expected}; train with --meters=false"
            )
        results.append(measure(seen))
        vars(seen).update(vars(Seen()))

    mixers = [block.mixer for block in model.blocks]
    with contextlib.ExitStack() as stack:
        seen = stack.enter_context(recording(mixers, names_of_gates(model)))
        for block in model.blocks:
            # before FSDP's own, which lets go of the block's weights
            stack.enter_context(block.register_forward_hook(of_block, prepend=True))
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
    values = gate.value(g).float().abs()
    heads = values.movedim(-2, 0).flatten(1)  # (heads, values)
    logits = g.float().movedim(-2, 0).flatten(1)  # (heads, values)
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
        "logits": to_json(logits.square().mean(1).sqrt()),
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
    logits: dict = {}
    for call in seen.calls:
        g = call.g
        if mask is not None:  # a token may have several, as the sub-tokens of deltaproduct
            g = g.unflatten(1, (mask.shape[1], -1))[mask]
        gates[call.name] = call.gate
        logits.setdefault(call.name, []).append(g.flatten(0, -3))  # (tokens, heads, width)
    return {name: gate_meter(gate, torch.cat(logits[name])) for name, gate in gates.items()}


def head_gates(seen: Seen) -> torch.Tensor | None:
    """(B, T, H), the mean size of the gate on a head's readout; None if none multiplies it."""
    call = seen.last_call("readout") or seen.last_call("native")
    if call is None or not call.gate.is_factor:
        return None
    return call.value().abs().mean(-1).expand(-1, -1, seen.mixer.n_head)


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
    first = {name: mask[0, :length] for name, mask in masks.items() if name != "other"}
    return {name: row.nonzero().flatten().tolist() for name, row in first.items()}


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
        kind = "share" if mixer.has_positive_weights else "proxy"
        if isinstance(mixer, Softmax) and mixer.has_positive_weights:
            kind = "weights"
        rows = max(1, WEIGHTS_AT_ONCE // (H * T * T))
        parts = [query_meters(some_rows(seen, slice(i, i + rows))) for i in range(0, B, rows)]
        for name in BY_QUERY:
            by_query[name] = torch.cat([part[name] for part in parts])
        sizes = values_of(seen).norm(dim=-1)  # (B, T, H)
        median = sizes[:, 1:].median(1).values.clamp(min=1e-30)
        norms = to_json((sizes[:, 0] / median).mean(0))

    def means(mask):
        found = {}
        for name, values in by_query.items():
            found[name] = to_json(values.transpose(1, 2)[mask].mean(0))
        return found

    kinds = {}
    for name, mask in masks.items():
        gates = gate_meters(seen, mask) if mask.any() else {}
        kinds[name] = means(mask) | {"gates": gates}
    queries = torch.arange(T, device=seen.x.device) > 0
    return means(queries.expand(B, -1)) | {"kind": kind, "value_norm": norms, "kinds": kinds}


def readout_of(seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """What `read` returned, as the readout (B, T, H, D) and its denominator (B, T, H, 1) behind a
    gate on it, or 1."""
    if seen.mixer.norm_kind != "denominator":
        return seen.o, torch.ones_like(seen.o[:1, :1, :1, :1])
    call = seen.last_call("denominator")
    denominator = seen.o[..., -1:] if call is None else call.output
    return seen.o[..., :-1], denominator.clamp(min=DENOMINATOR_MIN)


def weights_of(seen: Seen) -> torch.Tensor:
    """(B, H, T, T): each value's weight in each readout, before RMSNorm and gates. UserError
    without any."""
    if not seen.has_weights:
        raise UserError(
            f"{type(seen.mixer).__name__}: its readout is its own, so explicit_weights must be, too"
        )
    weights = seen.mixer.explicit_weights(seen.projection)
    if seen.mixer.norm_kind != "denominator":  # a division by one would copy them
        return weights
    _, denominator = readout_of(seen)
    return weights / denominator.transpose(1, 2)


def query_meters(seen: Seen) -> dict[str, torch.Tensor]:
    """What each query gets from token 0, and how widely it looks: {name of BY_QUERY: (B, H, T)}."""
    size = weights_of(seen).abs()  # (B, H, T, T)
    value = values_of(seen)[:, :1]  # (B, 1, H, D)
    # with a weight of one on token 0
    written = written_by_heads(seen, readout_factor(seen) * value)
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
    return {
        "share": size[..., 0] / whole,
        "to_sink": to_sink,
        "effective": size[..., 0] * written,
        "entropy": of_keys + of_sink,
    }


def written_by_heads(seen: Seen, o: torch.Tensor) -> torch.Tensor:
    """o (B, T, H, D), as out_proj gets it -> (B, H, T): the norm of what each head writes, over
    that of the stream."""
    out = seen.mixer.out_proj.weight.unflatten(1, (seen.mixer.n_head, -1)).to(o.dtype)  # (C, H, D)
    written = torch.einsum("bihd,chd->bihc", o, out)
    call = seen.last_call("output")
    if call is not None and call.gate.is_factor:
        written = written * call.value()
    scale = 1 / at_least_float32(seen.stream).norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return (written * scale[:, :, None]).norm(dim=-1).transpose(1, 2)


def values_of(seen: Seen) -> torch.Tensor:
    """v (B, T, H, D) in at least float32, repeated where several heads share it."""
    v = seen.projection.v
    return at_least_float32(v).repeat_interleave(seen.mixer.n_head // v.shape[2], dim=2)


def ratio(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """after / before, entry by entry; 0 where before is 0."""
    return torch.where(before == 0, 0.0, at_least_float32(after) / at_least_float32(before))


def readout_factor(seen: Seen) -> torch.Tensor:
    """(B, T, H, D): what the pass multiplied the readout by, entry by entry, up to out_proj: its
    norm, its activation, its gates and its scale, but not what a gate added."""
    o, denominator = readout_of(seen)
    o = o / denominator
    if seen.projection.skip is not None:
        o = o + seen.projection.skip
    last_call = {call.gate: call for call in seen.calls}
    factor: Any = 1.0
    for gate in (*seen.mixer.before_norm, *seen.mixer.after_norm):
        call = last_call[gate]
        factor = factor * ratio(call.y, o)
        if gate.is_factor:
            factor = factor * call.value()
        o = call.output
    return factor * ratio(seen.readout.view_as(o), o)


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
            size = weights_of(some_rows(seen, slice(i, i + 1))).abs()  # (1, H, 2 half, 2 half)
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
    names = [name for name, _ in model.config.layers()]
    for layer, name, induction in zip(layers, names, inductions, strict=True):
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
    most = min(tokens, TRAINING_TOKENS)
    rows = max(4, most // dataset.longest("val", block_size))
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
    residuals = [layer["residual"] for layer in layers]
    kinds: dict = {}
    for name in sinks[0]["kinds"]:
        of_kind = [sink["kinds"][name] for sink in sinks]
        kinds[name] = {number: mean_of(of_kind, number) for number in BY_QUERY}
        kinds[name]["gate_mean"] = mean_by_position(of_kind, "mean")
    return {
        "gate_mean": mean_by_position(layers, "mean"),
        "gate_below_0.1": mean_by_position(layers, "below_0.1"),
        "gate_open": mean_by_gate(layers, "open"),
        "gate_logits": mean_by_gate(layers, "logits"),
        "sink": mean_of(sinks, "share"),
        "to_sink": mean_of(sinks, "to_sink"),
        "sink_baseline": to_json(baseline(T)),
        "effective_sink": mean_of(sinks, "effective"),
        "entropy": mean_of(sinks, "entropy"),
        "value_norm": mean_of(sinks, "value_norm"),
        "branch": [layer["branch"] for layer in layers],
        "max_activation": maximum(at["max"] for at in residuals),
        "max_over_median": maximum(at["max_over_median"] for at in residuals),
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


def mean_by_gate(layers: list[dict], name: str) -> dict[str, float | None]:
    """{"LAYER.POSITION", as 3.readout: mean of a number of this gate over its heads}"""
    means = {}
    for i, layer in enumerate(layers):
        for position, gate in layer["gates"].items():
            means[f"{i}.{position}"] = mean_of([gate], name)
    return means


def mean_of(meters: list[dict], name: str) -> float | None:
    """Over layers and heads that have the number."""
    values = []
    for meter in meters:
        values += [x for x in meter[name] if x is not None]
    return to_json(fmean(values)) if values else None


def maximum(values: Iterable[float | None]) -> float | None:
    """None if one of them is, which was not finite."""
    return to_json(max(math.inf if x is None else x for x in values))
