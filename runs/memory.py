"""What a run will need of the memory, before any of it is taken; and the refusal of what this machine doesn't have.

    need = training(config, "float32", dataset, processes)                     {"weights": bytes, ..., "total": bytes}
    line = check(config, lambda config: training(...))                         a line to print, or UserError

The model's own code runs once in torch's FakeTensorMode, where every operation gives a tensor of the right size with no
memory behind it, while a tally follows the bytes that are alive. A new mixer is covered without a word here. Each kind
of block runs once and is replayed for all layers of its kind. What an operation takes only while it runs isn't seen.
On a GPU, and with torch.compile, the estimate is that of the plain form, which needs more.
"""

from configurator import UserError

import contextlib
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from data.shards import Dataset
from model import GPT, Block, GPTConfig
from ops.loss import cross_entropy_sum
from runs.hardware import Processes, autocast, memory_available, pick_dtype
from runs.limits import show_bytes
from runs.parallel import is_sharded, recompute, shards_of
from runs.probe import query_meters, rows_at_once, training_rows

# what is larger is extrapolated from these: the loops over chunks take their time here, too
MOST_TOKENS, LONGEST = 8192, 2048
EVALUATED_AT_ONCE = 8192  # tokens of a batch; measured: twice as many take 1.1 to 1.3 times as long per token
# a CPU's heap has holes between what is kept: resident memory over what is alive, measured: 1.1 to 1.5 (test_memory.py)
HOLES = 1.35
SIZES = (
    "n_layer", "n_embd", "n_head", "head_dim", "mlp_ratio", "mlp_width", "vocab_size", "pad_vocab_to", "expand",
    "state_size", "n_groups", "delta_heads", "delta_key_dim", "delta_value_dim", "gate_rank", "short_conv",
    "batch_size", "block_size", "eval_batch_size", "gradient_accumulation_steps", "rows", "num_samples", "tokens",
)  # fmt: skip


class Tally(TorchDispatchMode):
    """Follows the bytes of all storages that operations make while it is on."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.start, self.alive, self.phases = 0, 0, 0, {}, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return output

    def count(self, storage: torch.UntypedStorage) -> None:
        number, size = storage._cdata, storage.nbytes()
        if number in self.alive:  # a view, or written in place
            return

        def freed(_):
            self.now -= size
            del self.alive[number]

        self.alive[number] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)

    def end_phase(self) -> None:
        """Notes the highest and the last number of bytes of the phase that ends here, from those at its start."""
        self.phases.append((self.peak - self.start, self.now - self.start))
        self.start = self.peak = self.now


class _Mark(torch.autograd.Function):
    """The identity. It ends a phase on the way forward, and another on the way back."""

    @staticmethod
    def forward(ctx, x, tally):
        ctx.tally = tally
        tally.end_phase()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.tally.end_phase()
        return dy, None


class _MarkedBlock(nn.Module):
    def __init__(self, block, tally):
        super().__init__()
        self.block, self.tally = block, tally

    @property
    def mixer(self):
        return self.block.mixer

    def forward(self, x, state=None, start=0, only=None):
        return self.block(_Mark.apply(x, self.tally), state, start)


# ----------------------------------------------------------------------------------------------------------------------
# What is traced: call(model, tally, idx, autocast). The phases are: embedding, every kind of block, head; and of a
# train_step, head, the kinds in reverse and embedding once more, on the way back


def train_step(model: GPT, tally: Tally, idx: torch.Tensor, autocast: torch.autocast) -> None:
    """A micro-step in which every token has a label."""
    keys = dict(vocab_size=model.config.vocab_size, softcap=model.config.logit_softcap)
    with autocast:
        loss = cross_entropy_sum(_Mark.apply(model.features(idx)[0], tally), model.output_weight, idx, **keys)
    tally.end_phase()
    loss.backward()


@torch.no_grad()
def scoring(model: GPT, tally: Tally, idx: torch.Tensor, autocast: torch.autocast) -> None:
    """A batch of evaluate.score."""
    from evaluate import CHUNK_TOKENS  # here, since evaluate.py imports this file

    with autocast:
        logits = model.logits(_Mark.apply(model.features(idx)[0], tally).flatten(0, 1)[:CHUNK_TOKENS])
        F.cross_entropy(logits, idx.flatten()[:CHUNK_TOKENS], reduction="none")


@torch.no_grad()
def answering(model: GPT, tally: Tally, idx: torch.Tensor, autocast: torch.autocast) -> None:
    """Logits of all tokens."""
    model.logits(_Mark.apply(model.features(idx)[0], tally))


@torch.no_grad()
def prefill(model: GPT, tally: Tally, idx: torch.Tensor, autocast: torch.autocast) -> None:
    """Reads a prompt into the state that decoding keeps."""
    model.logits(_Mark.apply(model.features(idx, model.init_state(len(idx)))[0], tally)[:, -1])


@torch.no_grad()
def metering(model: GPT, tally: Tally, idx: torch.Tensor, autocast: torch.autocast) -> None:
    """What the sink meter computes of some rows at a time, for all heads."""

    def measure(block, args, output):
        x = args[0][: rows_at_once(block.mixer, args[0].shape[1])]
        if block.mixer.has_weights():
            query_meters(block.mixer, x, x)

    handles = [block.register_forward_hook(measure) for block in model.blocks]
    with autocast:
        _Mark.apply(model.features(idx)[0], tally)
    for handle in handles:
        handle.remove()


# ----------------------------------------------------------------------------------------------------------------------
# The trace, and what follows from it


def peak_of(
    call: Callable,
    config: GPTConfig,
    dtype: str,
    B: int,
    T: int,
    device: str = "cpu",
    *,
    accumulates: bool = False,
    shards: float = 1,
    recomputes: bool = False,
) -> float:
    """Bytes that a call takes on idx (B, T) above the weights, at most. accumulates: there are gradients already.

    shards: processes that a block's gradients are spread over; recomputes: activation_checkpointing
    """
    alive = replay(phases_of(call, config, dtype, B, T, recomputes), *sizes_of(config), accumulates, shards)
    return float(alive * (HOLES if device == "cpu" else 1))


def replay(
    phases: np.ndarray,
    kinds: list[int],
    shell_bytes: int,
    kind_bytes: list[int],
    accumulates: bool = False,
    shards: float = 1,
) -> float:
    """The highest sum over all layers. kinds: which kind each of them is."""
    n, is_training = len(kind_bytes), len(phases) > len(kind_bytes) + 2
    order = [0, *(1 + kind for kind in kinds), n + 1]
    gradients = np.zeros(len(phases))  # what stays behind of a phase on the way back
    if is_training:
        order += [n + 2, *(2 * n + 2 - kind for kind in reversed(kinds)), 2 * n + 3]
        gradients[n + 3 :] = [*reversed(kind_bytes), shell_bytes]
    now = (shell_bytes + sum(kind_bytes[kind] for kind in kinds)) if accumulates else 0
    peak = now
    for i in order:
        peak = max(peak, now + phases[i][0])
        now += phases[i][1] - gradients[i] * (1 if accumulates else 1 - 1 / shards)
    return peak


def phases_of(call: Callable, config: GPTConfig, dtype: str, B: int, T: int, recomputes: bool = False) -> np.ndarray:
    """(phases, 2): the highest and the last bytes of each, from those at its start. Exact up to MOST_TOKENS."""
    trace = functools.partial(_trace, call, model_keys(config), dtype, recomputes)
    if B * T <= MOST_TOKENS:
        return trace(B, T)
    if T <= LONGEST:
        b = max(1, MOST_TOKENS // (2 * T))
        one, two = trace(b, T), trace(2 * b, T)
        return one + (two - one) * ((B - b) / b)
    # constant + B (linear T + square T^2), as in every mixer; with weights of all pairs of tokens there is a square
    h = LONGEST // 2
    short, long, two = trace(1, h), trace(1, 2 * h), trace(2, 2 * h)
    constant, of_row = long - (two - long), two - long
    square = (of_row - 2 * (short - constant)) / (2 * h * h)
    linear = (short - constant) / h - square * h
    return constant + B * (linear * float(T) + square * float(T) ** 2)


def model_keys(config: GPTConfig) -> tuple:
    """The model's keys of a config, as what can be looked up."""
    return tuple((field.name, getattr(config, field.name)) for field in dataclasses.fields(GPTConfig))


@functools.lru_cache(maxsize=256)
def _trace(call, keys, dtype, recomputes, B, T):
    config = GPTConfig(**dict(keys))
    model, tally = _shell(config), Tally()
    with FakeTensorMode():
        blocks = [_MarkedBlock(Block(config, *layer), tally) for layer in kinds_of(config)[1]]
        for module in list(model.modules()):
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype)))
        for block in blocks if recomputes else ():
            recompute(block.block)
        model.blocks = nn.ModuleList(blocks)
        model.train(call is train_step)
        idx = torch.zeros(B, T, dtype=torch.long)
        with tally:
            call(model, tally, idx, autocast("cpu", dtype))
            tally.end_phase()
    return np.array(tally.phases, dtype=float)


def _shell(config):
    """A GPT on the meta device, without its blocks."""
    kinds = kinds_of(config)[0]
    layers = next(i for i in range(1, len(kinds) + 1) if len(set(kinds[:i])) == len(set(kinds)))
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # a GPT draws its seed
        model = GPT(dataclasses.replace(config, n_layer=layers))
    model.config, model.blocks = config, nn.ModuleList()
    return model


def kinds_of(config: GPTConfig) -> tuple[list[int], list[tuple]]:
    """(number of the kind of each layer, the (mixer, gate) of each kind)"""
    layers = config.layers()
    kinds = {repr(layer): layer for layer in layers}
    number = {name: i for i, name in enumerate(kinds)}
    return [number[repr(layer)] for layer in layers], list(kinds.values())


def sizes_of(config: GPTConfig) -> tuple[list[int], int, list[int]]:
    """(kinds of the layers, bytes of what is no block's, bytes of each kind of block)"""
    kinds, layers = kinds_of(config)
    with torch.device("meta"):
        blocks = [Block(config, *layer) for layer in layers]
    of = [sum(p.nbytes for p in module.parameters()) for module in (_shell(config), *blocks)]
    return kinds, of[0], of[1:]


def weight_bytes(config: GPTConfig) -> int:
    kinds, shell, of_kind = sizes_of(config)
    return shell + sum(of_kind[kind] for kind in kinds)


# ----------------------------------------------------------------------------------------------------------------------
# The needs of the programs: {part: bytes}, and "total" for their worst moment


def held(config, world_size: int) -> dict[str, float]:
    """What each of the processes holds in a training step, beside activations: bytes of each kind.

    The parameters and AdamW's two moments, or their shards; the gradients, with DDP's copy of them; and under fsdp
    what is whole for a while: what is no block's, one block, the next one, the buffer that it arrives in, and the
    gradients that leave. Under fsdp micro-steps before the last one keep their gradients whole.
    """
    weights, (_, shell, of_kind) = weight_bytes(config), sizes_of(config)
    if not is_sharded(config, world_size):
        copies = 1 + (world_size > 1)
        return {"parameters": weights, "gradients": copies * weights, "optimizer": 2 * weights}
    own = weights / shards_of(config, world_size)
    gradients = weights if config.gradient_accumulation_steps > world_size else own
    gathered = shell + 3 * max(of_kind) + max(shell, *of_kind)
    return {"parameters": own, "gradients": gradients, "optimizer": 2 * own, "gathered": gathered}


def stepping(config, dtype: str, length: int, world_size: int, device: str) -> dict[str, float]:
    """What each of the processes needs for a training step on rows of that length.

    The total is not the sum: activations go while gradients come, and a CPU's heap has holes between all of them.
    """
    parts, accumulates = held(config, world_size), config.gradient_accumulation_steps > world_size
    options: dict = dict(recomputes=config.activation_checkpointing)
    peak = functools.partial(peak_of, train_step, config, dtype, config.batch_size, length, device, **options)
    parts["activations"] = peak(shards=math.inf)  # as if gradients left at once
    shards = shards_of(config, world_size)
    gradients = weight_bytes(config) if accumulates else weight_bytes(config) / shards  # those that the peak has
    together = peak(accumulates=accumulates, shards=shards) - gradients - parts["activations"]
    return parts | {"total": sum(parts.values()) + together}


def training(config, dtype: str, dataset: Dataset, processes: Processes) -> dict[str, float]:
    """What one process of train.py needs."""
    device, world_size, weights = processes.device_type, processes.world_size, weight_bytes(config)
    length = longest_row(dataset, "train", config.block_size)
    parts = stepping(config, dtype, length, world_size, device)
    # a step's rows are alive while the next are loaded
    rows = 2 * 16 * (config.gradient_accumulation_steps // world_size) * config.batch_size * length
    step = parts.pop("total") + rows
    between = parts["parameters"] + parts["optimizer"]
    batch = evaluation_rows(config, dataset)
    evaluation = evaluating(config, dtype, dataset, "val", batch, config.block_size, device)["total"]
    if config.meters:
        longest = longest_row(dataset, "val", config.block_size)
        meters = peak_of(metering, config, dtype, training_rows(longest), longest, device)
        evaluation = max(evaluation, meters)
    saved = 0
    if is_sharded(config, world_size):
        evaluation += weights  # reads a copy that is whole
        if device == "cpu":  # rank 0 gathers a checkpoint beside that copy
            saved = between + 4 * weights
    else:
        between += parts["gradients"] - weights  # DDP keeps its copy
    return parts | {"evaluation": evaluation, "total": max(step, between + evaluation, saved)}


def evaluation_rows(config, dataset: Dataset) -> int:
    """How many rows train.py evaluates at once: eval_batch_size.

    If that is None: n_layer times batch_size. A step keeps the activations of every layer for the way back, and an
    evaluation those of one. That is at most EVALUATED_AT_ONCE tokens, unless batch_size is more.
    """
    if config.eval_batch_size:
        return config.eval_batch_size
    most = EVALUATED_AT_ONCE // longest_row(dataset, "val", config.block_size)
    return max(config.batch_size, min(config.batch_size * config.n_layer, most))


def evaluating(
    config: GPTConfig,
    dtype: str,
    dataset: Dataset,
    split: str,
    rows: int,
    block_size: int,
    device: str = "cpu",
    stride: int | None = None,
) -> dict[str, float]:
    """What evaluate.score needs beside the weights of a model of this config."""
    length, n_rows = longest_row(dataset, split, block_size), dataset.counts(split).get("rows")
    rows = min(rows, n_rows or -(-dataset.counts(split)["tokens"] // min(stride or block_size, block_size)))
    need = peak_of(scoring, config, dtype, rows, length, device)
    # inputs, targets and labels; the sums by position
    return {"total": need + 32 * rows * length + 24 * block_size * max(1, len(dataset.slices))}


def longest_row(dataset: Dataset, split: str, block_size: int) -> int:
    """Tokens of the longest row that is read; the windows of a stream are filled up to block_size."""
    dataset.counts(split)  # raises UserError where there is no such split
    shards = dataset.meta["splits"][split]["shards"]
    return block_size if dataset.kind == "stream" else max(shard["seq_len"] for shard in shards)


# ----------------------------------------------------------------------------------------------------------------------
# The check


class NotEnoughMemory(UserError):
    """More memory would be needed than is left: now, and on this machine."""


def check(config, need: Callable, device: str = "cpu", processes_here: int = 1) -> str:
    """Returns a line about what need(config) comes to.

    Raises NotEnoughMemory where that is more than there is, unless config.memory_check is false. The message names the
    key that helps the most when it is made smaller.
    """
    parts = _parts(need, config)
    if isinstance(parts, str):
        return f"memory: not estimated ({parts})"
    total = parts.pop("total")
    available, where = memory_available(device, processes_here)
    if total > available and config.memory_check:
        raise NotEnoughMemory(
            f"about {show_bytes(total)} of memory would be needed, and {where} has {show_bytes(available)} left: "
            f"{_reason(config, need, total)}--memory_check=false tries it all the same"
        )
    listed = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items())
    return f"memory: about {show_bytes(total)} ({listed}); {where} has {show_bytes(available)} left"


def _parts(need, config):
    """need(config); infinite where torch cannot even count the bytes; or, in words, why there is no estimate."""
    try:
        return need(config)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # the traced code may be anybody's: if it is broken, the run's own error is the one to read
        words = (str(error).splitlines() or [""])[0][:100]
        return {"total": math.inf} if "overflow" in words.lower() else f"{type(error).__name__}: {words}"


def _reason(config, need, total):
    """The key that makes it large: the one which brings it down the most where it is halved, or its default if less.

    Keys above their defaults come first, the others only if none of those explains the size.
    """
    found, fields = [(total, None, None)], {field.name: field for field in dataclasses.fields(config)}
    names = [name for name in SIZES if name in fields and getattr(config, name)]
    for name in sorted(names, key=lambda name: getattr(config, name) <= (fields[name].default or 0)):
        value, default = getattr(config, name), fields[name].default
        if value <= (default or 0) and min(size for size, _, _ in found) < 0.6 * total:
            break
        smaller = type(value)(value / (2 if total < math.inf else 2**40))
        smaller = max(1, min(smaller, default) if default else smaller)
        with contextlib.suppress(UserError):
            if name == "n_embd":  # a multiple of n_head
                smaller = max(1, smaller // config.n_head) * config.n_head
            parts = _parts(need, _replaced(config, name, smaller))
            if not isinstance(parts, str):
                found.append((parts["total"], name, smaller))
    size, name, smaller = min(found, key=lambda row: row[0])
    return (
        "" if name is None else f"{name}={getattr(config, name)} makes it large ({show_bytes(size)} with {smaller}); "
    )


def _replaced(config, name, value):
    keys = {name: value}
    if name in ("n_embd", "n_head") and getattr(config, "head_dim", 0) == config.n_embd // config.n_head:
        keys["head_dim"] = None  # it follows from the two
    return dataclasses.replace(config, **keys)


def at_most(config: GPTConfig, rows: int, length: int) -> float:
    """Bytes that a forward pass certainly stays below, without a trace: the first one in a process takes a second.

    A block's outputs are as wide as its weight matrices; a pass would have to hold 64 times all of them, and as many
    times the weights of all pairs of tokens.
    """
    _, shell, of_kind = sizes_of(config)
    heads = max(config.expand * config.n_head, config.delta_heads or 0)
    width = (max(of_kind) + shell) / config.n_embd + 4 * heads * length
    return rows * length * width * (64 + 4 * config.n_layer)  # the last: a state for each layer


def clearly_fits(config: GPTConfig, rows: int, length: int, device: str = "cpu", processes_here: int = 1) -> bool:
    return at_most(config, rows, length) < memory_available(device, processes_here)[0]


def activations_at_most(config, dataset: Dataset) -> float:
    """Bytes that the activations of a training step certainly stay below, without a trace."""
    # a step keeps of each layer what a forward pass takes at most for one
    return at_most(config, config.batch_size * config.n_layer, longest_row(dataset, "train", config.block_size))


def training_at_most(config, dataset: Dataset) -> float:
    """Bytes that one process of train.py certainly stays below, without a trace."""
    length = max(longest_row(dataset, split, config.block_size) for split in ("train", "val"))
    rows = max(evaluation_rows(config, dataset), training_rows(length))
    loaded = 32 * config.gradient_accumulation_steps * config.batch_size * length
    scores = 24 * config.block_size * max(1, len(dataset.slices))
    activations = max(activations_at_most(config, dataset), at_most(config, rows, length))
    return activations + 8 * weight_bytes(config) + loaded + scores


# ----------------------------------------------------------------------------------------------------------------------
# One call for each program, before it takes or writes anything


def check_training(config, resumed: dict | None, dataset: Dataset, processes: Processes) -> str:
    """train.py's line about memory, or UserError."""
    dtype = pick_dtype(resumed["dtype"] if resumed else config.dtype, processes.device_type)

    def need(config):
        return training(config, dtype, dataset, processes)

    here = processes.device_type, processes.local_size
    available, where = memory_available(*here)
    parts = _parts(lambda config: {"total": training_at_most(config, dataset)}, config)
    if not isinstance(parts, str) and parts["total"] < available:
        bound = {"activations at most": activations_at_most(config, dataset)}
        sizes = held(config, processes.world_size) | bound
        listed = ", ".join(f"{name} {show_bytes(size)}" for name, size in sizes.items())
        return f"memory: far less is needed than the {show_bytes(available)} that {where} has left ({listed})"
    line = check(config, need, *here)
    if processes.device_type != "cpu" and config.memory_check:  # a model is made in RAM
        available, where = memory_available("cpu", processes.local_size)
        if (size := weight_bytes(config)) > available:
            raise UserError(f"its weights are {show_bytes(size)}, and {where} has {show_bytes(available)} of RAM left")
    return line


def check_evaluation(config, model: GPT, dataset: Dataset, block_size: int, processes: Processes) -> None:
    """UserError for what evaluate.py has no memory for, and for windows of text that are longer than the text."""
    tokens = dataset.counts(config.split)["tokens"]
    if dataset.kind == "stream" and block_size > max(model.config.block_size, tokens - 1):
        raise UserError(f"block_size={block_size}: {config.split} has {tokens} tokens, so {tokens - 1} reads all of it")

    def need(config):
        options = dict(device=processes.device_type, stride=config.stride)
        sizes = config.batch_size, config.block_size
        return evaluating(model.config, config.dtype, dataset, config.split, *sizes, **options)

    here = dict(device=processes.device_type, processes_here=processes.local_size)
    if not clearly_fits(model.config, config.batch_size * max(1, len(dataset.slices)), block_size, **here):
        check(dataclasses.replace(config, block_size=block_size), need, **here)


def check_sampling(config, model: GPT, rows: int | None, length: int) -> None:
    """UserError for a prompt (1, length), or for MQAR's rows, that sample.py has no memory for."""
    device = model.wte.weight.device.type
    call = prefill if rows is None else answering
    if clearly_fits(model.config, rows or 1, max(length, model.config.block_size), device):
        return
    check(config, lambda config: {"total": peak_of(call, model.config, "float32", rows or 1, length, device)}, device)


def check_metering(config, model: GPT, dataset: Dataset, dtype: str) -> None:
    """UserError for rows that meters.py has no memory for."""
    device = model.wte.weight.device.type
    T = longest_row(dataset, config.split, model.config.block_size)

    def need(config):
        rows = min(config.rows, dataset.counts(config.split).get("rows", math.inf))
        sizes = rows, model.config.block_size, device
        scored = evaluating(model.config, "float32", dataset, config.split, *sizes)["total"]
        seen = peak_of(metering, model.config, dtype, rows, T, device)
        return {"total": max(scored, seen)}

    if not clearly_fits(model.config, config.rows, model.config.block_size, device):
        check(config, need, device)
