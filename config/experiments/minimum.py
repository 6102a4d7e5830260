"""
The minimum experiment: does an elementwise sigmoid gate let the plainest linear attention solve a small recall task?

The mixer is cosFormer without denominator, norm or positions, in 2 layers x 64. The task is MQAR with 4 pairs, 2 of
them asked for, in rows of 64 tokens. Everything was fixed before the first run. Success: the gated model is above 75%
and the ungated one below 55% in every seed. Failure: the two means are within 3 points, or a run is not finite. A gain
of more than 5 points is judged separately. Twenty runs take 16 minutes on two CPU cores.

Result (ten seeds, results/minimum/): failure. Accuracy is 27.1% without the gate and 25.5% with it, where chance among
the values in context is 25%. The gain is -1.6 points (exact 95% interval -4.0 to +0.3), and so not more than 5.
"""

name = "minimum"
seeds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
arms = {"none": {"gate": "none"}, "elementwise": {"gate": "elementwise"}}
solved_above = 0.9
claims = {"the gate adds more than 5 points": {"contrast": "elementwise - none", "above": 0.05}}

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
    "n_head": 4,
    "mlp_ratio": 3,
    "block_size": 64,
    "attention": "cosformer",
    "position": "none",
    "readout_norm": "none",
    "batch_size": 64,
    "max_iters": 1500,
    "warmup_iters": 100,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "eval_interval": 100,
    "eval_batch_size": 250,
    "device": "cpu",
    "dtype": "float32",
}
