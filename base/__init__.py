"""The ground that all else stands on, and which imports nothing else of the project: files, rules
for what comes from outside, the standard streams, tensors in files."""
