"""Stage 3: which parameters are gathered together, and when."""
