"""Tensor functions that know nothing of files or runs: the recurrence, the parts of layers, the loss, sampling."""
