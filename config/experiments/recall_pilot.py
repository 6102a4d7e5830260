"""
Is recall.py's task one that every mixer solves without a gate, neither at once nor never? On seeds of its own.

Passed: each mixer gets to 98% before the horizon in nine runs of ten, and in all ten not before step 150 (log 150 is
5.01). If a count fails, the task is changed here first, before a run of recall.py.
"""

include = "recall.py"

name = "recall_pilot"
seeds = [360, 361, 362, 363, 364, 365, 366, 367, 368, 369]
selection_seeds = [370, 371, 372]
arms = {
    "softmax": {"attention": "softmax"},
    "cosformer": {"attention": "cosformer"},
    "gla": {"attention": "gla"},
    "mamba2": {"attention": "mamba2"},
    "gated_deltanet": {"attention": "gated_deltanet"},
}

claims = {
    "softmax gets to 98%": {"contrast": {"softmax": -1}, "above": -0.5, "in": 9, "of": ["lost", 0.98]},
    "softmax not before step 150": {"contrast": {"softmax": 1}, "above": 5.01, "in": 10, "of": ["log_steps", 0.98]},
    "cosformer gets to 98%": {"contrast": {"cosformer": -1}, "above": -0.5, "in": 9, "of": ["lost", 0.98]},
    "cosformer not before step 150": {"contrast": {"cosformer": 1}, "above": 5.01, "in": 10, "of": ["log_steps", 0.98]},
    "gla gets to 98%": {"contrast": {"gla": -1}, "above": -0.5, "in": 9, "of": ["lost", 0.98]},
    "gla not before step 150": {"contrast": {"gla": 1}, "above": 5.01, "in": 10, "of": ["log_steps", 0.98]},
    "mamba2 gets to 98%": {"contrast": {"mamba2": -1}, "above": -0.5, "in": 9, "of": ["lost", 0.98]},
    "mamba2 not before step 150": {"contrast": {"mamba2": 1}, "above": 5.01, "in": 10, "of": ["log_steps", 0.98]},
    "gated_deltanet gets to 98%": {"contrast": {"gated_deltanet": -1}, "above": -0.5, "in": 9, "of": ["lost", 0.98]},
    "gated_deltanet not before step 150": {
        "contrast": {"gated_deltanet": 1},
        "above": 5.01,
        "in": 10,
        "of": ["log_steps", 0.98],
    },
}
