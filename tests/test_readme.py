"""The README is true: its keys build, its numbers are the code's.

python -m pytest tests/test_readme.py
"""

import re
from pathlib import Path

import pytest

import configurator
import data.text.prepare as text
from gate import GATE_ACTIVATIONS, GRANULARITIES, POSITIONS
from model import GPT, MIXERS, GPTConfig
from train import TrainConfig

ROOT = Path(configurator.__file__).parent
README = (ROOT / "README.md").read_text()
KEYS = [code for code in re.findall(r"`(--[^`]*)`", README) if "=" in code and "NAME" not in code]
PARAMETERS = {  # millions at 12 x 768 and 50,257 ids: without a gate, and with an elementwise one
    "softmax": (123.6, 130.6),
    "cosformer": (123.6, 130.6),
    "gla": (123.9, 130.9),
    "mamba2": (126.3, 140.4),
    "gated_deltanet": (123.9, 131.0),
}


def test_there_are_keys_to_check():
    assert len(KEYS) > 20


@pytest.mark.parametrize("keys", KEYS)
def test_every_line_of_keys_builds_a_model(keys):
    if "--tokenizer" in keys:
        assert configurator.load(text.Config, keys.split(), positional="paths").tokenizer == "gpt2"
        return
    config = configurator.load(TrainConfig, ["--attention=softmax", "--qk_norm=true", *keys.split()])
    config.vocab_size, config.n_layer = 16, 1
    assert GPT(config).n_params() > 0


@pytest.mark.parametrize("name", MIXERS)
def test_parameter_counts_are_those_of_the_readme(name):
    for gate, millions in zip(("none", "elementwise"), PARAMETERS[name], strict=True):
        model = GPT(GPTConfig(attention=name, gate=gate, vocab_size=50257))
        assert round(model.n_params() / 1e6, 1) == millions
        assert f"{millions}M" in README


@pytest.mark.parametrize("name", MIXERS)
def test_match_params_comes_within_a_thousandth(name):
    gate = "elementwise@readout+headwise@key"
    matched = GPT(GPTConfig(attention=name, gate=gate, match_params=True, vocab_size=50257)).n_params()
    ungated = GPT(GPTConfig(attention=name, gate="none", vocab_size=50257)).n_params()
    assert abs(matched - ungated) < 0.001 * ungated


def test_the_tables_name_every_mixer_and_every_word_of_the_gate():
    for word in (*MIXERS, *GRANULARITIES, *POSITIONS, *GATE_ACTIVATIONS):
        assert word in README, word


def test_every_committed_config_is_valid():
    files = [file for file in sorted((ROOT / "config").rglob("*.py")) if file.parent.name != "experiments"]
    assert files
    for file in files:
        configurator.load(TrainConfig, [str(file)])
