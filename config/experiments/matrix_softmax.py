"""
The matrix's gated softmax once more, at the learning rate that softmax without a gate chose.

In the matrix, gated softmax chose 3e-2 by less than a tenth of a point, and failed on two seeds of five at both sizes.
This experiment asks whether the rate was the cause. It was added after the fact, is exploratory, and no part of the
matrix's claims. 10 runs take five minutes on two CPU cores.
"""

include = "base/matrix.py"

name = "matrix_softmax"
arms = {
    "softmax sigmoid": {"attention": "softmax", "gate": "elementwise"},
}

base = {"learning_rate": 1e-2}
