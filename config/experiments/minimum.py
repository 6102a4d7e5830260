"""
The minimum experiment: does an elementwise sigmoid gate let the plainest linear attention solve a small recall task?

The mixer is cosFormer without denominator, norm or positions. Everything was fixed before the first run. Success: the
gated model is above 75% and the ungated one below 55% in every seed. Failure: the two means are within 3 points, or a
run is not finite. A gain of more than 5 points is judged separately. Twenty runs take 16 minutes on two CPU cores.

Result (ten seeds, results/minimum/): failure. Accuracy is 27.1% without the gate and 25.5% with it, where chance among
the values in context is 25%. The gain is -1.6 points (exact 95% interval -4.0 to +0.3), and so not more than 5.
"""

include = "base/recall.py"

name = "minimum"
seeds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

base = {"n_head": 4, "position": "none", "readout_norm": "none", "learning_rate": 1e-3}
