"""Search: which strategy each op of a step takes, and how parameters lie, on one group of mesh axes after the other."""
