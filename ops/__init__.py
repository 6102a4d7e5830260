"""Tensor functions that know nothing of files or runs: recurrence, parts of layers, loss, how a
token is drawn."""

IGNORE = -100  # the target where nothing is predicted, as in torch's cross_entropy
