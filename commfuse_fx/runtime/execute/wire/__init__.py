"""What is on the wire of a step."""
