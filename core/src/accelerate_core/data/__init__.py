"""Divide data over ranks, order and read it, and track the position in an epoch."""
