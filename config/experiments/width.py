"""
Does the order of the small recipes hold at 6 x 384? AdamW and Muon, without a gate and with one: a look, two seeds.

Muon's recipe of config/pystdlib.py without its n-grams, on the bytes of data/pylib: 10.7M parameters, 300 steps of
4,096 tokens. A gated model has a narrower MLP, so that it has the parameters of the ungated one. In the gate run's
small models Muon ends lower than AdamW, and a gate lowers the loss of Muon's. Muon's rate is that of 4 x 128; AdamW
has 1e-3 and its usual beta1 of 0.9. None was chosen at this width. Two seeds decide nothing: all claims are
exploratory, and say which way both seeds point.
"""

name = "width"
metric = "val_loss"
seeds = [71, 72]
arms = {
    "adamw": {"optimizer": "adamw", "learning_rate": 1e-3, "beta1": 0.9},
    "adamw sigmoid": {
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "beta1": 0.9,
        "gate": "elementwise",
        "match_params": True,
    },
    "muon": {},
    "muon sigmoid": {"gate": "elementwise", "match_params": True},
}

prepare = "pylib"
data = {"seed": 0}

claim_base = {"exploratory": True}
claims = {
    "Muon ends lower than AdamW, without a gate": {"contrast": "adamw - muon", "above": 0, "in": 2},
    "Muon ends lower than AdamW, with a gate": {
        "contrast": "adamw sigmoid - muon sigmoid",
        "above": 0,
        "in": 2,
    },
    "the gate lowers the loss of AdamW's": {
        "contrast": "adamw - adamw sigmoid",
        "above": 0,
        "in": 2,
    },
    "the gate lowers the loss of Muon's": {"contrast": "muon - muon sigmoid", "above": 0, "in": 2},
}

base = {
    "n_layer": 6,
    "n_embd": 384,
    "n_head": 6,
    "block_size": 256,
    "batch_size": 16,
    "short_conv": 4,
    "qk_norm": True,
    "rope_base": 1000.0,
    "optimizer": "muon",
    "learning_rate": 1e-2,
    "muon_lr_scale": 1.5,
    "beta1": 0.8,
    "max_iters": 300,
    "warmup_iters": 20,
    "eval_interval": 100,
    "eval_tokens": 65_536,
    "eval_whole": False,
    "meters": False,
    "device": "cpu",
    "dtype": "bfloat16",
}
