"""The figures of runs and of an experiment, from rows made by hand."""

import itertools
import json
import math

from made_rows import labels_of, line_of, listed, made_row, rows_of, write_rows

import plot
from study import report


def test_a_mixer_has_a_panel_and_every_kind_of_arm_a_line_of_its_own(tmp_path, drawn):
    kinds = {
        "none": {}, "native": {"gate": "native"}, "sigmoid": {"gate": "elementwise"},
        "wide": {"gate": "elementwise", "gate_bias": 1.0}, "matched": {"gate": "elementwise", "match_params": True},
    }  # fmt: skip
    arms = {f"{m} {kind}": {"attention": m} | keys for m in ("gla", "mamba2") for kind, keys in kinds.items()}
    rows = rows_of(listed(arms=arms), lambda run: 0.5 + 0.1 * run["seed"])
    rows[0] = made_row(rows[0], None)  # not finite
    report.figures(rows, tmp_path)
    assert list(drawn) == ["accuracy.png"]
    panels = drawn["accuracy.png"].axes
    assert [axes.get_title() for axes in panels] == ["gla", "mamba2"]
    for axes in panels:
        assert labels_of(axes) == set(kinds)
        assert len(axes.lines) == 5 * (2 + 1) and not axes.collections  # of two seeds no interval is drawn
        assert line_of(axes, "none").get_color() == "#000000"
    assert len({line.get_color() for line in panels[0].lines}) == 5


def test_three_sizes_of_state_are_drawn_against_their_bytes_in_a_panel_per_kind(tmp_path, drawn):
    names = [f"{mixer} {kind}{size}" for mixer in ("gla", "kda") for kind in ("", "levels ") for size in (4, 8, 16)]
    rows = rows_of(listed(arms={name: {"attention": name.split()[0]} for name in names}))
    report.figures([row | {"state_bytes": 1024 * int(row["arm"].split()[-1])} for row in rows], tmp_path)
    panels = drawn["state.png"].axes
    assert [axes.get_title() for axes in panels] == ["none", "levels"]
    assert all(line_of(axes, "kda").get_xydata().tolist() == [[4, 50], [8, 50], [16, 50]] for axes in panels)


def test_a_run_that_was_not_finite_has_no_mean_behind_its_last_evaluation(tmp_path, drawn):
    rows = rows_of(listed(arms={"none": {}}, seeds=[0, 1, 2]))
    rows[1] = made_row(rows[1], None) | {"curve": [[0, 0.1], [50, 0.5]]}
    report.figures(rows, tmp_path)
    mean = line_of(drawn["accuracy.png"].axes[0], "none")
    finite = dict(zip(mean.get_xdata(), map(math.isfinite, mean.get_ydata()), strict=True))
    assert finite == {0: True, 50: True, 51: False, 100: False}


def test_rows_of_two_versions_of_a_run_are_not_drawn_as_two_seeds(tmp_path, helpers):
    rows = rows_of(listed(arms={"none": {}}))
    write_rows(tmp_path, rows + [row | {"config": row["config"] | {"n_embd": 32}} for row in rows])
    assert "two rows of arm 'none', seed 0" in helpers.error_of(plot.draw, tmp_path)


def test_runs_named_together_are_drawn_in_one_figure_against_steps_and_seconds(tmp_path, drawn):
    for name, median in {"a": 100, "b": 400}.items():
        rows = [{"event": "eval", "step": step, "val_loss": 3 - step / 10} for step in (0, 10)]
        rows += [{"event": "train", "step": 5, "loss": 2.5, "tokens_per_second": n} for n in (1, median, 9000)]
        write_rows(tmp_path / name, rows, "metrics.jsonl")
        about = {"tokens_per_step": 200, "config": {"dataset": f"data/{name}"}}
        (tmp_path / name / "config.json").write_text(json.dumps(about))
    plot.main([str(tmp_path / name) for name in "ab"])
    lines = [line_of(axes, str(tmp_path / "b")).get_xydata().tolist() for axes in drawn["curves.png"].axes]
    assert lines == [[[0, 3], [10, 2]], [[0, 3], [5, 2]]]
    assert drawn["curves.png"].get_suptitle().endswith("Of different data: nats a token do not compare")


def test_weight_times_gate_is_drawn_beside_the_weights_in_one_scale(tmp_path, drawn):
    shown = {"weights": [[1.0, 0.0], [0.5, 0.5]], "queries": {}, "layer": 0, "head": 1}
    layers = [{"sink": {"share": [0.7, 0.75]}}]
    both = [("softmax", "none", []), ("gla", "headwise", [0.0, 1.0])]
    checkpoints = [{"attention": a, "gate": b, "maps": [shown | {"gate": c}], "layers": layers} for a, b, c in both]
    (tmp_path / "meters.json").write_text(json.dumps({"checkpoints": checkpoints}))
    plot.main([str(tmp_path / "meters.json")])
    assert drawn["maps.png"].axes[1].get_title() == "gla, gate headwise\nlayer 0, head 1"
    _, gated, product = (axes.images[0] for axes in drawn["maps.png"].axes)
    assert product.get_array().tolist() == [[0, 0], [0.5, 0.5]] and product.get_clim() == gated.get_clim() == (0, 1)


def test_every_panel_has_a_place_on_the_page_and_maps_are_the_largest():
    for n, n_maps in itertools.product((3, 4, 5), range(4)):
        cells = [(i, 1 / len(line)) for row in plot.page_rows(n, n_maps) for line in row for i in line]
        sizes = [sum(size for i, size in cells if i == panel) for panel in range(n + n_maps)]
        assert min(sizes) > 0 and set(sizes[n:]) <= {1.0}
