"""
Stability: how high may the learning rate go before training diverges, with the gate and without it?

Every arm is trained at each rate. A run has diverged if it is not finite, or if its validation loss is higher at the
end than at the start. Gradients are clipped at 1, as in every run here. Sixty short runs take about an hour on two CPU
cores.

Result (one seed, results/stability/): no run diverges at rates up to 0.3. With the gate, the loss at the end is lower
in 24 of 30 pairs, and the largest activation in 28. For softmax at rates of 0.01 and more, the loss is lower by a
quarter of a nat.

The rows are on the first version of the text, with tables and split at random by file: the one of commit d8014b5. A
later run is on another text, and belongs in a folder of its own.
"""

include = "base/bytes.py"

name = "stability"
arms = {
    "softmax": {"attention": "softmax"},
    "softmax gated": {"attention": "softmax", "gate": "elementwise"},
    "cosformer": {"attention": "cosformer"},
    "cosformer gated": {"attention": "cosformer", "gate": "elementwise"},
    "gla": {"attention": "gla"},
    "gla gated": {"attention": "gla", "gate": "elementwise"},
    "mamba2": {"attention": "mamba2"},
    "mamba2 gated": {"attention": "mamba2", "gate": "elementwise"},
    "gated_deltanet": {"attention": "gated_deltanet"},
    "gated_deltanet gated": {"attention": "gated_deltanet", "gate": "elementwise"},
}
learning_rates = [1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]

base = {"state_size": 32, "max_iters": 300, "warmup_iters": 30, "eval_interval": 150, "log_interval": 5}
