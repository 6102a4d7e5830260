"""
tinyshakespeare by nanoGPT's recipe for a CPU: 4 layers x 128, softmax, 64 characters of context, 2,000 steps.

    python data/shakespeare_char/prepare.py
    torchrun --standalone --nproc_per_node=1 train.py config/shakespeare_char.py

Result: 1.776 nats a character of the validation split (one seed, float32); nanoGPT's README reports 1.88.
"""

dataset = "data/shakespeare_char"
out_dir = "out/shakespeare_char"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 64

batch_size = 12
max_iters = 2000
learning_rate = 1e-3
min_lr = 1e-4
beta2 = 0.99

eval_interval = 250
