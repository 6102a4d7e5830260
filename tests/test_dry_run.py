"""train.py --dry_run=true prints what a run takes, by numbers that are checked here, and writes nothing."""

import json
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import train
from base import configurator
from keys import TrainConfig
from model import GPT, GPTConfig
from runs import dry_run
from runs.dry_run import CARD, MFU, bytes_a_token, disk_line, memory_of
from runs.hardware import PEAK_FLOPS
from runs.memory import without_data


def test_a_dry_run_counts_steps_time_memory_and_epochs_and_writes_nothing(mqar, helpers, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dry_run, "peak_flops", lambda *of: (2e12, "made up"))
    keys = dict(dry_run=True, gradient_accumulation_steps=4, max_iters=10, gate="elementwise", keep_interval=4)
    helpers.train(mqar, "out", **keys)
    said = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    meta = dry_run.read_meta(Path(mqar))
    model = without_data(
        GPTConfig(**dry_run.model_args(TrainConfig(**helpers.tiny, gate="elementwise", vocab_size=meta["vocab_size"])))
    )
    train = meta["splits"]["train"]
    row = train["tokens"] / train["rows"]
    tokens = round(16 * row)
    assert f"model: 2 x 16, softmax, gate elementwise, {model.n_params():,} parameters" in said
    assert f"; the whole run reads {160 * row:,.0f}: {160 * row / train['tokens']:.3g} epochs" in said
    assert f"steps: 10 of {tokens:,} tokens, {10 * tokens:,} tokens in all" in said
    flops = 3 * tokens * model.flops_per_token(round(row))
    hours = 10 * flops / (MFU * 2 * PEAK_FLOPS[CARD]) / 3600
    assert f"{hours:10,.3g} hours, 2 x 989 TFLOP/s (H100" in said
    assert "2 x 2 TFLOP/s (the cpu of this machine, made up)" in said
    assert "memory of a process on a GPU, of 2, ddp, about:" in said and "2 that stay" in said
    monkeypatch.setenv("RANK", "1")
    helpers.train(mqar, "out", **keys)
    assert capsys.readouterr().out == ""
    monkeypatch.delenv("RANK")
    error = helpers.error_of(helpers.train, mqar, "out", **keys | dict(gradient_accumulation_steps=3))
    assert "gradient_accumulation_steps=3: must be a multiple of the 2 processes" in error
    assert error.endswith("the next one is 4")
    monkeypatch.setenv("WORLD_SIZE", "0")
    assert "WORLD_SIZE=0: must be the number of processes" in helpers.error_of(helpers.train, mqar, "out", **keys)


def test_without_data_a_dry_run_of_a_large_model_takes_seconds_of_processor_time(helpers, tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = "--n_layer=24 --n_embd=2048 --n_head=16 --mlp=swiglu --dataset=data/none --threads=1".split()
    ended = helpers.script(ROOT / "train.py", "--dry_run=true", *words, cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.decode()
    assert "data: not there, rows are taken to have 1024 tokens: data/none/meta.json: no such file" in said
    assert "export: hub/export.py --to_hf=FOLDER --family=llama can write it" in said
    assert after.ru_utime - before.ru_utime < 15 and list(tmp_path.iterdir()) == []  # 1.6 s on an idle machine


def test_a_dry_run_names_the_keys_that_no_family_of_transformers_has(mqar, helpers, capsys):
    helpers.train(mqar, "out", dry_run=True, mlp="swiglu", gate="elementwise", gate_bias=0.0)
    said = capsys.readouterr().out
    assert "--to_hf cannot write it\nnot as llama: gate='elementwise': there it can only be" in said
    assert re.search(r"not as qwen3_5_text: \w+=", said)


def total(words, world_size=1):
    config = TrainConfig(**configurator.read_words(TrainConfig, words.split()))
    config.vocab_size = 1000
    model = without_data(GPTConfig(**dry_run.model_args(config)))
    parts = memory_of(config, model, world_size)
    return {name: n_bytes for (name, _), n_bytes in parts.items()}, model, config


def test_memory_is_what_a_step_holds_by_kind():
    ddp, model, config = total("--n_layer=4 --n_embd=64 --n_head=2 --gradient_accumulation_steps=8", 4)
    weights = 4 * model.n_params()
    assert (ddp["weights"], ddp["gradients"], ddp["moments"]) == (weights, weights, 2 * weights)
    assert ddp["sums"] == weights and ddp["batches"] == 16 * 12 * 1024 * 2
    fsdp, _, _ = total("--n_layer=4 --n_embd=64 --n_head=2 --gradient_accumulation_steps=8 --parallel=fsdp", 4)
    assert fsdp["weights"] == weights / 4 and fsdp["moments"] == weights / 2 and fsdp["sums"] == weights
    muon, _, _ = total("--n_layer=4 --n_embd=64 --n_head=2 --optimizer=muon")
    matrices = 4 * sum(m.weight.numel() for m in model.blocks.modules() if isinstance(m, torch.nn.Linear))
    assert muon["moments"] == 2 * weights - matrices
    less, _, _ = total("--n_layer=4 --n_embd=64 --n_head=2 --activation_checkpointing=true")
    assert less["activations"] < ddp["activations"] / 2
    config.keep_interval, config.keep_last = 500, 3
    assert "3 that stay" in disk_line(config, model)


CASES = [
    dict(mlp="gelu"), dict(mlp="swiglu", gate="elementwise", qk_norm=True), dict(attention="mamba2", mlp="none"),
    dict(attention="gated_deltanet", gate="native", mlp="swiglu"), dict(attention="gla", gate="native"),
]  # fmt: skip


@pytest.mark.parametrize("keys", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_activations_are_about_what_autograd_keeps(keys, dtype, width):
    T = 256
    model = GPT(GPTConfig(**dict(n_layer=2, n_head=4, n_embd=256, block_size=T, vocab_size=64) | keys))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=width == 2):
        model.features(torch.zeros(1, T, dtype=torch.long))
    measured = sum(storage.nbytes() for storage in kept.values())
    if width == 2:  # copies of weights are counted apart
        linears = [m for m in model.blocks.modules() if isinstance(m, torch.nn.Linear)]
        measured -= 2 * sum(linear.weight.numel() for linear in linears)
    counted = T * sum(bytes_a_token(block, 256, width) for block in model.blocks)
    assert 0.7 < counted / measured < 1.4


def row_of(words):
    """The row of docs/pretrain.md for a run of these configs on 8 GPUs."""
    config = TrainConfig(**configurator.read_words(TrainConfig, words))
    model = without_data(GPTConfig(**dry_run.model_args(config)))
    assert "--family=qwen3_5_text can write it" in dry_run.export_line(model)
    step = config.batch_size * config.gradient_accumulation_steps * config.block_size
    flops = 3 * config.max_iters * step * model.flops_per_token()
    cells = [
        " ".join(f"`{Path(word).name}`" for word in words),
        f"{model.n_params() / 1e6:,.0f}M",
        f"{config.max_iters * step / 1e9:.1f}B",
        f"{step / 1e6:.2f}M",
        f"{config.learning_rate:.2g}",
        f"{sum(memory_of(config, model, 8).values()) / 1e9:.0f} GB",
        f"{flops / (MFU * PEAK_FLOPS[CARD]) / 3600:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("size", ["124M", "350M", "1.3B"])
def test_configs_of_pretraining_can_be_exported_and_take_what_their_page_says(size):
    page = (ROOT / "docs" / "pretrain.md").read_text()
    folder = ROOT / "config" / "pretrain"
    for words in ([f"{size}.py"], [f"{size}.py", "hybrid.py"]):
        assert row_of([str(folder / word) for word in words]) in page


def test_data_without_a_split_for_training_are_one_line(text, tmp_path, helpers):
    folder = shutil.copytree(text, tmp_path / "text")
    meta = json.loads((folder / "meta.json").read_text())
    del meta["splits"]["train"]
    (folder / "meta.json").write_text(json.dumps(meta))
    message = helpers.error_of(train.main, [f"--dataset={folder}", "--dry_run=true", f"--out_dir={tmp_path}/out"])
    assert message == f"{folder}: has no split train; it has val"
