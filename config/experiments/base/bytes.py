"""
What the experiments on running text share: a small GPT on the bytes of Python's standard library, read by its loss.
"""

seeds = [0]
metric = "val_loss"

prepare = "pystdlib"
data = {"val_fraction": 0.015}

base = {
    "n_layer": 4,
    "n_embd": 128,
    "n_head": 4,
    "block_size": 256,
    "batch_size": 8,
    "eval_batch_size": 32,
    "device": "cpu",
    "dtype": "float32",
}
