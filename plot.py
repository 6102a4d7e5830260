"""Draws figures from the files of runs and experiments, and from nothing else:

    python plot.py out               a run: out/page.png, from metrics.jsonl and, if they are there,
                                     meters.json (meters.py) and lengths.json (evaluate.py); of an
                                     imported model, from meters.json alone
    python plot.py results/minimum   an experiment: its metric against the step, every seed, in
                                     accuracy.png, val_loss.png or learning_rates.png; branch.png,
                                     flops.png, gain.png and lengths_gain.png if its rows have the numbers;
                                     sink.png and sink_arms.png if its data set names kinds of query
                                     (experiment.py CONFIG --run=false adds claims.png, mixers.png,
                                     windows.png and report.html)
    python plot.py results           all experiments: every claim that was judged, in claims.png
    python plot.py out/meters.json   a file of meters.py with several checkpoints: an attention map
                                     of each, side by side
    python plot.py lengths.json      a file of evaluate.py --lengths --out: its loss by position

A figure is written beside its data. This file draws runs and lengths; study/report.py draws experiments,
study/overview.py all of them, speed/figures.py what bench.py measured, and study/drawing.py has what all figures share.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P leaves it out

import configurator
from configurator import UserError, key

import collections
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

from runs.files import check_can_write, read_json, read_jsonl
from study import overview, report, sinks
from study.drawing import COLOURS, drawable, dress, mean, mixer_colours, panel_grid, write
from study.rows import read_rows

OF_SINK = ("share", "random_tokens", "effective", "token_0_before", "token_0_after")


@dataclass
class PlotConfig:
    folders: list[str] = key([], "folders of runs or experiments, or files of meters.py and evaluate.py --lengths")


def main(argv: list[str]) -> None:
    config = configurator.load(PlotConfig, argv, positional="folders", program="plot.py", description=__doc__)
    if not config.folders:
        raise UserError("folders=[]: name what to draw, as in: python plot.py out")
    for folder in map(Path, config.folders):
        if os.path.exists(folder):
            check_can_write("folders", folder / "page.png" if os.path.isdir(folder) else folder.with_suffix(".png"))
        with drawable(folder):
            print(*draw(folder), sep="\n")


def draw(folder: Path) -> list:
    """Draws the figures of what the folder or the file holds. Returns their paths; raises UserError."""
    if folder.suffix == ".json" and not os.path.isdir(folder):
        return draw_json(folder)
    if os.path.isdir(folder) and any(folder.glob("rows*.jsonl")):
        return draw_experiment(folder)
    if os.path.isfile(folder / "metrics.jsonl") or os.path.isfile(folder / "meters.json"):
        return [page(folder)]
    if os.path.isdir(folder) and any(folder.glob("*/claims.json")):
        return [overview.draw(folder)]
    raise UserError(
        f"{folder}: has neither metrics.jsonl (a run) nor rows.jsonl (an experiment), and none of its folders has "
        "claims.json (judged claims of an experiment)"
    )


def draw_experiment(folder: Path) -> list[Path]:
    """Draws the figures of an experiment's rows, and returns their paths. Raises UserError."""
    rows = read_rows(folder)
    runs = [(row["arm"], row["seed"], row.get("setting")) for row in rows if "purpose" not in row]
    if twice := [run for run, n in collections.Counter(runs).items() if n > 1]:
        arm, seed, _ = twice[0]
        raise UserError(
            f"{folder}: has two rows of arm {arm!r}, seed {seed}, with other keys each: `python experiment.py CONFIG "
            f"--out_dir={folder} --run=false` draws those of the config"
        )
    drawn = draw_json(folder / "meters.json") if os.path.isfile(folder / "meters.json") else []
    return [*report.figures(rows, folder), *drawn]


def draw_json(file: Path) -> list:
    """Draws a file of meters.py or of evaluate.py --lengths. Returns the path of the figure, or a line that says why
    there is none."""
    content = read_json(file)
    if "checkpoints" in content:
        with_maps = [meters for meters in content["checkpoints"] if meters["maps"]]
        if not with_maps:
            return [f"{file}: has no attention map, nothing to draw"]
        return [sinks.maps(with_maps, file.with_name("maps.png"))]
    figure, axes = plt.subplots(figsize=(7, 4.2))
    length_panel(axes, content)
    return [write(figure, file.with_suffix(".png"))]


# ----------------------------------------------------------------------------------------------------------------------
# The page of a run: a panel for each thing that was measured


def page(folder: Path) -> Path:
    """Draws a run's page.png and returns its path. Raises UserError for a run that has measured nothing yet."""
    panels: list[Callable] = []
    title, metrics = str(folder), read_jsonl(folder / "metrics.jsonl")
    if metrics:  # an imported model has no run of its own
        panels.append(functools.partial(loss_panel, metrics=metrics))
    if os.path.isfile(folder / "meters.json"):
        meters = read_json(folder / "meters.json")["checkpoints"][-1]
        title = title_of(meters)
        panels += meters_panels(meters)
    if os.path.isfile(folder / "lengths.json"):
        panels.append(functools.partial(length_panel, evaluation=read_json(folder / "lengths.json")))
    if not panels:
        raise UserError(f"{folder}: its metrics.jsonl is empty, so that there is nothing to draw yet")
    figure, grid = panel_grid(len(panels), 3, (5.2, 4))
    for axes, panel in zip(grid.flat, panels, strict=False):
        panel(axes)
    figure.suptitle(title)
    return write(figure, folder / "page.png")


def title_of(meters: dict) -> str:
    known = with_sink(meters)
    without = [f"{i} ({layer['mixer']})" for i, layer in enumerate(meters["layers"]) if i not in known]
    lines = [
        f"{meters['attention']}, gate {meters['gate']}, step {meters['step']}: meters on the first {meters['rows']} "
        f"rows of {meters['tokens']} tokens of {meters['dataset']}, {meters['split']}",
        f"packing: {meters['packing']}",
        f"no weights, so no sink and no map: layer {' and '.join(without)}" if without else "",
    ]
    return "\n".join(filter(None, lines)) + "\n"


def meters_panels(meters: dict) -> list[Callable]:
    """The panels of what meters.py measured of a checkpoint, each a function of axes."""
    panels: list = [(gate_panel, any(layer["gates"] for layer in meters["layers"]))]
    panels += [(sink_panel, with_sink(meters)), (token_0_panel, with_sink(meters)), (residual_panel, True)]
    panels += [(functools.partial(map_panel, shown=shown), True) for shown in meters["maps"]]
    panels.append((pruning_panel, meters["pruning"]))
    return [functools.partial(panel, meters=meters) for panel, is_there in panels if is_there]


def with_sink(meters: dict) -> dict[int, dict]:
    """{number of the layer: its meters} of the layers whose sink is known: of some mixers it is not."""
    return {i: at for i, at in enumerate(meters["layers"]) if all(None not in at["sink"][name] for name in OF_SINK)}


def loss_panel(axes: plt.Axes, metrics: list[dict]) -> None:
    train = [(row["step"], row["loss"]) for row in metrics if row["event"] == "train"]
    evaluations = [row for row in metrics if row["event"] == "eval"]
    val = [(row["step"], row["val_loss"]) for row in evaluations]
    size = f" ({evaluations[-1]['labels']:,} tokens)" if evaluations and "labels" in evaluations[-1] else ""
    spikes = [(row["step"], row["loss"]) for row in metrics if row["event"] == "train" and row.get("spike")]
    for points, look in (
        (train, dict(color=COLOURS[5], linewidth=1, label="training (one batch)")),
        (val, dict(color=COLOURS[0], marker="o", markersize=3, label=f"validation{size}")),
        (spikes, dict(color=COLOURS[6], marker="x", linestyle="", label="spike")),
    ):
        if points:
            axes.plot(*zip(*points, strict=True), **look)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="Loss")
    axes.legend(frameon=False)
    dress(axes)


def gate_panel(axes: plt.Axes, meters: dict) -> None:
    """The distribution of the gate's values: an image with a row per layer and position."""
    shown = [(i, *item) for i, layer in enumerate(meters["layers"]) for item in layer["gates"].items()]
    spread = [[mean(column) for column in zip(*gate["histogram"], strict=True)] for _, _, gate in shown]
    n = len(spread[0]) if any(row[-1] for row in spread) else len(spread[0]) - 1  # the last bin: values above 1
    percent = [[100 * share for share in row[:n]] for row in spread]
    image = axes.imshow(percent, aspect="auto", cmap="cividis", extent=(0, n / 20, len(shown), 0))
    axes.figure.colorbar(image, ax=axes, label="share of the gate's values (%)")
    one_position = len({position for _, position, _ in shown}) == 1
    names = [str(i) if one_position else f"{i} {position}" for i, position, _ in shown]
    axes.set_yticks([i + 0.5 for i in range(len(shown))], names)
    centre = [mean(gate["mean"]) for _, _, gate in shown]
    axes.plot(centre, [i + 0.5 for i in range(len(shown))], "o", color="white", markeredgecolor="black", label="mean")
    axes.legend(loc="upper right")
    small = mean(share for _, _, gate in shown for share in gate["below_0.1"])
    value = "gate value" if n == 20 else "gate value, absolute (last: above 1)"
    axes.set(xlabel=value, ylabel="layer", title=f"Gate: {small:.0%} of the values are under 0.1")


def sink_panel(axes: plt.Axes, meters: dict) -> None:
    """The weight on token 0 by layer: a dot per head."""
    x, layers = zip(*with_sink(meters).items(), strict=True)
    colours = mixer_colours(layer["mixer"] for layer in layers)
    for i, layer in zip(x, layers, strict=True):
        heads, colour = layer["sink"]["share"], colours[layer["mixer"]]
        label = "a head" if i == x[0] else None
        axes.plot([i] * len(heads), [100 * x for x in heads], "o", color=colour, alpha=0.7, label=label)
    means = [100 * mean(layer["sink"]["share"]) for layer in layers]
    random = [100 * mean(layer["sink"]["random_tokens"]) for layer in layers]
    axes.plot(x, means, color="black", label="mean of the heads")
    axes.plot(x, random, "D--", color="0.4", markerfacecolor="white", label="the same on random tokens")
    for kind, marker in zip(layers[0]["sink"]["kinds"], "v^<>" * len(layers[0]["sink"]["kinds"]), strict=False):
        found = [
            (i, [s for s in layer["sink"]["kinds"][kind]["share"] if s is not None])
            for i, layer in zip(x, layers, strict=True)
        ]
        points = [(i, 100 * mean(shares)) for i, shares in found if shares]
        axes.plot(*zip(*points, strict=True), marker, color=COLOURS[1], label=f"queries: {kind}")
    axes.axhline(100 * meters["sink_baseline"], color="0.4", linestyle=":", label="uniform weights")
    proxies = dict.fromkeys(layer["mixer"] for layer in layers if layer["sink"]["kind"] == "proxy")
    axes.set(xlabel="layer", title="Sink" + f" ({', '.join(proxies)}: a proxy)" * bool(proxies))
    axes.set(ylabel="weight on token 0, of later queries (%)", xticks=x)
    leave_room(axes)
    dress(axes)


def token_0_panel(axes: plt.Axes, meters: dict) -> None:
    """Token 0's share of the readout by layer, before norm and gate and behind them, and the effective sink."""
    x, layers = zip(*with_sink(meters).items(), strict=True)
    for name, label, colour, style in (
        ("token_0_before", "share of the readout, before the gate", COLOURS[0], "o-"),
        ("token_0_after", "share behind the gate", COLOURS[1], "s--"),
        ("effective", "written / residual (effective sink)", COLOURS[2], "^-"),
    ):
        axes.plot(x, [100 * mean(layer["sink"][name]) for layer in layers], style, color=colour, label=label)
    axes.axhline(100 * meters["sink_baseline"], color="0.4", linestyle=":", label="equal parts")
    axes.set(xlabel="layer", ylabel="%, mean of the heads", title="Token 0 in the readout")
    axes.set(xticks=x)
    leave_room(axes)
    dress(axes)


def residual_panel(axes: plt.Axes, meters: dict) -> None:
    """The largest and the median activation by layer."""
    residuals = [layer["residual"] for layer in meters["layers"]]
    top = [r["max"] for r in residuals]
    median = [r["max"] / r["max_over_median"] for r in residuals]
    axes.plot(range(len(top)), top, color=COLOURS[1], marker="^", label="largest |h|")
    axes.plot(range(len(top)), median, color=COLOURS[0], marker="o", label="median |h|")
    i = top.index(max(top))
    where = f"position {residuals[i]['position']}, channel {residuals[i]['channel']}"
    axes.annotate(
        where, (i, top[i]), xytext=(0, 8), textcoords="offset points", ha="right" if i else "left", fontsize=8
    )
    axes.set(xlabel="layer", ylabel="|h| after the layer", yscale="log", title=f"Residual stream ({meters['dtype']})")
    axes.set_xticks(range(len(top)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.15)
    axes.legend(frameon=False)
    dress(axes)


def map_panel(axes: plt.Axes, meters: dict, shown: dict) -> None:
    """The weights of one head on the first row's first tokens."""
    layer = meters["layers"][shown["layer"]]
    image = sinks.attention_map(axes, shown, sinks.largest(shown))
    axes.figure.colorbar(image, ax=axes, label="weight", pad=0.16 if shown["gate"] else 0.05)
    what = "Implied weights" if layer["sink"]["kind"] == "proxy" else "Attention"
    share = f"token 0: {layer['sink']['share'][shown['head']]:.1%}"
    axes.set_title(f"{what}: layer {shown['layer']}, head {shown['head']} ({share})", fontsize=10)


def pruning_panel(axes: plt.Axes, meters: dict) -> None:
    """Loss, and the share of gate values that are zero, against the threshold."""
    curve = meters["pruning"]
    thresholds = [row["threshold"] for row in curve]
    axes.plot(thresholds, [row["loss"] for row in curve], color=COLOURS[0], marker="o", label="loss (left)")
    axes.set(xlabel="gate values under this are zero", ylabel="loss (nats a token)", title="Pruning by the gate")
    right = axes.twinx()
    right.plot(thresholds, [100 * row["zeroed"] for row in curve], color=COLOURS[1], linestyle="--", marker="s", ms=4)
    right.set(ylabel="values that are zero (%, dashed)", ylim=(0, 100))
    right.spines["top"].set_visible(False)
    dress(axes)


def leave_room(axes: plt.Axes) -> None:
    """Starts the y axis at zero and leaves room for the legend above the data."""
    axes.set_ylim(0, 1.4 * axes.dataLim.y1)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")


def length_panel(axes: plt.Axes, evaluation: dict) -> None:
    """Loss by position in the context: a line per context length, and a mark at the trained length."""
    reached = [
        result for result in evaluation["lengths"] if result.get("by_position") and result.get("loss") is not None
    ]
    for i, result in enumerate(reached):
        positions, loss = zip(*result["by_position"], strict=True)
        label = f"context of {result['block_size']:,}: {result['loss']:.3f} nats"
        axes.plot(positions, loss, color=COLOURS[i % len(COLOURS)], marker="o", markersize=3, label=label)
    axes.axvline(evaluation["trained_length"], color="0.5", linestyle=":", label="trained length")
    axes.set(xlabel="position in the context (tokens)", ylabel="loss (nats a token)")
    axes.set_title(f"{evaluation['attention']}, gate {evaluation['gate']}, RoPE scaling {evaluation['rope_scaling']}")
    axes.legend(frameon=False)
    dress(axes)


if __name__ == "__main__":
    configurator.run(main)
