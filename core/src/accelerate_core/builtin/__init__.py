"""Small features and fallbacks that are part of the core."""
