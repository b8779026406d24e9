"""Ops of our own that a graph may call."""
