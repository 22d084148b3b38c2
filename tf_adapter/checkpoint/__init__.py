"""What a checkpoint stores of a Keras model and its optimizer, and how it comes back."""
