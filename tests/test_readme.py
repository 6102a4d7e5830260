"""The documents are true: the keys of docs/gates.md build models, the numbers of docs/mixers.md are the code's."""

import json
import re
from statistics import fmean

import house
import pytest
import torch
from conftest import ROOT

import configurator
from gate import GATE_ACTIVATIONS, GRANULARITIES, POSITIONS
from model import GPT, MIXERS, GPTConfig
from runs.files import read_jsonl
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


# what pages say in words of their own: {(experiment, the pages): {how its claim begins: as it is written}}
HEADLINES = {
    ("late_gate", "results/EARLIER.md docs/gates.md"): {
        "a gate from the start lowers": "0.054", "a gate added late lowers": "0.022",
    },
    ("late_gate", "results/EARLIER.md"): {"a gate added late stays above": "0.031", "ten times the rate": "0.014"},
    ("horizon", "results/README.md"): {
        "after 6,000 steps": "-0.049", "... the wide gate does": "-0.033", "... the headwise gate does": "-0.051",
        "a start at one changes": "0.016", "the sigmoid gate gains less in 6,000": "0.062",
        "the sigmoid gate gains less far": "0.074", "it gains less behind": "0.053",
    },
    ("text", "README.md results/EARLIER.md"): {
        "the gate lowers the loss, pooled": "0.032", "it lowers softmax's": "0.018", "it lowers gla's": "0.089",
        "it lowers mamba2's": "0.024", "it lowers gated_deltanet's": "0.029", "with matched parameters": "0.033",
        "the native gate is lower": "0.023",
    },
    ("text", "results/EARLIER.md"): {
        "it lowers cosformer's": "-0.001", "more in linear mixers": "0.017", "matched parameters keep": "0.019",
        "the wide gate is lower": "0.008",
    },
    ("rivals_on_text", "results/README.md"): {
        "a token's sink logit lowers the loss": "-0.009", "the sigmoid gate does": "0.003",
    },
    ("sink", "results/README.md"): {"headwise halves the effective": "0.055"},
    ("sink", "README.md results/README.md"): {"instrument": "82%"},
    ("recall", "README.md results/README.md"): {"the sigmoid gate changes": "1.15", "a SiLU gate from one": "2.18"},
    ("recall", "results/README.md"): {
        "a sigmoid gate is a fixed half": "0.99", "input-dependence changes the steps": "1.00",
        "a gate from one changes": "0.99", "the native gate changes": "2.45",
    },
    ("log_linear", "results/README.md"): {
        "the gate changes the steps of Guo's": "1.17", "the gate changes the steps of merged": "1.24",
        "behind a convolution log-linear": "1.01",
    },
    ("parity", "results/README.md"): {"beta to 2 changes": "29.6"},
    ("s3", "results/README.md"): {"beta to 2 changes": "30.6", "the gate changes what beta": "27.4"},
}  # fmt: skip


def test_the_page_says_of_horizon_what_its_rows_hold():
    runs, page = {}, (ROOT / "results" / "README.md").read_text()
    for line in (ROOT / "results" / "horizon" / "rows.jsonl").read_text().splitlines():
        if "purpose" not in (row := json.loads(line)):
            runs.setdefault(row["arm"], {})[row["seed"]] = row
    pairs = [("none 1,500", "sigmoid 1,500"), ("none", "sigmoid"), ("none", "wide"), ("none", "headwise")]
    for part in ("near", "far", "repeated", "elsewhere"):  # the table of gains
        gains = [
            fmean(run["loss"][part] - runs[arm][seed]["loss"][part] for seed, run in runs[without].items())
            for without, arm in pairs
        ]
        assert f"| {' | '.join(f'{gain:.3f}' for gain in gains)} |\n" in page
    best = {arm: {seed: max(map(max, run["meters"]["induction"])) for seed, run in runs[arm].items()} for arm in runs}
    learned = [seed for seed, score in best["none"].items() if score > 0.05]
    behind = {seed: run["val_loss"] - runs["none"][seed]["val_loss"] for seed, run in runs["sigmoid"].items()}
    least, most = min(behind[seed] for seed in learned), max(behind[seed] for seed in learned)
    assert 0.05 < max(max(best[arm].values()) for arm in ("wide", "headwise")) < 0.06
    assert len(learned) == 6 and max(best["sigmoid"].values()) < 0.01 and f"{least:.3f} to {most:.3f} behind" in page
    pruned = [run["scores"]["pruned"]["loss"] - run["val_loss"] for run in runs["sigmoid"].values()]
    assert f"{min(pruned):.3f} to {max(pruned):.3f} higher" in page


def test_the_page_says_of_the_rivals_what_their_rows_hold():
    runs, tried, page = {}, {}, (ROOT / "results" / "README.md").read_text()
    for row in read_jsonl(ROOT / "results" / "rivals_on_text" / "rows.jsonl"):
        if "purpose" in row:
            tried.setdefault((row["arm"], row["config"]["learning_rate"]), []).append(row["val_loss"])
        else:
            runs.setdefault(row["arm"], {})[row["seed"]] = row
    arms = [runs[arm] for arm in ("sigmoid", "sink token", "headwise", "sink head", "softpick", "FoX")]
    for of in (lambda row: row["val_loss"], lambda row: row["loss"]["far"]):
        gains = [fmean(of(runs["none"][seed]) - of(row) for seed, row in arm.items()) for arm in arms]
        assert f"| {' | '.join(f'{gain:.3f}' for gain in gains)} |\n" in page
    speeds = [f"{fmean(row['step_ms'] for row in arm.values()):.0f}" for arm in arms]
    assert f"| {' | '.join(speeds)} |\n" in page
    for arm in ("none", "sigmoid", "sink token"):
        lost = [fmean(tried[arm, rate]) - fmean(tried[arm, 3e-3]) for rate in (6e-3, 1.2e-2)]
        assert "{:.3f} and {:.3f}".format(*lost) in page


def test_the_page_says_of_states_what_their_rows_hold():
    runs, page = {}, (ROOT / "results" / "README.md").read_text()
    for task in ("parity", "s3"):
        for row in read_jsonl(ROOT / "results" / task / "rows.jsonl"):
            if "purpose" not in row:
                runs.setdefault((task, row["arm"]), []).append(100 * row["scores"]["whole"]["slices"]["64"])
    for arm in ("softmax", "mamba2", "gated_deltanet", "gated_deltanet to 2", "deltaproduct", "monarch"):
        of_arm = [runs[task, name] for task in ("parity", "s3") for name in (arm, f"{arm} sigmoid")]
        solved = [sum(seed > 95 for seed in seeds) for seeds in of_arm]
        cells = [f"{fmean(seeds):.0f}" + f" ({n})" * (n > 0) for seeds, n in zip(of_arm, solved, strict=True)]
        assert f"| {' | '.join(cells)} |\n" in page


@pytest.mark.parametrize("experiment, pages", HEADLINES)
def test_the_numbers_of_the_pages_are_those_of_the_rows(experiment, pages):
    found = json.loads((ROOT / "results" / experiment / "claims.json").read_text())["claims"]
    for claim, shown in HEADLINES[experiment, pages].items():
        (estimate,) = [each["estimate"] for each in found if each["name"].startswith(claim)]
        digits = len(shown.rstrip("%").partition(".")[2])
        assert f"{estimate:.{digits}f}" == shown.rstrip("%"), claim
        assert [page for page in pages.split() if shown not in (ROOT / page).read_text()] == [], claim
