"""Arms as the product of mixers and variants, and claims about all of them.

    mixers = ["softmax", "gla"] variants = {"none": {}, "sigmoid": {"gate": "elementwise"},
    "native": {"gate": "native", "mixers": ["gla"]}}

gives the arms "softmax", "softmax sigmoid", "gla", "gla sigmoid" and "gla native", each with its
mixer as `attention`.

    "it helps": {"contrast": "sigmoid - none", "pool": mixers, "above": 0}
    "it helps MIXER": {"contrast": "sigmoid - none", "each": mixers, "above": 0}

The first claim is about the mean over the mixers, or about a sum such as "gla - 0.5 * softmax"; the
second one stands for a claim in each.
"""

import itertools
import re
from collections.abc import Iterable

import configurator
from base.rules import wrong_field
from configurator import UserError, show

NAMES = [(str, 1, 80), 1, 99]
PLACE = "MIXER"  # in the name of a claim in each mixer


def check_named(label: str, names: Iterable[str], choices: Iterable[str], kind: str) -> None:
    """Raises UserError for a name that is not one of the config's own names of arms or claims."""
    for name in names:
        if not choices:
            raise UserError(f"{label}={show(name)}: the experiment has no {kind}")
        configurator.check_choice(label, name, list(choices))


def arm_name(mixer: str, variant: str) -> str:
    return mixer if variant == "none" else f"{mixer} {variant}"


def all_arms(config) -> dict[str, dict]:
    """{arm: its keys}: mixers x variants, then config.arms; one that has the name of a product adds
    keys to it."""
    if bool(config.mixers) != bool(config.variants):
        raise UserError("mixers, variants: arms are the product of both; give the other one, too")
    if twice := sorted(set(config.variants) & set(config.arms)):
        raise UserError(f"arms, variants: both have {show(twice[0])}; rename one of them")
    arms: dict[str, dict] = {}
    for mixer, (variant, keys) in itertools.product(config.mixers, config.variants.items()):
        check_named(f"variants: {variant}: mixers", keys.get("mixers", []), config.mixers, "mixers")
        if mixer in keys.get("mixers", config.mixers):
            of_variant = {name: value for name, value in keys.items() if name != "mixers"}
            arms[arm_name(mixer, variant)] = {"attention": mixer} | of_variant
    return arms | {name: arms.get(name, {}) | keys for name, keys in config.arms.items()}


def arms_named(config, names: Iterable[str]) -> list[str]:
    """The arms that the names stand for: those of a variant in every mixer that has it, or the arm
    itself."""
    arms = []
    for name in names:
        in_mixers = (
            [arm_name(mixer, name) for mixer in config.mixers] if name in config.variants else []
        )
        arms += [arm for arm in in_mixers if arm in config.arms] or [name]
    return arms


def weights_of(label: str, text: str) -> dict[str, float]:
    """{name: weight} of a sum such as "0.5 * none - headwise". Raises UserError."""
    first, *rest = re.split(r" ([+-]) ", text.strip())
    terms = [
        ("-" * first.startswith("-"), first.removeprefix("-")),
        *zip(rest[::2], rest[1::2], strict=True),
    ]
    weights: dict[str, float] = {}
    for sign, term in terms:
        weight, _, name = term.rpartition(" * ")
        if name in weights or not re.fullmatch(r"(\d{1,9}(\.\d{1,9}|/[1-9]\d{,9})?)?", weight):
            raise UserError(
                f"{label}={show(text)}: write a sum of names, each once, as in 'none - 0.5 * sigmoid'"
            )
        top, _, bottom = (weight or "1").partition("/")
        weights[name] = float(f"{sign}1") * float(top) / float(bottom or 1)
    return weights


def with_base(base: dict, claim: dict) -> dict:
    """The claim with the keys of claim_base. Its own threshold, and its pool or each, take the
    place of those there; a reason for families there is that of the claims that have one."""
    for kinds in ({"above", "other_than", "within"}, {"pool", "each"}):
        if kinds & claim.keys():
            base = {name: value for name, value in base.items() if name not in kinds}
    if "family" not in base | claim:
        base = {name: value for name, value in base.items() if name != "family_reason"}
    return base | claim


def all_claims(config) -> dict[str, dict]:
    """{claim: its keys}, where a contrast of variants, with "pool" or "each", is written out as one
    of arms."""
    claims: list[tuple[str, dict]] = []
    for name, claim in config.claims.items():
        kinds, weights = (
            {"pool", "each"} & claim.keys(),
            weights_of(f"claims: {name}: contrast", claim["contrast"]),
        )
        if not kinds:
            claims.append((name, claim | {"contrast": weights}))
            continue
        if len(kinds) > 1 or (kinds == {"each"}) != (PLACE in name):
            words = f"it has pool or each; with each, and then alone, its name has {PLACE} in it"
            raise UserError(f"claims: {name}: {words}")
        (kind,), others = kinds, {key: claim[key] for key in claim if key not in kinds}
        mixers = claim[kind]
        if isinstance(mixers, str):
            pool = mixers = weights_of(f"claims: {name}: {kind}", mixers)
        elif wrong := wrong_field(mixers, NAMES, kind):
            raise UserError(f"claims: {name}: {wrong}")
        else:
            pool = dict.fromkeys(mixers, 1 / len(set(mixers)))
        check_named(f"claims: {name}: {kind}", mixers, config.mixers, "mixers")
        check_named(f"claims: {name}", weights, config.variants, "variants")
        each = [(name.replace(PLACE, mixer), {mixer: 1.0}) for mixer in mixers if kind == "each"]
        for label, of_mixers in each or [(name, pool)]:
            pairs = itertools.product(of_mixers.items(), weights.items())
            contrast = {
                arm_name(mixer, variant): share * weight
                for (mixer, share), (variant, weight) in pairs
            }
            claims.append((label, others | {"contrast": contrast}))
    return configurator.refuse_twice(claims)
