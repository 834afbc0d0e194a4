"""`accelerate-core estimate-memory`."""
