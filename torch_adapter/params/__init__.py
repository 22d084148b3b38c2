"""Where parameters live: names, flat buffers, the pieces that this rank owns."""
