"""What a run would take, by arithmetic: `train.py --dry_run=true` prints it, and writes nothing.

The model is built on the meta device, and nothing is computed but, where no table has it, the peak
of this device. Memory is that of one process on a
GPU, in the dtype of the key, or bfloat16 for auto. The activations are an estimate: eagerly, layer
by layer, without what a kernel keeps for itself.
"""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from base.configurator import UserError
from base.files import find_data, parts_of_mixture
from data.meta import read_meta
from keys import GPTConfig, TrainConfig, model_args
from model import GPT, Block, Softmax
from ops.loss import chunk_tokens
from runs.hardware import DTYPES, PEAK_FLOPS, cpu_threads, peak_flops, pick_device, pick_dtype
from runs.memory import without_data
from runs.muon import matrices_of
from runs.notes import model_line
from runs.parallel import check_micro_steps, is_fsdp
from runs.resume import Start

CARD = "H100"  # of PEAK_FLOPS
MFU = 0.4  # the share of the peak that is assumed
VOCAB_SIZE = 50_257  # GPT-2's, where neither a key nor the data say it


class Data(NamedTuple):
    """What the meta.json of a data set says, or what is assumed without one."""

    vocab_size: int
    tokens_per_row: float  # a mean; of text the block_size
    lines: list[str]  # to print


def print_plan(start: Start) -> None:
    """Prints what the run takes. Under torchrun one process prints, for all of them."""
    if os.environ.get("RANK", "0") != "0":
        return
    config = start.config
    world_size = processes_of_torchrun()
    check_micro_steps(config, world_size)
    data = data_of(config)
    config.vocab_size = config.vocab_size or data.vocab_size
    model = without_data(GPTConfig(**model_args(config)))
    if config.gates_only:
        model.train_gates_only()

    first_step = 0 if start.resumed is None else start.resumed["iter_num"]
    steps = config.max_iters - first_step
    rows = config.batch_size * config.gradient_accumulation_steps
    tokens = round(rows * data.tokens_per_row)
    flops = 3 * tokens * model.flops_per_token(round(data.tokens_per_row))
    print("\n".join([*start.notes, model_line(model), *data.lines]))
    print(
        f"steps: {steps:,} of {tokens:,} tokens, {steps * tokens:,} tokens in all; "
        f"{flops / 1e12:,.4g} TFLOPs a step, three times the forward pass"
    )
    print(f"time, if {MFU:.0%} of a peak is reached:")
    peaks = [(PEAK_FLOPS[CARD], f"{CARD}, by its data sheet in bfloat16"), peak_of_this(config)]
    for peak, name in peaks:
        hours = steps * flops / (MFU * peak * world_size) / 3600
        print(f"  {hours:10,.3g} hours, {world_size} x {peak / 1e12:.3g} TFLOP/s ({name})")
    kind = f", {config.parallel}" if world_size > 1 else ""
    print(f"memory of a process on a GPU, of {world_size}{kind}, about:")
    parts = memory_of(config, model, world_size)
    for (name, how), n_bytes in parts.items():
        print(f"  {size(n_bytes)} {name}: {how}")
    print(f"  {size(sum(parts.values()))} together")
    print(disk_line(config, model))
    print(export_line(model))


def processes_of_torchrun() -> int:
    """WORLD_SIZE, which torchrun sets, and anybody may set for a dry run."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"WORLD_SIZE={text}: must be the number of processes, or `unset WORLD_SIZE`"
        )
    return int(text)


def size(n_bytes: float) -> str:
    """Bytes as text of one width."""
    return f"{tqdm.format_sizeof(n_bytes, 'B'):>8}"


# -- The data ------------------------------------------------------------------------------------


def data_of(config: TrainConfig) -> Data:
    """The data of the run. The shards are not opened."""
    try:
        find_data(config.dataset)
    except UserError as error:
        line = f"data: not there, rows are taken to have {config.block_size} tokens: {error}"
        return Data(VOCAB_SIZE, config.block_size, [line])
    parts = parts_of_mixture(config.dataset)
    rows = config.max_iters * config.batch_size * config.gradient_accumulation_steps
    vocab_size = 0
    row = 0.0  # tokens, a mean over the parts
    lines = []
    for folder, weight in parts.items():
        meta = read_meta(Path(folder))
        if "train" not in meta["splits"]:
            raise UserError(f"{folder}: has no split train; it has {', '.join(meta['splits'])}")
        train = meta["splits"]["train"]
        share = weight / sum(parts.values())
        length = length_of(meta, config.block_size)
        row += share * length
        vocab_size = max(vocab_size, meta["vocab_size"])
        if "drawn" in train:
            lines.append(f"data: {folder}, drawn anew for every step")
        else:
            read = rows * share * length  # tokens
            lines.append(
                f"data: {folder}, {train['tokens']:,} tokens; the whole run reads "
                f"{read:,.0f}: {read / train['tokens']:.3g} epochs"
            )
    return Data(vocab_size, row, lines)


def length_of(meta: dict, block_size: int) -> float:
    """The mean tokens of a row of training; of text block_size, also where documents are rows."""
    train = meta["splits"]["train"]
    if meta["kind"] == "stream":
        return block_size
    if "drawn" in train:
        return train["drawn"]["length"]
    return train["tokens"] / train["rows"]


# -- Time, memory, disk --------------------------------------------------------------------------


def peak_of_this(config: TrainConfig) -> tuple[float, str]:
    """(FLOP/s, how it is known) of a device of this machine. On a CPU auto is float32 here: to find
    the faster dtype takes a while."""
    device = pick_device(config.device)
    torch.set_num_threads(cpu_threads(config.threads))
    dtype = config.dtype
    if (device, dtype) == ("cpu", "auto"):
        dtype = "float32"
    peak, how = peak_flops(device, pick_dtype(dtype, device))
    return peak, f"the {device} of this machine, {how}"


def memory_of(config: TrainConfig, model: GPT, world_size: int) -> dict[tuple[str, str], float]:
    """{(what, how it is counted): bytes} that a process on a GPU holds at the peak of a step."""
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    width = DTYPES[dtype].itemsize
    micro_steps = config.gradient_accumulation_steps // world_size
    shards = world_size if is_fsdp(config, world_size) else 1
    trained = [p for p in model.parameters() if p.requires_grad]
    linears = [m.weight for m in model.blocks.modules() if isinstance(m, nn.Linear)]
    tokens = config.batch_size * config.block_size
    weights = sum(p.nbytes for p in model.parameters())
    gradients = sum(p.nbytes for p in trained)
    moments = moments_of(config, model)
    of_moments = "two a weight; one in Muon's matrices"
    parts = {
        ("weights", "4 bytes a parameter"): weights / shards,
        ("gradients", "4 bytes a parameter that is trained"): gradients / shards,
        ("moments", of_moments): moments / shards,
    }
    if world_size > 1 and micro_steps > 1:
        parts["sums", "whole gradients between micro-steps; ddp: in the first step"] = gradients
    if shards > 1:
        blocks = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
        others = weights - sum(blocks)
        gathered = others + 3 * max(blocks) + max(others, *blocks)
        parts["gathered", "three blocks, what is none's, the larger of these once more"] = gathered
    elif dtype != "float32":
        copies = width * sum(p.numel() for p in linears)
        parts["copies", f"linear layers of the blocks in {dtype}"] = copies

    kept = [bytes_a_token(block, config.n_embd, width) for block in model.blocks]
    how = f"{tokens:,} tokens of a micro-step x {sum(kept):,} bytes"
    activations = sum(kept)
    if config.activation_checkpointing:
        activations = 4 * config.n_embd * len(kept) + max(kept)
        how = f"{tokens:,} tokens x the input of each block and all of one block"
    parts["activations", how] = tokens * activations
    table = model.output_weight
    chunk = min(tokens, chunk_tokens(table))
    logits = chunk * len(table) * width  # the kernel of ops/softmax_kernel.py works in place
    how = f"{chunk:,} tokens x {len(table):,} logits, and the output weight in {dtype} and its gradient"
    parts["loss", how] = logits + table.numel() * (4 + 2 * width) + 3 * 4 * tokens * config.n_embd
    parts["batches", "ids and labels of a step, 8 bytes each"] = 16 * tokens * micro_steps
    return parts


def bytes_a_token(block: Block, n_embd: int, width: int) -> int:
    """Bytes that a block keeps of a token for the way back: the input and the output of each linear
    layer in the dtype of products, of `width` bytes, the input of its two norms in float32, and in
    a layer with a recurrence 64 bytes more for each channel of its readout: what the plain form
    keeps, fla's kernels less."""
    n_bytes = 2 * 4 * n_embd
    for module in block.modules():
        if isinstance(module, nn.Linear):
            n_bytes += width * (module.in_features + module.out_features)
    if not isinstance(block.mixer, Softmax):
        n_bytes += 64 * block.mixer.out_proj.in_features
    return n_bytes


def moments_of(config: TrainConfig, model: GPT) -> int:
    """Bytes of the optimizer's moments: two a weight that is trained, one in Muon's matrices."""
    one_moment = set()
    if config.optimizer == "muon":
        one_moment = set(matrices_of(model, with_gates=config.gate_optimizer != "adamw"))
    n_bytes = 0
    for p in model.parameters():
        if p.requires_grad:
            n_bytes += p.nbytes if p in one_moment else 2 * p.nbytes
    return n_bytes


def disk_line(config: TrainConfig, model: GPT) -> str:
    """What the checkpoints of the run take."""
    one = sum(p.nbytes for p in model.parameters()) + moments_of(config, model)
    n_kept = 0
    if config.keep_interval is not None:
        n_kept = config.max_iters // config.keep_interval
        n_kept = min(n_kept, config.keep_last or n_kept)
    # a kept one is a link to ckpt.pt until the next save; one more is written beside the others
    return (
        f"disk: {size(one).strip()} a checkpoint; ckpt.pt, best.pt, {n_kept} that stay, and the one "
        f"that is being written: {size((3 + n_kept) * one).strip()}"
    )


def export_line(model: GPT) -> str:
    """The family as which hub/export.py can write the model for transformers, or the keys that
    stand in the way."""
    from hub.export_hf import CLASSES, as_family

    reasons = []
    for family in CLASSES:
        try:
            as_family(model.config, model.state_dict(), family)
        except UserError as error:
            reasons.append(f"not as {family}: {error}")
        else:
            return f"export: hub/export.py --to_hf=FOLDER --family={family} can write it"
    return "\n".join(["export: hub/export.py --to_hf cannot write it", *reasons])
