"""
The hybrid of Qwen3-Next, three layers of Gated DeltaNet and one of softmax, without gates and with its own, on text.

Its gates: Gated DeltaNet's native one in three layers, the elementwise sigmoid gate in the softmax layer. `static` is
the elementwise gate on softmax alone whose value does not depend on the input. The setting is that of text.py.
"""

include = "base/bytes.py"

name = "text_hybrid"
seeds = [11, 12, 13, 14, 15]
arms = {
    "hybrid": {"attention": "gated_deltanet,gated_deltanet,gated_deltanet,softmax"},
    "hybrid gated": {
        "attention": "gated_deltanet,gated_deltanet,gated_deltanet,softmax",
        "gate": "native,native,native,elementwise",
    },
    "softmax": {"attention": "softmax"},
    "softmax static": {"attention": "softmax", "gate": "elementwise", "gate_input": "static"},
}

data = {"val_fraction": 0.03}

learning_rates = [1e-3, 3e-3, 1e-2]
selection_seeds = [100, 101]
select_by = "last"
pool_rates = True
selection_iters = [300]
selection_base = {"meters": False, "eval_whole": False}  # a sample is enough to choose a rate by
pair_spread = 0.02  # in nats, of the pilot of text.py

claims = {
    "its gates lower the hybrid's loss": {
        "contrast": {"hybrid": 1, "hybrid gated": -1},
        "above": 0,
        "sides": 1,
        "family": "hybrid",
    },
    "a static gate lowers softmax's loss": {
        "contrast": {"softmax": 1, "softmax static": -1},
        "above": 0,
        "sides": 1,
        "family": "static",
    },
}

base = {
    "max_iters": 1500,
    "warmup_iters": 150,
    "eval_interval": 375,
    "eval_tokens": 20_000,  # of the curve and the rates; the loss that is compared is that of the whole split
    "threads": 1,
}
