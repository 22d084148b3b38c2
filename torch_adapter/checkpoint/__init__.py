"""What a checkpoint stores of a torch model and its optimizer, and how it comes back."""
