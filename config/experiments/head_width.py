"""
Is the gate's effect larger where the state is smaller? The minimum experiment with heads of 8, 16, 32 and 64.

The width of the model stays 64, so there are 8, 4, 2 heads and 1, as many parameters in each setting, and a state that
grows with the head: n_head x 2 head_dim x head_dim numbers a layer. The hypothesis, written before the first run: the
gate's gain is more than 5 points at heads of 8, and larger there than at 64. 32 runs, 25 minutes on two CPU cores.

Result (results/head_width/): no. Nothing is solved at any width; the gain is -0.5 points [-1.1, +0.1] at heads of 8,
and two ungated runs with a head of 64 are on their way (41 and 50%), no gated one is.
"""

name = "head_width"
arms = {"none": {"gate": "none"}, "elementwise": {"gate": "elementwise"}}
settings = {
    "heads of 8": {"n_head": 8},
    "heads of 16": {"n_head": 4},
    "heads of 32": {"n_head": 2},
    "heads of 64": {"n_head": 1},
}
seeds = [0, 1, 2, 3]
solved_above = 0.9
claims = {
    "the gate adds more than 5 points": {"contrast": {"elementwise": 1, "none": -1}, "above": 0.05},
    "it adds more at heads of 8 than at 64": {
        "contrast": {"heads of 8": {"elementwise": 1, "none": -1}, "heads of 64": {"elementwise": -1, "none": 1}},
        "above": 0.0,
    },
}

prepare = "mqar"
data = {
    "seq_len": 64,
    "vocab_size": 16,
    "pairs": 4,
    "queries": 2,
    "power": 1.0,  # uniform offsets
    "filler": "zero",
    "train_size": 10_000,
    "val_size": 1_000,
}

base = {
    "n_layer": 2,
    "n_embd": 64,
    "mlp_ratio": 3,
    "block_size": 64,
    "attention": "cosformer",
    "position": "none",
    "readout_norm": "none",
    "batch_size": 64,
    "max_iters": 1500,
    "learning_rate": 1e-3,
    "warmup_iters": 100,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "eval_interval": 100,
    "eval_batch_size": 250,
    "device": "cpu",
    "dtype": "float32",
}
