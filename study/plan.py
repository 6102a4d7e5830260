"""The list of an experiment's runs, and the learning rates that are chosen on the way. All of it
follows from the rows.

    plan = Plan(config, rows)
    plan.lacking                                # the runs that are known by now and have no row

All rates get runs of selection_iters steps, with a schedule of their own. Unless widen_rates is
false, a rate that wins at the edge of the grid widens the grid by one more, once on each side
(docs/experiments.md, Learning rates).
"""

import math
from collections.abc import Iterable
from statistics import fmean, stdev

from base import configurator
from study.curves import area
from study.rows import as_read, mixer_of, text_of, wanted_scores
from train import TrainConfig


class Plan:
    """What an experiment consists of, as far as the rows say by now.

    choices: of learning rates, see choose_rates; compared: the runs that are compared, as far as
    their rates are chosen; shown: their rows, with the scores that the config asks for; runs: those
    that choose rates, then these; lacking: the runs without a row; done: the rows of the others;
    others: the rows of no such run; unscored: the finite rows that lack a score.
    """

    def __init__(self, config, rows: list[dict]):
        by_text = {text_of(row): row for row in rows}
        self.choices = choose_rates(config, rows)
        self.compared = runs_of(config, rates_of(config, self.choices))
        self.runs = []
        for choice in self.choices:
            self.runs += choice["runs"]
        self.runs += self.compared
        known = {text_of(run): run for run in self.runs}
        self.lacking = [run for text, run in known.items() if text not in by_text]
        self.done = [by_text[text] for text in known if text in by_text]
        self.others = [row for text, row in by_text.items() if text not in known]
        self.shown = []
        self.unscored = []
        for row in self.done:
            if "purpose" in row:
                continue
            wanted = wanted_scores(config, row["arm"])
            made = row.get("scored", {})  # older rows lack it
            names = [name for name in wanted if made.get(name) == wanted[name]]
            scores = {name: row["scores"][name] for name in names if name in row["scores"]}
            self.shown.append(row | {"scores": scores})
            if row["finite"] and len(scores) < len(wanted):
                self.unscored.append(row)

    def more(self) -> str:
        """What to say behind the number of runs."""
        waits = any(choice["rate"] is None for choice in self.choices)
        return "; more follow when learning rates are chosen" if waits else ""


def runs_of(config, rates: dict[str, float | None]) -> list[dict]:
    """Every run of the seeds, those of first_arms first. rates: {arm: learning rate, or None for
    that of its keys} of the arms that are run."""
    runs = []
    for seed in config.seeds:
        for arm, rate in rates.items():
            if seed in config.seeds_of.get(arm, config.seeds):
                runs.append(make_run(config, seed, arm, rate))
    return sorted(runs, key=lambda run: run["arm"] not in config.first_arms)


def make_run(config, seed: int, arm: str, rate: float | None) -> dict:
    """A run as it stands in its row: arm, seed, data, keys of train.py and, of a branch, where it
    begins."""
    keys = config.base | config.arms[arm] | {"seed": seed}
    if rate is not None:
        keys["learning_rate"] = rate
    run = {"arm": arm, "seed": seed, "data": config.data, "config": keys}
    if arm in config.branches:
        run["branch"] = config.branches[arm]
    return as_read(run)


def make_trial(config, seed: int, arm: str, rate: float) -> dict:
    """A run that a rate is chosen by. The schedule and the evaluations of a shorter one are those
    of a full run, scaled down; without a decay, it is the first steps of a full one."""
    run = make_run(config, seed, arm, rate) | {"purpose": "selection"}
    run.pop("branch", None)
    keys = configurator.build(TrainConfig, run["config"])
    steps = config.selection_iters or keys.max_iters
    if steps < keys.max_iters:
        run["config"]["max_iters"] = steps
        if keys.schedule != "constant":
            for name in ("warmup_iters", "eval_interval", "decay_iters"):
                length = getattr(keys, name)
                if length:
                    run["config"][name] = max(1, round(length * steps / keys.max_iters))
            for name in ("save_interval", "keep_interval", "keep_last"):  # a trial keeps nothing
                run["config"].pop(name, None)
    run["config"] |= config.selection_base
    return run


def name_of(run: dict) -> str:
    """The folder of a run."""
    rate = f"-lr{run['config']['learning_rate']:g}" if "purpose" in run else ""
    return f"{run['arm']}{rate}-seed{run['seed']}"


def steps_of(runs: Iterable[dict]) -> int:
    """The steps that these runs make in all; a branch makes those behind its checkpoint."""
    steps = 0
    for run in runs:
        steps += configurator.build(TrainConfig, run["config"]).max_iters
        if "branch" in run:
            steps -= run["branch"]["at"]
    return steps


# -- Learning rates --------------------------------------------------------------------------------


def choose_rates(config, rows: list[dict]) -> list[dict]:
    """A dict for each arm that chooses a rate of its own, with what the rows say of the choice by
    now:

        arm
        rate        None while rows are missing
        runs        those that the choice takes, as far as they are known by now
        values      {rate: `value_of` each seed}, of the rates whose seeds have all run
        is_edge, other, margin, error       see `settled`
    """
    if not config.selection_seeds:
        return []
    by_text = {text_of(row): row for row in rows}
    arms = [arm for arm in config.arms if arm not in config.rate_of]
    choices = [choose_rate(config, arm, by_text) for arm in arms]
    return pooled(choices) if config.pool_rates else choices


def choose_rate(config, arm: str, by_text: dict[str, dict]) -> dict:
    waiting = set(config.learning_rates)
    values = {}
    choice: dict = {"arm": arm, "rate": None, "runs": [], "values": values}
    while True:
        for rate in sorted(waiting):
            runs = [make_trial(config, seed, arm, rate) for seed in config.selection_seeds]
            choice["runs"] += runs
            rows = [by_text.get(text_of(run)) for run in runs]
            if None not in rows:
                values[rate] = [value_of(config, row) for row in rows]
        if waiting - values.keys():  # rows are missing
            return choice
        rates = sorted(values)
        rate = safest(values)
        is_edge = rate in (rates[0], rates[-1]) and rate in config.learning_rates
        if not (config.widen_rates and is_edge and len(rates) > 1):
            return settled(choice, rate)
        neighbour = rates[1] if rate == rates[0] else rates[-2]
        waiting = {float(f"{rate * rate / neighbour:.6g}")}


def value_of(config, row: dict) -> float:
    """What a rate is chosen by, of one run: more is better, and a run that was not finite is the
    worst."""
    value = area(row) if config.select_by == "auc" else row[config.metric]
    if value is None or not row["finite"]:
        return -math.inf
    return value if config.metric == "accuracy" else -value


def pooled(choices: list[dict]) -> list[dict]:
    """The choices, pooled by mixer. The arms of a mixer wait for each other. Then each takes the rate
    that is chosen by their means, unless its own best one is better by more than a standard
    error."""
    made = []
    for choice in choices:
        mixer, values = mixer_of(choice["runs"][0]), choice["values"]
        members = [other for other in choices if mixer_of(other["runs"][0]) == mixer]
        if any(member["rate"] is None for member in members):
            made.append(choice | {"rate": None})
            continue
        means = {}
        for rate in values:
            of_members = [member["values"].get(rate) for member in members]
            if None not in of_members:
                means[rate] = [fmean(of_seed) for of_seed in zip(*of_members, strict=True)]
        joint, best = safest(means), highest(values)
        margin, error = difference(values[best], values[joint])
        rate = best if margin > error else joint  # NaN is not more
        made.append(settled(choice, rate))
    return made


def settled(choice: dict, rate: float) -> dict:
    """The choice with its rate. is_edge: whether this is the lowest or the highest of those tried;
    other: the best of the other rates; margin: by how much the rate's mean is better, infinite
    where there is no other; error: the standard error of the margin."""
    others = dict(choice["values"])
    made = choice | {"rate": rate, "is_edge": rate in (min(others), max(others))}
    values = others.pop(rate)
    made |= {"other": None, "margin": math.inf, "error": 0.0}
    if others:
        made["other"] = highest(others)
        made["margin"], made["error"] = difference(values, others[made["other"]])
    return made


def highest(values: dict[float, list[float]]) -> float:
    """The rate of the highest mean, the smaller one of two that are equal. A lost run is -inf."""
    return max(sorted(values), key=lambda rate: fmean(values[rate]))


def safest(values: dict[float, list[float]]) -> float:
    """The smallest rate whose mean is less than a standard error below the highest one. With one
    seed, whose error is NaN, this is the rate of the highest mean."""
    best = highest(values)
    rates = [best]
    for rate, of_rate in values.items():
        margin, error = difference(values[best], of_rate)
        if margin < error:
            rates.append(rate)
    return min(rates)


def difference(values: list[float], others: list[float]) -> tuple[float, float]:
    """(mean, its standard error) of values - others, paired by seed. A lost run is -inf: the result
    is (inf, 0) where only others have one, and (NaN, NaN) where values have one. The error of one
    seed is NaN."""
    if -math.inf in values:
        return math.nan, math.nan
    if -math.inf in others:
        return math.inf, 0.0
    pairs = [value - other for value, other in zip(values, others, strict=True)]
    error = stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
    return fmean(pairs), error


def rates_of(config, choices: list[dict]) -> dict[str, float | None]:
    """{arm: its learning rate}, its own or that of another arm, where it is chosen by now; without
    selection_seeds None, for that of its keys."""
    if not config.selection_seeds:
        return dict.fromkeys(config.arms)
    chosen = {choice["arm"]: choice["rate"] for choice in choices}
    taken = {arm: chosen[config.rate_of.get(arm, arm)] for arm in config.arms}
    return {arm: rate for arm, rate in taken.items() if rate is not None}
