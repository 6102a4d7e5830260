"""The meters of a run and of a checkpoint: the log, the command; the figures and the report that are made of them.

python -m pytest tests/test_meters.py
"""

import base64
import json
from html.parser import HTMLParser

import pytest

import meters
import plot
from runs import probe
from study import report

# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(mqar, helpers, tmp_path_factory):
    return helpers.train(mqar, tmp_path_factory.mktemp("run"), gate="elementwise")


def test_the_log_has_the_meters_of_every_evaluation_and_a_gate_that_did_not_move(trained, mqar, helpers, tmp_path):
    logged = [row["meters"] for row in helpers.metrics(trained, "eval")]
    assert [meter["gate_mean"] for meter in logged][0] == {"readout": 0.5}
    assert logged[0]["collapsed"] == [f"layer {i}, readout: all within 0.05 of 0.5" for i in (0, 1)]
    assert all(meter["sink_baseline"] == probe.numbers(probe.baseline(32)) for meter in logged)
    assert [row["spike"] for row in helpers.metrics(trained, "train")] == [False] * 8
    without = helpers.train(mqar, tmp_path / "off", gate="elementwise", meters="false")
    assert all("meters" not in row for row in helpers.metrics(without, "eval"))
    assert helpers.losses(without) == helpers.losses(trained)


def test_several_checkpoints_give_a_table_each_and_one_file_which_the_page_is_drawn_of(trained, capsys):
    both = f"--checkpoint={trained / 'best.pt'},{trained / 'ckpt.pt'}"
    meters.main([both, "--rows=4", "--score_batches=2", "--maps=1.0,0.1", "--device=cpu"])
    printed = capsys.readouterr().out
    assert printed.count("packing: no BOS") == 2
    written = json.loads((trained / "meters.json").read_text())["checkpoints"]
    short = json.loads(printed.splitlines()[-1])["checkpoints"]
    assert [row["checkpoint"] for row in written] == [row["checkpoint"] for row in short] == both[13:].split(",")
    assert [(shown["layer"], shown["head"]) for shown in written[1]["maps"]] == [(1, 0), (0, 1)]
    assert written[1]["pruning"][0] == {"threshold": 0.0, "zeroed": 0.0} | {
        name: written[1][name] for name in ("loss", "accuracy")
    }
    assert len(written[1]["layers"][0]["sink"]["random_tokens"]) == 2
    plot.main([str(trained)])
    assert (trained / "page.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_decoding_speed_needs_a_headwise_gate(trained, mqar, helpers, tmp_path, capsys):
    words = ["--skip_below=0.6", "--device=cpu", "--rows=2", "--score_batches=1"]
    message = helpers.error_of(meters.main, [f"--checkpoint={trained}", *words])
    assert message == "skip_below=0.6: no softmax layer has a headwise gate on its readout"
    helpers.train(mqar, tmp_path, gate="headwise", block_size=96)
    meters.main([f"--checkpoint={tmp_path}", *words])
    (row,) = json.loads((tmp_path / "meters.json").read_text())["checkpoints"]
    assert row["decoding"]["heads_skipped"] == 1.0 and "100.0% of the heads skipped" in capsys.readouterr().out


def test_rows_of_one_token_have_nothing_to_measure(text, helpers, tmp_path):
    out = helpers.train(text, tmp_path / "out", block_size=1, max_iters=1, meters="false")
    message = helpers.error_of(meters.main, helpers.words(checkpoint=out, device="cpu"))
    assert "rows of one token, which has no other to look at" in message


def test_a_map_that_is_not_there_names_those_that_are(trained, helpers):
    for text in ("2.0", "0", "a.b"):
        message = helpers.error_of(meters.main, [f"--checkpoint={trained}", f"--maps={text}", "--device=cpu"])
        assert message == f"maps={text!r}: write layer.head, from 0.0 to 1.1"


class Page(HTMLParser):
    """Collects the images and the cells of a page, and every address it would load from elsewhere."""

    def __init__(self):
        super().__init__()
        self.images, self.cells, self.open_tags = [], [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        assert tag not in ("script", "link", "iframe")
        if tag == "img":
            kind, _, data = attributes["src"].partition(",")
            assert kind == "data:image/png;base64"
            self.images.append(base64.b64decode(data, validate=True))
        if tag not in ("img", "meta"):
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        if self.open_tags[-1:] == ["td"]:
            self.cells.append(data)


def test_the_report_opens_and_holds_its_figures_and_its_table(tmp_path):
    rows = [
        {"arm": arm, "seed": seed, "metric": "accuracy", "accuracy": 0.25 + seed / 4, "curve": [[0, 0.1], [9, 0.5]],
         "data": {"pairs": 4}, "config": {"gate": "<none> & more"}}
        for arm in ("none", "a < b") for seed in (0, 1)
    ]  # fmt: skip
    figures = report.figures(rows, tmp_path)
    page = Page()
    page.feed(report.write_page(rows, figures, tmp_path / "report.html").read_text())
    page.close()
    assert page.images == [figure.read_bytes() for figure in figures] and not page.open_tags
    first = page.cells.index("none")  # behind the keys that all runs share
    assert page.cells[first : first + 6] == ["none", "0", "0.25", "none", "1", "0.5"]
    assert {"a < b", "<none> & more", "data: pairs", "4"} <= set(page.cells)
