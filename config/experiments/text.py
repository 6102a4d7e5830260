"""
Does the gate lower the loss of a language model, and by how much? Five mixers, on bytes of Python's standard library.

4 layers x 128, 256 tokens, 1,500 steps of 2,048 bytes: a quarter of the text, once. "wide" is the identity at the start
(sigmoid2), "matched" takes its parameters from the MLP and costs as many FLOPs as no gate. The seed decides the order
of the data and the weights, and in these rows the split of the text. A gain is a loss without minus a loss with, in
nats a byte, of the whole validation split.

A pilot (seeds 0 to 3, 600 steps, one rate) saw a spread of 0.02 between pairs: seven seeds then see a gain of 0.02 of
one pair of arms, five seeds 0.03. The claims were written before the first run. The rows are on the first version of
the text (commit d8014b5); a later run is on another.
"""

include = "base/text.py"

name = "text"
seeds = [11, 12, 13, 14, 15, 16, 17]
mixers = ["softmax", "cosformer", "gla", "mamba2", "gated_deltanet"]
variants = {
    "none": {},
    "sigmoid": {"gate": "elementwise"},
    "wide": {"gate": "elementwise", "gate_activation": "sigmoid2"},
    "matched": {"gate": "elementwise", "match_params": True},
    "native": {"gate": "native", "mixers": ["gla", "mamba2", "gated_deltanet"]},
}
# seven seeds for the claims by mixer, which are five at once; five for the others, which are pooled
seeds_of = {"wide": [11, 12, 13, 14, 15], "matched": [11, 12, 13, 14, 15], "native": [11, 12, 13, 14, 15]}

# the claims by mixer and the pooled one are of these; the others follow, if the hours last
first_arms = ["none", "sigmoid"]

# beyond the training length, with the gate and without: loss by position; scores are no part of a run
scores = {
    "as trained": {"lengths": [256, 512, 1024]},
    "NTK": {"lengths": [512, 1024], "rope_scaling": "ntk", "rope_factor": 4},
    "YaRN": {"lengths": [512, 1024], "rope_scaling": "yarn", "rope_factor": 4},
}
scores_of = {
    "as trained": ["none", "sigmoid"],
    "NTK": ["softmax", "softmax sigmoid"],
    "YaRN": ["softmax", "softmax sigmoid"],
}

claim_base = {"contrast": "none - sigmoid", "pool": mixers, "above": 0, "sides": 1}
claims = {
    "the gate lowers the loss, pooled over five mixers": {"family": "pooled"},
    "it lowers MIXER's": {"each": mixers, "family": "by mixer"},
    "more in linear mixers and SSMs than in softmax": {
        "pool": "0.25 * cosformer + 0.25 * gla + 0.25 * mamba2 + 0.25 * gated_deltanet - softmax",
        "family": "linear against softmax",
    },
    "with matched parameters, at equal FLOPs, it lowers the loss, pooled": {
        "contrast": "none - matched",
        "family": "matched",
    },
    "matched parameters keep more than half of the gain, pooled": {
        "contrast": "0.5 * none + 0.5 * sigmoid - matched",
        "family": "what the parameters bought",
    },
    "the wide gate is lower than the sigmoid gate, pooled": {"contrast": "sigmoid - wide", "family": "wide"},
    "the native gate is lower than the sigmoid gate, pooled over three mixers": {
        "contrast": "sigmoid - native",
        "pool": ["gla", "mamba2", "gated_deltanet"],
        "family": "native",
    },
}

base = {"state_size": 32}
