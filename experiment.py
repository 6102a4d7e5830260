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

out_dir gets rows.jsonl (one object per finished run), figures, report.html and a folder per run;
started again, it keeps the rows it has, and continues the runs that were stopped. SIGTERM,
Ctrl-C, SIGHUP and SIGUSR1 stop the runs, each of which saves first; the status is then 128 plus the
signal's number.

base and data given on the command line, or beside an include, are added to those of the file:
--base='{"n_layer": 4}' changes one key. Every other key takes the place of the file's.
"""

from dataclasses import dataclass

from base import configurator
from base.configurator import key


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
        {},
        '{variant: its keys of train.py; "mixers": the only ones that have it}; the arm of the variant '
        '"none" is called as its mixer',
    )
    seeds: list[int] = key(
        [0], "one run of every arm each; it seeds the data, too, unless data has a seed", at_least=0
    )
    seeds_of: dict = key({}, "{arm: the only ones of the seeds that it is run with}")
    branches: dict = key(
        {},
        '{arm: {"of": another arm, "at": step}}: it goes on from the checkpoint that the other keeps then',
    )
    first_arms: list[str] = key(
        [], "arms whose runs of all seeds go before those of the others, if hours are short"
    )
    learning_rates: list[float] = key([], "to choose from, on selection_seeds", above=0)
    selection_seeds: list[int] = key(
        [], "seeds that the learning rates are chosen on, and nothing else", at_least=0
    )
    rate_of: dict = key({}, "{arm: another one, whose chosen rate it takes; none is tried for it}")
    select_by: str = key(
        "auc", "auc: area under the curve; last: its last value", choices=("auc", "last")
    )
    selection_iters: int = key(
        0,
        "steps of the runs that choose rates, with a schedule of their own (0: max_iters)",
        at_least=0,
    )
    selection_base: dict = key(
        {}, "more keys of train.py for the runs that choose rates, such as meters = False"
    )
    pool_rates: bool = key(
        False,
        "true: a mixer's arms share the rate that is best for their mean, unless another is clearly better "
        "for one",
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
    claim_base: dict = key({}, "keys of every claim, unless it has others in their place")
    claims: dict = key(
        {},
        '{claim: {"contrast": "arm - arm", "above": threshold, ...}}: docs/experiments.md, Claims',
    )
    pair_spread: float | None = key(
        None,
        "--dry_run without rows: assumed standard deviation of a pair's difference, in a row's unit",
        above=0,
    )
    run: bool = key(True, "false: no run is started, the rows that are there are shown")
    dry_run: bool = key(False, "show the list of runs and what each claim can show, and do nothing")
    out_dir: str | None = key(None, "of rows and runs (None: results/NAME); workers may share it")
    overwrite: bool = key(
        False, "true: take an out_dir that holds other files, and replace data of other keys in it"
    )
    jobs: int = key(
        0, "runs at a time (0: as many as the GPUs, or the cores, can hold)", at_least=0
    )
    processes_per_run: int = key(
        1, "processes, of a GPU each, that share a run's micro-steps (torchrun)", at_least=1
    )

    def __post_init__(self):
        configurator.check(self)
        check_entry(vars(self), ENTRIES)
        self.arms = all_arms(self)
        self.claims = all_claims(self)
        self.first_arms = arms_named(self, self.first_arms)
        self.scores_of = {score: arms_named(self, arms) for score, arms in self.scores_of.items()}
        seeds_of = {}
        for name, seeds in self.seeds_of.items():
            seeds_of |= dict.fromkeys(arms_named(self, [name]), seeds)
        self.seeds_of = seeds_of
        refuse(not self.arms, "arms={}: nothing to run; name a file of config/experiments/")
        refuse(not self.seeds, "seeds=[]: nothing to run; add one at least, as in seeds = [0, 1]")
        refuse(
            bool(self.learning_rates) != bool(self.selection_seeds),
            "learning_rates, selection_seeds: give both, or none",
        )
        every = self.selection_seeds + self.seeds
        refuse(
            len(set(every)) < len(every),
            "seeds, selection_seeds: name each seed once; those that choose rates are not compared",
        )
        self.check_names()
        self.check_runs()
        for arm, branch in self.branches.items():
            with about(f"branches: {arm}"):
                self.check_branch(arm, branch["of"], branch["at"])
        for name, claim in self.claims.items():
            with about(f"claims: {name}"):
                self.check_claim(claim)
        claims.check_reach(self)

    def check_names(self) -> None:
        """Raises UserError for a name that could lead out of out_dir, since runs' folders and
        scores' files bear the names of arms and scores, and for one of no arm or score."""
        words = "names are file names: 1 to 80 bytes, without slashes and line ends, that begin "
        words += "with no dot or space"
        for name in [self.name, *self.arms, *self.scores]:
            is_right = FILE_NAME.fullmatch(name) and name.isprintable() and len(name.encode()) <= 80
            refuse(not is_right, f"name, arms, scores: {show(name)}: {words}")
        scripts = sorted(file.parent.name for file in (ROOT / "data").glob("*/prepare.py"))
        configurator.check_choice("prepare", self.prepare, scripts)
        check_named("scores_of", self.scores_of, self.scores)
        check_named("scores_of", itertools.chain(*self.scores_of.values()), self.arms)
        for label in ("seeds_of", "first_arms", "rate_of"):
            check_named(label, getattr(self, label), self.arms)
        check_named("rate_of", self.rate_of.values(), sorted(self.arms.keys() - self.rate_of))
        for arm in self.arms:
            seeds = seeds_of_arms(self, [arm])
            refuse(not seeds, f"seeds_of: {arm}: has none of seeds={self.seeds}")

    def check_runs(self) -> None:
        """Raises UserError for a wrong key of any run, before the first one."""
        configurator.build(TrainConfig, self.selection_base, source="selection_base")
        configurator.build(script_of(self.prepare).Config, self.data, source="data")
        for name, keys in self.scores.items():
            configurator.build(EvaluateConfig, keys, source=f"score {name!r}")
        for arm in self.arms:
            keys = self.keys_of(arm)
            with about(f"arm {arm!r}"):
                refuse(
                    keys.dtype == "auto",
                    "dtype=auto is timed anew in each run: add dtype to base",
                )
                refuse(
                    self.selection_iters > keys.max_iters and arm not in self.rate_of,
                    f"selection_iters: must be at most max_iters={keys.max_iters}",
                )

    def keys_of(self, arm: str):
        """The keys of train.py that an arm has."""
        return configurator.build(TrainConfig, self.base | self.arms[arm], source=f"arm {arm!r}")

    def check_branch(self, arm: str, of: str, at: int) -> None:
        """Raises UserError for a branch that cannot begin: from a checkpoint that the other arm does not
        keep for each of its seeds, or that lies behind its own end, or in a circle. Likewise for one
        that would be of another model than the checkpoint, or take keys of the other arm in silence."""
        check_named("of", [arm, of], self.arms)
        ours = self.keys_of(arm)
        keys = self.keys_of(of)
        is_kept = keys.keep_interval and at % keys.keep_interval == 0 and at <= keys.max_iters
        refuse(not is_kept, f"{of!r} keeps no checkpoint of step {at}: give it a keep_interval")
        refuse(
            seeds_of_arms(self, [arm]) != seeds_of_arms(self, [arm, of]),
            f"{of!r} is not run with all of its seeds",
        )
        refuse(at > ours.max_iters, f"at={at}: is behind its own max_iters={ours.max_iters}")
        before = [arm]  # the arms that it goes back to
        while before[-1] in self.branches:
            is_circle = self.branches[before[-1]]["of"] in before
            before.append(self.branches[before[-1]]["of"])
            refuse(is_circle, f"goes on from itself, by {' from '.join(before)}")
        kept = model_args(keys)
        changed = [name for name in kept if getattr(ours, name) != kept[name]]
        refuse(
            changed,
            f"has another {', '.join(changed)} than {of!r}, from whose checkpoint it goes on",
        )
        # a run that goes on takes the keys that it does not give from the checkpoint
        unsaid = self.arms[of].keys() - self.base.keys() - self.arms[arm].keys() - OF_CHECKPOINTS
        if ours.schedule != keys.schedule:
            unsaid -= set(OF_SCHEDULE)
        taken = sorted(name for name in unsaid if getattr(ours, name) != getattr(keys, name))
        refuse(taken, f"would take {', '.join(taken)} from {of!r}: give them here, too")

    def check_claim(self, claim: dict) -> None:
        """Raises UserError for a claim whose parts contradict each other, or that names what the
        experiment lacks."""
        check_named("contrast", claim["contrast"], self.arms)
        path = claim.get("of", [self.metric])
        is_right = all(type(name) is str for name in path)
        if str(path[0]) in curves.METRICS:
            parts = PARTS[:1] if path[0] == "at" else PARTS  # "at" is of the curve as a whole
            is_right = path[1:-1] in parts and type(path[-1]) in (int, float)
        if path[0] == "log":
            is_right = is_right and len(path) > 1 and path[1] not in {"log", *curves.METRICS}
        refuse(
            not is_right,
            f"of={show(path)}: must be names that lead to a number in a row, or as ['lost', 0.9]",
        )
        given = claim.keys()
        if "in" in given:
            is_right = "above" in given and not {"sides", "within", "family"} & given
        elif "other_than" in given:
            is_right = not {"above", "sides"} & given
        else:
            is_right = {"above", "within"} & given
        refuse(
            not is_right,
            "must have above, other_than (which has two sides, and no above) or within; "
            "a count (in) has above, and no sides, within or family",
        )
        refuse(
            "family" in given and "family_reason" not in given,
            "family: say in family_reason why it is corrected for less than all claims, or leave it out",
        )
        n_seeds = len(seeds_of_arms(self, claim["contrast"]))
        refuse(claim.get("in", 0) > n_seeds, "in: is more than the seeds of its arms")


configurator.begin(__name__, ExperimentConfig)

import ast
import datetime
import itertools
import json
import os
import re
from pathlib import Path

from base.configurator import show
from base.files import check_output, one_line, read_regular, write_text
from evaluate import EvaluateConfig
from keys import model_args, without_alias
from runs.outdir import ROOT
from runs.resume import OF_SCHEDULE
from study import claims, curves, report
from study.arms import (
    NAMES,
    about,
    all_arms,
    all_claims,
    arms_named,
    check_entry,
    check_named,
    refuse,
    seeds_of_arms,
)
from study.page import write_page
from study.plan import Plan, choose_rates, name_of
from study.rows import read_rows, script_of
from study.runner import run_all
from train import TrainConfig

FILE_NAME = re.compile(r"[^./\\ ][^/\\]*")
OF_CHECKPOINTS = {"save_interval", "keep_interval", "keep_last"}  # what an arm keeps of its own
# of the path of a claim about a learning curve: nothing, or a part of the text
PARTS = [[], ["near"], ["far"], ["repeated"], ["elsewhere"]]
# what each entry of a dict in the config holds, as rules of rules.wrong_field
ENTRIES: dict = {
    "arms": {str: {}},
    "variants": {str: {"mixers?": NAMES}},
    "scores": {str: {}},
    "seeds_of": {str: [(int, 0, 1 << 60), 1, 999]},
    "rate_of": {str: (str, 1, 99)},
    "scores_of": {str: NAMES},
    "branches": {str: {"of": (str, 1, 99), "at": (int, 1, 1 << 60)}},
    "claims": {str: {}},
}


def main(argv: list[str]) -> None:
    config = configurator.load(ExperimentConfig, argv)
    out_dir = Path(config.out_dir or ROOT / "results" / config.name)
    if config.dry_run:
        print(listed(config, read_rows(out_dir)))
        return
    if os.path.isdir(out_dir):  # before any run: what is written, or removed, at the end
        check_output(out_dir / "claims.json", "claims")
        check_output(out_dir / "report.html", "report")
        for name in report.FIGURES:
            check_output(out_dir / name, "figure")
    rows = run_all(config, out_dir)
    if rows is not None:
        # a row may hold what no table can be made of
        with one_line(f"{out_dir / 'rows.jsonl'}: cannot be shown"):
            report_on(config, rows, out_dir, question_of(argv))


def report_on(config: ExperimentConfig, rows: list, out_dir: Path, question: str) -> None:
    """Prints the tables of the rows, and writes claims.json, the figures and report.html."""
    choices = choose_rates(config, read_rows(out_dir))
    judged = claims.judge_claims(config, rows, choices)
    records = [claims.record(claim) for claim in judged]
    remarks = claims.remarks(records)
    arms = report.arms_table(config, rows)
    rates = report.rates_table(config, choices)
    verdicts = claims.table(records)
    if records:
        write_text(out_dir / "claims.json", json.dumps({"claims": records}, indent=1) + "\n")
    else:
        (out_dir / "claims.json").unlink(missing_ok=True)
    said = [str(part) for part in (arms, rates, verdicts, remarks) if part]
    print("\n" + "\n\n".join(said) + "\n")
    gated = {
        row["arm"] for row in rows if without_alias(row["config"]).get("gate", "none") != "none"
    }
    sides = {claim["claim"]: report.gate_side(claim, gated) for claim in judged}
    figures = [report.figure(rows, out_dir)]
    figures += report.gain_curves(rows, out_dir / "gain.png")
    figures += report.claims_figure(records, out_dir / "claims.png", sides)
    asked, _, design = question.partition("\n\n")
    means = [f"{name}: {word}, {mean} {unit}" for name, word, mean, _, unit, *_ in verdicts.cells]
    commits = ", ".join(sorted({str(row.get("git_commit"))[:7] for row in rows}))
    made = f"{len(rows)} runs, of commit {commits}; written on {datetime.date.today()}"
    parts = [asked, means, made, design, *figures, verdicts, remarks.splitlines(), arms, rates]
    page = write_page(out_dir / "report.html", filter(None, parts))
    print("written:", ", ".join(map(str, [out_dir / "rows.jsonl", *figures, page])))


def question_of(argv: list[str]) -> str:
    """What the last config file of the command line says at its top, if there is one."""
    files = [word for word in argv if not word.startswith("-")]
    if not files:
        return ""
    return ast.get_docstring(ast.parse(read_regular(files[-1], 1 << 20))) or files[-1]


def listed(config: ExperimentConfig, rows: list[dict]) -> str:
    """The runs that have no row, as far as learning rates are chosen; then what each claim can
    show."""
    plan = Plan(config, rows)
    lines = [name_of(run) for run in plan.lacking]
    lines.append(f"{len(plan.lacking)} of {len(plan.runs)} runs to do{plan.more()}")
    reach = claims.reach_table(config, plan.shown)
    if reach:
        lines.append(f"\n{reach}")
    return "\n".join(lines)


if __name__ == "__main__":
    configurator.run(main, needs_stdout=False)
