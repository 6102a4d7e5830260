"""Where the numbers of a run go, beside metrics.jsonl. To send them somewhere else, add a class like
TensorBoard, its line in LOGGERS, and its name to the choices of the key `logger` (keys.py).

    Logger(config, first_step, kept, run_id)    kept: the rows that stay, of a resumed run; run_id
                                                is the same for each of its starts
    log(row)                                    {"event": "train", "step": 30, "loss": 2.1, ...}
    close()                                     the run has ended

A row holds numbers, and lists and dicts of them; its event is train, eval, end or stopped. train.py
makes the rows: a number that you add to one there arrives in every logger. Only the first process
has a logger.
"""

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from base import files
from base.configurator import UserError
from base.streams import tell


class TensorBoard:
    """out_dir/tensorboard: every number of a row, at any depth, is a curve: "train/loss",
    "eval/meters/branch/0" ..."""

    def __init__(self, config, first_step: int, kept: list[dict], run_id: str):
        with files.one_line("logger='tensorboard': pip install tensorboard", ImportError):
            from torch.utils.tensorboard import SummaryWriter
        folder = files.make_folder(Path(config.out_dir) / "tensorboard")
        # hides what was logged of first_step and later, which is undone, but for rows in `kept`
        self.board = SummaryWriter(folder, purge_step=first_step)
        for row in kept:
            if row["step"] >= first_step:
                self.log(row)

    def log(self, row: dict) -> None:
        for name, number in curves_of(row).items():
            self.board.add_scalar(name, number, row["step"])
        self.board.flush()

    def close(self) -> None:
        self.board.close()


class Service:
    """What Wandb and Trackio share: the curves of TensorBoard, in the project "nanogate". Where the
    library fails, one line says so, and the run goes on without it."""

    name: str  # of the library
    start: Callable  # (config, run_id) starts the library's run
    starting_step = 0  # the rows of earlier steps are there
    has_failed = False

    def __init__(self, config, first_step: int, kept: list[dict], run_id: str):
        with files.one_line(f"logger={self.name!r}: pip install {self.name}", ImportError):
            self.library = importlib.import_module(self.name)
        self._try(self.start, config, run_id)
        for row in kept:
            self.log(row)

    def log(self, row: dict) -> None:
        if row["step"] >= self.starting_step:
            self._try(self.library.log, curves_of(row), step=row["step"])

    def close(self) -> None:
        self._try(self.library.finish)

    def _try(self, function: Callable, *args, **keys) -> None:
        if self.has_failed:
            return
        try:
            with files.one_line(f"logger={self.name!r}: failed, and only metrics.jsonl goes on"):
                function(*args, **keys)
        except UserError as error:
            self.has_failed = True
            tell(str(error))


class Wandb(Service):
    """A run of Weights & Biases: WANDB_PROJECT names another project, and WANDB_MODE=offline sends
    nothing.

    wandb takes no step back: what a resume undoes stays there, and rows are left out up to the last
    step that it has, so that each step stands there once. Rows from before the resume that it lacks
    are sent. Offline, each start writes all rows into a folder of its own in
    out_dir/wandb: `wandb sync` of the last folder alone sends the run, whole and as it is in
    metrics.jsonl.
    """

    name = "wandb"

    def start(self, config, run_id: str) -> None:
        run = self.library.init(
            project=os.environ.get("WANDB_PROJECT", "nanogate"),
            name=config.out_dir,
            id=run_id,
            resume="allow",
            dir=config.out_dir,
            config=dataclasses.asdict(config),
            # the streams are those of base/streams.py, the code is in out_dir/code, and a service
            # that is down holds up the start and the end of a run for so many seconds
            settings={
                "console": "off",
                "save_code": False,
                "init_timeout": 30,
                "finish_timeout": 30,
            },
        )
        self.starting_step = run.starting_step


class Trackio(Service):
    """A run in trackio's store on this machine (TRACKIO_DIR), or what its own variables say.

    trackio takes no row back, but a run: a resume replaces the run in the store by all rows of
    metrics.jsonl. Elsewhere, as in a Space, each start is a run with all rows, beside the last one.
    """

    name = "trackio"

    def start(self, config, run_id: str) -> None:
        name = f"{config.out_dir} {run_id[:8]}"  # a run has no other mark that we may choose
        with contextlib.suppress(ValueError):  # the first run of the project
            for run in self.library.Api().runs("nanogate"):
                if run.name == name:
                    run.delete()
        self.library.init("nanogate", name, config=dataclasses.asdict(config), embed=False)


def curves_of(row: dict) -> dict[str, float]:
    """{"train/loss": 2.1, ...} of a row."""
    numbers = {name: x for name, x in row.items() if name not in ("event", "step")}
    return dict(curves(row["event"], numbers))


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


LOGGERS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
