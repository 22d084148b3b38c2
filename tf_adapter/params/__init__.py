"""Where variables live: layouts, flat buffers, the pieces that this rank owns."""
