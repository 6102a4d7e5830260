"""TensorBoard beside metrics.jsonl: every number of its rows is a curve, "train/loss", "eval/meters/branch/0", ...

board = Board("out/tensorboard", rows=[])       # the rows that a resumed run has from before
board.add({"event": "train", "step": 0, "loss": 10.8})

pip install tensorboard; tensorboard --logdir out
"""

from configurator import UserError

import os
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".nanogate"  # of our event files: those of other programs in the folder stay there


def remove_events(folder: Path | str) -> None:
    """Removes the event files of a run, unless the folder is a link to another one."""
    for old in Path(folder).glob(f"events.out.tfevents.*{SUFFIX}") if not os.path.islink(folder) else ():
        old.unlink()


class Board:
    def __init__(self, folder: Path | str, rows: list[dict]):
        """Writes the rows anew, so that those of steps which a kill has undone stand there once, not twice."""
        remove_events(folder)
        self.writer = import_writer()(folder, filename_suffix=SUFFIX)
        for row in rows:
            self.add(row)

    def add(self, row: dict) -> None:
        values = {name: value for name, value in row.items() if name not in ("event", "step")}
        for name, value in numbers_of(values, row["event"]):
            self.writer.add_scalar(name, value, row["step"])

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def numbers_of(value: object, name: str) -> Iterator[tuple[str, float]]:
    """The numbers in a row, at any depth, each with the path to it."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers_of(part, f"{name}/{key}")
    elif isinstance(value, int | float):
        yield name, float(value)


def import_writer() -> type:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("logger='tensorboard': it is not installed: pip install tensorboard") from None
    return SummaryWriter
