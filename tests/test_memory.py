"""What a run will need of the memory: estimated beforehand, near to what is measured, and refused where there is less.

python -m pytest tests/test_memory.py
python -m pytest tests/test_memory.py -m slow      the estimate of gated, softcapped and half-precision models
"""

import itertools
import math
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
from data import writing
from data.mqar import prepare as mqar_prepare
from data.shards import open_dataset
from model import MIXERS, GPTConfig, Softmax
from runs import hardware, limits, memory

ROOT = Path(__file__).resolve().parents[1]
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
# a run in a process of its own, that prints how far its resident memory has risen above that of the imports
MEASURE = """
import sys
import torch._dynamo  # the optimizer loads it
import train
from runs import memory

memory.training_at_most = lambda *_: float("inf")  # the estimate is what is tested

def status(name):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(name + ":"))
    return 1024 * int(line.split()[1])

before = status("VmRSS")
train.main(sys.argv[1:])
print("measured", status("VmHWM") - before)
"""


def estimated_over_measured(helpers, text, out_dir, **keys):
    """Of a run of train.py: three steps between two evaluations."""
    keys = dict(
        n_layer=4, n_embd=384, n_head=6, block_size=256, batch_size=8, eval_batch_size=1, max_iters=3,
        position="none", mlp_ratio=4, meters=False, dataset=text, out_dir=out_dir,
    ) | keys  # fmt: skip
    words = helpers.words(**helpers.tiny | keys)
    run = subprocess.run([sys.executable, "-c", MEASURE, *words], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    number, unit = re.search(r"memory: about ([\d.,]+) (\w+)", run.stdout).groups()
    measured = int(re.search(r"measured (\d+)", run.stdout).group(1))
    assert measured > 250e6  # else it is the noise that is measured
    return float(number.replace(",", "")) * UNITS[unit] / measured


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


ONE_OF_EACH_KIND = ("softmax", "mamba2")  # all tokens; a recurrence, with a convolution


@on_linux
@pytest.mark.parametrize(
    "attention",
    [pytest.param(name, marks=[] if name in ONE_OF_EACH_KIND else pytest.mark.slow) for name in MIXERS],
)
def test_estimate_is_within_30_percent_of_the_measured_peak(helpers, text, tmp_path, attention):
    assert 0.7 < estimated_over_measured(helpers, text, tmp_path / "out", attention=attention) < 1.3


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("attention", MIXERS)
@pytest.mark.parametrize(
    "keys",
    [
        dict(dtype="bfloat16"),
        dict(gate="elementwise", match_params=True),
        dict(vocab_size=30_000, batch_size=4),
        dict(gradient_accumulation_steps=3, n_embd=768, n_head=12, batch_size=2),
        dict(n_layer=8, dropout=0.1, gate="headwise", dtype="bfloat16"),
    ],
)
def test_estimate_is_within_30_percent_for_other_runs(helpers, text, tmp_path, attention, keys):
    assert 0.7 < estimated_over_measured(helpers, text, tmp_path / "out", attention=attention, **keys) < 1.3


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        dict(attention_softcap=30.0, block_size=256),
        dict(attention="softmax,gla", gate="none,elementwise"),
        dict(batch_size=2, block_size=1024, meters=True),
        dict(n_layer=8, batch_size=16, activation_checkpointing=True),
    ],
)
def test_estimate_is_within_30_percent_for_softcaps_patterns_meters_and_checkpointing(helpers, text, tmp_path, keys):
    assert 0.7 < estimated_over_measured(helpers, text, tmp_path / "out", **keys) < 1.3


@pytest.mark.parametrize(("attention", "B", "T"), [("softmax", 40, 64), ("gla", 2, 2048), ("softmax", 2, 2048)])
def test_extrapolated_phases_are_the_traced_ones(monkeypatch, attention, B, T):
    keys = dict(attention=attention, position="none", n_layer=1, n_embd=32, n_head=2, vocab_size=40, block_size=2048)
    config = GPTConfig(**keys, attention_softcap=9.0)  # its weights of all pairs are a square of T
    exact = memory.phases_of(memory.train_step, config, "float32", B, T)
    monkeypatch.setattr(memory, "MOST_TOKENS", 1024)
    monkeypatch.setattr(memory, "LONGEST", 1024)
    assert memory.phases_of(memory.train_step, config, "float32", B, T) == pytest.approx(exact, rel=0.1, abs=1e5)


def test_estimate_leaves_the_random_state_as_it_was():
    before = torch.get_rng_state()
    memory.peak_of(memory.train_step, GPTConfig(n_layer=1, n_embd=24, n_head=2, vocab_size=9), "float32", 1, 16)
    assert torch.equal(torch.get_rng_state(), before)


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


def test_what_a_run_takes_at_most_is_far_more_than_the_estimate(mqar, text):
    here = SimpleNamespace(device_type="cpu", world_size=1)
    for attention, dataset in itertools.product(MIXERS, map(open_dataset, (mqar, text))):
        keys = dict(attention=attention, position="none", gate="elementwise", vocab_size=256, block_size=32)
        config = train.TrainConfig(**keys, n_layer=2, n_embd=16, n_head=2, batch_size=4)
        exact = memory.training(config, "float32", dataset, here)["total"]
        assert 4 * exact < memory.training_at_most(config, dataset)


def test_a_run_that_is_not_traced_lists_what_it_holds_and_a_bound_for_activations(helpers, mqar, tmp_path, capsys):
    out = helpers.train(mqar, tmp_path / "out", max_iters=1, n_embd=128, meters=False)
    (listed,) = re.findall(r"memory: far less is needed .*\((.*)\)", capsys.readouterr().out)
    parts = {
        name: float(number) * UNITS[unit] for name, number, unit in re.findall(r"(\D+) ([\d.]+) (\w+)(?:, )?", listed)
    }
    config = train.TrainConfig(**torch.load(out / "ckpt.pt")["config"])
    here = SimpleNamespace(device_type="cpu", world_size=1)
    exact = memory.training(config, "float32", open_dataset(mqar), here)
    bound = parts.pop("activations at most")
    assert parts == {name: pytest.approx(exact[name], rel=0.1) for name in ("parameters", "gradients", "optimizer")}
    assert 4 * exact["activations"] < bound < memory.training_at_most(config, open_dataset(mqar))


def test_memory_check_false_runs_all_the_same(helpers, mqar, tmp_path, monkeypatch, capsys):
    helpers.train(mqar, tmp_path / "small", max_iters=1)
    assert "memory: far less is needed than the " in capsys.readouterr().out  # so it is not traced
    monkeypatch.setattr(hardware, "ram_available", lambda: (1000, "this machine"))
    assert "this machine has 1 kB left" in helpers.error_of(helpers.train, mqar, tmp_path / "out")
    helpers.train(mqar, tmp_path / "out", memory_check=False, max_iters=1)
    assert "memory: about " in capsys.readouterr().out


def test_model_code_that_cannot_be_traced_is_no_obstacle(helpers, mqar, tmp_path, monkeypatch, capsys):
    def read(self, p, state, start):
        assert float(p.q.detach().sum()) < 1e9  # a value, which a tensor of shapes alone does not have
        return before(self, p, state, start)

    before = Softmax.read
    monkeypatch.setattr(Softmax, "read", read)
    monkeypatch.setattr(memory, "training_at_most", lambda *_: math.inf)
    helpers.train(mqar, tmp_path / "out", max_iters=1, n_embd=20)  # no width of another test
    assert "memory: not estimated" in capsys.readouterr().out


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
    model = SimpleNamespace(config=GPTConfig(n_layer=1, n_embd=16, n_head=2, vocab_size=256, block_size=5000))
    config = evaluate.EvaluateConfig()
    here = SimpleNamespace(device_type="cpu", local_size=1)
    memory.check_evaluation(config, model, dataset, 5000, here)
    assert "reads all of it" in helpers.error_of(memory.check_evaluation, config, model, dataset, 5001, here)


@pytest.mark.parametrize("name", ["mqar", "text"])
def test_sampling_and_meters_are_refused_without_the_memory(helpers, checkpoints, name, monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "ram_available", lambda: (10_000, "this machine"))
    for main, keys in ((sample.main, {}), (meters.main, dict(out=tmp_path / "meters.json", threads=1))):
        words = helpers.words(checkpoint=checkpoints[name], device="cpu", **keys)
        assert "this machine has 10 kB left" in helpers.error_of(main, words)
        main([*words, "--memory_check=false"])


def test_threads_beyond_what_a_machine_takes_are_refused(helpers, mqar, tmp_path):
    assert "threads=1000000: at most" in helpers.error_of(helpers.train, mqar, tmp_path / "out", threads=10**6)


@pytest.mark.parametrize(
    "keys", [dict(train_size=1 << 50), dict(val_size=1 << 62), dict(slices="1000000000000/4"), dict(seq_len=1 << 40)]
)
def test_mqar_beyond_memory_or_disk_is_refused_before_anything_is_written(helpers, tmp_path, keys):
    error = helpers.error_of(mqar_prepare.main, helpers.words(**keys, out_dir=tmp_path / "data"))
    assert "would be needed" in error and "lower train_size" in error
    assert not (tmp_path / "data").exists()


def test_mqar_that_the_disk_has_no_room_for_is_refused(helpers, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "disk_free", lambda folder: 1000)
    error = helpers.error_of(mqar_prepare.main, helpers.words(train_size=100, out_dir=tmp_path / "data"))
    assert f"the disk of {tmp_path / 'data'} has 1 kB left" in error


@pytest.mark.parametrize(
    ("line", "files", "left"),
    [
        ("0::/job", {"job/memory.max": "5000", "job/memory.current": "4000"}, 1000),
        ("0::/a", {"a/memory.max": "5000", "a/memory.current": "4000", "a/memory.stat": "inactive_file 500"}, 1500),
        ("0::/a/b", {"a/memory.max": "7000", "a/memory.current": "4000", "a/b/memory.max": "max"}, 3000),
        ("0::/not/mounted", {"memory.max": "900", "memory.current": "1000"}, 0),
        (
            "4:memory:/job",
            {"memory/job/memory.limit_in_bytes": "5000", "memory/job/memory.usage_in_bytes": "1000"},
            4000,
        ),
        ("4:cpu:/job", {"memory/job/memory.limit_in_bytes": "5000"}, None),
        ("4:memory:/", {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "1"}, None),
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
