"""Measures the gates of a checkpoint and what they do: sinks, activations, pruning, 8-bit
arithmetic.

    python meters.py --checkpoint=out/best.pt                    a table, and out/meters.json
    python meters.py --checkpoint=out/best.pt --maps=0.1,3.0     maps of layer.head 0.1 and 3.0
    python meters.py --checkpoint=early/ckpt.pt,late/ckpt.pt     several checkpoints, to compare
    python plot.py out                                           draws out/meters.json: out/page.png

It prints a table of means; the file has every layer, head, kind of query and map. docs/meters.md
says what each meter means: gates and whether they have collapsed, sinks (the share of token 0 in
the attention weights, and what a gate leaves of it), induction scores, the largest activations, and
the loss with pruned gates and in 8 bits. These losses are of score_batches batches, in float32; all
else is of the first rows of the split, in the run's dtype. Sinks grow with training, and tiny
models may have none.

A data set may name kinds of query, as data/backcopy does: a list of tokens each. Sinks, gates and
loss are then measured for each kind apart, and for all other queries.
"""

from dataclasses import dataclass

import configurator
from base.files import find_checkpoint, find_data
from configurator import key
from keys import DTYPES


@dataclass
class MetersConfig:
    checkpoint: list[str] = key(
        ["out/best.pt"], "checkpoints, earliest first (or their folders)", find=find_checkpoint
    )
    dataset: str | None = key(
        None, "folder of the data (None: that of the first checkpoint)", find=find_data
    )
    split: str = key("val", "the split of the data to read")
    rows: int = key(16, "how many of the split's first rows the meters read", at_least=1)
    score_batches: int = key(4, "number of batches of that many rows for the losses", at_least=1)
    maps: list[str] = key(
        [], "attention maps to keep, as layer.head (empty: the heads of largest and smallest sink)"
    )
    dtype: str | None = key(None, "dtype of matrix products (None: the run's)", choices=DTYPES)
    out: str | None = key(None, "file for the JSON (None: meters.json beside the last checkpoint)")
    device: str = key("auto", "device to compute on", choices=("auto", "cpu", "cuda", "mps"))
    threads: int = key(0, "CPU threads (0: OMP_NUM_THREADS, or cores)", at_least=0, at_most=512)
    memory_check: bool = key(True, "refuse to run if more memory is needed than is left")


configurator.begin(__name__, MetersConfig, __doc__, positional=None)

import itertools
import json
import os
from pathlib import Path

import torch

from base.files import check_output, write_text
from configurator import UserError
from data.shards import Dataset
from evaluate import check_loss, score, summarize
from model import GPT
from ops import IGNORE
from runs import memory, probe
from runs.checkpoint import check_vocabulary, data_of, load_model
from runs.hardware import Processes, pick_dtype
from study.interventions import gates_to_prune, pruned, quantised
from study.page import aligned

MAP_TOKENS = 64
THRESHOLDS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # that gate values are pruned at
SINK_KINDS = {  # what a sink is a share of
    "weights": "the weights of the attention",
    "share": "its own weights, as a share of their sum",
    "proxy": "a proxy, the absolute share of the weights that its readout implies",
    "none": "no weights: its readout is its own, and nothing knows its explicit_weights",
}


def main(argv: list[str]) -> None:
    config = configurator.load(MetersConfig, argv, positional=None)
    if not config.checkpoint:
        raise UserError("checkpoint=[]: give at least one, as in --checkpoint=out/best.pt")
    last = Path(config.checkpoint[-1])
    out = (
        Path(config.out)
        if config.out
        else (last if os.path.isdir(last) else last.parent) / "meters.json"
    )
    check_output(out, "meters", "out")
    processes = Processes(config.device, config.threads)
    dataset, results = None, []
    for path in config.checkpoint:
        model, checkpoint = load_model(path, processes.device)
        if dataset is None:
            dataset = data_of(checkpoint, config.dataset).parts[0]
        check_vocabulary(model.config.vocab_size, checkpoint, dataset)
        results.append(meters_of(model, checkpoint, path, dataset, config))
    write_text(out, json.dumps({"checkpoints": results}) + "\n")
    for result in results:  # after the file: nobody may read on
        print(table(result), end="\n\n")
    print(f"written: {out}")


def meters_of(
    model: GPT, checkpoint: dict, path: Path | str, dataset: Dataset, config: MetersConfig
) -> dict:
    """Every number of one checkpoint, ready for JSON. Raises UserError if the loss is not
    finite."""
    device, T = model.wte.weight.device, model.config.block_size
    dtype = pick_dtype(config.dtype or checkpoint.get("dtype", "float32"), device.type)
    memory.check_evaluation(config, model, dataset, T)
    batches = list(
        itertools.islice(dataset.eval_batches(config.split, config.rows, T), config.score_batches)
    )

    def scores():  # in float32, whatever the dtype
        numbers = summarize(score(model, batches, block_size=T), dataset, config.split)
        check_loss(numbers["loss"], path)
        return {name: numbers[name] for name in ("loss", "accuracy")}

    heads = [
        (f"{i}.{head}", block.mixer)
        for i, block in enumerate(model.blocks)
        for head in range(block.mixer.n_head)
    ]
    for name in config.maps:
        if name not in [known for known, mixer in heads if mixer.explicit_weights is not None]:
            raise UserError(
                f"maps={name!r}: write layer.head, of a head that is there and has weights"
            )
    whole = scores()
    inputs, targets, name = probe.first_rows(dataset, config.split, config.rows, T)
    if inputs.shape[1] < 2:
        raise UserError(
            f"{path}: on rows of one token, which has no other to look at, there is nothing to measure"
        )
    inputs, targets = inputs.to(device), targets.to(device)
    masks = probe.query_masks(inputs, dataset.kinds)
    layers = probe.layer_meters(model, inputs, masks, dtype)
    noise = torch.randint(
        dataset.vocab_size, inputs.shape, generator=torch.Generator().manual_seed(0)
    ).to(device)
    controls = probe.probe(model, noise, lambda seen: probe.sink_meter(seen, {}), dtype)
    for layer, control in zip(layers, controls, strict=True):
        layer["sink"]["random_tokens"] = control["share"]
    with quantised(model):
        in_8_bits = scores()
    pruning = []
    for threshold in THRESHOLDS if gates_to_prune(model) else ():
        with pruned(model, threshold) as counts:
            after = scores()
        pruning.append(
            {"threshold": threshold, "zeroed": probe.numbers(counts[0] / counts[1])} | after
        )
    return {
        "checkpoint": str(path),
        "step": checkpoint.get("iter_num"),
        **{name: getattr(model.config, name) for name in ("attention", "gate", "gate_activation")},
        "dataset": dataset.name,
        "folder": str(dataset.folder),
        "split": config.split,
        "slice": name,
        "dtype": dtype,
        "rows": len(inputs),
        "tokens": inputs.shape[1],
        "sink_baseline": probe.baseline(inputs.shape[1]),
        "layers": layers,
        "losses": probe.losses_by_kind(model, inputs, targets, masks, dtype),
        "maps": attention_maps(model, inputs, layers, masks, config.maps, dtype),
        **whole,
        "labels": sum(int((targets != IGNORE).sum()) for _, targets, _ in batches),
        "pruning": pruning,
        "quantised": in_8_bits,
    }


def attention_maps(
    model: GPT, inputs: torch.Tensor, layers: list, masks: dict, wanted: list, dtype: str
) -> list:
    """The wanted heads' maps on the first row's first t <= MAP_TOKENS tokens: [{layer, head,
    weights, gate, queries}].

    weights: (t, t). gate: (t,), the mean over the head's channels of the gate on its readout; empty
    if none multiplies. queries: {kind: their positions}, without those of kind "other".
    """
    shares = {
        f"{i}.{head}": x
        for i, at in enumerate(layers)
        for head, x in enumerate(at["sink"]["share"])
    }
    sinks = {name: share for name, share in shares.items() if share is not None}
    if not sinks:
        return []
    wanted = wanted or list(dict.fromkeys([max(sinks, key=sinks.get), min(sinks, key=sinks.get)]))
    # causal: the first tokens' weights do not depend on the others
    prefix = inputs[:1, :MAP_TOKENS]

    def measure(seen):
        gate = probe.head_gates(seen)
        weights = probe.weights_of(seen)[0] if seen.has_weights else None
        return weights, None if gate is None else gate[0]  # (H, t, t), (t, H)

    seen = probe.probe(model, prefix, measure, dtype)
    marks = {
        name: mask[0, :MAP_TOKENS].nonzero().flatten().tolist()
        for name, mask in masks.items()
        if name != "other"
    }
    maps = []
    for layer, head in (map(int, name.split(".")) for name in wanted):
        weights, gate = seen[layer]
        shown = {"weights": weights[head], "gate": [] if gate is None else gate[:, head]}
        maps.append(
            {
                "layer": layer,
                "head": head,
                **{k: probe.numbers(x) for k, x in shown.items()},
                "queries": marks,
            }
        )
    return maps


def table(result: dict) -> str:
    """The numbers of a checkpoint as text, a line per layer."""
    gate = (
        result["gate"]
        if result["gate"] in ("none", "native")
        else f"{result['gate']} {result['gate_activation']}"
    )
    layers = result["layers"]
    rows = [layer_row(i, layer) for i, layer in enumerate(layers)]
    lines = [
        f"{result['checkpoint']} (step {result['step']}, {result['attention']}, gate {gate}), {result['dtype']}",
        f"on the first {result['rows']} rows of {result['tokens']} tokens of {result['dataset']}, {result['split']}",
        f"sink of uniform weights: {result['sink_baseline']:.1%}; random: the same on tokens drawn at random",
        "",
        *aligned([list(rows[0]), *(list(row.values()) for row in rows)]),
        "",
    ]
    lines += dict.fromkeys(
        f"sink of {at['mixer']}: {SINK_KINDS[at['sink']['kind']]}" for at in layers
    )
    lines += [f"collapsed: {line}" for line in probe.collapsed_gates(layers)]
    lines += [
        "",
        f"loss {result['loss']:.4f}, accuracy {result['accuracy']:.1%}, over {result['labels']:,} labels",
    ]
    for row in result["pruning"]:
        zeroed = (
            f"gate values under {row['threshold']:<4} set to zero: {row['zeroed']:6.1%} of them"
        )
        lines.append(f"{zeroed}, {change(row, result)}")
    return "\n".join([*lines, f"8-bit weights and inputs: {change(result['quantised'], result)}"])


def layer_row(i: int, layer: dict) -> dict[str, str]:
    """{column: its text}; means over the heads."""
    gates, sink, residual = layer["gates"], layer["sink"], layer["residual"]
    # that of the readout
    gate = next((gates[name] for name in ("readout", "native", *gates) if name in gates), {})
    return {
        "layer": str(i),
        "mixer": layer["mixer"],
        "gate mean": show(gate.get("mean"), ".3f"),
        **{f"gate {name}": show(gate.get(name)) for name in ("below_0.1", "above_0.9")},
        "sink": show(sink["share"]),
        "random": show(sink["random_tokens"]),
        "to sink": show(sink["to_sink"]),
        "token 0": show(sink["token_0_before"]),
        "behind gate": show(sink["token_0_after"]),
        "max |h|": show([residual["max"]], ".4g"),
        "over median": show([residual["max_over_median"]], ".4g"),
        "position (token) channel": f"{residual['position']} ({residual['token']}) {residual['channel']}",
    }


def show(values: list | None, form: str = ".1%") -> str:
    """The mean over the heads, or "-" where there is none."""
    middle = probe.mean(values or ())
    return "-" if middle is None else format(middle, form)


def change(row: dict, result: dict) -> str:
    return f"loss {row['loss']:.4f} ({row['loss'] - result['loss']:+.4f}), accuracy {row['accuracy']:.1%}"


if __name__ == "__main__":
    configurator.run(main)
