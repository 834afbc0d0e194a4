"""Lets every test import the helpers in this folder: pytest puts a conftest's folder on the path."""
