"""Recipes on a published model, run on random tiny ones with a trained BPE."""

import importlib
import json
import re
import shlex

import published
import pytest
import torch
from conftest import LINES, ROOT
from test_gguf import write as write_gguf
from test_huggingface import IDX, SIZES
from transformers import AutoModelForCausalLM

import evaluate
import meters
import plot
import sample
from data.text import prepare as text_prepare
from data.tokenizer import train_bpe
from hub import export
from runs.checkpoint import load_model

HERE = ["--device=cpu", "--threads=1"]
SMALL = {  # more words of a script
    "train.py": [*HERE, "--max_iters=8", "--eval_interval=8", "--warmup_iters=1", "--learning_rate=1e-3"],
    "meters.py": [*HERE, "--rows=2"],
}


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with a text, in which commands are run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("".join(LINES * 40))
    (tmp_path / "config").symlink_to(ROOT / "config")
    return tmp_path


def make_hub(folder, kind="baseline"):
    model = published.save_gated_qwen3(kind, folder, **SIZES)
    (folder / "tokenizer.json").write_bytes(train_bpe("bpe:300", LINES * 40).content)
    return model


def test_every_script_takes_the_folder_of_a_hub(work, helpers, capsys):
    model = make_hub(work / "hub")
    torch.testing.assert_close(load_model("hub")[0](IDX), model(IDX).logits, rtol=0, atol=1e-4)
    words = ["--checkpoint=hub", *HERE]
    assert "--dataset=FOLDER" in helpers.error_of(meters.main, words)
    text_prepare.main(["book.txt", "--tokenizer=hub", "--out_dir=data"])
    capsys.readouterr()
    meters.main([*SMALL["meters.py"], "--checkpoint=hub", "--dataset=data"])
    evaluate.main([*words, "--dataset=data"])
    sample.main(["--checkpoint=hub", "--device=cpu", "--max_new_tokens=3", "--start=The quick"])
    printed = capsys.readouterr().out
    assert "hub (step 0, softmax, gate none)" in printed and printed.count("The quick") == 3
    plot.main(["hub", "--html=true"])
    assert {"page.png", "page.html", "meters.json"} < {file.name for file in (work / "hub").iterdir()}
    made = export.main(["--checkpoint=hub", "--safetensors=ours"])
    assert made is None and torch.equal(load_model("ours")[0].wte.weight, load_model("hub")[0].wte.weight)


def test_a_gate_on_a_published_model_is_the_recipe_of_its_config(work, helpers):
    make_hub(work / "Qwen3-0.6B")
    (work / "out" / "smollm2").mkdir(parents=True)
    write_gguf(work / "out" / "smollm2" / "model.gguf")
    for line in re.findall(r"^    python (.*)$", (ROOT / "config" / "late_gate.py").read_text(), re.M):
        script, *words = shlex.split(line)
        program = importlib.import_module(script.removesuffix(".py").replace("/", "."))
        program.main([*words, *SMALL.get(script, [])])
    first, last = (helpers.metrics(work / "out" / "late_gate", "eval")[i]["val_loss"] for i in (0, -1))
    plain = helpers.metrics(work / "out" / "twin", "eval")[0]["val_loss"]
    assert first == plain and last < first
    before, _, gated = json.loads((work / "out" / "late_gate" / "meters.json").read_text())["checkpoints"]
    assert (
        before["gate"] == "none" and gated["gate"] == "elementwise" and gated["losses"]["all"] < before["losses"]["all"]
    )
    assert all(at["gates"]["readout"]["mean"] and at["sink"]["share"] for at in gated["layers"])
    ours, theirs = load_model("out/gated_qwen")[0], AutoModelForCausalLM.from_pretrained("gated")
    torch.testing.assert_close(ours(IDX), theirs(IDX).logits, rtol=0, atol=1e-4)
