"""Dividing turns marks into a local graph: it chooses a layout for each value, and inserts redistributions."""
