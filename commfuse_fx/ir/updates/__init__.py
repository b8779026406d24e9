"""The nodes of parameter updates, and what they take."""
