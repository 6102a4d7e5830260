"""The list of an experiment's runs, and the learning rates that are chosen on the way. All of it
follows from the rows.

    plan = Plan(config, rows)
    plan.lacking                                # the runs that are known by now and have no row

All rates get runs of selection_iters steps, with a schedule of their own. Unless widen_rates is
false, a rate that wins at the edge of the grid widens the grid by one more, once on each side
(docs/experiments.md, Learning rates).
"""

import itertools
import math
from collections.abc import Iterable
from statistics import fmean, stdev

import numpy as np

import configurator
from study.curves import area
from study.rows import as_read, missing_scores, mixer_of, text_of
from train import TrainConfig

# with fewer degrees of freedom the spread of a run is not known: of four, it is off by a factor of
# up to 1.7 up or 2.9 down in 95% of cases, of one, by 2.2 up or 32 down
LEAST_FREEDOM = 4


class Plan:
    """What an experiment consists of, as far as the rows say by now.

    compared: the runs that are compared, as far as their rates are chosen; shown: their rows; runs:
    those that choose rates, then these; lacking: the runs without a row; done: the rows of the
    others; unscored: the rows that lack a score; others: the rows of no such run.
    """

    def __init__(self, config, rows: list[dict]):
        self.choices, by_text = choose_rates(config, rows), {text_of(row): row for row in rows}
        self.compared = runs_of(
            config, rates_of(config, self.choices) if config.selection_seeds else None
        )
        self.shown = [by_text[text] for text in map(text_of, self.compared) if text in by_text]
        self.runs = [run for choice in self.choices for run in choice["runs"]] + self.compared
        known = {text_of(run): run for run in self.runs}
        self.lacking = [run for text, run in known.items() if text not in by_text]
        self.done = [by_text[text] for text in known if text in by_text]
        self.unscored = [row for row in self.done if missing_scores(config, row)]
        self.others = [row for text, row in by_text.items() if text not in known]
        self.waits_for_rates = any(choice["rate"] is None for choice in self.choices)


def runs_of(config, chosen: dict[str, float] | None = None) -> list[dict]:
    """Every run of the seeds. chosen: {arm: rate}, of the only arms that are run; None: all, at the
    rates they have."""
    rates = dict.fromkeys(config.arms) if chosen is None else chosen
    return [
        make_run(config, seed, arm, rates[arm])
        for is_late, seed, arm in itertools.product((False, True), config.seeds, config.arms)
        if arm in rates
        and seed in config.seeds_of.get(arm, [seed])
        and is_late != (arm in config.first_arms)
    ]


def make_run(config, seed: int, arm: str, rate: float | None, purpose: str | None = None) -> dict:
    """A run as it stands in its row: arm, seed, data, keys of train.py and, of a branch, where it
    begins."""
    keys = (
        config.base
        | config.arms[arm]
        | {"seed": seed}
        | ({} if rate is None else {"learning_rate": rate})
    )
    run = {"arm": arm, "seed": seed, "data": config.data, "config": keys}
    if purpose is not None:
        run["purpose"] = purpose
    elif arm in config.branches:
        run["branch"] = config.branches[arm]
    return as_read(run)


def make_trial(config, seed: int, arm: str, rate: float) -> dict:
    """A run that a rate is chosen by. The schedule and the evaluations of a shorter one are those
    of a full run, scaled down; without a decay, it is the first steps of a full one."""
    run = make_run(config, seed, arm, rate, "selection")
    keys = configurator.build(TrainConfig, run["config"])
    if (steps := config.selection_iters or keys.max_iters) < keys.max_iters:
        run["config"]["max_iters"] = steps
        if keys.decay != "constant":
            scale = steps / keys.max_iters
            for name, least in {
                "warmup_iters": 0,
                "eval_interval": 1,
                "lr_decay_iters": 1,
                "decay_iters": 1,
            }.items():
                if getattr(keys, name) is not None:
                    run["config"][name] = max(least, round(scale * getattr(keys, name)))
    run["config"] |= config.selection_base
    return run


def name_of(run: dict) -> str:
    """The folder of a run."""
    rate = f"lr{run['config']['learning_rate']:g}" if "purpose" in run else None
    return "-".join(filter(None, [run["arm"], rate, f"seed{run['seed']}"]))


def steps_of(runs: Iterable[dict]) -> int:
    return sum(
        configurator.build(TrainConfig, run["config"]).max_iters - first_step(run) for run in runs
    )


def first_step(run: dict) -> int:
    """The step that a run begins at: 0, but for a branch."""
    return run["branch"]["at"] if "branch" in run else 0


def choose_rates(config, rows: list[dict]) -> list[dict]:
    """For each arm that chooses a rate of its own, the runs that this takes, and what their rows
    show: {arm, rate (None while rows are missing), runs: those known by now, trials: {rate: a row,
    or None, of each seed}, values: {rate: `value_of` each seed}, noise: see `noise_of`, and what
    `settled` adds}"""
    by_text = {text_of(row): row for row in rows}
    choosing = [arm for arm in config.arms if config.selection_seeds and arm not in config.rate_of]
    choices = []
    for arm in choosing:
        choice: dict = {"arm": arm, "rate": None, "runs": [], "trials": {}, "values": {}}
        try_rates(config, choice, sorted(set(config.learning_rates)), by_text)
        choices.append(choice)
    # before any grid is widened: a choice must not depend on what came of it
    for choice in choices:
        choice["noise"] = noise_of(config, choice, of_its_mixer(choice, choices))
    choices = [choose_rate(config, choice, by_text) for choice in choices]
    return pooled(choices) if config.pool_rates else choices


def try_rates(config, choice: dict, rates: list[float], by_text: dict[str, dict]) -> None:
    """Adds these rates to the runs, trials and values of a choice."""
    for rate in rates:
        runs = [make_trial(config, seed, choice["arm"], rate) for seed in config.selection_seeds]
        choice["runs"] += runs
        choice["trials"][rate] = [by_text.get(text_of(run)) for run in runs]
        if None not in choice["trials"][rate]:
            choice["values"][rate] = [value_of(config, row) for row in choice["trials"][rate]]


def has_all_rows(choice: dict) -> bool:
    return len(choice["values"]) == len(choice["trials"])


def of_its_mixer(choice: dict, choices: list[dict]) -> list[dict]:
    mixer = mixer_of(choice["runs"][0])
    return [member for member in choices if mixer_of(member["runs"][0]) == mixer]


def choose_rate(config, choice: dict, by_text: dict[str, dict]) -> dict:
    if choice["noise"] is None:
        return choice
    rates = list(choice["trials"])
    while has_all_rows(choice):
        rate, wider = safest(choice["values"], highest(choice["values"]), choice["noise"]), []
        # an edge of the config's own rates is that of all tried as long as it has not been widened
        # on that side
        if (
            config.widen_rates
            and len(rates) > 1
            and rate in config.learning_rates
            and rate in (rates[0], rates[-1])
        ):
            wider = [float(f"{rate * rate / rates[1 if rate == rates[0] else -2]:.6g}")]
        if not wider:
            return settled(choice, rate)
        try_rates(config, choice, wider, by_text)
        rates = sorted(rates + wider)
    return choice


def noise_of(config, choice: dict, members: list[dict]) -> dict | None:
    """What a rate's mean may owe to its seeds: {spread: of a run, freedom: its degrees of freedom};
    None while rows are missing. members: the choices of the arms of its mixer, before any grid is
    widened.

    The spread is that of what is left of the runs of each arm, without those of rates at which one
    was not finite, when the means of its rates and of its seeds are taken away. NaN: with fewer
    than LEAST_FREEDOM degrees of freedom it is not known, and the best mean wins. rate_noise
    "pairs" is the rule of before 0.5: each difference of two rates has a spread of its own, with a
    degree of freedom less than there are seeds (spread: None).
    """
    n_seeds = len(config.selection_seeds)
    if config.rate_noise == "pairs":
        return {"spread": None, "freedom": n_seeds - 1} if has_all_rows(choice) else None
    if not all(map(has_all_rows, members)):
        return None
    squares, freedom = 0.0, 0
    for member in members:
        finite = [of_rate for of_rate in member["values"].values() if -math.inf not in of_rate]
        if not finite:
            continue
        table = np.array(finite)  # (rates, seeds)
        left = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
        squares += float((left**2).sum())
        freedom += (len(finite) - 1) * (n_seeds - 1)
    spread = math.sqrt(squares / freedom) if freedom >= LEAST_FREEDOM else math.nan
    return {"spread": spread, "freedom": freedom}


def value_of(config, row: dict) -> float:
    """What a rate is chosen by, of one run: more is better, and a run that was not finite is the
    worst."""
    value = area(row) if config.select_by == "auc" else row[config.metric]
    return (
        -math.inf
        if value is None or not row["finite"]
        else value
        if config.metric == "accuracy"
        else -value
    )


def pooled(choices: list[dict]) -> list[dict]:
    """The choices of the arms of one mixer, which wait for each other: each takes the rate that is
    chosen by their means, unless its own best one is better by more than a standard error, or loses
    fewer runs."""
    made = []
    for choice in choices:
        members, values, noise = of_its_mixer(choice, choices), choice["values"], choice["noise"]
        if any(member["rate"] is None for member in members):
            made.append(choice | {"rate": None})
            continue
        shared = set.intersection(*(set(member["values"]) for member in members))
        by_arm = {rate: [member["values"][rate] for member in members] for rate in shared}
        best = highest({rate: list(map(fmean, of_arms)) for rate, of_arms in by_arm.items()})
        means = {
            rate: list(map(fmean, zip(*of_arms, strict=True))) for rate, of_arms in by_arm.items()
        }
        joint = safest(means, best, noise, n_arms=len(members))
        best = highest(values)
        margin, error = difference(values[best], values[joint], noise)
        # NaN is not more
        is_better = margin > error or values[joint].count(-math.inf) > values[best].count(-math.inf)
        mixer = mixer_of(choice["runs"][0])
        made.append(settled(choice, best if is_better else joint) | {"joint": (mixer, joint)})
    return made


def settled(choice: dict, rate: float) -> dict:
    """The choice with its rate, is_edge, other: the best of the other rates, margin: how much
    better the rate's mean is, and error: the standard error of the margin; the last three are
    missing where there is no other."""
    made = choice | {
        "rate": rate,
        "is_edge": rate in (min(choice["trials"]), max(choice["trials"])),
    }
    other = highest({other: values for other, values in choice["values"].items() if other != rate})
    if other is not None:
        margin, error = difference(choice["values"][rate], choice["values"][other], choice["noise"])
        made |= {"other": other, "margin": margin, "error": error}
    return made


def highest(values: dict[float, list[float]]) -> float | None:
    """Of the rates with the fewest -inf, that of the highest mean over what is finite at all of
    these, the smaller one of two that are equal; None where there is no rate."""
    fewest = min((of_rate.count(-math.inf) for of_rate in values.values()), default=0)
    left = {rate: of_rate for rate, of_rate in values.items() if of_rate.count(-math.inf) == fewest}
    finite = [
        i for i, column in enumerate(zip(*left.values(), strict=True)) if -math.inf not in column
    ]
    return max(
        left,
        key=lambda rate: (fmean([left[rate][i] for i in finite] or [0.0]), -rate),
        default=None,
    )


def safest(values: dict[float, list[float]], best: float, noise: dict, n_arms: int = 1) -> float:
    """The best rate, or the smallest that is less than a standard error worse over the seeds; NaN
    is not less."""
    differences = {
        rate: difference(values[best], of_rate, noise, n_arms) for rate, of_rate in values.items()
    }
    return min([best, *(rate for rate, (margin, error) in differences.items() if margin < error)])


def difference(
    values: list[float], others: list[float], noise: dict, n_arms: int = 1
) -> tuple[float, float]:
    """(mean, its standard error) of values - others, paired by seed, of one arm or of the means of
    several. NaN, NaN where a run was not finite; the error alone where the noise is not known."""
    if -math.inf in values + others:
        return math.nan, math.nan
    pairs = [value - other for value, other in zip(values, others, strict=True)]
    if noise["spread"] is not None:
        return fmean(pairs), noise["spread"] * math.sqrt(2 / (len(pairs) * n_arms))
    return fmean(pairs), stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan


def rates_of(config, choices: list[dict]) -> dict[str, float]:
    """{arm: its learning rate}, its own or that of another arm, where it is chosen by now."""
    chosen = {choice["arm"]: choice["rate"] for choice in choices}
    taken = {arm: chosen.get(config.rate_of.get(arm, arm)) for arm in config.arms}
    return {arm: rate for arm, rate in taken.items() if rate is not None}


def unknown_runs(config, choices: list[dict]) -> list[dict]:
    """Stand-ins for the runs that are not known yet: they have one of the learning rates, and cost
    as much."""
    known = rates_of(config, choices)
    waiting = [arm for arm in config.arms if config.selection_seeds and arm not in known]
    return runs_of(config, {arm: config.learning_rates[0] for arm in waiting})
