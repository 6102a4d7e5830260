"""
How much does the loss of a text model depend on the seed? nanoGPT's recipe for a CPU, with this model as it is.

The text is 1 MB of characters of Python's standard library, nearly all of one byte. All five seeds have the same text
and the same split, so that what differs is the weights at the start and the order of the batches. The sizes of later
experiments rest on this noise. nanoGPT's own loss there, 1.88, is of Shakespeare, and compares with no number here.

Result (results/nanogpt_cpu/): 1.536 nats a byte, a standard deviation of 0.0054 over the seeds. The rows are on the
first version of the text (commit d8014b5); a later run is on another.
"""

include = "base/bytes.py"

name = "nanogpt_cpu"
arms = {"softmax": {}}
seeds = [0, 1, 2, 3, 4]

data = {"most_bytes": 1_000_000, "val_fraction": 0.1, "seed": 0}

base = {
    "block_size": 64,
    "batch_size": 12,
    "max_iters": 2000,
    "learning_rate": 1e-3,
    "min_lr": 1e-4,
    "warmup_iters": 100,
    "beta2": 0.99,
    "eval_interval": 250,
    "eval_batch_size": 128,
}
