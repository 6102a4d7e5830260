"""
Whatever comes in, what goes out is the right result or one clear line: command lines, config files, texts, shards,
checkpoints, prompts, what plot.py draws. Hundreds of cases in CI; NANOGATE_CASES of each by hand.

    python -m pytest tests/test_fuzz.py -m "not slow"
    NANOGATE_CASES=5000 python -m pytest tests/test_fuzz.py -m slow -k "not script"
    NANOGATE_SCRIPT_CASES=300 python -m pytest tests/test_fuzz.py -m slow -k script
"""

import configurator
from configurator import UserError

import collections
import contextlib
import copy
import dataclasses
import functools
import io
import json
import math
import operator
import os
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib.figure
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bench
import data.mqar.prepare as mqar_prepare
import data.pystdlib.prepare as pystdlib_prepare
import data.text.prepare as text_prepare
import data.wikitext103.prepare as wikitext103_prepare
import evaluate
import experiment
import export
import meters
import plot
import sample
import train
from data.backcopy import prepare as backcopy_prepare
from data.shards import open_dataset
from data.tokenizer import get_tokenizer
from data.writing import write_stream
from evaluate import score, summarize
from model import GPT, MIXERS, GPTConfig
from runs import checkpoint as checkpoints

ROOT = Path(__file__).resolve().parent.parent
LONG = int(os.environ.get("NANOGATE_CASES", 2000))
SCRIPT_CASES = int(os.environ.get("NANOGATE_SCRIPT_CASES", 300))
HOW_MANY = pytest.mark.parametrize("cases", [60, pytest.param(LONG, marks=pytest.mark.slow)], ids=["quick", "long"])
ARGS = dict(n_layer=1, n_embd=8, n_head=2, block_size=16, vocab_size=256)
anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
nested = st.recursive(anything, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3))


def fuzz(cases, *strategies):
    """Calls the function below it with so many draws."""

    def call(function):
        options = dict(max_examples=cases, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        options["derandomize"] = cases < LONG  # CI tries the same ones each time
        settings(**options)(given(*strategies)(function))()

    return call


def one_line(function, *args, **keys):
    """What it returns, or None and a UserError of one line. Whatever else it raises fails the test."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return function(*args, **keys)
    except UserError as error:
        assert str(error).isprintable() and 0 < len(str(error)) < 1000
        return None


def places(value, path=()):
    """The paths of all that a value holds."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in items:
        yield (*path, name)
        yield from places(part, (*path, name))


def with_change(value, at, new):
    """A copy, in which the at-th of its places holds something else; GONE: is not there."""
    value, found = copy.deepcopy(value), list(places(value))
    *path, name = found[at % len(found)]
    parent = functools.reduce(operator.getitem, path, value)
    if new is GONE:
        del parent[name]
    else:
        parent[name] = new
    return value


GONE = object()
STRANGE = st.sampled_from(
    [GONE, None, True, [], {}, "", "x" * 5000, -5, 0, 10**400, 2**63, -1e300, 1e-300, "$\\x$", "../x"]
)
STRANGE_FLOATS = st.sampled_from([math.nan, math.inf, -math.inf])


# ----------------------------------------------------------------------------------------------------------------------
# Command lines and config files


@HOW_MANY
def test_any_words_make_a_config_of_train_or_one_line(cases):
    names = st.sampled_from([*train.TrainConfig.__dataclass_fields__, "n_layers", "config_override", ""])
    values = st.sampled_from(["0", "-1", "1e3", "nan", "inf", "None", "true", "1e999", "[1]", "{}", "'", "softmax,gla"])
    words = st.builds("--{}={}".format, names, values | st.text(max_size=9)) | st.text(max_size=9)

    @fuzz(cases, st.lists(words, max_size=4))
    def check(argv):
        if not {"-h", "--help"} & set(argv):
            config = one_line(configurator.load, train.TrainConfig, argv)
            # what was taken is taken again
            assert config is None or configurator.build(train.TrainConfig, dataclasses.asdict(config)) == config


@HOW_MANY
def test_any_config_file_is_a_config_or_one_line(cases, tmp_path):
    @fuzz(
        cases,
        st.binary(max_size=60) | st.text(max_size=60).map(lambda x: x.encode("utf-8", "surrogatepass")),
        st.sampled_from(["py", "json"]),
    )
    def check(content, ending):
        (tmp_path / f"fuzz.{ending}").write_bytes(content)
        one_line(configurator.load, train.TrainConfig, [str(tmp_path / f"fuzz.{ending}")])


@HOW_MANY
def test_an_experiment_of_anything_is_a_config_or_one_line(cases):
    whole = dict(
        name="a", base={"dtype": "float32", "n_layer": 1}, mixers=["gla", "softmax"],
        variants={"plain": {}, "native": {"gate": "native", "mixers": ["gla"]}},
        arms={"none": {}, "gated": {"gate": "elementwise"}},
        settings={"d8": {"n_embd": 16, "n_head": 2, "data": {"pairs": 4}}, "d9": {"n_embd": 32, "n_head": 2}},
        seeds=[0, 1], learning_rates=[0.1, 0.2], selection_seeds=[5], rate_of={"gated": "none"},
        data={"vocab_size": 64}, scores={"x": {"batch_size": 8}}, prepare="mqar",
        baseline="none", treatment="gated", success_above=0.7, success_below=0.5, failure_within=0.1,
        claims={
            "c": {"contrast": {"none": 1, "gated": -1}, "above": 0.1, "of": ["accuracy"]},
            "p": {"contrast": {"plain": 1}, "pool": ["gla", "softmax"], "above": 1},
            "in MIXER": {"contrast": {"plain": 1, "native": -1}, "each": ["gla"], "within": 1},
            "e": {"contrast": {"d8": {"none": 1}, "d9": {"none": -1}}, "other_than": 0},
        },
        exploratory=True, pilot=None,
    )  # fmt: skip
    experiment.ExperimentConfig(**whole)

    @fuzz(cases, st.integers(0, 10**6), STRANGE | STRANGE_FLOATS | nested)
    def check(at, value):
        one_line(configurator.build, experiment.ExperimentConfig, with_change(whole, at, value))


# ----------------------------------------------------------------------------------------------------------------------
# Prepare scripts


@HOW_MANY
def test_any_file_becomes_a_text_that_reads_back_or_one_line(cases, tmp_path):
    @fuzz(
        cases, st.binary(max_size=80) | st.text(max_size=60).map(str.encode), st.floats(0.01, 0.9), st.integers(1, 40)
    )
    def check(content, val_fraction, shard_tokens):
        (tmp_path / "a.txt").write_bytes(content)
        out = tmp_path / "out"
        words = [f"--out_dir={out}", f"--val_fraction={val_fraction}", f"--shard_tokens={shard_tokens}"]
        shutil.rmtree(out, ignore_errors=True)
        one_line(text_prepare.main, [str(tmp_path / "a.txt"), *words])
        if (out / "meta.json").is_file():
            meta = json.loads((out / "meta.json").read_text())
            parts = [s["file"] for split in ("train", "val") for s in meta["splits"][split]["shards"]]
            assert b"".join(np.load(out / part).astype(np.uint8).tobytes() for part in parts) == content
            open_dataset(out)
        assert (tmp_path / "a.txt").read_bytes() == content


@HOW_MANY
def test_any_setting_of_mqar_makes_a_data_set_or_one_line(cases, tmp_path):
    numbers = st.integers(-1, 40)

    @fuzz(
        cases,
        numbers,
        numbers,
        st.none() | numbers,
        st.integers(2, 70),
        st.sampled_from(["zero", "random", "x"]),
        st.text("0123456789/,-", max_size=9),
    )
    def check(seq_len, pairs, queries, vocab_size, filler, slices):
        keys = dict(seq_len=seq_len, pairs=pairs, vocab_size=vocab_size, filler=filler, train_size=20, val_size=3)
        keys |= {"queries": queries, "out_dir": str(tmp_path)} | ({"slices": slices} if "/" in slices else {})
        shutil.rmtree(tmp_path, ignore_errors=True)
        one_line(mqar_prepare.main, [f"--{name}={value}" for name, value in keys.items()])
        if (tmp_path / "meta.json").is_file():
            dataset = open_dataset(tmp_path)
            inputs, targets = dataset.batch("train", 0, seed=0, batch_size=2, block_size=10**9)
            assert 0 <= inputs.min() and inputs.max() < vocab_size and (targets != -100).any()


# ----------------------------------------------------------------------------------------------------------------------
# Shards


@HOW_MANY
def test_any_damage_to_a_data_set_is_found_or_changes_nothing(cases, tmp_path):
    about = dict(generator="tests", generator_version=1, parameters={}, seed=0, name="text")
    splits = {"train": ["The quick brown fox. " * 9] * 3, "val": ["jumps over. " * 9]}
    write_stream(tmp_path, splits, tokenizer=get_tokenizer("byte"), shard_tokens=200, **about)
    whole = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    shards = sorted(name for name in whole if name.endswith(".npy"))
    kinds = st.sampled_from(["flip", "cut", "swap", "write", "meta"])

    @fuzz(cases, kinds, st.sampled_from(shards), st.sampled_from(shards), st.integers(0, 10**6), nested)
    def check(kind, name, other, at, value):
        for file in whole:
            (tmp_path / file).write_bytes(whole[file])
        content, damaged = bytearray(whole[name]), True
        if kind == "flip":
            content[at % len(content)] ^= 1 << at % 8
        elif kind == "cut":
            content = content[: at % len(content)]
        elif kind == "swap":
            content, damaged = whole[other], whole[other] != whole[name]
        elif kind == "write":
            content[at % len(content) :] = repr(value).encode()
            damaged = bytes(content) != whole[name]
        else:
            meta = json.loads(whole["meta.json"])
            place, path = meta, []
            while isinstance(place, dict | list) and place:
                keys = list(place) if isinstance(place, dict) else list(range(len(place)))
                path.append(keys[at % len(keys)])
                parent, place, at = place, place[path[-1]], at // 7
            parent[path[-1]] = value
            (tmp_path / "meta.json").write_text(json.dumps(meta))
            one_line(open_dataset, tmp_path)
            return
        (tmp_path / name).write_bytes(content)
        assert (one_line(open_dataset, tmp_path) is None) == damaged


@HOW_MANY
def test_a_data_set_whose_meta_json_holds_anything_is_read_or_one_line(cases, tmp_path):
    about = dict(generator="tests", generator_version=1, seed=0, name="text")
    parameters = {"text": {"val": {"published_words": 7}}, "version": "raw"}
    splits = {"train": ["The quick brown fox. " * 9] * 3, "val": ["jumps over. " * 9]}
    write_stream(
        tmp_path / "text", splits, tokenizer=get_tokenizer("byte"), shard_tokens=200, parameters=parameters, **about
    )
    mqar_prepare.main([f"--out_dir={tmp_path / 'mqar'}", *"--vocab_size=16 --train_size=9 --val_size=3".split()])
    whole = {name: json.loads((tmp_path / name / "meta.json").read_text()) for name in ("text", "mqar")}
    logits = torch.zeros(1, 1, 256)

    def use(folder):
        dataset = open_dataset(folder)
        dataset.batch("train", 3, seed=0, batch_size=2, block_size=64)
        sums = score(lambda x: logits.expand(*x.shape, 256), dataset.eval_batches("val", 4, 64), block_size=64)
        json.dumps(summarize(sums, dataset, "val"))

    @fuzz(cases, st.sampled_from(list(whole)), st.integers(0, 10**6), STRANGE | STRANGE_FLOATS | nested)
    def check(name, at, value):
        (tmp_path / name / "meta.json").write_text(json.dumps(with_change(whole[name], at, value)))
        one_line(use, tmp_path / name)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


def make_checkpoint(**changed):
    torch.manual_seed(0)
    about = {"format": 1, "model_args": dict(ARGS), "iter_num": 3}
    return about | {"model": GPT(GPTConfig(**ARGS)).state_dict()} | changed


def equal(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.filterwarnings("ignore")
@HOW_MANY
def test_any_damage_to_a_checkpoint_is_found_or_changes_nothing(cases, tmp_path):
    file, right = tmp_path / "ckpt.pt", make_checkpoint()
    checkpoints.save(file, right)
    whole = file.read_bytes()

    @fuzz(
        cases * 3,
        st.sampled_from(["flip", "cut", "zero", "write"]),
        st.integers(0, 10**7),
        st.binary(min_size=1, max_size=30),
    )
    def check(kind, at, junk):
        content, at = bytearray(whole), at % len(whole)
        if kind == "flip":
            content[at] ^= 1 << junk[0] % 8
        elif kind == "cut":
            content = content[:at]
        elif kind == "zero":
            content[at : at + 512] = bytes(len(content[at : at + 512]))
        else:
            content[at : at + len(junk)] = junk
        file.write_bytes(content)
        loaded = one_line(checkpoints.load, file)
        assert loaded is None or equal(loaded, right)


@HOW_MANY
def test_a_checkpoint_of_anything_is_loaded_or_one_line(cases, tmp_path):
    names = st.sampled_from([*GPTConfig.__dataclass_fields__, "wte.weight", "norm.weight", "x"])
    parts = st.sampled_from(["model", "model_args", "iter_num", "data", "config", "all"])
    tensors = st.sampled_from(
        [torch.zeros(3), torch.zeros(256, 8), torch.zeros(256, 8).half(), torch.zeros(2, dtype=torch.int)]
    )
    sizes = st.integers(-3, 2**70)

    @fuzz(cases, parts, names, nested | tensors | sizes)
    def check(part, name, value):
        checkpoint = make_checkpoint()
        if part == "all":
            checkpoint = value
        elif part in ("model", "model_args"):
            checkpoint[part] = checkpoint[part] | {name: value}
        else:
            checkpoint[part] = value
        torch.save(checkpoint, tmp_path / "ckpt.pt")
        one_line(checkpoints.load_model, tmp_path / "ckpt.pt")


@pytest.mark.filterwarnings("ignore")
@HOW_MANY
def test_a_checkpoint_whose_fields_hold_anything_is_evaluated_and_sampled_or_one_line(cases, text, tmp_path, helpers):
    out = helpers.train(text, tmp_path / "out", max_iters=1, n_layer=1, n_embd=8)
    right = checkpoints.load(out)
    fields = {name: value for name, value in right.items() if name not in ("model", "optimizer")}
    words = [f"--checkpoint={tmp_path / 'ckpt.pt'}", "--device=cpu", "--threads=1"]

    @fuzz(cases, st.integers(0, 10**6), STRANGE | STRANGE_FLOATS | nested)
    def check(at, value):
        if isinstance(value, str):  # torch's own writer takes no other
            value = value.encode("utf-8", "replace").decode()
        changed = with_change(fields, at, value)
        torch.save({name: right[name] for name in ("model", "optimizer")} | changed, tmp_path / "ckpt.pt")
        one_line(evaluate.main, words)
        one_line(sample.main, [*words[:2], "--num_samples=1", "--max_new_tokens=2"])


# ----------------------------------------------------------------------------------------------------------------------
# plot.py


def make_drawable():
    """A run's three files and an experiment's rows, small, with all that plot.py looks at."""
    spread = {"histogram": [[0.0] * 20 + [1.0]], "mean": [0.5], "below_0.1": [0.25]}
    layer = {
        "mixer": "gla",
        "gates": {"readout": spread},
        "sink": {
            "kind": "proxy",
            "share": [0.1, 0.2],
            "random_tokens": [0.1, 0.1],
            "token_0_before": [0.1, 0.2],
            "token_0_after": [0.1, 0.2],
            "effective": [0.1, 0.2],
            "kinds": {"trigger": {"share": [0.1, None]}, "other": {"share": [0.2, 0.3]}},
        },
        "residual": {"max": 2.0, "max_over_median": 4.0, "position": 0, "channel": 1},
    }
    meters = {"attention": "gla", "gate": "elementwise", "step": 3, "rows": 1, "tokens": 2, "dataset": "text"}
    meters |= {"split": "val", "packing": "no BOS", "dtype": "float32", "sink_baseline": 0.5, "layers": [layer, layer]}
    meters |= {
        "maps": [
            {
                "layer": 1,
                "head": 1,
                "weights": [[1.0, 0.0], [0.5, -0.5]],
                "gate": [0.5, 1.0],
                "queries": {"trigger": [1]},
            }
        ]
    }
    meters |= {"pruning": [{"threshold": 0.1, "loss": 2.0, "zeroed": 0.5}]}
    lengths = {"attention": "gla", "gate": "none", "rope_scaling": "none", "trained_length": 4}
    lengths |= {
        "lengths": [
            {"block_size": 4, "loss": 2.0, "by_position": [[0, 3.0], [2, 1.0]]},
            {"block_size": 8, "limit": "x"},
        ]
    }
    metrics = [{"event": "train", "step": 0, "loss": 2.0, "spike": True}, {"event": "eval", "step": 0, "val_loss": 2.0}]
    row = {"arm": "none", "seed": 0, "data": {"pairs": 4}, "config": {"attention": "gla", "gate": "none"}}
    row |= {"finite": True, "accuracy": 0.5, "val_loss": 1.0, "metric": "accuracy", "curve": [[0, 0.1], [9, 0.5]]}
    row |= {"state_bytes": 64, "scores": {"long": {"slices": {"64/4": 0.5, "128/4": 0.25, "128/8": 0.1}}}}
    other = row | {"arm": "elementwise", "config": {"attention": "gla", "gate": "elementwise", "learning_rate": 0.1}}
    return {
        "run/metrics.jsonl": metrics,
        "run/meters.json": {"checkpoints": [meters]},
        "run/lengths.json": lengths,
        "experiment/rows.jsonl": [row, other],
    }


@pytest.mark.filterwarnings("ignore")
@HOW_MANY
def test_any_json_is_drawn_or_one_line(cases, tmp_path, monkeypatch):
    savefig = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, file, **keys: savefig(self, file, **keys | {"dpi": 15})
    )
    whole = make_drawable()
    for name in ("run", "experiment"):
        (tmp_path / name).mkdir()

    def put(name, content):
        lines = (
            map(json.dumps, content) if name.endswith("jsonl") and isinstance(content, list) else [json.dumps(content)]
        )
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))

    for name in whole:
        put(name, whole[name])
    plot.main(
        [str(tmp_path / "run"), str(tmp_path / "run" / "lengths.json"), str(tmp_path / "experiment")]
    )  # all right

    names = st.sampled_from(list(whole))

    @fuzz(cases, names, st.integers(0, 10**6), STRANGE | STRANGE_FLOATS | nested, st.integers(0, 20))
    def check(name, at, value, replaces_all):
        put(name, with_change(whole[name], at, value) if replaces_all or value is GONE else value)
        targets = [name] if name == "run/lengths.json" else []
        for target in [*targets, name.partition("/")[0]]:
            one_line(plot.main, [str(tmp_path / target)])
        plt.close("all")
        put(name, whole[name])
        assert {file.name for file in tmp_path.iterdir()} == {"run", "experiment"}


# ----------------------------------------------------------------------------------------------------------------------
# Sampling


@HOW_MANY
def test_any_sampling_gives_ids_of_the_vocabulary_or_one_line(cases):
    models = {}
    for name in MIXERS:
        torch.manual_seed(1)
        models[name] = GPT(GPTConfig(**ARGS | dict(attention=name))).eval()
        for p in models[name].parameters():
            p.data.mul_(30)  # logits far apart
    small = st.integers(-2, 12)
    floats = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 1e-320, 1e-45, 1e-8, 1.0, 1e30])

    @fuzz(
        cases,
        st.sampled_from(list(MIXERS)),
        st.lists(st.integers(-2, 258) | st.integers(0, 255), max_size=20),
        small,
        floats,
        st.none() | small,
        st.none() | floats,
        st.none() | st.integers(-1, 300),
    )
    def check(mixer, ids, new, temperature, top_k, top_p, n_tokens):
        idx = torch.tensor([ids], dtype=torch.long)
        drawn = one_line(models[mixer].generate, idx, new, temperature, top_k, top_p, n_tokens)
        if drawn is None:
            return
        assert drawn.shape == (1, len(ids) + new) and torch.equal(drawn[:, : len(ids)], idx)
        assert 0 <= drawn[:, len(ids) :].min() and drawn[:, len(ids) :].max() < min(n_tokens or 256, 256)
        if temperature < 1e-20:  # as good as the argmax
            greedy = models[mixer].generate(idx, new, 0.0, n_tokens=n_tokens)
            assert torch.equal(drawn, greedy)


@HOW_MANY
def test_any_prompt_and_option_of_sample_is_text_or_one_line(cases, text, tmp_path, helpers):
    out = helpers.train(text, tmp_path / "out", max_iters=1)
    words = st.sampled_from(
        [
            "temperature=0",
            "top_k=0",
            "top_k=3",
            "top_p=0",
            "top_p=1",
            "top_p=2",
            "seed=-1",
            "max_new_tokens=0",
            "temperature=-1",
            "temperature=nan",
            "temperature=1e-300",
        ]
    )
    start = st.text(max_size=9) | st.sampled_from(
        ["", "\udcff", "FILE:", "FILE:/", f"FILE:{out}/ckpt.pt", "FILE:\0", "FILE:/dev/zero", f"FILE:{out}/pipe"]
    )
    os.mkfifo(out / "pipe")

    @fuzz(cases, start, st.lists(words, max_size=2))
    def check(start, options):
        argv = [f"--checkpoint={out}", "--device=cpu", "--num_samples=1", "--max_new_tokens=3", f"--start={start}"]
        if start != "-":
            one_line(sample.main, argv + [f"--{option}" for option in options])


# ----------------------------------------------------------------------------------------------------------------------
# Whole scripts

# A process imports a script once and forks for each command line, in a folder of its own: what the child prints and the
# status it leaves with are those of `python SCRIPT ...`. A child that is still at work after a while is stopped: it has
# taken the command line. PATCH leaves out what would take minutes, or reach for the internet.
DRIVER = """
import importlib, json, os, resource, signal, sys, traceback
from pathlib import Path
import configurator
name, patch, cases = json.load(open(sys.argv[1]))
module = importlib.import_module(name)
exec(patch)
for folder, argv in cases:
    os.makedirs(folder, exist_ok=True)
    said = Path(f"{sys.argv[1]}.said")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
            signal.alarm(SECONDS)
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(0, 1)
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            sys.argv = [name, *argv]
            configurator.run(module.main)
            status = 0
        except SystemExit as error:
            status = error.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([argv, status, said.read_text(errors="replace")]), flush=True)
"""
STRANGE_WORDS = ["", " ", "0", "1", "-1", "3", "1e3", "nan", "-inf", "1e999", "9" * 30, "None", "true", "[1]", "[]"]
STRANGE_WORDS += [
    "{}",
    '{"a": {}}',
    '{"a": null}',
    "[[[]]]",
    "'",
    "x" * 5000,
    "\udcff",
    "\U0001f642",
    "a,b",
    "0.5",
    "64/4",
]
RUN = dict(
    n_layer=1, n_embd=8, n_head=2, block_size=16, batch_size=2, max_iters=2, eval_interval=2, device="cpu",
    dtype="float32", threads=1,
)  # fmt: skip
SCRIPTS = {  # the module, its keys, the words of each command line, and what is not run
    "train": (train, train.TrainConfig, {"dataset": "{text}", "out_dir": "{new}"} | RUN, ""),
    "sample": (sample, sample.SampleConfig, {"checkpoint": "{run}", "max_new_tokens": 2, "num_samples": 1}, ""),
    "evaluate": (evaluate, evaluate.EvaluateConfig, {"checkpoint": "{run}", "threads": 1}, ""),
    "meters": (meters, meters.MetersConfig, {"checkpoint": "{run}", "threads": 1, "rows": 2}, ""),
    "experiment": (
        experiment,
        experiment.ExperimentConfig,
        {"arms": '{{"a": {{}}}}', "base": json.dumps(RUN).replace("{", "{{").replace("}", "}}"), "out_dir": "{new}"},
        "import study.runner; study.runner.work = lambda *args: None",
    ),
    "plot": (plot, plot.PlotConfig, {}, ""),
    "export": (export, export.ExportConfig, {"checkpoint": "{run}", "safetensors": "{new}"}, ""),
    "bench": (
        bench,
        bench.BenchConfig,
        {"out_dir": "{new}", "device": "cpu"},
        "module.PARTS = {name: lambda config, report: report.row(x=1) for name in module.PARTS};"
        "module.gemm_rate = lambda *args: 1e9; module.profile = lambda config: ''",
    ),
    "data.mqar.prepare": (mqar_prepare, mqar_prepare.Config, {"out_dir": "{new}", "train_size": 9, "val_size": 3}, ""),
    "data.backcopy.prepare": (
        backcopy_prepare,
        backcopy_prepare.Config,
        {"out_dir": "{new}", "text": "{file}", "characters": 8, "triggers": 2, "train_size": 9, "val_size": 3},
        "",
    ),
    "data.text.prepare": (text_prepare, text_prepare.Config, {"paths": "{file}", "out_dir": "{new}"}, ""),
    "data.pystdlib.prepare": (
        pystdlib_prepare,
        pystdlib_prepare.Config,
        {"out_dir": "{new}"},
        "find = module.sysconfig.get_path; module.sysconfig.get_path = lambda name: find(name) + '/json'",
    ),
    "data.wikitext103.prepare": (
        wikitext103_prepare,
        wikitext103_prepare.Config,
        {"from_dir": "{wiki}", "tokenizer": "byte", "out_dir": "{new}"},
        "",
    ),
}


@pytest.fixture(scope="module")
def inputs(text, mqar, tmp_path_factory, helpers):
    """{name: path} of what the scripts may be given: right files, damaged ones, folders, a pipe, devices."""
    folder = tmp_path_factory.mktemp("inputs")
    found = {"text": text, "mqar": mqar, "wiki": folder / "wiki", "file": folder / "a.txt", "pipe": folder / "pipe"}
    for name, data in (("run", text), ("mqar_run", mqar)):
        found[name] = helpers.train(data, folder / name, max_iters=2, n_layer=1, n_embd=8)
    found["file"].write_text("The quick brown fox.\n" * 40)
    found["wiki"].mkdir()
    for split, times in {"train": 30, "valid": 30, "test": 10}.items():
        (found["wiki"] / f"wiki.{split}.tokens").write_text(" \n = A Title = \n \n One two three .\n" * times)
    os.mkfifo(found["pipe"])
    whole = (found["run"] / "ckpt.pt").read_bytes()
    for name, content in {
        "empty.txt": b"", "cut.pt": whole[: len(whole) // 2], "flipped.pt": whole[:999] + b"x" + whole[1000:],
        "noise.py": bytes(range(256)), "keys.py": b"n_layer = 1\nseed = 3\n", "wrong.py": b"import os\n",
        "deep.json": b"[" * 100_000, "rows.jsonl": b'{"arm": 1}\n', "list.json": b"[1]", "keys.json": b'{"seed": 4}',
        "lengths.json": b'{"lengths": [{"block_size": "a"}]}',
    }.items():  # fmt: skip
        found[name] = folder / name
        found[name].write_bytes(content)
    for name in ("rows.jsonl", "metrics.jsonl", "meters.json", "meta.json"):
        found[f"folder of {name}"] = folder / f"of_{name}"
        found[f"folder of {name}"].mkdir()
        (found[f"folder of {name}"] / name).write_text('{"arm": 1, "layers": {}, "splits": []}\n')
    return found | {"null": "/dev/null", "full": "/dev/full", "zero": "/dev/zero", "none": folder / "no such"}


def command_line(draw, config_class, words, inputs, new):
    """Words of a script's command line: those it needs, some of them lacking, and keys with values of any kind."""
    paths = [str(path) for path in inputs.values()]
    words = {name: str(value).format(**inputs, new=new) for name, value in words.items()}
    argv = [f"--{name}={value}" for name, value in words.items() if name in SAFE or draw.random() < 0.95]
    fields = [name for name in config_class.__dataclass_fields__ if name not in ("run", "dry_run", "from_dir")]
    for _ in range(draw.randint(0, 4)):
        name = draw.choice(fields)
        values = [*STRANGE_WORDS, *config_class.__dataclass_fields__[name].metadata.get("choices", ())]
        value = str(draw.choice(paths if draw.random() < 0.3 else values))
        if name in SAFE and value in ("None", "gpt2") or (name, value) == ("memory_check", "false"):
            continue  # that is the repository's own folder, the internet, or all memory
        shapes = ["--{}={}"] * 30 + ["--{}", "-{}={}", "{}={}", "--{} {}", "--x{}={}", "\u2014{}={}"]
        argv.append(draw.choice(shapes).format(name, value))
    if draw.random() < 0.2:
        argv.insert(draw.randint(0, len(argv)), draw.choice([*paths, *STRANGE_WORDS, "--help", "--"]))
    return argv


SAFE = ("out_dir", "safetensors", "tokenizer", "from_dir", "max_iters")  # keys without which a script leaves its folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_any_command_line_of_a_script_ends_with_a_status_and_no_traceback(name, inputs, tmp_path):
    _, config_class, words, patch = SCRIPTS[name]
    draw, cases = random.Random(f"{name} {os.environ.get('NANOGATE_SEED', 1)}"), []
    for i in range(SCRIPT_CASES):
        folder = tmp_path / str(i)
        cases.append((str(folder), command_line(draw, config_class, words, inputs, folder / "new")))
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([name, patch, cases]))
    driver = DRIVER.replace("SECONDS", "60")
    keys = dict(cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    ended = subprocess.run([sys.executable, "-c", driver, str(file)], **keys)
    done = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(done) == len(cases), ended.stderr
    counts = collections.Counter(status for _, status, _ in done)
    print(f"{name}: {len(done)} command lines, statuses {dict(counts)}")
    print(*[f"  still at work: {argv}" for argv, status, _ in done if status == -14], sep="\n")
    wrong = [
        (argv, status, said)
        for argv, status, said in done
        if status not in (0, 1, 2, -14) or "Traceback" in said or (status == 2 and "error: " not in said)
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)}: {json.dumps(wrong[:5])[:5000]}"
    assert counts.keys() >= {0, 2}
