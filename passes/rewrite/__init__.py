"""Passes that replace nodes by others that do the same."""
