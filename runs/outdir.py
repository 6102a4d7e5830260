"""out_dir holds the files of a run, and only one run at a time writes them.

    with OutDir(config, processes, resumed) as out:         # UserError for another's folder
        out.start(about, first_step=0)                      # config.json, code/, the loggers
        out.log({"event": "train", "step": 0, "loss": 10.8})
        out.save(checkpoint, is_best=True)                  # best.pt, ckpt.pt

Whenever a run is killed, every file is whole, and ckpt.pt and metrics.jsonl are all it takes to go
on. Under torchrun every process makes these calls: rank 0 writes, and a UserError of rank 0 is
raised by all of them.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy
import torch

from base import files
from base.configurator import UserError
from base.files import write_text
from runs import checkpoint as checkpoints
from runs.hardware import Processes
from runs.loggers import LOGGERS, METRICS, JsonLines

ROOT = Path(__file__).resolve().parents[1]
KEPT = "ckpt-[1-9]*.pt"  # checkpoints that stay
NOT_CODE = ("config", "docs", "results", "tests")  # folders that no run reads its code from
ROW = {"event": (str, 1, 99), "step": (int, 0, 1 << 60)}  # what a line of metrics.jsonl has
# what meters.py and plot.py write of a run
OF_OTHER_SCRIPTS = ("meters.json", "page.png", "maps.png", "curves.png", "page.html")


class OutDir:
    def __init__(self, config, processes, resumed=None):
        """resumed: the checkpoint of this folder that the run goes on from, or None."""
        self.path = Path(config.out_dir)
        self.config = config
        self.processes = processes
        self.resumed = resumed
        self.lock = None
        self.metrics = None
        self.loggers = []  # of metrics.jsonl and others, on rank 0
        self.kept = []  # the rows of metrics.jsonl from before this start, on rank 0
        # the row of the end, on rank 0, if the run had ended at the step from which it goes on
        self.ended = None

    def __enter__(self):
        self.processes.on_main(self._lock)
        return self

    def __exit__(self, *error):
        for file in (*self.loggers, self.lock):
            with contextlib.suppress(OSError):  # a full disk, which was reported
                if file is not None:
                    file.close()

    def start(self, about: dict, first_step: int) -> None:
        """Writes config.json, which holds `about`, and the code, and opens the loggers."""
        self.processes.on_main(self._start, about, first_step)

    def log(self, row: dict) -> None:
        """Hands a row to the loggers. ValueError for a number that is not finite."""
        for logger in self.loggers:
            logger.log(row)

    def save(self, checkpoint: dict, is_best: bool = False) -> None:
        """Writes ckpt.pt. If it is the best, or stays, the file has those names before it is
        ckpt.pt, which vouches for the others."""
        self.processes.on_main(self._save, checkpoint, is_best)

    # -- on rank 0 ---------------------------------------------------------------------------------

    def _lock(self):
        files.claim(self.path, "run", self.config.overwrite)
        kept = [file.name for file in self.path.glob(KEPT)]
        names = ["config.json", METRICS, "ckpt.pt", "best.pt", *kept, *OF_OTHER_SCRIPTS]
        files.check_inside(self.path, names, ["code", "tensorboard", "wandb"])
        self.lock = files.lock(self.path)
        # init_from=auto starts where there is no ckpt.pt: a kill in the first save leaves best.pt
        # alone
        names = ["ckpt.pt"] if self.config.init_from == "auto" else ["ckpt.pt", "best.pt"]
        there = [name for name in names if (self.path / name).is_file()]
        if there and self.resumed is None and not self.config.overwrite:
            self.lock.close()
            raise UserError(
                f"{self.path}: holds a run already ({there[0]}); --init_from=resume goes on from "
                "its ckpt.pt, --overwrite=true starts over"
            )
        files.remove_leftovers(self.path)

    def _start(self, about, first_step):
        if first_step:
            self._read_kept_rows(first_step)
        # before anything is replaced: the library of one may be missing
        starts = (self.config, first_step, self.kept, about["run_id"])
        if self.config.logger in LOGGERS:
            self.loggers.append(LOGGERS[self.config.logger](*starts))
        if ROOT != (self.path / "code").resolve():  # a run's copy of the code, which goes on
            for name in code_of_the_project():
                copy_code(name, self.path / "code")
        if self.resumed is None:  # what would be taken for this run's
            old = ["ckpt.pt", "best.pt", *self.path.glob(KEPT)]
            if self.config.overwrite:
                old += OF_OTHER_SCRIPTS
            for name in old:
                (self.path / name).unlink(missing_ok=True)
        about |= {"command": sys.argv, "versions": versions()} | git_state()
        write_text(self.path / "config.json", json.dumps(about, indent=2))
        self.metrics = JsonLines(*starts)
        self.loggers.append(self.metrics)

    def _read_kept_rows(self, first_step):
        """A run that goes on from step n has lost what came after. The evaluation at n came after
        the save: if it is better than the best so far, the run ended before it was saved once more,
        as best.pt, and it is made again."""
        for row in read_metrics(self.path / METRICS):
            event = row["event"]
            if row["step"] < first_step:
                self.kept.append(row)
            elif row["step"] == first_step and event == "end":
                self.ended = row
            elif row["step"] == first_step and event == "eval":
                if row["val_loss"] >= self.resumed["best_val_loss"]:
                    self.kept.append(row)

    def _save(self, state, is_best):
        # the rows of all steps before this one are on the disk first
        self.metrics.sync()
        step = state["iter_num"]
        interval = self.config.keep_interval
        stays = interval is not None and step > 0 and step % interval == 0
        names = ["best.pt"] * is_best + [kept_checkpoint(step)] * stays + ["ckpt.pt"]
        file = self.path / names[0]
        checkpoints.save(file, state)
        for name in names[1:]:
            files.link_whole(file, self.path / name)
        if stays:
            self._remove_older_than_the_last(step)

    def _remove_older_than_the_last(self, step):
        """Leaves the keep_last newest of the checkpoints that stay. The new one is on the disk by
        now, so that a full disk loses none."""
        if self.config.keep_last is None:
            return
        oldest = step - (self.config.keep_last - 1) * self.config.keep_interval
        for file in self.path.glob(KEPT):
            number = file.stem.removeprefix("ckpt-")
            if number.isdecimal() and int(number) < oldest:
                file.unlink()


def copy_code(name: str, folder: Path) -> None:
    """Writes a file of the project into the folder, as a new one: an old one may be a hard link to
    that of another run. UserError for a folder that is a link."""
    for parent in reversed(Path(name).parents):  # of "mine/fast/scan.py" ., mine, mine/fast
        files.make_folder(folder / parent)
    content = (ROOT / name).read_bytes()
    files.write_whole(folder / name, lambda file: file.write(content))


def kept_checkpoint(step: int) -> str:
    """The name of the checkpoint that keep_interval keeps of a step."""
    return f"ckpt-{step}.pt"


def read_metrics(file: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl; none where there is no file. UserError names a damaged
    line."""
    return files.read_jsonl(file, ROW)


def code_of_the_project() -> list[str]:
    """The Python files of the repository, relative to it, but for NOT_CODE, hidden folders,
    environments and the code that runs have kept. They are enough to run any script of a run."""
    names = []
    for folder, inner, files_there in os.walk(ROOT):
        inner[:] = [name for name in inner if has_code(Path(folder) / name)]
        for name in files_there:
            if name.endswith(".py") and not name.startswith("."):
                names.append(str((Path(folder) / name).relative_to(ROOT)))
    return sorted(names)


def has_code(folder: Path) -> bool:
    is_of_a_run = folder.name == "code" and folder.with_name("config.json").is_file()
    is_environment = (folder / "pyvenv.cfg").is_file()
    is_left_out = folder.parent == ROOT and folder.name in NOT_CODE
    return not (folder.name.startswith(".") or is_of_a_run or is_environment or is_left_out)


def check_same_start(processes: Processes, config: Any, paths: Collection[str]) -> None:
    """Raises UserError, on every process, unless all have the same code and keys, but for threads
    and those in paths: what lies there is for the caller to compare."""
    if processes.world_size > 1:
        keys = dataclasses.asdict(config) | dict.fromkeys((*paths, "threads"))
        processes.check_same(keys, "the config", "start all processes with the same keys")
        processes.check_same(
            sha256_of(code_of_the_project()), "the code", "give all machines the same code"
        )


def code_sha256() -> tuple[str, dict[str, str]]:
    """(SHA-256 of the code of the project, {file: its own SHA-256}). Rows of an experiment whose
    hashes differ are of different code."""
    by_file = sha256_of(code_of_the_project())
    return hashlib.sha256(json.dumps(by_file).encode()).hexdigest(), by_file


def sha256_of(names: Iterable[str]) -> dict[str, str]:
    return {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in names}


def versions() -> dict[str, str]:
    return {
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
    }


def git_state() -> dict[str, str | bool | None]:
    """{"git_commit": the commit that is checked out, "git_dirty": whether code differs from it}, or
    None for both: without git, and in a copy of the project that is no repository."""
    # of this very folder: a repository around a copy of the project has commits of something else
    command = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}", "status"]
    command += ["--porcelain=v2", "--branch", "--", "*.py", ":!tests", ":!config", ":!results"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {"git_commit": None, "git_dirty": None}
    lines = done.stdout.decode(errors="replace").splitlines()
    commit = lines[0].split()[-1]  # "# branch.oid 27a232e..."
    is_dirty = any(not line.startswith("#") for line in lines)
    return {"git_commit": commit, "git_dirty": is_dirty}
