"""
The minimum experiment with twice the steps and a learning rate chosen for each arm, on a seed that nothing else uses.

All else is minimum.py's protocol, its thresholds too: where an arm only lacked time or a better rate, it shows here.
Eight runs to choose the rates and twenty to compare: an hour on two CPU cores. (One seed chooses them, not two: the
list was shortened, before its first run, to fit the machine time there was. So were its seeds, to five; the other five
of minimum.py's ten were added after the verdict on these had been seen, and both verdicts are told.)

Result (results/minimum_tuned/): in between. Both arms choose 5e-4, the smallest rate; none 54.9%, elementwise 50.0%,
gain -4.9 points [-14.5, +4.7] over ten seeds (-4.2 [-22.0, +13.5] over the first five); none is solved.
"""

include = "base/recall.py"

name = "minimum_tuned"
seeds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
selection_seeds = [100]
learning_rates = [5e-4, 1e-3, 2e-3, 4e-3]
baseline = "none"
treatment = "elementwise"
success_above = 0.75
success_below = 0.55
failure_within = 0.03

base = {"n_head": 4, "position": "none", "readout_norm": "none", "max_iters": 3000}
