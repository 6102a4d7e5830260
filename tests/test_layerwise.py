"""
Meters layer by layer: the numbers of the other meters, with the memory of one layer, beside what was published.

    python -m pytest tests/test_layerwise.py
"""

import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import meters
from export import export
from model import GPT, GPTConfig
from runs import checkpoint as checkpoints
from runs import hardware, probe
from study import layerwise

ROOT = Path(__file__).resolve().parents[1]
# what a process needs for published=true above its imports and a first, small model
MEASURE = """
import sys
import threading
import meters

def anonymous():
    # not the pages of the mapped file: the kernel maps as many of them as it likes, and takes them back when it must
    (line,) = (line for line in open("/proc/self/status") if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])

def watch():
    while not done.wait(0.001):
        seen.append(anonymous())

small, *words = sys.argv[1:]
meters.main([f"--checkpoint={small}", *words])
done, seen = threading.Event(), [anonymous()]
watcher = threading.Thread(target=watch)
watcher.start()
meters.main(words)
done.set()
watcher.join()
print("measured", max(seen) - seen[0])
"""


@torch.no_grad()
def save_model(folder, **keys):
    """A checkpoint of random weights, without a run."""
    keys = dict(n_layer=3, n_embd=16, n_head=2, block_size=24, vocab_size=256, state_size=4) | keys
    with torch.device("meta"):
        config = GPT(GPTConfig(**keys)).config
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in GPT(config).state_dict().items()}
    weights = {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}
    folder.mkdir()
    checkpoints.save(folder / "ckpt.pt", {"model": weights, "model_args": dataclasses.asdict(config)})
    return sum(tensor.nbytes for tensor in weights.values())


@pytest.mark.parametrize(
    "keys",
    [
        dict(attention="softmax", gate="elementwise", position="learned", norm="layer", bias=True, mlp="gelu_tanh"),
        dict(attention="gla,softmax,gated_deltanet", gate="none,headwise,native"),
        dict(attention="mamba2,cosformer", gate="none"),
    ],
)
def test_layer_by_layer_gives_the_numbers_of_the_other_meters(keys, tmp_path):
    save_model(tmp_path / "out", **keys)
    model, _ = checkpoints.load_model(tmp_path / "out")
    inputs = torch.randint(256, (3, 24))
    whole = probe.layer_meters(model, inputs, {}, "float32")
    pytest.importorskip("safetensors")
    export(tmp_path / "out", tmp_path / "export")
    for folder in ("out", "export"):
        opened, about = checkpoints.open_model(tmp_path / folder)
        assert "model" not in about
        for layer, other in zip(layerwise.layer_numbers(opened, inputs, "float32"), whole, strict=True):
            assert layer["mixer"] == other["mixer"]
            assert layer["first_token"] == pytest.approx(statistics.fmean(other["sink"]["share"]), rel=1e-3)
            assert layer["largest"] == pytest.approx(other["residual"]["max"], rel=1e-3)
            _, gate = meters.shown_gate(other)
            for name in ("mean", "below_0.1"):
                mean = statistics.fmean(gate[name]) if gate else None
                assert layer[f"gate_{name}"] == (mean if mean is None else pytest.approx(mean, rel=2e-3))


def test_weights_that_are_not_of_their_config_are_one_line(helpers, tmp_path):
    save_model(tmp_path / "out")
    saved = checkpoints.load(tmp_path / "out")
    del saved["model"]["blocks.1.norm_1.weight"]
    checkpoints.save(tmp_path / "out" / "ckpt.pt", saved)
    message = helpers.error_of(checkpoints.open_model, tmp_path / "out")
    assert "its weights are not those of its config" in message and "blocks.1.norm_1.weight" in message


def test_a_block_is_read_into_the_memory_of_the_block_before(tmp_path):
    save_model(tmp_path / "out", attention="softmax,softmax,gla")
    model, _ = checkpoints.open_model(tmp_path / "out")
    kept = probe.probe(model, torch.arange(24)[None], lambda block, seen: dict(block.state_dict()))
    places = [{name: tensor.data_ptr() for name, tensor in weights.items()} for weights in kept]
    assert places[0] == places[1]
    assert [weights["norm_1.weight"].device.type for weights in kept] == ["cpu"] * 3
    assert all(block.norm_1.weight.is_meta for block in model.blocks[:2])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_model_is_measured_in_less_memory_than_its_weights_take(text, tmp_path):
    save_model(tmp_path / "small", n_embd=64)
    size = save_model(tmp_path / "large", n_layer=8, n_embd=768, n_head=12, gate="headwise", vocab_size=3000)
    layer = 4 * 12 * 768**2
    assert size > 230e6
    words = ["--published=true", f"--dataset={text}", "--rows=2", "--device=cpu", "--threads=1"]
    words = [tmp_path / "small", f"--checkpoint={tmp_path / 'large'}", *words]
    run = subprocess.run([sys.executable, "-c", MEASURE, *map(str, words)], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    measured = int(run.stdout.splitlines()[-1].removeprefix("measured "))
    assert measured < 2 * layer < size / 4  # a layer's weights and its activations
    (row,) = json.loads((tmp_path / "large" / "published.json").read_text())["checkpoints"]
    assert len(row["layers"]) == 8 and row["tokens"] == 24


def test_the_table_has_the_published_numbers_beside_ours(text, tmp_path, helpers, capsys, monkeypatch):
    save_model(tmp_path / "plain")
    save_model(tmp_path / "gated", gate="elementwise")
    words = [f"--checkpoint={tmp_path / 'plain'},{tmp_path / 'gated'}", "--published=true", f"--dataset={text}"]
    words += ["--rows=2", "--tokens=16", "--device=cpu", "--threads=1"]
    meters.main(words)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-4:] for line in lines if line.startswith("  published")] == [
        ["46.7%", "1,053", "-", "-"],
        ["4.8%", "94", "0.116", "-"],
    ]
    assert [row["gate_mean"] is None for row in json.loads(lines[-1])["checkpoints"]] == [True, False]
    for more, message in (
        (["--maps=0.0"], "published=True: has no maps, queries or skip_below"),
        (["--published=false"], "tokens=16: is for published=true"),
    ):
        assert message in helpers.error_of(meters.main, [*words, *more])
    monkeypatch.setattr(hardware, "ram_available", lambda: (1000, "this machine"))
    assert "this machine has 1 kB left" in helpers.error_of(meters.main, words)
