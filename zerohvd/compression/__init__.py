"""What goes over the wire in the place of gradients and parameters: policies, packing, rounding."""
