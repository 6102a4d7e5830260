"""Models of others: folders of transformers, fla and Mamba-2 read as checkpoints, and checkpoints
written as theirs."""
