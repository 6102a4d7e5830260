"""
A small byte-level GPT on the sources of Python's standard library: 4 layers x 128, gated softmax attention.

    python data/pystdlib/prepare.py
    torchrun --standalone --nproc_per_node=1 train.py config/pystdlib.py

Result: 1.951 nats, 2.814 bits per byte on the validation split after 200 steps of 4,096 tokens (one seed, about a
minute on two CPU cores).
"""

dataset = "data/pystdlib"
out_dir = "out/pystdlib"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 256
attention = "softmax"
gate = "elementwise"

batch_size = 16
max_iters = 200
learning_rate = 2e-3
warmup_iters = 50
eval_interval = 200
