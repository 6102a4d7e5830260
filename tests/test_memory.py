"""What a run will hold: counted beforehand, never more than it takes, and refused where there is less.

python -m pytest tests/test_memory.py
"""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import evaluate
import meters
import sample
import train
from data.mqar import prepare as mqar_prepare
from data.shards import open_dataset
from model import GPT, MIXERS, GPTConfig
from runs import hardware, limits, memory

ROOT = Path(__file__).resolve().parents[1]
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate", ["none", "elementwise"])
@pytest.mark.parametrize("attention", [*MIXERS, "softmax,gla"])
def test_activations_are_never_more_than_a_step_keeps(attention, gate, dtype):
    keys = dict(n_layer=3, n_embd=64, n_head=4, block_size=64, vocab_size=11, position="none", state_size=16)
    for more in ({}, dict(n_kv_head=1, mlp="swiglu", mlp_ratio=8.0), dict(n_layer=1)):
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


def test_counting_leaves_the_random_state_as_it_was():
    before = torch.get_rng_state()
    memory.weight_bytes(GPTConfig(n_layer=1, n_embd=24, n_head=2, vocab_size=9))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("keys", [{}, dict(attention="softmax,gla,mamba2", gate="none,headwise"), dict(n_layer=1)])
def test_weights_are_counted_to_the_byte(keys):
    keys = dict(n_layer=7, n_embd=24, n_head=2, vocab_size=9, position="learned", block_size=16) | keys
    config = GPTConfig(**keys)
    assert memory.weight_bytes(config) == sum(p.nbytes for p in GPT(config).parameters())


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (dict(n_embd=1 << 20), "n_embd"),
        (dict(n_embd=1 << 50), "n_embd"),
        (dict(n_layer=10_000, n_embd=4096), "n_layer"),
        (dict(vocab_size=1 << 40), "vocab_size"),
        (dict(vocab_size=1 << 62), "vocab_size"),
        (dict(mlp_ratio=1e9), "mlp_ratio"),
        (dict(mlp_ratio=1e38), "mlp_ratio"),
        (dict(head_dim=1 << 30), "head_dim"),
        (dict(n_head=1 << 30, head_dim=2), "n_head"),
        (dict(attention="mamba2", position="none", state_size=1 << 40), "state_size"),
        (dict(attention="mamba2", position="none", expand=1 << 30), "expand"),
        (dict(batch_size=1 << 40), "batch_size"),
        (dict(gradient_accumulation_steps=1 << 40), "gradient_accumulation_steps"),
        (dict(block_size=1 << 40), "block_size"),
        (dict(position="learned", block_size=1 << 40), "block_size"),
        (dict(gate="elementwise", gate_rank=1 << 40), "gate_rank"),
        (dict(pad_vocab_to=1 << 40), "pad_vocab_to"),
    ],
)
def test_too_large_a_run_is_refused_before_anything_is_written(helpers, mqar, tmp_path, keys, named):
    error = helpers.error_of(helpers.train, mqar, tmp_path / "out", **keys)
    assert f"{named}={keys[named]}" in error and " left: " in error and "memory_check=false" in error
    assert not (tmp_path / "out").exists()


def test_a_run_lists_what_it_holds(helpers, mqar, tmp_path, capsys):
    out = helpers.train(mqar, tmp_path / "out", max_iters=1, n_embd=128, meters=False, gradient_accumulation_steps=3)
    total, number, listed = re.search(r"memory: at least (\S+) (\w+) \((.*)\); ", capsys.readouterr().out).groups()
    found = re.findall(r"(\D+) ([\d.]+) (\w+)(?:, )?", listed)
    parts = {name: float(size) * UNITS[unit] for name, size, unit in found}
    config = train.TrainConfig(**torch.load(out / "ckpt.pt")["config"])
    weights, tokens = memory.weight_bytes(config), 4 * 32
    outputs = (3 + 1 + 2 + 1) * 128  # of all layers but the last
    expected = dict(parameters=weights, gradients=weights, optimizer=2 * weights, rows=3 * 16 * tokens)
    expected |= dict(activations=4 * outputs * tokens, evaluation=48 * 32)
    assert parts == {name: pytest.approx(size, rel=0.06, abs=600) for name, size in expected.items()}
    assert float(total) * UNITS[number] == pytest.approx(sum(expected.values()), rel=0.06)


def test_memory_check_false_runs_all_the_same(helpers, mqar, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hardware, "ram_available", lambda: (1000, "this machine"))
    assert "this machine has 1 kB left" in helpers.error_of(helpers.train, mqar, tmp_path / "out")
    helpers.train(mqar, tmp_path / "out", memory_check=False, max_iters=1)
    assert "memory: at least " in capsys.readouterr().out


def test_a_run_that_fits_to_the_byte_is_not_refused(helpers, mqar, monkeypatch):
    config, here = train.TrainConfig(**helpers.tiny | {"vocab_size": 32}), SimpleNamespace(world_size=1, local_size=1)
    here.device_type = "cpu"
    seen, check = [], memory.check
    monkeypatch.setattr(memory, "check", lambda config, parts, *here: seen.append(parts) or check(config, parts, *here))
    memory.check_training(config, None, open_dataset(mqar), here)
    need = int(sum(seen[0].values()))
    for left in (need, need - 1):
        monkeypatch.setattr(memory, "memory_available", lambda *here, left=left: (left, "this machine"))
        if left == need:
            memory.check_training(config, None, open_dataset(mqar), here)
        else:
            assert "at least " in helpers.error_of(memory.check_training, config, None, open_dataset(mqar), here)


@pytest.fixture(scope="module")
def checkpoints(helpers, mqar, text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        "mqar": helpers.train(mqar, folder / "mqar", max_iters=1),
        "text": helpers.train(text, folder / "text", max_iters=1),
    }


@pytest.mark.parametrize("name", ["mqar", "text"])
@pytest.mark.parametrize("keys", [dict(block_size=10**9), dict(block_size=1 << 50), dict(lengths="32,1000000000000")])
def test_evaluate_refuses_a_block_size_beyond_memory_and_text(helpers, checkpoints, name, keys, monkeypatch, capsys):
    monkeypatch.setattr(hardware, "ram_available", lambda: (10**9, "this machine"))
    words = helpers.words(checkpoint=checkpoints[name], device="cpu", **keys)
    if name == "text" and "lengths" in keys:
        evaluate.main(words)
        assert "reads all of it" in capsys.readouterr().out
    else:
        error = helpers.error_of(evaluate.main, words)
        assert ("lengths" in error) if "lengths" in keys else "block_size=1" in error


def test_evaluate_reads_a_text_shorter_than_the_block_size_it_was_trained_with(helpers, text):
    dataset = open_dataset(text)
    model = GPT(GPTConfig(n_layer=1, n_embd=16, n_head=2, vocab_size=256, block_size=5000))
    config = evaluate.EvaluateConfig()
    memory.check_evaluation(config, model, dataset, 5000)
    assert "reads all of it" in helpers.error_of(memory.check_evaluation, config, model, dataset, 5001)


@pytest.mark.parametrize("name", ["mqar", "text"])
def test_sampling_and_meters_are_refused_without_the_memory(helpers, checkpoints, name, monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "ram_available", lambda: (10, "this machine"))
    for main, keys in ((sample.main, {}), (meters.main, dict(out=tmp_path / "meters.json", threads=1))):
        words = helpers.words(checkpoint=checkpoints[name], device="cpu", **keys)
        assert "this machine has 0 kB left" in helpers.error_of(main, words)
        main([*words, "--memory_check=false"])


def test_threads_beyond_what_a_machine_takes_are_refused(helpers, mqar, tmp_path):
    assert "threads=1000000: at most" in helpers.error_of(helpers.train, mqar, tmp_path / "out", threads=10**6)


@pytest.mark.parametrize(
    "keys", [dict(train_size=1 << 50), dict(val_size=1 << 62), dict(slices="1000000000000/4"), dict(seq_len=1 << 40)]
)
def test_mqar_beyond_memory_is_refused_before_anything_is_written(helpers, tmp_path, keys):
    error = helpers.error_of(mqar_prepare.main, helpers.words(**keys, out_dir=tmp_path / "data"))
    assert "would be needed" in error and "lower train_size" in error
    assert not (tmp_path / "data").exists()


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


@on_linux
def test_a_ulimit_is_found():
    code = "import resource; from runs import limits; resource.setrlimit(resource.RLIMIT_AS, (10**9, 10**9)); "
    code += "print(limits.ram_available())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    available, where = eval(run.stdout)
    assert where == "ulimit -v" and 0 < available < 10**9
