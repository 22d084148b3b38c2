"""What ranks do together: collectives, their log, and agreement between ranks."""
