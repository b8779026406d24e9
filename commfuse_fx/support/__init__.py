"""What every room may use: checks of arguments, JSON readers, logs, progress, tracebacks, the user's source lines."""
