"""A program: its graph, its nodes with typed metadata, their order, edits and checks."""
