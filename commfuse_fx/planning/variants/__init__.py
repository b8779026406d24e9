"""Several whole plans of one step, of which one is kept."""
