"""What a run holds at least, by arithmetic on its sizes; and the refusal of what this machine clearly doesn't have.

    line = check_training(config, resumed, dataset, processes)              a line to print, or NotEnoughMemory
    check_pass(config, model, rows, length)                                 the same for a forward pass

Parameters, gradients and moments are counted to the byte. The only activations that count are those that no block can
do without, the outputs of its matrices: a step takes 2 to 11 times as much. So nothing is refused that would fit. Where
torch reports a shortage all the same, the run ends with one line (configurator.report).
"""

from configurator import UserError

import dataclasses
import math

import torch

from data.shards import Dataset
from model import GPT, GPTConfig
from runs.hardware import DTYPES, Processes, memory_available, pick_dtype
from runs.limits import show_bytes
from runs.parallel import is_sharded, shards_of

# keys that make a model, a step or a pass large; one without a default is compared with USUAL
SIZES = (
    "n_layer", "n_embd", "n_head", "head_dim", "mlp_ratio", "mlp_width", "vocab_size", "pad_vocab_to", "expand",
    "state_size", "n_groups", "delta_heads", "delta_key_dim", "delta_value_dim", "gate_rank", "short_conv",
    "batch_size", "block_size", "gradient_accumulation_steps", "rows", "num_samples",
)  # fmt: skip
USUAL = 1000


def sizes_of(config: GPTConfig) -> tuple[float, list[float], list[float]]:
    """(bytes of the parameters that are no block's, those of each layer, numbers that its matrices make of a token).

    They are infinite where torch cannot even count them.
    """
    kinds = [repr(layer) for layer in config.layers()]
    n = max(kinds.index(kind) for kind in set(kinds)) + 1  # layers that show every kind
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):  # a GPT draws its seed
            model = GPT(dataclasses.replace(config, n_layer=n))
    except (RuntimeError, TypeError, OverflowError) as error:
        if "overflow" not in str(error).lower():
            raise
        return math.inf, [math.inf], [math.inf]
    blocks: dict = dict(zip(kinds, model.blocks, strict=False))  # one of each kind
    size = {kind: sum(p.nbytes for p in block.parameters()) for kind, block in blocks.items()}
    outputs = {kind: sum(widths_of(block)) for kind, block in blocks.items()}
    shell = sum(p.nbytes for p in model.parameters()) - sum(size[kind] for kind in kinds[:n])
    return shell, [size[kind] for kind in kinds], [outputs[kind] for kind in kinds]


def widths_of(block: torch.nn.Module) -> list[int]:
    """How many numbers each linear layer of a block makes of a token."""
    return [module.out_features for module in block.modules() if isinstance(module, torch.nn.Linear)]


def weight_bytes(config: GPTConfig) -> float:
    shell, of_layers, _ = sizes_of(config)
    return shell + sum(of_layers)


def held(config, world_size: int) -> dict[str, float]:
    """What each of the processes holds in a training step, beside activations: bytes of each kind.

    The parameters and AdamW's two moments, or their shards; the gradients, with DDP's copy of them; and under fsdp
    what is whole for a while: what is no block's, one block, the next one, the buffer that it arrives in, and the
    gradients that leave. Under fsdp micro-steps before the last one keep their gradients whole.
    """
    shell, of_layers, _ = sizes_of(config)
    weights = shell + sum(of_layers)
    if not is_sharded(config, world_size):
        copies = 1 + (world_size > 1)
        return {"parameters": weights, "gradients": copies * weights, "optimizer": 2 * weights}
    shard = weights / shards_of(config, world_size)
    gradients = weights if config.gradient_accumulation_steps > world_size else shard
    gathered = shell + 3 * max(of_layers) + max(shell, *of_layers)
    return {"parameters": shard, "gradients": gradients, "optimizer": 2 * shard, "gathered": gathered}


def activations_at_least(config, dtype: str, tokens: int) -> float:
    """Bytes that the blocks keep of a micro-step of so many tokens, from the way forward to the way back."""
    outputs = sizes_of(config)[2][:-1]  # the last layer may compute the tokens with labels alone
    if config.activation_checkpointing:  # the input of each block, and one block at a time
        return tokens * (4 * config.n_embd * config.n_layer + DTYPES[dtype].itemsize * max(outputs, default=0))
    return tokens * DTYPES[dtype].itemsize * sum(outputs)


def longest_row(dataset: Dataset, split: str, block_size: int) -> int:
    """Tokens of the longest row that is read; the windows of a stream are filled up to block_size."""
    dataset.counts(split)  # raises UserError where there is no such split
    shards = dataset.meta["splits"][split]["shards"]
    return block_size if dataset.kind == "stream" else max(shard["seq_len"] for shard in shards)


def bytes_of_sums(dataset: Dataset, block_size: int) -> int:
    """What evaluate.score adds up at each position, (2, block_size, 3) float64 a slice."""
    return 48 * block_size * max(1, len(dataset.slices))


# ----------------------------------------------------------------------------------------------------------------------
# One call for each program, before it takes or writes anything


class NotEnoughMemory(UserError):
    """More memory would be needed than is left: now, and on this machine."""


def check(config, parts: dict[str, float], device: str = "cpu", processes_here: int = 1) -> str:
    """A line about the bytes of each part. Raises NotEnoughMemory, unless config.memory_check is false, where their sum
    is more than there is: it names the key that is farthest above its default."""
    available, where = memory_available(device, processes_here)
    if sum(parts.values()) > available and config.memory_check:
        defaults: dict = {f.name: f.default or USUAL for f in dataclasses.fields(config) if f.name in SIZES}
        times = {name: (getattr(config, name) or 0) / default for name, default in defaults.items()}
        name = max(times, key=lambda name: times[name])
        cause = f"{name}={getattr(config, name)} makes it large; " if times[name] > 1 else ""
        raise NotEnoughMemory(
            f"at least {show_bytes(sum(parts.values()))} of memory would be needed, and {where} has "
            f"{show_bytes(available)} left: {cause}--memory_check=false tries it all the same"
        )
    listed = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items())
    return f"memory: at least {show_bytes(sum(parts.values()))} ({listed}); {where} has {show_bytes(available)} left"


def check_training(config, resumed: dict | None, dataset: Dataset, processes: Processes) -> str:
    """train.py's line about memory. Raises NotEnoughMemory."""
    device, here = processes.device_type, processes.local_size
    dtype = pick_dtype(resumed["dtype"] if resumed else config.dtype, device)
    tokens = config.batch_size * longest_row(dataset, "train", config.block_size)
    parts = held(config, processes.world_size)
    parts["rows"] = 16 * tokens * (config.gradient_accumulation_steps // processes.world_size)
    parts["activations"] = activations_at_least(config, dtype, tokens)
    parts["evaluation"] = bytes_of_sums(dataset, config.block_size)
    if device != "cpu":  # a model is made in RAM
        check(config, {"parameters": weight_bytes(config)}, "cpu", here)
    return check(config, parts, device, here)


def check_pass(config, model: GPT, rows: int, length: int, *, beside: float = 0, processes_here: int = 1) -> None:
    """NotEnoughMemory for ids (rows, length) whose forward pass the device clearly has no memory for.

    beside: bytes that are held with it
    """
    widest = max((width for block in model.blocks[:-1] for width in widths_of(block)), default=0)
    numbers = 16 + 4 * model.config.n_embd + 2 * widest  # bytes a token: ids, labels; x; an output in half precision
    check(config, {"activations": rows * length * numbers + beside}, model.wte.weight.device.type, processes_here)


def check_evaluation(config, model: GPT, dataset: Dataset, block_size: int, processes_here: int = 1) -> None:
    """NotEnoughMemory for the rows of evaluate.py or meters.py; UserError for windows longer than the text."""
    counts, length = dataset.counts(config.split), longest_row(dataset, config.split, block_size)
    tokens = counts["tokens"]
    if dataset.kind == "stream" and block_size > max(model.config.block_size, tokens - 1):
        raise UserError(f"block_size={block_size}: {config.split} has {tokens} tokens, so {tokens - 1} reads all of it")
    rows = min(getattr(config, "batch_size", None) or config.rows, counts.get("rows") or -(-tokens // length))
    check_pass(config, model, rows, length, beside=bytes_of_sums(dataset, block_size), processes_here=processes_here)
