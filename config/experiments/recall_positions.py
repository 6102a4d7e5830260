"""
Where may the gate stand? Qiu et al.'s positions, the denominator, norm before and after, a square: steps to solve.

recall.py's task, softmax and cosFormer, five seeds: a look. All arms run at 1e-2, the rate that all arms of recall.py
chose of two.
"""

include = "recall.py"

name = "recall_positions"
seeds = [0, 1, 2, 3, 4]
mixers = ["softmax", "cosformer"]
variants = {
    "none": {},
    "sigmoid": {"gate": "elementwise"},
    "headwise": {"gate": "headwise"},
    "value": {"gate": "elementwise@value"},
    "key": {"gate": "elementwise@key"},
    "query": {"gate": "elementwise@query"},
    "output": {"gate": "elementwise@output"},
    "denominator": {"gate": "headwise@denominator", "mixers": ["cosformer"]},
    "square": {"readout_activation": "square"},
    "RMSNorm": {"readout_norm": "rms"},
    "RMSNorm, gate": {"readout_norm": "rms", "gate": "elementwise"},
    "gate, RMSNorm": {"readout_norm": "rms", "norm_first": False, "gate": "elementwise"},
}
arms = {}
learning_rates = []
selection_seeds = []
exploratory = True  # five seeds decide nothing; these are the pairs of the figure mixers.png, as ratios of steps
claim_base = {"pool": mixers, "other_than": 0, "of": ["log_steps", 0.9]}
claims = {
    "headwise against sigmoid": {"contrast": {"headwise": 1, "sigmoid": -1}},
    "sigmoid against none": {"contrast": {"sigmoid": 1, "none": -1}},
    "value against none": {"contrast": {"value": 1, "none": -1}},
    "key against none": {"contrast": {"key": 1, "none": -1}},
    "query against none": {"contrast": {"query": 1, "none": -1}},
    "output against none": {"contrast": {"output": 1, "none": -1}},
    "square against none": {"contrast": {"square": 1, "none": -1}},
    "RMSNorm against none": {"contrast": {"RMSNorm": 1, "none": -1}},
    "a gate behind the norm against RMSNorm": {"contrast": {"RMSNorm, gate": 1, "RMSNorm": -1}},
    "a gate before the norm against RMSNorm": {"contrast": {"gate, RMSNorm": 1, "RMSNorm": -1}},
    "a gate on the denominator against none": {"contrast": {"denominator": 1, "none": -1}, "pool": ["cosformer"]},
}

base = {"learning_rate": 1e-2, "meters": False}
