"""Many runs of train.py, paired by seed, and what came of them:

    python experiment.py config/experiments/minimum.py
    python experiment.py config/experiments/minimum.py --out_dir=out/minimum --jobs=4
    python experiment.py config/experiments/matrix.py --dry_run=true        the list, and its estimated hours
    python experiment.py config/experiments/matrix.py --shard=2/8           a part of it, of 8 in a shared folder
    python experiment.py config/experiments/matrix.py --run=false           tables and figures from the rows there are

An experiment is a config file: arms x settings x seeds, the keys of train.py that all runs share (base), the data, how
a finished run is scored besides (scores), and what is claimed. Runs go on side by side, one process each. out_dir gets
rows.jsonl (one object per finished run), the figures, report.html and a folder per run; started again, it keeps the
rows it has and continues the runs that were stopped.

All arms of a seed see the same data in the same order, and start from the same weights where they share them. With
selection_seeds each arm's learning rate is chosen on those, in each setting, and the seeds are run at that one.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import configurator
import report
import verdict as verdicts
from configurator import UserError, key
from evaluate import EvaluateConfig
from files import read_jsonl
from hardware import keep_freed_memory, pick_device, seconds_of, usable_cores
from loss import IGNORE
from model import GPT
from train import TrainConfig

HERE = Path(__file__).resolve().parent


@dataclass
class ExperimentConfig:
    name: str = key("experiment", "what it is called")
    base: dict = key({}, "keys of train.py that every run has")
    arms: dict = key({}, "{name of the arm: its keys of train.py}")
    settings: dict = key({}, '{name: keys of train.py, and under "data" of the prepare script}: all arms in each')
    seeds: list[int] = key([0], "one run of every arm per seed; the seed of the data, too", at_least=0)
    learning_rates: list[float] = key([], "with selection_seeds: to choose from; without: all are run", above=0)
    selection_seeds: list[int] = key([], "seeds that the learning rates are chosen on, and nothing else", at_least=0)
    rate_of: dict = key({}, "{arm: the arm whose chosen rate it takes, untried itself}")
    rates_at: str | None = key(None, "the setting that rates are chosen in, for all (None: in each its own)")
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
    solved_above: float | None = key(None, "a run with a higher accuracy has solved the task; how many did is said")
    claims: dict = key(
        {},
        '{claim: {"contrast": {arm: weight} or {setting: {arm: weight}}, "above": threshold}}, judged by verdict.py; '
        'there may be a "setting", and "of": the keys that lead to another number of the rows than the metric',
    )
    scenarios: dict = key({}, "{scenario: {claim: the verdict it needs}}, looked for in each setting")
    run: bool = key(True, "false: no run is started, the rows that are there are shown")
    dry_run: bool = key(False, "show the list and its estimated hours, and do nothing")
    shard: str | None = key(None, "i/n: run every n-th of the list, from the i-th on (several machines, one folder)")
    out_dir: str | None = key(None, "where rows, figure and runs go (None: results/NAME)", is_path=True)
    jobs: int = key(0, "runs at a time (0: as many as there are GPUs, or cores)", at_least=0)

    def __post_init__(self):
        configurator.check(self)
        for arm in (self.baseline, self.treatment):
            if (self.baseline, self.treatment) != (None, None):
                configurator.check_choice("arms", arm, self.arms)
        for kind, named in (("arms", self.arms), ("settings", self.settings)):
            for name, keys in named.items():
                if not isinstance(keys, dict):
                    raise UserError(f"{kind}: {name}={keys!r}: must be a dict of keys of train.py")
        for run in runs_of(self, self.seeds[:1], self.learning_rates[:1]):  # a wrong key is found before the first run
            configurator.build(TrainConfig, run["config"], source=f"arm {run['arm']!r}")
        for name, keys in self.scores.items():
            configurator.build(EvaluateConfig, keys, source=f"score {name!r}")
        for name, claim in self.claims.items():
            if not isinstance(claim, dict) or set(claim) - {"setting", "of"} != {"contrast", "above"}:
                raise UserError(f"claims: {name}: must have a contrast and above, and may have a setting and of")
            if "setting" in claim or is_across_settings(claim):
                for setting in claim["contrast"] if is_across_settings(claim) else [claim["setting"]]:
                    configurator.check_choice(f"claims: {name}: setting", setting, self.settings)
            for weights in claim["contrast"].values() if is_across_settings(claim) else [claim["contrast"]]:
                for arm in weights:
                    configurator.check_choice(f"claims: {name}", arm, self.arms)
        for arm, other in self.rate_of.items():
            configurator.check_choice("rate_of", arm, self.arms)
            configurator.check_choice(f"rate_of: {arm}", other, [arm for arm in self.arms if arm not in self.rate_of])
        if self.rates_at is not None:
            configurator.check_choice("rates_at", self.rates_at, self.settings)
        if (self.rate_of or self.rates_at) and not self.selection_seeds:
            raise UserError("rate_of, rates_at: without selection_seeds no rate is chosen")
        for name, needed in self.scenarios.items():
            if not isinstance(needed, dict):
                raise UserError(f"scenarios: {name}={needed!r}: must be a dict of claims and their verdicts")
            for claim, word in needed.items():
                configurator.check_choice(f"scenarios: {name}", claim, self.claims)
                configurator.check_choice(f"scenarios: {name}: {claim}", word, verdicts.WORDS)
        if bool(self.selection_seeds) and not self.learning_rates:
            raise UserError("selection_seeds: there are no learning_rates to choose from")
        if set(self.selection_seeds) & set(self.seeds):
            raise UserError(f"selection_seeds={self.selection_seeds}: the comparison uses some of them, too")
        if self.learning_rates and not self.selection_seeds and self.metric != "val_loss":
            raise UserError(f"metric={self.metric!r}: with learning_rates it must be val_loss, which tells divergence")
        parse_shard(self.shard)


def main(argv):
    config = configurator.load(ExperimentConfig, argv, program="experiment.py", description=__doc__)
    out_dir = Path(config.out_dir or HERE / "results" / config.name)
    if config.dry_run:
        print(estimate(config, report.read_rows(out_dir)))
        return
    rows = run_all(config, out_dir)
    if rows is None:
        return
    judged = judge_claims(config, rows)
    said = summary(config, rows, judged)
    print(said)
    figures = report.figures(rows, out_dir)
    if any("mean" in claim for claim in judged):
        figures.append(report.claims(judged, out_dir / "claims.png"))
    about = [word for word in argv if not word.startswith(("--run", "--out_dir", "--jobs", "--shard"))]
    command = " ".join(["python experiment.py", *about])
    page = report.page(rows, figures, out_dir / "report.html", said, command)
    print("written:", ", ".join(map(str, [out_dir / "rows.jsonl", *figures, page])))


# ----------------------------------------------------------------------------------------------------------------------
# The list of runs


def runs_of(config, seeds, rates, chosen=None):
    """Every run of the seeds: settings x arms x rates. chosen: {(setting, arm): rate}, instead of rates."""
    runs = []
    for seed in seeds:
        for setting, changes in (config.settings or {None: {}}).items():
            data = config.data | changes.get("data", {})
            base = config.base | {name: value for name, value in changes.items() if name != "data"}
            for arm, keys in config.arms.items():
                for rate in [chosen[setting, arm]] if chosen else rates or [None]:
                    run = {"arm": arm, "seed": seed, "data": data, "config": base | keys | {"seed": seed}}
                    if rate is not None:
                        run["config"]["learning_rate"] = rate
                    if rate is not None and not config.selection_seeds:
                        run["arm"] = f"{arm} at {rate:g}"
                    elif rate is not None and chosen is None:
                        run["purpose"] = "selection"
                    if setting is not None:
                        run["setting"] = setting
                    if config.scores and "purpose" not in run:
                        run |= {"scored": config.scores, "score_data": config.score_data}
                    runs.append(json.loads(json.dumps(run)))  # as it will be read again: a tuple comes back as a list
    return runs


def selection_runs(config):
    """The runs that learning rates are chosen by."""
    runs = runs_of(config, config.selection_seeds, config.learning_rates) if config.selection_seeds else []
    return [r for r in runs if r["arm"] not in config.rate_of and config.rates_at in (None, r.get("setting"))]


def choose_rates(config, rows):
    """{(setting, arm): learning rate}, of the best mean over the selection seeds; None if some of their rows lack."""
    sign, best = (1 if config.metric == "accuracy" else -1), {}
    runs = selection_runs(config)
    found = [find_row(rows, run) for run in runs]
    if None in found:
        return None
    for setting, arm in dict.fromkeys((run.get("setting"), run["arm"]) for run in runs):
        means = {}
        for rate in config.learning_rates:
            own = [
                r for r in found if (r.get("setting"), r["arm"], r["config"]["learning_rate"]) == (setting, arm, rate)
            ]
            ends = [-math.inf if row[config.metric] is None else sign * row[config.metric] for row in own]
            means[rate] = statistics.fmean(ends)
        best[setting, arm] = max(means, key=means.get)
    return {
        (setting, arm): best[config.rates_at or setting, config.rate_of.get(arm, arm)]
        for setting in config.settings or [None]
        for arm in config.arms
    }


def steps_of(runs):
    return sum(configurator.build(TrainConfig, run["config"]).max_iters for run in runs)


def parse_shard(shard):
    """i/n -> (i, n), counted from 1. None -> (1, 1)."""
    first, slash, count = (shard or "1/1").partition("/")
    if not (slash and first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise UserError(f"shard={shard!r}: write i/n, from 1/n to n/n")
    return int(first), int(count)


def estimate(config, rows):
    """The list of runs that have no row, and the hours they will take: by the rows of their arm, else by some steps."""
    runs = runs_of(config, config.seeds, config.learning_rates[: 1 if config.selection_seeds else None])
    runs = selection_runs(config) + runs
    waiting = [run for run in runs if find_row(rows, run) is None]
    jobs, found, lines, total = jobs_of(config, gpus_of(config)), {}, [], 0.0
    for run in waiting:
        kind = run.get("setting"), run["arm"].split(" at ")[0]
        if kind not in found:
            same = [r["seconds"] for r in rows if (r.get("setting"), r["arm"].split(" at ")[0]) == kind]
            found[kind] = statistics.median(same) if same else seconds_by_steps(run, max(1, usable_cores() // jobs))
        lines.append(f"{name_of(run):<60}{found[kind]:>8,.0f} s")
        total += found[kind]
    hours = f"about {total / 3600 / jobs:.1f} hours, {jobs} at a time"
    return "\n".join([*lines, f"{len(waiting)} of {len(runs)} runs to do: {hours}"])


def seconds_by_steps(run, threads):
    """What a run without a row may take, by five steps of it here and now, on random tokens."""
    keys = configurator.build(TrainConfig, run["config"])
    torch.set_num_threads(threads)
    keep_freed_memory()
    keys.vocab_size = keys.vocab_size or run["data"].get("vocab_size", 256)
    device = pick_device(keys.device)
    model = GPT(keys).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    slices = run["data"].get("slices", str(run["data"].get("seq_len", keys.block_size)))  # length/pairs, ...
    longest = max(int(part.split("/")[0]) for part in slices.split(","))
    idx = torch.randint(keys.vocab_size, (keys.batch_size, min(longest, keys.block_size)), device=device)
    targets, labels = idx.clone(), run["data"].get("queries") or run["data"].get("pairs")
    if isinstance(labels, int):  # recall: all tokens are read, few are predicted
        targets[:, labels:] = IGNORE

    def step():
        model(idx, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = [seconds_of(step, device) for _ in range(6)]
    return statistics.median(seconds[1:]) * keys.gradient_accumulation_steps * keys.max_iters


def name_of(run):
    """The folder of a run."""
    rate = f"lr{run['config']['learning_rate']:g}" if "purpose" in run else None
    parts = [run.get("setting"), run["arm"], rate, f"seed{run['seed']}"]
    return "-".join(part for part in parts if part)


# ----------------------------------------------------------------------------------------------------------------------
# Running


def run_all(config, out_dir):
    """The rows of all runs, in the order of the list: those that are there, and the others, run now.

    None where another shard has some of them still to do.
    """
    chosen = None
    if config.selection_seeds:
        chosen = choose_rates(config, run_list(config, selection_runs(config), out_dir, "choosing learning rates"))
        if chosen is None:
            print("the learning rates are chosen when all runs of the selection seeds are there")
            return None
        for (setting, arm), rate in chosen.items():
            if config.rates_at in (None, setting):
                print(f"learning rate of {f'{setting}: ' if setting and not config.rates_at else ''}{arm}: {rate:g}")
    runs = runs_of(config, config.seeds, config.learning_rates, chosen)
    rows = run_list(config, runs, out_dir, config.name)
    found = [row for run in runs if (row := find_row(rows, run)) is not None]
    if len(found) < len(runs):
        print(f"{len(runs) - len(found)} of {len(runs)} runs have no row yet")
    return found if found and (len(found) == len(runs) or not config.run) else None


def run_list(config, runs, out_dir, title):
    """Runs what has no row, this shard's part of it. Returns all rows there are then."""
    out_dir.mkdir(parents=True, exist_ok=True)
    rows, (first, count) = report.read_rows(out_dir), parse_shard(config.shard)
    waiting = [run for run in runs[first - 1 :: count] if find_row(rows, run) is None]
    done = sum(find_row(rows, run) is not None for run in runs)
    print(f"{title}: {len(runs)} runs, {steps_of(runs):,} steps; {done} runs are done already")
    if waiting and config.run:
        file = out_dir / ("rows.jsonl" if count == 1 else f"rows.{first}-of-{count}.jsonl")
        if file.is_file():
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)  # a kill may have cut the last row short
        with open(file, "a") as rows_file:
            for row in run_side_by_side(config, waiting, out_dir):
                rows_file.write(json.dumps(row, allow_nan=False) + "\n")
                rows_file.flush()
        rows = report.read_rows(out_dir)
    return rows


def find_row(rows, run):
    """The row of this very run: same arm, seed, data and keys."""
    return next((row for row in rows if all(row.get(name) == value for name, value in run.items())), None)


def run_side_by_side(config, waiting, out_dir):
    """Yields a row whenever a run ends. One bar over all steps, with the losses and the speed of what is running.

    SIGTERM and Ctrl-C stop the runs, each of which saves first.
    """
    gpus = gpus_of(config)
    jobs = min(jobs_of(config, gpus), len(waiting))
    threads = max(1, usable_cores() // jobs)
    waiting, running, ended_steps = list(waiting), [], 0
    bar = tqdm(
        total=steps_of(waiting), desc=config.name, unit="step", smoothing=0.05,
        mininterval=0.5 if sys.stderr.isatty() else 30,
    )  # fmt: skip
    before = {
        number: signal.signal(number, lambda number, _: sys.exit(128 + number))
        for number in (signal.SIGTERM, signal.SIGINT)  # a shell starts what is in the background deaf to SIGINT
    }
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                gpu = min(gpus, key=[job["gpu"] for job in running].count) if gpus else None  # one with the fewest runs
                running.append(start(config, waiting.pop(0), out_dir, threads, gpu))
            time.sleep(0.2)
            for job in [job for job in running if job["process"].poll() is not None]:
                if job["process"].returncode == 0 and job["scores"]:
                    job["process"] = start_process(job["scores"].pop(0), job["folder"], threads, job["gpu"])
                    continue
                running.remove(job)
                ended_steps += steps_of([job["run"]])
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
        for job in running:
            job["process"].wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def gpus_of(config):
    """The names by which CUDA_VISIBLE_DEVICES knows the GPUs of this machine; none where the runs are on the CPU."""
    if pick_device(config.base.get("device", "auto")) != "cuda":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def jobs_of(config, gpus):
    """How many runs go on at a time."""
    return config.jobs or len(gpus) or usable_cores()


def start(config, run, out_dir, threads, gpu):
    """Starts a run: train.py, and behind it evaluate.py for each of the scores."""
    place = "-".join(filter(None, [run.get("setting"), f"seed{run['seed']}"]))
    data = prepare(config, run["data"] | {"seed": run["seed"]}, out_dir / "data" / place)
    folder = out_dir / name_of(run)
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
        "gpu": gpu,
        "process": start_process(["train.py", keys], folder, threads, gpu),
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


def start_process(command, folder, threads, gpu):
    script, keys = command
    environment = {"OMP_NUM_THREADS": str(threads)} | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    with open(folder / "log.txt", "a") as log:
        return subprocess.Popen(
            [sys.executable, HERE / script, f"--config_override={json.dumps(keys)}"],
            stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment,
            start_new_session=True,  # a terminal's Ctrl-C is for this process, which then asks each run once
        )  # fmt: skip


def was_made_for(keys, file):
    """Whether what lies beside the file is of these very keys, and not of what the experiment was before an edit."""
    return file.is_file() and json.loads(file.read_text()) == keys


def last_row(folder):
    rows = read_jsonl(folder / "metrics.jsonl")
    return rows[-1] if rows else {"step": 0}


def finish(config, job):
    """The row of a run that has ended. A run that was not finite has its row, a run that failed is an error."""
    run, folder, status = job["run"], job["folder"], job["process"].returncode
    metrics = read_jsonl(folder / "metrics.jsonl")
    evaluations = [row for row in metrics if row["event"] == "eval"]
    was_stopped = status == 1 and metrics[-1:] and metrics[-1]["event"] == "stopped"  # status 1 is any exception's, too
    if status and not was_stopped or not evaluations:
        tail = (folder / "log.txt").read_text().strip().splitlines()[-1:]
        raise UserError(f"{folder.name} ended with status {status}: {' '.join(tail)} (all of it: {folder / 'log.txt'})")
    about = json.loads((folder / "config.json").read_text())
    speeds = [row["tokens_per_second"] for row in metrics if row["event"] == "train"]
    speed = statistics.median(speeds) if speeds else math.nan
    return nan_to_none(run | {
        "finite": status == 0,
        "accuracy": evaluations[-1]["accuracy"] if status == 0 else math.nan,
        "val_loss": evaluations[-1]["val_loss"] if status == 0 else math.nan,
        "metric": config.metric,
        "curve": [[row["step"], row[config.metric]] for row in evaluations],
        "meters": evaluations[-1].get("meters", {}),
        "tokens_per_second": speed,
        "step_ms": 1000 * about["tokens_per_step"] / speed,
        "scores": {name: read_score(folder / f"score_{name}.json") for name in run.get("scored", ()) if status == 0},
        "seconds": time.time() - job["started"],
        **{name: about[name] for name in ("n_params", "flops_per_token", "state_bytes")},
        **{name: about[name] for name in ("git_commit", "git_dirty", "versions")},
    })  # fmt: skip


def read_score(file):
    """What evaluate.py wrote, without the path of this machine's checkpoint."""
    return {name: value for name, value in json.loads(file.read_text()).items() if name != "checkpoint"}


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


def summary(config, rows, judged):
    """All that is said about the rows: tables and verdicts by setting, then the claims."""
    parts = []
    for setting in config.settings or [None]:
        own = [row for row in rows if row.get("setting") == setting]
        if not own:
            parts.append(f"{setting}: no run of it has a row yet")
            continue
        parts += [table(config, own, setting), gains_table(config, own), slices_table(own)]
        if config.baseline is not None and {config.baseline, config.treatment} <= {row["arm"] for row in own}:
            parts.append(f"verdict: {verdict(config, own)}\ncost of the gate: {cost(config, own)}")
    if config.learning_rates and not config.selection_seeds:
        parts.append(divergence(rows))
    parts += [claims_table(judged), scenarios_table(config, judged)]
    return "\n" + "\n\n".join(filter(None, parts)) + "\n"


def show(config, row):
    end = number(row[config.metric])
    return f"accuracy {end:.1%}" if config.metric == "accuracy" else f"loss {end:.4f}"


def table(config, rows, setting=None):
    """One line per arm, every seed shown; with solved_above how many seeds solved it, and how soon."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    width = max(map(len, arms)) + 2
    title = "End accuracy" if config.metric == "accuracy" else "Validation loss at the end (nats a token)"
    title += f", {setting}" if setting else ""
    head = f"{'arm':<{width}}" + "".join(f"{seed:>8}" for seed in config.seeds) + "    mean"
    head += "  solved  steps to it" if config.solved_above is not None else ""
    lines, form = [f"{title}, by seed", head], ">8.1%" if config.metric == "accuracy" else ">8.4f"
    for arm in arms:
        by_seed = {row["seed"]: row for row in rows if row["arm"] == arm}
        ends = [number(row[config.metric]) for row in by_seed.values()]
        cells = [f"{number(by_seed[s][config.metric]):{form}}" if s in by_seed else " not run" for s in config.seeds]
        line = f"{arm:<{width}}" + "".join(cells) + f"{statistics.fmean(ends):{form}}"
        if config.solved_above is not None:
            steps = [steps_to(row["curve"], config.solved_above) for row in by_seed.values()]
            reached = [step for step in steps if step is not None]
            solved = sum(end > config.solved_above for end in ends)
            line += f"{f'{solved}/{len(ends)}':>8}{f'{statistics.median(reached):,.0f}' if reached else '-':>13}"
        lines.append(line)
    return "\n".join(lines)


def gains_table(config, rows):
    """One line per gated arm: its paired gain over the arm that has all its keys but the gate's. Not corrected."""
    lines, arms = [], {row["arm"]: row["config"] for row in reversed(rows)}  # the keys of the first seed
    width = max(map(len, arms)) + 2
    plain = {arm: without_gate(keys) for arm, keys in arms.items()}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        same = [other for other in arms if arms[other].get("gate", "none") == "none" and plain[other] == plain[arm]]
        if not same or arm == same[0]:
            continue
        setting = rows[0].get("setting")
        gains = list(verdicts.contrast(rows, {(setting, arm): 1, (setting, same[0]): -1}, [config.metric]).values())
        if len(gains) >= 2:
            mean, low, high = verdicts.t_interval(gains)
            when = said_of_steps(config, rows, arm, same[0])
            lines.append(f"{arm:<{width}}{mean:>+9.4f}{low:>+9.4f} to{high:>+9.4f}{when}")
    title = "gain over the same without a gate: mean, 95% interval, not corrected for their number"
    return "\n".join([title, *lines]) if lines else ""


def said_of_steps(config, rows, arm, other):
    """How often the arm is above solved_above later than the other, among the seeds in which both get there."""
    if config.solved_above is None:
        return ""
    steps = {(row["arm"], row["seed"]): steps_to(row["curve"], config.solved_above) for row in rows}
    pairs = [(steps.get((arm, seed)), steps.get((other, seed))) for seed in config.seeds]
    both = [one - two for one, two in pairs if None not in (one, two)]
    later, sooner = sum(step > 0 for step in both), sum(step < 0 for step in both)
    return f"; solved later in {later}, sooner in {sooner} of {len(both)} seeds that both solve" if both else ""


def without_gate(keys):
    """The keys that are not the gate's, nor chosen for it."""
    chosen = "match_params", "learning_rate"
    return {name: value for name, value in keys.items() if not name.startswith("gate") and name not in chosen}


def slices_table(rows):
    """One line per arm: its accuracy by length/pairs on the data of a score, means over the seeds."""
    lines, arms = [], list(dict.fromkeys(row["arm"] for row in rows))
    width = max(map(len, arms)) + 2
    for name in rows[0].get("scored", {}):
        scores = {arm: [row["scores"][name] for row in rows if row["arm"] == arm and row["scores"]] for arm in arms}
        slices = next((score.get("slices", ()) for own in scores.values() for score in own), ())
        if slices:
            head = f"{'arm':<{width}}" + "".join(f"{part:>10}" for part in slices)
            lines += [f"{name}: accuracy by length/pairs, means over the seeds", head]
        for arm, own in scores.items() if slices else ():
            means = [statistics.fmean(score["slices"][part] for score in own) if own else math.nan for part in slices]
            lines.append(f"{arm:<{width}}" + "".join(f"{value:>10.1%}" for value in means))
    return "\n".join(lines)


def steps_to(curve, accuracy):
    """The first evaluated step above it, or None."""
    return next((step for step, value in curve if value > accuracy), None)


def is_across_settings(claim):
    return any(isinstance(weights, dict) for weights in claim["contrast"].values())


def contrasts_of(config, claim):
    """{setting or None: {(setting, arm): weight}}: across settings; or in one; or, where none is named, in each."""
    if is_across_settings(claim):
        return {None: {(s, arm): w for s, weights in claim["contrast"].items() for arm, w in weights.items()}}
    settings = [claim["setting"]] if "setting" in claim else config.settings or [None]
    return {setting: {(setting, arm): w for arm, w in claim["contrast"].items()} for setting in settings}


def judge_claims(config, rows):
    """[{claim, setting, verdict, ...}]: all claims about one number of the rows, in all settings, are one family."""
    judged, families = [], {}
    for name, claim in config.claims.items():
        path = claim.get("of", [config.metric])
        for setting, weights in contrasts_of(config, claim).items():
            values = verdicts.contrast(rows, weights, path)
            judged.append({"claim": name, "setting": setting, "of": path, "by_seed": values})
            family = families.setdefault(tuple(path), [])
            family.append((judged[-1], (list(values.values()), claim["above"])))
    for family in families.values():
        for claim, result in zip(family, verdicts.judge([asked for _, asked in family]), strict=True):
            claim[0].update(result)
    return judged


def claims_table(judged):
    """A line per claim: the word, and what it rests on. Accuracies are fractions, losses nats."""
    lines = []
    for claim in judged:
        where = f", {claim['setting']}" if claim["setting"] else ""
        said = f"{claim['claim']}{where}: {claim['verdict']}"
        if "mean" in claim:
            said += (
                f" ({claim['mean']:+.4f}, 95% interval {claim['low']:+.4f} to {claim['high']:+.4f}, beyond "
                f"{claim['threshold']:g}; p {claim['p_holm']:.3g} after Holm, exact {claim['p_exact']:.3g}, "
                f"{claim['n']} seeds)"
            )
        lines.append(said)
    return "\n".join(lines)


def scenarios_table(config, judged):
    """A line per setting: the scenarios whose claims all have the verdicts they need there."""
    lines = []
    for setting in (config.settings or [None]) if config.scenarios else []:
        words = {claim["claim"]: claim["verdict"] for claim in judged if claim["setting"] == setting}
        held = [name for name, needed in config.scenarios.items() if needed.items() <= words.items()]
        lines.append(f"scenario{f', {setting}' if setting else ''}: {'; '.join(held) or 'none of them'}")
    return "\n".join(lines)


def divergence(rows):
    """Where each arm diverges: not finite, or a validation loss at the end above that at the start."""
    arms = report.by_learning_rate(rows)
    width = max(map(len, arms)) + 2
    lines = [f"{'arm':<{width}}{'highest rate without':>24}{'diverges at':>14}"]
    for arm, rates in arms.items():
        lost = [rate for rate, own in rates.items() if any(map(report.has_diverged, own))]
        kept = [rate for rate in rates if rate not in lost]
        highest, lowest = f"{max(kept):g}" if kept else "none", f"{min(lost):g}" if lost else "none"
        lines.append(f"{arm:<{width}}{highest:>24}{lowest:>14}")
    return "\n".join(lines)


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
