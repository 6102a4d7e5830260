"""
tinyshakespeare by this project's recipe: Muon, n-grams, a convolution and a gate; the steps are 500 of nanoGPT's 2,000.

    python data/shakespeare_char/prepare.py
    torchrun --standalone --nproc_per_node=1 train.py config/shakespeare_muon.py

Result: 1.681 nats a character of the validation split (one seed, 40 seconds of one CPU core); nanoGPT's recipe, which
is shakespeare_char.py, ends at 1.776 after its 2,000 steps, with 0.8M parameters where this has 1.3M.
"""

include = "shakespeare_char.py"

out_dir = "out/shakespeare_muon"

gate = "elementwise"
short_conv = 4
qk_norm = True
rope_base = 100.0
ngram_rows = 1000

optimizer = "muon"
max_iters = 500
learning_rate = 1e-2
muon_lr_scale = 1.5
beta1 = 0.8
beta2 = 0.95
warmup_iters = 25
min_lr = 1e-3
