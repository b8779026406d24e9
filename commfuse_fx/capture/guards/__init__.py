"""What a trace has read, and what a call must still be like."""
