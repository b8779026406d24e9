"""A compiled step as one HTML page."""
