"""An experiment's list, its rows, and the tables made of them. No run is started.

Claims are in test_claims.py, learning rates in test_rates.py, figures in test_figures.py.
"""

import dataclasses
import json

import pytest
from made_rows import ROOT, listed, rows_of, show, write_rows

import experiment
from base import configurator
from base.rules import wrong_field
from study import claims, report, runner, stats
from study.plan import Plan
from study.rows import ROW, read_rows, script_of


def test_a_dry_run_lists_what_is_left():
    config = listed()
    rows = rows_of(config)[:2]
    first, second, text = experiment.listed(config, rows).splitlines()
    assert [first, second] == ["none-seed1", "gated-seed1"] and text == "2 of 4 runs to do"


def test_claims_and_tables_are_made_again_from_the_rows(tmp_path, capsys):
    asked = {"it helps": {"contrast": "gated - none", "above": 0.05}}
    config = listed(seeds=list(range(8)), claims=asked, run=False)
    rows = rows_of(config, lambda run: {"none": 0.5, "gated": 0.8}[run["arm"]] + run["seed"] / 1000)
    write_rows(tmp_path, rows)
    judged = claims.judge_claims(config, experiment.run_all(config, tmp_path))
    said = claims.table(list(map(claims.record, judged)))
    assert said.cells[0][:4] == ["it helps", "supported", "+30.0 (+30.0 to +30.0)", "over +5.0"]
    capsys.readouterr()
    show(config, tmp_path)
    first = capsys.readouterr().out
    shown = [report.arms_table(config, rows), said]
    assert "\n\n".join(map(str, shown)) in first and (tmp_path / "claims.png").is_file()
    (line,) = [line for line in first.splitlines() if line.startswith("gated  80.0%")]
    low, high = stats.interval([0.8 + seed / 1000 for seed in range(8)])
    assert line.split()[8:] == ["80.7%", "80.4%", f"{low:.1%}", "to", f"{high:.1%}"]


CONFIGS = sorted((ROOT / "config" / "experiments").glob("*.py"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_committed_experiment_fixes_its_dtype_and_its_claims_are_those_of_its_rows(file):
    config = configurator.load(experiment.ExperimentConfig, [str(file), "--run=false"])
    assert {"dtype", "device"} <= config.base.keys() and config.name == file.stem
    rows = read_rows(folder := ROOT / "results" / config.name)
    plan = Plan(config, rows)
    assert not plan.others and not plan.unscored
    if not plan.shown:
        return  # none has run, or its rates are being chosen
    shown = experiment.run_all(config, folder)
    if not plan.lacking:  # else it is under way: the pages say so
        assert len(shown) == len(rows) - sum(len(choice["runs"]) for choice in plan.choices)
    if config.claims:
        kept = json.loads((folder / "claims.json").read_text())
        assert kept["claims"] == list(map(claims.record, claims.judge_claims(config, shown, plan.choices)))


def test_what_is_there_is_shown_before_the_rest_has_run(tmp_path, capsys):
    asked = {"it helps": {"contrast": "gated", "above": 0.5}}
    config = listed(claims=asked, claim_base={"exploratory": True})
    first, other, *_ = rows_of(config, lambda run: 0.4)
    other["config"]["dtype"] = "bfloat16"
    write_rows(tmp_path, [first, other])
    show(config, tmp_path)
    said = capsys.readouterr().out
    assert "4 runs, 20,000 steps; 1 runs are done already" in said and "3 of 4 runs have no row yet" in said
    assert "1 rows are not shown: they have other keys" in said and " exploratory: not run " in said


def test_of_two_rows_of_a_run_the_one_that_ended_last_counts_wherever_it_stands(tmp_path):
    (row,) = rows_of(listed(seeds=[0], arms={"none": {}}))
    older, newer = row | {"ended": 100.0, "accuracy": 0.1}, row | {"ended": 200.0, "accuracy": 0.2}
    for rows in ([older, newer], [newer, older], [row, newer], [newer, row]):  # older rows had no "ended"
        write_rows(tmp_path, rows)
        assert read_rows(tmp_path) == [newer]


def test_rows_of_another_metric_or_data_script_are_not_taken_for_this_experiment(tmp_path, helpers):
    config = listed(arms={"none": {}}, data={"val_size": 50})
    rows = [row | {"prepare": "mqar"} for row in rows_of(config)]
    write_rows(tmp_path, rows)
    assert len(runner.run_all(dataclasses.replace(config, run=False), tmp_path)) == len(rows)
    for key, value in {"metric": "val_loss", "prepare": "backcopy"}.items():
        other = dataclasses.replace(config, run=False, **{key: value})
        assert f"{key}=" in helpers.error_of(runner.run_all, other, tmp_path)


def test_rows_about_another_version_of_the_data_are_shown_and_never_mixed(tmp_path, monkeypatch, helpers):
    config = listed(seeds=[0, 1], data={})
    shown = dataclasses.replace(config, run=False)
    rows = rows_of(config)  # of before rows had the key
    monkeypatch.setattr("data.mqar.prepare.VERSION", 3)
    monkeypatch.setattr(runner, "start_process", lambda *words: pytest.fail("a run was started"))
    for asked, there in ((config, rows), (shown, rows[:1])):
        write_rows(tmp_path, there)
        assert len(runner.run_all(asked, tmp_path)) == len(there)
    message = helpers.error_of(runner.run_all, config, tmp_path)
    assert message == f"data_version=3: the rows in {tmp_path} have data_version=1; take another --out_dir"
    (tmp_path / "meta.json").write_text('{"generator_version": 1}')
    about = {"prepare": "mqar", "keys": {}}
    (tmp_path / "prepared.json").write_text(json.dumps(about))
    assert runner.is_prepared(about, 1, tmp_path) and not runner.is_prepared(about, 3, tmp_path)


STRANGE = [None, True, -1, 1.5, "x", [], [1], [[1]], {}, {"a": 1}, 10**30]


def test_a_row_without_a_field_or_with_one_of_a_wrong_type_is_one_line(tmp_path, helpers):
    (row,) = rows_of(listed(seeds=[0], arms={"none": {}}))
    read = 0
    for name, rule in ROW.items():
        for value in STRANGE:
            write_rows(tmp_path, [row, row | {name: value}])
            if wrong_field(value, rule) is None:
                read += len(read_rows(tmp_path)) > 0
            else:
                assert "rows.jsonl line 2: damaged; remove the line" in helpers.error_of(read_rows, tmp_path)
        write_rows(tmp_path, [{key: value for key, value in row.items() if key != name}])
        assert "line 1: damaged" in helpers.error_of(read_rows, tmp_path)
    assert read > len(ROW)


@pytest.mark.parametrize("path", sorted((ROOT / "data").glob("*/prepare.py")), ids=lambda path: path.parent.name)
def test_every_prepare_script_has_what_an_experiment_asks_of_it(path):
    script = script_of(path.parent.name)
    assert isinstance(script.VERSION, int) and dataclasses.is_dataclass(script.Config) and callable(script.main)
