"""Steps that are saved and loaded: files, shares of ranks, and the state in memory.

Why: docs/decisions.md, "What runs a call has rooms in one order".
"""
