"""What needs neither ranks nor a model: converting a checkpoint, and comparing two of them."""
