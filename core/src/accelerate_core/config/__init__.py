"""Typed settings and where each value came from. Nothing here imports torch."""
