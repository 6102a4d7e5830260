"""Many runs of train.py, paired by seed, and what came of them:

    python experiment.py config/experiments/minimum.py
    python experiment.py config/experiments/minimum.py --out_dir=out/minimum --jobs=4

An experiment is a config file: the keys of train.py that all runs share (base), the arms, the seeds, the data, and how
a finished run is scored besides (scores). Runs go on side by side, one process each. out_dir gets rows.jsonl (one
object per finished run), the figures and a folder per run; started again, it keeps the rows it has and continues the
runs that were stopped.

All arms of a seed see the same data in the same order, and start from the same weights where they share them.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

import configurator
import plot
from configurator import UserError, key
from evaluate import EvaluateConfig
from hardware import usable_cores
from train import TrainConfig

HERE = Path(__file__).resolve().parent


@dataclass
class ExperimentConfig:
    name: str = key("experiment", "what it is called")
    base: dict = key({}, "keys of train.py that every run has")
    arms: dict = key({}, "{name of the arm: its keys of train.py}")
    learning_rates: list[float] = key([], "every arm is run at each of these, and where it diverges is said", above=0)
    seeds: list[int] = key([0], "one run of every arm per seed; the seed of the data, too", at_least=0)
    prepare: str = key("mqar", "which data/*/prepare.py makes the data")
    data: dict = key({}, "keys of that script")
    metric: str = key("accuracy", "what the table and the curves show", choices=("accuracy", "val_loss"))
    scores: dict = key({}, "{name: keys of evaluate.py}: how each finished run is scored besides")
    score_data: dict = key({}, "keys of the same script, for the data of the scores (empty: the run's own)")
    baseline: str | None = key(None, "the arm that the verdict compares with (None: no verdict)")
    treatment: str | None = key(None, "the arm that the verdict is about")
    success_above: float = key(0.75, "success: the treatment's accuracy is above this in every seed")
    success_below: float = key(0.55, "... and the baseline's below this")
    failure_within: float = key(
        0.03, "failure: the mean accuracies are no further apart than this, or a run is not finite"
    )
    out_dir: str | None = key(None, "where rows, figure and runs go (None: results/NAME)")
    jobs: int = key(0, "runs at a time (0: as many as there are cores)", at_least=0)

    def __post_init__(self):
        configurator.check(self)
        for arm in (self.baseline, self.treatment):
            if (self.baseline, self.treatment) != (None, None):
                configurator.check_choice("arms", arm, self.arms)
        for name, keys in self.arms.items():  # a wrong key is found before the first run
            if not isinstance(keys, dict):
                raise UserError(f"arms: {name}={keys!r}: must be a dict of keys of train.py")
            configurator.build(TrainConfig, self.base | keys, source=f"arm {name!r}")
        if self.learning_rates and self.metric != "val_loss":
            raise UserError(f"metric={self.metric!r}: with learning_rates it must be val_loss, which tells divergence")
        if self.learning_rates:
            each = [(arm, keys, rate) for arm, keys in self.arms.items() for rate in self.learning_rates]
            self.arms = {f"{arm} at {rate:g}": keys | {"learning_rate": rate} for arm, keys, rate in each}
        for name, keys in self.scores.items():
            configurator.build(EvaluateConfig, keys, source=f"score {name!r}")

    @property
    def max_iters(self):
        return configurator.build(TrainConfig, self.base).max_iters


def main(argv):
    config = configurator.load(ExperimentConfig, argv, program="experiment.py", description=__doc__)
    out_dir = Path(config.out_dir or HERE / "results" / config.name)
    rows = run_all(config, out_dir)
    print(table(config, rows))
    if config.baseline is not None:
        print(f"\nverdict: {verdict(config, rows)}")
        print(f"cost of the gate: {cost(config, rows)}")
    if config.learning_rates:
        print(divergence(rows))
    figures = plot.experiment(rows, out_dir)
    report = plot.report(rows, figures, out_dir / "report.html")
    print("written:", ", ".join(map(str, [out_dir / "rows.jsonl", *figures, report])))


# ----------------------------------------------------------------------------------------------------------------------
# Running


def run_all(config, out_dir):
    """The rows of all runs, in the order of the list: those that rows.jsonl has, and the others, run now."""
    plan = []
    for seed in config.seeds:
        for arm, keys in config.arms.items():
            run = {"arm": arm, "seed": seed, "data": config.data, "config": config.base | keys | {"seed": seed}}
            if config.scores:
                run |= {"scored": config.scores, "score_data": config.score_data}
            plan.append(json.loads(json.dumps(run)))  # as it will be read again: a tuple comes back as a list
    file = out_dir / "rows.jsonl"
    out_dir.mkdir(parents=True, exist_ok=True)
    rows = plot.read_jsonl(file)
    waiting = [run for run in plan if find_row(rows, run) is None]
    done = len(plan) - len(waiting)
    print(f"{config.name}: {len(plan)} runs of {config.max_iters:,} steps, {done} of them done already")
    if waiting:
        if file.is_file():
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)  # a kill may have cut the last row short
        with open(file, "a") as rows_file:
            for row in run_side_by_side(config, waiting, out_dir):
                rows.append(row)
                rows_file.write(json.dumps(row, allow_nan=False) + "\n")
                rows_file.flush()
    return [find_row(rows, run) for run in plan]


def find_row(rows, run):
    """The row of this very run: same arm, seed, data and keys."""
    return next((row for row in rows if all(row.get(name) == value for name, value in run.items())), None)


def run_side_by_side(config, waiting, out_dir):
    """Yields a row whenever a run ends. One bar over all steps, with the losses and the speed of what is running."""
    jobs = min(config.jobs or usable_cores(), len(waiting))
    threads = max(1, usable_cores() // jobs)
    waiting, running, ended_steps = list(waiting), [], 0
    bar = tqdm(
        total=len(waiting) * config.max_iters, desc=config.name, unit="step", smoothing=0.05,
        mininterval=0.5 if sys.stderr.isatty() else 30,
    )  # fmt: skip
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(start(config, waiting.pop(0), out_dir, threads))
            time.sleep(0.2)
            for job in [job for job in running if job["process"].poll() is not None]:
                if job["process"].returncode == 0 and job["scores"]:
                    job["process"] = start_process(job["scores"].pop(0), job["folder"], threads)
                    continue
                running.remove(job)
                ended_steps += config.max_iters
                row = finish(config, job)
                bar.write(f"{row['arm']}, seed {row['seed']}: {show(config, row)}, {row['seconds']:.0f} s")
                yield row
            states = [(job["run"], last_row(job["folder"])) for job in running]
            bar.n = ended_steps + sum(state["step"] for _, state in states)
            shown = {f"{run['arm']}/{run['seed']}": f"{state['loss']:.3f}" for run, state in states if "loss" in state}
            speed = sum(state.get("tokens_per_second", 0) for _, state in states)
            bar.set_postfix(shown | {"tok_s": f"{speed:,.0f}"}, refresh=False)
            bar.update(0)
    finally:
        bar.close()
        for job in running:
            job["process"].terminate()
            job["process"].wait()


def start(config, run, out_dir, threads):
    """Starts a run: train.py, and behind it evaluate.py for each of the scores."""
    data = prepare(config, run["data"] | {"seed": run["seed"]}, out_dir / "data" / f"seed{run['seed']}")
    folder = out_dir / f"{run['arm']}-seed{run['seed']}"
    folder.mkdir(parents=True, exist_ok=True)
    keys = run["config"] | {"dataset": str(data), "out_dir": str(folder), "threads": threads}
    if not was_made_for(run, folder / "run.json"):
        (folder / "ckpt.pt").unlink(missing_ok=True)
    elif (folder / "ckpt.pt").is_file():
        keys["init_from"] = "resume"
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "log.txt").unlink(missing_ok=True)
    if config.score_data:
        data = prepare(config, config.score_data | {"seed": run["seed"]}, out_dir / "score_data" / f"seed{run['seed']}")
    about = {"checkpoint": str(folder / "ckpt.pt"), "dataset": str(data), "device": run["config"].get("device", "auto")}
    return {
        "run": run,
        "folder": folder,
        "process": start_process(["train.py", keys], folder, threads),
        "scores": [
            ["evaluate.py", about | {"out": str(folder / f"score_{name}.json")} | score]
            for name, score in config.scores.items()
        ],
        "started": time.time(),
    }


def prepare(config, keys, folder):
    """The folder of the data that data/*/prepare.py makes of these keys, made now unless it is there."""
    if not (was_made_for(keys, folder / "prepared.json") and (folder / "meta.json").is_file()):
        script = HERE / "data" / config.prepare / "prepare.py"
        command = [sys.executable, script, f"--config_override={json.dumps(keys | {'out_dir': str(folder)})}"]
        prepared = subprocess.run(command, capture_output=True, text=True)
        if prepared.returncode:
            raise UserError(f"data/{config.prepare}/prepare.py failed: {prepared.stderr.strip()}")
        (folder / "prepared.json").write_text(json.dumps(keys))
    return folder


def start_process(command, folder, threads):
    script, keys = command
    with open(folder / "log.txt", "a") as log:
        return subprocess.Popen(
            [sys.executable, HERE / script, f"--config_override={json.dumps(keys)}"],
            stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip


def was_made_for(keys, file):
    """Whether what lies beside the file is of these very keys, and not of what the experiment was before an edit."""
    return file.is_file() and json.loads(file.read_text()) == keys


def last_row(folder):
    rows = plot.read_jsonl(folder / "metrics.jsonl")
    return rows[-1] if rows else {"step": 0}


def finish(config, job):
    """The row of a run that has ended. A run that was not finite has its row, a run that failed is an error."""
    run, folder, status = job["run"], job["folder"], job["process"].returncode
    metrics = plot.read_jsonl(folder / "metrics.jsonl")
    evaluations = [row for row in metrics if row["event"] == "eval"]
    was_stopped = status == 1 and metrics[-1:] and metrics[-1]["event"] == "stopped"  # status 1 is any exception's, too
    if status and not was_stopped or not evaluations:
        tail = (folder / "log.txt").read_text().strip().splitlines()[-1:]
        raise UserError(f"{folder.name} ended with status {status}: {' '.join(tail)} (all of it: {folder / 'log.txt'})")
    about = json.loads((folder / "config.json").read_text())
    steps = [row["tokens_per_second"] for row in metrics if row["event"] == "train"]
    return nan_to_none(run | {
        "finite": status == 0,
        "accuracy": evaluations[-1]["accuracy"] if status == 0 else math.nan,
        "val_loss": evaluations[-1]["val_loss"] if status == 0 else math.nan,
        "metric": config.metric,
        "curve": [[row["step"], row[config.metric]] for row in evaluations],
        "tokens_per_second": statistics.median(steps) if steps else math.nan,
        "scores": {name: json.loads((folder / f"score_{name}.json").read_text()) for name in run.get("scored", ())}
        if status == 0
        else {},
        "seconds": time.time() - job["started"],
        **{name: about[name] for name in ("n_params", "flops_per_token", "state_bytes", "git_commit", "versions")},
    })  # fmt: skip


def nan_to_none(value):
    """What JSON can hold, at any depth."""
    if isinstance(value, dict):
        return {name: nan_to_none(item) for name, item in value.items()}
    if isinstance(value, list):
        return [nan_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value):
    return math.nan if value is None else value


# ----------------------------------------------------------------------------------------------------------------------
# Judging


def show(config, row):
    end = number(row[config.metric])
    return f"accuracy {end:.1%}" if config.metric == "accuracy" else f"loss {end:.4f}"


def table(config, rows):
    """One line per arm, every seed shown."""
    width = max(len(arm) for arm in config.arms) + 2
    title = "End accuracy" if config.metric == "accuracy" else "Validation loss at the end (nats a token)"
    lines = [f"\n{title}, by seed\n{'arm':<{width}}" + "".join(f"{seed:>8}" for seed in config.seeds) + "    mean"]
    form = ">8.1%" if config.metric == "accuracy" else ">8.4f"
    for arm in config.arms:
        ends = [number(row[config.metric]) for row in rows if row["arm"] == arm]
        lines.append(f"{arm:<{width}}" + "".join(f"{end:{form}}" for end in [*ends, statistics.fmean(ends)]))
    return "\n".join(lines)


def divergence(rows):
    """Where each arm diverges: not finite, or a validation loss at the end above that at the start."""
    lines = plot.divergence(plot.by_learning_rate(rows))
    width = max(len(arm) for arm, _, _ in lines) + 2
    said = [f"{arm:<{width}}{kept:>24}{lost:>14}" for arm, kept, lost in lines]
    return "\n".join([f"\n{'arm':<{width}}{'highest rate without':>24}{'diverges at':>14}", *said])


def verdict(config, rows):
    """success, failure or in between, by the rules of the config, with the numbers it rests on."""
    base = [row for row in rows if row["arm"] == config.baseline]
    treated = [row for row in rows if row["arm"] == config.treatment]
    if not all(row["finite"] for row in base + treated):
        return "failure (a run was not finite)"
    gain = statistics.fmean(row["accuracy"] for row in treated) - statistics.fmean(row["accuracy"] for row in base)
    said = (
        f"({config.treatment} - {config.baseline} = {100 * gain:+.1f} points over {len(base)} seeds; success is above "
    )
    said += f"{config.success_above:.0%} against below {config.success_below:.0%} in every seed, failure is within "
    said += f"{100 * config.failure_within:.0f} points)"
    gated_high = all(row["accuracy"] > config.success_above for row in treated)
    if gated_high and all(row["accuracy"] < config.success_below for row in base):
        return f"success {said}"
    return f"failure {said}" if abs(gain) <= config.failure_within else f"in between {said}"


def cost(config, rows):
    def median(name, arm):
        return statistics.median(number(row[name]) for row in rows if row["arm"] == arm)

    def more(name):
        return median(name, config.treatment) / median(name, config.baseline) - 1

    slower = 1 - median("tokens_per_second", config.treatment) / median("tokens_per_second", config.baseline)
    return (
        f"{more('n_params'):+.1%} parameters, {more('flops_per_token'):+.1%} FLOPs a token, "
        f"{-slower:+.1%} tokens/s in training (median over the runs, side by side on one machine)"
    )


if __name__ == "__main__":
    configurator.run(main)
