"""Data: which part of it a rank reads, in which order, and where an epoch stands."""
