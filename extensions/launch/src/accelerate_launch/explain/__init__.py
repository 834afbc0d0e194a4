"""Explain which plugins a run would use and why, without starting it."""
