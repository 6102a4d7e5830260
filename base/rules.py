"""
What a value from outside may be: a key of a command line, a field of a meta file, of a row, of
somebody's model.

    wrong_field(3, (int, 0, 9))                             None: nothing is wrong
    wrong_field({"a": "x"}, {"a": (int, 0, 9)}, "meta")     "meta.a='x': must be a whole number of at least 0 and ..."

A rule is one of

    Rule(int, above=0)          of a type, with limits: of a number itself, and of the length of a text, list or dict
    (int, least, most)          short for Rule(int, at_least=least, at_most=most)
    (int, least, most, None)    the same, or None
    {"a", "b"}                  one of these texts
    [rule, least, most]         a list of that length, every item by the rule
    {"a": rule, "b?": rule}     a dict that has these names, and maybe others; b may be missing
    {str: rule, "a": rule}      a dict of any names, every other value by the first rule
    object                      anything

configurator.key makes such a rule of a key's annotation and limits. No torch is imported here.
"""

import dataclasses
import difflib
import operator
from collections.abc import Collection
from typing import Any

KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "a dict",
}
LIMITS = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


class UserError(ValueError):
    """A mistake that a user can fix. Its text is one line of at most 900 characters, with line ends
    escaped."""

    def __init__(self, text):
        text = escape(text)
        super().__init__(text if len(text) <= 900 else f"{text[:450]} ... {text[-400:]}")


class DataError(UserError):
    """A UserError about a data set that is not there or does not fit the run. advice: what to do
    about it, in place of which configurator.report names the command of a config file, where that
    has one."""

    def __init__(self, text, advice=""):
        super().__init__(f"{text}; {advice}" if advice else text)
        self.text = escape(text)


@dataclasses.dataclass
class Rule:
    """A type with its limits. `items` is the rule of a list's items."""

    kind: type
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple = ()
    optional: bool = False
    items: Any = None

    def allows(self, value: Any) -> bool:
        """Whether the value has the type and keeps the limits. The items of a list are not looked
        at."""
        if value is None:
            return self.optional
        # true is no number, and an int of a thousand digits is no float
        is_kind = (
            type(value) is self.kind
            or self.kind is float
            and type(value) is int
            and abs(value) < 1 << 63
        )
        if not is_kind or self.choices and value not in self.choices:
            return False
        size = len(value) if isinstance(value, str | list | dict) else value
        return all(
            keeps(size, limit)
            for name, keeps in LIMITS.items()
            if (limit := getattr(self, name)) is not None
        )

    def words(self, value: object = None) -> str:
        """What is allowed. `value` is what was given: it decides the nearest choice."""
        if self.choices:
            hint = "" if value is None else did_you_mean(value, self.choices)
            text = f"one of {', '.join(map(str, self.choices))}{hint}"
        else:
            limits = [(name, x) for name in LIMITS if (x := getattr(self, name)) is not None]
            # the limits of 64 bits, or of float32, go without saying, but for the one that the
            # value breaks
            limits = [(name, x) for name, x in limits if abs(x) < 1 << 50 or breaks(value, name, x)]
            said = " and ".join(f"{name.replace('_', ' ')} {x}" for name, x in limits)
            of = " of" * (said[:2] == "at") if self.kind in (int, float) else " of length"
            text = KINDS[self.kind] + f"{of} {said}" * (said != "" and self.kind is not bool)
            if self.kind is str and said == "at least 1":
                text = "a text that is not empty"
        return text + ", or None" * self.optional


def breaks(value: Any, name: str, limit: float) -> bool:
    """Whether the value is a number beyond the limit, one of LIMITS."""
    return type(value) in (int, float) and not LIMITS[name](value, limit)


def wrong_field(value: Any, rule: Any, name: str = "") -> str | None:
    """Says in words what is wrong with a value, whose name is given, or returns None if it obeys
    the rule."""
    if rule is object:
        return None
    if isinstance(rule, tuple):
        kind, least, most, *none = rule
        rule = Rule(kind, at_least=least, at_most=most, optional=bool(none))
    elif isinstance(rule, set):
        rule = Rule(str, choices=tuple(sorted(rule)))
    elif isinstance(rule, list):
        items, least, most = rule
        rule = Rule(list, at_least=least, at_most=most, items=items)
    if isinstance(rule, Rule):
        if not rule.allows(value):
            return wrong(name or "it", value, rule.words(value))
        parts = (
            [(f"{name}[{i}]", part, rule.items) for i, part in enumerate(value)]
            if value and rule.items
            else []
        )
    elif type(value) is not dict or any(type(key) is not str or len(key) > 99 for key in value):
        return wrong(name or "it", value, "a dict, its names texts of at most 99 characters")
    else:
        named = {key: inner for key, inner in rule.items() if key is not str}
        rules = dict.fromkeys(value, rule[str]) if str in rule else {}
        rules |= {
            key.rstrip("?"): named[key] for key in named if key[-1] != "?" or key[:-1] in value
        }
        if missing := next((key for key in rules if key not in value), None):
            return f"{name or 'it'} has no {missing}"
        parts = [
            (f"{name}.{key}" if name else key, value[key], inner) for key, inner in rules.items()
        ]
    return next(
        (words for where, part, inner in parts if (words := wrong_field(part, inner, where))), None
    )


def wrong(name: str, value: object, allowed: str) -> str:
    return f"{name}={show(value)}: must be {allowed}"


def did_you_mean(word: object, candidates: Collection) -> str:
    """In brackets, "did you mean 'n_layer'?", or nothing where no candidate is near."""
    word = show(word).strip("'").lower()
    near = difflib.get_close_matches("cuda" if word == "gpu" else word, map(str, candidates), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def show(value: object) -> str:
    """repr(value), cut to 60 characters."""
    try:
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."
    # an int of more than 4,300 digits; lists nested a thousand deep; a tensor of packed bits
    except Exception:
        return f"<a very large {type(value).__name__}>"


def escape(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
