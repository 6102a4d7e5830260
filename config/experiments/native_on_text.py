"""
What does a sigmoid gate add beside the published gate? GLA, Mamba-2 and Gated DeltaNet, on clean text.

4 layers x 128, 256 tokens, 3,000 steps of 2,048 bytes, bfloat16, with the published convolutions. "both" has the
sigmoid gate beside the published one, "none" has neither. The arms of a mixer share a rate, chosen at 750 steps, unless
another is better for one by more than a standard error. 99 runs, of which 54 choose rates, take about 6 core-hours. A
gain is a loss without minus a loss with, in nats a byte.

Five seeds decide a one-sided claim that is a family of its own, if all five agree: the claims are pooled over the
mixers, gains by mixer are estimates. A gate that raises the loss makes its claim "refuted". The claims were written
before the first run.
"""

include = "base/clean.py"

name = "native_on_text"
seeds = [51, 52, 53, 54, 55]
mixers = ["gla", "mamba2", "gated_deltanet"]
variants = {"none": {}, "native": {"gate": "native"}, "both": {"gate": "native+elementwise"}}
selection_seeds = [320, 321]
selection_iters = 750
pool_rates = True

claim_base = {"contrast": "native - both", "pool": mixers, "above": 0, "sides": 1}
claims = {
    "a sigmoid gate beside the published one lowers the loss, pooled": {"family": "beside"},
    "the published gate lowers the loss, pooled": {"contrast": "none - native", "family": "published"},
    "beside its published gate MIXER gains": {"each": mixers, "exploratory": True},
    "with its published gate MIXER gains": {"contrast": "none - native", "each": mixers, "exploratory": True},
}

base = {"max_iters": 3000, "state_size": 32, "dtype": "bfloat16"}
