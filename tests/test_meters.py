"""The meters of a checkpoint: pruning, 8 bits, the command; the figures and the report that are made of them.

python -m pytest tests/test_meters.py
"""

import base64
import json
from html.parser import HTMLParser

import pytest
import torch

import meters
import plot
from model import GPT, MIXERS, GPTConfig
from runs import probe
from study import interventions, report

T, C, H, D = 12, 16, 2, 8
every_mixer = pytest.mark.parametrize("name", MIXERS)


@torch.no_grad()
def make_model(noise=0.2, **keys):
    """Two layers of random weights; noise 0 leaves the start, where gates are zero."""
    torch.manual_seed(0)
    keys = dict(n_layer=2, n_embd=C, n_head=H, block_size=T, vocab_size=20, state_size=4, position="none") | keys
    model = GPT(GPTConfig(**keys)).eval()
    for p in model.parameters():
        p.add_(noise * torch.randn_like(p))
    return model


def random_tokens():
    return torch.randint(20, (3, T), generator=torch.Generator().manual_seed(1))


# -- pruning and 8 bits ------------------------------------------------------------------------------------------------


@every_mixer
def test_pruning_at_threshold_0_changes_nothing_and_above_every_value_closes_all(name):
    model, tokens = make_model(attention=name, gate="elementwise"), random_tokens()
    before = model(tokens)
    with interventions.pruned(model, 0.0) as counts:
        assert torch.equal(model(tokens), before)
    assert counts[0] == 0 and counts[1] == 2 * 3 * T * model.blocks[0].mixer.n_head * D
    with interventions.pruned(model, 1.01) as counts:
        closed = model(tokens)
    assert counts[0] == counts[1]
    with torch.no_grad():
        for block in model.blocks:
            block.mixer.out_proj.weight.zero_()
    torch.testing.assert_close(closed, model(tokens))


def test_the_pruned_share_is_that_of_the_values_under_the_threshold():
    model, tokens = make_model(gate="elementwise"), random_tokens()
    layers = meters.layer_meters(model, tokens, {}, "float32")
    with interventions.pruned(model, 0.1) as counts:
        model(tokens)
    assert counts[0] / counts[1] == pytest.approx(meters.summary(layers, T)["gate_below_0.1"]["readout"], abs=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("keys", [dict(), dict(n_kv_head=1, qk_norm=True, position="rope")])
def test_decoding_without_closed_heads_is_the_pruned_model(keys):
    model, tokens = make_model(noise=0.5, gate="headwise", **keys), random_tokens()[:1]
    before, (state, skipped_state) = model(tokens), (model.init_state() for _ in range(2))
    with interventions.closed_heads_skipped(model, 0.5) as counts:
        skipped = []
        for start, end in ((0, 4), *((i, i + 1) for i in range(4, T))):
            x, skipped_state = model.features(tokens[:, start:end], skipped_state, start)
            skipped.append(x)
    for start, end in ((0, 4), *((i, i + 1) for i in range(4, T))):
        with interventions.pruned(model, 0.5 if start else 0.0):  # the prefill is whole
            x, state = model.features(tokens[:, start:end], state, start)
        torch.testing.assert_close(skipped.pop(0), x)
    assert 0 < counts[0] < counts[1] == (T - 4) * 2 * H
    assert torch.equal(model(tokens), before)
    assert all("read" not in vars(block.mixer) for block in model.blocks)


@torch.no_grad()
def test_eight_bits_keep_what_they_can_say_and_lose_what_an_outlier_hides():
    model = make_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    up = model.blocks[0].mlp.up
    up.weight[:, 0], up.weight[:, 1:] = 127.0, torch.randint(-127, 128, up.weight[:, 1:].shape).float()
    x, other = torch.zeros(1, C), torch.randn(1, C)
    x[0, 0], x[0, 1] = 127.0, 0.4  # 0.4 is less than half a level
    key = model.blocks[0].mixer.out_proj
    exact, fine = up(torch.eye(C)[1:2]), key(other)
    with interventions.quantised(model):
        torch.testing.assert_close(up(x), 127.0 * up.weight[:, 0][None])
        torch.testing.assert_close(up(torch.eye(C)[1:2]), exact)  # these weights are levels
        assert 0 < (key(other) - fine).abs().max() < 0.05 * fine.abs().max()
    assert torch.equal(key(other), fine) and not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if "0.mlp.up" not in name)


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
