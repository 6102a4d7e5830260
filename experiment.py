"""Runs train.py many times, paired by seed, and reports what came of it:

    python experiment.py config/experiments/sink_demo.py --out_dir=out/sink --jobs=4
    python experiment.py config/experiments/recall.py --dry_run=true      prints the list
    python experiment.py CONFIG --out_dir=SHARED                            again, here or elsewhere: another worker
    python experiment.py config/experiments/recall.py --run=false         shows the rows that are there

An experiment is a config file: arms x seeds, the keys of train.py that all runs share (base), the
data, how a finished run is scored besides (scores), and what is claimed. All arms of a seed see the
same data in the same order, and start from the same weights where they share them. With
selection_seeds each arm's learning rate is chosen on those, and the seeds are run at that one
(study/plan.py).

out_dir gets rows.jsonl (one object per finished run), the figures, report.html and a folder per
run; started again, it keeps the rows it has, continues the runs that were stopped, and computes the
scores that a finished run lacks. SIGTERM, Ctrl-C, SIGHUP and SIGUSR1 stop the runs, each of which
saves first; the status is then 128 and the signal's number.

base and data given on the command line, or beside an include, are added to those of the file:
--base='{"n_layer": 4}' changes one key. Every other key takes the place of the file's.
"""

from dataclasses import dataclass

import configurator
from configurator import key


@dataclass
class ExperimentConfig:
    name: str = key("experiment", "what it is called")
    base: dict = key(
        {}, "keys of train.py that every run has; a later base is added to it", merge=True
    )
    arms: dict = key({}, "{arm: its keys of train.py}")
    mixers: list[str] = key(
        [], 'with variants: every mixer in every variant is an arm, as "gla" and "gla sigmoid"'
    )
    variants: dict = key(
        {}, '{variant: its keys of train.py; "mixers": the only ones that have it}; none: the mixer'
    )
    seeds: list[int] = key(
        [0], "one run of every arm each; it seeds the data, too, unless data has a seed", at_least=0
    )
    seeds_of: dict = key({}, "{arm: the only ones of the seeds that it is run with}")
    branches: dict = key(
        {},
        '{arm: {"of": another arm, "at": step}}: it goes on from the checkpoint that this one keeps there',
    )
    first_arms: list[str] = key(
        [], "arms whose runs of all seeds go before those of the others, if hours are short"
    )
    learning_rates: list[float] = key([], "to choose from, on selection_seeds", above=0)
    selection_seeds: list[int] = key(
        [], "seeds that the learning rates are chosen on, and nothing else", at_least=0
    )
    rate_of: dict = key({}, "{arm: the arm whose chosen rate it takes, untried itself}")
    select_by: str = key(
        "auc", "auc: area under the curve; last: its last value", choices=("auc", "last")
    )
    selection_iters: int = key(
        0, "their steps, with a schedule of their own (0: max_iters)", at_least=0
    )
    selection_base: dict = key(
        {}, "keys of train.py of these runs alone, such as what they need not measure"
    )
    pool_rates: bool = key(
        False, "true: a mixer's arms share their mean's best rate, but for a clearly better one"
    )
    rate_noise: str = key(
        "pooled",
        "pooled: of all runs of a mixer that choose rates; pairs: of each two rates",
        choices=("pooled", "pairs"),
    )
    widen_rates: bool = key(
        True, "a choice at the edge of the rates tries the next one beyond (false: it does not)"
    )
    prepare: str = key("mqar", "which data/*/prepare.py makes the data")
    data: dict = key({}, "keys of that script; a later data is added to it", merge=True)
    metric: str = key(
        "accuracy", "what the table and the curves show", choices=("accuracy", "val_loss")
    )
    scores: dict = key({}, "{name: keys of evaluate.py}: how each finished run is scored besides")
    scores_of: dict = key({}, "{score: the only arms that are scored so}")
    solved_above: float | None = key(
        None, "a run with a higher accuracy has solved the task; the table counts them"
    )
    claim_base: dict = key({}, "keys of every claim, unless it has others in their place")
    claims: dict = key(
        {},
        '{claim: {"contrast": "arm - arm", "above": threshold, ...}}: docs/experiments.md, Claims',
    )
    pair_spread: float | None = key(
        None, "--dry_run without rows: assumed spread of pairs, in any unit", above=0
    )
    run: bool = key(True, "false: no run is started, the rows that are there are shown")
    dry_run: bool = key(False, "show the list, with hours where they are known, and do nothing")
    out_dir: str | None = key(None, "of rows and runs (None: results/NAME); workers may share it")
    overwrite: bool = key(
        False, "true: take an out_dir that holds files which are none of an experiment"
    )
    jobs: int = key(
        0, "runs at a time (0: as many as the GPUs, or the cores, can hold)", at_least=0
    )
    processes_per_run: int = key(
        1, "processes, of a GPU each, that share a run's micro-steps (torchrun)", at_least=1
    )
    gpus: int = key(
        0,
        "--dry_run: plan for so many GPUs (0: those of this machine)",
        at_least=0,
        at_most=1_000_000,
    )

    def __post_init__(self):
        configurator.check(self)
        self.claims = {
            name: with_base(self.claim_base, claim) if isinstance(claim, dict) else claim
            for name, claim in self.claims.items()
        }
        self.claim_base = {}
        for kind, rule in ENTRIES.items():
            for name, entry in getattr(self, kind).items():
                if wrong := wrong_field(entry, rule):
                    raise UserError(f"{kind}: {name}: {wrong}")
        self.check_paths()
        self.arms, self.claims = all_arms(self), all_claims(self)
        self.seeds_of = {
            arm: seeds for name, seeds in self.seeds_of.items() for arm in arms_named(self, [name])
        }
        self.first_arms = arms_named(self, self.first_arms)
        self.scores_of = {score: arms_named(self, arms) for score, arms in self.scores_of.items()}
        rates, seeds = self.learning_rates, self.selection_seeds
        refuse(
            {
                "arms={}: there is nothing to run; name a file of config/experiments/, or add arms": not self.arms,
                "seeds=[]: there is nothing to run; add one at least, as in seeds = [0, 1, 2]": not self.seeds,
                **self.wrong_branches(),
                "solved_above: is about accuracy, which is not the metric": self.solved_above
                and self.metric != "accuracy",
                "rate_of: without selection_seeds no rate is chosen": self.rate_of and not seeds,
                "learning_rates, selection_seeds: give both, or none": bool(rates) != bool(seeds),
                f"selection_seeds={seeds}: names a seed twice": len(set(seeds)) < len(seeds),
                f"seeds={self.seeds}: names a seed twice": len(set(self.seeds)) < len(self.seeds),
                f"selection_seeds={seeds}: the comparison uses some of them, too": set(seeds)
                & set(self.seeds),
            }
        )
        configurator.build(TrainConfig, self.selection_base, source="selection_base")
        for name, keys in self.scores.items():
            configurator.build(EvaluateConfig, keys, source=f"score {name!r}")
        scripts = sorted(file.parent.name for file in (HERE / "data").glob("*/prepare.py"))
        configurator.check_choice("prepare", self.prepare, scripts)
        self.check_names_of_arms()
        self.check_runs()
        for name, claim in self.claims.items():
            self.check_claim(name, claim)
        claims.check_reach(self)

    def check_paths(self) -> None:
        """Raises UserError for a name or a key that could lead out of out_dir: runs' folders and
        scores' files bear the names of arms and scores."""
        kinds = ("arms", "variants", "scores")
        named = [
            (f"{kind}: ", name, keys)
            for kind in kinds
            for name, keys in getattr(self, kind).items()
        ]
        named += [
            ("name: ", self.name, {}),
            ("", "base", self.base),
            ("", "selection_base", self.selection_base),
        ]
        for kind, name, keys in named:
            is_text = isinstance(name, str) and name.isprintable() and bool(name.strip())
            if not is_text or name[0] == "." or {"/", "\\"} & set(name) or len(name.encode()) > 80:
                words = "names are file names: 1 to 80 bytes, without slashes and line ends, that begin with no dot"
                raise UserError(f"{kind}{show(name)}: {words}")
            if taken := sorted(OURS[kind == "scores: "] & keys.keys()):
                raise UserError(
                    f"{kind}{name}: {taken[0]}: the experiment sets it, so that files stay in out_dir"
                )

    def check_names_of_arms(self) -> None:
        """Raises UserError where a dict names an arm or a score that the experiment does not
        have."""
        choosing = [arm for arm in self.arms if arm not in self.rate_of]
        check_named("scores_of", self.scores_of, self.scores, "scores")
        for label, names, arms in [
            ("seeds_of", self.seeds_of, self.arms),
            ("first_arms", self.first_arms, self.arms),
            *((f"scores_of: {score}", arms, self.arms) for score, arms in self.scores_of.items()),
            ("rate_of", self.rate_of, self.arms),
            *((f"rate_of: {arm}", [other], choosing) for arm, other in self.rate_of.items()),
        ]:
            check_named(label, names, arms, "such arms")
        few = {
            f"seeds_of: {arm}: has none of seeds={self.seeds}": of_arm
            for arm, of_arm in self.seeds_of.items()
        }
        refuse({words: not {*of_arm} & {*self.seeds} for words, of_arm in few.items()})

    def wrong_branches(self) -> dict[str, bool]:
        """{what is wrong with a branch: whether it is}, of arms that are known."""
        cases = {}
        for arm, branch in self.branches.items():
            label, parent, step = f"branches: {arm}", branch["of"], branch["at"]
            check_named(label, [arm, parent], self.arms, "such arms")
            keys = configurator.build(
                TrainConfig, self.base | self.arms[parent], source=f"arm {parent!r}"
            )
            own = configurator.build(TrainConfig, self.base | self.arms[arm], source=f"arm {arm!r}")
            kept = keys.keep_interval
            is_kept = kept is not None and step % kept == 0 and step <= keys.max_iters
            seeds, of_parent = (self.seeds_of.get(name, self.seeds) for name in (arm, parent))
            cases |= {
                f"{label}: {parent!r} keeps no checkpoint of step {step}: give it a keep_interval": not is_kept,
                f"{label}: has max_iters={own.max_iters}, and begins at step {step}": own.max_iters
                <= step,
                f"{label}: has seeds that {parent!r} has not": bool(set(seeds) - set(of_parent)),
                f"{label}: takes the rate of {parent!r}: add it to rate_of": bool(
                    self.selection_seeds
                    and self.rate_of.get(arm, arm) != self.rate_of.get(parent, parent)
                ),
            }
        return cases

    def check_runs(self) -> None:
        """Raises UserError for a wrong key of any run, before the first one."""
        for run in {run["arm"]: run for run in runs_of(self)}.values():
            arm, steps = (
                f"arm {run['arm']!r}",
                self.selection_iters * (run["arm"] not in self.rate_of),
            )
            keys = configurator.build(TrainConfig, run["config"], source=arm)
            words = f"{arm}: selection_iters={steps}: must be at most max_iters={keys.max_iters}"
            is_timed = f"{arm}: dtype=auto is timed anew in each run: add dtype to base"
            refuse({words: steps > keys.max_iters, is_timed: keys.dtype == "auto"})
            configurator.build(script_of(self.prepare).Config, run["data"], source="data")

    def check_claim(self, name: str, claim: dict) -> None:
        """Raises UserError for a claim whose parts contradict each other, or that names what the
        experiment lacks."""
        label, path, given = f"claims: {name}", claim.get("of", [self.metric]), claim.keys()
        check_named(label, given, [part.rstrip("?") for part in ENTRIES["claims"]], "parts")
        check_named(label, claim["contrast"], self.arms, "arms")
        n_seeds, numbers = (
            len(claims.seeds_of_claim(self, claim["contrast"])),
            ("above", "other_than", "within"),
        )
        names = [part for part in path if type(part) is str]
        in_row = path[path[:1] == ["log"] :]
        is_part = path[1:-1] in ([], *([part] for part in OF_LOSS))
        is_of_curve = is_part and names == path[:-1] and type(path[-1]) in (int, float)
        wrong = wrong_path(in_row) if names == path else None
        is_of_row = names == path and in_row and wrong is None
        is_path = is_of_curve if curves.METRICS.keys() & names[:1] else is_of_row
        refuse(
            {
                f"{label}: must have above, other_than or within": not {*numbers} & given,
                f"{label}: other_than has two sides, and no above": "other_than" in given
                and {"above", "sides"} & given,
                f"{label}: a count (in) has above, and no sides, within or family: it is no test": (
                    "in" in given
                    and ("above" not in given or {"sides", "within", "family"} & given)
                ),
                f"{label}: family={show(claim.get('family'))}: say in "
                "family_reason why it is corrected for less than all claims of the experiment, or leave "
                "family out (docs/experiments.md, Claims)": (
                    "family" in given and "family_reason" not in given
                ),
                f"{label}: family_reason: is the reason of a family, and the claim names none": (
                    "family_reason" in given and "family" not in given
                ),
                f"{label}: of={show(path)}: must be names that lead to a number in a row, or as ['lost', 0.9]"
                + f" ({wrong})" * bool(wrong): not is_path,
                f"{label}: in={claim.get('in')}: is more than the seeds of its arms": claim.get(
                    "in", 0
                )
                > n_seeds,
            }
        )
        if path[0] in ("log", "log_steps") and (
            far := [claim[n] for n in numbers if abs(claim.get(n, 0)) > 50]
        ):
            raise UserError(
                f"{label}: {far[0]}: of={show(path)} is a logarithm; that of 1,000 steps is 6.908"
            )
        arms_of = {name: set(self.scores_of.get(name, self.arms)) for name in self.scores}
        scores = [name for name, arms in arms_of.items() if claim["contrast"].keys() <= arms]
        check_named(
            f"{label}: of",
            in_row[1:2] if in_row[0] == "scores" else [],
            scores,
            "score of all these arms",
        )


configurator.begin(__name__, ExperimentConfig, __doc__)

import contextlib
import json
import math
import os
import statistics
from collections.abc import Mapping
from pathlib import Path

import torch

from base.files import check_output
from base.rules import wrong_field
from configurator import UserError, show
from evaluate import EvaluateConfig
from runs.outdir import write_text
from study import claims, curves, report
from study.arms import NAMES, all_arms, all_claims, arms_named, check_named, with_base
from study.page import write_page
from study.plan import Plan, choose_rates, first_step, name_of, runs_of, steps_of, unknown_runs
from study.rows import OF_LOSS, read_rows, script_of, wrong_path
from study.runner import gpus_of, jobs_of, lock, run_all
from train import TrainConfig

HERE = Path(__file__).resolve().parent
# {whether of evaluate.py: keys that the experiment sets, since they say where files are read and
# written}
OURS = {False: {"out_dir", "dataset", "init_from", "overwrite"}, True: {"out", "checkpoint"}}
NUMBER = (float, -1e9, 1e9)
# what each entry of a dict in the config holds, as rules of rules.wrong_field
ENTRIES: dict = {
    "arms": {},
    "variants": {"mixers?": NAMES},
    "scores": {},
    "seeds_of": [(int, 0, 1 << 60), 1, 999],
    "rate_of": (str, 1, 99),
    "scores_of": NAMES,
    "branches": {"of": (str, 1, 99), "at": (int, 1, 1 << 60)},
    "claims": {
        "contrast": (str, 1, 999),
        "above?": NUMBER,
        "other_than?": NUMBER,
        "within?": (float, 1e-9, 1e9),
        "of?": [object, 1, 9],
        "sides?": (int, 1, 2),
        "in?": (int, 1, 999),
        "family?": (str, 1, 99),
        "family_reason?": (str, 1, 999),
        "exploratory?": (bool, 0, 1),
        "pool?": object,
        "each?": NAMES,
    },
}


def refuse(cases: Mapping[str, object]) -> None:
    """Raises UserError with the first text whose condition is true."""
    for words, is_wrong in cases.items():
        if is_wrong:
            raise UserError(words)


def main(argv: list[str]) -> None:
    config = configurator.load(ExperimentConfig, argv)
    out_dir = Path(config.out_dir or HERE / "results" / config.name)
    if config.dry_run:
        print(estimate(config, read_rows(out_dir)))
        return
    check_outputs(out_dir)
    if (rows := run_all(config, out_dir)) is None:
        return
    choices = choose_rates(config, read_rows(out_dir))
    records = list(map(claims.record, claims.judge_claims(config, rows, choices)))
    tables: list = list(filter(None, [report.arms_table(config, rows)]))
    said: list = list(filter(None, [claims.table(records), claims.remarks(records)]))
    print("\n" + "\n\n".join(map(str, [*tables, *said])) + "\n")
    # workers end at the same time
    with lock(out_dir, "report", wait=math.inf) if config.run else contextlib.nullcontext():
        figures = report.figures(rows, out_dir) + report.claims_figure(
            records, out_dir / "claims.png"
        )
        figures += report.rate_windows(config, choices, rows, out_dir / "windows.png")
        if records:
            write_text(out_dir / "claims.json", json.dumps({"claims": records}, indent=1) + "\n")
        else:
            (out_dir / "claims.json").unlink(missing_ok=True)
        page = write_page(out_dir / "report.html", [*said, *figures, *tables])
    print("written:", ", ".join(map(str, [out_dir / "rows.jsonl", *figures, page])))


def check_outputs(out_dir: Path) -> None:
    """Raises UserError, before any run, where the folder has a file of somebody else in the place
    of what main writes at the end, or removes there."""
    if not os.path.isdir(out_dir):
        return
    check_output(out_dir / "claims.json", "claims")
    check_output(out_dir / "report.html", "report")
    for name in report.FIGURES:
        check_output(out_dir / name, "figure")


def estimate(config: ExperimentConfig, rows: list[dict]) -> str:
    """Lists the runs that have no row, with their hours by the rows of the same arm; then what each
    claim can show. Runs whose rate isn't chosen yet are listed at one of the rates."""
    plan, each = Plan(config, rows), config.processes_per_run
    waiting = plan.lacking + unknown_runs(config, plan.choices)
    jobs = jobs_of(config, gpus_of(config) if config.gpus or torch.cuda.is_available() else [])
    of_step: dict[str, list] = {}  # seconds of one process, by arm
    for row in rows:
        made = row.get("last_step") or first_step(row) + steps_of([row])
        steps = made - first_step(row)
        seconds = row["seconds"] * row.get("processes", 1) / max(steps, 1)
        of_step.setdefault(row["arm"], []).append(seconds)
    lines, known = [], []
    for run in waiting:
        seconds = [one * steps_of([run]) / each for one in of_step.get(run["arm"], [])]
        known += [statistics.median(seconds)] if seconds else []
        lines.append(f"{name_of(run):<60}" + (f"{known[-1]:>8,.0f} s" if seconds else ""))
    hours = f"about {sum(known) / 3600 / jobs:.1f} hours, {jobs} at a time, {each} processes each"
    counts = f"{len(waiting)} of {len(plan.done) + len(waiting)} runs to do"
    lines.append(counts + f": {hours}" * (len(known) == len(waiting)))
    said = filter(None, [claims.reach_table(config, plan.shown), claims.family_reasons(config)])
    return "\n\n".join(["\n".join(lines), *map(str, said)])


if __name__ == "__main__":
    configurator.run(main, needs_stdout=False)
