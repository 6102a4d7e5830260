"""
How high may the learning rate go before it does harm, with the gate and without it, with clipping and without it?

Softmax and Gated DeltaNet on the bytes of the standard library, 300 steps at each rate of a ladder, three seeds. A rate
does harm if the loss at its end is higher than at the best rate by 0.1 nats or more, or is not finite. The rows hold
the spikes of the training loss and the largest activation, too. Three seeds show these, and decide no claim.
"""

include = "base/bytes.py"

name = "text_stability"
seeds = [30, 31, 32]
arms = {
    "softmax": {"attention": "softmax"},
    "softmax sigmoid": {"attention": "softmax", "gate": "elementwise"},
    "gated_deltanet": {"attention": "gated_deltanet"},
    "gated_deltanet sigmoid": {"attention": "gated_deltanet", "gate": "elementwise"},
}
settings = {"clipped": {"grad_clip": 1.0}, "not clipped": {"grad_clip": None}}
learning_rates = [1e-3, 3e-3, 1e-2, 3e-2, 1e-1]

base = {
    "max_iters": 300,
    "warmup_iters": 30,
    "eval_interval": 150,
    "eval_tokens": 20_000,  # of the curve and the rates; the loss that is compared is that of the whole split
    "log_interval": 5,
    "threads": 1,
}
