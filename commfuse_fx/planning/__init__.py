"""From a captured graph to the final one: which passes, which variants, and which result is taken."""
