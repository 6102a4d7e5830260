"""What a run needs around its model: devices and memory, its folder and its loggers, checkpoints,
its start and its end."""
