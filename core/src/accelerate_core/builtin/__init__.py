"""What the core has of its own where no plugin is asked for."""
