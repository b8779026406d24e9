"""Passes by name and in order, and running them."""
