"""The types of the plugin contract."""
