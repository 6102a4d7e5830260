"""
The minimum experiment: does an elementwise sigmoid gate let the plainest linear attention solve a small recall task?

cosFormer without denominator, norm or positions; 4 pairs, 2 of them asked for; 2 layers x 64. Everything that could
be tuned was fixed before the first run. Success: the gated model above 75%, the ungated one below 55%, in every seed.
Failure: the two means within 3 points, or a run that is not finite. Anything else is in between. The claim is judged
besides: a gain of more than 5 points. Twenty runs, about 16 minutes on two CPU cores; `make demo` runs three seeds.

Result (ten seeds, results/minimum/): failure. None 27.1%, elementwise 25.5%, of which 25% is chance among the values in
context; the gain is -1.6 points (95% interval -3.9 to +0.6), and so not more than 5.
"""

name = "minimum"
arms = {"none": {"gate": "none"}, "elementwise": {"gate": "elementwise"}}
seeds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
baseline = "none"
treatment = "elementwise"
success_above = 0.75
success_below = 0.55
failure_within = 0.03
solved_above = 0.9
claims = {
    "the gate adds more than 5 points": {"contrast": {"elementwise": 1, "none": -1}, "above": 0.05},
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
    "n_head": 4,
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
