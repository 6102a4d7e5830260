"""
What the experiments on running text share: a small GPT on the bytes of Python's standard library, read by its loss.

The same 0.5 MB of text validates every seed. A rate is chosen by the loss at the end of a schedule, on two seeds that
are not compared.
"""

metric = "val_loss"

prepare = "pystdlib"
data = {"val_fraction": 0.05, "seed": 0}
learning_rates = [1.5e-3, 3e-3, 6e-3]
select_by = "last"
selection_base = {"meters": False}
pair_spread = 0.02  # in nats, of horizon.py's pilot
base = {
    "n_layer": 4,
    "n_embd": 128,
    "n_head": 4,
    "block_size": 256,
    "batch_size": 8,
    "device": "cpu",
    "dtype": "float32",
    "warmup_iters": 150,
    "eval_interval": 750,
    "eval_tokens": 100_000,  # of the curve; the loss that is compared is that of the whole split
    "threads": 1,
}
