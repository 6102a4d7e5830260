"""Scores a checkpoint on a whole split, each token once:

    python evaluate.py --checkpoint=out/best.pt
    python evaluate.py --checkpoint=out/best.pt --stride=128          windows overlap: more context
    python evaluate.py --checkpoint=out/best.pt --lengths=256,512     at several context lengths
    python evaluate.py --checkpoint=out/best.pt --prune_below=0.1     gate values under 0.1 set to zero
    python evaluate.py --checkpoint=out/best.pt --dataset=data/mqar --block_size=1024
    python evaluate.py --checkpoint=out/best.pt --eight_bits=true     weights and inputs rounded to 8 bits
    torchrun --standalone --nproc_per_node=8 evaluate.py --checkpoint=out/best.pt    on 8 GPUs

It prints a table, and --out=FILE writes the numbers as JSON, too. For text it reports the loss in
nats per token, token perplexity, bits per byte and, of a whole split of WikiText-103, word
perplexity. Only the last two compare models of different tokenizers, and only at the same context
length and stride. For MQAR it reports the accuracy of each slice.
"""

from dataclasses import dataclass

from base import configurator
from base.configurator import key
from base.files import find_checkpoint
from keys import ROPE_SCALINGS, ReadingKeys


@dataclass
class EvaluateConfig(ReadingKeys):
    checkpoint: str = key(
        "out/best.pt", "a checkpoint, or an out_dir (its ckpt.pt)", find=find_checkpoint
    )
    batch_size: int = key(32, "number of rows scored at once", at_least=1)
    block_size: int | None = key(None, "context length in tokens (None: the model's)", at_least=1)
    mask_documents: bool | None = key(
        None, "text: each document is read alone (None: as in training)"
    )
    stride: int | None = key(
        None, "text: tokens between the starts of windows (None: block_size)", at_least=1
    )
    lengths: list[int] = key(
        [], "text: context lengths to compare, each with its loss by position", at_least=1
    )
    rope_scaling: str | None = key(
        None, "how RoPE is extended (None: as in training)", choices=ROPE_SCALINGS
    )
    rope_factor: float | None = key(
        None, "with rope_scaling: extension factor (None: as in training)", at_least=1
    )
    prune_below: float | None = key(
        None, "gate values under this are set to zero (None: none)", above=0
    )
    eight_bits: bool = key(False, "true: weights and inputs of linear layers are rounded to 8 bits")


configurator.begin(__name__, EvaluateConfig)

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from tqdm import tqdm

from base.configurator import UserError
from base.files import check_output, write_text
from data.shards import Dataset
from gate import Gate
from model import GPT, token_losses
from ops import IGNORE
from runs.checkpoint import check_vocabulary, data_of, load_model
from runs.hardware import Processes, autocast, pick_dtype
from study.table import aligned

CHUNK_TOKENS = 1024  # the most tokens whose logits are held at once
POSITION_BINS = 16  # the most parts of the context that the loss by position is reported for
# a label is "repeated" if so many tokens before it have stood in a row earlier in the window
REPEATED = 8


# -- The numbers of a split ------------------------------------------------------------------------


def evaluate(
    model: GPT, dataset: Dataset, split: str, *, tokens: int | None = None, **keys: Any
) -> dict:
    """The numbers of the split, as `summarize` gives them. Each process gets those of all.

    For a mixture these are the means over its parts, by their weights; "parts" has the numbers of
    each. tokens: score a fixed sample of about that many tokens (Dataset.eval_batches), of which
    each part of a mixture has its share. keys: those of evaluate_part
    """
    if len(dataset.parts) == 1:
        return evaluate_part(model, dataset, split, tokens=tokens, **keys)
    is_sample = tokens is not None and tokens < dataset.counts(split)["tokens"]
    result: dict = {"loss": 0.0, "accuracy": 0.0, "labels": 0, "parts": {}}
    for part, weight in zip(dataset.parts, dataset.weights, strict=True):
        share = math.ceil(weight * tokens) if is_sample else None
        numbers = evaluate_part(model, part, split, tokens=share, **keys)
        result["loss"] += weight * numbers["loss"]
        result["accuracy"] += weight * numbers["accuracy"]
        result["labels"] += numbers["labels"]
        result["parts"][str(part.folder)] = numbers
    result["perplexity"] = perplexity(result["loss"])
    return result


def evaluate_part(
    model: GPT,
    dataset: Dataset,
    split: str,
    *,
    batch_size: int,
    block_size: int,
    stride: int | None = None,
    dtype: str = "float32",
    tokens: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    before_batch: Callable[[], object] | None = None,
) -> dict:
    """The numbers of a split of one data set.

    dtype: of matrix products; before_batch: is called before each batch, as often on every rank,
    and ends the evaluation by what it raises
    """
    device = model.wte.weight.device
    was_training = model.training
    model.eval()
    names = dataset.slices or [None]
    # nats, labels and correct answers: summed over all processes before any division
    sums = torch.zeros(len(names), 2, block_size, 3, dtype=torch.float64)
    batches = dataset.eval_batches(
        split, batch_size, block_size, rank, world_size, stride=stride, tokens=tokens
    )
    with autocast(device.type, dtype):
        for inputs, targets, document, name in batches:
            if before_batch is not None:
                before_batch()
            if document is not None:
                document = document.to(device)
            of_slice = sums[names.index(name)]
            add_scores(of_slice, model, inputs.to(device), targets.to(device), document)
    model.train(was_training)
    if world_size > 1:
        everywhere = sums.to(device)
        torch.distributed.all_reduce(everywhere)
        sums = everywhere.cpu()
    return summarize(sums, dataset, split)


@torch.no_grad()
def add_scores(
    sums: torch.Tensor,
    model: Any,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    document: torch.Tensor | None = None,
) -> None:
    """Adds nats, labels and correct answers of a batch (B, T) to sums (2, block_size, 3) at each
    position of a row, or of a document of packed rows: in sums[0] those of the labels behind a
    string that is new to it, in sums[1] of those behind a repeated one (`is_repeated`)."""
    labelled = targets != IGNORE
    hidden = model.features(inputs, document=document)[0][labelled]  # (n, C), of the n labels
    if document is None:
        document = torch.zeros_like(inputs)
    chunks = hidden.split(CHUNK_TOKENS)
    scores = []
    for x, target in zip(chunks, targets[labelled].split(CHUNK_TOKENS), strict=True):
        logits = model.logits(x)
        losses = token_losses(logits, target).cpu().double()
        correct = (logits.argmax(-1) == target).cpu().double()
        scores.append(torch.stack([losses, torch.ones_like(losses), correct], dim=1))
    positions = labelled.nonzero()[:, 1] - document[labelled]
    # in (2, block_size)
    places = is_repeated(inputs, document)[labelled] * sums.shape[1] + positions
    sums.flatten(0, 1).index_add_(0, places.cpu(), torch.cat(scores))


def is_repeated(inputs: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    """(B, T) -> (B, T) bool: whether the REPEATED tokens that end here have stood in a row earlier
    in the window, and in its document (B, T)."""
    B, T = inputs.shape
    found = torch.zeros(B, T, dtype=torch.bool, device=inputs.device)
    if T <= REPEATED:
        return found
    strings = inputs.unfold(1, REPEATED, 1)  # (B, n, 8)
    of_first, of_last = document[:, : 1 - REPEATED], document[:, REPEATED - 1 :]  # (B, n)
    strings = torch.cat([strings, of_first[..., None]], dim=2).flatten(0, 1)
    _, ids = strings.unique(dim=0, return_inverse=True)  # equal where the strings are
    for row, of_row in zip(found, ids.view(B, -1), strict=True):
        is_same = of_row[:, None] == of_row  # (n, n)
        row[REPEATED - 1 :] = is_same.tril(-1).any(1)
    found[:, REPEATED - 1 :] &= of_first == of_last  # else the string is of two documents
    return found


def summarize(sums: torch.Tensor, dataset: Dataset, split: str) -> dict:
    """sums (slices, 2, block_size, 3) -> the numbers of the split: loss (nats per label),
    perplexity, accuracy, labels; for rows slices, for a text loss_of (`parts_of_loss`) and, where
    the whole split was read as running text, bits per byte, which divide by its bytes, and
    by_position, the losses in at most POSITION_BINS parts of the window, in turn. Word perplexity is that of
    WikiText-103 alone, since code and bytes have no words: published figures of its raw version,
    too, divide by the words of the tokenised one, "published_words".
    """
    of_slices = sums.sum((1, 2))  # (slices, 3)
    nats, labels, correct = of_slices.sum(0).tolist()
    if not labels:
        raise UserError(
            f"{dataset.folder}: no token of {split} has a label, so there is nothing to score"
        )
    loss = nats / labels
    result: dict = {"loss": loss, "perplexity": perplexity(loss), "accuracy": correct / labels}
    result["labels"] = int(labels)
    if dataset.kind == "examples":
        result["slices"] = {}
        for name, (_, n, right) in zip(dataset.slices, of_slices.tolist(), strict=True):
            if n:
                result["slices"][name] = right / n
        return result
    result["loss_of"] = parts_of_loss(sums[0])
    counts = dataset.counts(split)
    if labels < counts["tokens"] - 1:
        return result
    result["bits_per_byte"] = nats / math.log(2) / counts["bytes"]
    result["bytes"] = counts["bytes"]
    width = math.ceil(sums.shape[2] / POSITION_BINS)
    result["by_position"] = [mean_loss(part) for part in sums[0].split(width, dim=1)]
    text = dataset.meta["parameters"].get("text", {}).get(split, {})
    words = text.get("published_words")
    if words:
        result["word_perplexity"] = perplexity(nats / words)
        result["tokens_per_word"] = counts["tokens"] / words
        result["words"] = words
    return result


def perplexity(nats: float) -> float:
    return math.exp(min(nats, 700.0))  # exp(710) is too large for a float


def parts_of_loss(sums: torch.Tensor) -> dict[str, float]:
    """The mean losses of the labels in the first eighth of a window (near), in its second half
    (far), behind repeated strings (repeated) and elsewhere, and the two differences; what has no
    label is left out. sums: (2, block_size, 3)"""
    T = sums.shape[1]
    parts = {
        "near": mean_loss(sums[:, : T // 8]),
        "far": mean_loss(sums[:, T // 2 :]),
        "repeated": mean_loss(sums[1:]),
        "elsewhere": mean_loss(sums[:1]),
    }
    losses = {name: loss for name, loss in parts.items() if loss is not None}
    for one, other in (("far", "near"), ("repeated", "elsewhere")):
        if one in losses and other in losses:
            losses[f"{one}_minus_{other}"] = losses[one] - losses[other]
    return losses


def mean_loss(sums: torch.Tensor) -> float | None:
    """(2, n, 3) -> nats per label; None without any."""
    nats, labels, _ = sums.sum((0, 1)).tolist()
    return nats / labels if labels else None


# -- Pruned gates, and arithmetic in 8 bits --------------------------------------------------------


def prune_gates(model: GPT, threshold: float) -> None:
    """From here on, gate values are zero if their absolute value is below the threshold: those of
    all gates, wherever they are, but additive ones and those on the denominator, where a zero
    closes nothing."""

    def prune(gate, act, y, g):
        return act(y, g).masked_fill(gate.value(g).abs() < threshold, 0.0)

    for path, gate in model.named_modules():
        if isinstance(gate, Gate) and gate.is_factor and not path.endswith(".denominator"):
            gate.act = functools.partial(prune, gate, gate.act)  # type: ignore[method-assign]


def to_8_bits(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """x, rounded to 255 levels from -largest to largest."""
    scale = largest.clamp(min=1e-30) / 127
    return (x / scale).round() * scale


@torch.no_grad()
def quantise(model: GPT) -> None:
    """From here on, every nn.Linear of the blocks has a weight that is rounded to 8 bits, and
    rounds its input, as 8-bit arithmetic would: to 255 levels, symmetric around zero, weights with
    one scale per row, inputs with one per tensor, from the largest |x| of the batch. The embedding
    and the output layer stay as they are.
    """

    def round_input(linear, args):
        return to_8_bits(args[0], args[0].abs().max())

    for linear in model.blocks.modules():
        if isinstance(linear, nn.Linear):
            rows = linear.weight.abs().amax(1, keepdim=True)
            linear.weight.copy_(to_8_bits(linear.weight, rows))
            linear.register_forward_pre_hook(round_input)


# -- The script ------------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    config = configurator.load(EvaluateConfig, argv)
    if config.out:
        check_output(config.out, "scores", "out")
    with Processes(config.device, config.threads) as processes:
        run(config, processes)


def run(config: EvaluateConfig, processes: Processes) -> None:
    rope = {"rope_scaling": config.rope_scaling, "rope_factor": config.rope_factor}
    given = {name: value for name, value in rope.items() if value is not None}
    model, checkpoint = load_model(config.checkpoint, processes.device, **given)
    name = config.dataset or checkpoint.get("data", {}).get("mixture")
    dataset = data_of(checkpoint, name, config.mask_documents)
    check_vocabulary(model.config.vocab_size, checkpoint, dataset)
    dtype = pick_dtype(config.dtype or checkpoint.get("dtype", "float32"), processes.device_type)
    if config.prune_below is not None:
        prune_gates(model, config.prune_below)
    if config.eight_bits:
        quantise(model)
    about = {
        "checkpoint": config.checkpoint,
        "step": checkpoint.get("iter_num"),
        "attention": model.config.attention,
        "gate": model.config.gate,
        "dataset": dataset.name,
        "split": config.split,
        "version": dataset.meta["parameters"].get("version"),
        "tokenizer": dataset.tokenizer,
        "mask_documents": dataset.mask_documents,
        "trained_length": model.config.block_size,
        "dtype": dtype,
        "rope_scaling": model.config.rope_scaling,
        "rope_factor": model.config.rope_factor,
        "prune_below": config.prune_below,
        "eight_bits": config.eight_bits,
    }
    results = []
    bar = tqdm(unit=" batch", disable=None if processes.is_main else True, leave=False)
    for block_size in config.lengths or [config.block_size or model.config.block_size]:
        numbers = evaluate(
            model,
            dataset,
            config.split,
            batch_size=config.batch_size,
            block_size=block_size,
            stride=config.stride,
            dtype=dtype,
            rank=processes.rank,
            world_size=processes.world_size,
            before_batch=bar.update,
        )
        if not math.isfinite(numbers["loss"]):
            raise UserError(
                f"{config.checkpoint}: its loss is {numbers['loss']}: its weights are broken, or the "
                "run has diverged"
            )
        results.append({"block_size": block_size, "stride": config.stride} | numbers)
    bar.close()
    if processes.is_main:
        report(config, about, results)


def report(config: EvaluateConfig, about: dict, results: list[dict]) -> None:
    """Writes the numbers, and prints those that are no list: a column for each context length."""
    if config.out:
        numbers = {"lengths": results} if config.lengths else results[0]
        write_text(config.out, json.dumps(about | numbers) + "\n")
    title = "{checkpoint} (step {step}, {attention}, gate {gate}) on {dataset}, {split}"
    print(title.format(**about))
    columns = [flat(result) for result in results]
    rows = []
    for name in max(columns, key=len):  # a short context has fewer numbers
        rows.append([name, *(column.get(name, "-") for column in columns)])
    print(*aligned(rows), sep="\n")


def flat(numbers: dict, before: str = "") -> dict[str, str]:
    """{name: number as text}, of numbers inside others, too; lists are left to the JSON."""
    found = {}
    for name, value in numbers.items():
        if isinstance(value, dict):
            found |= flat(value, f"{before}{name} ")
        elif isinstance(value, float):
            found[before + name] = f"{value:.4f}"
        elif isinstance(value, int):
            found[before + name] = f"{value:,}"
    return found


if __name__ == "__main__":
    configurator.run(main)
