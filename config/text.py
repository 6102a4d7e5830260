"""
Your own text files, as bytes: gated linear attention (GLA), 4 layers x 128, an elementwise gate.

    python data/text/prepare.py notes/ book.txt
    torchrun --standalone --nproc_per_node=1 train.py config/text.py

Result on the documents of docs/ (`docs/ --val=docs/gates.md`), 74,000 bytes: 1.814 nats a byte after 300 steps of 2,048
tokens, 8 passes over the text (one seed, 50 seconds of one CPU core). Without dropout it is lowest at step 200, 1.924. A
longer text is better off with `--dropout=0 --ngram_rows=4096`.
"""

include = "pystdlib.py"

dataset = "data/text"
out_dir = "out/text"

attention = "gla"
ngram_rows = 0
dropout = 0.2

batch_size = 8
max_iters = 300
warmup_iters = 24
eval_interval = 300
