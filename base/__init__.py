"""What a run needs around its model: devices and memory, folders, files, checkpoints, its start and
its end."""
