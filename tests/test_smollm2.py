"""What results/smollm2 measures, on a tiny model; its tables are those of the committed rows."""

import copy

import pytest
import torch
from conftest import ROOT
from small_models import off_its_start

from evaluate import quantise
from model import GPTConfig
from ops import IGNORE
from results.smollm2 import measure

KEYS = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, block_size=24, vocab_size=50)


@pytest.fixture
def model():
    return off_its_start(GPTConfig(**KEYS), torch.float32, noise=0.5).eval()


def test_the_labels_of_a_row_are_the_same_with_bos_and_without():
    row = torch.arange(10, 20)
    inputs, targets = measure.with_bos(row, True)
    assert inputs.tolist() == [[1, *range(10, 18)]] and targets.tolist() == [[IGNORE, *range(11, 19)]]
    inputs, targets = measure.with_bos(row, False)
    assert inputs.tolist() == [[*range(10, 19)]] and targets.tolist() == [[*range(11, 20)]]


@torch.no_grad()
def test_a_closed_head_does_not_see_the_first_token_and_the_others_are_as_before(model):
    mixer = model.blocks[0].mixer
    p = mixer.project(torch.randn(2, 24, 32), None, 0)
    whole = mixer.read(p, None, 0)
    measure.closed(mixer, [1, 3])
    o = mixer.read(p, None, 0)
    assert torch.allclose(o[:, :, [0, 2]], whole[:, :, [0, 2]], atol=1e-6) and torch.equal(o[:, 0], whole[:, 0])
    later = mixer.explicit_weights(p)[:, :, 1:, 1:]  # (B, H, queries, keys)
    later = later / later.sum(-1, keepdim=True)
    v = p.v.repeat_interleave(2, dim=2)[:, 1:]
    expected = torch.einsum("bhij,bjhd->bihd", later, v)
    assert torch.allclose(o[:, 1:, [1, 3]], expected[:, :, [1, 3]], atol=1e-5)


def test_a_row_has_every_number_of_every_layer(model):
    in_eight_bits = copy.deepcopy(model)
    quantise(in_eight_bits)
    row = measure.measured(model, in_eight_bits, *measure.with_bos(torch.arange(25), False))
    assert row["loss"] != row["loss in 8 bits"] and abs(row["loss"] - row["loss in 8 bits"]) < 0.1
    assert [len(layer) for layer in row["share"]] == [4, 4] and len(row["max"]) == 2
    assert 0 < measure.mean_over(row, "share", slice(0, 2)) < 1


def test_the_page_has_the_tables_of_the_rows(capsys, monkeypatch):
    monkeypatch.setattr(measure, "draw_layers", lambda *args: None)
    measure.main(["tables"])
    page = (ROOT / "results/smollm2/README.md").read_text()
    for line in capsys.readouterr().out.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in ("loss, nats a token", "what 8 bits cost", "weight on the first token, layers 12 to 29"):
            assert "| " + " | ".join(cells) + " |" in page
