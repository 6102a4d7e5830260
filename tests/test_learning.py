"""Every mixer learns to recall, and none learns what cannot be known. Minutes of training: `make test-all` runs them.

python -m pytest tests/test_learning.py
"""

import json

import numpy as np
import pytest

import data.mqar.prepare as mqar
import train
from data.writing import write_examples
from model import MIXERS

SEQ_LEN, PAIRS, VOCAB = 64, 4, 64
CHANCE = 1 / (VOCAB // 2)  # of the values; 1 / PAIRS for a model that has learned to name a value in context


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mqar")
    sizes = ["--train_size=20000", "--val_size=1000"]
    mqar.main([f"--seq_len={SEQ_LEN}", f"--pairs={PAIRS}", f"--vocab_size={VOCAB}", f"--out_dir={folder}", *sizes])
    return folder


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory):
    """The same task, every label replaced by a value drawn anew: nothing is left to know."""
    folder, rng, splits = tmp_path_factory.mktemp("shuffled"), np.random.default_rng(0), {}
    for split, rows in (("train", 4000), ("val", 1000)):
        examples = mqar.generate(rng, rows, SEQ_LEN, PAIRS, vocab_size=VOCAB).copy()
        labelled = examples[:, 1] > 0
        examples[:, 1][labelled] = rng.integers(VOCAB // 2, VOCAB, labelled.sum())
        splits[split] = [(examples, {"slice": f"{SEQ_LEN}/{PAIRS}", "pairs": PAIRS})]
    about = dict(name="shuffled", generator="test", generator_version=1, parameters={}, seed=0)
    write_examples(folder, splits, vocab_size=VOCAB, tokenizer="mqar", **about)
    return folder


def accuracy(mixer, folder, out_dir, max_iters):
    train.main(
        [
            f"--attention={mixer}", f"--dataset={folder}", f"--out_dir={out_dir}", f"--max_iters={max_iters}",
            "--n_layer=2", "--n_embd=64", "--n_head=2", f"--block_size={SEQ_LEN}", "--short_conv=4", "--state_size=32",
            "--mlp_ratio=2", "--batch_size=64", "--learning_rate=3e-3", "--warmup_iters=50", "--eval_interval=200",
            "--eval_batch_size=250", "--device=cpu", "--dtype=float32", "--threads=1",
        ]
    )  # fmt: skip
    rows = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["accuracy"] for row in rows if row["event"] == "eval"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_mixers_learn_to_recall(mixer, folder, tmp_path):
    steps = 2000 if mixer == "mamba2" else 1000  # it stays longer at naming one of the four values in context
    reached = accuracy(mixer, folder, tmp_path / "out", max_iters=steps)
    assert reached > (0.95 if mixer in ("softmax", "gated_deltanet", "gla") else 0.60)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_shuffled_labels_stay_at_chance(mixer, shuffled, tmp_path):
    assert accuracy(mixer, shuffled, tmp_path / "out", max_iters=400) < CHANCE + 0.03
