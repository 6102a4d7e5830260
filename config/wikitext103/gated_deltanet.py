"""
Gated DeltaNet, without any gate: one arm of the matrix.

The recipe and its cost: base.py. Result: not run yet.
"""

include = "base.py"

attention = "gated_deltanet"
gate = "none"
out_dir = "out/wikitext103/gated_deltanet"
