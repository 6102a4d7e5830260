"""
After the fact: the matrix's gated softmax once more, at the learning rate that softmax without a gate chose.

In the matrix it had chosen 3e-2 by less than a tenth of a point, and lost two seeds of five at both sizes. This asks
whether that was the rate. Not part of the matrix's claims; exploratory. 10 runs, five minutes on two CPU cores.
"""

name = "matrix_softmax"
arms = {
    "softmax sigmoid": {"attention": "softmax", "gate": "elementwise"},
}
settings = {
    "4 heads": {"n_head": 4},
    "2 heads": {"n_head": 2},
}
seeds = [0, 1, 2, 3, 4]

prepare = "mqar"
data = {"slices": "80/2,80/5,80/10,80/20", "vocab_size": 96, "train_size": 16_000, "val_size": 250}
scores = {"longer": {"batch_size": 50, "block_size": 320}}
score_data = {"slices": "80/20,160/20,320/20,160/40,320/40", "vocab_size": 96, "train_size": 1, "val_size": 200}

base = {
    "n_layer": 2,
    "n_embd": 64,
    "head_dim": 8,
    "state_size": 8,
    "mlp_ratio": 2,
    "block_size": 320,
    "expand": 1,
    "short_conv": 4,
    "init": "pytorch",
    "batch_size": 24,
    "max_iters": 800,
    "learning_rate": 1e-2,
    "warmup_iters": 50,
    "eval_interval": 200,
    "eval_batch_size": 250,
    "device": "cpu",
    "dtype": "float32",
}
