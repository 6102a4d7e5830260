"""What the command line and the config files accept, and that every mistake ends in one line that helps."""

import dataclasses
import math
import os
import sys
from unittest import mock

import pytest
from conftest import ROOT, Helpers

from base import configurator
from base.configurator import UserError, build, key, load, read_config_file, read_words
from base.rules import Rule, wrong_field
from keys import TrainConfig

error_of = Helpers.error_of


@dataclasses.dataclass
class Config:
    n_layer: int = key(12, "number of blocks", at_least=1)
    batch_size: int = key(8, "sequences in a step", at_least=1, at_most=1_000_000)
    learning_rate: float = key(6e-4, "step size of AdamW", above=0)
    dropout: float = key(0.0, "share of activations dropped in training", at_least=0, below=1)
    grad_clip: float | None = key(1.0, "largest norm of the gradient, None for no limit", above=0)
    warmup: int | None = key(None, "steps of warm-up, None for a tenth of the run", at_least=0)
    gated: bool = key(False, "whether a gate follows the readout")
    compile: str = key("auto", "whether to compile the model", choices=("auto", "true", "false"))
    device: str = key("auto", "where to run", choices=("auto", "cpu", "cuda", "mps"))
    gate: str = key("none", "granularity and position of the gate")
    start: str = key("\n", "text to go on from", at_least=0)
    paths: list[str] = key([], "runs to compare")
    seeds: list[int] = key([0, 1, 2], "one run for each", at_least=0)
    mixers: list[str] = key(["softmax"], "one run for each", choices=("softmax", "gla"))
    options: dict = key({}, "passed on to the plot")
    steps: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.steps = 100 * self.n_layer
        if self.warmup is not None and self.warmup > self.steps:
            raise UserError(f"warmup={self.warmup}: must be at most {self.steps}, the steps of the run")


def same(a, b):
    return a == b and type(a) is type(b)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(name, text) puts a file in the working folder, which is a fresh one."""
    monkeypatch.chdir(tmp_path)

    def write(name, content):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return name

    return write


# -- Rules, and the values of keys -------------------------------------------------------------------------------------

RULES = [  # a rule, what obeys it, what does not and what is then said of it
    ((int, 1, 9), [1, 9], [(0, "a whole number of at least 1 and at most 9"), (10, ""), (True, ""), (2.0, "")]),
    ((float, 0, 1), [0, 1, 0.5], [(1.1, "a number of at least 0 and at most 1"), (math.nan, ""), (10**400, "")]),
    (Rule(float, above=0, below=1), [0.5], [(0, "a number above 0 and below 1"), (1.0, "")]),
    ((bool, 0, 1), [True, False], [(1, "true or false"), (None, "")]),
    ((str, 1, 3), ["a", "abc"], [("", "a text of length at least 1 and at most 3"), ("abcd", ""), (None, "")]),
    ((int, 0, 9, None), [None, 3], [(-1, "a whole number of at least 0 and at most 9, or None")]),
    ({"b", "a"}, ["a"], [("c", "one of a, b"), (3, ""), (["a"], "")]),
    ([(int, 0, 9), 1, 2], [[1], [1, 2]], [([], "a list of length"), ([1, 2, 3], ""), ([1, -1], "[1]=-1")]),
    ({"a": (int, 0, 9), "b?": object}, [{"a": 1, "b": []}], [({"b": 1}, "it has no a"), ({"a": -1}, "a=-1: ")]),
    ({str: [(int, 0, 9), 1, 1]}, [{}, {"x?": [1]}], [({"x": [-1]}, "x[0]=-1"), ({3: [1]}, "whose names are texts")]),
]  # fmt: skip


def test_a_rule_lets_through_what_it_allows_and_says_what_else_is_wrong():
    for rule, right, wrong in RULES:
        for value in right:
            assert wrong_field(value, rule) is None, value
        for value, words in wrong:
            message = wrong_field(value, rule)
            assert message is not None and words in message, (value, message)


READ = {  # {key: [(text on the command line, the value)]}
    "n_layer": [("6", 6), (" 7 ", 7), ("5*8", 40), ("1e3", 1000), ("+1", 1)],
    "batch_size": [("4.0", 4)], "learning_rate": [("1", 1.0), ("3e-4", 3e-4)],
    "grad_clip": [("None", None), ("none", None), ("null", None), ("2", 2.0)],
    "gated": [("true", True), ("True", True), ("1", True), ("false", False), ("False", False), ("0", False)],
    "compile": [(False, "false"), ("true", "true")], "mixers": [("gla,softmax", ["gla", "softmax"])],
    "gate": [("none", "none"), ("None", "None"), ("native,native,headwise", "native,native,headwise")],
    "start": [("a=b", "a=b"), ("", ""), ("1", "1"), ("--help", "--help")],
    "paths": [("a,b c, d", ["a", "b c", "d"]), ("", []), ("['a', '2']", ["a", "2"])],
    "seeds": [("0,1e1", [0, 10]), ("[3]", [3]), ("(1, 2)", [1, 2])],
    "options": [('{"a": [1, true, null]}', {"a": [1, True, None]}), ("{'a': True}", {"a": True})],
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_value_is_read_by_the_type_of_its_key(name):
    for given, value in READ[name]:
        assert same(getattr(load(Config, [f"--{name}={given}"]), name), value), given
        assert same(getattr(build(Config, {name: given}), name), value), given
    assert load(Config, ["--gated"]).gated


WRONG = [  # (key, what is allowed, {text: how the message shows the value})
    ("batch_size", "a whole number of at least 1 and at most 1000000", {"0": 0, "1000001": 1000001}),
    ("n_layer", "a whole number of at least 1", {"0": 0, "1.5": 1.5}),
    ("n_layer", "a whole number of at least 1", {"": "''", "inf": "'inf'", "2**64": "'2**64'", "9k": "'9k'"}),
    ("n_layer", "a whole number of at least 1", {"1e19": 10**19, str(2**63): 2**63}),
    ("dropout", "a number of at least 0 and below 1", {"1": 1.0, "-1": -1.0, "none": None}),
    ("learning_rate", "a number above 0", {"0": 0.0, "True": True}),
    ("learning_rate", "a number above 0", {"nan": "'nan'"}),
    ("learning_rate", "a number above 0", {"1e999": math.inf, "1e39": 1e39}),
    ("grad_clip", "a number above 0, or None", {"-1": -1.0}),
    ("gated", "true or false", {"maybe": "'maybe'", "2": 2, "[]": []}),
    ("device", "one of auto, cpu, cuda, mps (did you mean 'cuda'?)", {"gpu": "'gpu'", "CUDA": "'CUDA'"}),
    ("paths", "a list", {"a,,b": "'a,,b'", "[open(1)]": "'[open(1)]'"}),
    ("seeds[1]", "a whole number of at least 0", {"0,x": "'x'", "0,-1": -1}),
    ("options", "a dict", {"1": 1, "{[1]: 2}": "'{[1]: 2}'"}),
]


def test_a_wrong_value_names_the_key_the_value_and_what_is_allowed():
    for name, allowed, shown in WRONG:
        for text, value in shown.items():
            message = error_of(load, Config, [f"--{name.split('[')[0]}={text}"])
            assert message == f"{name}={value}: must be {allowed}"
    for name, value in (("batch_size", 10**5000), ("seeds", [True]), ("learning_rate", True), ("gate", 5)):
        assert error_of(build, Config, {name: value}, source="base.py").startswith(f"base.py: {name}")


def test_an_unknown_key_is_answered_with_the_nearest_one():
    assert error_of(build, Config, {"n_layers": 1}, "a.py") == "a.py: unknown key 'n_layers' (did you mean 'n_layer'?)"
    assert error_of(load, Config, ["--batch-size=4"]) == "unknown key 'batch-size' (did you mean 'batch_size'?)"
    assert error_of(build, Config, {"xyzzy": 1}) == "unknown key 'xyzzy'"


def test_the_dataclass_checks_further_and_mutable_defaults_are_not_shared():
    assert error_of(load, Config, ["--n_layer=1", "--warmup=101"]).startswith("warmup=101: must be at most 100")
    build(Config, {}).paths.append("a")
    assert build(Config, {}).paths == []


def test_long_values_are_shortened_and_newlines_escaped():
    assert len(error_of(load, Config, ["--n_layer=" + "x" * 100_000])) < 130
    assert str(UserError("a\nb\x85c\ud800")) == r"a\nb\x85c\ud800" and len(str(UserError("x" * 100_000))) < 1000


# -- The words of the command line -------------------------------------------------------------------------------------


def test_files_apply_in_order_and_keys_come_last_in_their_order(write):
    write("a.py", "n_layer = 1\nbatch_size = 1\ngate = 'a'\ndropout = 0.1")
    write("b.py", "batch_size = 2\ngate = 'b'\ndropout = 0.2")
    override = '--config_override={"dropout": 0.4, "warmup": 3}'
    words = ["--gate=c", "a.py", "--dropout=0.3", override, "b.py"]
    config = load(Config, words)
    assert (config.n_layer, config.batch_size, config.gate, config.dropout) == (1, 2, "c", 0.4)
    assert read_words(Config, words).keys() == {"n_layer", "batch_size", "gate", "dropout", "warmup"}
    assert load(Config, ['--config_override={"n_layer": 4}', "--n_layer=5", "--n_layer=6"]).n_layer == 6
    assert load(Config, ["--n_layer=5", '--config_override={"n_layer": 4}']).n_layer == 4


def test_json_is_a_config_alone_as_the_config_of_a_run_and_behind_a_space(write):
    write("a.json", '{"n_layer": 3, "gate": "b"}')
    write("run.json", '{"run_id": "a", "dtype": "float32", "config": {"n_layer": 4}}')
    config = load(Config, ["a.json", "run.json", "--config_override", '{"batch_size": 7}'])
    assert (config.n_layer, config.gate, config.batch_size) == (4, "b", 7)
    hub = write("hub.json", '{"architectures": ["LlamaForCausalLM"], "hidden_size": 576}')
    assert error_of(load, TrainConfig, [hub]) == f"{hub}: unknown key 'hidden_size': here it is n_embd"
    for text, message in (("[1]", "must be a JSON object"), ("{", "a.json: cannot be read as JSON")):
        assert message in error_of(load, Config, [write("a.json", text)])
    assert "cannot be read as JSON" in error_of(load, Config, ["--config_override"])


def test_words_without_dashes_fill_a_list_and_one_of_another_spelling_says_how_to_write_it():
    assert load(Config, ["runs/a", "--n_layer=1", "seed=2", "7"], positional="paths").paths == ["runs/a", "seed=2", "7"]
    for word, message in (
        ("--batch_size", "'--batch_size': write --key=value"),
        ("batch_size=4", "'batch_size=4': a config file ends in .py or .json"),
        ("a\0b/x.py", "a\\x00b/x.py: no such file"),
        ("config/mqarr.py", "config/mqarr.py: no such file or folder"),
        ("--config_override=[1]", 'config_override: must be a JSON object, as in {"n_layer": 6}'),
        ('--config_override={"x": NaN}', "config_override: cannot be read as JSON (NaN is no JSON)"),
        ("--config_override=" + "[" * 100_000, "config_override: cannot be read as JSON ("),
    ):
        assert error_of(load, Config, [word]).startswith(message)
    assert error_of(load, Config, ["out"], positional=None) == "'out': write --key=value"


def test_help_shows_every_key_with_its_default_its_values_and_its_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(SystemExit) as caught:
        load(Config, ["--n_layers", "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and out.startswith("usage: python x.py [config.py ...] [--key")
    for field in (field for field in dataclasses.fields(Config) if field.init):
        assert f"\n  --{field.name}=" in out and f"\n        {field.metadata['help']} (" in out
    assert "  --n_layer=12\n        number of blocks (a whole number of at least 1)\n" in out
    assert "(a list, each item one of softmax, gla)" in out
    assert "  --start=\\n\n  " in out  # a default that holds a newline stays on its line


# -- Config files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, value",
    [
        ("x = 5 * 8", 40), ("x = -1", -1), ("x = 7 - 2 * (3 + 1)", -1), ("x = 1 / 4", 0.25), ("x = 1_000", 1000),
        ("y = 3\nx = y * 2", 6), ("x = 1\nx = x + 1", 2), ("x = True", True), ("x = None", None), ("x = 'a' 'b'", "ab"),
        ("x = [1, (2, 'a'), {'k': [None, -1.5]}]", [1, (2, "a"), {"k": [None, -1.5]}]), ("x = {}", {}),
        ("'''A docstring.'''\n# a comment\n\nx = 1  # why", 1), ("\ufeffx = 1\r\n", 1), ("x = 'é'", "é"),
    ],
)  # fmt: skip
def test_a_python_file_holds_literals_arithmetic_and_earlier_names(write, text, value):
    assert same(read_config_file(write("a.py", text))["x"], value)


NOT_ALLOWED = [
    "print(1)", "x, y = 1, 2", "x += 1", "x[0] = 1", "x.y = 1", "x = [y for y in (1,)]", "x = f'{1}'",
    "x = ().__class__", "x = {**{}}", "x = [*[1]]", "x = 1j", "x = 9 ** 9 ** 9", "x = lambda: 1", "x = open('a')",
    "x = __import__('pathlib').Path('executed').touch()", "if True:\n    x = 1", "import os",
]  # fmt: skip


@pytest.mark.parametrize(
    "text, message",
    [
        *((text, "a.py line 1: allowed are lines `name = value`, where") for text in NOT_ALLOWED),
        ("iters = 5\nx = iter", "a.py line 2: 'iter' is not assigned above (did you mean 'iters'?)"),
        ("x = 'a' * 9", "arithmetic is between numbers"),
        ("x = 1 / 0", "a.py line 1: division by zero"),
        (f"x = 1{'0' * 200}\ny = x * x", "a.py line 2: int too large to convert to float"),
        ("x = 1\n  y = 2", "a.py line 2: unexpected indent"),
        (b"x = '\xff'", "a.py line 1: (unicode error)"),
        ("include = 'a.py'", "its include leads back to it"),
        ("x = {'a': 1, 'a': 2}", "the key 'a' stands there twice"),
        ("#" * (1 << 20) + "\n", "is too large for a file of this kind"),
        *((f"n_layer = {part}", "a.py") for part in ("9" * 5000, "[" * 50_000, "1+" * 50_000 + "1")),
    ],
    ids=lambda text: str(text)[:20],
)
def test_anything_else_in_a_python_file_is_refused_with_its_line_and_never_executed(write, text, message):
    assert message in error_of(read_config_file, write("a.py", text))
    assert os.listdir() == ["a.py"]


# -- A whole script ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_rank", ["0", "1"])  # of torchrun: whichever process ends first says why
def test_run_turns_an_error_into_one_line_and_a_status(local_rank, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    for error, status, stderr in [
        (UserError("n_layer=0:\nno"), 2, "error: n_layer=0:\\nno\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(7), 7, ""),
        (OSError(28, "No space left"), 1, "error: [Errno 28] No space left\n"),
        (MemoryError(), 1, "error: not enough memory (malloc failed); lower batch_size or the model\n"),
        (TypeError("an edit"), 1, "Traceback (most recent call last):\n"),
    ]:
        with pytest.raises(SystemExit) as ended:
            configurator.run(mock.Mock(side_effect=error))
        printed = capsys.readouterr().err
        assert ended.value.code == status
        assert printed.startswith(stderr) if stderr.startswith("Traceback") else printed == stderr


TORCH = """# a file that scripts import in place of torch
import os
text = b"1" * (64 << 20)
del text
resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
print("imported", os.environ["OMP_WAIT_POLICY"], "kept" if resident > 64 << 20 else "returned")
raise SystemExit
"""
GOOD = {  # a command line of each script in which nothing is wrong
    "train.py": "--dataset=data", "sample.py": "--checkpoint=a.pt", "evaluate.py": "--checkpoint=a.pt",
    "meters.py": "--checkpoint=a.pt", "hub/export.py": "--from_hf=a.pt", "bench.py": "ops", "hub/harness.py": "",
    "experiment.py": "a.py", "plot.py": "data",
}  # fmt: skip
SLIPS = {  # wrong words: which scripts, and what they say
    "--help": (set(GOOD) - {"hub/harness.py"}, "usage: python"),
    "--no_such=1": (set(GOOD) - {"hub/harness.py"}, "error: unknown key 'no_such'"),
    "--device=tpu": ({"train.py", "sample.py", "evaluate.py", "meters.py", "bench.py"}, "error: device="),
    "--seed=x": ({"train.py", "sample.py"}, "error: seed="),
    "--dataset=none": ({"train.py", "evaluate.py", "meters.py"}, "error: none/meta.json: no such file; the docstring"),
    "--checkpoint=b": ({"sample.py", "evaluate.py", "meters.py", "hub/export.py"}, "error: b: no such checkpoint"),
    "--init_from=b": ({"train.py"}, "error: b: no such checkpoint"),
    "none.py": ({"train.py", "sample.py", "evaluate.py", "experiment.py"}, "error: none.py: no such file"),
    "--hidden_size=8": ({"train.py"}, "error: unknown key 'hidden_size': here it is n_embd"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and glibc alone is told to keep memory")
@pytest.mark.parametrize("script", GOOD)
def test_a_slip_is_told_before_torch_is_imported_and_all_scripts_share_their_settings(script, write, monkeypatch):
    write("torch.py", TORCH)
    for name in ("a.py", "a.pt", "data/meta.json"):
        write(name, "")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    good = ROOT / script, *GOOD[script].split()
    assert Helpers.script(*good, cwd=".").stdout == b"imported passive kept\n"
    for words, (scripts, message) in SLIPS.items():
        if script in scripts:
            done = Helpers.script(*good, words, cwd=".")
            assert (done.stdout + done.stderr).decode().startswith(message), words
            assert done.returncode == (0 if words == "--help" else 2)


def test_data_that_are_missing_are_a_line_that_names_the_script(tmp_path):
    message = Helpers.error_of(Helpers.train, tmp_path / "mqar", tmp_path / "out")
    assert "; run python data/mqar/prepare.py, with the keys that your config's docstring names" in message
    message = Helpers.error_of(Helpers.train, "shakespeare_char", tmp_path / "out")
    assert message.rstrip().endswith(", and say dataset=data/shakespeare_char")
    message = Helpers.error_of(Helpers.train, "data/fineweb_edu", tmp_path / "out")
    assert message.rstrip().endswith(
        "; the docstring of your config names the script in data/ that makes it, and its keys"
    )


SCRIPTS = [file for pattern in ("[!.]*.py", "data/*/prepare.py") for file in ROOT.glob(pattern)]
SCRIPTS = sorted(file for file in SCRIPTS if "\nif __name__" in file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_on_windows_every_script_ends_with_one_line(script, tmp_path):
    """Where the modules are hidden that Python has on Linux and macOS alone. It ends before it imports torch."""
    for name in ("fcntl", "resource", "termios", "pwd", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError(f'No module named {__name__}')")
    hide = f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = sys.argv[1:]"
    ended = Helpers.script("-c", f"{hide}; runpy.run_path(sys.argv[0], run_name='__main__')", script)
    message = b"error: nanogate needs Linux or macOS; on Windows use WSL\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", message)
