"""What several test files share: small data sets, a model that trains in seconds, a way to read what a run wrote."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

# before torch is first imported: tests run side by side, one thread each
os.environ["OMP_NUM_THREADS"] = "1"
# in the background and under nohup they are ignored, by what tests start, too
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402

if importlib.util.find_spec("fla") and not torch.cuda.is_available():
    sys.modules["fla"] = None  # transformers would take its kernels, which need a GPU
    for family in ("qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid"):
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    del sys.modules["fla"]

import evaluate  # noqa: E402
import plot  # noqa: E402
import train  # noqa: E402
from base.configurator import UserError  # noqa: E402
from base.files import parse_json  # noqa: E402
from data.mqar import prepare as mqar_prepare  # noqa: E402
from data.tokenizer import get_tokenizer  # noqa: E402
from data.writing import write_stream  # noqa: E402
from runs import hardware  # noqa: E402
from study import drawing, report, runner  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TINY = dict(
    n_layer=2, n_embd=16, n_head=2, mlp_ratio=2, block_size=32, batch_size=4, max_iters=8, warmup_iters=2,
    learning_rate=3e-3, eval_interval=4, log_interval=1, device="cpu", dtype="float32", threads=1,
)  # fmt: skip
# a stream of bytes with characters of 1, 2, 3 and 4 of them
LINES = ["The quick brown fox jumps over the lazy dog.\n", "Zwölf Boxkämpfer jagen Eva über den Deich.\n", "名は。🙂\n"]


def wait_until(condition, is_alive=lambda: True):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline and is_alive()
        time.sleep(0.01)


class Malicious:
    """What makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


class Helpers:
    tiny = TINY

    @staticmethod
    def words(**keys):
        """The words of a command line."""
        return [f"--{name}={value}" for name, value in keys.items()]

    @classmethod
    def train(cls, dataset, out_dir, **keys):
        """train.main in this process, with the tiny model unless keys say otherwise. Returns out_dir."""
        train.main(cls.words(**TINY | dict(dataset=dataset, out_dir=out_dir) | keys))
        return out_dir

    @staticmethod
    def metrics(out_dir, event=None):
        """The rows of metrics.jsonl, all or those of one event. NaN and Infinity are no JSON, and fail here."""
        rows = [parse_json(line, "metrics.jsonl") for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if event in (None, row["event"])]

    @classmethod
    def losses(cls, out_dir):
        """{step: training loss}; every step stands there once."""
        rows = cls.metrics(out_dir, "train")
        losses = {row["step"]: row["loss"] for row in rows}
        assert len(losses) == len(rows)
        return losses

    @classmethod
    def equal(cls, a, b):
        """Whether two checkpoints' values are the same to the bit."""
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(cls.equal(a[name], b[name]) for name in a)
        if isinstance(a, list):
            return len(a) == len(b) and all(map(cls.equal, a, b))
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    @staticmethod
    def without_times(rows):
        """Rows of metrics.jsonl without what no two runs have in common."""
        times = ("tokens_per_second", "mfu", "seconds", "eval_seconds")
        return [{k: v for k, v in row.items() if k not in times} for row in rows]

    @staticmethod
    def write_text(folder, train, val, test=(), **about):
        """A stream of bytes of these documents. Returns the folder."""
        about = dict(name="text", generator="tests", generator_version=1, parameters={}, seed=0) | about
        splits = {"train": train, "val": val} | ({"test": test} if test else {})
        write_stream(folder, splits, tokenizer=get_tokenizer("byte"), **about)
        return folder

    @staticmethod
    def script(*words, stdin=None, cwd=ROOT):
        """A script of the repository in a process of its own. Returns it when it has ended, its output as bytes."""
        words = [sys.executable, *map(str, words)]
        return subprocess.run(words, cwd=cwd, input=stdin, capture_output=True, timeout=300)

    @staticmethod
    def error_of(function, *args, **keys):
        """The text of the UserError that the call must raise, which must be one line."""
        with pytest.raises(UserError) as caught:
            function(*args, **keys)
        text = str(caught.value)
        assert text.isprintable() and len(text) < 400
        return text


# what make check tests: a mixer, an MLP, or a mixer with that MLP
CHECKED = " with ".join(os.environ[name] for name in ("MIXER", "MLP") if os.environ.get(name))


def pytest_report_teststatus(report):
    """make check MIXER=name prints no dots, so that its first line is the next function's."""
    if CHECKED and report.when == "call":
        return report.outcome, "", ""


def pytest_exception_interact(node, call):
    """make check MIXER=name: the first failure is a line of its own that names the broken promise, and what is wrong
    if the test says so."""
    reporter = node.config.pluginmanager.get_plugin("terminalreporter")
    if CHECKED and len(reporter.stats.get("failed", [])) < 2:
        promise = getattr(node, "originalname", "").removeprefix("test_").replace("_", " ") or "the check did not start"
        error = call.excinfo.exconly().partition("\n")[0].removeprefix("AssertionError: ")
        why = "" if error.startswith("assert ") else f"; {error}"
        reporter.write_line(f"{CHECKED} breaks a promise: {promise} [{node.name.rpartition('[')[2]}{why}")


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Random weights and inputs are the same, whichever tests ran before."""
    torch.manual_seed(0)


@pytest.fixture
def float16_on_a_cpu(monkeypatch):
    """float16, which is refused on a CPU, runs in this process: its loss scale is for GPUs, and is tested without."""
    monkeypatch.setattr(hardware, "TOO_SLOW", set())


@pytest.fixture(scope="session")
def helpers():
    return Helpers


@pytest.fixture(scope="session")
def mqar(tmp_path_factory):
    """Rows of 32 tokens, 4 pairs, all asked for; 15 keys, 16 values."""
    folder = tmp_path_factory.mktemp("mqar")
    keys = dict(slices="32/4", vocab_size=32, power=1, train_size=10_000, val_size=300, out_dir=folder)
    mqar_prepare.main(Helpers.words(**keys))
    return folder


@pytest.fixture
def keys(request, mqar, tmp_path):
    """keys(name, key=value, ...): those of a tiny run on MQAR in the folder of that name, with the test file's KEYS."""
    own = getattr(request.module, "KEYS", {})
    return lambda name, **given: TINY | own | dict(dataset=mqar, out_dir=tmp_path / name) | given


@pytest.fixture
def run(keys):
    """run(name, key=value, ...) trains with these keys, and returns the folder."""
    return lambda name, **given: Helpers.train(**keys(name, **given))


@pytest.fixture(scope="session")
def mixed_mqar(tmp_path_factory):
    """Rows of 2 to 7 labels and two lengths."""
    folder = tmp_path_factory.mktemp("mixed_mqar")
    keys = dict(slices="16/2,32/4,32/7", vocab_size=16, train_size=400, val_size=40, out_dir=folder)
    mqar_prepare.main(Helpers.words(**keys))
    return folder


@pytest.fixture(scope="session")
def trained(mqar, tmp_path_factory):
    """A run of 8 steps without a gate, to look at and to start from; nobody writes to it."""
    return Helpers.train(mqar, tmp_path_factory.mktemp("trained") / "out")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A stream of bytes: 40 documents for training, 7 for validation."""
    train, val = [LINES[i % 3] for i in range(40)], [LINES[(i + 1) % 3] for i in range(7)]
    return Helpers.write_text(tmp_path_factory.mktemp("text"), train, val)


@pytest.fixture
def evaluated(tmp_path):
    """evaluated(checkpoint, key=value, ...) -> the object that evaluate.py writes."""

    def call(checkpoint, **keys):
        out = tmp_path / "evaluated.json"
        evaluate.main(Helpers.words(checkpoint=checkpoint, device="cpu", out=out, **keys))
        return json.loads(out.read_text())

    return call


@pytest.fixture(scope="module")
def started():
    """[(script and folder, keys)] of the runs that experiments start from here on: they are made in this process."""
    found = []

    def start(script, keys, folder, threads, gpu, processes, held):
        found.append((f"{script} {folder.name}", keys))
        importlib.import_module(script.removesuffix(".py")).main([f"--config_override={json.dumps(keys)}"])
        return types.SimpleNamespace(returncode=0, poll=lambda: 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "start_process", start)
        yield found


@pytest.fixture
def drawn(monkeypatch):
    """{name of a figure file: its figure}, of what is drawn from here on, without a file."""
    figures = {}
    for module in (plot, drawing, report):
        monkeypatch.setattr(module, "write", lambda figure, path: figures.update({path.name: figure}) or path)
    yield figures
    for figure in figures.values():  # no tick is a formula, which study/drawing.py does not parse: it would be printed
        figure.canvas.draw()
        for axes in figure.axes:
            labels = [*axes.get_xticklabels(which="both"), *axes.get_yticklabels(which="both")]
            assert not [label for label in labels if "mathdefault" in label.get_text()]
        plt.close(figure)
