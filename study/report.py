"""An experiment's tables and figures: of its rows, of the runs that chose its rates, and of its
claims.

experiment.py makes them at its end, and again with --run=false; `python plot.py results/NAME` draws
the figures that need no config, and `python plot.py results` those of claims.
"""

import itertools
import math
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from base.files import one_line, read_json
from configurator import UserError
from keys import CLASS_OF, GPTConfig, keys_of_today
from study import claims, curves, sinks, stats
from study.drawing import (
    COLOURS,
    arm_looks,
    curve_panels,
    dress,
    legend_of,
    mixer_colours,
    plain_ticks,
    write,
)
from study.page import Table
from study.plan import LEAST_FREEDOM, rates_of
from study.rows import is_finite, mixer_of, number, variant_of

VERDICT_COLOURS = {
    "supported": COLOURS[2],
    "passed": COLOURS[2],
    "equivalent": COLOURS[0],
    "not supported": COLOURS[4],
    "refuted": COLOURS[1],
    "failed": COLOURS[1],
    "inconclusive": "0.5",
    stats.UNDECIDABLE: "0.75",
}

PARTS = {  # of the loss of a text (evaluate.parts_of_loss)
    "all": "all of the text",
    "near": "first eighth of the window",
    "far": "second half of the window",
    "repeated": "behind repeated strings",
    "elsewhere": "elsewhere",
}

# all that an experiment draws in its folder
FIGURES = (
    "accuracy.png",
    "val_loss.png",
    "sink.png",
    "gain.png",
    "state.png",
    "claims.png",
    "windows.png",
)

GATE_KEYS = {
    "gate",
    "gate_activation",
    "gate_bias",
    "gate_rank",
    "gate_input",
    "match_params",
    "branch_scale",
}


def show(config, row: dict) -> str:
    end = number(row[config.metric])
    return f"accuracy {end:.1%}" if config.metric == "accuracy" else f"loss {end:.4f}"


def arms_table(config, rows: list[dict]) -> Table:
    """A line per arm: every seed, the mean with its interval, with solved_above how many seeds
    solved the task, and how soon, and the learning rate, where the rows name it."""
    is_accuracy, solved_above = config.metric == "accuracy", config.solved_above
    title = (
        "End accuracy" if is_accuracy else "Validation loss at the end (nats a token)"
    ) + ", by seed"
    form, cells, has_rates = (
        ".1%" if is_accuracy else ".4f",
        [],
        any("learning_rate" in row["config"] for row in rows),
    )
    for arm in dict.fromkeys(row["arm"] for row in rows):
        by_seed = {row["seed"]: row for row in rows if row["arm"] == arm}
        ends = {seed: number(row[config.metric]) for seed, row in by_seed.items()}
        low, high = stats.interval(list(ends.values()))
        line = {"arm": arm}
        line |= {
            str(seed): f"{ends[seed]:{form}}" if seed in ends else "not run"
            for seed in config.seeds
        }
        line["mean"] = f"{statistics.fmean(ends.values()):{form}}"
        line["95% interval"] = "-" if low is None else f"{low:{form}} to {high:{form}}"
        if solved_above is not None:
            reached = [
                step
                for row in by_seed.values()
                if (step := curves.steps_to(row, solved_above)) is not None
            ]
            line["solved"] = f"{sum(end > solved_above for end in ends.values())}/{len(ends)}"
            line["steps to it"] = f"{statistics.median(reached):,.0f}" if reached else "-"
        if has_rates:
            tried = dict.fromkeys(row["config"].get("learning_rate") for row in by_seed.values())
            line["rate"] = ", ".join("-" if rate is None else f"{float(rate):g}" for rate in tried)
        cells.append(list(line.values()))
    return Table(title, list(line), cells)


def rates_table(config, choices: list[dict]) -> Table | None:
    """A line per arm that chooses its learning rate, or takes that of another arm: which one, and
    why."""
    scale, form = (100, ".1f") if config.metric == "accuracy" else (1, ".4f")
    chosen, cells = {choice["arm"]: choice for choice in choices}, []
    for arm, rate in rates_of(config, choices).items():
        if (choice := chosen.get(arm)) is None:
            cells.append([arm, f"{rate:g}", "-", "-", "-", f"that of {config.rate_of[arm]}"])
            continue
        values, lost = choice["values"][rate], choice["values"][rate].count(-math.inf)
        margin, error = (scale * choice.get(name, math.nan) for name in ("margin", "error"))
        remarks = [f"{lost} of {len(values)} runs were lost"] * (lost > 0)
        if "joint" in choice and choice["joint"][1] != rate:
            remarks.append(f"{choice['joint'][1]:g} is best for all arms of {choice['joint'][0]}")
        remarks += ["margin under a standard error"] * (abs(margin) < error) + ["edge"] * choice[
            "is_edge"
        ]
        if math.isnan(error) and not math.isnan(margin):
            remarks.append("too few runs tell what noise is: the best mean wins")
        # of a loss more is better, too
        mean = "-" if lost else f"{abs(scale * statistics.fmean(values)):{form}}"
        over = "-" if math.isnan(margin) else f"{margin:+{form}} over {choice['other']:g}"
        error = "-" if math.isnan(error) else f"{error:{form}}"
        cells.append([arm, f"{rate:g}", mean, over, error, "; ".join(remarks)])
    by = {"auc": "area under the curve", "last": "at the end"}[config.select_by]
    title = f"Learning rates, by the mean {by} over the selection seeds, and its margin over the next best one"
    title += "\nA standard error is "
    if config.rate_noise == "pairs":
        n = len(config.selection_seeds)
        title += f"of {n} seeds" + ", too few to tell" * (n <= LEAST_FREEDOM)
    else:
        title += "of the noise of all runs that chose rates for a mixer"
    header = ["arm", "rate", "mean", "margin", "standard error", "remarks"]
    return Table(title, header, cells) if cells else None


def figures(rows: list[dict], folder: Path) -> list[Path]:
    """Draws each figure that these rows have data for, and returns the paths. Runs that chose a
    rate are left out."""
    rows = [row for row in rows if "purpose" not in row]
    if not rows:
        raise UserError(f"{folder}: has no row of a compared run yet, nothing to draw")
    # the order in which runs ended is not shown
    rows = sorted(rows, key=lambda row: (row["arm"], row["seed"]))
    if any(row.get("sinks") for row in rows):
        return [sinks.figure(rows, folder / "sink.png")]
    drawn = [metric_curves(rows, folder / f"{rows[0]['metric']}.png")]
    if any(row.get("loss_curve") for row in rows) and (panels := gains(rows)):
        drawn.append(gain_curves(rows, panels, folder / "gain.png"))
    return drawn + (
        accuracy_by_state(rows, folder / "state.png") if rows[0]["metric"] == "accuracy" else []
    )


def metric_curves(rows: list[dict], path: Path) -> Path:
    """Draws the metric against the step: a panel per mixer, a colour per kind of arm, every seed.
    Returns the path."""
    is_accuracy = rows[0]["metric"] == "accuracy"
    panels, looks = {}, arm_looks(sorted(map(variant_of, rows)))
    for row in rows:
        panels.setdefault(mixer_of(row), {}).setdefault(variant_of(row), []).append(curve_of(row))
    values = [value for row in rows for _, value in curve_of(row)[1:] if is_finite(value)]

    def finish(axes, title):
        if is_accuracy:
            axes.set(ylim=(0, 100))
        # the first evaluation is far above
        elif margin := 0.04 * (max(values, default=0) - min(values, default=0)):
            axes.set(ylim=(min(values) - margin, max(values) + margin))

    label = "accuracy at the queries (%)" if is_accuracy else "validation loss (nats a token)"
    size = (7, 4.2) if len(panels) == 1 else (3.2, 2.7)
    return curve_panels(panels, looks, path, ylabel=label, size=size, finish=finish)


def curve_of(row: dict) -> list[tuple]:
    """[(step, the metric)], accuracy in per cent; NaN where it was not finite, and behind the end
    of such a run."""
    scale, end = 100 if row["metric"] == "accuracy" else 1, row["curve"][-1][0] + 1
    return [(step, scale * number(value)) for step, value in row["curve"]] + [(end, math.nan)] * (
        not row["finite"]
    )


def gains(rows: list[dict]) -> dict[str, dict[str, list]]:
    """{part: {arm: [[(step, loss of its plain arm minus its own), ...] of each seed]}}, of the arms
    that have one."""
    # of_run: {step: {part: loss}} behind the first evaluation
    plain, panels, of_run = plain_arms(rows), {}, {}
    for row in rows:
        parts = {one["step"]: one for one in row.get("loss_curve", [])}
        whole = row["curve"] if row["metric"] == "val_loss" else [(step, None) for step in parts]
        late = {step: {"all": loss} | parts.get(step, {}) for step, loss in whole if step > 0}
        of_run[row["arm"], row["seed"]] = late
    for part, ((arm, seed), after) in itertools.product(PARTS, of_run.items()):
        before = of_run.get((plain.get(arm), seed), {})
        pairs = (
            (step, before.get(step, {}).get(part), loss.get(part)) for step, loss in after.items()
        )
        if curve := [
            (step, was - now) for step, was, now in pairs if is_finite(was) and is_finite(now)
        ]:
            panels.setdefault(PARTS[part], {}).setdefault(arm, []).append(curve)
    return panels


def plain_arms(rows: list[dict]) -> dict[str, str]:
    """{arm: the one without a gate that has else the same keys, but for the rate; of several, that
    of the same rate}"""
    # keys: {arm: (the keys of its runs but of its gate, rate and seed; the names of its gate's;
    # rate)}
    keys, compared = {}, {}
    for row in rows:
        is_rival = keys_of_today(row["config"]).get("attention") in CLASS_OF.values()
        config = keys_of_today(row["config"]) | {"seed": None, "attention": mixer_of(row)}
        rate = config.pop("learning_rate", None)
        of_gate = {
            name for name in GATE_KEYS & config.keys() if config[name] != getattr(GPTConfig, name)
        }
        if is_rival:
            of_gate.add("attention")
        keys[row["arm"]] = {name: config[name] for name in config.keys() - GATE_KEYS}, of_gate, rate
    for arm, (shared, of_gate, rate) in keys.items():
        same = [
            (keys[other][2] != rate, other) for other in keys if keys[other][:2] == (shared, set())
        ]
        if of_gate and same:
            compared[arm] = min(same, key=lambda other: other[0])[1]
    return compared


def gain_curves(rows: list[dict], panels: dict[str, dict[str, list]], path: Path) -> Path:
    """Draws the gains against the step: a panel per part, a colour per arm, every seed. Returns the
    path."""
    looks = arm_looks(row["arm"] for row in rows)

    def finish(axes, title):
        axes.axhline(0, color="0.3", linewidth=1)

    label = "gain: loss without minus loss with (nats a token)"
    return curve_panels(
        panels, looks, path, ylabel=label, columns=3, size=(4.2, 3.0), finish=finish
    )


def accuracy_by_state(rows: list[dict], path: Path) -> list[Path]:
    """Draws the accuracy against the bytes of the state, as in "Zoology" (Arora et al. 2023), where
    a seed has three sizes or more: a panel per kind, a colour per mixer, every seed. Returns the
    paths. An arm's kind is its name without mixer and size: "levels" for "gla levels 16"."""
    points: dict = {}
    for row in rows:
        if "state_bytes" in row:
            kind = variant_of(row).rstrip(" 0123456789") or "none"
            point = row["state_bytes"] / 1024, 100 * number(row["accuracy"])
            points.setdefault((kind, mixer_of(row), row["seed"]), []).append(point)
    panels: dict = {}
    for (kind, mixer, _), curve in points.items():
        if len(dict(curve)) > 2:
            panels.setdefault(kind, {}).setdefault(mixer, []).append(sorted(curve))
    if not panels:
        return []
    colours = mixer_colours(map(mixer_of, rows))
    looks = {name: dict(color=colour, marker=".") for name, colour in colours.items()}

    def finish(axes, title):
        axes.set_xscale("log", base=4)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set(ylim=(0, 100))

    labels: dict = dict(
        ylabel="accuracy at the queries (%)", xlabel="KiB of state of a sequence, in float32"
    )
    return [curve_panels(panels, looks, path, **labels, columns=3, finish=finish)]


def rate_windows(config, choices: list[dict], rows: list[dict], path: Path) -> list[Path]:
    """Draws the metric at the end against the learning rate, where an arm has tried three rates: a
    panel per mixer, a colour per arm, as in the curves of the rows, every seed; a cross, and a gap
    in the line, where a run was lost. Returns the paths."""
    is_accuracy, panels = config.metric == "accuracy", {}
    scale, tried = 100 if is_accuracy else 1, set()
    for choice in choices:
        known = {rate: rows for rate, rows in sorted(choice["trials"].items()) if None not in rows}
        for of_seed in zip(*known.values(), strict=True):
            curve = [
                (rate, scale * number(row[config.metric]))
                for rate, row in zip(known, of_seed, strict=True)
            ]
            arms = panels.setdefault(mixer_of(of_seed[0]), {})
            arms.setdefault(variant_of(of_seed[0]), []).append(curve)
        tried |= known.keys()
    if not any(len(of_arm[0]) > 2 for arms in panels.values() for of_arm in arms.values()):
        return []
    looks = arm_looks(
        [*sorted(map(variant_of, rows)), *(arm for arms in panels.values() for arm in arms)]
    )

    def finish(axes, title):
        for i, (arm, of_arm) in enumerate(panels[title].items()):
            lost = [rate for curve in of_arm for rate, end in curve if not is_finite(end)]
            look = dict(color=looks[arm]["color"], transform=axes.get_xaxis_transform())
            axes.plot(lost, [0.97 - 0.03 * i] * len(lost), "x", **look)
        axes.set_xscale("log")
        # not formulas
        axes.set_xticks(sorted(tried), [f"{rate:,.2g}" for rate in sorted(tried)], fontsize=7)
        axes.minorticks_off()

    what = "accuracy at the end (%)" if is_accuracy else "loss at the end (nats a token)"
    look: dict = dict(
        xlabel="peak learning rate",
        ylabel=what,
        size=(2.5, 2.6),
        columns=len(panels),
        finish=finish,
    )
    # of few seeds they would fill the panel
    return [curve_panels(panels, looks, path, **look, has_bands=False)]


def draw_claims(folder: Path) -> list:
    """Draws the claims of each experiment in this folder. Returns the paths and a table of all.
    Raises UserError."""
    drawn, found = [], []
    for file in sorted(folder.glob("*/claims.json")):
        with one_line(f"{file}: cannot be drawn"):
            records = read_json(file)["claims"]
            found += [
                one | {"name": f"{file.parent.name}: {one['name']}"}
                for one in filter(has_run, records)
            ]
            drawn += claims_figure(records, file.with_name("claims.png"))
    if not drawn:
        raise UserError(f"{folder}: no claim of an experiment has been judged yet, nothing to draw")
    return [*drawn, claims.table(found)]


def has_run(one: dict) -> bool:
    return one["verdict"] != "not run" and bool(one["seeds"])


def claims_figure(records: list[dict], path: Path) -> list[Path]:
    """Draws a panel per unit, with the mean of each claim's contrast, its exact interval, bars at
    its threshold or the ends of its band, and a dot for each seed. Where few seeds leave the exact
    interval open, a thin line goes up to the edge, and a darker one is Student's interval; what is
    exploratory has a hollow mark. Returns the path, or none where no claim has run."""
    if not (records := list(filter(has_run, records))):
        return []
    panels = {
        unit: of for unit in claims.UNITS if (of := [one for one in records if one["unit"] == unit])
    }
    heights = [0.7 + 0.22 * len(of) for of in panels.values()]
    figure, grid = plt.subplots(
        len(panels), 1, figsize=(9, sum(heights)), squeeze=False, height_ratios=heights
    )
    for axes, (unit, of) in zip(grid.flat, panels.items(), strict=True):
        zero = 1.0 if unit in (claims.RATIO, "ratio") else 0.0  # a contrast without a difference
        axes.axvline(zero, color="0.3", linewidth=1)
        axes.set_yticks([-i for i in range(len(of))], [one["name"] for one in of], fontsize=8)
        for i, one in enumerate(of):
            claim_line(
                axes, -i, one, zero, [value for one in of for value in one["seeds"].values()]
            )
        axes.set(xlabel=unit, ylim=(-len(of) + 0.2, 0.8))
        if unit == claims.RATIO:
            axes.set_xscale("log")
            low, high = axes.get_xlim()
            plain_ticks(
                axes.xaxis, (1, 1.2, 1.5, 2, 3, 5, 7, 8, 9) if high / low < 10 else (1, 2, 5)
            )
        else:
            axes.xaxis.set_major_locator(MaxNLocator(7))
        dress(axes)
    legend_of(figure, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return [write(figure, path)]


def claim_line(axes: plt.Axes, y: float, one: dict, zero: float, seeds: list[float]) -> None:
    """seeds: the values of all claims of the panel."""
    middle, colour, dots = (
        one["estimate"],
        VERDICT_COLOURS[one["verdict"]],
        list(one["seeds"].values()),
    )
    if one["over"] is None and None in (one["low"], one["high"]):  # a count has no interval
        edges = [min(zero, *seeds), max(zero, *seeds)]
        axes.plot(
            edges, [y, y], color="0.8", linewidth=0.8, label="exact interval open: too few seeds"
        )
        if one["student_low"] is not None:
            ends = [one["student_low"], one["student_high"]]
            axes.plot(ends, [y, y], color="0.4", linewidth=1.2, label="Student's, there")
    ends = [middle if end is None else end for end in (one["low"], one["high"])]
    axes.plot(ends, [y, y], color=colour, linewidth=3, label=one["verdict"])
    axes.plot([middle], [y], "o", color=colour)
    if one["threshold"] is not None:
        axes.plot([one["threshold"]], [y], "|", color="black", markersize=11, label="threshold")
    if (band := one["within"]) is not None:
        axes.plot(
            [1 / band if zero else -band, band],
            [y, y],
            "|",
            color="0.4",
            markersize=11,
            label="band",
        )
    axes.plot(dots, [y] * len(dots), ".", color="0.4", markersize=4, zorder=3, label="a seed")
    if one["exploratory"]:
        look: dict = dict(markerfacecolor="white", markeredgecolor=colour, markersize=6, zorder=4)
        axes.plot([middle], [y], "o", label="mean, exploratory", **look)
