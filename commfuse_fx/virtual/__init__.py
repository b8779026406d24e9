"""All ranks of a world in one process."""
