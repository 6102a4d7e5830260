"""
cosFormer linear attention, with an elementwise sigmoid gate after its readout: one arm of the matrix.

The recipe and its cost: base.py. Result: not run yet.
"""

include = "base.py"

attention = "cosformer"
gate = "elementwise"
out_dir = "out/wikitext103/cosformer_gated"
