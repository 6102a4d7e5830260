"""Arms as the product of mixers and variants, and claims about all of them.

    mixers = ["softmax", "gla"]
    variants = {"none": {}, "sigmoid": {"gate": "elementwise"}, "native": {"gate": "native", "mixers": ["gla"]}}

gives the arms "softmax", "softmax sigmoid", "gla", "gla sigmoid" and "gla native", each with its mixer as `attention`.

    "it helps": {"contrast": {"sigmoid": 1, "none": -1}, "pool": mixers, "above": 0}
    "it helps MIXER": {"contrast": {"sigmoid": 1, "none": -1}, "each": mixers, "above": 0}

The first claim is about the mean over the mixers, or about a weighted sum, {mixer: weight}; the second one stands for a
claim in each.
"""

import configurator
from configurator import UserError, show

import itertools
from collections.abc import Iterable

from rules import wrong_field

WEIGHTS = {str: (float, -1e9, 1e9)}
NAMES = [(str, 1, 80), 1, 99]
PLACE = "MIXER"  # in the name of a claim in each mixer


def check_named(label: str, value: object, choices: Iterable[str], kind: str) -> None:
    """Raises UserError for a value that is not one of the config's own names of arms, claims or settings."""
    if not choices:
        raise UserError(f"{label}={show(value)}: the experiment has no {kind}")
    configurator.check_choice(label, value, list(choices))


def arm_name(mixer: str, variant: str) -> str:
    return mixer if variant == "none" else f"{mixer} {variant}"


def all_arms(config) -> dict[str, dict]:
    """{arm: its keys}: mixers x variants, then config.arms; one that has the name of a product adds keys to it."""
    if bool(config.mixers) != bool(config.variants):
        raise UserError("mixers, variants: arms are the product of both; give the other one, too")
    if twice := sorted(set(config.variants) & set(config.arms)):
        raise UserError(f"arms, variants: both have {show(twice[0])}; rename one of them")
    for variant, keys in config.variants.items():
        for mixer in keys.get("mixers", []):
            check_named(f"variants: {variant}: mixers", mixer, config.mixers, "mixers")
    arms: dict[str, dict] = {}
    for mixer, (variant, keys) in itertools.product(config.mixers, config.variants.items()):
        if mixer in keys.get("mixers", config.mixers):
            arm = {"attention": mixer} | {name: value for name, value in keys.items() if name != "mixers"}
            if "init_from_arm" in arm:
                arm["init_from_arm"] = arm_name(mixer, arm["init_from_arm"])
            arms[arm_name(mixer, variant)] = arm
    return arms | {name: arms.get(name, {}) | keys for name, keys in config.arms.items()}


def arms_named(config, names: Iterable[str]) -> list[str]:
    """The arms that the names stand for: those of a variant in every mixer that has it, or the arm itself."""
    arms = []
    for name in names:
        in_mixers = [arm_name(mixer, name) for mixer in config.mixers] if name in config.variants else []
        arms += [arm for arm in in_mixers if arm in config.arms] or [name]
    return arms


def all_claims(config) -> dict[str, dict]:
    """{claim: its keys}, where a contrast of variants, with "pool" or "each", is written out as one of arms."""
    claims: list[tuple[str, dict]] = []
    for name, claim in config.claims.items():
        if not {"pool", "each"} & claim.keys():
            claims.append((name, claim))
            continue
        check_pool(config, name, claim)
        rest = {key: claim[key] for key in claim if key not in ("pool", "each")}
        pool = claim.get("pool", {})
        weights = pool if isinstance(pool, dict) else dict.fromkeys(pool, 1 / len(set(pool)))
        pools = [(name.replace(PLACE, mixer), {mixer: 1.0}) for mixer in claim.get("each", [])] or [(name, weights)]
        claims += [(name, rest | {"contrast": over(claim["contrast"], mixers)}) for name, mixers in pools]
    return configurator.refuse_twice(claims)


def with_base(base: dict, claim: dict) -> dict:
    """The claim with the keys of claim_base. Its own threshold, and its pool or each, take the place of those there."""
    for kinds in ({"above", "other_than", "within"}, {"pool", "each"}):
        if kinds & claim.keys():
            base = {name: value for name, value in base.items() if name not in kinds}
    return base | claim


def over(contrast: dict[str, float], mixers: dict[str, float]) -> dict[str, float]:
    """{arm: weight}: the contrast of variants in each of the mixers, times the weight of the mixer."""
    return {arm_name(mixer, v): share * weight for mixer, share in mixers.items() for v, weight in contrast.items()}


def check_pool(config, name: str, claim: dict) -> None:
    """Raises UserError unless the claim pools variants over mixers, or stands for one in each."""
    kind = "pool" if "pool" in claim else "each"
    if "pool" in claim and "each" in claim or (kind == "each") != (PLACE in name):
        raise UserError(f"claims: {name}: it has pool or each; with each, and then alone, its name has {PLACE} in it")
    rule = WEIGHTS if isinstance(claim[kind], dict) else NAMES
    if wrong := wrong_field(claim, {kind: rule, "contrast": WEIGHTS}):
        raise UserError(f"claims: {name}: {wrong}")
    for mixer in claim[kind]:
        check_named(f"claims: {name}: {kind}", mixer, config.mixers, "mixers")
    for variant in claim["contrast"]:
        check_named(f"claims: {name}", variant, config.variants, "variants")
