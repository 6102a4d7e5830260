"""
Mamba-2 with its published SiLU gate (gate = "native"), on the data of pystdlib.py.

    python data/pystdlib/prepare.py
    torchrun --standalone --nproc_per_node=1 train.py config/native.py

Result: 1.540 nats, 2.22 bits per byte on the validation split after 300 steps of 2,048 tokens (one seed, five minutes
on two CPU cores).
"""

include = "pystdlib.py"

out_dir = "out/native"

attention = "mamba2"
gate = "native"

batch_size = 8
max_iters = 300
eval_interval = 300
