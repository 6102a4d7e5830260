"""How an arm's learning rate is chosen: which runs it takes, which rate wins, and what the report says of it.

python -m pytest tests/test_rates.py
"""

from configurator import UserError

import dataclasses
import json
import math
import re
import types

import pytest
from made_rows import BASE, line_of, listed, made_row, write_rows

import experiment
from study import curves, rates, report, runner
from study.plan import compared_runs, rates_of
from study.rows import by_run, read_rows, text_of


@pytest.fixture
def made(monkeypatch):
    """made(value) -> the names of the runs that are made from here on; value(run) is the accuracy of a run, or None."""

    def call(value):
        names, process = [], types.SimpleNamespace(returncode=0, poll=lambda: 0, terminate=int, wait=int)

        def start(config, run, out_dir, threads, gpu, held):
            names.append(experiment.name_of(run))
            job = {"item": run, "name": names[-1], "folder": out_dir / names[-1], "gpu": gpu, "lock": held}
            return job | {"process": process, "commands": []}

        monkeypatch.setattr(runner, "start", start)
        monkeypatch.setattr(runner, "finish", lambda config, job: made_row(job["item"], value(job["item"])))
        monkeypatch.setattr(runner.time, "sleep", lambda seconds: None)
        return names

    return call


def choosing(**keys):
    about = dict(settings={}, seeds=[0], selection_seeds=[7, 8], learning_rates=[0.001, 0.01, 0.1], jobs=8)
    return listed(**about | {"arms": {"none": {"gate": "none"}}, "base": BASE | {"max_iters": 400}} | keys)


def by_rate(values):
    """A value(run) that depends on the rate alone."""
    return lambda run: values[run["config"]["learning_rate"]]


def test_rates_are_chosen_on_the_selection_seeds_and_the_seeds_run_at_them(tmp_path, made, capsys):
    config = listed(settings={}, seeds=[0], selection_seeds=[7, 8], learning_rates=[0.001, 0.01])
    scores = {("none", 0.001): 0.6, ("none", 0.01): 0.5, ("gated", 0.001): 0.6, ("gated", 0.01): 0.7}

    def value(run):
        rate, seed = run["config"]["learning_rate"], run["seed"]
        diverged = (run["arm"], rate, seed) == ("none", 0.001, 8)  # one seed of the better rate is not finite
        return None if diverged else scores.get((run["arm"], rate), 0.3)

    made(value)
    rows = experiment.run_all(config, tmp_path)
    assert [(row["arm"], row["seed"], row["config"]["learning_rate"]) for row in rows] == [
        ("none", 0, 0.01), ("gated", 0, 0.01)
    ]  # fmt: skip
    assert "learning rate of none: 0.01 (" in capsys.readouterr().out
    every = read_rows(tmp_path)
    assert len(every) == 2 * 3 * 2 + 2
    compared = report.figures(rows, tmp_path)[0].read_bytes()
    assert report.figures(every, tmp_path)[0].read_bytes() == compared  # runs that chose a rate are in no figure
    with pytest.raises(UserError, match="no row of a compared run yet"):
        report.figures([row for row in every if "purpose" in row], tmp_path)


def test_all_rates_get_short_runs_and_the_best_two_full_ones_in_one_call(tmp_path, made, capsys):
    config = choosing(learning_rates=[0.001, 0.003, 0.01, 0.03])
    names = made(by_rate({0.001: 0.2, 0.003: 0.6, 0.01: 0.7, 0.03: 0.1}))
    rows = experiment.run_all(config, tmp_path)
    short = [f"none-lr{rate}-short-seed{seed}" for rate in (0.001, 0.003, 0.01, 0.03) for seed in (7, 8)]
    full = [f"none-lr{rate}-seed{seed}" for rate in (0.003, 0.01) for seed in (7, 8)]
    assert names == [*short, *full, "none-seed0"] and rows[0]["config"]["learning_rate"] == 0.01
    said = capsys.readouterr().out
    assert "none: 0.01 (mean area under the curve 45.0%; +2.5 over 0.003, standard error 0.0 points)\n" in said
    assert experiment.run_all(config, tmp_path) == rows and len(names) == 13
    (choice,) = experiment.choose_rates(config, read_rows(tmp_path))  # again from the rows alone
    assert (choice["rate"], choice["other"], choice["is_edge"]) == (0.01, 0.003, False)
    assert choice["margin"] == pytest.approx(0.025) and choice["error"] == pytest.approx(0)


def test_a_short_run_is_the_run_scaled_down_with_a_schedule_of_its_own():
    keys = dict(max_iters=400, warmup_iters=40, eval_interval=50, lr_decay_iters=400)
    config = choosing(base=BASE | keys)
    (choice,) = experiment.choose_rates(config, [])
    run = choice["runs"][0]
    assert {name: run["config"][name] for name in keys} == {name: steps // 4 for name, steps in keys.items()}
    assert run["purpose"] == "short selection" and run["config"]["learning_rate"] == 0.001
    assert "lr_decay_iters" not in experiment.choose_rates(choosing(), [])[0]["runs"][0]["config"]  # max_iters
    cheap = choosing(base=BASE | keys, selection_iters=[200, 320])
    assert experiment.choose_rates(cheap, [])[0]["runs"][0]["config"]["eval_interval"] == 25
    choices, _ = chosen(cheap, by_rate({0.001: 0.1, 0.01: 0.5, 0.1: 0.4}))
    longest = choices[0]["runs"][-1]
    assert longest["purpose"] == "selection"
    assert {name: longest["config"][name] for name in keys} == {name: 4 * n // 5 for name, n in keys.items()}


def test_a_short_run_without_a_decay_is_the_first_steps_of_the_run():
    keys = dict(max_iters=400, warmup_iters=40, eval_interval=50, decay_lr=False)
    (choice,) = experiment.choose_rates(choosing(base=BASE | keys), [])
    assert {name: choice["runs"][0]["config"][name] for name in keys} == keys | {"max_iters": 100}


def test_runs_that_choose_a_rate_can_leave_out_what_only_the_comparison_needs():
    config = choosing(selection_base={"meters": False, "eval_whole": False})
    choices, _ = chosen(config, by_rate({0.001: 0.1, 0.01: 0.5, 0.1: 0.4}))
    assert {(run["config"]["meters"], run["config"]["eval_whole"]) for run in choices[0]["runs"]} == {(False, False)}
    compared = compared_runs(config, choices)[-1]
    assert "purpose" not in compared and not {"meters", "eval_whole"} & set(compared["config"])
    for wrong, said in (({"dataset": "x"}, "the experiment sets it"), ({"meter": False}, "meter")):
        with pytest.raises(UserError, match=said):
            choosing(selection_base=wrong)


def chosen(config, value):
    """The choices, all runs that they ask for made, and how many that were."""
    rows = []
    while True:
        choices = experiment.choose_rates(config, rows)
        lacking = [run for choice in choices for run in choice["runs"] if text_of(run) not in by_run(rows)]
        if not lacking:
            return choices, len(rows)
        rows += [made_row(run, value(run)) for run in lacking]


@pytest.mark.parametrize(
    "values, rate, n_full, is_edge",
    [
        ({0.001: 0.1, 0.01: 0.5, 0.1: 0.4}, 0.01, 2, False),
        ({0.001: 0.1, 0.01: 0.5, 0.1: 0.6, 1.0: 0.2}, 0.1, 3, False),
        ({0.001: 0.1, 0.01: 0.5, 0.1: 0.6, 1.0: 0.7, 10.0: 0.9}, 1.0, 3, True),  # once on each side
        ({0.001: 0.6, 0.01: 0.5, 0.1: 0.1, 0.0001: 0.7}, 0.0001, 3, True),
        ({0.001: 0.5, 0.01: 0.1, 0.1: 0.6, 1.0: 0.2}, 0.1, 3, False),
    ],
)
def test_a_choice_at_the_edge_widens_the_grid_by_one_full_run_once_on_each_side(values, rate, n_full, is_edge):
    (choice,), n_runs = chosen(choosing(), by_rate(values))
    assert (choice["rate"], choice["is_edge"]) == (rate, is_edge)
    assert n_runs == 2 * (3 + n_full)
    said = rates.lines(choosing(), [choice])[0]
    assert ("at the edge of the rates" in said) == is_edge


@pytest.mark.parametrize("noise, rate", [(0.0, 0.1), (0.05, 0.01)])
def test_of_two_rates_within_a_standard_error_the_smaller_one_is_taken(noise, rate):
    values = {0.001: 0.1, 0.01: 0.5, 0.1: 0.52, 1.0: 0.2}
    config = choosing()
    signs = {(0.1, 7): 1, (0.1, 8): -1}
    (choice,), _ = chosen(
        config, lambda run: (r := run["config"]["learning_rate"]) and values[r] + noise * signs.get((r, run["seed"]), 0)
    )
    assert choice["rate"] == rate
    assert ("margin under a standard error" in rates.lines(config, [choice])[0]) == (noise > 0)


def test_one_seed_has_no_standard_error_and_a_loss_is_better_when_lower():
    config = choosing(selection_seeds=[7], metric="val_loss")

    def row(run):
        loss = {0.001: 3.0, 0.01: 2.0, 0.1: 2.1}[run["config"]["learning_rate"]]
        return made_row(run, 0.5) | {"val_loss": loss, "metric": "val_loss", "curve": [[0, 4.0], [100, loss]]}

    rows = []
    for _ in range(3):
        (choice,) = experiment.choose_rates(config, rows)
        rows = [row(run) for run in choice["runs"]]
    assert choice["rate"] == 0.01 and math.isnan(choice["error"])
    (line,) = rates.lines(config, [choice])
    assert line == "learning rate of none: 0.01 (mean area under the curve 3.0000; +0.0500 over 0.1, one seed)"


def test_a_rate_that_diverged_in_a_seed_is_never_chosen_over_one_that_did_not():
    values = by_rate({0.001: 0.1, 0.01: 0.2, 0.1: 0.9, 1.0: 0.1})
    (choice,), _ = chosen(choosing(), lambda run: None if (run["seed"], values(run)) == (8, 0.9) else values(run))
    assert choice["rate"] == 0.01


def test_the_area_of_a_run_that_was_solved_early_counts_up_to_the_horizon():
    run = {"finite": True, "curve": [[0, 0.0], [10, 1.0], [20, 1.0]]}
    assert curves.area(run) == pytest.approx(0.75)
    assert curves.area(run | {"horizon": 100}) == pytest.approx(0.95)
    assert curves.area(run | {"curve": [[0, 0.5]], "horizon": 0}) == 0.5
    assert curves.area(run | {"finite": False}) is None


def test_a_grid_that_is_not_to_be_widened_stays_as_it_is():
    config = choosing(widen_rates=False)
    choices, _ = chosen(config, by_rate({0.001: 0.1, 0.01: 0.4, 0.1: 0.5}))
    assert choices[0]["is_edge"] and {trial["rate"] for trial in choices[0]["trials"]} == set(config.learning_rates)


def test_a_rate_may_be_chosen_by_the_last_value_of_short_and_longer_runs():
    ends, half_way = {0.0001: 0.1, 0.001: 0.3, 0.01: 0.5, 0.1: 0.4}, {0.0001: 0.1, 0.001: 1.0, 0.01: 0.2, 0.1: 0.1}

    def rows_of(config):
        rows, choices = [], experiment.choose_rates(config, [])
        while lacking := [r for choice in choices for r in choice["runs"] if text_of(r) not in by_run(rows)]:
            for run in lacking:
                rate, row = run["config"]["learning_rate"], made_row(run, ends[run["config"]["learning_rate"]])
                rows.append(row | {"curve": [[0, 0.0], [50, half_way[rate]], [100, ends[rate]]]})
            choices = experiment.choose_rates(config, rows)
        return choices[0]["rate"], choices[0]["other"], choices[0]["margin"], len(rows)

    assert rows_of(choosing()) == (0.001, 0.01, pytest.approx(0.35), 12)
    assert rows_of(choosing(select_by="last")) == (0.01, 0.1, pytest.approx(0.1), 10)
    assert rows_of(choosing(select_by="last", selection_iters=[200])) == (0.01, 0.1, pytest.approx(0.1), 6)


def test_arms_of_a_mixer_share_a_rate_unless_one_is_clearly_better_off_with_another():
    ends = {
        "gla": {0.001: (0.50, 0.50), 0.01: (0.60, 0.62), 0.1: (0.3, 0.3)},
        "gla noisy": {0.001: (0.50, 0.80), 0.01: (0.63, 0.63), 0.1: (0.3, 0.3)},  # +0.02, standard error 0.15
        "gla other": {0.001: (0.62, 0.63), 0.01: (0.60, 0.60), 0.1: (0.3, 0.3)},
        "softmax": {0.001: (0.7, 0.7), 0.01: (0.6, 0.6), 0.1: (0.3, 0.3), 0.0001: (0.1, 0.1)},
    }
    arms = {name: {"attention": name.split()[0]} for name in ends}
    config = choosing(arms=arms, select_by="last", selection_iters=[100], pool_rates=True)

    def end_of(run):
        return ends[run["arm"]].get(run["config"]["learning_rate"], (0.0, 0.0))[run["seed"] - 7]

    choices, _ = chosen(config, end_of)
    assert {choice["arm"]: choice["rate"] for choice in choices} == {
        "gla": 0.01, "gla noisy": 0.01, "gla other": 0.001, "softmax": 0.001,
    }  # fmt: skip
    assert choices[1]["other"] == 0.001 and choices[1]["margin"] == pytest.approx(-0.02)
    assert "0.01 is best for all arms of gla" in "".join(rates.lines(config, choices))
    alone = choosing(arms=arms, select_by="last", selection_iters=[100])
    assert chosen(alone, end_of)[0][1]["rate"] == 0.001


def test_pooled_rates_need_the_same_runs_of_every_arm(helpers):
    arms = {"gla": {"attention": "gla"}, "gla gated": {"attention": "gla", "gate": "elementwise"}}
    about = dict(arms=arms, select_by="last", pool_rates=True)
    assert "pool_rates=True" in helpers.error_of(choosing, **about, learning_rates=[1e-3, 3e-3, 1e-2, 3e-2])
    config = choosing(**about, learning_rates=[1e-3, 3e-3])
    choices, _ = chosen(config, lambda run: {1e-3: 0.5, 3e-3: 0.6}.get(run["config"]["learning_rate"], 0.4))
    assert [(choice["rate"], choice["is_edge"]) for choice in choices] == [(3e-3, False)] * 2


def test_one_rate_on_offer_is_every_arms():
    arms = {"gla": {"attention": "gla"}, "gla gated": {"attention": "gla", "gate": "elementwise"}}
    config = choosing(arms=arms, learning_rates=[0.01], select_by="last", selection_iters=[100], pool_rates=True)
    choices, _ = chosen(config, lambda run: 0.5)
    assert [choice["rate"] for choice in choices] == [0.01, 0.01] and rates.lines(config, choices)


def test_an_arm_that_takes_anothers_rate_may_be_shorter_than_the_runs_that_choose_it(helpers):
    arms = {"long": {"max_iters": 200}, "short": {"max_iters": 50}}
    about = dict(arms=arms, select_by="last", selection_iters=[200])
    choices, _ = chosen(choosing(rate_of={"short": "long"}, **about), lambda run: 0.5)
    assert [choice["arm"] for choice in choices] == ["long"]
    assert "none over max_iters=50" in helpers.error_of(choosing, **about)


def test_arms_of_a_mixer_wait_for_each_others_rates():
    arms = {"gla": {"attention": "gla"}, "gla gated": {"attention": "gla", "gate": "elementwise"}, "softmax": {}}
    config = choosing(arms=arms, select_by="last", selection_iters=[100], pool_rates=True)
    rows = []
    for choice in experiment.choose_rates(config, []):
        if choice["arm"] != "gla gated":
            rows += [made_row(run, 0.5 if run["config"]["learning_rate"] == 0.01 else 0.2) for run in choice["runs"]]
    found = {choice["arm"]: choice["rate"] for choice in experiment.choose_rates(config, rows)}
    assert found == {"gla": None, "gla gated": None, "softmax": 0.01}


def test_the_rates_table_has_every_run_that_chose_a_rate_and_the_end_table_the_rate(tmp_path, made, capsys):
    config = choosing(arms={"none": {"gate": "none"}, "gated": {"gate": "elementwise"}})
    made(by_rate({0.001: 0.2, 0.01: 0.5, 0.1: 0.3}))
    keys = dataclasses.asdict(config)
    experiment.main([f"--config_override={json.dumps(keys)}", f"--out_dir={tmp_path}"])
    said = capsys.readouterr().out
    lines = [line.split() for line in said[said.index("Learning rates: accuracy at the end") :].splitlines()]
    assert lines[1] == "arm rate chosen steps seed 7 seed 8 mean area".split()
    assert lines[2:7] == [
        "none 0.001 100 20.0% 20.0% 20.0% 32.5%".split(),
        "none 0.01 100 50.0% 50.0% 50.0% 40.0%".split(),
        "none 0.1 100 30.0% 30.0% 30.0% 35.0%".split(),
        "none 0.01 * 400 50.0% 50.0% 50.0% 40.0%".split(),
        "none 0.1 400 30.0% 30.0% 30.0% 35.0%".split(),
    ]
    assert "arm        0   mean  95% interval  rate\nnone   50.0%  50.0%             -  0.01\n" in said
    cells = [cell for line in lines[2:7] for cell in line]
    page = re.sub("<[^>]*>", " ", (tmp_path / "report.html").read_text())
    assert [word for word in page[page.index("Learning rates: ") :].split() if word in cells][: len(cells)] == cells
    first = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    experiment.main([f"--config_override={json.dumps(keys | {'run': False})}", f"--out_dir={tmp_path}"])
    assert capsys.readouterr().out.endswith(said[said.index("End accuracy") :])
    again = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    assert {name for name in first if first[name] != again[name]} <= {"report.html"}  # it has the command


def test_the_short_runs_show_in_which_rates_a_mixer_learns(tmp_path, drawn):
    arms = {"softmax": {}, "gla": {"attention": "gla"}, "gla gated": {"attention": "gla", "gate": "elementwise"}}
    ends = {"softmax": [0.5, 0.6, 0.5], "gla": [0.2, 0.7, None], "gla gated": [0.3, 0.8, 0.1]}
    rates_tried = [0.001, 0.01, 0.1]
    config = choosing(arms=arms)

    def end_of(run):
        return ends[run["arm"]][rates_tried.index(run["config"]["learning_rate"])]

    choices, _ = chosen(config, end_of)
    found = rates.windows_of(config, choices)
    without_short = choosing(arms=arms, selection_iters=[100])
    assert str(rates.windows_of(without_short, chosen(without_short, end_of)[0])) == str(found)
    seeds = len(config.selection_seeds)
    wanted = {
        "softmax": {"none": dict(zip(rates_tried, ends["softmax"], strict=True))},
        "gla": {
            "none": {0.001: 0.2, 0.01: 0.7, 0.1: math.nan},
            "gated": dict(zip(rates_tried, ends["gla gated"], strict=True)),
        },
    }
    for mixer, of_arms in wanted.items():
        for arm, own in of_arms.items():
            assert found[mixer][arm] == {rate: pytest.approx([end] * seeds, nan_ok=True) for rate, end in own.items()}
    rates.windows(config.metric, found, tmp_path / "windows.png")
    softmax, gla = drawn["windows.png"].axes
    assert (softmax.get_title(), gla.get_title()) == ("softmax", "gla")
    assert [label.get_text() for label in softmax.get_xticklabels()] == ["0.001", "0.01", "0.1"]
    assert list(line_of(gla, "gated").get_ydata()) == pytest.approx([30, 80, 10])
    assert math.isnan(line_of(gla, "none").get_ydata()[2])  # no line across the rate that a run did not survive
    thin = [line for line in gla.lines if line.get_linewidth() == 0.7]
    assert [sum(map(math.isfinite, line.get_ydata())) for line in thin] == [2] * seeds + [3] * seeds
    crosses = [line for line in gla.lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[0.1], []]
    few = choosing(arms={"softmax": {}}, learning_rates=rates_tried[:2], widen_rates=False)
    assert rates.windows_of(few, chosen(few, lambda run: 0.5)[0]) == {}


def test_one_arm_may_choose_the_rate_for_another(tmp_path, capsys):
    arms = {"none": {}, "gated": {"gate": "elementwise"}, "matched": {"gate": "elementwise", "match_params": True}}
    keys = dict(selection_seeds=[7], learning_rates=[0.001, 0.01], rate_of={"matched": "gated"})
    config = listed(arms=arms, seeds=[0], scores={"longer": {"lengths": [64]}}, run=False, **keys)
    best = {"none": 0.001, "gated": 0.01}
    tried = [run for choice in experiment.choose_rates(config, []) for run in choice["runs"]]
    assert {(run["setting"], run["arm"]) for run in tried} == {(s, arm) for s in ("d16", "d32") for arm in best}
    assert len(tried) == 8
    value = lambda run: 0.9 if run["config"]["learning_rate"] == best[run["arm"]] else 0.5  # noqa: E731
    choices, _ = chosen(config, value)
    rows = [made_row(run, value(run)) for choice in choices for run in choice["runs"]]
    assert rates_of(config, choices) == {(s, arm): best.get(arm, 0.01) for s in ("d16", "d32") for arm in arms}
    rows += [made_row(run, 0.5) for run in compared_runs(config, choices)]
    write_rows(tmp_path, rows)
    assert len(experiment.run_all(config, tmp_path)) == 6
    assert "learning rate of d32: matched: 0.01 (that of gated)\n" in capsys.readouterr().out
    assert experiment.choose_rates(config, rows[1:])[0]["rate"] is None
    assert experiment.estimate(config, rows[1:]).startswith("d16-none-lr0.001-seed7 ")


def test_a_dry_run_knows_the_chosen_rates_and_guesses_what_is_not_chosen_yet():
    config, value = choosing(seeds=[0, 1], selection_seeds=[7], jobs=1), by_rate({0.001: 0.3, 0.01: 0.5, 0.1: 0.4})
    choices, _ = chosen(config, value)
    selection = [made_row(run, value(run)) for choice in choices for run in choice["runs"]]
    rows = selection + [made_row(run, 0.5) for run in compared_runs(config, choices)]
    assert experiment.estimate(config, rows).startswith("0 of 7 runs to do")
    assert experiment.estimate(config, rows[:-1]).splitlines()[0].startswith("none-seed1 ")
    assert experiment.estimate(config, selection).splitlines()[-1].startswith("2 of 7 runs to do")
    lines = [line.split()[:2] for line in experiment.estimate(config, selection[:2]).splitlines()]
    assert lines == [  # a step of a short run, which took 36 s here, costs as much as one of a full run
        ["none-lr0.1-short-seed7", "36"], ["none-lr0.001-seed7", "144"], ["none-lr0.01-seed7", "144"],
        ["none-seed0", "144"], ["none-seed1", "144"], ["5", "of"],
    ]  # fmt: skip
    scored = dataclasses.replace(config, scores={"longer": {}})
    assert experiment.estimate(scored, rows).endswith("; 2 finished runs lack a score")
