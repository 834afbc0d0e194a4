"""Typed settings, and the source of each value. Importing this package does not import torch."""
