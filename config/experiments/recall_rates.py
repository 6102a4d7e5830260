"""
Does a gate cost steps in recall when each arm has its own best rate? recall.py's task, six rates, three mixers.

In recall.py all arms chose 1e-2, the upper of two rates, and the sigmoid gate took 1.15 times the steps: what a rate
0.68 times as high would give. Here each arm chooses among six rates, sqrt(2) apart, by the area under its curve, on
eight seeds that are not compared. 696 runs, of which 576 choose rates, take about 3.5 core-hours.

"fixed half" multiplies the branch by 0.5. "fast half" is the same with the output projection at twice the rate. No key
sets that, and none must: AdamW's steps do not scale with the gradient, so 0.5 W at twice the rate is a weight that
starts at half (out_init_scale) at the rate itself, but for clipping, epsilon and weight decay.

Log steps to 90% are compared; 0.0953 is a factor of 1.1. "Costs steps" stands if the sigmoid gate is slower, goes if it
is within 10%, and changes if one mixer alone pays. Intervals take the chosen rates as given. Ten seeds decide each.
"""

include = "recall.py"

name = "recall_rates"
seeds = [400, 401, 402, 403, 404, 405, 406, 407, 408, 409]
mixers = ["softmax", "gla", "gated_deltanet"]
arms = {}
variants = {
    "none": {},
    "sigmoid": {"gate": "elementwise"},
    "fixed half": {"branch_scale": 0.5},
    "fast half": {"out_init_scale": 0.5},
}
learning_rates = [5e-3, 7.07e-3, 1e-2, 1.41e-2, 2e-2, 2.83e-2]
widen_rates = True
selection_seeds = [410, 411, 412, 413, 414, 415, 416, 417]
pool_rates = False

claim_base = {"contrast": "sigmoid - none", "pool": mixers, "other_than": 0, "of": ["log_steps", 0.9]}
claims = {
    "the sigmoid gate changes the steps": {"family": "own rates"},
    "a fixed half changes the steps": {"contrast": "fixed half - none", "family": "own rates"},
    "a fast half changes the steps": {"contrast": "fast half - none", "family": "own rates"},
    "the sigmoid gate costs nothing, within 10%": {"within": 0.0953, "family": "within 10%"},
    "it is a fixed half, within 10%": {"contrast": "sigmoid - fixed half", "within": 0.0953, "family": "within 10%"},
    "the sigmoid gate changes MIXER's steps": {"each": mixers, "family": "by mixer"},
}
