"""Small building blocks on torch and the standard library, free of any state of this package."""
