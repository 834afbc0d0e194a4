"""Functions that the peer's scripts import."""
