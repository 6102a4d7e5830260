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
from base.configurator import UserError
from base.streams import tell
from runs import checkpoint as checkpoints
from runs.hardware import pick_device, signals_to, usable_cores
from runs.outdir import ROOT, kept_checkpoint, read_metrics
from study.arms import seeds_of_arms
from study.plan import Plan, name_of, steps_of
from study.rows import number, read_rows, script_of, text_of, wanted_scores

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
    counts = f"{len(plan.runs)} runs, {steps_of(plan.runs):,} steps"
    print(f"{config.name}: {counts}; {len(plan.done)} runs are done already{plan.more()}")
    if config.run and plan.lacking:
        with signals_to(stop):
            work(config, out_dir)
        plan = Plan(config, read_rows(out_dir))
    lacking = len(plan.compared) - len(plan.shown)
    if lacking:
        print(f"{lacking} of {len(plan.compared)} runs have no row yet")
    hidden = sum("purpose" not in row for row in plan.others)
    if hidden:
        words = "they have other keys, or wait for a learning rate that is not chosen yet"
        print(f"{hidden} rows are not shown: {words}")
    if plan.unscored:
        words = "remove these rows and start again: the runs that ended are scored, not repeated"
        print(f"{len(plan.unscored)} rows lack a score that the config asks for; {words}")
    return plan.shown or None


def check_rows(config, plan: Plan, out_dir: Path) -> None:
    """Raises UserError for rows of these runs that are about another metric or data of another
    script, and where a run would be added to rows about another version of that script."""
    ours = {"metric": config.metric, "prepare": config.prepare}
    if config.run and plan.lacking:
        ours["data_version"] = script_of(config.prepare).VERSION
    for row in plan.done:
        there = {"prepare": config.prepare, "data_version": 1} | row  # older rows lack them
        for name, value in ours.items():
            if there[name] != value:
                raise UserError(
                    f"{name}={value}: the rows in {out_dir} have {name}={there[name]}; "
                    "take another --out_dir"
                )


def start_of_branch(run: dict, out_dir: Path) -> Path:
    """The checkpoint that a branch goes on from."""
    parent = {"arm": run["branch"]["of"], "seed": run["seed"]}
    return out_dir / name_of(parent) / kept_checkpoint(run["branch"]["at"])


def is_ready(run: dict, plan: Plan, out_dir: Path) -> bool:
    """Whether a branch can begin: the checkpoint that it goes on from is there. Raises UserError
    where no run will make it."""
    if "branch" not in run:
        return True
    start = start_of_branch(run, out_dir)
    # where more runs follow, that of the other arm may not be known yet
    will_be_made = start.parent.name in map(name_of, plan.lacking) or plan.more()
    if not start.is_file() and not will_be_made:
        raise UserError(
            f"{name_of(run)}: goes on from {start}, which is not there, and no run that is left "
            "makes it; to repeat one, remove its row"
        )
    return start.is_file()


def stop(number: int) -> NoReturn:
    """What a signal does: `work` ends, and lets its runs save."""
    name = signal.Signals(number).name
    words = "the runs save and end. A second SIGTERM or Ctrl-C ends this worker alone, at once"
    tell(f"{name}: {words}")
    sys.exit(128 + number)


@dataclasses.dataclass
class Job:
    """A run that goes on: its process, and the rest of `carry_out`."""

    name: str
    gpu: str | None
    rest: Generator[subprocess.Popen, None, dict]
    process: subprocess.Popen


def work(config, out_dir: Path) -> None:
    """Makes the runs that no other worker makes, until none is left for any of them. A signal stops
    the runs, which save first."""
    gpus = gpus_of(config)
    jobs = jobs_of(config, gpus)
    # of each process of a run. Results may depend on it: the same for all, also when few are left
    threads = max(1, usable_cores() // (jobs * config.processes_per_run))
    running = []
    look_at, waits = 0.0, False
    try:
        while True:
            if len(running) < jobs and time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK
                plan = Plan(config, read_rows(out_dir))
                if not plan.lacking and not running:
                    return
                for run in plan.lacking:
                    if len(running) == jobs:
                        break
                    held = take(run, out_dir) if is_ready(run, plan, out_dir) else None
                    if held is not None:
                        gpu = min(gpus, key=[job.gpu for job in running].count, default=None)
                        rest = carry_out(config, run, out_dir, threads, gpu, held)
                        running.append(Job(name_of(run), gpu, rest, next(rest)))
                if not running and not waits:
                    print(f"waiting for {len(plan.lacking)} runs of other workers")
                waits = not running
            time.sleep(0.2)
            for job in [job for job in running if job.process.poll() is not None]:
                try:
                    job.process = next(job.rest)
                except StopIteration as end:
                    running.remove(job)
                    look_at = 0.0
                    row = end.value
                    plan = Plan(config, read_rows(out_dir))
                    said = f"{config.metric} {number(row[config.metric]):.4f}"
                    done = f"{len(plan.done)} of {len(plan.runs)} runs"
                    print(f"{job.name}: {said}, {row['seconds']:.0f} s ({done})", flush=True)
    finally:
        for job in running:
            job.process.terminate()
        for job in running:
            job.process.wait()
            job.rest.close()


def lock(out_dir: Path, name: str, wait: float = 0.0) -> IO:
    """The lock of a run, or of "rows", which one worker has at a time. It lies beside the run's
    folder. Raises files.InUse while another process has it."""
    folder = files.make_folder(files.make_folder(out_dir / "locks") / name)
    return files.lock(folder, wait)


def take(run: dict, out_dir: Path) -> IO | None:
    """Locks a run. None: another worker has it, or processes of one that was killed; or it has a
    row by now."""
    try:
        held = lock(out_dir, name_of(run))
    except files.InUse:
        return None
    if text_of(run) in map(text_of, read_rows(out_dir)):
        held.close()
        return None
    return held


def append_row(out_dir: Path, row: dict) -> None:
    with lock(out_dir, "rows", wait=math.inf), files.open_rows(out_dir / "rows.jsonl") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def gpus_of(config) -> list[str]:
    """The GPUs of this machine for each run that goes on at a time, as CUDA_VISIBLE_DEVICES names
    them; none for runs on the CPU. Raises UserError if one run needs more."""
    if pick_device(config.base.get("device", "auto")) != "cuda":
        return []
    each = config.processes_per_run
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    if len(names) < each:
        raise UserError(f"processes_per_run={each}: each needs a GPU, and there are {len(names)}")
    return [",".join(names[i : i + each]) for i in range(0, len(names) - each + 1, each)]


def jobs_of(config, gpus: list[str]) -> int:
    """How many runs go on at a time."""
    at_most = config.jobs or len(gpus) or max(1, usable_cores() // config.processes_per_run)
    trials = len(config.learning_rates) * len(config.selection_seeds)
    return min(at_most, len(config.arms) * max(len(config.seeds), trials))


def carry_out(
    config, run: dict, out_dir: Path, threads: int, gpu: str | None, held: IO
) -> Generator[subprocess.Popen, None, dict]:
    """Makes a run with its scores: yields each process in turn, and goes on when that one has
    ended. It appends the row, which it returns, and then gives the lock of the run back."""
    folder = out_dir / name_of(run)
    checkpoint = folder / "ckpt.pt"
    with held:
        data = prepare(config, run["data"], run["seed"], out_dir / "data")
        started = time.time()
        claim_run(run, folder)
        if "branch" in run and not checkpoint.is_file():
            files.link_whole(start_of_branch(run, out_dir), checkpoint)
        keys = {"eval_whole": True, "threads": threads, "init_from": "auto"} | run["config"]
        if checkpoint.is_file():
            keys["init_from"] = "auto"
        keys |= {"dataset": str(data), "out_dir": str(folder)}
        n = config.processes_per_run
        process = start_process("train.py", keys, folder, threads, gpu, n, held)
        yield process
        row = finish(config, run, folder, process.returncode)
        if "branch" in run:  # the seconds of its checkpoint are the other run's
            before = checkpoints.load(start_of_branch(run, out_dir), mapped=True)
            row["seconds"] -= before["seconds"]
        is_scored = row["finite"] and "purpose" not in run
        wanted = wanted_scores(config, run["arm"]) if is_scored else {}
        for name, score_keys in wanted.items():
            file = folder / f"score_{name}.json"
            keys = {"dataset": str(data), "device": run["config"].get("device", "auto")}
            keys |= score_keys | {"checkpoint": str(checkpoint), "out": str(file)}
            process = start_process("evaluate.py", keys, folder, threads, gpu, 1, held)
            yield process
            check_end(folder, process.returncode)
            score = files.read_json(file)
            score.pop("checkpoint", None)  # a path of this machine
            row["scores"][name] = score
            row["scored"][name] = score_keys
        row["seconds"] = max(row["seconds"], time.time() - started)
        row["ended"] = time.time()
        append_row(out_dir, row)  # other machines see it before the lock goes
    return row


def claim_run(run: dict, folder: Path) -> None:
    """Makes the folder of a run. Raises UserError where it holds another one, as one of what the
    experiment was before an edit."""
    file = folder / "run.json"
    has_begun = (folder / "ckpt.pt").is_file() or (folder / "metrics.jsonl").is_file()
    if has_begun and not (file.is_file() and files.read_json(file) == run):
        raise UserError(
            f"{folder}: holds a run of other keys; move it away, or take another --out_dir"
        )
    files.claim(folder, "run")
    files.write_text(file, json.dumps(run))
    (folder / "log.txt").unlink(missing_ok=True)


def prepare(config, keys: dict, seed: int, place: Path) -> Path:
    """The folder of the data that data/*/prepare.py makes of these keys, made now unless it is
    there. The data have the run's seed, unless the keys name another; where the script has none,
    all seeds share the data. Raises UserError for a folder of other data, unless
    config.overwrite."""
    script, folder = script_of(config.prepare), place / "all"
    if hasattr(script.Config, "seed") and "seed" not in keys:
        keys, folder = keys | {"seed": seed}, place / f"seed{seed}"
    about = {"prepare": config.prepare, "keys": keys}
    place.mkdir(parents=True, exist_ok=True)
    # workers that start together need the same data; the lock lies beside the folder, which is the
    # data set's alone
    with lock(place, folder.name, wait=math.inf):
        if not is_prepared(about, script.VERSION, folder):
            # data that other experiments share by a link are read, and not made anew
            files.check_inside(place.parent, folders=[place.name])
            files.check_inside(place, folders=[folder.name])
            given = keys | {"out_dir": str(folder), "overwrite": config.overwrite}
            with contextlib.redirect_stdout(io.StringIO()):
                script.main([f"--config_override={json.dumps(given)}"])
            files.write_text(folder / "prepared.json", json.dumps(about))
    return folder


def is_prepared(about: dict, version: int, folder: Path) -> bool:
    """Whether the folder holds the data of this script and its keys, at the version that it is at
    now."""
    file, meta = folder / "prepared.json", folder / "meta.json"
    if not (file.is_file() and meta.is_file()):
        return False
    is_same = files.read_json(file) == about
    return is_same and files.read_json(meta).get("generator_version") == version


def start_process(
    script: str, keys: dict, folder: Path, threads: int, gpu: str | None, processes: int, held: IO
) -> subprocess.Popen:
    """Starts a script in a process of its own, or under torchrun in several that share its work. It
    holds the lock of the run, too, which is therefore not free before it ends, also where the
    worker is killed."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        # seconds that torchrun leaves them to save in
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "600"
    command += [str(ROOT / script), f"--config_override={json.dumps(keys)}"]
    with files.open_to_append(folder / "log.txt") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            # a terminal's Ctrl-C is for this process, which then asks each run once
            start_new_session=True,
            pass_fds=[held.fileno()],
        )


def check_end(folder: Path, status: int) -> list[dict]:
    """The rows of metrics.jsonl of a run whose process has ended. Raises UserError for a crash; to
    stop where the loss is not finite is none."""
    metrics = read_metrics(folder / "metrics.jsonl")
    events = [row["event"] for row in metrics]
    was_stopped = status == 1 and events[-1:] == ["stopped"]  # status 1 is any exception's, too
    if "eval" in events and (status == 0 or was_stopped):
        return metrics
    log = folder / "log.txt"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    reason = [*errors, *lines[-1:], ""][0]  # torchrun prints a report of its own at the end
    raise UserError(f"{folder.name} ended with status {status}: {reason} (all of it: {log})")


def finish(config, run: dict, folder: Path, status: int) -> dict:
    """The row of a run that has been trained, or has diverged. Raises UserError for a crash."""
    metrics, about = check_end(folder, status), files.read_json(folder / "config.json")
    evaluations = [row for row in metrics if row["event"] == "eval"]
    speeds = [row["tokens_per_second"] for row in metrics if row["event"] == "train"]
    end = evaluations[-1] | metrics[-1]  # the row of event "end" has the numbers of the whole split
    row = run | {
        "finite": status == 0,
        "horizon": about["config"]["max_iters"],
        "last_step": metrics[-1]["step"],  # before the horizon: solved, or not finite
        "accuracy": end["accuracy"] if status == 0 else None,
        "val_loss": end["val_loss"] if status == 0 else None,
        "metric": config.metric,
        "curve": [[row["step"], row[config.metric]] for row in evaluations],
        "meters": evaluations[-1].get("meters", {}),
        "sinks": sinks_of(evaluations),
        "loss": end.get("loss_of", {}),
        "loss_curve": [
            {"step": row["step"]} | row["loss_of"] for row in evaluations if "loss_of" in row
        ],
        "step_ms": 1000 * about["tokens_per_step"] / statistics.median(speeds or [math.nan]),
        "scores": {},
        "scored": {},
        "seconds": metrics[-1].get("seconds", 0),  # over all starts of the run
        "processes": config.processes_per_run,
        "prepare": config.prepare,
        "data_version": script_of(config.prepare).VERSION,
        # by these a claim shows that seeds were added later
        "planned_seeds": seeds_of_arms(config, [run["arm"]]),
    }
    row |= {name: about.get(name) for name in OF_CODE_AND_MACHINE}
    return json.loads(json.dumps(row), parse_constant=lambda constant: None)  # NaN is no JSON


def sinks_of(evaluations: list[dict]) -> list[dict]:
    """The meters of each kind of query, for the figures, where the data set names kinds."""
    points = []
    for evaluation in evaluations:
        meters = evaluation.get("meters", {})
        if meters.get("kinds"):
            point = {"step": evaluation["step"], "value_norm": meters["value_norm"]}
            points.append(point | meters["kinds"])
    return points
