"""From a user's model, loss and optimizer to one graph of the training step."""
