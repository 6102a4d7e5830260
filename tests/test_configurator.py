# python -m pytest -q tests/test_configurator.py
"""What the command line and the config files accept, and that every mistake ends in one line that helps."""

import configurator
from configurator import UserError, build, key, load, read_config_file

import dataclasses
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runs.hardware import Processes
from runs.resume import is_started_again

ROOT = os.path.dirname(configurator.__file__)


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
    paths: list = key([], "runs to compare")
    rates: list = key([0.1], "one run for each", above=0)
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


# A name that stands there twice


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (['--options={"a": 1, "b": {"x": 1, "x": 2}}'], "'x'"),
        (["--options={'a': 1, 'a': 2}"], "'a'"),
        (['--config_override={"n_layer": 1, "n_layer": 2}'], "'n_layer'"),
        (["twice.json"], "'n_layer'"),
        (["twice.py"], "'a'"),
    ],
)
def test_a_name_that_stands_twice_in_json_or_in_a_dict_is_refused_by_name(words, name, write):
    write("twice.json", '{"n_layer": 1, "n_layer": 2}')
    write("twice.py", "options = {'a': 1, 'a': 2}")
    assert f"the key {name} stands there twice" in error_of(load, Config, words)


# The values of keys


@pytest.mark.parametrize(
    "word, value",
    [
        ("n_layer=6", 6),
        ("batch_size=1e3", 1000),
        ("batch_size= 7 ", 7),
        ("learning_rate=1", 1.0),
        ("learning_rate=3e-4", 3e-4),
        ("dropout=0", 0.0),
        ("grad_clip=None", None),
        ("grad_clip=none", None),
        ("grad_clip=null", None),
        ("grad_clip=2", 2.0),
        ("warmup=NONE", None),
        ("warmup=0", 0),
        *((f"gated={text}", True) for text in ("true", "True", "TRUE", "1", "yes", "Yes")),
        *((f"gated={text}", False) for text in ("false", "False", "0", "no", "NO")),
        ("compile=False", "false"),
        ("compile=true", "true"),
        ("device=cuda", "cuda"),
        ("gate=none", "none"),
        ("gate=None", "None"),
        ("gate=native,native,elementwise", "native,native,elementwise"),
        ("start=a=b", "a=b"),
        ("start=", ""),
        ("start=1", "1"),
        ("start=--help", "--help"),
        ("run_name=None", None),
        ("run_name=null", None),
        ("run_name=none", "none"),
        ("run_name=a", "a"),
        ("paths=a,b c, d", ["a", "b c", "d"]),
        ("paths=", []),
        ("paths=a", ["a"]),
        ("paths=0,1.5,x,nan", [0, 1.5, "x", "nan"]),
        ("paths=['a', 2, None]", ["a", 2, None]),
        ('paths=["a", 2, null]', ["a", 2, None]),
        ("paths=(1, 2)", [1, 2]),
        ("seeds=0,1e1", [0, 10]),
        ("seeds=[3]", [3]),
        ("mixers=gla,softmax", ["gla", "softmax"]),
        ('options={"a": [1, true]}', {"a": [1, True]}),
        ("options={'a': True}", {"a": True}),
    ],
)
def test_text_on_the_command_line_is_read_by_the_type_of_its_key(word, value):
    name = word.partition("=")[0]
    assert same(getattr(load(Config, [f"--{word}"]), name), value)


@pytest.mark.parametrize(
    "word, message",
    [
        ("batch_size=0", "batch_size=0: must be at least 1 and at most 1000000"),
        ("n_layer=0", "n_layer=0: must be at least 1"),
        ("n_layer=1.5", "n_layer='1.5': must be a whole number"),
        ("n_layer=", "n_layer='': must be a whole number"),
        ("n_layer=5*8", "n_layer='5*8': must be a whole number"),
        ("n_layer=inf", "n_layer='inf': must be a whole number"),
        ("n_layer=1e30", "n_layer='1e30': must be a whole number of 64 bits"),
        ("n_layer=None", "n_layer='None': must be a whole number; None is not allowed"),
        ("dropout=none", "dropout='none': must be a finite number; None is not allowed"),
        ("dropout=1", "dropout=1.0: must be at least 0 and below 1"),
        ("learning_rate=0", "learning_rate=0.0: must be above 0"),
        ("learning_rate=nan", "learning_rate='nan': must be a finite number"),
        ("learning_rate=1e999", "learning_rate='1e999': must be a finite number"),
        ("learning_rate=1e300", "learning_rate='1e300': must be between -3.4e38 and 3.4e38, as float32 is"),
        ("grad_clip=-3.5e38", "grad_clip='-3.5e38': must be between -3.4e38 and 3.4e38, as float32 is"),
        ("grad_clip=-1", "grad_clip=-1.0: must be above 0"),
        ("gated=maybe", "gated='maybe': must be true or false"),
        ("gated=2", "gated='2': must be true or false"),
        ("device=gpu", "device='gpu': must be one of auto, cpu, cuda, mps (did you mean 'cuda'?)"),
        ("device=CUDA", "device='CUDA': must be one of auto, cpu, cuda, mps (did you mean 'cuda'?)"),
        ("device=xyz", "device='xyz': must be one of auto, cpu, cuda, mps"),
        ("device=False", "device='False': must be one of auto, cpu, cuda, mps"),
        ("paths=a,,b", "paths='a,,b': must be a list, as in a,b or [1, 2]"),
        ("paths=[1", "paths='[1': must be a list, as in a,b or [1, 2]"),
        ("paths=[open('x')]", "paths=\"[open('x')]\": must be a list, as in a,b or [1, 2]"),
        ("seeds=0,x", "seeds[1]='x': must be a whole number"),
        ("seeds=0,-1", "seeds=-1: must be at least 0"),
        ("rates=0.1,x", "rates='x': must be above 0"),
        ("mixers=gla,softmix", "mixers='softmix': must be one of softmax, gla (did you mean 'softmax'?)"),
        ("options=1", "options='1': must be a dict, as in {\"name\": 1}"),
        ("options={[1]: 2}", "options='{[1]: 2}': must be a dict, as in {\"name\": 1}"),
    ],
)
def test_a_wrong_value_names_the_key_the_value_and_what_is_allowed(word, message):
    assert error_of(load, Config, [f"--{word}"]) == message


@pytest.mark.parametrize(
    "name, given_value, value",
    [
        ("learning_rate", 1, 1.0),
        ("batch_size", 4.0, 4),
        ("batch_size", "1e3", 1000),
        ("grad_clip", None, None),
        ("compile", False, "false"),
        ("compile", True, "true"),
        ("gated", True, True),
        ("gate", "none", "none"),
        ("paths", ("a", "b"), ["a", "b"]),
        ("seeds", [1.0, "2"], [1, 2]),
        ("options", {"a": 1}, {"a": 1}),
    ],
)
def test_values_from_files_are_promoted_to_the_type_of_the_key(name, given_value, value):
    assert same(getattr(build(Config, {name: given_value}), name), value)


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("batch_size", True, "a whole number"),
        ("learning_rate", True, "a finite number"),
        ("seeds", [True], "a whole number"),
        ("batch_size", 1.5, "a whole number"),
        ("batch_size", [1], "a whole number"),
        ("batch_size", None, "a whole number; None is not allowed"),
        ("learning_rate", float("nan"), "a finite number"),
        ("learning_rate", float("-inf"), "a finite number"),
        ("gated", 2, "true or false"),
        ("gated", None, "true or false; None is not allowed"),
        ("gate", 5, "a string"),
        ("gate", None, "a string; None is not allowed"),
        ("gate", False, "a string"),
        ("device", False, "one of auto, cpu, cuda, mps"),
        ("device", 1, "one of auto, cpu, cuda, mps"),
        ("paths", {"a": 1}, "a list"),
        ("options", [1], "a dict"),
    ],
)
def test_a_file_value_of_another_type_is_refused(name, value, allowed):
    text = error_of(build, Config, {name: value}, source="base.py")
    assert text.startswith(f"base.py: {name}") and f": must be {allowed}" in text


def test_numbers_too_large_to_print_are_refused():
    assert error_of(build, Config, {"batch_size": 10**5000}) == "batch_size=<a very large int>: must be a whole number"
    assert error_of(build, Config, {"learning_rate": 10**400}).endswith("must be a finite number")
    assert error_of(build, Config, {"gate": [10**5000]}) == "gate=<a very large list>: must be a string"


def test_an_unknown_key_is_answered_with_the_nearest_one():
    assert error_of(build, Config, {"n_layers": 1}) == "unknown key 'n_layers' (did you mean 'n_layer'?)"
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
    assert len(error_of(load, Config, ["--n_layer=" + "x" * 100_000])) < 120
    assert error_of(load, Config, ["--n_layer=1\n2\r\u2028\x1b[31m"]).startswith(r"n_layer='1\n2\r\u2028\x1b[31m'")
    assert str(UserError("a\nb\x85c\ud800")) == r"a\nb\x85c\ud800"
    for word in ("x" * 100_000, "-" + "x" * 100_000, "--" + "x" * 100_000, "n_layer=" + "x" * 100_000):
        for positional in ("config", None):
            error_of(load, Config, [word], positional=positional)


# The words of the command line


def test_files_apply_in_order_and_keys_come_last_in_their_order(write):
    write("a.py", "n_layer = 1\nbatch_size = 1\ngate = 'a'\ndropout = 0.1")
    write("b.json", '{"batch_size": 2, "gate": "b", "dropout": 0.2}')
    config = load(
        Config, ["--gate=c", "a.py", "--dropout=0.3", '--config_override={"dropout": 0.4, "warmup": 3}', "b.json"]
    )
    assert (config.n_layer, config.batch_size, config.gate, config.dropout) == (1, 2, "c", 0.4)
    assert load(Config, ['--config_override={"n_layer": 4}', "--n_layer=5", "--n_layer=6"]).n_layer == 6
    assert load(Config, ["--n_layer=5", '--config_override={"n_layer": 4}']).n_layer == 4


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--batch_size", "4"], "--batch_size: write --batch_size=4"),
        (["--batch_size", "4", "no.py"], "--batch_size: write --batch_size=4"),
        (["--batch_size"], "--batch_size: write --batch_size=value"),
        (["--batch_size", "--n_layer=1"], "--batch_size: write --batch_size=value"),
        (["--gated"], "--gated: write --gated=true"),
        (["--gated", "no.py"], "--gated: write --gated=true"),
        (["--gated", "False"], "--gated: write --gated=False"),
        (["--compile"], "--compile: write --compile=true"),
        (["--compile", "auto"], "--compile: write --compile=auto"),
        (["--config_override", "{}"], "--config_override: write --config_override={}"),
        (["-batch_size=4"], "-batch_size=4: write --batch_size=4"),
        (["---batch_size=4"], "---batch_size=4: write --batch_size=4"),
        (["—batch_size=4"], "—batch_size=4: write --batch_size=4"),
        (["batch_size=4"], "batch_size=4: write --batch_size=4"),
        (["-batch_size", "4"], "-batch_size: write --batch_size=4"),
        (["-b"], "-b: write --key=value"),
        (["-"], "-: write --key=value"),
        (["--"], "--: write --key=value"),
        (["--=4"], "--=4: write --key=value"),
        (["--n_layers"], "unknown key 'n_layers' (did you mean 'n_layer'?)"),
        ([""], "the name of a config file is empty"),
        (["--config_override=[1]"], 'config_override: must be a JSON object, as in {"n_layer": 6}'),
        (['--config_override={"n_layers": 1}'], "config_override: unknown key 'n_layers' (did you mean 'n_layer'?)"),
        (['--config_override={"n_layer": 0}'], "config_override: n_layer=0: must be at least 1"),
    ],
)
def test_a_word_of_another_spelling_says_how_to_write_it(argv, message):
    assert error_of(load, Config, argv) == message


def test_a_config_override_that_is_not_json_says_where():
    assert error_of(load, Config, ["--config_override={'a': 1}"]).startswith(
        "config_override: not valid JSON (Expecting"
    )
    assert "not valid JSON" in error_of(load, Config, ["--config_override=" + "[" * 100_000])


def test_positional_words_can_fill_a_list_or_be_refused():
    assert load(Config, ["runs/a", "--n_layer=1", "seed=2"], positional="paths").paths == ["runs/a", "seed=2"]
    assert load(Config, ["7"], positional="paths").paths == ["7"]
    assert load(Config, ["7", "8"], positional="seeds").seeds == [7, 8]
    assert error_of(load, Config, ["x"], positional="seeds") == "seeds[0]='x': must be a whole number"
    assert error_of(load, Config, ["out"], positional=None) == "out: write --key=value"
    assert error_of(load, Config, ["n_layer=1"], positional=None) == "n_layer=1: write --n_layer=1"
    assert error_of(load, Config, ["n_layer", "1"], positional=None) == "n_layer: write --n_layer=1"
    assert error_of(load, Config, [""], positional=None) == "'': write --key=value"


@pytest.mark.parametrize("positional, words", [("config", "[config.py ...] "), ("paths", "[paths ...] "), (None, "")])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_every_key_with_its_default_its_values_and_its_line(capsys, positional, words, flag):
    with pytest.raises(SystemExit) as caught:
        load(Config, ["--n_layers", flag], positional=positional, program="x.py", description="Trains.\n\n    x " * 20)
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert out.startswith(f"usage: python x.py {words}[--key=value ...]\n\nTrains.\n")
    assert max(len(line) for line in out.splitlines()) <= 120
    for field in dataclasses.fields(Config):
        if field.init:
            assert f"\n  --{field.name}=" in out and field.metadata["help"][:20] in out
    assert "  --n_layer=12 " in out and "number of blocks (a whole number, at least 1)" in out
    assert "one of auto, cpu, cuda, mps" in out and "or None" in out and "--gated=false" in out
    assert "did you mean" not in out
    assert r"  --start=\n  " in out  # a default that holds a newline stays on its line
    starts = ("number of blocks", "step size", "text to go on", "whether a gate")
    columns = [line.index(start) for line in out.splitlines() for start in starts if start in line]
    assert len(columns) == 4 and len(set(columns)) == 1


# Config files


@pytest.mark.parametrize(
    "text, value",
    [
        ("x = 5 * 8", 40),
        ("x = -1", -1),
        ("x = 7 // 2 + 7 % 4 - 2 ** 3", -2),
        ("x = 1 / 4", 0.25),
        ("x = 2 ** -1", 0.5),
        ("x = 1_000", 1000),
        ("y = 3\nx = y * 2", 6),
        ("x = 1\nx = x + 1", 2),
        ("x = True", True),
        ("x = None", None),
        ("x = 'a' 'b'", "ab"),
        ("x = [1, (2, 'a'), {'k': [None, -1.5]}]", [1, (2, "a"), {"k": [None, -1.5]}]),
        ("x = {}", {}),
        ("'''A docstring.'''\n# a comment\n\nx = 1  # why", 1),
        ("\ufeffx = 1\r\n", 1),
        ("x = 'é'", "é"),
    ],
)
def test_a_python_file_holds_literals_arithmetic_and_earlier_names(write, text, value):
    assert same(read_config_file(write("a.py", text))["x"], value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("x = 1\nimport os", "a.py line 2: import os: allowed are lines `name = value`, where"),
        ("\nx = open('a')", "a.py line 2: x = open('a'): allowed are"),
        ("if True:\n    x = 1", "a.py line 1: if True:: allowed are"),
        ("print(1)", "allowed are"),
        ("x, y = 1, 2", "allowed are"),
        ("x += 1", "allowed are"),
        ("x: int = 1", "allowed are"),
        ("x[0] = 1", "allowed are"),
        ("x.y = 1", "allowed are"),
        ("x = [y for y in (1,)]", "allowed are"),
        ("x = f'{1}'", "allowed are"),
        ("x = ().__class__", "allowed are"),
        ("x = {1}", "allowed are"),
        ("x = {**{}}", "allowed are"),
        ("x = {[1]: 2}", "allowed are"),
        ("x = [*[1]]", "allowed are"),
        ("x = b'a'", "allowed are"),
        ("x = 1j", "allowed are"),
        ("x = ...", "allowed are"),
        ("x = not 1", "allowed are"),
        ("x = 1 << 3", "allowed are"),
        ("x = 1 if 1 else 2", "allowed are"),
        ("x = (y := 1)", "allowed are"),
        ("x = lambda: 1", "allowed are"),
        ("x = true", "x = true: 'true' is not assigned above (did you mean 'True'?)"),
        (
            "max_iters = 5\nx = max_iter",
            "line 2: x = max_iter: 'max_iter' is not assigned above (did you mean 'max_iters'?)",
        ),
        ("x = y\ny = 1", "a.py line 1: x = y: 'y' is not assigned above"),
        ("x = 'a' * 10 ** 9", "arithmetic is between numbers"),
        ("x = [0] * 9", "arithmetic is between numbers"),
        ("x = True + 1", "arithmetic is between numbers"),
        ("x = -'a'", "arithmetic is between numbers"),
        ("x = 1 // 0", "x = 1 // 0: integer division or modulo by zero"),
        ("x = 9 ** 9 ** 9", "a.py line 1: the result is too large"),
        ("x = 10 ** 200\ny = x * x", "a.py line 2: the result is too large"),
        ("x = 9.0 ** 999", "a.py line 1: the result is too large"),
        ("x = (-8) ** 0.5", "x = (-8) ** 0.5: math domain error"),
        ("x = 0 ** -1", "x = 0 ** -1: math domain error"),
        ("x = ", "a.py line 1: invalid syntax"),
        ("x = 1\n  y = 2", "a.py line 2: unexpected indent"),
        ("x = '", "a.py line 1: unterminated string"),
        ("x = \0", "a.py"),
        (b"x = '\xff'", "a.py: is not UTF-8 text"),
        ("include = 1", "a.py: include=1: must be the name of a config file"),
        ("include = ' '", "a.py: include=' ': must be the name of a config file"),
        ("include = 'b.py'\ninclude = 'c.py'", "a.py line 2: include = 'c.py': a second include; a file has one"),
    ],
)
def test_anything_else_in_a_python_file_is_refused_with_its_line(write, text, message):
    assert message in error_of(read_config_file, write("a.py", text))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "a.json: not valid JSON (Expecting value: line 1 column 1 (char 0))"),
        ('{"x": 1,\n}', "a.json: not valid JSON ("),
        ("[1]", "a.json: must be a JSON object"),
        (b"\xff\xfe", "a.json: is not UTF-8 text"),
    ],
)
def test_a_json_file_holds_one_object(write, text, message):
    assert message in error_of(read_config_file, write("a.json", text))
    assert read_config_file(write("b.json", '{"x": [1, null], "y": 2.0}')) == {"x": [1, None], "y": 2.0}


def test_a_file_too_large_to_parse_is_refused(write):
    for value in ("9" * 5000, "-" * 50_000 + "1", "[" * 50_000, "1+" * 50_000 + "1"):
        assert error_of(read_config_file, write("a.py", f"x = {value}")).startswith("a.py")
    for depth in range(500, 3000, 25):  # deep enough for the stack of the parser, then of our reader, to end
        instance_or_one_line([write("a.py", f"n_layer = {'1+' * depth}1")], "config")
    for value in ("9" * 5000, "[" * 100_000):
        assert error_of(read_config_file, write("a.json", value)).startswith("a.json: not valid JSON")


def test_a_config_file_is_never_executed(write):
    write("a.py", "n_layer = __import__('pathlib').Path('executed').touch()")
    error_of(load, Config, ["a.py"])
    assert not os.path.exists("executed")


def test_included_keys_come_first_wherever_the_include_stands(write):
    write("config/sub/root.json", '{"x": 0, "y": 0, "z": 0}')
    write("config/base.py", "y = 1\nx = 1\ninclude = 'sub/root.json'")
    write("config/a.py", "x = 2\ninclude = 'base.py'")
    assert read_config_file("config/a.py") == {"x": 2, "y": 1, "z": 0}
    write("config/both.py", "include = 'a.py'\nw = 1")  # the same file twice is no cycle
    assert read_config_file("config/both.py") == {"x": 2, "y": 1, "z": 0, "w": 1}


def test_later_dicts_of_a_key_that_merges_are_added_and_those_of_others_replace(write):
    @dataclasses.dataclass
    class Merging:
        base: dict = key({}, "what all share", merge=True)
        arms: dict = key({}, "what is compared")

    write("included.py", "base = {'a': 1, 'b': 1, 'c': {'d': 1}}\narms = {'x': {}}")
    write("file.py", "include = 'included.py'\nbase = {'b': 2, 'c': {'e': 1}}\narms = {'y': {}}")
    write("alone.py", "base = {'b': 2}")
    assert load(Merging, ["file.py"]).base == {"a": 1, "b": 2, "c": {"e": 1}}  # not c's names
    words = [
        "file.py",
        "alone.py",
        '--base={"b": 3, "f": 3}',
        '--config_override={"base": {"f": 4}}',
        "--arms={'z': 1}",
    ]
    config = load(Merging, words)
    assert config.base == {"a": 1, "b": 3, "c": {"e": 1}, "f": 4} and config.arms == {"z": 1}
    assert load(Merging, ["--base={'b': 3}"]).base == {"b": 3}


def test_an_include_that_cannot_be_read_or_goes_in_circles_is_an_error(write):
    write("a.py", "include = 'b.py'")
    write("b.py", "include = './c.py'")
    write("c.py", "include = 'b.py'")
    assert error_of(read_config_file, "a.py").endswith("b.py: include cycle: b.py -> c.py -> b.py")
    write("d.py", "include = 'd.py'")
    assert error_of(read_config_file, "d.py") == "d.py: include cycle: d.py -> d.py"
    write("config/base.py", "x = 1")
    write("config/e.py", "include = 'bse.py'")
    assert error_of(read_config_file, "config/e.py").startswith(
        "config/bse.py: no such config file (did you mean 'base.py'?)"
    )


def test_a_name_that_is_no_config_file_is_an_error(write):
    write("config/train_mqar.py", "")
    write("config/notes.txt", "")
    for name, message in [
        ("config/train_mqr.py", "config/train_mqr.py: no such config file (did you mean 'train_mqar.py'?)"),
        ("config/train_mqar", "config/train_mqar: no such config file (did you mean 'train_mqar.py'?)"),
        ("config/xyz.py", "config/xyz.py: no such config file"),
        ("nowhere/a.py", "nowhere/a.py: no such config file"),
        ("config", "config: is a folder, not a config file"),
        ("config/notes.txt", "config/notes.txt: a config file ends in .py or .json"),
        (" ", "the name of a config file is empty"),
        ("a\0b.py", r"a\x00b.py: no such config file"),
        ("\ud800.py", r"\ud800.py: no such config file"),
    ]:
        assert error_of(read_config_file, name) == message
    assert "no such config file" in error_of(read_config_file, "x" * 5000 + ".py")


def test_a_mistake_in_a_file_names_the_file(write):
    write("a.py", "n_layers = 1")
    assert error_of(load, Config, ["a.py"]) == "a.py: unknown key 'n_layers' (did you mean 'n_layer'?)"
    write("a.py", "batch_size = 0")
    assert error_of(load, Config, ["a.py", "--batch_size=1"]).startswith("a.py: batch_size=0: must be at least 1")


# A whole script


@pytest.mark.parametrize(
    "statement, status, stderr",
    [
        ("pass", 0, ""),
        ("raise configurator.UserError('n_layer=0:\\nno')", 2, "error: n_layer=0:\\nno\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        ("open('gone/x')", 1, "error: gone/x: No such file or directory\n"),
        (
            "raise MemoryError",
            1,
            "error: not enough memory (malloc failed); lower batch_size, block_size or the model\n",
        ),
        (
            "raise RuntimeError('[enforce fail] DefaultCPUAllocator: can\\'t allocate memory: 9 bytes\\nmore')",
            1,
            "error: not enough memory ([enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes); "
            "lower batch_size, block_size or the model\n",
        ),
        ("print('\\ud800 é', file=sys.stderr)", 0, "\\ud800 \\xe9\n"),
    ],
)
def test_run_turns_an_error_into_one_line_and_a_status(statement, status, stderr):
    code = f"import sys, configurator\ndef main(argv):\n    print(argv)\n    {statement}\nconfigurator.run(main)"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code, "--a=1"], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "['--a=1']\n", stderr)


@pytest.mark.parametrize("error", ["TypeError('an edit')", "OSError(2, 'of an edit', 'x')"])
def test_an_error_of_model_code_keeps_its_traceback(tmp_path, error):
    (tmp_path / "model.py").write_text(f"def forward():\n    raise {error}\n")
    code = "import configurator, model\nconfigurator.run(lambda argv: model.forward())"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 1 and 'model.py", line 2, in forward' in done.stderr


BUFFERED = {"PYTHONUNBUFFERED": ""}  # a short text fails to be written at the end alone


@pytest.mark.parametrize("script", ["train.py", "data/mqar/prepare.py"])
def test_a_full_disk_under_the_output_is_one_line(script):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, script, "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | BUFFERED,
        )
    assert done.returncode == 1
    assert done.stderr == "error: standard output, or a connection: No space left on device\n"


SCRIPTS = ["train", "sample", "evaluate", "meters", "experiment", "plot", "bench", "export", "harness"]


@pytest.mark.parametrize("safe", ["", "1"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_while_modules_are_imported_is_one_line(script, safe, tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")  # found before the real one
    (tmp_path / "matplotlib.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": safe}  # 1: without the script's folder
    done = subprocess.run([sys.executable, f"{script}.py"], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stderr == "interrupted\n" and done.returncode in (130, -2)


@pytest.mark.parametrize(
    ("environment", "words"),
    [({"WORLD_SIZE": "2"}, "RANK, LOCAL_RANK"), ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"), ({"RANK": "x"}, None)],
)
def test_what_is_left_of_torchrun_in_the_environment_is_named(environment, words, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if words is None:  # one process alone: nothing else of torchrun counts
        assert Processes("cpu", 1).world_size == 1
        return
    with pytest.raises(UserError, match=words):
        Processes("cpu", 1)


def test_a_number_of_starts_that_is_none_is_named(monkeypatch):
    for text in ("", "two"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", text)
        with pytest.raises(UserError, match=f"SLURM_RESTART_COUNT='{text}': .*`unset SLURM_RESTART_COUNT`"):
            is_started_again()


@pytest.mark.parametrize("left", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "two"}])
def test_a_process_without_torchrun_prints_its_error_whatever_rank_is_left_in_the_environment(
    left, monkeypatch, capsys
):
    for name in ("1", "x"):
        for key_, value in ({"LOCAL_RANK": name} | left).items():
            monkeypatch.setenv(key_, value)
        assert configurator.report(UserError("wrong")) == 2
        assert capsys.readouterr().err == "error: wrong\n"
    places = dict(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, MASTER_ADDR="a", MASTER_PORT=1)
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    configurator.report(UserError("wrong"))
    assert capsys.readouterr().err == ""  # local rank 0 prints the same


@pytest.mark.parametrize("statement", ["print('a')", "print('a' * 99999)", "configurator.load(Config, ['--help'])"])
def test_a_reader_that_stops_reading_gets_no_stack_trace(statement):
    reader, writer = os.pipe()
    os.close(reader)
    code = (
        f"import configurator, dataclasses\nConfig = dataclasses.make_dataclass('C', [])\ndef main(argv): {statement}"
    )
    command, environment = [sys.executable, "-c", f"{code}\nconfigurator.run(main)"], os.environ | BUFFERED
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, env=environment)
    os.close(writer)
    assert (done.stderr, done.returncode) == (b"", 141)


def test_a_stream_without_a_reader_falls_silent_and_a_help_without_docstrings_has_none(capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        for _ in range(3):
            print("nobody hears it", file=configurator.falls_silent(stream), flush=True)
    with pytest.raises(SystemExit):
        load(Config, ["--help"], description=None)  # python -OO
    assert "keys, with their defaults" in capsys.readouterr().out


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


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        NAMES, st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT, st.lists, max_leaves=5)
    )
)
def test_any_values_build_a_config_or_a_one_line_error(values):
    try:
        assert isinstance(build(Config, values), Config)
    except UserError as error:
        assert len(str(error).splitlines()) == 1


# ----------------------------------------------------------------------------------------------------------------------
# Config files that never end, or grow without end


@pytest.mark.parametrize(
    "lines",
    [
        "a0 = [1, 1]\n" + "".join(f"a{i + 1} = [a{i}, a{i}]\n" for i in range(40)),
        "a0 = {1: 1}\n" + "".join(f"a{i + 1} = {{1: a{i}, 2: a{i}}}\n" for i in range(40)),
        f"a0 = {'x' * 1000!r}\n" + "".join(f"a{i + 1} = (a{i}, a{i})\n" for i in range(40)),
        "a0 = [1]\n" + "".join(f"a{i + 1} = [a{i}]\n" for i in range(3000)),
    ],
    ids=["lists", "dicts", "texts", "nested"],
)
def test_a_config_that_doubles_thirty_times_or_nests_a_thousand_deep_is_one_line(tmp_path, lines):
    (tmp_path / "a.py").write_text(lines + "n_layer = a3\n")
    with pytest.raises(UserError, match=r"a.py line \d+: a\d+ = .*: the value is (too large|nested too deep)"):
        configurator.read_config_file(tmp_path / "a.py")
    (tmp_path / "b.json").write_text('{"arms": ' + "[" * 500 + "]" * 500 + "}")
    with pytest.raises(UserError, match="nested too deep"):
        configurator.read_config_file(tmp_path / "b.json")


def test_a_config_is_a_file_of_at_most_a_megabyte(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    (tmp_path / "large.py").write_text("#" * (1 << 20) + "\n")
    for name, expected in {
        "pipe.py": "a pipe or a device",
        "zero.py": "a pipe or a device",
        "large.py": "has more than 1,048,576 bytes",
    }.items():
        with pytest.raises(UserError, match=expected):
            configurator.read_config_file(tmp_path / name)


def test_a_message_is_no_endless_line():
    assert len(str(UserError("x" * 100_000))) < 1000
    assert str(UserError("a" * 900)) == "a" * 900
