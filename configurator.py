"""
The settings of a script: a dataclass of keys, set by config files and by --key=value, and checked before any work.

    @dataclasses.dataclass
    class Config:
        n_layer: int = key(12, "number of blocks", at_least=1)
        device: str = key("auto", "where to run", choices=("auto", "cpu", "cuda", "mps"))

    config = load(Config, argv)    # python train.py config/small.py --n_layer=6 --config_override='{"device": "cpu"}'

A class may name keys that it lacks and what to write instead: `elsewhere = {"eval_iters": "leave it out"}`.

The annotation gives the type: int, float, bool, str, dict or list[...] of one of them, each also as `... | None`; key()
adds the limits (rules.py). Config files apply first, in their order, then the -- words, in theirs; the later value
wins. A config file looks as in nanoGPT (`batch_size = 5 * 8`), but it is parsed and never executed: a config that came
with somebody's checkpoint cannot run code, and a misspelled name is an error. Every mistake that a user can fix is a
UserError of one line. A script that ends in `configurator.run(main)` prints that line and exits with status 2. A script
imports this module first, so that Ctrl-C while torch is being loaded prints one line, too.
"""

import ast
import copy
import dataclasses
import functools
import itertools
import json
import operator
import os
import re
import sys
import textwrap
import traceback
import typing
from collections.abc import Collection, Iterable

from rules import (
    KINDS,
    MOST_PARTS,
    Rule,
    UserError,
    check_size,
    did_you_mean,
    escape,
    shorten,
    show,
    wrong,
    wrong_field,
)
from runs.files import parse_json, read_regular, refuse_twice


def run(main):
    """
    Calls main(argv) as the whole of a script. A UserError ends it with status 2, an interrupt with 130, and what the
    machine refuses (a full disk, little memory) with 1; each prints one line. Other exceptions keep their traceback.
    """
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal lacks is printed escaped
        stream.reconfigure(errors="backslashreplace")
    sys.stderr = falls_silent(sys.stderr)
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `--help | head`: nobody reads on. 141 is the status of SIGPIPE, which Python ignores
        os._exit(141)
    except (Exception, KeyboardInterrupt) as error:
        status = report(error)
        falls_silent(sys.stdout).flush()  # a full disk: Python would fail once more when it flushes at exit
        sys.exit(status)


class falls_silent:
    """
    A stream whose first error (its reader is gone, its disk is full) sends it and all that follows to /dev/null: work
    of hours does not end because nobody reads about it.
    """

    def __init__(self, stream: typing.Any):
        self.stream = stream

    def __getattr__(self, name: str) -> typing.Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())  # what is in its buffer goes there, too

    def flush(self) -> None:
        self.write("")


def report(error: BaseException) -> int | str:
    """Prints on standard error why a script ends, and returns its exit status."""
    rank = os.environ.get("LOCAL_RANK", "0") if "MASTER_PORT" in os.environ else "0"  # among torchrun's processes here
    text = escape(shorten(str(error).strip().partition("\n")[0], 300))
    match error:
        case SystemExit():
            return error.code or 0
        case UserError() | KeyboardInterrupt():
            line, status = ("interrupted", 130) if isinstance(error, KeyboardInterrupt) else (f"error: {error}", 2)
            if rank == "0":  # all ranks have it alike
                print(line, file=sys.stderr)
            return status
        case _ if is_of_memory(error):
            line = f"error: not enough memory ({text or 'malloc failed'}); lower batch_size, block_size or the model"
        case OSError():
            name = escape(shorten(str(error.filename or "standard output, or a connection"), 200))
            line = f"error: {name}: {error.strerror or text}"
        case _:
            traceback.print_exception(error)
            return 1
    print(line if rank == "0" else f"local rank {rank}: {line}", file=sys.stderr)
    return 1


def is_of_memory(error: BaseException) -> bool:
    """Whether it is a shortage of memory, which torch words differently on a CPU, on CUDA and on MPS."""
    words = "can't allocate memory|not enough memory|out of memory|[Cc]annot allocate memory"
    return isinstance(error, MemoryError) or re.search(words, str(error)) is not None


def _report_uncaught(kind, error, trace):
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if os.path.realpath(getattr(sys.modules["__main__"], "__file__", "")).startswith(os.path.dirname(__file__) + os.sep):
    sys.excepthook = _report_uncaught  # Ctrl-C in one of our scripts before run(main), while modules are being imported
for _name, _mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, _name) is None:  # closed, as by >&-: the next file that is opened would take its number
        setattr(sys, _name, open(os.devnull, _mode))
        os.set_inheritable(getattr(sys, _name).fileno(), True)


# ----------------------------------------------------------------------------------------------------------------------
# The keys and their checks

WIDEST = {int: 2**63 - 1, float: 3.4028234663852886e38}  # 64 bits, and float32: the values go into tensors
LITERALS = {"true": True, "false": False, "null": None, "none": None}  # as JSON spells them, and as people do


def key(
    default: typing.Any, help: str, *, merge: bool = False, choices: Iterable = (), **checks: typing.Any
) -> typing.Any:
    """
    A dataclass field with its checks. `help` is one line. In a list, the checks hold for each item.

    merge: a later dict is added to the earlier ones instead of replacing them.
    choices, at_least, at_most, above, below, is_path: as in rules.Rule.
    """
    metadata = {"help": help, "merge": merge, "checks": checks | {"choices": tuple(choices)}}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache  # an experiment builds hundreds of configs each time it looks for its next run
def rules_of(config_class: type) -> dict[str, Rule]:
    """The rule of each key of a class."""
    hints = typing.get_type_hints(config_class)
    fields = [field for field in dataclasses.fields(config_class) if field.init]
    return {field.name: _rule_of(hints[field.name], field.metadata.get("checks", {})) for field in fields}


def _rule_of(hint, checks):
    parts = typing.get_args(hint)
    if type(None) in parts:  # `list[int] | None`
        (hint,) = (part for part in parts if part is not type(None))
        return dataclasses.replace(_rule_of(hint, checks), optional=True)
    if typing.get_origin(hint) is list:
        return Rule(list, items=_rule_of(parts[0], checks))
    if hint not in KINDS or hint is list:
        raise TypeError(f"{hint}: a key is an int, float, bool, str, dict or list[...], or one of them | None")
    if hint in WIDEST:
        checks = ({} if "above" in checks else {"at_least": -WIDEST[hint]}) | checks
        checks = ({} if "below" in checks else {"at_most": WIDEST[hint]}) | checks
    return Rule(hint, **checks)


def build(config_class: type, values: dict, source: str = "") -> typing.Any:
    """
    An instance of config_class from a dict, with every value checked. Text is read by the type of its key: "1e3" sets
    an int to 1000. Messages begin with `source`, a file name. Raises UserError, as the class's __post_init__ may, too.
    """
    return config_class(**_check(config_class, values, source))


def check(instance: object) -> None:
    """Checks and converts the values of an instance as `build` does, for the __post_init__ of its class."""
    vars(instance).update(_check(type(instance), vars(instance)))


def check_choice(label: str, value: object, choices: Collection) -> None:
    """Raises a UserError if the value is not one of the choices; the message names the nearest one."""
    if value not in choices:
        raise UserError(wrong(label, value, Rule(str, choices=tuple(choices)).words(value)))


def _check(config_class, values, source=""):
    rules, prefix = rules_of(config_class), f"{shorten(source, 200)}: " if source else ""
    _check_elsewhere(config_class, values, prefix)
    checked = {}
    for name, value in values.items():
        if name not in rules:
            raise UserError(f"{prefix}unknown key {show(name)}{did_you_mean(name, [*rules, 'config_override'])}")
        try:
            checked[name] = _read(value, rules[name])
        except UserError as error:
            raise UserError(f"{prefix}{name}: {error}") from None
        if words := wrong_field(checked[name], rules[name], prefix + name):
            raise UserError(words)
    return checked


def _check_elsewhere(config_class, names, prefix=""):
    """Raises one UserError that says for all such keys among `names` what to write instead."""
    elsewhere = getattr(config_class, "elsewhere", {})
    groups = itertools.groupby((name for name in elsewhere if name in names), elsewhere.get)
    if lines := [f"{', '.join(keys)}: no key here: {advice}" for advice, keys in groups]:
        raise UserError(prefix + "; ".join(lines))


def _read(value, rule):
    """The value as the type that the rule asks for. One that cannot be read stays as it is, and breaks the rule."""
    kind, text = rule.kind, value.strip() if isinstance(value, str) else None
    if kind is str:
        if value in ("True", "False") or isinstance(value, bool):  # nanoGPT's compile = False, of auto, true, false
            return str(value).lower() if str(value).lower() in rule.choices else value
        return None if rule.optional and value in ("None", "null") else value  # gate="none" is a name
    if kind is list and text is not None and text[:1] not in ("[", "(") and not (rule.optional and text == "None"):
        words = [word.strip() for word in text.split(",")] if text else []
        value = value if "" in words else words
    elif text is not None:
        try:
            value = _evaluate(ast.parse(text, mode="eval").body, LITERALS)
        except UserError:
            raise
        except (ValueError, ArithmeticError, SyntaxError, RecursionError, MemoryError):
            return value
    is_number = type(value) in (int, float)  # True is none: batch_size = True must not train with batches of one
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    if kind is float and is_number and abs(value) < 1e300:
        return float(value)
    if kind is bool and is_number and value in (0, 1):
        return bool(value)
    if kind is list and isinstance(value, list | tuple):
        return [_read(item, rule.items) for item in value]
    return value


# ----------------------------------------------------------------------------------------------------------------------
# The command line


def load(
    config_class: type,
    argv: list[str],
    *,
    positional: str | None = "config",
    program: str = "train.py",
    description: str | None = "",
) -> typing.Any:
    """
    An instance of config_class from the words of a command line. Its attribute `given` has the names that were set.

    positional="config": words without dashes are config files. positional=NAME: they become the items of that list key.
    positional=None: such words are refused. --help prints every key and exits. Raises UserError.
    """
    if "--help" in argv or "-h" in argv:
        print(_help(config_class, positional, program, description or ""), flush=True)  # python -OO drops __doc__
        raise SystemExit(0)
    # Spelling is checked before files: the mistake in `--batch_size 4 config.py` is not that no file is called 4.
    words, settings = [], []
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, text = word.lstrip("-").partition("=")
        is_key = name in rules_of(config_class)
        if word.startswith("--") and equals and name:
            settings.append((name, text))
        elif word.startswith("-") or positional is None or (positional == "config" and is_key):
            name, text = (name, text if equals else following) if is_key else ("key", "")
            raise UserError(f"{shorten(word) or show(word)}: write --{name}={shorten(text) or 'value'}")
        else:
            words.append(word)

    merge = [field.name for field in dataclasses.fields(config_class) if field.metadata.get("merge")]
    given = []  # (dict, where it is from), the later one wins
    if positional == "config":
        given += [(read_config_file(word, merge), word) for word in words]
    elif words:
        given.append(({positional: words}, ""))
    for name, text in settings:
        given.append((_parse_object(text, name), name) if name == "config_override" else ({name: text}, ""))
    _check_elsewhere(config_class, [name for values, _ in given for name in values])
    values: dict = {}
    for later, source in given:
        values = _merged(values, _check(config_class, later, source), merge)
    config = config_class(**values)
    config.given = frozenset(values)  # the other keys have their defaults
    return config


def _merged(before, after, merge):
    """Both dicts in one. The later value of a name wins; under a name in `merge`, two dicts are joined likewise."""
    both = [name for name in merge if isinstance(before.get(name), dict) and isinstance(after.get(name), dict)]
    return before | after | {name: before[name] | after[name] for name in both}


def _help(config_class, positional, program, description):
    words = {"config": " [config.py ...]", None: ""}.get(positional, f" [{positional} ...]")
    lines = [f"usage: python {program}{words} [--key=value ...]", ""]
    for line in description.strip().splitlines():
        lines += textwrap.wrap(line, 120, subsequent_indent=" " * (len(line) - len(line.lstrip()))) or [""]
    lines += ["", "keys, with their defaults:", ""]
    indent = " " * 8
    for field in (field for field in dataclasses.fields(config_class) if field.init):
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        default = default if isinstance(default, str | None) else json.dumps(default)
        rule = rules_of(config_class)[field.name]
        allowed = f"a list, each item {rule.items.words()}" if rule.items else rule.words()
        about = f"{field.metadata.get('help', '')} ({allowed})"
        lines.append(f"  --{field.name}={shorten(escape(str(default)), 60)}")
        lines += textwrap.wrap(about, 112, initial_indent=indent, subsequent_indent=indent)
    return "\n".join([*lines, "  --config_override={}", f"{indent}several keys at once (a JSON object)"])


# ----------------------------------------------------------------------------------------------------------------------
# Config files

ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
ALLOWED = (
    "allowed are lines `name = value`, where a value is a number, string, True, False, None, list, tuple, dict, "
    "+ - * / between numbers, or a name assigned above"
)


def read_config_file(path: str | os.PathLike, merge: Iterable[str] = (), _open_files: tuple[str, ...] = ()) -> dict:
    """
    The keys of a config file as a dict, unchecked. A .py file holds assignments of literals, a .json file one object.
    `include = "base.py"`, a path relative to the file, puts the keys of that file first. merge: the names whose dicts
    are joined with those of the included file. Raises UserError with file and line.
    """
    path = os.fspath(path)
    text, name = _read_text(path), shorten(path, 200)
    files = (*_open_files, os.path.realpath(path))
    if files[-1] in _open_files:
        raise UserError(f"{name}: include cycle: {' -> '.join(os.path.basename(file) for file in files)}")
    values = _parse_object(text, name) if path.endswith(".json") else _parse_python(text, name)
    if "include" in values:
        base = values.pop("include")
        if not isinstance(base, str) or not base.strip():
            raise UserError(wrong(f"{name}: include", base, "the name of a config file"))
        values = _merged(read_config_file(os.path.join(os.path.dirname(path), base), merge, files), values, merge)
    return values


def _read_text(path):
    name = shorten(path, 200)
    if not path.endswith((".py", ".json")):
        raise UserError(f"{name or repr(name)}: a config file ends in .py or .json")
    if not os.path.exists(path):
        folder, file = os.path.split(path)
        there = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        near = did_you_mean(file, [name for name in there if name.endswith((".py", ".json"))])
        raise UserError(f"{name}: no such config file{near}")
    try:
        text = read_regular(path, MOST_PARTS).decode("utf-8-sig")  # -sig: some editors write a byte order mark
    except UnicodeDecodeError:
        raise UserError(f"{name}: is not UTF-8 text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _parse_object(text, name):
    values = parse_json(text, name)
    if not isinstance(values, dict):
        raise UserError(f'{name}: must be a JSON object, as in {{"n_layer": 6}}')
    try:
        check_size(values)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    return values


def _parse_python(text, name):
    try:
        statements = ast.parse(text, filename=name).body
    except SyntaxError as error:
        raise UserError(f"{name} line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # a zero byte; thousands of brackets
        raise UserError(f"{name}: cannot be parsed ({error})") from None
    values = {}
    for statement in statements:
        try:
            match statement:
                case ast.Assign(targets=[ast.Name(id="include")]) if "include" in values:
                    raise ValueError("a second include; a file has one")
                case ast.Assign(targets=[ast.Name(id=target)]):
                    values[target] = _evaluate(statement.value, values)
                    check_size(values[target])
                case ast.Expr(value=ast.Constant(value=str())):
                    pass  # a docstring
                case _:
                    raise ValueError(ALLOWED)
        except (ValueError, ArithmeticError, RecursionError) as error:
            line = shorten(text.split("\n")[statement.lineno - 1].strip())
            raise UserError(f"{name} line {statement.lineno}: {line}: {error}") from None
    return values


def _evaluate(node, names):
    """The value of an expression made of literals, arithmetic and `names`. Raises ValueError or ArithmeticError."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.List() | ast.Tuple():
            items = [_evaluate(item, names) for item in node.elts]
            return items if isinstance(node, ast.List) else tuple(items)
        case ast.Dict() if all(isinstance(name, ast.Constant) for name in node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return refuse_twice((_evaluate(name, names), _evaluate(value, names)) for name, value in pairs)
        case ast.Name(id=name):
            if name not in names:
                near = did_you_mean(name, [*names, "True", "False", "None"])
                raise ValueError(f"{show(name)} is not assigned above{near}; a string is written in quotes")
            return names[name]
        case ast.UnaryOp(op=ast.USub()):
            return _evaluate(ast.BinOp(ast.Constant(-1), ast.Mult(), node.operand), names)
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            left, right = _evaluate(node.left, names), _evaluate(node.right, names)
            if not {type(left), type(right)} <= {int, float}:
                raise ValueError("arithmetic is between numbers")
            result = ARITHMETIC[type(node.op)](left, right)
            float(result)  # OverflowError: a product of products would take hours, and all memory
            return result
    raise ValueError(ALLOWED)
