"""What stands in where a part is not installed."""
