"""
The sink in a minute: two arms of sink.py, two seeds, 600 steps. `make demo` runs it.

It shows what happens, and decides nothing: sink.py has the claims and their seeds.
"""

include = "sink.py"

name = "sink_demo"
arms = {"none": {}, "headwise": {"gate": "headwise"}}
seeds = [0, 1]
seeds_of = {}
claims = {}

data = {"train_size": 38_400, "val_size": 500}

base = {"max_iters": 600}
