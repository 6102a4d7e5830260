"""
Is a gate worth its parameters and its compute? The five mixers of one_harness.py at equal size, and published gates.

Text, model, steps and rates are those of one_harness.py, whose runs without a gate and with the sigmoid gate are taken
from its rows (seeds 41 to 46; made by earlier code, which flags say). The new arms:

    sigmoid, matched    the MLP is narrower by what the gate adds, so that parameters, and FLOPs, are those of no gate
    native              GLA's, Mamba-2's and Gated DeltaNet's published gates
    native sigmoid      both
    none 4,500          no gate, a whole schedule of 4,500 steps: what a quarter less of compute costs

Rates of the sigmoid gate are those that one_harness.py chose with it; a native gate takes the ungated arm's, and both
together the sigmoid gate's. Three claims are confirmatory, one-sided, and one family (Holm); each needs all six seeds:
the sigmoid gate gains at equal parameters, pooled over the five; native gates gain, pooled over three; the sigmoid gate
gains beside them. All else is exploratory: gains of one mixer, of which six seeds can decide none, and by how much a
gain exceeds what its FLOPs are worth as more steps. That worth is the fall of the ungated loss from 4,500 steps to
6,000, with three seeds, times the ratio of logarithms: 0.230 for softmax's 6.8% more FLOPs, 0.242 for cosFormer's 7.2%,
0.248 for 7.4% in GLA and Gated DeltaNet, and 0.451 for Mamba-2's 13.9%.

The claims were written before the first run of a new arm, with the rows of one_harness.py known.
"""

include = "base/clean.py"

name = "matched"
seeds = [41, 42, 43, 44, 45, 46]
mixers = ["softmax", "cosformer", "gla", "mamba2", "gated_deltanet"]
variants = {
    "none": {},
    "sigmoid": {"gate": "elementwise"},
    "sigmoid, matched": {"gate": "elementwise", "match_params": True},
    "native": {"gate": "native", "mixers": ["gla", "mamba2", "gated_deltanet"]},
    "native sigmoid": {"gate": "native+elementwise", "mixers": ["gla", "mamba2", "gated_deltanet"]},
    "none 4,500": {"max_iters": 4500},
}
arms = {
    "softmax": {"learning_rate": 6e-3},
    "softmax sigmoid": {"learning_rate": 6e-3},
    "softmax sigmoid, matched": {"learning_rate": 6e-3},
    "softmax none 4,500": {"learning_rate": 6e-3},
    "cosformer": {"learning_rate": 6e-3},
    "cosformer sigmoid": {"learning_rate": 1.2e-2},
    "cosformer sigmoid, matched": {"learning_rate": 1.2e-2},
    "cosformer none 4,500": {"learning_rate": 6e-3},
    "mamba2": {"learning_rate": 1.2e-2},
    "mamba2 sigmoid": {"learning_rate": 6e-3},
    "mamba2 sigmoid, matched": {"learning_rate": 6e-3},
    "mamba2 native": {"learning_rate": 1.2e-2},
    "mamba2 native sigmoid": {"learning_rate": 6e-3},
    "mamba2 none 4,500": {"learning_rate": 1.2e-2},
}
seeds_of = {"none 4,500": [41, 42, 43]}
first_arms = ["none", "sigmoid", "sigmoid, matched", "native", "native sigmoid"]
learning_rates = []

claim_base = {"above": 0, "sides": 1}
claims = {
    "at equal parameters the sigmoid gate lowers the loss, pooled over five mixers": {
        "contrast": "none - sigmoid, matched",
        "pool": ["softmax", "cosformer", "gla", "mamba2", "gated_deltanet"],
    },
    "published gates lower it, pooled over three": {
        "contrast": "none - native",
        "pool": ["gla", "mamba2", "gated_deltanet"],
    },
    "beside them the sigmoid gate lowers it, pooled over three": {
        "contrast": "native - native sigmoid",
        "pool": ["gla", "mamba2", "gated_deltanet"],
    },
    "at equal parameters the sigmoid gate lowers MIXER's loss": {
        "contrast": "none - sigmoid, matched",
        "each": ["softmax", "cosformer", "gla", "mamba2", "gated_deltanet"],
        "sides": 2,
        "exploratory": True,
    },
    "its published gate lowers MIXER's loss": {
        "contrast": "none - native",
        "each": ["gla", "mamba2", "gated_deltanet"],
        "sides": 2,
        "exploratory": True,
    },
    "softmax gains beyond what its compute is worth": {
        "contrast": "1.230 * softmax - softmax sigmoid - 0.230 * softmax none 4,500",
        "sides": 2,
        "exploratory": True,
    },
    "cosformer gains beyond what its compute is worth": {
        "contrast": "1.242 * cosformer - cosformer sigmoid - 0.242 * cosformer none 4,500",
        "sides": 2,
        "exploratory": True,
    },
    "gla gains beyond what its compute is worth": {
        "contrast": "1.248 * gla - gla sigmoid - 0.248 * gla none 4,500",
        "sides": 2,
        "exploratory": True,
    },
    "mamba2 gains beyond what its compute is worth": {
        "contrast": "1.451 * mamba2 - mamba2 sigmoid - 0.451 * mamba2 none 4,500",
        "sides": 2,
        "exploratory": True,
    },
    "gated_deltanet gains beyond what its compute is worth": {
        "contrast": "1.248 * gated_deltanet - gated_deltanet sigmoid - 0.248 * gated_deltanet none 4,500",
        "sides": 2,
        "exploratory": True,
    },
}

base = {
    "max_iters": 6000,
    "short_conv": 4,
    "state_size": 32,
    "dtype": "bfloat16",
    "learning_rate": 3e-3,
}
