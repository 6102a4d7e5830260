"""
The small version, for a laptop: 4 x 256, T = 256, 15.9M parameters (12.9M of them the embedding), gated softmax.
"""

dataset = "data/wikitext103"
out_dir = "out/wikitext103/laptop"

n_layer = 4
n_head = 4
n_embd = 256
block_size = 256
attention = "softmax"
gate = "elementwise"
dropout = 0.1

batch_size = 16
max_iters = 1000
learning_rate = 1e-3
warmup_iters = 100
weight_decay = 0.1
eval_interval = 500
