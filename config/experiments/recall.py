"""
What does a gate on the readout buy in recall beyond the scale of its branch: its start, its input, its activation?

MQAR of 64 tokens and 80 ids, 2 to 16 pairs in turn, two layers x 64, two heads of 32, a width-4 convolution and
PyTorch's initialisation everywhere. The learning rate is constant after a warmup of 100 steps, so that the step at
which a run gets there does not depend on the horizon; with a decay the last points of accuracy waited for it
(results/LOG.md). A pilot on seeds of its own confirmed the task: ungated, all fifty runs got to 98%, after 160
to 1,200 steps. Chance, a guess among the values in context, is 13%; a run ends after two evaluations at 98%, the
ceiling; the horizon is 1,500 steps.

Arms of each mixer: no gate; the published sigmoid gate, which starts at a half; a wide gate, 2 sigmoid(g + b), from a
half and from one, alike in all else; a wide constant from one (static); no gate, but the branch halved (fixed half);
no gate, but the output projection's initial weights halved (half init), which AdamW changes twice as fast, relatively.
Three mixers have a native SiLU gate, whose random weights start it around zero, and a SiLU gate from one in the same
place. The number compared is the logarithm of the steps to 90%, that of the horizon for a run that never gets there; a
difference of 0.0953 is a factor of 1.1, one of 0.1398 of 1.15, one of 0.1823 of 1.2. Rates are chosen on seeds 100 to
102, by the area under the curve of 600 steps. A claim pools the mixers; those by mixer are a family of their own, and
exploratory where ten seeds cannot place a spread of 0.25 within the band. All were written before the first run but the
last three, which are exploratory.
"""

name = "recall"
seeds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
solved_above = 0.9
arms = {
    "softmax": {"attention": "softmax"},
    "softmax sigmoid": {"attention": "softmax", "gate": "elementwise"},
    "softmax wide half": {
        "attention": "softmax",
        "gate": "elementwise",
        "gate_activation": "sigmoid2",
        "gate_bias": -1.0986,
    },
    "softmax wide one": {
        "attention": "softmax",
        "gate": "elementwise",
        "gate_activation": "sigmoid2",
        "gate_bias": 0.0,
    },
    "softmax static one": {
        "attention": "softmax",
        "gate": "elementwise",
        "gate_activation": "sigmoid2",
        "gate_input": "static",
    },
    "softmax fixed half": {"attention": "softmax", "branch_scale": 0.5},
    "softmax half init": {"attention": "softmax", "out_init_scale": 0.5},
    "cosformer": {"attention": "cosformer"},
    "cosformer sigmoid": {"attention": "cosformer", "gate": "elementwise"},
    "cosformer wide half": {
        "attention": "cosformer",
        "gate": "elementwise",
        "gate_activation": "sigmoid2",
        "gate_bias": -1.0986,
    },
    "cosformer wide one": {
        "attention": "cosformer",
        "gate": "elementwise",
        "gate_activation": "sigmoid2",
        "gate_bias": 0.0,
    },
    "cosformer static one": {
        "attention": "cosformer",
        "gate": "elementwise",
        "gate_activation": "sigmoid2",
        "gate_input": "static",
    },
    "cosformer fixed half": {"attention": "cosformer", "branch_scale": 0.5},
    "cosformer half init": {"attention": "cosformer", "out_init_scale": 0.5},
    "gla": {"attention": "gla"},
    "gla sigmoid": {"attention": "gla", "gate": "elementwise"},
    "gla wide half": {"attention": "gla", "gate": "elementwise", "gate_activation": "sigmoid2", "gate_bias": -1.0986},
    "gla wide one": {"attention": "gla", "gate": "elementwise", "gate_activation": "sigmoid2", "gate_bias": 0.0},
    "gla static one": {
        "attention": "gla",
        "gate": "elementwise",
        "gate_activation": "sigmoid2",
        "gate_input": "static",
    },
    "gla fixed half": {"attention": "gla", "branch_scale": 0.5},
    "gla half init": {"attention": "gla", "out_init_scale": 0.5},
    "gla native": {"attention": "gla", "gate": "native"},
    "gla silu from one": {"attention": "gla", "gate": "elementwise", "gate_activation": "silu", "gate_bias": 1.278},
    "mamba2": {"attention": "mamba2"},
    "mamba2 sigmoid": {"attention": "mamba2", "gate": "elementwise"},
    "mamba2 wide half": {
        "attention": "mamba2",
        "gate": "elementwise",
        "gate_activation": "sigmoid2",
        "gate_bias": -1.0986,
    },
    "mamba2 wide one": {"attention": "mamba2", "gate": "elementwise", "gate_activation": "sigmoid2", "gate_bias": 0.0},
    "mamba2 static one": {
        "attention": "mamba2",
        "gate": "elementwise",
        "gate_activation": "sigmoid2",
        "gate_input": "static",
    },
    "mamba2 fixed half": {"attention": "mamba2", "branch_scale": 0.5},
    "mamba2 half init": {"attention": "mamba2", "out_init_scale": 0.5},
    "mamba2 native": {"attention": "mamba2", "gate": "native"},
    "mamba2 silu from one": {
        "attention": "mamba2",
        "gate": "elementwise",
        "gate_activation": "silu",
        "gate_bias": 1.278,
        "norm_first": False,
    },
    "gated_deltanet": {"attention": "gated_deltanet"},
    "gated_deltanet sigmoid": {"attention": "gated_deltanet", "gate": "elementwise"},
    "gated_deltanet wide half": {
        "attention": "gated_deltanet",
        "gate": "elementwise",
        "gate_activation": "sigmoid2",
        "gate_bias": -1.0986,
    },
    "gated_deltanet wide one": {
        "attention": "gated_deltanet",
        "gate": "elementwise",
        "gate_activation": "sigmoid2",
        "gate_bias": 0.0,
    },
    "gated_deltanet static one": {
        "attention": "gated_deltanet",
        "gate": "elementwise",
        "gate_activation": "sigmoid2",
        "gate_input": "static",
    },
    "gated_deltanet fixed half": {"attention": "gated_deltanet", "branch_scale": 0.5},
    "gated_deltanet half init": {"attention": "gated_deltanet", "out_init_scale": 0.5},
    "gated_deltanet native": {"attention": "gated_deltanet", "gate": "native"},
    "gated_deltanet silu from one": {
        "attention": "gated_deltanet",
        "gate": "elementwise",
        "gate_activation": "silu",
        "gate_bias": 1.278,
    },
}

prepare = "mqar"
data = {"slices": "64/2,64/4,64/8,64/16", "vocab_size": 80, "train_size": 20_000, "val_size": 64}

# in the pilots no run was at 98% after 600 steps at 1e-3; at 3e-2 softmax needed 112 to 768, and cosFormer
# more than 1,500 in two runs of nine
learning_rates = [3e-3, 1e-2]
widen_rates = False
selection_seeds = [100, 101, 102]
selection_iters = [600]  # at a constant rate, the first 600 steps of a run
pool_rates = True
selection_base = {"meters": False}

pair_spread = 0.25  # of log steps; with and without the sigmoid gate, on five other seeds: 0.10 to 0.31 by mixer

# contrasts are of log steps, so that each is a ratio of steps; over 1: the first arm is slower
claims = {
    # the start alone: the same gate from a half and from one
    "a start at a half slows softmax and cosformer by more than 10%": {
        "contrast": {
            "softmax wide half": 0.5,
            "softmax wide one": -0.5,
            "cosformer wide half": 0.5,
            "cosformer wide one": -0.5,
        },
        "above": 0.0953,
        "sides": 1,
        "of": ["log_steps", 0.9],
        "family": "start",
    },
    "it changes gla, mamba2 and gated_deltanet by less than 20%": {
        "contrast": {
            "gla wide half": 1 / 3,
            "gla wide one": -1 / 3,
            "mamba2 wide half": 1 / 3,
            "mamba2 wide one": -1 / 3,
            "gated_deltanet wide half": 1 / 3,
            "gated_deltanet wide one": -1 / 3,
        },
        "within": 0.1823,
        "of": ["log_steps", 0.9],
        "family": "start",
    },
    "a start at a half changes softmax": {
        "contrast": {
            "softmax wide half": 1,
            "softmax wide one": -1,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "start, by mixer",
    },
    "a start at a half changes cosformer": {
        "contrast": {
            "cosformer wide half": 1,
            "cosformer wide one": -1,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "start, by mixer",
    },
    "a start at a half changes gla": {
        "contrast": {
            "gla wide half": 1,
            "gla wide one": -1,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "start, by mixer",
    },
    "a start at a half changes mamba2": {
        "contrast": {
            "mamba2 wide half": 1,
            "mamba2 wide one": -1,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "start, by mixer",
    },
    "a start at a half changes gated_deltanet": {
        "contrast": {
            "gated_deltanet wide half": 1,
            "gated_deltanet wide one": -1,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "start, by mixer",
    },
    # what depending on the input buys, from the same start
    "input-dependence changes the steps": {
        "contrast": {
            "softmax static one": 0.2,
            "softmax wide one": -0.2,
            "cosformer static one": 0.2,
            "cosformer wide one": -0.2,
            "gla static one": 0.2,
            "gla wide one": -0.2,
            "mamba2 static one": 0.2,
            "mamba2 wide one": -0.2,
            "gated_deltanet static one": 0.2,
            "gated_deltanet wide one": -0.2,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "input",
    },
    "input-dependence changes softmax's steps": {
        "contrast": {
            "softmax static one": 1,
            "softmax wide one": -1,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "input, by mixer",
    },
    "input-dependence changes cosformer's steps": {
        "contrast": {
            "cosformer static one": 1,
            "cosformer wide one": -1,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "input, by mixer",
    },
    "input-dependence changes gla's steps": {
        "contrast": {
            "gla static one": 1,
            "gla wide one": -1,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "input, by mixer",
    },
    "input-dependence changes mamba2's steps": {
        "contrast": {
            "mamba2 static one": 1,
            "mamba2 wide one": -1,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "input, by mixer",
    },
    "input-dependence changes gated_deltanet's steps": {
        "contrast": {
            "gated_deltanet static one": 1,
            "gated_deltanet wide one": -1,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "input, by mixer",
    },
    # the scale of the branch alone
    "a sigmoid gate is a fixed half, within 15%": {
        "contrast": {
            "softmax sigmoid": 0.2,
            "softmax fixed half": -0.2,
            "cosformer sigmoid": 0.2,
            "cosformer fixed half": -0.2,
            "gla sigmoid": 0.2,
            "gla fixed half": -0.2,
            "mamba2 sigmoid": 0.2,
            "mamba2 fixed half": -0.2,
            "gated_deltanet sigmoid": 0.2,
            "gated_deltanet fixed half": -0.2,
        },
        "within": 0.1398,
        "of": ["log_steps", 0.9],
        "family": "scale",
    },
    "in softmax, too": {
        "contrast": {
            "softmax sigmoid": 1,
            "softmax fixed half": -1,
        },
        "within": 0.1398,
        "of": ["log_steps", 0.9],
        "family": "scale, by mixer",
        "exploratory": True,
    },
    "in cosformer, too": {
        "contrast": {
            "cosformer sigmoid": 1,
            "cosformer fixed half": -1,
        },
        "within": 0.1398,
        "of": ["log_steps", 0.9],
        "family": "scale, by mixer",
        "exploratory": True,
    },
    "in gla, too": {
        "contrast": {
            "gla sigmoid": 1,
            "gla fixed half": -1,
        },
        "within": 0.1398,
        "of": ["log_steps", 0.9],
        "family": "scale, by mixer",
        "exploratory": True,
    },
    "in mamba2, too": {
        "contrast": {
            "mamba2 sigmoid": 1,
            "mamba2 fixed half": -1,
        },
        "within": 0.1398,
        "of": ["log_steps", 0.9],
        "family": "scale, by mixer",
        "exploratory": True,
    },
    "in gated_deltanet, too": {
        "contrast": {
            "gated_deltanet sigmoid": 1,
            "gated_deltanet fixed half": -1,
        },
        "within": 0.1398,
        "of": ["log_steps", 0.9],
        "family": "scale, by mixer",
        "exploratory": True,
    },
    # the same half as initial weights alone, which training can undo
    "half of the output projection's initial weights changes the steps": {
        "contrast": {
            "softmax half init": 0.2,
            "softmax": -0.2,
            "cosformer half init": 0.2,
            "cosformer": -0.2,
            "gla half init": 0.2,
            "gla": -0.2,
            "mamba2 half init": 0.2,
            "mamba2": -0.2,
            "gated_deltanet half init": 0.2,
            "gated_deltanet": -0.2,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "initial scale",
    },
    # the native gate against its activation from one
    "a SiLU gate from one is sooner than the native gate by more than 10%": {
        "contrast": {
            "gla native": 1 / 3,
            "gla silu from one": -1 / 3,
            "mamba2 native": 1 / 3,
            "mamba2 silu from one": -1 / 3,
            "gated_deltanet native": 1 / 3,
            "gated_deltanet silu from one": -1 / 3,
        },
        "above": 0.0953,
        "sides": 1,
        "of": ["log_steps", 0.9],
        "family": "native",
    },
    "sooner in gla": {
        "contrast": {
            "gla native": 1,
            "gla silu from one": -1,
        },
        "above": 0.0953,
        "sides": 1,
        "of": ["log_steps", 0.9],
        "family": "native, by mixer",
    },
    "sooner in mamba2": {
        "contrast": {
            "mamba2 native": 1,
            "mamba2 silu from one": -1,
        },
        "above": 0.0953,
        "sides": 1,
        "of": ["log_steps", 0.9],
        "family": "native, by mixer",
    },
    "sooner in gated_deltanet": {
        "contrast": {
            "gated_deltanet native": 1,
            "gated_deltanet silu from one": -1,
        },
        "above": 0.0953,
        "sides": 1,
        "of": ["log_steps", 0.9],
        "family": "native, by mixer",
    },
    # the published default
    "the sigmoid gate changes the steps": {
        "contrast": {
            "softmax sigmoid": 0.2,
            "softmax": -0.2,
            "cosformer sigmoid": 0.2,
            "cosformer": -0.2,
            "gla sigmoid": 0.2,
            "gla": -0.2,
            "mamba2 sigmoid": 0.2,
            "mamba2": -0.2,
            "gated_deltanet sigmoid": 0.2,
            "gated_deltanet": -0.2,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "default",
    },
    # looked at after the runs
    "a gate from one changes the steps": {
        "contrast": {
            "softmax wide one": 0.2,
            "softmax": -0.2,
            "cosformer wide one": 0.2,
            "cosformer": -0.2,
            "gla wide one": 0.2,
            "gla": -0.2,
            "mamba2 wide one": 0.2,
            "mamba2": -0.2,
            "gated_deltanet wide one": 0.2,
            "gated_deltanet": -0.2,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "beside",
        "exploratory": True,
    },
    "half of the branch changes the steps": {
        "contrast": {
            "softmax fixed half": 0.2,
            "softmax": -0.2,
            "cosformer fixed half": 0.2,
            "cosformer": -0.2,
            "gla fixed half": 0.2,
            "gla": -0.2,
            "mamba2 fixed half": 0.2,
            "mamba2": -0.2,
            "gated_deltanet fixed half": 0.2,
            "gated_deltanet": -0.2,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "beside",
        "exploratory": True,
    },
    "the native gate changes the steps": {
        "contrast": {
            "gla native": 1 / 3,
            "gla": -1 / 3,
            "mamba2 native": 1 / 3,
            "mamba2": -1 / 3,
            "gated_deltanet native": 1 / 3,
            "gated_deltanet": -1 / 3,
        },
        "other_than": 0,
        "of": ["log_steps", 0.9],
        "family": "beside",
        "exploratory": True,
    },
}

base = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 2,
    "state_size": 32,
    "expand": 1,
    "mlp_ratio": 2,
    "block_size": 64,
    "short_conv": 4,
    "init": "pytorch",
    "batch_size": 24,
    "max_iters": 1500,
    "warmup_iters": 100,
    "decay_lr": False,
    "eval_interval": 16,
    "eval_batch_size": 256,
    "stop_above": 0.98,
    "device": "cpu",
    "dtype": "float32",
}
