"""Scores a checkpoint on a whole split, each token once:

    python evaluate.py --checkpoint=out/best.pt
    python evaluate.py --checkpoint=out/best.pt --stride=128          windows overlap: more context
    python evaluate.py --checkpoint=out/best.pt --lengths=256,512     at several context lengths
    python evaluate.py --checkpoint=out/best.pt --prune_below=0.1     gate values under 0.1 set to zero
    python evaluate.py --checkpoint=out/best.pt --dataset=data/mqar --block_size=1024
    torchrun --standalone --nproc_per_node=8 evaluate.py --checkpoint=out/best.pt    on 8 GPUs
    torchrun --standalone --nproc_per_node=8 evaluate.py --parallel=fsdp     with a shard of the model on each

It prints a table. For text it reports the loss in nats per token, token perplexity, bits per byte
and, of a whole split of WikiText-103, word perplexity. Only the last two compare models of
different tokenizers, and only at the same context length and stride. For MQAR it reports the
accuracy of each slice.
"""

from dataclasses import dataclass

import configurator
from base.files import find_checkpoint, find_data
from configurator import key
from keys import DTYPES, ROPE_SCALINGS


@dataclass
class EvaluateConfig:
    checkpoint: str = key(
        "out/best.pt", "a checkpoint, or an out_dir (its ckpt.pt)", find=find_checkpoint
    )
    dataset: str | None = key(
        None, "folder of the data (None: what the checkpoint was trained on)", find=find_data
    )
    split: str = key("val", "the split of the data to score")
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
    dtype: str | None = key(None, "dtype of matrix products (None: the run's)", choices=DTYPES)
    json: bool = key(False, "true: print one JSON object instead of the table")
    out: str | None = key(None, "file for the JSON (None: no file)")
    parallel: str = key(
        "ddp",
        "what each process holds; ddp: all of the model, fsdp: a shard",
        choices=("ddp", "fsdp"),
    )
    device: str = key("auto", "device to compute on", choices=("auto", "cpu", "cuda", "mps"))
    threads: int = key(
        0,
        "CPU threads per process (0: OMP_NUM_THREADS, or cores / processes)",
        at_least=0,
        at_most=512,
    )
    memory_check: bool = key(True, "refuse to run if more memory is needed than is left")


configurator.begin(__name__, EvaluateConfig, __doc__)

import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from base.files import check_output, write_text
from configurator import UserError
from data.shards import Dataset
from model import GPT, token_losses
from ops import IGNORE
from ops.sampling import most_new_tokens
from runs import memory, parallel
from runs.checkpoint import check_same_weights, check_vocabulary, data_of, load_model
from runs.hardware import Processes, autocast, pick_dtype
from runs.notes import unused_keys
from runs.outdir import check_same_start
from study.interventions import gates_to_prune, pruned, quantised
from study.page import aligned

CHUNK_TOKENS = 1024  # the most tokens whose logits are held at once
# tokens of a batch in training; measured: twice as many take 1.1 to 1.3 times as long a token
EVALUATED_AT_ONCE = 8192
POSITION_BINS = 16  # the most parts of the context that the loss by position is reported for
# a label is "repeated" if so many tokens before it have stood in a row earlier in the window
REPEATED = 8


@torch.no_grad()
def score(model: Any, batches: Iterable[tuple], *, block_size: int) -> dict:
    """Scores batches of (inputs (B, T), targets (B, T), slice).

    Returns {slice: (2, block_size, 3) float64}, the sums of nats, labels and correct answers at
    each position of a row, of the labels behind a string that is new to the row and of those behind
    a repeated one (`is_repeated`). model: a GPT, or any function of inputs (B, T) to logits (B, T,
    V).
    """
    sums: dict = {}
    is_gpt = isinstance(model, GPT)
    device = model.wte.weight.device if is_gpt else "cpu"
    for inputs, targets, name in batches:
        inputs, targets = inputs.to(device), targets.to(device)
        labelled = targets != IGNORE
        if is_gpt:
            hidden = model.features(inputs)[0][labelled]
            chunks = map(model.logits, hidden.split(CHUNK_TOKENS))
        else:
            chunks = model(inputs)[labelled].float().split(CHUNK_TOKENS)
        scores = []
        for logits, target in zip(chunks, targets[labelled].split(CHUNK_TOKENS), strict=True):
            losses = token_losses(logits, target).cpu().double()
            correct = (logits.argmax(-1) == target).cpu().double()
            scores.append(torch.stack([losses, torch.ones_like(losses), correct], dim=1))
        positions = labelled.nonzero()[:, 1]
        # in (2, block_size)
        places = (is_repeated(inputs)[labelled] * block_size + positions).cpu()
        of_slice = sums.setdefault(name, torch.zeros(2, block_size, 3, dtype=torch.float64))
        of_slice.flatten(0, 1).index_add_(0, places, torch.cat(scores))
    return sums


def is_repeated(inputs: torch.Tensor) -> torch.Tensor:
    """(B, T) -> (B, T) bool: whether the REPEATED tokens that end here have stood in a row earlier
    in the window."""
    B, T = inputs.shape
    if T <= REPEATED:
        return torch.zeros(B, T, dtype=torch.bool, device=inputs.device)
    strings = inputs.unfold(1, REPEATED, 1).reshape(-1, REPEATED)  # (B n, 8)
    # (B, n), equal where the strings are
    ids = strings.unique(dim=0, return_inverse=True)[1].view(B, -1)
    ids, order = ids.sort(dim=1, stable=True)  # of equal ones the first in the window comes first
    again = F.pad(ids[:, 1:] == ids[:, :-1], (1, 0))
    return F.pad(torch.zeros_like(again).scatter(1, order, again), (REPEATED - 1, 0))


def summarize(sums: dict, dataset: Dataset, split: str) -> dict:
    """Sums -> the numbers of the split: loss (nats per label), perplexity, accuracy; slices, or
    those of a text, with loss_of (`parts_of_loss`).

    Bits per byte divide by the bytes of the split, so a sample of it has none. Word perplexity is
    that of WikiText-103 alone, since code and bytes have no words: published figures of its raw
    version, too, divide by the words of the tokenised one, "published_words".
    """
    totals = sum((rows.sum((0, 1)) for rows in sums.values()), torch.zeros(3, dtype=torch.float64))
    nats, labels, correct = totals.tolist()
    if not labels:
        raise UserError(
            f"{dataset.folder}: no token of {split} has a label, so there is nothing to score"
        )
    result: dict = {
        "loss": nats / labels,
        "perplexity": perplexity(nats / labels),
        "accuracy": correct / labels,
    }
    result["labels"] = int(labels)
    if dataset.kind == "examples":
        of_slice = {name: rows.sum((0, 1)).tolist() for name, rows in sums.items()}
        return result | {
            "slices": {name: right / n for name, (_, n, right) in of_slice.items() if n}
        }
    result["loss_of"] = parts_of_loss(sums)
    counts, text = dataset.counts(split), dataset.meta["parameters"].get("text", {}).get(split, {})
    if labels < counts["tokens"] - 1:
        return result
    result |= {"bits_per_byte": nats / math.log(2) / counts["bytes"], "bytes": counts["bytes"]}
    if words := text.get("published_words"):
        result |= {
            "word_perplexity": perplexity(nats / words),
            "tokens_per_word": counts["tokens"] / words,
        }
        result["words"] = words
    return result


def check_loss(loss: float, path: Path | str) -> None:
    """Raises UserError for a checkpoint whose loss is not finite, which no JSON could hold."""
    if not math.isfinite(loss):
        raise UserError(
            f"{path}: its loss is {loss}: its weights are broken, or the run has diverged"
        )


def perplexity(nats: float) -> float:
    return math.exp(min(nats, 700.0))  # exp(710) is too large for a float


def parts_of_loss(sums: dict) -> dict[str, float]:
    """The mean losses of the labels in the first eighth of a window (near), in its second half
    (far), behind repeated strings (repeated) and elsewhere, and the two differences; what has no
    label is left out."""
    (rows,) = sums.values()
    T = rows.shape[1]
    parts = {
        "near": rows[:, : T // 8],
        "far": rows[:, T // 2 :],
        "repeated": rows[1:],
        "elsewhere": rows[:1],
    }
    totals = {name: part.sum((0, 1)) for name, part in parts.items()}
    means = {name: float(total[0] / total[1]) for name, total in totals.items() if total[1] > 0}
    for one, other in (("far", "near"), ("repeated", "elsewhere")):
        if one in means and other in means:
            means[f"{one}_minus_{other}"] = means[one] - means[other]
    return means


def evaluation_rows(config, dataset: Dataset) -> int:
    """How many rows train.py evaluates at once: eval_batch_size or, if that is None, n_layer times
    batch_size, since a step keeps the activations of every layer and an evaluation those of one; at
    most EVALUATED_AT_ONCE tokens, unless batch_size is more."""
    most = EVALUATED_AT_ONCE // dataset.longest("val", config.block_size)
    return config.eval_batch_size or max(
        config.batch_size, min(config.batch_size * config.n_layer, most)
    )


def evaluate(
    model: GPT,
    dataset: Dataset,
    split: str,
    *,
    batch_size: int,
    block_size: int,
    dtype: str = "float32",
    tokens: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    before_batch: Callable[[], None] | None = None,
) -> dict:
    """The numbers of the split (`summarize`). Sums are taken over all ranks before any division:
    each gets the same.

    dtype: of matrix products; tokens: score a fixed sample of about that many tokens
    (Dataset.eval_batches), of which each part of a mixture has its share; before_batch: is called
    before each batch, as often on every rank, and ends the evaluation by what it raises
    """
    if len(dataset.parts) > 1:
        keys: Any = dict(
            batch_size=batch_size,
            block_size=block_size,
            dtype=dtype,
            rank=rank,
            world_size=world_size,
        )
        keys |= dict(before_batch=before_batch)
        n = tokens if tokens and tokens < dataset.counts(split)["tokens"] else None
        return of_mixture(
            dataset,
            lambda part, w: evaluate(model, part, split, tokens=n and math.ceil(w * n), **keys),
        )
    was_training, device = model.training, model.wte.weight.device
    model.eval()
    batches = dataset.eval_batches(split, batch_size, block_size, rank, world_size, tokens=tokens)
    if before_batch is not None:
        batches = calling(before_batch, batches)
    with autocast(device.type, dtype):
        sums = score(model, batches, block_size=block_size)
    model.train(was_training)
    return summarize(sum_over_ranks(sums, dataset, block_size, device, world_size), dataset, split)


def calling(function: Callable[[], None], batches: Iterable[tuple]) -> Iterator[tuple]:
    """The batches; the function is called before each of them."""
    for batch in batches:
        function()
        yield batch


def of_mixture(dataset: Dataset, numbers_of: Callable) -> dict:
    """The means of numbers_of(part, weight) over the parts of a mixture, by their weights; parts:
    those of each."""
    result: dict = {"loss": 0.0, "perplexity": 0.0, "accuracy": 0.0, "labels": 0, "parts": {}}
    for part, weight in zip(dataset.parts, dataset.weights, strict=True):
        result["parts"][str(part.folder)] = numbers = numbers_of(part, weight)
        result["loss"] += weight * numbers["loss"]
        result["accuracy"] += weight * numbers["accuracy"]
        result["labels"] += numbers["labels"]
    return result | {"perplexity": perplexity(result["loss"])}


def sum_over_ranks(
    sums: dict, dataset: Dataset, block_size: int, device: torch.device | str, world_size: int
) -> dict:
    """Adds the sums of all processes; each of them gets the result."""
    if world_size == 1:
        return sums
    names = dataset.slices or [None]  # a rank may have had no batch of some slice
    empty = torch.zeros(2, block_size, 3, dtype=torch.float64)
    everywhere = torch.stack([sums.get(name, empty) for name in names]).to(device)
    torch.distributed.all_reduce(everywhere)
    return {
        name: rows for name, rows in zip(names, everywhere.cpu(), strict=True) if rows[..., 1].any()
    }


def main(argv: list[str]) -> None:
    config = configurator.load(EvaluateConfig, argv)
    with Processes(config.device, config.threads) as processes:
        run(config, processes)


def run(config: EvaluateConfig, processes: Processes) -> None:
    check_same_start(processes, config, ("checkpoint", "dataset", "out"))
    if config.out:
        check_output(config.out, "scores", "out")
    if config.lengths and config.block_size:
        raise UserError("block_size, lengths: give one of them")
    rope = {
        name: value
        for name in ("rope_scaling", "rope_factor")
        if (value := getattr(config, name)) is not None
    }
    is_sharded = parallel.is_fsdp(config, processes.world_size)
    model, checkpoint = load_model(
        config.checkpoint, "cpu" if is_sharded else processes.device, **rope
    )
    unused = unused_keys(model.config) if rope else {}
    for name in [name for name in rope if name in unused and rope[name] not in ("none", 1.0)]:
        raise UserError(f"{name}={rope[name]}: changes nothing, since {unused[name]}")
    name = config.dataset or checkpoint.get("data", {}).get("mixture")
    dataset = data_of(checkpoint, name, config.mask_documents)
    processes.check_same(
        dataset.sha256, f"dataset={dataset.folder}", "give all machines the same data"
    )
    check_same_weights(processes, config.checkpoint)
    check_vocabulary(model.config.vocab_size, checkpoint, dataset)
    if config.prune_below is not None and not gates_to_prune(model):
        raise UserError(
            f"prune_below={config.prune_below}: {config.checkpoint} has no gate that multiplies"
        )
    if dataset.kind == "examples" and (config.stride or config.lengths or config.mask_documents):
        keys = "stride, lengths and mask_documents"
        raise UserError(f"{dataset.folder}: {keys} are for text, and these data are separate rows")
    config.dtype = pick_dtype(
        config.dtype or checkpoint.get("dtype", "float32"), processes.device_type
    )
    if is_sharded:
        # what is rounded to 8 bits is rounded from float32, as in one process
        gathered = "float32" if config.eight_bits else config.dtype
        parallel.shard(model, processes, gathered)

    about = {
        "checkpoint": config.checkpoint,
        "step": checkpoint.get("iter_num"),
        "attention": model.config.attention,
    }
    about |= {
        "gate": model.config.gate,
        "dataset": dataset.name,
        "split": config.split,
        "tokenizer": dataset.tokenizer,
    }
    about |= (
        {"version": dataset.meta["parameters"].get("version")} if dataset.kind == "stream" else {}
    )
    about |= {"trained_length": model.config.block_size, "dtype": config.dtype}
    about |= {"rope_scaling": model.config.rope_scaling, "rope_factor": model.config.rope_factor}
    about |= {
        name: getattr(config, name)
        for name in ("prune_below", "eight_bits")
        if getattr(config, name)
    }
    results = []
    pruning = (
        contextlib.nullcontext()
        if config.prune_below is None
        else pruned(model, config.prune_below)
    )
    rounding = quantised(model) if config.eight_bits else contextlib.nullcontext()
    with parallel.eager(model), autocast(processes.device_type, config.dtype), pruning, rounding:
        for block_size in config.lengths or [config.block_size or model.config.block_size]:
            try:
                results.append(read(model, dataset, config, block_size, processes))
            # of the model or the text; memory may be there the next time
            except UserError as limit:
                if not config.lengths or isinstance(limit, memory.NotEnoughMemory):
                    raise
                results.append({"block_size": block_size, "limit": str(limit)})
        found = [result for result in results if "limit" not in result]
        if not found:
            raise UserError(results[0]["limit"])
        for result in found:  # not in read: a loss that is not finite is no limit of a length
            check_loss(result["loss"], config.checkpoint)
    if processes.is_main:
        line = json.dumps(about | ({"lengths": results} if config.lengths else results[0]))
        if config.out:
            write_text(config.out, line + "\n")
        print(line if config.json else table(about, results))


def read(
    model: GPT, dataset: Dataset, config: EvaluateConfig, block_size: int, processes: Processes
) -> dict:
    """Scores the split in windows of one context length. Returns the numbers."""
    stride, split = config.stride or block_size, config.split
    reading = f"{'documents' if dataset.mask_documents else 'windows'}, stride {stride}"
    about: dict = {"block_size": block_size, "reading": reading}
    if len(dataset.parts) > 1:
        return about | of_mixture(
            dataset, lambda part, _: read(model, part, config, block_size, processes)
        )
    processes.on_main(
        memory.check_evaluation, config, model, dataset, block_size, processes.local_size
    )
    is_sharded = parallel.is_fsdp(config, processes.world_size)
    if dataset.mask_documents and is_sharded and block_size >= most_new_tokens(model, 0):
        # a rank whose documents are short would go on alone
        raise UserError(
            f"position {block_size - 1} is past block_size={model.config.block_size}, where its state ends"
        )
    is_quiet, of_rank = (
        not (processes.is_main and sys.stderr.isatty()),
        (processes.rank, processes.world_size),
    )
    batches = dataset.eval_batches(split, config.batch_size, block_size, *of_rank, stride=stride)
    batches = tqdm(batches, f"T={block_size}", unit=" batch", disable=is_quiet, leave=False)
    sums = processes.on_all(functools.partial(score, model, batches, block_size=block_size))
    sums = sum_over_ranks(sums, dataset, block_size, processes.device, processes.world_size)
    result = about | summarize(sums, dataset, split)
    if config.lengths:
        (rows,) = (both.sum(0) for both in sums.values())  # (block_size, 3)
        width = -(-block_size // POSITION_BINS)
        parts = [(i, rows[i : i + width].sum(0)) for i in range(0, block_size, width)]
        result["by_position"] = [[i, float(part[0] / part[1])] for i, part in parts if part[1] > 0]
    return result


def table(about: dict, results: list[dict]) -> str:
    """The numbers as text: a column for each context length."""
    title = (
        f"{about['checkpoint']} (step {about['step']}, {about['attention']}, gate {about['gate']})"
    )
    version = f" ({about['version']})" if about.get("version") else ""
    lines = [
        f"{title} on {about['dataset']}{version}, {about['split']}, tokenizer {about['tokenizer']}"
    ]
    lines += (
        [f"gate values under {about['prune_below']} set to zero"] if "prune_below" in about else []
    )
    lines += (
        ["weights and inputs of linear layers rounded to 8 bits"] if "eight_bits" in about else []
    )
    columns = [result for result in results if "limit" not in result]
    first = columns[0] if columns else {}
    rows = [
        [name, *(c[name] for c in columns)]
        for name, x in first.items()
        if not isinstance(x, dict | list)
    ]
    # a short context has fewer
    parts = sorted((c.get("loss_of", {}) for c in columns), key=len, reverse=True)
    names = dict.fromkeys(name for part in parts for name in part)
    rows += [[f"loss {name}", *(c["loss_of"].get(name, "-") for c in columns)] for name in names]
    rows += [
        [f"loss {part}", *(c["parts"][part]["loss"] for c in columns)]
        for part in first.get("parts", {})
    ]
    rows += [[f"accuracy {name}", accuracy] for name, accuracy in first.get("slices", {}).items()]

    def shown(value):
        return (
            f"{value:,d}"
            if isinstance(value, int)
            else f"{value:.4f}"
            if isinstance(value, float)
            else value
        )

    lines += [
        f"  {line}" for line in aligned([[name, *map(shown, values)] for name, *values in rows])
    ]
    lines += [
        f"  T = {result['block_size']}: {result['limit']}"
        for result in results
        if "limit" in result
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    configurator.run(main)
