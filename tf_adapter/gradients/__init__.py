"""Gradients from the tape to this rank's reduced shards."""
