"""
Does the convolution, or the length of the run, decide where a sink appears? Controls of sink.py, in its setting.

sink.py's Mamba-2 and Gated DeltaNet have no sink, but a convolution that its softmax lacks: here softmax has one of 4
("conv") and they have none. Its elementwise gate did not halve the sink in 1,000 steps: "3,000" is three times as long.
36 runs take about 1.2 core-hours. Six seeds decide two one-sided claims of a family, if all six agree. The numbers are
sink.py's, about idle queries; 0.13 is twice the uniform weight on <s>. The claims were written before the first run.
"""

include = "sink.py"

name = "sink_controls"
seeds = [20, 21, 22, 23, 24, 25]
arms = {
    "none": {},
    "conv": {"short_conv": 4},
    "mamba2 bare": {"attention": "mamba2", "short_conv": 0},
    "gated_deltanet bare": {"attention": "gated_deltanet", "short_conv": 0},
    "none 3,000": {"max_iters": 3000},
    "elementwise 3,000": {"max_iters": 3000, "gate": "elementwise"},
}
seeds_of = {}

claim_base = {"of": ["meters", "kinds", "other", "share"], "above": -0.0326, "sides": 1}
claims = {
    "a convolution halves the weight's excess": {"contrast": "0.5 * none - conv", "family": "with it"},
    "Mamba-2 without one has a sink": {"contrast": "mamba2 bare", "above": 0.13, "family": "without"},
    "Gated DeltaNet without one has a sink": {"contrast": "gated_deltanet bare", "above": 0.13, "family": "without"},
    "in 3,000 steps elementwise halves the weight's excess": {
        "contrast": "0.5 * none 3,000 - elementwise 3,000",
        "family": "3,000 steps",
    },
    "... the effective sink's excess": {
        "contrast": "0.5 * none 3,000 - elementwise 3,000",
        "above": -0.0049,
        "of": ["meters", "kinds", "other", "effective"],
        "family": "3,000 steps",
    },
}
