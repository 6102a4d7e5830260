"""What is clearly too large for this machine is refused before anything is written."""

import pytest

import evaluate
import train
from data.shards import open_dataset
from model import GPT, GPTConfig
from runs import memory


@pytest.mark.parametrize(
    "keys",
    [
        dict(n_embd=1 << 20), dict(vocab_size=1 << 40), dict(batch_size=1 << 40), dict(block_size=1 << 40),
        dict(gradient_accumulation_steps=1 << 40), dict(attention="mamba2", position="none", state_size=1 << 40),
        dict(mlp_ratio=1e38),  # more than can be counted
    ],
)  # fmt: skip
def test_too_large_a_run_is_refused_before_anything_is_written(helpers, mqar, tmp_path, keys):
    error = helpers.error_of(helpers.train, mqar, tmp_path / "out", **keys)
    assert "would be needed, and" in error or "tensors that are too large" in error
    assert not (tmp_path / "out").exists()


def test_what_fits_to_the_byte_is_not_refused_and_memory_check_false_tries_the_rest(helpers, monkeypatch):
    monkeypatch.setattr(memory, "ram_available", lambda: 200)
    memory.check(train.TrainConfig(), 100, "cpu", processes_here=2)
    memory.check(train.TrainConfig(memory_check=False), 101, "cpu", processes_here=2)
    assert "memory_check=false" in helpers.error_of(memory.check, train.TrainConfig(), 101, "cpu", processes_here=2)


def test_evaluate_reads_a_text_shorter_than_the_block_size_it_was_trained_with(helpers, text):
    dataset = open_dataset(text)
    model = GPT(GPTConfig(n_layer=1, n_embd=16, n_head=2, vocab_size=256, block_size=5000))
    config = evaluate.EvaluateConfig()
    memory.check_evaluation(config, model, dataset, 5000)
    assert "reads all of it" in helpers.error_of(memory.check_evaluation, config, model, dataset, 5001)
