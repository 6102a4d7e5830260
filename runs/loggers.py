"""Where the numbers of a run go. To send them somewhere else, too, add a class like TensorBoard,
its line in LOGGERS, and its name to the choices of the key `logger` (keys.py).

    Logger(config, first_step, kept)    kept: the rows before first_step, of a run that goes on
    log(row)                            {"event": "train", "step": 30, "loss": 2.1, ...}
    close()                             the run has ended

A row holds numbers, and lists and dicts of them; its event is train, eval, end or stopped. train.py
makes the rows: a number that you add to one there arrives in every logger. Only the first process
has loggers.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from base import files
from base.files import write_text

METRICS = "metrics.jsonl"


class JsonLines:
    """out_dir/metrics.jsonl: one row a line, written at once."""

    def __init__(self, config, first_step: int, kept: list[dict]):
        file = Path(config.out_dir) / METRICS
        write_text(file, "".join(json.dumps(row) + "\n" for row in kept))
        self.file = files.open_to_append(file)

    def log(self, row: dict) -> None:
        """Raises ValueError for a number that is not finite, which is no JSON."""
        self.file.write(json.dumps(row, allow_nan=False) + "\n")
        self.file.flush()

    def sync(self) -> None:
        """Returns when all rows are on the disk."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """out_dir/tensorboard: every number of a row, at any depth, is a curve: "train/loss",
    "eval/meters/branch/0" ..."""

    def __init__(self, config, first_step: int, kept: list[dict]):
        with files.one_line("logger='tensorboard': pip install tensorboard", ImportError):
            from torch.utils.tensorboard import SummaryWriter
        folder = files.make_folder(Path(config.out_dir) / "tensorboard")
        # hides what was logged of first_step and later, which is undone, but for rows in `kept`
        self.board = SummaryWriter(folder, purge_step=first_step)
        for row in kept:
            if row["step"] >= first_step:
                self.log(row)

    def log(self, row: dict) -> None:
        numbers = {name: x for name, x in row.items() if name not in ("event", "step")}
        for name, number in curves(row["event"], numbers):
            self.board.add_scalar(name, number, row["step"])
        self.board.flush()

    def close(self) -> None:
        self.board.close()


def curves(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """(name, number) of each number in a value, whose own name is given."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from curves(f"{name}/{key}", part)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from curves(f"{name}/{i}", part)
    elif isinstance(value, int | float):
        yield name, float(value)


LOGGERS = {"tensorboard": TensorBoard}  # beside JsonLines, which every run has
