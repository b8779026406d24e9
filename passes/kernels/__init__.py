"""Passes that only make a rank's own computation faster."""
