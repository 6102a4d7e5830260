"""
Does a sink appear in text at this size? A look at two seeds, where sinks are strongest in small models.

Gu et al. 2024 (2410.10781) find them strongest with a fixed first token, learned positions and weight decay 0.5. Four
runs of 3,000 steps of 2,048 bytes take half an hour on two CPU cores.

Result (results/sink_text/): no sink. The first token gets 0.9 and 1.4% of the weight without a gate, 0.8 and 0.8% with
it (uniform: 1.1%). The loss is 1.906, 1.957 without the gate and 1.835, 1.918 with it. The rows are on the first
version of the text (commit d8014b5); a later run is on another.
"""

include = "base/bytes.py"

name = "sink_text"
arms = {"none": {}, "elementwise": {"gate": "elementwise"}}
seeds = [0, 1]

data = {"row_len": 512, "val_fraction": 0.015}

base = {
    "block_size": 512,
    "batch_size": 4,
    "position": "learned",
    "weight_decay": 0.5,
    "learning_rate": 2e-3,
    "warmup_iters": 100,
    "max_iters": 3000,
    "eval_interval": 500,
    "dtype": "bfloat16",
}
