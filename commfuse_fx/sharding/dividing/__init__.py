"""From marks to a local graph: which layout each value takes, and where layouts are exchanged."""
