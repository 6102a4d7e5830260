"""
The 125M comparison on WikiText-103, what all its arms share: 12 x 768, T = 1024, 0.5M tokens a step, dropout 0.1.

An arm is two flags, --attention and --gate, and a folder of its own. The recipe took a Transformer of this size to a
token perplexity of 18.6 (Poli et al. 2023, table 4.3; up to 100 epochs). This budget: 0.6B tokens an arm (5 epochs),
about 1 GPU-hour on an A100. The larger one, 3.8B tokens (32 epochs): name budget_3.8B.py behind this file.

    python data/wikitext103/prepare.py
    python train.py config/wikitext103/base.py --attention=gla --gate=elementwise --out_dir=out/wikitext103/gla_gated
    torchrun --standalone --nproc_per_node=8 train.py config/wikitext103/base.py config/wikitext103/budget_3.8B.py

Result: not run yet.
"""

dataset = "data/wikitext103"
out_dir = "out/wikitext103/softmax"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
attention = "softmax"
gate = "none"
dropout = 0.1

batch_size = 16
gradient_accumulation_steps = 32  # 16 * 1024 * 32 = 524,288 tokens a step, on 1 GPU or on 8
max_iters = 1150
learning_rate = 6e-4
warmup_iters = 100
weight_decay = 0.1
grad_clip = 1.0
eval_interval = 115
