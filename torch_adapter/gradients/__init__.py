"""Gradients from their arrival in the backward pass to this rank's reduced shards."""
