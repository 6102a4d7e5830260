"""
Which mixers track permutations of three things, and does a gate on the readout change it? parity.py with S3.

The word problem of S3: at every position the product of all permutations so far, of which there are six (chance is
17%). A transition of the delta rule with beta to 2 is a reflection, of which a permutation of three is at most two:
DeltaProduct, with two a token, is meant for it (Siems et al. 2025).
"""

include = "parity.py"

name = "s3"
seeds_of = {"monarch": [0, 1], "monarch sigmoid": [0, 1]}
data = {"task": "s3"}
selection_seeds = [410, 411]
