"""What users hold: the compiled step, and the session behind it."""
