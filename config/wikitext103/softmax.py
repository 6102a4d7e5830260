"""Softmax attention with RoPE, without any gate: one arm of the matrix (base.py has the recipe and the cost). Result: not run yet."""

include = "base.py"

attention = "softmax"
gate = "none"
out_dir = "out/wikitext103/softmax"
