"""`accelerate-core runs`."""
