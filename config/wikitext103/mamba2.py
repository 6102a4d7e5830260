"""
Mamba-2, without any gate: one arm of the matrix.

The recipe and its cost: base.py. Result: not run yet.
"""

include = "base.py"

attention = "mamba2"
gate = "none"
out_dir = "out/wikitext103/mamba2"
