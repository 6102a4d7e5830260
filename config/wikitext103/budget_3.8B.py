"""The larger budget: 3.8B tokens an arm, about 6 GPU-hours on an A100, 78 for thirteen arms. Result: not run yet."""

max_iters = 7250
warmup_iters = 300
eval_interval = 725
