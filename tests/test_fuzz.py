"""
Whatever comes in, what goes out is right or one clear line. CI tries 60 cases a kind, and 10 command lines of each
whole script; by hand more are tried:

    NANOGATE_CASES=5000 python -m pytest tests/test_fuzz.py -k "not whole_script"
    NANOGATE_SCRIPT_CASES=300 python -m pytest tests/test_fuzz.py -k whole_script -s
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import importlib
import io
import json
import math
import multiprocessing
import operator
import os
import random
import resource
import runpy
import shutil
import signal
import sys
import types
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import off_its_start

import bench
import evaluate
import experiment
import meters
import plot
import sample
import train
from base import configurator
from base.configurator import UserError
from base.files import read_json, sha256_of_file
from data.mqar import prepare as mqar_prepare
from data.shards import open_dataset
from data.text import prepare as text_prepare
from evaluate import add_scores, summarize
from hub import export
from model import MIXERS, GPTConfig
from runs import checkpoint as checkpoints
from study import drawing, runner

pytestmark = pytest.mark.filterwarnings("ignore")
IN_CI = 60
CASES = int(os.environ.get("NANOGATE_CASES", IN_CI))
GONE = object()


def fuzz(*strategies, times=1):
    """The test below it is tried with draws of these, `times` as often as the others."""
    options = dict(deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=CASES == IN_CI)
    return lambda test: settings(max_examples=CASES * times, **options)(given(*strategies)(test))


anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
NESTED = st.recursive(anything, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3))
STRANGE = NESTED | st.sampled_from(
    [GONE, None, True, [], {}, "", "x" * 5000, -5, 0, 10**400, 2**63, -1e300, 1e-300, "$\\x$", "../x"]
    + [math.nan, math.inf, -math.inf]
)
PLACES = st.integers(0, 10**6)
TENSORS = st.sampled_from([torch.zeros(3), torch.zeros(256, 8).half(), torch.zeros(2, dtype=torch.int)])
PIECES = "n_layer paths include None True x 1 0.5 9 1e9 'a' = = == + - * / ** % ( ) [ ] { } , : ; . \n \\ # if import"
VALUES = (
    st.sampled_from(["0", "-1", "1e3", "nan", "inf", "None", "true", "1e999", "[1]", "{}", "'", "softmax,gla"])
    | st.text(st.characters(codec=None), max_size=9)  # with surrogates: what a shell makes of bytes
    | st.lists(st.sampled_from(PIECES.split(" ")), max_size=20).map(" ".join)
)


def one_line(function, *args, **keys):
    """What it returns, or None and a UserError of one line. Whatever else it raises fails the test."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return function(*args, **keys)
    except UserError as error:
        assert str(error).isprintable() and 0 < len(str(error)) < 1000
        return None


def places(value, path=(), most=None):
    """The paths of all that a value holds, of lists to the first items only where `most` says how many."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:most]) if isinstance(value, list) else ()
    for name, part in items:
        yield (*path, name)
        yield from places(part, (*path, name), most)


def with_change(value, at, new):
    """A copy, in which the at-th of its places holds something else; GONE: is not there."""
    paths = list(places(value))
    return changed_at(value, paths[at % len(paths)], new)


def changed_at(value, path, new):
    value, (*path, name) = copy.deepcopy(value), path
    parent = functools.reduce(operator.getitem, path, value)
    if new is GONE:
        del parent[name]
    else:
        parent[name] = new
    return value


# -- Command lines and config files ------------------------------------------------------------------------------------

CONFIGS = {
    "train.py": train.TrainConfig, "sample.py": sample.SampleConfig, "evaluate.py": evaluate.EvaluateConfig,
    "meters.py": meters.MetersConfig, "plot.py": plot.PlotConfig, "hub/export.py": export.ExportConfig,
    "bench.py": bench.BenchConfig, "experiment.py": experiment.ExperimentConfig,
}  # fmt: skip
for file in sorted(ROOT.glob("data/*/prepare.py")):
    prepare = importlib.import_module(f"data.{file.parent.name}.prepare")
    CONFIGS[f"data/{file.parent.name}/prepare.py"] = prepare.Config

OF_TRAINING_OR_ANY = st.just(train.TrainConfig) | st.sampled_from([*CONFIGS.values()])


@fuzz(OF_TRAINING_OR_ANY, st.data(), st.sampled_from(["config", None]), times=4)
def test_any_command_line_of_any_script_is_a_config_or_one_line(config_class, data, positional):
    names = st.sampled_from([*config_class.__dataclass_fields__, "n_layers", "config_override", ""])
    words = st.builds("--{}={}".format, names, VALUES) | st.text(max_size=9)
    argv = data.draw(st.lists(words, max_size=4))
    if not {"-h", "--help"} & set(argv):
        config = one_line(configurator.load, config_class, argv, positional=positional)
        # what was taken is taken again
        assert config is None or configurator.build(config_class, dataclasses.asdict(config)) == config


def texts_of(config_class):
    """The keys of a class that are texts, but for the prompt, which may be empty."""
    rules = configurator.rules_of(config_class)
    return [name for name, rule in rules.items() if rule.kind is str and name != "start"]


TEXTS_OF = [(script, name) for script, config_class in CONFIGS.items() for name in texts_of(config_class)]


@pytest.mark.parametrize(("script", "name"), TEXTS_OF, ids=" ".join)
def test_an_empty_text_is_never_taken_for_the_default(script, name, helpers):
    """A variable of the shell that is not set: --out_dir=$OUT would replace what is in the script's own folder."""
    for empty in (f"--{name}=", f"--config_override={json.dumps({name: ''})}"):
        message = helpers.error_of(configurator.load, CONFIGS[script], [empty])
        assert message.startswith(f"{name}='': must be ")


LINES = st.builds("{} = {}".format, st.sampled_from([*train.TrainConfig.__dataclass_fields__, "include"]), VALUES)
TEXTS = st.lists(LINES, max_size=3).map("\n".join) | st.text(max_size=60)


@fuzz(st.binary(max_size=60) | TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass")), times=4)
def test_any_config_file_is_a_config_or_one_line(tmp_path, content):
    (tmp_path / "fuzz.py").write_bytes(content)
    one_line(configurator.load, train.TrainConfig, [str(tmp_path / "fuzz.py")])


FILES = [ROOT / f"config/experiments/{name}.py" for name in ("recall", "horizon")]  # which have all its keys
EXPERIMENTS = [configurator.read_config_file(file, merge=("base", "data")) for file in FILES]


@fuzz(st.sampled_from(EXPERIMENTS), PLACES, STRANGE)
def test_an_experiment_of_anything_is_a_config_or_one_line(whole, at, value):
    configurator.build(experiment.ExperimentConfig, copy.deepcopy(whole))
    one_line(configurator.build, experiment.ExperimentConfig, with_change(whole, at, value))


# -- Data sets ---------------------------------------------------------------------------------------------------------


@fuzz(st.binary(max_size=80) | st.text(max_size=60).map(str.encode), st.floats(0.01, 0.9))
def test_any_file_becomes_a_text_that_reads_back_or_one_line(tmp_path, content, val_fraction):
    (tmp_path / "a.txt").write_bytes(content)
    out = tmp_path / "out"
    words = [f"--out_dir={out}", f"--val_fraction={val_fraction}"]
    shutil.rmtree(out, ignore_errors=True)
    one_line(text_prepare.main, [str(tmp_path / "a.txt"), *words])
    if (out / "meta.json").is_file():
        meta = json.loads((out / "meta.json").read_text())
        parts = [s["file"] for split in ("train", "val") for s in meta["splits"][split]["shards"]]
        assert b"".join(np.load(out / part).astype(np.uint8).tobytes() for part in parts) == content
        open_dataset(out)
    assert (tmp_path / "a.txt").read_bytes() == content


MQAR = {
    "vocab_size": st.integers(2, 70),
    "slices": st.builds("{}/{}".format, st.integers(-1, 40), st.integers(-1, 40))
    | st.text("0123456789/,-", max_size=9),
}


@fuzz(st.fixed_dictionaries(MQAR))
def test_any_setting_of_mqar_makes_a_data_set_or_one_line(tmp_path, keys):
    shutil.rmtree(tmp_path, ignore_errors=True)
    words = keys | dict(train_size=20, val_size=3, out_dir=tmp_path)
    one_line(mqar_prepare.main, [f"--{name}={value}" for name, value in words.items()])
    if (tmp_path / "meta.json").is_file():
        inputs, targets, _ = open_dataset(tmp_path).batch("train", 0, seed=0, batch_size=2, block_size=10**9)
        assert 0 <= inputs.min() and inputs.max() < keys["vocab_size"] and (targets != -100).any()


@pytest.fixture(scope="module")
def stream(tmp_path_factory, helpers):
    """A text in several shards, to copy."""
    about = {"parameters": {"text": {"val": {"published_words": 7}}, "version": "raw"}, "shard_tokens": 200}
    folder, texts = tmp_path_factory.mktemp("stream"), (["The quick brown fox. " * 9] * 3, ["jumps over. " * 9])
    return helpers.write_text(folder, *texts, **about)


def damaged(content, kind, at, junk):
    """Bytes with a bit flipped, cut short, or partly overwritten."""
    content, at = bytearray(content), at % len(content)
    if kind == "flip":
        content[at] ^= 1 << junk[0] % 8
    elif kind == "cut":
        content = content[:at]
    else:
        content[at : at + len(junk)] = junk
    return bytes(content)


JUNK = st.binary(min_size=1, max_size=30) | st.just(bytes(512))
DAMAGE = st.sampled_from(["flip", "cut", "write"]), st.integers(0, 10**7), JUNK


@fuzz(*DAMAGE, st.integers(0, 9), st.integers(0, 9))
def test_any_damage_to_a_shard_is_found_or_changes_nothing(stream, tmp_path, kind, at, junk, one, other):
    folder = shutil.copytree(stream, tmp_path / "stream", copy_function=shutil.copyfile, dirs_exist_ok=True)
    open_dataset(folder)  # whatever it remembers must not hide the damage
    shards = sorted(folder.glob("*.npy"))
    whole, others = (shards[i % len(shards)].read_bytes() for i in (one, other))
    content = damaged(whole, kind, at, junk) if others == whole else others  # a shard has the content of another
    shards[one % len(shards)].write_bytes(content)
    assert (one_line(open_dataset, folder) is None) == (content != whole)


@fuzz(st.booleans(), PLACES, STRANGE)
def test_a_data_set_whose_meta_json_holds_anything_is_read_or_one_line(stream, mqar, tmp_path, is_text, at, value):
    folder = shutil.copytree(stream if is_text else mqar, tmp_path / f"{is_text}", dirs_exist_ok=True)
    whole, logits = json.loads((folder / "meta.json").read_text()), torch.zeros(1, 1, 256)
    (folder / "meta.json").write_text(json.dumps(with_change(whole, at, value)))
    model = types.SimpleNamespace(logits=lambda x: x)

    def use():
        dataset = open_dataset(folder)
        dataset.batch("train", 3, seed=0, batch_size=2, block_size=64)
        names = dataset.slices or [None]
        sums = torch.zeros(len(names), 2, 64, 3, dtype=torch.float64)
        for inputs, targets, _, name in dataset.eval_batches("val", 4, 64):
            model.features = lambda x, document: (logits.expand(*x.shape, 256), None)
            add_scores(sums[names.index(name)], model, inputs, targets)
        json.dumps(summarize(sums, dataset, "val"))

    one_line(use)


# -- Checkpoints -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory, helpers):
    """(the folder of a run of one step, its checkpoint)"""
    out = helpers.train(text, tmp_path_factory.mktemp("trained") / "out", max_iters=1, n_layer=1, n_embd=8)
    return out, checkpoints.load(out)


@fuzz(*DAMAGE, times=3)
def test_any_damage_to_a_checkpoint_is_found_or_changes_nothing(trained, tmp_path, helpers, kind, at, junk):
    out, right = trained
    (tmp_path / "ckpt.pt").write_bytes(damaged((out / "ckpt.pt").read_bytes(), kind, at, junk))
    loaded = one_line(checkpoints.load, tmp_path / "ckpt.pt")
    assert loaded is None or helpers.equal(loaded, right)


@fuzz(PLACES, STRANGE | TENSORS | st.integers(-3, 2**70), st.integers(0, 20), times=2)
def test_a_checkpoint_of_anything_is_evaluated_and_sampled_or_one_line(trained, tmp_path, at, value, replaces_all):
    if isinstance(value, str):  # torch's own writer takes no other
        value = value.encode("utf-8", "replace").decode()
    changed = with_change(trained[1], at, value) if replaces_all or value is GONE else value
    torch.save(changed, tmp_path / "ckpt.pt")
    words = [f"--checkpoint={tmp_path / 'ckpt.pt'}", "--device=cpu"]
    one_line(evaluate.main, [*words, "--threads=1"])
    one_line(sample.main, [*words, "--num_samples=1", "--max_new_tokens=2"])


# -- Figures -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawable(trained, tmp_path_factory):
    """({name: content of a file that plot.py reads}, a folder for what is changed)"""
    folder = shutil.copytree(
        trained[0], tmp_path_factory.mktemp("drawable") / "run", ignore=lambda *_: ["code", "pipe"]
    )
    meters.main([f"--checkpoint={folder}", "--device=cpu", "--rows=2"])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {"metrics.jsonl": list(map(json.loads, lines)), "meters.json": read_json(folder / "meters.json")}, folder


DRAWN = st.sampled_from([["."], [".", "."], ["meters.json"]])  # of one run, of several, a file of meters.py


@fuzz(st.sampled_from(["metrics.jsonl", "meters.json"]), PLACES, STRANGE, st.integers(0, 20), DRAWN)
def test_any_json_is_drawn_or_one_line(drawable, name, at, value, replaces_all, parts):
    contents, folder = drawable
    content = contents[name]
    changed = with_change(content, at, value) if replaces_all or value is GONE else value
    for file, whole in (contents | {name: changed}).items():
        is_lines = file == "metrics.jsonl" and isinstance(whole, list)
        lines = whole if is_lines else [whole]
        (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = sorted(os.listdir(folder.parent))
    with pytest.MonkeyPatch.context() as patch:  # nothing is rendered, which takes a second
        for module in (plot, drawing):
            patch.setattr(module, "write", lambda figure, path: plt.close(figure) or path)
        one_line(plot.main, [str(folder / part) for part in parts])
    plt.close("all")
    assert sorted(os.listdir(folder.parent)) == before


# -- Sampling ----------------------------------------------------------------------------------------------------------


@functools.cache
def model_of(mixer):
    """Its logits are far apart."""
    config = GPTConfig(n_layer=1, n_embd=16, n_head=2, block_size=16, vocab_size=256, attention=mixer)
    return off_its_start(config, torch.float32, noise=0.6)


SMALL = st.integers(-2, 12)
FLOATS = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 1e-320, 1e-45, 1e-8, 1.0, 1e30])
IDS = st.lists(st.integers(-2, 258) | st.integers(0, 255), max_size=20)
VOCABULARY = st.none() | st.integers(-1, 300)


@fuzz(st.sampled_from(list(MIXERS)), IDS, SMALL, FLOATS, st.none() | SMALL, st.none() | FLOATS, VOCABULARY)
def test_any_sampling_gives_ids_of_the_vocabulary_or_one_line(mixer, ids, new, temperature, top_k, top_p, n_tokens):
    model, idx = model_of(mixer), torch.tensor([ids], dtype=torch.long)
    drawn = one_line(model.generate, idx, new, temperature, top_k, top_p, n_tokens)
    if drawn is None:
        return
    assert drawn.shape == (1, len(ids) + new) and torch.equal(drawn[:, : len(ids)], idx)
    assert 0 <= drawn[:, len(ids) :].min() and drawn[:, len(ids) :].max() < min(n_tokens or 256, 256)
    if temperature < 1e-20:  # as good as the argmax
        assert torch.equal(drawn, model.generate(idx, new, 0.0, n_tokens=n_tokens))


STARTS = ["", "\udcff", "FILE:", "FILE:/", "FILE:ckpt.pt", "FILE:\0", "FILE:/dev/zero", "FILE:pipe"]
OPTIONS = "temperature=0 temperature=-1 temperature=nan top_k=0 top_k=3 top_p=0 top_p=1 top_p=2 seed=-1 "
OPTIONS += "max_new_tokens=0"


@fuzz(st.text(max_size=9) | st.sampled_from(STARTS), st.lists(st.sampled_from(OPTIONS.split()), max_size=2))
def test_any_prompt_and_option_of_sample_is_text_or_one_line(trained, start, options):
    out = trained[0]
    if not (out / "pipe").exists():
        os.mkfifo(out / "pipe")
    start = start.replace("ckpt.pt", f"{out}/ckpt.pt").replace("pipe", f"{out}/pipe")
    argv = [f"--checkpoint={out}", "--device=cpu", "--num_samples=1", "--max_new_tokens=3", f"--start={start}"]
    one_line(sample.main, argv + [f"--{option}" for option in options])


# -- Whole scripts -----------------------------------------------------------------------------------------------------

SCRIPT_CASES = int(os.environ.get("NANOGATE_SCRIPT_CASES", 10))
SECONDS = 60  # a script that is still at work by then has taken its command line
TINY_RUN = dict(
    n_layer=1, n_embd=8, n_head=2, block_size=16, batch_size=2, max_iters=2, eval_interval=2, device="cpu",
    dtype="float32", threads=1,
)  # fmt: skip
WORDS = {  # script: keys of a command line in which nothing is wrong; {new} is a folder that is not there yet
    "train.py": {"dataset": "{text}", "out_dir": "{new}"} | TINY_RUN,
    "sample.py": {"checkpoint": "{run}", "max_new_tokens": 2, "num_samples": 1, "device": "cpu"},
    "evaluate.py": {"checkpoint": "{run}", "threads": 1, "device": "cpu"},
    "meters.py": {"checkpoint": "{run}", "threads": 1, "rows": 2, "device": "cpu", "out": "{new}.json"},
    "experiment.py": {"arms": {"a": {}}, "base": TINY_RUN, "out_dir": "{new}"},
    "plot.py": {"folders": "{run}"},
    "hub/export.py": {"checkpoint": "{run}", "safetensors": "{new}"},
    "bench.py": {"what": "ops", "device": "cpu", "threads": 1, "out_dir": "{new}"},
    "data/backcopy/prepare.py": {
        "text": "{file}", "characters": 8, "triggers": 2, "train_size": 9, "val_size": 3, "out_dir": "{new}",
    },
    "data/hub/prepare.py": {"name": "{copies}", "tokenizer": "byte", "out_dir": "{new}"},
    "data/mqar/prepare.py": {"train_size": 9, "val_size": 3, "out_dir": "{new}"},
    "data/pystdlib/prepare.py": {"most_bytes": 9999, "out_dir": "{new}"},
    "data/shakespeare_char/prepare.py": {"from_file": "{file}", "out_dir": "{new}"},
    "data/states/prepare.py": {"val_size": 3, "out_dir": "{new}"},
    "data/text/prepare.py": {"paths": "{file}", "out_dir": "{new}"},
    "data/wikitext103/prepare.py": {"from_dir": "{wiki}", "tokenizer": "byte", "out_dir": "{new}"},
}  # fmt: skip
# always given, since without them a script writes beside itself, or asks the internet
ALWAYS = ("out_dir", "safetensors", "tokenizer", "from_dir", "from_file", "max_iters", "most_bytes")
WRITTEN = ("out", "out_dir", "safetensors", "to_hf", "whole")  # what is named here may be replaced
ODD = ["", " ", "0", "1", "-1", "3", "1e3", "nan", "-inf", "1e999", "9" * 30, "None", "true", "[1]", "[]", "{}"]
ODD += ['{"a": {}}', '{"a": null}', "[[[]]]", "'", "x" * 5000, "\udcff", "\U0001f642", "a,b", "0.5", "64/4"]


@pytest.fixture(scope="module")
def inputs(trained, text, mqar, tmp_path_factory):
    """{name: path} of what a script may be given: right files, damaged ones, folders, a pipe, devices."""
    folder = tmp_path_factory.mktemp("inputs")
    found = {name: folder / name for name in ("run", "text", "mqar", "wiki", "copies", "pipe", "no such")}
    for name, source in (("run", trained[0]), ("text", text), ("mqar", mqar)):
        shutil.copytree(source, found[name], ignore=shutil.ignore_patterns("code", "pipe"))
    meters.main([f"--checkpoint={found['run']}", "--device=cpu", "--rows=2"])
    found["wiki"].mkdir()
    for split, times in {"train": 30, "valid": 30, "test": 10}.items():
        (found["wiki"] / f"wiki.{split}.tokens").write_text(" \n = A Title = \n \n One two three .\n" * times)
    found["copies"].mkdir()
    (found["copies"] / "a.jsonl").write_text('{"text": "The quick brown fox."}\n' * 400)
    os.mkfifo(found["pipe"])
    whole = (found["run"] / "ckpt.pt").read_bytes()
    for name, content in {
        "file": b"The quick brown fox.\n" * 40, "empty": b"", "cut.pt": whole[: len(whole) // 2],
        "flipped.pt": whole[:999] + b"x" + whole[1000:], "noise.py": bytes(range(256)), "keys.py": b"seed = 3\n",
        "wrong.py": b"import os\n", "deep.json": b"[" * 100_000, "list.json": b"[1]", "keys.json": b'{"seed": 4}',
    }.items():  # fmt: skip
        found[name] = folder / name
        found[name].write_bytes(content)
    for name in ("rows.jsonl", "metrics.jsonl", "meters.json", "meta.json", "claims.json"):
        found[f"odd {name}"] = folder / f"odd_{name}"
        found[f"odd {name}"].mkdir()
        (found[f"odd {name}"] / name).write_text('{"arm": 1, "layers": {}, "splits": []}\n')
    devices = {name: f"/dev/{name}" for name in ("null", "full", "zero")}
    return {name: str(path) for name, path in found.items()} | devices


def command_line(draw, script, inputs, new):
    """The words of a command line: those it needs, some of them lacking, and keys with values of any kind."""
    words = WORDS[script]
    argv = []
    for name, value in words.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value).format(**inputs, new=new)
        if name in ALWAYS or draw.random() < 0.95:
            argv.append(f"--{name}={text}")
    fields = [field for field in dataclasses.fields(CONFIGS[script]) if field.name not in ("run", "dry_run", "name")]
    shapes = ["--{}={}"] * 30 + ["--{}", "-{}={}", "{}={}", "--{} {}", "--x{}={}", "\u2014{}={}"]
    for _ in range(draw.randint(0, 4)):
        field = draw.choice(fields)
        odd = [*ODD, *field.metadata["checks"].get("choices", ())]
        value = str(draw.choice(list(inputs.values()) if draw.random() < 0.3 else odd))
        # a device of this machine, an input of the next case, the folder of the script, all memory, the internet
        is_spared = field.name in WRITTEN and value in inputs.values() or field.name in ALWAYS and value == "None"
        if not is_spared:
            argv.append(draw.choice(shapes).format(field.name, value))
    if draw.random() < 0.2 and "/hub/" not in script:  # words without dashes name data sets there
        argv.insert(draw.randint(0, len(argv)), draw.choice([*inputs.values(), *ODD, "--help", "--"]))
    return argv


def run_script(script, argv, folder):
    """`python SCRIPT ...` in this process, a fork that ends with it. What it prints on standard error is in `said`."""
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    signal.alarm(SECONDS)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT), 2)
    sys.stdin, sys.stdout, sys.stderr = (
        open(0, encoding="utf-8"),
        open(1, "w", encoding="utf-8"),
        open(2, "w", encoding="utf-8", errors="backslashreplace"),
    )  # noqa: SIM115
    sys.argv = [script, *argv]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def contents(inputs):
    """{file: the hash of its content} of all inputs, but for what meters.py and plot.py write beside a checkpoint."""
    folder = Path(inputs["file"]).parent
    files = [file for file in folder.rglob("*") if file.is_file() and file.name not in ("meters.json", "page.png")]
    return {file: sha256_of_file(file) for file in files}


@pytest.mark.parametrize("script", WORDS)
def test_any_command_line_of_a_whole_script_ends_with_a_status_and_no_traceback(script, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "work", lambda *words: None)  # no experiment trains
    for part in bench.PARTS.values():  # nor is anything measured
        monkeypatch.setattr(sys.modules[part.__module__], part.__name__, lambda config, rows: rows.write("one"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    draw = random.Random(f"{script} {os.environ.get('NANOGATE_SEED', 1)}")
    before, statuses, wrong = contents(inputs), collections.Counter(), []
    for case in range(SCRIPT_CASES):
        folder = tmp_path / str(case)
        folder.mkdir()
        argv = command_line(draw, script, inputs, folder / "new")
        child = multiprocessing.get_context("fork").Process(target=run_script, args=(script, argv, folder))
        child.start()
        child.join()
        said = (folder / "said").read_text(errors="replace")
        statuses[child.exitcode] += 1
        is_told = child.exitcode not in (1, 2) or said.count("error: ") == 1
        if child.exitcode not in (0, 1, 2, -signal.SIGALRM) or "Traceback" in said or not is_told:
            wrong.append((argv, child.exitcode, said[-2000:]))
        shutil.rmtree(folder)
    print(f"{script}: {SCRIPT_CASES} command lines, statuses {dict(statuses)}")
    assert not wrong, f"{len(wrong)} of {SCRIPT_CASES}: {json.dumps(wrong[:5])}"
    assert contents(inputs) == before
