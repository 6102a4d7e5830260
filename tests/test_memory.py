"""What a run will hold: counted beforehand, never more than it takes, and refused where there is less.

python -m pytest tests/test_memory.py
"""

import re

import pytest
import torch

import evaluate
import meters
import sample
import train
from data.shards import open_dataset
from model import GPT, MIXERS, GPTConfig
from runs import hardware, limits, memory

PART = re.compile(r"(\w+) ([\d,.]+) (\w+)[,)]")
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}


def kept_by_a_step(config, dtype, B, T):
    """Bytes of all tensors but the parameters that the blocks and the loss keep for the way back."""
    model, idx, kept = GPT(config), torch.randint(config.vocab_size, (B, T)), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), hardware.autocast("cpu", dtype):
        loss = model(idx, torch.where(torch.arange(T) == T - 1, idx, -100))  # one label a row
    assert loss.requires_grad  # what was kept is alive until here
    return sum(size for place, size in kept.items() if place not in weights)


@pytest.mark.parametrize("attention", [*MIXERS, "softmax,gla"])
def test_activations_are_never_more_than_a_step_keeps(attention):
    keys = dict(n_layer=3, n_embd=64, n_head=4, block_size=64, vocab_size=11, position="none", state_size=16)
    for gate, dtype, more in (
        ("none", "float32", {}),
        ("elementwise", "bfloat16", {}),
        ("none", "bfloat16", dict(n_kv_head=1, mlp="swiglu", mlp_ratio=8.0)),
        ("elementwise", "float32", dict(n_layer=1)),
    ):
        config = train.TrainConfig(**keys | more, attention=attention, gate=gate)
        estimate = memory.activations_at_least(config, dtype, 8 * 64)
        kept = kept_by_a_step(config, dtype, 8, 64)
        assert estimate <= kept < (12 * estimate if config.n_layer > 1 else float("inf"))


def test_recomputed_activations_are_the_inputs_of_blocks_and_one_block():
    keys = dict(n_layer=3, n_embd=64, n_head=4, mlp_ratio=4, vocab_size=11, position="none")
    config = train.TrainConfig(**keys, activation_checkpointing=True)
    block = (3 + 1 + 4 + 1) * 64  # q, k and v; the output; the MLP's two
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        assert memory.activations_at_least(config, dtype, 100) == 100 * (3 * 4 * 64 + size * block)


@pytest.mark.parametrize("keys", [{}, dict(attention="softmax,gla,mamba2", gate="none,headwise"), dict(n_layer=1)])
def test_weights_are_counted_to_the_byte_and_the_random_state_stays(keys):
    keys = dict(n_layer=7, n_embd=24, n_head=2, vocab_size=9, position="learned", block_size=16) | keys
    config, before = GPTConfig(**keys), torch.get_rng_state()
    counted = memory.held(config, 1)["parameters"]
    assert torch.equal(torch.get_rng_state(), before)
    assert counted == sum(p.nbytes for p in GPT(config).parameters())


@pytest.mark.parametrize(
    ("keys", "largest"),
    [
        (dict(n_embd=1 << 20), "parameters"),
        (dict(vocab_size=1 << 40), "parameters"),
        (dict(attention="mamba2", position="none", state_size=1 << 40), "activations"),
        (dict(gate="elementwise", gate_rank=1 << 40), "parameters"),
        (dict(batch_size=1 << 40), "activations"),
        (dict(gradient_accumulation_steps=1 << 40), "rows"),
        (dict(block_size=1 << 40), "evaluation"),
        (dict(n_embd=1 << 50), None),  # more than can be counted
        (dict(mlp_ratio=1e38), None),
    ],
)
def test_too_large_a_run_is_refused_before_anything_is_written(helpers, mqar, tmp_path, keys, largest):
    error = helpers.error_of(helpers.train, mqar, tmp_path / "out", **keys)
    assert not (tmp_path / "out").exists()
    if largest is None:
        assert "tensors that are too large" in error
    else:
        sizes = {name: float(size.replace(",", "")) * UNITS[unit] for name, size, unit in PART.findall(error)}
        assert max(sizes, key=sizes.get) in (largest, "optimizer") and "memory_check=false" in error


def test_a_run_lists_what_it_holds(helpers, mqar, tmp_path, capsys):
    out = helpers.train(mqar, tmp_path / "out", max_iters=1, n_embd=128, meters=False, gradient_accumulation_steps=3)
    total, number, listed = re.search(r"memory: at least (\S+) (\w+) \((.*)\); ", capsys.readouterr().out).groups()
    parts = {name: float(size) * UNITS[unit] for name, size, unit in PART.findall(f"{listed})")}
    config = train.TrainConfig(**torch.load(out / "ckpt.pt")["config"])
    weights, tokens = memory.held(config, 1)["parameters"], 4 * 32
    outputs = (3 + 1 + 2 + 1) * 128  # of all layers but the last
    expected = dict(parameters=weights, gradients=weights, optimizer=2 * weights, rows=3 * 16 * tokens)
    expected |= dict(activations=4 * outputs * tokens, evaluation=48 * 32)
    assert parts == {name: pytest.approx(size, rel=0.06, abs=600) for name, size in expected.items()}
    assert float(total) * UNITS[number] == pytest.approx(sum(expected.values()), rel=0.06)


@pytest.mark.parametrize("left", [100, 99])
def test_what_fits_to_the_byte_is_not_refused_and_memory_check_false_tries_the_rest(left, helpers, monkeypatch):
    monkeypatch.setattr(memory, "ram_available", lambda: (2 * left, "this machine"))
    config, parts = train.TrainConfig(), {"parameters": 60.0, "rows": 40.0}
    if left == 99:
        error = helpers.error_of(memory.check, config, parts, processes_here=2)
        assert "(parameters 0 kB, rows 0 kB); each of 2 processes here has 0 kB left: --memory_check=false" in error
        config.memory_check = False
    assert "memory: at least 0 kB" in memory.check(config, parts, processes_here=2)


@pytest.fixture(scope="module")
def checkpoints(helpers, mqar, text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        "mqar": helpers.train(mqar, folder / "mqar", max_iters=1),
        "text": helpers.train(text, folder / "text", max_iters=1),
    }


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("mqar", dict(block_size=10**9), "this machine has 1.0 GB left"),
        ("text", dict(block_size=1 << 50), "reads all of it"),
        ("text", dict(lengths="32,1000000000000"), None),
        ("mqar", dict(lengths="32,64"), "lengths are for text"),
    ],
)
def test_evaluate_refuses_a_block_size_beyond_memory_and_text(
    name, keys, words, helpers, checkpoints, monkeypatch, capsys
):
    monkeypatch.setattr(memory, "ram_available", lambda: (10**9, "this machine"))
    argv = helpers.words(checkpoint=checkpoints[name], device="cpu", **keys)
    if words:
        assert words in helpers.error_of(evaluate.main, argv)
    else:
        evaluate.main(argv)
        assert "reads all of it" in capsys.readouterr().out


def test_evaluate_reads_a_text_shorter_than_the_block_size_it_was_trained_with(helpers, text):
    dataset = open_dataset(text)
    model = GPT(GPTConfig(n_layer=1, n_embd=16, n_head=2, vocab_size=256, block_size=5000))
    config = evaluate.EvaluateConfig()
    memory.check_evaluation(config, model, dataset, 5000)
    assert "reads all of it" in helpers.error_of(memory.check_evaluation, config, model, dataset, 5001)


def test_sampling_and_meters_are_refused_without_the_memory(helpers, checkpoints, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "ram_available", lambda: (10, "this machine"))
    for main, name, keys in (
        (sample.main, "mqar", {}),
        (sample.main, "text", {}),
        (meters.main, "mqar", dict(out=tmp_path / "meters.json", threads=1, score_batches=1)),
    ):
        words = helpers.words(checkpoint=checkpoints[name], device="cpu", **keys)
        assert "this machine has 0 kB left" in helpers.error_of(main, words)
        main([*words, "--memory_check=false"])


def test_threads_beyond_what_a_machine_takes_are_refused(helpers, mqar, tmp_path):
    assert "threads=1000000: at most" in helpers.error_of(helpers.train, mqar, tmp_path / "out", threads=10**6)


@pytest.mark.parametrize(
    ("line", "files", "left"),
    [
        ("0::/job", {"job/memory.max": "5000", "job/memory.current": "4000"}, 1000),
        ("0::/a", {"a/memory.max": "5000", "a/memory.current": "4000", "a/memory.stat": "inactive_file 500"}, 1500),
        ("0::/a/b", {"a/memory.max": "7000", "a/memory.current": "4000", "a/b/memory.max": "max"}, 3000),
        ("0::/not/mounted", {"memory.max": "900", "memory.current": "1000"}, 0),
        ("4:memory:/job", {"memory.max": "5000", "memory.current": "1"}, None),
    ],
)  # fmt: skip
def test_a_containers_limit_is_found(tmp_path, monkeypatch, line, files, left):
    monkeypatch.setattr(limits, "PROC", tmp_path / "proc")
    monkeypatch.setattr(limits, "CGROUPS", tmp_path / "cgroup")
    for name, content in {"proc/self/cgroup": line, **{f"cgroup/{name}": text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    assert limits._of_container() == ([] if left is None else [(left, "this container")])
