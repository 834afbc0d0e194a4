"""What the core and its parts promise each other: types alone."""
