"""Arms as the product of mixers and variants, and claims about all of them.

    mixers = ["softmax", "gla"]
    variants = {
        "none": {},
        "sigmoid": {"gate": "elementwise"},
        "native": {"gate": "native", "mixers": ["gla"]},
    }

gives the arms "softmax", "softmax sigmoid", "gla", "gla sigmoid" and "gla native", each with its
mixer as `attention`.

    "it helps": {"contrast": "sigmoid - none", "pool": mixers, "above": 0}
    "it helps MIXER": {"contrast": "sigmoid - none", "each": mixers, "above": 0}

The first claim is about the mean over the mixers, or about a sum such as "gla - 0.5 * softmax"; the
second one stands for a claim in each.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction

from base import configurator
from base.configurator import UserError, show
from base.rules import wrong_field

NAMES = [(str, 1, 80), 1, 99]
NUMBER = (float, -1e9, 1e9)
CLAIM: dict = {  # as rules of rules.wrong_field
    "contrast": (str, 1, 999),
    "above?": NUMBER,
    "other_than?": NUMBER,
    "within?": (float, 1e-9, 1e9),
    "of?": [object, 1, 9],
    "sides?": (int, 1, 2),
    "in?": (int, 1, 999),
    "family?": (str, 1, 99),
    "family_reason?": (str, 1, 999),
    "exploratory?": (bool, 0, 1),
    "pool?": object,
    "each?": NAMES,
}
PLACE = "MIXER"  # in the name of a claim in each mixer
WEIGHT = re.compile(r"(\d{1,9}(\.\d{1,9}|/[1-9]\d{,9})?)?")


@contextlib.contextmanager
def about(label: str) -> Iterator[None]:
    """Puts what they are about before the UserErrors inside."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{label}: {error}") from None


def refuse(is_wrong: object, words: str) -> None:
    if is_wrong:
        raise UserError(words)


def check_entry(value: object, rule: object, name: str = "") -> None:
    """Raises UserError for a value that breaks a rule of rules.wrong_field."""
    wrong = wrong_field(value, rule, name)
    refuse(wrong, wrong)


def check_named(label: str, names: Iterable[str], choices: Iterable[str]) -> None:
    """Raises UserError for a name that is none of the choices."""
    for name in names:
        configurator.check_choice(label, name, list(choices) or ["(there are none)"])


def arm_name(mixer: str, variant: str) -> str:
    return mixer if variant == "none" else f"{mixer} {variant}"


def all_arms(config) -> dict[str, dict]:
    """{arm: its keys}: mixers x variants, then config.arms; one that has the name of a product adds
    keys to it."""
    refuse(
        bool(config.mixers) != bool(config.variants),
        "mixers, variants: arms are the product of both; give the other one, too",
    )
    twice = sorted(config.variants.keys() & config.arms)
    refuse(twice, f"arms, variants: both have {', '.join(twice)}; rename one of them")
    arms = {}
    for mixer in config.mixers:
        for variant, keys in config.variants.items():
            only = keys.get("mixers", config.mixers)
            check_named(f"variants: {variant}: mixers", only, config.mixers)
            if mixer in only:
                arm = {"attention": mixer} | keys
                arm.pop("mixers", None)
                arms[arm_name(mixer, variant)] = arm
    for name, keys in config.arms.items():
        arms[name] = arms.get(name, {}) | keys
    return arms


def arms_named(config, names: Iterable[str]) -> list[str]:
    """The arms that the names stand for: those of a variant in every mixer that has it, or the arm
    itself."""
    arms = []
    for name in names:
        of_variant = []
        if name in config.variants:
            in_mixers = [arm_name(mixer, name) for mixer in config.mixers]
            of_variant = [arm for arm in in_mixers if arm in config.arms]
        arms += of_variant or [name]
    return arms


def seeds_of_arms(config, arms: Iterable[str]) -> list[int]:
    """The seeds that all of the arms are run with."""
    seeds = config.seeds
    for arm in arms:
        of_arm = config.seeds_of.get(arm, seeds)
        seeds = [seed for seed in seeds if seed in of_arm]
    return seeds


def weights_of(text: str) -> dict[str, float]:
    """{name: weight} of a sum such as "0.5 * none - headwise". Raises UserError."""
    words = text.strip()
    signed = f"- {words[1:].lstrip()}" if words.startswith("-") else f"+ {words}"
    parts = re.split(r"(?:^| )([+-]) ", signed)[1:]
    weights = {}
    for sign, term in zip(parts[::2], parts[1::2], strict=True):
        weight, _, name = term.rpartition(" * ")
        refuse(
            name in weights or not WEIGHT.fullmatch(weight),
            f"{show(text)}: write a sum of names, each once, as in 'none - 0.5 * sigmoid'",
        )
        weights[name] = float(Fraction(sign + (weight or "1")))
    return weights


def with_base(base: dict, claim: dict) -> dict:
    """The claim with the keys of claim_base. Its own threshold, and its pool or each, take the
    place of those there."""
    for kinds in ({"above", "other_than", "within"}, {"pool", "each"}):
        if kinds & claim.keys():
            base = {name: value for name, value in base.items() if name not in kinds}
    return base | claim


def all_claims(config) -> dict[str, dict]:
    """{claim: its keys}, where a contrast of variants, with "pool" or "each", is written out as one
    of arms."""
    claims = []
    for name, claim in config.claims.items():
        with about(f"claims: {name}"):
            claims += written_out(config, name, with_base(config.claim_base, claim))
    return configurator.refuse_twice(claims)


def written_out(config, name: str, claim: dict) -> list[tuple[str, dict]]:
    """[(name, claim about arms)] that a claim stands for."""
    check_entry(claim, CLAIM)
    check_named("its key", claim, [part.rstrip("?") for part in CLAIM])
    weights = weights_of(claim["contrast"])
    kinds = {"pool", "each"} & claim.keys()
    if not kinds:
        return [(name, claim | {"contrast": weights})]
    refuse(
        len(kinds) > 1 or ("each" in kinds) != (PLACE in name),
        f"it has pool or each; with each, and then alone, its name has {PLACE} in it",
    )
    (kind,) = kinds
    mixers = claim.pop(kind)
    if isinstance(mixers, str):
        pool = weights_of(mixers)
    else:
        check_entry(mixers, NAMES, kind)
        pool = dict.fromkeys(mixers, 1 / len(set(mixers)))
    check_named(kind, pool, config.mixers)
    check_named("contrast", weights, config.variants)
    groups = [(name, pool)]
    if kind == "each":
        groups = [(name.replace(PLACE, mixer), {mixer: 1.0}) for mixer in mixers]
    claims = []
    for group_name, group in groups:
        contrast = {}
        for mixer, share in group.items():
            for variant, weight in weights.items():
                contrast[arm_name(mixer, variant)] = share * weight
        claims.append((group_name, claim | {"contrast": contrast}))
    return claims
