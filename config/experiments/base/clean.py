"""
What the experiments on clean text share: pystdlib as it is now, the same 0.5 MB of it to validate on for every seed.

A rate is chosen by the loss at the end of a schedule, on two seeds that are not compared.
"""

include = "bytes.py"

data = {"val_fraction": 0.05, "seed": 0}
learning_rates = [1.5e-3, 3e-3, 6e-3]
select_by = "last"
selection_base = {"meters": False}
pair_spread = 0.02  # in nats, of horizon.py's pilot
base = {
    "warmup_iters": 150,
    "eval_interval": 750,
    "eval_tokens": 100_000,  # of the curve; the loss that is compared is that of the whole split
    "threads": 1,
}
