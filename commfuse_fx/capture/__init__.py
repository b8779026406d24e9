"""Capture turns a user's model, loss and optimizer into one graph of the training step."""
