"""What the first token gets, by kind of query: the table, the reading and the figures of an experiment with sinks.

All is made from the field "sinks" of the rows, which holds the meters of each kind of query at each evaluation
(docs/meters.md), and the attention maps from a meters.json. A data set that names kinds of query, such as
data/backcopy, has them. "other" are the queries of no named kind: those where the head has nothing to do.
"""

import statistics
from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.colors import PowerNorm

from study.drawing import COLOURS, curve_panels, write

Z = "the first token"
ARM_COLOURS = [COLOURS[6], *COLOURS[:6]]  # black is the first arm, in general without a gate


def at_end(row: dict) -> dict:
    return row["sinks"][-1]


def kinds_in(rows: list[dict]) -> list[str]:
    """The names of the kinds, "other" first."""
    names = [name for name in at_end(rows[0]) if name not in ("step", "value_norm")]
    return sorted(names, key=lambda name: name != "other")


def gate_of(kind: dict) -> float | None:
    """The mean of the gate on the readout, or else of the first gate there is."""
    means = kind["gate_mean"]
    return means.get("readout", next(iter(means.values()), None))


def with_sinks(rows: Iterable[dict]) -> list[dict]:
    return [row for row in rows if row.get("sinks")]


def arms_by_seeds(rows: list[dict]) -> tuple[list[str], list[str]]:
    """(arms with the most seeds, the other arms), each in the order of the rows."""
    counts = {arm: sum(row["arm"] == arm for row in rows) for arm in dict.fromkeys(row["arm"] for row in rows)}
    most = max(counts.values())
    return [arm for arm, n in counts.items() if n == most], [arm for arm, n in counts.items() if n < most]


# ----------------------------------------------------------------------------------------------------------------------
# In words and numbers


def table(rows: list[dict]) -> list[list[str]]:
    """Rows of cells, one per arm: means over the seeds at the end, and the standard deviation of the weight."""
    kinds = kinds_in(rows)
    cells = [["arm", "seeds", *(f"weight, {k}" for k in kinds), "sd", *(f"effective, {k}" for k in kinds)]]
    cells[0] += ["|v_0|", *(f"gate, {k}" for k in kinds), *(f"loss, {k}" for k in kinds)]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        ends = [at_end(row) for row in rows if row["arm"] == arm]
        weights = [share for end in ends if (share := end[kinds[0]]["share"]) is not None]
        line = [arm, str(len(ends)), *(show(mean_of(end[k]["share"] for end in ends), ".1%") for k in kinds)]
        line += [f"{statistics.stdev(weights):.1%}" if len(weights) > 1 else "-"]
        line += [show(mean_of(end[k]["effective"] for end in ends), ".3f") for k in kinds]
        line += [show(mean_of(end["value_norm"] for end in ends), ".2f")]
        line += [show(mean_of(gate_of(end[k]) for end in ends), ".2f") for k in kinds]
        cells.append([*line, *(f"{mean_of(end[k]['loss'] for end in ends):.4f}" for k in kinds)])
    return cells


def reading(rows: list[dict]) -> list[str]:
    """What the table says, in sentences: one per arm among those with the most seeds. Empty without an arm "none"."""
    arms, _ = arms_by_seeds(rows)
    if "none" not in arms or len(kinds_in(rows)) != 2:
        return []
    idle, busy = kinds_in(rows)
    lines = []
    for arm in sorted(arms, key=lambda arm: arm != "none"):
        ends = [at_end(row) for row in rows if row["arm"] == arm]
        weight = mean_of(end[idle]["share"] for end in ends)
        if weight is None:
            lines.append(f"With {arm}: its mixer has no weights, and so no sink.")
            continue
        norm = mean_of(end["value_norm"] for end in ends)
        effective = mean_of(end[idle]["effective"] for end in ends)
        gates = [mean_of(gate_of(end[kind]) for end in ends) for kind in (idle, busy)]
        if arm == "none":
            lines.append(
                f"Without a gate, queries with nothing to do put {weight:.0%} of their weight on {Z}, whose value has "
                f"shrunk to {norm:.2f} of the others'; what the head writes of it is {effective:.3f} of the stream."
            )
        else:
            gate = f"; the gate is {gates[0]:.2f} there and {gates[1]:.2f} at {busy}s" if None not in gates else ""
            lines.append(f"With {arm}: weight {weight:.0%}, value {norm:.2f}, written {effective:.3f}{gate}.")
    return lines


def mean_of(values: Iterable[float | None]) -> float | None:
    values = [value for value in values if value is not None]
    return statistics.fmean(values) if values else None


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# ----------------------------------------------------------------------------------------------------------------------
# In figures


def figures(rows: list[dict], folder: Path) -> list[Path]:
    """Draws sink.png, and sink_arms.png for the arms with fewer seeds. Returns the paths."""
    rows = with_sinks(rows)
    arms, others = arms_by_seeds(rows)
    drawn = [curves(rows, sorted(arms, key=lambda arm: arm != "none"), folder / "sink.png")]
    return drawn + ([small_multiples(rows, others, folder / "sink_arms.png")] if others else [])


def curves(rows: list[dict], arms: list[str], path: Path) -> Path:
    """Weight, effective sink, value norm and gate against the step: a colour per arm, every seed, and the mean with its
    interval; the gate at the queries of the second kind is dashed."""
    idle, *busy = kinds_in(rows)
    values: dict = {
        f"Weight on {Z} (%)": lambda point: percent(point[idle]["share"]),
        f"Effective sink: written of {Z} / |x|": lambda point: point[idle]["effective"],
        f"Value norm of {Z} / median": lambda point: point["value_norm"],
        "Gate": lambda point: gate_of(point[idle]),
    }
    panels = {title: {arm: curves_of(rows, arm, value) for arm in arms} for title, value in values.items()}
    looks = {arm: dict(color=colour) for arm, colour in zip(arms, ARM_COLOURS * len(arms), strict=False)}
    for arm in arms if busy else []:
        label = f"{arm}, at {busy[0]}s"
        panels["Gate"][label] = curves_of(rows, arm, lambda point: gate_of(point[busy[0]]))
        looks[label] = looks[arm] | dict(linestyle="--")
    where = f"at queries that are no {' and no '.join(f'{kind}s' for kind in busy)}" if busy else "at all queries"

    def finish(axes, title):
        axes.set(ylim=(0, None))
        if title.startswith("Weight"):
            axes.axhline(100 * uniform(rows, idle), color="0.4", linestyle=":", label="uniform weights")

    size, xlabel = (4.7, 3.0), f"step ({where})"
    return curve_panels(panels, looks, path, xlabel=xlabel, columns=2, size=size, sharey=False, finish=finish)


def small_multiples(rows: list[dict], arms: list[str], path: Path) -> Path:
    """The weight on token 0 against the step: a panel per arm, with the arm "none" in grey behind it, every seed."""
    idle = kinds_in(rows)[0]
    both = {"none": "none", "the arm of the panel": None}
    looks = {label: dict(color=colour) for label, colour in zip(both, ("0.75", COLOURS[0]), strict=True)}
    share = {arm: curves_of(rows, arm, lambda point: percent(point[idle]["share"])) for arm in ["none", *arms]}
    panels = {arm: {label: share[name or arm] for label, name in both.items()} for arm in arms}

    def finish(axes, title):
        axes.axhline(100 * uniform(rows, idle), color="0.4", linestyle=":", linewidth=1, label="uniform weights")
        axes.set(ylim=(0, 102))

    return curve_panels(panels, looks, path, ylabel=f"weight on {Z} (%)", size=(2.8, 2.2), finish=finish)


def curves_of(rows: list[dict], arm: str, value) -> list[list]:
    """[[(step, what value gives of a point of "sinks"), ...] of each run of the arm], of the runs that have one."""
    curves = [[(point["step"], value(point)) for point in row["sinks"]] for row in rows if row["arm"] == arm]
    known = [[(step, number) for step, number in curve if number is not None] for curve in curves]
    return [curve for curve in known if curve]


def uniform(rows: list[dict], kind: str) -> float:
    """The weight that uniform weights put on token 0, mean over the queries of the kind."""
    return statistics.fmean(row["meters"]["kinds"][kind]["uniform"] for row in rows)


def maps(checkpoints: list[dict], path: Path) -> Path:
    """The first attention map of each checkpoint of a meters.json, side by side, in one scale. Returns the path."""
    n, shown = len(checkpoints), [meters["maps"][0] for meters in checkpoints]
    widths = [1.0] * n + [0.04]
    figure, grid = plt.subplots(1, n + 1, figsize=(5.2 * n + 0.6, 4.9), width_ratios=widths)
    limit = max(largest(one) for one in shown)
    for axes, meters, one in zip(grid, checkpoints, shown, strict=False):
        image = attention_map(axes, one, limit)
        axes.set_title(gate_name(meters), fontsize=12)
    figure.colorbar(image, cax=grid[-1], label="weight")
    return write(figure, path)


def largest(shown: dict) -> float:
    return max(abs(w) for row in shown["weights"] for w in row)


def gate_name(meters: dict) -> str:
    return "without a gate" if meters["gate"] == "none" else f"gate {meters['gate']}"


def attention_map(axes: plt.Axes, shown: dict, limit: float):
    """Draws a map of meters.json: marks at the queries of a kind, and the gate as a strip. Returns the image.

    limit: the weight at the end of the scale. Weights that have both signs get a scale around zero.
    """
    weights, n = shown["weights"], len(shown["weights"])
    signed: dict = dict(cmap="PuOr", vmin=-limit, vmax=limit)
    positive: dict = dict(cmap="cividis", norm=PowerNorm(0.5, 0, limit))
    image = axes.imshow(weights, **(signed if any(w < 0 for row in weights for w in row) else positive))
    for i, (kind, positions) in enumerate(shown["queries"].items()):
        label = f"{kind}s"
        axes.plot([-1.5 - i] * len(positions), positions, ">", color=COLOURS[1 + i], ms=4, label=label, clip_on=False)
    axes.set(xlabel="key (position)", ylabel="query (position)", xlim=(-0.5, n - 0.5), ylim=(n - 0.5, -0.5))
    if shown["queries"]:
        axes.tick_params(axis="y", pad=10)
        axes.legend(frameon=False, loc="upper right", labelcolor="white", fontsize=9, handletextpad=0.1)
    if shown["gate"]:
        strip = axes.inset_axes((1.03, 0, 0.06, 1), sharey=axes)
        strip.imshow(
            [[value] for value in shown["gate"]], cmap="gray", vmin=0, vmax=max(1, *shown["gate"]), aspect="auto"
        )
        strip.set(xticks=[0], xticklabels=["gate"], ylim=(n - 0.5, -0.5))
        strip.tick_params(axis="y", left=False, labelleft=False)
    return image
