"""Training that goes on after ranks have been lost: copies in memory, and starting again."""
