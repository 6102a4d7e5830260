"""
Is the gate's effect larger where the state is smaller? The minimum experiment with heads of 8, 16, 32 and 64.

The width of the model stays 64, so there are 8, 4, 2 heads or 1. All settings have the same number of parameters, and
the state grows with the head: n_head x 2 head_dim x head_dim numbers a layer. The hypothesis was written before the
first run: the gate's gain is more than 5 points at heads of 8, and larger there than at 64. 32 runs take 25 minutes on
two CPU cores.

Result (results/head_width/): inconclusive, with four seeds. No run solves the task at any width. The gain is -0.5
points [-1.1, +0.1] at heads of 8. With a head of 64, two ungated runs rise above chance (41 and 50%), and no gated run
does.
"""

include = "base/recall.py"

name = "head_width"
settings = {
    "heads of 8": {"n_head": 8},
    "heads of 16": {"n_head": 4},
    "heads of 32": {"n_head": 2},
    "heads of 64": {"n_head": 1},
}
seeds = [0, 1, 2, 3]
exploratory = True  # its seeds are too few for any claim to be supported by the exact test
claims = {
    "the gate adds more than 5 points": {"contrast": {"elementwise": 1, "none": -1}, "above": 0.05},
    "it adds more at heads of 8 than at 64": {
        "contrast": {"heads of 8": {"elementwise": 1, "none": -1}, "heads of 64": {"elementwise": -1, "none": 1}},
        "above": 0.0,
    },
}

base = {"position": "none", "readout_norm": "none", "learning_rate": 1e-3}
