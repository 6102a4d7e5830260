"""Draws figures from the files of runs and experiments, and from nothing else:

    python plot.py out               a run: out/page.png, from metrics.jsonl, meters.json (meters.py), or both
    python plot.py results/minimum   an experiment: each figure that its rows have the numbers for
                                     (experiment.py CONFIG --run=false adds those of its claims, and report.html)
    python plot.py results           all experiments: every claim that was judged, in claims.png
    python plot.py out/meters.json   several checkpoints of meters.py: an attention map of each, side by side
    python plot.py out --html=true   also out/page.html, to look at a text in a browser, token by token (token_page.py)

Here are the page of a run and its panels. study/report.py draws experiments, study/overview.py all of them.
"""

from dataclasses import dataclass

import configurator
from configurator import key


@dataclass
class PlotConfig:
    folders: list[str] = key([], "folders of runs or experiments, or files of meters.py")
    html: bool = key(False, "write page.html beside meters.json, too: its last checkpoint's gates, token by token")
    text: str | None = key(None, "html: the text to show (None: the first row that meters.py read)")


configurator.begin(__name__, PlotConfig, __doc__, positional="folders")

import collections
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

from configurator import UserError
from runs.files import read_json, read_jsonl
from study import overview, report, sinks
from study.drawing import COLOURS, drawable, dress, mean, mixer_colours, panel_grid, write
from study.rows import read_rows
from token_page import write_page

OF_SINK = ("share", "random_tokens", "effective", "token_0_before", "token_0_after")


def main(argv: list[str]) -> None:
    config = configurator.load(PlotConfig, argv, positional="folders", program="plot.py", description=__doc__)
    if not config.folders:
        raise UserError("folders=[]: name what to draw, as in: python plot.py out")
    if config.text is not None and not config.html:
        raise UserError("text=...: is shown on the page in HTML; add --html=true")
    for folder in map(Path, config.folders):
        with drawable(folder):
            print(*draw(folder), *([write_page(folder, config.text)] if config.html else []), sep="\n")


def draw(folder: Path) -> list:
    """Draws the figures of what the folder or the file holds. Returns their paths; raises UserError."""
    if folder.suffix == ".json" and not os.path.isdir(folder):
        return draw_maps(folder)
    if os.path.isdir(folder) and any(folder.glob("rows*.jsonl")):
        return draw_experiment(folder)
    if os.path.isfile(folder / "metrics.jsonl") or os.path.isfile(folder / "meters.json"):
        return [page(folder)]
    if os.path.isdir(folder) and any(folder.glob("*/claims.json")):
        return [overview.draw(folder)]
    raise UserError(f"{folder}: has no metrics.jsonl (a run), rows.jsonl (an experiment) or */claims.json (several)")


def draw_experiment(folder: Path) -> list[Path]:
    """Draws the figures of an experiment's rows, and returns their paths. Raises UserError."""
    rows = read_rows(folder)
    runs = collections.Counter((row["arm"], row["seed"]) for row in rows if "purpose" not in row)
    if twice := [run for run, n in runs.items() if n > 1]:
        arm, seed = twice[0]
        raise UserError(f"{folder}: two rows of arm {arm!r}, seed {seed}; experiment.py --run=false draws the config's")
    drawn = draw_maps(folder / "meters.json") if os.path.isfile(folder / "meters.json") else []
    return [*report.figures(rows, folder), *drawn]


def draw_maps(file: Path) -> list:
    """Draws a file of meters.py. Returns the path of the figure, or a line that says why there is none."""
    with_maps = [meters for meters in read_json(file)["checkpoints"] if meters["maps"]]
    if not with_maps:
        return [f"{file}: has no attention map, nothing to draw"]
    return [sinks.maps(with_maps, file.with_name("maps.png"))]


def page(folder: Path) -> Path:
    """Draws a run's page.png and returns its path. Raises UserError for a run that has measured nothing yet."""
    title, metrics = str(folder), read_jsonl(folder / "metrics.jsonl")
    panels: list[Callable] = [functools.partial(loss_panel, metrics=metrics)] if metrics else []
    if os.path.isfile(folder / "meters.json"):
        meters = read_json(folder / "meters.json")["checkpoints"][-1]
        title = (
            f"{meters['attention']}, gate {meters['gate']}, step {meters['step']}: on the first {meters['rows']} rows "
            f"of {meters['tokens']} tokens of {meters['dataset']}, {meters['split']}"
        )
        if without := [str(i) for i in range(len(meters["layers"])) if i not in with_sink(meters)]:
            title += f"\nno weights, so no sink and no map: layer {', '.join(without)}"
        panels += [functools.partial(panel, meters=meters) for panel in meters_panels(meters)]
    if not panels:
        raise UserError(f"{folder}: its metrics.jsonl is empty, so that there is nothing to draw yet")
    figure, grid = panel_grid(len(panels), 3, (5.2, 4))
    for axes, panel in zip(grid.flat, panels, strict=False):
        panel(axes)
    figure.suptitle(title)
    return write(figure, folder / "page.png")


def meters_panels(meters: dict) -> list[Callable]:
    """The panels of what meters.py measured of a checkpoint, each a function of axes and meters."""
    panels: list[Callable] = [gate_panel] if any(layer["gates"] for layer in meters["layers"]) else []
    panels += [sink_panel, token_0_panel] if with_sink(meters) else []
    return [*panels, residual_panel, *(functools.partial(map_panel, shown=shown) for shown in meters["maps"])]


def with_sink(meters: dict) -> dict[int, dict]:
    """{number of the layer: its meters} of the layers whose sink is known: of some mixers it is not."""
    return {i: at for i, at in enumerate(meters["layers"]) if all(None not in at["sink"][name] for name in OF_SINK)}


def lines(axes: plt.Axes, of: Iterable[tuple], **about) -> None:
    """Draws lines, (points, style, colour, label) each, with a legend."""
    for points, style, colour, label in of:
        axes.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=4)
    axes.set(**about)
    axes.legend(frameon=False, fontsize=8)
    dress(axes)


def loss_panel(axes: plt.Axes, metrics: list[dict]) -> None:
    train = [row for row in metrics if row["event"] == "train"]
    evaluations = [row for row in metrics if row["event"] == "eval"]
    size = f" ({evaluations[-1]['labels']:,} tokens)" if evaluations and "labels" in evaluations[-1] else ""
    losses = [
        ([(row["step"], row["loss"]) for row in train], "-", COLOURS[5], "training (one batch)"),
        ([(row["step"], row["val_loss"]) for row in evaluations], "o-", COLOURS[0], f"validation{size}"),
        ([(row["step"], row["loss"]) for row in train if row.get("spike")], "x", COLOURS[6], "spike"),
    ]
    lines(axes, [line for line in losses if line[0]], xlabel="step", ylabel="loss (nats a token)", title="Loss")


def gate_panel(axes: plt.Axes, meters: dict) -> None:
    """The distribution of the gate's values: an image with a row per layer and position."""
    gates = [(i, *item) for i, layer in enumerate(meters["layers"]) for item in layer["gates"].items()]
    spread = [[100 * mean(column) for column in zip(*gate["histogram"], strict=True)] for _, _, gate in gates]
    has_more = any(row[-1] for row in spread)  # the last bin: values above 1
    n, y = len(spread[0]) - (not has_more), [i + 0.5 for i in range(len(gates))]
    image = axes.imshow([row[:n] for row in spread], aspect="auto", cmap="cividis", extent=(0, n / 20, len(gates), 0))
    axes.figure.colorbar(image, ax=axes, label="share of the gate's values (%)")
    axes.set_yticks(y, [f"{i} {position}" for i, position, _ in gates])
    centre = [mean(gate["mean"]) for _, _, gate in gates]
    axes.plot(centre, y, "o", color="white", markeredgecolor="black", label="mean")
    axes.legend(loc="upper right")
    small = mean(share for _, _, gate in gates for share in gate["below_0.1"])
    value = "gate value, absolute (last: above 1)" if has_more else "gate value"
    axes.set(xlabel=value, ylabel="layer", title=f"Gate: {small:.0%} of the values are under 0.1")


def of_heads(layers: dict[int, dict], name: str) -> list[tuple]:
    """[(layer, mean over its heads in per cent)] of a number of the sink."""
    return [(i, 100 * mean(layer["sink"][name])) for i, layer in layers.items()]


def sink_panel(axes: plt.Axes, meters: dict) -> None:
    """The weight on token 0 by layer: a dot per head."""
    layers = with_sink(meters)
    colours = mixer_colours(layer["mixer"] for layer in layers.values())
    for i, layer in layers.items():
        heads, label = [100 * share for share in layer["sink"]["share"]], "a head" if i == min(layers) else None
        axes.plot([i] * len(heads), heads, "o", color=colours[layer["mixer"]], alpha=0.7, label=label)
    means = [
        (of_heads(layers, "share"), "-", "black", "mean of the heads"),
        (of_heads(layers, "random_tokens"), "D--", "0.4", "the same on random tokens"),
    ]
    axes.axhline(100 * meters["sink_baseline"], color="0.4", linestyle=":", label="uniform weights")
    proxies = dict.fromkeys(layer["mixer"] for layer in layers.values() if layer["sink"]["kind"] == "proxy")
    title = "Sink" + f" ({', '.join(proxies)}: a proxy)" * bool(proxies)
    ylabel = "weight on token 0, of later queries (%)"
    lines(axes, means, title=title, xlabel="layer", ylabel=ylabel, xticks=[*layers], ylim=(0, None))


def token_0_panel(axes: plt.Axes, meters: dict) -> None:
    """Token 0's share of the readout by layer, before norm and gate and behind them, and the effective sink."""
    layers = with_sink(meters)
    shares = [
        (of_heads(layers, "token_0_before"), "o-", COLOURS[0], "share of the readout, before the gate"),
        (of_heads(layers, "token_0_after"), "s--", COLOURS[1], "share behind the gate"),
        (of_heads(layers, "effective"), "^-", COLOURS[2], "written / residual (effective sink)"),
    ]
    axes.axhline(100 * meters["sink_baseline"], color="0.4", linestyle=":", label="equal parts")
    about: dict = dict(title="Token 0 in the readout", xlabel="layer", ylabel="%, mean of the heads", xticks=[*layers])
    lines(axes, shares, ylim=(0, None), **about)


def residual_panel(axes: plt.Axes, meters: dict) -> None:
    """The largest and the median activation by layer."""
    residuals = [layer["residual"] for layer in meters["layers"]]
    top = [(i, at["max"]) for i, at in enumerate(residuals)]
    median = [(i, at["max"] / at["max_over_median"]) for i, at in enumerate(residuals)]
    both = [(top, "^-", COLOURS[1], "largest |h|"), (median, "o-", COLOURS[0], "median |h|")]
    title = f"Residual stream ({meters['dtype']})"
    lines(axes, both, xlabel="layer", ylabel="|h| after the layer", yscale="log", title=title, xticks=range(len(top)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.15)


def map_panel(axes: plt.Axes, meters: dict, shown: dict) -> None:
    """The weights of one head on the first row's first tokens."""
    sink = meters["layers"][shown["layer"]]["sink"]
    image = sinks.attention_map(axes, shown, sinks.largest(shown))
    axes.figure.colorbar(image, ax=axes, label="weight", pad=0.16 if shown["gate"] else 0.05)
    what = "Implied weights" if sink["kind"] == "proxy" else "Attention"
    share = f"token 0: {sink['share'][shown['head']]:.1%}"
    axes.set_title(f"{what}: layer {shown['layer']}, head {shown['head']} ({share})", fontsize=10)


if __name__ == "__main__":
    configurator.run(main)
