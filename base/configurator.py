"""
The settings of a script: a dataclass of keys, set by config files and by --key=value, and checked
before any work.

    @dataclasses.dataclass
    class Config:
        n_layer: int = key(12, "number of blocks", at_least=1)
        device: str = key("auto", "where to run", choices=("auto", "cpu", "cuda", "mps"))

    config = load(Config, argv)    # python train.py config/small.py --n_layer=6

    begin(__name__, Config)    # on top of a script, before it imports torch

The annotation gives the type: int, float, bool, str, dict or list[...] of one of them, each also as
`... | None`; key() adds the limits (base/rules.py). A text may be empty only where its key says
at_least=0. Config files apply first, in their order, then the -- words, in theirs; the later value
wins. A config file looks as in nanoGPT (`batch_size = 5 * 8`), but it is parsed and never executed;
a JSON file holds an object of keys, as the config.json of a run does.
Every mistake that a user can fix is a UserError of one line; a script that ends in
`configurator.run(main)` prints it. What begin() calls imports no torch, so that --help and a slip
in the command line take a tenth of a second.
"""

import ast
import copy
import ctypes
import dataclasses
import functools
import json
import operator
import os
import signal
import sys
import traceback
import typing
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from base.files import find_path, is_of_memory, one_line, parse_json, read_regular, refuse_twice
from base.rules import Rule, UserError, did_you_mean, escape, show, wrong, wrong_field
from base.streams import end_at_once_by, open_streams


def begin(name: str, config_class: type, positional: str | None = "config") -> None:
    """Every script calls this first, with its __name__; where it is imported, nothing happens. Sets
    what OpenMP and glibc do, prints --help, or the mistake of the command line that can be found
    without torch, and exits."""
    if name != "__main__":
        return
    set_up()

    def check_words(argv):
        values = read_words(config_class, argv, positional)
        if not values.get("dry_run"):  # which goes on without the data
            find_files(config_class, values)

    run(check_words)
    # until run(main): an interrupt while torch is imported would print a traceback
    end_at_once_by(signal.SIGINT)


def set_up() -> None:
    """Opens the standard streams that are closed (base/streams.py). Tells OpenMP's threads to sleep
    where they wait: ones that spin are three times slower on a busy machine. Tells glibc to keep
    what is freed: it would return large blocks, and every step would fault them in again."""
    open_streams()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


def run(main: Callable, needs_stdout: bool = True) -> None:
    """Calls main(argv) as the whole of a script. A UserError ends it with status 2, an interrupt
    with 130, and what the machine refuses (a full disk, little memory) with 1; each prints one
    line. Other exceptions keep their traceback. SIGTERM, SIGHUP and SIGUSR1 print a line and end it
    at once, unless main handles them.

    needs_stdout: what the script prints is its result. Where standard output fails, it ends: with
    status 141 if the reader is gone (`sample.py | head`), with 1 if a disk is full. A script whose
    result is files (train.py, experiment.py, bench.py) goes on without standard output. No script
    needs standard error, or standard input.
    """
    open_streams(needs_stdout)
    end_at_once_by(signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # KeyboardInterrupt: what was begun is cleaned up
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(report(error))


def report(error: BaseException) -> Any:
    """Prints on standard error why a script ends, and returns its exit status. Under torchrun each
    process prints its own line: which one ends first is not known."""
    reason = escape(str(error).strip().partition("\n")[0][:300])
    status = 1
    if isinstance(error, SystemExit):
        return error.code or 0
    elif isinstance(error, UserError):
        status = 2
        line = f"error: {error}"
    elif isinstance(error, KeyboardInterrupt):
        status = 130
        line = "interrupted"
    elif is_of_memory(error):
        reason = reason or "malloc failed"
        line = f"error: not enough memory ({reason}); lower batch_size or the model"
    elif isinstance(error, OSError):
        line = f"error: {reason}"
    else:
        line = "".join(traceback.format_exception(error)).rstrip()
    print(line, file=sys.stderr)
    return status


CONFIGS = (".py", ".json")  # how a config file's name ends
# 64 bits, and float32: the values go into tensors
WIDEST = {int: 2**63 - 1, float: 3.4028234663852886e38}
# as JSON spells them, and as people do
LITERALS = {"true": True, "false": False, "null": None, "none": None}


def key(default: Any, help: str, *, merge=False, find: Callable | None = None, **checks) -> Any:
    """A dataclass field with its checks, those of rules.Rule; in a list they hold for each item.
    `help` is one line.

    merge: a later dict is added to the earlier ones instead of replacing them. find(value) raises
    UserError where the file that the value names is not there.
    """
    metadata = dict(default=default, help=help, merge=merge, find=find, checks=checks)
    if not isinstance(default, list | dict):
        return dataclasses.field(default=default, metadata=metadata)
    return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)


@functools.cache  # an experiment builds hundreds of configs each time it looks for its next run
def rules_of(config_class: type) -> dict[str, Rule]:
    """The rule of each key of a class."""
    hints = typing.get_type_hints(config_class)
    rules = {}
    for field in dataclasses.fields(config_class):
        if field.init:
            rules[field.name] = _rule_of(hints[field.name], field.metadata.get("checks", {}))
    return rules


def _rule_of(hint, checks):
    parts = typing.get_args(hint)
    if type(None) in parts:  # `list[int] | None`
        return dataclasses.replace(_rule_of(parts[0], checks), optional=True)
    if typing.get_origin(hint) is list:
        return Rule(list, items=_rule_of(parts[0], checks))
    limits = {}
    if hint in WIDEST:
        limits = {"at_least": -WIDEST[hint], "at_most": WIDEST[hint]}
    elif hint is str and "choices" not in checks:
        # --out_dir=$OUT where OUT is not set: an empty name would be taken for the default, or for
        # the working folder
        limits = {"at_least": 1}
    return Rule(hint, **limits | checks)


def build(config_class: type, values: dict, source: str = "") -> Any:
    """An instance of config_class from a dict, with every value checked. Text is read by the type
    of its key: "1e3" sets an int to 1000. Messages begin with `source`. Raises UserError, as the
    class's __post_init__ may, too."""
    return config_class(**_check(config_class, values, source))


def check(instance: object) -> None:
    """Checks and converts the values of an instance as `build` does, for the __post_init__ of its
    class."""
    vars(instance).update(_check(type(instance), vars(instance)))


def check_choice(label: str, value: object, choices: Collection) -> None:
    """Raises a UserError if the value is not one of the choices; the message names the nearest
    one."""
    if value not in choices:
        raise UserError(wrong(label, value, Rule(str, choices=choices).words(value)))


def _check(config_class, values, source=""):
    rules = rules_of(config_class)
    prefix = f"{source}: " if source else ""
    unknown = [name for name in values if name not in rules]
    elsewhere = getattr(config_class, "elsewhere", {})
    for name in unknown:
        if name in elsewhere:
            raise UserError(f"{prefix}unknown key {show(name)}: here it is {elsewhere[name]}")
    if unknown:
        hint = did_you_mean(unknown[0], [*rules, "config_override"])
        raise UserError(f"{prefix}unknown key {show(unknown[0])}{hint}")
    checked = {}
    for name, value in values.items():
        checked[name] = _read(value, rules[name])
        words = wrong_field(checked[name], rules[name], prefix + name)
        if words:
            raise UserError(words)
    return checked


def _read(value, rule):
    """The value as the type that the rule asks for. One that cannot be read stays as it is, and
    breaks the rule."""
    kind = rule.kind
    if kind is str:
        word = str(value).lower()
        if word in ("true", "false") and word in rule.choices:  # nanoGPT's compile = False
            return word
        # gate="none" is a name
        return None if rule.optional and value in ("None", "null") else value
    if isinstance(value, str):
        text = value.strip()
        if kind is list and text != "None" and text[:1] not in ("[", "("):
            words = [word.strip() for word in text.split(",")] if text else []
            return value if "" in words else [_read(word, rule.items) for word in words]
        try:
            value = _evaluate(ast.parse(text, mode="eval").body, LITERALS)
        except (ValueError, ArithmeticError, SyntaxError, RecursionError, MemoryError):
            return value
    if kind is list and isinstance(value, list | tuple):
        return [_read(item, rule.items) for item in value]
    if type(value) not in (int, float):  # True is none: batch_size = True is no batch of one
        return value
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    if kind is float and abs(value) < 1e300:
        return float(value)
    return bool(value) if kind is bool and value in (0, 1) else value


def load(config_class: type, argv: list[str], positional: str | None = "config") -> Any:
    """An instance of config_class from the words of a command line, as read_words reads them.
    Raises UserError."""
    return config_class(**read_words(config_class, argv, positional))


def read_words(config_class: type, argv: list[str], positional: str | None = "config") -> dict:
    """{key: value} of a command line, each checked by itself. --help prints every key and exits.

    positional="config": words without dashes are config files or, by their end, the checkpoint of a
    script that has such a key. positional=NAME: they become the items of that list key.
    positional=None: such words are refused.
    """
    if "--help" in argv or "-h" in argv:
        print(_help(config_class, positional), flush=True)
        raise SystemExit(0)
    # spelling is checked before files: the mistake in `--batch_size 4 config.py` is not that no
    # file is called 4
    rules = rules_of(config_class)
    flags = [f"--{name}" for name, rule in rules.items() if rule.kind is bool]
    words = []
    settings = []  # (dict, the file that it is from); the later one wins
    words_left = iter(argv)
    for word in words_left:
        if word in flags:
            word += "=true"
        if word == "--config_override":  # as others write it, with a space
            word += "=" + next(words_left, "")
        name, equals, text = word.lstrip("-").partition("=")
        if name == "out_dir" and name not in rules and "checkpoint" in rules:
            name = "checkpoint"  # as of nanoGPT's sample.py
        if word.startswith("--") and equals and name:
            values = parse_json(text, name) if name == "config_override" else {name: text}
            if not isinstance(values, dict):
                raise UserError('config_override: must be a JSON object, as in {"n_layer": 6}')
            settings.append((values, ""))
        elif word.startswith("-") or positional is None:
            raise UserError(f"{show(word)}: write --key=value")
        elif positional == "config" and "checkpoint" in rules and not word.endswith(CONFIGS):
            settings.append(({"checkpoint": word}, ""))
        else:
            words.append(word)

    fields = dataclasses.fields(config_class)
    merge = [field.name for field in fields if field.metadata.get("merge")]
    if positional == "config":
        settings = [(read_config_file(word, merge), word) for word in words] + settings
    elif words:
        settings = [({positional: words}, ""), *settings]
    values = {}
    for later, source in settings:
        values = _merged(values, _check(config_class, later, source), merge)
    return values


def find_files(config_class: type, values: dict) -> None:
    """Raises UserError where a file that a key names is not there."""
    for field in dataclasses.fields(config_class):
        find = field.metadata.get("find")
        # a run that starts from a checkpoint takes the keys that are not given from it, and an
        # import of a model needs no data
        is_meant = field.name in values or not {"init_from", "from_hf"} & set(values)
        if find and is_meant:
            named = values.get(field.name, field.metadata["default"])
            for path in named if isinstance(named, list) else [named]:
                if path is not None:
                    find(path)


def _merged(before, after, merge):
    """Both dicts in one. The later value of a name wins; under a name in `merge`, two dicts are
    joined likewise."""
    values = before | after
    for name in merge:
        if isinstance(before.get(name), dict) and isinstance(after.get(name), dict):
            values[name] = before[name] | after[name]
    return values


def _help(config_class, positional):
    words = {"config": " [config.py ...]", None: ""}.get(positional, f" [{positional} ...]")
    about = (sys.modules["__main__"].__doc__ or "").strip()  # python -OO drops it
    lines = [f"usage: python {sys.argv[0]}{words} [--key=value ...]", "", about, "", "keys:", ""]
    for name, rule in rules_of(config_class).items():
        metadata = config_class.__dataclass_fields__[name].metadata
        default = metadata["default"]
        if not isinstance(default, str | None):
            default = json.dumps(default)
        allowed = f"a list, each item {rule.items.words()}" if rule.items else rule.words()
        lines.append(f"  --{name}={escape(str(default))}")
        lines.append(f"        {metadata['help']} ({allowed})")
    lines.append("  --config_override={}")
    lines.append("        several keys at once (a JSON object)")
    return "\n".join(lines)


ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
ALLOWED = (
    "allowed are lines `name = value`, where a value is a number, string, True, False, None, "
    "list, tuple, dict, + - * / between numbers, or a name assigned above"
)


def read_config_file(path: str | os.PathLike, merge: Iterable[str] = ()) -> dict:
    """The keys of a config file, unchecked. `include = "base.py"`, a path relative to the file,
    puts the keys of that file first; under the names in `merge` its dicts are joined with these. A
    JSON file gives its object, or the keys in the config.json of a run. Raises UserError with file
    and line."""
    path = os.fspath(path)
    if not path.endswith(CONFIGS):
        raise UserError(f"{path!r}: a config file ends in .py or .json")
    find_path(path)
    content = read_regular(path, 1 << 20)
    if path.endswith(".json"):
        values = parse_json(content, path)
        if isinstance(values, dict) and "run_id" in values:
            values = values.get("config")
        if not isinstance(values, dict):
            raise UserError(f'{path}: must be a JSON object, as in {{"n_layer": 6}}')
        return values
    values = {}
    line = 1
    try:
        for statement in ast.parse(content).body:
            line = statement.lineno
            match statement:
                case ast.Assign(targets=[ast.Name(id=target)]):
                    values[target] = _evaluate(statement.value, values)
                case ast.Expr(value=ast.Constant(value=str())):
                    pass  # a docstring
                case _:
                    raise ValueError(ALLOWED)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", line)
        words = getattr(error, "msg", str(error)) or "nested too deep"
        raise UserError(f"{path} line {line}: {words}") from None
    if "include" in values:
        with one_line(f"{path}: its include leads back to it", RecursionError):
            base = read_config_file(Path(path).parent / str(values.pop("include")), merge)
        values = _merged(base, values, merge)
    return values


def _evaluate(node, names):
    """The value of an expression made of literals, arithmetic and `names`. Raises ValueError or
    ArithmeticError."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.List() | ast.Tuple():
            items = [_evaluate(item, names) for item in node.elts]
            return items if isinstance(node, ast.List) else tuple(items)
        case ast.Dict() if all(isinstance(name, ast.Constant) for name in node.keys):
            keys = [_evaluate(name, names) for name in node.keys]
            values = [_evaluate(value, names) for value in node.values]
            return refuse_twice(zip(keys, values, strict=True))
        case ast.Name(id=name):
            if name not in names:
                near = did_you_mean(name, [*names, "True", "False", "None"])
                raise ValueError(
                    f"{show(name)} is not assigned above{near}; a string is written in quotes"
                )
            return names[name]
        case ast.UnaryOp() | ast.BinOp() if type(node.op) in ARITHMETIC:
            parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
            numbers = [_evaluate(part, names) for part in parts]
            if not set(map(type, numbers)) <= {int, float}:
                raise ValueError("arithmetic is between numbers")
            result = ARITHMETIC[type(node.op)](*numbers)
            float(result)  # OverflowError: a product of products would take hours, and all memory
            return result
    raise ValueError(ALLOWED)
