"""What a model and an optimizer will need, found without allocating them."""
