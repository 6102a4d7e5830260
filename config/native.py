"""
Mamba-2 with its published SiLU gate (gate = "native"), on the data and with the steps of pystdlib.py.

    python data/pystdlib/prepare.py
    torchrun --standalone --nproc_per_node=1 train.py config/native.py
"""

include = "pystdlib.py"

out_dir = "out/native"

attention = "mamba2"
gate = "native"

batch_size = 8
max_iters = 300
eval_interval = 300
