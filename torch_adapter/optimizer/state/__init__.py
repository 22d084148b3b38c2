"""The state of an optimizer: whole outside, sharded inside; checked when it is loaded."""
