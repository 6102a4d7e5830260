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
    "headwise against sigmoid": {"contrast": "headwise - sigmoid"},
    "sigmoid against none": {"contrast": "sigmoid - none"},
    "value against none": {"contrast": "value - none"},
    "key against none": {"contrast": "key - none"},
    "query against none": {"contrast": "query - none"},
    "output against none": {"contrast": "output - none"},
    "square against none": {"contrast": "square - none"},
    "RMSNorm against none": {"contrast": "RMSNorm - none"},
    "a gate behind the norm against RMSNorm": {"contrast": "RMSNorm, gate - RMSNorm"},
    "a gate before the norm against RMSNorm": {"contrast": "gate, RMSNorm - RMSNorm"},
    "a gate on the denominator against none": {"contrast": "denominator - none", "pool": ["cosformer"]},
}

base = {"learning_rate": 1e-2, "meters": False}
