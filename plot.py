"""Draws figures from the files of runs and experiments, and from nothing else:

    python plot.py out               a run: out/page.png, from metrics.jsonl, meters.json, or both
    python plot.py out/a out/b       several runs: their losses in out/a/curves.png, then each page
    python plot.py results/recall    an experiment: the figure of its rows (experiment.py CONFIG
                                     --run=false adds that of its claims)
    python plot.py out/meters.json   checkpoints of meters.py: an attention map of each, in maps.png
    python plot.py out --html=true   also out/page.html, a text token by token (study/token_page.py)

Here are the figures of runs. study/report.py draws those of experiments and of claims.
"""

from dataclasses import dataclass

from base import configurator
from base.configurator import key
from base.files import find_path


@dataclass
class PlotConfig:
    folders: list[str] = key(
        ["out"], "folders of runs or experiments, or files of meters.py", find=find_path
    )
    html: bool = key(
        False,
        "write page.html beside meters.json, too: its last checkpoint's gates, token by token",
    )
    text: str | None = key(None, "html: the text to show (None: the first row that meters.py read)")


configurator.begin(__name__, PlotConfig, positional="folders")

import itertools
import os
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.ticker import MaxNLocator

from base.configurator import UserError
from base.files import one_line, read_json, read_jsonl
from runs import probe
from study import report
from study.drawing import dress, panel_grid, write
from study.rows import read_rows
from study.token_page import write_page


def main(argv: list[str]) -> None:
    config = configurator.load(PlotConfig, argv, positional="folders")
    folders = [Path(folder) for folder in config.folders]
    runs = [folder for folder in folders if os.path.isfile(folder / "metrics.jsonl")]
    with one_line(f"{', '.join(config.folders)}: cannot be drawn"):
        if len(runs) > 1:
            print(curves(runs))
        for folder in folders:
            if os.path.isfile(folder):
                print(maps(folder))
            elif os.path.isfile(folder / "rows.jsonl"):
                print(report.figure(read_rows(folder), folder))
            else:
                print(page(folder))
            if config.html:
                print(write_page(folder, config.text))


# -- The losses of several runs --------------------------------------------------------------------


def curves(folders: list[Path]) -> Path:
    """Draws the validation losses of runs in curves.png, in the first one's folder, and returns its
    path. Raises UserError."""
    figure, axes = plt.subplots()
    lines = {}
    for folder in folders:
        metrics = read_jsonl(folder / "metrics.jsonl")
        lines[str(folder)] = losses_of(metrics, "eval", "val_loss")
    draw_lines(axes, lines)
    ends = {label: points[-1][1] for label, points in lines.items() if points}
    if ends:
        least = min(ends, key=ends.__getitem__)
        title = f"Lowest at its end: {least}, {ends[least]:.4f}"
        axes.set_title(textwrap.fill(title, 60), fontsize=11)
    axes.set(xlabel="step", ylabel="validation loss (nats a token)   ← better")
    # not beside that folder: in out/ it would be a foreign file for a run with the default out_dir
    return write(figure, folders[0] / "curves.png")


def losses_of(metrics: list[dict], event: str, name: str) -> list[tuple]:
    return [(row["step"], row[name]) for row in metrics if row["event"] == event]


def draw_lines(axes: plt.Axes, lines: dict[str, list]) -> None:
    """{label: [(x, y), ...]}, with a legend of up to eight lines."""
    for label, points in lines.items():
        if points:
            axes.plot(*zip(*points, strict=True), ".-", label=label)
    dress(axes)
    if 0 < len(axes.lines) < 9:
        axes.legend()


# -- Attention maps --------------------------------------------------------------------------------


def maps(file: Path) -> Path | str:
    """Draws the first attention map of each checkpoint of a meters.json, side by side, in one
    scale; behind that of one with a gate, weight times gate: what the gate leaves. Returns the
    path, or a line that says why there is none."""
    panels = []  # [(title, weights, gate, the map)]
    for meters in read_json(file)["checkpoints"]:
        for shown in meters["maps"][:1]:
            weights, gate = np.abs(shown["weights"]), np.array(shown["gate"])
            title = "{attention}, gate {gate}\nlayer {layer}, head {head}".format(**shown | meters)
            panels.append((f"{title}\n{on_first(weights, shown)}", weights, gate, shown))
            if gate.size:
                passed = weights * gate[:, None]
                title = f"weight times gate:\n{on_first(passed, shown)}"
                panels.append((title, passed, gate[:0], shown))
    if not panels:
        return f"{file}: has no attention map, nothing to draw"
    most = max(weights.max() for _, weights, _, _ in panels)
    norm = PowerNorm(0.5, 0, most)
    ticks = [0, 0.1 * most, 0.25 * most, 0.5 * most, most]  # apart by the root
    scale = {
        "ticks": ticks,
        "format": "%.2g",
        "label": "size of the weight\n(colours by its root)",
    }
    figure, grid, spare = panel_grid(len(panels), 3.2)
    for axes, (title, weights, gate, shown) in zip(grid, panels, strict=True):
        image = axes.imshow(weights, cmap="cividis", norm=norm)
        axes.set_xlabel("key (position)")
        axes.set_title(title, fontsize=10)
        for kind, positions in shown["queries"].items():
            marks = {"color": "#D55E00", "markersize": 4, "label": f"{kind}s"}
            axes.plot([-1.5] * len(positions), positions, ">", **marks)
        if gate.size:
            strip = axes.inset_axes((1.03, 0, 0.06, 1), sharey=axes)
            strip.imshow(gate[:, None], cmap="gray", vmin=0, vmax=1, aspect="auto")
            strip.axis("off")
            strip.set_title("gate", fontsize="small")
    for axes in grid[::2]:
        axes.set_ylabel("query (position)")
    handles, names = grid[0].get_legend_handles_labels()
    if spare:  # it has room for the scale and for what the marks are
        bar = spare[0].inset_axes((0.1, 0.3, 0.8, 0.06))
        figure.colorbar(image, cax=bar, orientation="horizontal", **scale)
        spare[0].legend(handles, names, loc="center", frameon=False, fontsize=12)
    else:
        figure.colorbar(image, ax=grid, **scale)
    if names and not spare:
        grid[0].legend(labelcolor="white", frameon=False)
    return write(figure, file.with_name("maps.png"))


def on_first(weights: np.ndarray, shown: dict) -> str:
    """How much token 0 gets, in words: of the queries of no named kind, where there are kinds."""
    named = {0, *itertools.chain(*shown["queries"].values())}
    others = [i for i in range(len(weights)) if i not in named]
    if not others:
        return ""
    when = " when idle" if shown["queries"] else ""
    return f"token 0 gets {weights[others, 0].mean():.0%}{when}"


# -- The page of a run -----------------------------------------------------------------------------


def page(folder: Path) -> Path:
    """Draws a run's page.png, a panel for each kind of number, and returns its path. Raises
    UserError for a run that has measured nothing yet."""
    title = str(folder)
    panels = {}  # {title: {label: [(x, y), ...]}}
    metrics = read_jsonl(folder / "metrics.jsonl")
    if metrics:
        panels["Loss by step"] = {
            "training (one batch)": losses_of(metrics, "train", "loss"),
            "validation": losses_of(metrics, "eval", "val_loss"),
        }
    if os.path.isfile(folder / "meters.json"):
        meters = read_json(folder / "meters.json")["checkpoints"][-1]
        title = "{attention}, gate {gate}, step {step}: numbers by layer".format(**meters)
        for i, layer in enumerate(meters["layers"]):
            for panel, numbers in numbers_of(layer).items():
                lines = panels.setdefault(panel, {})
                for label, number in numbers.items():
                    if number is not None:
                        lines.setdefault(label, []).append((i, number))
    if not panels:
        words = "has no metrics.jsonl (a run), meters.json or rows.jsonl (an experiment), or they "
        raise UserError(f"{folder}: {words}hold nothing yet")
    figure, grid, _ = panel_grid(len(panels), 3.2)
    for axes, (panel, lines) in zip(grid, panels.items(), strict=True):
        draw_lines(axes, lines)
        axes.set_title(panel)
        axes.set(xlabel="step" if panel == "Loss by step" else "layer", ylabel=UNITS[panel])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title)
    return write(figure, folder / "page.png")


UNITS = {
    "Loss by step": "nats a token   ← better",
    "Weight of each head on token 0": "share of the weight",
    "Token 0": "of the weight, of the stream",
    "Value norm of token 0": "over the median of the others",
    "Gate": "mean value (1: open)",
    "Residual stream": "size",
}


def numbers_of(layer: dict) -> dict[str, dict]:
    """{panel: {label: number}} of the meters of one layer, means over its heads."""
    sink, residual = layer["sink"], layer["residual"]
    mean = probe.mean_of([sink], "share")
    heads = {f"head {i}": x for i, x in enumerate(sink["share"])}
    found = [x for x in sink["share"] if x is not None]
    if len(heads) > 8 and found:  # so many lines cannot be told apart
        heads = {"highest head": max(found), "mean": mean, "lowest head": min(found)}
    return {
        "Weight of each head on token 0": heads,
        "Token 0": {"weight": mean, "effective sink": probe.mean_of([sink], "effective")},
        "Value norm of token 0": {"over the median": probe.mean_of([sink], "value_norm")},
        "Gate": probe.mean_by_position([layer], "mean"),
        "Residual stream": {
            "largest |h|": residual["max"],
            "over the median": residual["max_over_median"],
        },
    }


if __name__ == "__main__":
    configurator.run(main)
