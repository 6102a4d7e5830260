"""out_dir holds the files of a run, and only one run at a time writes them.

    with OutDir(config, resumed) as out:
        out.take()                                          # UserError for another's folder
        out.start(about, first_step=0)                      # config.json, code/, the loggers
        out.log({"event": "train", "step": 0, "loss": 10.8})
        out.save(checkpoint, is_best=True)                  # best.pt, ckpt.pt

Whenever a run is killed, every file is whole, and ckpt.pt and metrics.jsonl are all it takes to go
on. Under torchrun rank 0 alone writes: train.py makes these calls there (Processes.on_main), and
log does nothing elsewhere.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from base import files
from base.configurator import UserError
from keys import TrainConfig
from runs import checkpoint as checkpoints
from runs.loggers import LOGGERS

METRICS = "metrics.jsonl"
ROOT = Path(__file__).resolve().parents[1]
KEPT = "ckpt-[1-9]*.pt"  # checkpoints that stay
NOT_CODE = ("config", "docs", "results", "tests")  # folders that no run reads its code from
ROW = {"event": (str, 1, 99), "step": (int, 0, 1 << 60)}  # what a line of metrics.jsonl has
# what meters.py and plot.py write of a run
OF_OTHER_SCRIPTS = ("meters.json", "page.png", "maps.png", "curves.png", "page.html")


class OutDir(contextlib.AbstractContextManager):
    def __init__(self, config: TrainConfig, resumed: dict | None = None):
        """resumed: the checkpoint of this folder that the run goes on from, or None."""
        self.path = Path(config.out_dir)
        self.config = config
        self.resumed = resumed
        self.lock: IO | None = None
        self.metrics: IO | None = None  # metrics.jsonl
        self.logger: Any = None  # another one, of runs/loggers.py
        self.kept: list[dict] = []  # the rows of metrics.jsonl that stay, of a resumed run
        # the row of the end, if the run had ended at the step from which it goes on
        self.ended: dict | None = None

    def __exit__(self, *error):
        for file in (self.logger, self.metrics, self.lock):
            with contextlib.suppress(OSError):  # a full disk, which was reported
                if file is not None:
                    file.close()

    def take(self) -> None:
        """Makes the folder a run's, and locks it. UserError where it is somebody else's, or holds a
        run that this one does not go on from."""
        files.claim(self.path, "run", self.config.overwrite)
        kept = [file.name for file in self.path.glob(KEPT)]
        names = ["config.json", METRICS, "ckpt.pt", "best.pt", *kept, *OF_OTHER_SCRIPTS]
        files.check_inside(self.path, names, ["code", "tensorboard", "wandb"])
        self.lock = files.lock(self.path)
        # init_from=auto starts where there is no ckpt.pt: a kill in the first save leaves only best.pt
        names = ["ckpt.pt"] if self.config.init_from == "auto" else ["ckpt.pt", "best.pt"]
        there = [name for name in names if (self.path / name).is_file()]
        if there and self.resumed is None and not self.config.overwrite:
            raise UserError(
                f"{self.path}: holds a run already ({there[0]}); --init_from=resume goes on from "
                "its ckpt.pt, --overwrite=true starts over"
            )
        files.remove_leftovers(self.path)

    def start(self, about: dict, first_step: int) -> None:
        """Writes config.json, which holds `about`, and the code, and opens the loggers."""
        if first_step:
            self.read_kept_rows(first_step)
        # before anything is replaced: the library of one may be missing
        if self.config.logger in LOGGERS:
            make = LOGGERS[self.config.logger]
            self.logger = make(self.config, first_step, self.kept, about["run_id"])
        # else the run goes on with its own copy of the code
        if ROOT != (self.path / "code").resolve():
            for name in code_of_the_project():
                for parent in reversed(Path(name).parents):  # of "mine/scan.py" . and mine
                    files.make_folder(self.path / "code" / parent)
                # as a new file: an old one may be a hard link to that of another run
                files.write_bytes(self.path / "code" / name, (ROOT / name).read_bytes())
        if self.resumed is None:  # what would be taken for this run's
            old: list = ["ckpt.pt", "best.pt", *(file.name for file in self.path.glob(KEPT))]
            if self.config.overwrite:
                old += OF_OTHER_SCRIPTS
            for name in old:
                (self.path / name).unlink(missing_ok=True)
        about = about | {"command": sys.argv} | git_state()
        files.write_text(self.path / "config.json", json.dumps(about, indent=2))
        rows = "".join(json.dumps(row) + "\n" for row in self.kept)
        files.write_text(self.path / METRICS, rows)
        self.metrics = files.open_to_append(self.path / METRICS)

    def read_kept_rows(self, first_step: int) -> None:
        """Keeps the rows from before the step at which the run goes on, and the evaluation of that
        step, which comes after the save. One that is better than the best so far is dropped, and
        made again: the run was killed before that step was saved as best.pt."""
        for row in read_metrics(self.path / METRICS):
            event = row["event"]
            if row["step"] < first_step:
                self.kept.append(row)
            elif row["step"] == first_step and event == "end":
                self.ended = row
            elif row["step"] == first_step and event == "eval":
                if row["val_loss"] >= self.resumed["best_val_loss"]:
                    self.kept.append(row)

    def log(self, row: dict) -> None:
        """Writes a row as a line of metrics.jsonl, at once, and hands it to the logger. ValueError
        for a number that is not finite, which is no JSON."""
        if self.logger is not None:
            self.logger.log(row)
        if self.metrics is not None:
            self.metrics.write(json.dumps(row, allow_nan=False) + "\n")
            self.metrics.flush()

    def save(self, checkpoint: dict, is_best: bool) -> None:
        """Writes ckpt.pt. A checkpoint that is the best, or stays, is written under that name
        first: where a step has its ckpt.pt, it has the others."""
        os.fsync(self.metrics.fileno())  # the rows of all steps before this one
        step = checkpoint["iter_num"]
        interval = self.config.keep_interval
        stays = interval is not None and step > 0 and step % interval == 0
        names = ["best.pt"] * is_best + [kept_checkpoint(step)] * stays + ["ckpt.pt"]
        file = self.path / names[0]
        checkpoints.save(file, checkpoint)
        for name in names[1:]:
            files.link_whole(file, self.path / name)
        if stays and self.config.keep_last is not None:
            # the new one is on the disk by now, so that a full disk loses none
            oldest = step - (self.config.keep_last - 1) * interval
            for file in self.path.glob(KEPT):
                number = file.stem.removeprefix("ckpt-")
                if number.isdecimal() and int(number) < oldest:
                    file.unlink()


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
    # a run that is starting beside this one has its mark before its first file of code
    marks = ("config.json", files.MARKER)
    is_of_a_run = folder.name == "code" and any(folder.with_name(x).is_file() for x in marks)
    is_environment = (folder / "pyvenv.cfg").is_file() or (folder / "conda-meta").is_dir()
    is_left_out = folder.parent == ROOT and folder.name in NOT_CODE
    return not (folder.name.startswith(".") or is_of_a_run or is_environment or is_left_out)


def code_sha256() -> tuple[str, dict[str, str]]:
    """(SHA-256 of the code of the project, {file: its own SHA-256}). Rows of an experiment whose
    hashes differ are of different code."""
    by_file = {}
    for name in code_of_the_project():
        by_file[name] = hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps(by_file).encode()).hexdigest(), by_file


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
