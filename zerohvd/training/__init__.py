"""A step and an optimizer's state, as far as they need no tensor: shared by the adapters."""
