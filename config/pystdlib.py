"""
A small byte-level GPT on the sources of Python's standard library: 4 layers x 128, gated softmax attention.

    python data/pystdlib/prepare.py
    torchrun --standalone --nproc_per_node=1 train.py config/pystdlib.py

Result: 1.317 nats, 1.900 bits per byte on the validation split after 200 steps of 4,096 tokens (one seed, about a
minute of one CPU core).
"""

dataset = "data/pystdlib"
out_dir = "out/pystdlib"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 256
attention = "softmax"
gate = "elementwise"

short_conv = 4
qk_norm = True
rope_base = 1000.0
ngram_rows = 4096

optimizer = "muon"
batch_size = 16
max_iters = 200
learning_rate = 1e-2
muon_lr_scale = 1.5
beta1 = 0.8
warmup_iters = 12
eval_interval = 200
