"""
What the experiments on running text share: a small GPT on the bytes of Python's standard library, read by its loss.
"""

metric = "val_loss"

prepare = "pystdlib"
# 360 kB of the old text to validate on: the error of a paired difference from the choice of bytes is about 0.003 then
data = {"val_fraction": 0.03}

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
