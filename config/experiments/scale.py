"""
What does a gate gain in models of 12M parameters on 31M tokens, at equal parameters? Softmax and Gated DeltaNet.

6 layers x 384, 512 tokens of bpe:4096 on data/pylib, 950 steps of 64 rows: 31M tokens, each read about once, 14 times
the parameters and, counted in bytes, 8 times the text of one_harness.py. All have a convolution of 4 on q, k and v. A
gated model has a narrower MLP, so that it has the parameters of the ungated one. The rate, 2e-3 behind 100 steps of
warmup and falling to a tenth, was not chosen: no run was made before these. A gain is a loss of the whole validation
split (nats a token) without the sigmoid gate minus one with it.

For one GPU, in bfloat16, compiled: three seeds at a time, so far as its minutes go. The claims are about six seeds.
They were written before the first run.

    python experiment.py config/experiments/scale.py --jobs=6
"""

name = "scale"
metric = "val_loss"
mixers = ["softmax", "gated_deltanet"]
variants = {"none": {}, "sigmoid": {"gate": "elementwise", "match_params": True}}
seeds = [61, 62, 63, 64, 65, 66]
first_arms = ["softmax", "softmax sigmoid"]

prepare = "pylib"
data = {"tokenizer": "bpe:4096", "seed": 0}
pair_spread = 0.01  # in nats, a guess

claim_base = {"contrast": "none - sigmoid", "above": 0, "sides": 1}
claims = {
    "the gate lowers the loss of softmax": {"pool": ["softmax"]},
    "it lowers the loss of Gated DeltaNet": {"pool": ["gated_deltanet"]},
    "MIXER gains": {"each": mixers, "sides": 2, "exploratory": True},
}

base = {
    "n_layer": 6,
    "n_embd": 384,
    "n_head": 6,
    "block_size": 512,
    "batch_size": 64,
    "short_conv": 4,
    "max_iters": 950,
    "warmup_iters": 100,
    "learning_rate": 2e-3,
    "min_lr": 2e-4,
    "eval_interval": 190,
    "eval_tokens": 131_072,  # of the curve; the loss that is compared is that of the whole split
    "meters": False,
    "device": "cuda",
    "dtype": "bfloat16",
}
