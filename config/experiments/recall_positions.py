"""
Where may the gate stand? Qiu et al.'s positions, the denominator, norm before and after, a square: steps to solve.

recall.py's task, softmax and cosFormer, five seeds: a look, without claims. All arms run at 1e-2, the rate that
all arms of recall.py chose of two.
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
claims = {}

base = {"learning_rate": 1e-2, "meters": False}
