"""
Your own text files, as bytes: gated linear attention (GLA), 4 layers x 128, an elementwise gate.

    python data/text/prepare.py notes/ book.txt
    torchrun --standalone --nproc_per_node=1 train.py config/text.py

Result on the documents of docs/ at commit 54437560 (`docs/ --val=docs/gates.md`), 75,000 bytes: 1.801 nats a byte
after 300 steps of 2,048 tokens, 8 passes over the text (one seed, 46 seconds of one CPU core). It overfits without its
dropout. A text of megabytes wants `--dropout=0 --ngram_rows=4096`.
"""

dataset = "data/text"
out_dir = "out/text"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 256
attention = "gla"
short_conv = 4
gate = "elementwise"
dropout = 0.2

optimizer = "muon"
batch_size = 8
max_iters = 300
learning_rate = 1e-2
muon_lr_scale = 1.5
beta1 = 0.8
warmup_iters = 24
eval_interval = 300
