"""
A hybrid in the shape of Qwen3-Next: three Gated DeltaNet layers with their published gate, then gated softmax.

    python data/pystdlib/prepare.py
    torchrun --standalone --nproc_per_node=1 train.py config/hybrid.py

Result: 1.347 nats, 1.94 bits per byte on the validation split after 300 steps of 2,048 tokens (one seed, a minute of
one CPU core).
"""

include = "pystdlib.py"

out_dir = "out/hybrid"

attention = "gated_deltanet,gated_deltanet,gated_deltanet,softmax"
gate = "native,native,native,elementwise"
qk_norm = True
n_kv_head = 2

batch_size = 8
max_iters = 300
learning_rate = 5e-3
warmup_iters = 24
eval_interval = 300
