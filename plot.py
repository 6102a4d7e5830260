"""Figures from what runs and experiments have written, and from nothing else:

    python plot.py out                a run: loss and validation loss against steps -> out/loss.png
    python plot.py results/minimum    an experiment: accuracy against steps, every seed -> results/minimum/accuracy.png

A figure lies beside the files it was made of.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import configurator
from configurator import UserError, key

# Okabe & Ito 2008: told apart by the colour-blind. The same colour for the same arm everywhere
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]


@dataclass
class PlotConfig:
    folders: list[str] = key([], "folders of runs or experiments, or JSON files of evaluate.py")


def main(argv):
    config = configurator.load(PlotConfig, argv, positional="folders", program="plot.py", description=__doc__)
    if not config.folders:
        raise UserError("no folder given: python plot.py out")
    for folder in map(Path, config.folders):
        if folder.suffix == ".json" and folder.is_file():
            print(length_curve(json.loads(folder.read_text()), folder.with_suffix(".png")))
        elif (folder / "rows.jsonl").is_file():
            rows = read_jsonl(folder / "rows.jsonl")
            print(accuracy_curves(rows, max(step for row in rows for step, _ in row["curve"]), folder / "accuracy.png"))
        elif (folder / "metrics.jsonl").is_file():
            print(loss_curve(read_jsonl(folder / "metrics.jsonl"), folder / "loss.png"))
        else:
            raise UserError(f"{folder}: has neither metrics.jsonl (a run) nor rows.jsonl (an experiment)")


def read_jsonl(file):
    """The objects of a file of JSON lines that a run or an experiment wrote; a last line cut short is left out."""
    text = Path(file).read_text() if Path(file).is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def loss_curve(metrics, path):
    train = [(row["step"], row["loss"]) for row in metrics if row["event"] == "train"]
    val = [(row["step"], row["val_loss"]) for row in metrics if row["event"] == "eval"]
    figure, axes = plt.subplots(figsize=(7, 4.2))
    axes.plot(*zip(*train, strict=True), color=COLOURS[5], linewidth=1, label="training (one batch)")
    axes.plot(*zip(*val, strict=True), color=COLOURS[0], marker="o", markersize=3, label="validation (whole split)")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    return save(figure, axes, path)


def accuracy_curves(rows, max_iters, path):
    """Accuracy at the queries against the step: a line per run, a colour per arm."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    rows = sorted(rows, key=lambda row: (row["arm"], row["seed"]))  # whatever order they ended in: the same figure
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    for row in rows:
        first_of_arm = row is next(other for other in rows if other["arm"] == row["arm"])
        seeds = [other["seed"] for other in rows if other["arm"] == row["arm"]]
        steps, accuracy = zip(*row["curve"], strict=True)
        label = f"gate: {row['arm']} (seeds {', '.join(map(str, seeds))})" if first_of_arm else None
        colour = COLOURS[arms.index(row["arm"]) % len(COLOURS)]
        axes.plot(steps, [100 * a for a in accuracy], color=colour, linewidth=1.6, label=label)
    pairs = rows[0]["data"].get("pairs")  # several slices have several, other data have none
    if pairs:
        label = "chance among the values in context"
        axes.axhline(100 / pairs, color=COLOURS[6], linestyle=":", linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="accuracy at the queries (%)", xlim=(0, max_iters), ylim=(0, 100))
    return save(figure, axes, path)


def length_curve(evaluation, path):
    """Loss by position in the context, a line per context length, the trained length marked."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    reached = [result for result in evaluation["lengths"] if "by_position" in result]
    for i, result in enumerate(reached):
        positions, loss = zip(*result["by_position"], strict=True)
        label = f"context of {result['block_size']:,}: {result['loss']:.3f} nats"
        axes.plot(positions, loss, color=COLOURS[i % len(COLOURS)], marker="o", markersize=3, label=label)
    axes.axvline(evaluation["trained_length"], color="0.5", linestyle=":", label="trained length")
    axes.set(xlabel="position in the context (tokens)", ylabel="loss (nats a token)")
    axes.set_title(f"{evaluation['attention']}, gate {evaluation['gate']}, RoPE scaling {evaluation['rope_scaling']}")
    return save(figure, axes, path)


def save(figure, axes, path):
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


if __name__ == "__main__":
    configurator.run(main)
