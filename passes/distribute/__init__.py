"""Passes that say which rank computes what, and insert the collectives that this takes."""
