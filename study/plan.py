"""The list of an experiment's runs, and the learning rates that are chosen on the way. All of it follows from the rows.

    plan = Plan(config, rows)
    plan.lacking                                # the runs that are known by now and have no row

All rates get runs of selection_iters steps, with a schedule of their own. Unless widen_rates is false, a rate that wins
at the edge of the grid widens the grid by one more, once on each side (docs/experiments.md, Learning rates).
"""

import itertools
import math
from collections.abc import Iterable
from statistics import fmean, stdev

import configurator
from study.curves import area
from study.rows import as_read, missing_scores, mixer_of, text_of
from train import TrainConfig


class Plan:
    """What an experiment consists of, as far as the rows say by now.

    rows: {text_of(run): row}; compared: the runs that are compared, as far as their rates are chosen; runs: those that
    choose rates, then these; lacking: the runs without a row; done: the rows of the others; unscored: the rows that
    lack a score; others: the rows of no such run.
    """

    def __init__(self, config, rows: list[dict]):
        self.choices, self.rows = choose_rates(config, rows), {text_of(row): row for row in rows}
        rates = rates_of(config, self.choices) if config.selection_seeds else None
        self.compared = runs_of(config, config.seeds, rates)
        self.runs = [run for choice in self.choices for run in choice["runs"]] + self.compared
        known = {text_of(run): run for run in self.runs}
        self.lacking = [run for text, run in known.items() if text not in self.rows]
        self.done = [self.rows[text] for text in known if text in self.rows]
        self.unscored = [row for row in self.done if missing_scores(config, row)]
        self.others = [row for text, row in self.rows.items() if text not in known]
        self.waits_for_rates = any(choice["rate"] is None for choice in self.choices)


def runs_of(config, seeds: list[int], chosen: dict[str, float] | None = None) -> list[dict]:
    """Every run of the seeds. chosen: {arm: rate}, of the only arms that are run; None: all, at the rates they have."""
    runs = []
    for is_late, seed, arm in itertools.product((False, True), seeds, config.arms):
        is_left_out = seed in config.seeds and seed not in config.seeds_of.get(arm, [seed])
        is_known = chosen is None or arm in chosen
        if is_known and not is_left_out and is_late != (arm in config.first_arms):
            runs.append(make_run(config, seed, arm, None if chosen is None else chosen[arm]))
    return runs


def make_run(config, seed: int, arm: str, rate: float | None, purpose: str | None = None) -> dict:
    """A run as it stands in its row: arm, seed, data and keys of train.py."""
    keys = config.base | config.arms[arm] | {"seed": seed} | ({} if rate is None else {"learning_rate": rate})
    run = {"arm": arm, "seed": seed, "data": config.data, "config": keys} | ({"purpose": purpose} if purpose else {})
    return as_read(run)


def make_trial(config, seed: int, arm: str, rate: float) -> dict:
    """A run that a rate is chosen by. The schedule and the evaluations of a shorter one are those of a full run, scaled
    down; without a decay, it is the first steps of a full one."""
    run = make_run(config, seed, arm, rate, "selection")
    keys = configurator.build(TrainConfig, run["config"])
    if (steps := config.selection_iters or keys.max_iters) < keys.max_iters:
        run["config"]["max_iters"] = steps
        if keys.decay != "constant":
            scale = steps / keys.max_iters
            for name, least in {"warmup_iters": 0, "eval_interval": 1, "lr_decay_iters": 1, "decay_iters": 1}.items():
                if getattr(keys, name) is not None:
                    run["config"][name] = max(least, round(scale * getattr(keys, name)))
    run["config"] |= config.selection_base
    return run


def name_of(run: dict) -> str:
    """The folder of a run."""
    rate = f"lr{run['config']['learning_rate']:g}" if "purpose" in run else None
    return "-".join(filter(None, [run["arm"], rate, f"seed{run['seed']}"]))


def steps_of(runs: Iterable[dict]) -> int:
    return sum(configurator.build(TrainConfig, run["config"]).max_iters for run in runs)


def choose_rates(config, rows: list[dict]) -> list[dict]:
    """For each arm that chooses a rate of its own, the runs that this takes, and what their rows show:
    {arm, rate (None while rows are missing), runs: those known by now, trials: [{rate, rows}], values: {rate:
    `value_of` each seed}, and what `settled` adds}"""
    by_text = {text_of(row): row for row in rows}
    choosing = [arm for arm in config.arms if config.selection_seeds and arm not in config.rate_of]
    choices = [choose_rate(config, arm, by_text) for arm in choosing]
    return pooled(config, choices) if config.pool_rates else choices


def choose_rate(config, arm: str, by_text: dict[str, dict]) -> dict:
    choice: dict = {"arm": arm, "rate": None, "runs": [], "trials": [], "values": {}}
    rates = waiting = sorted(set(config.learning_rates))
    while waiting:
        measured = measure(config, choice, by_text, waiting)
        if measured is None:
            return choice
        choice["values"] |= measured
        rate, waiting = safest(choice["values"], highest(choice["values"])), []
        # an edge of the config's own rates is that of all tried as long as it has not been widened on that side
        if config.widen_rates and len(rates) > 1 and rate in config.learning_rates and rate in (rates[0], rates[-1]):
            waiting = [float(f"{rate * rate / rates[1 if rate == rates[0] else -2]:.6g}")]
        rates = sorted(rates + waiting)
    return settled(choice, rate)


def measure(config, choice: dict, by_text: dict, rates: list[float]) -> dict | None:
    """{rate: its values by seed}, higher is better, or None while a row is missing. Adds to choice what is there."""
    measured = {}
    for rate in rates:
        runs = [make_trial(config, seed, choice["arm"], rate) for seed in config.selection_seeds]
        rows = [by_text.get(text_of(run)) for run in runs]
        choice["runs"] += runs
        choice["trials"].append({"rate": rate, "rows": rows})
        if None not in rows:
            measured[rate] = [value_of(config, row) for row in rows]
    return measured if len(measured) == len(rates) else None


def value_of(config, row: dict) -> float:
    """What a rate is chosen by, of one run: more is better, and a run that was not finite is the worst."""
    value = area(row) if config.select_by == "auc" else row[config.metric]
    return -math.inf if value is None or not row["finite"] else value if config.metric == "accuracy" else -value


def pooled(config, choices: list[dict]) -> list[dict]:
    """The choices of the arms of one mixer, which wait for each other: each takes the rate that is chosen by their
    means, unless its own best one is better by more than a standard error, or loses fewer runs."""
    groups: dict = {}
    for choice in choices:
        groups.setdefault(mixer_of(choice["runs"][0]), []).append(choice)
    made = {}
    for mixer, members in groups.items():
        if any(choice["rate"] is None for choice in members):
            made |= {choice["arm"]: choice | {"rate": None} for choice in members}
            continue
        shared = set.intersection(*(set(choice["values"]) for choice in members))
        by_arm = {rate: [choice["values"][rate] for choice in members] for rate in shared}
        best = highest({rate: list(map(fmean, of_arms)) for rate, of_arms in by_arm.items()})
        joint = safest({rate: list(map(fmean, zip(*of_arms, strict=True))) for rate, of_arms in by_arm.items()}, best)
        for choice in members:
            best = highest(choice["values"])
            margin, error = difference(choice["values"][best], choice["values"][joint])
            lost, lost_at_best = (choice["values"][one].count(-math.inf) for one in (joint, best))
            rate = best if margin > error or lost > lost_at_best else joint  # NaN is not more
            made[choice["arm"]] = settled(choice, rate) | {"joint": (mixer, joint)}
    return [made[choice["arm"]] for choice in choices]


def settled(choice: dict, rate: float) -> dict:
    """The choice with its rate, is_edge, other: the best of the other rates, margin: how much better the rate's mean
    is, and error: the standard error of the margin; the last three are missing where there is no other."""
    tried = [trial["rate"] for trial in choice["trials"]]
    made = choice | {"rate": rate, "is_edge": rate in (min(tried), max(tried))}
    other = highest({other: values for other, values in choice["values"].items() if other != rate})
    if other is not None:
        margin, error = difference(choice["values"][rate], choice["values"][other])
        made |= {"other": other, "margin": margin, "error": error}
    return made


def highest(values: dict[float, list[float]]) -> float | None:
    """Of the rates with the fewest -inf, that of the highest mean over what is finite at all of these, the smaller one
    of two that are equal; None where there is no rate."""
    fewest = min((of_rate.count(-math.inf) for of_rate in values.values()), default=0)
    left = {rate: of_rate for rate, of_rate in values.items() if of_rate.count(-math.inf) == fewest}
    finite = [i for i, column in enumerate(zip(*left.values(), strict=True)) if -math.inf not in column]
    return max(left, key=lambda rate: (fmean([left[rate][i] for i in finite] or [0.0]), -rate), default=None)


def safest(values: dict[float, list[float]], best: float) -> float:
    """The best rate, or the smallest that is less than a standard error worse over the seeds; NaN is not less."""
    differences = {rate: difference(values[best], of_rate) for rate, of_rate in values.items()}
    return min([best, *(rate for rate, (margin, error) in differences.items() if margin < error)])


def difference(values: list[float], others: list[float]) -> tuple[float, float]:
    """(mean, its standard error) of values - others, paired by seed. NaN where a run was not finite, or of one seed."""
    if -math.inf in values + others:
        return math.nan, math.nan
    pairs = [value - other for value, other in zip(values, others, strict=True)]
    return fmean(pairs), stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan


def rates_of(config, choices: list[dict]) -> dict[str, float]:
    """{arm: its learning rate}, its own or that of another arm, where it is chosen by now."""
    chosen = {choice["arm"]: choice["rate"] for choice in choices}
    taken = {arm: chosen.get(config.rate_of.get(arm, arm)) for arm in config.arms}
    return {arm: rate for arm, rate in taken.items() if rate is not None}


def unknown_runs(config, choices: list[dict]) -> list[dict]:
    """Stand-ins for the runs that are not known yet: they have one of the learning rates, and cost as much."""
    known, arms = rates_of(config, choices), config.arms if config.selection_seeds else []
    guessed = {arm: config.learning_rates[0] for arm in arms if arm not in known}
    return runs_of(config, config.seeds, guessed)
