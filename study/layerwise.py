"""What Qiu et al. (2025) print of a model in tables 2 and 4: first-token attention, largest activation, mean gate.

    python meters.py --checkpoint=out/baseline,out/elementwise --published=true

It is measured layer by layer: a checkpoint takes the memory of one layer's weights and of one row's attention, whatever
its size (runs/checkpoint.py, open_model). The published numbers stand beside those measured here.

    first token   share of token 0 in the weights of queries 1..T-1, mean over heads, rows and queries
    largest |h|   of the residual stream behind the layer
    gate          mean of the gate's values, and the share of them below 0.1: how sparse it is
"""

import statistics

import torch

from model import GPT, Mixer
from runs.probe import SINK_KINDS, probe

# table 4 of the paper, its mixture of experts of 15B parameters; the released models have 1B and other numbers
PUBLISHED = {
    "none": ("baseline", 0.467, 1053.0, None),
    "elementwise": ("G1 elementwise", 0.048, 94.0, 0.116),
    "headwise": ("G1 headwise", 0.073, 98.0, 0.172),
    "shared": ("G1 head-shared", 0.301, 286.0, 0.271),
    "elementwise@value": ("G2 elementwise", 0.297, 125.0, 0.221),
}


def first_token_share(mixer: Mixer, x: torch.Tensor) -> torch.Tensor | None:
    """Mean share of token 0 in the weights of the queries behind it; x (1, T, C). None if the mixer has no weights."""
    if not mixer.has_weights():
        return None
    weights = mixer.weights(x)[:, :, 1:].abs_()  # (1, H, T - 1, T)
    return (weights[..., 0] / weights.sum(-1).clamp(min=1e-30)).mean()


def gate_of(mixer: Mixer, x: torch.Tensor) -> dict:
    """{gate_mean, gate_below_0.1} of the gate on the readout or, without one, of the first; None without a gate."""
    name = next((name for name in ("readout", "native", *mixer.gates) if name in mixer.gates), None)
    if name is None:
        return {"gate_mean": None, "gate_below_0.1": None}
    values = mixer.gates[name].value(mixer.gates[name].logits(x)).float().abs()
    return {"gate_mean": float(values.mean()), "gate_below_0.1": float((values < 0.1).float().mean())}


def layer_numbers(model: GPT, inputs: torch.Tensor, dtype: str) -> list[dict]:
    """[{mixer, first_token, largest, gate_mean, gate_below_0.1}] by layer, over inputs (B, T), a row at a time.

    model: of checkpoint.open_model, or any other.
    """

    def measure(block, seen):
        first, largest = first_token_share(block.mixer, seen["x"]), seen["residual"].float().abs().max()
        first = None if first is None else float(first)
        return {"first_token": first, "largest": float(largest)} | gate_of(block.mixer, seen["x"])

    rows = [probe(model, row, measure, dtype) for row in inputs.split(1)]
    together = {"largest": max}
    return [
        {"mixer": name}
        | {
            key: None if layers[0][key] is None else together.get(key, statistics.fmean)(each[key] for each in layers)
            for key in layers[0]
        }
        for (name, _), *layers in zip(model.config.layers(), *rows, strict=True)
    ]


def over_layers(layers: list[dict]) -> dict:
    """The numbers of a model: means over its layers, and the largest activation of any."""
    found = {}
    for key, together in (
        ("first_token", statistics.fmean),
        ("largest", max),
        ("gate_mean", statistics.fmean),
        ("gate_below_0.1", statistics.fmean),
    ):
        values = [layer[key] for layer in layers if layer[key] is not None]
        found[key] = together(values) if values else None
    return found


def table(results: list[dict]) -> str:
    """results: [{checkpoint, gate, rows, tokens, dataset, split, dtype, layers}] -> the layers of each, then all of
    them beside the published numbers."""
    lines = []
    for result in results:
        lines += [
            f"{result['checkpoint']} (gate {result['gate']}, {result['dtype']}), the first {result['rows']} rows of "
            f"{result['tokens']} tokens of {result['dataset']}, {result['split']}",
            "layer mixer          first token  largest |h|   gate mean    <0.1",
        ]
        lines += [f"{i:<5} {layer['mixer']:<14} {cells(layer)}" for i, layer in enumerate(result["layers"])]
        without = dict.fromkeys(layer["mixer"] for layer in result["layers"] if layer["first_token"] is None)
        lines += [f"first token of {', '.join(without)}: {SINK_KINDS['none']}"] * bool(without) + [""]
    lines.append("model                               first token  largest |h|   gate mean    <0.1")
    for result in results:
        lines.append(f"{result['checkpoint'][-34:]:<35} {cells(over_layers(result['layers']))}")
        if result["gate"] in PUBLISHED:
            name, first, largest, gate = PUBLISHED[result["gate"]]
            row = {"first_token": first, "largest": largest, "gate_mean": gate, "gate_below_0.1": None}
            lines.append(f"{'  published, ' + name:<35} {cells(row)}")
    return "\n".join(lines)


def cells(row: dict) -> str:
    formats = {"first_token": "11.1%", "largest": "12,.4g", "gate_mean": "11.3f", "gate_below_0.1": "7.1%"}
    shown = ((row[key], form) for key, form in formats.items())
    return " ".join("-".rjust(len(format(1.0, form))) if x is None else format(x, form) for x, form in shown)
