"""Arms as the product of mixers and variants, and claims that are pooled over mixers or made in each.

test_rows.py compares the arms and the claims of results/ with their rows.
"""

import re

import pytest
from made_rows import ROOT, every_run, listed

from base import configurator
from study import arms

VARIANTS = {"none": {}, "sigmoid": {"gate": "elementwise"}, "native": {"gate": "native", "mixers": ["gla", "mamba2"]}}
MIXERS = ["softmax", "gla", "mamba2"]
HELPS = {"contrast": "sigmoid - none", "above": 0.0}


def product(**keys):
    return listed(**dict(mixers=MIXERS, variants=VARIANTS, arms={}, claim_base={"exploratory": True}) | keys)


def test_seeds_scores_and_first_arms_may_name_a_variant():
    config = product(
        seeds_of={"native": [1], "softmax sigmoid": [0]}, first_arms=["none", "gla native"], scores={"x": {}},
        scores_of={"x": ["native", "softmax"]},
    )  # fmt: skip
    assert config.seeds_of == {"gla native": [1], "mamba2 native": [1], "softmax sigmoid": [0]}
    assert config.first_arms == ["softmax", "gla", "mamba2", "gla native"]
    assert config.scores_of == {"x": ["gla native", "mamba2 native", "softmax"]}


def test_runs_are_those_of_seeds_of_and_those_of_first_arms_go_first_in_all_seeds():
    def runs_with(**keys):
        config = listed(arms={"a": {}, "b": {}, "c": {}}, **keys)
        return [(run["arm"], run["seed"]) for run in every_run(config)]

    by_seed = [(arm, seed) for seed in (0, 1) for arm in "abc"]
    assert runs_with() == by_seed and runs_with(seeds_of={"b": [1]}) == [run for run in by_seed if run != ("b", 0)]
    first = [("b", 0), ("c", 0), ("b", 1), ("c", 1), ("a", 0), ("a", 1)]
    assert runs_with(first_arms=["c", "b"]) == first


def test_a_pool_may_be_a_weighted_sum_of_mixers():
    config = product(claims={"more": HELPS | {"contrast": "0.5 * sigmoid", "pool": "gla - softmax"}})
    assert config.claims["more"]["contrast"] == {"gla sigmoid": 0.5, "softmax sigmoid": -0.5}


def test_a_sum_in_words_is_weights_and_a_wrong_one_is_one_line(helpers):
    assert arms.weights_of("- 0.5 * none + sigmoid") == {"none": -0.5, "sigmoid": 1.0}
    assert arms.weights_of("-1/2 * a, b+c + 3 * d - 0.25 * none") == {"a, b+c": -0.5, "d": 3.0, "none": -0.25}
    for text in ("none - none", "a * b", "1e9 * none", "1/0 * none"):
        assert "write a sum of names, each once" in helpers.error_of(arms.weights_of, text)


def test_the_claims_of_the_documents_are_claims(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/experiments.md").read_text(), re.DOTALL)
    shown = [block for block in blocks if "claims = {" in block]
    names = "gated", "none", "small gated", "small", "large gated", "large", "matched", "wide half", "wide one"
    for block in shown:
        (file := tmp_path / "shown.py").write_text(block)
        keys = configurator.read_config_file(file)
        given = {"arms": {} if "mixers" in keys else dict.fromkeys(names, {})}
        assert listed(seeds=list(range(9)), **given, **keys).claims
    assert len(shown) == 2


@pytest.mark.parametrize(
    "keys, expected",
    [
        (dict(mixers=[]), "mixers, variants: arms are the product of both; give the other one, too"),
        (dict(variants={"none": 3}), "variants.none=3: must be a dict"),
        (dict(variants={"none": {"mixers": ["glaa"]}}), "variants: none: mixers='glaa': must be one of softmax, gla"),
        (dict(arms={"sigmoid": {}}), "arms, variants: both have sigmoid; rename one of them"),
        (dict(claims={"a": HELPS | {"pool": []}}), "claims: a: pool=[]: must be a list"),
        (dict(claims={"a": HELPS | {"pool": ["glaa"]}}), "claims: a: pool='glaa': must be one of softmax, gla, mamba2"),
        (
            dict(claims={"a": HELPS | {"pool": MIXERS, "contrast": "lat"}}),
            "claims: a: contrast='lat': must be one of none",
        ),
        (dict(claims={"a": HELPS | {"each": MIXERS}}), "claims: a: it has pool or each; with each, and then alone,"),
        (dict(claims={"MIXER": HELPS | {"each": ["gla", "gla"]}}), "the key 'gla' stands there twice"),
    ],
    ids=str,
)
def test_a_wrong_product_or_pool_is_one_line(keys, expected, helpers):
    assert helpers.error_of(product, **keys).startswith(expected)
