"""What goes over the wire instead of plain values: policies, and packing with this framework."""
