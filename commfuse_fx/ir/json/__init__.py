"""Programs as JSON: written, and read back without trust in the file."""
