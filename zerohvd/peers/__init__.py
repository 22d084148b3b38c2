"""What one rank alone may ask of the others, without their main threads."""
