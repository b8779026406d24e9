"""Passes that decide the order of nodes, so that communication overlaps computation."""
