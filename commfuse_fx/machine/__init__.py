"""What a program runs on: clusters, presets of them, and measured profiles of a step. Data, no graph."""
