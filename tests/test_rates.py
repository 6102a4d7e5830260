"""How an arm's learning rate is chosen: which runs it takes, which rate wins, and what the report says of it."""

import math

import pytest
from made_rows import BASE, listed, made_row, write_rows

import experiment
from base.configurator import UserError
from study import report, runner
from study.plan import Plan, name_of, rates_of
from train import TrainConfig

GLAS = {"gla": {"attention": "gla"}, "gla gated": {"attention": "gla", "gate": "elementwise"}}


def choosing(**keys):
    about = dict(seeds=[0], selection_seeds=[7, 8], learning_rates=[0.001, 0.01, 0.1], jobs=8)
    return listed(**about | {"arms": {"none": {"gate": "none"}}, "base": BASE | {"max_iters": 400}} | keys)


def rate_of(run):
    return run["config"]["learning_rate"]


def by_rate(values):
    """A value(run) of {rate: value}, or a pair of values, of seeds 7 and 8."""
    pairs = {rate: value if isinstance(value, tuple) else (value, value) for rate, value in values.items()}
    return lambda run: pairs[rate_of(run)][run["seed"] == 8]


def chosen(config, value):
    """The choices, all runs that they ask for made, and how many that were."""
    rows = []
    while lacking := [run for run in Plan(config, rows).lacking if "purpose" in run]:
        rows += [made_row(run, value(run), config.metric) for run in lacking]
    return experiment.choose_rates(config, rows), len(rows)


# -- The runs ----------------------------------------------------------------------------------------------------------


def test_all_rates_get_runs_side_by_side_and_then_the_best_one_is_compared(tmp_path, capsys):
    config = choosing(learning_rates=[0.001, 0.003, 0.01, 0.03], jobs=9)
    value, rows = by_rate({0.001: 0.2, 0.003: 0.6, 0.01: 0.7, 0.03: 0.1}), []
    assert runner.jobs_of(config, []) == 8
    while lacking := Plan(config, rows).lacking:
        rows += [made_row(run, value(run)) for run in lacking]
    trials = [f"none-lr{rate}-seed{seed}" for rate in (0.001, 0.003, 0.01, 0.03) for seed in (7, 8)]
    assert [name_of(row) for row in rows] == [*trials, "none-seed0"]
    write_rows(tmp_path, rows)
    (compared,) = experiment.run_all(config, tmp_path)
    assert rate_of(compared) == 0.01
    assert "more follow" not in capsys.readouterr().out
    (choice,) = experiment.choose_rates(config, rows)
    (cells,) = report.rates_table(config, [choice]).cells
    assert cells == [
        "none",
        "0.01",
        "0.3250 at 0.001, 0.4250 at 0.003, 0.4500 at 0.01, 0.3000 at 0.03",
    ]
    assert (choice["rate"], choice["other"], choice["is_edge"]) == (0.01, 0.003, False)
    assert choice["margin"] == pytest.approx(0.025) and choice["error"] == 0
    with pytest.raises(UserError, match="no row of a compared run yet"):
        report.figure(rows[:-1], tmp_path)


def test_a_short_run_is_the_run_scaled_down_with_a_schedule_of_its_own():
    keys = dict(max_iters=400, warmup_iters=40, eval_interval=50, decay_iters=40, schedule="wsd")
    config = choosing(base=BASE | keys, selection_iters=320)
    choices, _ = chosen(config, by_rate({0.001: 0.1, 0.01: 0.5, 0.1: 0.4}))
    run = choices[0]["runs"][0]
    assert {name: run["config"][name] for name in keys if name != "schedule"} == {
        name: 4 * n // 5 for name, n in keys.items() if name != "schedule"
    }
    assert run["purpose"] == "selection" and rate_of(run) == 0.001
    kept = dict(save_interval=50, keep_interval=100, keep_last=2)  # of which a shorter run keeps none
    (choice,) = experiment.choose_rates(choosing(base=BASE | keys | kept, selection_iters=100), [])
    config = choice["runs"][0]["config"]
    assert not kept.keys() & config.keys() and TrainConfig(**config).eval_interval == 12
    (choice,) = experiment.choose_rates(choosing(base=BASE | keys), [])  # 0: as long as the run
    assert choice["runs"][0]["config"]["max_iters"] == 400


# -- The choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, rate, n_more, is_edge, keys",
    [
        ({0.001: 0.1, 0.01: 0.5, 0.1: 0.4}, 0.01, 0, False, {}),
        ({0.001: 0.1, 0.01: 0.5, 0.1: 0.6, 1.0: 0.7, 10.0: 0.9}, 1.0, 1, True, {}),  # once on each side
        ({0.001: 0.6, 0.01: 0.5, 0.1: 0.1, 0.0001: 0.7}, 0.0001, 1, True, {}),
        ({0.001: 0.1, 0.01: 0.4, 0.1: 0.5}, 0.1, 0, True, {"widen_rates": False}),
        ({0.001: 0.1, 0.01: 0.5, 0.1: 0.52, 1.0: 0.2}, 0.1, 1, False, {}),
        ({0.001: 0.1, 0.01: 0.5, 0.1: (0.57, 0.47)}, 0.01, 0, False, {}),  # within a standard error: the smaller one
        (
            {0.001: 0.1, 0.01: 0.2, 0.1: (0.9, None)},
            0.01,
            0,
            False,
            {},
        ),  # diverged in a seed: never over one that did not
    ],
)
def test_a_choice_at_the_edge_widens_the_grid_by_one_once_on_each_side(values, rate, n_more, is_edge, keys):
    (choice,), n_runs = chosen(choosing(**keys), by_rate(values))
    assert (choice["rate"], choice["is_edge"], n_runs) == (rate, is_edge, 2 * (3 + n_more))


def test_one_seed_has_no_standard_error_and_a_loss_is_better_when_lower():
    config = choosing(selection_seeds=[7], metric="val_loss")
    (choice,), _ = chosen(config, by_rate({0.001: 3.0, 0.01: 2.0, 0.1: 2.1}))
    assert choice["rate"] == 0.01 and math.isnan(choice["error"])
    (cells,) = report.rates_table(config, [choice]).cells
    assert cells[:2] == ["none", "0.01"] and cells[2].startswith("1.0250 at 0.001, 0.7750 at 0.01")


def test_arms_of_a_mixer_share_a_rate_unless_one_is_clearly_better_off_with_another():
    ends = {
        "gla": {0.001: (0.50, 0.50), 0.01: (0.60, 0.62), 0.1: (0.3, 0.3)},
        "gla noisy": {0.001: (0.60, 0.67), 0.01: (0.63, 0.62), 0.1: (0.3, 0.3)},  # +0.01, standard error 0.04
        "gla other": {0.001: (0.605, 0.63), 0.01: (0.60, 0.60), 0.1: (0.3, 0.3)},  # +0.0175, standard error 0.0125
        "softmax": {0.001: (0.7, 0.7), 0.01: (0.6, 0.6), 0.1: (0.3, 0.3), 0.0001: (0.1, 0.1)},
        "mamba2": {0.001: (0.1, 0.1), 0.01: (0.60, 0.60), 0.1: (0.59, 0.63)},  # +0.01 on both, standard error 0.025
        "mamba2 gated": {0.001: (0.1, 0.1), 0.01: (0.60, 0.60), 0.1: (0.58, 0.64)},
        "kda": {0.001: (0.5, 0.5), 0.01: (0.6, 0.6), 0.1: (0.3, 0.3)},
        "kda lost": {0.001: (0.5, 0.5), 0.01: (0.6, None), 0.1: (None, 0.3), 0.0001: (None, 0.0)},
    }
    arms = {name: {"attention": name.split()[0]} for name in ends}
    config = choosing(arms=arms, select_by="last", selection_iters=100, pool_rates=True)

    def end_of(run):
        return ends[run["arm"]].get(rate_of(run), (0.0, 0.0))[run["seed"] - 7]

    choices, _ = chosen(config, end_of)
    wanted = {"gla": 0.01, "gla noisy": 0.01, "gla other": 0.001, "softmax": 0.001, "kda": 0.01, "kda lost": 0.001}
    wanted |= {"mamba2": 0.01, "mamba2 gated": 0.01}
    assert {choice["arm"]: choice["rate"] for choice in choices} == wanted
    assert choices[1]["other"] == 0.001 and choices[1]["margin"] == pytest.approx(-0.01)


def test_pooled_rates_wait_for_each_other():
    about = dict(arms=GLAS | {"softmax": {}}, select_by="last", pool_rates=True)
    config = choosing(**about, selection_iters=100)
    runs = [run for choice in experiment.choose_rates(config, []) for run in choice["runs"]]
    rows = [made_row(run, 0.5 if rate_of(run) == 0.01 else 0.2) for run in runs if run["arm"] != "gla gated"]
    known = {choice["arm"]: choice["rate"] for choice in experiment.choose_rates(config, rows)}
    assert known == {"gla": None, "gla gated": None, "softmax": 0.01}


def test_one_arm_may_choose_the_rate_for_another(helpers):
    arms = {"none": {}, "gated": {"gate": "elementwise"}, "matched": {"gate": "elementwise", "match_params": True}}
    config, best = choosing(arms=arms, rate_of={"matched": "gated"}), {"none": 0.001, "gated": 0.01}
    choices, _ = chosen(config, lambda run: 0.9 if rate_of(run) == best[run["arm"]] else 0.5)
    assert [choice["arm"] for choice in choices] == list(best)
    assert rates_of(config, choices) == {arm: best.get(arm, 0.01) for arm in arms}
    # such an arm may be shorter than the runs that choose its rate; another may not
    about = dict(arms={"long": {"max_iters": 200}, "short": {"max_iters": 50}}, selection_iters=200)
    choosing(rate_of={"short": "long"}, **about)
    assert "selection_iters: must be at most max_iters=50" in helpers.error_of(choosing, **about)
