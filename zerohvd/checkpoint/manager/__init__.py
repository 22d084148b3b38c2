"""Many checkpoints in one folder: which to write, which to keep, writing in the background."""
