"""
How much is recalled with how many bytes of state? Seven mixers, without a gate, with one, and with log-linear states.

MQAR of 64 tokens with 64 ids and 8 or 16 pairs, two layers x 64, four heads of 4, 8 and 16, so that a state grows by
a factor of 2 to 3.8 from size to size, as in "Zoology" (Arora et al. 2023). All take recall.py's rate. One seed is a
look.
"""

name = "state_size"
seeds = [0]
# those whose state has levels
mixers = ["cosformer", "gla", "mamba2", "gated_deltanet", "deltanet", "kda"]
variants = {
    "4": {"head_dim": 4, "state_size": 4},
    "8": {"head_dim": 8, "state_size": 8},
    "16": {"head_dim": 16, "state_size": 16},
    "sigmoid 4": {"head_dim": 4, "state_size": 4, "gate": "elementwise"},
    "sigmoid 8": {"head_dim": 8, "state_size": 8, "gate": "elementwise"},
    "sigmoid 16": {"head_dim": 16, "state_size": 16, "gate": "elementwise"},
    "levels 4": {"head_dim": 4, "state_size": 4, "levels": "log_linear", "mixers": mixers},
    "levels 8": {"head_dim": 8, "state_size": 8, "levels": "log_linear", "mixers": mixers},
    "levels 16": {"head_dim": 16, "state_size": 16, "levels": "log_linear", "mixers": mixers},
}
mixers = ["softmax", "cosformer", "gla", "mamba2", "gated_deltanet", "deltanet", "kda"]  # all seven

prepare = "mqar"
data = {"slices": "64/8,64/16", "vocab_size": 64, "train_size": 20_000, "val_size": 64}

base = {
    "n_layer": 2, "n_embd": 64, "n_head": 4, "expand": 1, "mlp_ratio": 2, "block_size": 64, "short_conv": 4,
    "init": "pytorch", "batch_size": 24, "max_iters": 1000, "warmup_iters": 100, "learning_rate": 1e-2,
    "eval_interval": 100, "meters": False, "device": "cpu", "dtype": "float32", "threads": 1,
}  # fmt: skip
