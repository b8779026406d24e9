"""The options of a compile: one table of them, the context that they default to, and marks on parameters."""
