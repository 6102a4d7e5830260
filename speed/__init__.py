"""The parts of bench.py: what is measured, against what, and how a ratio becomes a claim."""
