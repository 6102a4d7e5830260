"""
Softmax attention with one gate value per head, grouped keys and values and QK-norm, on the data of pystdlib.py.

    python data/pystdlib/prepare.py
    torchrun --standalone --nproc_per_node=1 train.py config/headwise.py

Result: 1.953 nats, 2.82 bits per byte on the validation split after 300 steps of 2,048 tokens (one seed, two minutes
on two CPU cores). pystdlib.py itself takes a third more tokens.
"""

include = "pystdlib.py"

out_dir = "out/headwise"

gate = "headwise"
qk_norm = True
n_kv_head = 2

batch_size = 8
max_iters = 300
eval_interval = 300
