"""
The small version, for a laptop: gated softmax, 4 x 256, T = 256, 16.3M parameters (12.9M of them the embedding).

400 steps of 4,096 tokens, about 20 minutes on two CPU cores. Other arms: --attention=gla --gate=none ...

    python data/wikitext103/prepare.py
    python train.py config/wikitext103/laptop.py

Result: not run yet on the training split. Trained on the validation articles instead (wikitext103-mini): 6.358 nats a
token, 1,612 word perplexity, 2.042 bits per byte on the test articles after 200 steps, and it overfits from there on.
"""

include = "base.py"

out_dir = "out/wikitext103/laptop"

n_layer = 4
n_head = 4
n_embd = 256
block_size = 256
gate = "elementwise"

gradient_accumulation_steps = 1
max_iters = 400
learning_rate = 1e-3
warmup_iters = 40
eval_interval = 200
