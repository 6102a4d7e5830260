"""TensorBoard beside metrics.jsonl: every number of its rows is a curve, "train/loss", "eval/meters/branch/0", ...

pip install tensorboard; tensorboard --logdir out
"""

from pathlib import Path
from typing import Any


def open_board(folder: Path, first_step: int, rows: list[dict]) -> Any:
    """A SummaryWriter that hides what was logged of first_step and later, which is undone, and then adds the rows."""
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(folder, purge_step=first_step)
    for row in rows:
        add_row(board, row)
    return board


def add_row(board: Any, row: dict) -> None:
    """Adds the numbers of a row, at any depth, each under the path to it."""
    parts: list[tuple[str, Any]] = [(row["event"], {key: x for key, x in row.items() if key not in ("event", "step")})]
    for name, value in parts:  # grows meanwhile
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            parts += [(f"{name}/{key}", part) for key, part in items]
        elif isinstance(value, int | float):
            board.add_scalar(name, float(value), row["step"])
