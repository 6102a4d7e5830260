"""Numbers of a checkpoint, over a whole split, each token scored once:

    python evaluate.py --checkpoint=out/best.pt
    python evaluate.py --checkpoint=out/best.pt --dataset=data/mqar --split=val

Prints a table and, as its last line, one JSON object. Text gets its loss in nats a token, perplexity and bits per
byte (which compares models of different tokenizers); MQAR the accuracy at the queries, in all and by slice.
"""

import json
import math
import sys
from dataclasses import dataclass

import torch
from tqdm import tqdm

import configurator
from checkpoint import load_model
from configurator import UserError, key
from data.shards import open_dataset
from hardware import pick_device
from loss import IGNORE

CHUNK_TOKENS = 1024  # logits of so many tokens are held at once


@torch.no_grad()
def score(model, dataset, split, *, batch_size, block_size, rank=0, world_size=1, progress=False):
    """This rank's sums over its share of the split: {slice: tensor of (nats, labels, correct)}, float64."""
    device, totals = model.wte.weight.device, {}
    batches = dataset.eval_batches(split, batch_size, block_size, rank, world_size)
    for inputs, targets, name in tqdm(batches, "evaluating", unit=" batch", disable=not progress, leave=False):
        hidden = model.features(inputs.to(device))[0]
        labelled = targets != IGNORE
        hidden, targets = hidden[labelled.to(device)], targets[labelled].to(device)
        sums = totals.setdefault(name, torch.zeros(3, dtype=torch.float64))
        for x, target in zip(hidden.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True):
            logits = model.logits(x)
            nats = torch.nn.functional.cross_entropy(logits, target, reduction="none").cpu().double().sum()
            correct = (logits.argmax(-1) == target).sum()
            sums += torch.tensor([nats.item(), len(target), correct.item()], dtype=torch.float64)
    return totals


def summarize(totals, dataset, split):
    """Sums -> loss (nats a label), perplexity, accuracy, and by kind of data bits_per_byte or slices."""
    nats, labels, correct = (float(x) for x in sum(totals.values()))
    loss = nats / labels
    result = {"loss": loss, "perplexity": math.exp(min(loss, 700)), "accuracy": correct / labels, "labels": int(labels)}
    if dataset.kind == "stream":
        result["bits_per_byte"] = nats / math.log(2) / dataset.counts(split)["bytes"]
    else:
        result["slices"] = {name: float(sums[2] / sums[1]) for name, sums in totals.items()}
    return result


def evaluate(model, dataset, split, *, batch_size, block_size, rank=0, world_size=1, progress=False):
    """The split's numbers, summed over all ranks before anything is divided: the same dict on each of them."""
    was_training = model.training
    model.eval()
    options = dict(batch_size=batch_size, block_size=block_size, rank=rank, world_size=world_size)
    totals = score(model, dataset, split, progress=progress, **options)
    model.train(was_training)
    if world_size > 1:
        names = dataset.slices or [None]  # a rank may have had no batch of some slice
        sums = torch.stack([totals.get(name, torch.zeros(3, dtype=torch.float64)) for name in names])
        sums = sums.to(model.wte.weight.device)
        torch.distributed.all_reduce(sums)
        totals = {name: row for name, row in zip(names, sums.cpu(), strict=True) if row[1] > 0}
    return summarize(totals, dataset, split)


@dataclass
class EvaluateConfig:
    checkpoint: str = key("out/best.pt", "the checkpoint, or the out_dir that holds ckpt.pt")
    dataset: str | None = key(None, "folder of the data (None: what the checkpoint was trained on)")
    split: str = key("val", "which split")
    batch_size: int = key(32, "rows at a time", at_least=1)
    block_size: int | None = key(None, "context length (None: the model's)", at_least=1)
    device: str = key("auto", "where to compute", choices=("auto", "cpu", "cuda", "mps"))


def main(argv):
    config = configurator.load(EvaluateConfig, argv, program="evaluate.py", description=__doc__)
    model, checkpoint = load_model(config.checkpoint, pick_device(config.device))
    trained_on = checkpoint.get("data", {})
    dataset = open_dataset(config.dataset or trained_on.get("path", ""))
    if dataset.vocab_size > model.config.vocab_size:
        raise UserError(f"{dataset.folder}: {dataset.vocab_size} token ids, the model knows {model.config.vocab_size}")
    block_size = config.block_size or model.config.block_size
    options = dict(batch_size=config.batch_size, block_size=block_size)
    result = evaluate(model, dataset, config.split, progress=sys.stderr.isatty(), **options)

    print(
        f"{config.checkpoint} (step {checkpoint.get('iter_num')}) on {dataset.folder}, {config.split}, T={block_size}"
    )
    rows = [(name, value) for name, value in result.items() if name != "slices"]
    rows += [(f"accuracy {name}", value) for name, value in result.get("slices", {}).items()]
    for name, value in rows:
        print(f"  {name:<16}{value:>12,d}" if isinstance(value, int) else f"  {name:<16}{value:>12.4f}")
    about = {"checkpoint": config.checkpoint, "dataset": str(dataset.folder), "split": config.split}
    print(json.dumps(about | {"block_size": block_size} | result))


if __name__ == "__main__":
    configurator.run(main)
