"""Measures the gates of a checkpoint and what they do: sinks, activations, induction.

    python meters.py --checkpoint=out/best.pt                    a table, and out/meters.json
    python meters.py --checkpoint=out/best.pt --map=3.0          the attention map of layer 3's head 0
    python meters.py --checkpoint=early/ckpt.pt,late/ckpt.pt     several checkpoints, to compare
    python plot.py out                                           draws out/meters.json: out/page.png

It prints a table of means; the file has every layer, head, kind of query and map. docs/meters.md
says what each meter means: gates, sinks (the share of token 0 in
the attention weights, and what a gate leaves of it), induction scores, the largest activations. All
are of the first rows of the split, in the run's dtype. Sinks grow with training, and tiny models
may have none. evaluate.py tells what pruned gates and 8 bits do to the loss.

A data set may name kinds of query, as data/backcopy does: a list of tokens each. Sinks, gates and
loss are then measured for each kind apart, and for all other queries.
"""

from dataclasses import dataclass

from base import configurator
from base.configurator import key
from base.files import find_checkpoint
from keys import ReadingKeys


@dataclass
class MetersConfig(ReadingKeys):
    checkpoint: list[str] = key(
        ["out/best.pt"], "checkpoints, earliest first (or their folders)", find=find_checkpoint
    )
    rows: int = key(16, "how many of the split's first rows the meters read", at_least=1)
    block_size: int | None = key(None, "length of the rows (None: the model's)", at_least=2)
    first_id: int | None = key(
        None, "id put before each row, as a BOS, which has no label (None: none)", at_least=0
    )
    map: str | None = key(
        None, "attention map to keep, as layer.head (None: that of the head of largest sink)"
    )


configurator.begin(__name__, MetersConfig, positional="checkpoint")

import json

import torch
import torch.nn.functional as F

from base.configurator import UserError
from base.files import check_output, write_text
from model import GPT
from ops import IGNORE
from runs import probe
from runs.checkpoint import check_vocabulary, data_of, load_model
from runs.hardware import Processes, pick_dtype
from study.table import aligned

MAP_TOKENS = 64
# of the table, as probe.summary names them
COLUMNS = (
    "sink",
    "effective_sink",
    "entropy",
    "value_norm",
    "max_activation",
    "max_over_median",
    "gate_mean",
)


def main(argv: list[str]) -> None:
    config = configurator.load(MetersConfig, argv, positional="checkpoint")
    if not config.checkpoint:
        raise UserError("checkpoint=[]: give at least one, as in --checkpoint=out/best.pt")
    out = config.out or find_checkpoint(config.checkpoint[-1]).parent / "meters.json"
    check_output(out, "meters", "out")
    processes = Processes(config.device, config.threads)
    results = [meters_of(path, config, processes) for path in config.checkpoint]
    write_text(out, json.dumps({"checkpoints": results}) + "\n")
    for result in results:
        report(result)
    print(f"written: {out}")


def meters_of(path: str, config: MetersConfig, processes: Processes) -> dict:
    """Every number of one checkpoint, ready for JSON. Raises UserError."""
    model, checkpoint = load_model(path, processes.device)
    dataset = data_of(checkpoint, config.dataset).parts[0]
    check_vocabulary(model.config.vocab_size, checkpoint, dataset)
    dtype = pick_dtype(config.dtype or checkpoint.get("dtype", "float32"), processes.device_type)
    T = config.block_size or model.config.block_size
    inputs, targets = probe.first_rows(dataset, config.split, config.rows, T)
    if config.first_id is not None:
        if config.first_id >= model.config.vocab_size:
            raise UserError(
                f"first_id={config.first_id}: the model knows {model.config.vocab_size} ids"
            )
        inputs = F.pad(inputs[:, :-1], (1, 0), value=config.first_id)
        targets = F.pad(targets[:, :-1], (1, 0), value=IGNORE)
    inputs = inputs.to(processes.device)
    targets = targets.to(processes.device)
    masks = probe.query_masks(inputs, dataset.kinds)
    layers, hidden = probe.layer_meters(model, inputs, masks, dtype)
    queries = {"all": torch.ones_like(inputs, dtype=torch.bool)} | masks
    return {
        "checkpoint": path,
        "step": checkpoint.get("iter_num"),
        "attention": model.config.attention,
        "gate": model.config.gate,
        "gate_activation": model.config.gate_activation,
        "dataset": dataset.name,
        "folder": str(dataset.folder),
        "split": config.split,
        "first_id": config.first_id,
        "dtype": dtype,
        "rows": len(inputs),
        "tokens": inputs.shape[1],
        "sink_baseline": probe.baseline(inputs.shape[1]),
        "layers": layers,
        "losses": probe.losses_by_kind(model, hidden, targets, queries, dtype),
        "maps": attention_map(model, inputs, layers, masks, config.map, dtype),
    }


def attention_map(
    model: GPT, inputs: torch.Tensor, layers: list, masks: dict, name: str | None, dtype: str
) -> list:
    """The map of a head, "layer.head" (None: that of the largest sink), on the first row's first t
    <= MAP_TOKENS tokens: [{layer, head, weights, gate, queries}], or [] without any weights.

    weights: (t, t). gate: (t,), the mean over the head's channels of the gate on its readout; empty
    if none multiplies. queries: {kind: their positions}, without those of kind "other".
    """
    sinks = {}
    for i, layer in enumerate(layers):
        for head, share in enumerate(layer["sink"]["share"]):
            if share is not None:
                sinks[f"{i}.{head}"] = share
    if name is None and not sinks:
        return []
    name = name or max(sinks, key=sinks.get)
    if name not in sinks:
        raise UserError(f"map={name!r}: write layer.head, of a head that is there and has weights")
    layer, head = map(int, name.split("."))

    def measure(seen):
        if not seen.has_weights:
            return None
        gate = probe.head_gates(seen)
        shown = [] if gate is None else probe.to_json(gate[0, :, head])
        return {"weights": probe.to_json(probe.weights_of(seen)[0, head]), "gate": shown}

    # causal: the first tokens' weights do not depend on the others
    seen, _ = probe.probe(model, inputs[:1, :MAP_TOKENS], measure, dtype)
    queries = probe.places_of(masks, MAP_TOKENS)
    return [{"layer": layer, "head": head, "queries": queries} | seen[layer]]


def report(result: dict) -> None:
    """Prints the numbers of a checkpoint: means over the heads, a line per layer."""
    print("{checkpoint} (step {step}, {attention}, gate {gate}), {dtype}".format(**result))
    print("on the first {rows} rows of {tokens} tokens of {dataset}, {split}".format(**result))
    print(f"loss {result['losses']['all']}, sink of uniform weights {result['sink_baseline']:.4g}")
    rows = [["layer", *COLUMNS]]
    for i, layer in enumerate(result["layers"]):
        means = probe.summary([layer], result["tokens"])
        rows.append([f"{i} {layer['mixer']}", *(str(means[name]) for name in COLUMNS)])
    print(*aligned(rows), sep="\n")


if __name__ == "__main__":
    configurator.run(main)
