"""
Do log-linear states give cosFormer recall, or the shift by a token that a convolution gives? And does a gate add to it?

Elsewhere "cos-log-linear" reached 91.3% of MQAR where cosFormer reached 25.9%, in one run each (2 x 32, 4,000 rows of
128 tokens with 8 pairs, no convolution; `levels=merged` is that partition). At odd positions level 1 is the token
before, where MQAR's key stands: the gain may be that shift alone. So: cosFormer plain, with log-linear states by Guo et
al. and by that partition, each without and with a convolution of 4, without and with a sigmoid gate. Keys stand at even
positions, so that this shift is there. Two layers x 64, rows of 64 tokens with 8 pairs, 80 ids.

Without a convolution the accuracy at the end is compared (a guess among the values, 12.5%, is chance, and no pilot
rose above it); with one, where all arms are near 99%, the logarithm of the steps to 90%.
"""

name = "log_linear"
seeds = [0, 1, 2, 3, 4, 5, 6, 7]
arms = {
    "plain": {"short_conv": 0},
    "plain sigmoid": {"short_conv": 0, "gate": "elementwise"},
    "guo": {"short_conv": 0, "levels": "log_linear"},
    "guo sigmoid": {"short_conv": 0, "levels": "log_linear", "gate": "elementwise"},
    "merged": {"short_conv": 0, "levels": "merged"},
    "merged sigmoid": {"short_conv": 0, "levels": "merged", "gate": "elementwise"},
    "conv plain": {},
    "conv plain sigmoid": {"gate": "elementwise"},
    "conv guo": {"levels": "log_linear"},
    "conv guo sigmoid": {"levels": "log_linear", "gate": "elementwise"},
    "conv merged": {"levels": "merged"},
    "conv merged sigmoid": {"levels": "merged", "gate": "elementwise"},
}

prepare = "mqar"
data = {"slices": "64/8", "vocab_size": 80, "train_size": 20_000, "val_size": 256, "shift": 0}

learning_rates = [3e-3, 1e-2]
widen_rates = False
selection_seeds = [420, 421]
selection_iters = 600
pool_rates = True

pair_spread = 0.25  # of log steps, as in recall.py

claim_base = {
    "other_than": 0,
    "family": "accuracy",
    "family_reason": "declared before 0.5, when the claims about one number were a family",
}
claims = {
    # without a convolution: the accuracy, a family of its own
    "log-linear states (Guo) change accuracy": {"contrast": "guo - plain"},
    "merged ones do": {"contrast": "merged - plain"},
    "the gate adds to Guo's": {"contrast": "guo sigmoid - guo"},
    "the gate adds to merged ones": {"contrast": "merged sigmoid - merged"},
    # with a convolution: the steps, another family
    "behind a convolution log-linear states (Guo) change the steps": {
        "contrast": "conv guo - conv plain",
        "of": ["log_steps", 0.9],
        "family": "steps",
    },
    "merged ones do, there": {
        "contrast": "conv merged - conv plain",
        "of": ["log_steps", 0.9],
        "family": "steps",
    },
    "the gate changes the steps of Guo's": {
        "contrast": "conv guo sigmoid - conv guo",
        "of": ["log_steps", 0.9],
        "family": "steps",
    },
    "the gate changes the steps of merged ones": {
        "contrast": "conv merged sigmoid - conv merged",
        "of": ["log_steps", 0.9],
        "family": "steps",
    },
}

base = {
    "n_layer": 2, "n_embd": 64, "n_head": 2, "attention": "cosformer", "mlp_ratio": 2, "block_size": 66,
    "short_conv": 4, "init": "pytorch", "batch_size": 24, "max_iters": 1500, "warmup_iters": 100,
    "schedule": "constant", "eval_interval": 25, "stop_above": 0.98, "meters": False, "device": "cpu",
    "dtype": "float32", "threads": 1,
}  # fmt: skip
