"""
Does the gain depend on the size? Softmax, smaller and larger than horizon.py's 4 layers x 128, on clean text.

2 layers x 64 for 6,000 steps and 6 x 192 for 3,000, heads of 32, 256 tokens, 2,048 bytes a step, bfloat16. Each arm has
a rate of its own, as in horizon.py, chosen at 1,500 steps. 44 runs, of which 24 choose rates, take about 5 core-hours.
A gain is a loss without the sigmoid gate minus a loss with it, in nats a byte.

Five seeds decide a one-sided claim that is a family of its own, if all five agree. A gate that raises the loss makes
its claim "refuted". The sizes have other steps, so that their difference is exploratory; curves compare them at equal
steps. The claims were written before the first run.
"""

include = "base/clean.py"

name = "size"
seeds = [61, 62, 63, 64, 65]
arms = {
    "small": {"n_layer": 2, "n_embd": 64, "n_head": 2},
    "small sigmoid": {"n_layer": 2, "n_embd": 64, "n_head": 2, "gate": "elementwise"},
    "large": {"n_layer": 6, "n_embd": 192, "n_head": 6, "max_iters": 3000},
    "large sigmoid": {"n_layer": 6, "n_embd": 192, "n_head": 6, "max_iters": 3000, "gate": "elementwise"},
}
selection_seeds = [330, 331]
selection_iters = 1500

claim_base = {"above": 0, "sides": 1}
claims = {
    "the sigmoid gate lowers the loss at 2 x 64": {"contrast": "small - small sigmoid", "family": "2 x 64"},
    "... at 6 x 192": {"contrast": "large - large sigmoid", "family": "6 x 192"},
    "it gains less behind repeated strings than elsewhere, pooled": {
        "contrast": "0.5 * small sigmoid - 0.5 * small + 0.5 * large sigmoid - 0.5 * large",
        "of": ["loss", "repeated_minus_elsewhere"],
        "family": "where",
    },
    "it gains more at 6 x 192 than at 2 x 64": {
        "contrast": "large - large sigmoid - small + small sigmoid",
        "exploratory": True,
    },
}

base = {"max_iters": 6000, "dtype": "bfloat16"}
