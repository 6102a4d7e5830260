"""TensorBoard beside metrics.jsonl: every number of its rows is a curve, "train/loss", "eval/meters/branch/0", ...

pip install tensorboard; tensorboard --logdir out
"""

from configurator import UserError

import os
from pathlib import Path
from typing import Any

SUFFIX = ".nanogate"  # of our event files: those of other programs in the folder stay there


def remove_events(folder: Path) -> None:
    """Removes the event files of a run, unless the folder is a link to another one."""
    for old in folder.glob(f"events.out.tfevents.*{SUFFIX}") if not os.path.islink(folder) else ():
        old.unlink()


def import_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("logger='tensorboard': it is not installed: pip install tensorboard") from None
    return SummaryWriter


def open_board(folder: Path, rows: list[dict]) -> Any:
    """A SummaryWriter of rows that are written anew: those of steps which a kill has undone stand there once."""
    remove_events(folder)
    board = import_writer()(folder, filename_suffix=SUFFIX)
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
