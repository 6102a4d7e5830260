"""
Does the gate lower WikiText-103's word perplexity by more than 3%? 125M parameters, five mixers, five seeds.

The recipe of config/wikitext103/base.py, 0.6B tokens a run. Each arm chooses its learning rate on another seed, by runs
of a third. A gain of 3% is a difference of 0.0305 in the logarithm of the test split's word perplexity,
without minus with. The claims were written before the first run. Five seeds support a claim that stands alone, so that
those by mixer are exploratory. Several machines may share out_dir, each with a call of its own (docs/wikitext103.md).
"""

name = "wikitext103"
seeds = [0, 1, 2, 3, 4]
metric = "val_loss"
mixers = ["softmax", "cosformer", "gla", "mamba2", "gated_deltanet"]
variants = {
    "none": {},
    "sigmoid": {"gate": "elementwise"},
    "native": {"gate": "native", "mixers": ["gla", "mamba2", "gated_deltanet"]},
}

prepare = "wikitext103"
scores = {"test": {"split": "test", "batch_size": 16}}

processes_per_run = 1  # a GPU each; 8: each run has the eight GPUs of a node, under torchrun

learning_rates = [3e-4, 6e-4, 1.2e-3]
selection_seeds = [100]
selection_iters = 345
pair_spread = 0.01  # of the logarithm of a perplexity, a guess

claim_base = {
    "contrast": "none - sigmoid",
    "above": 0,
    "sides": 1,
    "of": ["log", "scores", "test", "word_perplexity"],
    "family_reason": "declared before 0.5, when a claim named its family without a reason",
}
claims = {
    "in linear mixers and SSMs the gate lowers word perplexity by more than 3%": {
        "pool": ["cosformer", "gla", "mamba2", "gated_deltanet"],
        "above": 0.0305,
        "family": "linear",
    },
    "by more than in softmax": {
        "pool": "0.25 * cosformer + 0.25 * gla + 0.25 * mamba2 + 0.25 * gated_deltanet - softmax",
        "family": "linear against softmax",
    },
    "the native gate is lower than the sigmoid gate, pooled over three mixers": {
        "contrast": "sigmoid - native",
        "pool": ["gla", "mamba2", "gated_deltanet"],
        "family": "native",
    },
    "by more than 3% in MIXER": {
        "each": mixers,
        "above": 0.0305,
        "family": "by mixer",
        "exploratory": True,
    },
}

base = {
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "block_size": 1024,
    "vocab_size": 50257,
    "dropout": 0.1,
    "batch_size": 16,
    "gradient_accumulation_steps": 32,  # 524,288 tokens a step, on 1 GPU or on 8
    "max_iters": 1150,
    "warmup_iters": 100,
    "weight_decay": 0.1,
    "grad_clip": 1.0,
    "eval_interval": 115,
    "device": "cuda",
    "dtype": "bfloat16",
}
