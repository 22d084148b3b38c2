"""What this rank holds and moves; what a run does while it runs."""
