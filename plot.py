"""Figures from what runs and experiments have written, and from nothing else:

    python plot.py out               a run: its page, from metrics.jsonl and what meters.py and evaluate.py --lengths
                                     left beside it (meters.json, lengths.json) -> out/page.png
    python plot.py results/minimum   an experiment: its metric against steps, every seed -> results/minimum/accuracy.png
                                     or learning_rates.png; ends.png, state.png, slices.png, lengths.png where its rows
                                     have such numbers; experiment.py CONFIG --run=false adds claims.png, report.html
    python plot.py lengths.json      what evaluate.py --lengths --out wrote: loss by position -> lengths.png

A figure lies beside the files it was made of.
"""

import base64
import html
import json
import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import PowerNorm
from matplotlib.ticker import LogLocator, NullFormatter

import configurator
from configurator import UserError, key

# Okabe & Ito 2008: told apart by the colour-blind
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
LINES = ["-", "--", ":"]
MIXER_COLOURS = dict(zip(("softmax", "cosformer", "gla", "mamba2", "gated_deltanet"), COLOURS, strict=False))
GATES = ("none", "elementwise", "matched", "native", "native+elementwise")
GATE_LOOKS = dict(zip(GATES, zip("o^vsD", COLOURS, strict=False), strict=True))  # marker, colour


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
            print(page(folder))
        else:
            raise UserError(f"{folder}: has neither metrics.jsonl (a run) nor rows.jsonl (an experiment)")


def read_jsonl(file):
    """The objects of a file of JSON lines that a run or an experiment wrote; a last line cut short is left out."""
    text = Path(file).read_text() if Path(file).is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


# ----------------------------------------------------------------------------------------------------------------------
# The page of a run: a panel for each thing that was measured


def page(folder):
    """Draws page.png. Returns its path."""
    metrics = read_jsonl(folder / "metrics.jsonl")
    panels = [lambda axes: loss_panel(axes, metrics)]
    title = str(folder)
    if (folder / "meters.json").is_file():
        meters = json.loads((folder / "meters.json").read_text())["checkpoints"][-1]
        title = f"{meters['attention']}, gate {meters['gate']}, step {meters['step']}: meters on the first "
        title += f"{meters['rows']} rows of {meters['tokens']} tokens of {meters['dataset']}, {meters['split']}\n"
        title += f"packing: {meters['packing']}\n"
        panels += [lambda axes: gate_panel(axes, meters)] if any(layer["gates"] for layer in meters["layers"]) else []
        panels += [lambda axes: sink_panel(axes, meters), lambda axes: early_panel(axes, meters)]
        panels += [lambda axes: residual_panel(axes, meters)]
        panels += [lambda axes, shown=shown: map_panel(axes, shown, meters) for shown in meters["maps"]]
        panels += [lambda axes: pruning_panel(axes, meters)] if meters["pruning"] else []
    if (folder / "lengths.json").is_file():
        evaluation = json.loads((folder / "lengths.json").read_text())
        panels.append(lambda axes: length_panel(axes, evaluation))
    columns = min(3, len(panels))
    n_rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(n_rows, columns, figsize=(5.2 * columns, 4 * n_rows + 0.4), squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        panel(axes)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(title)
    return write(figure, folder / "page.png")


def loss_panel(axes, metrics):
    train = [(row["step"], row["loss"]) for row in metrics if row["event"] == "train"]
    val = [(row["step"], row["val_loss"]) for row in metrics if row["event"] == "eval"]
    spikes = [(row["step"], row["loss"]) for row in metrics if row.get("spike")]
    axes.plot(*zip(*train, strict=True), color=COLOURS[5], linewidth=1, label="training (one batch)")
    axes.plot(*zip(*val, strict=True), color=COLOURS[0], marker="o", markersize=3, label="validation (whole split)")
    if spikes:
        axes.plot(*zip(*spikes, strict=True), color=COLOURS[6], marker="x", linestyle="", label="spike")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="Loss")
    axes.legend(frameon=False)
    dress(axes)


def gate_panel(axes, meters):
    """How the gate's values are spread, a row of the image per layer and position."""
    shown = [(i, *item) for i, layer in enumerate(meters["layers"]) for item in layer["gates"].items()]
    spread = [[mean(column) for column in zip(*gate["histogram"], strict=True)] for _, _, gate in shown]
    n = len(spread[0]) if any(row[-1] for row in spread) else len(spread[0]) - 1  # the last part: all above 1
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


def sink_panel(axes, meters):
    """The share of token 0 by layer: a dot per head."""
    layers = meters["layers"]
    for i, layer in enumerate(layers):
        heads, colour = layer["sink"]["share"], MIXER_COLOURS.get(layer["mixer"], COLOURS[6])
        label = "a head" if i == 0 else None
        axes.plot([i] * len(heads), [100 * x for x in heads], "o", color=colour, alpha=0.7, label=label)
    x, means = range(len(layers)), [100 * mean(layer["sink"]["share"]) for layer in layers]
    random = [100 * mean(layer["sink"]["random_tokens"]) for layer in layers]
    axes.plot(x, means, color="black", label="mean of the heads")
    axes.plot(x, random, "D--", color="0.4", markerfacecolor="white", label="the same on random tokens")
    axes.axhline(100 * meters["sink_baseline"], color="0.4", linestyle=":", label="uniform weights")
    proxies = dict.fromkeys(layer["mixer"] for layer in layers if layer["sink"]["kind"] == "proxy")
    axes.set(xlabel="layer", title="Sink" + f" ({', '.join(proxies)}: a proxy)" * bool(proxies))
    axes.set(ylabel="weight on token 0, of later queries (%)", xticks=x)
    leave_room(axes)
    dress(axes)


def early_panel(axes, meters):
    """Token 0's share of the readout by layer, before the gate and behind it."""
    early = [layer["early"] for layer in meters["layers"]]
    for name, label, colour, style in (("before", "before", COLOURS[0], "o-"), ("after", "behind", COLOURS[1], "s--")):
        shares = [(i, 100 * e[f"token_0_{name}"]) for i, e in enumerate(early) if e[f"token_0_{name}"] is not None]
        if shares:
            axes.plot(*zip(*shares, strict=True), style, color=colour, label=f"{label} the gate")
    axes.axhline(100 * meters["sink_baseline"], color="0.4", linestyle=":", label="equal parts")
    axes.set(xlabel="layer", ylabel="token 0's share of the readout (%)", title="Token 0 in the readout")
    axes.set(xticks=range(len(early)))
    leave_room(axes)
    dress(axes)


def residual_panel(axes, meters):
    """The largest activation by layer, over the median one."""
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
    axes.set(xlabel="layer", ylabel="|h| behind the layer", yscale="log", title=f"Residual stream ({meters['dtype']})")
    axes.set_xticks(range(len(top)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.15)
    axes.legend(frameon=False)
    dress(axes)


def map_panel(axes, shown, meters):
    """The weights of one head on the first row's first tokens."""
    weights, layer = shown["weights"], meters["layers"][shown["layer"]]
    is_signed = any(w < 0 for row in weights for w in row)
    limit = max(abs(w) for row in weights for w in row)
    colours = (
        dict(cmap="PuOr", vmin=-limit, vmax=limit) if is_signed else dict(cmap="cividis", norm=PowerNorm(0.5, 0, limit))
    )
    image = axes.imshow(weights, **colours)
    axes.figure.colorbar(image, ax=axes, label="weight")
    what = "Implied weights" if layer["sink"]["kind"] == "proxy" else "Attention"
    share = f"token 0: {layer['sink']['share'][shown['head']]:.1%}"
    axes.set(xlabel="key (position)", ylabel="query (position)")
    axes.set_title(f"{what}: layer {shown['layer']}, head {shown['head']} ({share})")


def pruning_panel(axes, meters):
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


def leave_room(axes):
    """From zero up, with the legend above the data."""
    axes.set_ylim(0, 1.4 * axes.dataLim.y1)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")


def mean(values):
    values = list(values)
    return sum(values) / len(values)


# ----------------------------------------------------------------------------------------------------------------------
# Experiments


def experiment(rows, folder):
    """Every figure that the rows of an experiment have something for. Returns their paths."""
    rows = sorted(rows, key=lambda row: (row["arm"], row["seed"]))  # whatever order they ended in: the same figure
    scores = [score for row in rows for score in row.get("scores", {}).values()]
    if by_learning_rate(rows):  # too many lines for the curves
        figures = [rate_curves(rows, folder / "learning_rates.png")]
    else:
        figures = [metric_curves(rows, folder / f"{rows[0].get('metric', 'accuracy')}.png")]
    settings, arms = {row.get("setting") for row in rows}, {row["arm"] for row in rows}
    if len(settings) > 1 and len(arms) <= len(COLOURS):
        figures.append(ends(rows, folder / "ends.png"))
    mixers, gates = {mixer_of(row) for row in rows}, {gate_of(row) for row in rows}
    is_known = mixers <= MIXER_COLOURS.keys() and is_accuracy(rows)
    if len(mixers) > 1 and is_known and {"none", "elementwise"} <= gates:
        figures.append(state_arrows(rows, folder / "state.png"))
    if any("slices" in score for score in scores):
        figures.append(slice_curves(rows, folder / "slices.png"))
    if any("lengths" in score for score in scores):
        figures.append(context_curves(rows, folder / "lengths.png"))
    return figures


def arms_of(rows):
    """{mixer: its arms}."""
    arms = {}
    for row in rows:
        own = arms.setdefault(mixer_of(row), [])
        own += [row["arm"]] if row["arm"] not in own else []
    return arms


def has_many_arms(rows):
    """Several mixers, and one of them with more arms than there are line styles: a panel for each mixer, then."""
    arms = arms_of(rows)
    return len(arms) > 1 and max(map(len, arms.values())) > len(LINES)


def styles(rows):
    """{arm: how its lines are drawn}, the same in every figure: a colour per mixer, a line style per arm of it.

    With a panel for each mixer it is a colour per kind of gate; where all arms have one mixer, a colour per arm.
    """
    arms = arms_of(rows)
    if has_many_arms(rows):
        return {row["arm"]: dict(color=GATE_LOOKS[gate_of(row)][1], label=gate_label(gate_of(row))) for row in rows}
    if len(arms) > 1 and arms.keys() <= MIXER_COLOURS.keys():
        pairs = [(arm, MIXER_COLOURS[mixer], LINES[i]) for mixer, own in arms.items() for i, arm in enumerate(own)]
    else:
        names = [arm for own in arms.values() for arm in own]
        pairs = [(arm, COLOURS[i % len(COLOURS)], LINES[i // len(COLOURS) % len(LINES)]) for i, arm in enumerate(names)]
    return {arm: dict(color=colour, linestyle=line) for arm, colour, line in pairs}


def metric_curves(rows, path):
    """What the experiment measures against the step: a panel per setting, a line per run, a colour per arm."""
    settings = list(dict.fromkeys(row.get("setting") for row in rows))
    panels = [(setting, [row for row in rows if row.get("setting") == setting]) for setting in settings]
    columns, style = min(len(settings), 4), styles(rows)
    if has_many_arms(rows):
        columns = len(arms_of(rows))
        panels = [
            (", ".join(filter(None, (mixer, setting))), [row for row in own if mixer_of(row) == mixer])
            for setting, own in panels
            for mixer in arms_of(rows)
        ]
    size = (7, 4.2) if columns == 1 else (4 * columns, 3.6 * -(-len(panels) // columns))
    figure, grid = plt.subplots(-(-len(panels) // columns), columns, figsize=size, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, own) in zip(grid.flat, panels, strict=False):
        metric_panel(axes, own, style)
        axes.set_title(title)
        dress(axes)
    labels = {}
    for axes in grid.flat:
        labels |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if columns == 1 and len(labels) <= 5:
        grid[0, 0].legend(frameon=False)
    else:
        look = dict(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.legend(labels.values(), labels.keys(), **look)
    return write(figure, path)


def metric_panel(axes, rows, style):
    scale = 100 if is_accuracy(rows) else 1
    for row in rows:
        first_of_arm = row is next(other for other in rows if other["arm"] == row["arm"])
        seeds = [other["seed"] for other in rows if other["arm"] == row["arm"]]
        steps, values = zip(*row["curve"], strict=True)
        look = {"label": f"{row['arm']} (seeds {', '.join(map(str, seeds))})"} | style[row["arm"]]
        look |= {} if first_of_arm else {"label": None}
        axes.plot(steps, [scale * value for value in values], linewidth=1.6, **look)
    pairs = rows[0]["data"].get("pairs")  # several slices have several, other data have none
    if pairs and is_accuracy(rows):
        label = "chance among the values in context"
        axes.axhline(100 / pairs, color=COLOURS[6], linestyle=":", linewidth=1, label=label)
    axes.set(xlabel="step", xlim=(0, max(step for row in rows for step, _ in row["curve"])))
    if is_accuracy(rows):
        axes.set(ylabel="accuracy at the queries (%)", ylim=(0, 100))
    else:
        axes.set(ylabel="validation loss (nats a token)")


def is_accuracy(rows):
    """What the experiment measures: accuracy, or the validation loss."""
    return rows[0].get("metric", "accuracy") == "accuracy"


def end_of(row):
    """Accuracy in per cent, or loss; NaN for a run that was not finite."""
    value, scale = (row["accuracy"], 100) if is_accuracy([row]) else (row["val_loss"], 1)
    return math.nan if value is None else scale * value


def ends(rows, path):
    """Where every run ended: a line per setting, a point per seed, a colour per arm, a bar at its mean."""
    settings, style = list(dict.fromkeys(row.get("setting") for row in rows)), styles(rows)
    figure, axes = plt.subplots(figsize=(8, 1 + 0.17 * len(settings) * (1 + len(style))))
    for i, setting in enumerate(settings):
        for j, (arm, look) in enumerate(style.items()):
            values = [end_of(row) for row in rows if (row.get("setting"), row["arm"]) == (setting, arm)]
            y, label = -i - (j + 1) / (len(style) + 1), arm if i == 0 else None
            axes.plot(values, [y] * len(values), "o", color=look["color"], markersize=6, alpha=0.6, label=label)
            axes.plot([mean(values)] if values else [], [y] * bool(values), "|", color=look["color"], markersize=14)
        axes.axhline(-i, color="0.85", linewidth=0.8)
    axes.set_yticks([-i - 0.5 for i in range(len(settings))], settings)
    axes.set(xlabel="validation loss at the end (nats)", ylim=(-len(settings), 0))
    if is_accuracy(rows):
        axes.set(xlabel="accuracy at the end (%)", xlim=(0, 102))
    dress(axes)
    axes.grid(visible=False, axis="y")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return write(figure, path)


def state_arrows(rows, path):
    """Accuracy against the bytes of the state: a marker per kind of gate, at the mean over the seeds, and an arrow of a
    point or more from none to elementwise. Dashes are seeds: of none on the left, of elementwise on the right."""
    figure, axes = plt.subplots(figsize=(9, 5.5))
    beside = {"none": 0.94, "elementwise": 1.06}
    for mixer in by_mixer(rows):
        colour = MIXER_COLOURS[mixer]
        for setting in dict.fromkeys(row.get("setting") for row in rows):
            means = {}
            for gate, (marker, _) in GATE_LOOKS.items():
                own = [r for r in rows if (r.get("setting"), mixer_of(r), gate_of(r)) == (setting, mixer, gate)]
                if not own:
                    continue
                size = own[0]["state_bytes"]
                means[gate] = size, mean([end_of(row) for row in own])
                axes.plot(*means[gate], marker, color=colour, fillstyle="none", markersize=7)
                if gate in beside:
                    dashes = dict(marker="_", linestyle="", markersize=6, alpha=0.5)
                    axes.plot([beside[gate] * size] * len(own), [end_of(row) for row in own], color=colour, **dashes)
            if {"none", "elementwise"} <= means.keys() and abs(means["none"][1] - means["elementwise"][1]) > 1:
                arrow = dict(arrowstyle="->", color=colour, linewidth=1.6)
                axes.annotate("", means["elementwise"], means["none"], arrowprops=arrow)
        axes.plot([], [], color=colour, linewidth=3, label=mixer)
    for gate, (marker, _) in GATE_LOOKS.items():
        if gate in map(gate_of, rows):
            axes.plot([], [], marker, color="0.3", fillstyle="none", label=gate_label(gate))
    axes.plot([], [], "_", color="0.3", label="a seed: left without, right with the gate")
    axes.set(xscale="log", xlabel="state (bytes a sequence)", ylabel="accuracy at the end (%)", ylim=(0, 102))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    dress(axes)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return write(figure, path)


def mixer_of(row):
    return row["config"].get("attention", "softmax")


def gate_of(row):
    """The kind of arm this is: a gate, or "matched", where the rest is narrower to make room for the gate."""
    keys = row["config"]
    return "matched" if keys.get("match_params") else keys.get("gate", "none")


def gate_label(gate):
    return "elementwise, parameters matched" if gate == "matched" else f"gate {gate}"


def by_mixer(rows):
    """{mixer: [(line style, gate, the rows of that arm: one per seed)]}: solid without a gate, dashed with one."""
    mixers = {}
    for row in rows:
        gates = mixers.setdefault(mixer_of(row), {})
        gates.setdefault(gate_of(row), []).append(row)
    return {
        mixer: [("-" if gate == "none" else "--", gate, own) for gate, own in gates.items()]
        for mixer, gates in mixers.items()
    }


def slice_curves(rows, path):
    """Recall beyond what was trained: longer rows with as many pairs, and with more; a row of panels per setting.

    Without a gate and with the elementwise one. Lines are means over the seeds.
    """
    rows = [row for row in rows if gate_of(row) in ("none", "elementwise") and row["scores"]]
    settings = list(dict.fromkeys(row.get("setting") for row in rows))
    slices = next(slices_of(row) for row in rows)
    shapes = [tuple(map(int, name.split("/"))) for name in slices]
    fewest = min(pairs for _, pairs in shapes)
    same = [shape for shape in shapes if shape[1] == fewest]
    more = [shape for shape in shapes if shape not in same[1:]]
    size = (13, 4.2 * len(settings))
    figure, grid = plt.subplots(len(settings), 2, figsize=size, sharey=True, squeeze=False)
    for setting, panels in zip(settings, grid, strict=True):
        own = [row for row in rows if row.get("setting") == setting]
        for axes, shown in zip(panels, (same, more), strict=True):
            slice_panel(axes, own, shown)
        where = f"{setting}: " if setting else ""
        panels[0].set(ylabel="accuracy at the queries (%)", title=f"{where}longer, with as many pairs as trained")
        panels[1].set(title=f"{where}longer, with more pairs")
    grid[-1, 1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return write(figure, path)


def slices_of(row):
    """{"length/pairs": accuracy} of the first score that has it."""
    return next(score["slices"] for score in row["scores"].values() if "slices" in score)


def slice_panel(axes, rows, shown):
    """shown: [(length, pairs)], the x axis."""
    for mixer, arms in by_mixer(rows).items():
        colour = MIXER_COLOURS.get(mixer, COLOURS[6])
        for linestyle, gate, own in arms:
            each = [[100 * slices_of(row)[f"{length}/{pairs}"] for length, pairs in shown] for row in own]
            means = [mean(values) for values in zip(*each, strict=True)]
            label = f"{mixer}, gate {gate}"
            axes.plot(range(len(shown)), means, color=colour, linestyle=linestyle, marker="o", ms=3, label=label)
            for values in each:
                axes.plot(range(len(shown)), values, color=colour, linestyle="", marker="_", ms=6, alpha=0.5)
    chance = [100 / pairs for _, pairs in shown]
    axes.plot(range(len(shown)), chance, color="0.5", linestyle=":", label="chance among the values in context")
    axes.set_xticks(range(len(shown)), [f"{length:,} / {pairs}" for length, pairs in shown])
    axes.set(xlabel="length / pairs", ylim=(0, 102))
    dress(axes)


def context_curves(rows, path):
    """Loss by position at the longest context each mixer reached: a panel per mixer, a colour per scaling of RoPE."""
    mixers = by_mixer(rows)
    figure, panels = plt.subplots(1, len(mixers), figsize=(4.2 * len(mixers), 4.2), sharey=True, squeeze=False)
    for axes, (mixer, arms) in zip(panels[0], mixers.items(), strict=True):
        for linestyle, gate, own in arms:
            shown = []
            for colour, name in zip(COLOURS, own[0]["scores"], strict=False):
                scores = [row["scores"][name] for row in own]
                longest = [[result for result in score["lengths"] if "by_position" in result][-1] for score in scores]
                positions = [position for position, _ in longest[0]["by_position"]]
                losses = zip(*([loss for _, loss in result["by_position"]] for result in longest), strict=True)
                curve = [mean(values) for values in losses]
                if curve in shown:  # without RoPE there is nothing to scale
                    continue
                shown.append(curve)
                axes.plot(positions, curve, color=colour, linestyle=linestyle, label=f"{name}, gate {gate}")
                trained = scores[0]["trained_length"]
        axes.axvline(trained, color="0.5", linestyle=":", linewidth=1)
        unreached = [result["block_size"] for result in scores[0]["lengths"] if "limit" in result]
        ending = f"\n(refuses {', '.join(map(str, unreached))})" if unreached else ""
        axes.set(xlabel="position in the context (tokens)", title=f"{mixer}, trained at {trained}{ending}")
        axes.legend(frameon=False, fontsize=8)
        dress(axes)
    panels[0][0].set(ylabel="loss (nats a token)")
    return write(figure, path)


def claims(judged, path):
    """What was claimed: each contrast's mean with its 95% interval, and a bar where its threshold is.

    judged: as experiment.py's judge_claims returns them; those that were not run are left out. A panel for each number
    of the rows that claims are about.
    """
    panels = {}
    for claim in judged:
        if "mean" in claim:
            panels.setdefault(tuple(claim["of"]), []).append(claim)
    heights = [0.7 + 0.3 * len(own) for own in panels.values()]
    look = dict(squeeze=False, height_ratios=heights)
    figure, grid = plt.subplots(len(panels), 1, figsize=(9, sum(heights)), **look)
    colours = {"supported": COLOURS[2], "not supported": COLOURS[1], "inconclusive": "0.5"}
    for axes, (of, own) in zip(grid.flat, panels.items(), strict=True):
        scale, lines = 1 if of == ("val_loss",) else 100, []
        for i, claim in enumerate(own):
            name = ", ".join(filter(None, (claim["claim"], claim["setting"])))
            ends = (scale * claim[end] for end in ("low", "mean", "high"))
            lines.append((name, *ends, colours[claim["verdict"]]))
            axes.plot([scale * claim["threshold"]], [-i], "|", color="black", markersize=11)
        interval_lines(axes, lines)
        axes.axvline(0, color="0.3", linewidth=1)
        axes.set(xlabel=f"{' '.join(of)} ({'points' if scale == 100 else 'nats a token'})", ylim=(-len(own), 1))
        dress(axes)
    axes.plot([], [], "|", color="black", markersize=11, label="threshold")
    for word, colour in colours.items():
        axes.plot([], [], color=colour, linewidth=3, label=word)
    figure.legend(
        *axes.get_legend_handles_labels(), frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    return write(figure, path)


def interval_lines(axes, lines):
    """lines: [(name, low, middle, high, colour)], from the top down."""
    for i, (_, low, middle, high, colour) in enumerate(lines):
        axes.plot([low, high], [-i, -i], color=colour, linewidth=3)
        axes.plot([middle], [-i], color=colour, marker="o")
    axes.set_yticks([-i for i in range(len(lines))], [name for name, *_ in lines], fontsize=8)


def by_learning_rate(rows):
    """{arm: {learning rate: its rows}} of an experiment with learning_rates, whose arms are named "ARM at RATE"."""
    rates = {}
    for row in rows:
        arm, at, rate = row["arm"].rpartition(" at ")
        if at and rate == f"{row['config'].get('learning_rate'):g}":
            rates.setdefault(arm, {}).setdefault(row["config"]["learning_rate"], []).append(row)
    return {arm: dict(sorted(own.items())) for arm, own in rates.items()}


def has_diverged(row):
    """A run that was not finite, or ended with a higher validation loss than it began with."""
    return not row["finite"] or row["val_loss"] > row["curve"][0][1]


def rate_curves(rows, path):
    """Validation loss at the end against the learning rate; a cross at the top where a run diverged."""
    figure, axes = plt.subplots(figsize=(8, 5))
    arms = by_learning_rate(rows)
    style = styles([row | {"arm": arm} for arm, rates in arms.items() for own in rates.values() for row in own])
    top = max(row["curve"][0][1] for row in rows)
    for i, (arm, rates) in enumerate(arms.items()):
        ends = {rate: [row["val_loss"] for row in own if not has_diverged(row)] for rate, own in rates.items()}
        kept = {rate: mean(losses) for rate, losses in ends.items() if losses}
        axes.plot(kept.keys(), kept.values(), marker="o", ms=4, label=arm, **style[arm])
        lost = [rate for rate, own in rates.items() if any(map(has_diverged, own))]
        axes.plot(lost, [top * (1 + 0.03 * i)] * len(lost), "x", color=style[arm]["color"])  # side by side
    axes.plot([], [], marker="x", linestyle="", color="0.3", label="a run that diverged")
    axes.set(xscale="log", xlabel="peak learning rate", ylabel="validation loss at the end (nats a token)")
    return save(figure, axes, path)


# ----------------------------------------------------------------------------------------------------------------------
# The report


def report(rows, figures, path, said="", command=""):
    """Writes an HTML file that holds the figures and the tables of an experiment, and needs nothing else. Its path.

    said: the tables and verdicts, as experiment.py prints them. command: what makes all of this.
    """
    name = html.escape(path.parent.resolve().name)
    parts = [f"<h1>{name}</h1>", f"<p><code>{html.escape(command)}</code></p>", f"<pre>{html.escape(said)}</pre>"]
    for figure in figures:
        image = base64.b64encode(Path(figure).read_bytes()).decode()
        parts.append(f'<figure><img alt="{html.escape(figure.stem)}" src="data:image/png;base64,{image}"></figure>')
    columns = ["setting", "arm", "seed", "accuracy", "val_loss", "finite", "n_params", "state_bytes", "flops_per_token"]
    columns = [name for name in [*columns, "step_ms", "tokens_per_second", "seconds"] if name in rows[0]]
    parts += ["<h2>Runs</h2>", html_table(columns, [[row.get(name, "") for name in columns] for row in rows])]
    configs = [row["config"] | {f"data: {name}": value for name, value in row["data"].items()} for row in rows]
    shared = {name: value for name, value in configs[0].items() if all(c.get(name) == value for c in configs)}
    for about in ("git_commit", "versions"):
        shared[about] = "; ".join(dict.fromkeys(str(row[about]) for row in rows if about in row))
    parts += ["<h2>What all runs share</h2>", html_table(["key", "value"], shared.items())]
    path.write_text(REPORT.format(title=name, body="\n".join(parts)))
    return path


def divergence(rates):
    """[[arm, highest learning rate at which no run diverged, lowest at which one did]], from `by_learning_rate`."""
    lines = []
    for arm, own in rates.items():
        lost = [rate for rate, rows in own.items() if any(map(has_diverged, rows))]
        kept = [rate for rate in own if rate not in lost]
        lines.append([arm, f"{max(kept):g}" if kept else "none", f"{min(lost):g}" if lost else "none"])
    return lines


def html_table(columns, rows):
    def line(tag, cells):
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell_text(cell))}</{tag}>" for cell in cells) + "</tr>"

    return "<table>\n" + "\n".join([line("th", columns), *(line("td", row) for row in rows)]) + "\n</table>"


def cell_text(value):
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


REPORT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }}
figure {{ margin: 1rem 0 }} img {{ max-width: 100% }}
pre {{ overflow-x: auto; font-size: 12px }}
table {{ border-collapse: collapse }} th, td {{ padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: left }}
</style></head><body>
{body}
</body></html>
"""

# ----------------------------------------------------------------------------------------------------------------------
# What evaluate.py --lengths and bench.py wrote, and how figures are dressed


def length_curve(evaluation, path):
    figure, axes = plt.subplots(figsize=(7, 4.2))
    length_panel(axes, evaluation)
    return write(figure, path)


def length_panel(axes, evaluation):
    """Loss by position in the context, a line per context length, the trained length marked."""
    reached = [result for result in evaluation["lengths"] if "by_position" in result]
    for i, result in enumerate(reached):
        positions, loss = zip(*result["by_position"], strict=True)
        label = f"context of {result['block_size']:,}: {result['loss']:.3f} nats"
        axes.plot(positions, loss, color=COLOURS[i % len(COLOURS)], marker="o", markersize=3, label=label)
    axes.axvline(evaluation["trained_length"], color="0.5", linestyle=":", label="trained length")
    axes.set(xlabel="position in the context (tokens)", ylabel="loss (nats a token)")
    axes.set_title(f"{evaluation['attention']}, gate {evaluation['gate']}, RoPE scaling {evaluation['rope_scaling']}")
    axes.legend(frameon=False)
    dress(axes)


def bench(folder):
    """The figures of what bench.py has written there, of this and of earlier calls: ratios; cost against length."""
    parts = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    claims = [claim for part in parts for claim in part["claims"]]
    rows = [row for part in parts for row in part["rows"] if "mixer" in row and ("T" in row or "context" in row)]
    figures = [ratios(claims, folder / "ratios.png")] if claims else []
    return figures + ([cost_curves(rows, folder / "cost.png")] if rows else [])


def cost_curves(rows, path):
    """Speed and memory of training against T, at as many tokens a step, and time of a decoded token against context."""
    panels = [
        ("T", "tokens_s", "training (tokens/s)"), ("T", "peak_mb", "training, peak memory (MB)"),
        ("context", "ms", "decoding (ms a token)"),
    ]  # fmt: skip
    panels = [(x, y, title) for x, y, title in panels if any(x in row and y in row for row in rows)]
    figure, axes_of = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 4), squeeze=False)
    for axes, (x, y, title) in zip(axes_of[0], panels, strict=True):
        for mixer in dict.fromkeys(row["mixer"] for row in rows):
            points = [(row[x], row[y]) for row in rows if row["mixer"] == mixer and x in row and y in row]
            axes.plot(*zip(*points, strict=True), color=MIXER_COLOURS[mixer], marker="o", ms=3, label=mixer)
        axes.set(ylim=(0, None), title=title, xlabel="context" if x == "context" else "sequence length")
        axes.set_xscale("log", base=2)
        dress(axes)
    axes_of[0, 0].legend(frameon=False, fontsize=8)
    return write(figure, path)


def ratios(claims, path):
    """What bench.py measured: each ratio with its interval over its target; right of the line at 1 is better."""
    figure, axes = plt.subplots(figsize=(9, 1 + 0.3 * len(claims)))
    colours = {"met": COLOURS[2], "missed": COLOURS[1], "unresolved": "0.5"}
    lines = []
    for claim in claims:
        name = f"{claim['name']}: {claim['ratio']:.2f} ({'<=' if claim['at_most'] else '>='} {claim['target']:g})"
        sign = -1 if claim["at_most"] else 1
        low, middle, high = sorted((claim[end] / claim["target"]) ** sign for end in ("low", "ratio", "high"))
        lines.append((name, low, middle, high, colours[claim["met"]]))
    interval_lines(axes, lines)
    axes.axvline(1, color="0.3", linewidth=1)
    axes.set(xscale="log", xlabel="ratio over its target (turned over where less is better), 95% interval")
    left, right = axes.get_xlim()
    ticks = [tick for tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20) if left <= tick <= right]
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
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
    figure.savefig(path, dpi=150, bbox_inches="tight")  # a legend may stand outside
    plt.close(figure)
    return path


if __name__ == "__main__":
    configurator.run(main)
