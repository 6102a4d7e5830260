"""
Your own text files, as bytes: gated linear attention (GLA), 4 layers x 128, an elementwise gate.

    python data/text/prepare.py notes/ book.txt
    torchrun --standalone --nproc_per_node=1 train.py config/text.py

Result on three documents of this repository, 55,577 bytes, and a fourth of 4,224 bytes for validation: 2.314 nats a
byte after 300 steps of 2,048 tokens, 11 passes over the text (one seed, five minutes on one busy CPU core).
"""

include = "pystdlib.py"

dataset = "data/text"
out_dir = "out/text"

attention = "gla"

batch_size = 8
max_iters = 300
eval_interval = 300
