"""
The small version, for a laptop: gated softmax, 4 x 256, T = 256, 16.3M parameters (12.9M of them the embedding), Muon.

400 steps of 4,096 tokens, about 20 minutes on two CPU cores. Other arms: --attention=gla --gate=none ...

    python data/wikitext103/prepare.py
    python train.py config/wikitext103/laptop.py

Result: not run yet on the training split. Trained on the validation articles instead (wikitext103-mini) with
--max_iters=120: 6.168 nats a token, 1,292 word perplexity, 1.981 bits per byte on the test articles. The same shape
under AdamW had 6.358 after its best 200 steps; 200 steps of Muon were no better than 120.
"""

include = "base.py"

out_dir = "out/wikitext103/laptop"

n_layer = 4
n_head = 4
n_embd = 256
block_size = 256
gate = "elementwise"

short_conv = 4
qk_norm = True
rope_base = 1000.0

gradient_accumulation_steps = 1
max_iters = 400
optimizer = "muon"
learning_rate = 3e-3
muon_lr_scale = 2.0
beta1 = 0.8
warmup_iters = 20
eval_interval = 200
