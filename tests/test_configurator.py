# python -m pytest -q tests/test_configurator.py
"""What the command line and the config files accept, and that every mistake ends in one line that helps."""

import configurator
from configurator import UserError, build, key, load, read_config_file

import contextlib
import dataclasses
import io
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rules import Rule, wrong_field
from runs.hardware import Processes

ROOT = Path(configurator.__file__).parent


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
    suffix: str = key("", "end of the file names", choices=("", ".png", ".pdf"))
    start: str = key("\n", "text to go on from")
    run_name: str | None = key(None, "name of the run in plots, None for the name of its folder")
    out_dir: str = key("out", "where the run is written", is_path=True)
    paths: list[str] = key([], "runs to compare")
    slices: list[str] | None = key(None, "parts to show, None for all")
    seeds: list[int] = key([0, 1, 2], "one run for each", at_least=0)
    mixers: list[str] = key(["softmax"], "one run for each", choices=("softmax", "gla"))
    options: dict = key({}, "passed on to the plot")
    base: dict = key({}, "what all runs share", merge=True)
    steps: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.steps = 100 * self.n_layer
        if self.warmup is not None and self.warmup > self.steps:
            raise UserError(f"warmup={self.warmup}: must be at most {self.steps}, the steps of the run")


def same(a, b):
    return a == b and type(a) is type(b)


def error_of(function, *args, **kwargs):
    """The one-line text of the UserError that the call must raise."""
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    text = str(caught.value)
    assert len(text.splitlines()) == 1 and text.isprintable() and len(text) < 500
    return text


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(name, text) puts a file in the working folder, which is a fresh one."""
    monkeypatch.chdir(tmp_path)

    def write(name, content):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return name

    return write


# ----------------------------------------------------------------------------------------------------------------------
# The rules of values


RULES = [  # a rule, what obeys it, what does not and what is then said of it
    ((int, 1, 9), [1, 9], [(0, "a whole number of at least 1 and at most 9"), (10, ""), (True, ""), (2.0, "")]),
    ((int, 1, 1 << 60), [1 << 60], [(0, "a whole number of at least 1"), ((1 << 60) + 1, f"at most {1 << 60}")]),
    ((float, 0, 1), [0, 1, 0.5], [(1.1, "a number of at least 0 and at most 1"), (math.nan, ""), (True, "")]),
    ((float, 0, math.inf), [math.inf], [(-math.inf, "a number of at least 0"), (10**400, "")]),
    (Rule(float, above=0, below=1), [0.5], [(0, "a number above 0 and below 1"), (1.0, "")]),
    ((bool, 0, 1), [True, False], [(1, "true or false"), (None, "")]),
    ((str, 1, 3), ["a", "abc"], [("", "a text of length 1 to 3"), ("abcd", ""), (b"a", ""), (None, "")]),
    ((int, 0, 9, None), [None, 3], [(-1, "a whole number of at least 0 and at most 9, or None")]),
    ((dict, 1, 1 << 60), [{1: 2}], [({}, "a dict of length 1 or more"), ([1], "")]),
    ({"b", "a"}, ["a"], [("c", "one of a, b"), (3, ""), (["a"], "")]),
    ([(int, 0, 9), 1, 2], [[1], [1, 2]], [([], "a list of length 1 to 2"), ([1, 2, 3], ""), ([1, -1], "[1]=-1")]),
    ({"a": (int, 0, 9), "b?": object}, [{"a": 1, "b": []}], [({"b": 1}, "it has no a"), ({"a": -1}, "a=-1: ")]),
    ({str: [(int, 0, 9), 1, 1]}, [{}, {"x?": [1]}], [({"x": [-1]}, "x[0]=-1"), ({3: [1]}, "its names texts")]),
    (Rule(str, is_path=True), ["a/b"], [("", "the name of a file or folder"), ("a\0", ""), ("ä" * 128, "")]),
    (object, [None, 3, [{}]], []),
]  # fmt: skip


def test_a_rule_lets_through_what_it_allows_and_says_what_else_is_wrong():
    for rule, right, wrong in RULES:
        for value in right:
            assert wrong_field(value, rule) is None, value
        for value, words in wrong:
            message = wrong_field(value, rule)
            assert message is not None and words in message, (value, message)
    assert wrong_field({"x": [3]}, {"x": [(str, 1, 3), 1, 1]}, "meta").startswith("meta.x[0]=3: must be a text")


# ----------------------------------------------------------------------------------------------------------------------
# The values of keys


READ = {  # {key: [(text on the command line, the value)]}
    "n_layer": [("6", 6), (" 7 ", 7), ("5*8", 40), ("1e3", 1000)],
    "batch_size": [("4.0", 4)],
    "learning_rate": [("1", 1.0), ("3e-4", 3e-4)],
    "dropout": [("0", 0.0)],
    "grad_clip": [("None", None), ("none", None), ("null", None), ("2", 2.0)],
    "warmup": [("0", 0)],
    "gated": [("true", True), ("True", True), ("1", True), ("false", False), ("False", False), ("0", False)],
    "compile": [("False", "false"), ("true", "true")],
    "gate": [("none", "none"), ("None", "None"), ("native,native,headwise", "native,native,headwise")],
    "start": [("a=b", "a=b"), ("", ""), ("1", "1"), ("--help", "--help")],
    "run_name": [("None", None), ("none", "none"), ("a", "a")],
    "paths": [("a,b c, d", ["a", "b c", "d"]), ("", []), ("['a', '2']", ["a", "2"])],
    "slices": [("None", None)],
    "seeds": [("0,1e1", [0, 10]), ("[3]", [3]), ("(1, 2)", [1, 2])],
    "mixers": [("gla,softmax", ["gla", "softmax"])],
    "options": [('{"a": [1, true, null]}', {"a": [1, True, None]}), ("{'a': True}", {"a": True})],
}
FROM_FILES = {  # {key: [(value of a file, the value)]}
    "learning_rate": [(1, 1.0)],
    "batch_size": [(4.0, 4), ("1e3", 1000)],
    "grad_clip": [(None, None)],
    "compile": [(False, "false"), (True, "true")],
    "gated": [(True, True)],
    "paths": [(("a", "b"), ["a", "b"])],
    "seeds": [([1.0, "2"], [1, 2])],
    "options": [({"a": 1}, {"a": 1})],
}


@pytest.mark.parametrize("name", READ)
def test_a_value_is_read_by_the_type_of_its_key(name):
    for text, value in READ[name]:
        assert same(getattr(load(Config, [f"--{name}={text}"]), name), value), text
    for given, value in FROM_FILES.get(name, ()):
        assert same(getattr(build(Config, {name: given}), name), value), given


DEVICES = "one of auto, cpu, cuda, mps"
WRONG = [  # (key, what is allowed, {text: how the message shows the value})
    ("batch_size", "a whole number of at least 1 and at most 1000000", {"0": 0, "1000001": 1000001}),
    ("n_layer", "a whole number of at least 1", {"0": 0, "1.5": 1.5, "": "''", "inf": "'inf'", "None": None}),
    ("n_layer", f"a whole number of at least 1 and at most {2**63 - 1}", {"1e19": 10**19}),
    ("dropout", "a number of at least 0 and below 1", {"1": 1.0, "-1": -1.0, "none": None}),
    ("learning_rate", "a number above 0", {"0": 0.0, "nan": "'nan'", "True": True}),
    ("learning_rate", "a number above 0 and at most 3.4028234663852886e+38", {"1e999": math.inf, "1e39": 1e39}),
    ("grad_clip", "a number above 0, or None", {"-1": -1.0}),
    ("gated", "true or false", {"maybe": "'maybe'", "2": 2, "[]": []}),
    ("device", f"{DEVICES} (did you mean 'cuda'?)", {"gpu": "'gpu'", "CUDA": "'CUDA'"}),
    ("device", DEVICES, {"xyz": "'xyz'", "False": "'False'"}),
    ("paths", "a list", {"a,,b": "'a,,b'", "[1": "'[1'", "[open(1)]": "'[open(1)]'"}),
    ("seeds[1]", "a whole number of at least 0", {"0,x": "'x'", "0,-1": -1}),
    ("mixers[1]", "one of softmax, gla (did you mean 'softmax'?)", {"gla,softmix": "'softmix'"}),
    ("options", "a dict", {"1": 1, "{[1]: 2}": "'{[1]: 2}'"}),
    ("out_dir", "the name of a file or folder, at most 255 bytes between slashes", {"": "''"}),
]


WRONG_IN_FILES = [
    ("batch_size", "a whole number", [True, 1.5, [1], None, 10**5000]),
    ("seeds", "a whole number", [[True]]),
    ("learning_rate", "a number", [True, math.nan, -math.inf, 10**400]),
    ("gated", "true or false", [2, None, []]),
    ("gate", "a text", [5, None, False]),
    ("device", DEVICES, [False, 1]),
    ("paths", "a list", [{"a": 1}]),
    ("options", "a dict", [[1]]),
]


def test_a_wrong_value_names_the_key_the_value_and_what_is_allowed():
    for name, allowed, shown in WRONG:
        for text, value in shown.items():
            message = error_of(load, Config, [f"--{name.split('[')[0]}={text}"])
            assert message == f"{name}={value}: must be {allowed}"
    for name, allowed, values in WRONG_IN_FILES:
        for value in values:
            message = error_of(build, Config, {name: value}, source="base.py")
            assert message.startswith(f"base.py: {name}") and f": must be {allowed}" in message
    assert error_of(build, Config, {"gate": [10**5000]}) == "gate=<a very large list>: must be a text"


def test_an_unknown_key_is_answered_with_the_nearest_one():
    assert error_of(build, Config, {"n_layers": 1}, "a.py") == "a.py: unknown key 'n_layers' (did you mean 'n_layer'?)"
    assert error_of(build, Config, {"xyzzy": 1}) == "unknown key 'xyzzy'"
    assert error_of(load, Config, ["--batch-size=4"]) == "unknown key 'batch-size' (did you mean 'batch_size'?)"
    assert "(did you mean 'config_override'?)" in error_of(load, Config, ["--config_overide={}"])
    assert error_of(build, Config, {"steps": 1}) == "unknown key 'steps' (did you mean 'seeds'?)"  # steps is derived


def test_the_dataclass_checks_further_and_mutable_defaults_are_not_shared():
    assert error_of(load, Config, ["--n_layer=1", "--warmup=101"]).startswith("warmup=101: must be at most 100")
    assert load(Config, ["--n_layer=1", "--warmup=100"]).steps == 100
    build(Config, {}).paths.append("a")
    build(Config, {}).options["a"] = 1
    assert build(Config, {}).paths == [] and build(Config, {}).options == {}


def test_long_values_are_shortened_and_newlines_escaped():
    assert len(error_of(load, Config, ["--n_layer=" + "x" * 100_000])) < 130
    assert error_of(load, Config, ["--n_layer=1\n2\r\u2028\x1b[31m"]).startswith(r"n_layer='1\n2\r\u2028\x1b[31m'")
    assert str(UserError("a\nb\x85c\ud800")) == r"a\nb\x85c\ud800"
    assert len(str(UserError("x" * 100_000))) < 1000 and str(UserError("a" * 900)) == "a" * 900
    for word in ("x" * 100_000, "--" + "x" * 100_000, "n_layer=" + "x" * 100_000, "a/" * 50_000 + ".py"):
        for positional in ("config", None):
            with pytest.raises(UserError) as caught:
                load(Config, [word], positional=positional)
            assert len(str(caught.value)) < 1000


# ----------------------------------------------------------------------------------------------------------------------
# The words of the command line


def test_files_apply_in_order_and_keys_come_last_in_their_order(write):
    write("a.py", "n_layer = 1\nbatch_size = 1\ngate = 'a'\ndropout = 0.1")
    write("b.py", "batch_size = 2\ngate = 'b'\ndropout = 0.2")
    override = '--config_override={"dropout": 0.4, "warmup": 3}'
    config = load(Config, ["--gate=c", "a.py", "--dropout=0.3", override, "b.py"])
    assert (config.n_layer, config.batch_size, config.gate, config.dropout) == (1, 2, "c", 0.4)
    assert config.given == {"n_layer", "batch_size", "gate", "dropout", "warmup"}
    assert load(Config, ['--config_override={"n_layer": 4}', "--n_layer=5", "--n_layer=6"]).n_layer == 6
    assert load(Config, ["--n_layer=5", '--config_override={"n_layer": 4}']).n_layer == 4


MISSPELLED = {  # {positional: [(words, how the message begins)]}
    "config": [
        (["--batch_size", "4", "no.py"], "'--batch_size': write --key=value"),
        (["-batch_size=4"], "'-batch_size=4': write --key=value"),
        (["--=4"], "'--=4': write --key=value"),
        (["batch_size=4"], "'batch_size=4': a config file ends in .py"),
        ([""], "'': a config file ends in .py"),
        (["--config_override=[1]"], 'config_override: must be a JSON object, as in {"n_layer": 6}'),
        (['--config_override={"n_layer": 0}'], "n_layer=0: must be a whole number of at least 1"),
        (["--config_override={'a': 1}"], "config_override: cannot be read as JSON (Expecting property name enclosed"),
        (["--config_override=" + "[" * 100_000], "config_override: cannot be read as JSON ("),
        (['--config_override={"x": NaN}'], "config_override: cannot be read as JSON (NaN is no JSON)"),
        (['--config_override={"n_layer": 1, "n_layer": 2}'], "config_override: cannot be read as JSON (the key"),
    ],
    "seeds": [(["x"], "seeds[0]='x': must be a whole number of at least 0")],
    None: [(["out"], "'out': write --key=value"), ([""], "'': write --key=value")],
}


def test_words_without_dashes_fill_a_list_and_one_of_another_spelling_says_how_to_write_it():
    assert load(Config, ["runs/a", "--n_layer=1", "seed=2", "7"], positional="paths").paths == ["runs/a", "seed=2", "7"]
    assert load(Config, ["7", "8"], positional="seeds").seeds == [7, 8]
    for positional, cases in MISSPELLED.items():
        for words, message in cases:
            assert error_of(load, Config, words, positional=positional).startswith(message)


def test_help_shows_every_key_with_its_default_its_values_and_its_line(capsys):
    for positional, words in (("config", "[config.py ...] "), ("paths", "[paths ...] "), (None, "")):
        description = None if positional is None else "Trains.\n\n    x"  # None: python -OO
        with pytest.raises(SystemExit) as caught:
            load(Config, ["--n_layers", "--help"], positional=positional, program="x.py", description=description)
        out = capsys.readouterr().out
        assert caught.value.code == 0 and out.startswith(f"usage: python x.py {words}[--key=value ...]\n")
        assert ("\nTrains.\n" in out) == bool(description)
        assert max(len(line) for line in out.splitlines()) <= 120
    for field in (field for field in dataclasses.fields(Config) if field.init):
        assert f"\n  --{field.name}=" in out and f"\n        {field.metadata['help'][:20]}" in out
    assert "  --n_layer=12\n        number of blocks (a whole number of at least 1)\n" in out
    assert "one of auto, cpu, cuda, mps)" in out and "or None)" in out and "--gated=false\n" in out
    assert "(a list, each item one of softmax, gla)" in out and "did you mean" not in out
    assert "  --start=\\n\n  " in out  # a default that holds a newline stays on its line


# ----------------------------------------------------------------------------------------------------------------------
# Config files


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
    "print(1)", "x, y = 1, 2", "x += 1", "x: int = 1", "x[0] = 1", "x.y = 1", "x = [y for y in (1,)]", "x = f'{1}'",
    "x = ().__class__", "x = {1}", "x = {**{}}", "x = {[1]: 2}", "x = [*[1]]", "x = b'a'", "x = 1j", "x = ...",
    "x = not 1", "x = 1 << 3", "x = 9 ** 9 ** 9", "x = 1 if 1 else 2", "x = (y := 1)", "x = lambda: 1", "x = open('a')",
    "x = __import__('pathlib').Path('executed').touch()", "if True:\n    x = 1", "import os",
]  # fmt: skip


@pytest.mark.parametrize(
    "text, message",
    [
        *((text, "a.py line 1: allowed are lines `name = value`, where") for text in NOT_ALLOWED),
        ("x = true", "a.py line 1: 'true' is not assigned above (did you mean 'True'?)"),
        ("iters = 5\nx = iter", "a.py line 2: 'iter' is not assigned above (did you mean 'iters'?)"),
        ("x = y\ny = 1", "a.py line 1: 'y' is not assigned above"),
        *((f"x = {sum_}", "arithmetic is between numbers") for sum_ in ("'a' * 9", "[0] * 9", "True + 1", "-'a'")),
        ("x = 1 / 0", "a.py line 1: division by zero"),
        (f"x = 1{'0' * 200}\ny = x * x", "a.py line 2: int too large to convert to float"),
        ("x = ", "a.py line 1: invalid syntax"),
        ("x = 1\n  y = 2", "a.py line 2: unexpected indent"),
        ("x = '", "a.py line 1: unterminated string"),
        ("x = \0", "a.py"),
        (b"x = '\xff'", "a.py line 1: (unicode error)"),
        ("x = {'a': 1, 'a': 2}", "the key 'a' stands there twice"),
        ("include = 1", "'1': a config file ends in .py"),
    ],
)
def test_anything_else_in_a_python_file_is_refused_with_its_line_and_never_executed(write, text, message):
    assert message in error_of(read_config_file, write("a.py", text))
    assert os.listdir() == ["a.py"]


DOUBLED = "".join(f"a{i + 1} = [a{i}, a{i}]\n" for i in range(40))
NESTED = "".join(f"a{i + 1} = [a{i}]\n" for i in range(99))


@pytest.mark.parametrize(
    "text",
    [
        *(f"n_layer = {part}" for part in ("9" * 5000, "-" * 50_000 + "1", "[" * 50_000, "1+" * 50_000 + "1")),
        *(f"n_layer = {'1+' * depth}1" for depth in (500, 900, 1000, 1500, 2900)),  # our reader's stack, the parser's
        f"a0 = [1, 1]\n{DOUBLED}",
        f"a0 = [1]\n{NESTED}",
    ],
    ids=lambda text: text[:20],
)
def test_a_file_too_large_or_too_deep_is_a_config_or_one_line(write, text):
    if "a0" in text:
        assert error_of(load, Config, [write("a.py", text)]) == "a value is too large, or nested too deep"
    else:
        with contextlib.suppress(UserError):
            assert load(Config, [write("a.py", text)]).n_layer == text.count("1")
    deep = '{"options": {"a": ' + "[" * 500 + "]" * 500 + "}}"
    assert error_of(load, Config, [f"--config_override={deep}"]) == "a value is too large, or nested too deep"


def test_included_keys_come_first_wherever_the_include_stands(write):
    write("config/sub/root.py", "x = 0\ny = 0\nz = 0")
    write("config/base.py", "y = 1\nx = 1\ninclude = 'sub/root.py'")
    write("config/a.py", "x = 2\ninclude = 'base.py'")
    assert read_config_file("config/a.py") == {"x": 2, "y": 1, "z": 0}
    write("config/both.py", "include = 'a.py'\nw = 1")  # the same file twice is no cycle
    assert read_config_file("config/both.py") == {"x": 2, "y": 1, "z": 0, "w": 1}


def test_later_dicts_of_a_key_that_merges_are_added_and_those_of_others_replace(write):
    write("included.py", "base = {'a': 1, 'b': 1, 'c': {'d': 1}}\noptions = {'x': {}}")
    write("file.py", "include = 'included.py'\nbase = {'b': 2, 'c': {'e': 1}}\noptions = {'y': {}}")
    write("alone.py", "base = {'b': 2}")
    assert load(Config, ["file.py"]).base == {"a": 1, "b": 2, "c": {"e": 1}}  # not c's names
    words = ["file.py", "alone.py", '--base={"b": 3, "f": 3}', '--config_override={"base": {"f": 4}}']
    config = load(Config, [*words, "--options={'z': 1}"])
    assert config.base == {"a": 1, "b": 3, "c": {"e": 1}, "f": 4} and config.options == {"z": 1}
    assert load(Config, ["--base={'b': 3}"]).base == {"b": 3}


FILES = {  # {name: (content, what is wrong with it)}
    "low.py": ("batch_size = 0", "low.py: batch_size=0: must be a whole number of at least 1 and at most 1000000"),
    "a.py": ("include = 'b.py'", "include cycle: a.py -> b.py -> c.py -> b.py"),
    "b.py": ("include = './c.py'", "include cycle: b.py -> c.py -> b.py"),
    "c.py": ("include = 'b.py'", "include cycle: c.py -> b.py -> c.py"),
    "large.py": ("#" * (1 << 20) + "\n", "has more than 1,048,576 bytes, which is too large for a file of this kind"),
    "config/notes.txt": ("", "'config/notes.txt': a config file ends in .py"),
    "config/no_such.py": (None, "config/no_such.py: cannot be read (No such file or directory)"),
    "qq\0.py": (None, r"qq\x00.py: cannot be read (embedded null byte)"),
    "folder.py/x": ("", "'folder.py/x': a config file ends in .py"),
    "folder.py": (None, "folder.py: is a folder, a pipe or a device, where a file is needed"),
    "pipe.py": (None, "pipe.py: is a folder, a pipe or a device, where a file is needed"),
}


def test_a_file_that_is_no_config_is_named_with_what_is_wrong(write):
    for name, (content, _) in FILES.items():
        if content is not None:
            write(name, content)
    os.mkfifo("pipe.py")
    for name, (_, message) in FILES.items():
        assert error_of(load, Config, [name, "--batch_size=1"]).endswith(message)


# ----------------------------------------------------------------------------------------------------------------------
# A whole script


class Stream(io.StringIO):
    def reconfigure(self, **keys):
        assert keys == {"errors": "backslashreplace"}


def no_memory():
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes\nmore")


def raises(error):
    raise error


NO_MEMORY = "error: not enough memory ({}); lower batch_size, block_size or the model\n"


@pytest.mark.parametrize(
    "work, status, stderr",
    [
        (lambda: None, None, ""),
        (lambda: raises(UserError("n_layer=0:\nno")), 2, "error: n_layer=0:\\nno\n"),
        (lambda: raises(KeyboardInterrupt()), 130, "interrupted\n"),
        (lambda: raises(SystemExit(7)), 7, ""),
        (lambda: open("gone/x"), 1, "error: gone/x: No such file or directory\n"),
        (lambda: raises(OSError(28, "No space left")), 1, "error: standard output, or a connection: No space left\n"),
        (lambda: raises(MemoryError()), 1, NO_MEMORY.format("malloc failed")),
        (no_memory, 1, NO_MEMORY.format("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")),
        (lambda: raises(TypeError("an edit")), 1, "Traceback (most recent call last):\n"),
    ],
)
def test_run_turns_an_error_into_one_line_and_a_status(work, status, stderr, monkeypatch):
    stdout, stderr_stream = Stream(), Stream()
    for name, value in {"stdout": stdout, "stderr": stderr_stream, "argv": ["x.py", "--a=1"]}.items():
        monkeypatch.setattr(sys, name, value)
    with pytest.raises(SystemExit) if status is not None else contextlib.nullcontext() as ended:
        configurator.run(lambda argv: print(argv) or work())
    assert status is None or ended.value.code == status
    printed = stderr_stream.getvalue()
    assert stdout.getvalue() == "['--a=1']\n"
    assert printed.startswith(stderr) if stderr.startswith("Traceback") else printed == stderr


SCRIPT = """
import sys, configurator
def main(argv):
    {}
configurator.run(main)
"""


@pytest.mark.parametrize(
    ("statement", "stdout", "status", "stderr"),
    [
        ("print('\\ud800 é', file=sys.stderr)", os.devnull, 0, "\\ud800 \\xe9\n"),  # on an ASCII terminal
        ("print('a')", "/dev/full", 1, "error: standard output, or a connection: No space left on device\n"),
        ("print('a')", None, 141, ""),  # None: a pipe that nobody reads
        ("print('a', file=configurator.falls_silent(sys.stdout)); print('b', file=sys.stderr)", None, 0, "b\n"),
    ],
)
def test_a_script_ends_well_on_any_stream(statement, stdout, status, stderr):
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}  # a short text fails at the end
    with open(stdout, "w") if stdout else os.fdopen(writer, "w") as stream:
        command = [sys.executable, "-c", SCRIPT.format(statement)]
        done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr) == (status, stderr)


TORCHRUN = dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1")


def test_what_a_launcher_has_left_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "x")  # one process alone: nothing else of torchrun counts
    assert Processes("cpu", 1).world_size == 1
    for size, words in (("2", "LOCAL_RANK"), ("two", "WORLD_SIZE='two'")):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert words in error_of(Processes, "cpu", 1)


def test_the_first_process_prints_an_error_whatever_rank_a_launcher_has_left(monkeypatch, capsys):
    for left in ({"LOCAL_RANK": "x"}, {"LOCAL_RANK": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "two"}):
        for name, value in left.items():
            monkeypatch.setenv(name, value)
        assert configurator.report(UserError("wrong")) == 2
        assert capsys.readouterr().err == "error: wrong\n"
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    configurator.report(UserError("wrong"))
    assert capsys.readouterr().err == ""  # local rank 0 prints the same
    configurator.report(OSError(28, "full"))
    assert capsys.readouterr().err == "local rank 1: error: standard output, or a connection: full\n"


# ----------------------------------------------------------------------------------------------------------------------
# The keys of a model and of a run


def test_the_keys_are_read_without_torch_and_a_new_one_is_one_line_with_its_help(tmp_path):
    for name in ("configurator.py", "rules.py", "keys.py", "runs"):
        (shutil.copytree if os.path.isdir(ROOT / name) else shutil.copy)(ROOT / name, tmp_path / name)
    keys = tmp_path / "keys.py"
    line = '    n_layer: int = key(12, "number of layers", at_least=1, at_most=10_000)\n'
    assert keys.read_text().count(line) == 1
    keys.write_text(keys.read_text().replace(line, line + '    z_loss: float = key(0.5, "weight of z", at_least=0)\n'))
    code = "import sys, configurator, keys\nprint('torch' in sys.modules, end=' ')\n"
    code += "print(configurator.rules_of(keys.TrainConfig)['z_loss'].words(), end=' ')\n"
    code += "print(configurator._check(keys.TrainConfig, {'z_loss': '2'}))\n"
    code += "configurator.load(keys.TrainConfig, ['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("False a number of at least 0 {'z_loss': 2.0}\n"), done.stderr
    assert "\n  --z_loss=0.5\n        weight of z (a number of at least 0)\n" in done.stdout
