"""The parts of bench.py: what is measured, against what, and the rows that are written."""
