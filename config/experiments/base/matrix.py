"""
What the matrix and its second look share: MQAR at 80 tokens, 2 to 20 pairs in turn, four heads of 8 or two.

Each model is also scored on longer rows and on more pairs; block_size is cosFormer's M.
"""

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
    "warmup_iters": 50,
    "eval_interval": 200,
    "eval_batch_size": 250,
    "device": "cpu",
    "dtype": "float32",
}
