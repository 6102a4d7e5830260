"""
Does a gate delay, or change, in-context learning that is no copying? Linear regression, each row with its own weights.

data/regression: rows of 12 examples x1 x2 y.
"""

name = "regression"
seeds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
solved_above = 0.55
arms = {
    "none": {},
    "sigmoid": {"gate": "elementwise"},
    "fixed half": {"branch_scale": 0.5},
}
first_arms = ["none", "sigmoid"]

prepare = "regression"
data = {"seed": 0}
pair_spread = 0.2

claim_base = {}
claims = {
    "the sigmoid gate changes the steps": {
        "contrast": "sigmoid - none",
        "other_than": 0,
        "of": ["log_steps", 0.55],
    },
    "it changes the final loss": {
        "contrast": "sigmoid - none",
        "other_than": 0,
        "of": ["val_loss"],
    },
    "a fixed half changes the steps": {
        "contrast": "fixed half - none",
        "other_than": 0,
        "of": ["log_steps", 0.55],
        "exploratory": True,
    },
    "the gate and a fixed half differ in steps": {
        "contrast": "sigmoid - fixed half",
        "other_than": 0,
        "of": ["log_steps", 0.55],
        "exploratory": True,
    },
    "a fixed half changes the final loss": {
        "contrast": "fixed half - none",
        "other_than": 0,
        "of": ["val_loss"],
        "exploratory": True,
    },
}

base = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "block_size": 36,
    "batch_size": 32,
    "max_iters": 3000,
    "schedule": "constant",
    "warmup_iters": 100,
    "learning_rate": 4e-3,
    "eval_interval": 20,
    "eval_batch_size": 64,
    "meters": False,
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
}
