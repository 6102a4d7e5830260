"""What a gate gains: which arm each arm is compared with, and the figure of gains against the step."""

import itertools

import pytest

from study import gains, report


def test_an_arm_is_compared_with_the_one_that_lacks_its_gate_alone_in_any_order():
    kinds = itertools.product(
        ("softmax", "gla"),
        ({}, {"gate": "elementwise"}, {"branch_scale": 0.5}, {"forget_gate": True}),
        ({}, {"max_iters": 9}),
    )
    rows = [{"arm": str(n), "config": {"attention": mixer, "seed": n} | gate | short}
            for n, (mixer, gate, short) in enumerate(kinds)]  # fmt: skip
    wanted = {str(n): str(n - n % 8 + n % 2) for n in range(16) if n % 8 > 1}
    for every in (rows, rows[::-1]):
        assert gains.plain_arms(every) == wanted


def test_the_gain_is_of_the_run_of_the_seed_that_has_no_gate_and_else_the_same_keys(drawn, tmp_path):
    rows = []
    for arm, keys, seed, loss in (
        ("none", {}, 0, 2.0), ("none", {}, 1, 2.5), ("none short", {"max_iters": 9}, 0, 3.0),
        ("sigmoid", {"gate": "elementwise", "learning_rate": 1e-2}, 0, 1.5),
        ("sigmoid", {"gate": "elementwise"}, 1, 2.6),
        ("sigmoid short", {"gate": "elementwise", "max_iters": 9}, 0, 3.5), ("gla", {"attention": "gla"}, 0, 1.0),
    ):  # fmt: skip
        about = {"seed": seed, "finite": True, "val_loss": loss, "metric": "val_loss", "curve": [[0, 5.0], [9, loss]]}
        parts = [{"step": step, "near": loss + 1, "far": loss - 1} for step in (0, 9)]
        rows.append(about | {"arm": arm, "config": {"max_iters": 18} | keys, "loss_curve": parts})
    panels = gains.gains(rows)
    for curves in panels.values():
        assert curves == {"sigmoid": [[(9, 0.5)], [(9, pytest.approx(-0.1))]], "sigmoid short": [[(9, -0.5)]]}
    assert gains.PARTS["all"] not in gains.gains([row | {"metric": "accuracy"} for row in rows])
    report.figures(rows, tmp_path)
    assert [axes.get_title() for axes in drawn["gain.png"].axes] == [gains.PARTS[p] for p in ("all", "near", "far")]
