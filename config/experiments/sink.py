"""
The attention sink on a laptop: what does a gate take over from the first token?

Bigram-Backcopy (data/backcopy): the one head of a one-layer GPT has work at the triggers, 37% of the queries, and must
be silent at the others, which all numbers below are about. 130 runs take 95 minutes on two CPU cores.
"""

name = "sink"
metric = "val_loss"
arms = {
    "none": {},
    "elementwise": {"gate": "elementwise"},
    "sigmoid2": {"gate": "elementwise", "gate_activation": "sigmoid2"},
    "headwise": {"gate": "headwise"},
    "elementwise@value": {"gate": "elementwise@value"},
    # exploratory, five seeds: other gates, the two controls without a gate on x, and mixers that can forget
    "elementwise@query": {"gate": "elementwise@query"},
    "static": {"gate": "elementwise", "gate_input": "static"},
    "rms": {"readout_norm": "rms"},
    "non_sparse": {"gate": "elementwise", "gate_activation": "non_sparse"},
    "silu": {"gate": "elementwise", "gate_activation": "silu"},
    "cosformer": {"attention": "cosformer"},
    "cosformer gated": {"attention": "cosformer", "gate": "elementwise"},
    "gla": {"attention": "gla"},
    "gla gated": {"attention": "gla", "gate": "elementwise"},
    "mamba2": {"attention": "mamba2"},
    "mamba2 gated": {"attention": "mamba2", "gate": "elementwise"},
    "gated_deltanet": {"attention": "gated_deltanet"},
    "gated_deltanet gated": {"attention": "gated_deltanet", "gate": "elementwise"},
    "two layers": {"n_layer": 2},
    "two layers elementwise": {"n_layer": 2, "gate": "elementwise"},
    "two layers headwise": {"n_layer": 2, "gate": "headwise"},
}
seeds = [0, 1, 2, 3, 4]  # of the exploratory arms
seeds_of = {
    "elementwise@query": seeds, "static": seeds, "rms": seeds, "non_sparse": seeds, "silu": seeds, "cosformer": seeds,
    "cosformer gated": seeds, "gla": seeds, "gla gated": seeds, "mamba2": seeds, "mamba2 gated": seeds,
    "gated_deltanet": seeds, "gated_deltanet gated": seeds, "two layers": seeds, "two layers elementwise": seeds,
    "two layers headwise": seeds,
}  # fmt: skip
seeds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]  # of all others

# all about the queries that are no triggers. A pilot (seed 100) fixed the task and the thresholds before the first run:
# uniform weights would put 0.065 on <s>, and write 0.0099 of the residual stream of it
claim_base = {
    "of": ["meters", "kinds", "other", "share"],
    "family_reason": "declared before 0.5, when the claims about one number were a family",
}
claims = {
    "instrument: without a gate the weight on <s> is over 0.5": {
        "contrast": "none",
        "above": 0.5,
        "in": 9,
    },
    "elementwise halves the weight's excess over uniform": {
        "contrast": "0.5 * none - elementwise",
        "above": -0.0326,
        "sides": 1,
        "family": "weight",
    },
    "headwise halves the weight's excess over uniform": {
        "contrast": "0.5 * none - headwise",
        "above": -0.0326,
        "sides": 1,
        "family": "weight",
    },
    "elementwise halves the effective sink's excess": {
        "contrast": "0.5 * none - elementwise",
        "above": -0.0049,
        "sides": 1,
        "of": ["meters", "kinds", "other", "effective"],
        "family": "effective sink",
    },
    "headwise halves the effective sink's excess": {
        "contrast": "0.5 * none - headwise",
        "above": -0.0049,
        "sides": 1,
        "of": ["meters", "kinds", "other", "effective"],
        "family": "effective sink",
    },
}

prepare = "backcopy"

base = {
    "n_layer": 1, "n_head": 1, "n_embd": 64, "block_size": 64, "position": "learned", "batch_size": 64,
    "expand": 1, "state_size": 64, "max_iters": 1000, "warmup_iters": 50, "learning_rate": 3e-3,
    "eval_interval": 50, "device": "cpu", "dtype": "float32",
}  # fmt: skip
