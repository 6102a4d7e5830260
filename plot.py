"""Draws figures from the files of runs and experiments, and from nothing else:

    python plot.py out               a run: out/page.png, from metrics.jsonl, meters.json (meters.py), or both
    python plot.py out/a out/b       several runs: their losses in out/a/curves.png, then the page of each
    python plot.py results/recall    an experiment: each figure that its rows have the numbers for
                                     (experiment.py CONFIG --run=false adds those of its claims, and report.html)
    python plot.py results           all experiments: the claims of each in its claims.png, and one table of them all
    python plot.py out/meters.json   several checkpoints of meters.py: an attention map of each, side by side
    python plot.py out --html=true   also out/page.html, a text token by token, of the checkpoint (study/token_page.py)

Here are the figures of runs. study/report.py draws those of experiments and of claims.
"""

from dataclasses import dataclass

import configurator
from base.files import find_path
from configurator import key


@dataclass
class PlotConfig:
    folders: list[str] = key(
        [], "folders of runs or experiments, or files of meters.py", find=find_path
    )
    html: bool = key(
        False,
        "write page.html beside meters.json, too: its last checkpoint's gates, token by token",
    )
    text: str | None = key(None, "html: the text to show (None: the first row that meters.py read)")


configurator.begin(__name__, PlotConfig, __doc__, positional="folders")

import collections
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import PowerNorm

from base.files import one_line, read_json, read_jsonl
from configurator import UserError
from study import report
from study.drawing import (
    COLOURS,
    SPARE_COLOURS,
    dress,
    legend_of,
    mixer_colours,
    plain_ticks,
    write,
)
from study.rows import read_rows
from study.token_page import write_page

OF_SINK = ("share", "random_tokens", "effective", "token_0_before", "token_0_after")


def main(argv: list[str]) -> None:
    config = configurator.load(PlotConfig, argv, positional="folders")
    if not config.folders:
        raise UserError("folders=[]: name what to draw, as in: python plot.py out")
    if config.text is not None and not config.html:
        raise UserError("text=...: is shown on the page in HTML; add --html=true")
    folders = list(map(Path, config.folders))
    runs = [folder for folder in folders if os.path.isfile(folder / "metrics.jsonl")]
    if len(runs) > 1:
        print(curves(runs))
    for folder in folders:
        with one_line(f"{folder}: cannot be drawn"):
            drawn = [*draw(folder), *([write_page(folder, config.text)] if config.html else [])]
        print(*drawn, sep="\n")


def draw(folder: Path) -> list:
    """Draws the figures of what the folder or the file holds. Returns their paths; raises
    UserError."""
    if folder.suffix == ".json" and not os.path.isdir(folder):
        return [maps(folder)]
    if os.path.isfile(folder / "rows.jsonl"):
        rows = read_rows(folder)
        runs = collections.Counter(
            (row["arm"], row["seed"]) for row in rows if "purpose" not in row
        )
        if twice := [f"arm {arm!r}, seed {seed}" for (arm, seed), n in runs.items() if n > 1]:
            raise UserError(
                f"{folder}: two rows of {twice[0]}; experiment.py --run=false draws the config's"
            )
        drawn = [maps(folder / "meters.json")] if os.path.isfile(folder / "meters.json") else []
        return [*report.figures(rows, folder), *drawn]
    if os.path.isfile(folder / "metrics.jsonl") or os.path.isfile(folder / "meters.json"):
        return [page(folder)]
    if os.path.isdir(folder) and any(folder.glob("*/claims.json")):
        return report.draw_claims(folder)
    raise UserError(
        f"{folder}: has no metrics.jsonl (a run), rows.jsonl (an experiment) or */claims.json (several)"
    )


def curves(folders: list[Path]) -> Path:
    """Draws the losses of runs in curves.png, in the first one's folder, and returns its path.
    Raises UserError."""
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    # the losses behind the first twentieth of each run, which the axis is for
    late, data = [], set()
    for folder, colour in zip(folders, itertools.cycle([*COLOURS, *SPARE_COLOURS]), strict=False):
        with one_line(f"{folder}: cannot be drawn"):
            metrics = read_jsonl(folder / "metrics.jsonl")
            about = (
                read_json(folder / "config.json")
                if os.path.isfile(folder / "config.json")
                else None
            )
            speeds = [row["tokens_per_second"] for row in metrics if row["event"] == "train"]
            seconds = about["tokens_per_step"] / median(speeds) if about and speeds else math.nan
            looks: list[dict] = [dict(linewidth=0.7, alpha=0.6), dict(marker=".", label=folder)]
            for points, look in zip(losses(metrics), looks, strict=True):
                steps, values = np.array(points, dtype=float).reshape(-1, 2).T
                by_step.plot(steps, values, color=colour, **look)
                by_time.plot(seconds * steps, values, color=colour, **look)
                late += [*values[20 * steps >= steps.max(initial=0)]]
            data |= {os.path.realpath(about["config"]["dataset"])} if about else set()
    by_step.set(xlabel="step", ylabel="loss (nats a token)", ylim=(None, max(late, default=None)))
    by_time.set_xlabel("seconds: the run's steps at its median speed, without evaluations")
    note = ". Of different data: nats a token do not compare" * (len(data) > 1)
    figure.suptitle(f"Loss: validation (dots) and training, one batch (thin){note}")
    for axes in (by_step, by_time):
        dress(axes)
    legend_of(figure)
    # beside it, in out/, the default run would find a foreign file
    return write(figure, folders[0] / "curves.png")


def losses(metrics: list[dict]) -> tuple[list, list]:
    """([(step, training loss), ...], [(step, validation loss), ...])"""
    train = [(row["step"], row["loss"]) for row in metrics if row["event"] == "train"]
    return train, [(row["step"], row["val_loss"]) for row in metrics if row["event"] == "eval"]


def maps(file: Path) -> Path | str:
    """Draws the first attention map of each checkpoint of a meters.json, side by side, in one
    scale; behind that of one with a gate, weight times gate: what the gate leaves. Returns the
    path, or a line that says why there is none."""
    checkpoints = [meters for meters in read_json(file)["checkpoints"] if meters["maps"]]
    if not checkpoints:
        return f"{file}: has no attention map, nothing to draw"
    panels, mixers = [], {meters["attention"] for meters in checkpoints}
    for meters in checkpoints:
        shown, n_heads = meters["maps"][0], sum(len(at["sink"]["share"]) for at in meters["layers"])
        title = f"{meters['attention']}, " * (len(mixers) > 1)
        title += "without a gate" if meters["gate"] == "none" else f"gate {meters['gate']}"
        panels.append(
            (title + f"\nlayer {shown['layer']}, head {shown['head']}" * (n_heads > 1), shown)
        )
        if gate := shown["gate"]:
            left = [
                [weight * value for weight in row]
                for row, value in zip(shown["weights"], gate, strict=True)
            ]
            panels.append(("weight times gate", shown | {"weights": left, "gate": []}))
    scale = scale_of([shown for _, shown in panels])
    figure, grid = plt.subplots(1, len(panels), figsize=(4 * len(panels), 4), squeeze=False)
    for axes, (title, shown) in zip(grid.flat, panels, strict=True):
        image = attention_map(axes, shown, scale)
        axes.set_title(title, fontsize=12)
    figure.colorbar(
        image, cax=axes.inset_axes((1.05, 0, 0.05, 1)), label="weight (colours by its root)"
    )
    return write(figure, file.with_name("maps.png"))


def scale_of(maps: list[dict]) -> dict:
    """matplotlib's keys of the colour scale of these maps: around zero if a weight is negative."""
    weights = [weight for shown in maps for row in shown["weights"] for weight in row]
    limit = max(map(abs, weights))
    if min(weights) < 0:
        return dict(cmap="PuOr", vmin=-limit, vmax=limit)
    return dict(cmap="cividis", norm=PowerNorm(0.5, 0, limit))


def attention_map(axes: plt.Axes, shown: dict, scale: dict):
    """Draws a map of meters.json: marks at the queries of a kind, and the gate as a strip. Returns
    the image."""
    n, image = len(shown["weights"]), axes.imshow(shown["weights"], **scale)
    for i, (kind, positions) in enumerate(shown["queries"].items()):
        look: dict = dict(color=COLOURS[1 + i], ms=4, label=f"{kind}s", clip_on=False)
        axes.plot([-1.5 - i] * len(positions), positions, ">", **look)
    axes.set(
        xlabel="key (position)",
        ylabel="query (position)",
        xlim=(-0.5, n - 0.5),
        ylim=(n - 0.5, -0.5),
    )
    if shown["queries"]:
        axes.tick_params(axis="y", pad=10)
        axes.legend(
            frameon=False, loc="upper right", labelcolor="white", fontsize=9, handletextpad=0.1
        )
    if gate := shown["gate"]:
        strip = axes.inset_axes((1.03, 0, 0.06, 1), sharey=axes)
        strip.imshow(
            [[value] for value in gate], cmap="gray", vmin=0, vmax=max(1, *gate), aspect="auto"
        )
        strip.set(xticks=[0], xticklabels=["gate"], ylim=(n - 0.5, -0.5))
        strip.tick_params(axis="y", left=False, labelleft=False)
    return image


def page(folder: Path) -> Path:
    """Draws a run's page.png and returns its path. Raises UserError for a run that has measured
    nothing yet."""
    title, metrics = str(folder), read_jsonl(folder / "metrics.jsonl")
    panels: list[Callable] = [functools.partial(loss_panel, metrics=metrics)] if metrics else []
    large: list[Callable] = []
    if os.path.isfile(folder / "meters.json"):
        meters = read_json(folder / "meters.json")["checkpoints"][-1]
        title = (
            f"{meters['attention']}, gate {meters['gate']}, step {meters['step']}: on the first {meters['rows']} rows "
            f"of {meters['tokens']} tokens of {meters['dataset']}, {meters['split']}"
        )
        if without := [str(i) for i in range(len(meters["layers"])) if i not in with_sink(meters)]:
            title += f"\nno weights, so no sink and no map: layer {', '.join(without)}"
        shown = [sink_panel, heads_panel, token_0_panel] if with_sink(meters) else []
        shown += [gate_panel] * any(layer["gates"] for layer in meters["layers"]) + [residual_panel]
        panels += [functools.partial(panel, meters=meters) for panel in shown]
        large = [
            functools.partial(map_panel, meters=meters, shown=shown) for shown in meters["maps"]
        ]
    if not panels:
        raise UserError(
            f"{folder}: its metrics.jsonl is empty, so that there is nothing to draw yet"
        )
    rows = page_rows(len(panels), len(large))
    heights = list(map(len, rows))
    figure = plt.figure(figsize=(14, 3.1 * sum(heights) + 0.5))
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.08)
    for part, row in zip(
        figure.subfigures(len(rows), height_ratios=heights, squeeze=False).flat, rows, strict=True
    ):
        for i, axes in part.subplot_mosaic(row).items():
            [*panels, *large][i](axes)
    figure.suptitle(title)
    return write(figure, folder / "page.png")


def page_rows(n: int, n_maps: int) -> list[list[list]]:
    """The rows of a page, each a mosaic of the numbers of its panels: two or three of n panels in a
    row, then two maps in a row twice as high. Beside a map that is left over stand the last two
    panels, so that no place is empty."""
    panels, maps = list(range(n)), list(range(n, n + n_maps))
    beside = panels[-2:] if n_maps % 2 else []
    alone = panels[: n - len(beside)]
    width = 2 if len(alone) == 4 else 3
    rows = [[alone[i : i + width]] for i in range(0, len(alone), width)]
    rows += [[[left, right]] * 2 for left, right in zip(maps[::2], maps[1::2], strict=False)]
    return rows + [[[maps[-1], i] for i in beside]] if beside else rows


def with_sink(meters: dict) -> dict[int, dict]:
    """{number of the layer: its meters} of the layers whose sink is known: of some mixers it is
    not."""
    return {
        i: at
        for i, at in enumerate(meters["layers"])
        if all(None not in at["sink"][name] for name in OF_SINK)
    }


def few(places: Iterable) -> list:
    """Every nth of the places for ticks, so that the labels of a deep model's layers do not
    touch."""
    places = list(places)
    return places[:: math.ceil(len(places) / 14)]


def lines(axes: plt.Axes, of: Iterable[tuple], xlabel: str = "layer", **about) -> None:
    """Draws lines, (points, style, colour, label) each, with a legend below, where it hides no
    point."""
    for points, style, colour, label in of:
        axes.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=4)
    axes.margins(y=0.12)
    axes.set(xlabel=xlabel, **about)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
    dress(axes)


def loss_panel(axes: plt.Axes, metrics: list[dict]) -> None:
    train, evaluations = losses(metrics)
    labels = [row["labels"] for row in metrics if row["event"] == "eval" and "labels" in row]
    size = f" ({labels[-1]:,} tokens)" if labels else ""
    shown = [
        (train, "-", COLOURS[5], "training (one batch)"),
        (evaluations, "o-", COLOURS[0], f"validation{size}"),
        (
            [(row["step"], row["loss"]) for row in metrics if row.get("spike")],
            "x",
            COLOURS[6],
            "spike",
        ),
    ]
    lines(
        axes,
        [line for line in shown if line[0]],
        xlabel="step",
        ylabel="loss (nats a token)",
        title="Loss",
    )


def gate_panel(axes: plt.Axes, meters: dict) -> None:
    """The distribution of the gate's values: an image with a row per layer and position."""
    gates = [
        (i, *item) for i, layer in enumerate(meters["layers"]) for item in layer["gates"].items()
    ]
    spread = [
        [100 * fmean(column) for column in zip(*gate["histogram"], strict=True)]
        for _, _, gate in gates
    ]
    has_more = any(row[-1] for row in spread)  # the last bin: values above 1
    n, y = len(spread[0]) - (not has_more), [i + 0.5 for i in range(len(gates))]
    image = axes.imshow(
        [row[:n] for row in spread],
        aspect="auto",
        cmap="cividis",
        extent=(0, n / 20, len(gates), 0),
    )
    axes.figure.colorbar(image, ax=axes, label="share of the values (%)")
    axes.set_yticks(few(y), few(f"{i} {position}" for i, position, _ in gates))
    centre = [fmean(gate["mean"]) for _, _, gate in gates]
    axes.plot(centre, y, "o", color="white", markeredgecolor="black")
    small = fmean(share for _, _, gate in gates for share in gate["below_0.1"])
    value = (
        "gate value, absolute (dot: mean, last: above 1)" if has_more else "gate value (dot: mean)"
    )
    axes.set(xlabel=value, ylabel="layer", title=f"Gate: {small:.0%} of the values are under 0.1")


def of_heads(layers: dict[int, dict], name: str) -> list[tuple]:
    """[(layer, mean over its heads in per cent)] of a number of the sink."""
    return [(i, 100 * fmean(layer["sink"][name])) for i, layer in layers.items()]


def sink_panel(axes: plt.Axes, meters: dict) -> None:
    """The weight on token 0 by layer: a dot per head."""
    layers = with_sink(meters)
    colours = mixer_colours(layer["mixer"] for layer in layers.values())
    for i, layer in layers.items():
        heads, label = (
            [100 * share for share in layer["sink"]["share"]],
            "a head" if i == min(layers) else None,
        )
        axes.plot(
            [i] * len(heads), heads, "o", color=colours[layer["mixer"]], alpha=0.7, label=label
        )
    means = [
        (of_heads(layers, "share"), "-", "black", "mean of the heads"),
        (of_heads(layers, "random_tokens"), "D--", "0.4", "the same on random tokens"),
    ]
    axes.axhline(100 * meters["sink_baseline"], color="0.4", linestyle=":", label="uniform weights")
    proxies = dict.fromkeys(
        layer["mixer"] for layer in layers.values() if layer["sink"]["kind"] == "proxy"
    )
    title = "Sink" + f" ({', '.join(proxies)}: a proxy)" * bool(proxies)
    lines(
        axes, means, title=title, ylabel="weight on token 0 (%)", xticks=few(layers), ylim=(0, None)
    )


def heads_panel(axes: plt.Axes, meters: dict) -> None:
    """The weight on token 0 by layer and head, an image with a row per layer; white where it is not
    known."""
    shares = [layer["sink"]["share"] for layer in meters["layers"]]
    known, width = with_sink(meters), max(map(len, shares))
    table = np.full((len(shares), width), np.nan)
    for i in known:
        table[i, : len(shares[i])] = [100 * share for share in shares[i]]
    image = axes.imshow(table, aspect="auto", cmap="cividis", vmin=0)
    axes.figure.colorbar(image, ax=axes, label="weight on token 0 (%)")
    axes.set(xlabel="head", ylabel="layer", title="Sink of each head")
    axes.set(xticks=few(range(width)), yticks=few(range(len(shares))))


def token_0_panel(axes: plt.Axes, meters: dict) -> None:
    """Token 0's share of the readout by layer, before norm and gate and behind them, and the
    effective sink."""
    layers = with_sink(meters)
    shares = [
        (of_heads(layers, "token_0_before"), "o-", COLOURS[0], "share, before the gate"),
        (of_heads(layers, "token_0_after"), "s--", COLOURS[1], "share, behind the gate"),
        (of_heads(layers, "effective"), "^-", COLOURS[2], "effective sink"),
    ]
    axes.axhline(100 * meters["sink_baseline"], color="0.4", linestyle=":", label="equal parts")
    axes.set_title("Token 0 in the readout")
    lines(axes, shares, ylabel="%, mean of the heads", xticks=few(layers), ylim=(0, None))


def residual_panel(axes: plt.Axes, meters: dict) -> None:
    """The largest and the median activation by layer."""
    residuals = [layer["residual"] for layer in meters["layers"]]
    top = [(i, at["max"]) for i, at in enumerate(residuals)]
    median = [(i, at["max"] / at["max_over_median"]) for i, at in enumerate(residuals)]
    both = [(top, "^-", COLOURS[1], "largest |h|"), (median, "o-", COLOURS[0], "median |h|")]
    title = f"Residual stream ({meters['dtype']})"
    lines(
        axes,
        both,
        ylabel="|h| after the layer",
        yscale="log",
        title=title,
        xticks=few(range(len(top))),
    )
    plain_ticks(axes.yaxis, (1, 2, 5))
    axes.margins(y=0.15)


def map_panel(axes: plt.Axes, meters: dict, shown: dict) -> None:
    """The weights of one head on the first row's first tokens."""
    sink = meters["layers"][shown["layer"]]["sink"]
    image = attention_map(axes, shown, scale_of([shown]))
    axes.figure.colorbar(
        image, cax=axes.inset_axes((1.15 if shown["gate"] else 1.05, 0, 0.05, 1)), label="weight"
    )
    what = "Implied weights" if sink["kind"] == "proxy" else "Attention"
    share = f"token 0: {sink['share'][shown['head']]:.1%}"
    axes.set_title(f"{what}: layer {shown['layer']}, head {shown['head']} ({share})", fontsize=10)


if __name__ == "__main__":
    configurator.run(main)
