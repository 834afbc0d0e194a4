"""The part that no framework has its own of."""
