"""Every command of the documents works: each is run on small data and small models, in one working copy.

A command is a line of a ``` block, or `code` that starts with python, torchrun or make. Three kinds are not run here:
their words are checked, and other tests run what bench.py measures, what downloads WikiText-103, and make's targets.
Runs of experiments are listed (--dry_run), not made. A command of no known kind fails.
"""

import contextlib
import dataclasses
import importlib
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import published
import pytest
from conftest import LINES, ROOT, TINY, Helpers
from torch.distributed.run import get_args_parser

import configurator
import export
import train
from data.text import prepare as text_prepare
from data.tokenizer import get_tokenizer
from data.writing import write_stream
from model import GPTConfig

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "config/README.md", "tests/README.md")),
    *sorted((ROOT / "results").rglob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
TEXT = {file.relative_to(ROOT).as_posix(): file.read_text() for file in DOCUMENTS}
PLACEHOLDERS = {"NAME": "pystdlib", "--key=value": "--n_layer=2", "PATH...": "book.txt", "FOLDER": "notes"}
PLACEHOLDERS |= {"HOST": "localhost", "CONFIG": "config/experiments/minimum.py"}
# how a user gets here, and what tests/test_cluster.py writes for
NOT_RUN = {"git clone --depth=1 REPOSITORY nanogate", "cd nanogate", ". .venv/bin/activate", "tensorboard --logdir=out"}


def commands_of(text):
    """The commands of a document, without comments; `a && b` is two."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    lines += re.findall(r"`((?:python|torchrun|make) [^`]+)`", text)
    return [part.strip() for line in lines for part in re.split(r"\s# ", line)[0].split("&&") if part.strip()]


COMMANDS = sorted({command for text in TEXT.values() for command in commands_of(text)})


@pytest.fixture(scope="module")
def copy(tmp_path_factory, mqar):
    """A working copy: the configs, a small text under every name of a data set, rows of experiments."""
    with contextlib.chdir(tmp_path_factory.mktemp("copy")):
        Path("config").symlink_to(ROOT / "config")
        shutil.copytree(ROOT / "results", "results", ignore=shutil.ignore_patterns("bench"))
        Path("notes").mkdir()
        for file in ("book.txt", "prompt.txt", "notes/a.md", "notes/b.md"):
            Path(file).write_text("".join(LINES * 20))
        # long enough for --lengths=1024, short enough to be evaluated in a moment
        splits = {split: [LINES[i % 3] * 5 for i in range(6)] for split in ("train", "val", "test")}
        about = dict(name="text", generator="tests", generator_version=1, parameters={}, seed=0)
        for name in ("pystdlib", "text", "gaterun", "wikitext103", "wikitext103-mini"):
            write_stream(f"data/{name}", splits, tokenizer=get_tokenizer("byte"), **about)
        shutil.copytree(mqar, "data/mqar")
        yield


# -- Each kind of command ----------------------------------------------------------------------------------------------

# what makes a command of train.py small
FEWER = dict(n_layer=4, block_size=64, max_iters=2, eval_interval=2, gradient_accumulation_steps=2, meters="false")
SMALL = Helpers.words(**TINY | FEWER)


def run_train(words):
    config, small = configurator.load(train.TrainConfig, words), SMALL
    shutil.rmtree(config.out_dir, ignore_errors=True)
    if config.init_from in ("resume", "auto"):  # a run to go on with
        train.main([*(word for word in words if not word.startswith("--init_from=")), *small])
    elif config.init_from != "scratch":
        checkpoint(config.init_from)
        if Path(config.init_from).name in ("qwen3", "Qwen3-0.6B"):  # it has sizes of its own
            sizes = {field.name for field in dataclasses.fields(GPTConfig)}
            small = [word for word in SMALL if word[2:].partition("=")[0] not in sizes]
    train.main([*words, *small])
    assert (Path(config.out_dir) / "ckpt.pt").is_file()


def make_qwen3():
    """Makes the folder of a hub, the model that is imported from it, and a data set with its tokenizer."""
    if not Path("data/qwen3").exists():
        sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, head_dim=8)
        sizes |= dict(num_key_value_heads=1, vocab_size=300, max_position_embeddings=64)
        published.save_gated_qwen3("baseline", Path("Qwen3-0.6B"), **sizes)
        published.save_tokenizer(Path("Qwen3-0.6B/tokenizer.json"), 300)
        export.main(["--from_hf=Qwen3-0.6B", "--out_dir=out/qwen3"])
        text_prepare.main(["book.txt", "--tokenizer=out/qwen3", "--out_dir=data/qwen3"])


def checkpoint(path):
    """Makes the run that a command takes for granted: its gate or its mixer stands in the name."""
    path = Path(path)
    folder = path.parent if path.suffix == ".pt" else path
    if folder.name in ("qwen3", "Qwen3-0.6B"):
        return make_qwen3()
    if not (folder / "ckpt.pt").exists():
        gates = {"plain": "none", "plain_qwen": "none", "headwise": "headwise"}
        words = [f"--gate={gates.get(folder.name, 'elementwise')}", f"--out_dir={folder}", "--overwrite=true"]
        if "qwen" in folder.name:
            return run_train(["config/late_gate_qwen.py", *words])
        mixer = "gla" if "gla" in folder.name else "softmax"
        train.main(["config/pystdlib.py", f"--attention={mixer}", *words, *SMALL])
    if not path.exists():
        shutil.copy(folder / "ckpt.pt", path)


def run_on_checkpoint(script, words):
    more = {"sample": ["--max_new_tokens=4", "--num_samples=1"], "evaluate": ["--device=cpu", "--threads=1"]}
    more["meters"] = [*more["evaluate"], "--rows=2", "--score_batches=1"]
    if any(word.startswith("--from_hf=") for word in words):
        make_qwen3()
    for paths in [word.partition("=")[2] for word in words if word.startswith("--checkpoint=")]:
        for path in paths.split(","):
            checkpoint(path)
    importlib.import_module(script).main([*words, *more.get(script, [])])


def run_plot(words):
    for word in words:
        if word.startswith(("out/", "Qwen3")):
            folder = word.removesuffix("/meters.json")
            checkpoint(folder)
            needs_meters = folder != word or folder.startswith("Qwen3") or "--html=true" in words
            if needs_meters and not Path(folder, "meters.json").exists():
                data = ["--dataset=data/qwen3"] if "qwen3" in folder.lower() else []
                run_on_checkpoint("meters", [f"--checkpoint={folder}", *data])
    importlib.import_module("plot").main(words)


def run_prepare(name, words):
    prepare = importlib.import_module(f"data.{name}.prepare")
    if "--tokenizer=Qwen3-0.6B" in words:
        make_qwen3()
    words = [*words, f"--out_dir=prepared/{name}"]
    if name in ("wikitext103", "hub"):  # test_wikitext103.py and test_hub.py run them on texts of their own
        configurator.load(prepare.Config, words, positional="name" if name == "hub" else None)
        return
    prepare.main([*words, "--train_size=200", "--val_size=20"] if name in ("mqar", "backcopy") else words)
    assert json.loads(Path(f"prepared/{name}/meta.json").read_text())["splits"].keys() == {"train", "val"}


def run(command):
    if command in NOT_RUN:
        return
    for placeholder, value in PLACEHOLDERS.items():
        command = command.replace(placeholder, value)
    words = shlex.split(command)
    environment = [word.partition("=")[0] for word in words if re.match("[A-Z_]+=", word) and words[0] != "make"]
    program, *words = words[len(environment) :]
    if program == "make":
        subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, check=True)
        return
    if program == "torchrun":  # in this process and alone: other tests start several
        launched = get_args_parser().parse_args(words)
        program, words = "python", [launched.training_script, *launched.training_script_args]
    if program == "sbatch":  # tests/test_cluster.py runs the files; what they start gets the words behind them
        file = next(word for word in words if word.endswith(".sbatch"))
        (script,) = re.findall(r"(\w+\.py) (?:--init_from=auto )?\"\$@\"", (ROOT / file).read_text())
        program, words = "python", [script, *words[words.index(file) + 1 :]]
    assert program == "python", f"{command}: no test knows how to run it"
    if words[:2] == ["-m", "pytest"]:
        texts = [(ROOT / word).read_text() for word in words if word.endswith(".py")]
        assert texts and all(any(name in text for text in texts) for name in environment)
        return
    script, *words = words
    name = script.removesuffix(".py")
    if "--help" in words:
        with pytest.raises(SystemExit, match="0"):
            importlib.import_module(name).main(words)
    elif script.startswith("data/"):
        run_prepare(script.split("/")[1], words)
    elif script == "train.py":
        run_train(words)
    elif script in ("evaluate.py", "sample.py", "meters.py", "export.py"):
        run_on_checkpoint(name, words)
    elif script == "plot.py":
        run_plot(words)
    elif script == "experiment.py":
        words += [f"--out_dir=results/{Path(words[0]).stem}"] + ["--dry_run=true"] * ("--run=false" not in words)
        importlib.import_module("experiment").main(words)
    elif script == "harness.py":  # tests/test_harness.py runs it; the library need not be installed
        assert words[:3] == ["run", "--model", "nanogate"]
    else:
        assert script == "bench.py", f"{command}: no test knows how to run it"
        bench = importlib.import_module("bench")  # tests/test_bench.py runs its parts
        configurator.load(bench.BenchConfig, words, positional="what")


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
    modules = ["train", "evaluate", "sample", "meters", "plot", "experiment", "bench", "export"]
    modules += [f"data.{file.parent.name}.prepare" for file in (ROOT / "data").glob("*/prepare.py")]
    known = {"config_override", "help", "key", "model", "model_args", "tasks", "include_path"}  # four of lm-eval
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
