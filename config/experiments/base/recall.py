"""
What the experiments on the smallest recall task share: MQAR with 4 pairs, 2 of them asked for, in rows of 64 tokens.

The model is cosFormer in 2 layers x 64, which minimum.py fixed before its first run. An experiment includes this file,
and names what it compares; the claim below stands unless the experiment has claims of its own.
"""

arms = {"none": {"gate": "none"}, "elementwise": {"gate": "elementwise"}}
solved_above = 0.9
claims = {"the gate adds more than 5 points": {"contrast": {"elementwise": 1, "none": -1}, "above": 0.05}}

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
    "batch_size": 64,
    "max_iters": 1500,
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
