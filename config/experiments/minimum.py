"""
The minimum experiment: does an elementwise sigmoid gate let the plainest linear attention solve a small recall task?

cosFormer without denominator, norm or positions; 4 pairs, 2 of them asked for; 2 layers x 64. Everything that could
be tuned was fixed before the first run. Success: the gated model above 75%, the ungated one below 55%, in every seed.
Failure: the two means within 3 points, or a run that is not finite. Anything else is in between. The claim is judged
besides: a gain of more than 5 points. Twenty runs, about 16 minutes on two CPU cores; `make demo` runs three seeds.

Result (ten seeds, results/minimum/): failure. None 27.1%, elementwise 25.5%, of which 25% is chance among the values in
context; the gain is -1.6 points (95% interval -3.9 to +0.6), and so not more than 5.
"""

include = "base/recall.py"

name = "minimum"
seeds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
baseline = "none"
treatment = "elementwise"
success_above = 0.75
success_below = 0.55
failure_within = 0.03

base = {"n_head": 4, "position": "none", "readout_norm": "none", "learning_rate": 1e-3}
