"""Gated linear attention, without any gate: one arm of the matrix (base.py has the recipe and the cost). Result: not run yet."""

include = "base.py"

attention = "gla"
gate = "none"
out_dir = "out/wikitext103/gla"
