"""What is known of ops and of the values that they make."""
