"""The figures of claims: pairs of seeds, and how many runs have not solved the task, from rows made by hand.

python -m pytest tests/test_claims.py
"""

import matplotlib.pyplot as plt
import pytest

import experiment
from study import claims, tables

ARMS = {"none": {}, "elementwise": {"gate": "elementwise"}}
CLAIMS = {
    "more": {"contrast": {"elementwise": 1, "none": -1}, "above": 0},
    "half": {"contrast": {"none": 0.5, "elementwise": -1}, "above": 0},
    "alone": {"contrast": {"none": 1}, "above": 0, "in": 1},
}
CURVES = {"none": (0.5, 0.95, 0.2), "elementwise": (0.99, 0.97, 0.4)}


def judged():
    config = experiment.ExperimentConfig(
        arms=ARMS, claims=CLAIMS, seeds=[0, 1, 2], base={"dtype": "float32", "max_iters": 100}, exploratory=True
    )
    rows = []
    for run in experiment.runs_of(config, config.seeds, []):
        end = CURVES[run["arm"]][run["seed"]]
        rows.append(
            run | {"finite": True, "accuracy": end, "metric": "accuracy", "curve": [[0, 0.1], [50, end], [100, end]]}
        )
    return tables.judge_claims(config, rows), rows


@pytest.fixture
def drawn(monkeypatch):
    """{name of a figure file: its figure}, of what is drawn from here on."""
    figures = {}
    monkeypatch.setattr(claims, "write", lambda figure, path: figures.update({path.name: figure}) or path)
    yield figures
    for figure in figures.values():
        plt.close(figure)


def test_a_claim_of_two_arms_shows_both_in_every_seed_and_a_count_is_no_pair(drawn, tmp_path):
    claims.figures(*judged(), 0.9, tmp_path)
    assert list(drawn) == ["claims.png", "pairs.png", "survival.png"]
    more, half = (axes for axes in drawn["pairs.png"].axes if axes.axison)
    assert [tick.get_text() for tick in more.get_xticklabels()] == ["none", "elementwise"]
    assert [list(line.get_ydata()) for line in more.lines] == [
        pytest.approx(ends) for ends in [[50.0, 99.0], [95.0, 97.0], [20.0, 40.0]]
    ]
    assert [tick.get_text() for tick in half.get_xticklabels()] == ["elementwise", "none"]
    assert [list(line.get_ydata()) for line in half.lines] == [
        pytest.approx(ends) for ends in [[99.0, 50.0], [97.0, 95.0], [40.0, 20.0]]
    ]


def test_runs_not_yet_solved_fall_at_their_steps_and_those_at_risk_are_counted(drawn, tmp_path):
    claims.figures(*judged(), 0.9, tmp_path)
    (axes,) = drawn["survival.png"].axes
    none, gated = axes.lines
    assert none.get_xdata().tolist() == [0, 50, 100, 100]
    assert none.get_ydata() == pytest.approx([100, 200 / 3, 200 / 3, 200 / 3])
    assert gated.get_ydata() == pytest.approx([100, 100 / 3, 100 / 3, 100 / 3])
    assert [text.get_text() for text in axes.texts] == ["3", "3", "2", "3", "3", "1"]  # at 0, 50 and 100 steps


def test_without_a_threshold_or_rows_there_is_no_figure_of_them(drawn, tmp_path):
    found, rows = judged()
    claims.figures(found, rows, None, tmp_path)
    assert list(drawn) == ["claims.png", "pairs.png"]
    assert claims.figures([], rows, None, tmp_path) == []


def test_long_claims_are_wrapped_between_words():
    assert claims.wrapped("one two three four", 8) == "one two\nthree\nfour"
