"""One call of a compiled step, module or update on this rank."""
