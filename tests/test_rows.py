"""
An experiment's list, its rows, and the tables made of them. No run is started.

Claims are in test_claims.py, learning rates in test_rates.py, figures in test_figures.py.

    python -m pytest tests/test_rows.py
"""

import configurator
from configurator import UserError

import contextlib
import dataclasses
import functools
import html
import itertools
import json
import math
import random
import time

import pytest
from made_rows import BASE, ROOT, line_of, listed, made_row, write_rows

import experiment
from study import claims, rates, report, runner, stats, tables
from study.plan import Plan
from study.rows import missing_scores, read_rows, wanted_scores, wrong_row


def test_every_setting_has_every_arm_and_its_own_data():
    runs = experiment.runs_of(listed(), [0, 1], [])
    assert [experiment.name_of(run) for run in runs] == [
        "d16-none-seed0", "d16-gated-seed0", "d32-none-seed0", "d32-gated-seed0",
        "d16-none-seed1", "d16-gated-seed1", "d32-none-seed1", "d32-gated-seed1",
    ]  # fmt: skip
    assert [run["data"]["pairs"] for run in runs[:4]] == [2, 2, 4, 4]
    assert [run["config"]["n_embd"] for run in runs[:4]] == [16, 16, 32, 32]
    assert all("data" not in run["config"] for run in runs)


def test_a_dry_run_lists_what_is_left_and_estimates_its_hours(monkeypatch):
    monkeypatch.setattr(experiment, "seconds_of_step", lambda *words: 0.01)
    config = listed(jobs=1)
    runs = experiment.runs_of(config, config.seeds, [])
    text = experiment.estimate(config, [made_row(runs[0], 0.5)]).splitlines()
    assert len(text) == 8 and text[3].startswith("d16-none-seed1") and text[3].endswith(" 36 s")  # as its arm's row
    assert not any(line.startswith("d16-none-seed0") for line in text) and text[0].endswith(" 50 s")  # 5,000 steps
    assert text[-1] == f"7 of 8 runs to do: about {(36 + 6 * 50) / 3600:.1f} hours, 1 at a time"


def test_claims_are_judged_by_setting_and_tables_are_made_again_from_the_rows(tmp_path, capsys):
    gain = {"gated": 1, "none": -1}
    asked = {"it helps": {"contrast": gain, "above": 0.05}}  # in each setting
    asked["it helps at 16"] = {"contrast": {"d16": gain}, "above": 0.05}
    asked["it helps more at 16"] = {"contrast": {"d16": gain, "d32": {"gated": -1, "none": 1}}, "above": 0.0}
    config = listed(seeds=list(range(8)), claims=asked, solved_above=0.75, run=False)
    value = {("d16", "none"): 0.5, ("d16", "gated"): 0.8, ("d32", "none"): 0.5, ("d32", "gated"): 0.5}
    runs = experiment.runs_of(config, config.seeds, [])
    rows = [made_row(run, value[run["setting"], run["arm"]] + run["seed"] / 1000) for run in runs]
    write_rows(tmp_path, rows)
    judged = claims.judge_claims(config, experiment.run_all(config, tmp_path))
    assert [claim["setting"] for claim in judged] == ["d16", "d32", None, None]
    assert [claim["verdict"] for claim in judged] == ["supported", "not supported", "supported", "supported"]
    for claim, gained in zip(judged, (0.3, 0.0, 0.3, 0.3), strict=True):
        assert claim["by_seed"] == pytest.approx(dict.fromkeys(range(8), gained), abs=1e-12)
    said = "it helps, d16: supported (+0.3000, exact 95% interval +0.3000 to +0.3000, identical in all seeds; over 0.05"
    assert said in claims.claims_table(judged)
    words = [f"--config_override={json.dumps(dataclasses.asdict(config))}", f"--out_dir={tmp_path}"]
    capsys.readouterr()
    experiment.main(words)
    first = capsys.readouterr().out
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    page = html.unescape(files["report.html"].decode())
    assert "claims.png" in files and tables.summary(config, rows, judged) in first
    assert str(tables.table(config, [row for row in rows if row["setting"] == "d16"], "d16")) in page
    assert "How this was made: python experiment.py --config_override=" in page
    gains = tables.gains_table(config, [row for row in rows if row["setting"] == "d16"])
    assert gains.cells == [["gated", "+0.3000", "identical in all seeds", "8"]] and str(gains) in first
    (line,) = [line for line in first.splitlines() if line.startswith("gated  80.0%")]
    low, high = stats.interval([0.8 + seed / 1000 for seed in range(8)])
    assert line.split()[8:] == ["80.7%", "80.4%", f"{low:.1%}", "to", f"{high:.1%}", "8/8", "100"]
    experiment.main(words)
    assert capsys.readouterr().out == first
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files


def test_the_gain_is_over_the_arm_that_lacks_the_keys_of_the_gate_and_no_others():
    gated = {"gate": "elementwise"}
    arms = {"none": {}, "static": gated | {"gate_input": "static"}, "other": gated | {"readout_norm": "none"}}
    config = listed(arms=arms, settings={}, seeds=[0, 1])
    rows = [made_row(run, 0.5 + 0.1 * (run["arm"] == "static")) for run in experiment.runs_of(config, config.seeds, [])]
    assert tables.gains_table(config, rows).cells == [["static", "+0.1000", "identical in all seeds", "2"]]


def test_in_a_sweep_the_gain_is_over_the_same_rate_and_with_chosen_rates_over_whichever_was_chosen():
    sweep = listed(settings={}, learning_rates=[0.001, 0.1], metric="val_loss")
    ends = {"none at 0.001": 1.0, "none at 0.1": 2.0, "gated at 0.001": 0.9, "gated at 0.1": 1.5}
    runs = experiment.runs_of(sweep, sweep.seeds, sweep.learning_rates)
    rows = [made_row(run, 0.5) | {"val_loss": ends[run["arm"]]} for run in runs[::-1]]  # 0.1 comes first
    said = {arm: gain for arm, gain, *_ in tables.gains_table(sweep, rows).cells}
    assert said == {"gated at 0.1": "-0.5000", "gated at 0.001": "-0.1000"}
    assert tables.gains_table(sweep, rows).title.startswith("Loss minus that of the same without a gate")
    chosen = listed(settings={}, learning_rates=[0.001, 0.1], selection_seeds=[7])
    rates = {(None, "none"): 0.001, (None, "gated"): 0.1}
    runs = experiment.runs_of(chosen, chosen.seeds, chosen.learning_rates, rates)
    rows = [made_row(run, 0.5 + 0.2 * (run["arm"] == "gated")) for run in runs]
    assert tables.gains_table(chosen, rows[1:]) is None  # one pair
    assert tables.gains_table(chosen, rows).cells == [["gated", "+0.2000", "identical in all seeds", "2"]]
    assert tables.gains_table(chosen, rows).title.startswith("Gain over the same without a gate")
    three = dataclasses.replace(chosen, seeds=[0, 1, 2])
    rows = [made_row(run, 0.5) for run in experiment.runs_of(three, three.seeds, chosen.learning_rates, rates)]
    assert [line[-1] for line in tables.gains_table(three, rows[1:]).cells] == ["2"]  # the first seed lacks an arm


def test_rows_that_other_or_unknown_code_and_machines_made_are_counted():
    config = listed(settings={}, seeds=[0, 1])
    about = {"dtype": "float32", "device": "cpu", "threads": 1, "code_sha256": "c0de" * 16}
    rows = [made_row(run, 0.5) | about for run in experiment.runs_of(config, config.seeds, [])]
    one, two, *others = rows
    assert "made by" not in tables.summary(config, rows, [])
    said = tables.summary(config, [one, two | {"threads": 2}, *others], [])
    assert "made by: threads 1 (3 of 4 rows), 2 (1 of 4 rows)" in said
    said = tables.summary(config, [one, two | {"code_sha256": "beef" * 16}, *others], [])
    assert "made by: code c0dec0dec0de (3 of 4 rows), beefbeefbeef (1 of 4 rows)\n" in said
    old = [{name: value for name, value in row.items() if name not in about} for row in rows]
    unknown = (f"{name} unknown (4 of 4 rows)" for name in ("code", "device", "threads"))
    assert tables.origins(old) == f"made by: {'; '.join(unknown)}"
    said = tables.summary(config, [*rows[:2], *old[2:]], [])
    assert "made by: code c0dec0dec0de (2 of 4 rows), unknown (2 of 4 rows); device cpu (2" in said


def test_a_row_that_other_code_made_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "start", lambda *words: pytest.fail("a run was started"))
    config = listed()
    rows = [made_row(run, 0.5) for run in experiment.runs_of(config, config.seeds, [])]
    rows = [row | {"code_sha256": str(i), "threads": i} for i, row in enumerate(rows)]
    write_rows(tmp_path, rows)
    assert [row["code_sha256"] for row in experiment.run_all(config, tmp_path)] == list("01234567")


def test_a_row_at_one_rate_is_not_left_out_because_the_run_at_another_has_no_row_yet(tmp_path, capsys):
    config = listed(settings={}, seeds=[0], selection_seeds=[7], learning_rates=[0.001, 0.01], run=False)
    (choice, *_) = experiment.choose_rates(config, [])
    write_rows(tmp_path, [made_row(choice["runs"][0], 0.5)])
    experiment.run_all(config, tmp_path)
    said = capsys.readouterr().out
    assert "1 runs are done already" in said and "left out" not in said


def test_rows_of_other_keys_are_counted_and_what_differs_is_named(tmp_path, capsys):
    config = listed(run=False)
    rows = [made_row(run, 0.5) for run in experiment.runs_of(config, config.seeds, [])]
    for row in rows[1:]:
        row["config"]["dtype"] = "bfloat16"
    rows[-1]["data"]["pairs"] = 3
    write_rows(tmp_path, rows)
    assert len(experiment.run_all(config, tmp_path)) == 1
    said = capsys.readouterr().out
    assert "8 runs, 40,000 steps; 1 runs are done already" in said and "7 of 8 runs have no row yet" in said
    left_out = "of their rows have other keys, and are left out: dtype 'bfloat16' in the row, 'float32' in the config"
    assert f"  6 {left_out}\n" in said and f"  1 {left_out}; pairs 3 in the row, 4 in the config\n" in said


CONFIGS = sorted((ROOT / "config" / "experiments").glob("*.py"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_committed_experiment_fixes_its_dtype_and_finds_its_rows(file):
    config = configurator.load(experiment.ExperimentConfig, [str(file), "--run=false"])
    assert {"dtype", "device"} <= config.base.keys() and config.name == file.stem
    rows = read_rows(ROOT / "results" / config.name)
    if not any("dtype" in row["config"] for row in rows):
        return  # there is none, or they are from before the config fixed the dtype
    plan = Plan(config, rows)
    assert not plan.others
    if not plan.lacking and not plan.waits_for_rates:  # else it is under way: the pages say so
        shown = experiment.run_all(config, ROOT / "results" / config.name)
        assert len(shown) == len(rows) - sum(len(choice["runs"]) for choice in plan.choices)
        assert all(row["scores"].keys() == wanted_scores(config, row).keys() for row in shown)


def test_a_score_may_be_of_some_arms_only(helpers):
    scores = {"a": {"lengths": [32]}, "b": {"lengths": [64]}}
    config = listed(settings={}, metric="val_loss", scores=scores, scores_of={"b": ["gated"]})
    runs = {run["arm"]: made_row(run, 0.5) for run in experiment.runs_of(config, [0], [])}
    assert {arm: missing_scores(config, run) for arm, run in runs.items()} == {"none": ["a"], "gated": ["a", "b"]}
    assert "'other'" in helpers.error_of(listed, scores=scores, scores_of={"b": ["other"]})
    assert "'c'" in helpers.error_of(listed, scores=scores, scores_of={"c": ["gated"]})
    assert "scores_of: b" in helpers.error_of(listed, scores=scores, scores_of={"b": "gated"})


def test_base_and_data_on_the_command_line_are_added_to_those_of_the_file():
    words = ['--base={"n_layer": 4}', '--data={"pairs": 8}', '--arms={"none": {}, "elementwise": {}}']
    config = configurator.load(experiment.ExperimentConfig, [str(ROOT / "config/experiments/minimum.py"), *words])
    assert (config.base["n_layer"], config.base["n_embd"], config.base["dtype"]) == (4, 64, "float32")
    assert (config.data["pairs"], config.data["queries"]) == (8, 2)
    assert config.arms == {"none": {}, "elementwise": {}}


def test_what_is_there_is_shown_before_the_rest_has_run(tmp_path, capsys):
    asked = {"it helps": {"contrast": {"gated": 1}, "above": 0.5}}
    config = listed(claims=asked, exploratory=True)
    runs = experiment.runs_of(config, config.seeds, [])
    write_rows(tmp_path, [made_row(runs[0], 0.4)])  # of one arm, in one setting
    keys = dataclasses.asdict(config) | {"run": False}
    experiment.main([f"--config_override={json.dumps(keys)}", f"--out_dir={tmp_path}"])
    said = capsys.readouterr().out
    assert "7 of 8 runs have no row yet" in said and "d32: none of its runs has a row yet" in said
    assert all(f"it helps, {setting}: exploratory: not run" in said for setting in ("d16", "d32"))


def test_every_arm_is_run_at_every_rate_and_a_run_that_diverged_has_no_end(tmp_path):
    keys = dict(arms={"a": {"gate": "none"}, "b": {}}, learning_rates=[0.001, 0.1, 3], metric="val_loss", base=BASE)
    config = experiment.ExperimentConfig(**keys)
    runs = experiment.runs_of(config, [0], config.learning_rates)
    assert [run["arm"] for run in runs] == ["a at 0.001", "a at 0.1", "a at 3", "b at 0.001", "b at 0.1", "b at 3"]
    assert runs[2]["config"] == BASE | {"gate": "none", "learning_rate": 3, "seed": 0}
    ends = [1.0, 1.5, 2.1, 1.0, math.nan, 1.9]  # of runs that begin at 2
    about = dict(metric="val_loss", data={})
    rows = [
        run | about | {"scores": {}, "val_loss": end, "finite": not math.isnan(end), "curve": [[0, 2.0], [6, end]]}
        for run, end in zip(runs, ends, strict=True)
    ]
    of_a, of_b = rates.sweep_of(rows)[""].values()
    assert of_a == {0.001: [1.0], 0.1: [1.5], 3: [pytest.approx(math.nan, nan_ok=True)]}
    assert math.isnan(of_b[0.1][0]) and of_b[3] == [1.9]
    assert [figure.name for figure in report.figures(rows, tmp_path)] == ["learning_rates.png"]


def test_a_sweep_with_settings_has_a_panel_and_a_line_for_each_and_no_mean_of_survivors(drawn, tmp_path):
    rows = []
    for setting, seed, rate in itertools.product(("clipped", "not clipped"), (0, 1), (0.001, 0.1)):
        is_lost = (setting, seed, rate) == ("not clipped", 1, 0.1)
        end = None if is_lost else 1.0 if setting == "clipped" else 1.5
        run = {"arm": f"softmax at {rate:g}", "setting": setting, "seed": seed, "config": {"learning_rate": rate}}
        about = {"finite": not is_lost, "val_loss": end, "curve": [[0, 2.0], [6, end]], "data": {}, "scores": {}}
        rows.append(run | about | {"metric": "val_loss"})
    report.figures(rows, tmp_path)
    panels = {axes.get_title(): axes for axes in drawn["learning_rates.png"].axes}
    means = {title: line_of(axes, "softmax") for title, axes in panels.items()}
    assert list(means["clipped"].get_ydata()) == [1.0, 1.0]
    assert list(means["not clipped"].get_ydata()) == pytest.approx([1.5, math.nan], nan_ok=True)
    crosses = {title: [line for line in axes.lines if line.get_marker() == "x"] for title, axes in panels.items()}
    assert {title: list(line.get_xdata()) for title, (line,) in crosses.items()} == {
        "clipped": [],
        "not clipped": [0.1],
    }


def test_figures_and_claims_that_are_gone_leave_no_file(tmp_path):
    config = listed(arms={"none": {}, "gated": {"gate": "elementwise"}}, settings={}, seeds=[0, 1])
    write_rows(tmp_path, [made_row(run, 0.5) for run in experiment.runs_of(config, config.seeds, [])])
    for name in ("claims.json", "mixers.png", "claims.png", "mine.png"):
        (tmp_path / name).write_bytes(b"")
    experiment.main(
        [f"--config_override={json.dumps(dataclasses.asdict(config) | {'run': False})}", f"--out_dir={tmp_path}"]
    )
    assert {"mine.png", "accuracy.png"} <= {file.name for file in tmp_path.iterdir()}
    assert not {"claims.json", "mixers.png", "claims.png"} & {file.name for file in tmp_path.iterdir()}


def test_rows_of_another_metric_or_data_script_are_not_taken_for_this_experiment(tmp_path, helpers):
    config = listed(settings={}, arms={"none": {}}, data={"val_size": 50})
    rows = [made_row(run, 0.5) | {"prepare": "mqar"} for run in experiment.runs_of(config, config.seeds, [])]
    write_rows(tmp_path, rows)
    assert len(runner.run_all(dataclasses.replace(config, run=False), tmp_path)) == len(rows)
    for key, value in {"metric": "val_loss", "prepare": "backcopy"}.items():
        other = dataclasses.replace(config, run=False, **{key: value})
        assert f"{key}=" in helpers.error_of(runner.run_all, other, tmp_path)
    shards = tmp_path / "data"
    shards.mkdir()
    (shards / "meta.json").write_text('{"generator_version": 1}')
    (shards / "prepared.json").write_text(json.dumps({"prepare": "mqar", "keys": {"val_size": 50}}))
    assert runner.is_prepared("mqar", {"val_size": 50}, shards)
    assert not runner.is_prepared("backcopy", {"val_size": 50}, shards)


def test_rows_about_another_version_of_the_data_are_shown_and_never_mixed(tmp_path, monkeypatch, capsys, helpers):
    config = listed(settings={}, seeds=[0, 1], data={})
    shown = dataclasses.replace(config, run=False)
    first, *others = [made_row(run, 0.5) for run in experiment.runs_of(config, config.seeds, [])]
    later = [row | {"data_version": 3} for row in (first, *others)]
    monkeypatch.setattr("data.mqar.prepare.VERSION", 3)
    monkeypatch.setattr(runner, "start", lambda *words: pytest.fail("a run was started"))
    words = f"the rows in {tmp_path} are about version 1 of data/mqar; it is at version 3"
    for asked, rows in ((config, [first, *others]), (shown, [first])):  # of before rows had the key
        write_rows(tmp_path, rows)
        assert len(runner.run_all(asked, tmp_path)) == len(rows) and words in capsys.readouterr().out
    assert f"{words}: take another --out_dir" in helpers.error_of(runner.run_all, config, tmp_path)
    write_rows(tmp_path, [first, *later[1:]])
    assert "about version 1, 3 of data/mqar" in helpers.error_of(runner.run_all, shown, tmp_path)
    write_rows(tmp_path, later)
    assert len(runner.run_all(config, tmp_path)) == 4 and "version" not in capsys.readouterr().out
    (tmp_path / "meta.json").write_text('{"generator_version": 1}')
    (tmp_path / "prepared.json").write_text(json.dumps({"prepare": "mqar", "keys": {}}))
    assert not runner.is_prepared("mqar", {}, tmp_path)


def test_a_last_row_without_an_end_of_line_counts_unless_it_was_cut(tmp_path):
    config = listed(settings={})
    rows = [made_row(run, 0.5) for run in experiment.runs_of(config, config.seeds, [])]
    file = tmp_path / "rows.jsonl"
    for tail, kept in ((json.dumps(rows[1]), 2), (json.dumps(rows[1])[:-1], 1), ("7", 1), ("", 1)):
        file.write_text(json.dumps(rows[0]) + "\n" + tail)
        assert len(read_rows(tmp_path)) == kept
        runner.append_row(tmp_path, rows[2])
        assert len(read_rows(tmp_path)) == kept + 1


def test_a_score_that_was_added_later_counts_whatever_the_clock_says(tmp_path):
    config = listed(settings={}, arms={"none": {}}, scores={"longer": {}})
    (run, *_) = experiment.runs_of(config, config.seeds, [])
    ahead = made_row(run, 0.5) | {"ended": time.time() + 600}
    (tmp_path / "score_longer.json").write_text('{"loss": null, "accuracy": 0.5}')
    row = runner.scored(config, ahead, tmp_path)
    write_rows(tmp_path, [ahead, row])
    assert read_rows(tmp_path)[0]["scores"] == {"longer": {"loss": None, "accuracy": 0.5}}


def test_an_arm_with_at_in_its_name_is_scored_and_a_learning_rate_may_be_given_as_text():
    arms = {"gate at value": {"learning_rate": "1e-3"}, "none": {}}
    config = listed(settings={}, arms=arms, scores={"longer": {}}, scores_of={"longer": ["gate at value"]})
    rows = [made_row(run, 0.5) for run in experiment.runs_of(config, config.seeds, [])]
    assert [missing_scores(config, row) for row in rows] == [["longer"], [], ["longer"], []]
    assert "0.001" in str(tables.table(config, rows))


STRANGE = [None, True, -1, 1.5, "x", "\ud800", [], [1], [[1]], {}, {"a": 1}, 10**30]


def places(value, path=()):
    """The paths to everything inside a row, of lists to the first item."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, item in items:
        yield (*path, name)
        yield from places(item, (*path, name))


@pytest.mark.parametrize("name, arm, seed", [("sink", "none", 0), ("text", "gla sigmoid", 11)])
def test_a_real_row_of_any_wrong_field_is_shown_or_one_line(name, arm, seed, tmp_path, monkeypatch):
    """Each field is replaced or taken away; some of the changed rows that can be read go through the whole report."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **keys: file.write(b"png"))
    every = [row for row in read_rows(ROOT / "results" / name) if row["arm"] == arm]
    first, *rows = [row for row in every if "purpose" in row or row["seed"] in (seed, seed + 1)][::-1]
    read, refused = [], 0
    for path, value in itertools.product(places(first), ["gone", *STRANGE]):
        changed = json.loads(json.dumps(first))
        place = functools.reduce(lambda inner, name: inner[name], path[:-1], changed)
        place.pop(path[-1]) if value == "gone" else place.__setitem__(path[-1], value)
        refused += (wrong := wrong_row(changed)) is not None
        assert wrong is None or configurator.escape(wrong)
        read += [changed] if wrong is None else []
    assert refused > len(read) / 2
    config = str(ROOT / "config" / "experiments" / f"{name}.py")
    for changed in random.Random(0).sample(read, 12):
        write_rows(tmp_path / "out", [*rows, changed])
        with contextlib.suppress(UserError):
            experiment.main([config, f"--out_dir={tmp_path / 'out'}", "--run=false"])


def test_a_row_of_broken_encoding_is_one_line(tmp_path, helpers):
    (tmp_path / "rows.jsonl").write_bytes(b'{"arm": "\xff"}\n')
    assert "rows.jsonl line 1: damaged" in helpers.error_of(read_rows, tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"7", b'"x"', b"null", b"{}", b'{"prepare": 1, "keys": 2}'])
def test_a_run_json_or_prepared_json_of_any_kind_is_of_another_run_and_a_damaged_one_is_one_line(
    content, tmp_path, helpers
):
    (run, *_) = experiment.runs_of(listed(), [0], [])
    (tmp_path / "meta.json").write_bytes(content)
    for name, call in {
        "run.json": lambda: runner.is_of(run, tmp_path),
        "prepared.json": lambda: runner.is_prepared("mqar", {"pairs": 1}, tmp_path),
    }.items():
        (tmp_path / name).write_bytes(content)
        assert not call()
        (tmp_path / name).write_bytes(b'{"a": "\xff"')
        assert f"{name}: cannot be read as JSON" in helpers.error_of(call)
    (tmp_path / "prepared.json").write_text(json.dumps({"prepare": "mqar", "keys": {"pairs": 1}}))
    assert not runner.is_prepared("mqar", {"pairs": 1}, tmp_path)
