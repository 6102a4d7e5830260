"""
What text.py and the experiments in its setting share: 1,500 steps of 2,048 bytes, and how a learning rate is chosen.

The rate is chosen on two seeds that are not compared: the best one for all arms of a mixer together, unless another is
clearly better for an arm.
"""

include = "bytes.py"

learning_rates = [1e-3, 3e-3, 1e-2]
selection_seeds = [100, 101]
select_by = "last"
pool_rates = True
selection_iters = 300
selection_base = {"meters": False, "eval_whole": False}  # a sample is enough to choose a rate by
pair_spread = 0.02  # in nats, of a pilot of text.py: 600 steps at one rate, seeds 0 to 3

base = {
    "max_iters": 1500,
    "warmup_iters": 150,
    "eval_interval": 375,
    "eval_tokens": 20_000,  # of the curve and the rates; the loss that is compared is that of the whole split
    "threads": 1,
}
