"""Calls of a model that Dynamo has cut into several graphs.

Why: docs/decisions.md, "What runs a call has rooms in one order".
"""
