"""Stage 3: a model's variables as units, gathered when a layer runs and freed after it."""
