"""
log_linear.py with rows that begin with one token of filler: keys stand at odd positions and values at even ones.

Level 1 is then the value before a key, and no longer the key before a value. Arms with a convolution, which shows the
token before whatever the position, do not run.
"""

include = "log_linear.py"

name = "log_linear_shifted"
arms = {
    "plain": {}, "plain sigmoid": {"gate": "elementwise"},
    "guo": {"levels": "log_linear"}, "guo sigmoid": {"levels": "log_linear", "gate": "elementwise"},
    "merged": {"levels": "merged"}, "merged sigmoid": {"levels": "merged", "gate": "elementwise"},
}  # fmt: skip
base = {"short_conv": 0}
data = {"shift": 1}
claims = {
    "log-linear states (Guo) change accuracy": {"contrast": "guo - plain"},
    "merged ones do": {"contrast": "merged - plain"},
    "the gate adds to Guo's": {"contrast": "guo sigmoid - guo"},
    "the gate adds to merged ones": {"contrast": "merged sigmoid - merged"},
}
