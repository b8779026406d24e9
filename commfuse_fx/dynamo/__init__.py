"""Calls of a model that Dynamo has cut into several graphs."""
