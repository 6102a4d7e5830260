"""How the learning rates of an experiment were chosen: a line per arm, a table of every run, and a figure."""

import math
import statistics
from pathlib import Path

import matplotlib.pyplot as plt

from study import report
from study.drawing import ALL_COLOURS, COLOURS, dress, is_finite, label_edges, log_axis, mean, write
from study.page import Table
from study.plan import rates_of, value_of
from study.tables import number

FEWEST = 3  # rates, below which there is no window to see


def lines(config, choices: list[dict]) -> list[str]:
    """One line per arm that chooses its learning rate, or takes that of another arm: which one, and why."""
    own, said = {(choice["setting"], choice["arm"]): choice for choice in choices}, []
    for (setting, arm), rate in rates_of(config, choices).items():
        where = f"{setting}: " if setting else ""
        is_own = (setting, arm) in own
        why = why_chosen(config, own[setting, arm]) if is_own else f"that of {config.rate_of[arm]}"
        said.append(f"learning rate of {where}{arm}: {rate:g} ({why})")
    if missing := sum(choice["rate"] is None for choice in choices):
        said.append(
            f"{missing} of {len(choices)} learning rates are not chosen yet: rows of selection seeds are missing"
        )
    return said


def why_chosen(config, choice: dict) -> str:
    """The mean that a rate was chosen by, its margin over the next best rate, and what makes the choice doubtful."""
    by = "area under the curve" if config.select_by == "auc" else "at the end"
    full = {trial["rate"]: trial["area"] for trial in choice["trials"] if not trial["is_short"]}
    words = [f"mean {by} {in_metric(config, full[choice['rate']])}"]
    if "joint" in choice:
        mixer, joint = choice["joint"]
        words.append(f"{joint:g} is best for all arms of {mixer}")
    if "other" in choice:
        scale, unit = (100, " points") if config.metric == "accuracy" else (1, "")
        margin, error = scale * choice["margin"], scale * choice["error"]
        form = "+.1f" if scale == 100 else "+.4f"
        if math.isnan(margin):
            words.append(f"{choice['other']:g} was not finite in every seed")
        elif math.isnan(error):
            words.append(f"{margin:{form}}{unit} over {choice['other']:g}, one seed")
        else:
            words.append(f"{margin:{form}} over {choice['other']:g}, standard error {error:{form[1:]}}{unit}")
            words += ["margin under a standard error"] if abs(margin) < error else []
    return "; ".join(words + (["at the edge of the rates"] if choice["is_edge"] else []))


def in_metric(config, value: float) -> str:
    """A mean that rates are chosen by, in which more is better, as the metric is shown."""
    return f"{value:.1%}" if config.metric == "accuracy" else f"{-value:.4f}"


def table(config, choices: list[dict]) -> Table | None:
    """The end of every run that a learning rate was chosen by: a line per arm and rate, a star at the chosen rate."""
    by = ["area"] if config.select_by == "auc" else []
    header = ["arm", "rate", "chosen", "steps", *(f"seed {seed}" for seed in config.selection_seeds), "mean", *by]
    cells = []
    for choice in choices:
        name = ", ".join(filter(None, (choice["arm"], choice["setting"])))
        for trial in sorted(choice["trials"], key=lambda trial: (not trial["is_short"], trial["rate"])):
            is_chosen = trial["rate"] == choice["rate"] and not trial["is_short"]
            ends = [math.nan if row is None else number(row[config.metric]) for row in trial["rows"]]
            form = ".1%" if config.metric == "accuracy" else ".4f"
            seeds = [
                "not run" if row is None else f"{end:{form}}" for row, end in zip(trial["rows"], ends, strict=True)
            ]
            line = [name, f"{trial['rate']:g}", "*" if is_chosen else "", f"{trial['steps']:,}", *seeds]
            cells.append([*line, f"{statistics.fmean(ends):{form}}", *(in_metric(config, trial["area"]) for _ in by)])
    what = "accuracy" if config.metric == "accuracy" else "validation loss"
    title = f"Learning rates: {what} at the end of the runs that chose them (*)"
    return Table(title, header, cells) if choices else None


def figure(config, choices: list[dict], path: Path) -> Path:
    """What each rate was chosen by, a panel per arm and setting; a dot is a run, and a dotted line the chosen rate."""
    columns = min(5, len(choices))
    rows = -(-len(choices) // columns)
    look: dict = dict(figsize=(2.5 * columns + 0.5, 1.9 * rows + 0.6), sharex=True, sharey="row", squeeze=False)
    drawn, grid = plt.subplots(rows, columns, **look)
    tried = sorted({trial["rate"] for choice in choices for trial in choice["trials"]})
    scale = 100 if config.metric == "accuracy" else -1
    for axes in grid.flat[len(choices) :]:
        axes.set_axis_off()
    for axes, choice in zip(grid.flat, choices, strict=False):
        for trial in choice["trials"]:
            values = [value_of(config, row) for row in trial["rows"] if row is not None]
            shown = [scale * value for value in values if math.isfinite(value)]
            inside = "none" if trial["is_short"] else COLOURS[0]
            axes.plot([trial["rate"]] * len(shown), shown, "o", color=COLOURS[0], markerfacecolor=inside, markersize=4)
            lost = len(values) - len(shown)
            axes.plot(
                [trial["rate"]] * lost, [0.97] * lost, "x", color=COLOURS[1], transform=axes.get_xaxis_transform()
            )
        if choice["rate"] is not None:
            axes.axvline(choice["rate"], color="0.4", linestyle=":", linewidth=1)
        axes.set_title(", ".join(filter(None, (choice["arm"], choice["setting"]))), fontsize=8)
        log_axis(axes, tried)
        dress(axes)
    label_edges(grid)
    drawn.supxlabel("peak learning rate", fontsize=9)
    of = "area under the curve" if config.select_by == "auc" else "at the end"
    what = "accuracy (%)" if config.metric == "accuracy" else "validation loss (nats a token)"
    drawn.supylabel(f"{what}, {of}", fontsize=9)
    handles = [
        plt.Line2D([], [], marker="o", linestyle="", color=COLOURS[0], markerfacecolor="none", label="a short run"),
        plt.Line2D([], [], marker="o", linestyle="", color=COLOURS[0], label="a longer run"),
        plt.Line2D([], [], marker="x", linestyle="", color=COLOURS[1], label="not finite"),
        plt.Line2D([], [], linestyle=":", color="0.4", label="chosen"),
    ]
    drawn.legend(handles=handles, frameon=False, ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.0))
    return write(drawn, path)


def windows_of(config, choices: list[dict]) -> dict[str, dict[str, dict[float, list[float]]]]:
    """{mixer: {arm without its mixer's name: {rate: metric at the end of the first runs, by seed}}}; for two mixers or
    more.

    The first runs, short ones if there are any, are at every rate in every arm. NaN: a run without a finite metric.
    """
    found: dict = {}
    for choice in choices:
        has_short = any(trial["is_short"] for trial in choice["trials"])
        for trial in choice["trials"]:
            if trial["is_short"] == has_short and None not in trial["rows"]:
                ends = [number(row[config.metric]) for row in trial["rows"]]
                mixer, variant = report.mixer_of(trial["rows"][0]), report.variant_of(trial["rows"][0])
                variant = ", ".join(filter(None, (variant, choice["setting"])))
                found.setdefault(mixer, {}).setdefault(variant, {})[trial["rate"]] = ends
    is_window = len(found) > 1 and max(len(own) for arms in found.values() for own in arms.values()) >= FEWEST
    return found if is_window else {}


def windows(config, found: dict, path: Path) -> Path:
    """The metric against the learning rate, a panel per mixer: the mean of each arm, a thick line for that without a
    gate, and a dash per seed; a cross, and a gap in the line, where a run was not finite. Returns the path.

    found: as `windows_of` gives it.
    """
    drawn, grid = plt.subplots(1, len(found), figsize=(2.5 * len(found) + 0.5, 2.6), sharex=True, sharey=True)
    names = list(dict.fromkeys(variant for arms in found.values() for variant in arms))
    tried = sorted({rate for arms in found.values() for by_rate in arms.values() for rate in by_rate})
    others = dict(zip((name for name in names if name != "none"), ALL_COLOURS[:-1], strict=False))
    scale = 100 if config.metric == "accuracy" else 1
    for axes, (mixer, arms) in zip(grid, found.items(), strict=True):
        for variant, by_rate in sorted(arms.items(), key=lambda item: item[0] == "none"):  # on top of the others
            look = dict(color="black", linewidth=2.5) if variant == "none" else dict(color=others.get(variant, "0.6"))
            rates = sorted(by_rate)
            axes.plot(rates, [scale * mean(by_rate[rate]) for rate in rates], marker=".", label=variant, **look)
            runs = [(rate, scale * end) for rate in rates for end in by_rate[rate]]
            axes.plot(*zip(*runs, strict=True), "_", color=look["color"], markersize=5, alpha=0.5)
            lost = [rate for rate in rates if not all(map(is_finite, by_rate[rate]))]
            axes.plot(lost, [0.97] * len(lost), "x", color=look["color"], transform=axes.get_xaxis_transform())
        log_axis(axes, tried)
        axes.set_title(mixer, fontsize=9)
        dress(axes)
    drawn.supxlabel("peak learning rate", fontsize=9)
    what = "accuracy (%)" if config.metric == "accuracy" else "validation loss\n(nats a token)"
    grid[0].set_ylabel(f"{what}\nat the end of the first runs", fontsize=8)
    handles = {line.get_label(): line for axes in grid for line in axes.lines}
    shown = [handles[name] for name in names]
    drawn.legend(handles=shown, frameon=False, ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.0))
    return write(drawn, path)
