"""Dispatching: one rank reads, every rank receives its part, one step ahead."""
