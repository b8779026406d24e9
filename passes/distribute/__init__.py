"""Passes that insert collectives."""
