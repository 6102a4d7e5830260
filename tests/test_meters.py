"""The meters of a run and of a checkpoint: the log, the command; the figures and the report that are made of them.

python -m pytest tests/test_meters.py
"""

import base64
import json
from html.parser import HTMLParser

import pytest
import test_contract
import torch
import torch.nn as nn

import meters
import plot
from model import MIXERS, Mixer, Projection
from runs import probe
from study import report, sinks
from study.page import Table

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


def test_rows_of_one_token_have_nothing_to_measure(text, helpers, tmp_path):
    out = helpers.train(text, tmp_path / "out", block_size=1, max_iters=1, meters="false")
    message = helpers.error_of(meters.main, helpers.words(checkpoint=out, device="cpu"))
    assert "rows of one token, which has no other to look at" in message


def test_a_map_that_is_not_there_names_those_that_are(trained, helpers):
    for text in ("2.0", "0", "a.b"):
        message = helpers.error_of(meters.main, [f"--checkpoint={trained}", f"--maps={text}", "--device=cpu"])
        assert message == f"maps={text!r}: write layer.head, from 0.0 to 1.1"


class Page(HTMLParser):
    """Collects the images and the texts of a page, and every address it would load from elsewhere."""

    def __init__(self):
        super().__init__()
        self.images, self.texts, self.open_tags = [], [], []

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
        if self.open_tags[-1:] == ["pre"]:
            self.texts.append(data)


def test_the_report_opens_and_holds_its_figures_and_its_table(tmp_path):
    rows = [
        {"arm": arm, "seed": seed, "metric": "accuracy", "accuracy": 0.25 + seed / 4, "curve": [[0, 0.1], [9, 0.5]],
         "data": {"pairs": 4}, "config": {"gate": "<none> & more"}}
        for arm in ("none", "a < b") for seed in (0, 1)
    ]  # fmt: skip
    figures, shown = report.figures(rows, tmp_path), Table("ends", ["arm", "0"], [["a < b", "0.25"]])
    page = Page()
    page.feed(report.write_page(tmp_path / "report.html", ["<none> & more", *figures, shown]).read_text())
    page.close()
    assert page.images == [figure.read_bytes() for figure in figures] and not page.open_tags
    assert page.texts[:2] == ["<none> & more", str(shown)]


# -- a mixer whose readout is not the recurrence -----------------------------------------------------------------------


class LongConv(Mixer):
    """q times a causal convolution of k v over all positions, with one learned filter per channel (Hyena, 2023)."""

    past_block_size = "ends"

    def __init__(self, config, gate):
        H, D = config.n_head, config.head_dim
        super().__init__(config, gate, query=(H, D), key=(H, D), value=(H, D))
        self.qkv = nn.Linear(config.n_embd, 3 * H * D, bias=False)
        self.filter = nn.Parameter(torch.empty(config.block_size, H * D))

    def init_parameter(self, name, start, generator):
        start.normal_(0.0, 0.1, generator=generator)

    def project(self, x, state, start):
        return Projection(*self.qkv(x).unflatten(-1, (-1, self.value_width)).chunk(3, dim=2))  # (B, T, H, D)

    def read(self, p, state, start):
        past = p.k * p.v
        if state is not None:
            end = start + past.shape[1]
            state["past"][:, start:end] = past
            past = state["past"][:, :end].to(past.dtype)
        S, T = past.shape[1], p.q.shape[1]
        lag = torch.arange(S - T, S)[:, None] - torch.arange(S)  # (T, S)
        filters = self.filter[lag.clamp(min=0)] * (lag >= 0)[..., None]  # (T, S, H D)
        return p.q * torch.einsum("tsc,bsc->btc", filters, past.flatten(2)).view_as(p.q)

    def init_state(self, batch_size, device=None, dtype=None):
        shape = batch_size, self.config.block_size, self.n_head, self.value_width
        return {"past": torch.zeros(shape, device=device, dtype=dtype)}

    def flops_per_token(self, T):
        return self.n_head * self.value_width * (T + 3)


NO_WEIGHTS = "no weights: its readout is its own, and it has no explicit_weights"


@pytest.mark.parametrize("attention, without", [("longconv", [0, 1]), ("longconv,softmax", [0])])
def test_a_mixer_without_weights_has_no_sink_and_all_else_is_measured_and_drawn(
    attention, without, text, helpers, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(MIXERS, "longconv", LongConv)
    out = helpers.train(text, tmp_path / "run", attention=attention, gate="headwise")
    capsys.readouterr()
    words = [f"--checkpoint={out}", "--device=cpu", "--rows=2", "--score_batches=1", "--queries=[aeiou]"]
    meters.main(words)
    printed = capsys.readouterr().out
    (row,) = json.loads((out / "meters.json").read_text())["checkpoints"]
    for i, layer in enumerate(row["layers"]):
        sink, has_none = layer["sink"], i in without
        kinds = [sink["kinds"][name] for name in ("[aeiou]", "other")]
        for name in ("share", "effective", "effective_uniform", "token_0_before", "token_0_after"):
            assert all((one[name] == [None, None]) == has_none for one in (sink, *kinds)), name
        assert sink["random_tokens"] == [None, None] if has_none else None not in sink["random_tokens"]
        assert (sink["heads_above"] is None) == (sink["kind"] == "none") == has_none
        assert None not in layer["gates"]["readout"]["mean"] + layer["rank"]["before"] + [layer["branch"]]
        assert layer["residual"]["max"] > 0 and kinds[0]["queries"] > 0
    assert f"sink of longconv: {NO_WEIGHTS}" in printed
    assert {shown["layer"] for shown in row["maps"]} == {0, 1} - {*without}
    short = json.loads(printed.splitlines()[-1])["checkpoints"][0]
    assert (short["sink"] is None) == (len(without) == 2) and short["gate_mean"]

    drawn = {}
    for module in (plot, sinks):
        monkeypatch.setattr(module, "write", lambda figure, path: drawn.update({path.name: figure}) or path)
    plot.main([str(out)])
    titles = [axes.get_title() for axes in drawn["page.png"].axes]
    named = " and ".join(f"{i} (longconv)" for i in without)
    assert f"no weights, so no sink and no map: layer {named}" in drawn["page.png"].get_suptitle()
    assert any(title.startswith("Gate") for title in titles) and any("Residual" in title for title in titles)
    assert any(title.startswith("Sink") for title in titles) == (len(without) == 1)
    capsys.readouterr()
    plot.main([str(out / "meters.json")])
    assert ("maps.png" in drawn) == (len(without) == 1) != ("no attention map" in capsys.readouterr().out)

    message = helpers.error_of(meters.main, [*words, "--maps=0.1"])
    assert message == "maps='0.1': layer 0 is longconv, which has no weights to draw"


def test_a_mixer_without_weights_keeps_every_other_promise(monkeypatch):
    monkeypatch.setitem(MIXERS, "longconv", LongConv)
    monkeypatch.setenv("MIXER", "longconv")
    cases, checks = test_contract.list_cases(), [f for name, f in vars(test_contract).items() if name[:5] == "test_"]
    assert len(cases) > 20 and len(checks) > 7
    keys = cases["longconv, elementwise"]
    for check in checks:
        if check is not test_contract.test_explicit_weights_reproduce_the_readout:
            check(keys)
    with pytest.raises(pytest.skip.Exception, match="no mixer here has weights"):
        test_contract.test_explicit_weights_reproduce_the_readout(keys)
