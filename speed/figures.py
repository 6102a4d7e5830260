"""The figure of what bench.py wrote: training and decoding by length."""

from pathlib import Path

import matplotlib.pyplot as plt

from runs.files import read_json
from study.drawing import dress, log_axis, mixer_colours, write

PANELS = (
    ("T", "tokens_s", "training (tokens/s)"),  # as many tokens a step at every T
    ("T", "peak_mb", "training, peak memory (MB)"),
    ("context", "ms", "decoding (ms a token)"),
)


def draw(folder: Path) -> list[Path]:
    """Draws what the parts length and decode wrote to the folder, in cost.png. Returns its path, if there is any."""
    files = [folder / f"{part}.json" for part in ("length", "decode")]
    rows = [row for file in files if file.is_file() for row in read_json(file)["rows"] if "mixer" in row]
    panels = [(x, y, title) for x, y, title in PANELS if any(x in row and y in row for row in rows)]
    if not panels:
        return []
    figure, grid = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 4), squeeze=False)
    for axes, (x, y, title) in zip(grid[0], panels, strict=True):
        for mixer, colour in mixer_colours(row["mixer"] for row in rows).items():
            points = [(row[x], row[y]) for row in rows if row["mixer"] == mixer and x in row and y in row]
            if points:  # a mixer that one part of bench.py has measured, and another not yet
                axes.plot(*zip(*points, strict=True), color=colour, marker="o", ms=3, label=mixer)
        axes.set(ylim=(0, None), title=title, xlabel="context" if x == "context" else "sequence length")
        log_axis(axes, (row[x] for row in rows if x in row and y in row))
        dress(axes)
    axes.legend(*grid[0, 0].get_legend_handles_labels(), frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return [write(figure, folder / "cost.png")]
