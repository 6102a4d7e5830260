"""
Can a trained model be given a gate? Added after half of the steps, from identity, against a gate from the start.

Two parts of 300 steps on the same 600 kB: the second starts from the weights that the first one ends with, with fresh
moments, a warmup of its own and a decay. "never" has no gate, "late" gets one for the second part (sigmoid2, whose
weights start at zero: the same function), "late fast" the same with ten times the learning rate for the gate's weights,
and "start" has it in both. Qiu et al. (2025, A.7) report that a gate added in continued training does not help. In a
pilot pairs differed with a spread of 0.02; five seeds then see 0.03 of one pair of arms. A gain is a loss without minus
a loss with, in nats a byte, of the whole validation split. The claims were written before the first run. The rows are
on the first version of the text (commit d8014b5); a later run is on another.
"""

include = "base/bytes.py"

name = "late_gate"
seeds = [10, 11, 12, 13, 14]
mixers = ["softmax", "gated_deltanet"]
variants = {
    "first": {"decay_lr": False},
    "first gated": {"decay_lr": False, "gate": "elementwise", "gate_activation": "sigmoid2"},
    "never": {"init_from_arm": "first"},
    "late": {"init_from_arm": "first", "gate": "elementwise", "gate_activation": "sigmoid2"},
    "late fast": {"init_from_arm": "first", "gate": "elementwise", "gate_activation": "sigmoid2", "new_lr_scale": 10},
    "start": {"init_from_arm": "first gated", "gate": "elementwise", "gate_activation": "sigmoid2"},
}

claim_base = {"pool": mixers, "above": 0, "sides": 1}
claims = {
    "a gate from the start lowers the loss, pooled over two mixers": {
        "contrast": "never - start",
        "family": "from the start",
    },
    "a gate added late lowers the loss, pooled": {"contrast": "never - late", "family": "late"},
    "a gate added late stays above one from the start, pooled": {
        "contrast": "late - start",
        "family": "late against the start",
    },
    "ten times the rate for the new weights lowers the loss, pooled": {
        "contrast": "late - late fast",
        "family": "the rate of the new weights",
    },
}

base = {
    "max_iters": 300,
    "warmup_iters": 30,
    "learning_rate": 3e-3,
    "eval_interval": 100,
    "eval_tokens": 30_000,
    "threads": 1,
    "dtype": "bfloat16",
}
