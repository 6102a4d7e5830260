"""The documents are true: the keys of docs/gates.md build models, the numbers of docs/mixers.md are the code's."""

import importlib
import json
import os
import re
from statistics import fmean

import house
import pytest
import torch
from conftest import ROOT

import configurator
from base.files import read_jsonl
from gate import GATE_ACTIVATIONS, GRANULARITIES, POSITIONS
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
    told = configurator.command_of_configs([str(ROOT / file)])
    script, *words = told.partition("is for the data of: python ")[2].split()
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    made = vars(configurator.load(module.Config, words, positional="paths"))
    assert (made["out_dir"] or os.path.dirname(script)) == keys["dataset"]
    (front,) = re.findall(rf"`python {script}(.*)`", (ROOT / "README.md").read_text()) or [None]
    if front is not None and made["out_dir"] is None:  # the same data, but for the names of one's own files
        shown = vars(configurator.load(module.Config, front.split(), positional="paths"))
        assert shown | {"paths": 0} == made | {"paths": 0}


PAGE = (ROOT / "results" / "README.md").read_text()
BOTH_PAGES = PAGE + (ROOT / "results" / "EARLIER.md").read_text()

# what these pages say without an interval: {experiment: {how its claim begins: as it is written}}
HEADLINES = {
    "late_gate": {
        "a gate from the start lowers": "0.054", "a gate added late lowers": "0.022",
        "a gate added late stays above": "0.031", "ten times the rate": "0.014",
    },
    "text": {
        "the gate lowers the loss, pooled": "0.032", "it lowers softmax's": "0.018", "it lowers cosformer's": "-0.001",
        "it lowers gla's": "0.089", "it lowers mamba2's": "0.024", "it lowers gated_deltanet's": "0.029",
        "with matched parameters": "0.033", "matched parameters keep": "0.019", "more in linear mixers": "0.017",
        "the native gate is lower": "0.023", "the wide gate is lower": "0.008",
    },
    "rivals_on_text": {"a token's sink logit lowers the loss": "-0.009", "the sigmoid gate does": "0.003"},
    "sink": {"headwise halves the effective": "0.055", "instrument": "82%"},
    "log_linear": {"log-linear states (Guo)": "0.7", "merged ones do": "0.8"},
    "s3": {"the gate changes what beta": "27.4"},
}  # fmt: skip


def by_arm(experiment):
    """{arm: {seed: row}}, without those that chose a rate."""
    runs = {}
    for row in read_jsonl(ROOT / "results" / experiment / "rows.jsonl"):
        if "purpose" not in row:
            runs.setdefault(row["arm"], {})[row["seed"]] = row
    return runs


def claims_of(experiment):
    return json.loads((ROOT / "results" / experiment / "claims.json").read_text())["claims"]


@pytest.mark.parametrize("experiment", HEADLINES)
def test_the_numbers_of_the_pages_are_those_of_the_claims(experiment):
    found = claims_of(experiment)
    for begin, shown in HEADLINES[experiment].items():
        estimate = next(claim["estimate"] for claim in found if claim["name"].startswith(begin))
        digits = len(shown.rstrip("%").partition(".")[2])
        assert f"{estimate:.{digits}f}" == shown.rstrip("%") and shown in BOTH_PAGES, begin


def test_the_front_page_and_the_page_of_gates_give_no_number_that_results_lacks():
    front = (ROOT / "README.md").read_text().partition("## The result")[2].partition("\n## ")[0]
    assert [number for number in re.findall(r"\d\.\d{2,}", front + GATES) if number not in BOTH_PAGES] == []


def test_every_interval_of_the_page_is_that_of_a_claim_or_spans_the_seeds_of_an_arm():
    known = []
    for runs in (*by_arm("sink").values(), *by_arm("sink_rivals").values()):
        for what, unit in (("share", 100), ("effective", 1)):
            values = [unit * run["meters"]["kinds"]["other"][what] for run in runs.values()]
            known.append((fmean(values), min(values), max(values)))
    for claim in (claim for file in (ROOT / "results").glob("*/claims.json") for claim in claims_of(file.parent.name)):
        low, high = (claim[end] if claim[end] is not None else claim[f"student_{end}"] for end in ("low", "high"))
        if low is not None:  # a gain is a loss the other way round
            known += [(claim["estimate"], low, high), (-claim["estimate"], -high, -low)]
    n = r"(-?\d+(?:\.\d+)?)"
    shown = re.findall(rf"{n}[\w ]* \((?:bound {n}|(?:one-sided bounds )?{n}(?: to|,) {n})", PAGE)
    assert len(shown) > 40
    for numbers in ([number for number in found if number] for found in shown):
        digits = [len(number.partition(".")[2]) for number in numbers]
        assert any(numbers == [f"{x:.{d}f}" for x, d in zip(values, digits, strict=False)] for values in known), numbers


# tables of gains on the page: {experiment: ([(arm without, arm with) of each column], parts of the text or a step)}
PARTS = ("val_loss", "near", "far", "repeated", "elsewhere")
FIVE = [(mixer, f"{mixer} sigmoid") for mixer in ("softmax", "cosformer", "gla", "mamba2", "gated_deltanet")]
RIVALS = [("none", arm) for arm in ("sigmoid", "sink token", "headwise", "sink head", "softpick", "FoX")]
FORMS = [("none 1,500", "sigmoid 1,500"), ("none", "sigmoid"), ("none", "wide"), ("none", "headwise")]
GAINS = {"horizon": (FORMS, PARTS), "rivals_on_text": (RIVALS, PARTS[:3:2]), "one_harness": (FIVE, (1500, *PARTS[1:]))}


@pytest.mark.parametrize("experiment", GAINS)
def test_the_tables_of_gains_are_what_the_rows_hold(experiment):
    runs, (columns, parts) = by_arm(experiment), GAINS[experiment]
    for part in parts:
        of = lambda row, part=part: (row | row["loss"] | dict(row["curve"]))[part]  # noqa: E731
        gains = [fmean(of(runs[none][seed]) - of(row) for seed, row in runs[arm].items()) for none, arm in columns]
        assert f"| {' | '.join(f'{gain:.3f}' for gain in gains)} |\n" in PAGE


def test_the_page_says_of_horizon_what_its_rows_hold():
    runs = by_arm("horizon")
    best = {arm: {seed: max(map(max, run["meters"]["induction"])) for seed, run in runs[arm].items()} for arm in runs}
    learned = [seed for seed, score in best["none"].items() if score > 0.05]
    behind = {seed: run["val_loss"] - runs["none"][seed]["val_loss"] for seed, run in runs["sigmoid"].items()}
    least, most = min(behind[seed] for seed in learned), max(behind[seed] for seed in learned)
    assert 0.05 < max(max(best[arm].values()) for arm in ("wide", "headwise")) < 0.06
    assert len(learned) == 6 and max(best["sigmoid"].values()) < 0.01 and f"{least:.3f} to {most:.3f} behind" in PAGE
    rise = {}  # {(arm, how its models were read again): the loss of each over what it was}
    for arm, how in (("sigmoid", "pruned"), ("none", "8 bits"), ("sigmoid", "8 bits")):
        rise[arm, how] = [run["scores"][how]["loss"] - run["val_loss"] for run in runs[arm].values()]
    assert f"{min(rise['sigmoid', 'pruned']):.3f} to {max(rise['sigmoid', 'pruned']):.3f} higher" in PAGE
    eight = [f"{fmean(rise[arm, '8 bits']):.4f}" for arm in ("none", "sigmoid")]
    assert f"{eight[0]} without a gate, {eight[1]} with" in PAGE


def test_the_page_says_of_the_rivals_what_their_rows_hold():
    runs, tried = by_arm("rivals_on_text"), {}
    for row in read_jsonl(ROOT / "results" / "rivals_on_text" / "rows.jsonl"):
        if "purpose" in row:
            tried.setdefault((row["arm"], row["config"]["learning_rate"]), []).append(row["val_loss"])
    speeds = [f"{fmean(row['step_ms'] for row in runs[arm].values()):.0f}" for _, arm in RIVALS]
    assert f"| {' | '.join(speeds)} |\n" in PAGE
    for arm in ("none", "sigmoid", "sink token"):
        lost = [fmean(tried[arm, rate]) - fmean(tried[arm, 3e-3]) for rate in (6e-3, 1.2e-2)]
        assert "{:.3f} and {:.3f}".format(*lost) in PAGE


def test_the_page_says_of_states_what_their_rows_hold():
    runs = [by_arm(task) for task in ("parity", "s3")]
    for name in ("softmax", "mamba2", "gated_deltanet", "gated_deltanet to 2", "deltaproduct", "monarch"):
        cells = []
        for seeds in (of_task[arm].values() for of_task in runs for arm in (name, f"{name} sigmoid")):
            found = [100 * row["scores"]["whole"]["slices"]["64"] for row in seeds]
            solved = sum(accuracy > 95 for accuracy in found)
            cells.append(f"{fmean(found):.0f}" + f" ({solved})" * (solved > 0))
        assert f"| {' | '.join(cells)} |\n" in PAGE


def test_the_page_says_of_state_sizes_what_their_rows_hold():
    found = {arm.removesuffix(" 8"): 100 * runs[0]["accuracy"] for arm, runs in by_arm("state_size").items()}
    plain = "DeltaNet recalls {deltanet:.0f}%, GLA {gla:.0f}, KDA {kda:.0f}, Gated DeltaNet {gated_deltanet:.0f};"
    assert plain.format(**found) in PAGE
    for what, least in (("levels", "Mamba-2"), ("sigmoid", "KDA")):
        gains = {name: found[f"{name} {what}"] - found[name] for name in MIXERS if f"{name} {what}" in found}
        if what == "sigmoid":
            assert f"Mamba-2 by {gains.pop('mamba2'):.0f}." in PAGE
        assert f"by {min(gains.values()):.0f} ({least}) to +{max(gains.values()):.0f} points" in PAGE
