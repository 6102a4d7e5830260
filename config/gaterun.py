"""
The gate run: nanoGPT's loss by its own recipe for a CPU, in a fraction of its processor time (results/gaterun/).

    python data/pystdlib/prepare.py --most_bytes=1_000_000 --val_fraction=0.1 --out_dir=data/gaterun
    torchrun --standalone --nproc_per_node=1 train.py config/gaterun.py
"""

dataset = "data/gaterun"
out_dir = "out/gaterun"

n_layer = 1
n_head = 2
n_embd = 64
block_size = 64
ngram_rows = 3900
gate = "elementwise"
match_params = True
short_conv = 4
qk_norm = True
rope_base = 100.0

optimizer = "muon"
batch_size = 32
max_iters = 75
learning_rate = 1e-2
muon_lr_scale = 2.5
warmup_iters = 4
min_lr = 2e-3
beta1 = 0.8
beta2 = 0.95

eval_interval = 75
device = "cpu"
dtype = "float32"
threads = 1
