"""
Your own text files, as bytes: gated linear attention (GLA), 4 layers x 128, an elementwise gate.

    python data/text/prepare.py notes/ book.txt
    torchrun --standalone --nproc_per_node=1 train.py config/text.py
"""

include = "pystdlib.py"

dataset = "data/text"
out_dir = "out/text"

attention = "gla"
gate = "elementwise"

batch_size = 8
max_iters = 300
eval_interval = 300
