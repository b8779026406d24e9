"""Gradients that no graph of a backward has reduced, and those of backwards that were over."""
