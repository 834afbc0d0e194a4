"""The part of the library that is common to all frameworks."""
