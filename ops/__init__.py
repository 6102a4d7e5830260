"""Tensor functions that know nothing of files or runs: recurrence, parts of layers, loss, how a token is drawn."""
