"""One call of a compiled step, module or update on this rank.

Why: docs/decisions.md, "What runs a call has rooms in one order".
"""
