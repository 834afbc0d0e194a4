"""What ships with the core beside the loop."""
