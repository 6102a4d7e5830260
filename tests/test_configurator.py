# python -m pytest -q tests/test_configurator.py
"""What the command line and the config files accept, and that every mistake ends in one line that helps."""

import configurator
from configurator import UserError, build, key, load, read_config_file

import dataclasses
import io
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    ((str, 64, 64), ["x" * 64], [("x", "a text of length 64")]),
    ((int, 0, 9, None), [None, 3], [(-1, "a whole number of at least 0 and at most 9, or None")]),
    ((dict, 1, 1 << 60), [{1: 2}], [({}, "a dict of length 1 or more"), ([1], "")]),
    ({"b", "a"}, ["a"], [("c", "one of a, b"), (3, ""), (["a"], "")]),
    ([(int, 0, 9), 1, 2], [[1], [1, 2]], [([], "a list of length 1 to 2"), ([1, 2, 3], ""), ((1,), ""), (3, "")]),
    ([(int, 0, 9), 0, 2], [[]], [([1, -1], "[1]=-1: must be a whole number of at least 0")]),
    ({"a": (int, 0, 9), "b?": object}, [{"a": 1, "b": []}], [({"b": 1}, "it has no a"), ({"a": -1}, "a=-1: ")]),
    ({"b?": (int, 0, 9)}, [{}], [({"b": "x"}, "b='x': must be a whole number"), ([], "a dict, its names texts")]),
    ({str: [(int, 0, 9), 1, 1]}, [{}, {"x?": [1]}], [({"x": [-1]}, "x[0]=-1"), ({3: [1]}, "its names texts")]),
    (Rule(str, is_path=True), ["a/b"], [("", "the name of a file or folder"), ("a\0", ""), ("ä" * 128, "")]),
    (object, [None, 3, [{}]], []),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "right", "wrong"), RULES, ids=map(str, range(len(RULES))))
def test_a_rule_lets_through_what_it_allows_and_says_what_else_is_wrong(rule, right, wrong):
    for value in right:
        assert wrong_field(value, rule) is None, value
    for value, words in wrong:
        message = wrong_field(value, rule)
        assert message is not None and words in message, (value, message)
    for value in [row for row, _ in wrong if not isinstance(row, list | dict)][:1]:
        assert wrong_field({"x": [value]}, {"x": [rule, 1, 1]}, "meta").startswith(f"meta.x[0]={value!r}"[:60])


# ----------------------------------------------------------------------------------------------------------------------
# The values of keys


READ = {  # {key: [(text on the command line, the value)]}
    "n_layer": [("6", 6), (" 7 ", 7), ("5*8", 40), ("1e3", 1000)],
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


@pytest.mark.parametrize("name, text, value", [(name, *pair) for name, pairs in READ.items() for pair in pairs])
def test_text_on_the_command_line_is_read_by_the_type_of_its_key(name, text, value):
    assert same(getattr(load(Config, [f"--{name}={text}"]), name), value)


@pytest.mark.parametrize("name, text, value", [(name, *pair) for name, pairs in FROM_FILES.items() for pair in pairs])
def test_values_from_files_are_promoted_to_the_type_of_the_key(name, text, value):
    assert same(getattr(build(Config, {name: text}), name), value)


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


@pytest.mark.parametrize("name, allowed, text, shown", [(*row[:2], *pair) for row in WRONG for pair in row[2].items()])
def test_a_wrong_value_names_the_key_the_value_and_what_is_allowed(name, allowed, text, shown):
    assert error_of(load, Config, [f"--{name.split('[')[0]}={text}"]) == f"{name}={shown}: must be {allowed}"


WRONG_IN_FILES = [
    ("batch_size", "a whole number", [True, 1.5, [1], None]),
    ("seeds", "a whole number", [[True]]),
    ("learning_rate", "a number", [True, math.nan, -math.inf]),
    ("gated", "true or false", [2, None, []]),
    ("gate", "a text", [5, None, False]),
    ("device", DEVICES, [False, 1]),
    ("paths", "a list", [{"a": 1}]),
    ("options", "a dict", [[1]]),
]


@pytest.mark.parametrize("name, allowed, value", [(*row[:2], value) for row in WRONG_IN_FILES for value in row[2]])
def test_a_file_value_of_another_type_is_refused(name, allowed, value):
    text = error_of(build, Config, {name: value}, source="base.py")
    assert text.startswith(f"base.py: {name}") and f": must be {allowed}" in text


def test_numbers_too_large_to_print_are_refused():
    assert error_of(build, Config, {"batch_size": 10**5000}).startswith(
        "batch_size=<a very large int>: must be a whole"
    )
    assert error_of(build, Config, {"learning_rate": 10**400}).endswith("at most 3.4028234663852886e+38")
    assert error_of(build, Config, {"gate": [10**5000]}) == "gate=<a very large list>: must be a text"


def test_an_unknown_key_is_answered_with_the_nearest_one():
    assert error_of(build, Config, {"n_layers": 1}, "a.py") == "a.py: unknown key 'n_layers' (did you mean 'n_layer'?)"
    assert error_of(build, Config, {"xyzzy": 1}) == "unknown key 'xyzzy'"
    assert error_of(load, Config, ["--batch-size=4"]) == "unknown key 'batch-size' (did you mean 'batch_size'?)"
    assert "(did you mean 'config_override'?)" in error_of(load, Config, ["--config_overide={}"])
    assert error_of(build, Config, {"steps": 1}) == "unknown key 'steps' (did you mean 'seeds'?)"  # steps is derived


def test_the_dataclass_own_checks_are_let_through():
    assert error_of(load, Config, ["--n_layer=1", "--warmup=101"]).startswith("warmup=101: must be at most 100")
    assert load(Config, ["--n_layer=1", "--warmup=100"]).steps == 100


def test_mutable_defaults_are_not_shared():
    build(Config, {}).paths.append("a")
    build(Config, {}).options["a"] = 1
    assert build(Config, {}).paths == [] and build(Config, {}).options == {}


def test_a_key_of_a_type_that_has_no_reader_is_the_developers_error():
    @dataclasses.dataclass
    class Bad:
        shape: tuple = key((1,), "no such type")

    with pytest.raises(TypeError, match="a key is an int"):
        build(Bad, {"shape": (2,)})


def test_long_values_are_shortened_and_newlines_escaped():
    assert len(error_of(load, Config, ["--n_layer=" + "x" * 100_000])) < 130
    assert error_of(load, Config, ["--n_layer=1\n2\r\u2028\x1b[31m"]).startswith(r"n_layer='1\n2\r\u2028\x1b[31m'")
    assert str(UserError("a\nb\x85c\ud800")) == r"a\nb\x85c\ud800"
    assert len(str(UserError("x" * 100_000))) < 1000 and str(UserError("a" * 900)) == "a" * 900
    for word in ("x" * 100_000, "-" + "x" * 100_000, "--" + "x" * 100_000, "n_layer=" + "x" * 100_000):
        for positional in ("config", None):
            error_of(load, Config, [word], positional=positional)


# ----------------------------------------------------------------------------------------------------------------------
# The words of the command line


def test_files_apply_in_order_and_keys_come_last_in_their_order(write):
    write("a.py", "n_layer = 1\nbatch_size = 1\ngate = 'a'\ndropout = 0.1")
    write("b.json", '{"batch_size": 2, "gate": "b", "dropout": 0.2}')
    override = '--config_override={"dropout": 0.4, "warmup": 3}'
    config = load(Config, ["--gate=c", "a.py", "--dropout=0.3", override, "b.json"])
    assert (config.n_layer, config.batch_size, config.gate, config.dropout) == (1, 2, "c", 0.4)
    assert config.given == {"n_layer", "batch_size", "gate", "dropout", "warmup"}
    assert load(Config, ['--config_override={"n_layer": 4}', "--n_layer=5", "--n_layer=6"]).n_layer == 6
    assert load(Config, ["--n_layer=5", '--config_override={"n_layer": 4}']).n_layer == 4


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--batch_size", "4"], "--batch_size: write --batch_size=4"),
        (["--batch_size", "4", "no.py"], "--batch_size: write --batch_size=4"),
        (["--batch_size"], "--batch_size: write --batch_size=value"),
        (["-batch_size=4"], "-batch_size=4: write --batch_size=4"),
        (["batch_size=4"], "batch_size=4: write --batch_size=4"),
        (["-b"], "-b: write --key=value"),
        (["--"], "--: write --key=value"),
        (["--=4"], "--=4: write --key=value"),
        ([""], "'': a config file ends in .py or .json"),
        (["--config_override=[1]"], 'config_override: must be a JSON object, as in {"n_layer": 6}'),
        (['--config_override={"n_layers": 1}'], "config_override: unknown key 'n_layers' (did you mean 'n_layer'?)"),
        (['--config_override={"n_layer": 0}'], "config_override: n_layer=0: must be a whole number of at least 1"),
        (["--config_override={'a': 1}"], "config_override: cannot be read as JSON (Expecting property name enclosed"),
        (["--config_override=" + "[" * 100_000], "config_override: cannot be read as JSON ("),
        (['--config_override={"n_layer": 1, "n_layer": 2}'], "config_override: cannot be read as JSON (the key"),
    ],
)  # fmt: skip
def test_a_word_of_another_spelling_says_how_to_write_it(argv, message):
    assert error_of(load, Config, argv).startswith(message)


@pytest.mark.parametrize(
    ("words", "positional", "ends"),
    [
        (["runs/a", "--n_layer=1", "seed=2"], "paths", ["runs/a", "seed=2"]),
        (["7"], "paths", ["7"]),
        (["7", "8"], "seeds", [7, 8]),
        (["x"], "seeds", "seeds[0]='x': must be a whole number of at least 0"),
        (["out"], None, "out: write --key=value"),
        (["n_layer=1"], None, "n_layer=1: write --n_layer=1"),
        (["n_layer", "1"], None, "n_layer: write --n_layer=1"),
        ([""], None, "'': write --key=value"),
    ],
)
def test_positional_words_can_fill_a_list_or_be_refused(words, positional, ends):
    if isinstance(ends, list):
        assert getattr(load(Config, words, positional=positional), positional) == ends
    else:
        assert error_of(load, Config, words, positional=positional) == ends


@pytest.mark.parametrize("positional, words", [("config", "[config.py ...] "), ("paths", "[paths ...] "), (None, "")])
def test_help_shows_every_key_with_its_default_its_values_and_its_line(capsys, positional, words):
    for argv, description in ((["--n_layers", "--help"], "Trains.\n\n    x " * 20), (["-h"], None)):  # None: python -OO
        with pytest.raises(SystemExit) as caught:
            load(Config, argv, positional=positional, program="x.py", description=description)
        out = capsys.readouterr().out
        assert caught.value.code == 0 and out.startswith(f"usage: python x.py {words}[--key=value ...]\n")
        assert ("\nTrains.\n" in out) == bool(description)
        assert max(len(line) for line in out.splitlines()) <= 120
        for field in dataclasses.fields(Config):
            if field.init:
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
        *(
            (text, f"a.py line 1: {text.splitlines()[0]}: allowed are lines `name = value`, where")
            for text in NOT_ALLOWED
        ),
        ("x = true", "a.py line 1: x = true: 'true' is not assigned above (did you mean 'True'?)"),
        ("iters = 5\nx = iter", "a.py line 2: x = iter: 'iter' is not assigned above (did you mean 'iters'?)"),
        ("x = y\ny = 1", "a.py line 1: x = y: 'y' is not assigned above"),
        *(
            (f"x = {sum_}", "arithmetic is between numbers")
            for sum_ in ("'a' * 10000000", "[0] * 9", "True + 1", "-'a'")
        ),
        ("x = 1 / 0", "x = 1 / 0: division by zero"),
        (f"x = 1{'0' * 200}\ny = x * x", "a.py line 2: y = x * x: int too large to convert to float"),
        ("x = ", "a.py line 1: invalid syntax"),
        ("x = 1\n  y = 2", "a.py line 2: unexpected indent"),
        ("x = '", "a.py line 1: unterminated string"),
        ("x = \0", "a.py"),
        (b"x = '\xff'", "a.py: is not UTF-8 text"),
        ("x = {'a': 1, 'a': 2}", "the key 'a' stands there twice"),
        ("include = 1", "a.py: include=1: must be the name of a config file"),
        ("include = ' '", "a.py: include=' ': must be the name of a config file"),
        ("include = 'b.py'\ninclude = 'c.py'", "a.py line 2: include = 'c.py': a second include; a file has one"),
    ],
)
def test_anything_else_in_a_python_file_is_refused_with_its_line_and_never_executed(write, text, message):
    assert message in error_of(read_config_file, write("a.py", text))
    assert os.listdir() == ["a.py"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "a.json: cannot be read as JSON (Expecting value: line 1 column 1 (char 0))"),
        ('{"x": 1,\n}', "a.json: cannot be read as JSON ("),
        ("[1]", "a.json: must be a JSON object"),
        ('{"x": NaN}', "a.json: cannot be read as JSON (NaN is no JSON)"),
        ('{"x": [{"y": 1, "y": 2}]}', "the key 'y' stands there twice"),
        (b"\xff\xfe", "a.json: is not UTF-8 text"),
    ],
)
def test_a_json_file_holds_one_object(write, text, message):
    assert message in error_of(read_config_file, write("a.json", text))
    assert read_config_file(write("b.json", '{"x": [1, null], "y": 2.0}')) == {"x": [1, None], "y": 2.0}


DOUBLED = "".join(f"a{i + 1} = [a{i}, a{i}]\n" for i in range(40))
NESTED = "".join(f"a{i + 1} = [a{i}]\n" for i in range(99))


@pytest.mark.parametrize(
    "text",
    [*(f"x = {part}" for part in ("9" * 5000, "-" * 50_000 + "1", "[" * 50_000, "1+" * 50_000 + "1"))]
    + [f"n_layer = {'1+' * depth}1" for depth in (500, 900, 1000, 1500, 2900)]  # our reader's stack, the parser's
    + [f"a0 = {first}\n{DOUBLED}" for first in ("[1, 1]",)] + [f"a0 = [1]\n{NESTED}"],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_file_too_large_or_too_deep_is_one_line(write, text):
    if "\n" not in text:
        instance_or_one_line([write("a.py", text)], "config")
    else:
        write("a.py", text)
        assert error_of(read_config_file, "a.py").endswith(("the value is too large", "the value is nested too deep"))
    for value in (text[4:], '{"arms": ' + "[" * 500 + "]" * 500 + "}"):
        assert error_of(read_config_file, write("a.json", value)).startswith("a.json: ")


def test_included_keys_come_first_wherever_the_include_stands(write):
    write("config/sub/root.json", '{"x": 0, "y": 0, "z": 0}')
    write("config/base.py", "y = 1\nx = 1\ninclude = 'sub/root.json'")
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


FILES = {
    "config/train_mqar.py": "",
    "config/notes.txt": "",
    "wrong.py": "n_layers = 1",
    "low.py": "batch_size = 0",
    "a.py": "include = 'b.py'",
    "b.py": "include = './c.py'",
    "c.py": "include = 'b.py'",
    "d.py": "include = 'd.py'",
    "config/e.py": "include = 'train_mqr.py'",
    "large.py": "#" * (1 << 20) + "\n",
}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config/train_mqr.py", "config/train_mqr.py: no such config file (did you mean 'train_mqar.py'?)"),
        ("config/e.py", "config/train_mqr.py: no such config file (did you mean 'train_mqar.py'?)"),
        ("config/no_such.py", "config/no_such.py: no such config file"),
        ("nowhere/a.py", "nowhere/a.py: no such config file"),
        ("config/train_mqar", "config/train_mqar: a config file ends in .py or .json"),
        ("config/notes.txt", "config/notes.txt: a config file ends in .py or .json"),
        ("qq\0.py", r"qq\x00.py: no such config file"),
        ("qqq\ud800.py", r"qqq\ud800.py: no such config file"),
        ("x" * 5000 + ".py", "x" * 197 + "...: no such config file"),
        ("folder.py", "folder.py: is a folder, a pipe or a device, where a file is needed"),
        ("pipe.py", "pipe.py: is a folder, a pipe or a device, where a file is needed"),
        ("zero.py", "zero.py: is a folder, a pipe or a device, where a file is needed"),
        ("large.py", "large.py: has more than 1,048,576 bytes, which is too large for a file of this kind"),
        ("a.py", "include cycle: a.py -> b.py -> c.py -> b.py"),
        ("d.py", "d.py: include cycle: d.py -> d.py"),
        ("wrong.py", "wrong.py: unknown key 'n_layers' (did you mean 'n_layer'?)"),
        ("low.py", "low.py: batch_size=0: must be a whole number of at least 1 and at most 1000000"),
    ],
)
def test_a_file_that_is_no_config_is_named_with_what_is_wrong(name, message, write):
    for file, content in FILES.items():
        write(file, content)
    os.mkdir("folder.py")
    os.mkfifo("pipe.py")
    os.symlink("/dev/zero", "zero.py")
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
    streams = {name: Stream() for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(sys, "argv", ["x.py", "--a=1"])
    if status is None:
        configurator.run(lambda argv: print(argv) or work())
    else:
        with pytest.raises(SystemExit) as ended:
            configurator.run(lambda argv: print(argv) or work())
        assert ended.value.code == status
    printed = streams["stderr"].getvalue()
    assert streams["stdout"].getvalue() == "['--a=1']\n"
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
        ("print('\\ud800 é', file=sys.stderr)", None, 0, "\\ud800 \\xe9\n"),  # on an ASCII terminal
        ("print('a')", "/dev/full", 1, "error: standard output, or a connection: No space left on device\n"),
        ("print('a')", "no reader", 141, ""),
        ("print('a' * 99999)", "no reader", 141, ""),
        ("print('a', file=configurator.falls_silent(sys.stdout)); print('b', file=sys.stderr)", "no reader", 0, "b\n"),
        ("print(sys.stdin.read(), open('/dev/null').fileno() > 2, file=sys.stderr)", "closed", 0, " True\n"),
    ],
)
def test_a_script_ends_well_on_any_stream(statement, stdout, status, stderr):
    reader, writer = os.pipe()
    os.close(reader)
    stream = open("/dev/full", "w") if stdout == "/dev/full" else writer
    command = [sys.executable, "-c", SCRIPT.format(statement)]
    if stdout == "closed":
        command = ["sh", "-c", 'exec "$@" <&- >&-', "sh", *command]
    environment = os.environ | {
        "PYTHONIOENCODING": "ascii",
        "PYTHONUNBUFFERED": "",
    }  # a short text fails at the end alone
    done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (status, stderr)


SCRIPTS = ["train", "sample", "evaluate", "meters", "experiment", "plot", "bench", "export", "harness"]


@pytest.mark.parametrize("safe", ["", "1"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_while_modules_are_imported_is_one_line(script, safe, tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")  # found before the real one
    (tmp_path / "matplotlib.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": safe}  # 1: without the script's folder
    done = subprocess.run([sys.executable, f"{script}.py"], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stderr == "interrupted\n" and done.returncode in (130, -2)


TORCHRUN = dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1")


@pytest.mark.parametrize(
    ("environment", "words"),
    [({"WORLD_SIZE": "2"}, "RANK, LOCAL_RANK"), ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"), ({"RANK": "x"}, None)],
)
def test_what_is_left_of_torchrun_in_the_environment_is_named(environment, words, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if words is None:  # one process alone: nothing else of torchrun counts
        assert Processes("cpu", 1).world_size == 1
    else:
        assert words in error_of(Processes, "cpu", 1)


@pytest.mark.parametrize("left", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "two"}])
@pytest.mark.parametrize("rank", ["1", "x"])
def test_the_first_process_prints_an_error_whatever_rank_a_launcher_has_left(left, rank, monkeypatch, capsys):
    for name, value in ({"LOCAL_RANK": rank} | left).items():
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


# ----------------------------------------------------------------------------------------------------------------------
# Fuzz: always an instance or a one-line UserError

ANY_TEXT = st.text(st.characters(codec=None), max_size=60)  # with surrogates: what a shell makes of bytes
NAMES = st.sampled_from([field.name for field in dataclasses.fields(Config)] + ["config_override"])
PIECES = (
    "n_layer paths include None True x 1 0.5 9 1e9 'a' = = == + - * / // ** % ( ) [ ] { } , : ; . \n \\ # if import"
)
VALUES = st.one_of(ANY_TEXT, st.lists(st.sampled_from(PIECES.split(" ")), max_size=20).map(" ".join))
SETTINGS = st.builds("--{}={}".format, NAMES, VALUES)


def instance_or_one_line(argv, positional):
    try:
        assert isinstance(load(Config, argv, positional=positional), Config)
    except UserError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 1000


@settings(max_examples=200, deadline=None)
@given(argv=st.lists(ANY_TEXT | SETTINGS, max_size=3), positional=st.sampled_from(["config", "paths", "seeds", None]))
def test_any_command_line_is_a_config_or_a_one_line_error(argv, positional):
    if not {"-h", "--help"} & set(argv):
        instance_or_one_line(argv, positional)


@settings(max_examples=200, deadline=None)
@given(
    content=VALUES | st.lists(st.builds("{} = {}".format, NAMES, VALUES)).map("\n".join),
    suffix=st.sampled_from(["py", "json"]),
)
def test_any_file_is_a_config_or_a_one_line_error(tmp_path_factory, content, suffix):
    path = tmp_path_factory.getbasetemp() / f"fuzz.{suffix}"
    path.write_bytes(content.encode("utf-8", errors="surrogatepass"))
    instance_or_one_line([str(path)], "config")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(NAMES, st.recursive(SCALARS, st.lists, max_leaves=5)))
def test_any_values_build_a_config_or_a_one_line_error(values):
    try:
        assert isinstance(build(Config, values), Config)
    except UserError as error:
        assert len(str(error).splitlines()) == 1
