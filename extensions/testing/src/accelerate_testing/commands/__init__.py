"""Commands for authors of plugins."""
