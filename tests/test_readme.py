"""The documents are true: the keys of docs/gates.md build models, the numbers of docs/mixers.md are the code's."""

import ast
import importlib
import os
import re

import house
import pytest
import torch
from conftest import ROOT

from base import configurator
from gate import GATE_ACTIVATIONS, POSITIONS
from keys import GRANULARITIES
from model import GPT, MIXERS, GPTConfig
from train import TrainConfig

GATES = (ROOT / "docs" / "gates.md").read_text()
TABLES = (ROOT / "docs" / "mixers.md").read_text()
CONFIGS = (ROOT / "config" / "README.md").read_text()
OF_PAPER, _, SHIPPED = GATES.partition("## Who ships what")
ROWS, SHIPPED = (re.findall(r"^\| .* \| `(--[^`]*)` \|$", text, re.M) for text in (OF_PAPER, SHIPPED))
PARAMETERS = re.findall(r"^\| `(\w+)` \| ([\d.]+)M \| ([\d.]+)M \|$", TABLES, re.M)


@pytest.mark.parametrize("keys", list(dict.fromkeys(ROWS + SHIPPED)))
def test_every_row_of_keys_builds_a_model(keys):
    config = configurator.load(TrainConfig, ["--attention=softmax", "--qk_norm=true", *keys.split()])
    config.vocab_size, config.n_layer = 16, 1
    assert GPT(config).n_params() > 0


def n_params(**keys):
    with torch.device("meta"):  # shapes alone
        return GPT(GPTConfig(vocab_size=50257, block_size=64, **keys)).n_params()


@pytest.mark.parametrize("name, ungated, gated", PARAMETERS)
def test_parameter_counts_are_those_of_the_table(name, ungated, gated):
    for gate, millions in (("none", ungated), ("elementwise", gated)):
        assert f"{n_params(attention=name, gate=gate) / 1e6:.1f}" == millions


@pytest.mark.parametrize("name", MIXERS)
def test_match_params_comes_within_a_thousandth(name):
    gate = "elementwise@readout+headwise@key"
    matched, ungated = n_params(attention=name, gate=gate, match_params=True), n_params(attention=name)
    assert abs(matched - ungated) < 0.001 * ungated


def test_the_tables_name_mixers_that_exist_with_their_parameters():
    """A user's own mixer needs no row."""
    (described,) = re.findall(r"^\| mixer \| q, k .*?\n\n", TABLES, re.M | re.S)
    described = re.findall(r"^\| `(\w+)` \|", described, re.M)
    assert described == [name for name, _, _ in PARAMETERS] and len(described) >= 7
    assert set(described) <= set(MIXERS)


def test_the_page_of_gates_has_the_rows_of_the_paper_and_names_every_granularity_position_and_activation():
    """A user's own activation needs no entry."""
    assert len(set(ROWS)) == len(ROWS) == 20  # as many as in the paper's tables
    for word, known in (("GRANULARITY", GRANULARITIES), ("POSITION", POSITIONS)):
        (line,) = re.findall(rf"^    {word} {{2,}}(.*)$", GATES, re.M)
        assert [part.split()[0] for part in re.sub(r"\([^)]*\)", "", line).split("|")] == list(known)
    (line,) = re.findall(r"^\| `gate_activation` \| (.*) \|$", GATES, re.M)
    named = re.findall(r"`(\w+)`", line)
    assert named == list(GATE_ACTIVATIONS)[: len(named)] and len(named) >= 10


# the files of config/ that git knows: a user's own may be anything
COMMITTED = [file for file in house.tracked() if file.parts[0] == "config"] if (ROOT / ".git").exists() else []
COMMITTED = [file for file in COMMITTED if file.suffix == ".py" and "experiments" not in file.parts]


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_every_committed_config_is_valid_and_has_its_line(file):
    configurator.load(TrainConfig, [str(ROOT / file)])
    assert f"| `{file.relative_to('config').as_posix()}` |" in CONFIGS


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_every_committed_config_that_names_data_tells_the_command_that_makes_them_as_the_readme_does(file):
    if "dataset" not in (keys := configurator.read_config_file(ROOT / file)):
        return
    lines = [line.strip() for line in ast.get_docstring(ast.parse((ROOT / file).read_text())).splitlines()]
    told = next(line for line in lines if line.startswith("python data/"))
    script, *words = told.removeprefix("python ").split()
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    positional = "name" if "hub" in script else "paths"
    made = vars(configurator.load(module.Config, words, positional=positional))
    assert (made["out_dir"] or os.path.dirname(script)) == keys["dataset"]
    (front,) = re.findall(rf"`python {script}(.*)`", (ROOT / "README.md").read_text()) or [None]
    if front is not None and made["out_dir"] is None:  # the same data, but for the names of one's own files
        shown = vars(configurator.load(module.Config, front.split(), positional="paths"))
        assert shown | {"paths": 0} == made | {"paths": 0}
