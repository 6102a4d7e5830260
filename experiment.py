"""Runs train.py many times, paired by seed, and reports what came of it:

    python experiment.py config/experiments/minimum.py
    python experiment.py config/experiments/minimum.py --out_dir=out/minimum --jobs=4
    python experiment.py config/experiments/text.py --dry_run=true        prints the list and its estimated hours
    python experiment.py CONFIG --out_dir=SHARED                            again, here or elsewhere: another worker
    python experiment.py config/experiments/text.py --run=false           shows the rows that are there

An experiment is a config file: arms x settings x seeds, the keys of train.py that all runs share (base), the data, how
a finished run is scored besides (scores), and what is claimed. All arms of a seed see the same data in the same order,
and start from the same weights where they share them. With selection_seeds each arm's learning rate is chosen on those,
and the seeds are run at that one (study/plan.py).

Runs go on side by side, one process each. out_dir gets rows.jsonl (one object per finished run), the figures,
report.html and a folder per run; started again, it keeps the rows it has, continues the runs that were stopped, and
computes the scores that a finished run lacks. A folder that holds a run of other keys is moved aside; an out_dir that
is none of an experiment is refused before anything is written. Any number of these calls may share an out_dir, on one
machine or on several (study/runner.py). SIGTERM, Ctrl-C, SIGHUP (a closed terminal) and SIGUSR1 stop the runs, each of
which saves first; the status is then 128 and the signal's number.

base and data given on the command line, or beside an include, are added to those of the file: --base='{"n_layer": 4}'
changes one key. Every other key takes the place of the file's.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P leaves it out

import configurator
from configurator import UserError, key, show

import ast
import contextlib
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from evaluate import EvaluateConfig
from model import GPT
from ops import IGNORE
from rules import wrong_field
from runs.hardware import autocast, keep_freed_memory, pick_device, pick_dtype, seconds_of
from runs.outdir import write_text
from study import claims, curves, power, ranks, rates, report, tables
from study.arms import NAMES, WEIGHTS, all_arms, all_claims, arms_named, check_named, with_base
from study.plan import Plan, choose_rates, name_of, runs_of, steps_of, unknown_runs
from study.rows import arm_of, read_rows, text_of
from study.runner import gpus_of, jobs_of, lock, run_all, script_of, threads_of
from train import TrainConfig, make_optimizers

HERE = Path(__file__).resolve().parent
# the verdict needs all of them, or none is given
RULE = ("baseline", "treatment", "success_above", "success_below", "failure_within")
# keys of train.py and evaluate.py that the experiment sets: they say where files are read and written
OURS = {"train.py": ("out_dir", "dataset", "init_from", "overwrite"), "evaluate.py": ("out", "checkpoint")}
NUMBER = (float, -1e9, 1e9)
# what each entry of a dict in the config holds, as rules of rules.wrong_field
ENTRIES: dict = {
    "variants": {"mixers?": NAMES}, "settings": {"data?": (dict, 0, 999)}, "seeds_of": [(int, 0, 1 << 60), 1, 999],
    "rate_of": (str, 1, 99), "scores_of": NAMES, "ranks": WEIGHTS,
    "claims": {
        "contrast": (dict, 1, 999), "above?": NUMBER, "other_than?": NUMBER, "within?": (float, 1e-9, 1e9),
        "of?": [object, 1, 9], "sides?": (int, 1, 2), "in?": (int, 1, 999), "family?": (str, 1, 99),
        "exploratory?": (bool, 0, 1), "pool?": object, "each?": NAMES,
    },
}  # fmt: skip


@dataclass
class ExperimentConfig:
    elsewhere = dict.fromkeys(
        ("dataset", "n_layer", "max_iters", "gate"),
        "this config is of train.py, and an experiment has such keys in base",
    )
    name: str = key("experiment", "what it is called")
    base: dict = key({}, "keys of train.py that every run has; a later base is added to it", merge=True)
    arms: dict = key(
        {},
        "{name of the arm: its keys of train.py}; init_from_arm: an arm whose weights, at the end of its run of "
        "the same seed and setting, it starts from",
    )
    mixers: list[str] = key([], 'with variants: every mixer in every variant is an arm, as "gla" and "gla sigmoid"')
    variants: dict = key(
        {},
        '{variant: its keys of train.py}; "none" is named as the mixer alone; "mixers": the only ones that have it; '
        "an arm of the same name in arms adds keys. seeds_of, first_arms and scores_of may name a variant",
    )
    settings: dict = key({}, '{name: keys of train.py, and under "data" of the prepare script}: all arms in each')
    seeds: list[int] = key([0], "one run of every arm each; it seeds the data, too, unless data has a seed", at_least=0)
    seeds_of: dict = key({}, "{arm: the only ones of the seeds that it is run with}")
    first_arms: list[str] = key([], "arms whose runs of all seeds go before those of the others, if hours are short")
    learning_rates: list[float] = key([], "with selection_seeds: to choose from; without: all are run", above=0)
    selection_seeds: list[int] = key([], "seeds that the learning rates are chosen on, and nothing else", at_least=0)
    rate_of: dict = key({}, "{arm: the arm whose chosen rate it takes, untried itself}")
    select_by: str = key(
        "auc",
        "auc: area under the curve; last: its last value",
        choices=("auc", "last"),
    )
    selection_iters: list[int] = key(
        [],
        "steps of the short runs and of those at the best two rates (empty: max_iters / 4, max_iters), or of all runs",
        at_least=1,
    )
    selection_base: dict = key({}, "keys of train.py of these runs alone, such as what they need not measure")
    pool_rates: bool = key(
        False, "true: a mixer's arms share the rate best for their mean, but for one that is better by a standard error"
    )
    widen_rates: bool = key(True, "a choice at the edge of the rates tries the next one beyond (false: it does not)")
    prepare: str = key("mqar", "which data/*/prepare.py makes the data")
    data: dict = key({}, "keys of that script; a later data is added to it", merge=True)
    metric: str = key("accuracy", "what the table and the curves show", choices=("accuracy", "val_loss"))
    scores: dict = key({}, "{name: keys of evaluate.py}: how each finished run is scored besides")
    scores_of: dict = key({}, "{score: the only arms that are scored so}")
    baseline: str | None = key(None, "the arm that the verdict compares with (None: no verdict, of accuracy alone)")
    treatment: str | None = key(None, "the arm that the verdict is about; it needs the three keys below, too")
    success_above: float | None = key(None, "success: the treatment's accuracy is above this in every seed")
    success_below: float | None = key(None, "... and the baseline's below this")
    failure_within: float | None = key(
        None, "failure: the mean accuracies are no further apart than this, or a run is not finite"
    )
    solved_above: float | None = key(None, "a run with a higher accuracy has solved the task; the table counts them")
    claim_base: dict = key({}, "keys of every claim, unless it has others in their place")
    claims: dict = key(
        {},
        '{claim: {"contrast": {arm: weight} or {setting: {arm: weight}}, "above": threshold}}, judged by study/stats; '
        '"other_than": in place of above, for a change in either direction; "of": the keys that lead to another number '
        'of the rows than the metric; "sides": 1 for a one-sided test; "in": n for a count, passed if n seeds are '
        'above the threshold; "within": half of a band around zero that counts as no effect; "family": a name for the '
        'question; "exploratory": true; "pool": mixers, for a contrast of variants; "each": a claim in each of them '
        "(study/arms.py)",
    )
    ranks: dict = key(
        {}, "{name: {arm: its published gain}}: Spearman's correlation of the arms' metric with it (study/ranks.py)"
    )
    exploratory: bool = key(False, "true: no claim was declared with the power to be shown; their words say so")
    pilot: str | None = key(None, "--dry_run: a folder of rows whose spread says what claims can show", is_path=True)
    pair_spread: float | None = key(
        None, "--dry_run without rows: the standard deviation of a difference of two arms, which is assumed", above=0
    )
    run: bool = key(True, "false: no run is started, the rows that are there are shown")
    dry_run: bool = key(False, "show the list and its estimated hours, and do nothing")
    out_dir: str | None = key(
        None, "where rows, figure and runs go (None: results/NAME); several workers may share it", is_path=True
    )
    overwrite: bool = key(False, "true: take an out_dir that holds files which are none of an experiment")
    jobs: int = key(0, "runs at a time (0: as many as the GPUs, or the cores, can hold)", at_least=0)
    processes_per_run: int = key(
        1, "processes, of a GPU each, that share the micro-steps of a run, under torchrun", at_least=1
    )
    gpus: int = key(0, "--dry_run: plan for so many GPUs (0: those of this machine)", at_least=0, at_most=1_000_000)
    gpu_flops: float | None = key(
        None, "--dry_run without a GPU: FLOPs a second that one is assumed to reach, which gives GPU-hours", above=0
    )

    def __post_init__(self):
        configurator.check(self)
        for kind in ("arms", "variants", "settings", "scores"):
            for name, keys in getattr(self, kind).items():
                check_keys(f"{kind}: {name}", keys, "evaluate.py" if kind == "scores" else "train.py")
        if (wrong := wrong_field(self.claims, {str: (dict, 1, 99)}, "claims")) is not None:
            raise UserError(wrong)
        self.claims = {name: with_base(self.claim_base, claim) for name, claim in self.claims.items()}
        self.claim_base = {}
        for kind, rule in ENTRIES.items():
            for name, entry in getattr(self, kind).items():
                if wrong := wrong_field(entry, rule):
                    raise UserError(f"{kind}: {name}: {wrong}")
        self.arms, self.claims = all_arms(self), all_claims(self)
        if not self.arms:
            raise UserError(
                'arms={}: there is nothing to run; name a file of config/experiments/, or add arms = {"none": {}, ...}'
            )
        if not self.seeds:
            raise UserError("seeds=[]: there is nothing to run; add one at least, as in seeds = [0, 1, 2]")
        for kind in ("name", "arms", "settings", "scores"):
            check_names(kind, [self.name] if kind == "name" else getattr(self, kind))
        self.check_verdict()
        check_keys("base", self.base, "train.py")
        check_keys("selection_base", self.selection_base, "train.py")
        configurator.build(TrainConfig, self.selection_base, source="selection_base")
        for name, keys in self.scores.items():
            configurator.build(EvaluateConfig, keys, source=f"score {name!r}")
        scripts = sorted(file.parent.name for file in (HERE / "data").glob("*/prepare.py"))
        configurator.check_choice("prepare", self.prepare, scripts)
        self.seeds_of = {arm: seeds for name, seeds in self.seeds_of.items() for arm in arms_named(self, [name])}
        self.first_arms = arms_named(self, self.first_arms)
        self.scores_of = {score: arms_named(self, arms) for score, arms in self.scores_of.items()}
        self.check_names_of_arms()
        self.check_rates()
        self.check_runs()
        for name, claim in self.claims.items():
            self.check_claim(name, claim)
        power.check_reach(self)
        if self.gpus and not self.dry_run:
            raise UserError(f"gpus={self.gpus}: is for --dry_run=true; CUDA_VISIBLE_DEVICES says which GPUs are used")

    def check_names_of_arms(self) -> None:
        """Raises UserError where a dict names an arm or a score that the experiment does not have."""
        choosing = [arm for arm in self.arms if arm not in self.rate_of]
        named = [
            ("seeds_of", self.seeds_of, self.arms),
            ("first_arms", self.first_arms, self.arms),
            *((f"scores_of: {score}", arms, self.arms) for score, arms in self.scores_of.items()),
            ("rate_of", self.rate_of, self.arms),
            *((f"rate_of: {arm}", [other], choosing) for arm, other in self.rate_of.items()),
            *((f"ranks: {name}", order, self.arms) for name, order in self.ranks.items()),
        ]
        for score in self.scores_of:
            check_named("scores_of", score, self.scores, "scores")
        for label, names, arms in named:
            for name in names:
                check_named(label, name, arms, "arms")
        for name, order in self.ranks.items():
            if len(set(order.values())) < 2 or len(order) < 3:
                raise UserError(f"ranks: {name}: an order is of three arms or more, and not all gains may be equal")
        from_scratch = [name for name, keys in self.arms.items() if "init_from_arm" not in keys]
        for arm, other in [(arm, keys["init_from_arm"]) for arm, keys in self.arms.items() if arm not in from_scratch]:
            check_named(f"arms: {arm}: init_from_arm", other, from_scratch, "arms that start from scratch")
            if self.learning_rates:
                raise UserError(f"arms: {arm}: init_from_arm: give learning_rate in base and arms, not learning_rates")
            if lacking := set(self.seeds_of.get(arm, self.seeds)) - set(self.seeds_of.get(other, self.seeds)):
                raise UserError(f"seeds_of: {other}: {arm!r} starts from it, and needs its seed {min(lacking)}, too")

    def check_rates(self) -> None:
        """Raises UserError for keys of the learning rates that contradict each other."""
        rates, seeds = self.learning_rates, self.selection_seeds
        has_short_runs = len(rates) > 2 and len(self.selection_iters) != 1
        for is_wrong, words in [
            (self.rate_of and not seeds, "rate_of: without selection_seeds no rate is chosen"),
            (seeds and not rates, "selection_seeds: there are no learning_rates to choose from"),
            (len(set(seeds)) < len(seeds), f"selection_seeds={seeds}: names a seed twice"),
            (set(seeds) & set(self.seeds), f"selection_seeds={seeds}: the comparison uses some of them, too"),
            (
                rates and not seeds and self.metric != "val_loss",
                f"metric={self.metric!r}: with learning_rates it must be val_loss, which tells divergence",
            ),
            (
                self.pool_rates and has_short_runs,
                "pool_rates=True: arms compare all rates in runs of one length: give selection_iters one number, as in "
                "selection_iters = [300], or leave pool_rates out",
            ),
        ]:
            if is_wrong:
                raise UserError(words)

    def check_runs(self) -> None:
        """Raises UserError for a wrong key of any run, before the first one; and where two would share a folder."""
        folders: dict[str, dict] = {}
        for run in runs_of(self, self.seeds, []):
            other = folders.setdefault(name_of(run), run)
            if other is not run:  # setting "a" with arm "b-c", and "a-b" with "c"
                raise UserError(
                    f"settings, arms: {other.get('setting')!r} with {other['arm']!r} and {run.get('setting')!r} with "
                    f"{run['arm']!r} would share the folder {name_of(run)}; rename one of them"
                )
        each_arm = {(run.get("setting"), run["arm"]): run for run in runs_of(self, self.seeds, self.learning_rates[:1])}
        for run in each_arm.values():
            arm, keys = run["arm"], configurator.build(TrainConfig, run["config"], source=f"arm {run['arm']!r}")
            if keys.dtype == "auto":
                raise UserError(
                    f"arm {arm!r}: dtype=auto is timed anew in each run, so that paired runs may differ: "
                    'add "dtype": "float32", or bfloat16, to base'
                )
            if keys.gradient_accumulation_steps % self.processes_per_run:
                raise UserError(
                    f"arm {arm!r}: gradient_accumulation_steps={keys.gradient_accumulation_steps}: must be a "
                    f"multiple of processes_per_run={self.processes_per_run}, which share the micro-steps"
                )
            steps = [] if arm in self.rate_of else self.selection_iters
            if steps and not (len(steps) < 3 and sorted(set(steps)) == steps and steps[-1] <= keys.max_iters):
                raise UserError(
                    f"selection_iters={steps}: must be one number, or two with the smaller one first, and none over "
                    f"max_iters={keys.max_iters} of arm {arm!r}"
                )
            configurator.build(script_of(self.prepare).Config, run["data"], source="data")

    def check_claim(self, name: str, claim: dict) -> None:
        """Raises UserError for a claim whose parts contradict each other, or that names what the experiment lacks."""
        known = [key.rstrip("?") for key in ENTRIES["claims"]]
        if unknown := set(claim) - set(known):
            configurator.check_choice(f"claims: {name}", min(unknown, key=str), known)
        path = claim.get("of", [self.metric])
        metric = path[0] if type(path[0]) is str else None
        kinds = [int, float] if metric in curves.METRICS else [str]
        is_across = claims.is_across_settings(claim)
        contrasts = list(claim["contrast"].values()) if is_across else [claim["contrast"]]
        for is_wrong, words in [
            (not {"above", "other_than", "within"} & set(claim), "must have above, other_than or within"),
            (
                "other_than" in claim and {"above", "sides"} & set(claim),
                "other_than is a threshold with two sides: it needs no above and no sides",
            ),
            (
                "in" in claim and ("above" not in claim or {"sides", "within", "family"} & set(claim)),
                "a count (in) needs above, and has no sides, within or family: it is no test",
            ),
            (
                metric is None or any(type(part) not in kinds for part in path[1:]),
                f"of={show(path)}: must be names; log_steps and lost take a number",
            ),
            (
                metric in curves.METRICS and len(path) != 2,
                f"of={show(path)}: must be like {show([metric, 0.9])}",
            ),
            (path == ["log"], f"of={show(path)}: must be like {show(['log', 'val_loss'])}"),
            *((wrong, wrong) for wrong in (wrong_field(weights, WEIGHTS) for weights in contrasts)),
        ]:
            if is_wrong:
                raise UserError(f"claims: {name}: {words}")
        for setting in claim["contrast"] if is_across else []:
            check_named(f"claims: {name}: setting", setting, self.settings, "settings")
        for arm in (arm for weights in contrasts for arm in weights):
            check_named(f"claims: {name}", arm, self.arms, "arms")
        for weights in claims.contrasts_of(self, claim).values():
            if claim.get("in", 0) > len(claims.seeds_of_claim(self, weights)):
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
        for name in ("baseline", "treatment") if not lacking else ():
            check_named(name, getattr(self, name), self.arms, "arms")


def check_names(kind: str, names: Iterable[str]) -> None:
    """Raises UserError for a name that cannot be a file name: runs' folders and scores' files in out_dir bear these."""
    for name in names:
        is_text = isinstance(name, str) and name.isprintable() and bool(name.strip())
        if not is_text or name[0] == "." or {"/", "\\"} & set(name) or len(name.encode()) > 80:
            raise UserError(
                f"{kind}: {show(name)}: names are file names: a text of 1 to 80 bytes, without slashes and line ends, "
                "that begins with no dot"
            )


def check_keys(label: str, keys: object, script: str) -> None:
    """Raises UserError for anything but a dict of keys, and for a key that the experiment itself sets."""
    if not isinstance(keys, dict):
        raise UserError(f"{label}={show(keys)}: must be a dict of keys of {script}")
    if taken := [key for key in OURS[script] if key in keys]:
        raise UserError(f"{label}: {taken[0]}: the experiment sets it, so that its files stay in out_dir; leave it out")


def main(argv: list[str]) -> None:
    config = configurator.load(ExperimentConfig, argv, program="experiment.py", description=__doc__)
    out_dir = Path(config.out_dir or HERE / "results" / config.name)
    if config.dry_run:
        print(estimate(config, read_rows(out_dir)))
        return
    rows = run_all(config, out_dir)
    if rows is None:
        return
    choices = choose_rates(config, read_rows(out_dir))
    judged = claims.judge_claims(config, rows, choices)
    of_rates = rates.table(config, choices)
    print(tables.summary(config, rows, judged) + (f"\n{of_rates}\n" if of_rates else ""))
    words = [word for word in argv if not word.startswith(("--run", "--out_dir", "--jobs"))]
    # workers end at the same time
    with lock(out_dir, "report", wait=math.inf) if config.run else contextlib.nullcontext():
        figures = report.figures(rows, out_dir) + report.figures_of_claims(config, rows, judged, choices, out_dir)
        records, orders = list(map(claims.record, judged)), ranks.records(config, rows)
        if records or orders:
            kept = {"claims": records} | ({"ranks": orders} if orders else {})
            write_text(out_dir / "claims.json", json.dumps(kept, indent=1) + "\n")
        else:
            (out_dir / "claims.json").unlink(missing_ok=True)
        shown = [claims.claims_table(judged), *figures, *tables.parts(config, rows), *([of_rates] if of_rates else [])]
        command = " ".join(["python experiment.py", *words])
        page = report.write_page(out_dir / "report.html", shown, about_of(argv), command)
        for name in report.DRAWN - {figure.name for figure in figures}:  # of claims and arms that are gone
            (out_dir / name).unlink(missing_ok=True)
    print("written:", ", ".join(map(str, [out_dir / "rows.jsonl", *figures, page])))


def about_of(argv: list[str]) -> str:
    """The docstring of the config file, which states the hypothesis; empty if no file is given."""
    file = next((word for word in argv if word.endswith(".py") and not word.startswith("--")), None)
    return "" if file is None else ast.get_docstring(ast.parse(Path(file).read_text())) or ""


# ----------------------------------------------------------------------------------------------------------------------
# What is left to do


def estimate(config: ExperimentConfig, rows: list[dict]) -> str:
    """Lists the runs that have no row, with their hours: by the rows of the same arm, or else by timing some steps.

    Then what each claim can show. Runs whose rate isn't chosen yet are listed at one of the rates.
    """
    plan, each = Plan(config, rows), config.processes_per_run
    later = unknown_runs(config, plan.choices)
    waiting = [run for run in plan.runs + later if text_of(run) not in plan.rows]
    is_assumed = config.gpu_flops is not None and not torch.cuda.is_available()
    gpus = ["assumed"] if is_assumed and not config.gpus else gpus_of(config)
    jobs, lines, total = jobs_of(config, gpus), [], 0.0
    of_step: dict[tuple, float] = {}  # seconds, by setting and arm
    for run in waiting:
        kind = run.get("setting"), arm_of(config, run)
        if kind not in of_step:
            # micro-steps that other numbers of processes share are taken to take as long
            measured = [
                row["seconds"] * row.get("processes", 1) / each / (row.get("last_step") or steps_of([row]))
                for row in rows
                if (row.get("setting"), arm_of(config, row)) == kind
            ]
            if not measured and is_assumed:
                measured = [seconds_by_flops(run, config.gpu_flops) / each]
            of_step[kind] = statistics.median(measured or [seconds_by_steps(run, threads_of(config, jobs)) / each])
        seconds = of_step[kind] * steps_of([run])
        lines.append(f"{name_of(run):<60}{seconds:>8,.0f} s")
        total += seconds
    hours = f"about {total / 3600 / jobs:.1f} hours, {jobs} at a time"
    hours += f", {each} {'GPUs' if gpus else 'processes'} each" if each > 1 else ""
    hours += f" ({total * each / 3600:.1f} GPU-hours, {len(gpus) * each} GPUs)" if gpus else ""
    hours += f", assuming {config.gpu_flops:.2g} FLOPs a second, which is not measured" if is_assumed else ""
    hours += f"; {len(plan.unscored)} finished runs lack a score" if plan.unscored else ""
    lines.append(f"{len(waiting)} of {len(plan.runs + later)} runs to do: {hours}")
    return "\n".join([*lines, *power.lines(config, rows), *ranks.lines(config)])


def keys_and_length(run: dict) -> tuple[TrainConfig, int]:
    """The keys of a run, with the number of token ids that its data will have, and the longest row of a step."""
    keys = configurator.build(TrainConfig, run["config"])
    keys.vocab_size = keys.vocab_size or run["data"].get("vocab_size", 256)
    slices = run["data"].get("slices", str(run["data"].get("seq_len", keys.block_size)))  # length/pairs, ...
    longest = max(int(part.split("/")[0]) for part in slices.split(","))
    return keys, min(longest, keys.block_size)


def seconds_by_flops(run: dict, flops: float) -> float:
    """The seconds that a step takes at so many FLOPs a second; training costs three times the forward pass."""
    keys, length = keys_and_length(run)
    with torch.device("meta"):
        of_token = GPT(keys).flops_per_token()
    return 3 * of_token * keys.batch_size * keys.gradient_accumulation_steps * length / flops


def seconds_by_steps(run: dict, threads: int) -> float:
    """Estimates the seconds that a step of a run takes, from five of them here and now, on random tokens."""
    keys, length = keys_and_length(run)
    torch.set_num_threads(threads)
    keep_freed_memory()
    device = pick_device(keys.device)
    dtype, model = pick_dtype(keys.dtype, device), GPT(keys).to(device)
    optimizers = make_optimizers(model, keys, device)
    idx = torch.randint(keys.vocab_size, (keys.batch_size, length), device=device)
    targets, labels = idx.clone(), run["data"].get("queries") or run["data"].get("pairs")
    if isinstance(labels, int):  # recall: all tokens are read, few are predicted
        targets[:, labels:] = IGNORE

    def step():
        with autocast(device, dtype):
            loss = model(idx, targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()

    seconds = [seconds_of(step, device) for _ in range(6)]
    return statistics.median(seconds[1:]) * keys.gradient_accumulation_steps


if __name__ == "__main__":
    configurator.run(main)
