"""Horovod for TensorFlow tensors: array operations, graph-safe collectives."""
