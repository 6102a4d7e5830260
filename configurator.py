"""
The settings of a script: a dataclass of keys, set by config files and by --key=value, and checked before any work.

    @dataclasses.dataclass
    class Config:
        n_layer: int = key(12, "number of blocks", at_least=1)
        device: str = key("auto", "where to run", choices=("auto", "cpu", "cuda", "mps"))

    config = load(Config, argv)    # python train.py config/small.py --n_layer=6 --config_override='{"device": "cpu"}'

A class may name keys that it lacks and what to write instead: `elsewhere = {"eval_iters": "leave it out"}`.

The dataclass defines all checks. The annotation gives the type: int, float, bool, str, list or dict, each also as
`... | None`; `list[int]` gives the type of the items. key() gives the allowed values. Config files apply first, in
their order, then the -- words, in theirs; the later value wins. A config file looks as in nanoGPT (`batch_size = 5 *
8`), but it is parsed and never executed: a config that came with somebody's checkpoint cannot run code, and a
misspelled name is an error. Every mistake that a user can fix is a UserError of one line. A script that ends in
`configurator.run(main)` prints that line and exits with status 2. A script imports this module first, so that Ctrl-C
while torch is being loaded prints one line, too.
"""

import ast
import copy
import dataclasses
import difflib
import functools
import itertools
import json
import math
import operator
import os
import re
import stat
import sys
import textwrap
import traceback
import typing
from collections.abc import Collection, Iterable


class UserError(ValueError):
    """A mistake that a user can fix. Its text is one line: characters that break lines or terminals are escaped.

    The middle of a text of more than 900 characters is left out, as with a path of thousands of characters.
    """

    def __init__(self, text):
        text = _escape(text)
        super().__init__(text if len(text) <= 900 else f"{text[:450]} ... {text[-400:]}")


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


class _FallsSilent:
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        self._try(self.stream.write, text)

    def flush(self):
        self._try(self.stream.flush)

    def _try(self, function, *args):
        try:
            function(*args)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())  # what is in its buffer goes there, too

    def __getattr__(self, name):
        return getattr(self.stream, name)


def falls_silent(stream: typing.TextIO) -> typing.Any:
    """
    The stream, whose first error (its reader is gone, its disk is full) sends it and all that follows to /dev/null:
    work of hours does not end because nobody reads about it.
    """
    return _FallsSilent(stream)


def report(error: BaseException) -> int | str:
    """Prints on standard error why a script ends, and returns its exit status."""
    if isinstance(error, SystemExit):
        return error.code or 0
    line, status = _line_of(error)
    if line is None:
        traceback.print_exception(error)
    elif (rank := _local_rank()) == 0:
        print(line, file=sys.stderr)
    elif not isinstance(error, UserError | KeyboardInterrupt):  # those all of torchrun's processes have alike
        print(f"local rank {rank}: {line}", file=sys.stderr)
    return status


def _local_rank():
    """The number of this process on its machine where torchrun has set all that it sets, and else 0."""
    names = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    found = [os.environ.get(name, "") for name in names]
    return int(found[0]) if all(map(str.isdecimal, found)) and int(found[2]) > 1 else 0


def _line_of(error):
    """(the line that says why a script ends, its exit status). The line is None where the traceback helps more."""
    if isinstance(error, UserError):
        return f"error: {error}", 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    text = _escape(_shorten(str(error).strip().partition("\n")[0], 300))
    if is_of_memory(error):
        return f"error: not enough memory ({text or 'malloc failed'}); lower batch_size, block_size or the model", 1
    is_of_model = any(frame.filename.endswith(MODEL_FILES) for frame in traceback.extract_tb(error.__traceback__))
    if isinstance(error, OSError) and not is_of_model:
        where = _escape(_shorten(str(error.filename), 200)) if error.filename else "standard output, or a connection"
        return f"error: {where}: {error.strerror or text}", 1
    return None, 1


def is_of_memory(error: BaseException) -> bool:
    """Whether it is a shortage of memory, which torch words differently on a CPU, on CUDA and on MPS."""
    words = "can't allocate memory|not enough memory|out of memory|[Cc]annot allocate memory"
    return isinstance(error, MemoryError) or re.search(words, str(error)) is not None


def _report_uncaught(kind, error, trace):
    """For sys.excepthook: Ctrl-C outside of run(), while modules are being imported, prints one line."""
    if issubclass(kind, KeyboardInterrupt):
        print(_line_of(error)[0], file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


# whoever edits these files wants the traceback of an error in them
MODEL_FILES = ("model.py", "gate.py", "ops/recurrence.py", "ops/layers.py", "ops/fast.py", "ops/loss.py")
if os.path.realpath(getattr(sys.modules["__main__"], "__file__", "")).startswith(os.path.dirname(__file__) + os.sep):
    sys.excepthook = _report_uncaught  # only where one of our own scripts runs
    for _name, _mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, _name) is None:  # closed, as by >&-: the next file that is opened would take its number
            setattr(sys, _name, open(os.devnull, _mode))
            os.set_inheritable(getattr(sys, _name).fileno(), True)


# ----------------------------------------------------------------------------------------------------------------------
# The keys and their checks

TYPES = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
    list: "a list, as in a,b or [1, 2]",
    dict: 'a dict, as in {"name": 1}',
}
FLOAT32_MAX = 3.4028234663852886e38
BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def key(
    default: typing.Any,
    help: str,
    *,
    choices: Iterable | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    merge: bool = False,
    is_path: bool = False,
) -> typing.Any:
    """
    A dataclass field with its checks. `help` is one line. In a list, choices and limits hold for each item.

    merge: a later dict is added to the earlier ones instead of replacing them.
    is_path: something will be written there, so the text must be a name that a file or folder can have.
    """
    limits = [
        (f"{words} {limit}", holds, limit)
        for words, holds, limit in (
            ("at least", operator.ge, at_least),
            ("at most", operator.le, at_most),
            ("above", operator.gt, above),
            ("below", operator.lt, below),
        )
        if limit is not None
    ]
    metadata: dict = {"help": help, "choices": tuple(choices or ()), "limits": limits}
    metadata |= {"merge": merge, "is_path": is_path}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def build(config_class: type, values: dict, source: str = "") -> typing.Any:
    """
    An instance of config_class from a dict, with every value checked. Text is read by the type of its key: "1e3" sets
    an int to 1000. Messages begin with `source`, a file name. Raises UserError, as the class's __post_init__ may, too.
    """
    return config_class(**_check(config_class, values, source))


def check(instance: object) -> None:
    """Checks and converts the values of an instance as `build` does, for the __post_init__ of its class."""
    vars(instance).update(_check(type(instance), vars(instance)))


def _check(config_class, values, source=""):
    fields, hints = _fields(config_class), _hints(config_class)
    prefix = f"{_shorten(source, 200)}: " if source else ""
    _check_elsewhere(config_class, values, prefix)
    checked = {}
    for name, value in values.items():
        if name not in fields:
            raise UserError(f"{prefix}unknown key {show(name)}{_did_you_mean(name, fields)}")
        choices, limits = fields[name].metadata.get("choices", ()), fields[name].metadata.get("limits", ())
        if isinstance(value, bool) or value in ("True", "False"):
            if str(value).lower() in choices:  # nanoGPT's compile = False, for one of auto, true, false
                value = str(value).lower()
        value = _convert(prefix + name, value, hints[name], choices)
        for item in value if isinstance(value, list) else [value]:
            if choices and item is not None and item not in choices:
                raise _wrong(prefix + name, item, _one_of(choices, item))
            is_number = isinstance(item, int | float)  # an untyped list may hold words
            if (
                limits
                and item is not None
                and not (is_number and all(holds(item, limit) for _, holds, limit in limits))
            ):
                raise _wrong(prefix + name, item, _range(limits))
        if fields[name].metadata.get("is_path") and value is not None:
            longest = max(len(part.encode(errors="replace")) for part in value.split("/"))
            if not value.strip() or "\0" in value or len(value) > 4000 or longest > 255:
                raise _wrong(prefix + name, value, "the name of a file or folder, at most 255 bytes between slashes")
        checked[name] = value
    return checked


def _check_elsewhere(config_class, names, prefix=""):
    """Raises one UserError that says for all such keys among `names` what to write instead."""
    found = {}
    for name, instead in getattr(config_class, "elsewhere", {}).items():
        if name in names:
            found.setdefault(instead, []).append(name)
    if found:
        raise UserError(
            prefix + "; ".join(f"{', '.join(keys)}: no key here: {instead}" for instead, keys in found.items())
        )


@functools.cache  # an experiment builds hundreds of configs each time it looks for its next run
def _hints(config_class):
    return typing.get_type_hints(config_class)


def _fields(config_class):
    return {field.name: field for field in dataclasses.fields(config_class) if field.init}


def _kind(hint):
    """`list[int] | None` -> (list, int, True): the type, the type of the items, whether None is allowed."""
    optional = type(None) in typing.get_args(hint)
    if optional:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    base = typing.get_origin(hint) or hint
    if base not in TYPES:
        raise TypeError(f"{hint}: a key is an int, float, bool, str, list or dict, or one of them | None")
    return base, next(iter(typing.get_args(hint)), None) if base is list else None, optional


def _convert(label, value, hint, choices):
    base, item_hint, optional = _kind(hint)
    says_none = value is None
    if isinstance(value, str):  # gate="none" is a name, not a missing value: where text is meant, only None and null
        says_none = value in ("None", "null") if base is str else value.strip().lower() in ("none", "null")
    if says_none and optional:
        return None
    try:
        value_read = _read(value, base, typed_items=item_hint is not None)
    except UserError as error:
        raise UserError(f"{label}: {error}") from None
    except (ValueError, TypeError, LookupError, OverflowError, SyntaxError, RecursionError, MemoryError):
        allowed = _one_of(choices, value) or TYPES[base]
        raise _wrong(label, value, allowed + "; None is not allowed" * says_none) from None
    if base is int and abs(value_read) >= 2**63:  # torch would fail later, with a stack trace
        raise _wrong(label, value, "a whole number of 64 bits")
    if base is float and abs(value_read) > FLOAT32_MAX:  # it goes into tensors, where it would be infinite
        raise _wrong(label, value, "between -3.4e38 and 3.4e38, as float32 is")
    if item_hint is not None:
        return [_convert(f"{label}[{i}]", item, item_hint, choices) for i, item in enumerate(value_read)]
    return value_read


def _read(value, base, typed_items):
    """The value as a `base`. Raises one of the exceptions that _convert catches."""
    if base is bool:
        return BOOLS[str(value).strip().lower()]
    if base in (int, float):
        number = _number(value) if isinstance(value, str) else value
        # to Python True is 1: batch_size = True must not train with batches of one
        if isinstance(number, bool) or not math.isfinite(number) or (base is int and number != int(number)):
            raise ValueError
        return base(number)
    if base is list and isinstance(value, str) and not value.strip().startswith(("[", "(")):
        words = [word.strip() for word in value.split(",")] if value.strip() else []
        if "" in words:
            raise ValueError
        return words if typed_items else [_number_or_word(word) for word in words]
    if base in (list, dict) and isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=refuse_twice)
        except json.JSONDecodeError:
            value = _evaluate(ast.parse(value.strip(), mode="eval").body, {})
    if not isinstance(value, (list, tuple) if base is list else base):
        raise ValueError
    if base in (list, dict):
        check_size(value)
    return base(value)


def _number(text):
    try:
        return int(text)
    except ValueError:
        return float(text)  # 1e3


def _number_or_word(text):
    try:
        return _number(text) if math.isfinite(_number(text)) else text  # a word may be "inf" or "nan"
    except (ValueError, OverflowError):
        return text


# ----------------------------------------------------------------------------------------------------------------------
# The wording of messages


def check_choice(label: str, value: object, choices: Collection) -> None:
    """Raises a UserError if the value is not one of the choices; the message names the nearest one."""
    if value not in choices:
        raise _wrong(label, value, _one_of(choices, value))


def _wrong(label, value, allowed):
    return UserError(f"{label}={show(value)}: must be {allowed}")


def _one_of(choices, value=""):
    return choices and "one of " + ", ".join(str(choice) for choice in choices) + _did_you_mean(value, choices)


def _range(limits):
    return " and ".join(words for words, _, _ in limits)


def _did_you_mean(word, candidates):
    word, candidates = show(word).strip("'"), [str(candidate) for candidate in candidates]
    if (synonym := {"gpu": "cuda"}.get(word.lower())) in candidates:
        return f" (did you mean {synonym!r}?)"
    for spelling in (word, word.lower()):
        for near in difflib.get_close_matches(spelling, candidates, 1) if word else ():
            return f" (did you mean {near!r}?)"
    return ""


def show(value: object) -> str:
    """repr(value), cut to 60 characters."""
    try:
        return _shorten(repr(value))
    except Exception:  # an int of more than 4,300 digits; lists nested a thousand deep; a tensor of packed bits
        return f"<a very large {type(value).__name__}>"


def _escape(text):
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _shorten(text, width=60):
    return text if len(text) <= width else text[: width - 3] + "..."


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
    fields = _fields(config_class)
    if "--help" in argv or "-h" in argv:
        print(_help(config_class, positional, program, description or ""), flush=True)  # python -OO drops __doc__
        raise SystemExit(0)

    # Spelling is checked before files: the mistake in `--batch_size 4 config.py` is not that no file is called 4.
    words, settings = [], []
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, text = word.lstrip("-–—").partition("=")  # web pages turn -- into one long dash
        known = name in fields or name == "config_override" or name in getattr(config_class, "elsewhere", ())
        if known and word == f"--{name}={text}":
            settings.append((name, text))
        elif word.startswith("--") and name and not known:
            raise UserError(f"unknown key {show(name)}{_did_you_mean(name, [*fields, 'config_override'])}")
        elif word.startswith("-") or positional is None or (positional == "config" and known and equals):
            if not known:
                name, text = "key", "value"
            elif not equals:
                text = _value_after(fields.get(name), following)
            raise UserError(f"{_shorten(word) or show(word)}: write --{name}={_shorten(text)}")
        else:
            words.append(word)

    merge = [name for name, field in fields.items() if field.metadata.get("merge")]
    given = []  # (dict, where it is from), the later one wins
    if positional == "config":
        given += [(read_config_file(word, merge), word) for word in words]
    elif words:
        given.append(({positional: words}, ""))
    for name, text in settings:
        given.append((_parse_json(text, name), name) if name == "config_override" else ({name: text}, ""))
    _check_elsewhere(config_class, [name for each, _ in given for name in each])
    checked = [_check(config_class, each, source) for each, source in given]
    values = functools.reduce(functools.partial(_merged, merge=merge), checked, {})
    config = config_class(**values)
    config.given = frozenset(values)  # the other keys have their defaults
    return config


def _merged(before, after, merge):
    """Both dicts in one. The later value of a name wins; under a name in `merge`, two dicts are joined likewise."""
    merged = before | after
    for name in merge:
        if isinstance(before.get(name), dict) and isinstance(after.get(name), dict):
            merged[name] = before[name] | after[name]
    return merged


def _value_after(field, following):
    """The value that a --key without '=' most likely meant: the next word, or true for a switch."""
    choices = field.metadata.get("choices", ()) if field else ()
    if field and (isinstance(field.default, bool) or "true" in choices):
        return following if following.lower() in (*BOOLS, *choices) else "true"
    return following if following and not following.startswith("--") else "value"


def _help(config_class, positional, program, description):
    words = {"config": " [config.py ...]", None: ""}.get(positional, f" [{positional} ...]")
    lines = [f"usage: python {program}{words} [--key=value ...]", ""]
    for line in description.strip().splitlines():
        lines += textwrap.wrap(line, 120, subsequent_indent=" " * (len(line) - len(line.lstrip()))) or [""]
    lines += [""] * bool(description.strip()) + ["keys, with their defaults:", ""]

    rows, hints = [], _hints(config_class)
    for name, field in _fields(config_class).items():
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        base, _, optional = _kind(hints[name])
        text = str(default).lower() if base is bool else json.dumps(default) if base in (list, dict) else str(default)
        allowed = _one_of(field.metadata.get("choices")) or TYPES[base]
        allowed += f", {_range(field.metadata['limits'])}" if field.metadata.get("limits") else ""
        allowed += " or None" if optional else ""
        rows.append((f"  --{name}={_shorten(_escape(text), 40)}", f"{field.metadata.get('help', '')} ({allowed})"))
    rows.append(("  --config_override={}", "several keys at once (a JSON object)"))

    column = min(36, 2 + max(len(left) for left, _ in rows))
    for left, text in rows:
        if len(left) > column - 2:  # a long name gets a line of its own
            lines.append(left)
            left = ""
        indent = {"initial_indent": left.ljust(column), "subsequent_indent": " " * column}
        lines += textwrap.wrap(text, 100, **indent, break_on_hyphens=False)
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# Config files

MOST_BYTES = 1 << 20  # the largest config file, and the largest value of a key
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
ALLOWED = (
    "allowed are lines `name = value`, where a value is a number, string, True, False, None, list, tuple, dict, "
    "arithmetic between numbers, or a name assigned above"
)


def read_config_file(path: str | os.PathLike, merge: Iterable[str] = (), _open_files: tuple[str, ...] = ()) -> dict:
    """
    The keys of a config file as a dict, unchecked. A .py file holds assignments of literals, a .json file one object.
    `include = "base.py"`, a path relative to the file, puts the keys of that file first. merge: the names whose dicts
    are joined with those of the included file. Raises UserError with file and line.
    """
    path = os.fspath(path)
    text, name = _read_text(path), _shorten(path, 200)
    real = os.path.realpath(path)
    if real in _open_files:
        cycle = [*_open_files[_open_files.index(real) :], real]
        raise UserError(f"{name}: include cycle: {' -> '.join(os.path.basename(file) for file in cycle)}")
    values = _parse_json(text, name) if path.endswith(".json") else _parse_python(text, name)
    if "include" in values:
        base = values.pop("include")
        if not isinstance(base, str) or not base.strip():
            raise UserError(f"{name}: include={show(base)}: must be the name of a config file")
        included = read_config_file(os.path.join(os.path.dirname(path), base), merge, (*_open_files, real))
        values = _merged(included, values, merge)
    return values


def read_regular(path: str | os.PathLike, most: int) -> bytes:
    """The bytes of a file of at most `most` bytes. Raises UserError, also for a pipe or device, which may never end."""
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
        if is_file:  # opening a pipe would wait for its writer
            with open(path, "rb") as file:
                data = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not is_file:
        raise UserError(f"{path}: is a folder, a pipe or a device, where a file is needed")
    if len(data) > most:
        raise UserError(f"{path}: has more than {most:,} bytes, which is too large for a file of this kind")
    return data


def _read_text(path):
    name = _shorten(path, 200)
    if not path.strip():
        raise UserError("the name of a config file is empty")
    if os.path.isdir(path):
        is_run = os.path.isfile(os.path.join(path, "ckpt.pt"))
        hint = f"; a run is named with a key, as in --checkpoint={name}" if is_run else ""
        raise UserError(f"{name}: is a folder, not a config file{hint}")
    if not os.path.exists(path):
        folder, file = os.path.split(path)
        try:
            near = _did_you_mean(file, [each for each in os.listdir(folder or ".") if each.endswith((".py", ".json"))])
        except (OSError, ValueError):
            near = ""
        raise UserError(f"{name}: no such config file{near}")
    if not path.endswith((".py", ".json")):
        raise UserError(f"{name}: a config file ends in .py or .json")
    try:
        text = read_regular(path, MOST_BYTES).decode("utf-8-sig")  # -sig: some editors write a byte order mark
    except UnicodeDecodeError:
        raise UserError(f"{name}: is not UTF-8 text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _parse_json(text, name):
    try:
        values = json.loads(text, object_pairs_hook=refuse_twice)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f'{name}: must be a JSON object, as in {{"n_layer": 6}}')
    try:
        check_size(values)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    return values


def refuse_twice(pairs: Iterable[tuple]) -> dict:
    """The dict of the pairs. UserError for a name that occurs twice: the first value would be dropped in silence."""
    found = {}
    for name, value in pairs:
        if name in found:
            raise UserError(f"the key {show(name)} stands there twice")
        found[name] = value
    return found


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
                    value = _evaluate(statement.value, values)
                    check_size(value)
                    values[target] = value
                case ast.Expr(value=ast.Constant(value=str())):
                    pass  # a docstring
                case _:
                    raise ValueError(ALLOWED)
        except OverflowError:
            raise UserError(f"{name} line {statement.lineno}: the result is too large") from None
        except (ValueError, ZeroDivisionError, RecursionError) as error:
            line = _shorten(text.split("\n")[statement.lineno - 1].strip())
            raise UserError(f"{name} line {statement.lineno}: {line}: {error}") from None
    return values


def check_size(value: object, most: int = MOST_BYTES) -> None:
    """Raises ValueError for a value that is nested too deep to be printed, or has more than `most` parts and letters.

    A part counts as often as it occurs: thirty lists, each holding the one before it twice, take little memory and
    would print a billion items.
    """
    left, size = [(value, 0)], 0
    while left:
        value, depth = left.pop()
        size += 1 + (len(value) if isinstance(value, str | list | tuple | dict | set) else 0)
        if size > most:
            raise ValueError("the value is too large")
        if depth > 50:
            raise ValueError("the value is nested too deep")
        if isinstance(value, dict):
            left += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list | tuple | set):
            left += [(part, depth + 1) for part in value]


def _evaluate(node, names):
    """The value of an expression made of literals, arithmetic and `names`. Raises ValueError or ArithmeticError."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.List():
            return [_evaluate(item, names) for item in node.elts]
        case ast.Tuple():
            return tuple(_evaluate(item, names) for item in node.elts)
        case ast.Dict() if all(isinstance(each, ast.Constant) for each in node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return refuse_twice((_evaluate(name, names), _evaluate(value, names)) for name, value in pairs)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name):
            near = _did_you_mean(name, [*names, "True", "False", "None"])
            raise ValueError(f"{show(name)} is not assigned above{near}; a string is written in quotes")
        case ast.UnaryOp(op=ast.USub()):
            return _calculate(operator.mul, -1, _evaluate(node.operand, names))
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            return _calculate(ARITHMETIC[type(node.op)], _evaluate(node.left, names), _evaluate(node.right, names))
    raise ValueError(ALLOWED)


def _calculate(function, left, right):
    if not {type(left), type(right)} <= {int, float}:
        raise ValueError("arithmetic is between numbers")
    if function is operator.pow:
        math.pow(left, right)  # as floats first, for the OverflowError: 9**9**9 would take hours, and all memory
    result = function(left, right)
    float(result)  # OverflowError: no number is larger than the largest float
    return result
