"""`accelerate-core checkpoints` and `merge-weights`."""
