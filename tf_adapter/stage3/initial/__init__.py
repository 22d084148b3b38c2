"""The first values of a model that no rank ever holds whole."""
