"""Figures from what runs and experiments have written, and from nothing else:

    python plot.py out               a run: loss and validation loss against steps -> out/loss.png
    python plot.py results/minimum   an experiment: its metric against steps, every seed -> results/minimum/accuracy.png
                                     and, where its runs were scored at other lengths, slices.png and lengths.png
    python plot.py lengths.json      what evaluate.py --lengths --out wrote: loss by position -> lengths.png

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
            print(*experiment(read_jsonl(folder / "rows.jsonl"), folder), sep="\n")
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


def experiment(rows, folder):
    """Every figure that the rows of an experiment have something for. Returns their paths."""
    rows = sorted(rows, key=lambda row: (row["arm"], row["seed"]))  # whatever order they ended in: the same figure
    scores = [score for row in rows for score in row.get("scores", {}).values()]
    figures = [metric_curves(rows, folder / f"{rows[0].get('metric', 'accuracy')}.png")]
    if any("slices" in score for score in scores):
        figures.append(slice_curves(rows, folder / "slices.png"))
    if any("lengths" in score for score in scores):
        figures.append(context_curves(rows, folder / "lengths.png"))
    return figures


def metric_curves(rows, path):
    """What the experiment measures against the step: a line per run, a colour per arm."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    is_accuracy = rows[0].get("metric", "accuracy") == "accuracy"
    for row in rows:
        first_of_arm = row is next(other for other in rows if other["arm"] == row["arm"])
        seeds = [other["seed"] for other in rows if other["arm"] == row["arm"]]
        steps, values = zip(*row["curve"], strict=True)
        label = f"{row['arm']} (seeds {', '.join(map(str, seeds))})" if first_of_arm else None
        style = dict(color=COLOURS[arms.index(row["arm"]) % len(COLOURS)], linewidth=1.6)
        style["linestyle"] = ("-", "--", ":")[arms.index(row["arm"]) // len(COLOURS) % 3]
        axes.plot(steps, [100 * value if is_accuracy else value for value in values], label=label, **style)
    pairs = rows[0]["data"].get("pairs")  # several slices have several, other data have none
    if pairs and is_accuracy:
        label = "chance among the values in context"
        axes.axhline(100 / pairs, color=COLOURS[6], linestyle=":", linewidth=1, label=label)
    axes.set(xlabel="step", xlim=(0, max(step for row in rows for step, _ in row["curve"])))
    if is_accuracy:
        axes.set(ylabel="accuracy at the queries (%)", ylim=(0, 100))
    else:
        axes.set(ylabel="validation loss (nats a token)")
    return save(figure, axes, path)


def by_mixer(rows):
    """{mixer: [(line style, gate, the rows of that arm: one per seed)]}: solid without a gate, dashed with one."""
    mixers = {}
    for row in rows:
        gates = mixers.setdefault(row["config"].get("attention", "softmax"), {})
        gates.setdefault(row["config"].get("gate", "none"), []).append(row)
    return {
        mixer: [("-" if gate == "none" else "--", gate, own) for gate, own in gates.items()]
        for mixer, gates in mixers.items()
    }


def slice_curves(rows, path):
    """Recall beyond what was trained: longer rows with as many pairs, and with more. Lines are means over the seeds."""
    figure, panels = plt.subplots(1, 2, figsize=(13, 4.2), sharey=True)
    slices = [score["slices"] for score in rows[0]["scores"].values() if "slices" in score][0]
    shapes = [tuple(map(int, name.split("/"))) for name in slices]
    fewest = min(pairs for _, pairs in shapes)
    same = [shape for shape in shapes if shape[1] == fewest]
    more = [shape for shape in shapes if shape not in same[1:]]
    for axes, shown in zip(panels, (same, more), strict=True):
        for colour, (mixer, arms) in zip(COLOURS, by_mixer(rows).items(), strict=False):
            for linestyle, gate, own in arms:
                scores = [score["slices"] for row in own for score in row["scores"].values() if "slices" in score]
                each = [[100 * score[f"{length}/{pairs}"] for length, pairs in shown] for score in scores]
                mean = [sum(values) / len(values) for values in zip(*each, strict=True)]
                label = f"{mixer}, gate {gate}"
                axes.plot(range(len(shown)), mean, color=colour, linestyle=linestyle, marker="o", ms=3, label=label)
                for values in each:
                    axes.plot(range(len(shown)), values, color=colour, linestyle="", marker="_", ms=6, alpha=0.5)
        chance = [100 / pairs for _, pairs in shown]
        axes.plot(range(len(shown)), chance, color="0.5", linestyle=":", label="chance among the values in context")
        axes.set_xticks(range(len(shown)), [f"{length:,} / {pairs}" for length, pairs in shown])
        axes.set(xlabel="length / pairs", ylim=(0, 102))
        dress(axes)
    panels[0].set(ylabel="accuracy at the queries (%)", title="longer, with as many pairs as trained")
    panels[1].set(title="longer, with more pairs")
    panels[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return write(figure, path)


def context_curves(rows, path):
    """Loss by position at the longest context each mixer reached: a panel per mixer, a colour per scaling of RoPE."""
    mixers = by_mixer(rows)
    figure, panels = plt.subplots(1, len(mixers), figsize=(4.2 * len(mixers), 4.2), sharey=True, squeeze=False)
    for axes, (mixer, arms) in zip(panels[0], mixers.items(), strict=True):
        for linestyle, gate, own in arms:
            for colour, name in zip(COLOURS, own[0]["scores"], strict=False):
                scores = [row["scores"][name] for row in own]
                ends = [[result for result in score["lengths"] if "by_position" in result][-1] for score in scores]
                positions = [position for position, _ in ends[0]["by_position"]]
                losses = zip(*([loss for _, loss in end["by_position"]] for end in ends), strict=True)
                mean = [sum(values) / len(values) for values in losses]
                axes.plot(positions, mean, color=colour, linestyle=linestyle, label=f"{name}, gate {gate}")
                trained = scores[0]["trained_length"]
        axes.axvline(trained, color="0.5", linestyle=":", linewidth=1)
        unreached = [result["block_size"] for result in scores[0]["lengths"] if "limit" in result]
        ending = f": refuses {', '.join(map(str, unreached))}" if unreached else ""
        axes.set(xlabel="position in the context (tokens)", title=f"{mixer}, trained at {trained}{ending}")
        axes.legend(frameon=False, fontsize=8)
        dress(axes)
    panels[0][0].set(ylabel="loss (nats a token)")
    return write(figure, path)


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


def ratios(claims, path):
    """What bench.py measured: each ratio with its interval over its target; right of the line at 1 is better."""
    figure, axes = plt.subplots(figsize=(9, 1 + 0.3 * len(claims)))
    colours = {"met": COLOURS[2], "missed": COLOURS[1], "unresolved": "0.5"}
    for i, claim in enumerate(claims):
        ends = sorted((claim[end] / claim["target"]) ** (-1 if claim["at_most"] else 1) for end in ("low", "high"))
        middle = (claim["ratio"] / claim["target"]) ** (-1 if claim["at_most"] else 1)
        axes.plot(ends, [-i, -i], color=colours[claim["met"]], linewidth=3)
        axes.plot([middle], [-i], color=colours[claim["met"]], marker="o")
    axes.axvline(1, color="0.3", linewidth=1)
    names = [
        f"{claim['name']}: {claim['ratio']:.2f} ({'<=' if claim['at_most'] else '>='} {claim['target']:g})"
        for claim in claims
    ]
    axes.set_yticks([-i for i in range(len(claims))], names, fontsize=8)
    axes.set(xscale="log", xlabel="ratio over its target (turned over where less is better), 95% interval")
    for name, colour in colours.items():
        axes.plot([], [], color=colour, linewidth=3, label=name)
    return save(figure, axes, path)


def save(figure, axes, path):
    dress(axes)
    axes.legend(frameon=False)
    return write(figure, path)


def dress(axes):
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def write(figure, path):
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


if __name__ == "__main__":
    configurator.run(main)
