"""Draws an experiment's figures and writes its report.html, from its rows and from nothing else.

experiment.py does both at its end. `python plot.py results/NAME` draws the figures again; `python experiment.py CONFIG
--run=false` also writes report.html again, with the tables and verdicts.
"""

from configurator import UserError

import html
import itertools
import math
from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt

from runs.outdir import write_text
from study import gains, lengths, mixers, sinks
from study.drawing import (
    ALL_COLOURS,
    COLOURS,
    dress,
    interval,
    is_finite,
    label_edges,
    legend_of,
    log_axis,
    mean,
    mean_lines,
    mean_mark,
    mixer_colours,
    write,
)
from study.page import Table, csv_link, figure_html, heading, lines_html, page, paragraphs, table_html

LINES = ["-", "--", ":"]
GATES = ("none", "elementwise", "matched", "native", "native+elementwise")
MARKERS = "o^vsDPX*<>"
LOST = "x+1234"  # marks of arms with a run that diverged
DRAWN = {  # the names of all figures of an experiment
    f"{name}.png"
    for name in (
        "accuracy", "val_loss", "sink", "sink_arms", "learning_rates", "branch", "ends", "flops", "state", "slices",
        "lengths", "lengths_gain", "gain", "claims", "pairs", "survival", "mixers", "rates", "windows",
    )
}  # fmt: skip


def figures(rows: list[dict], folder: Path) -> list[Path]:
    """Draws each figure that these rows have data for, and returns the paths. Runs that chose a rate are left out."""
    rows = [row for row in rows if "purpose" not in row]
    if not rows:
        raise UserError(f"{folder}: has no row of a compared run yet, nothing to draw")
    rows = sorted(rows, key=lambda row: (row["arm"], row["seed"]))  # the order in which runs ended is not shown
    scores = [score for row in rows for score in row.get("scores", {}).values()]
    if any(row.get("sinks") for row in rows):
        drawn = sinks.figures(rows, folder)
    elif by_learning_rate(rows):  # a sweep has too many runs for curves
        drawn = [rate_curves(rows, folder / "learning_rates.png")]
    else:
        drawn = [metric_curves(rows, folder / f"{rows[0].get('metric', 'accuracy')}.png")]
    if any(row.get("meter_curve") for row in rows):
        drawn.append(branch_curves(rows, folder / "branch.png"))
    settings, arms = {row.get("setting") for row in rows}, {row["arm"] for row in rows}
    if len(settings) > 1 and len(arms) <= len(COLOURS):
        drawn.append(ends(rows, folder / "ends.png"))
    if mixers.has_flops(rows):
        drawn.append(mixers.flops(rows, folder / "flops.png"))
    names, gates = {mixer_of(row) for row in rows}, {gate_of(row) for row in rows}
    if len(names) > 1 and is_accuracy(rows) and {"none", "elementwise"} <= gates and has_one_arm_a_gate(rows):
        drawn.append(state_arrows(rows, folder / "state.png"))
    if sliced := with_slices(rows):
        drawn.append(slice_curves(*sliced, folder / "slices.png"))
    if any("lengths" in score for score in scores):
        drawn.append(context_curves(rows, folder / "lengths.png"))
    if any(row.get("loss_curve") for row in rows) and gains.gains(rows):
        drawn.append(gains.figure(rows, folder / "gain.png"))
    if lengths.panels_of(rows):
        drawn.append(lengths.figure(rows, folder / "lengths_gain.png"))
    return drawn


def arms_of(rows: list[dict]) -> dict[str, list[str]]:
    """{mixer: [its arms]}, in the order of the rows."""
    arms = {}
    for row in rows:
        own = arms.setdefault(mixer_of(row), [])
        own += [row["arm"]] if row["arm"] not in own else []
    return arms


def has_many_arms(rows: list[dict]) -> bool:
    """Whether one of several mixers has more arms than there are line styles: each arm then gets a panel."""
    arms = arms_of(rows)
    return len(arms) > 1 and max(map(len, arms.values())) > len(LINES)


def styles(rows: list[dict]) -> dict[str, dict]:
    """{arm: matplotlib's keys for its lines}, the same in every figure: a colour per mixer, a line style per arm of it.

    If there is one mixer, a colour per arm.
    """
    arms = arms_of(rows)
    if len(arms) > 1:
        colours = mixer_colours(arms)
        pairs = [
            (arm, colours[mixer], LINES[i % len(LINES)]) for mixer, own in arms.items() for i, arm in enumerate(own)
        ]
    else:
        names = [arm for own in arms.values() for arm in own]
        pairs = [(arm, COLOURS[i % len(COLOURS)], LINES[i // len(COLOURS) % len(LINES)]) for i, arm in enumerate(names)]
    return {arm: dict(color=colour, linestyle=line) for arm, colour, line in pairs}


def gate_looks(rows: list[dict]) -> dict[str, tuple[str, str]]:
    """{kind of gate: (marker, colour)}: those of GATES first, so that they look the same in every experiment."""
    names = list(dict.fromkeys([*GATES, *map(gate_of, rows)]))
    return {name: (MARKERS[i % len(MARKERS)], COLOURS[i % len(COLOURS)]) for i, name in enumerate(names)}


def variant_of(row: dict) -> str:
    """What an arm adds to its mixer: the arm's name without the mixer's, "none" if nothing is left."""
    return row["arm"].removeprefix(mixer_of(row)).strip(" ,") or "none"


def small_multiples(rows: list[dict], path: Path) -> Path:
    """The metric against the step: a column per mixer, a row per kind of arm, a colour per setting.

    A thin line is a run, a thick one the mean, with its interval. The runs of the mixer's arm "none" are grey in every
    panel of its column. Returns the path.
    """
    mixers = list(arms_of(rows))
    variants = sorted(dict.fromkeys(map(variant_of, rows)), key=lambda name: name != "none")
    settings = list(dict.fromkeys(row.get("setting") for row in rows))
    colours = dict(zip(settings, itertools.cycle(ALL_COLOURS)))  # noqa: B905 (a cycle has no end)
    look: dict = dict(figsize=(2.6 * len(mixers), 1.9 * len(variants) + 0.6), sharex=True, sharey=True, squeeze=False)
    figure, grid = plt.subplots(len(variants), len(mixers), **look)
    for i, variant in enumerate(variants):
        for j, mixer in enumerate(mixers):
            axes, own = grid[i, j], [row for row in rows if mixer_of(row) == mixer]
            found = [row for row in own if variant_of(row) == variant]
            if not found:
                axes.set_axis_off()
                continue
            grey = [(row, "0.82") for row in own if variant_of(row) == "none" and variant != "none"]
            for row, colour in grey + [(row, colours[row.get("setting")]) for row in found]:
                axes.plot(*zip(*curve_of(row), strict=True), color=colour, linewidth=0.7, alpha=0.6)
            for setting, colour in colours.items():
                curves = [curve_of(row) for row in found if row.get("setting") == setting]
                mean_lines(axes, curves, color=colour, linewidth=1.8)
            draw_chance(axes, rows)
            axes.set_title(f"{mixer}, {variant}", fontsize=9)
            set_range(axes, rows)
            dress(axes)
    figure.supxlabel("step", fontsize=10)
    figure.supylabel(axis_label(rows), fontsize=10)
    label_edges(grid)
    handles = [plt.Line2D([], [], color=colour, label=s) for s, colour in colours.items() if s is not None]
    plain, others = (
        {mixer_of(row) for row in rows if (variant_of(row) == "none") is wanted} for wanted in (True, False)
    )
    handles += [plt.Line2D([], [], color="0.82", label="without a gate")] if plain & others else []
    if handles:
        figure.legend(handles=handles, frameon=False, ncols=len(handles), loc="upper center", bbox_to_anchor=(0.5, 0.0))
    return write(figure, path)


def metric_curves(rows: list[dict], path: Path) -> Path:
    """The metric against the step: a panel per setting, a colour per arm; a thin line per run, and a thick one at the
    mean, with its interval. Returns the path."""
    if has_many_arms(rows):
        return small_multiples(rows, path)
    settings = list(dict.fromkeys(row.get("setting") for row in rows))
    panels = [(setting, [row for row in rows if row.get("setting") == setting]) for setting in settings]
    columns, style = min(len(settings), 4), styles(rows)
    size = (7, 4.2) if columns == 1 else (4 * columns, 3.6 * -(-len(panels) // columns))
    figure, grid = plt.subplots(-(-len(panels) // columns), columns, figsize=size, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, own) in zip(grid.flat, panels, strict=False):
        metric_panel(axes, own, style)
        set_range(axes, rows)
        axes.set_title(title)
        dress(axes)
    if columns == 1 and len(grid[0, 0].get_legend_handles_labels()[1]) <= 3:
        grid[0, 0].legend(frameon=False)
    else:
        legend_of(figure)
    return write(figure, path)


def metric_panel(axes: plt.Axes, rows: list[dict], style: dict[str, dict]) -> None:
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        curves = [curve_of(row) for row in own]
        for curve in curves if len(own) > 1 else []:
            axes.plot(*zip(*curve, strict=True), linewidth=0.7, alpha=0.5, **style[arm])
        label = f"{arm} (seeds {', '.join(str(row['seed']) for row in own)})"
        mean_lines(axes, curves, linewidth=2, label=label, **style[arm])
    draw_chance(axes, rows)
    axes.set(xlabel="step", xlim=(0, max(step for row in rows for step, _ in row["curve"])))
    axes.set(ylabel=axis_label(rows))


def curve_of(row: dict) -> list[tuple]:
    """[(step, the metric)], accuracy in per cent; NaN where it was not finite, and behind the end of such a run."""
    scale = 100 if is_accuracy([row]) else 1
    end = [] if row.get("finite", True) else [(row["curve"][-1][0] + 1, math.nan)]
    return [(step, math.nan if value is None else scale * value) for step, value in row["curve"]] + end


def set_range(axes: plt.Axes, rows: list[dict]) -> None:
    """The whole range of an accuracy; of a loss, what is behind the first evaluation, which is far above."""
    values = [value for row in rows for _, value in curve_of(row)[1:] if is_finite(value)]
    if is_accuracy(rows):
        axes.set(ylim=(0, 100))
    elif margin := 0.04 * (max(values, default=0) - min(values, default=0)):
        axes.set(ylim=(min(values) - margin, max(values) + margin))


def draw_chance(axes: plt.Axes, rows: list[dict]) -> None:
    """A line at the accuracy of a guess among the values in context."""
    pairs = rows[0]["data"].get("pairs")  # there is no single number with several slices, or without pairs
    if pairs and is_accuracy(rows):
        label = "chance among the values in context"
        axes.axhline(100 / pairs, color=COLOURS[6], linestyle=":", linewidth=1, label=label)


def axis_label(rows: list[dict]) -> str:
    return "accuracy at the queries (%)" if is_accuracy(rows) else "validation loss (nats a token)"


def is_accuracy(rows: list[dict]) -> bool:
    """Whether the experiment measures accuracy; if not, it measures the validation loss."""
    return rows[0].get("metric", "accuracy") == "accuracy"


def end_of(row: dict) -> float:
    """The metric at the end of a run: accuracy in per cent, or loss; NaN if the run was not finite."""
    value, scale = (row["accuracy"], 100) if is_accuracy([row]) else (row["val_loss"], 1)
    return math.nan if value is None else scale * value


def branch_curves(rows: list[dict], path: Path) -> Path:
    """Branch over residual norm, below it the mean of the gates, and the highest induction score of a head, against the
    step: a column of panels per setting and mixer, a colour per kind of arm. Means over the seeds with their intervals.
    Returns the path."""
    rows = [row for row in rows if row.get("meter_curve")]
    panels, gated = {}, any(row["meter_curve"]["gate_mean"] for row in rows)
    inducts = any(row["meter_curve"].get("induction") for row in rows)
    for row in rows:
        place = ", ".join(filter(None, (row.get("setting"), mixer_of(row))))
        panels.setdefault(place, {}).setdefault(variant_of(row), []).append(row["meter_curve"])
    colours = colours_of(rows)
    columns, each = min(4, len(panels)), 1 + gated + inducts
    lines = each * -(-len(panels) // columns)
    look: dict = dict(figsize=(3.6 * columns + 0.6, 2.5 * lines + 0.4), squeeze=False, sharex=True)
    figure, grid = plt.subplots(lines, columns, **look)
    for axes in grid.flat:
        axes.set_axis_off()
    for i, (place, arms) in enumerate(panels.items()):
        above, *below = grid[each * (i // columns) : each * (i // columns + 1), i % columns]
        for arm, curves in ((arm, arms[arm]) for arm in colours if arm in arms):
            colour = colours[arm]
            mean_lines(above, [pairs_of(curve, curve["branch"]) for curve in curves], color=colour, label=arm)
            if inducts:
                highest = [pairs_of(curve, map(highest_score, curve["induction"])) for curve in curves]
                mean_lines(below[-1], highest, color=colour, label=arm)
            for position, style in zip(curves[0]["gate_mean"], itertools.cycle(LINES)):  # noqa: B905
                own = [pairs_of(curve, curve["gate_mean"][position]) for curve in curves]
                label = f"{arm}, {position}" if len(curves[0]["gate_mean"]) > 1 else arm
                mean_lines(below[0], own, color=colour, linestyle=style, label=label)
        above.set(title=place, ylabel="|branch| / |residual|" if i % columns == 0 else None)
        for axes in [above, *below]:
            axes.set_axis_on()
            axes.set(ylim=(0, None))
            dress(axes)
        [above, *below][-1].set(xlabel="step")
        for axes, name in zip(below, ["mean of the gate"] * gated + ["highest induction score"] * inducts, strict=True):
            axes.set(ylabel=name if i % columns == 0 else None)
    label_edges(grid)
    legend_of(figure)
    return write(figure, path)


def colours_of(rows: list[dict]) -> dict[str, str]:
    """{what an arm adds to its mixer: its colour}: the same in every panel, black for the arm without a gate."""
    names = dict.fromkeys(map(variant_of, rows))
    plain = {"none": ALL_COLOURS[-1]} if "none" in names else {}
    return plain | dict(zip((n for n in names if n != "none"), itertools.cycle(ALL_COLOURS[:-1])))  # noqa: B905


def highest_score(layers: list[list]) -> float | None:
    return max((score for heads in layers for score in heads if score is not None), default=None)


def pairs_of(curve: dict, values: Iterable) -> list[tuple]:
    return list(zip(curve["step"], values, strict=True))


def ends(rows: list[dict], path: Path) -> Path:
    """The metric at the end of every run: a line per setting, a point per seed, a colour per arm, a bar at the mean and
    a line along its interval."""
    settings, style = list(dict.fromkeys(row.get("setting") for row in rows)), styles(rows)
    figure, axes = plt.subplots(figsize=(8, 1 + 0.17 * len(settings) * (1 + len(style))))
    for i, setting in enumerate(settings):
        for j, (arm, look) in enumerate(style.items()):
            values = [end_of(row) for row in rows if (row.get("setting"), row["arm"]) == (setting, arm)]
            y, label = -i - (j + 1) / (len(style) + 1), arm if i == 0 else None
            marker = "o" if len(arms_of(rows)) == 1 else MARKERS[j % len(MARKERS)]  # arms of a mixer share its colour
            axes.plot(values, [y] * len(values), marker, color=look["color"], markersize=6, alpha=0.6, label=label)
            axes.plot([mean(values)] if values else [], [y] * bool(values), "|", color=look["color"], markersize=14)
            low, high = interval(values)
            axes.plot([] if low is None else [low, high], [] if low is None else [y, y], color=look["color"], lw=1.5)
        axes.axhline(-i, color="0.85", linewidth=0.8)
    axes.set_yticks([-i - 0.5 for i in range(len(settings))], settings)
    axes.set(xlabel="validation loss at the end (nats)", ylim=(-len(settings), 0))
    if is_accuracy(rows):
        axes.set(xlabel="accuracy at the end (%)", xlim=(0, 102))
    dress(axes)
    axes.grid(visible=False, axis="y")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return write(figure, path)


def has_one_arm_a_gate(rows: list[dict]) -> bool:
    """Whether every mixer has one arm of each kind of gate and size of the state."""
    places = {(row.get("setting"), row["arm"]): (mixer_of(row), gate_of(row), row.get("state_bytes")) for row in rows}
    return len(set(places.values())) == len(places)


def state_arrows(rows: list[dict], path: Path) -> Path:
    """Accuracy by the bytes of the state: a panel per mixer, a marker per kind of gate at the mean over the seeds with
    its interval, and an arrow from none to elementwise if they differ by more than a point. Returns the path."""
    mixers, looks = by_mixer(rows), gate_looks(rows)
    kinds = [gate for gate in looks if gate in set(map(gate_of, rows))]
    colours = mixer_colours(mixers)
    look: dict = dict(figsize=(2.1 * len(mixers) + 0.6, 4.4), squeeze=False, sharey=True)
    figure, grid = plt.subplots(1, len(mixers), **look)
    for axes, mixer in zip(grid[0], mixers, strict=True):
        own = [row for row in rows if mixer_of(row) == mixer]
        sizes = sorted({row["state_bytes"] for row in own})
        for place, size in enumerate(sizes):
            means = {}
            for i, gate in enumerate(kinds):
                values = [end_of(row) for row in own if (gate_of(row), row["state_bytes"]) == (gate, size)]
                if values:
                    x = place + 0.16 * (i - (len(kinds) - 1) / 2)
                    mean_mark(axes, x, values, colours[mixer], looks[gate][0], fillstyle="none", markersize=6)
                    means[gate] = x, mean(values)
            if {"none", "elementwise"} <= means.keys() and abs(means["none"][1] - means["elementwise"][1]) > 1:
                arrow = dict(arrowstyle="->", color=colours[mixer], linewidth=1.4)
                axes.annotate("", means["elementwise"], means["none"], arrowprops=arrow)
        axes.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes], fontsize=8)
        axes.set(xlim=(-0.6, len(sizes) - 0.4), ylim=(0, 102))
        axes.set_title(mixer, fontsize=10)
        dress(axes)
    grid[0, 0].set(ylabel="accuracy at the end (%)")
    figure.supxlabel("state (bytes a sequence)", fontsize=10)
    handles = [
        plt.Line2D([], [], marker=looks[gate][0], color="0.3", linestyle="", fillstyle="none", label=gate_label(gate))
        for gate in kinds
    ]
    handles.append(plt.Line2D([], [], color="0.3", linewidth=1, marker="_", label="95% interval of the mean; a seed"))
    place_of: dict = dict(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, fontsize=8, frameon=False)
    figure.legend(handles=handles, **place_of)
    return write(figure, path)


def mixer_of(row: dict) -> str:
    return row["config"].get("attention", "softmax")


def gate_of(row: dict) -> str:
    """The kind of gate of a row's arm: `gate`, or "matched" if the MLP is narrower to make room for the gate."""
    keys = row["config"]
    return "matched" if keys.get("match_params") else keys.get("gate", "none")


def gate_label(gate: str) -> str:
    return "elementwise, parameters matched" if gate == "matched" else f"gate {gate}"


def by_mixer(rows: list[dict]) -> dict[str, list[tuple[str, str, list[dict]]]]:
    """{mixer: [(line style, label, rows of an arm, one per seed)]}: solid without a gate, dashed with one.

    An arm's label is its kind of gate, or what it adds to its mixer where two arms have the same kind.
    """
    mixers: dict[str, dict] = {}
    for row in rows:
        mixers.setdefault(mixer_of(row), {}).setdefault((row.get("setting"), row["arm"]), []).append(row)
    found = {}
    for mixer, arms in mixers.items():
        gates = [gate_of(own[0]) for own in arms.values()]
        names = [", ".join(filter(None, (setting, variant_of(own[0])))) for (setting, _), own in arms.items()]
        labels = [f"gate {gate}" for gate in gates] if len(set(gates)) == len(gates) else names
        lines = ["-" if gate == "none" else "--" for gate in gates]
        found[mixer] = list(zip(lines, labels, arms.values(), strict=True))
    return found


def slices_of(score: dict) -> dict[tuple, float]:
    """{(length, pairs): accuracy} of a score; what its other slices are of has no place on the axis."""
    found = score.get("slices", {}).items()
    return {tuple(map(int, name.split("/"))): value for name, value in found if "/" in name and value is not None}


def with_slices(rows: list[dict]) -> tuple[list[dict], str] | None:
    """(the rows without a gate and with an elementwise one that a score has slices of, the name of that score)."""
    rows = [row for row in rows if gate_of(row) in ("none", "elementwise")]
    for name in dict.fromkeys(name for row in rows for name in row.get("scores", {})):
        if found := [row for row in rows if slices_of(row["scores"].get(name, {}))]:
            return found, name
    return None


def slice_curves(rows: list[dict], name: str, path: Path) -> Path:
    """Recall on longer rows than in training, with as many pairs and with more: a row of panels per setting.

    rows, name: as `with_slices` gives them. Lines are means over the seeds, with their intervals.
    """
    settings = list(dict.fromkeys(row.get("setting") for row in rows))
    size = (13, 4.2 * len(settings))
    figure, grid = plt.subplots(len(settings), 2, figsize=size, sharey="row", squeeze=False)
    for setting, panels in zip(settings, grid, strict=True):
        own = [row for row in rows if row.get("setting") == setting]
        shapes = list(dict.fromkeys(shape for row in own for shape in slices_of(row["scores"][name])))
        fewest = min(pairs for _, pairs in shapes)
        same = [shape for shape in shapes if shape[1] == fewest]
        more = [shape for shape in shapes if shape not in same[1:]]
        for axes, shown in zip(panels, (same, more), strict=True):
            slice_panel(axes, own, shown, name)
        where = f"{setting}: " if setting else ""
        panels[0].set(ylabel="accuracy at the queries (%)", title=f"{where}longer, with as many pairs as trained")
        panels[1].set(title=f"{where}longer, with more pairs")
    grid[-1, 1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return write(figure, path)


def slice_panel(axes: plt.Axes, rows: list[dict], shown: list[tuple], name: str) -> None:
    """shown: [(length, pairs)], the x axis. name: of the score."""
    colours, arms = mixer_colours(by_mixer(rows)), [(m, arm) for m, own in by_mixer(rows).items() for arm in own]
    for i, (mixer, (linestyle, label, own)) in enumerate(arms):
        found = [slices_of(row["scores"][name]) for row in own]
        each = [[100 * slices[shape] for slices in found if shape in slices] for shape in shown]
        places = [x + 0.4 * ((i + 0.5) / len(arms) - 0.5) for x in range(len(shown))]
        reached = [(x, values) for x, values in zip(places, each, strict=True) if values]
        look: dict = dict(color=colours[mixer], linestyle=linestyle, label=f"{mixer}, {label}")
        axes.plot([x for x, _ in reached], [mean(values) for _, values in reached], **look)
        for x, values in reached:
            mean_mark(axes, x, values, colours[mixer], markersize=3)
    chance = [100 / pairs for _, pairs in shown]
    axes.plot(range(len(shown)), chance, color="0.5", linestyle=":", label="chance among the values in context")
    axes.set_xticks(range(len(shown)), [f"{length:,} / {pairs}" for length, pairs in shown])
    axes.set(xlabel="length / pairs", ylim=(0, 102))
    dress(axes)


def context_curves(rows: list[dict], path: Path) -> Path:
    """Loss by position at the longest context of each mixer: a panel per mixer, a colour per scaling of RoPE."""
    mixers = by_mixer([row for row in rows if any("lengths" in score for score in row["scores"].values())])
    figure, panels = plt.subplots(1, len(mixers), figsize=(3.4 * len(mixers), 3.6), sharey=True, squeeze=False)
    labels: dict = {}
    for axes, (mixer, arms) in zip(panels[0], mixers.items(), strict=True):
        seeds = set.intersection(*({row["seed"] for row in own} for _, _, own in arms))
        for linestyle, label, own in arms:
            shown, own = [], [row for row in own if row["seed"] in seeds] or own
            names = dict.fromkeys(name for row in own for name, score in row["scores"].items() if "lengths" in score)
            for colour, name in zip(COLOURS, names, strict=False):
                scores = [row["scores"][name] for row in own if name in row["scores"]]
                curves = lengths.at_longest([lengths.by_length(score["lengths"]) for score in scores])
                if not curves or curves in shown:  # without RoPE there is nothing to scale
                    continue
                shown.append(curves)
                mean_lines(axes, curves, color=colour, linestyle=linestyle, label=f"{name}, {label}")
        trained = scores[0]["trained_length"]
        axes.axvline(trained, color="0.5", linestyle=":", linewidth=1)
        unreached = lengths.refused([score["lengths"] for score in scores])
        ending = f"\n(refuses {', '.join(map(str, unreached))})" if unreached else ""
        axes.set(xlabel="position in the context (tokens)", title=f"{mixer}, {seeds_in_words(len(seeds))}{ending}")
        dress(axes)
        labels |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    panels[0][0].set(ylabel="loss (nats a token)")
    axes.plot([], [], color="0.5", linestyle=":", linewidth=1, label=f"trained length, {trained}")
    labels |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    place: dict = dict(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, frameon=False)
    figure.legend(labels.values(), labels.keys(), **place)
    return write(figure, path)


def seeds_in_words(n: int) -> str:
    return "1 seed" if n == 1 else f"{n} seeds" if n else "no seed in all arms"


def by_learning_rate(rows: list[dict]) -> dict[str, dict[float, list[dict]]]:
    """{arm: {learning rate: its rows}} of a sweep, whose arms are named "ARM at RATE"."""
    rates = {}
    for row in rows:
        arm, at, rate = row["arm"].rpartition(" at ")
        own = row["config"].get("learning_rate")
        if at and own is not None and rate == f"{float(own):g}":
            rates.setdefault(arm, {}).setdefault(row["config"]["learning_rate"], []).append(row)
    return {arm: dict(sorted(own.items())) for arm, own in rates.items()}


def has_diverged(row: dict) -> bool:
    """Whether a run was not finite, or ended with a higher validation loss than it began with."""
    # both on the same tokens, where val_loss is of the whole split
    return not row["finite"] or row["curve"][-1][1] > row["curve"][0][1]


def rate_curves(rows, path):
    """Validation loss at the end against the learning rate, a panel per setting. Where a run diverged, a mark of its
    arm stands at the top, and the line has a gap: a mean of the others would look better than the arm is."""
    settings = list(dict.fromkeys(row.get("setting") for row in rows))
    figure, grid = plt.subplots(1, len(settings), figsize=(1 + 7 * len(settings) ** 0.7, 5), sharey=True, squeeze=False)
    arms = by_learning_rate(rows)
    style = styles([row | {"arm": arm} for arm, rates in arms.items() for own in rates.values() for row in own])
    top = max(row["curve"][0][1] for row in rows)
    for axes, setting in zip(grid[0], settings, strict=True):
        for i, (arm, rates) in enumerate(arms.items()):
            here = {rate: [row for row in own if row.get("setting") == setting] for rate, own in rates.items()}
            ends = {
                rate: [row["val_loss"] for row in own if not has_diverged(row)] for rate, own in here.items() if own
            }
            lost = [rate for rate, losses in ends.items() if len(losses) < len(here[rate])]
            means = [math.nan if rate in lost else mean(losses) for rate, losses in ends.items()]
            axes.plot(ends.keys(), means, label=arm, **style[arm])
            for rate, losses in ends.items():
                if losses:
                    mean_mark(axes, rate, losses, style[arm]["color"], markersize=4)
            look: dict = dict(color=style[arm]["color"], marker=LOST[i % len(LOST)], linestyle="")
            if lost:
                axes.plot(lost, [top * (1 + 0.03 * i)] * len(lost), label=f"{arm}: a run diverged", **look)
        log_axis(axes, (rate for rates in arms.values() for rate in rates))
        axes.set(xlabel="peak learning rate", title=setting)
        dress(axes)
    grid[0, 0].set(ylabel="validation loss at the end (nats a token)")
    legend_of(figure)
    return write(figure, path)


# ----------------------------------------------------------------------------------------------------------------------
# The report


def write_page(
    rows: list[dict],
    figures: list[Path],
    path: Path,
    tables: Iterable[str | Table] = (),
    command: str = "",
    about: str = "",
    verdicts: Table | None = None,
) -> Path:
    """Writes the figures and tables of an experiment as one HTML file that needs no other. Returns its path.

    tables: those that experiment.py prints, and texts among them. command: the command that writes all of this. about:
    the config's docstring, with the hypothesis. verdicts: a row per claim; with its figure it comes before all else.
    """
    name = path.parent.resolve().name
    parts = paragraphs(about)
    parts += [heading("Verdicts"), table_html(verdicts)] if verdicts else []
    parts += map(figure_html, sorted(figures, key=lambda figure: figure.stem != "claims"))
    parts.append(heading("Tables"))
    for part in filter(None, tables):
        parts.append(table_html(part) if isinstance(part, Table) else lines_html(part))
    parts += [heading("How this was made"), f"<p><code>{html.escape(command)}</code></p>"]
    columns = ["setting", "arm", "seed", "accuracy", "val_loss", "finite", "n_params", "state_bytes", "flops_per_token"]
    columns = [name for name in [*columns, "step_ms", "tokens_per_second", "seconds"] if name in rows[0]]
    configs = [row["config"] | {f"data: {name}": value for name, value in row["data"].items()} for row in rows]
    shared = {name: value for name, value in configs[0].items() if all(c.get(name) == value for c in configs)}
    for key in ("dtype", "device", "threads", "code_sha256", "git_commit", "git_dirty", "versions"):
        found = dict.fromkeys(str(row[key]) for row in rows if key in row)
        shared |= {key: "; ".join(found)} if found else {}
    keys = [[name, cell_text(value)] for name, value in shared.items()]
    parts.append(table_html(Table("", ["key, the same in all runs", "value"], keys)))
    raw = [["" if row.get(name) is None else str(row[name]) for name in columns] for row in rows]
    runs = Table("", columns, [[cell_text(row.get(name, "")) for name in columns] for row in rows])
    parts += [heading("Runs"), csv_link(Table("", columns, raw), name), table_html(runs)]
    write_text(path, page(name, parts))
    return path


def cell_text(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
