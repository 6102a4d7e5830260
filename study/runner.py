"""The running of an experiment: processes side by side, in one worker or in several that share
out_dir.

    rows = run_all(config, out_dir)     # the rows of the compared runs, in the order of the list

Each `python experiment.py CONFIG --out_dir=SHARED` is a worker. It locks a run that has no row,
starts train.py and evaluate.py for it, appends its row to rows.jsonl, and takes the next, until
none is left, which follows from the rows alone (plan.py). The processes of a run hold its lock
together with the worker: it is free when all of them are gone, and another worker then goes on
where it was stopped. A worker with nothing to do waits for the runs of the others.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO, NoReturn

import torch

from base import files
from base.streams import tell
from configurator import UserError
from runs import checkpoint as checkpoints
from runs.hardware import pick_device, signals_to, usable_cores
from runs.outdir import ROOT, kept_checkpoint, read_metrics, write_text
from study import report
from study.plan import Plan, name_of, steps_of
from study.rows import (
    OF_KIND,
    as_read,
    missing_scores,
    read_rows,
    run_of,
    scores_of,
    script_of,
    text_of,
)

LOOK = 2.0  # seconds between looks at the rows of other workers
OF_CODE_AND_MACHINE = (  # fields of a run's config.json that its row has, too
    "n_params",
    "flops_per_token",
    "state_bytes",
    "dtype",
    "device",
    "threads",
    "code_sha256",
    "git_commit",
    "git_dirty",
    "versions",
)


def run_all(config, out_dir: Path) -> list[dict] | None:
    """Prints what is done already, starts the runs that have no row, unless run=false, and returns
    the rows of the compared runs in the order of the list, or None."""
    # one without a marker may be results/NAME of a clone: it has our rows
    files.claim(out_dir, "experiment", config.overwrite or bool(read_rows(out_dir)))
    if config.run:
        files.check_place(out_dir / "rows.jsonl")
        files.check_inside(out_dir, folders=["locks"])
    plan = Plan(config, read_rows(out_dir))
    check_rows(config, plan, out_dir)
    more = "; more follow when learning rates are chosen" if plan.waits_for_rates else ""
    done = f"{len(plan.done)} runs are done already"
    print(f"{config.name}: {len(plan.runs)} runs, {steps_of(plan.runs):,} steps; {done}{more}")
    if lost := sorted(name_of(run) for run in plan.unscored if not is_kept(run, out_dir)):
        words = "a score of theirs needs; to run one again, remove its row"
        print(
            f"  {len(lost)} finished runs have no checkpoint in {out_dir} ({', '.join(lost[:3])}), which {words}"
        )
    if config.run and to_do(plan, out_dir):
        with signals_to(stop):
            work(config, out_dir)
        plan = Plan(config, read_rows(out_dir))
    if (table := report.rates_table(config, plan.choices)) is not None:
        print(f"\n{table}")
    if lacking := len(plan.compared) - len(plan.shown):
        print(f"{lacking} of {len(plan.compared)} runs have no row yet")
    if hidden := sum("purpose" not in row for row in plan.others):
        print(
            f"{hidden} rows are not shown: they have other keys, or wait for a learning rate that is not chosen yet"
        )
    shown = []
    for row in plan.shown:  # a row in the file may have more scores
        scores = {
            name: score for name, score in scores_of(config, row).items() if score is not None
        }
        shown.append(row | {"scores": scores})
    return shown or None


def check_rows(config, plan: Plan, out_dir: Path) -> None:
    """Raises UserError for rows of these runs that are about another metric, or about data of
    another script or of several versions. Rows about another version than the script's are shown,
    and no run is added to them."""
    for name, ours in {"metric": config.metric, "prepare": config.prepare}.items():
        if other := {row.get(name, ours) for row in plan.done} - {ours}:
            raise UserError(
                f"{name}={ours}: the rows in {out_dir} have {name}={min(other)}; take another --out_dir"
            )
    now, rows_of = (
        script_of(config.prepare).VERSION,
        {row.get("data_version", 1) for row in plan.done},
    )
    if rows_of - {now}:  # rows of before this key are about a first version
        versions = ", ".join(map(str, sorted(rows_of)))
        about = f"the rows in {out_dir} are about version {versions} of data/{config.prepare}; it is at version {now}"
        if len(rows_of) > 1 or config.run and to_do(plan, out_dir):
            raise UserError(f"{about}: take another --out_dir for the new data")
        print(about)


def to_do(plan: Plan, out_dir: Path) -> list[dict]:
    """What can be done now: runs without a row, and rows that lack a score whose checkpoints are
    still there."""
    return [*plan.lacking, *(row for row in plan.unscored if is_kept(row, out_dir))]


def is_ready(item: dict, plan: Plan, out_dir: Path) -> bool:
    """Whether a branch can begin: the checkpoint that it goes on from is there. Raises UserError
    where the run that was to keep it has ended without."""
    if "branch" not in item or "finite" in item:
        return True
    file = start_of_branch(item, out_dir)
    of, seed = item["branch"]["of"], item["seed"]
    if not file.is_file() and any(row["arm"] == of and row["seed"] == seed for row in plan.shown):
        words = f"goes on from {file}, which is not there, though that run has ended; to make it again, remove its row"
        raise UserError(f"{name_of(item)}: {words}")
    return file.is_file()


def start_of_branch(run: dict, out_dir: Path) -> Path:
    """The checkpoint that a branch goes on from."""
    parent = {"arm": run["branch"]["of"], "seed": run["seed"]}
    return out_dir / name_of(parent) / kept_checkpoint(run["branch"]["at"])


def stop(number: int) -> NoReturn:
    """What a signal does: `work` ends, and lets its runs save."""
    name = signal.Signals(number).name
    tell(
        f"{name}: the runs save and end. A second SIGTERM or Ctrl-C ends this worker alone, at once"
    )
    sys.exit(128 + number)


def work(config, out_dir: Path) -> None:
    """Runs what no other worker runs, until nothing is left to do for any of them. A signal stops
    the runs, which save first."""
    gpus = gpus_of(config)
    jobs = jobs_of(config, gpus)
    # of each process of a run; results may depend on it: for the first run as for the last one
    threads = max(1, usable_cores() // (jobs * config.processes_per_run))
    running: list[dict] = []
    look_at, waits = 0.0, False
    try:
        while True:
            if len(running) < jobs and time.monotonic() >= look_at:
                plan = Plan(config, read_rows(out_dir))
                items = to_do(plan, out_dir)
                if not items and not running:
                    return
                for item in (one for one in items if is_ready(one, plan, out_dir)):
                    is_ours = name_of(item) in [job["name"] for job in running]
                    if (
                        len(running) < jobs
                        and not is_ours
                        and (held := take(config, item, out_dir)) is not None
                    ):
                        gpu = min(gpus, key=[job["gpu"] for job in running].count, default=None)
                        rest = carry_out(config, item, out_dir, threads, gpu, held)
                        running.append(
                            {"name": name_of(item), "gpu": gpu, "rest": rest, "process": next(rest)}
                        )
                if not running and not waits:
                    print(
                        f"waiting for {len(items)} runs of other workers, first {name_of(items[0])}"
                    )
                waits, look_at = not running, time.monotonic() + LOOK
            time.sleep(0.2)
            for job in [job for job in running if job["process"].poll() is not None]:
                try:
                    job["process"] = next(job["rest"])
                except StopIteration as end:
                    running.remove(job)
                    done = f"{end.value['seconds']:.0f} s ({len(plan.done) + 1} of {len(plan.runs)} runs)"
                    print(f"{job['name']}: {report.show(config, end.value)}, {done}", flush=True)
                    look_at = 0.0
    finally:
        for job in running:
            job["process"].terminate()
        for job in running:
            job["process"].wait()
            job["rest"].close()


def lock(out_dir: Path, name: str, wait: float = 0.0) -> IO:
    """The lock of a run, of "rows" or of the "report", which one worker has at a time. It lies
    beside the run's folder. Raises files.InUse while another process has it."""
    folder = files.make_folder(files.make_folder(out_dir / "locks") / name)
    return files.lock(folder, wait)


def take(config, item: dict, out_dir: Path) -> IO | None:
    """Locks a run. None: another worker has it, or processes of one that was killed; or it has a
    row by now."""
    try:
        held = lock(out_dir, name_of(item))
    except files.InUse:
        return None
    if text_of(item) in map(text_of, to_do(Plan(config, read_rows(out_dir)), out_dir)):
        return held
    held.close()
    return None


def append_row(out_dir: Path, row: dict) -> None:
    with lock(out_dir, "rows", wait=math.inf), files.open_rows(out_dir / "rows.jsonl") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def gpus_of(config) -> list[str]:
    """The GPUs of each run that goes on at a time, as CUDA_VISIBLE_DEVICES names them: of this machine, or as many as
    --dry_run plans for; none for runs on the CPU. Raises UserError if one run needs more."""
    each, planned = config.processes_per_run, config.gpus * config.dry_run
    if not planned and pick_device(config.base.get("device", "auto")) != "cuda":
        return []
    names = list(map(str, range(planned or torch.cuda.device_count())))
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) and not planned:
        names = visible.split(",")
    if len(names) < each:
        raise UserError(f"processes_per_run={each}: each needs a GPU, and there are {len(names)}")
    return [",".join(names[i : i + each]) for i in range(0, len(names) - each + 1, each)]


def jobs_of(config, gpus: list[str]) -> int:
    at_most = config.jobs or len(gpus) or max(1, usable_cores() // config.processes_per_run)
    trials = len(config.learning_rates) * len(config.selection_seeds)
    return min(at_most, len(config.arms) * max(len(config.seeds), trials))


def carry_out(
    config, item: dict, out_dir: Path, threads: int, gpu: str | None, held: IO
) -> Generator[subprocess.Popen, None, dict]:
    """Makes a run with its scores, or the scores that a row lacks: yields each process in turn, and
    goes on when that one has ended. It appends the row, which it returns, and then gives the lock
    of the run back."""
    run, folder, is_new = run_of(item), out_dir / name_of(item), "finite" not in item
    with held:
        row, data = dict(item), prepare(config, run["data"], run["seed"], out_dir / "data")
        started = time.time()
        if is_new:
            if any(
                (folder / name).is_file() for name in ("ckpt.pt", "metrics.jsonl")
            ) and not is_of(run, folder):
                raise UserError(
                    f"{folder}: holds a run of other keys; move it away, or take another --out_dir"
                )
            files.claim(folder, "run")
            keys = {"eval_whole": True, "threads": threads} | run["config"]
            keys |= {"dataset": str(data), "out_dir": str(folder), "init_from": "auto"}
            write_text(folder / "run.json", json.dumps(run))
            if "branch" in run and not (folder / "ckpt.pt").is_file():
                files.link_whole(start_of_branch(run, out_dir), folder / "ckpt.pt")
            (folder / "log.txt").unlink(missing_ok=True)
            yield (
                process := start_process(
                    ("train.py", keys), folder, threads, gpu, config.processes_per_run, held
                )
            )
            row = finish(config, run, folder, process.returncode)
            if "branch" in run:  # the seconds of its checkpoint are the other run's
                row["seconds"] -= checkpoints.load(start_of_branch(run, out_dir), mapped=True)[
                    "seconds"
                ]
        about = {"checkpoint": str(folder / "ckpt.pt"), "dataset": str(data)}
        about["device"] = run["config"].get("device", "auto")
        for name in missing_scores(config, row):
            file = folder / f"score_{name}.json"
            keys = about | config.scores[name] | {"out": str(file)}
            yield (process := start_process(("evaluate.py", keys), folder, threads, gpu, 1, held))
            check_end(folder, process.returncode)
            score = files.read_json(file)
            score.pop("checkpoint", None)  # a path of this machine
            row["scores"] = row["scores"] | {name: score}
            row["scored"] = row.get("scored", {}) | {name: as_read(config.scores[name])}
        if is_new:
            row["seconds"] = max(row["seconds"], time.time() - started)
        # where a run has two rows, the later one counts, also if a machine whose clock is ahead
        # made the first
        row["ended"] = max(time.time(), row.get("ended", 0) + 1e-3)
        append_row(out_dir, row)  # other machines see it before the lock goes
    return row


def is_of(run: dict, folder: Path) -> bool:
    """Whether the folder is of this very run, and not of what the experiment was before an edit."""
    file = folder / "run.json"
    return file.is_file() and files.read_json(file) == run


def is_kept(item: dict, out_dir: Path) -> bool:
    """Whether the checkpoint of the end of a run, or of a row's run, is still there."""
    run, folder = run_of(item), out_dir / name_of(item)
    if not is_of(run, folder) or not (folder / "ckpt.pt").is_file():
        return False
    return [row["event"] for row in read_metrics(folder / "metrics.jsonl")][-1:] == ["end"]


def prepare(config, keys: dict, seed: int, place: Path) -> Path:
    """The folder of the data that data/*/prepare.py makes of these keys, made now unless it is
    there. The data have the run's seed, unless the keys name another; where the script has none,
    all seeds share the data."""
    script, folder = script_of(config.prepare), place / "all"
    if "seed" in {field.name for field in dataclasses.fields(script.Config)} - keys.keys():
        keys, folder = keys | {"seed": seed}, place / f"seed{seed}"
    place.mkdir(parents=True, exist_ok=True)
    # workers that start together need the same data; the lock lies beside the folder, which is the
    # data set's alone
    with lock(place, folder.name, wait=math.inf):
        if not is_prepared(config.prepare, keys, folder):
            # data that other experiments share by a link are read, and not made anew
            files.check_inside(place.parent, folders=[place.name])
            files.check_inside(place, folders=[folder.name])
            files.claim(folder, "data set")
            # from here on a data set in the folder is the experiment's own, from before an edit of
            # its config
            is_own = (folder / "prepared.json").is_file()
            if is_own:
                write_text(folder / "prepared.json", "{}")  # until the new one is there
            given = keys | {"out_dir": str(folder), "overwrite": is_own}
            with contextlib.redirect_stdout(io.StringIO()):
                script.main([f"--config_override={json.dumps(given)}"])
            write_text(
                folder / "prepared.json", json.dumps({"prepare": config.prepare, "keys": keys})
            )
    return folder


def is_prepared(script: str, keys: dict, folder: Path) -> bool:
    """Whether data/SCRIPT/prepare.py has made the folder of these keys, at the version that it is
    at now."""
    file, meta = folder / "prepared.json", folder / "meta.json"
    if not (file.is_file() and meta.is_file()) or files.read_json(file) != {
        "prepare": script,
        "keys": keys,
    }:
        return False
    about = files.read_json(meta)
    return isinstance(about, dict) and about.get("generator_version") == script_of(script).VERSION


def start_process(
    command, folder: Path, threads: int, gpu: str | None, processes: int, held: IO
) -> subprocess.Popen:
    """Starts a script in a process of its own, or under torchrun in several that share its work. It
    holds the lock of the run, too, which is therefore not free before it ends, also where the
    worker is killed."""
    script, keys = command
    environment = {"OMP_NUM_THREADS": str(threads)} | (
        {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    )
    launcher = []
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        # seconds that torchrun leaves them to save in
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "600"
    with files.open_to_append(folder / "log.txt") as log:
        return subprocess.Popen(
            [sys.executable, *launcher, ROOT / script, f"--config_override={json.dumps(keys)}"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            # a terminal's Ctrl-C is for this process, which then asks each run once
            start_new_session=True,
            pass_fds=[held.fileno()],
        )


def check_end(folder: Path, status: int) -> list[dict]:
    """The rows of metrics.jsonl of a run whose process has ended. Raises UserError for a crash; to
    stop where the loss is not finite is none."""
    metrics = read_metrics(folder / "metrics.jsonl")
    # status 1 is any exception's, too
    was_stopped = status == 1 and metrics[-1:] and metrics[-1]["event"] == "stopped"
    if status and not was_stopped or "eval" not in [row["event"] for row in metrics]:
        lines = (
            (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        )
        # behind the error of the run other ranks may tell that they have lost it, and torchrun
        # prints a report
        errors = sorted(
            filter(lambda line: line.startswith("error: "), lines),
            key=lambda line: "has lost the" in line,
        )
        tail = [*errors, *lines[-1:], ""][0]
        raise UserError(
            f"{folder.name} ended with status {status}: {tail} (all of it: {folder / 'log.txt'})"
        )
    return metrics


def finish(config, run: dict, folder: Path, status: int) -> dict:
    """The row of a run that has been trained, or has diverged. Raises UserError for a crash."""
    metrics, about = check_end(folder, status), files.read_json(folder / "config.json")
    evaluations = [row for row in metrics if row["event"] == "eval"]
    speed = statistics.median(
        [row["tokens_per_second"] for row in metrics if row["event"] == "train"] or [math.nan]
    )
    end = evaluations[-1] | metrics[-1]  # the row of event "end" has the numbers of the whole split
    sinks = [  # the meters of each kind of query, for the figures, if the data set names kinds
        {"step": row["step"], "value_norm": meters["value_norm"]}
        | {
            kind: {name: values[name] for name in OF_KIND}
            for kind, values in meters["kinds"].items()
        }
        for row in evaluations
        if (meters := row.get("meters", {})).get("kinds")
    ]
    row = run | {
        "finite": status == 0,
        "horizon": about["config"]["max_iters"],
        "last_step": metrics[-1]["step"],  # before the horizon: solved, or not finite
        "accuracy": end["accuracy"] if status == 0 else math.nan,
        "val_loss": end["val_loss"] if status == 0 else math.nan,
        "metric": config.metric,
        "curve": [[row["step"], row[config.metric]] for row in evaluations],
        "meters": evaluations[-1].get("meters", {}),
        "sinks": sinks,
        "loss": end.get("loss_of", {}),
        "loss_curve": [
            {"step": row["step"]} | row["loss_of"] for row in evaluations if "loss_of" in row
        ],
        "tokens_per_second": speed,
        "step_ms": 1000 * about["tokens_per_step"] / speed,
        "scores": {},
        "scored": {},
        "seconds": metrics[-1].get("seconds", 0),  # over all starts of the run
        **{name: about.get(name) for name in OF_CODE_AND_MACHINE},
        "processes": config.processes_per_run,
        "prepare": config.prepare,
        "data_version": script_of(config.prepare).VERSION,
        # a claim whose seeds were added later shows
        "planned_seeds": config.seeds_of.get(run["arm"], config.seeds),
    }
    return json.loads(json.dumps(row), parse_constant=lambda constant: None)  # NaN is no JSON
