"""The meters of a run and of a checkpoint: the log, the command; the figures and the report that are made of them."""

import json
import re
from unittest import mock

import edits
import pytest

import evaluate
import meters
import model
import plot
import train
from model import GPT, MIXERS, Block
from runs import probe
from runs.health import closed_gates


@pytest.fixture(scope="module")
def trained(mqar, helpers, tmp_path_factory):
    return helpers.train(mqar, tmp_path_factory.mktemp("run"), gate="elementwise")


def test_the_log_has_the_meters_of_every_evaluation(trained, mqar, helpers, tmp_path):
    logged = [row["meters"] for row in helpers.metrics(trained, "eval")]
    assert [meter["gate_mean"] for meter in logged][0] == {"readout": 0.5}
    assert all(meter["sink_baseline"] == probe.to_json(probe.baseline(32)) for meter in logged)
    without = helpers.train(mqar, tmp_path / "off", gate="elementwise", meters="false")
    assert all("meters" not in row for row in helpers.metrics(without, "eval"))
    assert helpers.losses(without) == helpers.losses(trained)


def test_numbers_are_written_before_they_are_printed_to_somebody_who_may_not_read_on(trained, tmp_path, monkeypatch):
    words = [f"--checkpoint={trained}", "--device=cpu", "--threads=1"]
    for script, more in ((meters, ["--rows=2"]), (evaluate, [])):
        monkeypatch.setattr(script, "print", mock.Mock(side_effect=BrokenPipeError), raising=False)
        with pytest.raises(BrokenPipeError):
            script.main([*words, *more, f"--out={tmp_path / script.__name__}.json"])
        assert json.loads((tmp_path / f"{script.__name__}.json").read_text())


STREAMS = 3


class Streams(Block):
    """A block of hyper-connections, whose hidden state (B, T, STREAMS, C) has streams that it mixes."""

    def forward(self, x, state=None, start=0):
        return x + (super().forward(x.mean(2), state, start) - x.mean(2))[:, :, None]


class Hyper(GPT):
    def features(self, idx, state=None, start=0, document=None):
        x = self.wte(idx)[:, :, None].expand(-1, -1, STREAMS, -1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x.mean(2)), state


def test_an_edited_hidden_state_with_an_axis_more_is_one_line_and_trains_without_meters(
    mqar, helpers, tmp_path, monkeypatch
):
    monkeypatch.setattr(model, "Block", Streams)
    monkeypatch.setattr(train, "GPT", Hyper)
    message = helpers.error_of(helpers.train, mqar, tmp_path / "a")
    assert message.startswith("meters: the hidden state of a block is (")
    assert ", 32, 3, 16), not the expected (batch, tokens, n_embd), (" in message
    assert message.endswith("train with --meters=false")
    assert len(helpers.losses(helpers.train(mqar, tmp_path / "b", meters="false"))) == 8


def test_rows_of_another_length_may_begin_with_an_id(trained, helpers, tmp_path):
    words = [f"--checkpoint={trained}", "--device=cpu", "--threads=1", "--rows=2", f"--out={tmp_path / 'm.json'}"]
    meters.main([*words, "--block_size=32", "--first_id=3"])
    (row,) = json.loads((tmp_path / "m.json").read_text())["checkpoints"]
    assert row["tokens"] == 32 and row["first_id"] == 3 and row["losses"]["all"] > 0
    assert "first_id=99999: the model knows" in helpers.error_of(meters.main, [*words, "--first_id=99999"])


def test_several_checkpoints_give_one_file_which_the_page_is_drawn_of(trained):
    both = f"--checkpoint={trained / 'best.pt'},{trained / 'ckpt.pt'}"
    meters.main([both, "--rows=4", "--map=1.0", "--device=cpu", "--threads=1"])
    written = json.loads((trained / "meters.json").read_text())["checkpoints"]
    assert [row["checkpoint"] for row in written] == both[13:].split(",")
    assert [(shown["layer"], shown["head"]) for shown in written[1]["maps"]] == [(1, 0)]
    assert written[1]["losses"]["all"] > 0
    plot.main([str(trained)])
    assert (trained / "page.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("attention, without", [("longconv", [0, 1]), ("longconv,softmax", [0])])
def test_a_mixer_without_weights_has_no_sink_and_all_else_is_measured_and_drawn(
    attention, without, text, helpers, tmp_path, monkeypatch, capsys, drawn
):
    monkeypatch.setitem(MIXERS, "longconv", edits.LongConv)
    out = helpers.train(text, tmp_path / "run", attention=attention, gate="headwise")
    words = [f"--checkpoint={out}", "--device=cpu", "--threads=1", "--rows=2"]
    meters.main(words)
    assert re.search("0 longconv +None +None", capsys.readouterr().out)
    (row,) = json.loads((out / "meters.json").read_text())["checkpoints"]
    for i, layer in enumerate(row["layers"]):
        sink, has_none = layer["sink"], i in without
        for name in ("share", "effective"):
            assert (sink[name] == [None, None]) == has_none and (has_none or None not in sink[name]), name
        assert (sink["kind"] == "none") == has_none
        assert None not in layer["gates"]["readout"]["mean"] + [layer["branch"]]
    assert {shown["layer"] for shown in row["maps"]} <= {0, 1} - {*without}
    short = probe.summary(row["layers"], row["tokens"])
    assert (short["sink"] is None) == (len(without) == 2) and short["gate_mean"]
    assert "a head that is there and has weights" in helpers.error_of(meters.main, [*words, "--map=0.1"])

    plot.main([str(out), str(out / "meters.json")])
    lines = {axes.get_title(): len(axes.lines) for axes in drawn["page.png"].axes}
    assert lines["Gate"] == 1 and lines["Residual stream"] == 2 and lines["Token 0"] == 4 - 2 * len(without)
    assert ("maps.png" in drawn) == (len(without) == 1) != ("no attention map" in capsys.readouterr().out)


# -- Gates that have closed --------------------------------------------------------------------------------------------


def test_a_gate_that_is_shut_is_a_note_once_and_a_field_of_each_evaluation(trained, mqar, helpers, tmp_path, capsys):
    assert [row["gate_closed"] for row in helpers.metrics(trained, "eval")] == [[]] * 3
    capsys.readouterr()
    shut = dict(gate="none,elementwise+headwise@value", gate_bias=-6.0)
    out = helpers.train(mqar, tmp_path / "shut", **shut)
    names = ["1.value", "1.readout"]  # in the order in which they are called
    assert [row["gate_closed"] for row in helpers.metrics(out, "eval")] == [names] * 3
    assert all("gate_closed" not in row for row in helpers.metrics(out) if row["event"] != "eval")
    notes = re.findall(r"note: step 0: gate (\S+) .* its mean is (\S+) of .*; (docs/\S+) says", capsys.readouterr().out)
    assert notes == [(name, "0.0025", "docs/gates.md") for name in names]
    assert "gate_closed" not in helpers.metrics(helpers.train(mqar, tmp_path / "off", meters="false"), "eval")[0]


def test_logits_that_grow_tenfold_over_the_first_evaluation_are_told_also_by_a_run_that_goes_on(
    mqar, helpers, tmp_path, capsys, monkeypatch
):
    measured, logits = train.training_meters, iter([2.5, 24.9, 25.0, 26.0])

    def grown(*given):
        return measured(*given) | {"gate_logits": {"0.readout": next(logits), "1.readout": 9.9}}

    monkeypatch.setattr(train, "training_meters", grown)
    keys = dict(gate="elementwise", gate_activation="silu")  # which has no mean to be shut at
    out = helpers.train(mqar, tmp_path / "out", **keys, max_iters=4)
    assert "may be stuck" not in capsys.readouterr().out
    for last, n_notes in ((8, 1), (12, 0)):
        helpers.train(mqar, out, **keys, max_iters=last, init_from="resume")
        notes = re.findall(
            "note: step 8: gate 0.readout .* grown to 25 .*, from 2.5 at step 0;", capsys.readouterr().out
        )
        assert len(notes) == n_notes
    rows = helpers.metrics(out, "eval")
    assert [row["gate_closed"] for row in rows] == [[], [], ["0.readout"], ["0.readout"]]


def test_logits_that_start_near_zero_count_as_one_and_those_that_are_not_finite_do_not_count():
    def row(step, logits, share=0.5):
        return {"step": step, "meters": {"gate_logits": {"0.readout": logits}, "gate_open": {"0.readout": share}}}

    for first, now, is_told in [(0.0, 9.9, False), (0.0, 10.0, True), (0.9, 9.9, False), (3.0, None, False)]:
        names, notes = closed_gates(row(20, now), [{"step": 0}, row(10, first), row(15, 8.0)])
        assert (names == ["0.readout"]) == is_told == any("at step 10;" in note for note in notes)
    assert closed_gates(row(0, 40.0), []) == ([], [])
    assert [bool(closed_gates(row(0, 1.0, share), [])[0]) for share in (0.019, 0.02, None)] == [True, False, False]
