"""The sharded optimizer: how it is made, updates, keeps its state."""
