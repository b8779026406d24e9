"""Gradients that no graph of a backward has reduced, and those of backwards that were over.

Why: docs/decisions.md, "What runs a call has rooms in one order".
"""
