"""What the ranks of one step tell each other before they send, and what runs the plans that they agree on.

Why: docs/decisions.md, "What runs a call has rooms in one order".
"""
