"""Horovod for torch tensors: array operations, asynchronous collectives, what travels."""
