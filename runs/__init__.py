"""What a run needs around its model: devices and memory, folders, files, checkpoints, where it starts, how it ends."""
