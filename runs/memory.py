"""What a run holds at least, by arithmetic on its sizes; and the refusal of what this machine clearly doesn't have.

    line = check_training(config, resumed, dataset, processes)              a line to print, or NotEnoughMemory
    check_pass(config, model, rows, length)                                 the same for a forward pass

Parameters, gradients and moments are counted to the byte. The only activations that count are those that no block can
do without, the outputs of its matrices: a step takes 2 to 11 times as much. So nothing is refused that would fit. Where
torch reports a shortage all the same, the run ends with one line (configurator.report).
"""

from configurator import UserError

import torch
import torch.nn as nn

from data.shards import Dataset
from model import GPT, GPTConfig
from runs.hardware import DTYPES, Processes, pick_dtype
from runs.limits import ram_available, show_bytes
from runs.parallel import is_sharded, shards_of


class NotEnoughMemory(UserError):
    """More memory would be needed than is left: now, and on this machine."""


def without_data(config: GPTConfig) -> GPT:
    """The model on the meta device, where tensors have shapes alone. Raises NotEnoughMemory for uncountable sizes."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):  # a GPT draws its seed
            return GPT(config)
    except (RuntimeError, TypeError, OverflowError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise NotEnoughMemory("its config asks for tensors that are too large") from None


def sizes_of(config: GPTConfig) -> tuple[int, list[int], list[int]]:
    """(bytes of the parameters that are no block's, those of each layer, numbers that its matrices make of a token)."""
    model = without_data(config)
    of_layers = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    matrices = [[module for module in block.modules() if isinstance(module, nn.Linear)] for block in model.blocks]
    outputs = [sum(matrix.out_features for matrix in of_block) for of_block in matrices]
    return sum(p.nbytes for p in model.parameters()) - sum(of_layers), of_layers, outputs


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


def check(config, parts: dict[str, float], device: str = "cpu", processes_here: int = 1) -> str:
    """A line about the bytes of each part, for one of processes_here processes that share this machine.

    Raises NotEnoughMemory, unless config.memory_check is false, where their sum is more than is left.
    """
    if device == "cuda":
        available, where = torch.cuda.mem_get_info()[0], "this GPU"
    elif device == "mps":
        available, where = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory(), "this GPU"
    else:
        available, where = ram_available()
        available //= processes_here
        where = where if processes_here == 1 else f"each of {processes_here} processes here"
    needed = sum(parts.values())
    listed = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items())
    line = f"memory: at least {show_bytes(needed)} ({listed}); {where} has {show_bytes(available)} left"
    if needed > available and config.memory_check:
        raise NotEnoughMemory(f"{line}: --memory_check=false tries it all the same")
    return line


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
        check(config, {"parameters": held(config, 1)["parameters"]}, "cpu", here)
    return check(config, parts, device, here)


def check_pass(config, model: GPT, rows: int, length: int, *, beside: float = 0, processes_here: int = 1) -> None:
    """NotEnoughMemory for ids (rows, length) whose forward pass the device clearly has no memory for.

    beside: bytes that are held with it
    """
    numbers = 16 + 4 * model.config.n_embd  # bytes of a token: its id and label, and x
    check(config, {"activations": rows * length * numbers + beside}, model.wte.weight.device.type, processes_here)


def check_evaluation(config, model: GPT, dataset: Dataset, block_size: int, processes_here: int = 1) -> None:
    """NotEnoughMemory for the rows of evaluate.py or meters.py; UserError for windows longer than the text."""
    counts, length = dataset.counts(config.split), longest_row(dataset, config.split, block_size)
    tokens = counts["tokens"]
    if dataset.kind == "stream" and block_size > max(model.config.block_size, tokens - 1):
        raise UserError(f"block_size={block_size}: {config.split} has {tokens} tokens, so {tokens - 1} reads all of it")
    rows = min(getattr(config, "batch_size", None) or config.rows, counts.get("rows") or -(-tokens // length))
    check_pass(config, model, rows, length, beside=bytes_of_sums(dataset, block_size), processes_here=processes_here)
