"""The running of an experiment: processes side by side, in one worker or in several that share out_dir.

    rows = run_all(config, out_dir)     # the rows of the compared runs, in the order of the list

Each `python experiment.py CONFIG --out_dir=SHARED`, on one machine or on several, is a worker. It locks a run that has
no row, starts train.py and evaluate.py for it, appends its row to rows.jsonl, and takes the next, until no run is left;
what can be run follows from the rows alone (plan.py). The processes of a run hold its lock together with the worker: a
run is free again when all of them are gone, and another worker then goes on where it was stopped. A worker that has
nothing to do waits for the runs of the others.
"""

from configurator import UserError, falls_silent

import contextlib
import dataclasses
import importlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import IO

import torch
from tqdm import tqdm

from runs import files
from runs.files import read_jsonl
from runs.hardware import pick_device, signals_to, usable_cores
from runs.outdir import ROOT, ROW, write_text
from study import rates, tables
from study.plan import Plan, name_of, parent_of, steps_of
from study.rows import as_read, missing_scores, read_rows, rows_of_other_keys, run_of, text_of, with_scores

LOOK = 2.0  # seconds between looks at the rows of other workers


def run_all(config, out_dir: Path) -> list[dict] | None:
    """Starts the runs that have no row, and returns the rows of all compared runs in the order of the list.

    With run=false, the rows that are there; None if there is none.
    """
    # one without a marker may be results/NAME of a clone: it has our rows
    files.claim(out_dir, "experiment", config.overwrite or bool(read_rows(out_dir)))
    plan = Plan(config, read_rows(out_dir))
    check_rows(config, plan, out_dir)
    say_what_is_left(config, plan, out_dir)
    if config.run and to_do(plan, out_dir):
        with (
            signals_to(lambda number: sys.exit(128 + number)),
            contextlib.redirect_stdout(falls_silent(sys.stdout)),  # the runs go on without a reader
        ):
            work(config, out_dir)
        plan = Plan(config, read_rows(out_dir))
    for line in rates.lines(config, plan.choices):
        print(line)
    shown = [with_scores(config, plan.rows[text]) for text in map(text_of, plan.compared) if text in plan.rows]
    if len(shown) < len(plan.compared):
        print(f"{len(plan.compared) - len(shown)} of {len(plan.compared)} runs have no row yet")
    hidden = sum("purpose" not in row for row in plan.others)
    if hidden and plan.waits_for_rates:
        print(f"{hidden} rows are not shown: they wait for a learning rate that is not chosen yet, or have other keys")
    return shown or None


def check_rows(config, plan: Plan, out_dir: Path) -> None:
    """Raises UserError for rows of these runs that are about another metric, or about data of another script.

    Prints that they are about another version of the data, and raises UserError where versions would be mixed.
    """
    for row, name in itertools.product(plan.done, ("metric", "prepare")):
        if row.get(name, ours := getattr(config, name)) != ours:
            raise UserError(f"{name}={ours}: the rows in {out_dir} have {name}={row[name]}; take another --out_dir")
    version = script_of(config.prepare).VERSION
    found = {row.get("data_version", 1) for row in plan.done}  # rows of before this key are all about a first version
    if found <= {version}:
        return
    versions = ", ".join(map(str, sorted(found)))
    words = f"the rows in {out_dir} are about version {versions} of data/{config.prepare}; it is at version {version}"
    if len(found) > 1 or config.run and to_do(plan, out_dir):
        raise UserError(f"{words}: take another --out_dir for the new data")
    print(words)


def say_what_is_left(config, plan: Plan, out_dir: Path) -> None:
    """Prints how many runs are known and done, and for those without a row, how rows of the same arm differ."""
    more = "; more follow when learning rates are chosen" if plan.waits_for_rates else ""
    done = f"{len(plan.done)} runs are done already"
    print(f"{config.name}: {len(plan.runs)} runs, {steps_of(plan.runs):,} steps; {done}{more}")
    for line in rows_of_other_keys(plan.others, plan.lacking):
        print(line)
    for run in plan.lacking:
        parent = parent_of(run)
        if parent is not None and text_of(parent) in plan.rows and not is_kept(parent, out_dir):
            print(
                f"  {name_of(run)} cannot start: the end of {name_of(parent)} is not in {out_dir}, or that run was not "
                "finite; to run that one again, remove its row"
            )
    lost = [row for row in plan.unscored if not is_kept(row, out_dir)]
    if lost:
        names = ", ".join(dict.fromkeys(name for row in plan.unscored for name in missing_scores(config, row)))
        print(
            f"  {len(lost)} finished runs lack a score ({names}), and their checkpoints are not in {out_dir}: "
            f"{', '.join(map(name_of, lost[:3]))}{', ...' if lost[3:] else ''}; to run one again, remove its row"
        )
    if len(lost) < len(plan.unscored) and not config.run:
        print(f"  {len(plan.unscored) - len(lost)} finished runs lack a score, which --run=true computes")


def to_do(plan: Plan, out_dir: Path) -> list[dict]:
    """What can be done now: runs without a row, and rows that lack a score whose checkpoints are still there."""
    starts = [(run, parent_of(run)) for run in plan.lacking]
    can_start = [
        run for run, parent in starts if parent is None or text_of(parent) in plan.rows and is_kept(parent, out_dir)
    ]
    return can_start + [row for row in plan.unscored if is_kept(row, out_dir)]


# ----------------------------------------------------------------------------------------------------------------------
# A worker


def work(config, out_dir: Path) -> None:
    """Runs what no other worker runs, until nothing is left to do for any of them.

    One bar over all steps, with the losses and the speed of what runs here. A signal stops the runs, which save first.
    """
    gpus = gpus_of(config)
    jobs = jobs_of(config, gpus)
    threads = threads_of(config, jobs)
    running: list[dict] = []
    ended_steps, look_at, told = 0, 0.0, ""
    bar = tqdm(
        total=0, desc=config.name, unit="step", smoothing=0.05, mininterval=0.5 if sys.stderr.isatty() else 30,
    )  # fmt: skip
    try:
        while True:
            if len(running) < jobs and time.monotonic() >= look_at:
                plan = Plan(config, read_rows(out_dir))
                items = to_do(plan, out_dir)
                bar.total = steps_of(plan.runs)
                ended_steps = bar.total - steps_of(plan.lacking)
                if not items and not running:
                    show_progress(bar, running, ended_steps)
                    return
                waiting = [item for item in items if name_of(item) not in [job["name"] for job in running]]
                while waiting and len(running) < jobs:
                    item = waiting.pop(0)
                    gpu = min(gpus, key=[job["gpu"] for job in running].count) if gpus else None
                    if (held := take(config, item, out_dir)) is not None:
                        running.append(start(config, item, out_dir, threads, gpu, held))
                if not running and told != (text := others_in_words(items)):
                    bar.write(told := text)
                look_at = time.monotonic() + LOOK
            time.sleep(0.2)
            for job in list(running):
                if job["process"].poll() is None:
                    continue
                if job["process"].returncode == 0 and job["commands"]:
                    command = job["commands"].pop(0)
                    job["process"] = start_process(command, job["folder"], threads, job["gpu"], 1, job["lock"])
                    continue
                running.remove(job)
                row = finish(config, job)
                append_row(out_dir, row)  # other machines see it before the lock goes
                job["lock"].close()
                bar.write(f"{job['name']}: {tables.show(config, row)}, {row['seconds']:.0f} s")
                look_at = 0.0
            show_progress(bar, running, ended_steps)
    finally:
        for job in running:
            job["process"].terminate()
        for job in running:
            job["process"].wait()
            job["lock"].close()
        bar.close()


def lock(out_dir: Path, name: str, wait: float = 0.0) -> IO:
    """The lock of a run, of "rows" or of the "report", which one worker has at a time. It lies beside the run's folder,
    which may be moved aside. Raises files.InUse while another process has it."""
    folder = out_dir / "locks" / name
    folder.mkdir(parents=True, exist_ok=True)
    return files.lock(folder, wait)


def take(config, item: dict, out_dir: Path) -> IO | None:
    """Locks a run. None: another worker has it, or processes of one that was killed; or it has a row by now."""
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


def others_in_words(items: list[dict]) -> str:
    return f"waiting for {len(items)} runs of other workers: {', '.join(map(name_of, items[:3]))}" + ", ..." * (
        len(items) > 3
    )


def show_progress(bar: tqdm, running: list[dict], ended_steps: int) -> None:
    states = [(job["item"], last_row(job["folder"])) for job in running if "finite" not in job["item"]]
    bar.n = ended_steps + sum(state["step"] for _, state in states)
    shown = {f"{run['arm']}/{run['seed']}": f"{state['loss']:.3f}" for run, state in states if "loss" in state}
    speed = sum(state.get("tokens_per_second", 0) for _, state in states)
    bar.set_postfix(shown | {"tok_s": f"{speed:,.0f}"}, refresh=False)
    bar.update(0)


def gpus_of(config) -> list[str]:
    """The GPUs of each run that goes on at a time, as CUDA_VISIBLE_DEVICES names them; none for runs on the CPU.

    They are those of this machine, or the number that --dry_run plans for. Raises UserError if one run needs more.
    """
    each, visible = config.processes_per_run, os.environ.get("CUDA_VISIBLE_DEVICES")
    if config.gpus:
        names = [str(i) for i in range(config.gpus)]
    elif pick_device(config.base.get("device", "auto")) != "cuda":
        return []
    else:
        names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if len(names) < each:
        raise UserError(f"processes_per_run={each}: each needs a GPU, and there are {len(names)}")
    return [",".join(names[i : i + each]) for i in range(0, len(names) - each + 1, each)]


def jobs_of(config, gpus: list[str]) -> int:
    """How many runs go on at a time."""
    rates = 1 if config.selection_seeds else len(config.learning_rates) or 1
    count = len(config.arms) * (len(config.settings) or 1) * len(config.seeds) * rates
    return min(config.jobs or len(gpus) or max(1, usable_cores() // config.processes_per_run), count)


def threads_of(config, jobs: int) -> int:
    """CPU threads of each process of a run: the same for the first run and for the last that is left.

    Results may depend on their number.
    """
    return max(1, usable_cores() // (jobs * config.processes_per_run))


# ----------------------------------------------------------------------------------------------------------------------
# A run: its data, its processes, its row


def start(config, item: dict, out_dir: Path, threads: int, gpu: str | None, held: IO) -> dict:
    """Starts train.py for a run, and evaluate.py after it for each score; for a row only the scores that it lacks."""
    run, is_finished_run = run_of(item), "finite" in item
    folder, commands = out_dir / name_of(run), []
    changes_data = "data" in config.settings.get(run.get("setting"), {})
    data = prepare(config, run["data"], run["seed"], out_dir / "data" / (run["setting"] if changes_data else ""))
    if not is_finished_run:
        make_room(run, folder)
        files.claim(folder, "run")
        keys = run["config"] | {"dataset": str(data), "out_dir": str(folder), "threads": threads, "init_from": "auto"}
        if (parent := parent_of(run)) is not None and not (folder / "ckpt.pt").is_file():
            # a kill in its first save leaves best.pt alone, which is replaced
            keys |= {"init_from": str(out_dir / name_of(parent) / "ckpt.pt"), "overwrite": True}
        write_text(folder / "run.json", json.dumps(run))
        (folder / "log.txt").unlink(missing_ok=True)
        commands.append(["train.py", keys])
    names = missing_scores(config, item if is_finished_run else run | {"finite": True})
    about = {"checkpoint": str(folder / "ckpt.pt"), "dataset": str(data), "device": run["config"].get("device", "auto")}
    for name in names:
        out = {"out": str(folder / f"score_{name}.json")}
        commands.append(["evaluate.py", about | config.scores[name] | out])
    processes = 1 if is_finished_run else config.processes_per_run
    process = start_process(commands.pop(0), folder, threads, gpu, processes, held)
    return {
        "item": item, "name": name_of(run), "folder": folder, "gpu": gpu, "process": process, "commands": commands,
        "started": time.time(), "lock": held,
    }  # fmt: skip


def make_room(run: dict, folder: Path) -> None:
    """Makes the folder of a run. One that holds another run is moved aside: no checkpoint is lost to an edit."""
    if any((folder / name).is_file() for name in ("ckpt.pt", "metrics.jsonl")) and not is_of(run, folder):
        files.lock(folder).close()  # UserError while that run is at work
        places = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
        aside = folder.rename(next(place for place in places if not place.exists()))
        tqdm.write(f"{folder} holds a run of other keys: it is now {aside.name}, and may be removed")
    folder.mkdir(parents=True, exist_ok=True)


def is_of(run: dict, folder: Path) -> bool:
    """Whether the folder is of this very run, and not of what the experiment was before an edit."""
    file = folder / "run.json"
    return file.is_file() and files.read_json(file) == run


def is_finished(run: dict, folder: Path) -> bool:
    """Whether the folder has the checkpoint of the end of this very run."""
    return is_of(run, folder) and (folder / "ckpt.pt").is_file() and last_row(folder).get("event") == "end"


def is_kept(row: dict, out_dir: Path) -> bool:
    """Whether the checkpoint that a row is of is still there."""
    return is_finished(run_of(row), out_dir / name_of(row))


def script_of(name: str) -> types.ModuleType:
    """data/NAME/prepare.py, with its keys (Config) and VERSION."""
    return importlib.import_module(f"data.{name}.prepare")


def prepare(config, keys, seed, place):
    """The folder of the data that data/*/prepare.py makes of these keys, made now unless it is there.

    The data have the run's seed, unless the keys name another; where the script has none, all seeds share the data.
    """
    folder = place / "all"
    if "seed" in {field.name for field in dataclasses.fields(script_of(config.prepare).Config)} - keys.keys():
        keys, folder = keys | {"seed": seed}, place / f"seed{seed}"
    if is_prepared(config.prepare, keys, folder):
        return folder
    # workers that start together need the same data; the lock lies beside the folder, which is the data set's alone
    lock_folder = place / f".{folder.name}"
    lock_folder.mkdir(parents=True, exist_ok=True)
    with files.lock(lock_folder, wait=math.inf):
        if not is_prepared(config.prepare, keys, folder):
            (folder / "prepared.json").unlink(missing_ok=True)
            script = ROOT / "data" / config.prepare / "prepare.py"
            command = [sys.executable, script, f"--config_override={json.dumps(keys | {'out_dir': str(folder)})}"]
            prepared = subprocess.run(command, capture_output=True, text=True)
            if prepared.returncode:
                raise UserError(f"data/{config.prepare}/prepare.py failed: {prepared.stderr.strip()}")
            write_text(folder / "prepared.json", json.dumps({"prepare": config.prepare, "keys": keys}))
    return folder


def is_prepared(script: str, keys: dict, folder: Path) -> bool:
    """Whether data/SCRIPT/prepare.py has made the folder of these keys, at the version that it is at now."""
    file, meta = folder / "prepared.json", folder / "meta.json"
    if not (file.is_file() and meta.is_file()):
        return False
    is_same = files.read_json(file) == {"prepare": script, "keys": keys}
    about = files.read_json(meta) if is_same else None
    return isinstance(about, dict) and about.get("generator_version") == script_of(script).VERSION


def start_process(
    command, folder: Path, threads: int, gpu: str | None, processes: int, held: IO | None = None
) -> subprocess.Popen:
    """Starts a script in a process of its own, or under torchrun in several that share its work. It holds the lock of
    the run, too, which is therefore not free before it ends, also where the worker is killed."""
    script, keys = command
    environment = {"OMP_NUM_THREADS": str(threads)} | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    launcher = []
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "600"  # seconds that torchrun leaves them to save in
    with files.open_in_place(folder / "log.txt") as log:
        return subprocess.Popen(
            [sys.executable, *launcher, ROOT / script, f"--config_override={json.dumps(keys)}"],
            stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment,
            start_new_session=True,  # a terminal's Ctrl-C is for this process, which then asks each run once
            pass_fds=[] if held is None or os.name != "posix" else [held.fileno()],
        )  # fmt: skip


def last_row(folder: Path) -> dict:
    rows = read_jsonl(folder / "metrics.jsonl", ROW)
    return rows[-1] if rows else {"step": 0}


def finish(config, job: dict) -> dict:
    """The row of a run that has ended. Divergence gives a row; a crash raises UserError."""
    item, folder, status = job["item"], job["folder"], job["process"].returncode
    metrics = read_jsonl(folder / "metrics.jsonl", ROW)
    evaluations = [row for row in metrics if row["event"] == "eval"]
    was_stopped = status == 1 and metrics[-1:] and metrics[-1]["event"] == "stopped"  # status 1 is any exception's, too
    if status and not was_stopped or not evaluations:
        lines = (folder / "log.txt").read_text().strip().splitlines()
        # torchrun prints a report of its own behind the error of the run
        tail = next((line for line in reversed(lines) if line.startswith("error: ")), " ".join(lines[-1:]))
        raise UserError(f"{folder.name} ended with status {status}: {tail} (all of it: {folder / 'log.txt'})")
    if "finite" in item:
        return scored(config, item, folder)
    about = files.read_json(folder / "config.json")
    speeds = [row["tokens_per_second"] for row in metrics if row["event"] == "train"]
    speed = statistics.median(speeds) if speeds else math.nan
    end = evaluations[-1] | metrics[-1]  # the row of event "end" has the numbers of the whole split
    row = item | {
        "finite": status == 0,
        "horizon": about["config"]["max_iters"],
        "last_step": metrics[-1]["step"],  # before the horizon: solved, or not finite
        "accuracy": end["accuracy"] if status == 0 else math.nan,
        "val_loss": end["val_loss"] if status == 0 else math.nan,
        "metric": config.metric,
        "curve": [[row["step"], row[config.metric]] for row in evaluations],
        "meters": evaluations[-1].get("meters", {}),
        "sinks": sink_curve(evaluations),
        "meter_curve": meter_curve(evaluations),
        "loss": end.get("loss_of", {}),
        "loss_curve": [{"step": row["step"]} | row["loss_of"] for row in evaluations if "loss_of" in row],
        "tokens_per_second": speed,
        "step_ms": 1000 * about["tokens_per_step"] / speed,
        "scores": {},
        "seconds": max(time.time() - job["started"], metrics[-1].get("seconds", 0)),  # the latter over all its starts
        **{name: about[name] for name in ("n_params", "flops_per_token", "state_bytes")},
        **{name: about.get(name) for name in ("dtype", "device", "threads", "code_sha256")},
        "processes": config.processes_per_run,
        "prepare": config.prepare,
        "data_version": script_of(config.prepare).VERSION,
        "planned_seeds": config.seeds_of.get(item["arm"], config.seeds),  # a claim whose seeds were added later shows
        **{name: about[name] for name in ("git_commit", "git_dirty", "versions")},
    }
    return scored(config, row, folder)


def sink_curve(evaluations: list[dict]) -> list[dict]:
    """The meters of each kind of query at each evaluation, for the figures; empty if the data set names no kinds."""
    names = ("share", "effective", "gate_mean", "loss")
    return [
        {"step": row["step"], "value_norm": row["meters"]["value_norm"]}
        | {kind: {name: found[name] for name in names} for kind, found in row["meters"]["kinds"].items()}
        for row in evaluations
        if row.get("meters", {}).get("kinds")
    ]


def meter_curve(evaluations: list[dict]) -> dict:
    """{step: [...], branch: [...], induction: [...], gate_mean: {position: [...]}}: the branch over the residual norm,
    mean over layers, the induction score of each head by layer, and the mean of the gates, at each evaluation; empty if
    the meters were off."""
    found = [(row["step"], row["meters"]) for row in evaluations if row.get("meters")]
    if not found:
        return {}
    ends = [meters["branch"] for _, meters in found]
    return {
        "step": [step for step, _ in found],
        "branch": [None if None in layers else float(f"{statistics.fmean(layers):.4g}") for layers in ends],
        "induction": [meters["induction"] for _, meters in found],
        "gate_mean": {name: [meters["gate_mean"][name] for _, meters in found] for name in found[0][1]["gate_mean"]},
    }


def scored(config, row: dict, folder: Path) -> dict:
    """The row with the scores that it lacked, which evaluate.py has written by now."""
    names = missing_scores(config, row)
    made = row | {
        "scored": row.get("scored", {}) | {name: as_read(config.scores[name]) for name in names},
        "scores": row["scores"] | {name: read_score(folder / f"score_{name}.json") for name in names},
        # where a run has two rows, the later one counts, also if a machine whose clock is ahead made the first
        "ended": max(time.time(), row.get("ended", 0) + 1e-3),
    }
    return nan_to_none(made)


def read_score(file: Path) -> dict:
    """What evaluate.py wrote, without the path of this machine's checkpoint."""
    return {name: value for name, value in files.read_json(file).items() if name != "checkpoint"}


def nan_to_none(value: object):
    """What JSON can hold, at any depth."""
    if isinstance(value, dict):
        return {name: nan_to_none(item) for name, item in value.items()}
    if isinstance(value, list):
        return [nan_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
