"""
What a value from outside may be: a key of a command line, a field of a meta file, of a row, of
somebody's model.

    wrong_field(3, (int, 0, 9))                             None: nothing is wrong
    wrong_field({"a": "x"}, {"a": (int, 0, 9)}, "meta")     "meta.a='x': must be a whole ..."

A rule is one of

    Rule(int, above=0)          of a type, with limits: of a number, or of the length of a text,
                                list or dict
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


@dataclasses.dataclass
class Rule:
    """A type with its limits. `items` is the rule of a list's items."""

    kind: type
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: Collection = ()
    optional: bool = False
    items: Any = None

    def __post_init__(self):
        self.choices = tuple(self.choices)

    def allows(self, value: Any) -> bool:
        """Whether the value has the type and keeps the limits. The items of a list are not looked
        at."""
        if value is None:
            return self.optional
        is_kind = type(value) is self.kind  # true is no number
        if self.kind is float and type(value) is int:
            is_kind = abs(value) < 1 << 63  # an int of a thousand digits is no float
        if not is_kind or self.choices and value not in self.choices:
            return False
        size = len(value) if isinstance(value, str | list | dict) else value
        for name, keeps in LIMITS.items():
            limit = getattr(self, name)
            if limit is not None and not keeps(size, limit):
                return False
        return True

    def words(self, value: object = None) -> str:
        """What is allowed. `value` is what was given: it decides the nearest choice."""
        if self.choices:
            hint = "" if value is None else did_you_mean(value, self.choices)
            text = f"one of {', '.join(map(str, self.choices))}{hint}"
        else:
            text = KINDS[self.kind] + self.words_of_limits()
        return f"{text}, or None" if self.optional else text

    def words_of_limits(self) -> str:
        """ " of at least 1 and below 5", or nothing."""
        limits = []
        for name in LIMITS:
            limit = getattr(self, name)
            # those of 64 bits, or of float32, go without saying
            if limit is not None and abs(limit) < 1 << 50:
                limits.append(f"{name.replace('_', ' ')} {limit}")
        words = " and ".join(limits)
        if not words or self.kind is bool:
            return ""
        if self.kind not in (int, float):
            return f" of length {words}"
        return f" of {words}" if words.startswith("at") else f" {words}"


def wrong_field(value: Any, rule: Any, name: str = "") -> str | None:
    """Says in words what is wrong with a value, whose name is given, or returns None if it obeys
    the rule."""
    if rule is object:
        return None
    if isinstance(rule, dict):
        return wrong_in_dict(value, rule, name)
    rule = as_rule(rule)
    if not rule.allows(value):
        return wrong(name or "it", value, rule.words(value))
    if value and rule.items:
        for i, item in enumerate(value):
            words = wrong_field(item, rule.items, f"{name}[{i}]")
            if words:
                return words
    return None


def as_rule(rule: Any) -> Rule:
    """The Rule that is meant by a tuple, a set or a list."""
    if isinstance(rule, tuple):
        kind, least, most, *none = rule
        return Rule(kind, at_least=least, at_most=most, optional=bool(none))
    if isinstance(rule, set):
        return Rule(str, choices=sorted(rule))
    if isinstance(rule, list):
        items, least, most = rule
        return Rule(list, at_least=least, at_most=most, items=items)
    return rule


def wrong_in_dict(value: Any, rules: dict, name: str) -> str | None:
    """wrong_field of a dict, whose rules are {"a": rule, "b?": rule, str: the rule of others}."""
    if type(value) is not dict or any(type(key) is not str for key in value):
        return wrong(name or "it", value, "a dict whose names are texts")
    for key in rules:
        if key is not str and not key.endswith("?") and key not in value:
            return f"{name or 'it'} has no {key}"
    of_others = rules.get(str, object)
    for key, item in value.items():
        rule = rules.get(key, rules.get(f"{key}?", of_others))
        words = wrong_field(item, rule, f"{name}.{key}" if name else key)
        if words:
            return words
    return None


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
