"""Runs train.py many times, paired by seed, and reports what came of it:

    python experiment.py config/experiments/minimum.py
    python experiment.py config/experiments/minimum.py --out_dir=out/minimum --jobs=4
    python experiment.py config/experiments/matrix.py --dry_run=true        prints the list and its estimated hours
    python experiment.py config/experiments/matrix.py --shard=2/8           runs one part of eight, in a shared folder
    python experiment.py config/experiments/matrix.py --run=false           shows the rows that are there

An experiment is a config file: arms x settings x seeds, the keys of train.py that all runs share (base), the data, how
a finished run is scored besides (scores), and what is claimed. Runs go on side by side, one process each. out_dir gets
rows.jsonl (one object per finished run), the figures, report.html and a folder per run; started again, it keeps the
rows it has, continues the runs that were stopped, and computes the scores that a finished run lacks. A run is its arm,
setting, seed, data and keys of train.py; a folder that holds another run is moved aside, with its checkpoints.
A folder that is none of an experiment is refused before anything is written. SIGTERM, Ctrl-C, SIGHUP (a closed
terminal) and SIGUSR1 stop the runs, each of which saves first; the status is then 128 and the signal's number.

base and data given on the command line, or beside an include, are added to those of the file: --base='{"n_layer": 4}'
changes one key. Every other key takes the place of the file's.

All arms of a seed see the same data in the same order, and start from the same weights where they share them. With
selection_seeds each arm's learning rate is chosen on those, in each setting, and the seeds are run at that one.
"""

import configurator
from configurator import UserError, key, show

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from evaluate import EvaluateConfig
from model import GPT
from ops import IGNORE
from runs import files
from runs.files import lock, read_jsonl, wrong_field
from runs.hardware import keep_freed_memory, pick_device, seconds_of, signals_to, usable_cores
from runs.outdir import write_text
from study import claims, curves, power, report, stats, tables
from study.rows import as_read, find_row, missing_scores, read_rows, rows_of_other_keys, run_of, with_scores
from train import TrainConfig, make_optimizers

HERE = Path(__file__).resolve().parent
RULE = (
    "baseline",
    "treatment",
    "success_above",
    "success_below",
    "failure_within",
)  # the verdict needs all of them, or none is given
# keys of train.py and evaluate.py that the experiment sets: they say where files are read and written
OURS = {"base": ("out_dir", "dataset", "init_from", "overwrite"), "scores": ("out", "checkpoint")}


@dataclass
class ExperimentConfig:
    name: str = key("experiment", "what it is called")
    base: dict = key({}, "keys of train.py that every run has; a later base is added to it", merge=True)
    arms: dict = key({}, "{name of the arm: its keys of train.py}")
    settings: dict = key({}, '{name: keys of train.py, and under "data" of the prepare script}: all arms in each')
    seeds: list[int] = key([0], "one run of every arm each; it seeds the data, too, unless data has a seed", at_least=0)
    seeds_of: dict = key({}, "{arm: the only ones of the seeds that it is run with}")
    learning_rates: list[float] = key([], "with selection_seeds: to choose from; without: all are run", above=0)
    selection_seeds: list[int] = key([], "seeds that the learning rates are chosen on, and nothing else", at_least=0)
    rate_of: dict = key({}, "{arm: the arm whose chosen rate it takes, untried itself}")
    rates_at: str | None = key(None, "the setting that rates are chosen in, for all (None: in each its own)")
    prepare: str = key("mqar", "which data/*/prepare.py makes the data")
    data: dict = key({}, "keys of that script; a later data is added to it", merge=True)
    metric: str = key("accuracy", "what the table and the curves show", choices=("accuracy", "val_loss"))
    scores: dict = key({}, "{name: keys of evaluate.py}: how each finished run is scored besides")
    score_data: dict = key({}, "keys of the same script, for the data of the scores (empty: the run's own)")
    baseline: str | None = key(None, "the arm that the verdict compares with (None: no verdict, of accuracy alone)")
    treatment: str | None = key(None, "the arm that the verdict is about; it needs the three keys below, too")
    success_above: float | None = key(None, "success: the treatment's accuracy is above this in every seed")
    success_below: float | None = key(None, "... and the baseline's below this")
    failure_within: float | None = key(
        None, "failure: the mean accuracies are no further apart than this, or a run is not finite"
    )
    solved_above: float | None = key(None, "a run with a higher accuracy has solved the task; the table counts them")
    claims: dict = key(
        {},
        '{claim: {"contrast": {arm: weight} or {setting: {arm: weight}}, "above": threshold}}, judged by study/stats; '
        'there may be a "setting"; "of": the keys that lead to another number of the rows than the metric; "sides": 1 '
        'for a one-sided test; "in": n for a count, which passes if n seeds are above the threshold; "within": half of '
        'a band around zero that counts as no effect; "family": a name for the question; "exploratory": true',
    )
    exploratory: bool = key(False, "true: no claim was declared with the power to be shown; their words say so")
    pilot: str | None = key(None, "--dry_run: a folder of rows whose spread says what claims can show", is_path=True)
    scenarios: dict = key({}, "{scenario: {claim: the verdict it needs}}, looked for in each setting")
    run: bool = key(True, "false: no run is started, the rows that are there are shown")
    dry_run: bool = key(False, "show the list and its estimated hours, and do nothing")
    shard: str | None = key(None, "i/n: run every n-th of the list, from the i-th on (several machines, one folder)")
    out_dir: str | None = key(None, "where rows, figure and runs go (None: results/NAME)", is_path=True)
    overwrite: bool = key(False, "true: take an out_dir that holds files which are none of an experiment")
    jobs: int = key(0, "runs at a time (0: as many as there are GPUs, or cores)", at_least=0)

    def __post_init__(self):
        configurator.check(self)
        if not self.arms:
            raise UserError(
                'arms={}: there is nothing to run; name a file of config/experiments/, or add arms = {"none": {}, ...}'
            )
        if not self.seeds:
            raise UserError("seeds=[]: there is nothing to run; add one at least, as in seeds = [0, 1, 2]")
        names = {"name": [self.name], "arms": self.arms, "settings": self.settings, "scores": self.scores}
        for kind, each in names.items():
            check_names(kind, each)
        self.check_verdict()
        for kind, named in (("arms", self.arms), ("settings", self.settings)):
            for name, keys in named.items():
                check_keys(kind, name, keys, "train.py", OURS["base"])
        for name, keys in self.settings.items():
            if not isinstance(keys.get("data", {}), dict):
                raise UserError(f"settings: {name}: data={show(keys['data'])}: must be a dict of keys of prepare.py")
        check_keys("base", "", self.base, "train.py", OURS["base"])
        for name, keys in self.scores.items():
            check_keys("scores", name, keys, "evaluate.py", OURS["scores"])
            configurator.build(EvaluateConfig, keys, source=f"score {name!r}")
        scripts = sorted(file.parent.name for file in (HERE / "data").glob("*/prepare.py"))
        configurator.check_choice("prepare", self.prepare, scripts)
        for arm, seeds in self.seeds_of.items():
            check_named("seeds_of", arm, self.arms, "arms")
            if wrong := wrong_field(seeds, [(int, 0, 1 << 60), 1, 999]):
                raise UserError(f"seeds_of: {arm}: {wrong}")
        each_arm = {(run.get("setting"), run["arm"]): run for run in runs_of(self, self.seeds, self.learning_rates[:1])}
        for run in each_arm.values():  # a wrong key is found before the first run
            keys = configurator.build(TrainConfig, run["config"], source=f"arm {run['arm']!r}")
            if keys.dtype == "auto":
                raise UserError(
                    f"arm {run['arm']!r}: dtype=auto is timed anew in each run, so that paired runs may differ: "
                    'add "dtype": "float32", or bfloat16, to base'
                )
            configurator.build(prepare_config(self), run["data"], source="data")
        self.check_folders()
        configurator.build(prepare_config(self), self.score_data, source="score_data")
        for name, claim in self.claims.items():
            self.check_claim(name, claim)
        power.check_reach(self)
        for arm, other in self.rate_of.items():
            check_named("rate_of", arm, self.arms, "arms")
            check_named(f"rate_of: {arm}", other, [arm for arm in self.arms if arm not in self.rate_of], "other arms")
        if self.rates_at is not None:
            check_named("rates_at", self.rates_at, self.settings, "settings")
        if (self.rate_of or self.rates_at) and not self.selection_seeds:
            raise UserError("rate_of, rates_at: without selection_seeds no rate is chosen")
        for name, needed in self.scenarios.items():
            if not isinstance(needed, dict):
                raise UserError(f"scenarios: {name}={show(needed)}: must be a dict of claims and their verdicts")
            for claim, word in needed.items():
                check_named(f"scenarios: {name}", claim, self.claims, "claims")
                configurator.check_choice(f"scenarios: {name}: {claim}", word, stats.WORDS)
        if bool(self.selection_seeds) and not self.learning_rates:
            raise UserError("selection_seeds: there are no learning_rates to choose from")
        if set(self.selection_seeds) & set(self.seeds):
            raise UserError(f"selection_seeds={self.selection_seeds}: the comparison uses some of them, too")
        if self.learning_rates and not self.selection_seeds and self.metric != "val_loss":
            raise UserError(f"metric={self.metric!r}: with learning_rates it must be val_loss, which tells divergence")
        parse_shard(self.shard)

    def check_folders(self) -> None:
        """Every run needs a folder of its own: setting "a" with arm "b-c" would share that of "a-b" with "c"."""
        found = {}
        for run in runs_of(self, self.seeds, []):
            other = found.setdefault(name_of(run), run)
            if other is not run:
                raise UserError(
                    f"settings, arms: {other.get('setting')!r} with {other['arm']!r} and {run.get('setting')!r} with "
                    f"{run['arm']!r} would share the folder {name_of(run)}; rename one of them"
                )

    def check_claim(self, name: str, claim: object) -> None:
        if not isinstance(claim, dict) or "contrast" not in claim or not {"above", "within"} & set(claim):
            raise UserError(f"claims: {name}: must have a contrast and above, or within")
        if unknown := set(claim) - {rule.rstrip("?") for rule in CLAIM}:
            configurator.check_choice(f"claims: {name}", min(unknown, key=str), [rule.rstrip("?") for rule in CLAIM])
        if wrong := wrong_field(claim, CLAIM):
            raise UserError(f"claims: {name}: {wrong}")
        if "in" in claim and ("above" not in claim or {"sides", "within", "family"} & set(claim)):
            raise UserError(
                f"claims: {name}: a count (in) needs above, and has no sides, within or family: it is no test"
            )
        path = claim.get("of", [self.metric])
        is_text = type(path[0]) is str
        kinds = [int, float] if is_text and path[0] in curves.METRICS else [str]
        if not is_text or any(type(part) not in kinds for part in path[1:]):
            raise UserError(f"claims: {name}: of={show(path)}: must be names; log_steps and lost take a number")
        if path[0] in curves.METRICS and len(path) != 1 + curves.PARAMETERS[path[0]]:
            example = ["auc"] if path[0] == "auc" else [path[0], 0.9]
            raise UserError(f"claims: {name}: of={show(path)}: must be like {show(example)}")
        is_across = tables.is_across_settings(claim)
        for setting in claim["contrast"] if is_across else [claim["setting"]] if "setting" in claim else []:
            check_named(f"claims: {name}: setting", setting, self.settings, "settings")
        for weights in claim["contrast"].values() if is_across else [claim["contrast"]]:
            if wrong := wrong_field(weights, WEIGHTS):
                raise UserError(f"claims: {name}: {wrong}")
            for arm in weights:
                check_named(f"claims: {name}", arm, self.arms, "arms")
        for weights in tables.contrasts_of(self, claim).values():
            if claim.get("in", 0) > len(tables.seeds_of_claim(self, weights)):
                raise UserError(f"claims: {name}: in={claim['in']}: is more than the seeds of its arms")

    def check_verdict(self) -> None:
        lacking = [name for name in RULE if getattr(self, name) is None]
        if 0 < len(lacking) < len(RULE):
            raise UserError(f"{', '.join(lacking)}: the verdict needs {'it' if len(lacking) == 1 else 'them'}, too")
        if self.metric != "accuracy" and (not lacking or self.solved_above is not None):
            name = "solved_above" if lacking else "baseline"
            raise UserError(
                f"{name}: is about accuracy, and metric={self.metric!r}; leave it out, and write a claim: "
                'claims = {"it helps": {"contrast": {"without": 1, "with": -1}, "above": 0.01}}'
            )
        if not lacking:
            for name in ("baseline", "treatment"):
                check_named(name, getattr(self, name), self.arms, "arms")


# what a claim holds; runs.files.wrong_field says how such a table is read
WEIGHTS = {str: (float, -1e9, 1e9)}
CLAIM = {
    "contrast": (dict, 1, 999),
    "above?": (float, -1e9, 1e9),
    "within?": (float, 1e-9, 1e9),
    "setting?": (str, 0, 999),
    "of?": [object, 1, 9],
    "sides?": (int, 1, 2),
    "in?": (int, 1, 999),
    "family?": (str, 1, 99),
    "exploratory?": (bool, 0, 1),
}


def check_names(kind: str, names: Iterable[str]) -> None:
    """Raises UserError for a name that cannot be a file name: runs' folders and scores' files in out_dir bear these."""
    for name in names:
        is_text = isinstance(name, str) and name.isprintable() and bool(name.strip())
        if not is_text or name[0] == "." or "/" in name or "\\" in name or len(name.encode()) > 80:
            raise UserError(
                f"{kind}: {show(name)}: names are file names: a text of 1 to 80 bytes, without slashes and line ends, "
                "that begins with no dot"
            )


def check_keys(kind: str, name: str, keys: object, script: str, taken: tuple[str, ...]) -> None:
    """Raises UserError for anything but a dict of keys, and for a key that the experiment itself sets."""
    label = f"{kind}: {name}" if name else kind
    if not isinstance(keys, dict):
        raise UserError(f"{label}={show(keys)}: must be a dict of keys of {script}")
    if found := [key for key in taken if key in keys]:
        raise UserError(f"{label}: {found[0]}: the experiment sets it, so that its files stay in out_dir; leave it out")


def check_named(label: str, value: object, choices: Iterable[str], kind: str) -> None:
    """Raises UserError for a value that is not one of the config's own names of arms, claims or settings."""
    if not choices:
        raise UserError(f"{label}={show(value)}: the experiment has no {kind}")
    configurator.check_choice(label, value, list(choices))


def main(argv: list[str]) -> None:
    config = configurator.load(ExperimentConfig, argv, program="experiment.py", description=__doc__)
    out_dir = Path(config.out_dir or HERE / "results" / config.name)
    if config.dry_run:
        print(estimate(config, read_rows(out_dir)))
        return
    rows = run_all(config, out_dir)
    if rows is None:
        return
    selection = [row for row in read_rows(out_dir) if row.get("purpose") == "selection"]
    judged = tables.judge_claims(config, rows, selection)
    summary = tables.summary(config, rows, judged)
    print(summary)
    figures = report.figures(rows, out_dir)
    figures += claims.figures(judged, rows, config.solved_above, out_dir)
    about = [word for word in argv if not word.startswith(("--run", "--out_dir", "--jobs", "--shard"))]
    command = " ".join(["python experiment.py", *about])
    page = report.page(rows, figures, out_dir / "report.html", summary, command)
    print("written:", ", ".join(map(str, [out_dir / "rows.jsonl", *figures, page])))


# ----------------------------------------------------------------------------------------------------------------------
# The list of runs


def runs_of(config: ExperimentConfig, seeds: list[int], rates: list[float], chosen: dict | None = None) -> list[dict]:
    """Every run of the seeds: settings x arms x rates. chosen: {(setting, arm): rate}, instead of rates."""
    runs = []
    for seed in seeds:
        for setting, changes in (config.settings or {None: {}}).items():
            data = config.data | changes.get("data", {})
            base = config.base | {name: value for name, value in changes.items() if name != "data"}
            for arm, keys in config.arms.items():
                if seed in config.seeds and seed not in config.seeds_of.get(arm, [seed]):
                    continue
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
                    runs.append(as_read(run))
    return runs


def selection_runs(config: ExperimentConfig) -> list[dict]:
    """The runs that learning rates are chosen by."""
    runs = runs_of(config, config.selection_seeds, config.learning_rates) if config.selection_seeds else []
    return [r for r in runs if r["arm"] not in config.rate_of and config.rates_at in (None, r.get("setting"))]


def choose_rates(config: ExperimentConfig, rows: list[dict]) -> dict | None:
    """{(setting, arm): the learning rate with the best mean over the selection seeds}; None while rows are missing."""
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


def steps_of(runs: list[dict]) -> int:
    return sum(configurator.build(TrainConfig, run["config"]).max_iters for run in runs)


def parse_shard(shard: str | None) -> tuple[int, int]:
    """i/n -> (i, n), counted from 1. None -> (1, 1)."""
    first, slash, count = (shard or "1/1").partition("/")
    if not (slash and first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise UserError(f"shard={shard!r}: write i/n, from 1/n to n/n")
    return int(first), int(count)


def of_shard(config: ExperimentConfig, runs: list) -> list:
    """This shard's part of a list."""
    first, count = parse_shard(config.shard)
    return runs[first - 1 :: count]


def estimate(config: ExperimentConfig, rows: list[dict]) -> str:
    """Lists the runs that have no row, with their hours: by the rows of the same arm, or else by timing some steps.

    Then what each claim can show. With a shard, its part of the list. Runs whose rate isn't chosen yet are listed at
    the first of the rates.
    """
    chosen = choose_rates(config, rows) if config.selection_seeds else None
    compared = runs_of(config, config.seeds, config.learning_rates[: 1 if config.selection_seeds else None], chosen)
    runs = of_shard(config, selection_runs(config)) + of_shard(config, compared)
    rows_found = [find_row(rows, run) for run in runs]
    waiting = [run for run, row in zip(runs, rows_found, strict=True) if row is None]
    unscored = [row for row in rows_found if row is not None and missing_scores(config, row)]
    jobs, found, lines, total = jobs_of(config, gpus_of(config)), {}, [], 0.0
    for run in waiting:
        kind = run.get("setting"), run["arm"].split(" at ")[0]
        if kind not in found:
            same = [r["seconds"] for r in rows if (r.get("setting"), r["arm"].split(" at ")[0]) == kind]
            found[kind] = statistics.median(same) if same else seconds_by_steps(run, threads_of(jobs))
        lines.append(f"{name_of(run):<60}{found[kind]:>8,.0f} s")
        total += found[kind]
    shard = f" in shard {config.shard}" if config.shard else ""
    hours = f"about {total / 3600 / jobs:.1f} hours, {jobs} at a time"
    hours += f"; {len(unscored)} finished runs lack a score" if unscored else ""
    total = f"{len(waiting)} of {len(runs)} runs{shard} to do: {hours}"
    return "\n".join([*lines, total, *power.lines(config, rows)])


def seconds_by_steps(run: dict, threads: int) -> float:
    """Estimates the seconds of a run that has no row, from five of its steps here and now, on random tokens."""
    keys = configurator.build(TrainConfig, run["config"])
    torch.set_num_threads(threads)
    keep_freed_memory()
    keys.vocab_size = keys.vocab_size or run["data"].get("vocab_size", 256)
    device = pick_device(keys.device)
    model = GPT(keys).to(device)
    optimizers = make_optimizers(model, keys, device)
    slices = run["data"].get("slices", str(run["data"].get("seq_len", keys.block_size)))  # length/pairs, ...
    longest = max(int(part.split("/")[0]) for part in slices.split(","))
    idx = torch.randint(keys.vocab_size, (keys.batch_size, min(longest, keys.block_size)), device=device)
    targets, labels = idx.clone(), run["data"].get("queries") or run["data"].get("pairs")
    if isinstance(labels, int):  # recall: all tokens are read, few are predicted
        targets[:, labels:] = IGNORE

    def step():
        model(idx, targets).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()

    seconds = [seconds_of(step, device) for _ in range(6)]
    return statistics.median(seconds[1:]) * keys.gradient_accumulation_steps * keys.max_iters


def name_of(run: dict) -> str:
    """The folder of a run."""
    rate = f"lr{run['config']['learning_rate']:g}" if "purpose" in run else None
    parts = [run.get("setting"), run["arm"], rate, f"seed{run['seed']}"]
    return "-".join(part for part in parts if part)


# ----------------------------------------------------------------------------------------------------------------------
# Running


def run_all(config: ExperimentConfig, out_dir: Path) -> list[dict] | None:
    """Starts the runs that have no row, and returns the rows of all runs in the order of the list.

    Returns None while another shard still has some of them to do.
    """
    claim_out_dir(config, out_dir)
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
    found = [with_scores(config, row) for run in runs if (row := find_row(rows, run)) is not None]
    if len(found) < len(runs):
        print(f"{len(runs) - len(found)} of {len(runs)} runs have no row yet")
    return found if found and (len(found) == len(runs) or not config.run) else None


def claim_out_dir(config: ExperimentConfig, out_dir: Path) -> None:
    """Marks out_dir as the folder of an experiment. Raises UserError for a folder that is somebody else's."""
    # one without a marker may be of an older version, or results/NAME of a clone: it has our rows
    has_our_rows = any({"arm", "seed", "config", "data", "finite"} <= row.keys() for row in read_rows(out_dir))
    files.claim(out_dir, "experiment", config.overwrite or has_our_rows)


def run_list(config: ExperimentConfig, runs: list[dict], out_dir: Path, title: str) -> list[dict]:
    """Starts this shard's runs that have no row, computes missing scores, and returns all rows that are there then."""
    rows, (first, count) = read_rows(out_dir), parse_shard(config.shard)
    rows_found = [find_row(rows, run) for run in runs]
    lacking = [run for run, row in zip(runs, rows_found, strict=True) if row is None]
    print(f"{title}: {len(runs)} runs, {steps_of(runs):,} steps; {len(runs) - len(lacking)} runs are done already")
    for line in rows_of_other_keys(rows, lacking):
        print(line)
    waiting = [run for run in of_shard(config, runs) if run in lacking]
    waiting += rows_to_score(config, of_shard(config, rows_found), out_dir)
    if waiting and config.run:
        file = out_dir / ("rows.jsonl" if count == 1 else f"rows.{first}-of-{count}.jsonl")
        if file.is_file():
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)  # a kill may have cut the last row short
        with open(file, "a") as rows_file:
            for row in run_side_by_side(config, waiting, out_dir):
                rows_file.write(json.dumps(row, allow_nan=False) + "\n")
                rows_file.flush()
        rows = read_rows(out_dir)
    return rows


def rows_to_score(config: ExperimentConfig, rows: list[dict], out_dir: Path) -> list[dict]:
    """The rows that lack a score and whose checkpoints are still there; the others are named."""
    unscored = [row for row in rows if row is not None and missing_scores(config, row)]
    kept = [row for row in unscored if is_finished(run_of(row), out_dir / name_of(row))]
    if len(kept) < len(unscored):
        names = ", ".join(dict.fromkeys(name for row in unscored for name in missing_scores(config, row)))
        lost = [name_of(row) for row in unscored if row not in kept]
        print(
            f"  {len(lost)} finished runs lack a score ({names}), and their checkpoints are not in {out_dir}: "
            f"{', '.join(lost[:3])}{', ...' if lost[3:] else ''}; to run one again, remove its row"
        )
    if kept and not config.run:
        print(f"  {len(kept)} finished runs lack a score, which --run=true computes")
    return kept


def run_side_by_side(config: ExperimentConfig, waiting: list[dict], out_dir: Path) -> Iterator[dict]:
    """Yields a row whenever a run ends. One bar over all steps, with the losses and the speed of what is running.

    waiting: runs, and rows of finished runs, of which only the scores that they lack are computed.
    A signal stops the runs, each of which saves first.
    """
    gpus = gpus_of(config)
    jobs = jobs_of(config, gpus)
    threads = threads_of(jobs)
    waiting, running, ended_steps = list(waiting), [], 0
    bar = tqdm(
        total=steps_to_do(waiting), desc=config.name, unit="step", smoothing=0.05,
        mininterval=0.5 if sys.stderr.isatty() else 30,
    )  # fmt: skip
    with signals_to(lambda number: sys.exit(128 + number)):
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    taken = [job["gpu"] for job in running]
                    gpu = min(gpus, key=taken.count) if gpus else None
                    running.append(start(config, waiting.pop(0), out_dir, threads, gpu))
                time.sleep(0.2)
                for job in [job for job in running if job["process"].poll() is not None]:
                    if job["process"].returncode == 0 and job["commands"]:
                        job["process"] = start_process(job["commands"].pop(0), job["folder"], threads, job["gpu"])
                        continue
                    running.remove(job)
                    ended_steps += steps_to_do([job["item"]])
                    row = finish(config, job)
                    bar.write(f"{row['arm']}, seed {row['seed']}: {tables.show(config, row)}, {row['seconds']:.0f} s")
                    yield row
                states = [(job["item"], last_row(job["folder"])) for job in running if steps_to_do([job["item"]])]
                bar.n = ended_steps + sum(state["step"] for _, state in states)
                losses = [(f"{run['arm']}/{run['seed']}", state["loss"]) for run, state in states if "loss" in state]
                shown = {name: f"{loss:.3f}" for name, loss in losses}
                speed = sum(state.get("tokens_per_second", 0) for _, state in states)
                bar.set_postfix(shown | {"tok_s": f"{speed:,.0f}"}, refresh=False)
                bar.update(0)
        finally:
            for job in running:
                job["process"].terminate()
            for job in running:
                job["process"].wait()
            bar.close()


def gpus_of(config: ExperimentConfig) -> list[str]:
    """The names by which CUDA_VISIBLE_DEVICES knows the GPUs of this machine; none where the runs are on the CPU."""
    if pick_device(config.base.get("device", "auto")) != "cuda":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def jobs_of(config: ExperimentConfig, gpus: list[str]) -> int:
    """How many runs go on at a time."""
    rates = 1 if config.selection_seeds else len(config.learning_rates) or 1
    count = len(config.arms) * (len(config.settings) or 1) * len(config.seeds) * rates
    return min(config.jobs or len(gpus) or usable_cores(), count)


def threads_of(jobs: int) -> int:
    """CPU threads of each run: the same for the first and for the last that is left, for results may depend on them."""
    return max(1, usable_cores() // jobs)


def steps_to_do(waiting: list[dict]) -> int:
    """The steps of the runs; a row that only lacks a score has none left."""
    return steps_of([item for item in waiting if "finite" not in item])


def start(config: ExperimentConfig, item: dict, out_dir: Path, threads: int, gpu: str | None) -> dict:
    """Starts train.py for a run, and evaluate.py after it for each score; for a row only the scores that it lacks."""
    run, is_finished_run = run_of(item), "finite" in item
    folder, commands = out_dir / name_of(run), []
    changes_data = "data" in config.settings.get(run.get("setting"), {})
    data = prepare(config, run["data"], run["seed"], out_dir / "data" / (run["setting"] if changes_data else ""))
    if not is_finished_run:
        make_room(run, folder)
        files.claim(folder, "run", overwrite=is_of(run, folder))  # an older version left no marker
        keys = run["config"] | {"dataset": str(data), "out_dir": str(folder), "threads": threads, "init_from": "auto"}
        write_text(folder / "run.json", json.dumps(run))
        (folder / "log.txt").unlink(missing_ok=True)
        commands.append(["train.py", keys])
    names = missing_scores(config, item if is_finished_run else run | {"finite": True})
    if names and config.score_data:
        data = prepare(config, as_read(config.score_data), run["seed"], out_dir / "score_data")
    about = {"checkpoint": str(folder / "ckpt.pt"), "dataset": str(data), "device": run["config"].get("device", "auto")}
    for name in names:
        out = {"out": str(folder / f"score_{name}.json")}
        commands.append(["evaluate.py", about | config.scores[name] | out])
    process = start_process(commands.pop(0), folder, threads, gpu)
    return {
        "item": item, "folder": folder, "gpu": gpu, "process": process, "commands": commands, "started": time.time()
    }  # fmt: skip


def make_room(run: dict, folder: Path) -> None:
    """Makes the folder of a run. One that holds another run is moved aside: no checkpoint is lost to an edit."""
    if any((folder / name).is_file() for name in ("ckpt.pt", "metrics.jsonl")) and not is_of(run, folder):
        lock(folder).close()  # UserError while that run is at work
        places = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
        aside = folder.rename(next(place for place in places if not place.exists()))
        tqdm.write(f"{folder} holds a run of other keys: it is now {aside.name}, and may be removed")
    folder.mkdir(parents=True, exist_ok=True)


def is_of(run: dict, folder: Path) -> bool:
    """Whether the folder is of this very run, and not of what the experiment was before an edit."""
    file = folder / "run.json"
    return file.is_file() and run_of(json.loads(file.read_text())) == run


def is_finished(run: dict, folder: Path) -> bool:
    """Whether the folder has the checkpoint of the end of this very run."""
    return is_of(run, folder) and (folder / "ckpt.pt").is_file() and last_row(folder).get("event") == "end"


def prepare_config(config: ExperimentConfig) -> type:
    """The keys of data/*/prepare.py, a dataclass."""
    return importlib.import_module(f"data.{config.prepare}.prepare").Config


def prepare(config, keys, seed, place):
    """The folder of the data that data/*/prepare.py makes of these keys, made now unless it is there.

    The data have the run's seed, unless the keys name another; where the script has none, all seeds share the data.
    """
    folder = place / "all"
    if "seed" in {field.name for field in dataclasses.fields(prepare_config(config))} - keys.keys():
        keys, folder = keys | {"seed": seed}, place / f"seed{seed}"
    if is_prepared(keys, folder):
        return folder
    # shards that start together need the same data; the lock lies beside the folder, which is the data set's alone
    lock_folder = place / f".{folder.name}"
    lock_folder.mkdir(parents=True, exist_ok=True)
    with lock(lock_folder, wait=True):
        if not is_prepared(keys, folder):
            (folder / "prepared.json").unlink(missing_ok=True)
            script = HERE / "data" / config.prepare / "prepare.py"
            command = [sys.executable, script, f"--config_override={json.dumps(keys | {'out_dir': str(folder)})}"]
            prepared = subprocess.run(command, capture_output=True, text=True)
            if prepared.returncode:
                raise UserError(f"data/{config.prepare}/prepare.py failed: {prepared.stderr.strip()}")
            write_text(folder / "prepared.json", json.dumps(keys))
    return folder


def is_prepared(keys: dict, folder: Path) -> bool:
    file = folder / "prepared.json"
    return file.is_file() and json.loads(file.read_text()) == keys and (folder / "meta.json").is_file()


def start_process(command, folder: Path, threads: int, gpu: str | None) -> subprocess.Popen:
    script, keys = command
    environment = {"OMP_NUM_THREADS": str(threads)} | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    with open(folder / "log.txt", "a") as log:
        return subprocess.Popen(
            [sys.executable, HERE / script, f"--config_override={json.dumps(keys)}"],
            stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment,
            start_new_session=True,  # a terminal's Ctrl-C is for this process, which then asks each run once
        )  # fmt: skip


def last_row(folder: Path) -> dict:
    rows = read_jsonl(folder / "metrics.jsonl")
    return rows[-1] if rows else {"step": 0}


def finish(config: ExperimentConfig, job: dict) -> dict:
    """The row of a run that has ended. Divergence gives a row; a crash raises UserError."""
    item, folder, status = job["item"], job["folder"], job["process"].returncode
    metrics = read_jsonl(folder / "metrics.jsonl")
    evaluations = [row for row in metrics if row["event"] == "eval"]
    was_stopped = status == 1 and metrics[-1:] and metrics[-1]["event"] == "stopped"  # status 1 is any exception's, too
    if status and not was_stopped or not evaluations:
        tail = (folder / "log.txt").read_text().strip().splitlines()[-1:]
        raise UserError(f"{folder.name} ended with status {status}: {' '.join(tail)} (all of it: {folder / 'log.txt'})")
    if "finite" in item:
        return scored(config, item, folder)
    about = json.loads((folder / "config.json").read_text())
    speeds = [row["tokens_per_second"] for row in metrics if row["event"] == "train"]
    speed = statistics.median(speeds) if speeds else math.nan
    row = item | {
        "finite": status == 0,
        "accuracy": evaluations[-1]["accuracy"] if status == 0 else math.nan,
        "val_loss": evaluations[-1]["val_loss"] if status == 0 else math.nan,
        "metric": config.metric,
        "curve": [[row["step"], row[config.metric]] for row in evaluations],
        "meters": evaluations[-1].get("meters", {}),
        "sinks": sink_curve(evaluations),
        "tokens_per_second": speed,
        "step_ms": 1000 * about["tokens_per_step"] / speed,
        "scores": {},
        "seconds": time.time() - job["started"],
        **{name: about[name] for name in ("n_params", "flops_per_token", "state_bytes")},
        **{name: about.get(name) for name in ("dtype", "device", "threads", "code_sha256")},
        **{name: about[name] for name in ("git_commit", "git_dirty", "versions")},
    }
    return nan_to_none(scored(config, row, folder))


def sink_curve(evaluations: list[dict]) -> list[dict]:
    """The meters of each kind of query at each evaluation, for the figures; empty if the data set names no kinds."""
    names = ("share", "effective", "gate_mean", "loss")
    return [
        {"step": row["step"], "value_norm": row["meters"]["value_norm"]}
        | {kind: {name: found[name] for name in names} for kind, found in row["meters"]["kinds"].items()}
        for row in evaluations
        if row.get("meters", {}).get("kinds")
    ]


def scored(config: ExperimentConfig, row: dict, folder: Path) -> dict:
    """The row with the scores that it lacked, which evaluate.py has written by now."""
    names, data = missing_scores(config, row), as_read(config.score_data)
    is_same_data = row.get("score_data", {}) == data
    wanted = {name: as_read(config.scores[name]) for name in names}
    found = {name: read_score(folder / f"score_{name}.json") for name in names}
    return row | {
        "scored": (row.get("scored", {}) if is_same_data else {}) | wanted,
        "score_data": data,
        "scores": (row["scores"] if is_same_data else {}) | found,
        "ended": time.time(),  # where a run has two rows, the later one counts
    }


def read_score(file: Path) -> dict:
    """What evaluate.py wrote, without the path of this machine's checkpoint."""
    return {name: value for name, value in json.loads(file.read_text()).items() if name != "checkpoint"}


def nan_to_none(value: object):
    """What JSON can hold, at any depth."""
    if isinstance(value, dict):
        return {name: nan_to_none(item) for name, item in value.items()}
    if isinstance(value, list):
        return [nan_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    configurator.run(main)
