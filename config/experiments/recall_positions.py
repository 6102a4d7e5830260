"""
Where may the gate stand? Qiu et al.'s positions, the denominator, norm before and after, a square: steps to solve.

recall.py's task, softmax and cosFormer, five seeds: a look. All arms run at 1e-2, the rate that all arms of recall.py
chose of two.
"""

include = "recall.py"

name = "recall_positions"
seeds = [0, 1, 2, 3, 4]
arms = {
    "softmax": {"attention": "softmax"},
    "softmax sigmoid": {"attention": "softmax", "gate": "elementwise"},
    "softmax headwise": {"attention": "softmax", "gate": "headwise"},
    "softmax value": {"attention": "softmax", "gate": "elementwise@value"},
    "softmax key": {"attention": "softmax", "gate": "elementwise@key"},
    "softmax query": {"attention": "softmax", "gate": "elementwise@query"},
    "softmax output": {"attention": "softmax", "gate": "elementwise@output"},
    "softmax square": {"attention": "softmax", "readout_activation": "square"},
    "softmax RMSNorm": {"attention": "softmax", "readout_norm": "rms"},
    "softmax RMSNorm, gate": {"attention": "softmax", "readout_norm": "rms", "gate": "elementwise"},
    "softmax gate, RMSNorm": {
        "attention": "softmax",
        "readout_norm": "rms",
        "norm_first": False,
        "gate": "elementwise",
    },
    "cosformer": {"attention": "cosformer"},
    "cosformer sigmoid": {"attention": "cosformer", "gate": "elementwise"},
    "cosformer headwise": {"attention": "cosformer", "gate": "headwise"},
    "cosformer value": {"attention": "cosformer", "gate": "elementwise@value"},
    "cosformer key": {"attention": "cosformer", "gate": "elementwise@key"},
    "cosformer query": {"attention": "cosformer", "gate": "elementwise@query"},
    "cosformer output": {"attention": "cosformer", "gate": "elementwise@output"},
    "cosformer denominator": {"attention": "cosformer", "gate": "headwise@denominator"},
    "cosformer square": {"attention": "cosformer", "readout_activation": "square"},
    "cosformer RMSNorm": {"attention": "cosformer", "readout_norm": "rms"},
    "cosformer RMSNorm, gate": {"attention": "cosformer", "readout_norm": "rms", "gate": "elementwise"},
    "cosformer gate, RMSNorm": {
        "attention": "cosformer",
        "readout_norm": "rms",
        "norm_first": False,
        "gate": "elementwise",
    },
}
learning_rates = []
selection_seeds = []
selection_iters = []
selection_base = {}
pool_rates = False
exploratory = True  # five seeds decide nothing; these are the pairs of the figure mixers.png, as ratios of steps
claims = {
    "headwise against sigmoid": {
        "contrast": {
            "softmax headwise": 0.5,
            "softmax sigmoid": -0.5,
            "cosformer headwise": 0.5,
            "cosformer sigmoid": -0.5,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
    },
    "sigmoid against none": {
        "contrast": {"softmax sigmoid": 0.5, "softmax": -0.5, "cosformer sigmoid": 0.5, "cosformer": -0.5},
        "other_than": 0,
        "of": ["log_steps", 0.9],
    },
    "value against none": {
        "contrast": {"softmax value": 0.5, "softmax": -0.5, "cosformer value": 0.5, "cosformer": -0.5},
        "other_than": 0,
        "of": ["log_steps", 0.9],
    },
    "key against none": {
        "contrast": {"softmax key": 0.5, "softmax": -0.5, "cosformer key": 0.5, "cosformer": -0.5},
        "other_than": 0,
        "of": ["log_steps", 0.9],
    },
    "query against none": {
        "contrast": {"softmax query": 0.5, "softmax": -0.5, "cosformer query": 0.5, "cosformer": -0.5},
        "other_than": 0,
        "of": ["log_steps", 0.9],
    },
    "output against none": {
        "contrast": {"softmax output": 0.5, "softmax": -0.5, "cosformer output": 0.5, "cosformer": -0.5},
        "other_than": 0,
        "of": ["log_steps", 0.9],
    },
    "square against none": {
        "contrast": {"softmax square": 0.5, "softmax": -0.5, "cosformer square": 0.5, "cosformer": -0.5},
        "other_than": 0,
        "of": ["log_steps", 0.9],
    },
    "RMSNorm against none": {
        "contrast": {"softmax RMSNorm": 0.5, "softmax": -0.5, "cosformer RMSNorm": 0.5, "cosformer": -0.5},
        "other_than": 0,
        "of": ["log_steps", 0.9],
    },
    "a gate behind the norm against RMSNorm": {
        "contrast": {
            "softmax RMSNorm, gate": 0.5,
            "softmax RMSNorm": -0.5,
            "cosformer RMSNorm, gate": 0.5,
            "cosformer RMSNorm": -0.5,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
    },
    "a gate before the norm against RMSNorm": {
        "contrast": {
            "softmax gate, RMSNorm": 0.5,
            "softmax RMSNorm": -0.5,
            "cosformer gate, RMSNorm": 0.5,
            "cosformer RMSNorm": -0.5,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
    },
    "a gate on the denominator against none": {
        "contrast": {"cosformer denominator": 1, "cosformer": -1},
        "other_than": 0,
        "of": ["log_steps", 0.9],
    },
}

base = {"learning_rate": 1e-2, "meters": False}
