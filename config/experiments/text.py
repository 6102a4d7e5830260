"""
Does the gate lower the loss of a language model, and by how much? Five mixers, on bytes of Python's standard library.

4 layers x 128, 256 tokens, 1,500 steps of 2,048 bytes: a quarter of the text, once. The arms of a mixer
are no gate, a sigmoid gate, a wide one (sigmoid2, the identity at the start), a sigmoid gate whose parameters are taken
from the MLP (matched), and the native gate of the three mixers that have one. The matched arm costs as many FLOPs as
the arm without a gate, so it is the comparison at equal compute, too. The learning rate is chosen on two seeds that are
not compared: the best one for all arms of the mixer together, unless another is clearly better for an arm. The seed
decides the order of the data and the weights, and in these rows the split of the text. The loss is that of the whole
validation split in nats a byte, and every gain below is a loss without minus a loss with.

A pilot (seeds 0 to 3, 600 steps, one rate) saw gains of 0.033 +- 0.027 for softmax and 0.093 +- 0.035 for Gated
DeltaNet, with a spread of 0.02 between pairs, and one of 0.155 for Gated DeltaNet's native gate. At that spread seven
seeds see a gain of 0.02 of one pair of arms, five seeds 0.03. The claims were written before the first run.

The rows are on the first version of the text, with tables and split at random by file: the one of commit d8014b5. A
later run is on another text, and belongs in a folder of its own.
"""

include = "base/bytes.py"

name = "text"
seeds = [11, 12, 13, 14, 15, 16, 17]
arms = {
    "softmax": {"attention": "softmax"},
    "softmax sigmoid": {"attention": "softmax", "gate": "elementwise"},
    "softmax wide": {"attention": "softmax", "gate": "elementwise", "gate_activation": "sigmoid2"},
    "softmax matched": {"attention": "softmax", "gate": "elementwise", "match_params": True},
    "cosformer": {"attention": "cosformer"},
    "cosformer sigmoid": {"attention": "cosformer", "gate": "elementwise"},
    "cosformer wide": {"attention": "cosformer", "gate": "elementwise", "gate_activation": "sigmoid2"},
    "cosformer matched": {"attention": "cosformer", "gate": "elementwise", "match_params": True},
    "gla": {"attention": "gla"},
    "gla sigmoid": {"attention": "gla", "gate": "elementwise"},
    "gla wide": {"attention": "gla", "gate": "elementwise", "gate_activation": "sigmoid2"},
    "gla matched": {"attention": "gla", "gate": "elementwise", "match_params": True},
    "gla native": {"attention": "gla", "gate": "native"},
    "mamba2": {"attention": "mamba2"},
    "mamba2 sigmoid": {"attention": "mamba2", "gate": "elementwise"},
    "mamba2 wide": {"attention": "mamba2", "gate": "elementwise", "gate_activation": "sigmoid2"},
    "mamba2 matched": {"attention": "mamba2", "gate": "elementwise", "match_params": True},
    "mamba2 native": {"attention": "mamba2", "gate": "native"},
    "gated_deltanet": {"attention": "gated_deltanet"},
    "gated_deltanet sigmoid": {"attention": "gated_deltanet", "gate": "elementwise"},
    "gated_deltanet wide": {"attention": "gated_deltanet", "gate": "elementwise", "gate_activation": "sigmoid2"},
    "gated_deltanet matched": {"attention": "gated_deltanet", "gate": "elementwise", "match_params": True},
    "gated_deltanet native": {"attention": "gated_deltanet", "gate": "native"},
}
# seven seeds for the claims by mixer, which are five at once; five for the others, which are pooled
seeds_of = {
    "softmax wide": [11, 12, 13, 14, 15],
    "softmax matched": [11, 12, 13, 14, 15],
    "cosformer wide": [11, 12, 13, 14, 15],
    "cosformer matched": [11, 12, 13, 14, 15],
    "gla wide": [11, 12, 13, 14, 15],
    "gla matched": [11, 12, 13, 14, 15],
    "gla native": [11, 12, 13, 14, 15],
    "mamba2 wide": [11, 12, 13, 14, 15],
    "mamba2 matched": [11, 12, 13, 14, 15],
    "mamba2 native": [11, 12, 13, 14, 15],
    "gated_deltanet wide": [11, 12, 13, 14, 15],
    "gated_deltanet matched": [11, 12, 13, 14, 15],
    "gated_deltanet native": [11, 12, 13, 14, 15],
}

# the claims by mixer and the pooled one are of these; the others follow, if the hours last
first_arms = [
    "softmax",
    "softmax sigmoid",
    "cosformer",
    "cosformer sigmoid",
    "gla",
    "gla sigmoid",
    "mamba2",
    "mamba2 sigmoid",
    "gated_deltanet",
    "gated_deltanet sigmoid",
]

# 360 kB to validate on: the error of a paired difference from the choice of bytes is about 0.003 then
data = {"val_fraction": 0.03}

# beyond the training length, with the gate and without: loss by position; scores are no part of a run
scores = {
    "as trained": {"lengths": [256, 512, 1024]},
    "NTK": {"lengths": [512, 1024], "rope_scaling": "ntk", "rope_factor": 4},
    "YaRN": {"lengths": [512, 1024], "rope_scaling": "yarn", "rope_factor": 4},
}
scores_of = {
    "as trained": [
        "softmax",
        "softmax sigmoid",
        "cosformer",
        "cosformer sigmoid",
        "gla",
        "gla sigmoid",
        "mamba2",
        "mamba2 sigmoid",
        "gated_deltanet",
        "gated_deltanet sigmoid",
    ],
    "NTK": ["softmax", "softmax sigmoid"],
    "YaRN": ["softmax", "softmax sigmoid"],
}

# predicted for language models of 125M and more; a token of GPT-2's has 4.57 bytes in WikiText-103
predicted = {
    "softmax": {"arms": ["softmax", "softmax sigmoid"], "per_cent": [1.5]},
    "cosformer": {"arms": ["cosformer", "cosformer sigmoid"], "per_cent": [3, 8]},
    "mamba2": {"arms": ["mamba2", "mamba2 sigmoid"], "per_cent": [1, 3]},
}
bytes_per_token = 4.57

learning_rates = [1e-3, 3e-3, 1e-2]
selection_seeds = [100, 101]
select_by = "last"
pool_rates = True
selection_iters = [300]
selection_base = {"meters": False, "eval_whole": False}  # a sample is enough to choose a rate by

pair_spread = 0.02  # in nats, of the pilot

claims = {
    "the gate lowers the loss, pooled over five mixers": {
        "contrast": {
            "softmax": 0.2,
            "softmax sigmoid": -0.2,
            "cosformer": 0.2,
            "cosformer sigmoid": -0.2,
            "gla": 0.2,
            "gla sigmoid": -0.2,
            "mamba2": 0.2,
            "mamba2 sigmoid": -0.2,
            "gated_deltanet": 0.2,
            "gated_deltanet sigmoid": -0.2,
        },
        "above": 0,
        "sides": 1,
        "family": "pooled",
    },
    "it lowers softmax's": {
        "contrast": {"softmax": 1, "softmax sigmoid": -1},
        "above": 0,
        "sides": 1,
        "family": "by mixer",
    },
    "it lowers cosformer's": {
        "contrast": {"cosformer": 1, "cosformer sigmoid": -1},
        "above": 0,
        "sides": 1,
        "family": "by mixer",
    },
    "it lowers gla's": {
        "contrast": {"gla": 1, "gla sigmoid": -1},
        "above": 0,
        "sides": 1,
        "family": "by mixer",
    },
    "it lowers mamba2's": {
        "contrast": {"mamba2": 1, "mamba2 sigmoid": -1},
        "above": 0,
        "sides": 1,
        "family": "by mixer",
    },
    "it lowers gated_deltanet's": {
        "contrast": {"gated_deltanet": 1, "gated_deltanet sigmoid": -1},
        "above": 0,
        "sides": 1,
        "family": "by mixer",
    },
    "more in linear mixers and SSMs than in softmax": {
        "contrast": {
            "cosformer": 0.25,
            "cosformer sigmoid": -0.25,
            "gla": 0.25,
            "gla sigmoid": -0.25,
            "mamba2": 0.25,
            "mamba2 sigmoid": -0.25,
            "gated_deltanet": 0.25,
            "gated_deltanet sigmoid": -0.25,
            "softmax": -1,
            "softmax sigmoid": 1,
        },
        "above": 0,
        "sides": 1,
        "family": "linear against softmax",
    },
    "with matched parameters, at equal FLOPs, it lowers the loss, pooled": {
        "contrast": {
            "softmax": 0.2,
            "softmax matched": -0.2,
            "cosformer": 0.2,
            "cosformer matched": -0.2,
            "gla": 0.2,
            "gla matched": -0.2,
            "mamba2": 0.2,
            "mamba2 matched": -0.2,
            "gated_deltanet": 0.2,
            "gated_deltanet matched": -0.2,
        },
        "above": 0,
        "sides": 1,
        "family": "matched",
    },
    "matched parameters keep more than half of the gain, pooled": {
        "contrast": {
            "softmax": 0.1,
            "softmax sigmoid": 0.1,
            "softmax matched": -0.2,
            "cosformer": 0.1,
            "cosformer sigmoid": 0.1,
            "cosformer matched": -0.2,
            "gla": 0.1,
            "gla sigmoid": 0.1,
            "gla matched": -0.2,
            "mamba2": 0.1,
            "mamba2 sigmoid": 0.1,
            "mamba2 matched": -0.2,
            "gated_deltanet": 0.1,
            "gated_deltanet sigmoid": 0.1,
            "gated_deltanet matched": -0.2,
        },
        "above": 0,
        "sides": 1,
        "family": "what the parameters bought",
    },
    "the wide gate is lower than the sigmoid gate, pooled": {
        "contrast": {
            "softmax sigmoid": 0.2,
            "softmax wide": -0.2,
            "cosformer sigmoid": 0.2,
            "cosformer wide": -0.2,
            "gla sigmoid": 0.2,
            "gla wide": -0.2,
            "mamba2 sigmoid": 0.2,
            "mamba2 wide": -0.2,
            "gated_deltanet sigmoid": 0.2,
            "gated_deltanet wide": -0.2,
        },
        "above": 0,
        "sides": 1,
        "family": "wide",
    },
    "the native gate is lower than the sigmoid gate, pooled over three mixers": {
        "contrast": {
            "gla sigmoid": 1 / 3,
            "gla native": -1 / 3,
            "mamba2 sigmoid": 1 / 3,
            "mamba2 native": -1 / 3,
            "gated_deltanet sigmoid": 1 / 3,
            "gated_deltanet native": -1 / 3,
        },
        "above": 0,
        "sides": 1,
        "family": "native",
    },
}

base = {
    "state_size": 32,
    "max_iters": 1500,
    "warmup_iters": 150,
    "eval_interval": 375,
    "eval_tokens": 20_000,  # of the curve and the rates; the loss that is compared is that of the whole split
    "threads": 1,
}
