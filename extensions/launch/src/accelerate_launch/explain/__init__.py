"""What is installed, what is active, and why: told without starting anything."""
