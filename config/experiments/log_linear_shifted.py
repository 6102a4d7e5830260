"""
log_linear.py with rows that begin with one token of filler: keys stand at odd positions and values at even ones.

Level 1 is then the value before a key, and no longer the key before a value.
"""

include = "log_linear.py"

name = "log_linear_shifted"
data = {"shift": 1}
