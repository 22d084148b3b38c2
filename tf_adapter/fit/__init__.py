"""model.fit on many ranks: the few patches of Keras, metrics, uneven batches."""
