"""Semantic diffs of two compiled graphs."""
